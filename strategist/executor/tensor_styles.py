"""Tensor-parallel styles that cut weights and change layouts at a block's borders, and compute in between on plain parts.

torch's own styles hand DTensors from one operation to the next, and each operation then works out its layout in Python,
forward and backward. Inside a block nothing is left to work out: the model computes with the part of each weight that
lies here (`part_here`), and the only communication is where hidden states enter and leave (Megatron-LM, arXiv
1909.08053, section 3; with sequence parallelism arXiv 2205.05198, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from strategist.errors import InternalError


def part_here(weight: Tensor) -> Tensor:
    """This rank's part of a weight, to compute with.

    Each rank's gradient of a weight that all hold whole comes from its own tokens or heads: it is one term of a sum, which
    `gradients.add_terms` makes once for all weights and micro-batches. Said to torch, FSDP2 would make one per weight and micro-batch.
    """
    if not isinstance(weight, DTensor):
        return weight
    if torch.compiler.is_compiling():  # which sees through torch's own way
        return weight.to_local()
    part: Tensor = _Part.apply(weight)  # type: ignore[no-untyped-call]
    return part


class _Part(Function):
    """What torch's `to_local` does, without working out for each gradient again that it lies as the weight."""

    @staticmethod
    def forward(ctx: Any, weight: DTensor) -> Tensor:
        ctx.spec = weight._spec
        ctx.set_materialize_grads(False)
        return weight._local_tensor.view_as(weight._local_tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> DTensor | None:
        return None if gradient is None else DTensor(gradient, ctx.spec, requires_grad=False)  # type: ignore[no-untyped-call]


class Linear(nn.Linear):
    """A linear layer that computes with the part of its weight that lies on this rank; an `adapter` takes the input and what the
    layer made of it. With `packed` it has no weight: that rests in four bits."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.adapter: nn.Module | None = None
        self.packed: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) to (..., out)."""
        bias = None if self.bias is None else part_here(self.bias)
        given = nn.functional.linear(x, part_here(self.weight), bias) if self.packed is None else self.packed(x, bias)
        return given if self.adapter is None else self.adapter(x, given)


class OutputLinear(Linear):
    """A linear layer that writes back to the residual stream. Cut by its inputs it gives a term of a sum over ranks.

    `leave` adds the terms up; the bias, which every rank holds whole, is added to their sum.
    """

    leave: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) to (..., out)."""
        if self.leave is None:
            return super().forward(x)
        whole = self.leave(nn.functional.linear(x, part_here(self.weight)))
        return whole if self.bias is None else whole + part_here(self.bias)


class Cut(ParallelStyle):
    """Leave each rank one part of every weight of a module, or all of it. The module must compute with `part_here`."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, _ in list(module.named_parameters(recurse=False)):
            distribute(module, name, device_mesh, self.placement)
        return module


class Entry(ParallelStyle):
    """Give a module the whole hidden state; backward adds up what the ranks' parts of its weights say about it.

    `layout` is how hidden states lie between blocks: whole on every rank, or cut by tokens.
    """

    def __init__(self, layout: Placement) -> None:
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(_enter, device_mesh, self.layout))
        return module


class Exit(ParallelStyle):
    """Cut an output layer's weight by its inputs and add up what the ranks' parts give, into `layout`."""

    def __init__(self, layout: Placement) -> None:
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, OutputLinear):
            raise InternalError(
                "INTERNAL", f"{type(module).__name__} is no output layer, so its terms cannot be added up."
            )
        distribute(module, "weight", device_mesh, Shard(1))
        if module.bias is not None and not self.layout.is_replicate():  # else each rank adds it to the same tokens
            distribute(module, "bias", device_mesh, Replicate())
        module.leave = partial(leave, device_mesh, self.layout)
        return module


class Border(Entry):
    """Give a module the whole hidden state, and add up the terms that it gives on each rank, into `layout`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(partial(_leave_after, device_mesh, self.layout))
        return super()._apply(module, device_mesh)


_HELD_WHOLE = "names_held_whole"
"""Where a module keeps the names of its weights that a rank has whole, as `distribute` made them."""


def distribute(module: nn.Module, name: str, mesh: DeviceMesh, *placements: Placement) -> None:
    """Make the parameter `name` of a module a DTensor, with one placement per axis of the mesh."""
    if any(placement.is_replicate() for placement in placements):
        module.__dict__.setdefault(_HELD_WHOLE, set()).add(name)
    whole = module.get_parameter(name)
    part = distribute_tensor(whole.detach(), mesh, placements)
    module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))


def held_whole(model: nn.Module) -> list[nn.Parameter]:
    """Weights of which each rank of tp has a term of the gradient."""
    return [
        module.get_parameter(name)
        for module in model.modules()
        for name in sorted(module.__dict__.get(_HELD_WHOLE, ()))
    ]


def _enter(mesh: DeviceMesh, layout: Placement, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden, *others = inputs
    return enter(mesh, layout, hidden), *others


def enter(mesh: DeviceMesh, layout: Placement, hidden: Tensor) -> Tensor:
    """All of a value that lies in `layout`; backward adds up what the ranks say about it."""
    return _Gathered.apply(hidden, _line(mesh, layout))  # type: ignore[no-any-return, no-untyped-call]


def _leave_after(mesh: DeviceMesh, layout: Placement, _module: nn.Module, _inputs: object, term: Tensor) -> Tensor:
    return leave(mesh, layout, term)


def leave(mesh: DeviceMesh, layout: Placement, term: Tensor) -> Tensor:
    """The sum of the ranks' terms, in `layout`."""
    return _Summed.apply(term, _line(mesh, layout))  # type: ignore[no-any-return, no-untyped-call]


class Line(NamedTuple):
    """Ranks by the name and the size of their group, and the dimension that hidden states are cut by between blocks; None where every
    rank has them whole.

    Operators are called as they are: what torch.distributed._functional_collectives wraps around them, so that waiting can be left for
    later, costs the host more than they do, and nothing is there to be done meanwhile."""

    group: str
    size: int
    dim: int | None

    def whole(self, part: Tensor) -> Tensor:
        """What the ranks hold parts of."""
        if self.dim is None:
            return part
        stacked = _made(_OPERATORS.all_gather_into_tensor, part.contiguous(), self.size, self.group)
        return stacked if self.dim == 0 else torch.cat(stacked.chunk(self.size), dim=self.dim)

    def sum(self, term: Tensor) -> Tensor:
        """The sum of the ranks' terms, of which each gets its part."""
        if self.dim is None:
            return _made(_OPERATORS.all_reduce, term.contiguous(), "sum", self.group)
        stacked = term.contiguous() if self.dim == 0 else torch.cat(term.chunk(self.size, dim=self.dim))
        return _made(_OPERATORS.reduce_scatter_tensor, stacked, "sum", self.size, self.group)


_OPERATORS = torch.ops._c10d_functional


def _line(mesh: DeviceMesh, layout: Placement) -> Line:
    group = mesh.get_group()
    return Line(group.group_name, group.size(), layout.dim if isinstance(layout, Shard) else None)


def _made(collective: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """What a collective gives, once it is there. Torch's own backward passes of these operators are not asked for: ours stand around
    them, and looking for theirs takes the host as long as the operator."""
    if torch.compiler.is_compiling():  # nothing is looked for in a graph
        return _waited(collective(*inputs))
    with torch._C._AutoDispatchBelowAutograd():
        return _waited(collective(*inputs))


def _waited(value: Tensor) -> Tensor:
    waited: Tensor = _OPERATORS.wait_tensor(value)
    return waited


class _Gathered(Function):
    """Of one rank's part the whole. A redistribution of DTensors does the same, and takes the host eight times as long (decision
    0160)."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return line.whole(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.line.sum(gradient), None


class _Summed(Function):
    """Of one rank's term the sum."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return line.sum(term)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.line.whole(gradient), None
