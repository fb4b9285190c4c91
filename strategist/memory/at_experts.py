"""Instants of a layer while its tokens are with experts on other ranks (docs/decisions/0111)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from strategist.memory.at_layers import among_others
from strategist.memory.instant import LAYERS, LOSS, NONE, Instant, added
from strategist.memory.step import Step
from strategist.space.candidates import Mask, Reals


def during_experts(step: Step) -> Iterator[Instant]:
    """Those of experts that are a unit of their own."""
    yield from _experts_forward(step)
    yield from _experts_backward(step)
    if step.is_mixed and not step.piped:
        yield _others_enter(step)
    yield from among_others(step, _experts_backward)


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
