"""The versions that a result depends on."""

from __future__ import annotations

import platform

import torch

import strategist


def versions() -> dict[str, str]:
    """Versions of this package, torch and Python, by name."""
    return {
        "strategist": strategist.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
