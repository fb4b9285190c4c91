"""Seconds of one layout, one stage at a time (docs/time_model.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

from strategist.facts.hardware import Cluster, Node, PacedCluster
from strategist.facts.job import Job
from strategist.facts.layers import build_layer
from strategist.facts.model import LayerKind, layer_counts, layer_sequence
from strategist.facts.parameters import count, outer_parameters
from strategist.facts.profile import BYTES
from strategist.records import replace
from tests.oracle import adapters, compression, convolutions, served, turned
from tests.oracle.attention import attention_FLOP, lengths
from tests.oracle.layer_time import COMPUTE_TERMS, Pass, device_of, head_time, layer_time
from tests.oracle.parameters import all_stages, held
from tests.oracle.ports import Port, is_between_nodes
from tests.oracle.rates import memory_Bps, peak_FLOPs, share
from tests.oracle.stages import IN_A_V, Layout, computed_again, last_stage, stage_kinds
from tests.oracle.tiles import units as tile_units
from tests.oracle.traffic import Row, collective_seconds, rows_of

AXES = ("tp", "cp", "ep", "pp", "dp")
TERMS = (*COMPUTE_TERMS, "loss", *AXES, "bubble", "straggler", "optimizer", "offload")


@dataclass(frozen=True)
class Time:
    """Exposed, hidden and recomputed nanoseconds of every term, and the step."""

    terms: dict[str, tuple[int, int]]
    again: dict[str, int]
    step_ns: int


@dataclass
class Stage:
    """One stage: compute per micro-batch by term, and `once` a step; exposed and hidden seconds per step by axis, and those it waits for
    what units cost its host."""

    layers: int
    compute: dict[str, Pass]
    exposed: dict[str, float] = field(default_factory=dict)
    hidden: dict[str, float] = field(default_factory=dict)
    once: dict[str, float] = field(default_factory=dict)
    units: float = 0.0
    ends: float = 0.0
    """Seconds of head and loss in forward."""

    def computing(self, m: int) -> float:
        """What it computes for over the m micro-batches of a step."""
        return m * sum(term.all for term in self.compute.values()) + sum(self.once.values())

    def seconds(self, m: int) -> float:
        """Everything but dp over the m micro-batches of a step."""
        return self.computing(m) + sum(seconds for axis, seconds in self.exposed.items() if axis != "dp")


def stage_time(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind]) -> Stage:
    """Compute and communication of one stage."""
    sums: dict[str, list[Pass]] = {term: [] for term in (*COMPUTE_TERMS, "loss")}
    by_kind = {kind: layer_time(job, layout, kind) for kind in set(kinds)}
    ends = 0.0
    for kind, redone in zip(kinds, computed_again(job, layout, stage, len(kinds)), strict=True):
        for term, seconds in by_kind[kind].items():
            sums[term].append(seconds if redone else Pass(seconds.forward, seconds.backward))
    if stage == last_stage(layout):
        for term, seconds in head_time(job, layout).items():
            sums[term].append(seconds)
            ends += seconds.forward
    compute = {
        term: Pass(sum(p.forward for p in parts), sum(p.backward for p in parts), sum(p.again for p in parts))
        for term, parts in sums.items()
    }
    found = Stage(len(kinds), compute, ends=ends)
    whole = held(job.model, layout, stage, kinds, sharded=False)
    added = job.trainable * job.profile.accumulate_bytes * whole.all / memory_Bps(device_of(job))
    e = found.compute["elementwise"]
    found.compute["elementwise"] = Pass(e.forward, e.backward + added, e.again)
    if job.profile.kernels.catches_up:
        _wait_for_host(job, layout, stage, kinds, found)
    _add_compression(job, layout, found)
    rows = rows_of(job, layout, stage, kinds, whole)
    port = _port(job, found)
    for axis in AXES:  # dp, which nobody waits for until the end, comes last
        own = [row for row in rows if row.axis == axis]
        found.exposed[axis], found.hidden[axis] = _axis(job, layout, found, own, port)
    return found


def _wait_for_host(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind], found: Stage) -> None:
    """What a device waits for whose host issues a micro-batch: in forward until its layers are issued, then head and loss run, of
    which the host issues little, then backward, with what runs again; and in either for gathers and reductions of units."""
    issued, compute = found.compute["host"], found.compute
    first = second = 0.0
    if not job.profile.launches_wait:
        head = head_time(job, layout) if stage == last_stage(layout) else {}
        works = [seconds for term, seconds in compute.items() if term != "host"]
        before_head = sum(seconds.forward for seconds in head.values())
        redone = issued.again - sum(seconds.again for seconds in works)
        first = issued.forward - (sum(seconds.forward for seconds in works) - before_head)
        second = issued.backward + redone - sum(seconds.backward for seconds in works) - before_head
        again = min(max(0.0, redone), max(0.0, second))
        found.compute["host"] = Pass(max(0.0, first), max(0.0, second) - again, again)
    for calls, late in zip(_unit_calls(job, layout, stage, kinds), (first, second), strict=True):
        found.units += layout["accumulation"] * max(0.0, calls * job.profile.kernels.unit_s - max(0.0, -late))


def _unit_calls(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind]) -> tuple[float, float]:
    """Gathers and reductions of units in forward and backward of a micro-batch."""
    if layout["zero"] < 2:
        return 0.0, 0.0
    layers = sum(tile_units(job.model, layout, kind) for kind in kinds)
    both = job.model.tied and layout["pp"] == 1
    ends = int(stage == 0) + int(stage == last_stage(layout) and not both)
    kept = 1.0 / layout["accumulation"] if layout["pp"] > 1 else 1.0  # a pipeline gathers and reduces once a step
    gathers, again = (1.0, 1.0) if layout["zero"] == 3 else (0.0 if job.profile.stays_whole else kept, 0.0)
    if job.profile.kernels.hooks_again and layout["recompute"] == "full":
        # Hooks of a layer's modules run whenever it does.
        layers_again = sum(computed_again(job, layout, stage, len(kinds)))
    else:
        layers_again = 0
    return gathers * (layers + ends), again * (layers + layers_again) + kept * (layers + ends) * (job.trainable > 0)


def _add_compression(job: Job, layout: Layout, found: Stage) -> None:
    """A hook's kernels run once a step."""
    if compression.word_of(layout) == "none":
        return
    device = device_of(job)
    products = peak_FLOPs(device, "fp32") * share("fp32_matmul_share", device)
    elementwise, matmul = compression.seconds(job, layout, memory_Bps(device), lambda: products)
    found.once.update(elementwise=elementwise, matmul=matmul)


def _port(job: Job, stage: Stage) -> Port:
    """The ports between nodes, while one micro-batch is computed."""
    overlap, terms = share("overlap_share", device_of(job)), stage.compute.values()
    return Port(overlap * sum(t.forward for t in terms), overlap * sum(t.backward + t.again for t in terms))


def _axis(job: Job, layout: Layout, stage: Stage, rows: Sequence[Row], port: Port) -> tuple[float, float]:
    """Exposed and hidden seconds of one axis, which shares the port with those before."""
    exposed = hidden = 0.0
    for behind in ("", "forward", "backward", "attention", "matmul", "compute", "opposite"):
        pool = [row for row in rows if _behind(job, row) == behind]
        joined = job.all_machines if axis_is_dp(pool) and job.all_machines is not None else job.cluster
        total = sum(collective_seconds(joined, row) * row.times for row in pool)
        tucked = _hideable(job, layout, stage, behind, pool) if behind and total else 0.0
        free = 1 - share("contention_share", device_of(job))
        usual = _first_piece(layout, stage, behind)
        rest = sum(
            collective_seconds(joined, row) * row.times * (1 - (usual if row.alone is None else row.alone))
            for row in pool
        )
        beside = min(rest, tucked)
        leaving = sum(
            collective_seconds(joined, row) * row.times
            for row in pool
            if row.size > 1 and is_between_nodes(joined, row.size, row.stride)
        )
        late = 0.0
        if behind and leaving:
            rounds = _rounds(job, layout, behind, pool)
            late = port.late(beside * leaving / total, rounds, _ahead(stage, behind), behind)
        share_hidden = free * (beside - late)
        exposed, hidden = exposed + total - share_hidden, hidden + share_hidden
    return exposed, hidden


def _ahead(stage: Stage, behind: str) -> float:
    """The part of what hides behind something that does so in forward."""
    terms = stage.compute.values()
    parts = {
        "forward": (1.0, 0.0),
        "backward": (0.0, 1.0),
        **{name: (term.forward, term.backward + term.again) for name, term in stage.compute.items()},
        **dict.fromkeys(
            ("compute", "opposite"), (sum(t.forward for t in terms), sum(t.backward + t.again for t in terms))
        ),
    }
    first, second = parts[behind]
    return first / (first + second) if first + second else 0.0


def axis_is_dp(pool: Sequence[Row]) -> bool:
    """Whether replicas meet, who may be on other nodes than those of a kind of their own."""
    return any(row.axis == "dp" for row in pool)


def _behind(job: Job, row: Row) -> str:
    """What a row runs behind under the framework's habits; "" for nothing."""
    hides = job.profile.hides
    if row.axis == "tp":
        return "matmul" if "tensor" in hides and row.op != "all-reduce" else ""
    if row.axis == "pp":
        return "compute" if "pipeline" in hides else ""
    if row.axis == "ep":
        return "opposite" if "experts" in hides else ""
    if row.axis == "dp" and not row.behind:
        return "forward" if "updates" in hides else ""
    if row.axis == "dp" and ("weights" if row.op == "all-gather" else "gradients") not in hides:
        return ""
    return row.behind


def _first_piece(layout: Layout, stage: Stage, behind: str) -> float:
    """The share that has nothing to run beside."""
    if behind == "matmul":
        return 1 / int(layout["tp"])
    if behind == "compute" and layout["virtual_stages"] == 1:
        return 1.0
    if behind == "opposite":  # chunks of micro-batches that the last rank runs forward before it runs any backward
        chunks, rounds = layout["virtual_stages"], layout["accumulation"]
        return min(1.0, ((chunks - 1) * layout["pp"] + 1) / (chunks * rounds))
    return 1 / stage.layers


def _hideable(job: Job, layout: Layout, stage: Stage, behind: str, pool: Sequence[Row]) -> float:
    """What the compute of a pass can cover."""
    compute = {
        "forward": sum(term.forward for term in stage.compute.values()) - stage.ends,
        "backward": sum(term.backward + term.again for term in stage.compute.values()),
        "attention": stage.compute["attention"].all,
        "matmul": stage.compute["matmul"].all,
        **dict.fromkeys(("compute", "opposite"), sum(term.all for term in stage.compute.values())),
    }[behind]
    return share("overlap_share", device_of(job)) * compute * _rounds(job, layout, behind, pool)


def _rounds(job: Job, layout: Layout, behind: str, pool: Sequence[Row]) -> float:
    """Micro-batches whose compute something runs beside: those in which it is sent, and where chunks take turns of pp micro-batches all that
    other chunks compute between the first chunk's turn and the last one's."""
    sent = max(min(row.times, layout["accumulation"]) for row in pool)
    if behind not in ("forward", "backward") or layout["schedule"] != "interleaved" or job.profile.has_units:
        return sent
    turn, others = min(layout["pp"], layout["accumulation"]), layout["virtual_stages"] - 1
    return max(sent, 1 / layout["virtual_stages"] + turn * others / layout["virtual_stages"])


def _bubble(layout: Layout, per_micro: Sequence[float]) -> float:
    """Of one micro-batch, what the stages but the slowest take one after the other."""
    idle = sum(per_micro) - max(per_micro)
    return idle / layout["virtual_stages"] if layout["schedule"] in ("interleaved", "looped_bfs", *IN_A_V) else idle


def _waited_for(job: Job, layout: Layout, stage: Stage) -> float:
    """Seconds of one micro-batch that stages wait for and idle: all of it, but under ZB-H1, which makes the gradients of weights in the
    time that it would have idled (T_F + T_B - T_W: once gone and once filled), and under ZBV, whose stages wait for gradients of inputs
    alone (T_B). Under DualPipeV two things can be last: T_F twice and T_B, or T_B twice and all but one of the stages' T_F. Nothing of experts is
    hidden meanwhile: only one of both passes runs."""
    seconds = (stage.seconds(layout["accumulation"]) + stage.hidden["ep"]) / layout["accumulation"]
    products = stage.compute["matmul"].backward / (1 + job.trainable)
    ahead, weights = sum(term.forward for term in stage.compute.values()), job.trainable * products
    inputs = seconds - ahead - weights
    if layout["schedule"] == "zbv":
        return inputs
    if layout["schedule"] == "dualpipev":
        return max(2 * ahead + inputs, ahead + 2 * inputs - ahead / (layout["pp"] - 1)) - weights
    return seconds - 2 * job.trainable * products if layout["schedule"] == "zb_h1" else seconds


EIGHT_BIT_BYTES = 2 * (1 + 4 + 4 + 4 + 4 + 4) + 12 + 8 + 16 + 2 * (4 + 8 + 8 + 5) + 3 * 8 + 8 + 16
"""Read and written per element by our 8-bit update, one operation after the other."""


def _adamw_bytes(job: Job, w: float, g: float, both: float) -> float:
    """Read and written per element by an update in so many kernels; `both` are the moments."""
    kernels = job.profile.update_kernels
    if kernels == "partitions":
        norm = 8 + 8  # of float64, whose making reads what the norm reads in any case
        summed = (g + 4) + 4 if job.formats.compute == "float16" else 0
        one_tensor, wide = g + g, (g + 4 if g < 4 else 0)
        scaled, adam, copied = 4 + 4, 4 * 4 + 3 * 4, 4 + w
        return summed + norm + one_tensor + wide + scaled + adam + copied
    if kernels == "one":
        return 2 * (w + both) + g
    if kernels == "stages":  # change written; norms of weight and change; both read again
        return 2 * (w + both) + g + 4 + (4 + 4) + (4 + 4)
    m = v = both / 2
    decay, first, second = w + w, m + g + m, (v + v) + (v + g + v)
    root, corrected, steadied = (v + v for _ in range(3))
    return decay + first + second + root + corrected + steadied + (w + m + v + w)


def _update(job: Job, layout: Layout) -> tuple[float, float]:
    """Seconds of the update on the device, and of offloading with the update on the host."""
    gpu = device_of(job)
    if job.workload.optimizer == "muon":
        stages = enumerate(stage_kinds(job, layout))
        return max(turned.seconds(job, layout, stage, kinds) for stage, kinds in stages), 0.0
    owned = job.trainable * max(held_.all for held_ in all_stages(job, layout, sharded=layout["zero"] >= 1))
    s, g = BYTES[job.formats.parameter], BYTES[job.formats.gradient]
    o = job.profile.state_bytes(job.workload.optimizer, job.workload.precision)
    touched = 2 * (s + o) + g
    if job.profile.kernels.name == "own" and job.workload.optimizer == "adamw8bit":
        touched = EIGHT_BIT_BYTES
    if layout["offload"] == "none":
        waits = served.seconds(job, layout, touched) if served.is_served(layout) else 0.0
        moved = touched if job.workload.optimizer != "adamw" else _adamw_bytes(job, s, g, o)
        return (moved + job.profile.gradient_passes * g) * owned / memory_Bps(gpu), waits
    link = (gpu.host_Bps or gpu.memory_Bps) * share("host_link_share", gpu)
    update = touched * owned / share("host_update_Bps", gpu)
    if layout["offload"] == "optimizer":
        return 0.0, (g + s) * owned / link + update
    seconds = layout["accumulation"] * (2 * s + g) * owned / link + update
    if layout["offload"] == "nvme":
        node = job.cluster.slowest
        seconds += 2 * o * owned / ((node.nvme_read_Bps or 0.0) / node.gpus)
    return 0.0, seconds


def times_of(job: Job, layout: Layout) -> list[Time]:
    """One optimizer step of one layout. Where several stages are equally slow, one answer for each of them. Of several kinds of nodes each
    waits for the one that is last."""
    kinds = {group.node for group in job.cluster.groups}
    if len(kinds) == 1:
        return _times_of(job, layout)
    every = [_times_of(replace(job, cluster=paced_by(job.cluster, kind)), layout) for kind in kinds]
    return max(every, key=lambda times: times[0].step_ns)


def paced_by(cluster: Cluster, kind: Node) -> Cluster:
    """The machines as if nodes of one kind were what all wait for."""
    return PacedCluster(
        groups=cluster.groups, origin=cluster.origin, oversubscription=cluster.oversubscription, pace=kind
    )


def _times_of(job: Job, layout: Layout) -> list[Time]:
    m = layout["accumulation"]
    kinds = stage_kinds(job, layout)
    stages = [stage_time(job, layout, stage, own) for stage, own in enumerate(kinds)]
    bubble = _bubble(layout, [_waited_for(job, layout, stage) for stage in stages])
    update, offload = _update(job, layout)
    alone = {"bubble": bubble, "optimizer": update, "offload": offload}
    slowest = _largest(stages, lambda stage: stage.seconds(m))
    busiest = _largest(stages, lambda stage: stage.exposed["dp"])
    alone["units"] = max(0.0, max(stage.units for stage in stages) - busiest[0].exposed["dp"])  # both go on at once
    late = _late(job)
    return [
        _ledger(m, own, sender, alone | {"straggler": late * own.computing(m)}) for own in slowest for sender in busiest
    ]


def _late(job: Job) -> float:
    """How much longer the slowest of all devices computes than the slowest of eight: a normal distribution's quantiles at
    (n - 3/8) / (n + 1/4)."""
    late, usual = (
        NormalDist().inv_cdf((8 * n - 3) / (8 * n + 2)) for n in (max((job.all_machines or job.cluster).world, 8), 8)
    )
    return share("device_spread", device_of(job)) * (late - usual)


def time_of(job: Job, layout: Layout) -> Time:
    """One optimizer step of one layout; the first of equally slow stages speaks."""
    return times_of(job, layout)[0]


def _largest(stages: Iterable[Stage], size: Callable[[Stage], float]) -> list[Stage]:
    """The stages whose size is the largest but for rounding, in order."""
    listed = list(stages)
    limit = max(size(stage) for stage in listed) * (1 - 1e-12)
    return [stage for stage in listed if size(stage) >= limit]


def _ledger(m: int, slowest: Stage, sender: Stage, alone: Mapping[str, float]) -> Time:
    exposed = (
        {term: m * passes.all + slowest.once.get(term, 0.0) for term, passes in slowest.compute.items()}
        | slowest.exposed
        | alone
    )
    exposed["dp"] = sender.exposed["dp"]
    hidden = slowest.hidden | {"dp": sender.hidden["dp"]}
    terms = {term: (_ns(exposed[term]), _ns(hidden.get(term, 0.0))) for term in TERMS}
    terms["host"] = terms["host"][0] + _ns(alone["units"]), 0
    again = {term: _ns(m * passes.again) for term, passes in slowest.compute.items()}
    return Time(terms, again, sum(shown for shown, _ in terms.values()))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def model_FLOP(job: Job) -> float:
    """Useful FLOP of one step."""
    shape, parameters = job.model, count(job.model)
    if shape.kind == "cnn":
        return float(convolutions.useful_FLOP(shape) * job.workload.global_batch)
    head = shape.vocab * shape.hidden if shape.tied else 0
    weights = parameters.active - outer_parameters(shape).before + head
    if shape.kind in ("dit", "dual-encoder"):  # attention's four and the feed-forward part's two or three matrices
        width = shape.heads * shape.head_dim
        projections = shape.hidden * (2 * width + 2 * shape.kv_heads * shape.head_dim)
        weights = shape.layers * (projections + (3 if shape.mlp_gated else 2) * shape.hidden * shape.ffn_hidden)
    attention, work = 0.0, job.workload
    for kind, number in layer_counts(shape).items():
        own, inputs = lengths(job, kind)
        attention += attention_FLOP(shape, kind, own, inputs) * number * own / inputs
    if shape.enc_layers:  # all of the decoder but two of four matrices of the attention to the encoder, and the head
        every = [m for kind in layer_sequence(shape) if kind.cross for m in build_layer(shape, kind).matrices]
        decoder = sum(m.inputs * m.outputs for m in every if m.name not in ("cross_k", "cross_v"))
        weights -= (decoder + shape.vocab * shape.hidden) * (1 - (work.target_len or work.seq_len) / work.seq_len)
    frozen = 0.0
    if shape.adapters is not None:
        frozen = weights - adapters.trained(shape, list(layer_sequence(shape)), 1)
    return (6 * weights - 2 * frozen + 3 * attention) * job.workload.tokens_per_step


def mfu(job: Job, step_seconds: float) -> float:
    """Useful FLOP over what all devices could do at their peak."""
    peaks = sum(g.count * g.node.gpus * peak_FLOPs(g.node.gpu, job.workload.precision) for g in job.cluster.groups)
    return model_FLOP(job) / (step_seconds * peaks)
