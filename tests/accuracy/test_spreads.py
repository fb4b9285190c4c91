"""The fit of how far steps lie from their predictions: it finds what errors were drawn with, and no source decides alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.spreads import NAMES_VARY, PARTS, Spreads, Timed, over_sources, score, spreads_of, weights

SURE, UNSURE = {"matmul": 0.95}, {"network": 0.6, "matmul": 0.35}


def run(source: str, value: float, made_of: dict[str, float] = SURE, framework: str = "nemo") -> Timed:
    """A run whose step is made of something, the rest attention."""
    rest = {part: made_of.get(part, 0.0) for part in PARTS}
    return Timed(source, "9.0", framework, rest | {"attention": 1.0 - sum(made_of.values())}, value)


def drawn(number: int, spread: dict[str, float], seed: int = 3) -> list[Timed]:
    """Runs of as many sources, half of them of products and half of waiting, whose errors are as far apart as said."""
    errors = np.random.default_rng(seed).standard_t(4, number)
    sort = [("matmul", SURE), ("network", UNSURE)]
    return [run(str(n), spread[sort[n % 2][0]] * error, sort[n % 2][1]) for n, error in enumerate(errors.tolist())]


def width(found: Spreads, made_of: dict[str, float], framework: str = "nemo") -> float:
    """How wide the interval of a run is."""
    low, high = found.bounds(run("", 0.0, made_of, framework))
    return high - low


def test_what_errors_were_drawn_with_is_found() -> None:
    """Where waiting goes wrong five times as far as products the intervals differ about as much, and where nothing differs hardly at all."""
    apart, alike = (spreads_of(drawn(400, {"matmul": 0.03, "network": far})) for far in (0.15, 0.03))
    assert 3.0 < width(apart, UNSURE) / width(apart, SURE) < 6.0
    assert 0.75 < width(alike, UNSURE) / width(alike, SURE) < 1.33


def test_four_of_five_runs_lie_inside() -> None:
    """On runs drawn the same way that the fit has not seen, whatever they are made of."""
    spread = {"matmul": 0.03, "network": 0.15}
    found, others = spreads_of(drawn(400, spread)), drawn(1000, spread, seed=4)
    for made_of in (SURE, UNSURE):
        own = [one for one in others if one.seconds == run("", 0.0, made_of).seconds]
        inside = [low <= one.value <= high for one, (low, high) in ((one, found.bounds(one)) for one in own)]
        assert np.mean(inside) == pytest.approx(0.8, abs=0.06)


def test_a_framework_whose_runs_lie_far_is_given_room() -> None:
    """As far as its many sources say, less far where one run does; one without any is as far as any may be."""
    usual = drawn(100, {"matmul": 0.05, "network": 0.05})
    far = [one._replace(source=f"far {n}", framework="far", value=4 * one.value) for n, one in enumerate(usual)]
    often, once = (spreads_of([*usual, *some]) for some in (far, far[:1]))
    ratio = [width(found, SURE, "far") / width(found, SURE) for found in (often, once)]
    assert ratio[0] > 2.5
    assert ratio[1] < 0.8 * ratio[0]
    found = spreads_of(usual)
    assert found.unknown == pytest.approx(math.exp(NAMES_VARY**2))
    assert width(found, SURE, "never seen") > width(found, SURE)


def test_a_source_of_many_runs_counts_like_five_at_the_most() -> None:
    """A thousand runs of one table do not make what twenty others say."""
    few = drawn(20, {"matmul": 0.1, "network": 0.1})
    many = [run("many", 0.001 * n / 1000.0) for n in range(1000)]
    assert sum(weights(many)) == pytest.approx(5.0, rel=0.01)
    alone, beside = spreads_of(few), spreads_of([*few, *many])
    assert width(beside, UNSURE) > 0.5 * width(alone, UNSURE)


def test_one_run_that_waited_for_something_else_does_not_decide() -> None:
    """Errors have tails: a run ten times as slow as predicted widens the interval of all by little."""
    runs = drawn(60, {"matmul": 0.05, "network": 0.05})
    spoilt = [*runs[:-1], runs[-1]._replace(value=math.log(10.0))]
    assert width(spreads_of(spoilt), SURE) < 1.3 * width(spreads_of(runs), SURE)


def test_the_score_is_least_for_the_interval_that_is_true() -> None:
    """Narrower ones pay for what they miss and wider ones for their width; sources count alike whatever their runs are."""
    values = np.random.default_rng(5).normal(0.0, 1.0, 20_000).tolist()
    mean = {half: np.mean([score(value, (-half, half)) for value in values]) for half in (0.8, 1.28, 1.9)}
    assert mean[1.28] == min(mean.values())
    assert over_sources([run("a", 0.0), run("b", 0.0), run("b", 0.0)], [1.0, 4.0, 6.0]) == pytest.approx(3.0)
