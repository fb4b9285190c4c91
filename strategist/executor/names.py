"""Parameter names as the bare model has them, whatever wraps it."""

from __future__ import annotations

import re
from collections.abc import Iterable

CHUNK = "_chunk_"
"""Before the number of a chunk of an interleaved pipeline, in the names of the module that holds the chunks."""

SLICE = "_slice_"
"""Before the number of a slice of a tiled linear layer, in the names of the module that holds the slices."""

WRAPPERS = re.compile(rf"_checkpoint_wrapped_module\.|_orig_mod\.|^{CHUNK}\d+\.")


def plain_name(name: str) -> str:
    """`name` without the prefixes that recomputation, compilation and interleaving insert."""
    return WRAPPERS.sub("", name)


def whole_name(name: str) -> str:
    """The name of the weight that a plain `name` is a slice of, or the name itself."""
    return re.sub(rf"\.{SLICE}\d+\.", ".", name)


def by_weight(names: Iterable[str]) -> dict[str, list[str]]:
    """Plain names in order, together with the other slices of their weight."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(whole_name(name), []).append(name)
    return found
