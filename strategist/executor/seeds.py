"""Random generators that follow from names."""

from __future__ import annotations

import hashlib

import torch


def generator(device: torch.device | str, *name: object) -> torch.Generator:
    """A generator on `device` that depends on the parts of `name` and on nothing else.

    The name is hashed, because torch's CPU generator drops all but the low 32 bits of a seed, so that sums and shifts of
    small numbers collide.
    """
    digest = hashlib.sha256("/".join(str(part) for part in name).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:4], "big"))
