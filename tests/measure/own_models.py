"""Models of a user's own, and what is none: the module `own` of tests that name functions with --model-fn."""

from __future__ import annotations

from pathlib import Path

from tests.cli.harness import Refusal

MODELS = """
import torch
from torch import nn

class Tiny(nn.Module):
    def __init__(self, vocab=64, width=32):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids):
        h = self.embedding(input_ids)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)

class Silent(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(32, 64)

    def forward(self, pixels):
        return self.head(pixels)

def raises():
    raise RuntimeError("no model today")

def touches_cuda():
    return nn.Linear(4, 4, device="cuda")

def number():
    return 7

not_a_function = 7
"""

NO_MODELS = {
    "a function without a module": Refusal(2, "E_PARSE", ("--model-fn", "Tiny")),
    "no such module": Refusal(2, "E_NAME", ("--model-fn", "nowhere:Tiny")),
    "no such function": Refusal(2, "E_NAME", ("--model-fn", "own:Huge")),
    "a number": Refusal(2, "E_NAME", ("--model-fn", "own:not_a_function")),
    "a function that raises": Refusal(2, "E_KIND", ("--model-fn", "own:raises")),
    "a module that takes no tokens": Refusal(2, "E_KIND", ("--model-fn", "own:Silent")),
    "a function that makes no module": Refusal(2, "E_TYPE", ("--model-fn", "own:number")),
}


def write_models(folder: Path) -> None:
    """Put the module where commands that run in the folder find it."""
    (folder / "own.py").write_text(MODELS, encoding="utf-8")
