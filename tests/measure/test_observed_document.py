"""The Observed document: strict at the door, exact in its sums."""

from __future__ import annotations

from typing import Any

import pytest

from strategist.document.estimate import MemoryTerm
from strategist.document.load import observed_from
from strategist.document.observed import MomentBytes, Observed, ObservedMemory, RankObservation
from strategist.document.write import as_document
from strategist.errors import StrategistError


def _moment(name: str, **sizes: int) -> MomentBytes:
    terms = tuple(MemoryTerm(term, size, "traced") for term, size in sizes.items())
    return MomentBytes(moment=name, module="", during="forward", operator="aten::mm", terms=terms)


def _rank(stage: int, *moments: MomentBytes) -> RankObservation:
    memory = ObservedMemory(moments=moments, modules=(), reserved=2**20, reserved_basis="modelled")
    return RankObservation(
        kind=f"stage {stage}", rank=stage, stage=stage, memory=memory, collectives=(), tiers=(), operators=(),
        substitutions=(), seconds=1.0, process_bytes=2**20,
    )  # fmt: skip


def _observed() -> Observed:
    light = _rank(0, _moment("loss", parameters=3, activations=4), _moment("optimizer step", parameters=3))
    heavy = _rank(1, _moment("loss", parameters=30))
    return Observed(made_by="tests", rung="traced", plan="sha256:0", torch="2", model="m", ranks=(light, heavy))


def test_a_document_survives_the_door() -> None:
    """Written and read again it is equal."""
    assert observed_from(as_document(_observed()), "OBSERVED") == _observed()


def test_the_peak_is_the_worst_moment_of_the_worst_rank() -> None:
    """Terms add up; the largest sum wins."""
    observed = _observed()
    assert observed.ranks[0].memory.peak.allocated == 7
    assert observed.worst is observed.ranks[1]
    assert observed.of_stage(0) is observed.ranks[0]
    assert observed.of_stage(5) is None


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"format": "strategist-observed/2"}, "SCHEMA_VERSION"),
        ({"format": "strategist-plan/1"}, "KIND"),
        ({"rung": "guessed"}, "CHOICE"),
        ({"surprise": 1}, "UNKNOWN_KEY"),
        ({"torch": 2}, "TYPE"),
        ({"ranks": [{"kind": "x"}]}, "MISSING"),
    ],
)
def test_the_door_is_strict(changes: dict[str, Any], code: str) -> None:
    """Another version, another kind, unknown words and keys, wrong types and missing fields are refused."""
    with pytest.raises(StrategistError) as refusal:
        observed_from(as_document(_observed()) | changes, "OBSERVED")
    errors = [refusal.value, *refusal.value.also]
    assert code in [error.code for error in errors]


def test_negative_bytes_are_refused() -> None:
    """Nothing in an observation is below nothing."""
    document = as_document(_observed())
    document["ranks"][0]["memory"]["reserved"] = -1
    with pytest.raises(StrategistError) as refusal:
        observed_from(document, "OBSERVED")
    assert refusal.value.code == "NEGATIVE"
