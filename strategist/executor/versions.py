"""The versions that a result depends on."""

from __future__ import annotations

import platform
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

import strategist
from strategist.errors import StaleError


def versions() -> dict[str, str]:
    """Versions of this package, torch and Python, by name."""
    return {
        "strategist": strategist.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def require_same_versions() -> None:
    """Raise StaleError FACTS_DIFFER, on every rank, when ranks of the running process group have other versions than others."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, versions())
    for name in versions():
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, own in enumerate(everybody):
            ranks[own[name]].append(rank)
        if len(ranks) > 1:
            words = ", ".join(f"{version} on rank {', '.join(map(str, at))}" for version, at in ranks.items())
            raise StaleError(
                "FACTS_DIFFER",
                f"Ranks run different versions of {name}: {words}.",
                flag=name,
                value=words,
                hint="Install the same versions for every rank.",
            )
