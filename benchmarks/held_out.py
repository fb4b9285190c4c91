"""Factors and intervals that ship, fitted to the published runs; and every source judged by those of all others.

`make calibration` runs this: it writes the catalogue's `calibration` and `intervals`, and results/calibration.json with every run
that they rest on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.record import ROOT, circumstances, write
from strategist.accuracy.bounds import Bounds, Error
from strategist.accuracy.bounds import bounds as bounds_of
from strategist.accuracy.calibrate import Judged, calibrate, factors_of, factors_without
from strategist.accuracy.judge import judge
from strategist.accuracy.table import Run, read_runs
from strategist.catalog import FOLDER, rows
from strategist.document.calibration import Calibration
from strategist.facts.calibration import Factor
from strategist.planner.write import ANYWHERE, Place, neighbourhoods

RUNS = ROOT / "benchmarks/truth/training.csv"
MEMORY_RUNS = ROOT / "benchmarks/truth/memory.csv"
LATER = ROOT / "benchmarks/truth/later.csv"
"""Runs that were collected after the formulas; no factor and no interval rests on them."""
SCORED = ("A", "B")
SPREAD = 0.0125
"""How far shipped factors may stray: docs/decisions/0149 and 0150 have what other spreads do to sources left out."""
MIN_SOURCES = 3
"""Sources that a neighbourhood needs for bounds of its own."""
MIN_RUNS = 20
"""Runs that it needs: the middle 80 % of fewer is two runs' own noise."""
OURS = "strategist"
"""The profile of our own executor."""
ROOM = 1.5
"""How much wider, in logarithms, bounds are where they rest on other devices' runs."""


def scored(judged: Iterable[Judged]) -> list[Judged]:
    """Runs of quality A and B."""
    return [one for one in judged if one.run["quality"] in SCORED]


def with_time(judged: Iterable[Judged]) -> list[Judged]:
    """Runs that are predicted and state a time or a rate."""
    return [one for one in judged if one.case is not None and one.case.measured.step_s is not None]


def fitted(judged: Sequence[Judged]) -> tuple[Factor, ...]:
    """The factors that runs ask for, by the formulas alone before."""
    timed = with_time(judged)
    return factors_of(timed, [one.run["source"] for one in timed], spread=SPREAD)


def left_out(plain: Sequence[Judged]) -> list[Judged]:
    """Every run, in order, under the factors that the runs of all other sources ask for."""
    timed = with_time(plain)
    others = factors_without(timed, [one.run["source"] for one in timed], spread=SPREAD)
    runs: dict[str, list[Run]] = {}
    for one in plain:
        runs.setdefault(one.run["source"], []).append(one.run)
    untimed = fitted(plain) if runs.keys() - others.keys() else ()
    found = {one.run["id"]: one for source, own in runs.items() for one in judge(own, others.get(source, untimed))}
    return [found[one.run["id"]] for one in plain]


def time_errors(judged: Iterable[Judged]) -> list[Error]:
    """The errors of every step time."""
    return [
        Error(one.run["source"], neighbourhoods(one.job), math.log(one.measured_s / one.step_s))
        for one in with_time(judged)
    ]


def memory_errors(judged: Iterable[Judged]) -> list[Error]:
    """The errors of every peak, like beside like."""
    cases = ((one, one.case.measured) for one in judged if one.case is not None)
    return [
        Error(one.run["source"], (), math.log(seen.peak_bytes / one.comparable_bytes(seen.mem_kind)))
        for one, seen in cases
        if seen.peak_bytes is not None
    ]


def bounds(known: Iterable[Error], place: Place) -> Bounds | None:
    """The middle 80 % of the errors in a neighbourhood, None with fewer than MIN_SOURCES sources or MIN_RUNS runs there."""
    return bounds_of(known, place, MIN_SOURCES, MIN_RUNS)


def wider(own: Bounds | None) -> Bounds:
    """Bounds for what has no runs of its own. Raises ValueError where there are none to widen."""
    if own is None:
        raise ValueError(f"fewer than {MIN_SOURCES} sources")
    return ROOM * own[0], ROOM * own[1]


def all_bounds(known: Sequence[Error]) -> dict[Place, Bounds]:
    """Bounds of every neighbourhood that has them, and those of anywhere."""
    places = sorted({place for error in known for place in error.places})
    found = {place: bounds(known, place) for place in places}
    return {ANYWHERE: wider(bounds(known, ANYWHERE))} | {place: own for place, own in found.items() if own is not None}


def nearest(known: Mapping[Place, Bounds], places: Sequence[Place], frameworks: Collection[str]) -> Bounds:
    """The bounds of the nearest neighbourhood that has any; of a framework that no run was of, no closer than those of anywhere."""
    low, high = next((known[place] for place in places if place in known), known[ANYWHERE])
    if not places or places[0].framework in frameworks:
        return low, high
    return min(low, known[ANYWHERE][0]), max(high, known[ANYWHERE][1])


def frameworks_of(known: Iterable[Error]) -> list[str]:
    """The frameworks of some runs, and our own executor, whose kernels and steps were measured (benchmarks/device/rows)."""
    return sorted({error.places[0].framework for error in known if error.places} | {OURS})


def as_factors(own: Bounds) -> dict[str, float]:
    """Bounds as factors on a prediction."""
    return {"low": round(math.exp(own[0]), 2), "high": round(math.exp(own[1]), 2)}


def factor_rows(factors: Iterable[Factor], judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Rows of the catalogue's `calibration`."""
    timed = with_time(judged)
    found = []
    for factor in factors:
        own = [one for one in timed if factor.applies(one.job.cluster.slowest.gpu.name, one.job.profile.name)]
        sources = ", ".join(sorted({one.run["source"] for one in own}))
        text = f"ours: fitted to {len(own)} published runs of {sources} (benchmarks/results/calibration.json names them), near 1 to {SPREAD:.2%}; `make calibration`"
        found.append(asdict(factor) | {"unit": "1", "basis": "measured", "source": text})
    return found


HOW = "middle 80 % of measured over predicted {what} of published runs (benchmarks/truth), each source under factors fitted without it, sources of n runs weighing sqrt(n); `make calibration`"


def interval_rows(times: Sequence[Error], peaks: Sequence[Error]) -> list[dict[str, Any]]:
    """Rows of the catalogue's `intervals`."""
    found = [_row("time", place, own, HOW.format(what="step times")) for place, own in all_bounds(times).items()]
    found[0] |= {"basis": "derived", "source": f"ours: over all devices, with half as much room again in logarithms, for those without runs of {MIN_SOURCES} sources: {HOW.format(what='step times')}"}  # fmt: skip
    found[0] |= {"frameworks": frameworks_of(times)}
    memory = bounds(peaks, ANYWHERE)
    return [*found, *([] if memory is None else [_row("memory", ANYWHERE, memory, HOW.format(what="peaks"))])]


def _row(name: str, place: Place, own: Bounds, how: str) -> dict[str, Any]:
    return {
        "name": name,
        **place._asdict(),
        **as_factors(own),
        "unit": "1",
        "basis": "measured",
        "source": f"ours: {how}",
    }


def calibration_of(judged: Sequence[Judged]) -> Calibration:
    """What ships, as a document, with what it is worth on sources left out."""
    return calibrate(judged, spreads=(SPREAD,), of_one_place=False)


def names(judged: Iterable[Judged]) -> dict[str, list[str]]:
    """The runs that factors rest on, by source."""
    found: dict[str, list[str]] = {}
    for one in with_time(judged):
        found.setdefault(one.run["source"], []).append(one.run["id"])
    return dict(sorted(found.items()))


def ship() -> dict[str, Any]:
    """Write the catalogue's tables, and say what they rest on."""
    plain = scored(judge(read_runs(str(RUNS))))
    found = calibration_of(plain)
    peaks = memory_errors((*plain, *scored(judge(read_runs(str(MEMORY_RUNS))))))
    _write("calibration", factor_rows(found.factors, plain))
    _write("intervals", interval_rows(time_errors(left_out(plain)), peaks))
    rows.cache_clear()
    return {**circumstances(("strategist", "numpy", "scipy")), "spread": SPREAD, "calibration": asdict(found), "rows": names(plain)}  # fmt: skip


def _write(table: str, found: Iterable[Mapping[str, Any]]) -> None:
    with open(f"{FOLDER}/{table}.jsonl", "w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in found)


if __name__ == "__main__":
    print(write("calibration", ship()))
