"""What the instants of a step are made of: kept activations, gradients that stand, gathered weights, units in reduction."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from strategist.document.estimate import MOMENTS
from strategist.facts.job import Job
from strategist.facts.profile import BYTES
from strategist.memory.activations import edges_CS, step_inputs_C, tables_C
from strategist.memory.backward import (
    Kept,
    is_brought_back,
    is_kept,
    is_last,
    layer_instants,
    residual_C,
)
from strategist.memory.logits import held_logits_CS, waiting_logits_CS
from strategist.memory.model_states import shards_state
from strategist.memory.situations import Situation
from strategist.records import dataclass
from strategist.space.candidates import Column, Mask, Reals
from strategist.space.shares import (
    Elements,
    Group,
    is_managed,
    is_plain_data_parallel,
    state_shards,
    vocabulary_elements,
)

LOSS, LAYERS, END, UPDATE = range(len(MOMENTS))
"""Places in MOMENTS."""


@dataclass(frozen=True, slots=True, eq=False)
class Instant:
    """Instants of one moment, and bytes by term: (C, S) each, with axes in front along which instants of one sort lie."""

    moment: int
    terms: Mapping[str, Reals]


class Layers:
    """The layers of a group's candidates in backward, the same in every pass. (C, S) each."""

    def __init__(self, job: Job, group: Group) -> None:
        self.job, self.group = job, group
        self.kept = Kept(job, group.candidates)
        self.one = self.kept.rows(is_kept)

    @cached_property
    def every(self) -> Reals:
        """What all layers keep of one micro-batch."""
        return self.group.layers_of(self.one)

    @cached_property
    def largest(self) -> Reals:
        """What the layer keeps that keeps most."""
        return _of_worst(self.group, self.one, self.one)

    @cached_property
    def last_matrix(self) -> Reals:
        """Elements of the largest last matrix of a feed-forward part."""
        last = self.kept.weights(is_last)
        return _of_worst(self.group, last, last)

    @cached_property
    def transient(self) -> Reals:
        """What the feed-forward part computes again, of the layer where that is most."""
        again = self.kept.rows(is_brought_back, "ffn", "inside", "product")
        return _of_worst(self.group, again, again)

    @cached_property
    def by_sort(self) -> LayerInstants:
        """The instants of one layer that can be its worst, of every sort, and what such a layer keeps."""
        ats = layer_instants(self.kept)
        temporaries, freed, weights = (
            np.stack(parts) for parts in zip(*((at.temporaries, at.freed, at.weights) for at in ats), strict=True)
        )
        is_product = np.array([at.is_product for at in ats])[:, None, None]
        return LayerInstants(temporaries, freed, weights, self.one, is_product)

    @cached_property
    def instants(self) -> LayerInstants:
        """The same on every stage, of the sort that is worst there."""
        ats = self.by_sort
        total = ats.temporaries - ats.freed + BYTES[self.job.formats.compute] * ats.weights
        return LayerInstants(
            temporaries=_of_worst(self.group, total, ats.temporaries),
            freed=_of_worst(self.group, total, ats.freed),
            weights=_of_worst(self.group, total, ats.weights),
            kept=_of_worst(self.group, total, np.broadcast_to(ats.kept, total.shape)),
            is_product=ats.is_product,
        )


@dataclass(frozen=True, slots=True, eq=False)
class LayerInstants:
    """Instants as in LayerInstant, and what the layer keeps, with axes of instants in front: of every sort of layer, (C, K), or of
    the one that is worst on each stage, (C, S)."""

    temporaries: Reals
    freed: Reals
    weights: Reals
    kept: Reals
    is_product: Mask


def _of_worst(group: Group, total: Reals, part: Reals) -> Reals:
    """`part` (..., C, K) of the sort of layer whose `total` is the largest on each stage, (..., C, S)."""
    return _of_sort(group, part, _worst_sort(group, total[..., None, :]))


def _worst_sort(group: Group, total: Reals) -> Column:
    """The sort of layer whose `total` (..., C, S or 1, K) is the largest of those on each stage, (..., C, S)."""
    if total.shape[-1] == 1:
        return np.zeros((*total.shape[:-2], len(group.stages)), np.int64)
    return np.where(group.layers_SK > 0, total, -np.inf).argmax(axis=-1)


def _of_sort(group: Group, part: Reals, sort: Column) -> Reals:
    """`part` (..., C, K) of one `sort` of layer on each stage, (..., C, S); nothing on stages without layers."""
    held: Mask = np.asarray((group.layers_SK > 0).any(axis=1))
    if part.shape[-1] == 1:
        return part * held
    return np.take_along_axis(np.broadcast_to(part, (*sort.shape[:-1], part.shape[-1])), sort, axis=-1) * held


class Step:
    """Backward passes of a group's candidates, one per situation. Bytes are (P, C, S), or (C, S) where all passes are alike,
    unless they say otherwise."""

    def __init__(
        self,
        job: Job,
        group: Group,
        counts: Elements,
        layers: Layers,
        at_rest: Reals,
        settled: Reals,
        situation: Situation,
    ) -> None:
        """`at_rest` are gradients while micro-batches follow each other, `settled` those that the update finds."""
        self.job, self.group, self.counts, self.at_rest, self.settled = job, group, counts, at_rest, settled
        self.layers, self.situation = layers, situation
        c = self.c = group.candidates
        formats = job.formats
        self.compute, self.reduce, self.stored = (
            BYTES[f] for f in (formats.compute, formats.reduce, formats.parameter)
        )
        self.piped = group.pp > 1
        self.plain = is_plain_data_parallel(c)[:, None]
        self.managed = is_managed(job, c)[:, None]
        self.reshards = shards_state(c, 3)[:, None]
        self.shards_gradients = shards_state(c, 2)[:, None]
        self.several = situation.stands
        self.buckets = self.plain & (c.data_parallel * c["cp"] > 1)[:, None]
        self.casts = self.compute != self.stored
        self.shards = state_shards(c)[:, None]
        self.tied = bool(job.model.tied and not self.piped)
        self.trained = job.trainable
        self.chunks = c["virtual_stages"][:, None]

    @cached_property
    def casts_here(self) -> Mask:
        """Where a weight's gradient is cast before it is accumulated, which lets go of what it was made from, (C, 1)."""
        return self.plain & self.casts | self.managed

    @cached_property
    def widest(self) -> Reals:
        """Elements of the widest layer, (C, 1)."""
        return self.counts.widest[:, None] / self.c["tiling"][:, None]

    @cached_property
    def first(self) -> Reals:
        """1 where the pass goes through the embedding."""
        return self.group.is_first[None, :] * self.situation.is_first * 1.0

    @cached_property
    def last(self) -> Reals:
        """1 where the pass goes through the head."""
        return self.group.is_last[None, :] * self.situation.is_last * 1.0

    @cached_property
    def head(self) -> Reals:
        """Elements of the head's matrix, where the pass goes through it."""
        return vocabulary_elements(self.job.model, self.c["tp"], np.ones_like(self.c["tp"]))[:, None] * self.last

    @cached_property
    def behind(self) -> Reals:
        """Elements of the unit of norm and head, where the pass goes through it."""
        return self.counts.behind * self.situation.is_last

    @cached_property
    def before(self) -> Reals:
        """Elements of the embedding's unit, where the pass goes through it."""
        return self.counts.before * self.situation.is_first

    @cached_property
    def others(self) -> Reals:
        """All that other passes in flight keep, and the step's tokens and labels."""
        s = self.situation
        kept = s.others * self._chunk + s.others_first * self._embedded + s.others_last * self._headed
        return kept + self.inputs

    @cached_property
    def activations(self) -> Reals:
        """All that is kept when this pass's backward begins."""
        return (
            self.others + self._chunk + self.situation.is_first * self._embedded + self.situation.is_last * self._headed
        )

    @cached_property
    def in_layers(self) -> Reals:
        """All that is kept when the layers' backward starts: what lies behind them is gone."""
        return self.activations - self.last * edges_CS(self.job, self.group)

    @cached_property
    def _chunk(self) -> Reals:
        """What one micro-batch keeps of one chunk inside."""
        return self.layers.every / self.chunks + tables_C(self.job)

    @cached_property
    def _embedded(self) -> Reals:
        """What the chunk with the embedding keeps more: its input does not lie in a receive buffer."""
        return self.stream * self.group.is_first[None, :] * self.piped

    @cached_property
    def _headed(self) -> Reals:
        """What the chunk with the head keeps more: final norm and the head's input, but no output to hand on."""
        return edges_CS(self.job, self.group) - self.stream * self.group.is_last[None, :] * self.piped

    @cached_property
    def held_logits(self) -> Reals:
        """The logits that a pipeline's last stage holds on to, and those of passes that wait for their backward."""
        waiting = self.situation.others_last * waiting_logits_CS(self.job, self.group)
        return self.last * held_logits_CS(self.job, self.group) + waiting

    @cached_property
    def inputs(self) -> Reals:
        """The step's tokens and labels."""
        return np.repeat(step_inputs_C(self.job, self.c)[:, None], len(self.group.stages), axis=1)

    @cached_property
    def stream(self) -> Reals:
        """The residual stream's gradient as the rank holds it between layers, (C, 1)."""
        return residual_C(self.job, self.c, whole=False)[:, None]

    @cached_property
    def stands(self) -> Mask:
        """Where gradients stand when the pass starts: of earlier micro-batches, or DDP's buckets."""
        return np.asarray(self.several | self.buckets, np.bool_)

    @cached_property
    def earlier(self) -> Reals:
        """Gradients that stand when the pass starts; in a pipeline those of other chunks too."""
        if not self.piped:
            return np.where(self.stands, self.at_rest, 0.0)
        s, counts = self.situation, self.counts
        whole = np.maximum(counts.whole, 1.0)
        standing = counts.layers * s.standing + counts.before * s.first_stands + counts.behind * s.last_stands
        reduced = counts.layers * s.reduced + counts.behind * s.last_reduced
        return self.at_rest * (standing / whole) + self.settled * (reduced / whole)

    def fresh(self, elements: Reals) -> Reals:
        """Gradients that this pass has made so far, of `elements`, where none stood before; at most all that will rest."""
        share = np.where(self.shards_gradients, self.shards, 1)
        made = np.minimum(self.trained * BYTES[self.job.formats.gradient] * elements / share, self.at_rest)
        if self.piped:
            made = np.where(self.managed & self.shards_gradients, self.trained * self.reduce * elements, made)
        return np.where(self.stands, 0.0, made)

    def in_reduction(self, elements: Reals) -> Reals:
        """A unit of `elements` while it is reduced: its gradient and the copy that is sent; where no shards are made of
        it, the gradient is gone when the result comes."""
        sent = self.reduce + np.where(self.shards_gradients, self.compute, 0.0)
        return np.where(self.reduces, self.trained * sent * elements, 0.0)

    def output(self, elements: Reals) -> Reals:
        """What a reduction gives, of `elements`, before it is added to what earlier micro-batches gave: gradients, or sums that
        replicas will average after the last one (FSDPParamGroup, _partial_reduce_output)."""
        parts = np.where(self.shards_gradients, self.shards, 1)
        joins = self.reduces & self.several & (self.shards_gradients | self.job.profile.replicas_wait)
        return np.where(joins, self.trained * self.reduce * elements / parts, 0.0)

    def retained(self, elements: Reals) -> Reals:
        """Where replicas average after each micro-batch: reduced gradients of unsharded units, which wait for the end of
        backward beside those that stand (FSDPParamGroup, _all_reduce_state)."""
        waits = self.reduces & self.several & ~self.shards_gradients & (not self.job.profile.replicas_wait)
        return np.where(waits, self.trained * self.reduce * elements, 0.0)

    @cached_property
    def outer(self) -> Reals:
        """Elements of the units outside the layers that are gathered as long as the pass runs: all of a root unit."""
        return self.before + self.behind if self.tied else self.before

    def gathered(self, *, layers: int | Column, head: bool, passed: Reals | float = 0.0) -> Reals:
        """Gathered weights: `layers` layers under ZeRO-3, otherwise all but what backward has `passed` (elements), which a
        pipeline keeps too. Tied ends are a root unit, which ZeRO-3 does not give back."""
        counts, tied = self.counts, self.job.model.tied
        if self.piped:
            chunk = np.minimum(layers * self.widest, counts.layers / self.chunks)
            root = self.before + self.behind if tied else (self.behind if head else 0.0)
            done = counts.layers * self.situation.reduced + counts.behind * self.situation.last_reduced
            return np.where(
                self.managed, self.compute * np.where(self.reshards, chunk + root, counts.whole - done), 0.0
            )
        own = np.minimum(layers * self.widest, counts.layers)
        still = np.maximum(0.0, counts.layers - passed)
        kept = np.where(self.reshards, own + (self.outer if tied else 0.0), still + self.outer)
        behind = counts.behind if head and not tied else 0.0
        return np.where(self.managed, self.compute * (kept + behind), 0.0)

    def in_layer(self, gone: Reals) -> LayerInstants:
        """The worst instant of the worst sort of layer when this share of the other layers is gone, (..., C, S)."""
        standing = self._in_layer(gone, np.bool_(True))
        if self.stands.all():
            return standing
        fresh = self._in_layer(gone, np.bool_(False))
        return LayerInstants(
            *(
                np.where(self.stands, getattr(standing, f), getattr(fresh, f))
                for f in LayerInstants.__dataclass_fields__
            )
        )

    def _in_layer(self, gone: Reals, stands: np.bool_) -> LayerInstants:
        """The same where gradients stand or not. Of each sort the instant counts that is worst by what differs between them, of
        the sorts the one that is worst with what it keeps beside the layers that are left."""
        ats = self.layers.by_sort
        freed = np.where(ats.is_product, ats.freed * self.casts_here, ats.freed)
        made = self.trained * BYTES[self.job.formats.gradient] / np.where(self.shards_gradients, self.shards, 1)
        joins = np.where(self.managed | stands, 0.0, made)
        casts = np.where(self.plain & self.casts, -self.trained * self.compute, 0.0)
        partial = np.where(self.managed, self.trained * self.compute, joins + casts)
        worth = ats.temporaries - freed + (partial + self._at_once(ats.is_product, stands)) * ats.weights
        worst = worth.argmax(axis=0)[None]
        total = worth.max(axis=0)[:, None, :]
        if total.shape[-1] > 1:
            total = total + gone[..., None] * ats.kept[:, None, :]
        sort = _worst_sort(self.group, total)

        def of_worst(part: Reals) -> Reals:
            own = np.take_along_axis(np.broadcast_to(part, worth.shape), worst, axis=0)[0]
            return _of_sort(self.group, own, sort)

        return LayerInstants(
            temporaries=of_worst(ats.temporaries),
            freed=of_worst(freed),
            weights=of_worst(ats.weights),
            kept=of_worst(ats.kept),
            is_product=of_worst(1.0 * ats.is_product) > 0.0,
        )

    def at_once(self, at: LayerInstants) -> Reals:
        """Bytes per weight of a matrix at work, without units: its gradient, and that in the weight's format beside what stands."""
        return self._at_once(at.is_product, self.stands)

    def _at_once(self, is_product: Mask, stands: Mask | np.bool_) -> Reals:
        cast = np.where(self.casts & stands, self.stored, 0.0)
        return self.trained * np.where(is_product & ~self.managed, self.compute + cast, 0.0)

    @cached_property
    def ahead_of_time(self) -> Reals:
        """Weights that ZeRO-3 gathers too early in a pipeline, (C, S) bytes: FSDP2 takes what ran before the first layer in any
        forward pass for what comes next, which is the end of the micro-batch before. Embeddings are never gathered in backward."""
        s, group = self.situation, self.group
        inner = np.where(s.is_begun | (s.others > 0), self.widest, 0.0) * (~group.is_first & ~group.is_last)[None, :]
        last = np.where(s.is_begun, self.counts.behind, 0.0)
        early = np.where(group.is_last[None, :], last, inner)
        return np.where(self.managed & self.reshards, self.compute * early, 0.0)

    @cached_property
    def reduces(self) -> Mask:
        """Where units are reduced during the pass: fully_shard and replicate outside of a pipeline."""
        return self.managed & (not self.piped)

    @cached_property
    def copies(self) -> Reals:
        """autocast's copies of the layers' weights that are kept for backward: none where layers are computed again."""
        keeps = self.plain & self.casts & self.c.is_word("recompute", "none")[:, None]
        return np.where(keeps, self.compute * self.counts.layers, 0.0)

    @cached_property
    def cached(self) -> Reals:
        """autocast's copies of the layers' weights that its cache holds until forward is over, and nothing afterwards: of whole
        weights, not of single experts."""
        dense = self.compute * (self.counts.layers - self.counts.experts)
        return np.where(self.plain & self.casts & (self.copies == 0.0), dense, 0.0)

    @cached_property
    def copies_again(self) -> Reals:
        """The copies of one layer's weights that recomputation makes."""
        layers = np.maximum(self.group.layers_SK.sum(axis=1)[None, :], 1.0)
        return np.where(self.plain & self.casts & (self.copies == 0.0), self.compute * self.counts.layers / layers, 0.0)

    @cached_property
    def outside(self) -> Reals:
        """Gradients that gather outside DDP's buckets while micro-batches are not reduced (no_sync)."""
        return np.where(self.buckets & self.several, self.at_rest, 0.0)

    @cached_property
    def head_copy(self) -> Reals:
        """autocast's copy of the head's weight."""
        return np.where(self.plain & self.casts, self.compute * self.head, 0.0)

    @cached_property
    def waiting(self) -> Reals:
        """The head's gradient, which waits for the embedding's when both are one weight of a root unit."""
        return np.where(self.reduces & self.tied, self.trained * self.compute * self.head, 0.0)

    @cached_property
    def old_head(self) -> Reals:
        """The same outside of units, in the format of the gradients."""
        return np.where(~self.managed & self.tied, self.trained * self.stored * self.head, 0.0)

    @cached_property
    def previous(self) -> Reals:
        """The gradient of the stage's input that the stage before still reads, in a pipeline of one chunk per rank."""
        if not self.piped:
            return np.zeros_like(self.stream)
        sends = self.c.is_word("schedule", "1f1b")[:, None] & self.situation.is_begun & ~self.group.is_first[None, :]
        return np.where(sends, self.stream, 0.0)
