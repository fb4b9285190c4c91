"""The instants of a step at which memory can peak, and what each term holds there.

The order of work is torch's: at the loss every activation is kept; the head's gradient comes first and, under fully_shard,
its unit is reduced first; then the layers backwards, one unit reduced behind the next; last the embedding. A unit's gradient
exists in the compute format and, while it is reduced, as a copy in the reduce format that lives until the next unit is
reduced. Source: PyTorch 2.13 torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, post_backward and foreach_reduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np

from strategist.document.estimate import MOMENTS
from strategist.facts.job import Job
from strategist.facts.profile import BYTES
from strategist.memory.activations import edges_CS, in_flight_CS, step_inputs_C
from strategist.memory.backward import (
    Kept,
    LayerInstant,
    is_kept,
    layer_instants,
    residual_C,
)
from strategist.memory.buffers import is_managed, is_plain_data_parallel
from strategist.memory.logits import forward_bytes_CS, held_logits_CS, loss_bytes_CS
from strategist.memory.logits import gradient_bytes_CS as logits_gradient_CS
from strategist.memory.model_states import shards_state
from strategist.records import dataclass
from strategist.space.candidates import Mask, Reals
from strategist.space.shares import Elements, Group, state_shards, vocabulary_elements

LOSS, LAYERS, END, UPDATE = range(len(MOMENTS))
"""Places in MOMENTS."""


@dataclass(frozen=True, slots=True, eq=False)
class Instant:
    """The moment that an instant belongs to, and bytes by term, (C, S) each."""

    moment: int
    terms: Mapping[str, Reals]


class Layers:
    """The layers of a group's candidates in backward, the same in every pass. (C, S) each."""

    def __init__(self, job: Job, group: Group) -> None:
        kept = Kept(job, group.candidates)
        one = kept.rows(is_kept)
        self.every = group.layers_of(one)
        self.largest = _of_worst(group, one, one)
        compute = BYTES[job.formats.compute]
        self.instants = tuple(_on_stages(group, at, one, compute) for at in layer_instants(kept))


@dataclass(frozen=True, slots=True, eq=False)
class StageInstant:
    """One instant of the sort of layer that is worst on each stage, as in LayerInstant but (C, S), and what that layer
    keeps."""

    temporaries: Reals
    freed: Reals
    weights: Reals
    kept: Reals
    is_product: bool


def _on_stages(group: Group, at: LayerInstant, kept: Reals, compute: float) -> StageInstant:
    total = at.temporaries - at.freed + compute * at.weights
    return StageInstant(
        temporaries=_of_worst(group, total, at.temporaries),
        freed=_of_worst(group, total, at.freed),
        weights=_of_worst(group, total, at.weights),
        kept=_of_worst(group, total, kept),
        is_product=at.is_product,
    )


def _of_worst(group: Group, total: Reals, part: Reals) -> Reals:
    """`part` (C, K) of the sort of layer whose `total` is the largest on each stage, (C, S)."""
    present: Mask = group.layers_SK > 0
    if present.shape[1] == 1:
        return part * present[None, :, 0]
    worst = np.where(present[None, :, :], total[:, None, :], -np.inf).argmax(axis=2)
    held: Mask = np.asarray(present.any(axis=1))
    return np.take_along_axis(part, worst, axis=1) * held[None, :]


class Step:
    """What the instants of a group's candidates are made of. Bytes are (C, S) unless they say otherwise."""

    def __init__(
        self, job: Job, group: Group, counts: Elements, layers: Layers, at_rest: Reals, settled: Reals, *, drains: bool
    ) -> None:
        """`at_rest` are gradients while micro-batches follow each other, `settled` those that the update finds; a step that
        `drains` has ended the first backward pass of a pipeline, so that gradients stand and one micro-batch less is kept."""
        self.job, self.group, self.counts, self.at_rest, self.settled = job, group, counts, at_rest, settled
        self.layers = layers
        c = self.c = group.candidates
        formats = job.formats
        self.compute, self.reduce, self.stored = (
            BYTES[f] for f in (formats.compute, formats.reduce, formats.parameter)
        )
        self.plain = is_plain_data_parallel(c)[:, None]
        self.managed = is_managed(job, c)[:, None]
        self.reshards = shards_state(c, 3)[:, None]
        self.piped = (c["pp"] > 1)[:, None]
        flight = in_flight_CS(group)
        self.flight = np.maximum(flight - 1.0, 1.0) if drains else flight
        micro = c["accumulation"][:, None]
        begun = micro > (1.0 if drains else np.ceil(flight))
        self.cut: Mask = (c["tp"] > 1)[:, None]
        self.several = (self.piped & begun) | (~self.piped & (micro > 1))
        self.buckets = self.plain & (c.data_parallel * c["cp"] > 1)[:, None]
        self.casts = self.compute != self.stored
        self.shards = state_shards(c)[:, None]
        self.tied = bool(job.model.tied and group.pp == 1)
        self.trained = job.trainable

    @property
    def casts_here(self) -> Mask:
        """Where a weight's gradient is cast before it is accumulated, which lets go of what it was made from, (C, 1)."""
        return self.plain & self.casts | self.managed

    @cached_property
    def widest(self) -> Reals:
        """Elements of the widest layer, (C, 1)."""
        return self.counts.widest[:, None] / self.c["tiling"][:, None]

    @cached_property
    def head(self) -> Reals:
        """Elements of the head's matrix, on the stage that has it."""
        return vocabulary_elements(self.job.model, self.c["tp"], np.ones_like(self.c["tp"]))[:, None] * self.last

    @cached_property
    def last(self) -> Reals:
        """1 on the last stage."""
        return self.group.is_last[None, :].astype(np.float64)

    @cached_property
    def activations(self) -> Reals:
        """All that is kept when the loss is known."""
        return self.flight * self.micro_batch + self.inputs

    @cached_property
    def micro_batch(self) -> Reals:
        """All that is kept of one micro-batch."""
        return self.layers.every + edges_CS(self.job, self.group)

    @cached_property
    def in_layers(self) -> Reals:
        """All that is kept when the layers' backward starts: what lies behind them is gone."""
        return self.activations - self.last * edges_CS(self.job, self.group, first=False)

    @cached_property
    def held_logits(self) -> Reals:
        """The logits that a pipeline's last stage holds on to."""
        return held_logits_CS(self.job, self.group)

    @cached_property
    def inputs(self) -> Reals:
        """The step's tokens and labels."""
        return np.repeat(step_inputs_C(self.job, self.c)[:, None], len(self.group.stages), axis=1)

    @cached_property
    def stream(self) -> Reals:
        """The residual stream's gradient as the rank holds it between layers, (C, 1)."""
        return residual_C(self.job, self.c, whole=False)[:, None]

    def retained(self, elements: Reals) -> Reals:
        """Reduced gradients of unsharded units, which wait for the end of backward beside those that stand."""
        waits = self.reduces & self.several & (self.c["zero"] < 2)[:, None] & (not self.job.profile.replicas_wait)
        return np.where(waits, self.trained * self.reduce * elements, 0.0)

    @cached_property
    def stands(self) -> Mask:
        """Where gradients stand when the last backward pass starts: of earlier micro-batches, or DDP's buckets, (C, 1)."""
        return np.asarray(self.several | self.buckets, np.bool_)

    @cached_property
    def earlier(self) -> Reals:
        """Gradients that stand when the last backward pass starts."""
        return np.where(self.stands, self.at_rest, 0.0)

    def fresh(self, elements: Reals) -> Reals:
        """Gradients that this pass has made so far, of `elements`, where none stood before; at most all that will rest."""
        share = np.where(self.c["zero"][:, None] >= 2, self.shards, 1)
        made = self.trained * BYTES[self.job.formats.gradient] * elements / share
        return np.where(self.stands, 0.0, np.minimum(made, self.at_rest))

    def in_reduction(self, elements: Reals) -> Reals:
        """A unit of `elements` while it is reduced: its gradient and the copy that is sent; where no shards are made of
        it, the gradient is gone when the result comes."""
        sent = self.reduce + np.where(self.c["zero"][:, None] >= 2, self.compute, 0.0)
        return np.where(self.reduces, self.trained * sent * elements, 0.0)

    def output(self, elements: Reals) -> Reals:
        """What a reduction gives, of `elements`, before it is added to the gradients that stand, or they to it."""
        is_sharded = (self.c["zero"] >= 2)[:, None]
        joins = self.reduces & self.several & (is_sharded | self.job.profile.replicas_wait)
        return np.where(joins, self.trained * self.reduce * elements / np.where(is_sharded, self.shards, 1), 0.0)

    @cached_property
    def outer(self) -> Reals:
        """Elements of the units outside the layers that are gathered as long as the pass runs: all of a root unit."""
        return self.counts.before + self.counts.behind if self.tied else self.counts.before

    def gathered(self, *, layers: int, head: bool, passed: Reals | float = 0.0) -> Reals:
        """Gathered weights: `layers` layers under ZeRO-3, otherwise all but what backward has `passed` (elements), which a
        pipeline keeps too."""
        own = np.minimum(layers * self.widest, self.counts.layers)
        given_back = np.where(self.piped, 0.0, passed)
        still = np.maximum(0.0, self.counts.layers - given_back)
        kept = np.where(self.reshards, own + (self.outer if self.tied else 0.0), still + self.outer)
        behind = self.counts.behind if head and not self.tied else 0.0
        return np.where(self.managed, self.compute * (kept + behind), 0.0)

    @cached_property
    def reduces(self) -> Mask:
        """Where units are reduced during the pass: fully_shard and replicate outside of a pipeline."""
        return self.managed & ~self.piped

    @cached_property
    def copies(self) -> Reals:
        """autocast's copies of the layers' weights that are kept for backward: none where layers are computed again."""
        keeps = self.plain & self.casts & self.c.is_word("recompute", "none")[:, None]
        return np.where(keeps, self.compute * self.counts.layers, 0.0)

    @cached_property
    def cached(self) -> Reals:
        """autocast's copies of the layers' weights that its cache holds until forward is over, and nothing afterwards."""
        return np.where(self.plain & self.casts, self.compute * self.counts.layers, 0.0) - self.copies

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
        """The gradient of the stage's input that the next stage still reads, in a pipeline."""
        return np.where(self.piped & self.several, self.stream, 0.0)


def instants(job: Job, group: Group, counts: Elements, at_rest: Reals, settled: Reals) -> tuple[Instant, ...]:
    """Every instant at which some candidate can peak; see Step for the gradients."""
    layers = Layers(job, group)
    found: list[Instant] = []
    for drains in (False, True) if group.pp > 1 else (False,):
        found.extend(_of_step(Step(job, group, counts, layers, at_rest, settled, drains=drains)))
    return tuple(found)


def _of_step(step: Step) -> tuple[Instant, ...]:
    return (
        _embedding(step),
        *_loss(step),
        *_head(step),
        _head_reduced(step),
        *_layers(step),
        *_end(step),
        _update(step),
    )


def _embedding(step: Step) -> Instant:
    """In a pipeline under ZeRO-3: the embedding is gathered, from one buffer into another, while others are in flight."""
    gathers = step.piped & step.reshards & step.managed
    table = np.where(gathers, 2.0 * step.compute * step.counts.before + step.compute * step.widest, 0.0)
    return Instant(
        LOSS,
        {
            "gradients": step.earlier,
            "activations": (step.flight - 1.0) * step.micro_batch + step.inputs,
            "gather_buffers": table * step.group.is_first[None, :],
        },
    )


def _loss(step: Step) -> tuple[Instant, Instant]:
    """The loss itself: logits, their float32 copy and log-probabilities, with all that autocast's cache holds. Then its own
    backward: log-probabilities, their gradient, and the gradient of the logits."""
    both = {
        "gradients": step.earlier,
        "activations": step.activations,
        "gather_buffers": step.gathered(layers=0, head=True),
        "bucket_buffers": step.copies + step.head_copy,
    }
    waits = step.previous + step.outside
    forward = both | {"logits": forward_bytes_CS(step.job, step.group), "temporaries": waits + step.cached}
    softmax = both | {"logits": loss_bytes_CS(step.job, step.group), "temporaries": waits}
    return Instant(LOSS, forward), Instant(LOSS, softmax)


def _head(step: Step) -> tuple[Instant, Instant]:
    """The head's weight gets its gradient; under autocast it is then cast to the format of the weight."""
    gradient = step.trained * step.compute * step.head
    before = step.previous + step.outside + step.last * step.stream
    own = 0.0 if step.tied else step.fresh(step.head)
    at_once = np.where(step.managed | step.casts, 0.0, own)
    joins = ~step.managed & ~step.stands & (not step.casts and not step.tied)
    made = {
        "gradients": step.earlier + at_once,
        "activations": step.activations,
        "logits": logits_gradient_CS(step.job, step.group),
        "gather_buffers": step.gathered(layers=1, head=True) + np.where(step.reduces, gradient, 0.0),
        "bucket_buffers": step.copies + step.head_copy,
        "temporaries": before + np.where(step.reduces | joins, 0.0, gradient),
    }
    stored = np.where(step.stands | step.tied, step.trained * step.stored * step.head, 0.0)
    casting = np.where(step.plain & step.casts, gradient + stored, 0.0)
    cast = {
        "gradients": step.earlier + own,
        "activations": step.activations - step.last * step.stream,
        "logits": step.held_logits,
        "gather_buffers": step.gathered(layers=0, head=True),
        "bucket_buffers": step.copies,
        "temporaries": before + casting,
    }
    return Instant(LOSS, made), Instant(LAYERS, cast)


def _head_reduced(step: Step) -> Instant:
    """Norm and head are reduced while the last layer is gathered."""
    behind = np.where(not step.tied, step.in_reduction(step.counts.behind), 0.0)
    behind = behind + step.output(step.counts.behind)
    held = np.where(step.piped & step.managed, step.compute * step.counts.behind, 0.0)
    return Instant(
        LAYERS,
        {
            "gradients": step.earlier + step.fresh(step.counts.behind),
            "activations": step.in_layers,
            "logits": step.held_logits,
            "gather_buffers": step.gathered(layers=1, head=False) + behind + step.waiting + held,
            "bucket_buffers": step.copies,
            "temporaries": step.previous
            + step.stream * np.where(held > 0, 2.0, 1.0)
            + step.retained(step.counts.behind)
            + held,
        },
    )


def _layers(step: Step) -> Iterator[Instant]:
    """Each worst instant of a layer: in the last one (behind the head), in the one before it and in the first."""
    for at in step.layers.instants:
        yield from (_in_layer(step, at, number) for number in (0, 1, -1))
    yield _layer_reduced(step)


def _in_layer(step: Step, at: StageInstant, number: int) -> Instant:
    """One instant of the `number`-th layer from the end; -1 is the first layer."""
    counts = step.counts
    layers = np.maximum(step.group.layers_SK.sum(axis=1)[None, :].astype(np.float64), 1.0)
    before = layers - 1.0 if number < 0 else np.minimum(float(number), layers - 1.0)
    share = before / np.maximum(layers - 1.0, 1.0)  # of the other layers, whatever their sort
    passed = share * np.maximum(0.0, counts.layers - step.widest)
    let_go = share * (step.layers.every - at.kept)
    again = np.where(step.plain & step.casts, step.cached / layers, 0.0)
    behind = np.zeros_like(step.head) if step.tied else counts.behind
    in_flight = step.trained * step.reduce * np.where(before > 0, step.widest, behind)
    done = behind + passed
    partial = step.trained * step.compute * at.weights
    cast = np.where(step.casts & step.stands, step.trained * step.stored * at.weights, 0.0)
    at_once = partial + cast if at.is_product else 0.0
    own = np.where(step.managed, 0.0, at.weights)
    return Instant(
        LAYERS,
        {
            "gradients": step.earlier + step.fresh(done + own),
            "activations": np.maximum(
                step.inputs,
                step.in_layers - np.where(at.is_product & ~step.casts_here, 0.0, at.freed) - let_go,
            ),
            "logits": step.held_logits,
            "gather_buffers": step.gathered(layers=2, head=False, passed=passed)
            + np.where(step.reduces, partial + in_flight, 0.0)
            + step.waiting,
            "bucket_buffers": np.maximum(
                0.0,
                step.copies * (1.0 - before / layers) - np.where(step.plain & step.casts, partial, 0.0),
            ),
            "temporaries": at.temporaries
            + step.previous
            + step.old_head
            + step.retained(done)
            + (step.outside if number == 0 else 0.0)
            + np.where(again > 0, np.maximum(0.0, again - partial), 0.0)
            + np.where(step.reduces, 0.0, np.where(step.managed, partial, at_once)),
        },
    )


def _layer_reduced(step: Step) -> Instant:
    """A layer is reduced while the next one is gathered."""
    counts = step.counts
    own = step.in_reduction(step.widest) + step.output(step.widest)
    behind = 0.0 if step.tied else counts.behind
    return Instant(
        LAYERS,
        {
            "gradients": step.earlier + step.fresh(behind + step.widest),
            "activations": np.maximum(step.inputs, step.in_layers - step.layers.largest),
            "logits": step.held_logits,
            "gather_buffers": step.gathered(layers=1, head=False, passed=step.widest) + own + step.waiting,
            "temporaries": step.stream + step.previous + step.retained(behind + step.widest),
        },
    )


def _update(step: Step) -> Instant:
    """Between backward and the update: without units the embedding's whole gradient waits beside its part of it."""
    cut = ~step.managed & step.cut & step.group.is_first[None, :]
    whole = step.trained * step.stored * step.job.model.vocab * step.job.model.hidden * cut
    return Instant(UPDATE, {"gradients": step.settled, "activations": step.inputs, "temporaries": whole})


def _end(step: Step) -> tuple[Instant, ...]:
    """The embedding's gradient, and its reduction."""
    counts, c = step.counts, step.c
    table = vocabulary_elements(step.job.model, np.ones_like(c["tp"]), np.ones_like(c["tp"]))[:, None]
    table = table * step.group.is_first[None, :]
    cut = step.cut
    gradient = step.trained * np.where(step.managed, step.compute, step.stored) * table
    local = np.where(cut, step.trained * step.compute * step.outer, gradient)
    stream = np.where(step.managed, 0.0, step.stored / step.compute) * step.stream * step.group.is_first[None, :]
    direct = np.logical_and(~step.managed & ~step.stands, ~cut)
    keeps = np.where(step.managed & (~step.reshards | step.tied), step.compute * step.outer, 0.0)
    keeps = np.where(step.piped, step.gathered(layers=1, head=False), keeps)
    others = (step.flight - 1.0) * step.micro_batch + step.inputs
    flight = np.where(step.reduces, step.trained * step.reduce * step.widest, 0.0)
    old = step.waiting + (np.where(step.reduces, step.compute * step.head, 0.0) if step.tied else 0.0)
    summed = 2.0 * step.old_head
    made = {
        "gradients": step.earlier + np.where(direct, step.fresh(counts.whole), step.fresh(counts.whole - step.outer)),
        "activations": others,
        "gather_buffers": np.where(step.reduces, keeps + flight + local + old, keeps),
        "temporaries": np.where(direct | (step.reduces & ~cut), 0.0, gradient)
        + step.retained(counts.whole - step.outer)
        + np.where(summed > 0, summed, stream)
        + step.previous,
    }
    at_once = np.where(step.managed & step.piped, step.trained * step.reduce * np.maximum(step.widest, step.outer), 0.0)
    reduced = {
        "gradients": step.at_rest,
        "activations": step.inputs,
        "gather_buffers": step.in_reduction(step.outer)
        + at_once
        + np.where(step.piped & ~step.reshards, keeps, 0.0)
        + step.output(step.outer),
        "temporaries": step.retained(counts.whole),
    }
    gathering = {
        "gradients": step.earlier,
        "activations": step.inputs,
        "temporaries": step.outside
        + np.where(summed > 0, summed, stream)
        + np.where((c["accumulation"] > 2)[:, None], gradient, 0.0),
    }
    return Instant(END, made), Instant(END, reduced), Instant(END, gathering)
