"""The blocks of any module: the longest container of like children. What is wrapped, recomputed and compiled one by one."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from strategist.records import dataclass

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Passage(nn.Module):
    """Stands where another pipeline stage has a part, so that the names of the others stay: gives what it is given."""

    def forward(self, first: Any, *_others: Any, **_more: Any) -> Any:
        """`first`, unchanged."""
        return first


@dataclass(frozen=True, slots=True)
class BlockList:
    """The blocks of a model by their names in it, in order; they may be exchanged one by one."""

    model: nn.Module
    blocks: dict[str, nn.Module]

    def exchange(self, name: str, block: nn.Module) -> None:
        """Put `block` where the block `name` is."""
        place, _, own = name.rpartition(".")
        self.model.get_submodule(place).register_module(own, block)


NAMED = "block_names"
"""On a module of which a pipeline left so little that like children no longer tell: where its blocks lie, and their names there."""


def find_blocks(model: nn.Module) -> BlockList:
    """The like children of the ModuleList, ModuleDict or Sequential with most of them, the first of equals, and such children of others:
    networks in stages and pairs of encoder and decoder have several rows of them. Layers of a decoder may be of another class than its
    encoder's: the row that has its place in the other half is one of them too.

    All children are alike, or those of one class that have weights and are more than one. Passages do not count. A model without such
    a container has no blocks.
    """
    if NAMED in vars(model):
        place, names = vars(model)[NAMED]
        full = (f"{place}.{name}" if place else name for name in names)
        return BlockList(model, {name: model.get_submodule(name) for name in full})
    containers = {name: module for name, module in model.named_modules() if isinstance(module, CONTAINERS)}
    rows = {name: _blocks_of(name, module) for name, module in containers.items()}
    place = max(rows, key=lambda name: len(rows[name]), default="")
    pair = [rows.get(name, {}) for name in (place, _other_half(place))]
    sorts = {sort for row in pair for sort in list(map(_sort, row.values()))[:1]}
    found: dict[str, nn.Module] = {}
    for row in (row for row in rows.values() if not sorts.isdisjoint(map(_sort, row.values()))):
        found |= {name: block for name, block in row.items() if not _lies_in(name, found)}
    return BlockList(model, found)


def _other_half(place: str) -> str:
    """The name of what lies in an encoder where `place` lies in its decoder, or the other way round."""
    halves = {"encoder": "decoder", "decoder": "encoder"}
    return ".".join(halves.get(part, part) for part in place.split("."))


def _lies_in(name: str, blocks: dict[str, nn.Module]) -> bool:
    """Whether a module of that name is a part of one of some blocks."""
    parts = name.split(".")
    return any(".".join(parts[:depth]) in blocks for depth in range(1, len(parts)))


def _sort(block: nn.Module) -> type:
    """The class of a block, whether a wrapper holds it that computes it again or not, and without what fully_shard makes of it."""
    inside = getattr(block, "_checkpoint_wrapped_module", block)
    return next(kind for kind in type(inside).__mro__ if not issubclass(kind, FSDPModule))


def _blocks_of(place: str, container: nn.Module) -> dict[str, nn.Module]:
    """The like children of a container, by their names in the model."""
    children = {name: child for name, child in container.named_children() if not isinstance(child, Passage)}
    sorts = Counter(_sort(child) for child in children.values() if any(True for _ in child.parameters()))
    kind, number = next(iter(sorts.most_common(1)), (nn.Module, 0))
    if len({_sort(child) for child in children.values()}) > 1:
        children = {name: child for name, child in children.items() if number > 1 and _sort(child) is kind}
    return {f"{place}.{name}" if place else name: child for name, child in children.items()}
