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

import numpy as np

from strategist.columns import on_stages
from strategist.facts.job import Job
from strategist.memory.logits import forward_bytes_CS, held_logits_CS, loss_bytes_CS
from strategist.memory.logits import gradient_bytes_CS as logits_gradient_CS
from strategist.memory.model_states import decoded_bytes, shards_state
from strategist.memory.situations import Schedule, Situation, one_pass
from strategist.memory.step import END, LAYERS, LOSS, NONE, UPDATE, Instant, LayerInstants, Layers, Step, added
from strategist.space.candidates import Column, Mask, Reals
from strategist.space.shares import Elements, Group, pieces_C, tokens, vocabulary_elements
from strategist.space.traffic import COALESCED_BYTES


def instants(
    job: Job,
    group: Group,
    counts: Elements,
    layers: Layers,
    at_rest: Reals,
    settled: Reals,
    *,
    at_loss: bool = False,
) -> tuple[Instant, ...]:
    """Every instant at which some candidate can peak, or only the fullest two of the loss. `at_rest` are gradients while
    micro-batches follow each other, `settled` those that the update finds, (C, S) each."""

    def in_situation(situation: Situation) -> Step:
        made_of = _tiled_step() if group.is_tiled else Step
        return made_of(job, group, counts, layers, at_rest, settled, situation)

    if group.pp == 1:
        step = in_situation(one_pass(group.candidates["accumulation"]))
        if at_loss:
            return _loss(step)
        return (
            *_gathering(step),
            *_loss(step),
            *_head(step),
            _head_reduced(step),
            *_layers_or_slices(step),
            *((*_experts_forward(step), *_experts_backward(step)) if step.has_apart else ()),
            *_end(step),
            *((_summed(step),) if group.candidates.in_threads else ()),
            *(_hooked(step) if "compression" in group.candidates.columns else ()),
            _update(step),
        )
    if group.is_v_shaped:
        from strategist.memory.vee import v_instants, v_loss  # of a schedule that is rarely asked for

        if at_loss:
            return tuple(v_loss(job, group, in_situation))
        return tuple(v_instants(job, group, in_situation, lambda step: (*_layers(step), *_end_of_pass(step)), _update))
    schedule = Schedule(group)
    if at_loss:
        at_most = _loss(in_situation(schedule.at(schedule.second_of_last_chunk())))
        return _in_two_parts(job, group, in_situation, at_most, at_loss=True) if schedule.splits else at_most
    firsts = schedule.first_of_first_chunk(), schedule.second_of_first_chunk()
    if schedule.has_chunks:
        second = schedule.second_of_last_chunk()
        every = schedule.at(schedule.first_pass(), second, *firsts, schedule.fullest())
        heads, bodies = in_situation(every.of(slice(2))), in_situation(every.of(slice(1, None)))
    else:
        heads = bodies = in_situation(schedule.at(*firsts))
    passes = (
        *_loss(heads),
        *_head(heads),
        _head_accumulated(heads),
        *_forward(bodies),
        *_layers(bodies),
        *((*_experts_forward(bodies), *_experts_backward(bodies)) if bodies.has_apart else ()),
        *_end_of_pass(bodies),
    )
    passes = (*passes, *_reductions(bodies))
    if schedule.splits:
        from strategist.memory.weight_passes import split_end

        return (*_in_two_parts(job, group, in_situation, passes), *split_end(bodies, _update(bodies)))
    return (*passes, _update(bodies))


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
        flat = np.where(step.apart, step.dense + last, flat)
    flat = step.compute * flat
    head = step.gathered(layers=0, head=True) + step.compute * (step.behind + last)
    gradients = np.where(gathers, step.earlier, 0.0)
    return (
        Instant(
            LOSS,
            {
                "gradients": gradients,
                "activations": np.where(gathers, np.maximum(step.inputs, step.in_layers - step.layers.largest), 0.0),
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


def _forward(step: Step) -> tuple[Instant, ...]:
    """In a pipeline under ZeRO-3, as long as forward and backward passes alternate: the embedding is gathered, from one buffer
    into another, beside the first layer; a layer, beside what was gathered too early, the worst of them; inside the last
    layer, or the head beside it. Then a backward pass begins with the last layer, behind which the next is gathered, and when
    only such passes are left, an embedding that is the root unit."""
    shards = step.reshards & step.managed
    runs = shards & step.situation.alternates
    tied = step.job.model.tied
    several = step.layers_of_chunk > 1
    table = step.compute * (2.0 * step.before + (2.0 if tied else 1.0) * step.widest) * step.first
    terms = (
        2.0 * _whole_stream(step) * (step.first * (not tied))
    )  # what a part of the table gives, and as ranks add it up
    layer = step.compute * (2.0 * step.widest + (step.before if tied else 0.0)) + step.ahead_of_time
    last = step.compute * (2.0 * step.behind + step.widest) * step.last
    inside = {"gradients": step.earlier, "activations": step.in_layers, "logits": step.held_logits}
    again = step.compute * (2.0 * step.before + np.where(several, 2.0, 1.0) * step.widest) * (tied and step.first)
    again = np.maximum(np.where(runs, 0.0, again), 2.0 * step.compute * step.widest)
    keeps = runs & step.c.is_word("recompute", "none")[:, None]
    made = step.stream * (
        step.last - (step.c["sequence_parallel"] > 0)[:, None]
    )  # the layer's output is not summed up yet
    return (
        Instant(
            LOSS,
            {
                "gradients": step.earlier,
                "activations": step.others + step.stream * step.first,
                "gather_buffers": np.where(runs, table, 0.0),
                "temporaries": np.where(runs & (step.c["sequence_parallel"] > 0)[:, None], terms, 0.0),
            },
        ),
        _gathered_in_turn(step, runs),
        Instant(
            LOSS,
            inside
            | {
                "activations": step.in_layers - step.layers.rest + np.where(keeps, made, 0.0),
                "gather_buffers": np.where(runs, np.maximum(layer, last), 0.0),
                "temporaries": step.previous
                + np.where(keeps, step.layers.result, np.where(runs, step.layers.transient, 0.0)),
            },
        ),
        Instant(
            LAYERS,
            inside
            | {"gather_buffers": np.where(shards & step.situation.is_begun, again, 0.0), "temporaries": step.previous},
        ),
    )


def _gathered_in_turn(step: Step, runs: Mask) -> Instant:
    """In a pipeline forward gathers a layer whose predecessor's first buffer is still there: the last one, or the one before it
    as long as the last one's buffer is there too, which an earlier backward pass has gathered."""
    layers, widest = step.layers_of_chunk, step.compute * step.widest
    early = step.situation.is_begun & (step.situation.others > 0) & ~step.group.is_last[None, :]
    beside = [np.maximum(step.others, step.in_layers - gone * step.layers.largest) for gone in (1.0, 2.0)]
    sooner = early & (layers > 2) & (widest > beside[0] - beside[1])
    root = step.compute * (step.before if step.job.model.tied else 0.0)
    head = np.where(step.group.is_last[None, :], step.ahead_of_time, 0.0)
    kept = np.where(sooner, beside[1], beside[0])
    turns = np.where(sooner, 4.0, 3.0) - step.apart if step.has_apart else np.where(sooner, 4.0, 3.0)
    return Instant(
        LOSS,
        {
            "gradients": step.earlier,
            "activations": np.where(runs, kept, 0.0),
            "logits": step.held_logits,
            "gather_buffers": np.where(runs & (layers > 1), turns * widest + root + head, 0.0),
            "temporaries": step.previous,
        },
    )


def _loss(step: Step) -> tuple[Instant, ...]:
    """The loss itself: logits, their float32 copy and log-probabilities, with all that autocast's cache holds. Then its own
    backward: log-probabilities, their gradient, and the gradient of the logits."""
    if step.c.chunks_loss:
        return (_loss_in_chunks(step),)
    both = {
        "gradients": step.earlier,
        "activations": step.activations,
        "gather_buffers": step.gathered_at_loss,
        "bucket_buffers": added(step.copies, step.head_copy),
    }
    waits = added(step.previous, step.outside)
    new = step.last * (forward_bytes_CS(step.job, step.group) - held_logits_CS(step.job, step.group))
    forward = both | {"logits": added(new, step.held_logits), "temporaries": added(waits, step.cached)}
    logits = added(step.last * loss_bytes_CS(step.job, step.group), step.held_logits)
    softmax = both | {"logits": logits, "temporaries": waits}
    return Instant(LOSS, forward, is_loss=True), Instant(LOSS, softmax, is_loss=True)


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
    gradient = step.ends * step.compute * step.head
    before = added(step.previous, step.outside, step.last * step.stream)
    own = 0.0 if step.tied else step.fresh(step.head)
    keeps = ~step.managed & (not step.casts)
    at_once = np.where(keeps, own, 0.0)
    joins = keeps & ~step.stands & (not step.tied)
    made = {
        "gradients": step.earlier + at_once,
        "activations": step.activations,
        "logits": added(step.last * logits_gradient_CS(step.job, step.group), step.held_logits),
        "gather_buffers": added(
            step.gathered(layers=1, head=True), NONE if step.piped else np.where(step.reduces, gradient, 0.0)
        ),
        "bucket_buffers": added(step.copies, step.head_copy),
        "temporaries": before + np.where(step.reduces | joins, 0.0, gradient),
    }
    casting = NONE
    if step.has_copies:
        stored = np.where(step.stands | step.tied, step.ends * step.stored * step.head, 0.0)
        casting = np.where(step.plain, gradient + stored, 0.0)
    cast = {
        "gradients": step.earlier + own,
        "activations": step.activations - step.last * step.stream,
        "logits": step.held_logits,
        "gather_buffers": step.gathered(layers=0, head=True),
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
    unit = np.where(step.managed, step.trained * step.compute * step.behind, 0.0)
    return Instant(
        LAYERS,
        {
            "gradients": step.earlier + step.fresh(step.passed_head),
            "activations": step.in_layers,
            "logits": step.held_logits,
            "gather_buffers": step.gathered(layers=1, head=True),
            "temporaries": step.previous + 2.0 * step.stream * step.last + unit,
        },
    )


def _layers(step: Step) -> tuple[Instant, ...]:
    """Each worst instant of a layer: in the last one (behind the head), in the one before it and in the first; under ZeRO-3,
    which has nothing to gather beside the first, in the second too."""
    numbers = _numbers(0, 1, -2, -1) if step.reshards.any() and not step.piped else _numbers(0, 1, -1)
    if step.has_apart:
        sides = step.before_attention, step.from_attention
        return *(_in_layer(step, numbers, side) for side in sides), _layer_reduced(step)
    if step.piped:
        last, others = (
            _in_layer(step, _numbers(0), step.in_given_layer),
            _in_layer(step, _numbers(1, -1), step.in_layer),
        )
        return last, others, _layer_reduced(step)
    return _in_layer(step, numbers, step.in_layer), _layer_reduced(step)


def _numbers(*numbers: int) -> Column:
    """Layers by number as an axis in front."""
    return np.array(numbers)[:, None, None, None]


def _in_layer(step: Step, number: Column, worst: Callable[[Reals], LayerInstants]) -> Instant:
    """The worst instant of the `number`-th layers from the end of the chunk; -1 is its first layer, -2 its second."""
    own = step.counts.layers / step.chunks
    layers = np.maximum(step.layers_of_chunk, 1.0)
    before = np.where(number < 0, np.maximum(layers + number, 0.0), np.minimum(number, layers - 1.0))
    share = before / np.maximum(layers - 1.0, 1.0)  # of the other layers, whatever their sort
    at = worst(share)
    passed = share * np.maximum(0.0, own - step.widest)
    given = np.where(before > 0, 0.0, step.given * at.is_early) if step.piped else NONE
    let_go = share * (step.layers.every / step.chunks - at.kept)
    behind = step.passed_head
    done = behind + passed
    gone = np.where(step.apart, at.routed, 0.0) if step.has_apart else NONE  # experts that are reduced
    weights = added(at.weights, at.stacked, -gone if step.has_apart else NONE)
    partial = step.trained * step.compute * np.where(step.at_once, 0.0, weights)
    made = np.where(step.at_once, weights, 0.0)
    alone = (number == -1) & (not step.piped)
    through = added(passed, gone)
    gathered = step.gathered(layers=np.where(alone, 1, 2), head=False, passed=through, experts=1.0 * (gone == 0.0))
    if step.piped:
        gathered = gathered + np.where(before >= layers - 1.0, step.ahead_of_time, 0.0)
        waits = added(at.temporaries, -given, step.previous, step.late, partial)
    else:
        in_flight = step.trained * step.reduce * np.where(before > 0, step.dense, behind)
        if gone is not NONE:
            in_flight = np.where(gone > 0.0, step.trained * step.reduce * step.routed, in_flight)
        gathered = added(gathered, np.where(step.reduces, partial + in_flight, 0.0), step.waiting)
        waits = added(at.temporaries, step.old_head, step.retained(done), np.where(step.reduces, 0.0, partial))
    terms = {
        "gradients": step.earlier + step.fresh(added(done, made, gone), added(step.routed_of(share), gone)),
        "activations": np.maximum(step.inputs, step.in_layers - at.freed - let_go),
        "logits": step.held_logits,
        "gather_buffers": gathered,
        "temporaries": added(waits, step.joining(at), _still_outside(step, done)),
    }
    if step.job.model.adapters is not None:
        terms["temporaries"] = terms["temporaries"] + step.unpacked
        if step.copies is not NONE:
            terms["bucket_buffers"] = step.copies * (1.0 - before / layers)
    if step.has_copies:
        copies = np.where(step.plain, step.trained * step.compute * at.weights, 0.0)
        again = np.maximum(0.0, step.copies_again - np.where(step.copies_again > 0, copies, 0.0))
        terms["bucket_buffers"] = np.maximum(0.0, step.copies * (1.0 - before / layers) - copies)
        terms["temporaries"] = terms["temporaries"] + again
    return Instant(LAYERS, terms)


def _experts_forward(step: Step) -> Iterator[Instant]:
    """Where experts are a unit of their own: they have worked in the last layer's forward, and their first buffer is still there
    where they were just gathered; then their results have gone back, and ZeRO-3 has given their weights back."""
    gathers, output = np.where(step.shards_gradients, step.compute * step.routed, 0.0), NONE
    if step.piped:
        gathers = np.where(step.reshards, gathers + step.ahead_of_time, 0.0)
        output = step.stream * (1.0 - step.last)  # is not made yet
    for experts, times in ((1.0, 4.0), (0.0, 5.0)):
        terms = {
            "gradients": step.earlier,
            "activations": step.in_layers - step.layers.behind_experts - output,
            "logits": step.held_logits,
            "gather_buffers": step.gathered(layers=1, head=False, experts=experts) + gathers,
            "temporaries": added(step.previous, step.layers.at_experts(times)),
        }
        yield _where_apart(step, LOSS, terms, step.situation.alternates)


def _experts_backward(step: Step) -> Iterator[Instant]:
    """The same where backward computes it again, in each worst layer; and experts are reduced, or in a pipeline added to what
    stands, while the rest of the layer before is gathered. Where one rank has all of their state the last gradient is gone by then,
    and what counts is when their inputs' gradients go back, through two more copies."""
    number = _numbers(0, 1, -2, -1)
    own = step.counts.layers / step.chunks
    layers = np.maximum(step.layers_of_chunk, 1.0)
    before = np.where(number < 0, np.maximum(layers + number, 0.0), np.minimum(np.maximum(number, 0), layers - 1.0))
    share = before / np.maximum(layers - 1.0, 1.0)
    passed = share * np.maximum(0.0, own - step.dense - step.routed)
    behind = step.passed_head
    left = step.in_layers - share * (step.layers.every / step.chunks - step.layers.largest)
    above = np.where(step.reduces, step.trained * step.reduce * np.where(before > 0, step.dense, behind), 0.0)
    early = np.where(before >= layers - 1.0, step.ahead_of_time, 0.0) if step.piped else NONE
    done = behind + passed, step.routed_of(share)
    recomputes = ~step.c.is_word("recompute", "none")[:, None]
    for buffers, times in ((1.0, 4.0), (0.0, 5.0)):
        again = np.where(step.reshards, buffers * step.compute * step.routed, 0.0)
        gathered = step.gathered(layers=1, head=False, passed=passed, experts=1.0)
        terms = {
            "gradients": step.earlier + step.fresh(*done),
            "activations": left - step.layers.behind_experts,
            "logits": step.held_logits,
            "gather_buffers": added(gathered, again, above, step.waiting, early),
            "temporaries": added(step.layers.at_experts(times), step.stream, step.previous, step.late),
        }
        yield _where_apart(step, LAYERS, terms, recomputes)
    at = step.layers.experts_end
    kept = {
        "activations": np.maximum(step.inputs, left - at.freed),
        "logits": step.held_logits,
        "temporaries": added(at.temporaries - step.compute * step.layers.bare_experts, step.previous, step.late),
    }
    gathered = added(
        step.gathered(layers=np.where(number == -1, 1 + step.piped, 2), head=False, passed=passed + step.routed),
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
    alone = step.sharers == 1
    made = {"gradients": step.earlier + step.fresh(*done), "gather_buffers": gathered + sent + every}
    yield _where_apart(step, LAYERS, kept | made)
    made = {
        "gradients": added(through, step.taking_over(step.routed, routed=True)),
        "gather_buffers": added(gathered, sent + np.where(alone, 0.0, last), step.output(step.routed, routed=True)),
    }
    yield _where_apart(step, LAYERS, kept | made)
    back = kept["temporaries"] + 2.0 * step.layers.sent
    made = {"gradients": through, "gather_buffers": gathered + sent, "temporaries": back}
    yield _where_apart(step, LAYERS, kept | made, alone)


def _where_apart(step: Step, moment: int, terms: Mapping[str, Reals], mask: Mask | bool = True) -> Instant:
    """An instant of candidates whose experts lie apart, on stages that have some."""
    where = step.apart & mask & (step.counts.experts > 0.0)
    return Instant(moment, {name: np.where(where, held, 0.0) for name, held in terms.items()})


def _still_outside(step: Step, done: Reals) -> Reals:
    """Gradients outside DDP's buckets when those of `done` elements have gone into theirs, which the last micro-batch does."""
    if step.outside is NONE:
        return NONE
    left = np.maximum(0.0, step.outside - np.where(step.outside > 0, step.trained * step.stored * done, 0.0))
    return np.where((step.c["accumulation"] > 2)[:, None], step.outside, left)


def _layer_reduced(step: Step) -> Instant:
    """A layer is reduced while the next one is gathered: its gradients and their copy, then the copy, what comes out and the
    gradient that was copied last. In a pipeline it is added to what stands, in the reduce format."""
    behind = step.passed_head
    terms = {
        "activations": np.maximum(step.inputs, step.in_layers - step.layers.largest),
        "logits": step.held_logits,
    }
    gathered = step.gathered(layers=1, head=False, passed=step.widest)
    if step.piped:
        last = np.where(step.stands, step.dense, step.layers.last_matrix)  # casts go one by one
        adds = np.where(step.at_once, 0.0, step.trained * step.compute * last)
        return Instant(
            LAYERS,
            terms
            | {
                "gradients": step.earlier + step.fresh(behind + step.widest),
                "gather_buffers": gathered,
                "temporaries": added(step.stream, step.previous, step.late, adds),
            },
        )
    bare = step.bare.widest[:, None] / pieces_C(step.group)[:, None]
    if step.has_apart:
        bare = np.where(step.apart, step.dense, bare)
    gone = np.where(step.reduces & step.shards_gradients, step.trained * step.compute * (bare - step.layers.final), 0.0)
    before = added(behind, step.routed)
    made = step.fresh(before + step.dense, step.routed)
    given = added(step.output(step.dense), step.taking_over(step.dense), made)
    is_copied = gone <= given - step.fresh(before, step.routed)
    done = np.where(is_copied, step.dense, 0.0)
    reduced = step.in_reduction(step.dense, bare) - np.where(is_copied, gone, 0.0)
    return Instant(
        LAYERS,
        terms
        | {
            "gradients": added(step.earlier, step.fresh(before + done, step.routed), step.taking_over(done)),
            "gather_buffers": added(gathered, reduced, step.output(done), step.waiting),
            "temporaries": added(step.stream, step.retained(behind + step.widest)),
        },
    )


def _end(step: Step) -> tuple[Instant, ...]:
    """Without a pipeline: the embedding's gradient, and its reduction."""
    counts, c = step.counts, step.c
    gradient = step.ends * np.where(step.managed, step.compute * step.bare.before, step.stored * _table(step))
    stream = np.where(step.managed, 0.0, step.stored / step.compute) * _whole_stream(step) * step.first
    if step.job.model.adapters is not None:  # nothing goes back to a frozen embedding
        stream = np.zeros_like(stream)
    direct = ~step.managed & ~step.stands
    keeps = np.where(step.managed & (~step.reshards | step.tied), step.compute * step.outer, 0.0)
    flight = np.where(step.reduces, step.trained * step.reduce * step.dense, 0.0)
    old = added(step.waiting, np.where(step.reduces, step.compute * step.head, 0.0) if step.tied else NONE)
    summed = np.where(step.old_head > 0, 2.0 * step.old_head, stream) if step.tied else stream
    made = {
        "gradients": step.earlier
        + np.where(direct, step.fresh(counts.whole), step.fresh(counts.whole - step.outer, step.routed_of(None))),
        "activations": step.others,
        "gather_buffers": np.where(step.reduces, keeps + flight + gradient + old, keeps),
        "temporaries": np.where(direct | step.reduces, 0.0, gradient)
        + step.retained(counts.whole - step.outer)
        + summed,
    }
    reduced = {
        "gradients": added(step.at_rest, step.taking_over(step.outer)),
        "activations": step.inputs,
        "gather_buffers": step.in_reduction(step.outer, step.outer) + step.output(step.outer),
        "temporaries": step.retained(counts.whole),
    }
    gathering = {
        "gradients": step.earlier,
        "activations": step.inputs,
        "temporaries": added(step.outside, summed, np.where((c["accumulation"] > 2)[:, None], gradient, 0.0)),
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


def _whole_stream(step: Step) -> Reals:
    """The residual stream's gradient as the embedding needs it, (C, 1)."""
    return (tokens(step.job, step.c) * step.job.model.hidden * step.compute)[:, None]


def _end_of_pass(step: Step) -> tuple[Instant, Instant]:
    """In a pipeline: the embedding's gradient; it is cast to the reduce format, and other passes are in flight."""
    tables = np.where(step.at_once, _table(step), step.before)  # the positions' gradient joined what stands before
    before = step.trained * np.where(step.managed, step.compute, step.stored) * tables
    direct = ~step.stands & (~step.managed | (step.compute == step.reduce))
    early = np.where(
        step.managed & step.reshards & (step.situation.others > 0), step.compute * step.widest * step.first, 0.0
    )
    common = {
        "activations": step.others + step.stream * step.first,
        "logits": step.held_logits,
        "gather_buffers": step.gathered(layers=0, head=False) + (-step.not_again if step.job.model.tied else early),
    }
    inside = step.fresh(step.counts.layers / step.chunks + step.passed_head)
    made = common | {
        "gradients": step.earlier + np.where(direct, step.fresh(_of_pass(step)), inside),
        "temporaries": added(np.where(direct, 0.0, before), _whole_stream(step) * step.first, step.previous, step.late),
    }
    cast = common | {
        "gradients": step.earlier + step.fresh(step.counts.layers / step.chunks + step.behind + _table(step)),
        "temporaries": added(np.where(direct, 0.0, before), step.previous, step.late),
    }
    return Instant(END, made), Instant(END, cast)


def _of_pass(step: Step) -> Reals:
    """Elements of all weights that the pass goes through."""
    return step.counts.layers / step.chunks + step.before + step.behind


def _reductions(step: Step) -> Iterator[Instant]:
    """In a pipeline, when all is computed: the units of the last chunk are reduced one after the other, first to last; each is
    copied once, and its last gradient, which may be all of it, is there until the result is."""
    counts, compute = step.counts, step.compute
    own = counts.layers / step.chunks
    several = step.chunks > 1
    behind = np.where(several, 0.0, counts.behind)
    whole = np.maximum(counts.whole, 1.0)
    out = step.trained * np.where(step.shards_gradients, step.reduce / step.shards, 0.0)
    let_go = several | step.c.is_word("schedule", "zb_h1")[:, None]
    held = on_stages(np.where(let_go, 0.0, step.stream)[:, 0], ~step.group.is_last)  # of the last forward pass
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
    for unit, passed, alone in units:
        left = counts.whole - done
        copied = step.trained * step.reduce * unit
        made = out * unit if alone else 0.0
        gathered = np.where(step.reshards, 0.0, left - unit)
        yield Instant(
            END,
            {
                "gradients": step.at_rest * (left / whole) + step.settled * (done / whole) + made,
                "activations": step.inputs + held,
                "logits": np.where(let_go, 0.0, held_logits_CS(step.job, step.group)),
                "gather_buffers": np.where(step.managed, copied + compute * gathered, 0.0),
            },
        )
        done = done + passed


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
    return Instant(UPDATE, terms)


def _owned(step: Step) -> Reals:
    """Elements whose state a rank keeps, (C, S)."""
    return np.where(shards_state(step.c, 1)[:, None], step.bare.sharded, step.bare.whole)
