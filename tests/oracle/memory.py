"""Bytes of one layout, one stage and one moment at a time (docs/memory_model.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import compress
from math import ceil, inf
from statistics import fmean

from strategist.catalog import rows
from strategist.facts.job import Job
from strategist.facts.layers import build_layer
from strategist.facts.model import LayerKind, ModelShape, layer_counts
from strategist.facts.profile import BYTES
from strategist.memory.saved import OURS, Saved, habits_of, saved_tensors
from tests.oracle import adapters, compression, convolutions, served, turned
from tests.oracle.held_whole import whole_weights
from tests.oracle.parameters import (
    Held,
    dense_of_layer,
    expert_shards,
    experts_of_layer,
    held,
    matrix_elements,
    padded,
    shards,
    tensors_of,
    vector_elements,
    vocabulary,
)
from tests.oracle.reserved import by_blocks, reserved
from tests.oracle.schedules import Around, around, around_forward
from tests.oracle.split_passes import split_end, split_instants, v_instants
from tests.oracle.stages import IN_A_V, Layout, computed_again, last_stage, stage_kinds, turns_back
from tests.oracle.tiles import layer_in_slices, tiles_of

Wanted = Callable[[tuple[str, ...], str], bool]
MOMENTS = ("loss", "backward of the last layer", "end of backward", "optimizer step")


@dataclass(frozen=True)
class Memory:
    """The worst moment of the worst stage: its terms, their sum, and the host bytes per device."""

    terms: dict[str, int]
    device: int
    moment: str
    stage: int
    host: int


def overhead(name: str) -> float:
    """A fixed cost of the catalogue."""
    return float(next(row["value"] for row in rows("overheads") if row["name"] == name))


def in_torchao(job: Job) -> bool:
    """In fp8 the matrices of dense models are torchao's under strategist's own executor, which autocast does not reach."""
    is_whole = job.model.moe is None and job.model.adapters is None
    return is_whole and job.workload.precision == "fp8" and job.profile.name == "strategist"


def is_plain(job: Job, layout: Layout) -> bool:
    """DDP or one process under autocast; everything else runs on fully_shard or replicate, in frameworks that have them experts too."""
    in_units = job.profile.has_units and layout["ep"] > 1
    if in_torchao(job):
        return False
    return bool(layout["zero"] < 2 and layout["tp"] == layout["pp"] == 1 and not in_units)


def uses_units(job: Job, layout: Layout) -> bool:
    """Weights lie in units of fully_shard or replicate."""
    ranks = layout["dp_replicate"] * layout["dp_shard"] * layout["cp"]
    alone = ranks == 1 and job.formats.compute == job.formats.parameter
    return not is_plain(job, layout) and not alone and (layout["zero"] >= 2 or job.profile.has_units)


def tokens(job: Job, layout: Layout) -> float:
    """T: tokens of one micro-batch on one rank."""
    return float(layout["micro_batch"] * job.workload.seq_len / layout["cp"])


def decoder_tokens(job: Job, layout: Layout) -> float:
    """T of what the head sees: behind an encoder a decoder has a sequence of its own."""
    work = job.workload
    own = work.seq_len if work.target_len is None or not job.model.enc_layers else work.target_len
    return float(layout["micro_batch"] * own / layout["cp"])


def sequence_cut(layout: Layout) -> int:
    """sp: tp under sequence parallelism, else 1."""
    return int(layout["tp"]) if layout["sequence_parallel"] else 1


def busiest(job: Job, layout: Layout) -> float:
    """Tokens at the experts of the rank that gets most, over the mean of the ep ranks, which cannot be more than their number."""
    asked, ranks = job.workload.expert_imbalance, layout.get("ep", 1)
    return float(asked if asked < ranks else ranks)


def _bytes_of(
    job: Job, layout: Layout, kind: LayerKind, wanted: Wanted, *parts: str, named: Callable[[str], bool] | None = None
) -> float:
    """Bytes of some rows of one layer for one micro-batch, under the layout's policy."""
    policy = layout["recompute"]
    if policy == "selective" and job.profile.light == "half-blocks":
        sides = (
            _bytes_of(job, {**layout, "recompute": side}, kind, wanted, *parts, named=named)
            for side in ("none", "full")
        )
        return sum(sides) / 2
    cuts = (sequence_cut(layout), layout["tp"], layout["etp"], layout["context_parallel"])
    rows = _weighed(job, kind, *cuts, is_plain(job, layout), busiest(job, layout))
    return _added_up(rows, policy, wanted, parts, named) * tokens(job, layout)


@lru_cache(maxsize=4096)
def _one(job: Job) -> Job:
    """The first job that was equal to this, and its model: what is kept by either then compares no fact of them."""
    return replace(job, model=_one_model(job.model))


@lru_cache(maxsize=4096)
def _one_model(shape: ModelShape) -> ModelShape:
    return shape


class Rows(tuple[tuple[Saved, float], ...]):
    """Rows of a layer that are asked for as one and the same thing, so that no row is compared."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


@lru_cache(maxsize=1 << 16)
def _added_up(
    rows: Rows, policy: str, wanted: Wanted, parts: tuple[str, ...], named: Callable[[str], bool] | None
) -> float:
    """Bytes for one token of the rows that are wanted, kept because passes and instants ask for them again and again."""
    total = 0.0
    for tensor, size in rows:
        if wanted is _used and tensor.part == "rest":
            continue
        if named is not None and not named(tensor.name):
            continue
        if wanted(tensor.policies, policy) and (not parts or tensor.part in parts):
            total += size
    return total


@lru_cache(maxsize=4096)
def _weighed(
    job: Job, kind: LayerKind, sp: int, tp: int, etp: int, context_parallel: str, is_plain: bool, busy: float
) -> Rows:
    """The rows of a layer and the bytes that a rank has of each for one token, kept because an instant asks for them again and again."""
    ways = {
        "sequence": sp,
        "heads": tp,
        "whole": 1,
        "dispatched": max(1, sp // etp),
        "autocast": 1 if is_plain else inf,
    }
    ways["exchanged"] = tp if context_parallel in ("all-to-all", "hierarchical") else inf
    ways["regathered"] = 1 if ways["dispatched"] > 1 else inf
    ways["summed"] = sp if tp > 1 and ways["dispatched"] == 1 else inf
    found = []
    for tensor in saved_tensors(job.model, kind, habits_of(job)):
        if not (tensor.cut_only and tp == 1):
            size = 4 if tensor.is_float32 else 1 if tensor.is_float8 else BYTES[job.formats.compute]
            found.append((tensor, tensor.width * size / ways[tensor.cut] * (busy if tensor.arrives else 1)))
    return Rows(found)


@lru_cache(maxsize=4096)
def _sizes(shape: ModelShape, kind: LayerKind, tp: int, etp: int, ep: int) -> tuple[tuple[str, float], ...]:
    """The matrices of a layer by name and the elements that a rank has of each, kept for the same reason."""
    found = []
    for m in build_layer(shape, kind).matrices:
        if m.is_expert:
            found.append((m.name, -(-m.copies // ep) * matrix_elements(replace(m, copies=1), etp, 1)))
        else:
            found.append((m.name, matrix_elements(m, tp, 1)))
    return tuple(found)


@lru_cache(maxsize=1 << 16)
def _chosen(shape: ModelShape, kind: LayerKind, tp: int, etp: int, ep: int, chosen: Callable[[str], bool]) -> float:
    """Elements that a rank has of some matrices of a layer."""
    return sum(size for name, size in _sizes(shape, kind, tp, etp, ep) if chosen(name))


def _kept(policies: tuple[str, ...], policy: str) -> bool:
    return policy in policies


def _kept_anyway(policies: tuple[str, ...], policy: str) -> bool:
    """Kept, and not in order to compute others again: backward reads it, and lets it go."""
    return "none" in policies and policy in policies


def _again(policies: tuple[str, ...], policy: str) -> bool:
    return "none" in policies and policy not in policies


def _used(policies: tuple[str, ...], policy: str) -> bool:
    """Kept only in order to compute others again."""
    return "none" not in policies and policy in policies


def kept_bytes(job: Job, layout: Layout, kind: LayerKind) -> float:
    """Bytes that one layer keeps for one micro-batch."""
    return _bytes_of(job, layout, kind, _kept)


def loss_bytes(job: Job, layout: Layout) -> tuple[float, float]:
    """Bytes per token and vocabulary entry: when the loss is known, and in its backward."""
    row, c = job.profile.keeping, BYTES[job.formats.compute]
    copies = 0.0 if c == 4 and row.forward_float32 else row.forward_compute * c
    cut = row.cut_float32 if layout["tp"] > 1 else 0.0
    return 4 * row.forward_float32 + copies, 4 * (row.backward_float32 + cut) + row.backward_compute * c


def in_flight(layout: Layout, stage: int) -> float:
    """Micro-batches whose activations one stage holds at once."""
    pp, m, v = layout["pp"], layout["accumulation"], layout["virtual_stages"]
    if pp == 1:
        return 1
    if layout["schedule"] in ("gpipe", "looped_bfs"):
        return float(m)
    if layout["schedule"] == "1f1b":
        return float(min(m, pp - stage))
    if layout["schedule"] in ("zb_h1", "zbv"):
        return float(min(m, pp))
    if layout["schedule"] == "dualpipev":
        return pp + 0.5
    return float(min(m * v, 2 * (pp - stage - 1) + (v - 1) * pp + 1) / v)


@dataclass(frozen=True)
class LayerAt:
    """One instant of a layer's backward: temporaries, kept bytes gone by then, elements with a gradient and those that are put
    together, whether a matrix is just getting its own, whether what the layer was given is still needed, and which of the elements
    are experts that are through, and whether those have yet to begin, so that the next layer is not gathered."""

    temporaries: float
    freed: float
    weights: float
    stacked: float = 0.0
    is_product: bool = False
    is_early: bool = True
    routed: float = 0.0
    is_sooner: bool = False


class Stage:
    """One backward pass of one stage of one layout."""

    def __init__(
        self, job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind], at: Around, *, others: bool = False
    ) -> None:
        """Where layers of two policies lie there, those of the policy that the last one has, or the `others`."""
        job = _one(job)
        again = computed_again(job, layout, stage, len(kinds))
        self.is_partly = any(again) and not all(again)
        self.made_from = job, layout, stage, kinds, at
        self.ats: dict[LayerKind, list[LayerAt]] = {}
        asked, are_again = layout, any(again) and again[-1] != others
        if not are_again:
            layout = {**layout, "recompute": "none"}
        are_mine = [not self.is_partly or redone is are_again for redone in again]
        self.mine = list(compress(kinds, are_mine))
        in_turn = are_mine[: len(kinds) // max(1, layout["virtual_stages"])][::-1]
        self.places = [place for place, is_mine in enumerate(in_turn) if is_mine]  # in backward
        self.job, self.a, self.stage, self.kinds, self.at = job, layout, stage, kinds, at
        a, formats = layout, job.formats
        self.c, self.r, self.s = BYTES[formats.compute], BYTES[formats.reduce], BYTES[formats.parameter]
        self.bare = held(job.model, a, stage, kinds, sharded=False)
        self.sharded = held(job.model, a, stage, kinds, sharded=True)
        self.w = padded(job.model, a, stage, kinds) if a["zero"] >= 2 else self.bare
        self.v, self.piped = a["virtual_stages"] if a["pp"] > 1 else 1, a["pp"] > 1
        self.begins, self.ends = stage == 0, stage == last_stage(a)
        self.first, self.last = self.begins and at.chunk == 0, self.ends and at.chunk == self.v - 1
        self.zero, self.q = a["zero"], job.trainable
        self.in_chunks = a.get("loss") == "chunked"
        self.q_ends = self.q if job.model.adapters is None else 0.0
        self.n = a["dp_shard"] * a["cp"]
        ranks = a["dp_replicate"] * self.n
        self.plain = is_plain(job, a)
        self.units = uses_units(job, a)
        self.reduces = self.units and not self.piped
        m = a["accumulation"]
        self.several = at.stands[at.chunk]
        self.threads = a["dp_replicate"] if a.get("replicas") == "threads" else 1
        self.buckets = self.plain and ranks > 1 and self.threads == 1
        self.stands = (self.several and self.threads == 1) or self.buckets
        self.casts = formats.compute != formats.parameter
        self.tied = job.model.tied and a["pp"] == 1
        self.T, self.h = tokens(job, a), job.model.hidden
        self.of_decoder = decoder_tokens(job, a) / self.T
        self.seen = decoder_tokens(job, a) * job.profile.head_tokens
        self.whole = self.T * self.h * self.c
        self.tiles = tiles_of(job.model, a)
        self.wl = self.w.widest / (a["tiling"] if self.tiles == 1 else 1)
        is_ours = job.profile.keeping.name == OURS and job.model.moe is not None
        self.apart = self.units and a["ep"] > 1 and is_ours
        self.sharers = int(expert_shards(a))
        self.own_tokens = max(1, sequence_cut(a) // a["etp"])  # ranks that send an expert's tokens between them
        units = self._units_of_layers() if self.apart else (self.wl, 0.0, self.wl, self.wl)
        self.D, self.X, self.beside, self.bald = units
        self.flat_X = self.X if self.apart and self.zero >= 2 and self.sharers > 1 else 0.0  # the buffer of a gathering
        if self.tiles > 1:  # what a layer is beside its matrices
            self.D = max(
                self.n * sum(vector_elements(v, a["tp"], self.n) for v in build_layer(job.model, kind).vectors)
                for kind in layer_counts(job.model)
            )
        self.wire = adapters.travelling(job)
        self.head = vocabulary(job.model, a["tp"], 1) if self.last else 0
        self.table = vocabulary(job.model, a["tp"], 1) if self.first else 0
        self.before, self.behind = (self.w.before if self.first else 0), (self.w.behind if self.last else 0)
        self.outer = self.before + (self.behind if self.tied else 0)
        self.own = self.w.layers / self.v
        self.inputs = 16 * self.T * m * self.threads
        if job.model.enc_layers:  # ids before the encoder, ids and labels of the decoder
            self.inputs = (self.T + 2 * decoder_tokens(job, a)) * 8 * m * self.threads
        if job.model.kind == "cnn":  # pixels of three colours, four bytes each, and a label
            self.inputs = (12 * dict(job.model.extra)["image"] ** 2 + 8) * self.T * m * self.threads
        self.numbers = served.kept(job, a)
        self.stream = self.whole / sequence_cut(a)
        self.given = self.stream if self.piped and not self.last else 0.0
        sends = self.piped and a["schedule"] == "1f1b" and at.begun and not self.begins
        self.previous = self.stream if sends else 0.0
        self.settled = _settled(job, a, kinds, self.bare, self.sharded)
        self.at_rest = _gradients(job, a, kinds, self.bare, self.sharded)
        self.at_once = not self.units or (self.piped and self.c == self.r)
        self.earlier = self._earlier()
        self.outside = self.at_rest if self.buckets and self.several else 0.0
        policies = [asked["recompute"] if redone else "none" for redone in again]
        kept = {
            (kind, policy): _bytes_of(job, {**a, "recompute": policy}, kind, _kept)
            for kind, policy in zip(kinds, policies, strict=True)
        }
        each = [kept[kind, policy] for kind, policy in zip(kinds, policies, strict=True)]
        self.every = sum(each) - self.begins * adapters.first_norm(job, a, self.T)
        self.of_mine = sum(compress(each, are_mine)) if self.is_partly else self.every
        passes = [self._keeps(chunk) for chunk in range(self.v)]
        flying = sum(count * size for count, size in zip(at.flight, passes, strict=True))
        self.others = flying - passes[at.chunk] + self.inputs
        self.all = flying + self.inputs
        self.turn = self._decoders()
        self.inside = self.all - (self.edges() if self.last else 0.0) + (self._encoded() if self.turn else 0.0)
        copies = self.c * self.w.layers if self.plain and self.casts else 0.0
        self.copies = copies if a["recompute"] == "none" else 0.0
        if self.plain and a["recompute"] == "none" and job.model.adapters is not None:
            self.copies = adapters.low_copies(job, self.q * self.w.all)
        alone = copies > 0 and self.copies == 0
        self.cached = self.c * (self.w.layers - self.w.experts) if alone else 0.0
        self.copies_again = self.c if alone else 0.0  # of an element that is computed again
        if self.is_partly and copies:
            redone = held(job.model, a, stage, list(compress(kinds, again)), sharded=False)
            self.copies, self.cached = copies - self.c * redone.layers, self.c * (redone.layers - redone.experts)
        self.head_copy = self.c * self.head if self.plain and self.casts else 0.0
        self.waiting = self.q_ends * self.c * self.head if self.reduces and self.tied else 0.0
        old_head = self.q_ends * self.s * self.head if not self.units and self.tied else 0.0
        self.growing_head = old_head if self.casts and not self.stands else 0.0
        self.old_head = old_head - self.growing_head
        self.early = self._early()
        others = [
            self._unit_before_time(chunk) for chunk in range(len(at.early)) if at.early[chunk] and chunk != at.chunk
        ]
        self.held = sum(others) if self.piped and self.v > 1 else 0.0
        finds = self.piped and at.is_forward and at.early[at.chunk]
        self.found = self._unit_before_time(at.chunk) if finds else 0.0
        roots = self.piped and job.model.tied and not self.at_once
        self.late = (
            self.q * self.c * self.behind if roots else 0.0
        )  # the root unit joins what stands at the end of the pass
        self.through = 0.0 if self.tied or roots else self.behind

    @property
    def is_mixed(self) -> bool:
        """Whether some of the model's layers have experts and others none."""
        return len({own.ffn for own in layer_counts(self.job.model)}) > 1

    def _decoders(self) -> int:
        """Layers of a decoder that are through before those of its encoder, one sort in each half; 0 for other models and where pieces or
        policies differ."""
        shape, sorts = self.job.model, layer_counts(self.job.model)
        plain = not (self.piped or self.is_partly or shape.adapters) and self.tiles == 1
        return shape.layers if shape.enc_layers and plain and len(sorts) == 2 else 0

    def _of_half(self, number: float, size: Callable[[LayerKind], float]) -> float:
        """What a layer has behind which so many are through."""
        return next(size(kind) for kind in layer_counts(self.job.model) if kind.cross == (number < self.turn - 0.25))

    def _through_halves(self, number: float, size: Callable[[LayerKind], float]) -> float:
        """What the layers that are through have in all."""
        return sum(self._of_half(place, size) for place in range(round(number)))

    def _unit(self, kind: LayerKind) -> float:
        """Elements of a layer, with padding where they are sharded."""
        parts = self.n if self.zero >= 2 else 1
        return float(parts * dense_of_layer(self.job.model, kind, self.a["tp"], parts))

    def _encoded(self) -> float:
        """What an encoder's last norm keeps, and its result."""
        own = self.h * self.c + (4 if self.job.model.norm in ("rmsnorm", "rmsnorm_nonparam") else 8)
        return self.T * own / sequence_cut(self.a) + self._memory()

    def _memory(self) -> float:
        """What an encoder gave: of its parts nothing where every layer of the decoder has put all of them together, and keeps that."""
        cut = sequence_cut(self.a)
        is_kept_whole = cut > 1 and self.a["recompute"] == "none" and self.job.profile.keeping.gathered_inputs
        return 0.0 if is_kept_whole else self.whole / cut

    def _units_of_layers(self) -> tuple[float, float, float, float]:
        """Elements of the largest unit of a layer without its experts, of that of its experts, and of the first where there are
        some and where there are none, with padding."""
        shape, a, sorts = self.job.model, self.a, layer_counts(self.job.model)
        parts = self.n if self.zero >= 2 else 1
        rests = {kind: parts * dense_of_layer(shape, kind, a["tp"], parts) for kind in sorts}
        ranks = self.sharers
        routed = max(ranks * experts_of_layer(shape, kind, a["ep"], a["etp"], ranks) for kind in sorts)
        beside = max((rest for kind, rest in rests.items() if kind.ffn == "moe"), default=0)
        bald = max((rest for kind, rest in rests.items() if kind.ffn != "moe"), default=0)
        return float(max(rests.values())), float(routed), float(beside), float(bald)

    def _earlier(self) -> float:
        """Gradients that stand, of this chunk and of others; reduced ones too."""
        if not self.piped:
            return self.at_rest if self.several or self.buckets else 0.0
        stands, reduced = (self._of_chunks(which) for which in (self.at.stands, self.at.reduced))
        first = self.w.before if self.at.stands[0] or self.at.reduced[0] else 0.0
        whole = max(self.w.all, 1.0)
        return self.at_rest * (stands + first) / whole + self.settled * reduced / whole

    def _of_chunks(self, which: Sequence[bool]) -> float:
        """Elements of the layers of some chunks, and of the head if the last is one of them."""
        return self.w.layers * sum(which) / self.v + (self.w.behind if which[-1] else 0.0)

    def _keeps(self, chunk: int) -> float:
        """What one micro-batch keeps of one chunk: layers, rotary tables; the output, while the input lies in a buffer."""
        shape = self.job.model
        tables = self.job.workload.seq_len / self.a["cp"] * shape.head_dim * self.c if shape.pos == "rope" else 0.0
        kept = self.every / self.v + tables + self.numbers
        if self.ends and chunk == self.v - 1:
            kept += self.edges() - (self.stream if self.piped else 0.0)
        if self.begins and chunk == 0 and self.piped:
            kept += self.stream
        return kept

    def _early(self) -> float:
        """What ZeRO-3 gathers in a pipeline before its time."""
        if not (self.piped and self.units and self.zero == 3):
            return 0.0
        if self.first:  # an embedding
            return 0.0
        there = self.at.flight[-1] - 1 if self.last else sum(self.at.flight) - 1
        return self._unit_before_time(self.at.chunk) if self.at.begun or there > 0 else 0.0

    def _unit_before_time(self, chunk: int) -> float:
        """What a chunk's backward pass gathers for the pass before it: the unit that ends its forward passes, unless that is a root."""
        if not (self.units and self.zero == 3):
            return 0.0
        is_first, is_last = self.begins and chunk == 0, self.ends and chunk == self.v - 1
        is_there = len(self.kinds) <= self.v and not (is_first or is_last)  # an only layer
        if is_there or (self.job.model.tied and (is_first or is_last)):
            return 0.0
        return self.c * (self.w.behind if is_last else self.D)

    def moving(self) -> float:
        """What is held in one pass and not in another; of those with as much, one that finds something holds a byte more."""
        return self.others + self.earlier + self.held + (self.found > 0)

    def edges(self) -> float:
        """Final norm and the head's input; those of an encoder, whose results all layers of a decoder read."""
        statistics = 4 if self.job.model.norm in ("rmsnorm", "rmsnorm_nonparam") else 8
        read = self.whole * self.of_decoder if self.job.model.adapters is None else 0.0
        encoded = self._encoded() if self.job.model.enc_layers else 0.0
        return self.of_decoder * self.T * (self.h * self.c + statistics) / sequence_cut(self.a) + read + encoded

    def logits(self, per_entry: float, *, held: bool = True) -> float:
        """Bytes of the vocabulary's tensors; what waits for backward, and the logits that a last stage holds on to."""
        if not self.ends:
            return 0.0
        waiting = self.at.flight[-1] - (self.at.chunk == self.v - 1)
        own = (
            (per_entry + (self.c if held and self.piped and self.job.profile.has_units else 0.0)) if self.last else 0.0
        )
        return self.seen * -(-self.job.model.vocab // self.a["tp"]) * (own + waiting * (self.c + 4))

    def fresh(self, elements: float, routed: float = 0.0) -> float:
        """Gradients made by this pass, `routed` of them of experts in units of their own."""
        if self.stands:
            return 0.0
        if self.piped and self.units and self.zero >= 2:
            return self.q * self.r * elements
        own = (elements - routed) / self.n + routed / self.sharers if self.zero >= 2 else elements
        return min(self.q * BYTES[self.job.formats.gradient] * own, self.at_rest)

    def reduction(self, elements: float, bare: float) -> float:
        """A unit while it is reduced; its gradient has no padding."""
        if not self.reduces:
            return 0.0
        return self.q * (self.r * elements + (self.c * bare if self.zero >= 2 else 0.0))

    def output(self, elements: float, ranks: int | None = None) -> tuple[float, float]:
        """What comes out, over all shards or some ranks, where earlier micro-batches have left something: (a gradient at once, a
        buffer)."""
        waits = self.zero >= 2 or self.job.profile.replicas_wait
        if not (self.reduces and self.several and waits):
            return 0.0, 0.0
        made = self.q * self.r * elements / ((ranks or self.n) if self.zero >= 2 else 1)
        sums = (self.zero < 2 or self.a["dp_replicate"] > 1) and self.job.profile.replicas_wait
        return (made, 0.0) if sums and self.a["accumulation"] == 2 else (0.0, made)

    def retained(self, elements: float) -> float:
        """Averages of unsharded units, where replicas average each time."""
        each = self.zero < 2 and not self.job.profile.replicas_wait
        return self.q * self.r * elements if self.reduces and self.several and each else 0.0

    def _of_some_layers(self, layers: int, own: float, experts: float) -> float:
        """Elements of some layers' units, of `own` in all; of units of experts only those asked for."""
        if self.tiles > 1:
            return min(min(layers, 1) * self.D, own)
        if not self.apart:
            return min(layers * self.wl, own)
        is_last = self.is_mixed and not self.piped and not self.is_partly
        return min(layers * (self.beside if is_last else self.D), own - self.w.experts / self.v) + experts * self.X

    def gathered(self, layers: int, *, head: bool = False, passed: float = 0.0, experts: float = 0.0) -> float:
        """Gathered weights; `layers` without their experts where those are units of their own."""
        if not self.units:
            return 0.0
        tied = self.job.model.tied
        if self.piped:
            if self.zero < 3:
                return self.c * (self.w.all - self._of_chunks(self.at.reduced))
            root = self._root() if tied else self.behind if head else 0.0
            return self.c * (self._of_some_layers(layers, self.own, experts) + root) + self.held
        kept = self.w.behind if head and not tied else 0.0
        if self.zero == 3:
            own = self.wire * self._of_some_layers(layers, self.w.layers, experts)
            return self.c * max(kept + own + (self.outer if tied else 0.0), self._soon_again(passed, head=head))
        return self.c * (kept + self.wire * max(0.0, self.w.layers - passed) + self.outer)

    def _soon_again(self, passed: float, *, head: bool) -> float:
        """Elements that DeepSpeed's ZeRO-3 has not let go of: backward reads them before so many others have worked."""
        if not self.job.profile.reuse_distance:
            return 0.0
        kept = self.job.profile.reuse_distance / (3 if self.a["recompute"] == "full" else 2)
        gone = passed + (0.0 if head or self.job.model.tied else self.w.behind)
        return self.wire * (min(kept, self.w.all) - gone)

    def _root(self) -> float:
        """Tied ends that lie gathered: those of the chunk at work, and an embedding that another chunk gathered for forward."""
        return (self.w.before if self.at.chunk == 0 or self.at.holds_first else 0.0) + self.behind

    def heads(self) -> Iterator[tuple[int, dict[str, float]]]:
        """(moment, terms) of the instants around the loss and the head."""
        if not self.piped:
            yield from self._sums()
            yield from [(0, self._cast_forward())] if in_torchao(self.job) else []
        yield from self.losses()
        yield from self._head()

    def _sums(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Under sequence parallelism what the last layer gives is added up in forward, and what the head gives in backward."""
        shape = self.job.model
        if sequence_cut(self.a) == 1 or shape.moe or shape.adapters or self.tiles > 1:
            return
        adds = 2 * self.whole + self.stream
        rest = self._worst_of_kinds(lambda kind: self._rows(kind, _kept, "rest"))
        shards = self.units and self.zero >= 2
        yield (
            0,
            {
                "gradients": self.earlier,
                "activations": self.inside - rest,
                "gather_buffers": self.gathered(1) + (self.c * self.wl if shards else 0.0),
                "temporaries": self._added_up(),
            },
        )
        if not self.in_chunks:
            (_, made), *_ = self._head_alone(self.whole)
            sums = {
                "activations": self.all - self.whole,
                "logits": 0.0,
                "temporaries": made["temporaries"] + adds - self.whole,
            }
            yield 1, made | sums

    def gathering(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Without a pipeline: forward gathers the last layer, whose predecessor's first buffer is still there; then norm and
        head beside that of the last layer."""
        if not self.units or self.zero < 2 or not self.kinds:
            return
        kept = self._worst_of_kinds(lambda kind: self._rows(kind, _kept))
        own = self.wire * (self.flat_X if self.apart else self.wl)
        flat = self.c * (self.beside + own if self.apart else own * min(2, len(self.kinds)))
        gathered = self.gathered(1, experts=1) + flat
        acts = max(self.inputs, self.inside - kept) + self.stream
        yield 0, {"gradients": self.earlier, "activations": acts, "gather_buffers": gathered}
        head = 0.0 if self.tied else self.gathered(0, head=True) + self.c * (self.behind + own)
        acts = self.inside + self.stream
        yield 0, {"gradients": self.earlier, "activations": acts, "gather_buffers": head}

    def casting(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Forward of the last layer beside autocast's copies that nothing keeps: before the last matrix has one, and behind it."""
        shape = self.job.model
        is_own = self.job.profile.keeping.name == OURS and shape.moe is None and shape.adapters is None
        if not is_own or self.a["recompute"] == "none" or not self.cached:
            return
        alone, relu = self.a["recompute"] == "full", not shape.mlp_gated and shape.mlp_act in ("relu", "relu2")
        parts = ("ffn", "inside") if alone and shape.mlp_gated else ("ffn", "inside", "product")
        made = self._worst_of_kinds(lambda kind: self._rows(kind, _again, *parts) - self._kept_behind(kind))
        product = self._worst_of_kinds(self._product)
        matrix = self._worst_of_kinds(lambda kind: self._elements(kind, _is_down))
        left = self.inside - self._worst_of_kinds(lambda kind: self._rows(kind, _kept, "rest"))
        first = made + (product if alone and relu else 0.0)
        second = first - (product if shape.mlp_gated or shape.mlp_act == "relu2" else 0.0)
        for made in (first - self.c * matrix, second + (self.whole if alone else 0.0)):
            waits = self.outside + self.cached + made
            beside = {"bucket_buffers": self.copies, "temporaries": waits}
            yield 0, {"gradients": self.earlier, "activations": left, **beside}

    def bodies(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Those of the layers."""
        sharded = not self.piped and self.zero == 3
        if self.is_partly:
            yield from (*self.one_by_one(), *self.other_side().one_by_one())
        else:
            looked_at = (0, 1, -2, -1) if sharded else (0, 1, -1)
            if self.turn:
                looked_at += (self.turn, self.turn + 1)
                yield 1, self._between_halves()
            for number in (0,) if self.job.model.kind == "cnn" else looked_at:
                yield from ((1, terms) for terms in (self._slices if self.tiles > 1 else self._layer)(number))
        if self.tiles == 1:
            yield from ((1, terms) for terms in self._layer_reduced())
            if sharded and self.units and not self.apart and 0 < len(self.kinds) < 3:
                yield 1, self._first_unpacked()
        if self.apart and self.w.experts:
            yield from self._experts_forward()
            numbers = () if self.is_partly else (0, 1, -2, -1)
            yield from ((1, terms) for number in numbers for terms in self._experts_backward(number))
        yield from self._end_of_pass() if self.piped else self._end()

    def other_side(self) -> Stage:
        """The same pass when it comes to the layers of the other policy."""
        return Stage(*self.made_from, others=True)

    def one_by_one(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Those of each layer of this policy."""
        for number in range(round(len(self.mine) / self.v)):
            yield from ((1, terms) for terms in self._layer(number))
            if self.apart and self.w.experts and any(kind.ffn == "moe" for kind in self.mine):
                yield from ((1, terms) for terms in self._experts_backward(number))

    def _behind(self, number: int) -> tuple[float, float, bool]:
        """Layers of the chunk through with backward, what they kept less a share of what the layer at work keeps, and whether that is
        the first of the chunk. Of layers of two policies the number counts those of one."""
        every, count = max(len(self.kinds) / self.v, 1.0), max(len(self.mine) / self.v, 1.0)
        own = max(count + number, 0.0) if number < 0 else min(number, count - 1)
        before = float(self.places[int(own)]) if self.is_partly else own
        return before, own / max(count - 1, 1), before >= every - 1

    def _let_go(self, number: int, kept: float) -> float:
        """What layers that are through kept: those of the other policy, and a share of one's own but for the layer at work. Where they hold on to the
        input that they were computed again from, they let go of nothing, and its gradient is there as well."""
        before, share, _ = self._behind(number)
        if self.job.profile.holds_passed and not self.job.recompute_layers and self.a["recompute"] == "full":
            return -before * self.stream
        return share * (self.of_mine / self.v - kept) + self._others_let_go(number)

    def _others_let_go(self, number: int) -> float:
        """What the layers of the other policy kept that are through at the so-many-th of this one."""
        if not self.is_partly:
            return 0.0
        through = self.places[number] - number
        return through * (self.every - self.of_mine) / (len(self.kinds) - len(self.mine))

    def forward(self) -> Iterator[tuple[int, dict[str, float]]]:
        """In a pipeline: a forward pass and, under ZeRO-3, what it gathers."""
        sharded, tied = self.zero == 3 and self.units, self.job.model.tied
        runs = sharded and self.at.alternates
        parts = 2 if self.a["sequence_parallel"] else int(self.a["tp"] > 1)
        terms = parts * self.whole if self.first and not tied else 0.0
        table, first, found = 0.0, 0.0, self.found if self.first else 0.0
        if tied and (self.first or self.last):
            table = self.c * 2 * (self._root() + self.wl)
        elif self.first:  # then its layer, behind what was gathered before its time or, if there are no more, at it
            table, first = self.c * 2 * self.before + found, self.c * (self.before + 2 * self.wl)
            first += found if len(self.kinds) > self.v else 0.0
        embedded = self.others + (self.stream if self.first else 0.0)
        common = {
            "gradients": self.earlier,
            "activations": embedded,
            "logits": self.logits(0, held=self.a["schedule"] != "interleaved"),
        }
        gathers, terms = (table, terms) if table + terms >= first else (first, 0.0)
        yield (
            0,
            common | {"gather_buffers": gathers + self.held if runs else 0.0, "temporaries": terms if runs else 0.0},
        )
        yield from ((0, terms) for terms in self._in_turn(runs))
        head_found = self.found if self.last else 0.0
        layer = self.c * (self.D + (self.X or self.wl) + (self._root() if tied else 0)) + head_found
        buffer = self.flat_X if self.apart else self.wl  # a rank that has all of the experts copies them without one
        head = self.c * (2 * self.behind + buffer) if self.last and not tied else 0.0
        found = self.gathered(0, head=True) if self.zero < 3 else 0.0
        parts = (
            ("ffn", "inside")
            if self.a["recompute"] == "full" and self.job.model.mlp_gated
            else ("ffn", "inside", "product")
        )
        computes = self._worst_of_kinds(lambda kind: self._rows(kind, _again, *parts))
        rest = self._worst_of_kinds(lambda kind: self._rows(kind, _kept, "rest"))
        fed = self.at.alternates
        summed = bool(self.a["sequence_parallel"]) and not self.job.model.moe
        keeps = fed and (self.a["recompute"] == "none" or summed)
        made = self.stream * (self.last - bool(self.a["sequence_parallel"]))
        moved = (
            rest if keeps and self.a["recompute"] != "none" else 0.0
        )  # what is kept of the result is there, in parts
        yield (
            0,
            {
                "gradients": self.earlier,
                "logits": self.logits(0, held=self.a["schedule"] != "interleaved"),
                "activations": self.inside - rest + (made if keeps else 0.0) + moved,
                "gather_buffers": max(layer, head) + self.held if runs else found if fed else 0.0,
                "temporaries": self.previous
                + (self._added_up() if keeps and summed else self._result() if keeps else computes if fed else 0.0)
                - moved,
            },
        )
        if in_torchao(self.job):
            casts = self._cast_forward()
            yield (
                0,
                casts
                | {
                    "logits": self.logits(0, held=self.a["schedule"] != "interleaved"),
                    "activations": casts["activations"] - (0.0 if self.last else self.stream),
                    "gather_buffers": layer + self.held if runs else found if fed else 0.0,
                    "temporaries": self.previous + (casts["temporaries"] if fed else 0.0),
                },
            )

    def beginning(self) -> tuple[int, dict[str, float]]:
        """In a pipeline a backward pass begins to gather."""
        sharded, tied = self.zero == 3 and self.units, self.job.model.tied
        again = self.c * (self.D + max(self.D, self.X))
        if tied and self.first and not (sharded and self.at.alternates):
            again = max(again, self.c * (2 * self.before + min(2, len(self.kinds) / self.v) * self.wl))
        begins = sharded and self.at.begun
        inside = {"gradients": self.earlier, "activations": self.inside, "logits": self.logits(0)}
        return 1, inside | {"gather_buffers": again + self.held if begins else 0.0, "temporaries": self.previous}

    def _in_turn(self, runs: bool) -> Iterator[dict[str, float]]:
        """A layer is gathered while its predecessor's first buffer is there: the last one, or the one before beside the last
        one's that came too early."""
        count, largest = len(self.kinds) / self.v, self._worst_of_kinds(lambda kind: self._rows(kind, _kept))
        early = self.found > 0 and not self.last
        beside = (
            (self.c * self._root() if self.job.model.tied else 0.0) + (self.found if self.last else 0.0) + self.held
        )
        for behind in (1, 2) if early and count > 2 else (1,):
            turns = 1 + behind if self.apart else 2 + behind
            gathered = turns * self.c * self.wl + beside
            second = largest
            if self.is_partly and 1 not in self.places:
                others = self.other_side()
                second = others._worst_of_kinds(lambda kind, side=others: side._rows(kind, _kept))  # type: ignore[misc]
            given = self.stream if self.last else 0.0  # what the layer before gave
            kept = max(self.others, self.inside - largest - (behind - 1) * second + given)
            yield {
                "gradients": self.earlier,
                "activations": kept if runs else 0.0,
                "logits": self.logits(0, held=self.a["schedule"] != "interleaved"),
                "gather_buffers": gathered if runs and count > 1 else 0.0,
                "temporaries": self.previous,
            }

    def _result(self) -> float:
        """What the last matrix of a layer gives, and what is held beside it until it is added up."""
        shape, cut = self.job.model, sequence_cut(self.a) > 1
        relu = shape.mlp_act == "relu" and not shape.mlp_gated
        held = self._worst_of_kinds(lambda kind: self._rows(kind, _kept, "product")) if relu else 0.0
        is_ours = self.job.profile.keeping.name == OURS
        if is_ours and shape.moe is not None and not shape.moe.shared_ffn and self.own_tokens > 1:
            return held + self.stream
        return held + (2 * self.whole + 2 * self.stream if cut else self.whole) * max(self.of_decoder, 1)

    def _added_up(self) -> float:
        """The same under sequence parallelism, and what lies in the frames at work until the sum is there."""
        adds = (2 * self.whole + self.stream) * max(self.of_decoder, 1)
        product = self._worst_of_kinds(lambda kind: self._rows(kind, _again, "product"))
        inputs = self._worst_of_kinds(lambda kind: self._rows(kind, _again, "ffn"))
        factor = product if self.a["recompute"] == "full" else 0.0
        more = max(product - adds, 0.0) if self.job.model.mlp_gated else 0.0
        return self._result() + inputs + product + factor + more

    def update(self) -> tuple[int, dict[str, float]]:
        """The update; tied ends of a pipeline exchange gradients before."""
        tied = self.piped and self.job.model.tied and (self.begins or self.ends)
        table = vocabulary(self.job.model, self.a["tp"], self.n if self.zero >= 2 else 1)
        theirs = self.q * self.s * table if tied else 0.0
        shape, once = self.job.model, self.job.profile.adds_terms == "step"
        sums = not once and not self.units and self.a["sequence_parallel"] and self.begins
        twice = self.q * self.s * shape.hidden * shape.pos_rows if sums and shape.pos == "learned" else 0.0
        own = self.sharded.all if self.zero >= 1 else self.bare.all
        here = self.job.workload.optimizer == "adamw" and self.a["offload"] == "none"
        roots = self.job.profile.update_copies * self.q * self.s * own if here else 0.0
        if not roots and self.job.profile.has_units and self.job.workload.optimizer == "adamw8bit":
            roots = DECODED_BYTES * min(own, DECODED_AT_ONCE) if self.a["offload"] == "none" else 0.0
        if self.job.workload.optimizer == "muon":  # matrices are turned once what the ends exchange is gone
            roots = turned.turning_bytes(self.job, self.a, self.stage, self.kinds)
            theirs, roots = (0.0, roots) if theirs < roots else (theirs, 0.0)
        if once and self.a["tp"] > 1:  # all terms of weights that are held whole lie in one message before
            here = sum(whole_weights(shape, self.a, self.stage, self.kinds))
            line = BYTES[self.job.formats.gradient] * here / (self.n if self.zero >= 2 else 1)
            theirs, roots = (0.0, line) if theirs + roots < line else (theirs, roots)
        terms = {"gradients": self.settled + twice, "activations": self.inputs, "pipeline_buffers": theirs}
        return 3, terms | {"temporaries": roots}

    def reductions(self) -> Iterator[tuple[int, dict[str, float]]]:
        """The last chunk of a pipeline is reduced, unit by unit."""
        behind = self.w.behind if self.v == 1 else 0.0
        out = self.q * self.r / self.n if self.zero >= 2 else 0.0
        left = self.w.before + self.own + behind
        single = self.job.model.pos != "learned"
        layer = min(self.D, self.own)
        layers = (
            [(layer, layer, False), (self.X, self.own - layer, False)] if self.apart else [(layer, self.own, False)]
        )
        for unit, passed, alone in (
            (self.w.before, self.w.before, single),
            *layers,
            (behind, behind, True),
        ):
            done, whole = self.w.all - left, max(self.w.all, 1.0)
            copied, made = self.q * self.r * unit, out * unit if alone else 0.0
            gathered = self.c * (left - unit) if self.zero < 3 else 0.0
            let_go = self.v > 1 or self.a["schedule"] == "zb_h1"
            held = 0.0 if let_go or not self.ends else self.c * self.seen * -(-self.job.model.vocab // self.a["tp"])
            last = 0.0 if self.ends or let_go else self.stream
            yield (
                2,
                {
                    "gradients": self.at_rest * left / whole + self.settled * done / whole + made,
                    "activations": self.inputs + last,
                    "logits": held,
                    "gather_buffers": copied + gathered if self.units else 0.0,
                },
            )
            left -= passed

    def buffered(self) -> Iterator[tuple[int, dict[str, float]]]:
        """(moment, terms) of every instant where gradients stand in one buffer beside whole weights, with the buckets of DeepSpeed's ZeRO-1 and 2:
        from the first gradient until the last is reduced, and the copy of the last bucket in one tensor."""
        room = self.job.profile.reduce_bucket if self.zero in (1, 2) else 0
        stored, formats = BYTES[self.job.formats.parameter], self.job.formats
        kinds = 1 + (formats.parameter == "float32" and formats.reduce != "float32")
        remains = room * (self.zero == 1 and self.a["accumulation"] > 1)
        copied = self.q * min(room, self.bare.all) * stored
        rooms = {0: remains * kinds * stored, 1: room * kinds * stored, 2: room * kinds * stored + copied, 3: 0.0}
        for moment, terms in self._without_buckets():
            yield moment, terms | {"bucket_buffers": rooms[moment]}

    def _without_buckets(self) -> Iterator[tuple[int, dict[str, float]]]:
        """The same but for buckets; where DeepSpeed reduces, the head's gradient is copied on its own if a bucket has no room for it."""
        row = self.job.profile.keeping
        stands = self.settled + self.q * self.c * (self.bare.all if row.loose_gradients else 0.0)
        stands += self.q * self.c * self._stand_ins() if row.placeholders else 0.0
        gathered = self.c * (min(2 * self.bare.widest, self.bare.layers) + self.bare.behind) if self.zero >= 3 else 0.0
        shape, edges = self.job.model, self.edges() if self.ends else 0.0
        tables = self.job.workload.seq_len / self.a["cp"] * shape.head_dim * self.c if shape.pos == "rope" else 0.0
        micro = self.every + edges + tables + self.stream * (self.begins - self.ends)
        every = in_flight(self.a, self.stage) * micro + self.inputs
        common = {"gradients": stands, "activations": every, "gather_buffers": gathered}
        entries = self.seen * -(-shape.vocab // self.a["tp"]) * self.ends
        loose = 0.0 if row.placeholders else self.q * self.c
        forward, backward, own_gradient, outputs = (entries * each for each in self._beside_outputs())
        common |= {"logits": outputs}
        yield 0, common | {"logits": forward}
        yield 0, common | {"logits": backward}
        own_head = vocabulary(shape, self.a["tp"], 1) if self.ends else 0
        given = self._whole_stream() * self.of_decoder if self.ends else 0.0
        head = loose * own_head + given
        yield 0, common | {"logits": own_gradient, "temporaries": head}
        if room := self.job.profile.reduce_bucket:
            alone = 2 * self.q * BYTES[self.job.formats.parameter] * own_head
            alone *= self.zero in (1, 2) and own_head > room
            yield 1, common | {"temporaries": alone + given}
        for side in (self, self.other_side()) if self.is_partly else (self,):
            gone = side._others_let_go(0)
            for found in zip(*(side._layer_ats(kind) for kind in dict.fromkeys(side.mine)), strict=True):
                at = max(found, key=lambda each: each.temporaries - each.freed + self.c * each.weights)
                finished = loose * at.weights if at.is_product else 0.0
                left = max(self.inputs, every - edges - gone - at.freed)
                yield 1, common | {"activations": left, "temporaries": at.temporaries + finished}
        table = self.q * self.c * self.bare.before + (self.stream if self.begins else 0.0)
        yield 2, common | {"activations": max(self.inputs, every - micro), "temporaries": table}
        yield 3, {"gradients": stands, "activations": self.inputs, "logits": outputs}

    def _beside_outputs(self) -> tuple[float, float, float, float]:
        """Bytes per token and vocabulary entry at the loss, in its backward, while the head works backward, and all the rest of the time.
        DeepSpeed's engine of pipelines keeps the outputs of the last two micro-batches on the last stage, those of the one at work among
        them, and while they come those of the one before the last too. A loop that has a name for its logits keeps one micro-batch's."""
        row = self.job.profile.keeping
        forward, backward = loss_bytes(self.job, self.a)
        if row.holds_logits:
            return forward, backward + self.c, 2 * self.c, self.c
        if not 0 < row.pipes_from <= self.a["pp"] or self.zero > 1:
            return forward, backward, self.c, 0.0
        others = 1 if self.a["accumulation"] == 1 else 2  # that lie there when those of this micro-batch come
        if row.piped_outputs == "float32" or self.c == 4:
            return forward + 4 * others, backward + 4 * (others - 1), self.c + 4 * others, 4.0 * others
        return forward + self.c * (others - 1), backward + self.c * others, self.c * (1 + others), self.c * others

    def _stand_ins(self) -> float:
        """Elements of one copy of each matrix that the stage has, and of its head."""
        found = {}
        for kind in self.kinds:
            for m in build_layer(self.job.model, kind).matrices:
                if m.name != "router":
                    cut = self.a["etp"] if m.is_expert else self.a["tp"]
                    found[m.name, m.outputs, m.inputs] = matrix_elements(replace(m, copies=1), cut, 1)
        return sum(found.values()) + (vocabulary(self.job.model, self.a["tp"], 1) if self.ends else 0)

    def losses(self) -> Iterator[tuple[int, dict[str, float]]]:
        """(moment, terms) at the loss and in its own backward."""
        before = {
            "gradients": self.earlier,
            "activations": self.all,
            "gather_buffers": self.gathered(0, head=True) - self._given_back(),
            "bucket_buffers": self.copies + self.head_copy,
        }
        if self.in_chunks:
            yield 0, self._last_chunk()
            return
        waits = self.previous + self.outside
        forward, backward = loss_bytes(self.job, self.a)
        yield 0, before | {"logits": self.logits(forward, held=False), "temporaries": waits + self.cached}
        yield 0, before | {"logits": self.logits(backward), "temporaries": waits}

    def _last_chunk(self) -> dict[str, float]:
        """Twice the logits of a chunk of tokens in float32, and all that backward will find."""
        shape, found = self.job.model, self._after_chunks()
        chunk = ceil(self.seen / ceil(shape.vocab / shape.hidden))
        own = (self.flat_X if self.apart else self.wl) if self.tied else self.behind
        last = own if self.units and self.zero >= 2 else 0.0
        return found | {
            "logits": 8 * chunk * shape.vocab,
            "gather_buffers": self.gathered(0, head=True) + found["gather_buffers"] + self.c * last,
            "temporaries": found["temporaries"] + self.cached + self.head_copy + self.stream,
        }

    def _after_chunks(self) -> dict[str, float]:
        """The head's gradient waits for backward: with its unit, as what the update finds, or beside it."""
        dW = self.q_ends * self.c * self.head
        becomes = not (self.units or self.stands or self.casts or self.tied)
        return {
            "gradients": self.earlier + (dW if becomes else 0.0),
            "activations": self.all,
            "gather_buffers": dW if self.units else 0.0,
            "bucket_buffers": self.copies,
            "temporaries": self.outside + (0.0 if self.units or becomes else dW),
        }

    def _head_after_chunks(self) -> dict[str, float]:
        """The head's gradient in the format of the weight, under autocast beside the one that was computed."""
        found, casts = self._after_chunks(), self.plain and self.casts
        joins = self.stands or self.tied
        return found | {
            "gradients": found["gradients"] + (self.fresh(self.head) if casts and not joins else 0.0),
            "gather_buffers": found["gather_buffers"] + self.gathered(1, head=True),
            "temporaries": found["temporaries"] + (self.q_ends * self.s * self.head if casts and joins else 0.0),
        }

    def _given_back(self) -> float:
        """The head, which ZeRO-3 gives back after a pass, until a forward pass needs it again."""
        gone = self.piped and self.units and self.zero == 3 and not self.at.alternates
        return self.c * self.behind if gone else 0.0

    def _head_alone(self, dX: float) -> Iterator[tuple[int, dict[str, float]]]:
        """The gradient of the head's weight, as it is made and as it is cast."""
        dW, own = self.q_ends * self.c * self.head, 0.0 if self.tied else self.fresh(self.head)
        becomes = not self.units and not self.stands and not self.casts and not self.tied
        waits = self.previous + self.outside + dX
        yield (
            0,
            {
                "gradients": self.earlier + (own if not self.units and not self.casts else 0.0),
                "activations": self.all,
                "logits": self.logits(self.c),
                "gather_buffers": self.gathered(1, head=True) + (dW if self.reduces else 0.0),
                "bucket_buffers": self.copies + self.head_copy,
                "temporaries": waits + (0.0 if self.reduces or becomes else dW),
            },
        )
        stored = self.q_ends * self.s * self.head if self.stands or self.tied else 0.0
        frozen = self.job.model.adapters is not None
        yield (
            1,
            {
                "gradients": self.earlier + own,
                "activations": self.all - (0.0 if frozen else dX),
                "logits": self.logits(0),
                "gather_buffers": self.gathered(int(frozen), head=True),
                "bucket_buffers": self.copies,
                "temporaries": waits + (dW + stored if self.plain and self.casts else 0.0) + (dX if frozen else 0.0),
            },
        )

    def _head(self) -> Iterator[tuple[int, dict[str, float]]]:
        dX, given = (self.stream, self.whole * self.of_decoder) if self.last else (0.0, 0.0)
        given = dX if self.job.model.adapters else given
        out, buffer = self.output(self.behind)
        yield from ((1, self._head_after_chunks()),) if self.in_chunks else self._head_alone(given)
        joined = self.through if self.piped else self.behind
        behind = {"gradients": self.earlier + self.fresh(joined), "activations": self.inside}
        if self.piped:
            added = self.q * self.c * self.behind if self.units else 0.0
            yield (
                1,
                behind
                | {
                    "logits": self.logits(0),
                    "gather_buffers": self.gathered(1, head=True),
                    "temporaries": self.previous + 2 * dX + added,
                },
            )
            return
        reduced = 0.0 if self.tied else self.reduction(self.behind, self.bare.behind)
        yield (
            1,
            behind
            | {
                "gradients": self.earlier + self.fresh(self.behind) + out,
                "gather_buffers": self.gathered(1) + reduced + buffer + self.waiting,
                "bucket_buffers": self.copies,
                "temporaries": self.stream * self.of_decoder + self.retained(self.behind),
            },
        )

    def _rows(self, kind: LayerKind, wanted: Wanted, *parts: str) -> float:
        return _bytes_of(self.job, self.a, kind, wanted, *parts)

    def _kept_behind(self, kind: LayerKind) -> float:
        """What blocks of convolutions behind the last of a kind will keep, and do not yet while forward is in that one."""
        if kind.mixer != "convolution":
            return 0.0
        return sum(self._rows(each, _kept) for each in convolutions.are_through(self.job.model, kind, self.mine))

    def _worst_of_kinds(self, size: Callable[[LayerKind], float]) -> float:
        return max((size(kind) for kind in set(self.mine)), default=0.0)

    def _whole_stream(self) -> float:
        return self.stream + (self.whole if sequence_cut(self.a) > 1 else 0.0)

    def _elements(self, kind: LayerKind, chosen: Callable[[str], bool]) -> float:
        return _chosen(self.job.model, kind, self.a["tp"], self.a["etp"], self.a["ep"], chosen) / self.a["tiling"]

    def _layer_ats(self, kind: LayerKind) -> list[LayerAt]:
        """The instants of one layer of a sort, the same for each layer of it. A decoder's layer has streams of its own tokens, and
        beside it lies the gradient of what the encoder gave."""
        if kind not in self.ats:
            self.ats[kind] = self._ats_of(kind)
        return self.ats[kind]

    def _ats_of(self, kind: LayerKind) -> list[LayerAt]:
        if not kind.cross:
            return self._ats(kind)
        decoder = copy(self)
        decoder.T, decoder.whole, decoder.stream = (
            self.of_decoder * size for size in (self.T, self.whole, self.stream)
        )
        return [dataclasses.replace(at, temporaries=at.temporaries + self.stream) for at in decoder._ats(kind)]

    def _ats(self, kind: LayerKind) -> list[LayerAt]:
        """The same of a layer whose streams are those of this object."""
        if kind.mixer == "convolution":
            return [self._convolutions(kind)]
        if kind.ffn == "moe" and self.job.profile.keeping.name == OURS:
            ats = [self._experts_before(kind), self._experts_behind(kind), self._one_expert(kind)]
            ats += [self._inputs_of_one(kind), self._inputs_of_all(kind), *self._added_again(kind)]
            ats += self._shared_at_work(kind) if self._has_shared() else []
        else:
            ats = [*self._uncast(kind), self._last_matrix(kind), self._feed_forward(kind), self._inputs(kind)]
            ats += self._at_casts(kind) if in_torchao(self.job) else []
        several = sequence_cut(self.a) > 1 and self.a["micro_batch"] > 1
        ours = self.job.model.moe is None and self.job.profile.keeping.name == OURS
        first = [LayerAt(2 * self.whole + self.stream, 0.0, 0.0)] if several and ours else []
        again = self._attention_across if kind.cross else self._attention  # an encoder's layer has as many
        across = [again(kind)] if self.job.model.enc_layers else []
        return [*ats, self._attention(kind), self._attention_inputs(kind), *first, *across]

    def _convolutions(self, kind: LayerKind) -> LayerAt:
        """Backward enters a block: two gradients as large as its result, what is computed again; blocks behind it are through."""
        through = convolutions.are_through(self.job.model, kind, self.mine)
        gradients = 2 * self.T * self.c * convolutions.result(convolutions.of(self.job.model, kind))
        freed = sum(self._rows(each, _kept) for each in through)
        weights = sum(self._elements(each, _is_any) for each in through)
        return LayerAt(gradients + self._rows(kind, _again), freed, weights)

    def _experts_before(self, kind: LayerKind) -> LayerAt:
        shared, waits, through = self._shared_are_through(kind)
        back = _bytes_of(self.job, self.a, kind, _again, named=_is_of_routed)
        stream = self._whole_stream() if self.own_tokens == 1 else self.stream
        used = self._rows(kind, _used)
        return LayerAt(2 * self._came() + stream + back + waits, used + through, shared, is_sooner=True)

    def _has_shared(self) -> bool:
        moe = self.job.model.moe
        return moe is not None and moe.shared_ffn > 0

    def _shared_at_work(self, kind: LayerKind) -> list[LayerAt]:
        """When the last matrix of shared experts has its gradient, and behind their activation."""

        def of(wanted: Wanted, name: str) -> float:
            return _bytes_of(self.job, self.a, kind, wanted, named=_is(name))

        moe, own_part = self.job.model.moe, self.whole / self.own_tokens
        gate = own_part if moe and moe.shared_gate else 0.0
        stream = (self._whole_stream() if self.own_tokens == 1 else self.stream) + gate
        kept, again = of(_kept, "shared_product"), of(_again, "shared_product")
        is_weighed = bool(moe and moe.shared_gate)
        freed = self._rows(kind, _used) + (of(_kept, "shared_result") if is_weighed else 0.0)
        back = self._rows(kind, _again) - of(_again, "shared_result") - again
        joined, casts = self.whole if self.own_tokens > 1 else 0.0, self.plain and self.casts
        down = self._elements(kind, _is("shared_down"))
        last = stream + gate + joined + kept + again + back + (0.0 if casts else again)
        times = 3 if self.job.model.mlp_gated else 2
        inside = stream + times * (kept + again) + back
        return [
            LayerAt(last, freed + (kept if casts else 0.0), down, is_product=True, is_sooner=True),
            LayerAt(inside, freed + kept, down, is_sooner=True),
        ]

    def _shared_are_through(self, kind: LayerKind) -> tuple[float, float, float]:
        """Shared experts go backward first: elements with a gradient, bytes of the gradient of their inputs, kept bytes gone."""
        moe = self.job.model.moe
        shared = self._elements(kind, _is_shared)
        through = _bytes_of(self.job, self.a, kind, _kept_anyway, named=_is_not_of_routed)
        return shared, self.whole / self.own_tokens * bool(moe and moe.shared_ffn), through

    def _experts_behind(self, kind: LayerKind) -> LayerAt:
        """One gradient per expert for each matrix, and the first matrix's put together."""
        moe = self.job.model.moe
        streams = self._came() + self.whole / self.own_tokens * bool(moe and moe.shared_ffn)
        matrices = 3 if self.job.model.mlp_gated else 2
        routed = self._trained_experts(kind)
        freed = self._rows(kind, _kept, "inside", "product") + self._rows(kind, _used, "mixer", "ffn")
        back = self._rows(kind, _again, "mixer", "exchanged", "ffn")
        shared = self._elements(kind, _is_shared)
        return LayerAt(streams + self.stream + self.c * routed + back, freed, shared, routed / matrices)

    def _trained_experts(self, kind: LayerKind) -> float:
        """Elements of routed experts that get gradients: none beside adapters."""
        return self._elements(kind, _is_expert) if self.job.model.adapters is None else 0.0

    def _one_expert(self, kind: LayerKind) -> LayerAt:
        """The first expert to go backward, behind its activation."""
        moe, shape, a = self.job.model.moe, self.job.model, self.a
        copies, experts = (moe.top_k, -(-moe.experts // a["ep"])) if moe else (0, 1)
        width = moe.ffn / a["etp"] / experts if moe else 0.0
        one, every = self.T * width * self.c * copies / self.own_tokens * busiest(self.job, a), self._came()
        matrices = 3 if shape.mlp_gated else 2
        own = self.c * self._trained_experts(kind) / matrices / experts
        kept = a["recompute"] == "none"
        temporaries = matrices * one + own + self.stream + (every if experts > 1 else 0.0)
        back = _bytes_of(self.job, self.a, kind, _again, named=_is_of_routed)
        gone = self._sent() + (one if shape.adapters is None else 0.0)  # a frozen matrix has no use for its input
        temporaries += back - (0.0 if kept else gone)
        shared, waits, through = self._shared_are_through(kind)
        freed = self._rows(kind, _used) + (gone if kept else 0.0)
        return LayerAt(temporaries + waits, freed + through, shared)

    def _inputs_of_one(self, kind: LayerKind) -> LayerAt:
        """The first expert, or the last but one, with the gradients of its matrices, and of its inputs for each of the first ones."""
        moe, shape, a = self.job.model.moe, self.job.model, self.a
        count = -(-moe.experts // a["ep"]) if moe else 1
        given, shared_ones = self._came(), self._shared_are_through(kind)
        one = given / count
        product = one * (moe.ffn / (moe.latent or shape.hidden) / a["etp"] if moe else 0.0)
        works = 2 * one + product if shape.mlp_gated else one + product
        own = self.c * self._trained_experts(kind) / count
        kept, used, again = (
            _bytes_of(self.job, a, kind, wanted, named=_made_by_experts) / count for wanted in (_kept, _used, _again)
        )
        kept -= used
        before = count - 2 if count > 2 and own + one > kept + again else 0
        back = _bytes_of(self.job, a, kind, _again, named=_is_of_routed) - (before + 1) * again
        keeps = a["recompute"] == "none"
        waits = (given if count > 1 else 0.0) + self.stream + shared_ones[1]
        gone = self._sent()  # what the experts gave, as it came back
        temporaries = works + waits + (before + 1) * own + before * one + back - (0.0 if keeps else gone)
        freed = self._rows(kind, _used) + shared_ones[2] + (before + 1) * kept + (gone if keeps else 0.0)
        return LayerAt(temporaries, freed, shared_ones[0])

    def _added_again(self, kind: LayerKind) -> list[LayerAt]:
        """Computed again, what experts gave is there as it came, by token, weighed, and added up."""
        if self.a["recompute"] == "none":
            return []
        gone, back = (
            _bytes_of(self.job, self.a, kind, wanted, named=_made_before_experts) for wanted in (_used, _again)
        )
        more = self._given_before_experts() + self._part_of_norm() + self.whole / self.own_tokens
        return [LayerAt(back + 3 * self._sent() + more, gone, 0.0, is_sooner=True)]

    def _inputs_of_all(self, kind: LayerKind) -> LayerAt:
        """The gradients of all experts' inputs, one by one and together."""
        ends = self._experts_behind(kind)
        return LayerAt(ends.temporaries + self._came(), ends.freed, ends.weights)

    def _product(self, kind: LayerKind) -> float:
        """The size of what goes into the last matrix, whether anything keeps it or not."""
        if self.job.model.adapters is not None:
            return self.T * self.job.model.ffn_hidden * self.c
        return self._rows(kind, _kept, "product") + self._rows(kind, _again, "product")

    def _feed_forward(self, kind: LayerKind) -> LayerAt:
        shape = self.job.model
        kept, again = self._rows(kind, _kept, "product"), self._rows(kind, _again, "product")
        back, used = self._rows(kind, _again) - again, self._rows(kind, _used)
        is_relu = shape.mlp_act == "relu" and not shape.mlp_gated
        times = 3 if shape.mlp_gated else 2
        temporaries = times * self._product(kind) + self.stream + back + (again if is_relu else 0.0)
        return LayerAt(temporaries, used + (0.0 if is_relu else kept), self._elements(kind, _is_down))

    def _last_matrix(self, kind: LayerKind) -> LayerAt:
        kept, again = self._rows(kind, _kept, "product"), self._rows(kind, _again, "product")
        back, casts = self._rows(kind, _again) - again, self.plain and self.casts
        products = 2 if self.job.model.adapters and "down" in self.job.model.adapters.targets else 1
        temporaries = products * self._product(kind) + self._whole_stream() + back + (0.0 if casts else again)
        freed = self._rows(kind, _used) + (kept if casts else 0.0)
        return LayerAt(temporaries, freed, self._elements(kind, _is_down), is_product=True)

    def _at_casts(self, kind: LayerKind) -> list[LayerAt]:
        """Each matrix of the feed-forward part while it casts, the last one first, then a gate if there is one."""
        down, gate, up = (self._elements(kind, _is(name)) for name in ("down", "gate", "up"))
        product, stream, gates = self._product(kind), self.stream, self.job.model.mlp_gated
        result = _bytes_of(self.job, self.a, kind, _kept, "rest")
        all_again, used = self._rows(kind, _again), self._rows(kind, _used)
        ats = [LayerAt(stream + all_again + self._cast_backward(down, stream, product), used + result, 0.0)]
        again = self._rows(kind, _again, "mixer", "exchanged", "ffn")
        freed = self._rows(kind, _kept, "inside", "product") + self._rows(kind, _used, "mixer") + result
        one = stream + again + self._cast_backward(gate, product, stream) + 2 * product
        other = stream + again + self._cast_backward(up, product, stream) + product + (stream if gates else 0.0)
        return [*ats, *([LayerAt(one, freed, down)] if gates else []), LayerAt(other, freed, down + gate)]

    def _cast_backward(self, weight: float, given: float, read: float) -> float:
        """What a matrix makes in backward, one after the other: a byte of each operand, made by nine, and the input's gradient."""
        g, x = given / self.c, read / self.c
        alive, most = 0.0, 0.0
        for made in (g, weight, None, g, x):
            most = max(most, alive + (read if made is None else 9 * made))
            alive += read if made is None else made
        return most

    def _cast_forward(self) -> dict[str, float]:
        """The last matrix of the last layer casts its input, then itself, beside what lies in the frames at work."""

        def held(kind: LayerKind) -> float:
            back, again = self._rows(kind, _again, "ffn"), self._rows(kind, _again, "product")
            x, weight = self._product(kind) / self.c, self._elements(kind, _is_down)
            frames = back + again * (2 if self.a["recompute"] == "full" else 1)
            is_relu = self.job.model.mlp_act == "relu" and not self.job.model.mlp_gated
            into = self._rows(kind, _kept, "product") if is_relu else 0.0
            return frames + into + max(9 * x, x + 9 * weight)

        rest = self._worst_of_kinds(lambda kind: self._rows(kind, _kept, "rest"))
        shards = self.units and self.zero >= 2
        return {
            "gradients": self.earlier,
            "activations": self.inside - rest,
            "gather_buffers": self.gathered(1) + (self.c * self.wl if shards else 0.0),
            "temporaries": self._worst_of_kinds(held),
        }

    def _uncast(self, kind: LayerKind) -> list[LayerAt]:
        """Under autocast the last matrix' gradient as it is made: what it was made of is there, and the copy of the matrix."""
        if not (self.plain and self.casts) or self.job.model.adapters is not None:
            return []
        gradient = self.q * self.c * self._elements(kind, _is_down)
        held = self._product(kind) + self._whole_stream() + self._rows(kind, _again) + gradient
        return [LayerAt(held, self._rows(kind, _used), 0.0)]

    def _inputs(self, kind: LayerKind) -> LayerAt:
        product = self._product(kind)
        streams = (2 if self.job.model.mlp_gated else 1) * self.whole + self.stream
        freed = self._rows(kind, _kept, "inside", "product") + self._rows(kind, _used, "mixer")
        back = self._rows(kind, _again, "mixer", "exchanged", "ffn")
        return LayerAt(product + streams + back, freed, self._elements(kind, _is_feed_forward))

    def _attention(self, kind: LayerKind) -> LayerAt:
        gradients = self.in_attention()
        back = self._rows(kind, _again, "mixer")
        freed = self._rows(kind, _kept, "exchanged", "ffn", "inside", "product") + self._rows(kind, _used, "mixer")
        if kind.cross:  # the attention to the encoder is through

            def of_cross(wanted: Wanted) -> float:
                return _bytes_of(self.job, self.a, kind, wanted, named=_is_cross)

            freed, back = freed + of_cross(_kept_anyway), back - of_cross(_again)
        gradients += self.stream if self.job.profile.keeping.name == OURS else self._whole_stream()
        temporaries, weights = gradients + back, self._elements(kind, _is_behind)
        return LayerAt(temporaries, freed, weights, is_early=False, routed=self._through(kind))

    def _attention_across(self, kind: LayerKind) -> LayerAt:
        """Inside the attention of a decoder to its encoder, whose keys are of all inputs: its own matrices but the last have no gradient yet."""
        back = self._rows(kind, _again, "mixer")
        freed = self._rows(kind, _kept, "exchanged", "ffn", "inside", "product") + self._rows(kind, _used, "mixer")
        gradients = self.in_attention(self.T / self.of_decoder)
        gradients += self.stream if self.job.profile.keeping.name == OURS else self._whole_stream()
        late = ("cross_q", "cross_k", "cross_v", "o")
        weights = self._elements(kind, lambda name: _is_behind(name) and name not in late)
        return LayerAt(gradients + back, freed, weights, is_early=False)

    def _through(self, kind: LayerKind) -> float:
        """Elements of experts whose unit is through when attention's backward begins."""
        return self._elements(kind, _is_expert) if self.apart else 0.0

    def in_attention(self, met: float | None = None) -> float:
        """Gradients of queries, keys, values and scores, and what the backward of attention takes inside; `met` are the tokens that have
        keys, where they are not those that ask."""
        shape, tp = self.job.model, self.a["tp"]
        heads, keys = shape.heads / tp, shape.kv_heads / tp
        met = self.T if met is None else met
        gradients = shape.head_dim * self.c * (self.T * 2 * heads + met * 2 * keys)
        if self.job.profile.attention == "unfused":
            wide = self.job.profile.keeping.wide_softmax and (shape.mlp_gated or self.c < self.s)
            length = met / self.a["micro_batch"] * self.a["cp"]
            return gradients + 2 * (4 if wide else self.c) * self.T * heads * length
        return gradients + self._flash(heads, keys)

    def _flash(self, heads: float, keys: float) -> float:
        """What flash attention's backward takes inside, on a rank with so many heads; in a ring of our own that of a block of all
        queries and half of another rank's keys, with what lies around it then."""
        shape, a, d = self.job.model, self.a, self.job.model.head_dim
        step = 32 if d <= 128 else 64
        padded = -(-max(d, 1) // step) * step
        length, here, around = round(self.T / a["micro_batch"] * a["cp"]), heads, a["cp"]
        if a["context_parallel"] == "all-to-all":
            here, around = heads / a["cp"], 1
        elif a["context_parallel"] == "hierarchical":
            here, around = heads / a["cp_inner"], a["cp"] // a["cp_inner"]
        length = ceil(length / around)
        inside = 4 * here * a["micro_batch"] * ceil(length / 128) * 128 * (1 + padded)
        per_query_head = 2 * self.T * heads * d * self.c if shape.heads != shape.kv_heads else 0.0
        if a["context_parallel"] not in ("ring", "hierarchical") or self.job.profile.keeping.name != OURS:
            return inside + per_query_head
        message = 2 * self.T * keys * d * self.c
        under_way = message if around > 2 else 0.0
        arrived, sums, own = message, message, self.T * d * self.c * (heads + keys)
        return inside + per_query_head / 2 + under_way + arrived + sums + own + 4 * heads * self.T / 2

    def _attention_inputs(self, kind: LayerKind) -> LayerAt:
        shape = self.job.model
        queries = self.T * self.c * shape.heads * shape.head_dim / self.a["tp"]
        kept = self.a["recompute"] == "none"  # the input of attention's matrices
        temporaries = 2 * self.whole + queries + self.stream + (0.0 if kept else self.whole)
        gone = self._rows(kind, _kept, "mixer", "exchanged", "ffn", "inside", "product")
        freed = gone - (self.whole if kept else 0.0)
        every = self._elements(kind, _is_any)
        return LayerAt(temporaries, freed, every, is_early=False, routed=self._through(kind))

    def _joining(self, at: LayerAt) -> float:
        """Gradients about to join what stands."""
        if not self.at_once:
            return 0.0
        casts = self.casts and not self.units
        work = (self.c if self.stands or casts else 0.0) + (self.s if self.stands and casts else 0.0)
        whole = (self.c if self.units else self.s) if self.stands else 0.0
        return self.q * ((work if at.is_product else 0.0) * at.weights + whole * at.stacked)

    def _layer(self, number: int) -> Iterator[dict[str, float]]:
        """Every instant of a layer of every sort that the stage has."""
        for kind in dict.fromkeys(self.mine):
            if self._lies_elsewhere(number, kind):
                continue
            kept = self._rows(kind, _kept)
            every = (
                self._elements(kind, _is_any) if self.is_mixed or self.turn else self.w.layers / max(len(self.kinds), 1)
            )
            yield from (self._in_layer(number, at, kept, every) for at in self._layer_ats(kind))
        if not self.kinds:
            yield self._in_layer(number, LayerAt(0.0, 0.0, 0.0), 0.0, 0.0)

    def _lies_elsewhere(self, number: int, kind: LayerKind) -> bool:
        """Layers with experts apart come last in forward, and first in backward."""
        if self.turn:  # and a decoder's before its encoder's
            return kind.cross == (self._behind(number)[0] > self.turn - 0.5)
        have = [own.ffn == "moe" for own in self.kinds]
        if not self.apart or self.is_partly or all(have) or not any(have):
            return False
        is_behind = self._behind(number)[0] > sum(have) / self.v - 0.5
        return (kind.ffn == "moe") == is_behind

    def _slices(self, number: int) -> Iterator[dict[str, float]]:
        """Every instant of a layer whose matrices are tiled."""
        count = max(len(self.kinds), 1)
        before = max(count + number, 0) if number < 0 else min(number, count - 1)
        for kind in dict.fromkeys(self.kinds):
            let_go = before / max(count - 1, 1) * (self.every - self._rows(kind, _kept))
            for first, temporaries, freed, own, bare, below, above, done in layer_in_slices(self, kind):
                sent = (self.D if before else self.through) if first else above
                gradient = self.q * (self.c * bare + self.r * sent)
                done = self.through + before * self.w.layers / count + done
                yield {
                    "gradients": self.earlier + self.fresh(done + (own if self.at_once else 0.0)) + self.growing_head,
                    "activations": max(self.inputs, self.inside - freed - let_go),
                    "gather_buffers": self.gathered(1)
                    + (self.c * (own + below) + gradient if self.units else 0.0)
                    + self.waiting,
                    "temporaries": temporaries
                    + self.old_head
                    + (self.s * own if self.at_once and self.stands else 0.0),
                }

    def _in_layer(self, number: int, at: LayerAt, kept: float, every: float) -> dict[str, float]:
        """One instant of a layer that keeps so much and has `every` so many elements."""
        count, (before, _, is_first) = max(len(self.kinds) / self.v, 1.0), self._behind(number)
        share = before / max(count - 1, 1)
        passed = share * max(0.0, self.own - self.wl)
        let_go = self._let_go(number, kept)
        behind = self.through
        done, weights = behind + passed, at.weights + at.stacked - at.routed
        routed = share * max(0.0, self.w.experts - self.X) + at.routed if self.apart else 0.0
        mixed = self.apart and not self.is_partly and self.is_mixed
        those = sum(own.ffn == "moe" for own in self.kinds) / self.v

        def unit(place: float) -> float:
            if self.turn:
                return self._of_half(place, self._unit)
            return (self.beside if place <= those - 0.5 else self.bald) if mixed else self.D

        if self.turn:
            let_go = self._through_halves(before, lambda own: self._rows(own, _kept))
            let_go += self._encoded() if before > self.turn - 0.5 else 0.0
            passed = self._through_halves(before, self._unit)
            done = behind + passed
        if mixed:
            first, rest = min(before, those), max(before - those, 0.0)
            of_experts = self._kept_with_experts() if those else 0.0
            others = max(0.0, self.every / self.v - those * of_experts) / max(1.0, len(self.kinds) / self.v - those)
            let_go = first * of_experts + rest * others
            passed = first * (self.beside + self.X) + rest * self.bald
            done, routed = behind + passed, first * self.X + at.routed
        partial = 0.0 if self.at_once else self.q * self.c * weights
        in_flight = self.q * self.r * (self.X if at.routed else unit(before - 1) if before else behind)
        freed_copies = self.q * self.c * at.weights
        through, keep = before, len(self.mine)
        if self.is_partly and self.a["recompute"] != "none":
            through, keep = before - number, len(self.kinds) - len(self.mine)
        elif self.is_partly:
            through = number
        copies = self.copies * (1 - through / max(keep / self.v, 1))
        if self.turn:
            copies = self.copies - self.c * passed if self.copies else 0.0
        if self.plain and self.casts and not self.copies_again:
            copies -= freed_copies
        given = self.given if before == 0 and at.is_early else 0.0
        alone = before >= count - 1 if self.piped else is_first
        layers = 1 if alone or (self.apart and at.is_sooner) else 2
        is_late = self.apart and self.zero == 3 and self.sharers == 1 and self.a["recompute"] == "none"
        experts = 0 if at.routed or (mixed and before > those - 0.5) or (is_late and at.is_sooner) else 1
        by_unit = mixed or (self.turn and not self.job.profile.reuse_distance)
        gathered = self.gathered(0 if by_unit else layers, passed=passed + at.routed, experts=experts)
        if by_unit and self.zero == 3 and self.units:
            gathered += self.c * (unit(before) + (unit(before + 1) if layers > 1 else 0.0))
        at_end = self.early if self.piped and before >= count - 1 else 0.0
        left = self._left_outside(done + (0.0 if at.is_product else at.weights))
        again = max(0.0, self.copies_again * every - freed_copies) if self.copies_again else 0.0
        return {
            "gradients": self.earlier
            + self.fresh(done + (weights if self.at_once else 0.0) + at.routed, routed)
            + self.growing_head,
            "activations": max(self.inputs, self.inside - at.freed - let_go),
            "logits": self.logits(0),
            "gather_buffers": gathered + at_end + (partial + in_flight if self.reduces else 0.0) + self.waiting,
            "bucket_buffers": max(0.0, copies),
            "temporaries": at.temporaries
            - given
            + self.previous
            + self.late
            + self.old_head
            + self.retained(done)
            + (self._second_table() if self.turn and before > self.turn - 0.5 else 0.0)
            + (left if self.outside else 0.0)
            + again
            + (0.0 if self.reduces else partial)
            + self._joining(at)
            + adapters.unpacked(self.job),
        }

    def _layer_reduced(self) -> Iterator[dict[str, float]]:
        """The gradients and their copy; or the copy, what comes out, and the gradient that was copied last."""
        kept = self._worst_of_kinds(lambda kind: self._rows(kind, _kept))
        behind = self.through
        adds = 0.0
        if self.piped and not self.at_once:
            last = self._worst_of_kinds(lambda kind: self._elements(kind, _is_down))
            adds = self.q * self.c * (self.D if self.stands else last)
        bare = self.D if self.apart else self.bare.widest / self.a["tiling"]
        if not self.piped and self.apart and self.is_mixed and not self.is_partly:
            yield from self._reduced_in_turn()
            return
        if self.turn:
            yield from self._reduced_of_halves()
            return
        # Widest parts may be of different layers; a pipeline counts a whole layer, which is one of them.
        begins, ends = (
            self.earlier + self.fresh(behind + (self.wl if self.piped else self.X + done), self.X)
            for done in (0.0, self.D)
        )
        out, buffer = self.output(self.D)
        loses = self.q * self.c * (bare - self._worst_of_kinds(self._final)) if self.zero >= 2 and self.reduces else 0.0
        copying = loses > out + buffer + ends - begins
        next_one = 1 if self.piped or len(self.kinds) > 1 else 0
        reduced = self.reduction(self.D, bare) + (0.0 if copying else buffer - loses)
        yield {
            "gradients": begins if copying else ends + out,
            "activations": max(self.inputs, self.inside - kept),
            "logits": self.logits(0),
            "gather_buffers": self.gathered(next_one, passed=self.wl) + reduced + self.waiting,
            "temporaries": self.stream + self.previous + self.retained(behind + self.wl) + adds + self.late,
        }

    def _left_outside(self, gone: float) -> float:
        """Gradients outside DDP's buckets when those of so many elements have gone into theirs, in the last of two micro-batches."""
        return self.outside if self.a["accumulation"] > 2 else max(0.0, self.outside - self.q * self.s * gone)

    def _second_table(self) -> float:
        """The decoder's gradient of a table that both halves look up, which waits for the encoder's; a tied head's waits anyway."""
        return 0.0 if self.tied else self.q_ends * (self.c if self.units else self.s) * self.table

    def _between_halves(self) -> dict[str, float]:
        """A decoder is through: its table gets a gradient, which is added to a tied head's."""
        passed = self._through_halves(self.turn, self._unit)
        done, is_one = self.through + passed, bool(self.job.profile.reuse_distance)
        gathered = self.gathered(1 if is_one else 0, passed=passed)
        if self.zero == 3 and self.units and not is_one:
            gathered += self.c * self._of_half(self.turn, self._unit)
        table = self.q_ends * (self.c if self.units else self.s) * self.table
        third = self.c * self.head if self.reduces and self.tied and not self.in_chunks else 0.0
        embedded = self.whole * self.of_decoder * (1.0 if self.units else self.s / self.c)
        shape = self.job.model
        places = self.h * shape.pos_rows if shape.pos == "learned" and shape.kind == "encdec" else 0
        if self.reduces:
            gathered += table + self.q_ends * self.c * places
            gathered += self.q * self.r * self._of_half(self.turn - 1, self._unit)
        beside = max(embedded - third, 0.0 if self.casts else self.old_head + self.growing_head)
        return {
            "gradients": self.earlier + self.fresh(done + (0.0 if self.units else places)) + self.growing_head,
            "activations": self.inside
            - self._through_halves(self.turn, lambda own: self._rows(own, _kept))
            - self._memory(),
            "gather_buffers": gathered + self.waiting + third,
            "bucket_buffers": max(0.0, self.copies - self.c * passed) if self.copies else 0.0,
            "temporaries": (0.0 if self.reduces else table)
            + self.stream
            + beside
            + self.old_head
            + self.retained(done)
            + (self._left_outside(done) if self.outside else 0.0),
        }

    def _reduced_of_halves(self) -> Iterator[dict[str, float]]:
        """The last layer of a decoder when it is reduced, and that of its encoder."""
        last = self._worst_of_kinds(self._final)
        for count in (0, self.turn):
            unit, before = self._of_half(count, self._unit), self._through_halves(count, self._unit)
            begins, ends = (self.earlier + self.fresh(self.through + before + done) for done in (0.0, unit))
            out, buffer = self.output(unit)
            loses = self.q * self.c * (unit - last) if self.zero >= 2 and self.reduces else 0.0
            copying = loses > out + buffer + ends - begins
            reduced = self.reduction(unit, unit) + (0.0 if copying else buffer - loses)
            follows, is_one = count < len(self.kinds) - 1, bool(self.job.profile.reuse_distance)
            gathered = self.gathered(1 if is_one and follows else 0, passed=before + unit)
            if follows and not is_one and self.zero == 3 and self.units:
                gathered += self.c * self._of_half(count + 1, self._unit)
            kept = self._through_halves(count + 1, lambda own: self._rows(own, _kept))
            kept += self._encoded() if count else 0.0
            yield {
                "gradients": begins if copying else ends + out,
                "activations": max(self.inputs, self.inside - kept),
                "logits": self.logits(0),
                "gather_buffers": gathered + reduced + self.waiting,
                "temporaries": self.stream
                + (0.0 if count else self.stream * self.of_decoder)
                + self.retained(self.through + before + unit),
            }

    def _first_unpacked(self) -> dict[str, float]:
        """Of one or two layers the first, when it leaves the buffer that it was gathered into: nothing of it has worked yet, and the copy
        of what lies above it is still being reduced."""
        above, kept, done = self.through, 0.0, self.through
        if len(self.kinds) == 2:
            above, kept = self.wl, self._worst_of_kinds(lambda kind: self._rows(kind, _kept))
            done += above
        return {
            "gradients": self.earlier + self.fresh(done),
            "activations": self.inside - kept,
            "logits": 0.0,
            "gather_buffers": self.gathered(1) + self.c * self.wire * self.wl + self.q * self.r * above + self.waiting,
            "temporaries": self.stream + self.retained(done),
        }

    def _reduced_in_turn(self) -> Iterator[dict[str, float]]:
        """Layers with experts come last in forward: the first of them that is reduced, and the first layer without; before that
        the latter is entered, gathered twice."""
        those = sum(own.ffn == "moe" for own in self.kinds)
        dense = len(self.kinds) - those
        of_experts = self._kept_with_experts() if those else 0.0
        if self.zero == 3 and self.w.experts:
            done = self.through + those * (self.beside + self.X)
            units = 2 * self.c * self.bald + self.q * self.r * self.beside
            yield {
                "gradients": self.earlier + self.fresh(done, those * self.X),
                "activations": max(self.inputs, self.inside - those * of_experts),
                "logits": self.logits(0),
                "gather_buffers": self.gathered(0) + units + self.waiting,
                "temporaries": self.stream,
            }
        of_others = (self.every - those * of_experts) / max(1, dense)
        last = self._worst_of_kinds(self._final)
        for count in (0, those):
            has = count < those
            unit, X = (self.beside, self.X) if has else (self.bald, 0.0)
            left = max(0, those - 1) if has else 0, dense if has else max(0, dense - 1)
            following = self.beside if left[0] else self.bald if left[1] else 0.0
            passed, routed = count * (self.beside + self.X) + X, count * self.X + X
            begins, ends = (self.earlier + self.fresh(self.through + passed + done, routed) for done in (0.0, unit))
            out, buffer = self.output(unit)
            loses = self.q * self.c * (unit - last) if self.zero >= 2 and self.reduces else 0.0
            copying = loses > out + buffer + ends - begins
            reduced = self.reduction(unit, unit) + (0.0 if copying else buffer - loses)
            kept = of_experts * (count + has) + of_others * (not has)
            gathered = self.gathered(0, passed=passed + unit) + (self.c * following if self.zero == 3 else 0.0)
            yield {
                "gradients": begins if copying else ends + out,
                "activations": max(self.inputs, self.inside - kept),
                "logits": self.logits(0),
                "gather_buffers": gathered + reduced + self.waiting,
                "temporaries": self.stream + self.retained(self.through + passed + unit),
            }

    def _mixture(self) -> LayerKind:
        """The sort of layer with experts."""
        return max(set(self.mine), key=lambda kind: self._elements(kind, _is_expert))

    def _kept_with_experts(self) -> float:
        """What a layer with experts keeps, on average of those that are looked at."""
        return fmean([self._rows(kind, _kept) for kind in self.mine if kind.ffn == "moe"])

    def _sent(self) -> float:
        """Bytes of the tokens' copies that a rank sends to experts."""
        shape, moe = self.job.model, self.job.model.moe
        width = (moe.latent or shape.hidden) * moe.top_k if moe else 0
        return self.T * width * self.c / self.own_tokens

    def _came(self) -> float:
        """Bytes of the copies that come to the experts of the rank which gets most."""
        return self._sent() * busiest(self.job, self.a)

    def _given_before_experts(self) -> float:
        """The gradient of the layer's result as what works there first needs it."""
        moe = self.job.model.moe
        before_gate = moe is not None and moe.shared_ffn > 0 and not moe.shared_gate
        return self._whole_stream() if self.own_tokens == 1 or before_gate else self.stream

    def _part_of_norm(self) -> float:
        """Where experts are cut, a rank's own part of the norm's result is there beside the whole that they get."""
        return self.stream if self.own_tokens == 1 and sequence_cut(self.a) > 1 else 0.0

    def _experts_forward(self) -> Iterator[tuple[int, dict[str, float]]]:
        """The last layer's forward: its experts have worked, the buffer they were gathered into still lies there; then their
        results went back, and ZeRO-3 has given their weights back. What full recompute lets go of is there in the experts' order, too."""
        if self.piped and not self.at.alternates:
            return
        flat = self.c * self.flat_X
        if self.piped:
            flat = flat + self.early if self.zero == 3 else 0.0
        kind = self._mixture()
        later = _bytes_of(self.job, self.a, kind, _kept, named=_made_behind_experts)
        later += _bytes_of(self.job, self.a, kind, _kept, "rest", named=_is_of_routed)
        passing = self._rows(kind, _again, "ffn") + self._part_of_norm()
        again = 1 if self.a["recompute"] == "full" else 0
        if self.zero == 3:
            made = _bytes_of(self.job, self.a, kind, _kept, named=_made_by_experts)
            yield (
                0,
                {
                    "gradients": self.earlier,
                    "activations": self.inside - later - made - self.given,
                    "logits": self.logits(0),
                    "gather_buffers": self._beside(self.beside, 0.0, 1) + flat,
                    "temporaries": self.previous + passing + self._sent() + (1 + again) * self._came(),
                },
            )
        for gathered, went, came in ((1, 1, 3 + again), (0, 2, 3)):
            yield (
                0,
                {
                    "gradients": self.earlier,
                    "activations": self.inside - later - self.given,
                    "logits": self.logits(0),
                    "gather_buffers": self._beside(0.0, 0.0, gathered) + flat,
                    "temporaries": self.previous + passing + went * self._sent() + came * self._came(),
                },
            )

        if self._has_shared() and self.own_tokens > 1 and self.a["recompute"] == "none":
            yield (
                0,
                {
                    "gradients": self.earlier,
                    "activations": self.inside - self.given,
                    "logits": self.logits(0),
                    "gather_buffers": self._beside(0.0, 0.0, 0) + flat,
                    "temporaries": self.previous + 2 * (self.whole + self.stream),
                },
            )

    def _beside(self, following: float, passed: float, experts: float) -> float:
        """Gathered weights while a layer with experts works: its unit, the next layer's, its experts."""
        units = self.c * (self.beside + following) if self.zero == 3 else 0.0
        return self.gathered(0, passed=passed, experts=experts) + units

    def _experts_backward(self, number: int) -> Iterator[dict[str, float]]:
        """Experts of a layer compute again, and their unit is reduced or, in a pipeline, added to what stands."""
        count, those = max(len(self.kinds) / self.v, 1.0), sum(kind.ffn == "moe" for kind in self.mine) / self.v
        own = max(max(those, 1.0) + number, 0.0) if number < 0 else min(number, max(those, 1.0) - 1)
        before = float(self.places[int(own)]) if self.is_partly else own
        passed, behind = before * (self.beside + self.X), self.through
        kept = self._rows(self._mixture(), _kept)
        left = self.inside - own / max(those - 1, 1) * (max(those, 1.0) * self._kept_with_experts() - kept)
        left -= self._others_let_go(int(own))
        above = self.q * self.r * (self.beside if before else behind) if self.reduces else 0.0
        at_end = self.early if self.piped and before >= count - 1 else 0.0
        done, routed = behind + passed, before * self.X
        if self.a["recompute"] != "none":
            kind, early = self._mixture(), _made_before_experts
            gone = _bytes_of(self.job, self.a, kind, _used, named=early)
            back = _bytes_of(self.job, self.a, kind, _again, named=early)
            gradient = self._given_before_experts()
            for buffers, went in ((1, 1), (0, 2)):
                held = self._came() * (buffers and self.a["recompute"] == "selective")  # results, one by one
                more = back - held + went * self._sent() + 3 * self._came() + gradient + self._part_of_norm()
                again = buffers * self.c * self.flat_X if self.zero == 3 else 0.0
                yield {
                    "gradients": self.earlier + self.fresh(done, routed),
                    "activations": left - gone + held,
                    "logits": self.logits(0),
                    "gather_buffers": self._beside(0.0, passed, 1) + again + above + self.waiting + at_end,
                    "temporaries": more + self.previous + self.late,
                }
        kind = self._mixture()
        bare, at = self._through(kind), self._experts_behind(kind)
        if self.a["recompute"] == "none" and self.zero == 3 and self.flat_X and not self.piped:
            gone = _bytes_of(self.job, self.a, kind, _kept, named=_made_behind_experts)
            shared = self.q * self.c * at.weights
            given = self._came() + self.stream + self._shared_are_through(kind)[1]
            yield {
                "gradients": self.earlier + self.fresh(done, routed),
                "activations": left - gone,
                "gather_buffers": self._beside(0.0, passed, 1) + self.c * self.flat_X + shared + above + self.waiting,
                "temporaries": given,
            }
        alone = before >= count - 1
        following = 0.0 if alone else self.D if own >= those - 1 else self.beside
        gathered = self._beside(following, passed + self.X, 0) + at_end + self.waiting
        gathered += self.q * self.c * at.weights
        inside = {
            "activations": max(self.inputs, left - at.freed),
            "logits": self.logits(0),
            "temporaries": at.temporaries - self.c * bare + self.previous + self.late,
        }
        last = self.q * self.c * at.stacked
        ends = self.earlier + self.fresh(done + self.X, routed + self.X)
        if self.piped:
            yield inside | {"gradients": ends, "gather_buffers": gathered + (0.0 if self.at_once else last)}
            return
        sent, (out, buffer) = self.q * self.r * self.X, self.output(self.X, self.sharers)
        alone = self.zero < 2 or self.sharers == 1
        last = 0.0 if alone else last
        begins = self.earlier + self.fresh(done, routed)
        yield inside | {"gradients": begins, "gather_buffers": gathered + sent + self.q * self.c * bare}
        yield inside | {"gradients": ends + out, "gather_buffers": gathered + sent + last + buffer}
        more = self._came()
        back = {"gradients": ends, "gather_buffers": gathered + sent, "temporaries": inside["temporaries"] + more}
        yield inside | back

    def _final(self, kind: LayerKind) -> float:
        """Elements of the weight that a layer lists last; a bias is nothing."""
        last = build_layer(self.job.model, kind).matrices[-1]
        return 0.0 if last.bias else self._elements(kind, _is(last.name))

    def _end(self) -> Iterator[tuple[int, dict[str, float]]]:
        bare = self.bare.before if self.first else 0.0
        dW = self.q_ends * (self.c * bare if self.units else self.s * self.table)
        if served.is_served(self.a):
            dW = served.rows_bytes(self.job, self.a)
        back = self.first and self.job.model.adapters is None
        stream = (1.0 if self.units else self.s / self.c) * self.whole if back else 0.0
        direct = not self.units and not self.stands
        keeps = self.c * self.outer if self.units and (self.zero < 3 or self.tied) else 0.0
        sum_in_unit = self.c * self.head if self.reduces and self.tied and not self.in_chunks else 0.0
        flight = self.q * self.r * self.D
        routed = self.w.experts if self.apart else 0.0
        sums = self.growing_head + self.old_head + max(stream - sum_in_unit, 0.0 if self.casts else self.old_head)
        sums += self._second_table() if self.turn else 0.0
        yield (
            2,
            {
                "gradients": self.earlier
                + (self.fresh(self.w.all) if direct else self.fresh(self.w.all - self.outer, routed)),
                "activations": self.others + self.numbers,
                "gather_buffers": keeps + (flight + dW + self.waiting + sum_in_unit if self.reduces else 0.0),
                "temporaries": (0.0 if direct or self.reduces else dW) + self.retained(self.w.all - self.outer) + sums,
            },
        )
        out, buffer = self.output(self.outer)
        reduced = self.reduction(self.outer, self.outer) + buffer
        rests, waits = self.at_rest + out, self.retained(self.w.all)
        yield 2, {"gradients": rests, "activations": self.inputs, "gather_buffers": reduced, "temporaries": waits}
        yield (
            2,
            {
                "gradients": self.earlier,
                "activations": self.inputs + self.numbers,
                "temporaries": self.outside + sums + (dW if self.a["accumulation"] > 2 or self.numbers else 0.0),
            },
        )

    def summed(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Gradients of the first device's replica beside the sum over all, the last of whose pieces is still flat."""
        if self.threads > 1:
            own = self.q * self.s * self.bare.all
            stands, joins = (self.earlier, self.settled) if self.several else (self.settled, 0.0)
            passing = own + min(10 * 2**20, own) + joins
            yield 2, {"gradients": stands, "activations": self.inputs, "temporaries": passing}

    def hooked(self) -> Iterator[tuple[int, dict[str, float]]]:
        """A bucket on its way: the first, when the head is through; the largest between; the last, when nothing else is left."""
        if compression.word_of(self.a) == "none":
            return
        sizes = compression.buckets(self.job)
        first, last = (compression.passing(self.job, self.a, size) for size in (sizes[0], sizes[-1]))
        between = compression.passing(self.job, self.a, max(sizes[1:-1], default=0))
        largest = self._worst_of_kinds(lambda kind: self._rows(kind, _kept))
        rows = (
            (1, self.inside, self.copies + first, self.stream + self.outside),
            (1, max(self.inputs, self.inside - largest), self.copies + between, self.stream + self.outside),
            (2, self.inputs, last, 0.0),
        )
        for moment, activations, held_, loose in rows:
            terms = {"gradients": self.earlier, "activations": activations, "bucket_buffers": held_}
            yield moment, terms | {"temporaries": loose}

    def _end_of_pass(self) -> Iterator[tuple[int, dict[str, float]]]:
        """The embedding's gradient while other passes are in flight, then in the reduce format."""
        dW = self.q * (self.c if self.units else self.s) * (self.table if self.at_once else self.before)
        direct = not self.stands and (not self.units or self.c == self.r)
        waits = self.units and self.zero == 3 and self.at.flight[0] > 1 and self.first and not self.job.model.tied
        common = {
            "activations": self.others + (self.stream if self.first else 0.0),
            "logits": self.logits(0),
            "gather_buffers": self.gathered(0) + (self.c * self.wl if waits else 0.0),
        }
        if self.job.model.tied and self.units and self.zero == 3 and self.a["schedule"] in ("gpipe", "looped_bfs"):
            common["gather_buffers"] -= self.c * self.behind
        inside = self.own + self.behind
        loose = (0.0 if direct else dW) + self.previous + self.late
        made = self.fresh(inside + self.before) if direct else self.fresh(self.own + self.through)
        stream = self.whole if self.first else 0.0
        yield 2, common | {"gradients": self.earlier + made, "temporaries": loose + stream}
        yield 2, common | {"gradients": self.earlier + self.fresh(inside + self.table), "temporaries": loose}


def instants(
    job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind]
) -> Iterator[tuple[int, dict[str, float]]]:
    """(moment, terms) of every instant of a stage that can be its worst."""

    if not job.profile.has_units:
        runs = layout["virtual_stages"]
        none = (False,) * runs
        yield from Stage(
            job, layout, stage, kinds, Around(0, (1,) + (0,) * (runs - 1), none, none, False, True, True)
        ).buffered()
        return

    if layout["pp"] == 1:
        (step,) = _at_heads(job, layout, stage, kinds)
        yield from (
            *step.gathering(),
            *step.casting(),
            *step.heads(),
            *step.bodies(),
            *step.summed(),
            *step.hooked(),
            step.update(),
        )
    elif layout["schedule"] in IN_A_V:
        yield from v_instants(lambda at: Stage(job, layout, stage, kinds, at))
    else:
        yield from _of_pipeline(job, layout, stage, kinds)


def _of_pipeline(
    job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind]
) -> Iterator[tuple[int, dict[str, float]]]:
    """The same of a pipeline whose stages have one run of layers, or chunks in turn."""

    def backward(number: int) -> Stage:
        return Stage(job, layout, stage, kinds, around(layout, stage, number))

    def forward(number: int) -> Stage:
        return Stage(job, layout, stage, kinds, around_forward(layout, stage, number))

    pp, v, m = layout["pp"], layout["virtual_stages"], layout["accumulation"]
    turn = m if layout["schedule"] == "looped_bfs" else pp
    first, again = backward(turn * (v - 1)), backward(turn * (v - 1) + 1)
    if layout["schedule"] == "zb_h1" and stage > 0:
        yield from split_instants(lambda at: Stage(job, layout, stage, kinds, at))
        yield from split_end(again)
        return
    heads = _at_heads(job, layout, stage, kinds)
    bodies, forwards = [first, again], [forward(0), forward(1), forward(2)]
    if v > 1:  # which pass holds most is not foreseen: each is looked at, but for those that are like one before
        every = [around(layout, stage, number) for number in range(v * m)]
        forwards = bodies = [Stage(job, layout, stage, kinds, at) for at in dict.fromkeys(every)]
    if _holds_early(layout):
        fed = dict.fromkeys(around_forward(layout, stage, number) for number, at in enumerate(every) if at.alternates)
        runs = [Stage(job, layout, stage, kinds, at) for at in fed]
        forwards = list(_fullest(runs, (v - 1,), (0,), range(1, v - 1)))
    for step in heads:
        yield from step.heads()
    for step in forwards:
        yield from step.forward()
    for step in bodies:
        yield from (step.beginning(), *step.bodies())
    yield from again.reductions()
    yield again.update()


def _holds_early(layout: Layout) -> bool:
    """Chunks in turn hold what ZeRO-3 gathered before its time while others work."""
    return bool(layout["virtual_stages"] > 1 and layout["schedule"] == "interleaved" and layout["zero"] == 3)


def _fullest(passes: Sequence[Stage], *chunks: Sequence[int]) -> Iterator[Stage]:
    """Of some passes those in which most is held, one of some chunks and one of others; as far as there are some."""
    for some in chunks:
        yield from sorted((step for step in passes if step.at.chunk in some), key=Stage.moving, reverse=True)[:1]


def _at_heads(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind]) -> list[Stage]:
    """The passes in which the head is looked at."""
    pp, v, m = layout["pp"], layout["virtual_stages"], layout["accumulation"]
    if pp == 1:
        several = m > 1
        return [Stage(job, layout, stage, kinds, Around(0, (1,), (several,), (False,), several, True, True))]
    if _holds_early(layout):
        every = [Stage(job, layout, stage, kinds, around(layout, stage, number)) for number in range(v * m)]
        return [every[0], *_fullest(every, (v - 1,))]
    rounds = m >= 2 * pp and layout["schedule"] != "looped_bfs"
    numbers = (0, 1) if v == 1 or not rounds else (0, pp * v)
    return [Stage(job, layout, stage, kinds, around(layout, stage, number)) for number in numbers]


INPUTS = (
    "q", "k", "v", "q_down", "q_up", "kv_down", "kv_up", "qkv", "qkvz", "beta", "in", "x", "dt", "decay_in", "decay_out", "gate_in", "gate_out",
)  # fmt: skip


def _is_any(_name: str) -> bool:
    return True


@cache
def _is(name: str) -> Callable[[str], bool]:
    """Whether something has this name; one and the same function for each name, as what is kept by it asks."""
    return lambda own: own == name


def _is_expert(name: str) -> bool:
    return name.startswith("expert")


def _is_shared(name: str) -> bool:
    return name.startswith("shared")


def _is_cross(name: str) -> bool:
    return name.startswith("cross_")


def _is_not_of_routed(name: str) -> bool:
    return not _is_of_routed(name)


def _made_before_experts(name: str) -> bool:
    return not _made_behind_experts(name)


def _is_of_routed(name: str) -> bool:
    return not name.startswith("shared_")


def _made_behind_experts(name: str) -> bool:
    return name == "expert_output" or name.startswith("shared_")


def _made_by_experts(name: str) -> bool:
    own = name.startswith("expert_") or name in ("gate", "up")
    return own and name not in ("expert_input", "expert_output")


def _is_down(name: str) -> bool:
    return name in ("down", "shared_down", "expert_down")


def _is_feed_forward(name: str) -> bool:
    mixer = name in INPUTS or name.startswith(("q_", "kv_", "o_"))
    return name.endswith(("gate", "up", "down")) and not mixer


def _is_behind(name: str) -> bool:
    return name not in INPUTS


def _settled(job: Job, layout: Layout, kinds: Sequence[LayerKind], whole: Held, sharded: Held) -> float:
    if layout["offload"] in ("parameters", "nvme"):
        return 0.0
    if job.profile.host_gradient_bytes and layout["offload"] == "optimizer" and layout["zero"] >= 2:
        return 0.0
    if job.model.adapters is not None:
        return adapters.states(job, layout, kinds, whole.all, sharded.all)["gradients"]
    return job.trainable * BYTES[job.formats.gradient] * (sharded if layout["zero"] >= 2 else whole).all


def _gradients(job: Job, layout: Layout, kinds: Sequence[LayerKind], whole: Held, sharded: Held) -> float:
    several = layout["zero"] >= 2 and layout["accumulation"] > 1
    if several and layout["pp"] > 1:
        return job.trainable * BYTES[job.formats.reduce] * whole.all
    if several and job.profile.accumulates_whole:
        return BYTES[job.formats.compute] * whole.all
    sums = job.profile.has_units and job.profile.replicas_wait and layout["zero"] >= 2 and layout["pp"] == 1
    if sums and layout["dp_replicate"] > 1 and layout["offload"] in ("parameters", "nvme"):
        return job.trainable * BYTES[job.formats.reduce] * sharded.all
    return _settled(job, layout, kinds, whole, sharded)


def _updated(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind]) -> float:
    """Elements that the fullest rank updates; torch's ZeRO-1 gives whole tensors to ranks, the largest first."""
    whole = held(job.model, layout, stage, kinds, sharded=False)
    if layout["zero"] == 0:
        return whole.all
    if layout["zero"] >= 2 or not job.profile.has_units:
        return held(job.model, layout, stage, kinds, sharded=True).all
    n, tp, ep = shards(layout), layout["tp"], layout["ep"]
    dense, routed = (tensors_of(job.model, layout, stage, kinds, experts=which) for which in (False, True))
    if ep == 1:
        return float(max(_dealt(dense + routed, n)))
    own, apart = _dealt(dense, n), _dealt(routed, int(expert_shards(layout)))
    return float(max(own[rank // tp] + apart[rank // (ep * layout["etp"])] for rank in range(n * tp)))


def _dealt(tensors: Sequence[int], ranks: int) -> list[int]:
    """What each rank has when each tensor, the largest first, goes to the rank with least."""
    loads = [0] * ranks
    for size in sorted(tensors, reverse=True):
        loads[loads.index(min(loads))] += size
    return loads


def _pipeline_buffers(job: Job, layout: Layout, stage: int) -> float:
    pp = layout["pp"]
    if pp == 1:
        return 0.0
    ends = (stage == 0) + (stage == last_stage(layout)) + 2 * turns_back(layout, stage)
    sent = tokens(job, layout) * job.model.hidden * BYTES[job.formats.compute]
    if not job.profile.has_units:
        return float((2 - ends) * sent)
    messages = layout["accumulation"] * (2 * layout["virtual_stages"] - ends)
    return float(messages * sent / sequence_cut(layout))


def _runtime(job: Job, layout: Layout) -> float:
    device = "cpu" if job.cluster.smallest.vendor == "CPU" else "gpu"
    axes = sum(layout[axis] > 1 for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"))
    axes += layout["context_parallel"] == "hierarchical"  # rings and groups inside
    context = "loaded" if device == "gpu" and job.profile.loads_all else device
    return overhead(f"{context}_context_bytes") + overhead(f"{device}_communicator_bytes") * axes


def stage_moments(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind]) -> list[dict[str, int]]:
    """The terms of one stage at the worst instant of each of the four moments, in whole bytes."""
    return [ties[0] for ties in stage_ties(job, layout, stage, kinds)]


def stage_ties(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind]) -> list[list[dict[str, int]]]:
    """The same of every instant that is as bad as the worst of its moment but for a byte; the worst first."""
    whole = held(job.model, layout, stage, kinds, sharded=False)
    sharded = held(job.model, layout, stage, kinds, sharded=True)
    weights_away = layout["offload"] in ("parameters", "nvme")
    stored = BYTES[job.formats.parameter]
    state = job.trainable * job.profile.state_bytes(job.workload.optimizer, job.workload.precision)
    weights_from = 2 if job.profile.has_units else 3
    always = {
        "parameters": 0.0 if weights_away else stored * (sharded if layout["zero"] >= weights_from else whole).all,
        "optimizer": 0.0 if layout["offload"] != "none" else state * _updated(job, layout, stage, kinds),
        "pipeline_buffers": _pipeline_buffers(job, layout, stage),
    }
    if job.profile.reduce_bucket and layout["zero"] == 3:  # one buffer for each format that is sent, for ever
        sent = {job.formats.reduce, "float32"} if job.formats.parameter == "float32" else {job.formats.reduce}
        always["bucket_buffers"] = job.profile.reduce_bucket * sum(BYTES[name] for name in sent)
    if compression.word_of(layout) != "none":
        always["bucket_buffers"] = compression.remembered(job, layout)
    if job.model.adapters is not None:
        own = adapters.states(job, layout, kinds, whole.all, sharded.all)
        always |= {name: own[name] for name in ("parameters", "optimizer")}
    if job.workload.optimizer == "muon":
        owned = sharded if layout["zero"] >= 1 else whole
        always["optimizer"] = turned.state_bytes(job, layout, stage, kinds, owned.all)
    runtime = {"runtime": _runtime(job, layout)}
    by_moment: dict[int, list[dict[str, float]]] = {}
    for moment, terms in instants(job, layout, stage, kinds):
        by_moment.setdefault(moment, []).append(terms)
    found = []
    for moment in range(len(MOMENTS)):
        ordered = sorted(by_moment[moment], key=lambda terms: -sum(terms.values()))
        worst = sum(ordered[0].values())
        found.append([_sum(always, terms) for terms in ordered if worst - sum(terms.values()) < 1.0])
    ever = max(sum(ties[0].values()) for ties in found)
    at_loss = sum(always.values()) + _at_loss(job, layout, stage, kinds)
    in_all = _reserved(job, layout, stage, kinds, at_loss=at_loss, ever=ever)
    return [
        [_ledger(terms, in_all) | {name: ceil(size) for name, size in runtime.items()} for terms in ties]
        for ties in found
    ]


def _let_go(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind]) -> float:
    """What a layer that is computed again keeps less than it would otherwise, at most, where no layer behind it keeps more."""
    again = computed_again(job, layout, stage, len(kinds))
    alone = {**layout, "recompute": "none"}
    redone = set(compress(kinds, again)) if any(again[-1:]) else set()
    return max((kept_bytes(job, alone, kind) - kept_bytes(job, layout, kind) for kind in redone), default=0.0)


def _at_loss(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind]) -> float:
    """What moves at the loss where that is most, in frameworks of units."""
    if not job.profile.has_units:
        return 0.0
    if layout["schedule"] in IN_A_V or (layout["schedule"] == "zb_h1" and stage > 0):
        parts = partial(v_instants, at_loss=True) if layout["schedule"] in IN_A_V else split_instants
        every = parts(lambda at: Stage(job, layout, stage, kinds, at))
        return max(sum(terms.values()) for moment, terms in every if moment == 0)
    losses = (terms for step in _at_heads(job, layout, stage, kinds) for _, terms in step.losses())
    return max(sum(terms.values()) for terms in losses)


def _reserved(
    job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind], *, at_loss: float, ever: float
) -> float:
    """What the allocator holds when tensors hold `ever` at most: by its blocks where they are known, else by a share."""
    if not by_blocks(job):
        return ever * (
            1.0 + overhead("expandable_slack" if job.profile.segments == "expandable" else "allocator_slack")
        )
    whole, sharded = (held(job.model, layout, stage, kinds, sharded=shards) for shards in (False, True))
    return reserved(
        job,
        layout,
        stage,
        kinds,
        at_loss=at_loss,
        ever=ever,
        let_go=max(0.0, _let_go(job, layout, stage, kinds)),
        settled=_settled(job, layout, kinds, whole, sharded),
        in_units=uses_units(job, layout),
    )


def _sum(always: dict[str, float], moving: dict[str, float]) -> dict[str, float]:
    """Terms that hold all the time, with those of an instant."""
    return always | {name: always.get(name, 0.0) + size for name, size in moving.items()}


def _ledger(terms: dict[str, float], in_all: float) -> dict[str, int]:
    """Whole bytes, and the rest of what the allocator holds in all."""
    rounded = {name: ceil(value) for name, value in terms.items()}
    return rounded | {"slack": ceil(in_all - sum(terms.values()))}


DECODED_BYTES, DECODED_AT_ONCE = 4 * 4, 2**22
"""Our 8-bit update of a piece of a weight holds four numbers of four bytes per element: two moments, a quotient, a code."""
BLOCK_ON_DRIVE = 2**24
"""Elements whose optimizer state our executor carries to and from a drive at once; two such blocks are on the host."""


def _host(job: Job, sharded: float, offload: str) -> int:
    stored, gradient = BYTES[job.formats.parameter], BYTES[job.formats.gradient]
    gradient = job.profile.host_gradient_bytes or gradient
    state = job.profile.state_bytes(job.workload.optimizer, job.workload.precision)
    per_element = {
        "none": 0.0,
        "optimizer": state
        + gradient
        + (stored if job.profile.has_units and not job.profile.host_gradient_bytes else 0.0),
        "parameters": state + gradient + stored,
        "nvme": gradient + stored,
    }
    passing = min(sharded, BLOCK_ON_DRIVE) if offload == "nvme" and job.profile.has_units else 0.0
    eight = offload != "none" and job.profile.has_units and job.workload.optimizer == "adamw8bit"
    decoded = DECODED_BYTES * min(sharded, DECODED_AT_ONCE) if eight else 0.0
    return ceil(per_element[offload] * sharded + 2 * state * passing + decoded)


def memory_of(job: Job, layout: Layout) -> Memory:
    """The worst moment of the worst stage of one layout."""
    worst: Memory | None = None
    host = ceil(served.host_bytes(job, layout, job.profile.state_bytes(job.workload.optimizer, job.workload.precision)))
    for stage, kinds in enumerate(stage_kinds(job, layout)):
        sharded = held(job.model, layout, stage, kinds, sharded=True)
        host = max(host, _host(job, sharded.all, layout["offload"]))
        moments = zip(MOMENTS, stage_moments(job, layout, stage, kinds), strict=True)
        moment, terms = max(moments, key=lambda each: sum(each[1].values()) - each[1]["slack"])
        device = sum(terms.values())
        if worst is None or device > worst.device:
            worst = Memory(terms, device, moment, stage, 0)
    if worst is None:
        raise ValueError("a layout has at least one stage")
    return Memory(worst.terms, worst.device, worst.moment, worst.stage, host)


def devices_of(job: Job, layout: Layout) -> list[int]:
    """What each stage of one layout takes of its device, at its own worst moment."""
    held_by = (stage_moments(job, layout, stage, kinds) for stage, kinds in enumerate(stage_kinds(job, layout)))
    worst = (max(moments, key=lambda terms: sum(terms.values()) - terms["slack"]) for moments in held_by)
    return [sum(terms.values()) for terms in worst]


def usable_bytes(job: Job) -> int:
    """Device memory less the headroom."""
    return int(job.cluster.smallest.memory_bytes * (1 - job.headroom))


def fits(job: Job, layout: Layout, memory: Memory) -> bool:
    """Device and host are large enough for what a layout takes, and there is a disk where one is needed."""
    room = min(int(0.9 * (g.node.ram_bytes or 0) / g.node.gpus) for g in job.cluster.groups)
    if any(group.node.gpu.shares_host for group in job.cluster.groups):
        room = usable_bytes(job) - memory.device
    has_disk = all(group.node.nvme_read_Bps for group in job.cluster.groups)
    on_disk = has_disk or layout["offload"] != "nvme"
    return memory.device <= usable_bytes(job) and memory.host <= room and on_disk
