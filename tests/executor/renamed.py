"""Weights of transformers' models under the names of the built-in model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Weights = Mapping[str, Tensor]
Source = tuple[str, Callable[[Tensor], Tensor]]
"""The name in transformers, and what to do with that tensor."""

NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
ATTENTION = {f"attention.{x}": f"self_attn.{x}_proj" for x in "qkvo"} | {
    f"attention.{x}_norm": f"self_attn.{x}_norm" for x in "qk"
}
GATED = {f"mlp.{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
PLAIN = {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
SHARED = {f"mlp.shared.{x}": f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")}
LAYER = NORMS | ATTENTION | GATED | SHARED | {"mlp.router": "mlp.gate", "mlp.shared_gate": "mlp.shared_expert_gate"}
ENDS = {"token_embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}

GPT2_LAYER = {"attention_norm": "ln_1", "mlp_norm": "ln_2", "attention.o": "attn.c_proj"} | PLAIN
GPT2_ENDS = {"token_embedding": "wte", "position_embedding": "wpe", "norm": "ln_f"}


def renamed(family: str, theirs: Weights, ours: Weights) -> dict[str, Tensor]:
    """Every weight that the built-in model has (`ours`, by name), taken from a model of transformers."""
    find = _in_gpt2 if family == "gpt2" else _in_llama
    sources = {name: find(name, family) for name in ours}
    return {name: change(theirs[source]) for name, (source, change) in sources.items()}


def _in_llama(name: str, family: str) -> Source:
    if not name.startswith("layers."):
        module, _, kind = name.rpartition(".")
        return f"{ENDS[module]}.{kind}", _same
    _, number, rest = name.split(".", 2)
    if rest.startswith("mlp.experts."):
        return _expert(f"model.layers.{number}.mlp.experts", rest.rpartition(".")[2])
    module, _, kind = rest.rpartition(".")
    table = LAYER | PLAIN if family == "starcoder2" else LAYER
    return f"model.layers.{number}.{table[module]}.{kind}", _same


def _expert(prefix: str, matrix: str) -> Source:
    """Ours are F x E x H. Theirs are E x 2F x H, gates before values, and E x H x F."""
    if matrix == "down":
        return f"{prefix}.down_proj", lambda w: w.permute(2, 0, 1)
    half = ("gate", "up").index(matrix)
    return f"{prefix}.gate_up_proj", lambda w: w.chunk(2, dim=1)[half].transpose(0, 1)


def _in_gpt2(name: str, _family: str) -> Source:
    """Matrices are stored in x out there, queries, keys and values side by side."""
    if not name.startswith("layers."):
        module, _, kind = name.rpartition(".")
        return (f"transformer.{GPT2_ENDS[module]}.{kind}", _same) if module != "head" else ("lm_head.weight", _same)
    _, number, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    if module in ("attention.q", "attention.k", "attention.v"):
        third = "qkv".index(module[-1])
        return f"transformer.h.{number}.attn.c_attn.{kind}", lambda w: w.chunk(3, dim=-1)[third].t()
    change: Any = (lambda w: w.t()) if "norm" not in module else _same
    return f"transformer.h.{number}.{GPT2_LAYER[module]}.{kind}", change


def _same(weight: Tensor) -> Tensor:
    return weight
