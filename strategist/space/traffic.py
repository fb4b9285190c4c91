"""What every axis sends in one optimizer step: operation, payload, how often, over which ranks, and behind what it hides.

One list serves the time model (seconds), the explanation (bytes per link) and the traced rung (same operations, same
bytes). Payload is the full tensor of the collective: the gathered one of an all-gather, the input of a reduce-scatter,
the buffer of an all-reduce, what one rank sends in an all-to-all or to a neighbour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np

from strategist.columns import on_stages, stage_by_stage
from strategist.facts.job import Job
from strategist.facts.layers import norm_size
from strategist.facts.model import ModelShape, Moe
from strategist.facts.parameters import position_tables
from strategist.facts.profile import BYTES
from strategist.facts.routing import called_on
from strategist.facts.runs import BREADTH_FIRST
from strategist.facts.tables import ID_BYTES
from strategist.facts.tensors import ddp_buckets
from strategist.records import cached_property, dataclass, replace
from strategist.space.candidates import Candidates, Column, Mask, Reals
from strategist.space.deals import tensors_S
from strategist.space.interleaved import interleaved_rounds
from strategist.space.shares import (
    Elements,
    Group,
    crowding,
    decodes_K,
    dense_CK,
    expert_CK,
    expert_shards,
    holds_early_C,
    is_managed,
    is_plain_data_parallel,
    layers,
    near_turn,
    routed_cut,
    sequence_cut,
    state_shards,
    targets,
    tokens,
    vocabulary_elements,
)
from strategist.space.stages import kinds, last_sorts

Op = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "send"]
Axis = Literal["tp", "cp", "ep", "pp", "dp"]
Hidden = Literal["nothing", "forward", "backward", "attention", "matmul", "compute", "pairs"]


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """One kind of collective. `payload_CS` bytes, (C, S) or broadcast to it, `count_CS` times per step, among the ranks of `place`; `behind` names
    the compute of the same stage that it may overlap with (`pairs`: that of the opposite pass over another micro-batch). A payload is sent in `pieces_CS` collectives, one after the other. Copies of a token
    that call on experts of one node travel there once where `merges` names the experts. `first_CS` is the share of the payload that nothing
    runs beside, where that is known better than by the number of layers."""

    axis: Axis
    op: Op
    payload_CS: Reals
    count_CS: Reals
    place: Place
    behind: Hidden
    pieces_CS: Reals | float = 1.0
    merges: Moe | None = None
    first_CS: Reals | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The ranks of one axis: how many, and how far apart, (C,) each."""

    size: Column
    stride: Column


Place = Literal[
    "tp", "cp", "cp_inner", "cp_ring", "ep", "pp", "shards", "dp_replicate", "replicas", "expert_replicas", "server"
]
"""The ranks of a collective: those of a mesh axis, neighbours along cp or every so-many-th rank of it, of one ZeRO group (dp_shard and
cp), all that sum gradients, or all that hold the same experts; or a rank and the parameter server, whose seconds are among those of offloading."""


def every_rank(c: Candidates) -> Mapping[Place, Ranks]:
    """The groups that a rank belongs to, in the rank order pp, dp_replicate, dp_shard, cp, tp."""
    tp, cp, one = c["tp"], c["cp"], np.ones_like(c["tp"])
    shards, replicas, experts = state_shards(c), c.data_parallel * cp, c["ep"] * c["etp"]
    inner = c.columns.get("cp_inner")
    return {
        "tp": Ranks(tp, one),
        "cp": Ranks(cp, tp),
        "ep": Ranks(experts, one),
        "pp": Ranks(c["pp"], replicas * tp),
        "shards": Ranks(shards, tp),
        "dp_replicate": Ranks(c["dp_replicate"], tp * shards),
        "replicas": Ranks(replicas, tp),
        "expert_replicas": Ranks(c.expert_dp, experts),
        **({} if inner is None else {"cp_inner": Ranks(inner, tp), "cp_ring": Ranks(cp // inner, tp * inner)}),
    }


def traffic(job: Job, group: Group, counts: Elements) -> tuple[Traffic, ...]:
    """Everything the group's candidates send, per stage; nothing for an axis that none of them has."""
    c = group.candidates
    if c.in_threads:
        return _threads(job, group, counts)
    if "compression" in c.columns:
        from strategist.space.compression import compressed_traffic

        return compressed_traffic(job, group, ahead_of_compute(group, counts.whole, counts.layers, counts.before))
    return (*traffic_within(job, group), *traffic_between(job, group, counts))


def traffic_within(job: Job, group: Group) -> tuple[Traffic, ...]:
    """What of it the ranks of one replica send each other, without threads."""
    return (
        *_tensor(job, group),
        *_whole_weights(job, group),
        *_context(job, group),
        *_expert(job, group),
        *_pipeline(job, group),
        *_tied_ends(job, group),
    )


def traffic_between(job: Job, group: Group, counts: Elements) -> tuple[Traffic, ...]:
    """What of it ranks send that share state or hold the same weights, without threads and compression; beside it what Muon gathers."""
    c = group.candidates
    full = counts.padded((c["zero"] >= 2)[:, None])
    return (
        *Data(job, group, _dense(job, group, full), "shards", "replicas").traffic(),
        *(_slices_again(job, group) if group.is_tiled else ()),
        *_gathered_in_vain(job, group),
        *(_momentum(job, group) if job.workload.optimizer == "muon" else ()),
        *(
            Data(job, group, _experts(job, group, full), "expert_replicas", "expert_replicas").traffic()
            if job.model.moe
            else ()
        ),
        *(_rows(job, group) if c.serves_tables else ()),
    )


def _rows(job: Job, group: Group) -> tuple[Traffic, ...]:
    """Rows of tables that a parameter server holds."""
    from strategist.space.served import pulled_and_pushed  # few ask for any

    return pulled_and_pushed(job, group)


def activation_traffic(job: Job, group: Group) -> tuple[Traffic, ...]:
    """What of it is the same however replicas share gradients, state and weights: activations and their gradients."""
    return (*_tensor(job, group), *_context(job, group), *_expert(job, group), *_pipeline(job, group))


def _dense(job: Job, group: Group, full: Elements) -> Shared:
    has_units, frozen = job.profile.has_units, None
    if job.model.adapters is not None:
        from strategist.space.adapters import frozen_traffic

        frozen = frozen_traffic(job, group)
    return Shared(
        all=full.whole - full.experts,
        layers=full.layers - full.experts,
        before=full.before,
        spare=_spare(job, group, full),
        shards=state_shards(group.candidates),
        units=_units(job, group),
        layer_units=_layer_units(job, group) if has_units else 1.0,
        updates=_updates(job, group),
        beside=frozen,
        near=_near(job, group, full),
    )


def _updates(job: Job, group: Group) -> Reals | float:
    """How many collectives ZeRO-1 sends updated weights in, (C, S): those of experts that are spread are sent apart."""
    if job.profile.updates == "tensors":
        apart = on_stages(group.candidates["ep"] > 1, 1.0 * tensors_S(job.model, group, "experts"))
        return _alike(group, tensors_S(job.model, group)) - apart
    return _per_stage(1.0 * state_shards(group.candidates)) if job.profile.updates == "ranks" else 1.0


def _experts(job: Job, group: Group, full: Elements) -> Shared:
    """Routed experts are sent with the rest of their layer where the same ranks share both, and our executor's ep does not make units
    of them; their new weights with those of the other tensors, unless they are spread."""
    is_moe = np.array([any(matrix.is_expert for matrix in layer.matrices) for layer in layers(job.model)])
    c, has_units = group.candidates, job.profile.has_units
    has_own = (c["ep"] * c["etp"] != c["tp"]) | (has_units & (c["ep"] > 1))
    alone = on_stages(has_own, (group.layers_SK * is_moe).sum(axis=1) * 1.0)
    shards = expert_shards(c)
    units = alone if has_units else np.minimum(alone, 1.0)
    none, updates, beside = np.zeros_like(full.experts), units, None
    if has_units:
        updates = on_stages(c["ep"] > 1, 1.0 * tensors_S(job.model, group, "experts"))
    if job.model.adapters is not None:
        from strategist.space.adapters import frozen_experts

        beside = frozen_experts(job, group)
    return Shared(full.experts, full.experts, None, none, shards, units, units, updates, beside=beside)


def _units(job: Job, group: Group) -> Reals:
    """How many collectives take all weights of a stage along, (C, S): one per unit, of which tied ends of one stage are one, or
    DDP's buckets. Of other frameworks it is not known: one."""
    c, profile = group.candidates, job.profile
    if not profile.has_units:
        return np.ones((len(c), len(group.is_first)))
    units = _all_units(job, group)
    if group.is_tiled:
        return units
    gradient = BYTES[job.formats.gradient] * job.trainable
    buckets = ddp_buckets(job.model, gradient, serves_tables=c.serves_tables)
    return np.where(is_plain_data_parallel(job, c)[:, None], buckets, units)


def _all_units(job: Job, group: Group) -> Reals:
    """Units of the layers of a stage and of embedding and head on it, (C, S): tied ends of one stage are one."""
    ends = group.is_first * 1.0 + group.is_last * (not (job.model.tied and group.pp == 1))
    return _layer_units(job, group) + ends


def unit_collectives(job: Job, group: Group) -> tuple[Reals, Reals]:
    """How often a host gathers or reduces a unit of weights in a step, in forward and in backward, (C, S) each, in the rounds of `_data`, and once
    more for each layer that full recompute runs again where its modules' hooks run again too. Units of experts alone do not count."""
    zero = group.candidates["zero"][:, None]
    gathers, reduces = (np.where(zero >= 2, rounds, 0.0) for rounds in _rounds(group))
    if job.profile.stays_whole:
        gathers = np.where(zero == 2, 0.0, gathers)
    units, again = _all_units(job, group), _micro(group) * _layer_units(job, group)
    if job.profile.kernels.hooks_again:
        again = again + _repeats(group) * _passes_CS(group, group.redone_SK.sum(axis=1))
    return gathers * units, np.where(zero == 3, again, 0.0) + reduces * (job.trainable > 0) * units


def _rounds(group: Group) -> tuple[Reals, Reals]:
    """How often a step gathers weights for forward and reduces gradients where they are cut, (C, 1) each: for every micro-batch unless a
    pipeline keeps them, as it does not keep weights under ZeRO-3."""
    micro = _micro(group)
    once = np.where(group.candidates["pp"][:, None] > 1, 1.0, micro)
    return np.where(group.candidates["zero"][:, None] == 3, micro, once), once


def _layer_units(job: Job, group: Group) -> Reals:
    """Units of all layers, (C, S): one each, or where matrices are tiled one for each slice and one for all else."""
    if not group.is_tiled:
        return _alike(group, group.layers_S)
    from strategist.space.tiles import units_K  # most searches look at no tiles

    return group.layers_of(units_K(job.model, group.candidates).astype(np.float64))


def _slices_again(job: Job, group: Group) -> Iterator[Traffic]:
    """Slices are gathered once more where layers are computed again, all but the one with which backward begins."""
    from strategist.space.tiles import repeated_CK

    c = group.candidates
    full = np.where(c.is_word("recompute", "full")[:, None], _micro(group), 0.0)
    elements, units = (group.layers_of(part) for part in repeated_CK(job.model, c, state_shards(c)))
    payload = BYTES[job.formats.compute] * elements
    yield Traffic("dp", "all_gather", payload, full * np.ones_like(payload), "shards", "backward", units)


def _momentum(job: Job, group: Group) -> Iterator[Traffic]:
    """Matrices inside the layers whose momentum ranks share are gathered for Muon, one by one; of those that tensor parallelism cut the
    parts then."""
    from strategist.space.turned import WIDTH, cut_CS, elements_CS, number_CS  # few ask for any

    shares = 1.0 * (group.candidates["zero"] >= 2)[:, None]
    payload, number = WIDTH * elements_CS(job.model, group), number_CS(job.model, group)
    yield Traffic("dp", "all_gather", payload, shares * np.ones_like(payload), "shards", "nothing", number)
    if (group.candidates["tp"] > 1).any():
        elements, parts = cut_CS(job.model, group)
        yield Traffic("tp", "all_gather", WIDTH * elements, np.ones_like(elements), "tp", "nothing", parts)


def _per_stage(value_C: Reals) -> Reals:
    """What is alike on all stages, (C, 1)."""
    return value_C[:, None]


def _alike(group: Group, value_S: Column | Reals) -> Reals:
    return on_stages(np.ones(len(group.candidates)), value_S)


def _passes_CS(group: Group, layers_S: Column) -> Reals:
    """Some layers of each stage times micro-batches, (C, S)."""
    return on_stages(_micro(group)[:, 0], layers_S)


def _micro(group: Group) -> Reals:
    """Micro-batches per step as (C, 1)."""
    return group.candidates["accumulation"][:, None].astype(np.float64)


def _repeats(group: Group) -> Reals:
    """1 where full recompute runs forward twice, (C, 1)."""
    return np.where(group.candidates.is_word("recompute", "full"), 1.0, 0.0)[:, None]


def _exchanges(job: Job, group: Group, which: Column | int = 1) -> Reals:
    """How often an all-to-all runs in forward and backward of the layers of some sorts, (C, S): recomputation of our own, of whatever
    kind, repeats it."""
    every, redone = (_passes_CS(group, (own * which).sum(axis=1)) for own in (group.layers_SK, group.redone_SK))
    anew = np.where(group.candidates.is_word("recompute", "none"), 0.0, 1.0)[:, None]
    return 2.0 * every + redone * (anew if job.profile.has_units else _repeats(group))


def _mixtures_again(job: Job, group: Group, is_moe: Column) -> Reals | float:
    """How often experts get their tokens once more, (C, S), because a run names whole mixtures among what selective recompute runs again."""
    if "moe" not in job.profile.redoes or job.profile.has_units:
        return 0.0
    selective = np.where(group.candidates.is_word("recompute", "selective"), 1.0, 0.0)[:, None]
    return selective * _passes_CS(group, (group.layers_SK * is_moe).sum(axis=1))


def _tensor(job: Job, group: Group) -> tuple[Traffic, ...]:
    """Megatron cuts: two all-reduces forward and two backward per layer, or an all-gather and a reduce-scatter in place
    of each under sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2); half as many where our experts lie
    whole and no shared ones are cut. The embedding adds a
    reduction forward, the head one backward (and their mirror images under sequence parallelism); the loss over a cut
    vocabulary reduces three numbers per token. Full recompute repeats the first of the two forward reductions (it stops
    when what backward needs is there), and any recompute repeats the all-gathers."""
    c = group.candidates
    if not (c["tp"] > 1).any():
        return ()
    if job.model.enc_layers:
        return _tensor_of_two(job, group)
    hidden = _per_stage(tokens(job, c) * job.model.hidden * BYTES[job.formats.compute])
    narrow = hidden / BYTES[job.formats.compute] * job.cast_width if job.gathers_cast else hidden
    numbers = _per_stage(tokens(job, c) * 4.0)
    passes, again = (_passes_CS(group, own.sum(axis=1)) for own in (group.layers_SK, group.redone_SK))
    parts, parts_again = passes - _uncut_CS(job, group, group.layers_SK), again - _uncut_CS(job, group, group.redone_SK)
    gated = job.model.moe is not None and job.model.moe.shared_gate
    blocks = passes * 2.0 + again * _repeats(group) + parts * 2.0
    if gated:
        blocks = blocks + _repeats(group) * _regathered_CS(job, group, group.redone_SK)
    anew = np.where(c.is_word("recompute", "none")[:, None], 0.0, 1.0)
    gathers = (passes + parts) * 2.0 + (again + parts_again) * anew
    first, last = (on_stages(_micro(group)[:, 0], at) for at in (group.is_first, group.is_last))
    sequence = (c["sequence_parallel"] > 0)[:, None]
    ends = first + last
    scattered, reduced = np.where(sequence, blocks + ends, 0.0), np.where(sequence, 0.0, blocks + ends)
    gathered = np.where(sequence, gathers + ends, 0.0)
    return (
        Traffic("tp", "all_reduce", hidden, reduced, "tp", "nothing"),
        Traffic("tp", "all_gather", narrow, gathered, "tp", "nothing"),
        Traffic("tp", "reduce_scatter", hidden, scattered, "tp", "nothing"),
        Traffic("tp", "all_reduce", numbers, 3.0 * last, "tp", "nothing"),
    )


def _tensor_of_two(job: Job, group: Group) -> tuple[Traffic, ...]:
    """The same of an encoder and a decoder behind it. A decoder's layer has three matrices that are cut by rows, and three parts that begin with
    one cut by columns, so three reductions forward and three backward of its own tokens; and its keys and values begin with what the encoder
    gave, whose gradient is reduced once more, or which is gathered once more under sequence parallelism (NVIDIA/Megatron-LM:
    megatron/model/transformer.py, ParallelAttention: query and key_value of cross-attention are a ColumnParallelLinear each; 23.05). Each of the two has
    an embedding. Full recompute repeats all forward reductions but the last."""
    c = group.candidates
    decodes = decodes_K(job.model)
    (encoder, again), (decoder, decoder_again) = (
        tuple(_passes_CS(group, (own * which).sum(axis=1)) for own in (group.layers_SK, group.redone_SK))
        for which in (~decodes, decodes)
    )
    first, last = (on_stages(_micro(group)[:, 0], at) for at in (group.is_first, group.is_last))
    anew = np.where(c.is_word("recompute", "none")[:, None], 0.0, 1.0)
    sequence = (c["sequence_parallel"] > 0)[:, None]
    width = BYTES[job.formats.compute]
    of_inputs = 4.0 * encoder + _repeats(group) * again + decoder + first
    of_targets = 6.0 * decoder + _repeats(group) * 2.0 * decoder_again + 2.0 * last
    gathers_inputs = 4.0 * encoder + anew * (2.0 * again + decoder_again) + decoder + first
    gathers_targets = 6.0 * decoder + anew * 3.0 * decoder_again + 2.0 * last
    found: list[Traffic] = []
    for rows, sums, gathers in (
        (tokens(job, c), of_inputs, gathers_inputs),
        (targets(job, c), of_targets, gathers_targets),
    ):
        hidden = _per_stage(rows * job.model.hidden * width)
        narrow = hidden / width * job.cast_width if job.gathers_cast else hidden
        found += (
            Traffic("tp", "all_reduce", hidden, np.where(sequence, 0.0, sums), "tp", "nothing"),
            Traffic("tp", "all_gather", narrow, np.where(sequence, gathers, 0.0), "tp", "nothing"),
            Traffic("tp", "reduce_scatter", hidden, np.where(sequence, sums, 0.0), "tp", "nothing"),
        )
    numbers = _per_stage(targets(job, c) * 4.0)
    return (*found, Traffic("tp", "all_reduce", numbers, 3.0 * last, "tp", "nothing"))


def _regathered_CS(job: Job, group: Group, layers_SK: Column) -> Reals:
    """Some layers of each stage times micro-batches in which our experts lie whole beside tensor parallelism, (C, S)."""
    c = group.candidates
    lies_whole = (routed_cut(c) > 1) & (c["ep"] > 1) & job.profile.has_units
    moe_layers = (layers_SK * np.array([kind.ffn == "moe" for kind in kinds(job.model)])).sum(axis=1)
    return on_stages(_micro(group)[:, 0] * lies_whole, moe_layers)


def _uncut_CS(job: Job, group: Group, layers_SK: Column) -> Reals | float:
    """The same, as far as tensor parallelism then has nothing to cut in the feed-forward part."""
    moe = job.model.moe
    return 0.0 if moe is None or moe.shared_ffn else _regathered_CS(job, group, layers_SK)


def _whole_weights(job: Job, group: Group) -> Iterator[Traffic]:
    """Weights that every tensor-parallel rank holds whole, of whose gradient it has a term: norms of heads and routers; under
    sequence parallelism, where a rank sees its own tokens, norms, biases behind row-cut matrices and positions too. The terms
    are added up when the unit is reduced, in the compute format, or else once, or all in one message a step."""
    c = group.candidates
    if not (c["tp"] > 1).any():
        return
    if job.profile.adds_terms == "step":
        yield from _terms_of_a_step(job, group)
        return
    each = is_managed(job, c) & (group.pp == 1)
    width = np.where(each, BYTES[job.formats.compute], BYTES[job.formats.parameter])
    times = np.where(each, c["accumulation"], 1)[:, None]
    for elements, count in _held_whole(job.model, group):
        payload, counts = _per_stage(elements * width), stage_by_stage(times * (1.0 * count))
        yield Traffic("tp", "all_reduce", payload, counts, "tp", "nothing")


def _terms_of_a_step(job: Job, group: Group) -> Iterator[Traffic]:
    """One message with all of them."""
    payload = terms_of_a_step_CS(job, group)
    if payload.any():
        terms = stage_by_stage(payload)
        yield Traffic("tp", "all_reduce", terms, 1.0 * (terms > 0), "tp", "nothing")


def terms_of_a_step_CS(job: Job, group: Group) -> Reals:
    """Bytes of one message with a rank's terms of the gradients of weights that every rank of tp holds whole, of which a rank of a ZeRO group
    has its part from ZeRO-2 on, (C, S) or broadcast to it."""
    c = group.candidates
    own = np.where(c["zero"] >= 2, state_shards(c), 1)[:, None]
    elements = sum((size * count for size, count in _held_whole(job.model, group)), np.zeros((1, 1)))
    terms: Reals = elements * BYTES[job.formats.gradient] / own * (c["tp"] > 1)[:, None]
    return terms


def _held_whole(shape: ModelShape, group: Group) -> Iterator[tuple[int, Any]]:
    """Elements of one of these weights, and how many a stage has of it, each (C, S) or broadcast to it."""
    sequence = group.candidates["sequence_parallel"] > 0
    routed = np.array([kind.ffn == "moe" for kind in kinds(shape)])
    all_layers, moe_layers = group.layers_S, (group.layers_SK * routed).sum(axis=1)
    norm, decoders, stacks = (
        norm_size(shape, 1),
        (group.layers_SK * decodes_K(shape)).sum(axis=1),
        1 + (shape.enc_layers > 0),
    )
    norms = norm * (
        2 * all_layers + decoders + stacks * (shape.final_norm * group.is_last + shape.embed_norm * group.is_first)
    )
    biases = (all_layers + decoders) * shape.o_bias + (all_layers - moe_layers) * shape.mlp_bias
    gates = moe_layers * bool(shape.moe and shape.moe.shared_ffn and shape.moe.shared_gate)
    rows: tuple[tuple[int, Any], ...] = (
        (shape.hidden, on_stages(sequence, norms + biases) + gates),
        *((shape.hidden * rows, on_stages(sequence, group.is_first)) for rows in position_tables(shape)),
        (shape.hidden * (shape.moe.experts if shape.moe else 0), moe_layers[None, :]),
        (shape.head_dim, 2 * all_layers[None, :] * (shape.qk_norm == "head")),
    )
    yield from ((elements, count) for elements, count in rows if elements and np.any(count))


def _context(job: Job, group: Group) -> tuple[Traffic, ...]:
    """Ring: keys and values travel past every rank, forward once, backward with their gradients (Liu et al. 2023, arXiv
    2310.01889). All-to-all: queries, keys and values change places, then the output, forward and backward (Jacobs et al.
    2023, arXiv 2309.14509). Hierarchical: both, an exchange among neighbours, whose tokens and share of the heads then travel around a
    ring across them (Fang and Zhao 2024, arXiv 2405.07719, section 3): as many bytes a hop, and fewer hops."""
    c, shape = group.candidates, job.model
    if not (c["cp"] > 1).any():
        return ()
    per_head = tokens(job, c) * shape.head_dim * BYTES[job.formats.compute] / c["tp"]
    travelling = _per_stage(per_head * 2.0 * shape.kv_heads)
    exchanged = _per_stage(per_head * (2.0 * shape.heads + 2.0 * shape.kv_heads))
    ring, together = (c["cp"] // c.exchanging)[:, None], (c.exchanging > 1)[:, None]
    passes, again = (_passes_CS(group, own.sum(axis=1)) for own in (group.layers_SK, group.redone_SK))
    hops = (3.0 * passes + again * _repeats(group)) * (ring - 1.0)
    exchanges = np.where(together, _exchanges(job, group), 0.0)
    every = (
        Traffic("cp", "send", travelling, hops, "cp", "attention"),
        Traffic("cp", "all_to_all", exchanged, exchanges, "cp", "nothing", 2.0),
    )
    return _apart(c, every) if "cp_inner" in c.columns else every


def _apart(c: Candidates, every: tuple[Traffic, ...]) -> tuple[Traffic, ...]:
    """Traffic of cp among all of its ranks, and of what is hierarchical among those around the ring and those inside."""
    split = c.is_word("context_parallel", "hierarchical")[:, None]
    among: Mapping[str, Place] = {"send": "cp_ring", "all_to_all": "cp_inner"}
    return tuple(
        replace(item, place=place, count_CS=np.where(here, item.count_CS, 0.0))
        for item in every
        for place, here in ((item.place, ~split), (among[item.op], split))
    )


def _expert(job: Job, group: Group) -> tuple[Traffic, ...]:
    """Tokens go to their experts and come back, forward and backward (GShard: Lepikhin et al. 2020, arXiv 2006.16668). Our ranks that
    cut the same experts each send all of them. All wait for the rank whose experts get most. Where copies are merged, a rank gets one of each
    token that calls on its experts."""
    moe, c = job.model.moe, group.candidates
    if moe is None:
        return ()
    merges = job.profile.merges_copies
    rows = tokens(job, c) / (routed_cut(c) if job.profile.has_units else sequence_cut(c))
    copies = rows * (called_on(moe, c["ep"]) if merges else moe.top_k) * crowding(job, c)
    sent = _per_stage(copies * (moe.latent or job.model.hidden) * job.exchange_width)
    is_moe = np.array([any(matrix.is_expert for matrix in layer.matrices) for layer in layers(job.model)])
    times = 2.0 * (_exchanges(job, group, is_moe) + _mixtures_again(job, group, is_moe))
    return (Traffic("ep", "all_to_all", sent, times, "ep", "nothing", merges=moe if merges else None),)


def _pipeline(job: Job, group: Group) -> Iterator[Traffic]:
    """Hidden states forward and their gradients backward, once per micro-batch and chunk, between neighbouring stages; the
    ends of the model have nothing before or behind them, and a stage that hands results to itself sends nothing. Every tensor-parallel rank sends its part where the framework does so
    (Narayanan et al. 2021, arXiv 2104.04473, section 4.1) or sequence parallelism has cut it. A stage that neither sends nor receives while it does the
    other waits for both, and makes what it received, and before backward what it sent, whole again (deepspeedai/DeepSpeed 0.19.8:
    deepspeed/runtime/pipe/schedule.py, TrainSchedule.steps; engine.py, PartitionedTensor.full)."""
    if group.pp == 1:
        return
    c, takes_turns = group.candidates, job.profile.sends == "turns"
    hidden = tokens(job, c) * job.model.hidden * BYTES[job.formats.compute]
    pieces = sequence_cut(c) if job.profile.sends == "whole" else c["tp"]
    micro, all_chunks = _micro(group)[:, 0], _micro(group) * c["virtual_stages"][:, None]
    ahead, back = (
        all_chunks - on_stages(micro, 1.0 * end + group.turns_back) for end in (group.is_first, group.is_last)
    )
    sends = (2.0 if takes_turns else 1.0) * (ahead + back)
    yield Traffic("pp", "send", _per_stage(hidden / pieces), sends, "pp", "nothing")
    if takes_turns and (c["tp"] > 1).any():
        yield Traffic("tp", "all_gather", _per_stage(hidden), ahead + 2.0 * back, "tp", "nothing")


def _tied_ends(job: Job, group: Group) -> tuple[Traffic, ...]:
    """The first and the last stage of a pipeline exchange the gradients of a matrix that both hold."""
    if group.pp == 1 or not job.model.tied:
        return ()
    c = group.candidates
    shards = np.where(c["zero"] >= 2, state_shards(c), 1)
    table = vocabulary_elements(job.model, c["tp"], shards) * BYTES[job.formats.parameter] * job.trainable
    tied = (group.is_first * 1.0 + group.is_last) * float(job.model.vocab > 0)
    return (Traffic("pp", "send", _per_stage(table), _alike(group, tied), "pp", "nothing"),)


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """What differs where adapters alone are trained, (C, S): elements that are reduced, in how many collectives, and bytes that
    gathered weights save because they travel in four bits."""

    trained: Reals
    units: Reals
    spared: Reals


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """Elements that ranks share the work on, (C, S): all of them, those inside the layers, those `before` these, and those that a pipeline under
    ZeRO-3 gathers once more than it needs; `shards` is how many ranks share one copy of their state, (C,). All are sent in
    `units`, those of the layers in `layer_units`, updated weights in `updates`. `beside` adapters the rest is
    frozen. The share `near` of the layers is still there when ZeRO-3's backward begins."""

    all: Reals
    layers: Reals
    before: Reals | None
    spare: Reals
    shards: Column
    units: Reals
    layer_units: Reals | float
    updates: Reals | float
    beside: Frozen | None = None
    near: Reals | float = 0.0


def _near(job: Job, group: Group, full: Elements) -> Reals | float:
    """The share of the layers' weights that nothing gathers for backward, since they are near the turn (`near_turn`), behind norm and head, (C, S);
    tied ends lie there all the time."""
    if not job.profile.reuse_distance:
        return 0.0
    ends = full.behind + (full.before if job.model.tied else 0.0)
    kept = near_turn(job, group.candidates, full.whole) - ends
    return np.clip(kept / np.maximum(full.layers, 1.0), 0.0, 1.0)


def _spare(job: Job, group: Group, counts: Elements) -> Reals:
    """Norm and head of a pipeline's last stage, where they are a unit: FSDP2 takes them for what follows each backward pass,
    the last one too. Where all forward passes come first, the last backward pass is that of the first of them, which nothing
    went before (FSDPParamGroup, _backward_prefetch)."""
    if group.pp == 1 or not job.profile.has_units or job.model.tied:
        return np.zeros_like(counts.behind)
    breadth_first = group.candidates.is_word("schedule", *BREADTH_FIRST)[:, None]
    return counts.behind * ((_micro(group) > 1) & ~breadth_first)


def _gathered_in_vain(job: Job, group: Group) -> Iterator[Traffic]:
    """The last layer of interleaved chunks under ZeRO-3 whose last backward pass gathers it for a pass that never comes, as `_spare`
    has it of norm and head: its experts, too, where no other rank has any. It does not where it is that of the first forward pass: where some pass of the chunk was in flight
    until then, which those of the first turn tell. A chunk's only layer is there already."""
    c, where = group.candidates, holds_early_C(group.candidates)
    if group.pp == 1 or not job.profile.has_units or not where.any():
        return
    rows, layers = np.flatnonzero(where), np.maximum(group.layers_S, 1.0)[None, :]
    held = c.where(rows)
    firsts, place = held.sorts((held["accumulation"], held["virtual_stages"]))
    m, v = (held[name][firsts][:, None] for name in ("accumulation", "virtual_stages"))
    chunks = np.arange(int(v.max()))[:, None, None]
    rounds = interleaved_rounds(group.pp, group.stages[None, :], m, v)
    _, left = rounds.left(chunks, np.minimum(m - 2, group.pp - 1))
    gathers = np.where((chunks == 0) & group.is_first, not job.model.tied, layers > v)
    gathers = gathers & ~((chunks == v - 1) & group.is_last)
    gathers = (left == 0) & (m > 1) & (chunks < v) & gathers
    ends = _last_sorts_VS(job, group, int(v.max()))[:, None, :]
    for number, own in enumerate(_unit_of_layer_CK(job, c).T):
        some = (gathers & (ends == number)).sum(axis=0)
        if some.any():
            times = np.zeros((len(layers[0]), len(c))).T
            times[rows] = some[place]
            payload = BYTES[job.formats.compute] * np.where(where, own, 0.0)[:, None] * np.ones_like(layers)
            yield Traffic("dp", "all_gather", payload, times, "shards", "backward")


def _last_sorts_VS(job: Job, group: Group, v: int) -> Column:
    """The sort of every chunk's last layer; with one sort a group has layouts of several numbers of chunks, up to `v`."""
    if len(kinds(job.model)) == 1:
        return np.zeros((v, len(group.stages)), np.int64)
    return last_sorts(job.model, group.pp, v)[:, group.stages]


def _unit_of_layer_CK(job: Job, c: Candidates) -> Reals:
    """Elements that are gathered for one layer of each sort under ZeRO-3: without experts that are spread, which are a unit of their own."""
    shards, sharers = state_shards(c), expert_shards(c)
    dense: Reals = dense_CK(job.model, c, shards) * shards[:, None]
    if job.model.moe is None:
        return dense
    experts = expert_CK(job.model, c, sharers) * sharers[:, None]
    return dense + np.where((c["ep"] > 1)[:, None], 0.0, experts)


class Data:
    """What the ranks that share the work on some elements send each other for gradients and, under ZeRO, for weights (Rajbhandari et al. 2020,
    arXiv 1910.02054, section 7): those `inside` a group that shares state, and `everybody` with the same elements. Columns are (C, 1),
    elements, bytes and times (C, S)."""

    def __init__(self, job: Job, group: Group, shared: Shared, inside: Place, everybody: Place) -> None:
        self.job, self.group, self.shared, self.inside, self.everybody = job, group, shared, inside, everybody
        self.zero, self.shards = group.candidates["zero"][:, None], shared.shards[:, None]
        self.compute = BYTES[job.formats.compute]

    def traffic(self) -> tuple[Traffic, ...]:
        """All of it."""
        return (*self._whole(), *self._in_shards())

    def _whole(self) -> Iterator[Traffic]:
        """Of weights that every rank has whole. Replicas: one all-reduce of the gradients (with tp in frameworks whose replicas do not wait,
        one for every micro-batch). ZeRO-1 adds sending the updated weights (torch's broadcasts them tensor by tensor, InternEvo's rank by
        rank). Where weights stay whole under ZeRO-2, updated ones are sent as under ZeRO-1, and every rank keeps its part of gradients that
        are all-reduced for every micro-batch."""
        job, zero = self.job, self.zero
        alone = np.where(self.group.candidates["tp"][:, None] > 1, self.between, self.one)
        keeps_part = self.is_cut & self.stays
        yield self._reduced("all_reduce", np.where(zero < 2, alone, 0.0), self.everybody)
        if keeps_part.any():
            yield self._reduced("all_reduce", np.where(keeps_part, self.rounds[1], 0.0), self.inside)
        update: Op = "all_gather" if job.profile.updates == "whole" else "broadcast"
        size, pieces = BYTES[job.formats.parameter] * self.trained, self.shared.updates * (job.trainable > 0)
        times = np.where(((zero == 1) | self.stays) & (self.shards > 1), self.one, 0.0)
        yield Traffic("dp", update, size, times, self.inside, "nothing", pieces, first_CS=self.late)

    def _in_shards(self) -> Iterator[Traffic]:
        """Of weights of which every rank has a shard. fully_shard: they are gathered for forward and, under ZeRO-3, those of the layers again
        for backward, but for what is kept until then (`near_turn`; the executor's units: norm and head stay, and the embedding's gradient
        does not depend on its values); gradients are reduce-scattered for every micro-batch unless a pipeline keeps them; HSDP all-reduces
        the shards between replicas, once where these wait."""
        shared, zero, is_apart = self.shared, self.zero, self.is_cut & ~self.stays
        (first, second), anew = self.gathered, 1.0 - shared.near
        gathers, reductions = (np.where(is_apart, rounds, 0.0) for rounds in self.rounds)
        again = np.where((zero == 3) & self.is_cut, _micro(self.group), 0.0) * self.one
        spared = np.where((zero == 3) & (shared.spare > 0), self.one, 0.0)
        sent = partial(Traffic, "dp", "all_gather", place=self.inside)
        yield sent(first, gathers, behind="forward", pieces_CS=shared.units, first_CS=self.early)
        yield sent(anew * second, again, behind="backward", pieces_CS=anew * shared.layer_units)
        yield sent(self.compute * shared.spare, spared, behind="backward")
        yield self._reduced("reduce_scatter", reductions, self.inside)
        yield self._reduced("all_reduce", np.where(zero >= 2, self.between, 0.0), "dp_replicate", self.shards)

    def _reduced(self, op: Op, times: Reals, place: Place, parts: Column | int = 1) -> Traffic:
        """Gradients, or one of so many parts of them, in one collective."""
        shared, job = self.shared, self.job
        pieces = shared.units * (job.trainable > 0) if shared.beside is None else shared.beside.units
        size = BYTES[job.formats.reduce] * self.trained / parts
        return Traffic("dp", op, size, times, place, "backward", pieces, first_CS=self.late)

    @cached_property
    def one(self) -> Reals:
        """Once a step."""
        return np.ones_like(self.shared.all)

    @cached_property
    def rounds(self) -> tuple[Reals, Reals]:
        """How often weights are gathered for forward, and gradients reduced where every micro-batch's are (`_rounds`)."""
        gathers, once = _rounds(self.group)
        return gathers * self.one, once * self.one

    @property
    def between(self) -> Reals:
        """How often replicas add theirs up."""
        return self.one if self.job.profile.replicas_wait else self.rounds[1]

    @cached_property
    def is_cut(self) -> Mask:
        """Where gradients are. Experts that no other rank of a replica has are neither gathered nor scattered."""
        return (self.zero >= 2) & ((self.inside != "expert_replicas") | (self.shards > 1))

    @cached_property
    def stays(self) -> Mask:
        """Where weights stay whole under ZeRO-2."""
        return (self.zero == 2) & self.job.profile.stays_whole

    @cached_property
    def trained(self) -> Reals:
        """Elements that have gradients."""
        return self.job.trainable * self.shared.all if self.shared.beside is None else self.shared.beside.trained

    @cached_property
    def gathered(self) -> tuple[Reals, Reals]:
        """Bytes of all weights that are gathered, and of those inside the layers."""
        first, second = self.compute * self.shared.all, self.compute * self.shared.layers
        if self.shared.beside is None:
            return first, second
        return first - self.shared.beside.spared, second - self.shared.beside.spared

    @cached_property
    def early(self) -> Reals | None:
        """The share of the weights that is gathered before anything runs beside it, where that is known."""
        if self.shared.before is None:
            return None
        return ahead_of_compute(self.group, *self.gathered, self.compute * self.shared.before)

    @property
    def late(self) -> Reals | None:
        """The same of gradients, which come in the other order; beside frozen weights it is not known."""
        return self.early if self.shared.beside is None else None


def ahead_of_compute(group: Group, every: Reals, in_layers: Reals, before: Reals) -> Reals:
    """The share of `every` weight, of which some are `in_layers` and some `before` them, that is gathered before anything is computed, and
    whose gradients are the last to be whole, (C, S): the embedding and a layer. Norm and head are the first whose gradients are, and their
    weights the last that forward reads. In bytes or in elements."""
    ahead = before + in_layers / np.maximum(1, group.layers_S)[None, :]
    return np.divide(ahead, every, out=np.ones_like(ahead), where=every > 0)


COALESCED_BYTES = 10 * 2**20
"""Of what nn.DataParallel sends at once (PyTorch 2.13 torch/nn/parallel/comm.py, buffer_size)."""
LOSS_BYTES = 4
"""Of the loss that a device gives back (float32)."""


def _threads(job: Job, group: Group, counts: Elements) -> tuple[Traffic, ...]:
    """What nn.DataParallel sends for every micro-batch: tokens and labels to the other devices, all weights to all of them, a
    loss back from each, and the sum of their gradients to device 0, whose backward waits for the last of them, so that nothing
    runs beside it. Source: PyTorch 2.13 torch/nn/parallel/data_parallel.py, replicate.py and _functions.py (Scatter, Broadcast,
    Gather, ReduceAddCoalesced)."""
    c, formats = group.candidates, job.formats
    each, others = _micro(group), _micro(group) * (c["dp_replicate"] - 1)[:, None]
    weights = BYTES[formats.parameter] * counts.whole
    gradients = job.trainable * BYTES[formats.gradient] * counts.whole
    tokens_there = _per_stage(2.0 * ID_BYTES * tokens(job, c))
    loss = np.full_like(tokens_there, float(LOSS_BYTES))
    sent = partial(Traffic, "dp", place="replicas", behind="nothing")
    return (
        sent("send", tokens_there, others),
        sent("broadcast", weights, each, pieces_CS=np.ceil(weights / COALESCED_BYTES)),
        sent("send", loss, others),
        sent("reduce", gradients, each, pieces_CS=np.ceil(gradients / COALESCED_BYTES)),
    )
