"""Listings of machines that are no hardware file: what they are, and the words that say the same."""

from __future__ import annotations

import re

from strategist.errors import InputError, shown
from strategist.facts.topo_matrix import is_matrix

_CARD = re.compile(r"^GPU [0-9]+: (.+) \(UUID: [^)]*\)\s*$", re.MULTILINE)
_SLICE = re.compile(r"^\s+MIG \S+\s+Device\s+[0-9]+:", re.MULTILINE)
_HOST = re.compile(r"^([A-Za-z0-9][\w.-]*)(?:\s+slots\s*=\s*|:)([0-9]+)\b.*$")


def refuse_listing(text: str, path: str, flag: str) -> None:
    """Raise InputError KIND where `text` is the output of `nvidia-smi topo -m` or `nvidia-smi -L`, or a file of hosts."""
    told = _matrix(text) or _cards(text) or _hosts(text)
    if told is not None:
        raise InputError("KIND", f"{flag} is {told[0]}", flag=flag, value=path, hint=told[1])


def _matrix(text: str) -> tuple[str, str] | None:
    if not is_matrix(text):
        return None
    what = "a topology matrix, which does not say what GPUs these are."
    return what, "Put it under `matrix` of a node in a hardware file, beside `gpu` (docs/hardware.md)."


def _cards(text: str) -> tuple[str, str] | None:
    cards = _CARD.findall(text)
    if not cards:
        return None
    if _SLICE.search(text):
        return (
            "a list of GPUs with MIG slices, which are not planned for.",
            "Name the GPU with --gpu, and what a slice has with --gpu-memory.",
        )
    if len(set(cards)) > 1:
        return "a list of unlike GPUs.", "Describe each kind as a node of a hardware file (docs/hardware.md)."
    return "a list of GPUs, and no hardware file.", f'Say --gpu "{shown(cards[0])}" --gpus-per-node {len(cards)}.'


def _hosts(text: str) -> tuple[str, str] | None:
    lines = [line for line in (row.partition("#")[0].strip() for row in text.splitlines()) if line]
    found = [match for match in map(_HOST.match, lines) if match]
    if not lines or len(found) < len(lines):
        return None
    counts = {int(match[2]) for match in found}
    if len(counts) > 1:
        return (
            "a file of hosts with unlike slots, which does not say what GPUs they have.",
            "Describe each kind as a node of a hardware file (docs/hardware.md).",
        )
    return (
        "a file of hosts, which does not say what GPUs they have.",
        f"Say --gpu NAME --gpus-per-node {counts.pop()} --nodes {len(found)}.",
    )
