"""Profiles of the property tests: `pytest --hypothesis-profile=nightly` looks at ten times as many cases, `fast` at a third.

No test is timed: on a busy machine any example may take long."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.register_profile("nightly", max_examples=1_000, deadline=None)
settings.register_profile("fast", max_examples=33, deadline=None)
settings.load_profile("untimed")
