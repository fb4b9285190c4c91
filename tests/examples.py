"""How many generated cases a property looks at: all of its own number in the ci suite, a third in the fast one."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

USUAL = 100
"""Cases of the profile that the ci suite runs under; a property's own number is meant for it."""


def cases_of(count: int) -> int:
    """`count` under the usual and the nightly profile, fewer under `--hypothesis-profile=fast`, at least one."""
    return max(1, min(count, count * settings().max_examples // USUAL))


def examples(count: int, **options: Any) -> settings:
    """Settings of a property of `count` cases."""
    return settings(max_examples=cases_of(count), **options)
