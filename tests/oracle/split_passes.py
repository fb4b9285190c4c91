"""ZB-H1 on one stage behind the first, and ZBV and DualPipeV on any, one pass after the other, and what lies there at each (docs/memory_model.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from strategist.facts.layers import build_layer
from strategist.facts.model import LayerKind
from tests.oracle.schedules import Around

if TYPE_CHECKING:
    from tests.oracle.memory import Stage
    from tests.oracle.parameters import Held

Moment = tuple[int, dict[str, float]]


def order(pp: int, m: int, stage: int) -> Iterator[tuple[str, int]]:
    """F, I (gradients of inputs) and W (of weights), as ranks of torch's ScheduleInterleavedZeroBubble do them."""
    ahead = pp - 1 - stage
    yield from [("F", 0)] * ahead
    for turn in range(m):
        if ahead + turn < m:
            yield "F", 0
        yield "I", 0
        if turn >= stage:
            yield "W", 0
    yield from [("W", 0)] * stage


def _filling(pp: int, stage: int) -> Iterator[tuple[str, int]]:
    """Until the second run has worked on as many micro-batches as there are stages."""
    yield from [("F", 0)] * (2 * (pp - stage) - 1)
    for _ in range(stage):
        yield from (("F", 1), ("F", 0))
    for _ in range(pp - stage):
        yield from (("F", 1), ("I", 1), ("W", 1))


def order_in_a_v(pp: int, m: int, stage: int) -> Iterator[tuple[str, int]]:
    """The same of ScheduleZBVZeroBubble, whose ranks have run 0 on the way down and run 1 on the way up."""
    begun, done = [2 * pp - 1 - stage, pp], [0, pp - stage]

    def do(kind: str, run: int) -> tuple[str, int]:
        begun[run] += kind == "F"
        done[run] += kind == "W"
        return kind, run

    yield from _filling(pp, stage)
    while begun[0] < m or begun[1] < m:
        if begun[0] < m:
            yield do("F", 0)
        yield from (do("I", 0), do("W", 0), do("F", 1), do("I", 1), do("W", 1))
    for _ in range(stage):
        yield from (do("I", 0), do("I", 1))
    for _ in range(pp - stage):
        yield from (do("I", 0), do("W", 0))
    for run in (1, 0):
        while done[run] < m:
            yield do("W", run)


def order_in_pairs(pp: int, m: int, stage: int) -> Iterator[tuple[str, int]]:
    """The same of ScheduleDualPipeV, which does some backward passes whole: B."""
    ahead, waiting = pp - 1 - stage, list[int]()
    yield from [("F", 0)] * 2 * ahead
    for _ in range(stage + 1):
        yield from (("F", 0), ("F", 1))
    for _ in range(ahead):
        yield from (("I", 1), ("W", 1), ("F", 1))
    for _ in range(m - pp - ahead):
        yield from (("F", 0), ("B", 1), ("F", 1), ("B", 0))
    for _ in range(ahead):
        yield from (("B", 1), ("F", 1), ("B", 0))
    for number in range(2 * stage + 2):
        run = (number + 1) % 2
        if number < stage + 1:
            yield "B", run
            continue
        waiting.append(run)
        yield "I", run
    for _ in range(ahead):
        yield "W", waiting.pop(0)
        waiting.append(0)
        yield "I", 0
    for run in waiting:
        yield "W", run


ORDERS = {"zbv": order_in_a_v, "dualpipev": order_in_pairs}


@dataclass
class Walk:
    """How often each pass of each run of layers ran, and what the gradients of weights are at: whether some were taken into the reduce
    format, whether some of the last W still lie as it made them, whether all are reduced; gradients of inputs that still lie."""

    runs: int
    m: int
    sent: int = 0
    ran: dict[tuple[str, int], int] = field(default_factory=lambda: dict.fromkeys(product("FIW", range(2)), 0))
    joined: list[bool] = field(default_factory=lambda: [False, False])
    loose: list[bool] = field(default_factory=lambda: [False, False])
    reduced: list[bool] = field(default_factory=lambda: [False, False])

    def around(self, run: int, *, at_once: bool) -> Around:
        """The same in the words of the other schedules."""
        every = range(self.runs)
        held = tuple(self.ran["F", r] - self.ran["W", r] for r in every)
        stands = tuple((self.ran["W", r] > 0 if at_once else self.joined[r]) and not self.reduced[r] for r in every)
        begun = any(self.ran["I", r] for r in every)
        return Around(run, held, stands, tuple(self.reduced[: self.runs]), begun, alternates=True, holds_first=True)

    def go_on(self, kind: str, run: int, *, keeps: bool) -> None:
        """One pass on; `keeps`: the gradient that it gives lies until the next step. B is both parts at once."""
        if kind in "IB":
            self.joined[run], self.loose[run] = self.joined[run] or self.loose[run] or kind == "B", False
            self.sent += keeps and kind == "I"
        if kind == "W":
            self.loose[run] = True
        for part in "IW" if kind == "B" else kind:
            self.ran[part, run] += 1


def split_instants(make: Callable[[Around], Stage]) -> Iterator[Moment]:
    """(moment, terms) before, inside and behind every part of every backward pass."""
    first = make(Around(0, (0,), (False,), (False,), False, alternates=True, holds_first=True))
    walk = Walk(1, first.a["accumulation"])
    for kind, run in order(first.a["pp"], first.a["accumulation"], first.stage):
        lies = Lies(make(walk.around(run, at_once=first.at_once)), walk, run)
        yield from lies.inputs() if kind == "I" else lies.weights() if kind == "W" else ()
        walk.go_on(kind, run, keeps=True)


def v_instants(make: Callable[[Around], Stage], *, at_loss: bool = False) -> Iterator[Moment]:
    """The same of a V: the first stage's first run has its backward in one part, and the last stage keeps what it hands to itself. With
    `at_loss` of passes in one part only those of the loss."""
    first = make(Around(0, (0, 0), (False, False), (False, False), False, alternates=True, holds_first=True))
    pp, m = first.a["pp"], first.a["accumulation"]
    turns = first.stage == pp - 1
    walk = Walk(2, m, sent=m if turns else 0)
    at_once = first.at_once
    for part, run in ORDERS[first.a["schedule"]](pp, m, first.stage):
        kind = {"I": "", "W": "B"}.get(part, part) if first.stage == run == 0 else part
        lies = Lies(make(walk.around(run, at_once=at_once)), walk, run)
        yield from {"I": lies.inputs, "W": lies.weights, "B": partial(lies.whole, at_loss=at_loss)}.get(kind, tuple)()
        walk.go_on(kind, run, keeps=not (turns and run == 1))
        if kind in ("W", "B") and walk.ran["W", run] == m:
            yield from Lies(make(walk.around(run, at_once=at_once)), walk, run).reductions()
            walk.reduced[run], walk.loose[run] = True, False
    moment, terms = first.update()
    lying = {"temporaries": walk.sent * first.stream, "activations": m * first.stream if turns else 0.0}
    yield moment, terms | {name: terms.get(name, 0.0) + size for name, size in lying.items()}


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
    """What lies on a stage before a pass of a run of layers. Elements become bytes by `c` in the compute format."""

    def __init__(self, step: Stage, walk: Walk, run: int) -> None:
        self.step, self.walk, self.run = step, walk, run
        self.waiting = walk.ran["I", run] - walk.ran["W", run]
        has_head = step.ends and run == walk.runs - 1
        self.has_head, self.layers = has_head, len(step.kinds) // walk.runs
        self.logits = step.c * step.T * -(-step.job.model.vocab // step.a["tp"]) if has_head else 0.0
        home = walk.runs == 2 and step.stage == step.a["pp"] - 1  # the last stage of a V hands results to itself
        self.all = step.all + (walk.m - step.at.flight[0]) * step.stream * home
        self.sent = walk.sent * step.stream + self._beside()
        self.own = self.elements(step.bare)

    def _beside(self) -> float:
        """What waits in the other run of a V, and gradients that its last second part made."""
        if self.walk.runs == 1:
            return 0.0
        walk, step, other = self.walk, self.step, 1 - self.run
        waiting = walk.ran["I", other] - walk.ran["W", other]
        loose = self.unjoined(step.bare.all - self.elements(step.bare)) if walk.loose[other] else 0.0
        return waiting * self.gradients(has_head=step.ends and other == 1) + loose

    def elements(self, held: Held) -> float:
        """Those of the run."""
        begins = self.step.begins and self.run == 0
        return held.layers / self.walk.runs + held.before * begins + held.behind * self.has_head

    def whole(self, *, at_loss: bool) -> Iterator[Moment]:
        """A backward pass in one part; the run of the first layers has no loss. What a second part left loose is taken in as far as
        gradients stand."""
        step = self.step
        loose = self.unjoined(self.own) if self.walk.loose[self.run] else 0.0
        before = () if step.stage == self.run == 0 else step.losses() if at_loss else step.heads()
        for moment, terms in (*before, *(() if at_loss else step.bodies())):
            taken = (terms["gradients"] - step.earlier) * step.c / step.r
            lies = {"temporaries": self.sent + max(0.0, loose - taken), "activations": self.all - step.all}
            yield moment, terms | {name: terms.get(name, 0.0) + size for name, size in lies.items()}

    def reductions(self) -> Iterator[Moment]:
        """A run behind its last second part: embedding, a layer, head."""
        step, own, out = self.step, self.elements(self.step.w), 0.0
        if step.zero >= 2:
            out = step.q * step.r / step.n
        layer = min(step.wl, step.w.layers)
        for unit, left, made in (
            (step.before, own, 0.0),
            (layer, own - step.before, 0.0),
            (step.behind, step.behind, out),
        ):
            share, copied = (own - left) / max(step.w.all, 1.0), step.q * step.r * unit
            becomes = 0.0 if step.zero >= 2 else copied
            stands = -step.at_rest * share if step.stands else becomes
            gathered = step.gathered(0) + copied - step.c * (own - left + unit)
            loose = self.unjoined(left - unit) if self.walk.loose[self.run] else 0.0
            yield (
                2,
                {
                    "gradients": step.earlier + stands + step.settled * share + made * step.behind,
                    "activations": self.all,
                    "gather_buffers": gathered if step.units else 0.0,
                    "temporaries": self.sent + loose,
                },
            )

    def inputs(self) -> Iterator[Moment]:
        """The loss; attention in the last layer and in the first; when all of the last W's gradients are taken in."""
        from tests.oracle.memory import loss_bytes

        step, every, loose = self.step, self.gradients(has_head=self.has_head), self.walk.loose[self.run]
        per_entry = (loss_bytes(step.job, step.a)[1] + step.c) / step.c
        common = {"activations": self.all, "gather_buffers": step.gathered(0, head=True)}
        lies = self.waiting * every + self.sent
        left = self.unjoined(self.own) if loose else 0.0
        at_loss = {"gradients": step.earlier, "logits": self.logits * (per_entry + self.waiting)}
        yield 0, common | at_loss | {"temporaries": lies + left}
        kept = self.logits * ((step.c + 4) / step.c + self.waiting + 1)
        roots = step.behind if step.job.model.tied else 0.0
        becomes = step.at_rest * self.elements(step.w) / max(step.w.all, 1.0) if loose and not step.stands else 0.0
        for below in (self.layers - 1, 0):
            below_here = min((below + 1) * step.wl, self.own)
            kind = step.kinds[0]
            norm = 0.0 if step.job.model.norm in ("layernorm_nonparam", "rmsnorm_nonparam") else step.stream
            work = max(
                step.in_attention() - self.of_layer(kind, early=True), 3 * step.whole - norm
            )  # three inputs give it a gradient
            made = every - below * self.of_layer(kind) + work
            stands = step.earlier + becomes * (1 - below_here / max(self.own, 1.0))
            left = self.unjoined(below_here + roots) if loose else 0.0
            yield 1, common | {"gradients": stands, "logits": kept, "temporaries": lies + made + left}
        shape = step.job.model
        down = shape.hidden * (shape.ffn_hidden / step.a["tp"] + shape.mlp_bias)
        final = self.unjoined(down) if loose else 0.0
        through = {"gradients": step.earlier + becomes, "temporaries": lies + every + step.stream + final}
        yield 1, common | through | {"logits": kept}

    def weights(self) -> Iterator[Moment]:
        """The first weight's gradient, and the last one's."""
        step, shape, tp = self.step, self.step.job.model, self.step.a["tp"]
        every, unjoined = self.gradients(has_head=self.has_head), self.unjoined(self.own)
        q, down = shape.hidden * shape.heads * shape.head_dim / tp, shape.hidden * shape.ffn_hidden / tp
        ends = (max(q, step.head), 2 * down) if shape.tied else (q, step.head if self.has_head else 2 * down)
        first, last = (step.q * step.c * size for size in ends)
        common = {"gather_buffers": step.gathered(0, head=True)}
        follows = unjoined if self.walk.loose[self.run] else 0.0
        begins = {"gradients": step.earlier, "activations": self.all, "logits": self.logits * (self.waiting - 1)}
        yield 2, common | begins | {"temporaries": self.waiting * every + self.sent + follows + first}
        adding = (step.at_once and step.stands) or (not step.at_once and self.walk.loose[self.run])
        new = 0.0 if step.stands or not step.at_once else step.fresh(self.elements(step.w))
        adds = last if adding else 0.0
        both = step.q * step.c * 2 * down if adding else 0.0
        kind, norm = step.kinds[0], 0.0 if shape.norm in ("layernorm_nonparam", "rmsnorm_nonparam") else step.stream
        read = step.T * step.c * shape.ffn_hidden / tp
        gone = self.of_layer(kind, early=True) + norm + step.whole + read
        attended = step.T * step.c * shape.head_dim * (shape.heads + shape.kv_heads) / tp if shape.qk_norm else 0.0
        inside = {
            "activations": self.all - norm - attended - step.whole * (1 if shape.mlp_gated else 2),
            "logits": self.logits * self.waiting,
        }
        lies = self.waiting * every - gone + self.sent + follows + both
        yield 2, common | inside | {"gradients": step.earlier, "temporaries": lies}
        layer = 2 * norm + attended + 2 * step.whole + read
        passed = self.layers * layer + self.has_head * (norm + step.whole) - norm
        stays = step.whole if self.has_head else read
        put_together = 0.0 if self.has_head or step.stream == step.whole else step.whole
        kept = max(step.inputs, self.all - passed + stays)
        through = {"gradients": step.earlier + new, "activations": kept, "logits": self.logits * self.waiting}
        lies = (self.waiting - 1) * every + put_together + self.sent + unjoined + adds
        yield 2, common | through | {"temporaries": lies}

    def unjoined(self, elements: float) -> float:
        """Gradients of weights that units have not taken into the reduce format."""
        return 0.0 if self.step.at_once else self.step.q * self.step.c * elements

    def gradients(self, *, has_head: bool) -> float:
        """Of results of products and norms of one micro-batch in a run; the last layer's lies where it was received."""
        step = self.step
        layers = sum(self.of_layer(kind) for kind in step.kinds) / self.walk.runs
        received = step.stream if step.stream == step.whole else 0.0
        normed = 0.0 if step.job.model.norm in ("layernorm_nonparam", "rmsnorm_nonparam") else step.stream
        return layers + (normed if has_head else -received)

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
        norms = 0 if shape.norm in ("layernorm_nonparam", "rmsnorm_nonparam") else 1 if early else 2
        return size + norms * step.stream + step.T * step.c * normed
