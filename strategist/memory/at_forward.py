"""Instants of forward passes: units that are gathered, copies that are cast, what is made before the loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from strategist.memory.at_loss import gradients_at_head
from strategist.memory.instant import LAYERS, LOSS, NEVER, NONE, Instant, Part, Terms, added
from strategist.memory.step import Step
from strategist.space.candidates import Mask, Reals


def under_autocast(step: Step) -> Iterator[Instant]:
    """Forward where autocast's copies of weights are there for its sake alone."""
    from strategist.memory.autocast import forward_instants  # layouts of units know no autocast

    return forward_instants(step)


def gathering(step: Step) -> tuple[Instant, Instant]:
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


def adding_up(step: Step) -> Iterator[Instant]:
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
    head = dict(step.parts("state", gradients_at_head)[0].of_all())
    kept, adds = step.of_work(lambda own: (own.activations - own.whole_stream, 2.0 * own.whole_stream + own.stream))
    head |= {"activations": kept, "temporaries": adds + head["temporaries"]}
    yield Instant(LAYERS, {name: np.where(cuts, part, 0.0) for name, part in head.items()})


def casting_in_forward(step: Step) -> Instant:
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


def casting_beside_passes(step: Step) -> Instant:
    """The same in a pipeline, as long as forward and backward passes alternate: what a chunk gives is not there yet."""
    state, work = step.parts("state", _gathered_in_forward)[-1], step.part("work", _kept_in_cast)
    return Instant(LOSS, {}, parts=(state, work))


def _kept_in_cast(step: Step) -> Terms:
    """What is kept in front of the last layer's last matrix, and what the cast makes."""
    made = np.where(step.situation.alternates, step.layers.while_cast, 0.0)
    return {
        "activations": step.in_layers - step.layers.rest - step.stream * (1.0 - step.last),
        "logits": step.logits_before_head,
        "temporaries": added(step.previous, made),
    }


def during_forward(step: Step) -> tuple[Instant, ...]:
    """In a pipeline, as long as forward and backward passes alternate: under ZeRO-3 the embedding is gathered, from one buffer
    into another, or the first layer beside that buffer, and so are tied ends; a layer, beside what was gathered too early, the worst of them; inside
    the last layer, whoever gathers, or the head beside it."""
    table, first, inside, _ = step.parts("state", _gathered_in_forward)
    with_table, ended, made = step.parts("work", _made_in_forward)
    embedded = _where_there(((table, with_table), (first, ended)))
    return *embedded, *_gathered_in_turn(step), Instant(LOSS, {}, parts=(inside, made))


def _where_there(every: Iterable[tuple[Part, Part]]) -> Iterator[Instant]:
    """Instants of forward that some candidate has, by what is gathered at them and what is kept."""
    for gathered, kept in every:
        if gathered.terms["gather_buffers"].max() > NEVER:
            yield Instant(LOSS, {}, parts=(gathered, kept))


def beginning(step: Step) -> Instant:
    """In a pipeline under ZeRO-3 a backward pass begins with the last layer, behind which the next is gathered, and when only such passes
    are left, with an embedding that is the root unit."""
    return Instant(
        LAYERS, {}, parts=(step.part("state", _gathered_at_beginning), step.part("work", _kept_at_beginning))
    )


def _kept_at_beginning(step: Step) -> Terms:
    """All that is kept then."""
    return {"activations": step.in_layers, "logits": step.held_logits, "temporaries": step.previous}


def _gathered_at_beginning(step: Step) -> Terms:
    """Gradients that stand, and gathered weights."""
    begins = 2.0 * step.widest
    if step.has_apart:  # the buffer gathered last is that of the experts
        begins = np.where(step.apart, step.dense + np.maximum(step.dense, step.routed), begins)
    layers = np.where(step.layers_of_chunk > 1, 2.0, 1.0) * step.widest
    root = step.compute * (2.0 * step.before + layers) * (step.job.model.tied and step.first)
    most = np.maximum(np.where(_runs(step), 0.0, root), step.compute * begins)
    begun = step.reshards & step.managed & step.situation.is_begun
    return {"gradients": step.earlier, "gather_buffers": np.where(begun, added(most, step.held_early), 0.0)}


def _runs(step: Step) -> Mask:
    """In a pipeline: where a forward pass gathers weights, because ZeRO-3 gave them back and it follows a backward pass."""
    return step.reshards & step.managed & step.situation.alternates


def _gathered_in_forward(step: Step) -> tuple[Terms, ...]:
    """Gradients that stand, and gathered weights: the embedding, the first layer beside its buffer, which both are there only where forward
    gathers, the last layer or the head, and the last layer alone. A unit that was gathered too early is there until its turn comes, which
    an only layer's is."""
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
    kept = _kept_in_forward(step)
    every = (
        np.where(runs, added(step.compute * table, found * step.first, step.held_early), NEVER),
        np.where(runs, added(first, several, step.held_early), NEVER),
        np.where(runs, added(np.maximum(layer, last), step.held_early), kept),
        np.where(runs, added(layer, step.held_early), kept),
    )
    return tuple({"gradients": step.earlier, "gather_buffers": gathered} for gathered in every)


def _kept_in_forward(step: Step) -> Reals:
    """All gathered weights, where a forward pass that runs just before finds them gathered."""
    keeps = step.situation.alternates & ~step.reshards
    return np.where(keeps, step.gathered(layers=0, head=True), 0.0)


def _made_in_forward(step: Step) -> tuple[Terms, Terms, Terms]:
    """What is kept when the embedding has worked, beside what a part of the table gives, and as ranks add it up, and without that; what is
    when the last layer has, and what lies beside it if a forward pass runs just before: the result of its last matrix, or what the layer
    computes again."""
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
    logits = {"logits": step.logits_before_head}
    ended = logits | {"activations": step.others + step.stream * step.first}
    kept = left + np.where(runs & keeps, made, 0.0)
    inside = {"activations": kept, "temporaries": added(step.previous, np.where(runs, result, 0.0))}
    return ended | {"temporaries": terms}, ended, logits | inside


def _gathered_in_turn(step: Step) -> Iterator[Instant]:
    """In a pipeline forward gathers a layer whose predecessor's first buffer is still there: the last one, or the one before it
    as long as the last one's buffer is there too, which an earlier backward pass has gathered."""
    return _where_there(zip(step.parts("state", _gathers_in_turn), step.parts("work", _kept_in_turn), strict=True))


def _kept_in_turn(step: Step) -> tuple[Terms, ...]:
    """What is kept before the last layer of the chunk, and before the one before it."""
    given = step.stream * step.last  # what the layer before gave; elsewhere the output of the chunk takes its place
    every = (np.maximum(step.others, step.in_layers - step.kept_by_last(gone) + given) for gone in (1.0, 2.0))
    return tuple(
        {"activations": kept, "logits": step.logits_before_head, "temporaries": step.previous} for kept in every
    )


def _gathers_in_turn(step: Step) -> tuple[Terms, ...]:
    """Gradients that stand, and gathered layers in turn, where there are some; beside them a root unit, a head that is there already, and units
    of other chunks. The second time where forward may gather sooner."""
    runs, layers, turn = _runs(step), step.layers_of_chunk, step.compute * step.widest
    early = runs & (step.last == 0.0) & (step.found_early > 0.0) & (layers > 2)
    root = step.compute * step.root if step.job.model.tied else NONE
    beside = added(step.found_early * step.last, root, step.held_early)
    turns = 3.0 - step.apart if step.has_apart else 3.0
    last = np.where(layers > 1, turns * turn + beside, 0.0)
    gathered = np.where(runs, last, NEVER), np.where(early, last + turn, NEVER)
    return tuple({"gradients": step.earlier, "gather_buffers": own} for own in gathered)
