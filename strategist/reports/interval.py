"""Why the interval of a step is as wide as it is: what of its width is whose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from strategist.document.estimate import TIME_TERMS
from strategist.document.plan import Plan
from strategist.facts.calibration import Part
from strategist.facts.profile import find_profile
from strategist.reports.brief import INDENT
from strategist.reports.lines import Line, wrapped
from strategist.timing.calibrated import part_seconds
from strategist.timing.intervals import Names, names_of, widths
from strategist.units import format_seconds

WORDS: Mapping[Part, str] = {
    "matmul": "matmul",
    "attention": "attention",
    "memory": "memory-bound work",
    "host": "launches",
    "network": "links and waiting",
}


def interval_account(plan: Plan) -> dict[str, Any] | None:
    """The share of the step and of its interval's width that is every part's, the widest first, and how many times as far as usual published runs
    on such devices and of such a framework lie; None where the interval is that of its owner's runs."""
    if plan.near:
        return None
    seconds = _seconds(plan)
    whole, wide = sum(seconds.values()), widths(seconds)
    ordered = sorted((part for part in seconds if seconds[part]), key=lambda part: -wide[part])
    return {
        "parts": [{"part": part, "step": seconds[part] / whole, "width": wide[part]} for part in ordered],
        "distances": {kind: own.times for kind, own in _names(plan).distances.items()},
    }


def interval_lines(plan: Plan, width: int) -> list[Line]:
    """The same in words."""
    step = plan.time.step
    ends = f"{format_seconds(step.low)} to {format_seconds(step.high)}"
    account = interval_account(plan)
    if account is None:
        near = plan.near[0]
        return wrapped("interval", f"{ends}: the middle 80 % of {near.runs} of your own runs", width, indent=INDENT)
    parts = ", ".join(f"{WORDS[own['part']]} {100 * own['width']:.0f} % ({100 * own['step']:.0f} % of the step)" for own in account["parts"] if own["width"] >= 0.005)  # fmt: skip
    text = f"{ends}: the middle 80 % of published steps made up alike. Of its width: {parts}."
    return wrapped("interval", f"{text} {_distances(plan)}", width, indent=INDENT)


def _distances(plan: Plan) -> str:
    found = _names(plan).distances
    device, framework = plan.cluster.slowest.gpu, find_profile(plan.strategy.profile)
    chip, own = found["chip"], found["framework"]
    return f"Runs on devices like {device.title} lie {chip.times:.2f} times as far from predictions as usual{_unseen(chip.runs)}, those of {framework.title} {own.times:.2f} times{_unseen(own.runs)}."


def _unseen(runs: int) -> str:
    return "" if runs else " (assumed: no published run is of it)"


def _names(plan: Plan) -> Names:
    return names_of(plan.cluster, plan.model, plan.strategy.profile)


def _seconds(plan: Plan) -> dict[Part, float]:
    """What the step takes in each part."""
    exposed = {name: np.zeros(1, np.int64) for name in TIME_TERMS}
    for term in plan.time.terms:
        exposed[term.name][0] = term.exposed_ns
    return {part: float(spent[0]) for part, spent in part_seconds(exposed).items()}
