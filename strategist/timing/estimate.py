"""The sum: where the seconds of one optimizer step go. Columns of candidates (C); every second has one home."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from strategist.columns import on_stages, rows_of
from strategist.document.estimate import TIME_TERMS
from strategist.facts.attention import attention_FLOP
from strategist.facts.hardware import Cluster
from strategist.facts.job import Job
from strategist.facts.model import LOOKED_UP, ModelShape, layer_counts
from strategist.facts.parameters import count, outer_parameters, over_matrices
from strategist.records import dataclass
from strategist.space.candidates import BY_STAGE, Candidates, Column, Mask, Reals, total_of
from strategist.space.engines import as_run
from strategist.space.shares import Elements, Group, Sorts, elements, groups, length_of, target_share
from strategist.space.traffic import (
    Hidden,
    Traffic,
    activation_traffic,
    traffic,
    traffic_between,
    traffic_within,
    unit_collectives,
)
from strategist.timing.calibrated import LONGEST_NS, counted, least_factor, scaled
from strategist.timing.collectives import FULL_BYTES, costs, leaving, merged_seconds
from strategist.timing.compute import COMPUTE_TERMS, Compute
from strategist.timing.mixed import paced_jobs
from strategist.timing.optimizer import offload_seconds, update_seconds
from strategist.timing.ports import IN_TURN, Ports, Shares
from strategist.timing.rates import memory_Bps, peak_FLOPs, share
from strategist.timing.sorts import has_sorts, sorts_between, sorts_within
from strategist.timing.stragglers import straggling

NANO = 1e9
NONE: Reals = np.zeros(())
"""No seconds, whatever the candidate."""
Terms = Mapping[str, tuple[Reals, Reals, Reals]]
"""(exposed, hidden, recomputed) seconds per step of every term, (C,) each."""


@dataclass(frozen=True, slots=True, eq=False)
class StepTimes:
    """Per candidate (C): exposed, hidden and recomputed nanoseconds by term, and the step as their exact sum."""

    exposed: Mapping[str, Column]
    hidden: Mapping[str, Column]
    again: Mapping[str, Column]
    step: Column


def step_times(job: Job, candidates: Candidates) -> StepTimes:
    """The time of one optimizer step of every candidate; on nodes of several kinds that of the kind which all others wait for."""
    return as_run(_of_one_engine, job, candidates)


def _of_one_engine(job: Job, candidates: Candidates) -> StepTimes:
    every = [_step_times(paced, candidates) for paced in paced_jobs(job)]
    return every[0] if len(every) == 1 else _of_the_last(every)


def _of_the_last(every: Sequence[StepTimes]) -> StepTimes:
    """The times of the kind that is last, for every candidate."""
    last = np.argmax([times.step for times in every], axis=0)[None]

    def chosen(columns: Iterable[Column]) -> Column:
        picked: Column = np.take_along_axis(np.stack(list(columns)), last, axis=0)[0]
        return picked

    exposed, hidden, again = (
        {name: chosen(getattr(times, kind)[name] for times in every) for name in TIME_TERMS}
        for kind in ("exposed", "hidden", "again")
    )
    return StepTimes(exposed, hidden, again, chosen(times.step for times in every))


def _step_times(job: Job, candidates: Candidates) -> StepTimes:
    """The same where all nodes are alike, or those of one kind set the pace."""
    size = len(candidates)
    nothing = np.zeros(size, np.int64)
    exposed, hidden, again = (dict.fromkeys(TIME_TERMS, nothing) for _ in range(3))
    compute = Compute(job, candidates)
    for group in groups(job, candidates):
        found: dict[tuple[int, str], Column] = {}
        for place, terms in _group_terms(job, group, compute):
            for name, kinds in terms.items():
                for kind, seconds in enumerate(kinds):
                    if seconds is not NONE:
                        rounded = counted(seconds * NANO)
                        own = rounded if place is None else rounded.take(place)
                        found[kind, name] = (
                            found[kind, name] + own if (kind, name) in found else own
                        )  # host has two homes
        for (kind, name), column in found.items():
            whole = (exposed, hidden, again)[kind]
            if whole[name] is nothing:
                whole[name] = np.zeros(size, np.int64)
            whole[name][group.rows] = column
    if factors := job.on_parts:
        exposed, hidden, again = (scaled(terms, factors) for terms in (exposed, hidden, again))
    step: Column = nothing + total_of(column for column in exposed.values() if column is not nothing)
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
    return as_run(_least_of_one_engine, job, candidates)


def _least_of_one_engine(job: Job, candidates: Candidates) -> Column:
    one_of_each, sort = candidates.alike(*_read_by_the_bound(candidates))
    some = candidates.where(one_of_each)
    return np.asarray(reduce(np.maximum, [_least_step_ns(paced, some) for paced in paced_jobs(job)])[sort])


def _least_step_ns(job: Job, some: Candidates) -> Column:
    """The same of some candidates that share nothing."""
    least = np.zeros(len(some))
    compute = Compute(job, some)
    for group in groups(job, some):
        work = _work(job, group, elements(job.model, group).whole, compute)
        sends = _with_seconds(job.cluster, group, activation_traffic(job, group))
        found = _occupied(job, group, work, sends, _shared_ports(job, work, sends))
        least[group.rows] = found.seconds + straggling(job) * found.computing.min(axis=1)
    factors = job.on_parts
    roundings = len(TIME_TERMS) * (2 if factors else 1)  # every term is rounded, and again once it is multiplied
    longest = np.minimum(least * (NANO * least_factor(factors)), LONGEST_NS)
    rounded = np.floor(longest).astype(np.int64) - roundings
    return np.maximum(0, rounded)


def stage_seconds_CS(job: Job, candidates: Candidates, stages: int) -> Reals:
    """What every stage is occupied for by one micro-batch, (C, S) for so many `stages`: computing, and what is sent meanwhile and nothing
    hides; infinite where a candidate has no such stage. Under GPipe and 1F1B of m micro-batches all of them together take
    (m - 1) max + sum over stages. On nodes of several kinds each stage is on the one that takes longest for it."""

    def slowest(own: Job, some: Candidates) -> Reals:
        return reduce(np.maximum, [_stage_seconds_CS(paced, some, stages) for paced in paced_jobs(own)])

    return as_run(slowest, job, candidates)


def _stage_seconds_CS(job: Job, candidates: Candidates, stages: int) -> Reals:
    seconds = np.full((len(candidates), stages), np.inf)
    compute = Compute(job, candidates)
    for group in groups(job, candidates, every_stage=True):
        counts = elements(job.model, group)
        work = _work(job, group, counts.whole, compute)
        within, _ = _within_and_between(job, group, counts, None)
        seconds[group.rows, : group.pp] = _occupied(job, group, work, within, _shared_ports(job, work, within)).waits
    return seconds


def _read_by_the_bound(c: Candidates) -> tuple[str, ...]:
    left_out = SHARING[1:] if c.in_threads else SHARING  # what threads launch for each other counts
    if "depth" in c.columns:  # which numbers those of all stages
        left_out = (*left_out, *(name for name in c.columns if name.startswith(BY_STAGE)))
    return tuple(name for name in c.columns if name not in (*left_out, "mesh"))


def model_FLOP(job: Job) -> float:
    """Useful FLOP of one step: 6 per weight that a token meets (input embedding left out; of diffusion transformers, whose modulation is
    worked out once per sample and whose second stream is met by the other tokens, and of the towers of a pair the matrices of the layers alone), 4 where it is frozen, and
    three passes of attention, recomputation not counted; of a convolution 6 per weight and position. Source: Chowdhery et al. 2022 (PaLM, arXiv 2204.02311, appendix B), causal half counted
    as computed."""
    shape = job.model
    outer = outer_parameters(shape)
    further = _at_further_positions(shape)
    head = shape.vocab * shape.hidden if shape.tied else 0
    weights = float(_in_layers(shape) if shape.kind in _BESIDE else count(shape).active - outer.before + head)
    weights -= dict(shape.extra).get(LOOKED_UP, 0)
    if shape.adapters is not None or shape.frozen:
        weights -= max(0.0, weights - job.trainable * count(shape).total) / 3.0
    attention, inputs = 0.0, job.workload.seq_len
    for kind, number in layer_counts(shape).items():
        per_token = attention_FLOP(shape, kind, length_of(job, kind), inputs)
        attention += number * per_token * length_of(job, kind) / inputs
    unmet = (1.0 - target_share(job)) * _met_by_targets(shape) if shape.enc_layers else 0.0
    return (6.0 * (weights + further - unmet) + 3.0 * attention) * job.workload.tokens_per_step


def _met_by_targets(shape: ModelShape) -> int:
    """Weights of matrices that the tokens of a decoder behind an encoder meet: the head's, and those of its layers that do not read what the encoder gave."""
    return shape.vocab * shape.hidden + over_matrices(shape, lambda matrix: matrix.weights * matrix.of_targets)


def _at_further_positions(shape: ModelShape) -> int:
    """Products per weight of a convolution that are not the first, summed over all of them: one weight meets every position of a sample."""
    return over_matrices(shape, lambda matrix: (matrix.positions - 1) * matrix.weights)


_BESIDE = ("dit", "dual-encoder")
"""Kinds of models with weights that most tokens do not meet. Source: Peebles and Xie 2023, arXiv 2212.09748, section 3.2 (adaLN); Esser et al.
2024, arXiv 2403.03206, section 4 (two streams); Radford et al. 2021, arXiv 2103.00020, section 2.4 (two towers)."""


def _in_layers(shape: ModelShape) -> int:
    """Weights of the matrices of all layers."""
    return over_matrices(shape, lambda matrix: matrix.parameters)


def mfu(job: Job, step_seconds: float) -> float:
    """Model FLOP utilisation: useful FLOP over what all devices could do at their dense peak in that time."""
    peak = sum(
        g.count * g.node.gpus * (peak_FLOPs(g.node.gpu, job.workload.precision) or 0.0) for g in job.cluster.groups
    )
    return model_FLOP(job) / (step_seconds * peak) if peak else 0.0


BOTH_PASSES: tuple[Hidden, ...] = ("compute", "pairs")
"""Covers that are all compute of a micro-batch."""


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """Seconds per micro-batch and stage, (C, S), by term: both passes, and the recomputed share of the first. `leads` are those that the
    host is ahead of its device in forward and in backward; `ends` those of forward's head and loss."""

    forward: dict[str, Reals]
    backward: dict[str, Reals]
    again: dict[str, Reals]
    leads: tuple[Reals, Reals]
    ends: Reals

    def pass_seconds(self, which: str) -> Reals:
        """Compute seconds of one pass over one micro-batch; recomputation belongs to backward."""
        parts = self.forward if which == "forward" else self.backward
        total = total_of(parts.values())
        return total if which == "forward" else total + total_of(self.again.values())

    def window(self, behind: Hidden) -> Reals:
        """Compute seconds over one micro-batch that traffic of one sort may run behind."""
        if behind in ("attention", "matmul"):
            return total_of(part[behind] for part in (self.forward, self.backward, self.again))
        if behind in BOTH_PASSES:
            return self.pass_seconds("forward") + self.pass_seconds("backward")
        return self.in_layers if behind == "forward" else self.pass_seconds(behind)

    @property
    def in_layers(self) -> Reals:
        """Compute seconds of forward until the head, which every weight is there for and nothing is gathered behind."""
        return self.pass_seconds("forward") - self.ends

    def shares(self, behind: Hidden) -> Shares:
        """The part of that window in either pass."""
        if behind in ("forward", "backward"):
            return {behind: 1.0}
        ahead = self.pass_seconds("forward") if behind in BOTH_PASSES else self.forward[behind]
        window = self.window(behind)
        part = np.divide(ahead, window, out=np.zeros_like(window), where=window > 0)
        return {"forward": part, "backward": 1.0 - part}


def _work(job: Job, group: Group, whole: Reals, compute: Compute) -> _Work:
    """What stages work on that hold `whole` elements, (C, S)."""
    times = compute.layers_of(group.rows)
    forward = {name: group.layers_of(value) for name, value in times.forward.items()}
    backward = {name: group.layers_of(value) for name, value in times.backward.items()}
    again = {name: group.redone_of(value) for name, value in times.again.items()}
    head, loss = (on_stages(seconds, group.is_last) for seconds in compute.ends_of(group.rows))
    products = 1.0 + job.trainable if job.model.adapters is None else 1.0  # a frozen head has no gradient
    added = job.trainable * whole * job.profile.accumulate_bytes / memory_Bps(job.cluster.slowest.gpu)
    backward["elementwise"] = backward["elementwise"] + added
    leads = np.zeros_like(head), np.zeros_like(head)
    if job.profile.kernels.catches_up and not job.profile.launches_wait:
        leads = _wait_for_host(forward, backward, again, (1.0 + products) * head + loss)
    forward["matmul"] = forward["matmul"] + head
    backward["matmul"] = backward["matmul"] + products * head
    forward["loss"], backward["loss"] = loss / 3.0, loss * 2.0 / 3.0
    return _Work(forward, backward, again, leads, head + loss / 3.0)


def _wait_for_host(
    forward: dict[str, Reals], backward: dict[str, Reals], again: dict[str, Reals], ends: Reals
) -> tuple[Reals, Reals]:
    """Of what the host takes to issue a micro-batch leave what the device waits for: in forward what is not issued while its layers run, in
    backward, and what runs again, what is not issued while they and head and loss run, which take `ends` seconds and few kernels. The
    seconds that the host is ahead in either."""
    first = forward["host"] - _busy(forward)
    second = backward["host"] + again["host"] - _busy(backward) - _busy(again) - ends
    forward["host"], waits = np.maximum(0.0, first), np.maximum(0.0, second)
    again["host"] = np.minimum(np.maximum(0.0, again["host"] - _busy(again)), waits)
    backward["host"] = waits - again["host"]
    return np.maximum(0.0, -first), np.maximum(0.0, -second)


def _busy(layers: Mapping[str, Reals]) -> Reals:
    """What a device works for."""
    return total_of(seconds for name, seconds in layers.items() if name != "host")


def _group_terms(job: Job, group: Group, compute: Compute) -> Iterator[tuple[Column | None, Terms]]:
    """Terms on the slowest stage, of one candidate of each sort beside the place of every candidate's sort, or of all candidates."""
    counts = elements(job.model, group)
    alike = sorts_within(job, group) if has_sorts(job, group) else None
    part, whole = (group, counts.whole) if alike is None else (alike.group, counts.of(alike.firsts).whole)
    work = _work(job, part, whole, compute)
    sends = (group.meshes.world > 1).any()  # a device alone sends nothing
    within, between = _within_and_between(job, group, counts, alike) if sends else ([], None)
    place = None if alike is None else alike.place
    ports = _shared_ports(job, work, within, [] if between is None else between.sends)
    yield place, _terms_within(job, _occupied(job, part, work, within, ports), work)
    shared = NONE
    if between is not None:
        shared, behind, _ = _terms_between(job, between, work, place, ports)
        yield None, {"dp": (shared, behind, NONE)}
    if job.profile.kernels.unit_s:
        yield None, {"host": (np.maximum(0.0, _issue_of_units(job, group, work, place) - shared), NONE, NONE)}
    update, offload = _update(job, group, counts)
    yield None, {"optimizer": (update, NONE, NONE), "offload": (offload, NONE, NONE)}


def _issue_of_units(job: Job, group: Group, work: _Work, place: Column | None) -> Reals:
    """Seconds per step, (C,), in which devices wait for hosts that gather and reduce units of weights, each of which takes `unit_s`, beyond
    what these are ahead; on the stage that waits longest. Traffic of dp that devices wait for goes on meanwhile."""
    micro, each = group.candidates["accumulation"][:, None], job.profile.kernels.unit_s
    waits = [
        np.maximum(0.0, each * calls - micro * _spread(lead, place))
        for calls, lead in zip(unit_collectives(job, group), work.leads, strict=True)
    ]
    return np.asarray(total_of(waits).max(axis=1))


class _Sent(NamedTuple):
    """Collectives, the seconds per step that they take, (C, S), and whether they are between nodes, (C, 1)."""

    item: Traffic
    seconds: Reals
    leaves: Mask


Sends = list[_Sent]


def _shared_ports(job: Job, work: _Work, *every: Sends) -> Ports | None:
    """The ports between nodes where traffic of more than one axis takes them behind compute; none where they are no matter."""
    hidden = (sent for sends in every for sent in sends if _behind(job, sent.item) != "nothing")
    if len({sent.item.axis for sent in hidden if sent.leaves.any()}) < 2:
        return None
    return Ports({which: _overlapping(job, work.pass_seconds(which)) for which in ("forward", "backward")})


@dataclass(frozen=True, slots=True, eq=False)
class _Between:
    """Collectives between replicas of a group's candidates, or of one of each sort with the `place` of every candidate's."""

    group: Group
    sends: Sends
    place: Column | None

    def spread(self, values: Any) -> Any:
        """The same of all candidates."""
        return _spread(values, self.place)


def _spread(values: Reals, place: Column | None) -> Reals:
    return values if place is None else np.asarray(rows_of(values, place))


def _within_and_between(job: Job, group: Group, counts: Elements, alike: Sorts | None) -> tuple[Sends, _Between | None]:
    """Collectives within replicas, of one candidate of each sort where there are sorts, and between them."""
    own, others = job.cluster, job.all_machines or job.cluster
    if alike is None:
        every = traffic(job, group, counts)
        sends = _with_seconds(others, group, [item for item in every if item.axis == "dp"])
        return _with_seconds(own, group, [item for item in every if item.axis != "dp"]), _Between(group, sends, None)
    within = _with_seconds(own, alike.group, traffic_within(job, alike.group))
    apart = sorts_between(job, group)
    part, place = (group, None) if apart is None else (apart.group, apart.place)
    part_counts = counts if apart is None else counts.of(apart.firsts)
    return within, _Between(part, _with_seconds(others, part, traffic_between(job, part, part_counts)), place)


def _terms_within(job: Job, found: _Occupied, work: _Work) -> Terms:
    """Terms of computing, of traffic within a replica and of waiting."""
    every, micro = found.every, found.micro
    slowest = every.argmax(axis=1)
    entry = slowest * len(slowest) + np.arange(len(slowest))  # where stages lie one behind the other

    def pick(value: Reals) -> Reals:
        there = value if value.shape == every.shape else np.broadcast_to(value, every.shape)
        return _entries_of(there, entry)

    terms: dict[str, tuple[Reals, Reals, Reals]] = {
        name: (pick(value), NONE, pick(micro * work.again[name]) if name in work.again else NONE)
        for name, value in found.busy.items()
    }
    terms |= {
        axis: (pick(found.exposed[axis]), pick(found.hidden[axis]), NONE) for axis in WITHIN if axis in found.exposed
    }
    terms["bubble"] = (found.idle, NONE, NONE)
    if late := straggling(job):
        terms["straggler"] = (late * pick(found.computing), NONE, NONE)
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


def _occupied(job: Job, group: Group, work: _Work, sends: Sends, ports: Ports | None) -> _Occupied:
    exposed, hidden = _communication(job, group, work, sends, ports)
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
    alone = every + hidden["ep"] if "ep" in hidden else every  # while stages wait there is no opposite pass
    waits = waited_for(group, alone / micro, work.pass_seconds("forward"), _weight_seconds(job, work))
    return _Occupied(group, busy, exposed, hidden, every, micro, waits)


def _with_seconds(network: Cluster, group: Group, items: Iterable[Traffic]) -> Sends:
    """Collectives with what they take."""
    at = group.mesh_at[group.mesh_of]
    return [
        _Sent(item, _seconds_CS(network, group, item), leaving(network, item.place, group.every_mesh).take(at)[:, None])
        for item in items
        if item.place != "server" and item.count_CS.any()
    ]


def _compression(job: Job, group: Group) -> tuple[float, float]:
    """(elementwise, matmul) seconds per step of a hook of DDP."""
    from strategist.timing.compression import compression_seconds  # few ask for any

    return compression_seconds(job, group.candidates.compression)


def _seconds_CS(network: Cluster, group: Group, item: Traffic) -> Reals:
    """Seconds per step of one kind of collective, (C, S)."""
    every, at = costs(network, item.op, item.place, group.every_mesh), group.mesh_at[group.mesh_of]
    latency, fill, walk, otherwise, per_byte = (cost.take(at)[:, None] for cost in every)
    if item.merges is not None:
        per_byte = merged_seconds(network, item.merges, group.every_mesh).take(at)[:, None]
    full = np.minimum(item.pieces_CS, item.payload_CS / FULL_BYTES)
    once = item.pieces_CS * latency + full * fill + item.payload_CS * per_byte
    if walk.any():
        once = once + np.minimum(item.pieces_CS * walk, item.payload_CS * otherwise)
    return item.count_CS * once


def _communication(
    job: Job, group: Group, work: _Work, sends: Sends, ports: Ports | None
) -> tuple[dict[str, Reals], dict[str, Reals]]:
    """Exposed and hidden seconds per step of every axis that sends, (C, S) each.

    What may overlap shares the compute it hides behind; the first and last pieces (one layer's worth) never do. What is
    between nodes shares their `ports` too, whatever it hides behind: the last in turn has what is left of them.
    """
    zero: Reals = np.zeros((len(group.stages), len(group.candidates))).T
    axes = dict.fromkeys(sent.item.axis for sent in sends)
    exposed: dict[str, Reals] = {axis: np.zeros_like(zero) for axis in axes}
    hidden: dict[str, Reals] = {axis: np.zeros_like(zero) for axis in exposed}
    in_the_open, covers = _covers(job, group, sends)
    for sent in in_the_open:
        exposed[sent.item.axis] += sent.seconds
    for cover in covers:
        beside = cover.beside(_overlapping(job, work.window(cover.behind)))
        part = cover.exposed_part(job, beside)
        for sent in cover.members:
            exposed[sent.item.axis] += sent.seconds * part
            hidden[sent.item.axis] += sent.seconds * (1.0 - part)
        for axis, late in cover.late(job, ports, beside, work.shares):
            exposed[axis] += late
            hidden[axis] -= late
    return exposed, hidden


def _terms_between(
    job: Job, between: _Between, work: _Work, place: Column | None, ports: Ports | None
) -> tuple[Reals, Reals, Reals]:
    """Seconds per step of what replicas send each other, exposed and hidden on the stage where most is exposed, and none recomputed; `place`
    is that of every candidate among those of `work` and of what their `ports` carry already."""
    in_the_open, covers = _covers(job, between.group, between.sends)
    size = len(between.group.rows) if between.place is None else len(between.place)
    shown: Reals = np.zeros((len(between.group.stages), size)).T
    if in_the_open:
        shown += between.spread(total_of(sent.seconds for sent in in_the_open))
    left = ports if ports is None or place is None else ports.each(lambda values: _spread(values, place))
    shared: list[tuple[Reals, Reals | None]] = []
    for cover in (cover.each(between.spread) for cover in covers):
        beside = cover.beside(_spread(_overlapping(job, work.window(cover.behind)), place))
        part = cover.exposed_part(job, beside)
        for sent in cover.members:
            shown += sent.seconds * part
            shared.append((sent.seconds, part))
        for _, late in cover.late(job, left, beside, work.shares):
            shown += late
            shared.append((late, None))
    stage = shown.argmax(axis=1)
    entry = stage * size + np.arange(size)  # where stages lie one behind the other
    behind = np.zeros(size)
    for seconds, part_ in shared:
        there = _entries_of(seconds, entry)
        behind += -there if part_ is None else there * (1.0 - _entries_of(part_, entry))
    return _entries_of(shown, entry), behind, NONE


def _entries_of(values_CS: Reals, entry: Column) -> Reals:
    """Entries of a column of candidates and stages, counted stage by stage."""
    return np.asarray(values_CS.ravel("F").take(entry))


def _overlapping(job: Job, window: Reals) -> Reals:
    """The part of a window that traffic may run behind."""
    return min(1.0, job.overlaps * share("overlap_share", job.cluster.slowest.gpu)) * window


@dataclass(frozen=True, slots=True, eq=False)
class _Cover:
    """Traffic that may run behind one sort of compute, (C, S) each: its `members` with their seconds, the `total` of these, the `rest` behind
    the first piece, and how often in a step some of it may run."""

    behind: Hidden
    members: Sends
    total: Reals
    rest: Reals
    rounds: Reals

    def beside(self, window: Reals) -> Reals:
        """Seconds that run beside compute: all but the first piece, as far as there is compute to hide behind."""
        return np.minimum(self.rest, window * self.rounds)

    def exposed_part(self, job: Job, beside: Reals) -> Reals:
        """The share of the traffic that does not run behind compute, and what compute loses meanwhile to the processors that collectives
        occupy."""
        kept = self.total - _free(job) * beside
        return np.divide(kept, self.total, out=np.zeros_like(self.total), where=self.total > 0)

    def late(
        self, job: Job, ports: Ports | None, beside: Reals, shares: Callable[[Hidden], Shares]
    ) -> Iterator[tuple[str, Reals]]:
        """Axes with what of their traffic would run beside compute and finds the ports between nodes taken."""
        if ports is None or not any(sent.leaves.any() for sent in self.members):
            return
        between_nodes = total_of(sent.seconds * sent.leaves for sent in self.members)
        each = np.divide(beside, self.total, out=np.zeros_like(self.total), where=self.total > 0)
        too_much = ports.too_much(between_nodes * each, self.rounds, shares(self.behind))
        again = _free(job) * np.divide(too_much, between_nodes, out=np.zeros_like(self.total), where=between_nodes > 0)
        for sent in self.members:
            yield sent.item.axis, sent.seconds * sent.leaves * again

    def each(self, function: Callable[[Any], Any]) -> _Cover:
        """The same of every column; members that take no time are left out."""
        members = [
            _Sent(item, function(seconds), function(leaves)) for item, seconds, leaves in self.members if seconds.any()
        ]
        return _Cover(self.behind, members, *(function(part) for part in (self.total, self.rest, self.rounds)))


def _last_of_chunks(c: Candidates) -> Reals:
    """How many micro-batches' backward a stage computes after the first gradients of its last chunk are whole, and forward before the weights of
    that chunk are read, (C,): a micro-batch, and of interleaved chunks, which run pp micro-batches in turn, those of a turn for every
    other chunk (NVIDIA/Megatron-LM: megatron/core/pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving: grad_sync_func
    once a chunk's last micro-batch is through, param_sync_func of the next chunk when one begins). Of units, FSDP's backward of a chunk ends
    with a wait for its reductions (pytorch/pytorch: torch/distributed/fsdp/_fully_shard/_fsdp_state.py, _root_post_backward_final_callback)."""
    chunks = np.where(c.is_word("schedule", "interleaved"), c["virtual_stages"], 1)
    turn = np.minimum(c["pp"], c["accumulation"])
    found: Reals = (1.0 + (chunks - 1.0) * turn) / chunks
    return found


def _free(job: Job) -> float:
    """What of compute is left to it where collectives run beside it."""
    return 1.0 - share("contention_share", job.cluster.slowest.gpu)


def _covers(job: Job, group: Group, sends: Sends) -> tuple[Sends, list[_Cover]]:
    """Traffic in the open, and what may run behind compute, in the order in which it gets the ports."""
    by_cover: dict[Hidden, Sends] = {}
    for sent in sends:
        by_cover.setdefault(_behind(job, sent.item), []).append(sent)
    in_the_open, micro = by_cover.pop("nothing", []), group.candidates["accumulation"][:, None]
    covers = []
    for behind in (cover for cover in IN_TURN if cover in by_cover):
        members = by_cover[behind]
        total = total_of(sent.seconds for sent in members)
        rounds = reduce(np.maximum, [np.minimum(sent.item.count_CS, micro) for sent in members])
        if behind in ("forward", "backward") and not job.profile.has_units:
            rounds = np.maximum(rounds, _last_of_chunks(group.candidates)[:, None])
        usual = _first_piece(group, behind)
        rest = total_of(
            sent.seconds * (1.0 - (usual if sent.item.first_CS is None else sent.item.first_CS)) for sent in members
        )
        covers.append(_Cover(behind, members, total, rest, rounds))
    return in_the_open, covers


def _behind(job: Job, item: Traffic) -> Hidden:
    """What an item runs behind under the framework's habits: some reduce gradients or gather weights in the open, some
    cut tensor-parallel products so that their collectives run behind them, some send while they compute."""
    hides = job.profile.hides
    if item.axis == "tp":
        return "matmul" if "tensor" in hides and item.op in ("all_gather", "reduce_scatter") else "nothing"
    if item.axis == "pp":
        return "compute" if "pipeline" in hides else "nothing"
    if item.axis == "ep":
        return "pairs" if "experts" in hides else "nothing"
    if item.axis == "dp" and item.behind == "nothing":
        return "forward" if "updates" in hides else "nothing"
    if item.axis == "dp":
        wanted = "weights" if item.op == "all_gather" else "gradients"
        return item.behind if wanted in hides else "nothing"
    return item.behind


def _first_piece(group: Group, behind: Hidden) -> Reals:
    """The share of traffic that nothing runs beside where the traffic does not say: one layer's, one of tp pieces of a product, the sends of
    every chunk where there is one chunk a stage and its neighbour waits for it, or that of passes without an opposite one, (C, S)."""
    c = group.candidates
    one_layer: Reals = (1.0 / np.maximum(1, group.layers_S))[None, :]
    if behind == "matmul":
        return (1.0 / c["tp"])[:, None]
    if behind == "pairs":
        return _alone(c)[:, None]
    if behind == "compute":
        return np.where(c["virtual_stages"][:, None] > 1, one_layer, 1.0)
    return one_layer


def _alone(c: Candidates) -> Reals:
    """The share of the forward passes of a stage's chunks before its first backward pass, and as many behind the last: one, and on every rank of
    interleaved stages pp for all chunks but the last (NVIDIA/Megatron-LM d98e8a6: megatron/core/pipeline_parallel/schedules.py,
    get_pp_rank_microbatches with overlap_moe_expert_parallel_comm, on the last rank; others wait while they have more)."""
    first = (c["virtual_stages"] - 1) * c["pp"] + 1.0
    share_alone: Reals = np.minimum(1.0, first / (c["accumulation"] * c["virtual_stages"]))
    return share_alone


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
