"""EPL's own configuration class takes every file, and our table of its keys is what it has.

EPL itself needs TensorFlow 1.x; its configuration needs only the constants beside it.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from inspect import getmembers
from types import ModuleType
from typing import Any

import pytest

from strategist.readers.foreign import keys_of
from tests.emitters.grid import distinct


@pytest.fixture(scope="module")
def config_class() -> Any:
    """epl.config.Config, without what the package imports first."""
    spec = find_spec("epl")
    assert spec is not None
    package = ModuleType("epl")
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules["epl"] = package
    from epl.config import Config

    return Config


def read_keys(config: Any) -> dict[str, Any]:
    """Every key that a configuration has, with its value."""
    sections = {name: section for name, section in getmembers(config) if not name.startswith("_")}
    return {
        f"{name}.{key}": value
        for name, section in sections.items()
        for key, value in getmembers(section)
        if not key.startswith("_")
    }


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["epl"])
def test_epl_takes_every_file(target: str, config_class: Any) -> None:
    """Its class accepts each file and then holds what stands in it; it takes any key, so that ours are compared with its own."""
    numbers = set()
    for text, _ in distinct(target, "epl.json"):
        document = json.loads(text)
        read = read_keys(config_class(document))
        assert set(document) <= set(read)
        lower = {key: value.lower() if isinstance(value, str) else value for key, value in document.items()}
        assert {key: read[key] for key in document} == lower
        numbers.add(document["pipeline.num_micro_batch"])
    assert len(numbers) > 1


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["epl"])
def test_epl_refuses_what_is_wrong(target: str, config_class: Any) -> None:
    """The class that takes our files refuses a number that is none, and a method of reduction that it does not have."""
    document = json.loads(distinct(target, "epl.json")[0][0])
    for wrong in ({"pipeline.num_micro_batch": "many"}, {"communication.gradients_reduce_method": "median"}):
        with pytest.raises(ValueError, match="error"):
            config_class(document | wrong)


def test_our_table_of_epl_is_its_class(config_class: Any) -> None:
    """The keys that we know are those that its configuration has."""
    assert set(keys_of("epl")) == set(read_keys(config_class()))
