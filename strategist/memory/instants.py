"""The instants of a step at which memory can peak, and what each term holds there.

The order of work is torch's: at the loss every activation is kept; the head's gradient comes first and, under fully_shard,
its unit is reduced first; then the layers backwards, one unit reduced behind the next; last the embedding. A unit's gradient
exists in the compute format and, while it is reduced, as a copy in the reduce format that lives until the next unit is
reduced. Source: PyTorch 2.13 torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, post_backward and foreach_reduce.
A pipeline keeps weights gathered and gradients unsharded until a chunk's last backward pass is over, and reduces then
(torch/distributed/pipelining/stage.py, backward_maybe_with_nosync and perform_reduce_grad).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from strategist.columns import on_stages
from strategist.facts.job import Job
from strategist.memory.logits import forward_bytes_CS, forward_holds_less, held_logits_CS, loss_bytes_CS
from strategist.memory.logits import gradient_bytes_CS as logits_gradient_CS
from strategist.memory.model_states import decoded_bytes, shards_state, turning_bytes_CS
from strategist.memory.situations import Schedule, Situation, one_pass
from strategist.memory.sorts import sorts_of
from strategist.memory.step import (
    END,
    LAYERS,
    LOSS,
    NONE,
    NOWHERE,
    UPDATE,
    Instant,
    LayerInstants,
    Layers,
    Step,
    added,
)
from strategist.space.candidates import Column, Mask, Reals
from strategist.space.shares import Elements, Group, holds_early_C, pieces_C, vocabulary_elements
from strategist.space.traffic import COALESCED_BYTES

FEW_LAYERS = 2
"""Of more layers the second from the front always holds more than the first when it is unpacked."""


def instants(
    job: Job,
    group: Group,
    counts: Elements,
    layers: Layers,
    at_rest: Reals,
    settled: Reals,
    *,
    at_loss: bool = False,
    made_of: type[Step] = Step,
) -> tuple[Instant, ...]:
    """Every instant at which some candidate can peak, or only the fullest two of the loss. `at_rest` are gradients while
    micro-batches follow each other, `settled` those that the update finds, (C, S) each."""

    def in_situation(situation: Situation, at: Column | None = None) -> Step:
        own = _tiled_step() if group.is_tiled else made_of
        return own(job, group, counts, layers, at_rest, settled, situation, at)

    if group.pp == 1:
        return _of_one_pass(in_situation(one_pass(group.candidates["accumulation"])), at_loss=at_loss)
    if group.is_v_shaped:
        from strategist.memory.vee import v_instants, v_loss  # of a schedule that is rarely asked for

        if at_loss:
            return tuple(v_loss(job, group, in_situation, _loss))
        return tuple(v_instants(job, group, in_situation, _before_layers, _through_layers, _update))
    return _of_pipeline(job, group, in_situation, at_loss=at_loss)


def _of_one_pass(step: Step, *, at_loss: bool) -> tuple[Instant, ...]:
    """Without a pipeline."""
    if at_loss:
        return _loss(step.unsorted())
    candidates = step.group.candidates
    return (
        *_gathering(step),
        *(_under_autocast(step) if step.has_copies else ()),
        *(_added_up(step) if step.cuts_sequences else ()),
        *((_cast_in_forward(step),) if step.job.casts_apart else ()),
        *_loss(step),
        *_head(step),
        _head_reduced(step),
        *_layers_or_slices(step),
        *(_experts(step) if step.has_apart else ()),
        *_end(step),
        *((_summed(step),) if candidates.in_threads else ()),
        *(_hooked(step) if "compression" in candidates.columns else ()),
        _update(step),
    )


def _of_pipeline(job: Job, group: Group, in_situation: Callable[..., Step], *, at_loss: bool) -> tuple[Instant, ...]:
    """In a pipeline whose stages have one run of layers, or chunks in turn."""
    sorts = sorts_of(job, group, "schedule")
    schedule, at = (Schedule(group), None) if sorts is None else (Schedule(sorts.group), sorts.place)
    if at_loss:
        at_most = _loss(in_situation(schedule.at(schedule.second_of_last_chunk()), at).unsorted())
        return _in_two_parts(job, group, in_situation, at_most, at_loss=True) if schedule.splits else at_most
    if schedule.has_chunks:
        heads, bodies, forwards = _in_chunks(group, schedule, at, in_situation)
    else:
        firsts = schedule.first_of_first_chunk(), schedule.second_of_first_chunk()
        heads = bodies = forwards = in_situation(schedule.at(*firsts), at)
    passes = (
        *_loss(heads),
        *_head(heads),
        _head_accumulated(heads),
        *_forward(forwards),
        *((_cast_beside_passes(forwards),) if job.casts_apart else ()),
        _begins(bodies),
        *_layers(bodies),
        *(_experts(bodies) if bodies.has_apart else ()),
        *_end_of_pass(bodies),
        *_reductions(bodies),
    )
    if schedule.splits:
        from strategist.memory.weight_passes import split_end

        return (*_in_two_parts(job, group, in_situation, passes), *split_end(bodies, _update(bodies)))
    return (*passes, _update(bodies))


def _in_chunks(
    group: Group, schedule: Schedule, at: Column | None, in_situation: Callable[..., Step]
) -> tuple[Step, Step, Step]:
    """The passes to look at where stages have several runs of layers: until the layers' backward begins, from there on, and forward."""
    firsts = schedule.first_of_first_chunk(), schedule.second_of_first_chunk()
    every = schedule.at(schedule.first_pass(), schedule.second_of_last_chunk(), *firsts, schedule.fullest())
    holds_early = holds_early_C(group.candidates)
    if not holds_early.any():
        heads, bodies = in_situation(every.of(slice(2)), at), in_situation(every.of(slice(1, None)), at)
        return heads, bodies, bodies
    from strategist.memory.early import in_company  # rarely asked for

    *looked_at, at = in_company(in_situation(every, at), every, at, np.flatnonzero(holds_early))
    heads, bodies, forwards = (in_situation(passes, at) for passes in looked_at)
    return heads, bodies, forwards


def _before_layers(step: Step) -> Iterator[Instant]:
    """Of one backward pass of a pipeline, until the layers' begins."""
    yield from (*_loss(step), *_head(step), _head_accumulated(step))


def _through_layers(step: Step) -> Iterator[Instant]:
    """From there on."""
    yield from (*_layers(step), *_end_of_pass(step))


def _in_two_parts(
    job: Job,
    group: Group,
    in_situation: Callable[[Situation], Step],
    whole: tuple[Instant, ...],
    *,
    at_loss: bool = False,
) -> tuple[Instant, ...]:
    """Where backward passes come in two parts their instants, elsewhere those of `whole` ones."""
    from strategist.memory.weight_passes import split_instants, whole_instants  # of a schedule that is rarely asked for

    parts = tuple(split_instants(job, group, in_situation))
    return (*whole_instants(group, whole), *(part for part in parts if part.is_loss or not at_loss))


def _under_autocast(step: Step) -> Iterator[Instant]:
    """Forward where autocast's copies of weights are there for its sake alone."""
    from strategist.memory.autocast import forward_instants  # layouts of units know no autocast

    return forward_instants(step)


def _tiled_step() -> type[Step]:
    """What instants are made of where matrices are tiled."""
    from strategist.memory.tiled import TiledStep  # most searches look at no tiles

    return TiledStep


def _layers_or_slices(step: Step) -> Iterable[Instant]:
    """The instants of the layers in one piece, or slice by slice."""
    if not step.group.is_tiled:
        return _layers(step)
    from strategist.memory.tiled import in_slices

    return in_slices(step)


def _gathering(step: Step) -> tuple[Instant, Instant]:
    """Without a pipeline: forward gathers the last layer, whose predecessor's first buffer is still there; then norm and head,
    beside that of the last layer."""
    layers = step.layers_of_chunk
    gathers = step.managed & step.shards_gradients & (layers > 0)
    last = step.last_unit if step.packed == 1.0 else step.packed * step.last_unit
    flat = last * np.minimum(layers, 2)
    if step.has_apart:
        flat = np.where(step.apart, step.beside + last, flat)
    flat = step.compute * flat
    head = step.gathered(layers=0, head=True) + step.compute * (step.behind + last)
    gradients = np.where(gathers, step.earlier, 0.0)
    return (
        Instant(
            LOSS,
            {
                "gradients": gradients,
                "activations": np.where(
                    gathers, step.stream + np.maximum(step.inputs, step.in_layers - step.layers.largest), 0.0
                ),
                "gather_buffers": np.where(gathers, step.gathered(layers=1, head=False, experts=1.0) + flat, 0.0),
            },
        ),
        Instant(
            LOSS,
            {
                "gradients": gradients,
                "activations": np.where(gathers, step.in_layers + step.stream, 0.0),
                "gather_buffers": np.where(gathers & (not step.tied), head, 0.0),
            },
        ),
    )


def _added_up(step: Step) -> Iterator[Instant]:
    """Under sequence parallelism without a pipeline: forward adds up what the last layer's last matrix gave, each rank for its own
    tokens: the term, the same in the order of the ranks, and their sum (PyTorch 2.13 torch/distributed/_functional_collectives.py,
    reduce_scatter_tensor). The layer's buffer is there as long as nothing else is gathered. Then the head does the same with the gradient
    of its input, which is gone like the logits."""
    if step.group.is_tiled or step.job.model.adapters is not None:
        return
    cuts = step.of_work(lambda own: (own.c["sequence_parallel"] > 0)[:, None])
    buffer = np.where(step.managed & step.shards_gradients, step.compute * step.last_unit, 0.0)
    held, result = step.of_work(lambda own: (own.in_layers - own.layers.rest, own.layers.while_added_up))
    layer = {
        "gradients": step.earlier,
        "activations": held,
        "gather_buffers": step.gathered(layers=1, head=False) + buffer,
        "temporaries": result,
    }
    yield Instant(LOSS, {name: np.where(cuts, part, 0.0) for name, part in layer.items()})
    if step.c.chunks_loss:
        return
    stood, _, becomes, _, gathered, _ = step.of_state(_gradients_at_head)
    kept, adds = step.of_work(lambda own: (own.activations - own.whole_stream, 2.0 * own.whole_stream + own.stream))
    head = {"gradients": stood, "activations": kept, "gather_buffers": gathered, "temporaries": adds + becomes}
    yield Instant(LAYERS, {name: np.where(cuts, part, 0.0) for name, part in head.items()})


def _cast_in_forward(step: Step) -> Instant:
    """Without a pipeline: forward is in the last matrix of the last layer, which casts what it reads; the layer's buffer is still there."""
    buffer = np.where(step.managed & step.shards_gradients, step.compute * step.last_unit, 0.0)
    return Instant(
        LOSS,
        {
            "gradients": step.earlier,
            "activations": step.of_work(lambda own: own.in_layers - own.layers.rest),
            "gather_buffers": step.gathered(layers=1, head=False) + buffer,
            "temporaries": step.of_work(lambda own: own.layers.while_cast),
        },
    )


def _cast_beside_passes(step: Step) -> Instant:
    """The same in a pipeline, as long as forward and backward passes alternate: what a chunk gives is not there yet."""
    gathered = step.of_state(lambda own: _gathered_in_forward(own)[-1])
    return Instant(
        LOSS,
        {
            "gradients": step.earlier,
            "activations": step.of_work(lambda own: own.in_layers - own.layers.rest - own.stream * (1.0 - own.last)),
            "logits": step.logits_before_head,
            "gather_buffers": gathered,
            "temporaries": step.of_work(
                lambda own: added(own.previous, np.where(own.situation.alternates, own.layers.while_cast, 0.0))
            ),
        },
    )


def _forward(step: Step) -> tuple[Instant, ...]:
    """In a pipeline, as long as forward and backward passes alternate: under ZeRO-3 the embedding is gathered, from one buffer
    into another, or the first layer beside that buffer, and so are tied ends; a layer, beside what was gathered too early, the worst of them; inside
    the last layer, whoever gathers, or the head beside it."""
    inside = {"gradients": step.earlier, "activations": step.in_layers, "logits": step.logits_before_head}
    runs, table, first, layer, _ = step.of_state(_gathered_in_forward)
    ended, made, result, parts = step.of_work(_made_in_forward)
    is_later = first > table + parts
    return (
        Instant(
            LOSS,
            {
                "gradients": step.earlier,
                "activations": ended,
                "logits": step.logits_before_head,
                "gather_buffers": np.where(is_later, first, table),
                "temporaries": np.where(runs & ~is_later, parts, 0.0),
            },
        ),
        _gathered_in_turn(step),
        Instant(
            LOSS,
            inside
            | {
                "activations": made,
                "gather_buffers": layer,
                "temporaries": result,
            },
        ),
    )


def _begins(step: Step) -> Instant:
    """In a pipeline under ZeRO-3 a backward pass begins with the last layer, behind which the next is gathered, and when only such passes
    are left, with an embedding that is the root unit."""
    return Instant(
        LAYERS,
        {
            "gradients": step.earlier,
            "activations": step.in_layers,
            "logits": step.held_logits,
            "gather_buffers": step.of_state(_gathered_at_beginning),
            "temporaries": step.previous,
        },
    )


def _gathered_at_beginning(step: Step) -> Reals:
    """Gathered weights then."""
    begins = 2.0 * step.widest
    if step.has_apart:  # the buffer gathered last is that of the experts
        begins = np.where(step.apart, step.dense + np.maximum(step.dense, step.routed), begins)
    layers = np.where(step.layers_of_chunk > 1, 2.0, 1.0) * step.widest
    root = step.compute * (2.0 * step.before + layers) * (step.job.model.tied and step.first)
    most = np.maximum(np.where(_runs(step), 0.0, root), step.compute * begins)
    begun = step.reshards & step.managed & step.situation.is_begun
    return np.where(begun, added(most, step.held_early), 0.0)


def _runs(step: Step) -> Mask:
    """In a pipeline: where a forward pass gathers weights, because ZeRO-3 gave them back and it follows a backward pass."""
    return step.reshards & step.managed & step.situation.alternates


def _gathered_in_forward(step: Step) -> tuple[Mask, Reals, Reals, Reals, Reals]:
    """Where forward gathers, and gathered weights: the embedding, the first layer beside its buffer, the last layer or the head, and the
    last layer alone. A unit that was gathered too early is there until its turn comes, which an only layer's is."""
    runs, tied = _runs(step), step.job.model.tied
    root = step.root if tied else 0.0
    found = step.found_early
    table: Reals = (
        2.0 * (step.root + step.widest) * (step.first + step.last) if tied else 2.0 * step.before * step.first
    )
    first = step.compute * (step.before + 2.0 * step.widest) * step.first
    several = np.where(step.layers_of_chunk > 1, found, 0.0) * step.first
    ends, buffer = 2.0 * step.widest, step.widest
    if step.has_apart:  # the buffer gathered last is that of the experts
        ends, buffer = np.where(step.apart, step.dense + step.routed, ends), step.last_unit
    layer = step.compute * (ends + root) + found * step.last
    last = 0.0 if tied else step.compute * (2.0 * step.behind + buffer) * step.last
    return (
        runs,
        np.where(runs, added(step.compute * table, found * step.first, step.held_early), 0.0),
        np.where(runs, added(first, several, step.held_early), 0.0),
        np.where(runs, added(np.maximum(layer, last), step.held_early), _kept_in_forward(step)),
        np.where(runs, added(layer, step.held_early), _kept_in_forward(step)),
    )


def _kept_in_forward(step: Step) -> Reals:
    """All gathered weights, where a forward pass that runs just before finds them gathered."""
    keeps = step.situation.alternates & ~step.reshards
    return np.where(keeps, step.gathered(layers=0, head=True), 0.0)


def _made_in_forward(step: Step) -> tuple[Reals, Reals, Reals, Reals]:
    """What is kept when the embedding has worked; what is when the last layer has, and what lies beside it if a forward pass runs just
    before: the result of its last matrix, or what the layer computes again; what a part of the table gives, and as ranks add it up."""
    runs = step.situation.alternates
    is_cut, keeps = (step.c["sequence_parallel"] > 0)[:, None], step.c.is_word("recompute", "none")[:, None]
    left = step.in_layers - step.layers.rest
    made = step.stream * (step.last - is_cut)  # the layer's output is not summed up yet
    result = np.where(keeps, step.layers.result, step.layers.transient)
    if step.cuts_sequences:
        kept = np.where(is_cut & ~keeps, step.layers.rest, 0.0)  # it is there, in parts
        left, result = left + kept, np.where(is_cut, step.layers.while_added_up - kept, result)
        keeps = keeps | is_cut
    parts = np.where(is_cut, 2.0, 1.0 * (step.c["tp"] > 1)[:, None])
    terms = parts * step.whole_stream * (step.first * (not step.job.model.tied))
    return (
        step.others + step.stream * step.first,
        left + np.where(runs & keeps, made, 0.0),
        added(step.previous, np.where(runs, result, 0.0)),
        terms,
    )


def _gathered_in_turn(step: Step) -> Instant:
    """In a pipeline forward gathers a layer whose predecessor's first buffer is still there: the last one, or the one before it
    as long as the last one's buffer is there too, which an earlier backward pass has gathered."""
    kept, later = step.of_work(_kept_in_turn)
    runs, early, gathers, beside = step.of_state(_gathers_in_turn)
    widest = step.compute * step.widest
    sooner = early & (widest > kept - later)
    turns = np.where(sooner, 4.0, 3.0) - step.apart if step.has_apart else np.where(sooner, 4.0, 3.0)
    return Instant(
        LOSS,
        {
            "gradients": step.earlier,
            "activations": np.where(runs, np.where(sooner, later, kept), 0.0),
            "logits": step.logits_before_head,
            "gather_buffers": np.where(gathers, turns * widest + beside, 0.0),
            "temporaries": step.previous,
        },
    )


def _kept_in_turn(step: Step) -> tuple[Reals, Reals]:
    """What is kept before the last layer of the chunk, and before the one before it."""
    given = step.stream * step.last  # what the layer before gave; elsewhere the output of the chunk takes its place
    one, two = (np.maximum(step.others, step.in_layers - step.kept_by_last(gone) + given) for gone in (1.0, 2.0))
    return one, two


def _gathers_in_turn(step: Step) -> tuple[Mask, Mask, Mask, Reals]:
    """Where forward gathers, where it may do so sooner, where there are layers in turn; beside them a root unit, a head that is there
    already, and units of other chunks."""
    runs, layers = _runs(step), step.layers_of_chunk
    early = (step.last == 0.0) & (step.found_early > 0.0)
    root = step.compute * step.root if step.job.model.tied else NONE
    return runs, early & (layers > 2), runs & (layers > 1), added(step.found_early * step.last, root, step.held_early)


def _loss(step: Step) -> tuple[Instant, ...]:
    """The loss itself: logits, their float32 copy and log-probabilities, with all that autocast's cache holds, unless what follows always
    holds more. Then its own backward: log-probabilities, their gradient, and the gradient of the logits."""
    if step.c.chunks_loss:
        return (_loss_in_chunks(step),)
    both = {
        "gradients": step.earlier,
        "activations": step.activations,
        "gather_buffers": step.gathered_at_loss,
        "bucket_buffers": added(step.copies, step.head_copy),
    }
    waits = added(step.previous, step.outside)
    softmax = Instant(LOSS, both | {"logits": step.of_work(_logits_of_softmax), "temporaries": waits}, is_loss=True)
    if step.cached is NONE and forward_holds_less(step.job, step.group):
        return (softmax,)
    forward = both | {"logits": step.of_work(_logits_of_forward), "temporaries": added(waits, step.cached)}
    return Instant(LOSS, forward, is_loss=True), softmax


def _logits_of_forward(step: Step) -> Reals:
    """Tensors of the vocabulary at the loss."""
    new = step.last * (forward_bytes_CS(step.job, step.group) - held_logits_CS(step.job, step.group))
    return added(new, step.held_logits)


def _logits_of_softmax(step: Step) -> Reals:
    """The same in its own backward."""
    return added(step.last * loss_bytes_CS(step.job, step.group), step.held_logits)


def _loss_in_chunks(step: Step) -> Instant:
    """The logits of a chunk in float32 and their log-probabilities, when the gradients of hidden states, which the kept ones count
    as, and of the head's weight are there already; what the norm gave is held until the last chunk is through. All of it lies inside
    the forward pass of fully_shard, which keeps the buffer that it gathered last until that is over."""
    terms = _beside_chunks(step)
    buffer = step.compute * (step.packed * step.last_unit if step.tied else step.behind)
    held = np.where(step.managed & step.shards_gradients, buffer, 0.0)
    return Instant(
        LOSS,
        terms
        | {
            "logits": step.last * forward_bytes_CS(step.job, step.group),
            "gather_buffers": step.gathered_at_loss + terms["gather_buffers"] + held,
            "temporaries": added(terms["temporaries"], step.cached, step.head_copy, step.last * step.stream),
        },
        is_loss=True,
    )


def _head_of_chunks(step: Step) -> tuple[Instant, ...]:
    """The head's gradient is there when backward begins; under autocast it is cast to the format of the weight."""
    terms = _beside_chunks(step)
    own, casting = NONE, NONE
    if step.has_copies:
        joins = step.stands | step.tied
        own = np.where(step.plain & ~joins, step.fresh(step.head), 0.0)
        casting = np.where(step.plain & joins, step.ends * step.stored * step.head, 0.0)
    more = {
        "gradients": added(terms["gradients"], own),
        "gather_buffers": step.gathered(layers=1, head=True) + terms["gather_buffers"],
        "temporaries": added(terms["temporaries"], casting),
    }
    return (Instant(LAYERS, terms | more),)


def _beside_chunks(step: Step) -> dict[str, Reals]:
    """What a chunked loss leaves until backward: the gradient of the head's weight, which belongs to its unit, or is the one that the
    update finds, or will join or be cast to it."""
    gradient = step.ends * step.compute * step.head
    becomes = ~step.managed & ~step.stands & (not step.casts) & (not step.tied)
    return {
        "gradients": step.earlier + np.where(becomes, gradient, 0.0),
        "activations": step.activations,
        "gather_buffers": np.where(step.managed, gradient, 0.0),
        "bucket_buffers": step.copies,
        "temporaries": added(step.outside, np.where(step.managed | becomes, 0.0, gradient)),
    }


def _head(step: Step) -> tuple[Instant, ...]:
    """The head's weight gets its gradient; under autocast it is then cast to the format of the weight."""
    if step.c.chunks_loss:
        return _head_of_chunks(step)
    stood, with_own, becomes, casting, gathered, later = step.of_state(_gradients_at_head)
    given, left, logits = step.of_work(_kept_at_head)
    before = added(step.outside, given)
    made = {
        "gradients": stood,
        "activations": step.activations,
        "logits": logits,
        "gather_buffers": gathered,
        "bucket_buffers": added(step.copies, step.head_copy),
        "temporaries": before + becomes,
    }
    cast = {
        "gradients": with_own,
        "activations": left,
        "logits": step.held_logits,
        "gather_buffers": later,
        "bucket_buffers": step.copies,
        "temporaries": added(before, casting),
    }
    if (
        step.job.model.adapters is not None
    ):  # nothing is cast: the norm works backward beside a head that is still gathered
        cast |= {
            "activations": step.activations,
            "gather_buffers": step.gathered(layers=1, head=True),
            "temporaries": before + step.last * step.stream,
        }
    return Instant(LOSS, made), Instant(LAYERS, cast)


def _gradients_at_head(step: Step) -> tuple[Reals, ...]:
    """Gradients when the head's is made, and when it stands among them; the one that does not yet, and what a cast makes of it; gathered
    weights and units in reduction at both times."""
    gradient = step.ends * step.compute * step.head
    own = 0.0 if step.tied else step.fresh(step.head)
    keeps = ~step.managed & (not step.casts)
    joins = keeps & ~step.stands & (not step.tied)
    sent, casting = NONE if step.piped else np.where(step.reduces, gradient, 0.0), NONE
    if step.has_copies:
        stored = np.where(step.stands | step.tied, step.ends * step.stored * step.head, 0.0)
        casting = np.where(step.plain, gradient + stored, 0.0)
    return (
        step.earlier + np.where(keeps, own, 0.0),
        step.earlier + own,
        np.where(step.reduces | joins, 0.0, gradient),
        casting,
        added(step.gathered(layers=1, head=True), sent),
        step.gathered(layers=0, head=True),
    )


def _kept_at_head(step: Step) -> tuple[Reals, Reals, Reals]:
    """The gradient of the head's input there, of all tokens; what is kept once the input is gone; the logits."""
    given = step.last * (step.whole_stream if step.job.model.adapters is None else step.stream)
    logits = added(step.last * logits_gradient_CS(step.job, step.group), step.held_logits)
    return added(step.previous, given), step.activations - given, logits


def _head_reduced(step: Step) -> Instant:
    """Norm and head are reduced while the last layer is gathered."""
    behind = NONE if step.tied else step.in_reduction(step.behind, step.bare.behind)
    return Instant(
        LAYERS,
        {
            "gradients": added(step.earlier, step.fresh(step.behind), step.taking_over(step.behind)),
            "activations": step.in_layers,
            "gather_buffers": added(
                step.gathered(layers=1, head=False), behind, step.output(step.behind), step.waiting
            ),
            "bucket_buffers": step.copies,
            "temporaries": added(step.stream, step.retained(step.behind)),
        },
    )


def _head_accumulated(step: Step) -> Instant:
    """In a pipeline norm and head are not reduced but added to what stands, in the reduce format."""
    gradients, gathered, unit = step.of_state(_accumulated_at_head)
    return Instant(
        LAYERS,
        {
            "gradients": gradients,
            "activations": step.in_layers,
            "logits": step.held_logits,
            "gather_buffers": gathered,
            "temporaries": step.of_work(lambda own: own.previous + 2.0 * own.stream * own.last) + unit,
        },
    )


def _accumulated_at_head(step: Step) -> tuple[Reals, Reals, Reals]:
    """Gradients, gathered weights, and the unit of norm and head."""
    unit = np.where(step.managed, step.trained * step.compute * step.behind, 0.0)
    return step.earlier + step.fresh(step.passed_head), step.gathered(layers=1, head=True), unit


def _layers(step: Step) -> tuple[Instant, ...]:
    """The instants inside layers, of some of which alone full recompute may run forward again, and of their reduction."""
    is_few = not step.piped and step.group.layers_SK.sum(axis=1).min() <= FEW_LAYERS
    few = (_first_gathered(step),) if is_few else ()
    return (*_in_layers(step), *_of_others(step, _in_layers), _layer_reduced(step), *few)


def _of_others(step: Step, instants_of: Callable[[Step], Iterable[Instant]]) -> Iterable[Instant]:
    """The same of those layers that are computed again where others are not."""
    if not step.is_side:
        return ()
    from strategist.memory.partly import of_others  # few ask for it

    return of_others(step, instants_of)


def _in_layers(step: Step) -> tuple[Instant, ...]:
    """Each worst instant of a layer: in the last one (behind the head), and in the others that are looked at."""
    numbers = _numbers(*step.numbers)
    if step.has_apart:
        sides = Step.before_attention, Step.from_attention
        return tuple(_in_layer(step, numbers, side) for side in sides)
    if step.piped:
        last, others = (
            _in_layer(step, _numbers(0), Step.in_given_layer),
            _in_layer(step, numbers[1:], Step.in_layer),
        )
        return last, others
    return (_in_layer(step, numbers, Step.in_layer),)


def _numbers(*numbers: int) -> Column:
    """Layers by number as an axis in front."""
    return np.array(numbers)[:, None, None, None]


WorstOf = Callable[[Step, Reals], LayerInstants]
"""The worst instant of a layer when a share of the other layers is gone."""


def _in_layer(step: Step, number: Column, worst: WorstOf) -> Instant:
    """The worst instant of the `number`-th layers from the end of the chunk; -1 is its first layer, -2 its second."""
    found = step.once("layer", lambda own: _worst_at(own, number, worst))
    activations, whole, made, gone, waits, partial, joins, sooner, joined, every = found
    passed = step.of_state(lambda own: _passed_before(own, number, made, gone, sooner))
    before, done, routed, gathered, in_flight, gradients = passed
    if made is not NONE:
        gradients = step.earlier + step.fresh(added(done, made, gone), added(routed, gone))
    if step.piped:
        waits = added(waits, step.late, partial)
    else:
        if gone is not NONE:
            in_flight = np.where(gone > 0.0, step.trained * step.reduce * step.routed, in_flight)
        gathered = added(gathered, np.where(step.reduces, partial + in_flight, 0.0), step.waiting)
        waits = added(waits, step.old_head, step.retained(done), np.where(step.reduces, 0.0, partial))
        gradients = added(gradients, step.growing_head)
    terms = {
        "gradients": gradients,
        "activations": activations,
        "logits": step.held_logits,
        "gather_buffers": gathered,
        "temporaries": added(waits, joins, _still_outside(step, done, joined)),
    }
    if step.job.model.adapters is not None:
        terms["temporaries"] = terms["temporaries"] + step.unpacked
        if step.copies is not NONE:
            terms["bucket_buffers"] = step.copies_left(before)
    if step.has_copies:
        copies = np.where(step.plain, step.trained * step.compute * whole, 0.0)
        again, left = step.copies_again(every), step.copies_left(before)
        terms["bucket_buffers"] = np.where(again > 0, left, np.maximum(0.0, left - copies))
        again = np.maximum(0.0, again - np.where(again > 0, copies, 0.0))
        terms["temporaries"] = terms["temporaries"] + again
    return Instant(LAYERS, terms)


def _layers_before(step: Step, number: Column) -> tuple[Reals, Reals, Reals]:
    """Layers of the chunk, those that backward has passed before such a layer, and their share of the others, whatever their sort."""
    layers, before = np.maximum(step.layers_of_chunk, 1.0), step.passed_layers(number)
    return layers, before, before / np.maximum(layers - 1.0, 1.0)


def _worst_at(step: Step, number: Column, worst: WorstOf) -> tuple[Any, ...]:
    """At the worst instant of such a layer: what is kept, elements of matrices with gradients if autocast copied some, the same with stacked ones
    and without experts that are reduced where gradients join what stands at once, and those experts; what waits beside them, their gradients that are no part of what stands yet, what is about to join that, and
    elements whose gradients have; whether experts have yet to begin; elements of all its matrices where sorts differ."""
    _, before, share = _layers_before(step, number)
    at = worst(step, share)
    let_go = step.let_go(before, at.kept)
    if step.is_mixed:
        let_go = np.where(step.apart, step.let_go_in_turn(before), let_go)
    gone = np.where(step.apart, at.routed, 0.0) if step.has_apart else NONE
    weights = added(at.weights, at.stacked, -gone if step.has_apart else NONE)
    partial: Reals = step.trained * step.compute * np.where(step.at_once, 0.0, weights)
    waits, joins = at.temporaries, step.joining(at)
    if step.piped:
        is_given = before == 0  # in the chunk's last layer, which may be its only one
        waits = added(
            waits, -np.where(is_given, step.given * at.is_early, 0.0) if is_given.any() else NONE, step.previous
        )
        if not step.job.model.tied:  # nothing comes between
            waits, partial, joins = added(waits, partial, joins), NONE, NONE
    kept = np.maximum(step.inputs, step.in_layers - at.freed - let_go)
    sooner = at.is_sooner if step.has_apart else NOWHERE
    joined = step.joined(at) if step.empties.any() else NONE
    whole = at.weights if step.has_copies else NONE
    made = np.where(step.at_once, weights, 0.0) if step.at_once.any() else NONE
    return kept, whole, made, gone, waits, partial, joins, sooner, joined, at.every


def _passed_before(step: Step, number: Column, made: Reals, gone: Reals, sooner: Mask) -> tuple[Reals | float, ...]:
    """Layers of the chunk before such a layer, elements whose backward is over, of experts among them, gathered weights, the gradient of
    the unit before in reduction, and gradients that stand where the layer's own do not yet: some of it only where that is asked for."""
    layers, before, share = _layers_before(step, number)
    passed = share * np.maximum(0.0, step.counts.layers / step.chunks - step.widest)
    alone = before >= layers - 1.0 if step.piped else step.is_first_layer(before)
    if sooner is not NOWHERE:
        alone = alone | (step.apart & sooner)
    experts, routed, above = 1.0 * (gone == 0.0), step.routed_of(share), step.dense
    if sooner is not NOWHERE:
        experts = experts * ~(step.copies_experts_late & sooner)
    gathers = np.where(alone, 1, 2)
    units: Reals = NONE
    if step.is_mixed:
        units, above, of_turn, routed_of_turn, has = _in_turn_of_sorts(step, before, alone)
        passed, routed = np.where(step.apart, of_turn, passed), np.where(step.apart, routed_of_turn, routed)
        experts, gathers = experts * has, np.where(step.apart, 0, gathers)
    gathered = step.gathered(layers=gathers, head=False, passed=added(passed, gone), experts=experts)
    gathered = added(gathered, units)
    if step.piped:
        gathered = gathered + np.where(before >= layers - 1.0, step.ahead_of_time, 0.0)
    in_flight = NONE if step.piped else step.trained * step.reduce * np.where(before > 0, above, step.passed_head)
    done = step.passed_head + passed
    if made is not NONE:
        return before, done, routed, gathered, in_flight, NONE
    gradients = step.earlier + step.fresh(added(done, gone), added(routed, gone))
    return (
        (NONE, NONE, NONE, gathered, NONE, gradients)
        if step.piped
        else (before, done, routed, gathered, in_flight, gradients)
    )


def _in_turn_of_sorts(step: Step, before: Reals, alone: Mask) -> tuple[Reals, ...]:
    """Where layers with experts apart come last in forward: gathered units of the layer behind which `before` others are through, and of
    the next one, unless it is `alone`; elements of the unit above it, and of those that are through, of experts among them; whether it has experts."""
    those = step.experts_of_chunk

    def unit(number: Reals) -> Reals:
        return np.where(step.apart, np.where(number <= those - 0.5, step.beside, step.alone), step.dense)

    first, rest = np.minimum(before, those), np.maximum(before - those, 0.0)
    units = step.compute * (unit(before) + np.where(alone, 0.0, unit(before + 1.0)))
    gathered = np.where(step.apart & step.reshards, units, 0.0)
    has = np.where(step.apart, before <= those - 0.5, True)
    passed = first * (step.beside + step.routed) + rest * step.alone
    return gathered, unit(before - 1.0), passed, first * step.routed, has * 1.0


def _experts(step: Step) -> Iterator[Instant]:
    """Those of experts that are a unit of their own."""
    yield from _experts_forward(step)
    yield from _experts_backward(step)
    if step.is_mixed and not step.piped:
        yield _others_enter(step)
    yield from _of_others(step, _experts_backward)


def _experts_forward(step: Step) -> Iterator[Instant]:
    """Where experts are a unit of their own: they have worked in the last layer's forward, and their first buffer is still there
    where they were just gathered; then their results have gone back, and ZeRO-3 has given their weights back. Copies of the
    tokens are around: those sent and those that came, in the experts' order where no policy keeps them, and what experts gave,
    one by one and put together; then five that went both ways, two of them of a rank's own tokens. Last what shared experts gave is added up, beside what the routed ones did."""
    gathers, output = np.where(step.shards_gradients, step.compute * step.buffered, 0.0), NONE
    if step.piped:
        gathers = np.where(step.reshards, gathers + step.ahead_of_time, 0.0)
        output = step.stream * (1.0 - step.last)  # is not made yet
    sorted_ = np.where(step.c.is_word("recompute", "full"), 1.0, 0.0)[:, None]
    for experts, own, others in ((1.0, 1.0, 3.0 + sorted_), (0.0, 2.0, 3.0)):
        passing = own * step.layers.sent + others * step.layers.arrived
        terms = {
            "gradients": step.earlier,
            "activations": step.in_layers - step.layers.behind_experts - output,
            "logits": step.held_logits,
            "gather_buffers": _gathered_beside(step, 0.0, experts=experts) + gathers,
            "temporaries": added(step.previous, step.layers.in_forward + passing),
        }
        yield _where_apart(step, LOSS, terms, step.situation.alternates)
    terms = {
        "gradients": step.earlier,
        "activations": step.in_layers - step.layers.behind_experts - step.layers.made_by_experts - output,
        "logits": step.held_logits,
        "gather_buffers": _gathered_beside(step, step.beside, experts=1.0) + gathers,
        "temporaries": added(
            step.previous, step.layers.in_forward + step.layers.sent + (1.0 + sorted_) * step.layers.arrived
        ),
    }
    yield _where_apart(step, LOSS, terms, step.situation.alternates & step.reshards)
    if step.layers.adds_shared_up.any():
        terms = {
            "gradients": step.earlier,
            "activations": step.in_layers - output,
            "logits": step.held_logits,
            "gather_buffers": _gathered_beside(step, 0.0) + gathers,
            "temporaries": added(step.previous, 2.0 * (step.whole_stream + step.stream)),
        }
        yield _where_apart(step, LOSS, terms, step.situation.alternates & step.layers.adds_shared_up)


def _experts_backward(step: Step) -> Iterator[Instant]:
    """The same where backward computes it again, in each worst layer; and experts are reduced, or in a pipeline added to what
    stands, while the rest of the layer before is gathered. Where one rank has all of their state the last gradient is gone by then.
    Then their inputs' gradients go back, through one more copy."""
    layers, (own, before, let_go) = np.maximum(step.layers_of_chunk, 1.0), step.experts_before()
    passed = before * (step.beside + step.routed)
    behind = step.passed_head
    left = step.in_layers - let_go
    above = np.where(step.reduces, step.trained * step.reduce * np.where(before > 0, step.beside, behind), 0.0)
    early = np.where(before >= layers - 1.0, step.ahead_of_time, 0.0) if step.piped else NONE
    done = behind + passed, before * step.routed
    gathered = _gathered_beside(step, 0.0, passed=passed, experts=1.0)
    terms = {
        "gradients": step.earlier + step.fresh(*done),
        "activations": left - step.layers.used_by_experts,
        "logits": step.held_logits,
    }
    for buffers, own_terms in _experts_again(step):
        buffered = added(gathered, buffers, above, step.waiting, early)
        activations = terms["activations"] + own_terms["activations"]
        again = terms | own_terms | {"activations": activations, "gather_buffers": buffered}
        yield _where_apart(step, LAYERS, again, ~step.c.is_word("recompute", "none")[:, None])
    at = step.layers.experts_end
    yield _experts_enter(
        step, terms, left, added(gathered, step.trained * step.compute * at.weights, above, step.waiting)
    )
    kept = {
        "activations": np.maximum(step.inputs, left - at.freed),
        "logits": step.held_logits,
        "temporaries": added(at.temporaries - step.compute * step.layers.bare_experts, step.previous, step.late),
    }
    alone = step.is_first_layer(before)
    following = np.where(own >= step.experts_of_chunk - 1.0, step.dense, step.beside)
    gathered = added(
        _gathered_beside(step, np.where(alone, 0.0, following), passed=passed + step.routed),
        step.trained * step.compute * at.weights,
        step.waiting,
        early,
    )
    last = step.trained * step.compute * at.stacked
    through = step.earlier + step.fresh(done[0] + step.routed, done[1] + step.routed)
    if step.piped:
        gathered = gathered + np.where(step.at_once, 0.0, last)
        yield _where_apart(step, LAYERS, kept | {"gradients": through, "gather_buffers": gathered})
        return
    sent = step.trained * step.reduce * step.routed
    every = step.trained * step.compute * step.layers.bare_experts
    unshared = step.sharers == 1
    made = {"gradients": step.earlier + step.fresh(*done), "gather_buffers": gathered + sent + every}
    yield _where_apart(step, LAYERS, kept | made)
    made = {
        "gradients": added(through, step.taking_over(step.routed, routed=True)),
        "gather_buffers": added(gathered, sent + np.where(unshared, 0.0, last), step.output(step.routed, routed=True)),
    }
    yield _where_apart(step, LAYERS, kept | made)
    back = kept["temporaries"] + step.layers.arrived
    made = {"gradients": through, "gather_buffers": gathered + sent, "temporaries": back}
    yield _where_apart(step, LAYERS, kept | made)


def _experts_enter(step: Step, terms: Mapping[str, Reals], left: Reals, gathered: Reals) -> Instant:
    """Under ZeRO-3, where nothing is computed again: backward enters the experts, which are there as they were gathered ahead of time and
    as matrices. The layer before is gathered behind them."""
    gradients, gone = step.layers.given_to_experts
    held = {
        "activations": left - gone,
        "gather_buffers": gathered + step.compute * step.buffered,
        "temporaries": gradients,
    }
    enters = step.reshards & (not step.piped) & step.c.is_word("recompute", "none")[:, None]
    return _where_apart(step, LAYERS, {**terms, **held}, enters & (step.buffered > 0.0))


def _others_enter(step: Step) -> Instant:
    """Under ZeRO-3 backward enters the first layer without experts, as it was gathered ahead of time and as matrices, while the one above
    is reduced; where all layers are alike their reduction is as much."""
    those = step.experts_of_chunk
    done, routed = step.passed_head + those * (step.beside + step.routed), those * step.routed
    units = 2.0 * step.compute * step.alone + np.where(step.reduces, step.trained * step.reduce * step.beside, 0.0)
    held = {
        "gradients": step.earlier + step.fresh(done, routed),
        "activations": np.maximum(step.inputs, step.in_layers - step.let_go_in_turn(those)),
        "gather_buffers": added(step.gathered(layers=0, head=False), units, step.waiting),
        "temporaries": added(step.stream, step.retained(done)),
    }
    return _where_apart(step, LAYERS, held, step.reshards & (those < step.layers_of_chunk))


def _gathered_beside(
    step: Step, following: Reals | float, passed: Reals | float = 0.0, experts: Reals | float = 0.0
) -> Reals:
    """Gathered weights while a layer with experts apart works: its own unit under ZeRO-3, that of the layer that comes next, and
    so many times its experts; else all that backward has not passed."""
    units = np.where(step.managed & step.reshards, step.compute * (step.beside + following), 0.0)
    return step.gathered(layers=0, head=False, passed=passed, experts=experts) + units


def _experts_again(step: Step) -> Iterator[tuple[Reals, dict[str, Reals]]]:
    """Where backward computes experts again: the buffer that they were gathered into while it is still there, and what else is; when
    their results are put together, which selective recompute keeps one by one until then, and when they have gone back."""
    layers, is_selective = step.layers, step.c.is_word("recompute", "selective")[:, None]
    results = np.where(is_selective, layers.arrived, 0.0)
    for buffers, own, held in ((1.0, 1.0, results), (0.0, 2.0, np.zeros_like(results))):
        tokens_there = layers.at_experts + own * layers.sent + 3.0 * layers.arrived - held
        yield (
            np.where(step.reshards, buffers * step.compute * step.buffered, 0.0),
            {"activations": held, "temporaries": added(tokens_there, step.stream, step.previous, step.late)},
        )


def _where_apart(step: Step, moment: int, terms: Mapping[str, Reals], mask: Mask | bool = True) -> Instant:
    """An instant of candidates whose experts lie apart, on stages that have some."""
    where = step.apart & mask & (step.counts.experts > 0.0)
    return Instant(moment, {name: np.where(where, held, 0.0) for name, held in terms.items()})


def _still_outside(step: Step, done: Reals, joined: Reals) -> Reals:
    """Gradients outside DDP's buckets when those of `done` and `joined` elements have gone into theirs, which the last micro-batch does."""
    if step.outside is NONE:
        return NONE
    left = np.maximum(0.0, step.outside - step.trained * step.stored * added(done, joined))
    return np.where(step.empties, left, step.outside)


def _layer_reduced(step: Step) -> Instant:
    """A layer is reduced while the next one is gathered, if there is one: its gradients and their copy, then the copy, what comes out and the
    gradient that was copied last. In a pipeline it is added to what stands, in the reduce format."""
    behind = step.passed_head
    terms = {
        "activations": step.of_work(lambda own: np.maximum(own.inputs, own.in_layers - own.layers.largest)),
        "logits": step.held_logits,
    }
    if step.piped:
        gradients, gathered, adds = step.of_state(_layer_accumulated)
        waits = step.of_work(lambda own: own.stream + own.previous)
        held = {"gradients": gradients, "gather_buffers": gathered, "temporaries": added(waits, step.late, adds)}
        return Instant(LAYERS, terms | held)
    gathered = step.gathered(layers=np.where(step.layers_of_chunk > 1, 1, 0), head=False, passed=step.widest)
    bare = step.bare.widest[:, None] / pieces_C(step.group)[:, None]
    unit, above, routed, passed = step.dense, step.routed, step.routed, step.widest
    if step.has_apart:
        bare = np.where(step.apart, step.dense, bare)
    if step.is_mixed:
        own = _reduced_in_turn(step)
        old = unit, above, routed, passed, gathered, terms["activations"]
        pairs = (np.where(step.apart, *pair) for pair in zip(own, old, strict=True))
        unit, above, routed, passed, gathered, terms["activations"] = pairs
        bare = np.where(step.apart, unit, bare)
    gone = np.where(step.reduces & step.shards_gradients, step.trained * step.compute * (bare - step.layers.final), 0.0)
    before = added(behind, above)
    made = step.fresh(before + unit, routed)
    given = added(step.output(unit), step.taking_over(unit), made)
    is_copied = gone <= given - step.fresh(before, routed)
    done = np.where(is_copied, unit, 0.0)
    reduced = step.in_reduction(unit, bare) - np.where(is_copied, gone, 0.0)
    return Instant(
        LAYERS,
        terms
        | {
            "gradients": added(step.earlier, step.fresh(before + done, routed), step.taking_over(done)),
            "gather_buffers": added(gathered, reduced, step.output(done), step.waiting),
            "temporaries": added(step.stream, step.retained(behind + passed)),
        },
    )


def _first_gathered(step: Step) -> Instant:
    """ZeRO-3 without a pipeline: the first layer's weights leave the buffer that they were gathered into, while the unit above is still
    copied for its reduction (FSDPState, _pre_backward, unshards before the layer's backward begins). Behind any other layer the next one
    is gathered then, and its own gradients are more; of one or two layers this one can hold most."""
    layers = step.layers_of_chunk
    gathers, two = step.managed & step.reshards & ~step.apart & (layers > 0) & (layers <= FEW_LAYERS), layers > 1
    done = step.passed_head + np.where(two, step.widest, 0.0)
    above = np.where(two, step.widest, step.passed_head)
    held = step.gathered(layers=1, head=False) + step.compute * step.packed * step.widest
    kept = step.of_work(lambda own: own.in_layers - np.where(own.layers_of_chunk > 1, own.layers.largest, 0.0))
    terms = {
        "gradients": step.earlier + step.fresh(done),
        "activations": kept,
        "gather_buffers": added(held, step.trained * step.reduce * above, step.waiting),
        "temporaries": added(step.stream, step.retained(done)),
    }
    return Instant(LAYERS, {name: np.where(gathers, part, 0.0) for name, part in terms.items()})


def _reduced_in_turn(step: Step) -> tuple[Reals, ...]:
    """Where layers with experts apart come last in forward, of the first of them that is reduced, and of the first layer without any:
    elements of its own unit, of those through before it, experts of these and of its own, and all that are through; gathered
    weights; what is kept."""
    those = step.experts_of_chunk
    before = np.stack((np.zeros_like(those), those))
    units, _, passed, routed, has = _in_turn_of_sorts(step, before, step.is_first_layer(before))
    unit = np.where(has > 0.0, step.beside, step.alone)
    above, routed = passed + has * step.routed, routed + has * step.routed
    gathered = step.gathered(layers=0, head=False, passed=above + unit) + units
    return (
        unit,
        above,
        routed,
        above + unit,
        gathered - np.where(step.apart & step.reshards, step.compute * unit, 0.0),
        np.maximum(step.inputs, step.in_layers - step.let_go_in_turn(before + 1.0)),
    )


def _layer_accumulated(step: Step) -> tuple[Reals, Reals, Reals]:
    """In a pipeline when a layer is added to what stands: gradients, gathered weights, and what is added."""
    last = np.where(step.stands, step.dense, step.layers.last_matrix)  # casts go one by one
    adds = np.where(step.at_once, 0.0, step.trained * step.compute * last)
    made = step.fresh(step.passed_head + step.widest)
    return step.earlier + made, step.gathered(layers=1, head=False, passed=step.widest), adds


def _end(step: Step) -> tuple[Instant, ...]:
    """Without a pipeline: the embedding's gradient, and its reduction. A tied head's is a copy of the product's result under autocast, to
    which autograd adds the embedding's in place; elsewhere it is a view of that result, and their sum is a third, made when the stream is gone."""
    counts, c = step.counts, step.c
    table = step.rows if c.serves_tables else _table(step)
    gradient = step.ends * np.where(step.managed, step.compute * step.bare.before, step.stored * table)
    stream = np.where(step.managed, 1.0, step.stored / step.compute) * step.whole_stream * step.first
    if step.job.model.adapters is not None:  # nothing goes back to a frozen embedding
        stream = np.zeros_like(stream)
    direct = ~step.managed & ~step.stands
    keeps = np.where(step.managed & (~step.reshards | step.tied), step.compute * step.outer, 0.0)
    flight = np.where(step.reduces, step.trained * step.reduce * step.dense, 0.0)
    in_unit = np.where(step.reduces, step.compute * step.head, 0.0) if step.tied and not step.c.chunks_loss else NONE
    third = NONE if step.casts else step.head_outside
    beside = added(np.maximum(stream - in_unit, third), step.head_outside)
    made = {
        "gradients": step.earlier
        + np.where(direct, step.fresh(counts.whole), step.fresh(counts.whole - step.outer, step.routed_of(None))),
        "activations": added(step.others, step.places),
        "gather_buffers": np.where(step.reduces, keeps + flight + gradient + added(step.waiting, in_unit), keeps),
        "temporaries": np.where(direct | step.reduces, 0.0, gradient)
        + step.retained(counts.whole - step.outer)
        + beside,
    }
    reduced = {
        "gradients": added(step.at_rest, step.taking_over(step.outer)),
        "activations": step.inputs,
        "gather_buffers": step.in_reduction(step.outer, step.outer) + step.output(step.outer),
        "temporaries": step.retained(counts.whole),
    }
    adds = (c["accumulation"] > 2) | c.serves_tables  # rows of a server's table never become what stands
    gathering = {
        "gradients": step.earlier,
        "activations": added(step.inputs, step.places),
        "temporaries": added(step.outside, beside, np.where(adds[:, None], gradient, 0.0)),
    }
    return Instant(END, made), Instant(END, reduced), Instant(END, gathering)


def _summed(step: Step) -> Instant:
    """Under nn.DataParallel: device 0 has the whole gradients of its own replica, their sum with those of the others, one piece
    of which is laid flat, and what earlier micro-batches left, to which the sum is added then. Source: PyTorch 2.13 torch/nn/parallel/comm.py,
    reduce_add_coalesced, which autograd calls once all replicas' gradients are there (_functions.py, Broadcast.backward)."""
    own = step.trained * step.stored * step.counts.whole
    return Instant(
        END,
        {
            "gradients": np.where(step.several, step.earlier, step.settled),
            "activations": step.inputs,
            "temporaries": own + np.minimum(own, COALESCED_BYTES) + np.where(step.several, step.settled, 0.0),
        },
    )


def _hooked(step: Step) -> Iterator[Instant]:
    """Under a hook of DDP: buckets on their way."""
    from strategist.memory.compression import hook_instants  # few ask for any

    return hook_instants(step)


def _table(step: Step) -> Reals:
    """Elements of the token table on the rank, where the pass goes through it."""
    one = np.ones_like(step.c["tp"])
    return vocabulary_elements(step.job.model, step.c["tp"], one)[:, None] * step.first


def _end_of_pass(step: Step) -> tuple[Instant, Instant]:
    """In a pipeline: the embedding's gradient; it is cast to the reduce format, and other passes are in flight."""
    made, cast, gathered, before = step.of_state(_gradients_at_end)
    common = {
        "activations": step.of_work(lambda own: own.others + own.stream * own.first),
        "logits": step.held_logits,
        "gather_buffers": gathered,
    }
    whole = step.of_work(lambda own: own.whole_stream * own.first)
    return (
        Instant(END, common | {"gradients": made, "temporaries": added(before, whole, step.previous, step.late)}),
        Instant(END, common | {"gradients": cast, "temporaries": added(before, step.previous, step.late)}),
    )


def _gradients_at_end(step: Step) -> tuple[Reals, Reals, Reals, Reals]:
    """In a pipeline: gradients when the embedding's is made and when it is cast, gathered weights, and the one that is cast."""
    tables = np.where(step.at_once, _table(step), step.before)  # the positions' gradient joined what stands before
    before = step.trained * np.where(step.managed, step.compute, step.stored) * tables
    direct = ~step.stands & (~step.managed | (step.compute == step.reduce))
    early = np.where(
        step.managed & step.reshards & (step.situation.others_first > 0), step.compute * step.widest * step.first, 0.0
    )
    inside = step.fresh(step.counts.layers / step.chunks + step.passed_head)
    cast = step.fresh(step.counts.layers / step.chunks + step.behind + _table(step))
    return (
        step.earlier + np.where(direct, step.fresh(_of_pass(step)), inside),
        step.earlier + cast,
        step.gathered(layers=0, head=False) + (-step.not_again if step.job.model.tied else early),
        np.where(direct, 0.0, before),
    )


def _of_pass(step: Step) -> Reals:
    """Elements of all weights that the pass goes through."""
    return step.counts.layers / step.chunks + step.before + step.behind


def _reductions(step: Step) -> Iterator[Instant]:
    """In a pipeline, when all is computed: the units of the last chunk are reduced one after the other, first to last; each is
    copied once, and its last gradient, which may be all of it, is there until the result is."""
    activations, logits = step.of_work(_kept_in_reduction)
    for gradients, gathered in step.of_state(_units_reduced):
        held = {"gradients": gradients, "activations": activations, "logits": logits, "gather_buffers": gathered}
        yield Instant(END, held)


def _lets_go(step: Step) -> Mask:
    """Where nothing of the last forward pass is held any more when units are reduced."""
    return np.asarray((step.chunks > 1) | step.c.is_word("schedule", "zb_h1")[:, None], np.bool_)


def _kept_in_reduction(step: Step) -> tuple[Reals, Reals]:
    """The step's inputs and what a stage sent last; logits."""
    let_go = _lets_go(step)
    held = on_stages(np.where(let_go, 0.0, step.stream)[:, 0], ~step.group.is_last)  # of the last forward pass
    return step.inputs + held, np.where(let_go, 0.0, held_logits_CS(step.job, step.group))


def _units_reduced(step: Step) -> tuple[tuple[Reals, Reals], ...]:
    """Gradients, and a unit's copy beside the weights that are still gathered, of one unit after the other."""
    counts = step.counts
    own = counts.layers / step.chunks
    behind = np.where(step.chunks > 1, 0.0, counts.behind)
    whole = np.maximum(counts.whole, 1.0)
    out = step.trained * np.where(step.shards_gradients, step.reduce / step.shards, 0.0)
    done = counts.whole - counts.before - own - behind
    layer = np.minimum(step.dense, own)
    apart = ((step.routed, own - layer, False),) if step.has_apart else ()
    first = np.where(step.apart, layer, own) if step.has_apart else own
    units = (
        (counts.before, counts.before, step.job.model.pos != "learned"),
        (layer, first, False),
        *apart,
        (behind, behind, True),
    )
    found = []
    for unit, passed, alone in units:
        left = counts.whole - done
        made = out * unit if alone else 0.0
        copied, gathered = step.trained * step.reduce * unit, np.where(step.reshards, 0.0, left - unit)
        gradients = step.at_rest * (left / whole) + step.settled * (done / whole) + made
        found.append((gradients, np.where(step.managed, copied + step.compute * gathered, 0.0)))
        done = done + passed
    return tuple(found)


def _update(step: Step) -> Instant:
    """The update, and what it makes of all weights at once. Tied ends of a pipeline exchange their gradients; without units a rank's term of the
    gradient of learned positions, under sequence parallelism, is there beside the sum."""
    ends, shape, c = step.group.is_first | step.group.is_last, step.job.model, step.c
    table = vocabulary_elements(shape, c["tp"], np.where(c["zero"] >= 2, step.shards[:, 0], 1))
    theirs = step.trained * step.stored * on_stages(table, ends & step.piped & shape.tied)
    sums = on_stages(~step.managed[:, 0] & (c["sequence_parallel"] > 0), step.group.is_first)
    positions = step.trained * step.stored * shape.hidden * shape.pos_rows * (shape.pos == "learned")
    terms = {
        "gradients": step.settled + positions * sums,
        "activations": step.inputs,
        "pipeline_buffers": theirs,
    }
    copies = step.trained * step.stored * step.job.profile.update_copies
    if copies:
        terms["temporaries"] = copies * _owned(step)
    elif step.job.profile.has_units and step.job.workload.optimizer == "adamw8bit":
        terms["temporaries"] = decoded_bytes(_owned(step)) * c.is_word("offload", "none")[:, None]
    elif step.job.workload.optimizer == "muon":
        turning = turning_bytes_CS(step.job, step.group)  # once the other end's gradient is gone
        terms |= {
            "pipeline_buffers": np.where(theirs < turning, 0.0, theirs),
            "temporaries": np.where(theirs < turning, turning, 0.0),
        }
    return Instant(UPDATE, terms)


def _owned(step: Step) -> Reals:
    """Elements whose state a rank keeps, (C, S)."""
    return np.where(shards_state(step.c, 1)[:, None], step.bare.sharded, step.bare.whole)
