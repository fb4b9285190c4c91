"""Sums over judged runs: how far predictions lie from measurements, per group."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from strategist.accuracy.judge import Judged
from strategist.columns import Reals
from strategist.records import dataclass, field

BY = ("source", "hardware", "framework", "model")
ALIKE = ("source", "table", "framework", "precision", "optimizer", "offload", "notes")
"""Columns that runs share when only their layout differs, besides the job."""
CLOSE, NEAR = 1.10, 1.25
MIN_RANKED = 3
"""Runs that differ only in their layout from which on an order can be right or wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Oom:
    """Verdicts against what happened: predicted to fit or not, ran or went out of memory. `assumed` of them fit only with a
    recompute policy that the row does not state. `tight` verdicts lie within the interval of the peak, `tight_and_wrong` of these are not
    what happened."""

    fits_and_ran: int = 0
    fits_but_oom: int = 0
    refused_but_ran: int = 0
    refused_and_oom: int = 0
    assumed: int = 0
    tight: int = 0
    tight_and_wrong: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Groups of runs that vary only the layout: the mean and the worst Spearman correlation of predicted and measured
    step times, and regret: measured time of the run that we rank first over the measured best, less one."""

    groups: int = 0
    correlation: float | None = None
    worst_correlation: float | None = None
    mean_regret: float | None = None
    worst_regret: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeFit:
    """Relative errors of step times. `mape`, `median`, `p90` and `max` are of |predicted / measured - 1|; `factor` is
    exp(median |ln(predicted / measured)|), `bias` is exp(median ln(predicted / measured)) - 1, `within_10` and
    `within_25` are shares of runs whose factor is at most 1.10 and 1.25."""

    runs: int
    mape: float
    median: float
    p90: float
    max: float
    factor: float
    bias: float
    within_10: float
    within_25: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """Relative errors of peak memory among runs whose figure counts the same thing: `mean`, `median`, `p90` and `max` of
    |predicted / measured - 1|, `bias` is exp(median ln(predicted / measured)) - 1."""

    kind: str
    runs: int
    mean: float
    median: float
    p90: float
    max: float
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One group of runs. `skipped` counts the reasons why runs could not be predicted."""

    key: Mapping[str, str]
    rows: int
    covered: int
    skipped: Mapping[str, int] = field(default_factory=dict)
    time: TimeFit | None = None
    ranking: Ranking = field(default_factory=Ranking)
    oom: Oom = field(default_factory=Oom)
    memory: tuple[MemoryFit, ...] = ()


def grouped(judged: Sequence[Judged], by: Sequence[str]) -> tuple[Group, ...]:
    """One group per combination of the columns `by`, most runs first; a group of everything stands in front."""
    members: dict[tuple[str, ...], list[Judged]] = {}
    for one in judged:
        members.setdefault(tuple(one.run.get(name, "") for name in by), []).append(one)
    ordered = sorted(members.items(), key=lambda item: (-len(item[1]), item[0]))
    groups = [scored(own, dict(zip(by, key, strict=True))) for key, own in ordered]
    return (scored(judged, {}), *groups)


def scored(judged: Sequence[Judged], key: Mapping[str, str]) -> Group:
    """Everything about one group."""
    answered = [one for one in judged if one.case is not None]
    return Group(
        key=key,
        rows=len(judged),
        covered=len(answered),
        skipped=dict(Counter(one.skipped for one in judged if one.case is None).most_common()),
        time=time_error(answered),
        ranking=ranking(answered),
        oom=verdicts(answered),
        memory=tuple(memory_errors(answered)),
    )


def log_errors(judged: Iterable[Judged]) -> Reals:
    """ln(predicted / measured) of every run with a measured step time."""
    pairs = ((one.step_s, one.case.measured.step_s) for one in judged if one.case is not None)
    return np.array([math.log(step / measured) for step, measured in pairs if measured is not None])


def time_error(judged: Sequence[Judged]) -> TimeFit | None:
    """The error of step times; None without any."""
    logs = log_errors(judged)
    if not len(logs):
        return None
    relative, size = np.abs(np.expm1(logs)), np.abs(logs)
    return TimeFit(
        runs=len(logs),
        mape=float(relative.mean()),
        median=float(np.median(relative)),
        p90=float(np.quantile(relative, 0.9)),
        max=float(relative.max()),
        factor=math.exp(float(np.median(size))),
        bias=math.expm1(float(np.median(logs))),
        within_10=float((size <= math.log(CLOSE)).mean()),
        within_25=float((size <= math.log(NEAR)).mean()),
    )


def ranking(judged: Sequence[Judged]) -> Ranking:
    """Orders inside the groups that vary only the layout; of runs with the same layout the median counts."""
    alike: dict[object, dict[object, list[tuple[float, float]]]] = {}
    for one in judged:
        if one.case is not None and one.case.measured.step_s is not None:
            words = tuple(one.run.get(name, "") for name in ALIKE)
            same = alike.setdefault((words, one.case.job), {})
            same.setdefault(one.case.layout, []).append((one.step_s, one.case.measured.step_s))
    groups = [
        np.array([np.median(pairs, axis=0) for pairs in layouts.values()]).T
        for layouts in alike.values()
        if len(layouts) >= MIN_RANKED
    ]
    if not groups:
        return Ranking()
    orders = [correlation(predicted, measured) for predicted, measured in groups]
    regrets = [float(measured[predicted.argmin()] / measured.min() - 1.0) for predicted, measured in groups]
    return Ranking(
        groups=len(groups),
        correlation=float(np.mean(orders)),
        worst_correlation=min(orders),
        mean_regret=float(np.mean(regrets)),
        worst_regret=max(regrets),
    )


def correlation(predicted: Reals, measured: Reals) -> float:
    """Spearman's rank correlation, ties by their mean rank (Spearman 1904); 0 where one side does not vary."""
    a, b = _ranks(predicted), _ranks(measured)
    spread = float(a.std() * b.std())
    return float(((a - a.mean()) * (b - b.mean())).mean()) / spread if spread else 0.0


def _ranks(values: Reals) -> Reals:
    below = (values[None, :] < values[:, None]).sum(axis=1)
    equal = (values[None, :] == values[:, None]).sum(axis=1)
    ranks: Reals = below + (equal - 1) / 2.0
    return ranks


def verdicts(judged: Iterable[Judged]) -> Oom:
    """Whether what was predicted to fit ran; the whole device counts as usable, without the headroom that plans leave."""
    known = [one for one in judged if one.case is not None]
    seen = Counter((one.fits, one.case.measured.is_oom) for one in known if one.case is not None)
    return Oom(
        fits_and_ran=seen[True, False],
        fits_but_oom=seen[True, True],
        refused_but_ran=seen[False, False],
        refused_and_oom=seen[False, True],
        assumed=sum(bool(one.assumed) for one in known),
        tight=sum(one.is_tight for one in known),
        tight_and_wrong=sum(
            one.is_tight and one.fits == one.case.measured.is_oom for one in known if one.case is not None
        ),
    )


def memory_errors(judged: Iterable[Judged]) -> Iterable[MemoryFit]:
    """Errors of the peak by what the published figure counts: tensors, what the allocator holds, or the device."""
    kinds: dict[str, list[float]] = {}
    for one in judged:
        if one.case is not None and one.case.measured.peak_bytes is not None:
            ratio = one.comparable_bytes(one.case.measured.mem_kind) / one.case.measured.peak_bytes
            kinds.setdefault(one.case.measured.mem_kind or "not stated", []).append(ratio)
    for kind, ratios in sorted(kinds.items()):
        off = np.abs(np.array(ratios) - 1.0)
        yield MemoryFit(
            kind=kind,
            runs=len(ratios),
            mean=float(off.mean()),
            median=float(np.median(off)),
            p90=float(np.quantile(off, 0.9)),
            max=float(off.max()),
            bias=math.expm1(float(np.median(np.log(ratios)))),
        )
