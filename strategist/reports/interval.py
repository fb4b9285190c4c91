"""Why the interval of a step is as wide as it is: what of its width is whose."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from strategist.document.estimate import TIME_TERMS
from strategist.document.plan import Costed
from strategist.facts.calibration import Part
from strategist.facts.profile import find_profile
from strategist.reports.brief import INDENT
from strategist.reports.lines import Line, line, wrapped
from strategist.timing.calibrated import parts_of_one
from strategist.timing.intervals import Names, names_of, published_interval, widths
from strategist.units import format_seconds

WORDS: Mapping[Part, str] = {
    "matmul": "matmul",
    "attention": "attention",
    "memory": "memory-bound work",
    "host": "launches",
    "network": "links and waiting",
}
ROUNDED = 1e-6
"""How far the ends of an interval in a file may be from what its terms give."""


def interval_account(plan: Costed) -> dict[str, Any] | None:
    """The share of the step and of its interval's width that is every part's, the widest first, and how many times as far as usual published runs
    on such devices and of such a framework lie; None where the interval is not theirs: that of its owner's runs, or of another version's rows."""
    seconds, names, step = _seconds(plan), _names(plan), plan.time.step
    theirs = published_interval(names, seconds)
    ends = ((step.low, theirs.low), (step.high, theirs.high))
    if not all(math.isclose(end, step.value * factor, rel_tol=ROUNDED) for end, factor in ends):
        return None
    whole, wide = sum(seconds.values()), widths(seconds)
    ordered = sorted((part for part in seconds if seconds[part]), key=lambda part: -wide[part])
    return {
        "parts": [{"part": part, "step": seconds[part] / whole, "width": wide[part]} for part in ordered],
        "distances": {kind: own.times for kind, own in names.distances.items()},
    }


def interval_lines(plan: Costed, width: int) -> Iterator[Line]:
    """The same in words; nothing of an interval that is not of published runs."""
    account = interval_account(plan)
    if account is None:
        return
    yield line("")
    ends = f"{format_seconds(plan.time.step.low)} to {format_seconds(plan.time.step.high)}"
    parts = ", ".join(f"{WORDS[own['part']]} {100 * own['width']:.0f} % ({100 * own['step']:.0f} % of the step)" for own in account["parts"] if own["width"] >= 0.005)  # fmt: skip
    text = f"{ends}: the middle 80 % of published steps made up alike. Of its width: {parts}."
    yield from wrapped("interval", f"{text} {_distances(plan)}", width, indent=INDENT)


def _distances(plan: Costed) -> str:
    found = _names(plan).distances
    device, framework = plan.cluster.slowest.gpu, find_profile(plan.strategy.profile)
    chip, own = found["chip"], found["framework"]
    return f"Runs on devices like {device.title} lie {chip.times:.2f} times as far from predictions as usual{_unseen(chip.runs)}, those of {framework.title} {own.times:.2f} times{_unseen(own.runs)}."


def _unseen(runs: int) -> str:
    return "" if runs else " (assumed: there are none)"


def _names(plan: Costed) -> Names:
    return names_of(plan.cluster, plan.model, plan.strategy.profile)


def _seconds(plan: Costed) -> dict[Part, float]:
    """What the step takes in each part."""
    exposed = {name: np.zeros(1, np.int64) for name in TIME_TERMS}
    for term in plan.time.terms:
        exposed[term.name][0] = term.exposed_ns
    return parts_of_one(exposed)
