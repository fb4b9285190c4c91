"""Factors and intervals that ship, fitted to the published runs; and every source judged by those of all others.

`make calibration` runs this: it writes the catalogue's `calibration`, `intervals` and `distances`, and results/calibration.json with every run
that they rest on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.record import ROOT, circumstances, write
from benchmarks.spreads import KINDS, Spreads, Timed, spreads_of
from strategist.accuracy.bounds import Error, bounds
from strategist.accuracy.calibrate import Judged, calibrate, factors_of, factors_without
from strategist.accuracy.judge import judge
from strategist.accuracy.table import Run, read_runs
from strategist.catalog import FOLDER, rows
from strategist.document.calibration import Calibration
from strategist.facts.calibration import Factor
from strategist.planner.write import ANYWHERE
from strategist.timing.intervals import UNKNOWN, Bounds, Distance

RUNS = ROOT / "benchmarks/truth/training.csv"
MEMORY_RUNS = ROOT / "benchmarks/truth/memory.csv"
LATER = ROOT / "benchmarks/truth/later.csv"
"""Runs that were collected after the formulas; no factor and no interval rests on them."""
SCORED = ("A", "B")
SPREAD = 0.0125
"""How far shipped factors may stray: docs/decisions/0149 and 0150 have what other spreads do to sources left out."""
MIN_SOURCES, MIN_RUNS = 3, 20
"""Sources and runs that bounds of peaks need: the middle 80 % of fewer runs is two runs' own noise."""
OURS = "strategist"
"""The profile of our own executor."""


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
    found = {one.run["id"]: one for source, own in runs.items() for one in judge(own, others.get(source, others[""]))}
    return [found[one.run["id"]] for one in plain]


def time_errors(judged: Iterable[Judged]) -> list[Timed]:
    """The errors of every step time, with what the steps are made of."""
    return [
        Timed(
            one.run["source"],
            one.job.cluster.slowest.gpu.chip,
            one.job.profile.name,
            one.parts,
            math.log(one.measured_s / one.step_s),
        )
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


def peak_bounds(known: Iterable[Error]) -> Bounds | None:
    """The middle 80 % of the errors of peaks."""
    return bounds(known, ANYWHERE, MIN_SOURCES, MIN_RUNS)


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


HOW = "measured over predicted {what} of published runs (benchmarks/truth), each source under factors fitted without it; `make calibration`"
"""Where intervals come from."""
FITTED = f"ours: fitted (benchmarks/spreads.py) to {HOW.format(what='step times')}"
ALONE = "ours: kernels and steps of our own executor were measured on an H100 and two H200 (benchmarks/device/rows); in no published run, so as far as any may lie"


def interval_rows(found: Spreads, peaks: Sequence[Error]) -> list[dict[str, Any]]:
    """Rows of the catalogue's `intervals`: of a step that is all of one part, and of a peak."""
    of_parts = [_row("time", part, own, FITTED) for part, own in found.parts.items()]
    memory = peak_bounds(peaks)
    text = f"ours: middle 80 % of {HOW.format(what='peaks')}, sources of n runs weighing sqrt(n)"
    return [*of_parts, *([] if memory is None else [_row("memory", "", memory, text)])]


def _row(name: str, part: str, own: Bounds, text: str) -> dict[str, Any]:
    low, high = (round(math.exp(side), 2) for side in own)
    return {"name": name, "part": part, "low": low, "high": high, "unit": "1", "basis": "measured", "source": text}


def distance_rows(found: Spreads) -> list[dict[str, Any]]:
    """Rows of the catalogue's `distances`: of those without runs, every device and framework with some, and our own executor."""
    unknown = Distance(found.unknown, 0, 0)
    return [
        *(_distance(kind, UNKNOWN, unknown, FITTED) for kind in KINDS),
        *(_distance(*name, own, FITTED) for name, own in found.distances.items()),
        _distance("framework", OURS, unknown, ALONE),
    ]


def _distance(kind: str, name: str, own: Distance, text: str) -> dict[str, Any]:
    basis = "measured" if own.runs else "assumed"
    return {"kind": kind, "name": name, "times": round(own.times, 2), "runs": own.runs, "sources": own.sources, "unit": "1", "basis": basis, "source": text}  # fmt: skip


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
    spreads = spreads_of(time_errors(left_out(plain)))
    _write("intervals", interval_rows(spreads, peaks))
    _write("distances", distance_rows(spreads))
    rows.cache_clear()
    return {**circumstances(("strategist", "numpy", "scipy")), "spread": SPREAD, "calibration": asdict(found), "rows": names(plain)}  # fmt: skip


def _write(table: str, found: Iterable[Mapping[str, Any]]) -> None:
    with open(f"{FOLDER}/{table}.jsonl", "w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in found)


if __name__ == "__main__":
    print(write("calibration", ship()))
