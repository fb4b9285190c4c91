"""Profiles of the property tests: `pytest --hypothesis-profile=nightly` looks at ten times as many cases, `fast` at a third;
`hunt` looks at a third too and does not make a failing case smaller, because somebody planted the fault (benchmarks/mutants.py).

No test is timed: on a busy machine any example may take long."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import Phase, settings

settings.register_profile("untimed", deadline=None)
settings.register_profile("nightly", max_examples=1_000, deadline=None)
settings.register_profile("fast", max_examples=33, deadline=None)
settings.register_profile("hunt", max_examples=33, deadline=None, phases=(Phase.explicit, Phase.generate))
settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """Modules and tests that were collected are garbage of no test: looking through them again and again takes a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether a module is left unread: all its tests are slow and slow tests were not asked for, so its imports (torch) would be for nothing."""
    if "not slow" not in config.getoption("markexpr") or collection_path.suffix != ".py":
        return None
    return True if "\npytestmark = pytest.mark.slow\n" in collection_path.read_text(encoding="utf-8") else None
