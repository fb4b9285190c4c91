"""The sum: where the seconds of one optimizer step go. Columns of candidates (C); every second has one home."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from strategist.columns import on_stages
from strategist.document.estimate import TIME_TERMS
from strategist.facts.attention import attention_FLOP
from strategist.facts.job import Job
from strategist.facts.layers import build_layer
from strategist.facts.model import ModelShape, layer_counts
from strategist.facts.parameters import count, outer_parameters
from strategist.records import dataclass
from strategist.space.candidates import BY_STAGE, Candidates, Column, Mask, Reals, total_of
from strategist.space.shares import Elements, Group, elements, groups
from strategist.space.traffic import Hidden, Traffic, activation_traffic, traffic
from strategist.timing.calibrated import least_factor, scaled
from strategist.timing.collectives import FULL_BYTES, Links, links
from strategist.timing.compute import COMPUTE_TERMS, Compute
from strategist.timing.optimizer import offload_seconds, update_seconds
from strategist.timing.ports import IN_TURN, Ports, Shares
from strategist.timing.rates import memory_Bps, peak_FLOPs, share
from strategist.timing.stragglers import straggling

NANO = 1e9
NONE: Reals = np.zeros(())
"""No seconds, whatever the candidate."""
Terms = Mapping[str, Reals]


@dataclass(frozen=True, slots=True, eq=False)
class StepTimes:
    """Per candidate (C): exposed, hidden and recomputed nanoseconds by term, and the step as their exact sum."""

    exposed: Mapping[str, Column]
    hidden: Mapping[str, Column]
    again: Mapping[str, Column]
    step: Column


def step_times(job: Job, candidates: Candidates) -> StepTimes:
    """The time of one optimizer step of every candidate."""
    size = len(candidates)
    exposed, hidden, again = ({name: np.zeros(size, np.int64) for name in TIME_TERMS} for _ in range(3))
    compute = Compute(job, candidates)
    for group in groups(job, candidates):
        for name, (shown, behind, redone) in _group_terms(job, group, compute).items():
            for whole, seconds in ((exposed, shown), (hidden, behind), (again, redone)):
                if seconds is not NONE:
                    whole[name][group.rows] = np.round(seconds * NANO).astype(np.int64)
    if factors := job.on_parts:
        exposed, hidden, again = (scaled(terms, factors) for terms in (exposed, hidden, again))
    step: Column = total_of(exposed.values())
    return StepTimes(exposed, hidden, again, step)


def joined_times(parts: Sequence[tuple[Column, StepTimes]], wanted: Column) -> StepTimes:
    """The times of some rows, in ascending order, out of those of several sets of rows that have them all."""
    rows = np.concatenate([rows for rows, _ in parts])
    order = rows.argsort(kind="stable")
    at = order[np.searchsorted(rows[order], wanted)]
    exposed, hidden, again = (
        {name: np.concatenate([getattr(times, kind)[name] for _, times in parts])[at] for name in TIME_TERMS}
        for kind in ("exposed", "hidden", "again")
    )
    return StepTimes(exposed, hidden, again, np.concatenate([times.step for _, times in parts])[at])


SHARING = ("dp_replicate", "dp_shard", "zero", "offload", "tiling")
"""Choices of how replicas share state: where layouts differ in these alone they compute and send activations alike."""


def least_step_ns(job: Job, candidates: Candidates) -> Column:
    """A bound that no step is below, whole nanoseconds, (C,): all of the step but the traffic of dp, the update and offloading,
    which take no less than nothing. Layouts that differ in `SHARING` alone share it, so that a million layouts ask for some ten
    thousand steps. Under a calibration it is as much lower as the least factor."""
    one_of_each, sort = candidates.alike(*_read_by_the_bound(candidates))
    some = candidates.where(one_of_each)
    least = np.zeros(len(some))
    compute = Compute(job, some)
    for group in groups(job, some):
        work = _work(job, group, elements(job.model, group), compute)
        sends = _with_seconds(job, group, activation_traffic(job, group))
        found = _occupied(job, group, work, sends)
        least[group.rows] = found.seconds + straggling(job) * found.computing.min(axis=1)
    factors = job.on_parts
    roundings = len(TIME_TERMS) * (2 if factors else 1)  # every term is rounded, and again once it is multiplied
    rounded = np.floor(least * (NANO * least_factor(factors))).astype(np.int64) - roundings
    return np.asarray(np.maximum(0, rounded)[sort])


def stage_seconds_CS(job: Job, candidates: Candidates, stages: int) -> Reals:
    """What every stage is occupied for by one micro-batch, (C, S) for so many `stages`: computing, and what is sent meanwhile and nothing
    hides; infinite where a candidate has no such stage. Under GPipe and 1F1B of m micro-batches all of them together take
    (m - 1) max + sum over stages."""
    seconds = np.full((len(candidates), stages), np.inf)
    compute = Compute(job, candidates)
    for group in groups(job, candidates, every_stage=True):
        counts = elements(job.model, group)
        sends = _with_seconds(job, group, traffic(job, group, counts))
        seconds[group.rows, : group.pp] = _occupied(job, group, _work(job, group, counts, compute), sends).waits
    return seconds


def _read_by_the_bound(c: Candidates) -> tuple[str, ...]:
    left_out = SHARING[1:] if c.in_threads else SHARING  # what threads launch for each other counts
    if "depth" in c.columns:  # which numbers those of all stages
        left_out = (*left_out, *(name for name in c.columns if name.startswith(BY_STAGE)))
    return tuple(name for name in c.columns if name not in (*left_out, "mesh"))


def model_FLOP(job: Job) -> float:
    """Useful FLOP of one step: 6 per weight that a token meets (input embedding left out; of diffusion transformers, whose modulation is
    worked out once per sample and whose second stream is met by the other tokens, and of the towers of a pair the matrices of the layers alone), 4 where it is frozen beside adapters, and
    three passes of attention, recomputation not counted. Source: Chowdhery et al. 2022 (PaLM, arXiv 2204.02311, appendix B), causal half counted
    as computed."""
    shape = job.model
    outer = outer_parameters(shape)
    head = shape.vocab * shape.hidden if shape.tied else 0
    weights = float(_in_layers(shape) if shape.kind in _BESIDE else count(shape).active - outer.before + head)
    if shape.adapters is not None:
        weights -= (weights - job.trainable * count(shape).total) / 3.0
    attention = sum(
        number * attention_FLOP(shape, kind, job.workload.seq_len) for kind, number in layer_counts(shape).items()
    )
    return (6.0 * weights + 3.0 * attention) * job.workload.tokens_per_step


_BESIDE = ("dit", "dual-encoder")
"""Kinds of models with weights that most tokens do not meet. Source: Peebles and Xie 2023, arXiv 2212.09748, section 3.2 (adaLN); Esser et al.
2024, arXiv 2403.03206, section 4 (two streams); Radford et al. 2021, arXiv 2103.00020, section 2.4 (two towers)."""


def _in_layers(shape: ModelShape) -> int:
    """Weights of the matrices of all layers."""
    return sum(
        number * sum(matrix.parameters for matrix in build_layer(shape, kind).matrices)
        for kind, number in layer_counts(shape).items()
    )


def mfu(job: Job, step_seconds: float) -> float:
    """Model FLOP utilisation: useful FLOP over what all devices could do at their dense peak in that time."""
    peak = sum(g.count * g.node.gpus * (peak_FLOPs(g.node.gpu, _mfu_precision(job)) or 0.0) for g in job.cluster.groups)
    return model_FLOP(job) / (step_seconds * peak) if peak else 0.0


def _mfu_precision(job: Job) -> str:
    return job.workload.precision


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """Seconds per micro-batch and stage, (C, S), by term: both passes, and the recomputed share of the first."""

    forward: dict[str, Reals]
    backward: dict[str, Reals]
    again: dict[str, Reals]

    def pass_seconds(self, which: str) -> Reals:
        """Compute seconds of one pass over one micro-batch; recomputation belongs to backward."""
        parts = self.forward if which == "forward" else self.backward
        total = total_of(parts.values())
        return total if which == "forward" else total + total_of(self.again.values())

    def window(self, behind: Hidden) -> Reals:
        """Compute seconds over one micro-batch that traffic of one sort may run behind."""
        if behind == "attention":
            return self.forward["attention"] * 3.5
        if behind == "matmul":
            return total_of(part["matmul"] for part in (self.forward, self.backward, self.again))
        if behind == "compute":
            return self.pass_seconds("forward") + self.pass_seconds("backward")
        return self.pass_seconds(behind)

    def shares(self, behind: Hidden) -> Shares:
        """The part of that window in either pass."""
        if behind in ("forward", "backward"):
            return {behind: 1.0}
        ahead = self.forward["attention"] if behind == "attention" else self.forward["matmul"]
        if behind == "compute":
            ahead = self.pass_seconds("forward")
        window = self.window(behind)
        part = np.divide(ahead, window, out=np.zeros_like(window), where=window > 0)
        return {"forward": part, "backward": 1.0 - part}


def _work(job: Job, group: Group, counts: Elements, compute: Compute) -> _Work:
    times = compute.layers_of(group.rows)
    forward = {name: group.layers_of(value) for name, value in times.forward.items()}
    backward = {name: group.layers_of(value) for name, value in times.backward.items()}
    again = {name: group.redone_of(value) for name, value in times.again.items()}
    head, loss = (on_stages(seconds, group.is_last) for seconds in compute.ends_of(group.rows))
    forward["matmul"] = forward["matmul"] + head
    products = 1.0 + job.trainable if job.model.adapters is None else 1.0  # a frozen head has no gradient
    backward["matmul"] = backward["matmul"] + products * head
    added = job.trainable * counts.whole * job.profile.accumulate_bytes / memory_Bps(job.cluster.slowest.gpu)
    backward["elementwise"] = backward["elementwise"] + added
    forward["loss"], backward["loss"] = loss / 3.0, loss * 2.0 / 3.0
    return _Work(forward, backward, again)


def _group_terms(job: Job, group: Group, compute: Compute) -> dict[str, tuple[Reals, Reals, Reals]]:
    """(exposed, hidden, recomputed) seconds per step of every term, (C,) each, on the slowest stage."""
    counts = elements(job.model, group)
    work = _work(job, group, counts, compute)
    sends: list[_Sent] = []
    if (group.meshes.world > 1).any():  # a device alone sends nothing
        sends = _with_seconds(job, group, traffic(job, group, counts))
    found = _occupied(job, group, work, sends)
    exposed, hidden, every, micro = found.exposed, found.hidden, found.every, found.micro
    slowest = every.argmax(axis=1)
    rows = np.arange(len(slowest))

    def pick(value: Reals) -> Reals:
        there = value if value.shape == every.shape else np.broadcast_to(value, every.shape)
        return there[:, 0] if len(group.stages) == 1 else there[rows, slowest]

    terms: dict[str, tuple[Reals, Reals, Reals]] = {
        name: (pick(value), NONE, pick(micro * work.again[name]) if name in work.again else NONE)
        for name, value in found.busy.items()
    }
    terms |= {axis: (pick(exposed[axis]), pick(hidden[axis]), NONE) for axis in WITHIN if axis in exposed}
    if "dp" in exposed:
        terms["dp"] = (exposed["dp"].max(axis=1), hidden["dp"][rows, exposed["dp"].argmax(axis=1)], NONE)
    terms["bubble"] = (found.idle, NONE, NONE)
    if late := straggling(job):
        terms["straggler"] = (late * pick(found.computing), NONE, NONE)
    update, offload = _update(job, group, counts)
    terms["optimizer"], terms["offload"] = (update, NONE, NONE), (offload, NONE, NONE)
    return terms


WITHIN = ("tp", "cp", "ep", "pp")
"""Axes whose exposed traffic a stage waits for within its micro-batches."""


@dataclass(frozen=True, slots=True, eq=False)
class _Occupied:
    """Seconds per step and stage, (C, S): computing by term, exposed and hidden traffic by axis, and `every` second of
    computing and of what is sent within micro-batches, of which there are `micro`, (C, 1). `waits` are those of a micro-batch that
    other stages wait for."""

    group: Group
    busy: Mapping[str, Reals]
    exposed: Mapping[str, Reals]
    hidden: Mapping[str, Reals]
    every: Reals
    micro: Reals
    waits: Reals

    @property
    def computing(self) -> Reals:
        """Seconds per step that every stage computes for, (C, S)."""
        return total_of(self.busy.values())

    @property
    def idle(self) -> Reals:
        """What the slowest stage waits for the others, (C,)."""
        return bubble(self.group, self.waits)

    @property
    def seconds(self) -> Reals:
        """What the slowest stage is occupied for, and what it waits for the others, (C,)."""
        total: Reals = self.every.max(axis=1) + self.idle
        return total


def _occupied(job: Job, group: Group, work: _Work, sends: list[_Sent]) -> _Occupied:
    exposed, hidden = _communication(job, group, work, sends)
    micro = group.candidates["accumulation"][:, None].astype(np.float64)
    busy = {
        name: micro * (work.forward[name] + work.backward[name] + work.again.get(name, 0.0))
        for name in (*COMPUTE_TERMS, "loss")
        if name in work.forward
    }
    if "compression" in group.candidates.columns:
        for name, seconds in zip(("elementwise", "matmul"), _compression(job, group), strict=True):
            busy[name] = busy[name] + seconds
    every = total_of((*busy.values(), *(exposed[axis] for axis in WITHIN if axis in exposed)))
    waits = waited_for(group, every / micro, work.pass_seconds("forward"), _weight_seconds(job, work))
    return _Occupied(group, busy, exposed, hidden, every, micro, waits)


class _Sent(NamedTuple):
    """Collectives, the seconds per step that they take, (C, S), and whether they are between nodes, (C, 1)."""

    item: Traffic
    seconds: Reals
    leaves: Mask


def _with_seconds(job: Job, group: Group, items: Iterable[Traffic]) -> list[_Sent]:
    """Collectives with what they take."""
    own = links(job.cluster, group.meshes)
    between = own if job.all_machines is None else links(job.all_machines, group.meshes)
    found = []
    for item in (item for item in items if item.place != "server"):
        network = between if item.axis == "dp" else own
        leaves = network.leave(item.place)[group.mesh_of][:, None]
        found.append(_Sent(item, _seconds_CS(network, group, item), leaves))
    return found


def _compression(job: Job, group: Group) -> tuple[float, float]:
    """(elementwise, matmul) seconds per step of a hook of DDP."""
    from strategist.timing.compression import compression_seconds  # few ask for any

    return compression_seconds(job, group.candidates.compression)


def _seconds_CS(network: Links, group: Group, item: Traffic) -> Reals:
    """Seconds per step of one kind of collective, (C, S)."""
    latency, fill, per_byte = (cost[group.mesh_of][:, None] for cost in network.seconds(item.op, item.place))
    full = np.minimum(item.pieces_CS, item.payload_CS / FULL_BYTES)
    return item.count_CS * (item.pieces_CS * latency + full * fill + item.payload_CS * per_byte)


def _communication(
    job: Job, group: Group, work: _Work, sends: list[_Sent]
) -> tuple[dict[str, Reals], dict[str, Reals]]:
    """Exposed and hidden seconds per step of every axis that sends, (C, S) each.

    What may overlap shares the compute it hides behind; the first and last pieces (one layer's worth) never do. What is
    between nodes shares their ports too, whatever it hides behind: the last in turn has what is left of them.
    """
    zero: Reals = np.zeros((len(group.stages), len(group.candidates))).T
    axes = dict.fromkeys(sent.item.axis for sent in sends)
    exposed: dict[str, Reals] = {axis: np.zeros_like(zero) for axis in axes}
    hidden: dict[str, Reals] = {axis: np.zeros_like(zero) for axis in exposed}
    by_cover: dict[Hidden, list[_Sent]] = {}
    for sent in sends:
        by_cover.setdefault(_behind(job, sent.item), []).append(sent)
    for sent in by_cover.pop("nothing", ()):
        exposed[sent.item.axis] += sent.seconds
    free = 1.0 - share("contention_share", job.cluster.slowest.gpu)
    ports = Ports({which: _overlap(job) * work.pass_seconds(which) for which in ("forward", "backward")})
    shares_ports = len({axis for cover in by_cover.values() for axis in _leaving(cover)}) > 1
    for behind in (cover for cover in IN_TURN if cover in by_cover):
        members = by_cover[behind]
        total = total_of(sent.seconds for sent in members)
        rounds = _rounds(group, members)
        beside = _beside(job, group, work, behind, rounds, total)
        part = np.divide(total - free * beside, total, out=np.zeros_like(total), where=total > 0)
        for sent in members:
            exposed[sent.item.axis] += sent.seconds * part
            hidden[sent.item.axis] += sent.seconds * (1.0 - part)
        if shares_ports and any(sent.leaves.any() for sent in members):
            leaving = total_of(sent.seconds * sent.leaves for sent in members)
            each = np.divide(beside, total, out=np.zeros_like(total), where=total > 0)
            late = ports.too_much(leaving * each, rounds, work.shares(behind))
            again = free * np.divide(late, leaving, out=np.zeros_like(total), where=leaving > 0)
            for sent in members:
                exposed[sent.item.axis] += sent.seconds * sent.leaves * again
                hidden[sent.item.axis] -= sent.seconds * sent.leaves * again
    return exposed, hidden


def _leaving(members: list[_Sent]) -> set[str]:
    """Axes of those collectives that some layouts send between nodes."""
    return {sent.item.axis for sent in members if sent.leaves.any()}


def _behind(job: Job, item: Traffic) -> Hidden:
    """What an item runs behind under the framework's habits: some reduce gradients or gather weights in the open, some
    cut tensor-parallel products so that their collectives run behind them, some send while they compute."""
    hides = job.profile.hides
    if item.axis == "tp":
        return "matmul" if "tensor" in hides and item.op in ("all_gather", "reduce_scatter") else "nothing"
    if item.axis == "pp":
        return "compute" if "pipeline" in hides else "nothing"
    if item.axis == "dp" and item.behind == "nothing":
        return "forward" if "updates" in hides else "nothing"
    if item.axis == "dp":
        wanted = "weights" if item.op == "all_gather" else "gradients"
        return item.behind if wanted in hides else "nothing"
    return item.behind


def _overlap(job: Job) -> float:
    """The share of compute that anything may run behind."""
    return min(1.0, job.overlap * share("overlap_share", job.cluster.slowest.gpu))


def _rounds(group: Group, members: list[_Sent]) -> Reals:
    """In how many micro-batches of a step such collectives are sent, (C, S)."""
    micro = group.candidates["accumulation"][:, None]
    return reduce(np.maximum, [np.minimum(sent.item.count_CS, micro) for sent in members])


def _beside(job: Job, group: Group, work: _Work, behind: Hidden, rounds: Reals, total: Reals) -> Reals:
    """Seconds that run beside compute, (C, S): all but the first piece, as far as there is compute to hide behind. Of them compute
    loses a part to the processors that collectives occupy."""
    available = _overlap(job) * work.window(behind) * rounds
    return np.minimum(total * (1.0 - _first_piece(group, behind)), available)


def _first_piece(group: Group, behind: Hidden) -> Reals:
    """The share of the traffic that nothing runs beside: one layer's, one of tp pieces of a product, or the sends of
    every chunk where there is one chunk a stage and its neighbour waits for it, (C, S)."""
    c = group.candidates
    one_layer: Reals = (1.0 / np.maximum(1, group.layers_SK.sum(axis=1)))[None, :]
    if behind == "matmul":
        return (1.0 / c["tp"])[:, None]
    if behind == "compute":
        return np.where(c["virtual_stages"][:, None] > 1, one_layer, 1.0)
    return one_layer


def _weight_seconds(job: Job, work: _Work) -> Reals:
    """Seconds of the gradients of weights of one micro-batch, (C, S): the part of the products of a backward pass that nobody
    waits for (Qi et al. 2023, arXiv 2401.10241, section 2: T_W)."""
    return work.backward["matmul"] * (job.trainable / (1.0 + job.trainable))


def waited_for(group: Group, per_micro_CS: Reals, forward_CS: Reals, weights_CS: Reals) -> Reals:
    """Seconds of a micro-batch on a stage that other stages wait for and idle, (C, S).

    All of it for GPipe and 1F1B (Huang et al. 2019, arXiv 1811.06965; Narayanan et al. 2021, arXiv 2104.04473, section 2.2), interleaved
    and looped breadth-first. ZB-H1 neither waits for the gradients of weights nor idles while it makes them: T_F + T_B - T_W instead of
    T_F + T_B + T_W (Qi et al. 2023, arXiv 2401.10241, table 1), as long as T_W is no more than T_B. ZBV would not idle at all where all
    three are equal (section 6); torch's order of it begins each second run's first backward passes T_B late once for each stage:
    T_B, as long as no other part is longer. DualPipeV (DeepSeek-AI 2024, arXiv 2412.19437, table 2, of twice as many ranks: F&B + B - 3 W) in
    torch, which runs what it pairs one behind the other and sends both results after it: T_F + T_B - T_W + max(T_F, T_B - T_F / (pp - 1)),
    as long as T_W is no more than T_F and that no more than T_B.
    """
    schedules = group.candidates
    splits, in_a_v, in_pairs = (schedules.is_word("schedule", word)[:, None] for word in ("zb_h1", "zbv", "dualpipev"))
    if splits.any():
        per_micro_CS = per_micro_CS - np.where(splits, 2.0 * weights_CS, 0.0)
    if in_a_v.any():
        per_micro_CS = np.where(in_a_v, per_micro_CS - forward_CS - weights_CS, per_micro_CS)
    if in_pairs.any():
        inputs = per_micro_CS - forward_CS - weights_CS
        later = np.maximum(forward_CS, inputs - forward_CS / max(1, group.pp - 1))
        per_micro_CS = np.where(in_pairs, per_micro_CS - 2.0 * weights_CS + later, per_micro_CS)
    return per_micro_CS


def bubble(group: Group, waits_CS: Reals) -> Reals:
    """Idle seconds of the slowest stage, (C,): what is waited for of one micro-batch on every other stage, once.

    (m - 1) max + sum over stages for GPipe and 1F1B; divided by the virtual stages when interleaved (Narayanan et al. 2021, arXiv
    2104.04473, section 2.2.2), looped breadth-first (Lamy-Poirier 2023, arXiv 2211.05953) or in a V.
    """
    if group.pp == 1:
        return np.zeros(len(waits_CS))
    idle = waits_CS @ group.stands_for - waits_CS.max(axis=1)
    return np.maximum(0.0, idle / group.candidates["virtual_stages"])


def _update(job: Job, group: Group, counts: Elements) -> tuple[Reals, Reals]:
    """Seconds of the update and of offloading, (C,) each, on the stage that owns most."""
    c = group.candidates
    whole, sharded = counts.whole.max(axis=1), counts.sharded.max(axis=1)
    owned = np.where(c["zero"] >= 1, sharded, whole)
    trained = job.trainable * owned
    if c.serves_tables:
        from strategist.timing.served import served_seconds  # few ask for any

        return update_seconds(job, c, trained), served_seconds(job, c)
    if job.workload.optimizer == "muon":
        from strategist.timing.muon import muon_seconds  # few ask for any

        return muon_seconds(job, group, counts), offload_seconds(job, c, trained)
    return update_seconds(job, c, trained), offload_seconds(job, c, trained)
