"""The outer surface as texts. `python -m tests.golden.record` writes them into this folder."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path

import strategist
from strategist.cli import COMMANDS
from tests.cli.harness import call

FOLDER = Path(__file__).parent

PLANS: Mapping[str, str] = {
    "one_4090_fits": "--model gpt2-medium --gpu rtx-4090 --gpus-per-node 1 --seq-len 1024",
    "one_4090_offloads": "--model-size 3B --gpu rtx-4090 --gpus-per-node 1",
    "node_fits_one_gpu": "--model llama-3.2-1b --hardware dgx-h100",
    "node_7b": "--model-size 7B --hardware dgx-h100",
    "node_pcie_7b": "--model-size 7B --hardware aws-g5.12xlarge --seq-len 2048",
    "nodes_70b_fast": "--model llama-3.1-70b --hardware dgx-h100:8 --seq-len 8192 --tokens 1T",
    "nodes_ethernet_13b": "--model-size 13B --hardware aws-g5.48xlarge:2 --seq-len 2048",
    "nodes_405b": "--model llama-3.1-405b --hardware dgx-h100:64 --seq-len 8192 --global-batch 1024",
    "experts": "--model mixtral-8x7b --hardware dgx-h100:4 --price-per-gpu-hour 2.5 --tokens 100B",
    "long_sequence": "--model llama-3.1-8b --hardware dgx-h100:2 --seq-len 131072 --global-batch 32",
    "pinned_across_nodes": "--model-size 7B --hardware dgx-h100:2 --pin tp=16",
    "fastest": "--model-size 13B --gpu rtx-3090 --gpus-per-node 8 --nodes 1 --policy fastest",
    "cpu_ranks": "--model llama-debug --hardware cpu:4",
    "rocm_encoder": "--model bert-large-uncased --gpu mi300x",
    "nothing_fits": "--model-size 70B --gpu rtx-4090 --gpus-per-node 1 --nodes 1",
}
"""Questions by the name of their file. Each one names its machines."""


def _names() -> str:
    return "".join(f"{_signature(name)}\n" for name in sorted(strategist.__all__))


def _signature(name: str) -> str:
    """A function with its arguments, a record with its fields, anything else as it is called."""
    value = getattr(strategist, name)
    if inspect.isfunction(value):
        return f"{name}{inspect.signature(value)}"
    if is_dataclass(value):
        return f"{name}({', '.join(field.name for field in fields(value))})"
    return name


def _help() -> str:
    pages = [["--help"], *([name, "--help"] for name, _ in COMMANDS)]
    return "\n".join(f"$ strategist {' '.join(words)}\n{_shown(words, 100)}" for words in pages)


def _plan(question: str) -> str:
    return f"$ strategist plan {question}\n{_shown(['plan', *question.split()], 80)}"


def _shown(words: Sequence[str], columns: int) -> str:
    """Output, errors and, when it is not 0, the exit code of a command on a terminal of some width."""
    before = dict(os.environ)
    os.environ.update(COLUMNS=str(columns), NO_COLOR="1")
    try:
        ran = call(*words)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return ran.out + ran.err + (f"exit {ran.code}\n" if ran.code else "")


GOLDEN: Mapping[str, Callable[[], str]] = {
    "public_names.txt": _names,
    "cli_help.txt": _help,
    **{f"plans/{name}.txt": partial(_plan, question) for name, question in PLANS.items()},
}
"""Every golden file by its name, and what belongs into it today."""


def record() -> None:
    """Write every golden file, and remove plans that are asked for no more."""
    for old in FOLDER.glob("plans/*.txt"):
        if f"plans/{old.name}" not in GOLDEN:
            old.unlink()
    for name, text in GOLDEN.items():
        (FOLDER / name).write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    record()
