"""Bytes of one layout, one stage and one moment at a time (docs/memory_model.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from strategist.catalog import rows
from strategist.facts.job import Job
from strategist.facts.layers import build_layer
from strategist.facts.model import LayerKind, layer_counts
from strategist.facts.profile import BYTES
from strategist.memory.saved import saved_tensors
from tests.oracle.parameters import Held, held, matrix_elements, vocabulary
from tests.oracle.stages import Layout, stage_kinds

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


def is_plain(layout: Layout) -> bool:
    """DDP or one process under autocast; everything else runs on fully_shard or replicate."""
    return bool(layout["zero"] < 2 and layout["tp"] == layout["pp"] == 1)


def tokens(job: Job, layout: Layout) -> float:
    """T: tokens of one micro-batch on one rank."""
    return float(layout["micro_batch"] * job.workload.seq_len / layout["cp"])


def sequence_cut(layout: Layout) -> int:
    """sp: tp under sequence parallelism, else 1."""
    return int(layout["tp"]) if layout["sequence_parallel"] else 1


def _bytes_of(job: Job, layout: Layout, kind: LayerKind, wanted: Wanted, *parts: str) -> float:
    """Bytes of some rows of one layer for one micro-batch, under the layout's policy."""
    ways = {"sequence": sequence_cut(layout), "heads": layout["tp"], "whole": 1}
    compute, policy = BYTES[job.formats.compute], layout["recompute"]
    total = 0.0
    for tensor in saved_tensors(job.model, kind):
        if wanted(tensor.policies, policy) and (not parts or tensor.part in parts):
            total += tensor.width * (4 if tensor.is_float32 else compute) / ways[tensor.cut]
    return total * tokens(job, layout)


def _kept(policies: tuple[str, ...], policy: str) -> bool:
    return policy in policies


def _again(policies: tuple[str, ...], policy: str) -> bool:
    return "none" in policies and policy not in policies


def kept_bytes(job: Job, layout: Layout, kind: LayerKind) -> float:
    """Bytes that one layer keeps for one micro-batch."""
    return _bytes_of(job, layout, kind, _kept)


def in_flight(layout: Layout, stage: int) -> float:
    """Micro-batches whose activations one stage holds at once."""
    pp, m, v = layout["pp"], layout["accumulation"], layout["virtual_stages"]
    if pp == 1:
        return 1
    if layout["schedule"] == "gpipe":
        return float(m)
    if layout["schedule"] == "1f1b":
        return float(min(m, pp - stage))
    return float(min(m * v, 2 * (pp - stage - 1) + (v - 1) * pp + 1) / v)


@dataclass(frozen=True)
class LayerAt:
    """One instant of a layer's backward: temporaries, kept bytes gone by then, elements with a gradient, and whether a
    matrix is just getting its own."""

    temporaries: float
    freed: float
    weights: float
    is_product: bool = False


class Stage:
    """One stage of one layout, in a pipeline's first backward pass or (`drains`) behind it."""

    def __init__(self, job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind], *, drains: bool) -> None:
        self.job, self.a, self.stage, self.kinds = job, layout, stage, kinds
        a, formats = layout, job.formats
        self.c, self.r, self.s = BYTES[formats.compute], BYTES[formats.reduce], BYTES[formats.parameter]
        self.w = held(job.model, a, stage, kinds, sharded=False)
        self.sharded = held(job.model, a, stage, kinds, sharded=True)
        self.first, self.last, self.piped = stage == 0, stage == a["pp"] - 1, a["pp"] > 1
        self.zero, self.q = a["zero"], job.trainable
        ranks = a["dp_replicate"] * a["dp_shard"] * a["cp"]
        self.plain = is_plain(a)
        alone = ranks == 1 and formats.compute == formats.parameter
        self.units = not self.plain and not alone and (self.zero >= 2 or job.profile.has_units)
        self.reduces = self.units and not self.piped
        flight, m = in_flight(a, stage), a["accumulation"]
        self.flight = max(flight - 1, 1.0) if drains else flight
        self.several = m > ceil(flight) if self.piped and not drains else m > 1
        self.buckets = self.plain and ranks > 1
        self.stands = self.several or self.buckets
        self.casts = formats.compute != formats.parameter
        self.tied = job.model.tied and a["pp"] == 1
        self.n = a["dp_shard"] * a["cp"]
        self.T, self.h = tokens(job, a), job.model.hidden
        self.wl = self.w.widest / a["tiling"]
        self.head = vocabulary(job.model, a["tp"], 1) if self.last else 0
        self.outer = self.w.before + (self.w.behind if self.tied else 0)
        self.behind = 0 if self.tied else self.w.behind
        self.inputs = 16 * self.T * m
        self.stream = self.T * self.h * self.c / sequence_cut(a)
        self.previous = self.stream if self.piped and self.several else 0.0
        self.settled = _settled(job, a, self.w, self.sharded)
        self.at_rest = _gradients(job, a, self.w, self.sharded)
        self.earlier = self.at_rest if self.stands else 0.0
        self.outside = self.at_rest if self.buckets and m > 1 else 0.0
        self.micro = sum(_bytes_of(job, a, kind, _kept) for kind in kinds) + self.edges() + self.shared()
        self.all = self.flight * self.micro + self.inputs
        copies = self.c * self.w.layers if self.plain and self.casts else 0.0
        self.copies = copies if a["recompute"] == "none" else 0.0
        self.cached = copies - self.copies
        self.head_copy = self.c * self.head if self.plain and self.casts else 0.0
        self.waiting = self.q * self.c * self.head if self.reduces and self.tied else 0.0
        self.old_head = self.q * self.s * self.head if not self.units and self.tied else 0.0

    def edges(self) -> float:
        """Final norm and the head's input."""
        if not self.last:
            return 0.0
        statistics = 4 if self.job.model.norm == "rmsnorm" else 8
        return self.T * (self.h * self.c + statistics) / sequence_cut(self.a) + self.T * self.h * self.c

    def shared(self) -> float:
        """Rotary tables, the stage's output, less its input, which lies in a receive buffer."""
        shape = self.job.model
        tables = self.job.workload.seq_len * shape.head_dim * self.c if shape.pos == "rope" else 0.0
        return tables + self.stream * ((not self.last) - (not self.first))

    def logits(self, per_entry: float) -> float:
        """Bytes of the vocabulary's tensors, and the logits that a pipeline's last stage holds on to."""
        if not self.last:
            return 0.0
        held_on = self.c if self.piped else 0.0
        return self.T * -(-self.job.model.vocab // self.a["tp"]) * (per_entry + held_on)

    def fresh(self, elements: float) -> float:
        """Gradients made by this pass."""
        if self.stands:
            return 0.0
        made = self.q * BYTES[self.job.formats.gradient] * elements / (self.n if self.zero >= 2 else 1)
        return min(made, self.at_rest)

    def reduction(self, elements: float) -> float:
        """A unit while it is reduced, with what comes out where gradients stand already."""
        if not self.reduces:
            return 0.0
        out = self.r / self.n if self.several and self.zero >= 2 else 0.0
        return self.q * elements * (self.r + (self.c if self.zero >= 2 else 0.0) + out)

    def retained(self, elements: float) -> float:
        """Reduced gradients of unsharded units."""
        return self.q * self.r * elements if self.reduces and self.several and self.zero < 2 else 0.0

    def gathered(self, layers: int, *, head: bool = False, passed: float = 0.0) -> float:
        """Gathered weights."""
        if not self.units:
            return 0.0
        kept = self.behind if head else 0.0
        if self.zero == 3:
            return self.c * (kept + min(layers * self.wl, self.w.layers) + (self.outer if self.tied else 0.0))
        given_back = 0.0 if self.piped else passed
        return self.c * (kept + max(0.0, self.w.layers - given_back) + self.outer)

    def instants(self) -> Iterator[tuple[int, dict[str, float]]]:
        """(moment, terms) of every instant."""
        yield from self._loss()
        yield from self._head()
        for number in (0, 1, -1):
            for which in (self._feed_forward, self._last_matrix, self._inputs, self._attention):
                yield 1, self._layer(which, number)
        yield 1, self._layer_reduced()
        yield from self._end()
        whole = self.q * self.s * self.job.model.vocab * self.h
        waits = self.first and not self.units and self.a["tp"] > 1
        yield 3, {"gradients": self.settled, "activations": self.inputs, "temporaries": whole if waits else 0.0}

    def _loss(self) -> Iterator[tuple[int, dict[str, float]]]:
        others = (self.flight - 1) * self.micro + self.inputs
        again = self.piped and self.zero == 3 and self.units and self.first
        table = self.c * (2 * self.w.before + self.wl) if again else 0.0
        yield 0, {"gradients": self.earlier, "activations": others, "gather_buffers": table}
        before = {
            "gradients": self.earlier,
            "activations": self.all,
            "gather_buffers": self.gathered(0, head=True),
            "bucket_buffers": self.copies + self.head_copy,
        }
        cast = self.c if self.c < 4 else 0
        waits = self.previous + self.outside
        yield 0, before | {"logits": self.logits(8 + cast), "temporaries": waits + self.cached}
        yield 0, before | {"logits": self.logits(16 if self.a["tp"] > 1 else 12), "temporaries": waits}

    def _head(self) -> Iterator[tuple[int, dict[str, float]]]:
        dW, dX = self.q * self.c * self.head, self.stream if self.last else 0.0
        own = 0.0 if self.tied else self.fresh(self.head)
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
        stored = self.q * self.s * self.head if self.stands or self.tied else 0.0
        yield (
            1,
            {
                "gradients": self.earlier + own,
                "activations": self.all - dX,
                "logits": self.logits(0),
                "gather_buffers": self.gathered(0, head=True),
                "bucket_buffers": self.copies,
                "temporaries": waits + (dW + stored if self.plain and self.casts else 0.0),
            },
        )
        stays = self.c * self.w.behind if self.piped and self.units else 0.0
        reduced = 0.0 if self.tied else self.reduction(self.w.behind)
        if self.tied and self.reduces and self.several and self.zero >= 2:
            reduced = self.q * self.r * self.w.behind / self.n
        yield (
            1,
            {
                "gradients": self.earlier + self.fresh(self.w.behind),
                "activations": self.all - self.edges(),
                "logits": self.logits(0),
                "gather_buffers": self.gathered(1) + reduced + self.waiting + stays,
                "bucket_buffers": self.copies,
                "temporaries": self.previous + self.stream * (2 if stays else 1) + self.retained(self.w.behind) + stays,
            },
        )

    def _rows(self, kind: LayerKind, wanted: Wanted, *parts: str) -> float:
        return _bytes_of(self.job, self.a, kind, wanted, *parts)

    def _whole_stream(self) -> float:
        return self.stream + (self.T * self.h * self.c if sequence_cut(self.a) > 1 else 0.0)

    def _elements(self, kind: LayerKind, chosen: Callable[[str], bool]) -> float:
        total = 0.0
        for m in build_layer(self.job.model, kind).matrices:
            if chosen(m.name):
                cut = self.a["etp"] if m.is_expert else self.a["tp"]
                if m.is_expert:
                    one = replace(m, copies=1)
                    total += -(-m.copies // self.a["ep"]) * matrix_elements(one, cut, 1)
                else:
                    total += matrix_elements(m, cut, 1)
        return total / self.a["tiling"]

    def _feed_forward(self, kind: LayerKind) -> LayerAt:
        kept, again = self._rows(kind, _kept, "product"), self._rows(kind, _again, "product")
        times = 3 if self.job.model.mlp_gated else 2
        back = self._rows(kind, _again) - again
        temporaries = times * (kept + again) + self._whole_stream() + back
        return LayerAt(temporaries, kept, self._elements(kind, _is_down))

    def _last_matrix(self, kind: LayerKind) -> LayerAt:
        kept, again = self._rows(kind, _kept, "product"), self._rows(kind, _again, "product")
        back = self._rows(kind, _again) - again
        temporaries = kept + again + self._whole_stream() + back
        return LayerAt(temporaries, kept, self._elements(kind, _is_down), is_product=True)

    def _inputs(self, kind: LayerKind) -> LayerAt:
        product = self._rows(kind, _kept, "product") + self._rows(kind, _again, "product")
        streams = (2 if self.job.model.mlp_gated else 1) * self.T * self.h * self.c + self.stream
        freed = self._rows(kind, _kept, "inside", "product")
        back = self._rows(kind, _again, "mixer", "ffn")
        return LayerAt(product + streams + back, freed, self._elements(kind, _is_feed_forward))

    def _attention(self, kind: LayerKind) -> LayerAt:
        shape, a = self.job.model, self.a
        d, heads, keys = shape.head_dim, shape.heads / a["tp"], shape.kv_heads / a["tp"]
        step = 32 if d <= 128 else 64
        padded = -(-max(d, 1) // step) * step
        rows = a["micro_batch"] * ceil(ceil(self.job.workload.seq_len / a["cp"]) / 128) * 128
        workspace = 4 * heads * rows * (1 + padded)
        expanded = 2 * self.T * heads * d * self.c if shape.heads != shape.kv_heads else 0.0
        gradients = self.T * d * self.c * (2 * heads + 2 * keys) + workspace + expanded
        back = self._rows(kind, _again, "mixer")
        freed = self._rows(kind, _kept, "ffn", "inside", "product")
        return LayerAt(gradients + self._whole_stream() + back, freed, self._elements(kind, _is_behind))

    def _layer(self, which: Callable[[LayerKind], LayerAt], number: int) -> dict[str, float]:
        order = [kind for kind in layer_counts(self.job.model) if kind in set(self.kinds)]
        ats = [(which(kind), kind) for kind in order]
        at, kind = max(ats, key=lambda pair: pair[0].temporaries - pair[0].freed + self.c * pair[0].weights)
        count, kept = len(self.kinds), self._rows(kind, _kept)
        before = count - 1 if number < 0 else min(number, count - 1)
        share = before / max(count - 1, 1)
        passed = share * max(0.0, self.w.layers - self.wl)
        let_go = share * (sum(self._rows(each, _kept) for each in self.kinds) - kept)
        done = self.behind + passed
        partial = self.q * self.c * at.weights
        cast = self.q * self.s * at.weights if self.casts and self.stands else 0.0
        loose = 0.0
        if not self.reduces:
            loose = partial if self.units else (partial + cast if at.is_product else 0.0)
        again = self.cached / max(count, 1)
        lets_go = self.units or (self.plain and self.casts)
        freed = at.freed if lets_go or not at.is_product else 0.0
        in_flight = self.q * self.r * (self.wl if before else self.behind)
        copies = self.copies * (1 - before / max(count, 1)) - (partial if self.plain and self.casts else 0.0)
        return {
            "gradients": self.earlier + self.fresh(done + (0.0 if self.units else at.weights)),
            "activations": max(self.inputs, self.all - self.edges() - freed - let_go),
            "logits": self.logits(0),
            "gather_buffers": self.gathered(2, passed=passed)
            + (partial + in_flight if self.reduces else 0.0)
            + self.waiting,
            "bucket_buffers": max(0.0, copies),
            "temporaries": at.temporaries
            + self.previous
            + self.old_head
            + self.retained(done)
            + (self.outside if number == 0 else 0.0)
            + (max(0.0, again - partial) if again else 0.0)
            + loose,
        }

    def _layer_reduced(self) -> dict[str, float]:
        kept = max(self._rows(kind, _kept) for kind in set(self.kinds))
        return {
            "gradients": self.earlier + self.fresh(self.behind + self.wl),
            "activations": max(self.inputs, self.all - self.edges() - kept),
            "logits": self.logits(0),
            "gather_buffers": self.gathered(1, passed=self.wl) + self.reduction(self.wl) + self.waiting,
            "temporaries": self.stream + self.previous + self.retained(self.behind + self.wl),
        }

    def _end(self) -> Iterator[tuple[int, dict[str, float]]]:
        cut = self.a["tp"] > 1
        table = vocabulary(self.job.model, 1, 1) if self.first else 0
        dW = self.q * (self.c if self.units else self.s) * table
        local = self.q * self.c * self.outer if cut else dW
        stream = self.s / self.c * self.stream if self.first and not self.units else 0.0
        direct = not self.units and not self.stands and not cut
        keeps = self.c * self.outer if self.units and (self.zero < 3 or self.tied) else 0.0
        if self.piped:
            keeps = self.gathered(1)
        waiting = self.waiting + (self.c * self.head if self.reduces and self.tied else 0.0)
        flight = self.q * self.r * self.wl
        sums = 2 * self.old_head or stream
        yield (
            2,
            {
                "gradients": self.earlier + self.fresh(self.w.all if direct else self.w.all - self.outer),
                "activations": (self.flight - 1) * self.micro + self.inputs,
                "gather_buffers": keeps + (flight + local + waiting if self.reduces else 0.0),
                "temporaries": (0.0 if direct or (self.reduces and not cut) else dW)
                + self.retained(self.w.all - self.outer)
                + sums
                + self.previous,
            },
        )
        at_once = self.q * self.r * max(self.wl, self.outer) if self.units and self.piped else 0.0
        yield (
            2,
            {
                "gradients": self.at_rest,
                "activations": self.inputs,
                "gather_buffers": self.reduction(self.outer)
                + at_once
                + (keeps if self.piped and self.zero < 3 else 0.0),
                "temporaries": self.retained(self.w.all),
            },
        )
        yield (
            2,
            {
                "gradients": self.earlier,
                "activations": self.inputs,
                "temporaries": self.outside + sums + (dW if self.a["accumulation"] > 2 else 0.0),
            },
        )


INPUTS = ("q", "k", "v", "q_down", "q_up", "kv_down", "kv_up", "qkvz", "beta", "in", "x", "dt")


def _is_down(name: str) -> bool:
    return name in ("down", "shared_down", "expert_down")


def _is_feed_forward(name: str) -> bool:
    mixer = name in INPUTS or name.startswith(("q_", "kv_", "o_"))
    return name.endswith(("gate", "up", "down")) and not mixer


def _is_behind(name: str) -> bool:
    return name not in INPUTS


def _settled(job: Job, layout: Layout, whole: Held, sharded: Held) -> float:
    if layout["offload"] in ("parameters", "nvme"):
        return 0.0
    return job.trainable * BYTES[job.formats.gradient] * (sharded if layout["zero"] >= 2 else whole).all


def _gradients(job: Job, layout: Layout, whole: Held, sharded: Held) -> float:
    if layout["zero"] >= 2 and layout["pp"] > 1 and layout["accumulation"] > 1:
        return job.trainable * BYTES[job.formats.reduce] * whole.all
    return _settled(job, layout, whole, sharded)


def _pipeline_buffers(job: Job, layout: Layout, stage: int) -> float:
    pp = layout["pp"]
    if pp == 1:
        return 0.0
    neighbours = 1 if stage in (0, pp - 1) else 2
    sent = tokens(job, layout) * job.model.hidden * BYTES[job.formats.compute]
    chunks = layout["accumulation"] * layout["virtual_stages"] if job.profile.has_units else 1
    return float(neighbours * chunks * sent)


def _runtime(job: Job, layout: Layout) -> float:
    device = "cpu" if job.cluster.smallest.vendor == "CPU" else "gpu"
    axes = sum(layout[axis] > 1 for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"))
    return overhead(f"{device}_context_bytes") + overhead(f"{device}_communicator_bytes") * axes


def stage_moments(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind]) -> list[dict[str, int]]:
    """The terms of one stage at the worst instant of each of the four moments, in whole bytes."""
    whole = held(job.model, layout, stage, kinds, sharded=False)
    sharded = held(job.model, layout, stage, kinds, sharded=True)
    weights_away = layout["offload"] in ("parameters", "nvme")
    stored, state = BYTES[job.formats.parameter], job.trainable * job.profile.state_bytes(job.workload.optimizer)
    always = {
        "parameters": 0.0 if weights_away else stored * (sharded if layout["zero"] >= 2 else whole).all,
        "optimizer": 0.0 if layout["offload"] != "none" else state * (sharded if layout["zero"] >= 1 else whole).all,
        "pipeline_buffers": _pipeline_buffers(job, layout, stage),
    }
    worst: dict[int, dict[str, float]] = {}
    for drains in (False, True) if layout["pp"] > 1 else (False,):
        for moment, terms in Stage(job, layout, stage, kinds, drains=drains).instants():
            if moment not in worst or sum(terms.values()) > sum(worst[moment].values()):
                worst[moment] = terms
    runtime = {"runtime": _runtime(job, layout)}
    return [_ledger(always | worst[moment] | runtime) for moment in range(len(MOMENTS))]


def _ledger(terms: dict[str, float]) -> dict[str, int]:
    """Whole bytes, and the allocator's slack on everything but the runtime."""
    rounded = {name: ceil(value) for name, value in terms.items()}
    allocated = sum(value for name, value in rounded.items() if name != "runtime")
    return rounded | {"slack": ceil(overhead("allocator_slack") * allocated)}


def _host(job: Job, sharded: float, offload: str) -> int:
    stored, gradient = BYTES[job.formats.parameter], BYTES[job.formats.gradient]
    state = job.profile.state_bytes(job.workload.optimizer)
    per_element = {
        "none": 0.0,
        "optimizer": state + gradient,
        "parameters": state + gradient + stored,
        "nvme": gradient + stored,
    }
    return ceil(per_element[offload] * sharded)


def memory_of(job: Job, layout: Layout) -> Memory:
    """The worst moment of the worst stage of one layout."""
    worst: Memory | None = None
    host = 0
    for stage, kinds in enumerate(stage_kinds(job.model, layout)):
        sharded = held(job.model, layout, stage, kinds, sharded=True)
        host = max(host, _host(job, sharded.all, layout["offload"]))
        for moment, terms in zip(MOMENTS, stage_moments(job, layout, stage, kinds), strict=True):
            device = sum(terms.values())
            if worst is None or device > worst.device:
                worst = Memory(terms, device, moment, stage, 0)
    if worst is None:
        raise ValueError("a layout has at least one stage")
    return Memory(worst.terms, worst.device, worst.moment, worst.stage, host)


def usable_bytes(job: Job) -> int:
    """Device memory less the headroom."""
    return int(job.cluster.smallest.memory_bytes * (1 - job.headroom))


def fits(job: Job, layout: Layout, memory: Memory) -> bool:
    """Device and host are large enough for what a layout takes, and there is a disk where one is needed."""
    room = min(int(0.9 * (g.node.ram_bytes or 0) / g.node.gpus) for g in job.cluster.groups)
    has_disk = all(group.node.nvme_read_Bps for group in job.cluster.groups)
    on_disk = has_disk or layout["offload"] != "nvme"
    return memory.device <= usable_bytes(job) and memory.host <= room and on_disk
