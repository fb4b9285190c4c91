"""The page of targets and the names that people know of targets which there are not."""

from __future__ import annotations

from collections import Counter

import pytest

from docs.targets_page import groups, targets_page
from strategist import StrategistError
from strategist.emitters import EMITTERS, find_emitter, proofs
from tests.source import ROOT


def test_the_page_has_every_target_with_its_proof() -> None:
    """Each target has a row with its axes, versions and proof, and the evidence of each proof is a place in the repository."""
    rows = {line.split("|")[1].strip(): line for line in targets_page().splitlines() if line.startswith("| `")}
    assert set(rows) == {f"`{emitter.name}`" for emitter in EMITTERS}
    for emitter in EMITTERS:
        proof = proofs()[emitter.name]
        assert f"| {', '.join(emitter.axes)} | {emitter.versions} | {proof['proof']} |" in rows[f"`{emitter.name}`"]
        assert (ROOT / proof["evidence"]).exists()


def test_the_old_launcher_is_translated() -> None:
    """torch.distributed.launch is no target: whoever asks for it is told torchrun, and how its words translate."""
    with pytest.raises(StrategistError, match="no target 'torch-launch'") as refused:
        find_emitter("torch-launch")
    assert "emit --to torchrun" in refused.value.hint
    assert "LOCAL_RANK" in refused.value.hint


def test_proofs_are_what_the_log_shows() -> None:
    """The proof of a target that the log has tests of follows from how they ended, and is of the day and commit of the log."""
    for log in groups().values():
        for target in {test["target"] for test in log["tests"]} - {None}:
            own = [test for test in log["tests"] if test["target"] == target]
            levels = {level: {t["outcome"] for t in own if t["level"] == level} for level in ("trained", "parsed")}
            shown = next((level for level, outcomes in levels.items() if outcomes == {"passed"}), "keys")
            assert (proofs()[target]["proof"], proofs()[target]["run"]) == (
                shown,
                f"{log['date']} at {log['commit'][:7]}",
            )


def test_as_many_targets_are_proven_as_promised() -> None:
    """24 targets or more are emitted, code of the framework itself accepts 16 or more, and 12 or more were trained with."""
    found = Counter(proof["proof"] for proof in proofs().values())
    assert found.total() >= 24
    assert found["parsed"] + found["trained"] >= 16
    assert found["trained"] >= 12
