"""Replicas as threads: what the formulas say of device 0 is what its program takes."""

from __future__ import annotations

import pytest

from strategist import recommend
from strategist.document.estimate import MemoryLedger
from strategist.errors import ImpossibleError
from strategist.measure.rehearse import rehearse
from strategist.measure.trace import trace
from strategist.verify import traced_ledger

pytestmark = pytest.mark.slow

EXACT, NEAR = 1e-3, 2e-2
STATES = ("parameters", "gradients", "optimizer")
JOB = {"seq_len": 256, "pin": "replicas=threads,recompute=none,micro_batch=1"}


@pytest.mark.parametrize(("rounds", "precision"), [(1, "fp32"), (3, "bf16")])
def test_device_0_holds_what_is_predicted(rounds: int, precision: str) -> None:
    """Weights, gradients and optimizer within 0.1 %, the sums and everything else within 2 %; the trace says what is not in it."""
    plan = recommend("distilgpt2", "dgx-h100", global_batch=8 * rounds, precision=precision, **JOB)
    seen = trace(plan)
    (device,) = seen.ranks
    assert device.kind == "device 0"
    assert "threads-of-devices" in {row.name for row in device.substitutions}
    predicted, traced = (_tensors(ledger) for ledger in (plan.memory, traced_ledger(plan.memory, seen)))
    assert predicted.keys() == traced.keys()
    for term, size in predicted.items():
        assert size == pytest.approx(traced[term], rel=EXACT if term in STATES else NEAR), term
    assert sum(predicted.values()) == pytest.approx(sum(traced.values()), rel=NEAR)


def _tensors(ledger: MemoryLedger) -> dict[str, int]:
    """Bytes of tensors by term where the device holds most."""
    return {term.name: term.bytes for term in ledger.worst.terms if term.name not in ("runtime", "slack")}


def test_a_device_of_a_process_with_several_is_not_rehearsed() -> None:
    """One process drives all devices, so none can run alone."""
    plan = recommend("distilgpt2", "dgx-h100", global_batch=8, **JOB)
    with pytest.raises(ImpossibleError, match="one process drives all"):
        rehearse(plan, device="cpu")
