"""What one stage sends in one step, and how long each collective takes (docs/time_model.md, Collectives)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import cache

from strategist.facts.blocks import block_tiers
from strategist.facts.domains import inner_tiers
from strategist.facts.groups import GroupLink, group_bandwidth
from strategist.facts.hardware import Cluster, PacedCluster
from strategist.facts.job import Job
from strategist.facts.layers import build_layer
from strategist.facts.model import LayerKind, layer_sequence
from strategist.facts.parameters import outer_parameters
from strategist.facts.profile import BYTES
from strategist.facts.tiers import tiers
from strategist.records import replace
from tests.oracle import adapters, compression, turned
from tests.oracle.held_whole import whole_weights
from tests.oracle.memory import busiest, decoder_tokens, is_plain, sequence_cut, tokens, uses_units
from tests.oracle.parameters import (
    Held,
    dense_of_layer,
    expert_ranks,
    expert_shards,
    experts_of_layer,
    padded,
    positions_of,
    shards,
    tensors_of,
    vocabulary,
)
from tests.oracle.ports import is_between_nodes, members_of_a_node
from tests.oracle.rates import share
from tests.oracle.routing import expected
from tests.oracle.schedules import in_vain
from tests.oracle.served import gone
from tests.oracle.stages import Layout, computed_again, last_stage, turns_back
from tests.oracle.tiles import repeated, tiles_of
from tests.oracle.tiles import units as tile_units

Beside = tuple[float, float, float]
"""Beside frozen weights: elements that are reduced, in how many collectives, and bytes that gathered weights save in four bits."""


@dataclass(frozen=True)
class Row:
    """One collective: its axis, what it hides behind ("" nothing), the payload, how often, over which ranks, and in how many
    pieces the payload is sent; where devices of a node pass on what came to it, the bytes that come to all nodes; and the part of the
    payload that is there before anything is computed, or after all of it, where it is not a layer's."""

    axis: str
    op: str
    behind: str
    payload_bytes: float
    times: float
    size: int
    stride: int
    pieces: float = 1
    to_nodes: float | None = None
    alone: float | None = None


RATES = ("Bps", "ring_Bps", "all_reduce_Bps", "all_to_all_Bps", "send_Bps")


@cache
def link_of(cluster: Cluster, size: int, stride: int) -> GroupLink:
    """What a group of ranks gets: inside a node of the kind that sets the pace, where one does, its own links; between nodes of several kinds
    what those of the worst leave it."""
    kinds = {group.node: group for group in cluster.groups}
    if len(kinds) == 1:
        return group_bandwidth(tiers(cluster), size, stride)
    if isinstance(cluster, PacedCluster) and not is_between_nodes(cluster, size, stride):
        return group_bandwidth(inner_tiers(kinds[cluster.pace]), size, stride)
    through = tiers(cluster)[-1]
    each = [
        group_bandwidth((*block_tiers(cluster.groups, [inner_tiers(kind)]), through), size, stride)
        for kind in kinds.values()
    ]
    slow = {name: min(getattr(link, name) for link in each) for name in RATES}
    return replace(
        each[0],
        **slow,
        latency_s=max(e.latency_s for e in each),
        fill_s=max(e.fill_s for e in each),
        walk_s=max(e.walk_s for e in each),
        tree_s=max(e.tree_s for e in each),
    )


def collective_seconds(cluster: Cluster, row: Row) -> float:
    """One collective; a rank alone and an empty payload cost nothing."""
    n, S = row.size, row.payload_bytes
    if n == 1 or S == 0:
        return 0.0
    link = link_of(cluster, row.size, row.stride)
    a, moved = link.latency_s * row.pieces, S * (n - 1) / n
    filling = link.fill_s * min(row.pieces, S / (4 * 2**20))
    if row.op in ("all-gather", "reduce-scatter", "broadcast", "reduce"):
        flagged = min(link.ring_Bps / 2, share("ring_flagged_GBps", cluster.slowest.gpu) * 1e9)
        return a + filling + min(row.pieces * link.walk_s + moved / link.ring_Bps, moved / flagged)
    if row.op == "all-reduce":
        sending = 2 * moved / link.all_reduce_Bps
        share_of_ring = share("tree_share", cluster.slowest.gpu)
        around, up_and_down = 2 * a + sending, 2 * link.tree_s * row.pieces + sending / share_of_ring
        return filling + min(around, up_and_down)
    if row.op == "all-to-all" and row.to_nodes is not None:
        return a + filling + max(_passed_on(cluster, row), _between_nodes(cluster, row))
    if row.op == "all-to-all":
        return a + filling + moved / link.all_to_all_Bps
    return a / (n - 1) + S / link.send_Bps


def _passed_on(cluster: Cluster, row: Row) -> float:
    """Every device of a node has its part of what came to the node, and sends each of the others theirs."""
    own = members_of_a_node(cluster, row.size)
    if own == 1:
        return 0.0
    return row.payload_bytes * (own - 1) / own / link_of(cluster, own, 1).all_to_all_Bps


def _between_nodes(cluster: Cluster, row: Row) -> float:
    """Every device sends each other node its tokens for it over its own share of the network."""
    nodes = row.size // members_of_a_node(cluster, row.size)
    if nodes == 1 or row.to_nodes is None:
        return 0.0
    network = tiers(cluster)[-1]
    return row.to_nodes * (nodes - 1) / nodes / (network.device_Bps * network.shares[0].all_to_all)


def rows_of(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind], whole: Held) -> list[Row]:
    """Everything one stage sends in one step."""
    if layout.get("replicas") == "threads":
        return list(_threads(job, layout, whole))
    if compression.word_of(layout) != "none":
        n, in_layers = layout["dp_replicate"], whole.all - whole.before - whole.behind
        last = (whole.before + in_layers / max(1, len(kinds))) / whole.all
        return [
            Row("dp", op, behind, size, 1, n, 1, pieces, alone=last)
            for op, size, behind, pieces in compression.sent(job, layout)
        ]
    return [
        *_momentum(job, layout, kinds),
        *_tensor(job, layout, stage, kinds),
        *_context(job, layout, stage, kinds),
        *_experts(job, layout, stage, kinds),
        *_pipeline(job, layout, stage),
        *_data(job, layout, stage, kinds, padded(job.model, layout, stage, kinds) if layout["zero"] >= 2 else whole),
    ]


def _momentum(job: Job, layout: Layout, kinds: Sequence[LayerKind]) -> Iterator[Row]:
    """Muon's ranks gather every matrix that they share or that was cut, one by one."""
    if job.workload.optimizer != "muon":
        return
    if layout["zero"] >= 2:
        size, messages = turned.sent(job, layout, kinds)
        yield Row("dp", "all-gather", "", size, 1, shards(layout), layout["tp"], messages)
    if layout["tp"] > 1:
        size, messages = turned.put_together(job, layout, kinds)
        yield Row("tp", "all-gather", "", size, 1, layout["tp"], 1, messages)


def _threads(job: Job, layout: Layout, whole: Held) -> Iterator[Row]:
    """One micro-batch after the other: ids out to each other device, weights out to all, a float32 back from each, gradients to the
    first. Of weights and gradients go 10 MiB at a time."""
    n, m, piece = layout["dp_replicate"], layout["accumulation"], 10 * 2**20
    weights, gradients = (whole.all * BYTES[name] for name in (job.formats.parameter, job.formats.gradient))
    gradients *= job.trainable
    yield Row("dp", "send", "", 2 * 8 * tokens(job, layout), m * (n - 1), n, 1)
    yield Row("dp", "broadcast", "", weights, m, n, 1, -(-weights // piece))
    yield Row("dp", "send", "", 4, m * (n - 1), n, 1)
    yield Row("dp", "reduce", "", gradients, m, n, 1, -(-gradients // piece))


def _passes(layout: Layout, again: bool) -> int:
    """fw: forward of a layer runs twice under full recompute of it."""
    return 2 if layout["recompute"] == "full" and again else 1


def _exchanges(job: Job, layout: Layout, again: bool) -> int:
    """All-to-alls of a layer forward and backward: in frameworks with units any recompute repeats the first."""
    if job.profile.has_units:
        return 3 if again else 2
    return _passes(layout, again) + 1


def _tensor(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind]) -> Iterator[Row]:
    T, h, c, m = tokens(job, layout), job.model.hidden, BYTES[job.formats.compute], layout["accumulation"]
    is_last = stage == last_stage(layout)
    ends, X, tp = m * (stage == 0) + m * is_last, len(kinds) * m, layout["tp"]
    own = job.profile.has_units and layout["ep"] > 1 and layout["sequence_parallel"] and layout["etp"] < tp
    whole = m * sum(kind.ffn == "moe" for kind in kinds) if own else 0  # mixtures that tensor parallelism does not cut
    again = [kind for kind, redone in zip(kinds, computed_again(job, layout, stage, len(kinds)), strict=True) if redone]
    whole_again, X_again = m * sum(kind.ffn == "moe" for kind in again) if own else 0, m * len(again)
    if job.model.enc_layers:
        yield from _of_two(job, layout, stage, kinds)
        return
    moe = job.model.moe
    uncut, uncut_again = (whole, whole_again) if moe is not None and not moe.shared_ffn else (0, 0)
    reductions = X * 4 + (X_again if layout["recompute"] == "full" else 0) - 2 * uncut + ends
    if layout["recompute"] == "full" and moe is not None and moe.shared_gate:
        reductions += whole_again
    if layout["sequence_parallel"]:
        gathers = (2 * X - uncut) * 2 + 2 * X_again - uncut_again + ends
        yield Row("tp", "all-gather", "", T * h * (job.cast_width if job.gathers_cast else c), gathers, tp, 1)
        yield Row("tp", "reduce-scatter", "", T * h * c, reductions, tp, 1)
    else:
        yield Row("tp", "all-reduce", "", T * h * c, reductions, tp, 1)
    if is_last:
        yield Row("tp", "all-reduce", "", 4 * T, 3 * m, tp, 1)
    yield from _terms(job, layout, stage, kinds)


def _terms(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind]) -> Iterator[Row]:
    """Gradients of weights that every rank holds whole."""
    tp, c, m = layout["tp"], BYTES[job.formats.compute], layout["accumulation"]
    whole_here = list(whole_weights(job.model, layout, stage, kinds))
    if job.profile.adds_terms == "step":
        own = layout["dp_shard"] * layout["cp"] if layout["zero"] >= 2 else 1
        if whole_here:
            yield Row("tp", "all-reduce", "", sum(whole_here) * BYTES[job.formats.gradient] / own, 1, tp, 1)
        return
    with_units = uses_units(job, layout) and layout["pp"] == 1
    width, times = (c, m) if with_units else (BYTES[job.formats.parameter], 1)
    for elements in whole_here:
        yield Row("tp", "all-reduce", "", elements * width, times, tp, 1)


def _of_two(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind]) -> Iterator[Row]:
    """An encoder's layers have two parts each, a decoder's three, of which one also begins with what the encoder gave."""
    h, c, m, tp = job.model.hidden, BYTES[job.formats.compute], layout["accumulation"], layout["tp"]
    redone = computed_again(job, layout, stage, len(kinds))
    starts, ends = stage == 0, stage == last_stage(layout)
    again = {"none": 0, "full": 1}.get(layout["recompute"], 0)
    sums = {"inputs": int(starts), "targets": 2 * ends}
    gathers = dict(sums)
    for kind, anew in zip(kinds, redone, strict=True):
        parts, own = (3, "targets") if kind.cross else (2, "inputs")
        sums[own] += 2 * parts + (again * (parts - 1) if anew else 0)
        gathers[own] += 2 * parts + (parts if anew else 0)
        sums["inputs"] += kind.cross
        gathers["inputs"] += kind.cross * (2 if anew else 1)
    sizes = {"inputs": tokens(job, layout), "targets": decoder_tokens(job, layout)}
    for stream, T in sizes.items():
        if layout["sequence_parallel"]:
            width = job.cast_width if job.gathers_cast else c
            yield Row("tp", "all-gather", "", T * h * width, m * gathers[stream], tp, 1)
            yield Row("tp", "reduce-scatter", "", T * h * c, m * sums[stream], tp, 1)
        else:
            yield Row("tp", "all-reduce", "", T * h * c, m * sums[stream], tp, 1)
    if ends:
        yield Row("tp", "all-reduce", "", 4 * sizes["targets"], 3 * m, tp, 1)
    yield from _terms(job, layout, stage, kinds)


def _context(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind]) -> Iterator[Row]:
    shape, cp, tp = job.model, layout["cp"], layout["tp"]
    per_head = tokens(job, layout) / tp * shape.head_dim * BYTES[job.formats.compute]
    m, again = layout["accumulation"], computed_again(job, layout, stage, len(kinds))
    inner = {"all-to-all": cp, "hierarchical": layout.get("cp_inner", 1)}.get(layout["context_parallel"], 1)
    if layout["context_parallel"] in (
        "ring",
        "hierarchical",
    ):  # every inner-th rank; all heads of its tokens, or a share of more
        around = cp // inner
        hops = m * sum(_passes(layout, redone) + 2 for redone in again) * (around - 1)
        yield Row("cp", "send", "attention", per_head * 2 * shape.kv_heads, hops, around, tp * inner)
    if inner > 1:
        exchanges = m * sum(_exchanges(job, layout, redone) for redone in again)
        payload = per_head * (2 * shape.heads + 2 * shape.kv_heads)
        yield Row("cp", "all-to-all", "", payload, exchanges, inner, tp, 2)


def _experts(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind]) -> Iterator[Row]:
    moe = job.model.moe
    if moe is None:
        return
    width = moe.latent or job.model.hidden
    own = max(1, sequence_cut(layout) // layout["etp"]) if job.profile.has_units else sequence_cut(layout)
    c = BYTES[job.formats.compute]
    if job.profile.dispatches_fp8:  # there, with a byte for 32 elements or four for 128; and back as it is
        c = (min(c, 1 + 1 / 32) + c) / 2
    one_each = busiest(job, layout) * tokens(job, layout) / own * width * c
    payload, to_nodes, ranks = one_each * moe.top_k, None, layout["ep"]
    if job.profile.merges_copies:
        size = ranks * layout["etp"]
        nodes = size // members_of_a_node(job.cluster, size)
        payload = one_each * expected(moe, ranks)
        to_nodes = one_each * (expected(moe, nodes) if nodes <= ranks else expected(moe, ranks) * nodes / ranks)
    again = computed_again(job, layout, stage, len(kinds))
    each = (_exchanges(job, layout, redone) for kind, redone in zip(kinds, again, strict=True) if kind.ffn == "moe")
    named = "moe" in job.profile.redoes and layout["recompute"] == "selective" and not job.profile.has_units
    mixtures = sum(kind.ffn == "moe" for kind in kinds)
    times = 2 * layout["accumulation"] * (sum(each) + named * mixtures)
    yield Row("ep", "all-to-all", "", payload, times, ranks * layout["etp"], 1, to_nodes=to_nodes)


def _pipeline(job: Job, layout: Layout, stage: int) -> Iterator[Row]:
    pp, tp, shape = layout["pp"], layout["tp"], job.model
    if pp == 1:
        return
    ends = (stage == 0) + (stage == last_stage(layout)) + 2 * turns_back(layout, stage)
    hidden = tokens(job, layout) * shape.hidden * BYTES[job.formats.compute]
    payload = hidden / (sequence_cut(layout) if job.profile.sends == "whole" else tp)
    stride = layout["dp_replicate"] * layout["dp_shard"] * layout["cp"] * tp
    messages = (2 * layout["virtual_stages"] - ends) * layout["accumulation"]
    if job.profile.sends == "turns":  # what comes waits until what goes is gone
        messages *= 2
        got = layout["virtual_stages"] - (stage == 0) - turns_back(layout, stage)
        put = layout["virtual_stages"] - (stage == last_stage(layout)) - turns_back(layout, stage)
        yield Row("tp", "all-gather", "", hidden, (got + put + put) * layout["accumulation"], tp, 1)
    yield Row("pp", "send", "", payload, messages, pp, stride)
    if shape.tied and ends:
        shared_by = layout["dp_shard"] * layout["cp"] if layout["zero"] >= 2 else 1
        table = vocabulary(shape, tp, shared_by) * BYTES[job.formats.parameter] * job.trainable
        yield Row("pp", "send", "", table, ends, pp, stride)


def _unit(job: Job, layout: Layout, kind: LayerKind) -> int:
    """Elements of one layer that all its shards hold together; experts that other ranks share are not among them."""
    k, k_experts = shards(layout), int(expert_shards(layout))
    experts = experts_of_layer(job.model, kind, 1, layout["etp"], k_experts) if layout["ep"] == 1 else 0
    return k * dense_of_layer(job.model, kind, layout["tp"], k) + k_experts * experts


def _data(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind], whole: Held) -> Iterator[Row]:
    """The dense rows, and the same for the routed experts over their replicas."""
    tp, cp, shard, replicate = (layout[name] for name in ("tp", "cp", "dp_shard", "dp_replicate"))
    r = BYTES[job.formats.reduce] * job.trainable
    everybody, sharded = (replicate * shard * cp, tp), (shard * cp, tp)
    in_layers = whole.dense - whole.before - whole.behind
    ranks = everybody if layout["zero"] < 2 else sharded
    ours = job.profile.has_units and layout["ep"] > 1
    apart = ours or layout["ep"] * layout["etp"] != tp  # other ranks share the experts
    alone = sum(kind.ffn == "moe" for kind in kinds) if apart else 0
    units, layers, tensors, expert_units = 1, 1, 1, min(alone, 1)
    if job.profile.has_units:
        ends = (stage == 0) + (stage == last_stage(layout)) - (job.model.tied and layout["pp"] == 1)
        of_layers = sum(tile_units(job.model, layout, kind) for kind in kinds)
        units = _buckets(job, gone(job.model, layout)) if is_plain(job, layout) else of_layers + ends
        expert_units, layers, tensors = alone, of_layers, _tensors(job, layout, stage, kinds)
    if job.profile.updates == "ranks":
        tensors = sharded[0]
    beside, of_experts = (None, None) if job.model.adapters is None else _beside(job, layout, kinds)
    there = _still_there(job, layout, whole)
    for row in _data_rows(
        job, layout, (whole.dense, in_layers), ranks, sharded, (units, layers, tensors), beside, there
    ):
        yield changed(row, alone=_before_and_a_layer(job, row, whole, len(kinds), beside))
    if tiles_of(job.model, layout) > 1 and layout["recompute"] == "full":
        again = [repeated(job.model, layout, kind, shards(layout)) for kind in kinds]
        size = BYTES[job.formats.compute] * sum(elements for elements, _ in again)
        yield Row(
            "dp", "all-gather", "backward", size, layout["accumulation"], *sharded, sum(count for _, count in again)
        )
    turns = layout["schedule"] not in ("gpipe", "looped_bfs")  # a forward pass went before the last backward pass
    own_unit = job.profile.has_units and not job.model.tied and turns
    if own_unit and layout["zero"] == 3 and layout["pp"] > 1 and layout["accumulation"] > 1:
        yield Row("dp", "all-gather", "backward", BYTES[job.formats.compute] * whole.behind, 1, *sharded)
    takes_turns = layout["schedule"] == "interleaved" and layout["virtual_stages"] > 1 and job.profile.has_units
    if takes_turns and layout["zero"] == 3 and kinds:
        v = layout["virtual_stages"]
        first, last = (0 if stage == 0 else None), (v - 1 if stage == last_stage(layout) else None)
        some = [chunk for chunk in in_vain(layout, stage) if chunk != last]  # that one gathers norm and head
        others = [chunk for chunk in some if (not job.model.tied if chunk == first else len(kinds) > v)]
        for chunk in others:
            one = kinds[(chunk + 1) * len(kinds) // v - 1]
            yield Row("dp", "all-gather", "backward", BYTES[job.formats.compute] * _unit(job, layout, one), 1, *sharded)
    replicas, apart = expert_ranks(layout), layout["ep"] * layout["etp"]
    sent_apart = _with_elements(job, layout, stage, kinds, experts=True) if layout["ep"] > 1 else 0
    own = (whole.experts, whole.experts)
    pieces = (expert_units, expert_units, sent_apart if job.profile.has_units else expert_units)
    sharing = replicas if expert_shards(layout) > 1 else 1
    everybody = replicas if layout["zero"] < 2 else sharing
    yield from _data_rows(job, layout, own, (everybody, apart), (sharing, apart), pieces, of_experts)
    if layout["zero"] >= 2:
        times = _between_replicas(job, layout)
        across = (replicate, tp * cp * shard)
        own, pieces_ = (
            (r * whole.dense, units) if beside is None else (BYTES[job.formats.reduce] * beside[0], beside[1])
        )
        dense = Row("dp", "all-reduce", "backward", own / (shard * cp), times, *across, pieces_)
        yield changed(dense, alone=_before_and_a_layer(job, dense, whole, len(kinds), beside))
        reduced = whole.experts if of_experts is None else 0.0
        yield Row("dp", "all-reduce", "backward", r * reduced / expert_shards(layout), times, *across, expert_units)


def _before_and_a_layer(job: Job, row: Row, whole: Held, layers: int, beside: Beside | None) -> float | None:
    """The part of a row that is the embedding's and the first layer's: of gathers in forward, of gradients and of updated weights, unless
    adapters in the layers have all of the gradients."""
    is_gather = row.op == "all-gather" and row.behind == "forward"
    if (row.op == "all-gather" and row.behind == "backward") or (beside is not None and not is_gather):
        return None
    packed = 0.0 if beside is None else beside[2] / BYTES[job.formats.compute]
    in_layers = whole.dense - whole.before - whole.behind - packed
    every = whole.dense - packed
    return (whole.before + in_layers / max(1, layers)) / every if every else 1.0


def _tensors(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind]) -> int:
    """Tensors that the dense ranks send each other under ZeRO-1: all, or those that are no spread experts'."""
    dense = _with_elements(job, layout, stage, kinds, experts=False)
    return dense + (_with_elements(job, layout, stage, kinds, experts=True) if layout["ep"] == 1 else 0)


def _with_elements(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind], *, experts: bool) -> int:
    return sum(size > 0 for size in tensors_of(job.model, layout, stage, kinds, experts=experts))


def _buckets(job: Job, away: tuple[int, int]) -> int:
    """DDP's buckets, filled from the head to the embedding: a first of 1 MiB, further ones of 25; tables that are `away` are in none."""
    shape, size = job.model, BYTES[job.formats.gradient] * job.trainable
    outer, table = outer_parameters(shape), vocabulary(shape, 1, 1)
    bias = max(0, outer.head - (0 if shape.tied else table))
    halves, positions = (2 if shape.enc_layers else 1), positions_of(shape)
    come = [0 if shape.tied else table, bias, outer.final_norm / halves, outer.extra - away[1]]
    was_decoder = False
    for kind in reversed(layer_sequence(shape)):
        if was_decoder and not kind.cross:
            come += [positions[1], (outer.embedding_norm + outer.final_norm) / 2]
        was_decoder = kind.cross
        layer = build_layer(shape, kind)
        for m in reversed(layer.matrices):
            for _ in range(1 if m.is_expert else m.copies):
                copies = m.copies if m.is_expert else 1
                come += [copies * m.weights, copies * m.outputs * m.bias]
        come += [vector.size for vector in layer.vectors]
    come += [outer.embedding_norm / halves, positions[0], table - away[0], outer.projection, outer.input]
    full, held = [], 0.0
    for elements in come:
        held += elements * size
        if held >= (25 if full else 1) * 2**20:
            full.append(held)
            held = 0.0
    return len(full) + (held > 0)


def _beside(job: Job, layout: Layout, kinds: Sequence[LayerKind]) -> tuple[Beside, Beside]:
    """Elements of all adapters, with padding where they are sharded; in how many collectives they are reduced; and bytes that
    quantised weights save on the way. Apart from that the same of routed experts, which have no adapters."""
    k = shards(layout) if layout["zero"] >= 2 else 1
    own = k * adapters.trained(job.model, kinds, k)
    in_buckets = is_plain(job, layout) or not job.profile.has_units
    units = _buckets_of_adapters(job, kinds) if in_buckets else len(kinds)
    saved = BYTES[job.formats.compute] - adapters.BITS / 8
    four, in_experts = (k * adapters.packed(job.model, kinds, k, experts=experts) for experts in (False, True))
    return (own, units, saved * four), (0.0, 0.0, saved * in_experts)


def _buckets_of_adapters(job: Job, kinds: Sequence[LayerKind]) -> int:
    """The same of adapters alone, from the last layer to the first, the second factor before the first."""
    rank = job.model.adapters.rank if job.model.adapters else 0
    found, held = 0, 0.0
    for inputs, outputs in list(reversed(adapters.targets(job.model))) * len(kinds):
        for size in (outputs * rank, rank * inputs):
            held += size * BYTES[job.formats.gradient]
            if held >= (25 if found else 1) * 2**20:
                found, held = found + 1, 0.0
    return found + (held > 0)


def _once_per_step(layout: Layout) -> int:
    return 1 if layout["pp"] > 1 else int(layout["accumulation"])


def _between_replicas(job: Job, layout: Layout) -> int:
    return 1 if job.profile.replicas_wait else _once_per_step(layout)


def _data_rows(
    job: Job,
    layout: Layout,
    held: tuple[float, float],
    ranks: tuple[int, int],
    sharing: tuple[int, int],
    pieces: tuple[float, float, float],
    beside: Beside | None = None,
    there: float = 0.0,
) -> Iterator[Row]:
    """`ranks` reduce, `sharing` share the state; `pieces` of everything, of the layers, and of updated weights. `beside` adapters:
    elements that are reduced, in how many pieces, and bytes that gathered weights save. `there` of the layers were kept for backward."""
    (elements, in_layers), (units, layers, tensors) = held, pieces
    own, reduced = elements * job.trainable, units * (job.trainable > 0)
    spared = 0.0
    if beside is not None:
        own, reduced, spared = beside
    zero, pp, m = layout["zero"], layout["pp"], layout["accumulation"]
    c, r, s = (BYTES[getattr(job.formats, name)] for name in ("compute", "reduce", "parameter"))
    s, trains = s * job.trainable, job.trainable > 0
    if zero < 2:
        times = _between_replicas(job, layout) if layout["tp"] > 1 else 1
        yield Row("dp", "all-reduce", "backward", r * own, times, *ranks, reduced)
    stays = zero == 2 and job.profile.stays_whole
    if zero == 1 or stays:
        op = "all-gather" if job.profile.updates == "whole" else "broadcast"
        yield Row("dp", op, "", s * elements, 1, *sharing, tensors * trains)
    if stays:
        yield Row("dp", "all-reduce", "backward", r * own, _once_per_step(layout), *ranks, reduced)
    elif zero >= 2:
        gathers = 1 if zero == 2 and pp > 1 else m
        yield Row("dp", "all-gather", "forward", c * elements - spared, gathers, *ranks, units)
        yield Row("dp", "reduce-scatter", "backward", r * own, _once_per_step(layout), *ranks, reduced)
    if zero == 3:
        yield Row(
            "dp", "all-gather", "backward", (c * in_layers - spared) * (1 - there), m, *ranks, layers * (1 - there)
        )


def _still_there(job: Job, layout: Layout, whole: Held) -> float:
    """The share of the layers that work comes back to before it has passed so many weights as DeepSpeed keeps them for: what lies
    behind them twice, or once more for layers that run again."""
    if not job.profile.reuse_distance or layout["pp"] > 1:
        return 0.0
    kept = job.profile.reuse_distance / (3 if layout["recompute"] == "full" else 2)
    ends = whole.behind + (whole.before if job.model.tied else 0.0)
    return min(max(min(kept, whole.all) - ends, 0.0) / max(whole.all - whole.before - whole.behind, 1.0), 1.0)
