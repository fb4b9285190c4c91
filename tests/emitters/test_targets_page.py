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
    """Each target's proof follows from the tests of the committed log, all of which ran at one commit, and the bars of targets are met."""
    log = groups()
    tests = [test for group in log.values() for test in group["tests"]]
    for emitter in EMITTERS:
        own = [test for test in tests if test["target"] == emitter.name]
        levels = {level: {t["outcome"] for t in own if t["level"] == level} for level in ("trained", "parsed")}
        shown = next((level for level, outcomes in levels.items() if outcomes == {"passed"}), "keys")
        assert proofs()[emitter.name]["proof"] == shown, emitter.name
    assert len({group["commit"] for group in log.values()}) == 1
    found = Counter(proof["proof"] for proof in proofs().values())
    assert found.total() >= 24
    assert found["parsed"] + found["trained"] >= 16
    assert found["trained"] >= 12
