"""Parameter names as the bare model has them, whatever wraps it."""

from __future__ import annotations

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def plain_name(name: str) -> str:
    """`name` without the prefixes that recomputation and compilation insert."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
