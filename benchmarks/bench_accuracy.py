"""Published runs against predictions: `make bench-accuracy` runs this and writes results/accuracy.json.

docs/accuracy.md is made from that file. Rows of quality A and B with a step time or a token rate are scored, every source under
factors that were fitted to all others (benchmarks/held_out.py), and beside it by the formulas alone; every row that
cannot be predicted is counted under its reason.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.held_out import (
    LATER,
    MEMORY_RUNS,
    RUNS,
    left_out,
    memory_errors,
    peak_bounds,
    time_errors,
)
from benchmarks.held_out import scored as of_quality
from benchmarks.record import circumstances, write
from benchmarks.spreads import Spreads, Timed, score, spreads_of
from benchmarks.spreads import over_sources as mean_over_sources
from strategist.accuracy.bounds import Error
from strategist.accuracy.judge import Judged, judge
from strategist.accuracy.scores import Group, grouped, scored, verdicts
from strategist.accuracy.scores import memory_errors as memory_fits
from strategist.accuracy.table import read_runs
from strategist.facts.calibration import shipped_factors
from strategist.planner.write import FEW_RUNS, FEW_SOURCES
from strategist.timing.intervals import Bounds

BARS: Mapping[str, float] = {"factor": 1.12, "within_10": 0.64, "within_25": 0.84}
"""What was reached and must be kept, averaged over sources; the aim is 1.12, 0.50 and 0.75."""
MIN_LISTED = 20
"""Runs that a source needs for a line of its own."""
MEMORY_BARS: Mapping[str, Mapping[str, float]] = {
    "simumax-b200": {"mean": 0.015, "max": 0.04, "bias": 0.03},
    "megatron-lm-functional-tests": {"median": 0.05, "bias": 0.03},
    "mist-aceso-artifact": {"median": 0.05, "bias": 0.03},
}
"""Errors of peak memory that were reached and must be kept: the bars of these sources."""
FALSE_OOM = 0.05
"""Share of the runs that ran which may be predicted not to fit; none that went out of memory may be predicted to."""
FITTED: Mapping[str, str] = {
    "sustained_share (Hopper, Blackwell, CDNA)": "mosaicml-llm-foundry, nvidia-jax-toolbox-pax, nvidia-nemo-docs",
    "sustained_share (Ampere)": "internlm-internevo, bigscience-bloom-prequel, mosaicml-llm-foundry",
    "fp8_relative_share (Blackwell)": "nvidia-megatron-bridge",
    "sustained_share (B200), cudnn shares (Blackwell)": "simumax-b200 (its products and attention alone, not its steps)",
    "rates of RTX 3090 Ti, RTX 4090 and A6000": "mli-transformers-benchmarks (its products alone, not its steps)",
    "launches and host_us of megatron-deepspeed": "vtrain (single node)",
    "launches and host_us of fused, experts": "nvidia-megatron-bridge",
    "launches of fused, dense": "megatron-lm-functional-tests (memory.csv)",
    "attention of fsdp1, internevo, megatron-2022; recompute of jax; selective recompute of fsdp1, fsdp2": "looked up because the residuals of mosaicml-llm-foundry, internlm-internevo, nemo-launcher-23.08, nvidia-jax-toolbox-pax, ibm-fms-fsdp and pytorch-torchao asked for it",
    "gathers in fp8, casts under scales per row, power of cards that nobody measured, attention by device; facts of rows corrected (benchmarks/truth/README.md)": "looked up because the residuals of nvidia-megatron-bridge, pytorch-torchtitan, pytorch-torchao, nvidia-nemo-automodel, nemo-launcher-23.08, mist-aceso-artifact and lambda-deeplearning-benchmark asked for it",
    "heads on the fp32 units, copies of BF16_Optimizer, launches that wait; links of a part of a node; what fills the links": "looked up because the residuals of bigscience-bloom-prequel and vtrain asked for it (no constant was set with them; the last from curves of collectives alone)",
    "misaligned_share": "bigscience-bloom-prequel, checked against its source",
    "rows of keeping, looked up in the frameworks' code because residuals of memory asked for it": "simumax-b200, megatron-lm-functional-tests, mosaicml-llm-foundry, bigscience-bloom-prequel, mli-transformers-benchmarks, pytorch-torchtitan, mist-aceso-artifact",
    "expandable_slack": "simumax-b200",
    "streams and idle blocks of reserved memory; unties, update_copies and adapters of litgpt; facts of rows corrected (benchmarks/truth/README.md)": "looked up because the residuals of pytorch-torchtitan, pytorch-torchao and litgpt-config-hub asked for it (no constant was set with them; the blocks from traces of our own program)",
    "walks of rings through nodes, links through the host, profiles of nanotron, oneflow, megatron-2019 and ddp-apex-once, what rows say of old cards and trainers (docs/decisions/0197 to 0200)": "looked up because the residuals of later.csv, of internlm-internevo and of mli-transformers-benchmarks asked for it (no constant was set with them)",
    "chunks that take turns, profile of mlperf-bert, attention on Blackwell, lists of networks, weights at rest in fp8; facts of rows corrected (docs/decisions/0202)": "looked up because the residuals of later.csv and of the mlperf-training sources asked for it (no constant was set with them)",
    "head in the format of casts, products in fp4, rates of MI325X and CDNA4, kernels of updates, contention_share (docs/decisions/0208)": "looked up because the residuals of later.csv, nvidia-megatron-bridge and the mlperf-training sources asked for it (no constant was set with them)",
    "what modules of Transformers move, adapters in single operations, ZeRO-2, buckets and updates of DeepSpeed, nanotron's loss (docs/decisions/0211)": "looked up because the residuals of later.csv asked for it (no constant was set with them)",
    "which GELU a model has, Gemini's profile, weights that DeepSpeed's ZeRO-3 keeps gathered; facts of rows corrected (docs/decisions/0214)": "looked up because later.csv's runs that went out of memory asked for it (no constant was set with these rows)",
    "outputs of DeepSpeed's pipelines, softmax and the residual stream under autocast, dropout's masks, kernels loaded at once; facts of rows corrected (docs/decisions/0206)": "looked up because later.csv's runs that went out of memory asked for it (no constant was set with them)",
    "profile and hooks of deepspeed-zero3, stages that take turns": "looked up because the residuals of deepspeed-blogs and bigscience-bloom-prequel asked for it (the hooks' time was measured on a CPU, before the rows of 254M came)",
}
"""Constants of the catalogue that were set with these rows in sight; their sources' errors are not held out."""


def measured() -> dict[str, Any]:
    """One run over the table: seconds of the processor (one thread, on a machine that other work shares), and what its answers say."""
    runs = read_runs(str(RUNS))
    start = time.process_time()
    shipped = judge(runs, shipped_factors())
    seconds = time.process_time() - start
    plain = judge(runs)
    good = left_out(of_quality(plain))
    cost = {"seconds_per_1000_rows": round(1000 * seconds / len(runs), 2)}
    return figures(plain, shipped, good) | {"later": later(time_errors(good))} | cost


def figures(plain: Sequence[Judged], shipped: Sequence[Judged], good: Sequence[Judged]) -> dict[str, Any]:
    """Groups by source, points of the scatter plot; of runs by the formulas alone, under the factors that ship, and, those of quality A and B,
    under those of all other sources."""
    bare, seen = of_quality(plain), of_quality(shipped)
    only = memory_only()
    everything, *groups = grouped(good, ("source",))
    by_source, lonely = {group.key["source"]: group for group in groups}, alone(good)
    multi = [one for one in good if one.run["source"] == "vtrain" and one.run["table"] == "multi node"]
    single = [one for one in good if one.run["source"] == "vtrain" and one.run["table"] != "multi node"]
    return {
        **circumstances(("strategist", "numpy", "scipy")),
        "rows": len(plain),
        "all": _summary(everything),
        "over_sources": over_sources(groups),
        "uncalibrated": _without(bare),
        "in_sight": _without(seen),
        "sources": [
            {"source": source, "is_alone": source in lonely, **_summary(group)} for source, group in by_source.items()
        ],
        "vtrain_single_node": _summary(scored(single, {})),
        "vtrain_multi_node": _summary(scored(multi, {})),
        "fitted": dict(FITTED),
        "memory": memory_by_source((*good, *only)),
        "verdicts": asdict(verdicts((*good, *only))),
        "intervals": intervals(spreads_of(time_errors(good))),
        "held_out": held_out(time_errors(good)),
        "memory_held_out": memory_held_out(memory_errors((*good, *only))),
        "flagged": flagged(good),
        "points": points(good),
    }


def _without(judged: Sequence[Judged]) -> dict[str, Any]:
    """The same rows judged otherwise: averages, and the median error over all of them and by source."""
    everything, *groups = grouped(judged, ("source",))
    return {
        "over_sources": over_sources(groups),
        "median": None if everything.time is None else _rounded(everything.time.median),
        "sources": {group.key["source"]: _rounded(group.time.median) for group in groups if group.time is not None},
    }


def later(known: Sequence[Timed]) -> dict[str, Any]:
    """Runs that were collected after the formulas, by source, under the factors that ship, and how the intervals of all other runs hold on them."""
    judged = of_quality(judge(read_runs(str(LATER)), shipped_factors()))
    everything, *groups = grouped(judged, ("source",))
    errors, spreads = time_errors(judged), spreads_of(known)
    return {
        "all": _summary(everything),
        "over_sources": over_sources(groups),
        "held": how_they_hold(errors, [spreads.bounds(run) for run in errors]),
        "verdicts": asdict(verdicts(judged)),
        "sources": [{"source": group.key["source"], **_summary(group)} for group in groups],
    }


def memory_only() -> list[Judged]:
    """Runs of which only the memory was published, of quality A and B."""
    return of_quality(judge(read_runs(str(MEMORY_RUNS))))


def memory_by_source(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Per source and per what its figure counts: rows with a figure, how many are predicted, why the others are not, and
    the errors of peak memory."""
    members: dict[tuple[str, str], list[Judged]] = {}
    for one in judged:
        if one.run.get("peak_mem_gb", ""):
            members.setdefault((one.run["source"], one.run.get("mem_kind", "")), []).append(one)
    return [
        {"source": source, "rows": len(own), "skipped": dict(Counter(one.skipped for one in own if one.case is None).most_common()), **fit}
        for (source, kind), own in sorted(members.items())
        for fit in (_memory_fit(kind, own),)
    ]  # fmt: skip


def _memory_fit(kind: str, own: Sequence[Judged]) -> dict[str, Any]:
    """The errors of rows that count the same; `runs` is 0 where none is predicted."""
    found = list(memory_fits(own))
    if not found:
        return {"kind": kind or "not stated", "runs": 0}
    return {name: _rounded(value) for name, value in asdict(found[0]).items()}


def over_sources(groups: Sequence[Group]) -> dict[str, float]:
    """Means over sources that state a time, each counting once: geometric for factors."""
    found = [group.time for group in groups if group.time is not None]
    mean = len(found)
    return {
        "sources": mean,
        "factor": round(math.exp(sum(math.log(one.factor) for one in found) / mean), 4),
        "within_10": round(sum(one.within_10 for one in found) / mean, 3),
        "within_25": round(sum(one.within_25 for one in found) / mean, 3),
    }


def alone(judged: Sequence[Judged]) -> set[str]:
    """Sources that have all runs of each device, or of each framework, that they used together: no other source tells how far the
    formulas lie there."""
    timed = [one for one in judged if one.measured_s]
    owners: dict[str, set[str]] = {}
    for one in timed:
        for name in _used(one):
            owners.setdefault(name, set()).add(one.run["source"])
    shared = {one.run["source"] for one in timed if all(len(owners[name]) > 1 for name in _used(one))}
    return {one.run["source"] for one in timed} - shared


def _used(one: Judged) -> tuple[str, str]:
    """The device and the framework of a run."""
    return one.job.cluster.slowest.gpu.name, f"framework {one.job.profile.name}"


def flagged(judged: Sequence[Judged]) -> dict[str, float]:
    """Runs on devices with few runs, or of frameworks that no other source has, which plans flag as outside calibrated ground
    (the latter would be, were their source not there): how many, the median of |predicted / measured - 1| among them, and among the others."""
    known = time_errors(judged)
    spreads = spreads_of(known)
    off = {
        inside: [abs(math.expm1(-run.value)) for run in known if _is_inside(run, spreads) is inside]
        for inside in (True, False)
    }
    return {
        "rows": len(off[False]),
        "median": round(float(np.median(off[False])), 3),
        "others": round(float(np.median(off[True])), 3),
    }


def _is_inside(run: Timed, spreads: Spreads) -> bool:
    chip, framework = (spreads.distances[name] for name in run.names)
    return chip.runs >= FEW_RUNS and chip.sources >= FEW_SOURCES and framework.sources > 1


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


def intervals(found: Spreads) -> dict[str, Any]:
    """What the catalogue's `intervals` and `distances` should say of times: factors on a step that is all of one part, and how many times as far
    the runs of a device or a framework lie."""
    return {
        "parts": {part: [round(math.exp(side), 2) for side in own] for part, own in found.parts.items()},
        "distances": [[*name, round(own.times, 2), own.runs, own.sources] for name, own in found.distances.items()],
        "unknown": round(found.unknown, 2),
    }


def held_out(known: Sequence[Timed]) -> dict[str, Any]:
    """How intervals hold that all sources but the run's own made, and the share of those inside by source."""
    without = {
        name: spreads_of([run for run in known if run.source != name]) for name in sorted({run.source for run in known})
    }
    limits = [without[run.source].bounds(run) for run in known]
    inside: dict[str, list[bool]] = {}
    for run, (low, high) in zip(known, limits, strict=True):
        inside.setdefault(run.source, []).append(low <= run.value <= high)
    return {
        **how_they_hold(known, limits),
        "sources": {name: round(sum(own) / len(own), 3) for name, own in sorted(inside.items()) if len(own) >= MIN_LISTED},
    }  # fmt: skip


def how_they_hold(runs: Sequence[Timed], limits: Sequence[Bounds]) -> dict[str, float]:
    """The share of runs inside their intervals, the same with every source counting alike, half the width of the middle one, and the score."""
    inside = [float(low <= run.value <= high) for run, (low, high) in zip(runs, limits, strict=True)]
    scores = [score(run.value, own) for run, own in zip(runs, limits, strict=True)]
    return {
        "coverage": round(float(np.mean(inside)), 3),
        "coverage_over_sources": round(mean_over_sources(runs, inside), 3),
        "median_half_width": round(math.expm1(float(np.median([high - low for low, high in limits])) / 2), 3),
        "score_over_sources": round(mean_over_sources(runs, scores), 3),
    }


def memory_held_out(known: Sequence[Error]) -> dict[str, float]:
    """Coverage of the interval of peaks, its bounds from all sources but the run's own."""
    hits = []
    for source in sorted({error.source for error in known}):
        low, high = peak_bounds([error for error in known if error.source != source]) or (0.0, 0.0)
        hits += [low <= error.value <= high for error in known if error.source == source]
    return {"rows": len(hits), "coverage": round(sum(hits) / len(hits), 3)}


def _digits(value: float) -> float:
    return float(f"{value:.3g}")


if __name__ == "__main__":
    print(write("accuracy", measured()))
