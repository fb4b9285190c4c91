"""Profiles of the property tests: `pytest --hypothesis-profile=nightly` looks at a hundred times as many cases."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("nightly", max_examples=10_000, deadline=None)
