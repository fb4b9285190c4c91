"""`python -m strategist` is `strategist`."""

from strategist.cli import entry

entry()
