"""ZB-H1 on one stage behind the first, one pass after the other, and what lies there at each (docs/memory_model.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strategist.facts.layers import build_layer
from strategist.facts.model import LayerKind
from tests.oracle.schedules import Around

if TYPE_CHECKING:
    from tests.oracle.memory import Stage

Moment = tuple[int, dict[str, float]]


def order(pp: int, m: int, stage: int) -> Iterator[str]:
    """F, I (gradients of inputs) and W (of weights), as ranks of torch's ScheduleInterleavedZeroBubble do them."""
    ahead = pp - 1 - stage
    yield from "F" * ahead
    for turn in range(m):
        if ahead + turn < m:
            yield "F"
        yield "I"
        if turn >= stage:
            yield "W"
    yield from "W" * stage


@dataclass
class Walk:
    """How often each pass ran, and what the gradients of weights are at: whether some were taken into the reduce format, whether
    some of the last W still lie as it made them."""

    forwards: int = 0
    inputs: int = 0
    weights: int = 0
    joined: bool = False
    loose: bool = False

    def around(self) -> Around:
        """The same in the words of the other schedules."""
        held, stands = self.forwards - self.weights, self.weights > 0
        return Around(0, (held,), (stands,), (False,), self.inputs > 0, alternates=True)


def split_instants(make: Callable[[Around], Stage]) -> Iterator[Moment]:
    """(moment, terms) before, inside and behind every part of every backward pass."""
    walk = Walk()
    first = make(walk.around())
    for kind in order(first.a["pp"], first.a["accumulation"], first.stage):
        lies = Lies(make(walk.around()), walk)
        if kind == "F":
            walk.forwards += 1
        elif kind == "I":
            yield from lies.inputs()
            walk.joined, walk.loose, walk.inputs = walk.joined or walk.loose, False, walk.inputs + 1
        else:
            yield from lies.weights()
            walk.loose, walk.weights = True, walk.weights + 1


def split_end(step: Stage) -> Iterator[Moment]:
    """What is reduced behind all passes, a layer and then norm and head, and the update."""
    m, a = step.a["accumulation"], step.a
    sent, behind = m * step.stream, step.w.behind
    never = not step.at_once and m == step.stage + 1  # all first parts ran before any second one
    sharded = step.q * step.r / step.n if a["zero"] >= 2 else 0.0
    for unit, left, made in ((min(step.wl, step.w.layers), step.w.all, 0.0), (behind, behind, sharded * behind)):
        share = left / max(step.w.all, 1.0)
        becomes = 0.0 if a["zero"] >= 2 else step.q * step.r * unit
        stands = becomes if never else step.at_rest * share
        terms = {
            "gradients": stands + step.settled * (1 - share) + made,
            "activations": step.inputs,
            "gather_buffers": step.q * step.r * unit + step.c * (left - unit) if step.units else 0.0,
            "temporaries": sent + (0.0 if step.at_once else step.q * step.c * (left - unit)),
        }
        yield 2, terms
    moment, terms = step.update()
    yield moment, terms | {"temporaries": terms.get("temporaries", 0.0) + sent}


class Lies:
    """What lies on a stage before a pass. Elements become bytes by `c` in the compute format."""

    def __init__(self, step: Stage, walk: Walk) -> None:
        self.step, self.walk = step, walk
        self.waiting = walk.inputs - walk.weights
        self.logits = step.c * step.T * -(-step.job.model.vocab // step.a["tp"]) if step.ends else 0.0
        self.sent = walk.inputs * step.stream
        self.stood = step.earlier if step.at_once or walk.joined else 0.0

    def inputs(self) -> Iterator[Moment]:
        """The loss; attention in the last layer and in the first."""
        from tests.oracle.memory import loss_bytes

        step, every = self.step, self.gradients()
        per_entry = (loss_bytes(step.job, step.a)[1] + step.c) / step.c
        common = {"activations": step.all, "gather_buffers": step.gathered(0, head=True)}
        lies = self.waiting * every + self.sent
        loose = self.unjoined(step.bare.all) if self.walk.loose else 0.0
        at_loss = {"gradients": self.stood, "logits": self.logits * (per_entry + self.waiting)}
        yield 0, common | at_loss | {"temporaries": lies + loose}
        kept = self.logits * ((step.c + 4) / step.c + self.waiting + 1)
        roots = step.behind if step.job.model.tied else 0.0
        for below in (len(step.kinds) - 1, 0):
            left = min((below + 1) * step.wl, step.bare.all) + roots
            made = (
                every
                - below * self.of_layer(step.kinds[0])
                - self.of_layer(step.kinds[0], early=True)
                + step.in_attention()
            )
            stands = self.stood if below else step.earlier
            loose = self.unjoined(left) if self.walk.loose else 0.0
            yield 1, common | {"gradients": stands, "logits": kept, "temporaries": lies + made + loose}

    def weights(self) -> Iterator[Moment]:
        """The first weight's gradient, and the last one's."""
        step, shape, tp = self.step, self.step.job.model, self.step.a["tp"]
        every, loose = self.gradients(), self.unjoined(step.bare.all)
        q, down = shape.hidden * shape.heads * shape.head_dim / tp, shape.hidden * shape.ffn_hidden / tp
        ends = (max(q, step.head), 2 * down) if shape.tied else (q, step.head if step.ends else 2 * down)
        first, last = (step.q * step.c * size for size in ends)
        common = {"gather_buffers": step.gathered(0, head=True)}
        follows = loose if self.walk.loose else 0.0
        begins = {"gradients": self.stood, "activations": step.all, "logits": self.logits * (self.waiting - 1)}
        yield 2, common | begins | {"temporaries": self.waiting * every + self.sent + follows + first}
        adding = (step.at_once and step.stands) or (not step.at_once and self.walk.loose)
        new = 0.0 if step.stands or not step.at_once else step.fresh(step.w.all)
        adds = last if adding else 0.0
        both = step.q * step.c * 2 * down if adding else 0.0
        kind, norm = step.kinds[0], 0.0 if shape.norm == "layernorm_nonparam" else step.stream
        gone = self.of_layer(kind, early=True) + norm + step.whole + step.T * step.c * shape.ffn_hidden / tp
        attended = step.T * step.c * shape.head_dim * (shape.heads + shape.kv_heads) / tp if shape.qk_norm else 0.0
        inside = {
            "activations": step.all - norm - attended - step.whole * (1 if shape.mlp_gated else 2),
            "logits": self.logits * self.waiting,
        }
        lies = self.waiting * every - gone + self.sent + follows + both
        yield 2, common | inside | {"gradients": self.stood, "temporaries": lies}
        layer = 2 * norm + attended + 2 * step.whole + step.T * step.c * shape.ffn_hidden / tp
        read = len(step.kinds) * layer + step.ends * (norm + step.whole) - norm
        kept = max(step.inputs, step.all - read)
        through = {"gradients": self.stood + new, "activations": kept, "logits": self.logits * self.waiting}
        yield 2, common | through | {"temporaries": (self.waiting - 1) * every + self.sent + loose + adds}

    def unjoined(self, elements: float) -> float:
        """Gradients of weights that units have not taken into the reduce format."""
        return 0.0 if self.step.at_once else self.step.q * self.step.c * elements

    def gradients(self) -> float:
        """Of results of products and norms of one micro-batch; the last layer's lies where it was received."""
        step = self.step
        layers = sum(self.of_layer(kind) for kind in step.kinds)
        received = step.stream if step.stream == step.whole else 0.0
        normed = 0.0 if step.job.model.norm == "layernorm_nonparam" else step.stream
        return layers + (normed if step.ends else -received)

    def of_layer(self, kind: LayerKind, *, early: bool = False) -> float:
        """The same of one layer; with `early` those that attention's backward has yet to make."""
        step, size = self.step, 0.0
        for matrix in build_layer(step.job.model, kind).matrices:
            inside = matrix.name in ("q", "k", "v")
            if early and not inside:
                continue
            size += step.whole if matrix.cut == "row" else step.T * step.c * matrix.outputs / step.a["tp"]
        shape = step.job.model
        normed = shape.head_dim * (shape.heads + shape.kv_heads) / step.a["tp"] if shape.qk_norm else 0.0
        norms = 0 if shape.norm == "layernorm_nonparam" else 1 if early else 2
        return size + norms * step.stream + step.T * step.c * normed
