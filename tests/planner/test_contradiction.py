"""Pins that no layout has together: the error names as few as contradict each other, and values that do not."""

from __future__ import annotations

import re
from typing import Any

import pytest

from strategist import recommend
from strategist.errors import ImpossibleError, NoPlanError

JOB: dict[str, Any] = {"model": "llama-3.1-8b", "hardware": "dgx-h100", "global_batch": 256}


def refused(**more: Any) -> ImpossibleError:
    """The error of the job with these words."""
    with pytest.raises(ImpossibleError) as caught:
        recommend(**JOB | more)
    return caught.value


@pytest.mark.parametrize(
    ("pins", "named", "other"),
    [
        ("pp=1,schedule=1f1b,micro_batch=2", {"pp=1", "schedule=1f1b"}, "With pp=1 schedule is none."),
        ("tp=1,recompute=full,sequence_parallel=1", {"tp=1", "sequence_parallel=1"}, "tp is 2, 4 or 8."),
        ("zero=2,dp=1,tp=8", {"zero=2", "tp=8"}, "With tp=8 zero is 0."),
        ("offload=optimizer,zero=0", {"offload=optimizer", "zero=0"}, "With offload=optimizer zero is 2."),
        ("tp=4,pp=4,zero=1", {"tp=4", "pp=4"}, "With pp=4 tp is 1 or 2."),
        ("loss=chunked,tp=2", {"loss=chunked", "tp=2"}, "With loss=chunked tp is 1."),
    ],
)
def test_only_pins_that_contradict_each_other_are_named(pins: str, named: set[str], other: str) -> None:
    """As few as there are, and for each what the others leave open."""
    error = refused(pin=pins)
    assert error.code == "NO_PLAN"
    assert set(str(error.value).split(", ")) == named
    assert other in (error.hint or "")


@pytest.mark.parametrize("pins", ["pp=1,schedule=1f1b", "zero=2,dp=1,tp=8", "dp_shard=4,dp_replicate=4", "dp=8,tp=2"])
def test_every_value_that_is_offered_has_layouts(pins: str) -> None:
    """With any of them in place of the pin there is a plan, or none that fits, or a rule that forbids it: never no layout."""
    said = dict(part.split("=") for part in pins.split(","))
    offered = re.findall(r"With (\S+) (\w+) is ([^.]+)\.", refused(pin=pins).hint or "")
    assert offered
    for beside, key, values in offered:
        for value in re.split(r", | or ", values):
            assert value != said[key]
            try:
                recommend(**JOB, pin=f"{beside},{key}={value}")
            except ImpossibleError as error:
                assert isinstance(error, NoPlanError) or "rule" in str(error.hint)


def test_a_batch_is_blamed_only_where_it_is_the_cause() -> None:
    """A micro-batch that divides everything beside two pins that contradict each other is left out of it; one that divides nothing is named."""
    assert refused(pin="micro_batch=2,pp=1,schedule=1f1b").code == "NO_PLAN"
    assert refused(micro_batch=3).code == "BATCH_SPLIT"
    both = refused(pin="micro_batch=64,accumulation=64")
    assert (both.code, "With accumulation=64 micro_batch is 1, 2 or 4." in str(both.hint)) == ("BATCH_SPLIT", True)


def test_techniques_that_nothing_does_without_are_named() -> None:
    """On eight devices one of them must be there; what is left out beside them is not to blame."""
    error = refused(forbid="recompute,dp,tp,pp,ep")
    assert str(error).startswith("No layout of 8 devices does without dp, tp and pp")


def test_a_pinned_accumulation_is_offered_the_batch_that_it_has_room_for() -> None:
    """Three micro-batches of 256 sequences and more are too large on eight devices; of 24 they are one sequence each, which fits."""
    error = refused(pin="accumulation=3", global_batch=None)
    assert isinstance(error, NoPlanError)
    assert any(fix.startswith("--global-batch 24 ") for fix in error.fixes)
    assert recommend(**JOB | {"pin": "accumulation=3", "global_batch": 24}).strategy.accumulation == 3


@pytest.mark.parametrize(
    ("pins", "sentence", "hint"),
    [
        ("pp=2,stage_split=3/4,recompute=1/1", "has stage_split=3/4", "The stages own 7 layers so, and the model has 32."),
        ("pp=4,recompute=3/1", "has pp=4 and recompute=3/1 together", "With recompute=3/1 pp is 2."),
        ("pp=1,recompute=by-stage", "has pp=1 and recompute=by-stage together", "With recompute=by-stage pp is 2, 4 or 8."),
        ("pp=2,stage_split=balanced", "stage_split=balanced goes with the layers", "Add recompute=by-stage to --pin."),
        ("pp=2,stage_split=16/16", "stage_split=16/16 goes with the layers", "Add recompute=A/B with a number for every stage"),
    ],
)  # fmt: skip
def test_numbers_for_every_stage_are_one_pin(pins: str, sentence: str, hint: str) -> None:
    """They are named as they were typed, and what balanced stages need beside them is said."""
    error = refused(pin=pins)
    assert sentence in str(error)
    assert hint in (error.hint or "")
