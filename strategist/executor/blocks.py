"""The blocks of any module: the longest container of like children. What is wrapped, recomputed and compiled one by one."""

from __future__ import annotations

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


def find_blocks(model: nn.Module) -> BlockList:
    """The longest ModuleList, ModuleDict or Sequential whose children are of one class; the first of equals.

    Passages do not count. A model without such a container has no blocks.
    """
    lists = [BlockList(model, {})] + [
        _blocks_of(module) for module in model.modules() if isinstance(module, CONTAINERS)
    ]
    alike = [found for found in lists if len({_sort(block) for block in found.blocks.values()}) <= 1]
    return max(alike, key=lambda found: len(found.blocks))


def _sort(block: nn.Module) -> type:
    """The class of a block, whether a wrapper holds it that computes it again or not, and without what fully_shard makes of it."""
    inside = getattr(block, "_checkpoint_wrapped_module", block)
    return next(kind for kind in type(inside).__mro__ if not issubclass(kind, FSDPModule))


def _blocks_of(container: nn.Module) -> BlockList:
    return BlockList(container, {n: c for n, c in container.named_children() if not isinstance(c, Passage)})
