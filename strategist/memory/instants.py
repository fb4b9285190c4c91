"""The instants of a step at which memory can peak, and what each term holds there.

The order of work is torch's: at the loss every activation is kept; the head's gradient comes first and, under fully_shard,
its unit is reduced first; then the layers backwards, one unit reduced behind the next; last the embedding. A unit's gradient
exists in the compute format and, while it is reduced, as a copy in the reduce format that lives until the next unit is
reduced. Source: PyTorch 2.13 torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, post_backward and foreach_reduce.
A pipeline keeps weights gathered and gradients unsharded until a chunk's last backward pass is over, and reduces then
(torch/distributed/pipelining/stage.py, backward_maybe_with_nosync and perform_reduce_grad).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from strategist.facts.job import Job
from strategist.memory.logits import forward_bytes_CS, held_logits_CS, loss_bytes_CS
from strategist.memory.logits import gradient_bytes_CS as logits_gradient_CS
from strategist.memory.situations import Schedule, Situation, one_pass
from strategist.memory.step import END, LAYERS, LOSS, UPDATE, Instant, Layers, Step
from strategist.space.candidates import Column, Reals
from strategist.space.shares import Elements, Group, tokens, vocabulary_elements


def instants(
    job: Job, group: Group, counts: Elements, at_rest: Reals, settled: Reals, *, at_loss: bool = False
) -> tuple[Instant, ...]:
    """Every instant at which some candidate can peak, or only the fullest two of the loss. `at_rest` are gradients while
    micro-batches follow each other, `settled` those that the update finds, (C, S) each."""
    layers = Layers(job, group)

    def in_situation(situation: Situation) -> Step:
        return Step(job, group, counts, layers, at_rest, settled, situation)

    if group.pp == 1:
        step = in_situation(one_pass(group.candidates["accumulation"]))
        if at_loss:
            return _loss(step)
        return (
            _gathering(step),
            *_loss(step),
            *_head(step),
            _head_reduced(step),
            *_layers(step),
            *_end(step),
            _update(step),
        )
    schedule = Schedule(group)
    if at_loss:
        return _loss(in_situation(schedule.at(schedule.second_of_last_chunk())))
    firsts = schedule.first_of_first_chunk(), schedule.second_of_first_chunk()
    heads = bodies = in_situation(schedule.at(*firsts))
    if schedule.has_chunks:
        second = schedule.second_of_last_chunk()
        heads = in_situation(schedule.at(schedule.first_pass(), second))
        bodies = in_situation(schedule.at(*firsts, second, schedule.fullest()))
    return (
        *_loss(heads),
        *_head(heads),
        _head_accumulated(heads),
        *_forward(bodies),
        *_layers(bodies),
        *_end_of_pass(bodies),
        *_reductions(bodies),
        _update(bodies),
    )


def _gathering(step: Step) -> Instant:
    """Without a pipeline: forward gathers the last layer, whose predecessor's first buffer is still there."""
    layers = step.group.layers_SK.sum(axis=1)[None, :]
    gathers = step.managed & step.shards_gradients & (layers > 0)
    flat = step.compute * step.widest * np.minimum(layers, 2)
    return Instant(
        LOSS,
        {
            "gradients": np.where(gathers, step.earlier, 0.0),
            "activations": np.where(gathers, np.maximum(step.inputs, step.in_layers - step.layers.largest), 0.0),
            "gather_buffers": np.where(gathers, step.gathered(layers=1, head=False) + flat, 0.0),
        },
    )


def _forward(step: Step) -> tuple[Instant, Instant, Instant]:
    """In a pipeline under ZeRO-3, as long as forward and backward passes alternate: the embedding is gathered, from one buffer
    into another, beside the first layer; a layer, beside what was gathered too early; the head beside the last layer. Then a
    backward pass begins with the last layer, and when only such passes are left, with an embedding that is the root unit."""
    shards = step.reshards & step.managed
    runs = shards & step.situation.alternates
    tied = step.job.model.tied
    table = step.compute * (2.0 * step.before + (2.0 if tied else 1.0) * step.widest) * step.first
    layer = step.compute * (2.0 * step.widest + (step.before if tied else 0.0)) + step.ahead_of_time
    last = step.compute * (2.0 * step.behind + step.widest) * step.last
    inside = {"gradients": step.earlier, "activations": step.in_layers, "logits": step.held_logits}
    again = step.compute * (2.0 * step.before + step.widest) * (tied and step.first)
    again = np.maximum(np.where(runs, 0.0, again), 2.0 * step.compute * step.widest)
    return (
        Instant(
            LOSS, {"gradients": step.earlier, "activations": step.others, "gather_buffers": np.where(runs, table, 0.0)}
        ),
        Instant(
            LOSS,
            inside
            | {
                "gather_buffers": np.where(runs, np.maximum(layer, last), 0.0),
                "temporaries": step.previous + np.where(runs, step.layers.transient, 0.0),
            },
        ),
        Instant(
            LAYERS,
            inside
            | {"gather_buffers": np.where(shards & step.situation.is_begun, again, 0.0), "temporaries": step.previous},
        ),
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
    held, last = step.held_logits, step.last
    forward = both | {
        "logits": last * forward_bytes_CS(step.job, step.group)
        + held
        - step.last * held_logits_CS(step.job, step.group),
        "temporaries": waits + step.cached,
    }
    softmax = both | {"logits": last * loss_bytes_CS(step.job, step.group) + held, "temporaries": waits}
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
        "logits": step.last * logits_gradient_CS(step.job, step.group) + step.held_logits,
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
    behind = 0.0 if step.tied else step.in_reduction(step.behind)
    return Instant(
        LAYERS,
        {
            "gradients": step.earlier + step.fresh(step.behind),
            "activations": step.in_layers,
            "gather_buffers": step.gathered(layers=1, head=False) + behind + step.output(step.behind) + step.waiting,
            "bucket_buffers": step.copies,
            "temporaries": step.stream + step.retained(step.behind),
        },
    )


def _head_accumulated(step: Step) -> Instant:
    """In a pipeline norm and head are not reduced but added to what stands, in the reduce format."""
    unit = np.where(step.managed, step.trained * step.compute * step.behind, 0.0)
    return Instant(
        LAYERS,
        {
            "gradients": step.earlier + step.fresh(step.behind),
            "activations": step.in_layers,
            "logits": step.held_logits,
            "gather_buffers": step.gathered(layers=1, head=True),
            "temporaries": step.previous + 2.0 * step.stream * step.last + unit,
        },
    )


def _layers(step: Step) -> tuple[Instant, ...]:
    """Each worst instant of a layer: in the last one (behind the head), in the one before it and in the first; under ZeRO-3,
    which has nothing to gather beside the first, in the second too."""
    numbers = (0, 1, -1) if step.piped or not step.reshards.any() else (0, 1, -2, -1)
    return _in_layer(step, np.array(numbers)[:, None, None, None]), _layer_reduced(step)


def _in_layer(step: Step, number: Column) -> Instant:
    """The worst instant of the `number`-th layers from the end of the chunk; -1 is its first layer, -2 its second."""
    own = step.counts.layers / step.chunks
    layers = np.maximum(step.group.layers_SK.sum(axis=1)[None, :] / step.chunks, 1.0)
    before = np.where(number < 0, np.maximum(layers + number, 0.0), np.minimum(number, layers - 1.0))
    share = before / np.maximum(layers - 1.0, 1.0)  # of the other layers, whatever their sort
    at = step.in_layer(share)
    passed = share * np.maximum(0.0, own - step.widest)
    given = step.stream * ((number == 0) * (1.0 - step.last) if step.piped else 0.0)  # lies in a receive buffer
    let_go = share * (step.layers.every / step.chunks - at.kept)
    behind = np.zeros_like(step.behind) if step.tied else step.behind
    in_flight = step.trained * step.reduce * np.where(before > 0, step.widest, behind)
    done = behind + passed
    partial = step.trained * step.compute * at.weights
    made = np.where(step.managed, 0.0, at.weights)
    alone = (number == -1) & (not step.piped)
    return Instant(
        LAYERS,
        {
            "gradients": step.earlier + step.fresh(done + made),
            "activations": np.maximum(
                step.inputs,
                step.in_layers - at.freed - let_go,
            ),
            "logits": step.held_logits,
            "gather_buffers": step.gathered(layers=np.where(alone, 1, 2), head=False, passed=passed)
            + (np.where(before >= layers - 1.0, step.ahead_of_time, 0.0) if step.piped else 0.0)
            + np.where(step.reduces, partial + in_flight, 0.0)
            + step.waiting,
            "bucket_buffers": np.maximum(
                0.0,
                step.copies * (1.0 - before / layers) - np.where(step.plain & step.casts, partial, 0.0),
            ),
            "temporaries": at.temporaries
            - given
            + step.previous
            + step.old_head
            + step.retained(done)
            + np.where(number == 0, _still_outside(step, behind), 0.0)
            + np.maximum(0.0, step.copies_again - np.where(step.copies_again > 0, partial, 0.0))
            + np.where(step.managed & ~step.reduces, partial, step.at_once(at) * at.weights),
        },
    )


def _still_outside(step: Step, done: Reals) -> Reals:
    """Gradients outside DDP's buckets when those of `done` elements have gone into theirs."""
    return np.maximum(0.0, step.outside - np.where(step.outside > 0, step.trained * step.stored * done, 0.0))


def _layer_reduced(step: Step) -> Instant:
    """A layer is reduced while the next one is gathered; in a pipeline it is added to what stands, in the reduce format."""
    behind = np.zeros_like(step.behind) if step.tied else step.behind
    own = step.in_reduction(step.widest) + step.output(step.widest)
    left = np.where(
        step.stands | (step.compute == step.reduce), step.widest, step.layers.last_matrix
    )  # casts go one by one
    adds = np.where(step.managed & step.piped, step.trained * step.compute * left, 0.0)
    return Instant(
        LAYERS,
        {
            "gradients": step.earlier + step.fresh(behind + step.widest),
            "activations": np.maximum(step.inputs, step.in_layers - step.layers.largest),
            "logits": step.held_logits,
            "gather_buffers": step.gathered(layers=1, head=False, passed=step.widest) + own + step.waiting,
            "temporaries": step.stream + step.previous + step.retained(behind + step.widest) + adds,
        },
    )


def _end(step: Step) -> tuple[Instant, ...]:
    """Without a pipeline: the embedding's gradient, and its reduction."""
    counts, c = step.counts, step.c
    gradient = step.trained * np.where(step.managed, step.compute * step.before, step.stored * _table(step))
    stream = np.where(step.managed, 0.0, step.stored / step.compute) * _whole_stream(step) * step.first
    direct = ~step.managed & ~step.stands
    keeps = np.where(step.managed & (~step.reshards | step.tied), step.compute * step.outer, 0.0)
    flight = np.where(step.reduces, step.trained * step.reduce * step.widest, 0.0)
    old = step.waiting + (np.where(step.reduces, step.compute * step.head, 0.0) if step.tied else 0.0)
    summed = 2.0 * step.old_head
    made = {
        "gradients": step.earlier + np.where(direct, step.fresh(counts.whole), step.fresh(counts.whole - step.outer)),
        "activations": step.others,
        "gather_buffers": np.where(step.reduces, keeps + flight + gradient + old, keeps),
        "temporaries": np.where(direct | step.reduces, 0.0, gradient)
        + step.retained(counts.whole - step.outer)
        + np.where(summed > 0, summed, stream),
    }
    reduced = {
        "gradients": step.at_rest,
        "activations": step.inputs,
        "gather_buffers": step.in_reduction(step.outer) + step.output(step.outer),
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


def _table(step: Step) -> Reals:
    """Elements of the token table on the rank, where the pass goes through it."""
    one = np.ones_like(step.c["tp"])
    return vocabulary_elements(step.job.model, step.c["tp"], one)[:, None] * step.first


def _whole_stream(step: Step) -> Reals:
    """The residual stream's gradient as the embedding needs it, (C, 1)."""
    return (tokens(step.job, step.c) * step.job.model.hidden * step.compute)[:, None]


def _end_of_pass(step: Step) -> tuple[Instant, Instant]:
    """In a pipeline: the embedding's gradient; it is cast to the reduce format, and other passes are in flight."""
    before = step.trained * np.where(step.managed, step.compute, step.stored) * step.before
    direct = ~step.stands & (~step.managed | (step.compute == step.reduce))
    early = np.where(
        step.managed & step.reshards & (step.situation.others > 0), step.compute * step.widest * step.first, 0.0
    )
    common = {
        "activations": step.others,
        "logits": step.held_logits,
        "gather_buffers": step.gathered(layers=0, head=False) + (0.0 if step.job.model.tied else early),
    }
    inside = step.fresh(step.counts.layers / step.chunks + step.behind)
    made = common | {
        "gradients": step.earlier + np.where(direct, step.fresh(_of_pass(step)), inside),
        "temporaries": np.where(direct, 0.0, before) + _whole_stream(step) * step.first + step.previous,
    }
    cast = common | {
        "gradients": step.earlier + step.fresh(step.counts.layers / step.chunks + step.behind + _table(step)),
        "temporaries": np.where(direct, 0.0, before) + step.previous,
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
    behind = np.where(step.chunks > 1, 0.0, counts.behind)
    whole = np.maximum(counts.whole, 1.0)
    out = step.trained * np.where(step.shards_gradients, step.reduce / step.shards, 0.0)
    done = counts.whole - counts.before - own - behind
    units = ((counts.before, step.job.model.pos != "learned"), (np.minimum(step.widest, own), False), (behind, True))
    for unit, alone in units:
        left = counts.whole - done
        copied = step.trained * step.reduce * unit + (out * unit if alone else 0.0)
        gathered = np.where(step.reshards, 0.0, left - unit)
        yield Instant(
            END,
            {
                "gradients": step.at_rest * (left / whole) + step.settled * (done / whole),
                "activations": step.inputs,
                "logits": np.where(step.chunks > 1, 0.0, held_logits_CS(step.job, step.group)),
                "gather_buffers": np.where(step.managed, copied + compute * gathered, 0.0),
            },
        )
        done = done + (own if unit is units[1][0] else unit)


def _update(step: Step) -> Instant:
    """Between backward and the update; tied ends of a pipeline exchange their gradients."""
    ends = (step.group.is_first | step.group.is_last)[None, :]
    table = vocabulary_elements(step.job.model, step.c["tp"], np.where(step.c["zero"] >= 2, step.shards[:, 0], 1))
    theirs = step.trained * step.stored * table[:, None] * (ends & step.piped & step.job.model.tied)
    return Instant(UPDATE, {"gradients": step.settled, "activations": step.inputs, "pipeline_buffers": theirs})
