"""Published runs against predictions: `make bench-accuracy` runs this and writes results/accuracy.json.

docs/accuracy.md is made from that file. Rows of quality A and B with a step time or a token rate are scored; every row that
cannot be predicted is counted under its reason.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.record import ROOT, circumstances, write
from strategist.accuracy.judge import Judged, judge
from strategist.accuracy.scores import Group, grouped, scored
from strategist.accuracy.table import read_runs

RUNS = ROOT / "benchmarks/truth/training.csv"
SCORED = ("A", "B")
FITTED: Mapping[str, str] = {
    "sustained_share (Hopper, Blackwell)": "mosaicml-llm-foundry, nvidia-jax-toolbox-pax, nvidia-nemo-docs",
    "fp8_relative_share (Blackwell)": "nvidia-megatron-bridge",
    "launches and host_us of megatron-deepspeed": "vtrain (single node)",
    "launches and host_us of fused, experts": "nvidia-megatron-bridge",
    "misaligned_share": "bigscience-bloom-prequel, checked against its source",
}
"""Constants of the catalogue that were set with these rows in sight; their sources' errors are not held out."""


def measured() -> dict[str, Any]:
    """One run over the table: seconds, groups by source, points of the scatter plot."""
    runs = read_runs(str(RUNS))
    start = time.perf_counter()
    judged = judge(runs)
    seconds = time.perf_counter() - start
    good = [one for one in judged if one.run["quality"] in SCORED]
    everything, *groups = grouped(good, ("source",))
    multi = [one for one in good if one.run["source"] == "vtrain" and one.run["table"] == "multi node"]
    single = [one for one in good if one.run["source"] == "vtrain" and one.run["table"] != "multi node"]
    return {
        **circumstances(("strategist", "numpy")),
        "rows": len(runs),
        "seconds_per_1000_rows": round(1000 * seconds / len(runs), 2),
        "all": _summary(everything),
        "over_sources": over_sources(groups),
        "sources": [{"source": group.key["source"], **_summary(group)} for group in groups],
        "vtrain_single_node": _summary(scored(single, {})),
        "vtrain_multi_node": _summary(scored(multi, {})),
        "fitted": dict(FITTED),
        "points": points(good),
    }


def over_sources(groups: Sequence[Group]) -> dict[str, float]:
    """Means over sources that state a time, each counting once: geometric for factors."""
    found = [group.time for group in groups if group.time is not None]
    mean = len(found)
    return {
        "sources": mean,
        "factor": round(math.exp(sum(math.log(one.factor) for one in found) / mean), 3),
        "within_10": round(sum(one.within_10 for one in found) / mean, 3),
        "within_25": round(sum(one.within_25 for one in found) / mean, 3),
    }


def _summary(group: Group) -> dict[str, Any]:
    """The figures of a group, rounded."""
    return {
        "rows": group.rows,
        "covered": group.covered,
        "skipped": dict(group.skipped),
        "time": None if group.time is None else {name: _rounded(value) for name, value in asdict(group.time).items()},
        "ranking": {name: _rounded(value) for name, value in asdict(group.ranking).items()},
        "oom": asdict(group.oom),
        "memory": [{name: _rounded(value) for name, value in asdict(kind).items()} for kind in group.memory],
    }


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def points(judged: Sequence[Judged]) -> list[tuple[float, float]]:
    """(measured, predicted) seconds of every scored run, to three digits."""
    pairs = ((one.case.measured.step_s, one.step_s) for one in judged if one.case is not None)
    return [(_digits(a), _digits(b)) for a, b in pairs if a is not None]


def _digits(value: float) -> float:
    return float(f"{value:.3g}")


if __name__ == "__main__":
    print(write("accuracy", measured()))
