"""The tests are tested: faults that planners have shipped with are planted, and a named test sees each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.mutants import Mutant, hunted, killed, mutants, planted, survivors
from benchmarks.record import ROOT, read


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)
def test_every_fault_can_still_be_planted(mutant: Mutant) -> None:
    """The text that a fault replaces stands in its file once, the fault is another text that compiles, and the test that must
    see it is there."""
    text = planted(mutant)
    assert text != (ROOT / mutant.file).read_text(encoding="utf-8")
    compile(text, mutant.file, "exec")
    file, _, name = mutant.test.partition("[")[0].partition("::")
    assert re.search(rf"^def {name}\b" if name else "", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)


def test_every_fault_was_seen() -> None:
    """The committed result is of all faults, by their names, and none survived."""
    found = read("mutants")["mutants"]
    assert [row["name"] for row in found] == [mutant.name for mutant in mutants()]
    assert len({row["name"] for row in found}) == len(found) >= 45
    assert survivors(found) == []


def test_a_fault_that_cannot_be_planted_is_refused() -> None:
    """A text that stands nowhere, or twice, is no place for a fault."""
    row = mutants()[0]
    for old in ("this text stands nowhere", "import"):
        with pytest.raises(ValueError, match="times in"):
            planted(row._replace(old=old))


@pytest.mark.slow
def test_the_hunt_tells_seen_from_unseen(tmp_path: Path) -> None:
    """A fault that changes what a test looks at is killed; one that changes nothing survives; one that breaks the collection of
    the test is not taken for a kill; and each is taken out again."""
    (tmp_path / "sums.py").write_text("def total(a, b):\n    return a + b\n", encoding="utf-8")
    (tmp_path / "test_sums.py").write_text("from sums import total\ndef test_total(): assert total(1, 2) == 3\n", encoding="utf-8")  # fmt: skip
    (tmp_path / "conftest.py").write_text('from hypothesis import settings\nsettings.register_profile("hunt")\n', encoding="utf-8")  # fmt: skip
    fault = Mutant("minus", "sums.py", "a + b", "a - b", "test_sums.py")
    ends = {"a - b": True, "b + a": False, "a +": False}
    assert {new: killed(fault._replace(new=new), tmp_path)["killed"] for new in ends} == ends
    assert (tmp_path / "sums.py").read_text(encoding="utf-8") == "def total(a, b):\n    return a + b\n"


@pytest.mark.nightly
def test_every_fault_is_seen() -> None:
    """Planted in a copy of today's source, each fault makes its test fail."""
    assert survivors(hunted(mutants())) == []
