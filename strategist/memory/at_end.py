"""Instants of the end of a backward pass, of what is reduced then, and of the update."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from strategist.columns import on_stages
from strategist.memory.instant import END, NONE, UPDATE, Instant, Terms, added
from strategist.memory.logits import held_logits_CS
from strategist.memory.model_states import decoded_bytes, shards_state, turning_bytes_CS
from strategist.memory.step import Step
from strategist.space.candidates import Mask, Reals, total_of
from strategist.space.shares import vocabulary_elements
from strategist.space.traffic import COALESCED_BYTES, terms_of_a_step_CS


def ending(step: Step) -> tuple[Instant, ...]:
    """Without a pipeline: the embedding's gradient, and its reduction. A tied head's is a copy of the product's result under autocast, to
    which autograd adds the embedding's in place; elsewhere it is a view of that result, and their sum is a third, made when the stream is gone."""
    counts, c = step.counts, step.c
    table = step.rows if c.serves_tables else step.table
    gradient = step.ends * np.where(step.managed, step.compute * step.bare.before, step.stored * table)
    stream = np.where(step.managed, 1.0, step.stored / step.compute) * step.whole_stream * step.first
    if step.job.model.adapters is not None:  # nothing goes back to a frozen embedding
        stream = np.zeros_like(stream)
    direct = ~step.managed & ~step.stands
    keeps = np.where(step.managed & (~step.reshards | step.tied), step.compute * step.outer, 0.0)
    flight = np.where(step.reduces, step.trained * step.reduce * step.dense, 0.0)
    in_unit = np.where(step.reduces, step.compute * step.head, 0.0) if step.tied and not step.c.chunks_loss else NONE
    third = NONE if step.casts else step.head_outside
    beside = added(np.maximum(stream - in_unit, third), step.head_outside, step.second_table)
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


def summed(step: Step) -> Instant:
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


def hooked(step: Step) -> Iterator[Instant]:
    """Under a hook of DDP: buckets on their way."""
    from strategist.memory.compression import hook_instants  # few ask for any

    return hook_instants(step)


def end_of_pass(step: Step) -> tuple[Instant, Instant]:
    """In a pipeline: the embedding's gradient; it is cast to the reduce format, and other passes are in flight."""
    made, cast = zip(step.parts("state", _gradients_at_end), step.parts("work", _kept_at_end), strict=True)
    return Instant(END, {}, parts=made), Instant(END, {}, parts=cast)


def _kept_at_end(step: Step) -> tuple[Terms, Terms]:
    """What is kept, and the gradient of the embedding's output as long as it is needed."""
    kept = {"activations": step.others + step.stream * step.first, "logits": step.held_logits}
    waits = step.whole_stream * step.first, NONE
    made, cast = (kept | {"temporaries": added(gradient, step.previous)} for gradient in waits)
    return made, cast


def _gradients_at_end(step: Step) -> tuple[Terms, Terms]:
    """In a pipeline: gradients when the embedding's is made and when it is cast, gathered weights, and what is cast."""
    tables = np.where(step.at_once, step.table, step.before)  # the positions' gradient joined what stands before
    before = step.trained * np.where(step.managed, step.compute, step.stored) * tables
    direct = ~step.stands & (~step.managed | (step.compute == step.reduce))
    early = np.where(
        step.managed & step.reshards & (step.situation.others_first > 0), step.compute * step.widest * step.first, 0.0
    )
    inside = step.fresh(step.counts.layers / step.chunks + step.passed_head)
    cast = step.fresh(step.counts.layers / step.chunks + step.behind + step.table)
    both = {
        "gather_buffers": step.gathered(layers=0, head=False) + (-step.not_again if step.job.model.tied else early),
        "temporaries": added(np.where(direct, 0.0, before), step.late),
    }
    made = step.earlier + np.where(direct, step.fresh(_of_pass(step)), inside)
    return both | {"gradients": made}, both | {"gradients": step.earlier + cast}


def _of_pass(step: Step) -> Reals:
    """Elements of all weights that the pass goes through."""
    return step.counts.layers / step.chunks + step.before + step.behind


def during_reductions(step: Step) -> Iterator[Instant]:
    """In a pipeline, when all is computed: the units of the last chunk are reduced one after the other, first to last; each is
    copied once, and its last gradient, which may be all of it, is there until the result is."""
    kept = step.part("work", _kept_in_reduction)
    return (Instant(END, {}, parts=(unit, kept)) for unit in step.parts("state", _units_reduced))


def _lets_go(step: Step) -> Mask:
    """Where nothing of the last forward pass is held any more when units are reduced."""
    return np.asarray((step.chunks > 1) | step.c.is_word("schedule", "zb_h1")[:, None], np.bool_)


def _kept_in_reduction(step: Step) -> Terms:
    """The step's inputs and what a stage sent last; logits."""
    let_go = _lets_go(step)
    held = on_stages(np.where(let_go, 0.0, step.stream)[:, 0], ~step.group.is_last)  # of the last forward pass
    logits = np.where(let_go, 0.0, held_logits_CS(step.job, step.group))
    return {"activations": step.inputs + held, "logits": logits}


def _units_reduced(step: Step) -> list[Terms]:
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
    found: list[Terms] = []
    for unit, passed, alone in units:
        left = counts.whole - done
        made = out * unit if alone else 0.0
        copied, gathered = step.trained * step.reduce * unit, np.where(step.reshards, 0.0, left - unit)
        gradients = step.at_rest * (left / whole) + step.settled * (done / whole) + made
        held = np.where(step.managed, copied + step.compute * gathered, 0.0)
        found.append({"gradients": gradients, "gather_buffers": held})
        done = done + passed
    return found


def updating(step: Step) -> Instant:
    """The update, and what it makes of all weights at once. Tied ends of a pipeline exchange their gradients; the terms of gradients of weights
    that tp ranks hold whole lie in one message before, where that is how they are added up; else, without units, a rank's term of the gradient of
    learned positions, under sequence parallelism, is there beside the sum."""
    ends, shape, c = step.group.is_first | step.group.is_last, step.job.model, step.c
    table = vocabulary_elements(shape, c["tp"], np.where(c["zero"] >= 2, step.shards[:, 0], 1))
    theirs = step.trained * step.stored * on_stages(table, ends & step.piped & shape.tied)
    adds_once = step.job.profile.adds_terms == "step"
    terms = {
        "gradients": step.settled if adds_once else step.settled + _of_positions(step),
        "activations": step.inputs,
        "pipeline_buffers": theirs,
    }
    is_adamw = step.job.workload.optimizer == "adamw"
    copies = step.trained * step.stored * step.job.profile.update_copies * is_adamw
    if copies:
        terms["temporaries"] = copies * _owned(step) * c.is_word("offload", "none")[:, None]
    elif step.job.profile.has_units and step.job.workload.optimizer == "adamw8bit":
        terms["temporaries"] = decoded_bytes(_owned(step)) * c.is_word("offload", "none")[:, None]
    elif step.job.workload.optimizer == "muon":  # once the other end's gradient is gone
        terms = _larger(terms, turning_bytes_CS(step.job, step.group))
    if adds_once and (c["tp"] > 1).any():
        terms = _larger(terms, terms_of_a_step_CS(step.job, step.group))
    return Instant(UPDATE, terms)


def _of_positions(step: Step) -> Reals:
    """Bytes of a rank's term of the gradient of learned positions, where it is there beside the sum, (C, S)."""
    shape, c = step.job.model, step.c
    sums = on_stages(~step.managed[:, 0] & (c["sequence_parallel"] > 0), step.group.is_first)
    return step.trained * step.stored * shape.hidden * shape.pos_rows * (shape.pos == "learned") * sums


def _larger(terms: dict[str, Reals], alone: Reals) -> dict[str, Reals]:
    """The terms of the update with what is there before or behind its buffers, where that is the larger of the two."""
    others = {name: terms.get(name, NONE) for name in ("pipeline_buffers", "temporaries")}
    is_larger = total_of(others.values()) < alone
    kept = {name: np.where(is_larger, 0.0, value) for name, value in others.items()}
    return terms | kept | {"temporaries": np.where(is_larger, alone, kept["temporaries"])}


def _owned(step: Step) -> Reals:
    """Elements whose state a rank keeps, (C, S)."""
    return np.where(shards_state(step.c, 1)[:, None], step.bare.sharded, step.bare.whole)
