"""A property is tried on a few examples every time and on hundreds of new ones every night."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings

from tests.examples import cases_of
from tests.strategies import CI, NIGHTLY

Check = Callable[..., None]


class Properties:
    """The properties of one file, in order."""

    def __init__(self) -> None:
        self.at_length: list[Any] = []

    def holds(self, examples: int, *drawn: Any) -> Callable[[Check], Check]:
        """Make a test of a check: `examples` derandomised ones here (fewer in the fast suite), and fifty times as many in the nightly list."""

        def finish(check: Check) -> Check:
            long: Any = settings(NIGHTLY, max_examples=50 * examples)(given(*drawn)(check))
            self.at_length.append(long)
            return settings(CI, max_examples=cases_of(examples))(given(*drawn)(check))

        return finish
