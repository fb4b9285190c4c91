"""The blocks of any module: the longest container of like children. What is wrapped, recomputed and compiled one by one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, slots=True)
class BlockList:
    """A container inside a model and its children, which may be exchanged one by one."""

    container: nn.Module | None

    def blocks(self) -> tuple[nn.Module, ...]:
        """The blocks in order; empty when the model has none."""
        return tuple(self.container.children()) if self.container is not None else ()

    def exchange(self, name: str, block: nn.Module) -> None:
        """Put `block` where the child `name` is."""
        if self.container is not None:
            self.container.register_module(name, block)

    def items(self) -> tuple[tuple[str, nn.Module], ...]:
        """Names and blocks in order."""
        return tuple(self.container.named_children()) if self.container is not None else ()


def find_blocks(model: nn.Module) -> BlockList:
    """The longest ModuleList, ModuleDict or Sequential whose children are of one class; the first of equals."""
    alike = [m for m in model.modules() if isinstance(m, CONTAINERS) and len({type(c) for c in m.children()}) == 1]
    return BlockList(max(alike, key=lambda container: len(list(container.children())), default=None))
