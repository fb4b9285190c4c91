"""Profiles of the property tests: `pytest --hypothesis-profile=nightly` looks at ten times as many cases."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("nightly", max_examples=1_000, deadline=None)
