"""References of OmegaConf are the values that they name."""

from __future__ import annotations

from typing import Any

import pytest

from strategist.readers.references import LONGEST, resolved


@pytest.mark.parametrize(
    ("table", "value"),
    [
        ({"x": "${variables.length}", "variables": {"length": 2048}}, 2048),
        ({"x": "${a}", "a": "${b}", "b": "${c}", "c": 7}, 7),
        ({"x": "a-${b}-${b}", "b": 3}, "a-3-3"),
        ({"x": "${nowhere}"}, "${nowhere}"),
        ({"x": "${a}", "a": {"b": 1}}, "${a}"),
        ({"x": "${oc.env:HOME}"}, "${oc.env:HOME}"),
        ({"x": "${a}", "a": False}, False),
        ({"x": "n${a}", "a": 0}, "n0"),
    ],
)
def test_a_reference_is_what_it_names(table: dict[str, Any], value: object) -> None:
    """A number stays one; what names no word or number stays as it is written."""
    assert resolved(table)["x"] == value


def test_references_inside_lists_and_sections_are_put_in() -> None:
    """At any depth."""
    assert resolved({"a": 1, "s": {"list": [{"x": "${a}"}]}})["s"] == {"list": [{"x": 1}]}


def test_references_that_lead_round_or_grow_come_to_an_end() -> None:
    """The first stay references; the others stop at a length that no word of a configuration has."""
    assert "$" in resolved({"a": "${b}", "b": "${a}"})["a"]
    doubled = {f"k{n}": f"${{k{n + 1}}}" * 2 for n in range(40)} | {"k40": "x" * 50}
    assert all(len(str(value)) <= LONGEST for value in resolved(doubled).values())
