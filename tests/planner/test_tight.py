"""Verdicts that lie within the errors of the formulas say so."""

from __future__ import annotations

import pytest

from strategist import predict, recommend
from strategist.document.prediction import Prediction

SAYS = {True: "may run out of memory all the same", False: "may fit all the same"}


def _predicted(micro_batch: int, hardware: str = "dgx-h100") -> Prediction:
    layout = f"dp=8,zero=2,micro_batch={micro_batch}"
    return predict("llama-3.2-3b", hardware, strategy=layout, global_batch=8 * micro_batch, seq_len=2048)


@pytest.mark.parametrize("micro_batch", range(1, 17))
def test_a_verdict_within_known_errors_is_called_tight(micro_batch: int) -> None:
    """The warning is there exactly where the device's size lies in the peak's interval, and turns with the verdict."""
    found = _predicted(micro_batch)
    said = [hint.sentence for hint in found.hints if hint.code == "W_TIGHT_MEMORY"]
    peak, size = found.memory.peak, found.memory.capacity_bytes
    assert bool(said) == (peak.low <= size <= peak.high)
    assert all(SAYS[found.fits] in sentence for sentence in said)


def test_growing_batches_are_clear_then_tight_then_clear() -> None:
    """As the micro-batch grows, what fits clearly becomes what fits tightly, what misses tightly, and what clearly does not fit."""
    states = []
    for micro_batch in range(1, 24):
        found = _predicted(micro_batch)
        states.append((not found.fits, any(hint.code == "W_TIGHT_MEMORY" for hint in found.hints)))
    order = [(False, False), (False, True), (True, True), (True, False)]
    assert list(dict.fromkeys(states)) == [state for state in order if state in states]
    assert {(False, False), (True, False)} < set(states)


def test_plans_near_the_limit_say_so() -> None:
    """A search fills devices: its plan has the warning where its own interval holds the device."""
    for model in ("llama-2-7b", "llama-3.2-1b", "llama-3.1-8b"):
        plan = recommend(model, "dgx-h100", global_batch=256)
        is_said = any(hint.code == "W_TIGHT_MEMORY" for hint in plan.hints)
        assert is_said == (plan.memory.peak.high >= plan.memory.capacity_bytes)


def test_hosts_have_no_such_limit() -> None:
    """Ranks on CPUs share their host's memory, whatever the interval."""
    found = predict("llama-debug", "cpu:4", strategy="dp=4", global_batch=8)
    assert not any(hint.code == "W_TIGHT_MEMORY" for hint in found.hints)
