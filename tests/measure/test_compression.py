"""Compressed gradients, traced: hooks send and hold what the formulas say."""

from __future__ import annotations

NEAR = 2e-2
