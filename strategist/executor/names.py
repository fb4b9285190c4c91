"""Parameter names as the bare model has them, whatever wraps it."""

from __future__ import annotations

import re

CHUNK = "_chunk_"
"""Before the number of a chunk of an interleaved pipeline, in the names of the module that holds the chunks."""

WRAPPERS = re.compile(rf"_checkpoint_wrapped_module\.|_orig_mod\.|^{CHUNK}\d+\.")


def plain_name(name: str) -> str:
    """`name` without the prefixes that recomputation, compilation and interleaving insert."""
    return WRAPPERS.sub("", name)
