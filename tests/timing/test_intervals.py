"""Intervals of a step: what they are mixed from, and what plans and explanations make of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategist import predict, recommend
from strategist.catalog import rows
from strategist.document.plan import Plan
from strategist.facts.clusters import load_cluster
from strategist.facts.models import load_model
from strategist.reports.interval import WORDS, interval_account
from strategist.reports.lines import text_of
from strategist.reports.text import explain_text
from strategist.timing.calibrated import PARTS
from strategist.timing.intervals import (
    UNKNOWN,
    Names,
    bounds_of_parts,
    distance_of,
    is_known,
    mixed,
    names_of,
    published_interval,
    widths,
)
from tests.strategies import CI

TIMED = tuple(part for part, terms in PARTS.items() if terms)
SECONDS = st.fixed_dictionaries({part: st.floats(0.001, 10.0) for part in TIMED})
USUAL = dict.fromkeys(TIMED, 1.0)


def test_every_part_with_seconds_has_an_interval_that_holds_its_prediction() -> None:
    """The catalogue, the calibration's parts and the words of explanations name the same; a product is closest to its prediction, a link farthest."""
    known = bounds_of_parts()
    assert set(known) == set(TIMED) == set(WORDS)
    assert all(low < 0.0 < high for low, high in known.values())
    width = {part: high - low for part, (low, high) in known.items()}
    assert min(width, key=lambda part: width[part]) == "matmul"
    assert max(width, key=lambda part: width[part]) == "network"


@pytest.mark.parametrize("part", TIMED)
def test_a_step_of_one_part_has_that_parts_interval(part: str) -> None:
    """Whatever its seconds are."""
    alone = {one: 3.0 * (one == part) for one in TIMED}
    assert mixed(bounds_of_parts(), alone, 1.0) == pytest.approx(dict(bounds_of_parts())[part])  # type: ignore[index]


@CI
@given(SECONDS, st.floats(0.1, 10.0), st.floats(0.2, 5.0))
def test_what_a_step_is_made_of_decides(seconds: dict[str, float], times: float, distance: float) -> None:
    """An interval is between those of its parts, does not ask how long the step is, grows with the distance, and its shares add up to it."""
    own = {part: seconds[part] for part in TIMED}
    low, high = mixed(bounds_of_parts(), own, 1.0)
    lows, highs = zip(*bounds_of_parts().values(), strict=True)
    assert min(lows) <= low <= max(lows) and min(highs) <= high <= max(highs)
    assert mixed(bounds_of_parts(), {part: times * own[part] for part in own}, 1.0) == pytest.approx((low, high))
    assert mixed(bounds_of_parts(), own, distance) == pytest.approx((distance * low, distance * high))
    assert sum(widths(own).values()) == pytest.approx(1.0)


def test_what_nobody_ran_lies_farther_than_usual() -> None:
    """Devices and frameworks without runs have one distance each, above 1; more runs that agree are closer to their predictions than none."""
    unknown = [distance_of(kind, "no such thing") for kind in ("chip", "framework")]
    assert [one.runs for one in unknown] == [0, 0]
    assert all(one.times > 1.0 for one in unknown)
    assert not is_known("framework", "no such thing") and is_known("framework", "nemo")
    often = published_interval(Names("9.0", "nemo"), USUAL)  # type: ignore[arg-type]
    never = published_interval(Names("no such chip", "no such framework"), USUAL)  # type: ignore[arg-type]
    assert never.low < often.low < 1.0 < often.high < never.high
    counted = [row for row in rows("distances") if row["runs"]]
    assert all(row["sources"] <= row["runs"] for row in counted)


def test_no_run_of_a_network_of_convolutions_is_known() -> None:
    """Its device and its framework have runs, but of language models."""
    h100 = load_cluster("dgx-h100")
    assert names_of(h100, load_model("llama-3-8b"), "nemo") == Names("9.0", "nemo")
    assert names_of(h100, load_model("resnet50"), "nemo") == Names(UNKNOWN, UNKNOWN)


def test_a_step_that_waits_more_has_the_wider_interval() -> None:
    """The same layout reduces its gradients once a step, whether it computes one micro-batch or 32 in between."""

    def ratio(global_batch: int) -> float:
        step = predict("llama-3-8b", "dgx-h100:4", strategy="dp=32,zero=1", global_batch=global_batch).time.step
        return step.high / step.low

    assert ratio(32) > 1.1 * ratio(1024)


def _plan() -> Plan:
    return recommend("llama-3-8b", "dgx-h100")


def test_explain_says_whose_the_width_is() -> None:
    """Shares of the step and of the width add up to 1 each, the widest first; their product with the distances is the plan's interval."""
    plan = _plan()
    account = interval_account(plan)
    assert account is not None
    for share in ("step", "width"):
        assert sum(own[share] for own in account["parts"]) == pytest.approx(1.0)
    assert account["parts"] == sorted(account["parts"], key=lambda own: -own["width"])
    far = math.prod(account["distances"].values())
    log_high = far * sum(own["step"] * bounds_of_parts()[own["part"]][1] for own in account["parts"])
    assert plan.time.step.high / plan.time.step.value == pytest.approx(math.exp(log_high))
    said = " ".join(text_of(explain_text(plan)).split())
    assert "Of its width:" in said and f"{WORDS[account['parts'][0]['part']]} {100 * account['parts'][0]['width']:.0f} %" in said  # fmt: skip


def test_nobody_accounts_for_an_interval_that_is_not_of_published_runs() -> None:
    """One's own runs, or another version's rows, made it then: nothing is said of its width."""
    plan = _plan()
    step = plan.time.step
    other = replace(plan, time=replace(plan.time, step=replace(step, low=0.97 * step.value, high=1.03 * step.value)))
    assert interval_account(other) is None
    assert "Of its width" not in text_of(explain_text(other))
