"""The phase diagram: one search for every size of model on every number of nodes of every kind of device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from strategist import __version__
from strategist.ask import Asked, Given, complete
from strategist.document.sweep import Cell, Sweep
from strategist.errors import InputError
from strategist.facts.gpus import find_gpu
from strategist.facts.resolved import Assumption, said_to_plan
from strategist.planner.recommend import choice
from strategist.planner.search import Pace, Watch, search
from strategist.records import dataclass, replace
from strategist.space.grammar import layout
from strategist.timing.estimate import mfu
from strategist.timing.rates import require_rate
from strategist.units import counted

MOST_CELLS = 400
"""Cells of the largest sweep: some minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is varied; everything else is said in `given`."""

    given: Given
    model_sizes: tuple[str, ...]
    gpus: tuple[str, ...]
    nodes: tuple[int, ...]


def sweep(grid: Grid, watch: Watch | None = None) -> Sweep:
    """The winner of every cell, of each of which `watch` hears; when a time budget has run out, of those until then, but always of the first. Raises InputError GRID_TOO_LARGE, DUPLICATE_KEY,
    what `complete` raises, and ImpossibleError HARDWARE_FEATURE for a device without a rate in the number format."""
    count = len(grid.model_sizes) * len(grid.gpus) * len(grid.nodes)
    if count > MOST_CELLS:
        raise InputError(
            "GRID_TOO_LARGE", f"{count:,} cells are more than {MOST_CELLS}.", flag="--model-size",
            value=count, hint="Name fewer sizes, devices or numbers of nodes.",
        )  # fmt: skip
    _are_different(grid)
    places = list(product(grid.gpus, grid.model_sizes, grid.nodes))
    pace = Pace(grid.given.time_budget, watch)
    asked = [complete(replace(grid.given, model_size=size, gpu=gpu, nodes=nodes)) for gpu, size, nodes in places]
    for one in asked:
        require_rate(one.question.job)
    return Sweep(
        made_by=f"strategist {__version__}",
        policy=grid.given.policy,
        assumptions=_shared([one.assumptions for one in asked]),
        cells=tuple(_cells(asked, places, pace)),
    )


def _cells(asked: Sequence[Asked], places: Sequence[tuple[str, str, int]], pace: Pace) -> Iterator[Cell]:
    """The winner of every cell, said where it is and how many are done."""
    for number, (one, (gpu, size, nodes)) in enumerate(zip(asked, places, strict=True)):
        pace.tick(f"{size} on {counted(nodes, 'node')} of {gpu}", number, len(places))
        yield _cell(one, size, pace, is_first=number == 0)


def _are_different(grid: Grid) -> None:
    """Raise InputError DUPLICATE_KEY for what is named twice, devices by another name too: its cells would stand twice."""
    gpus = [find_gpu(gpu, "--gpu").value.name for gpu in grid.gpus]
    for flag, named in (("--model-size", grid.model_sizes), ("--nodes", grid.nodes), ("--gpu", gpus)):
        twice = next((one for one in named if list(named).count(one) > 1), None)
        if twice is not None:
            raise InputError("DUPLICATE_KEY", f"{flag} names {twice} twice.", flag=flag, value=twice, hint="Name each once.")  # fmt: skip


def _shared(said: Sequence[tuple[Assumption, ...]]) -> tuple[Assumption, ...]:
    """Assumptions that were made in every cell alike."""
    shared = (one for one in said[0] if all(one in others for others in said))
    return tuple(said_to_plan(one, "--hardware", "--model") for one in shared)


def _cell(asked: Asked, size: str, pace: Pace, *, is_first: bool) -> Cell:
    """The winner of one question, as far as there is time."""
    job = asked.question.job
    gpu, nodes, gpus = job.cluster.smallest.name, job.cluster.nodes, job.cluster.world
    cell = Cell(model_size=size, gpu=gpu, nodes=nodes, gpus=gpus, precision=job.workload.precision)
    if pace.is_over and not is_first:
        return replace(cell, unfinished=True)
    found = search(asked.question, pace=pace.of_time, bests=True)
    if not len(found.fitting):
        return cell
    chosen = choice(found, asked.request.policy)
    seconds = found.step_seconds(chosen.row)
    return replace(
        cell,
        family=chosen.family,
        layout=layout(found.candidates.row(chosen.row)),
        step_s=seconds,
        peak_bytes=int(found.device_bytes[chosen.row]),
        tokens_per_second=job.workload.tokens_per_step / seconds,
        mfu=mfu(job, seconds),
        unfinished=found.untried > 0,
    )
