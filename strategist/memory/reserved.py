"""What the caching allocator reserves in frameworks of units, whose segments are fixed.

A free block serves a request of its own stream that it is large enough for, and nothing else; large requests get segments of
their own, rounded up to 2 MiB (PyTorch 2.13, c10/cuda/CUDACachingAllocator.cpp: get_free_block, get_allocation_size). So a
stream reserves more than its tensors ever hold at once: blocks that are free when a larger request comes stay idle beside
it. Requests larger than anything before are few, and known: tensors of the vocabulary, and what units are gathered into and
reduced from. Streams are those of fully_shard: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
"""

from __future__ import annotations

import numpy as np

from strategist.columns import on_stages
from strategist.facts.job import Job
from strategist.facts.profile import BYTES
from strategist.memory.instant import NOWHERE
from strategist.memory.layers import Layers
from strategist.memory.logits import idle_bytes_CS, largest_bytes_CS
from strategist.memory.model_states import shards_state
from strategist.records import cached_property
from strategist.space.candidates import Mask, Reals
from strategist.space.shares import (
    Elements,
    Group,
    is_managed,
    is_plain_data_parallel,
    pieces_C,
    state_shards,
    vocabulary_elements,
)

SEGMENT = 2 << 20
"""Large segments are multiples of so many bytes."""


class Pools:
    """Bytes that the streams of a group's candidates reserve, (C, S) each. `settled` are gradients that the update finds."""

    def __init__(self, job: Job, group: Group, counts: Elements, layers: Layers, settled: Reals) -> None:
        self.job, self.group, self.layers, self.settled = job, group, layers, settled
        c = self.c = group.candidates
        self.counts = counts.padded(shards_state(c, 2)[:, None])
        self.compute, self.reduce, self.stored = (
            BYTES[f] for f in (job.formats.compute, job.formats.reduce, job.formats.parameter)
        )
        self.managed = is_managed(job, c)[:, None]
        self.shards_gradients = shards_state(c, 2)[:, None]

    def reserved(self, at_loss: Reals, ever: Reals) -> Reals:
        """Bytes of all streams, where tensors hold `at_loss` at most at the loss, and `ever` at any instant. Reduced gradients lie
        in the stream of reductions, at the loss those of earlier micro-batches; a layer that is on its way in that of gathering,
        where there is one."""
        under_way = np.where(self._gathers, self._one_layer, 0.0)
        at_loss = at_loss if self._several is NOWHERE else at_loss - self._standing
        main = np.maximum(at_loss + self._idle + self._outgrown, ever - self._reduced - under_way)
        return main + self.gathering + self.reducing

    @cached_property
    def _gathers(self) -> Mask:
        """Where units are gathered from other ranks, (C, 1)."""
        return self.managed & self.shards_gradients & (state_shards(self.c) > 1)[:, None]

    @cached_property
    def _reduces(self) -> Mask:
        """Where units are reduced, (C, 1): in a pipeline only with other data ranks."""
        return self.managed & ((self.group.pp == 1) | (self.c.data_parallel * self.c["cp"] > 1)[:, None])

    @cached_property
    def _several(self) -> Mask:
        """Where gradients of earlier micro-batches lie in the stream of reductions, (C, 1)."""
        if self.group.pp > 1 or self.job.profile.accumulates_whole:
            return NOWHERE
        return self._reduces & (self.c["accumulation"] > 1)[:, None]

    @cached_property
    def _reduced(self) -> Reals:
        return np.where(self._reduces, self.settled, 0.0)

    @cached_property
    def _standing(self) -> Reals:
        return np.where(self._several, self.settled, 0.0)

    @cached_property
    def reducing(self) -> Reals:
        """The stream of reductions: gradients, and a unit's result that is about to be added to those that stand."""
        if self._several is NOWHERE:
            return self._reduced
        parts = np.where(self.shards_gradients, state_shards(self.c)[:, None], 1)
        result = self.job.trainable * self.reduce * self._largest / parts
        return self._reduced + np.where(self._several, result, 0.0)

    @cached_property
    def gathering(self) -> Reals:
        """The stream of gathering: a unit's buffer stays until the next one's has arrived. Layers take turns in two, one of which is
        the embedding's where that is large enough; the last layer of an even number lies in it when the head's is due, and that
        of an odd number is taken to. Weights in another format are cast there first, shard by shard. A group of one rank copies where it
        computes."""
        before, behind = (
            self.counts.before.T,
            self.counts.behind.T,
        )  # stages in front: numpy's loops run along candidates
        first = _segments(self.compute * (before + behind if self._tied else before))
        layer, shards = _segments(self.compute * self.layers.packed * self._widest[:, 0]), state_shards(self.c)
        turns = np.where(first >= layer, 1.0, np.minimum(2.0, self.group.layers_S[:, None]))
        head = 0.0 if self._tied else _segments(self.compute * behind)
        casts = self.compute * self._largest.T / shards if self.compute != self.stored else 0.0
        held = first + turns * layer + np.where(layer < head, head, 0.0) + casts
        return np.where(self._gathers[:, 0], held, 0.0).T

    @cached_property
    def _idle(self) -> Reals:
        """Free blocks at the loss, all smaller than what it asks for: logits that were copied, what a layer's forward held and did
        not keep, and its gathered weights where they were given back."""
        return idle_bytes_CS(self.job, self.group) + self.layers.let_go + self._one_layer

    @cached_property
    def _one_layer(self) -> Reals:
        """A layer's gathered weights where they are given back, (C, 1)."""
        gives_back = self.managed & shards_state(self.c, 3)[:, None]
        return np.where(gives_back, self.compute * self.layers.packed * self._widest, 0.0)

    @cached_property
    def _outgrown(self) -> Reals:
        """The largest request of backward, where no tensor of the loss left a block for it: what a unit is reduced from; under
        autocast the head's gradient as it is cast."""
        request = np.where(self._reduces, self.job.trainable * self.reduce * self._largest, 0.0)
        plain = is_plain_data_parallel(self.job, self.c)[:, None]
        if self.compute != self.stored and plain.any():
            tables = vocabulary_elements(self.job.model, self.c["tp"], np.ones_like(self.c["tp"]))
            head = on_stages(self.job.trainable * self.stored * tables, self.group.is_last)
            request = np.where(plain, head, request)
        return np.where(request > largest_bytes_CS(self.job, self.group), request, 0.0)

    @property
    def _tied(self) -> bool:
        return self.job.model.tied and self.group.pp == 1

    @cached_property
    def _widest(self) -> Reals:
        """Elements of the widest layer, or slice of one, (C, 1)."""
        return self.counts.widest[:, None] / pieces_C(self.group)[:, None]

    @cached_property
    def _largest(self) -> Reals:
        """Elements of the largest unit."""
        before, behind = self.counts.before, self.counts.behind
        outer = before + behind if self._tied else np.maximum(before, behind)
        return np.maximum(outer, self._widest)


def _segments(size: Reals) -> Reals:
    """Bytes of the segment of a large request."""
    return np.ceil(size / SEGMENT) * SEGMENT
