"""Scales of 8-bit moments in a checkpoint: under names that say of which elements of the whole weight their blocks are.

A block is 256 neighbours of a rank's part, so a layout that cuts a weight elsewhere may have other blocks, and what eight bits kept
of some means nothing for the others. A part of whole rows is a run of elements, `FIRST:LAST`; blocks of two runs are the same ones
where the runs begin whole blocks apart. Any other part, `FIRST:LAST` in each dim, is like itself alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from strategist.executor.eight_bits import BLOCK, MOMENTS
from strategist.records import dataclass

SCALES = tuple(f"{moment}_scale" for moment in MOMENTS)


@dataclass(frozen=True, slots=True)
class Loan:
    """Some scales of a checkpoint: the name they are stored under, and which of those."""

    name: str
    blocks: slice


def scale_name(name: str, state: str, parameter: nn.Parameter, first: int = 0) -> str:
    """What the scales of this rank's part of a parameter, which begins at row `first` of the weight `name`, are called in a checkpoint."""
    return f"optimizer/{name}/{state}/{_cut(parameter, first)}"


def is_scale(name: str) -> bool:
    """Whether a name in a checkpoint is one of scales."""
    return name.rpartition("/")[0].endswith(SCALES)


def _cut(parameter: nn.Parameter, first: int) -> str:
    """This rank's part of the whole: one run of elements, or a range in each dim."""
    sizes, begins = tuple(parameter.shape), (0,) * parameter.dim()
    if isinstance(parameter, DTensor):
        sizes, begins = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
    begins = tuple(begin + first * (dim == 0) for dim, begin in enumerate(begins))
    row = prod(parameter.shape[1:])
    if prod(sizes[1:]) == row:
        return _range(begins[0] * row, sizes[0] * row) if sizes else _range(0, 1)
    return ",".join(_range(begin, size) for begin, size in zip(begins, sizes, strict=True))


def _range(begin: int, size: int) -> str:
    return f"{begin}:{begin + size}"


def loans(name: str, stored: Iterable[str]) -> tuple[Loan, ...]:
    """Where in a checkpoint with these names the scales called `name` are: there, or among those of runs with the same blocks.
    Empty when its blocks are others."""
    kind, _, cut = name.rpartition("/")
    cuts = [other.rpartition("/")[2] for other in stored if other.rpartition("/")[0] == kind]
    if cut in cuts:
        return (Loan(name, slice(None)),)
    if "," in cut or not all(_is_run(other) for other in cuts):
        return ()
    first, last = _run(cut)
    over = sorted(run for run in map(_run, cuts) if run[0] < last and first < run[1])
    return tuple(_loan(kind, run, first, last) for run in over) if _same_blocks((first, last), over) else ()


def _is_run(cut: str) -> bool:
    return "," not in cut


def _run(cut: str) -> tuple[int, int]:
    first, last = cut.split(":")
    return int(first), int(last)


def _same_blocks(mine: tuple[int, int], theirs: Sequence[tuple[int, int]]) -> bool:
    """Whether some runs, which cover mine, are cut into blocks where mine is: wherever one run ends inside another, a block of
    the other ends."""
    first, last = mine
    starts_apart = all((begin - first) % BLOCK == 0 for begin, _ in theirs)
    ends_apart = all((end - first) % BLOCK == 0 for _, end in theirs if end < last)
    return starts_apart and ends_apart and _ends_a_block(last, first, theirs) and _covers(first, last, theirs)


def _ends_a_block(last: int, first: int, theirs: Sequence[tuple[int, int]]) -> bool:
    return (last - first) % BLOCK == 0 or all(end <= last for _, end in theirs)


def _covers(first: int, last: int, theirs: Sequence[tuple[int, int]]) -> bool:
    reached = first
    for begin, end in theirs:
        if begin > reached:
            return False
        reached = max(reached, end)
    return reached >= last


def _loan(kind: str, run: tuple[int, int], first: int, last: int) -> Loan:
    begin = run[0]
    blocks = slice((max(begin, first) - begin) // BLOCK, -((begin - min(run[1], last)) // BLOCK))
    return Loan(f"{kind}/{_range(begin, run[1] - begin)}", blocks)
