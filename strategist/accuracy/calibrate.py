"""Fit a few factors of the time model to measured runs, shrunk towards those that ship, and judge them on groups left out.

The seconds of a step are linear in the seconds of its parts, so the fit needs no new search: with X(o) the predicted seconds
of each part of each run (the bubble spread over them) where o times as much of compute as said has collectives beside it, known for a few o and
between them by lines in ln o, minimise over the logarithms a of the factors

    sum over runs of w soft(ln(sum over parts of X(o) exp(a)) - ln measured) + sum of ((a - a0) / SPREAD)^2

where a is a sum of one entry of the device, one of the framework and one of all runs alike, a0 the same of the factors that ship, SPREAD the one of a few that serves runs left out best, soft is least squares with linear tails and w makes a
group of n runs count like sqrt(n) (scipy.optimize.least_squares, loss soft_l1).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, get_args

import numpy as np

from strategist import __version__
from strategist.accuracy.bounds import Error, near_runs
from strategist.accuracy.judge import Judged, parts_at
from strategist.columns import Column, Reals, clamped
from strategist.document.calibration import Apart, Calibration, Held
from strategist.errors import ImpossibleError, InputError
from strategist.facts.calibration import Factor, Part
from strategist.planner.search import Watch
from strategist.planner.write import neighbourhoods
from strategist.records import dataclass
from strategist.timing.calibrated import PARTS as SECONDS_OF
from strategist.units import counted

Key = tuple[str, str]
"""("gpu" or "framework", its name), or ANY."""

PARTS: tuple[Part, ...] = get_args(Part)
TIMED: tuple[Part, ...] = tuple(part for part in PARTS if SECONDS_OF[part])
"""Parts that have seconds; the last of all is the overlap, which has none."""
OVERLAPS = (0.5, 0.7, 0.85, 1.0, 1.15, 1.4, 2.0)
"""Factors on the overlap under which runs are predicted."""
SPREADS, NOISE = (0.0, 0.07, 0.2, 0.6), 0.1
"""How far the logarithm of a factor may be expected to stray from 0, and that of a repeated measurement: not at all, 7, 20 or 60, and 10 %. Which of
them depends on how much the runs have in common that the formulas do not know: a machine where all takes half as long again asks for much."""
ANY: Key = ("any", "")
"""What is about every run of a table alike, whatever its device and framework: the place where they were measured."""
MIN_RUNS, MIN_GROUPS = 10, 3
WAYS = ("source", "model", "hardware", "gpus_total")
"""Columns whose values make groups; the first with enough of them is taken."""
NEAR = math.log(1.25)
FAR = math.log(2.0)
"""A run this far from what the factors say is one to look at: another unit, another layout, a run that waited for something else."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Runs as columns: predicted seconds by overlap and part (R, O, P), ln measured (R,), group numbers (R,), and the places of the
    entries that move each run in the list of keys, (R, 2) or with that of ANY (R, 3)."""

    parts: Reals
    measured: Reals
    group: Column
    keys: Column

    def where(self, keep: Any) -> Sample:
        """Some of the runs."""
        return Sample(self.parts[keep], self.measured[keep], self.group[keep], self.keys[keep])


Fit = Callable[..., Reals]


def calibrate(
    judged: Sequence[Judged],
    before: Sequence[Factor] = (),
    spreads: Sequence[float] = SPREADS,
    *,
    of_one_place: bool = True,
    watch: Watch | None = None,
) -> Calibration:
    """The factors that measured runs ask for: those `before`, which hold for a device or a framework, moved as far as the runs insist, and
    those of all these runs alike where they are `of_one_place`; those that are about none of the runs stay. Of the `spreads` the one is taken under which groups left
    out are predicted best, the narrowest of equals: with 0 among them, factors that help nowhere are not made. `watch` hears of each fit: to all runs, and without each group. Raises InputError TOO_SMALL for fewer than MIN_RUNS predicted runs with a step time, or
    runs of fewer than MIN_GROUPS groups."""
    timed = [one for one in judged if one.case is not None and one.case.measured.step_s is not None]
    way, groups = _groups(timed, Counter(one.skipped for one in judged if one.skipped))
    keys, sample = _sampled(timed, groups, alike=of_one_place)
    usual = _entries(before, keys)
    fitted = _told(watch, len(spreads) * (1 + len(set(groups))))
    fits = {spread: fitted(sample, usual, spread) for spread in sorted(spreads)}
    left_out = {spread: _left_out(sample, usual, spread, entries, fitted) for spread, entries in fits.items()}
    held = {spread: _held(sample, usual, errors) for spread, errors in left_out.items()}
    spread = min(held, key=lambda one: round(held[one].after, 3))
    return Calibration(
        made_by=f"strategist {__version__}",
        runs=len(timed),
        groups=len(set(groups)),
        grouped_by=way,
        factors=_beside(fits[spread], keys, before) if spread else tuple(before),
        held_out=held[spread],
        spread=spread,
        apart=_apart(timed, _errors(sample, fits[spread])[0]),
        near=tuple(near_runs(_known(timed, groups, left_out[spread]), MIN_GROUPS, MIN_RUNS)),
    )


def _known(timed: Sequence[Judged], groups: Sequence[str], errors: Reals) -> list[Error]:
    """ln(predicted / measured) of runs left out as errors of measured runs, with where they lie."""
    each = zip(timed, groups, errors.tolist(), strict=True)
    return [Error(group, neighbourhoods(one.job), -error) for one, group, error in each]


def _apart(timed: Sequence[Judged], errors: Reals) -> tuple[Apart, ...]:
    """The runs whose ln(predicted / measured) is beyond a factor of FAR."""
    found = [Apart(id=one.run["id"], ratio=round(math.exp(-error), 3)) for one, error in zip(timed, errors.tolist(), strict=True) if abs(error) > FAR]  # fmt: skip
    return tuple(sorted(found, key=lambda one: -abs(math.log(one.ratio))))


def _told(watch: Watch | None, total: int) -> Fit:
    """`_fit`, of which somebody hears: the words, how many of the `total` are done, and that no step time is the best so far."""
    done = count(1)

    def fitted(sample: Sample, usual: Reals, spread: float, start: Reals | None = None) -> Reals:
        found = _fit(sample, usual, spread, start)
        if watch is not None:
            watch("fitting without each group in turn", next(done), total, None)
        return found

    return fitted


def factors_of(
    timed: Sequence[Judged], groups: Sequence[str], spread: float, before: Sequence[Factor] = ()
) -> tuple[Factor, ...]:
    """The factors of devices and frameworks that runs of many places ask for, each in a group of its own name, without a word on what they
    are worth."""
    keys, sample = _sampled(timed, groups)
    return _moved(sample, keys, before, spread)


def factors_without(
    timed: Sequence[Judged], groups: Sequence[str], spread: float, before: Sequence[Factor] = ()
) -> dict[str, tuple[Factor, ...]]:
    """For each group the factors of `factors_of` that the runs of all other groups ask for, and under "", for groups without a time, those that
    all ask for."""
    keys, sample = _sampled(timed, groups)
    others = {name: sample.where(sample.group != number) for number, name in enumerate(sorted(set(groups)))}
    return {name: _moved(some, keys, before, spread) for name, some in {"": sample, **others}.items()}


def _moved(sample: Sample, keys: Sequence[Key], before: Sequence[Factor], spread: float) -> tuple[Factor, ...]:
    """The factors that a sample asks for, and those before it that are about none of its runs."""
    return _beside(_fit(sample, _entries(before, keys), spread), keys, before)


def _beside(entries: Reals, keys: Sequence[Key], before: Sequence[Factor]) -> tuple[Factor, ...]:
    """Fitted factors, and those before them that are about none of the keys."""
    return (*_factors(entries, keys), *(factor for factor in before if _key_of(factor) not in keys))


def _groups(timed: Sequence[Judged], reasons: Counter[str]) -> tuple[str, list[str]]:
    """The column that makes groups, and the group of every run; `reasons` why others are skipped, by number."""
    for way in WAYS:
        groups = [one.run.get(way, "") for one in timed]
        if len(timed) >= MIN_RUNS and len(set(groups)) >= MIN_GROUPS:
            return way, groups
    most = max(len({one.run.get(way, "") for one in timed}) for way in WAYS)
    raise InputError(
        "TOO_SMALL",
        f"{counted(len(timed), 'run')} can be predicted and have a step time, of {counted(most, 'group')} at the most; a calibration needs {MIN_RUNS} of {MIN_GROUPS} groups.{_most(reasons)}",
        flag="FILE",
        value=len(timed),
        hint=f"Add runs that differ in one of {', '.join(WAYS)}; `strategist accuracy` lists the rows that are skipped.",
    )


def _most(reasons: Counter[str]) -> str:
    """A sentence with the reason why most rows are skipped; nothing where none is."""
    return "".join(f" Skipped are {reasons.total()}, {number} of them because: {reason}." for reason, number in reasons.most_common(1))  # fmt: skip


def _keys(one: Judged, *, alike: bool) -> tuple[Key, ...]:
    job = one.job
    own = ("gpu", job.cluster.slowest.gpu.name), ("framework", job.profile.name)
    return (*own, ANY) if alike else own


def _key_of(factor: Factor) -> Key:
    return ("gpu", factor.gpu) if factor.gpu else ("framework", factor.framework) if factor.framework else ANY


def _entries(factors: Sequence[Factor], keys: Sequence[Key]) -> Reals:
    """Logarithms of known factors by key and part, (K, P)."""
    found = np.zeros((len(keys), len(PARTS)))
    for factor in factors:
        if _key_of(factor) in keys:
            found[keys.index(_key_of(factor)), PARTS.index(factor.part)] += math.log(factor.value)
    return found


def _sampled(timed: Sequence[Judged], groups: Sequence[str], *, alike: bool = False) -> tuple[list[Key], Sample]:
    """What factors can be told apart for, that of all runs `alike` among them or not, and the runs as columns."""
    own = [_keys(one, alike=alike) for one in timed]
    keys = sorted({key for some in own for key in some})
    return keys, _sample(timed, groups, keys, own)


def _sample(
    timed: Sequence[Judged], groups: Sequence[str], keys: Sequence[Key], own: Sequence[tuple[Key, ...]]
) -> Sample:
    place = {key: number for number, key in enumerate(keys)}
    names = sorted(set(groups))
    cases = [one.case for one in timed if one.case is not None]
    parts = [[[known[part] for part in TIMED] for known in parts_at(cases, overlap)] for overlap in OVERLAPS]
    return Sample(
        parts=np.array(parts).swapaxes(0, 1),
        measured=np.log([one.measured_s for one in timed]),
        group=np.array([names.index(group) for group in groups], np.int64),
        keys=np.array([[place[key] for key in some] for some in own], np.int64),
    )


def _errors(sample: Sample, entries: Reals) -> tuple[Reals, Reals]:
    """ln(predicted / measured), (R,), and what it grows by with the logarithm of each factor, (R, P): the share of the part in the prediction,
    and what overlap hides. `entries` is (K, P)."""
    moved = entries[sample.keys].sum(axis=1)
    parts, slopes = _at_overlap(sample.parts, moved[:, -1])
    scaled, by_overlap = (seconds * np.exp(moved[:, :-1]) for seconds in (parts, slopes))
    step = scaled.sum(axis=1)
    grows = np.column_stack([scaled, by_overlap.sum(axis=1)])
    return np.log(step) - sample.measured, grows / step[:, None]


def _at_overlap(parts: Reals, logarithm: Reals) -> tuple[Reals, Reals]:
    """Seconds by part (R, P) at a factor on the overlap of each run, and what they grow by with its logarithm; nothing beyond those that
    are known."""
    grid = np.log(OVERLAPS)
    inside = clamped(logarithm, grid[0], grid[-1])
    place = clamped(np.searchsorted(grid, inside, side="right") - 1, 0, len(grid) - 2)
    rows, width = np.arange(len(parts)), (grid[place + 1] - grid[place])[:, None]
    low, high = parts[rows, place], parts[rows, place + 1]
    slope = np.where((inside == logarithm)[:, None], (high - low) / width, 0.0)
    return low + (high - low) * ((inside - grid[place])[:, None] / width), slope


def _fit(sample: Sample, usual: Reals, spread: float, start: Reals | None = None) -> Reals:
    """Logarithms of the factors by key and part, (K, P), near the `usual` ones, looked for from `start` on; the usual ones where none may stray."""
    if not spread:
        return usual
    least_squares = _solver()
    sizes = Counter(sample.group.tolist())
    weight = np.array([sizes[group] ** -0.25 for group in sample.group.tolist()]) / NOISE
    shape = usual.shape
    rows = np.arange(len(weight))

    def residuals(flat: Reals) -> Reals:
        error, _ = _errors(sample, flat.reshape(shape))
        softened: Reals = 2.0 * np.sign(error) * (np.sqrt(1.0 + np.abs(error) / (2 * NOISE)) - 1.0) * 2 * NOISE
        return np.concatenate([weight * softened, (flat - usual.ravel()) / spread])

    def slopes(flat: Reals) -> Reals:
        error, share = _errors(sample, flat.reshape(shape))
        slope = weight / np.sqrt(1.0 + np.abs(error) / (2 * NOISE))
        table = np.zeros((len(weight), *shape))
        for side in range(sample.keys.shape[1]):
            table[rows, sample.keys[:, side]] += share * slope[:, None]
        return np.vstack([table.reshape(len(weight), -1), np.eye(usual.size) / spread])

    begin = usual if start is None else start
    found = least_squares(residuals, begin.ravel(), jac=slopes, method="lm", max_nfev=60)
    solution: Reals = found.x.reshape(shape)
    return solution


def _solver() -> Any:
    """scipy's least squares. Raises ImpossibleError UNSUPPORTED where the extra is not installed."""
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise ImpossibleError(
            "UNSUPPORTED",
            "Calibrating needs scipy, which is not installed.",
            flag="calibrate",
            hint="pip install 'strategist[calibrate]'.",
        ) from None
    return least_squares


def _left_out(sample: Sample, usual: Reals, spread: float, every: Reals, fitted: Fit) -> Reals:
    """ln(predicted / measured), (R,), each group under a fit to the others, which begins where that to `every` one ends."""
    found = np.zeros(len(sample.group))
    for group in sorted(set(sample.group.tolist())):
        own = sample.group == group
        found[own] = _errors(sample.where(own), fitted(sample.where(~own), usual, spread, every))[0]
    return found


def _held(sample: Sample, usual: Reals, left_out: Reals) -> Held:
    """What is won on groups left out of their fits, whose errors then were `left_out`."""
    before, after = ([np.abs(errors[sample.group == group]) for group in sorted(set(sample.group.tolist()))] for errors in (_errors(sample, usual)[0], left_out))  # fmt: skip
    return Held(
        before=math.exp(float(np.mean([np.median(errors) for errors in before]))),
        after=math.exp(float(np.mean([np.median(errors) for errors in after]))),
        before_within_25=float(np.mean([(errors <= NEAR).mean() for errors in before])),
        after_within_25=float(np.mean([(errors <= NEAR).mean() for errors in after])),
    )


def _factors(entries: Reals, keys: Sequence[Key]) -> list[Factor]:
    """Factors of at least a tenth of a percent, in the order of the keys."""
    found = []
    for (kind, name), row in zip(keys, np.exp(entries), strict=True):
        where: Mapping[str, Any] = {} if (kind, name) == ANY else {kind: name}
        found += [Factor(part=part, value=round(float(value), 4), **where) for part, value in zip(PARTS, row, strict=True) if abs(value - 1) >= 0.001]  # fmt: skip
    return found
