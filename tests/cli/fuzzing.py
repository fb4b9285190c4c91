"""How many cases a property test of the command line looks at."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def cases(percent: int) -> settings:
    """This share of the cases that the profile asks for; `--hypothesis-profile=nightly` asks for many."""
    return settings(
        max_examples=settings().max_examples * percent // 100,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
