"""Every row of the catalogue as a stranger's question: a sound plan or an error of its own, never a fault of ours."""

from __future__ import annotations

from typing import Any

import pytest

from strategist import recommend
from strategist.catalog import rows
from strategist.document.plan import Plan
from strategist.errors import StrategistError
from strategist.planner.check import faults
from strategist.units import format_count, format_gib, format_seconds, three_digits
from tests.examples import by_night

IMPOSSIBLE = {"NO_PLAN", "HARDWARE_FEATURE", "UNSUPPORTED_DEVICE", "BATCH_SPLIT", "NO_PATH"}
"""Codes that say that these machines cannot do this job."""


def answer(model: str, hardware: Any, **fields: Any) -> Plan | str:
    """The plan, or the code of the error."""
    try:
        return recommend(model, hardware, **fields)
    except StrategistError as error:
        return error.code


def is_sensible(plan: Plan) -> bool:
    """Ledgers add up, the peak is under what may be used, no device computes faster than it can, intervals hold."""
    step, peak = plan.time.step, plan.memory.peak
    fits = plan.memory.worst.device <= plan.memory.usable_bytes <= plan.memory.capacity_bytes
    ordered = step.low <= step.value <= step.high and peak.low <= peak.value <= peak.high
    return not faults(plan) and fits and ordered and 0 < plan.time.mfu < 1


def _length(row: dict[str, Any]) -> int:
    """1,024 tokens, or as many as a table of learned positions has room for."""
    known = [row[name] for name in ("pos_rows", "max_seq") if row.get(name) and row.get("pos") == "learned"]
    return min((1024, *known))


@pytest.mark.slow
@pytest.mark.parametrize("row", by_night(rows("models"), rows("models")[1::2]), ids=lambda row: row["name"])
def test_every_model_is_planned_or_refused(row: dict[str, Any]) -> None:
    """On four nodes of eight H100 each model has a sensible plan, is too large, or is no stack of layers at all."""
    length = None if row["kind"] == "cnn" else _length(row)
    found = answer(row["name"], "dgx-h100:4", seq_len=length, global_batch=64)
    if row["kind"] == "unet":
        assert found == "UNKNOWN_ARCH"
    else:
        assert found == "NO_PLAN" or (isinstance(found, Plan) and is_sensible(found)), found


@pytest.mark.slow
@pytest.mark.parametrize("row", rows("nodes"), ids=lambda row: row["name"])
def test_every_node_is_planned_for_or_refused(row: dict[str, Any]) -> None:
    """Two nodes of every type train a small model sensibly, or the error says what the devices lack."""
    found = answer("llama-3.2-1b", f"{row['name']}:2", seq_len=1024, global_batch=96)
    assert found in IMPOSSIBLE or (isinstance(found, Plan) and is_sensible(found)), found


@pytest.mark.parametrize("model", ["sd1.5-unet", "sdxl-unet"])
def test_models_without_a_stack_are_refused(model: str) -> None:
    """U-Nets are in the catalogue for their counts; a plan for one is an error with a way out."""
    with pytest.raises(StrategistError) as refused:
        recommend(model, "dgx-h100")
    assert (refused.value.code, refused.value.flag) == ("UNKNOWN_ARCH", "--model")
    assert "catalog" in (refused.value.hint or "")


@pytest.mark.slow
def test_a_batch_that_does_not_divide_is_offered_a_near_one() -> None:
    """Where data-parallel ranks go unused because the batch does not divide, the nearest batch that does is tried."""
    with pytest.raises(StrategistError) as refused:
        recommend("2T", "dgx-gb200-nvl72-tray:72", global_batch=2048)
    fixes = getattr(refused.value, "fixes", ())
    assert any(fix.startswith("--global-batch 2304 ") for fix in fixes), fixes
    assert isinstance(answer("2T", "dgx-gb200-nvl72-tray:72", global_batch=2304), Plan)


@pytest.mark.slow
@pytest.mark.parametrize("row", by_night(rows("nodes"), rows("nodes")[1::2]), ids=lambda row: row["name"])
def test_a_single_node_never_lacks_a_network(row: dict[str, Any]) -> None:
    """A model that is too large for one node is never refused because nothing is known that joins such nodes."""
    found = answer("405B", row["name"], precision="fp32", seq_len=1024, global_batch=64)
    assert found in IMPOSSIBLE - {"NO_PATH"} or (isinstance(found, Plan) and is_sensible(found)), found


@pytest.mark.slow
def test_what_was_fixed_is_named_where_dropping_it_helps() -> None:
    """A change that gives up pins says which: the user may never have typed --pin."""
    with pytest.raises(StrategistError) as refused:
        recommend("7B", "dgx-h100", micro_batch=256)
    assert getattr(refused.value, "fixes", ("",))[0].startswith("without micro_batch=256 ")


@pytest.mark.parametrize("value", [0.00123, 0.123, 1.5, 99.95, 999.4, 999.6, 1000, 1512, 9999, 123456])
def test_figures_are_never_in_powers_of_ten(value: float) -> None:
    """People read 1512 s, not 1.51e+03 s, and the figure is right to three digits."""
    words = three_digits(value)
    assert "e" not in words
    assert float(words) == pytest.approx(value, rel=0.005)
    assert not any("e+" in word for word in (format_seconds(value), format_count(value), format_gib(value * 2**30)))
