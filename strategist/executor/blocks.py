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
    """The blocks of one container by name, in order; they may be exchanged one by one."""

    container: nn.Module
    blocks: dict[str, nn.Module]

    def exchange(self, name: str, block: nn.Module) -> None:
        """Put `block` where the block `name` is."""
        self.container.register_module(name, block)


NAMED = "block_names"
"""On a module of which a pipeline left so little that like children no longer tell: where its blocks lie, and their names there."""


def find_blocks(model: nn.Module) -> BlockList:
    """The like children of the ModuleList, ModuleDict or Sequential with most of them; the first of equals.

    All children are alike, or those of one class that have weights and are more than one. Passages do not count. A model without such
    a container has no blocks.
    """
    if NAMED in vars(model):
        place, names = vars(model)[NAMED]
        container = model.get_submodule(place)
        return BlockList(container, {name: container.get_submodule(name) for name in names})
    lists = [_blocks_of(module) for module in model.modules() if isinstance(module, CONTAINERS)]
    return max([BlockList(model, {}), *lists], key=lambda found: len(found.blocks))


def _sort(block: nn.Module) -> type:
    """The class of a block, whether a wrapper holds it that computes it again or not, and without what fully_shard makes of it."""
    inside = getattr(block, "_checkpoint_wrapped_module", block)
    return next(kind for kind in type(inside).__mro__ if not issubclass(kind, FSDPModule))


def _blocks_of(container: nn.Module) -> BlockList:
    children = {name: child for name, child in container.named_children() if not isinstance(child, Passage)}
    sorts = Counter(_sort(child) for child in children.values() if any(True for _ in child.parameters()))
    kind, number = next(iter(sorts.most_common(1)), (nn.Module, 0))
    if len({_sort(child) for child in children.values()}) > 1:
        children = {name: child for name, child in children.items() if number > 1 and _sort(child) is kind}
    return BlockList(container, children)
