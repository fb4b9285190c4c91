"""The outer surface is what was recorded."""

from __future__ import annotations

import pytest

from tests.golden.record import FOLDER, GOLDEN


@pytest.mark.parametrize("name", GOLDEN)
def test_the_surface_is_as_recorded(name: str) -> None:
    """Public names, help pages and reports change knowingly: `python -m tests.golden.record`, then read the difference."""
    assert GOLDEN[name]() == (FOLDER / name).read_text(encoding="utf-8")


def test_every_recorded_file_is_asked_for() -> None:
    """No file is left over from a question that nobody asks any more."""
    recorded = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.txt")}
    assert recorded == set(GOLDEN)
