"""Initial weights that depend on the seed and the parameter's name only, never on the layout.

Each parameter is drawn whole from its own generator and then cut, so that every layout of a model starts from the same
numbers and no rank has to send any. It costs one unsharded parameter of temporary memory at a time. Generators of
different kinds of device give different numbers: equality holds among layouts on one kind of device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from strategist.executor.models.four_bits import BITS, BITS_OF_ONE, Packed
from strategist.executor.models.reference import ReferenceModel
from strategist.executor.names import by_weight, plain_name
from strategist.executor.seeds import generator
from strategist.records import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Home:
    """Where this rank keeps a weight whose values come whole: as it is, in slices whose rows lie below each other in it, or in the
    bytes of a `packed` matrix."""

    parts: tuple[nn.Parameter, ...]
    packed: Packed | None = None

    @property
    def size(self) -> torch.Size:
        """The size of the whole weight."""
        if self.packed is not None:
            return self.packed.size
        return torch.Size((sum(self._rows), *self.parts[0].shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        """The format in which its values are drawn."""
        return self.parts[0].dtype if self.packed is None else torch.float32

    @property
    def _rows(self) -> list[int]:
        return [len(part) for part in self.parts]

    def take(self, whole: Tensor) -> None:
        """Keep this rank's part of the values."""
        kept = whole if self.packed is None else self.packed.bytes_of(whole)
        for part, rows in zip(self.parts, torch.split(kept, self._rows), strict=True):
            local_part(part).copy_(cut_like(part, rows))


@dataclass(frozen=True, slots=True, eq=False)
class PackedHome:
    """Where this rank keeps a stack (F, E, H) of all experts' matrices in four bits: the bytes of one matrix after the other."""

    experts: tuple[Home, ...]

    @property
    def size(self) -> torch.Size:
        """The size of the whole stack."""
        rows, columns = self.experts[0].size
        return torch.Size((rows, len(self.experts), columns))

    @property
    def dtype(self) -> torch.dtype:
        """The format in which its values are drawn."""
        return self.experts[0].dtype

    def take(self, whole: Tensor) -> None:
        """Keep this rank's part of the values."""
        for expert, matrix in enumerate(whole.unbind(1)):
            self.take_one(matrix, expert)

    def take_one(self, matrix: Tensor, expert: int) -> None:
        """Keep this rank's part of one expert's matrix (F, H)."""
        self.experts[expert].take(matrix.contiguous())


def homes(model: nn.Module, named: Mapping[str, nn.Parameter]) -> dict[str, Home | PackedHome]:
    """The homes of a model's weights by name; matrices in four bits have the name of the weight that their bytes stand for, one in
    slices that of the weight in one piece."""
    packed = {id(module.bits): module for module in model.modules() if isinstance(module, Packed)}
    found: dict[str, Home | PackedHome] = {}
    stacks: dict[str, list[Home]] = {}
    for name, slices in by_weight(named).items():
        parts = tuple(named[part] for part in slices)
        home = Home(parts, packed.get(id(parts[0])))
        if home.packed is not None and (end := BITS_OF_ONE.search(name)):
            stacks.setdefault(name[: end.start()], []).append(home)
        else:
            found[name if home.packed is None else name.replace(BITS, ".weight")] = home
    return found | {name: PackedHome(tuple(experts)) for name, experts in stacks.items()}


@torch.no_grad()
def initialise(model: ReferenceModel, seed: int, device: torch.device | str = "cpu") -> None:
    """Write the initial value of every parameter of `model`, which may be sharded, drawn on `device`.

    Parameters must not be on meta; they may lie elsewhere than on `device`.
    """
    named = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    for name, home in homes(model, named).items():
        home.take(_drawn(model, name, home, seed, device))


def _drawn(model: ReferenceModel, name: str, home: Home | PackedHome, seed: int, device: torch.device | str) -> Tensor:
    """A whole weight; in a function of its own, so that none is alive when the next is made."""
    whole = torch.empty(home.size, dtype=home.dtype, device=device)
    model.fill(name, whole, generator(device, seed, name))
    return whole


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """The part of `whole` that this rank holds of `parameter`.

    Cuts are made in mesh order, as torch.chunk makes them, but FSDP2 cuts last although its axis stands first: that is
    what a strided placement means. Only numbers of Python are computed with, so that fake tensors can be cut too.
    """
    if not isinstance(parameter, DTensor):
        return whole
    mesh, placements = parameter.device_mesh, enumerate(parameter.placements)
    for axis, placement in sorted(placements, key=lambda pair: isinstance(pair[1], _StridedShard)):
        if isinstance(placement, (Shard, _StridedShard)):
            whole = _chunk(whole, placement.dim, mesh.get_local_rank(axis), mesh.size(axis))
    return whole


def _chunk(whole: Tensor, dim: int, index: int, count: int) -> Tensor:
    """The index-th of `count` chunks along `dim`; the last ones may be smaller or empty."""
    length = whole.shape[dim]
    size = -(-length // count)
    first = min(index * size, length)
    return whole.narrow(dim, first, min(size, length - first))
