"""No configuration, however broken, gets anything but a shape that adds up or a sentence with a code."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategist.errors import StrategistError
from strategist.facts.families import FAMILIES
from strategist.facts.families.vision_language import WRAPPERS
from strategist.facts.layers import build_layer
from strategist.facts.model import layer_sequence
from strategist.facts.model_config import shape_from_config
from strategist.facts.parameters import count, outer_parameters
from tests.examples import examples

FILES = sorted((Path(__file__).parent.parent / "data" / "configs").glob("*.json"))
CONFIGS = [json.loads(file.read_text()) for file in FILES]
TYPES = [name for family in FAMILIES for name in family.readers] + list(WRAPPERS)
KEYS = sorted({key for values in CONFIGS for key in values} | {"layer_types", "attention_types", "moe_layers"})

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from((10**4, 10**6, 10**9, 10**40, -(10**9))),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(("32", "auto", "relu", "full_attention", "\x1b[31m")),
)
JUNK = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=8)  # fmt: skip


def places(values: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything inside a configuration."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    return [place for key, value in items for place in ((*path, key), *places(value, (*path, key)))]


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    values: dict[str, Any] = copy.deepcopy(draw(st.sampled_from(CONFIGS)))
    for _ in range(draw(st.integers(1, 3))):
        *outer, key = draw(st.sampled_from(places(values)))
        holder: Any = values
        for step in outer:
            holder = holder[step]
        if draw(st.booleans()) and isinstance(holder, dict):
            del holder[key]
        else:
            holder[key] = draw(JUNK)
    return values


def assert_answered(values: Any) -> None:
    """The answer is a shape whose count adds up, or a StrategistError with exit code 2 and no raw control character."""
    try:
        shape = shape_from_config(values)
    except StrategistError as error:
        assert error.exit_code == 2
        assert "\x1b" not in str(error) + str(error.hint) + str(error.value)
        return
    layers = sum(build_layer(shape, kind).parameters for kind in layer_sequence(shape))
    assert count(shape).total == layers + outer_parameters(shape).total > 0
    assert 0 < count(shape).active <= count(shape).total
    assert "\x1b" not in shape.name + "".join(shape.notes)


@pytest.mark.slow
@examples(400)
@given(mutated())
def test_mutated_configurations_are_answered(values: dict[str, Any]) -> None:
    """Real configurations with keys deleted or replaced by junk are read correctly or refused politely."""
    assert_answered(values)


@pytest.mark.slow
@examples(200)
@given(st.sampled_from(TYPES), st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=6), JUNK, max_size=12))
def test_invented_configurations_are_answered(model_type: str, values: dict[str, Any]) -> None:
    """Invented configurations of every known model_type are read or refused, never crash."""
    assert_answered(values | {"model_type": model_type})


@examples(100)
@given(JUNK)
def test_anything_at_all_is_answered(values: Any) -> None:
    """Any JSON value whatever is answered."""
    assert_answered(values)
