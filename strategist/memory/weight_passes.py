"""What a stage holds whose backward passes come in two parts: gradients of inputs first, those of weights later (ZB-H1).

The first part runs on a graph that is kept: nothing that forward saved is given back before the second part is over, and
the gradient of every product's and norm's result waits for it, too (PyTorch 2.13 torch/distributed/pipelining/_backward.py,
stage_backward_input and stage_backward_weight). Order of work of stage s of p (schedules.py, ScheduleInterleavedZeroBubble
with one chunk a rank; Qi et al. 2023, arXiv 2401.10241, section 2.1): p - 1 - s forwards, then a forward and a first part in
turn, and from the s-th on a second part behind each, the oldest first. So p micro-batches are held on every stage, of s of
which the second part alone is left. The first stage has no input to give a gradient: all of its backward is the second part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from strategist.columns import on_stages, stage_by_stage
from strategist.facts.job import Job
from strategist.facts.model import ModelShape
from strategist.facts.profile import BYTES
from strategist.memory.backward import attention_gradients_C
from strategist.memory.instant import END, LAYERS, LOSS, Instant, only
from strategist.memory.layers import joins_at_once
from strategist.memory.logits import gradient_bytes_CS, held_logits_CS, loss_bytes_CS, waiting_logits_CS
from strategist.memory.saved import Cut
from strategist.memory.situations import Situation
from strategist.memory.step import Step
from strategist.records import cached_property, dataclass
from strategist.space.candidates import Column, Mask, Reals, total_of
from strategist.space.shares import Elements, Group, sequence_cut, tokens

Widths = dict[Cut, float]
"""Elements per token, by how parallelism cuts them (memory/saved.py)."""


def result_widths(shape: ModelShape) -> Widths:
    """Results of one layer whose gradients wait: of both norms, of all matrices. What a matrix gives that writes back to the
    residual stream has the stream's gradient, which such a matrix needs whole."""
    products = (2.0 if shape.mlp_gated else 1.0) * shape.ffn_hidden
    return {"sequence": 2.0 * _normed(shape), "heads": _attended(shape) + products, "whole": 2.0 * shape.hidden}


def _normed(shape: ModelShape) -> float:
    """A norm's result, where the norm has a weight."""
    return 0.0 if shape.norm.endswith("_nonparam") else float(shape.hidden)


def _attended(shape: ModelShape) -> float:
    """Queries, keys and values, and where those are normalised queries and keys once more."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return q + 2.0 * kv + _normed_in_attention(shape)


def _normed_in_attention(shape: ModelShape) -> float:
    """Queries and keys, where those are normalised."""
    return (shape.heads + shape.kv_heads) * shape.head_dim * bool(shape.qk_norm)


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """Parts of backward passes, (P, C, S) each or broadcast against it: what all schedules have in common; how many micro-batches wait
    for their second part behind the first; how many first parts have given a gradient that is still there; whether the gradients
    that the last second part made lie as it made them. The same of a stage's other run of layers, where it has one, and how many
    results of the last stage's own first run lie there for its second one beside those that are in flight."""

    situation: Situation
    waiting: Column
    sent: Column
    loose: Mask
    other_waiting: Column | int = 0
    other_loose: Mask | bool = False
    home: Column | int = 0


class Turns:
    """The turns in which a stage can hold most, (P, C, S): that of the last forward pass, and one and two turns later, while
    gradients of weights come to be; of second parts the first, too, that follows another one."""

    def __init__(self, group: Group, at_once: Mask) -> None:
        self.pp, self.m, self.stage = group.pp, group.candidates["accumulation"][:, None], group.stages[None, :]
        self._at_once, self._later = at_once, np.arange(3)[:, None, None]

    def first_parts(self) -> Progress:
        """Before a first part."""
        turn = np.minimum(self.m - self.pp + self.stage + self._later, self.m - 1)
        begun, done = np.minimum(self.m, self.pp - self.stage + turn), turn - self.stage
        return self._at(begun, turn, done, loose=done > 0, joined=done > 1)

    def second_parts(self) -> Progress:
        """Before a second part."""
        follows = (self.m - self.stage)[None]
        full = np.broadcast_to(self.m - self.pp + self._later, (len(self._later), *follows.shape[1:]))
        done = np.minimum(np.concatenate([full, follows]), self.m - 1)
        sent = np.minimum(done + self.stage + 1, self.m)
        loose = sent - done <= self.stage  # no first part ran since the second part before
        joined = np.where(loose, self.m - 1 - self.stage, done) > 0
        return self._at(np.minimum(self.m, self.pp - 1 - self.stage + sent), sent, done, loose=loose, joined=joined)

    def _at(self, begun: Column, sent: Column, done: Column, *, loose: Mask, joined: Mask) -> Progress:
        held, waiting, sent, loose = (stage_by_stage(part) for part in (begun - done, sent - done, sent, loose))
        stands = stage_by_stage(np.where(self._at_once, done > 0, joined))
        others, yes = held - 1.0, np.ones_like(stands)
        none = np.zeros_like(others)  # nothing is reduced before the last second part
        situation = Situation(
            others, others, others, yes, yes, stands, stands * 1.0, stands, stands, none, ~yes, sent > 0, yes, yes
        )
        return Progress(situation, waiting, sent, loose)


class Waiting:
    """Bytes of gradients that wait for the second part, of one micro-batch in a run of layers, (..., C, S); `is_last`: the run is the
    one with the head, where the stage has that."""

    def __init__(self, job: Job, group: Group, is_last: Mask) -> None:
        self.job, self.group, c = job, group, group.candidates
        self._has_head = group.is_last[None, :] & is_last
        self._divisors = {"sequence": sequence_cut(c), "heads": c["tp"], "whole": np.ones_like(c["tp"])}
        self._token = tokens(job, c) * BYTES[job.formats.compute]

    @cached_property
    def every(self) -> Reals:
        """Of all layers, and on the last stage of the last norm's result. The last layer's own is in a receive buffer, unless a matrix
        needs it whole."""
        shape, c = self.job.model, self.group.candidates
        normed, stream = self._bytes({"sequence": _normed(shape)}), self._bytes({"sequence": shape.hidden})
        received = np.where(sequence_cut(c) > 1, 0.0, stream)
        return self._layers + normed[:, None] * self._has_head - received[:, None] * ~self._has_head

    @cached_property
    def not_before_attention(self) -> Reals:
        """Of those of one layer, the ones that attention's backward has yet to make."""
        shape = self.job.model
        own: Widths = {"sequence": _normed(shape), "heads": _attended(shape)}
        return on_stages(self._bytes(own), np.ones(len(self.group.stages)))

    @cached_property
    def behind_attention(self) -> Reals:
        """What is there beside those of a layer when its norm's result is about to have its gradient: queries, keys and values each
        gave one for it, two of which are being added."""
        shape = self.job.model
        given = self._bytes({"whole": 3.0 * shape.hidden}) - self._bytes({"sequence": _normed(shape)})
        return on_stages(given, np.ones(len(self.group.stages)))

    @cached_property
    def of_one_layer(self) -> Reals:
        """Of those, the ones of one layer."""
        layers = self.group.layers_S[None, :] / self._chunks
        return self._layers / np.maximum(1.0, layers)

    @cached_property
    def read_by_products(self) -> Reals:
        """Activations that nothing but products and norms read, which their second part frees: the norms' inputs, of which the first lies
        in a receive buffer, both norms' results, the last matrix's input, and what the last norm and the head read."""
        shape = self.job.model
        norm, product = self._bytes({"sequence": _normed(shape)}), self._bytes({"whole": 1.0 * shape.hidden})
        layer = 2.0 * (norm + product) + self._bytes({"heads": shape.ffn_hidden + _normed_in_attention(shape)})
        return self._of_all_layers(layer) + (norm + product)[:, None] * self._has_head - norm[:, None]

    @cached_property
    def at_last_product(self) -> tuple[Reals, Reals]:
        """Of those, and of the gradients, the ones that are there until the last weight has its gradient: what the head or the last
        layer's last matrix reads, and the gradient of that matrix' result where it was put together from the ranks' parts."""
        shape = self.job.model
        read, whole = self._bytes({"heads": shape.ffn_hidden}), self._bytes({"whole": 1.0 * shape.hidden})
        joined = np.where(sequence_cut(self.group.candidates) > 1, whole, 0.0)
        return np.where(self._has_head, whole[:, None], read[:, None]), joined[:, None] * ~self._has_head

    @cached_property
    def read_before_product(self) -> Reals:
        """Of those, in the first layer, the ones that are gone at the second matrix of the feed-forward part: what attention's matrices
        and norms and the second norm read, and without a gate what the first matrix reads."""
        shape = self.job.model
        norm, product = self._bytes({"sequence": _normed(shape)}), self._bytes({"whole": 1.0 * shape.hidden})
        attended = self._bytes({"heads": _normed_in_attention(shape)})
        gone = norm + attended + (1.0 if shape.mlp_gated else 2.0) * product
        return on_stages(gone, np.ones(len(self.group.stages)))

    @cached_property
    def gone_before_product(self) -> Reals:
        """Of one layer's, the ones that are gone then: of norms, of attention's matrices, of the feed-forward part's first."""
        shape = self.job.model
        gone: Widths = {
            "sequence": 2.0 * _normed(shape),
            "heads": _attended(shape) + shape.ffn_hidden,
            "whole": shape.hidden,
        }
        return on_stages(self._bytes(gone), np.ones(len(self.group.stages)))

    def ends(self, step: Step) -> tuple[Reals, Reals, Reals]:
        """Elements of the weights whose gradients come first, in the first layer's feed-forward part, and last, (P, C, S): in the order in
        which the model lists them, a tied table's first. One that is being added to what stands is there until the next one is."""
        shape, c = self.job.model, self.group.candidates
        queries = (shape.hidden * shape.heads * shape.head_dim / c["tp"])[:, None] + 0.0 * step.last
        pair = (2.0 * shape.hidden * shape.ffn_hidden / c["tp"])[:, None] + 0.0 * step.last
        if shape.tied:
            return np.maximum(step.head, queries), pair, pair
        return queries, pair, np.where(step.last > 0, step.head, pair)

    @cached_property
    def _layers(self) -> Reals:
        return self._of_all_layers(self._bytes(result_widths(self.job.model)))

    def _of_all_layers(self, one_C: Reals) -> Reals:
        """Every sort of layer of a dense decoder has the same matrices."""
        return on_stages(one_C, self.group.layers_S) / self._chunks

    @property
    def _chunks(self) -> Column:
        return self.group.candidates["virtual_stages"][:, None]

    def _bytes(self, widths: Widths) -> Reals:
        """(C,)."""
        return self._token * total_of(width / self._divisors[cut] for cut, width in widths.items())


def split_instants(job: Job, group: Group, in_situation: Callable[[Situation], Step]) -> Iterator[Instant]:
    """The instants of stages whose backward passes come in two parts; nothing on others, and on the first stage."""
    turns = Turns(group, joins_at_once(job, group))
    first, second = turns.first_parts(), turns.second_parts()
    yield from only(_splits(group), first_part(in_situation(first.situation), first))
    yield from only(_splits(group), second_part(in_situation(second.situation), second))


def whole_instants(group: Group, instants: Iterable[Instant]) -> Iterator[Instant]:
    """The instants of backward passes in one part, and nothing on stages whose passes come in two."""
    return only(~_splits(group), instants)


def _splits(group: Group) -> Mask:
    """Stages whose backward passes come in two parts, (C, S)."""
    return np.asarray(on_stages(group.candidates.is_word("schedule", "zb_h1"), ~group.is_first))


def split_end(step: Step, update: Instant) -> Iterator[Instant]:
    """Behind all passes: a stage's layers are reduced one after the other, then norm and head, each once its loose gradients have
    been taken into the reduce format, or copied there at once where nothing stands in it; then the update, which `update` is without what was sent."""
    group, counts = step.group, step.counts
    whole, sent = np.maximum(counts.whole, 1.0), sent_gradients_CS(step)
    joined = step.at_once | (step.c["accumulation"][:, None] - 1 - group.stages[None, :] > 0)
    out = step.trained * np.where(step.shards_gradients, step.reduce / step.shards, 0.0)
    layer = np.minimum(step.widest, counts.layers)
    for unit, left, made in ((layer, counts.whole, 0.0), (counts.behind, counts.behind, out * counts.behind)):
        copied, rest = step.trained * step.reduce * unit, step.compute * (left - unit)
        stands = np.where(joined, step.at_rest * (left / whole), np.where(step.shards_gradients, 0.0, copied))
        held = {
            "gradients": stands + step.settled * (1.0 - left / whole) + made,
            "activations": step.inputs,
            "gather_buffers": np.where(step.managed, copied + rest, 0.0),
            "temporaries": sent + loose(step, left - unit),
        }
        yield from only(_splits(group), (Instant(END, held),))
    yield Instant(update.moment, {**update.terms, "temporaries": update.terms.get("temporaries", np.zeros(())) + sent})


def sent_gradients_CS(step: Step) -> Reals:
    """Bytes of the gradients that a stage has sent in a step: torch lets go of them when the next step begins, (C, S)."""
    splits = step.c.is_word("schedule", "zb_h1") * step.c["accumulation"]
    return on_stages(splits * step.stream[:, 0], ~step.group.is_first)


def loose(step: Step, elements: Reals) -> Reals:
    """Gradients of weights in the compute format, as a second part leaves them: units take them into the reduce format in the next
    first part."""
    return np.where(step.at_once, 0.0, step.trained * step.compute * elements)


def elements_of_run(step: Step, counts: Elements) -> Reals:
    """Those of the run of layers that a pass goes through, (..., C, S)."""
    at = step.situation
    return counts.layers / step.chunks + counts.before * at.is_first + counts.behind * at.is_last


def beside(step: Step, at: Progress) -> Reals:
    """Bytes that wait for second parts of a stage's other run of layers, and gradients that those have made."""
    other = Waiting(step.job, step.group, ~step.situation.is_last)
    made = loose(step, step.bare.whole - elements_of_run(step, step.bare))
    return at.other_waiting * other.every + np.where(at.other_loose, made, 0.0)


def kept(step: Step, at: Progress) -> Reals:
    """What is kept when a pass's backward begins; results of the last stage's own first run lie there as long as any it received."""
    return step.activations + at.home * step.stream


def first_part(step: Step, at: Progress) -> Iterator[Instant]:
    """The loss's backward; then attention's or its inputs', in the layer that comes first and in the one that comes last, by which what the
    second part before has left is taken in; and all of it when the last weight's is, beside the gradient of what the run was given."""
    job, group = step.job, step.group
    waiting = Waiting(job, group, step.situation.is_last)
    logits = step.last * gradient_bytes_CS(job, group)
    common = {
        "gradients": step.earlier,
        "activations": kept(step, at),
        "gather_buffers": step.gathered(layers=0, head=True),
    }
    waits = at.waiting * waiting.every + at.sent * step.stream + beside(step, at)
    own = elements_of_run(step, step.bare)
    left = np.where(at.loose, loose(step, own), 0.0)
    yield Instant(
        LOSS,
        common
        | {
            "logits": step.last * (loss_bytes_CS(job, group) + held_logits_CS(job, group)) + at.waiting * logits,
            "temporaries": waits + left,
        },
        is_loss=True,
    )
    inside = common | {"logits": step.last * waiting_logits_CS(job, group) + (at.waiting + 1) * logits}
    work = attention_gradients_C(job, step.c)[:, None] - waiting.not_before_attention
    work = np.maximum(work, waiting.behind_attention)
    layers = step.layers_of_chunk
    last_joins = step.behind if job.model.tied else np.zeros_like(step.behind)
    becomes = np.where(at.loose & ~step.stands, step.at_rest * _share_of_run(step), 0.0)
    for more in (layers - 1.0, np.zeros_like(layers)):  # layers that are yet to come
        below = np.minimum((more + 1.0) * step.widest, own)
        lies = np.where(at.loose, loose(step, below + last_joins), 0.0)
        joined = step.earlier + becomes * (1.0 - below / np.maximum(own, 1.0))
        made = waiting.every - more * waiting.of_one_layer
        yield Instant(LAYERS, inside | {"gradients": joined, "temporaries": waits + made + work + lies})
    lies = np.where(at.loose, loose(step, step.layers.last_matrix), 0.0)
    through = {"gradients": step.earlier + becomes, "temporaries": waits + waiting.every + step.stream + lies}
    yield Instant(LAYERS, inside | through)


def _share_of_run(step: Step) -> Reals:
    """What the run of layers that a pass goes through is of all that stands on the stage."""
    return elements_of_run(step, step.counts) / np.maximum(step.counts.whole, 1.0)


def second_part(step: Step, at: Progress) -> Iterator[Instant]:
    """The first weight gets its gradient: a tied head's, or that of queries; then the last one: of the head, or of the last layer's
    feed-forward part, when the other gradients of this micro-batch and the inputs of its products are gone."""
    waiting = Waiting(step.job, step.group, step.situation.is_last)
    logits = step.last * gradient_bytes_CS(step.job, step.group)
    unjoined = loose(step, elements_of_run(step, step.bare))
    stood = np.where(at.loose, unjoined, 0.0)
    first, pair, last = (step.trained * step.compute * part for part in waiting.ends(step))
    sent = at.sent * step.stream + beside(step, at)
    common = {"gradients": step.earlier, "gather_buffers": step.gathered(layers=0, head=True)}
    yield Instant(
        END,
        common
        | {
            "activations": kept(step, at),
            "logits": (at.waiting - 1) * logits,
            "temporaries": at.waiting * waiting.every + sent + stood + first,
        },
    )
    adds = np.where(step.at_once, step.stands, at.loose)
    yield Instant(
        END,
        common
        | {
            "activations": kept(step, at) - waiting.read_before_product,
            "logits": at.waiting * logits,
            "temporaries": at.waiting * waiting.every - waiting.gone_before_product + sent + stood + adds * pair,
        },
    )
    made = np.where(step.at_once, step.fresh(elements_of_run(step, step.counts)), 0.0)
    read, joined = waiting.at_last_product
    yield Instant(
        END,
        common
        | {
            "gradients": step.earlier + made,
            "activations": np.maximum(step.inputs, kept(step, at) - waiting.read_by_products + read),
            "logits": at.waiting * logits,
            "temporaries": (at.waiting - 1) * waiting.every + joined + sent + unjoined + adds * last,
        },
    )
