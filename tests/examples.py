"""How many cases a test looks at: a property all of its own number in the ci suite and a third in the fast one; a list all at night."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

USUAL = 100
"""Cases of the profile that the ci suite runs under; a property's own number is meant for it."""


def cases_of(count: int) -> int:
    """`count` under the usual and the nightly profile, fewer under `--hypothesis-profile=fast`, at least one."""
    return max(1, min(count, count * settings().max_examples // USUAL))


def examples(count: int, **options: Any) -> settings:
    """Settings of a property of `count` cases."""
    return settings(max_examples=cases_of(count), **options)


def by_night(values: Iterable[Any], some: Iterable[Any]) -> list[Any]:
    """All cases of a test, of which the ci suite leaves `some` to the nightly one: what they are made of is in others."""
    left = tuple(some)
    return [pytest.param(value, marks=pytest.mark.nightly) if value in left else value for value in values]
