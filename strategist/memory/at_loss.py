"""Instants of the loss and of the head behind it, whole or a few tokens at a time."""

from __future__ import annotations

import numpy as np

from strategist.memory.instant import LAYERS, LOSS, NONE, Instant, Terms, added
from strategist.memory.logits import forward_bytes_CS, forward_holds_less, held_logits_CS, loss_bytes_CS
from strategist.memory.logits import gradient_bytes_CS as logits_gradient_CS
from strategist.memory.step import Step
from strategist.space.candidates import Reals


def during_loss(step: Step) -> tuple[Instant, ...]:
    """The loss itself: logits, their float32 copy and log-probabilities, with all that autocast's cache holds, unless what follows always
    holds more. Then its own backward: log-probabilities, their gradient, and the gradient of the logits."""
    if step.c.chunks_loss:
        return (_loss_in_chunks(step),)
    both = {"bucket_buffers": added(step.copies, step.head_copy), "temporaries": step.outside}
    state, softmax = step.part("state", _shared_at_loss), step.part("work", _kept_in_softmax)
    backward = Instant(LOSS, both, is_loss=True, parts=(state, softmax))
    if step.cached is NONE and forward_holds_less(step.job, step.group):
        return (backward,)
    terms, kept = both | {"temporaries": added(step.outside, step.cached)}, step.part("work", _kept_at_loss)
    return Instant(LOSS, terms, is_loss=True, parts=(state, kept)), backward


def _shared_at_loss(step: Step) -> Terms:
    """Gradients that stand, and gathered weights."""
    return {"gradients": step.earlier, "gather_buffers": step.gathered_at_loss}


def _kept_at_loss(step: Step) -> Terms:
    """Activations and tensors of the vocabulary."""
    new = step.last * (forward_bytes_CS(step.job, step.group) - held_logits_CS(step.job, step.group))
    return {"activations": step.activations, "logits": added(new, step.held_logits), "temporaries": step.previous}


def _kept_in_softmax(step: Step) -> Terms:
    """The same in the loss's own backward."""
    logits = added(step.last * loss_bytes_CS(step.job, step.group), step.held_logits)
    return {"activations": step.activations, "logits": logits, "temporaries": step.previous}


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
    made, cast = (
        {"bucket_buffers": held, "temporaries": step.outside}
        for held in (added(step.copies, step.head_copy), step.copies)
    )
    when_made, when_cast = zip(step.parts("state", gradients_at_head), step.parts("work", _kept_at_head), strict=True)
    return Instant(LOSS, made, parts=when_made), Instant(LAYERS, cast, parts=when_cast)


def gradients_at_head(step: Step) -> tuple[Terms, Terms]:
    """When the head's gradient is made, and when it stands among the others: gradients, one that does not stand yet, or what a cast makes of
    it, and gathered weights with units in reduction. Beside adapters nothing is cast, and the head is still gathered then."""
    gradient = step.ends * step.compute * step.head
    own = 0.0 if step.tied else step.fresh(step.head)
    keeps = ~step.managed & (not step.casts)
    joins = keeps & ~step.stands & (not step.tied)
    sent, casting = NONE if step.piped else np.where(step.reduces, gradient, 0.0), NONE
    if step.has_copies:
        stored = np.where(step.stands | step.tied, step.ends * step.stored * step.head, 0.0)
        casting = np.where(step.plain, gradient + stored, 0.0)
    gathered, has_adapters = step.gathered(layers=1, head=True), step.job.model.adapters is not None
    made = {
        "gradients": step.earlier + np.where(keeps, own, 0.0),
        "gather_buffers": added(gathered, sent),
        "temporaries": np.where(step.reduces | joins, 0.0, gradient),
    }
    cast = {
        "gradients": step.earlier + own,
        "gather_buffers": gathered if has_adapters else step.gathered(layers=0, head=True),
        "temporaries": NONE if has_adapters else casting,
    }
    return made, cast


def _kept_at_head(step: Step) -> tuple[Terms, Terms]:
    """The gradient of the head's input, of all tokens, what is kept, and the logits; once these and the input are gone. Beside adapters the norm
    works backward then."""
    has_adapters = step.job.model.adapters is not None
    given = step.last * (step.stream if has_adapters else step.whole_stream * step.headed)
    logits = added(step.last * logits_gradient_CS(step.job, step.group), step.held_logits)
    made = {"activations": step.activations, "logits": logits, "temporaries": added(step.previous, given)}
    gone = {} if has_adapters else {"activations": step.activations - given}
    again = step.last * step.stream if has_adapters else NONE
    return made, made | gone | {"logits": step.held_logits, "temporaries": added(step.previous, given, again)}


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
            "temporaries": added(step.stream * step.headed, step.retained(step.behind)),
        },
    )


def head_accumulated(step: Step) -> Instant:
    """In a pipeline norm and head are not reduced but added to what stands, in the reduce format."""
    return Instant(LAYERS, {}, parts=(step.part("state", _accumulated_at_head), step.part("work", _kept_behind_head)))


def _accumulated_at_head(step: Step) -> Terms:
    """Gradients, gathered weights, and the unit of norm and head."""
    return {
        "gradients": step.earlier + step.fresh(step.passed_head),
        "gather_buffers": step.gathered(layers=1, head=True),
        "temporaries": np.where(step.managed, step.trained * step.compute * step.behind, 0.0),
    }


def _kept_behind_head(step: Step) -> Terms:
    """What is kept in layers, and the gradients of the head's input and output."""
    waits = step.previous + 2.0 * step.stream * step.last
    return {"activations": step.in_layers, "logits": step.held_logits, "temporaries": waits}
