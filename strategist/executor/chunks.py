"""The chunks of layers that one rank owns in an interleaved pipeline, and how everything else need not know of them.

With v virtual stages a rank owns v runs of layers far apart (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.2).
Each run is a model of its own, named as in the whole model. Steps treat one chunk after the other; optimizer, norms and
names see the module that holds all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import nn

from strategist.executor.names import CHUNK


class Chunks(nn.Module):
    """Holds the chunks of one rank, the one nearest to the embedding first; `plain_name` takes its prefix off names."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        super().__init__()
        for number, chunk in enumerate(chunks):
            self.add_module(f"{CHUNK}{number}", chunk)


def chunks_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """The chunks that `model` holds; `model` itself when it is not interleaved."""
    return tuple(model.children()) if isinstance(model, Chunks) else (model,)


def copy_structure(model: nn.Module) -> nn.Module:
    """Another module tree over the very same parameters and buffers: cutting one leaves the other whole."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
