"""`diff`: nothing that differs is passed over, nothing else is told, and the exit code says which it was."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from strategist.document.difference import NAMES, differences
from tests.cli.bad_inputs import written
from tests.cli.harness import SMALL, call, plan_file, plan_text

OTHER = (*SMALL, "--pin", "pp=2")
RICH = ("--model", "mixtral-8x7b", "--hardware", "dgx-h100:2")

NAMED = st.lists(st.fixed_dictionaries({"name": st.sampled_from("abc"), "bytes": st.integers(0, 2)}), max_size=3)
LEAVES = st.one_of(st.booleans(), st.integers(0, 2), st.sampled_from([0.5, None, "x"]))
DOCUMENTS = st.recursive(
    st.one_of(LEAVES, NAMED),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("pq"), inner, max_size=2)),
    max_leaves=8,
)
"""Few values, so that equal ones, reordered ones and namesakes are drawn often."""


A, B, C = ({"name": name, "bytes": size} for name, size in zip("abc", (0, 1, 1), strict=True))


@example([A, B, C], [A, C, B])
@example([A, A | {"bytes": 1}], [A | {"bytes": 2}, A | {"bytes": 1}])
@example([A, A | {"bytes": 1}], [A])
@example({"p": True}, {"p": 1})
@example([0.0, 1], [False, 1])
@given(DOCUMENTS, DOCUMENTS)
def test_there_is_a_difference_exactly_where_the_text_differs(old: Any, new: Any) -> None:
    """Two documents have no difference exactly when their canonical JSON is the same text."""
    same = json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True)
    assert (list(differences(old, new)) == []) == same


@given(DOCUMENTS, DOCUMENTS)
def test_the_way_back_is_the_mirror(old: Any, new: Any) -> None:
    """What is new one way is gone the other way, at the same places with the same values."""
    mirrored = {"added": "removed", "removed": "added"}
    there = sorted((d.path, d.kind, json.dumps([d.old, d.new])) for d in differences(old, new))
    back = sorted((d.path, mirrored.get(d.kind, d.kind), json.dumps([d.new, d.old])) for d in differences(new, old))
    assert there == back


def leaves(value: Any, path: str = "$") -> Iterator[tuple[str, Any, Any]]:
    """(field, container, key) of every leaf."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in pairs:
        if isinstance(item, (dict, list)):
            yield from leaves(item, str(key))
        else:
            yield str(key), value, key


@pytest.mark.slow
def test_one_changed_leaf_is_one_difference() -> None:
    """Whatever single figure or word of a plan is changed, that change and nothing else is told, with both values."""
    plan = json.loads(plan_text(*RICH))
    other = copy.deepcopy(plan)
    for field, container, key in leaves(other):
        before = container[key]
        container[key] = "changed"
        found = list(differences(plan, other))
        container[key] = before
        assert found, field
        if field not in NAMES and not isinstance(container, list):
            assert [(d.kind, d.old, d.new) for d in found] == [("changed", before, "changed")], field
            assert found[0].path.endswith(f".{field}")


def test_a_plan_is_the_same_as_itself(tmp_path: Path) -> None:
    """The same file twice ends with 0 and says so."""
    path = plan_file(tmp_path)
    ran = call("diff", path, path)
    assert (ran.code, ran.out) == (0, "The plans are the same, field by field.\n")
    assert call("diff", path, path, "--json").document == {"same": True, "differences": []}


def test_other_plans_end_with_eight(tmp_path: Path) -> None:
    """Another layout ends with 8; the degree that changed is told as a field, a sentence and in the report."""
    old, new = plan_file(tmp_path), plan_file(tmp_path, *OTHER, name="new.json")
    ran = call("diff", old, new, "--json")
    assert (ran.code, ran.document["same"]) == (8, False)
    pipeline = next(d for d in ran.document["differences"] if d["path"] == "$.mesh.pp")
    assert (pipeline["kind"], pipeline["old"], pipeline["new"]) == ("changed", 1, 2)
    assert pipeline["sentence"] in " ".join(call("diff", old, new).out.split())
    assert (call("diff", old, new, "--quiet").code, call("diff", old, new, "--quiet").out) == (8, "")


def test_a_word_that_only_names_the_maker_counts(tmp_path: Path) -> None:
    """Even who made the plan is a difference: nothing is ignored."""
    plan = json.loads(plan_text(*SMALL)) | {"made_by": "somebody"}
    ran = call("diff", plan_file(tmp_path), written(tmp_path, "b.json", json.dumps(plan)), "--json")
    assert [d["path"] for d in ran.document["differences"]] == ["$.made_by"]


def test_nothing_of_a_plan_steers_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control characters of a hand-written plan are printed as their numbers."""
    monkeypatch.chdir(tmp_path)  # names without folders, which a narrow table would cut
    plan = json.loads(plan_text(*SMALL)) | {"made_by": "some\x1b[2Jbody"}
    written(tmp_path, "b\x1b.json", json.dumps(plan))
    plan_file(tmp_path, name="a.json")
    for ran in (call("diff", "a.json", "b\x1b.json"), call("compare", "a.json", "b\x1b.json")):
        assert "\x1b" not in ran.out
        assert "\\x1b" in ran.out


@pytest.mark.parametrize("place", [0, 1])
def test_a_file_that_is_no_plan_is_named(place: int, tmp_path: Path) -> None:
    """The error says which of the two files is no Plan."""
    files = [plan_file(tmp_path), plan_file(tmp_path, name="b.json")]
    files[place] = written(tmp_path, "c.json", '{"format": "strategist-prediction/1"}')
    ran = call("diff", *files, "--json")
    assert (ran.code, ran.error["code"], ran.error["flag"]) == (2, "E_KIND", ("OLD", "NEW")[place])
