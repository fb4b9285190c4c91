"""Instants of backward passes through the layers of a chunk, and of the reductions between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from strategist.facts.parameters import position_tables
from strategist.memory.instant import LAYERS, NONE, NOWHERE, Instant, Terms, added
from strategist.memory.layers import LayerInstants
from strategist.memory.step import Step
from strategist.space.candidates import Column, Mask, Reals
from strategist.space.shares import decodes_K, pieces_C

FEW_LAYERS = 2
"""Of more layers the second from the front always holds more than the first when it is unpacked."""


WorstOf = Callable[[Step, Reals], LayerInstants]
"""The worst instant of a layer when a share of the other layers is gone."""


def during_layers(step: Step) -> tuple[Instant, ...]:
    """The instants inside layers, of some of which alone full recompute may run forward again, and of their reduction."""
    is_few = not step.piped and step.group.layers_S.min() <= FEW_LAYERS
    few = (_first_gathered(step),) if is_few else ()
    turn = (between_halves(step),) if step.in_halves else ()
    return (*_in_layers(step), *among_others(step, _in_layers), layer_reduced(step), *few, *turn)


def among_others(step: Step, instants_of: Callable[[Step], Iterable[Instant]]) -> Iterable[Instant]:
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


def _in_layer(step: Step, number: Column, worst: WorstOf) -> Instant:
    """The worst instant of the `number`-th layers from the end of the chunk; -1 is its first layer, -2 its second."""
    if step.piped and not (step.has_apart or step.at_once.any()):
        return _in_layer_of_unit(step, number, worst)
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
        if step.second_table is not NONE:
            waits = added(waits, np.where(before > step.job.model.layers - 0.5, step.second_table, 0.0))
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


def _in_layer_of_unit(step: Step, number: Column, worst: WorstOf) -> Instant:
    """The same in a pipeline where a layer's gradients join what stands together, when they are whole."""

    def kept(own: Step) -> Terms:
        activations, *_, waits, partial, joins, _, _, _ = _worst_at(own, number, worst)
        waits = added(waits, partial, joins)
        return {"activations": activations, "logits": own.held_logits, "temporaries": waits}

    def shared(own: Step) -> Terms:
        *_, gathered, _, gradients = _passed_before(own, number, NONE, NONE, NOWHERE)
        return {"gradients": gradients, "gather_buffers": gathered, "temporaries": own.late}

    return Instant(LAYERS, {}, parts=(step.part("state", shared), step.part("layer", kept)))


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
    if step.in_halves:
        let_go = step.let_go_of_halves(before)
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
    if step.in_halves:
        passed, units, above, gathers = _in_turn_of_halves(step, before, gathers)
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


def _in_turn_of_halves(step: Step, before: Reals, gathers: Column) -> tuple[Reals, Reals, Reals, Column]:
    """Where a decoder's layers are through before its encoder's: elements of `before` of them; gathered units of the layer behind these, which may
    be with the next one; elements of the unit above it; and how many layers as wide as the widest are gathered in place of those units."""
    decodes = decodes_K(step.job.model)

    def unit(number: Reals) -> Reals:
        return np.where(number <= step.job.model.layers - 0.5, step.units[:, decodes], step.units[:, ~decodes])

    passed, above = step.of_halves(before, step.units), unit(before - 1.0)
    if step.job.profile.reuse_distance:  # which counts elements, not units
        return passed, NONE, above, gathers
    units = step.compute * (np.where(gathers > 0, unit(before), 0.0) + np.where(gathers > 1, unit(before + 1.0), 0.0))
    return passed, np.where(step.managed & step.reshards, units, 0.0), above, 0 * gathers


def _still_outside(step: Step, done: Reals, joined: Reals) -> Reals:
    """Gradients outside DDP's buckets when those of `done` and `joined` elements have gone into theirs, which the last micro-batch does."""
    if step.outside is NONE:
        return NONE
    left = np.maximum(0.0, step.outside - step.trained * step.stored * added(done, joined))
    return np.where(step.empties, left, step.outside)


def layer_reduced(step: Step) -> Instant:
    """A layer is reduced while the next one is gathered, if there is one: its gradients and their copy, then the copy, what comes out and the
    gradient that was copied last. In a pipeline it is added to what stands, in the reduce format."""
    behind = step.passed_head
    if step.piped:
        return Instant(
            LAYERS, {}, parts=(step.part("state", _layer_accumulated), step.part("work", _kept_behind_layer))
        )
    terms = dict(step.part("work", _kept_behind_layer).of_all())
    gathered = step.gathered(layers=np.where(step.layers_of_chunk > 1, 1, 0), head=False, passed=step.widest)
    bare: Reals = step.bare.widest[:, None] / pieces_C(step.group)[:, None]
    unit, above, routed, passed = step.dense, step.routed, step.routed, step.widest
    if step.has_apart:
        bare = np.where(step.apart, step.dense, bare)
    if step.is_mixed:
        own = _reduced_in_turn(step)
        old = unit, above, routed, passed, gathered, terms["activations"]
        pairs = (np.where(step.apart, *pair) for pair in zip(own, old, strict=True))
        unit, above, routed, passed, gathered, terms["activations"] = pairs
        bare = np.where(step.apart, unit, bare)
    if step.in_halves:
        unit, above, passed, gathered, last = _reduced_of_halves(step)
        bare, terms = unit, {**terms, **last}
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
            "temporaries": added(terms["temporaries"], step.retained(behind + passed)),
        },
    )


def _kept_behind_layer(step: Step) -> Terms:
    """What is kept when the last layer is through, and the gradient that it gives."""
    return {
        "activations": np.maximum(step.inputs, step.in_layers - step.layers.largest),
        "logits": step.held_logits,
        "temporaries": added(step.stream, step.previous),
    }


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


def _reduced_of_halves(step: Step) -> tuple[Reals, Reals, Reals, Reals, Terms]:
    """Of the last layers of a decoder and of its encoder: elements of the unit, of those through before it, and with it; gathered weights of the
    next one; what is kept then, and the gradients that the layer gives, a decoder's beside that of what the encoder gave."""
    decodes, decoders = decodes_K(step.job.model), np.full_like(step.layers_of_chunk, step.job.model.layers)
    before = np.stack((np.zeros_like(decoders), decoders))
    unit: Reals = np.stack(np.broadcast_arrays(step.units[:, decodes], step.units[:, ~decodes]))
    above, next_one = step.of_halves(before, step.units), np.where(step.is_first_layer(before), 0, 1)
    _, units, _, gathers = _in_turn_of_halves(step, before + 1.0, next_one)
    gathered = step.gathered(layers=gathers, head=False, passed=above + unit) + units
    through = step.of_halves(before + 1.0, step.layers.one) + np.stack((0.0 * step.encoded, step.encoded))
    kept = np.maximum(step.inputs, step.in_layers - through)
    given = np.stack((step.stream * (1.0 + step.headed), step.stream))
    return unit, above, above + unit, gathered, {"activations": kept, "temporaries": given}


def between_halves(step: Step) -> Instant:
    """When a decoder's layers are through and its table gets its gradient, whose sum with a tied head's is a third as at the end (at_end.py,
    ending): beside it those of its positions, of the decoder's embedded tokens, gone when they are added up, and of what the encoder gave."""
    decoders = np.full_like(step.layers_of_chunk, step.job.model.layers)
    passed, units, above, gathers = _in_turn_of_halves(step, decoders, np.ones_like(decoders))
    table = step.ends * np.where(step.managed, step.compute, step.stored) * step.table
    embedded = np.where(step.managed, 1.0, step.stored / step.compute) * step.whole_stream * step.headed
    third, done = NONE if step.casts else step.head_outside, step.passed_head + passed
    positions = step.job.model.hidden * sum(position_tables(step.job.model)[1:]) * step.first
    in_unit = np.where(step.reduces, step.compute * step.head, 0.0) if step.tied and not step.c.chunks_loss else NONE
    flight = np.where(
        step.reduces, step.trained * step.reduce * above + table + step.ends * step.compute * positions, 0.0
    )
    return Instant(
        LAYERS,
        {
            "gradients": added(
                step.earlier + step.fresh(done + np.where(step.managed, 0.0, positions)), step.growing_head
            ),
            "activations": step.in_layers - step.of_halves(decoders, step.layers.one) - step.memory,
            "gather_buffers": added(
                step.gathered(layers=gathers, head=False, passed=passed), units, flight, step.waiting, in_unit
            ),
            "bucket_buffers": step.copies_left(decoders) if step.has_copies else NONE,
            "temporaries": added(
                np.where(step.reduces, 0.0, table),
                step.stream,
                np.maximum(embedded - in_unit, third),
                step.old_head,
                step.retained(done),
                _still_outside(step, done, NONE),
            ),
        },
    )


def _layer_accumulated(step: Step) -> Terms:
    """In a pipeline when a layer is added to what stands: gradients, gathered weights, and what is added."""
    last = np.where(step.stands, step.dense, step.layers.last_matrix)  # casts go one by one
    adds = np.where(step.at_once, 0.0, step.trained * step.compute * last)
    return {
        "gradients": step.earlier + step.fresh(step.passed_head + step.widest),
        "gather_buffers": step.gathered(layers=1, head=False, passed=step.widest),
        "temporaries": added(adds, step.late),
    }
