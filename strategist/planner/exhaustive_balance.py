"""Balanced stages again, one layout at a time: the layers of every stage and how many of them run again, by keeping of all splits of the first
stages those that some rest may still make the best (the search fixes a limit of the slowest stage instead, planner/balance.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from strategist.facts.job import Job
from strategist.facts.model import layer_sequence
from strategist.memory.estimate import device_bytes_CS
from strategist.planner.depth import ROUNDED
from strategist.planner.situation import one
from strategist.records import replace
from strategist.space.brute_force import Row
from strategist.space.candidates import LAYERS_OF, OF_STAGE, code
from strategist.space.stages import chunk_lengths
from strategist.timing.estimate import NANO, stage_seconds_CS


class Own(NamedTuple):
    """A stage with some layers: nanoseconds of a micro-batch, how many layers it owns, and how many of them run again."""

    ns: int
    layers: int
    again: int


class Part(NamedTuple):
    """The first stages with some layers: nanoseconds of the slowest and of all, and what every one of them owns."""

    slowest: int
    total: int
    owned: tuple[Own, ...]

    @property
    def layers(self) -> list[int]:
        """Layers of every one of them."""
        return [own.layers for own in self.owned]


def balanced_row(job: Job, row: Row) -> Row:
    """A layout of balanced stages with the numbers of its stages; of a layout that fits with none even stages, all of whose layers run again."""
    layers = len(layer_sequence(job.model))
    owned = _soonest(_ways(job, row, layers), row["accumulation"], layers)
    even = chunk_lengths(job.model, row["pp"], 1, is_weighted=False)
    numbers = [(own.layers, own.again) for own in owned] or [(own, own) for own in even]
    return (
        row
        | {f"{OF_STAGE}{stage}": again for stage, (_, again) in enumerate(numbers)}
        | {f"{LAYERS_OF}{stage}": own for stage, (own, _) in enumerate(numbers)}
    )


def _ways(job: Job, row: Row, layers: int) -> list[list[Own]]:
    """What every stage may own, with the fewest layers again with which it fits; up to as many as some stage has room for."""
    ways: list[list[Own]] = [[] for _ in range(row["pp"])]
    for own in range(1, layers - row["pp"] + 2):
        found = _with_layers(job, row, own)
        for stage, way in found.items():
            ways[stage].append(way)
        if not found or _is_late(ways, row["accumulation"], layers):
            break
    return ways


def _with_layers(job: Job, row: Row, own: int) -> dict[int, Own]:
    """Stages that fit with so many layers."""
    owning, found = replace(job, split=(own,) * row["pp"]), dict[int, Own]()
    for again in range(own + 1):
        said = {"recompute_layers": again} if again else {"recompute": code("recompute", "none")}
        plain = one(**row | {"recompute_depth": 0, "stage_split": 0} | said)
        held = device_bytes_CS(owning, plain, row["pp"])[0] + ROUNDED
        fit = [stage for stage in range(row["pp"]) if stage not in found and held[stage] <= job.usable_bytes]
        if fit:
            seconds = stage_seconds_CS(owning, plain, row["pp"])[0]
            found |= {stage: Own(round(float(seconds[stage]) * NANO), own, again) for stage in fit}
        if len(found) == row["pp"]:
            break
    return found


def _is_late(ways: Sequence[Sequence[Own]], rounds: int, layers: int) -> bool:
    """Whether all stages with as many layers as they have room for so far, which are enough, are through before one with more is."""
    if not all(ways) or sum(way[-1].layers for way in ways) < layers:
        return False
    most = [way[-1].ns for way in ways]
    return rounds * min(most) > (rounds - 1) * max(most) + sum(most)


def _soonest(ways: Sequence[Sequence[Own]], rounds: int, layers: int) -> tuple[Own, ...]:
    """What every stage owns where all micro-batches are through first; nothing where no numbers add up."""
    parts: dict[int, list[Part]] = {0: [Part(0, 0, ())]}
    for way in ways:
        longer: dict[int, list[Part]] = {}
        for used, before in parts.items():
            for own in way:
                if used + own.layers <= layers:
                    longer.setdefault(used + own.layers, []).extend(
                        Part(max(part.slowest, own.ns), part.total + own.ns, (*part.owned, own)) for part in before
                    )
        parts = {used: _not_behind(every) for used, every in longer.items()}
    whole = parts.get(layers, [])
    return min(
        whole,
        key=lambda part: ((rounds - 1) * part.slowest + part.total, part.slowest, part.layers),
        default=Part(0, 0, ()),
    ).owned


def _not_behind(parts: Sequence[Part]) -> list[Part]:
    """Those that no other is as good as in both times and has no more layers on the first stages."""
    kept: list[Part] = []
    for part in sorted(parts, key=lambda part: (part.slowest, part.total, part.layers)):
        if not kept or (part.total, part.layers) < (kept[-1].total, kept[-1].layers):
            kept.append(part)
    return kept
