"""Instants of the loss and of the head behind it, whole or a few tokens at a time."""

from __future__ import annotations

import numpy as np

from strategist.memory.instant import LAYERS, LOSS, NONE, Instant, added
from strategist.memory.logits import forward_bytes_CS, forward_holds_less, held_logits_CS, loss_bytes_CS
from strategist.memory.logits import gradient_bytes_CS as logits_gradient_CS
from strategist.memory.step import Step
from strategist.space.candidates import Reals


def during_loss(step: Step) -> tuple[Instant, ...]:
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


def during_head(step: Step) -> tuple[Instant, ...]:
    """The head's weight gets its gradient; under autocast it is then cast to the format of the weight."""
    if step.c.chunks_loss:
        return _head_of_chunks(step)
    stood, with_own, becomes, casting, gathered, later = step.of_state(gradients_at_head)
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


def gradients_at_head(step: Step) -> tuple[Reals, ...]:
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


def head_reduced(step: Step) -> Instant:
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


def head_accumulated(step: Step) -> Instant:
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
