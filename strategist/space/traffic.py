"""What every axis sends in one optimizer step: operation, payload, how often, over which ranks, and behind what it hides.

One list serves the time model (seconds), the explanation (bytes per link) and the traced rung (same operations, same
bytes). Payload is the full tensor of the collective: the gathered one of an all-gather, the input of a reduce-scatter,
the buffer of an all-reduce, what one rank sends in an all-to-all or to a neighbour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from strategist.facts.job import Job
from strategist.facts.model import ModelShape
from strategist.facts.profile import BYTES
from strategist.space.candidates import Candidates, Column, Reals, code
from strategist.space.shares import Group, dense_CK, expert_CK, layers, outer_elements, tokens

Op = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
Axis = Literal["tp", "cp", "ep", "pp", "dp"]
Hidden = Literal["nothing", "forward", "backward", "attention"]


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """One kind of collective. `payload_CS` bytes, `count_CS` times per step, among `size` ranks `stride` apart (C,);
    `behind` names the compute of the same stage that it may overlap with."""

    axis: Axis
    op: Op
    payload_CS: Reals
    count_CS: Reals
    size: Column
    stride: Column
    behind: Hidden


def strides(c: Candidates) -> dict[str, Column]:
    """Distance between neighbours along each axis in the rank order pp, dp_replicate, dp_shard, cp, tp, (C,) each."""
    tp = np.ones_like(c["tp"])
    cp = c["tp"]
    shard = cp * c["cp"]
    replicate = shard * c["dp_shard"]
    return {"tp": tp, "cp": cp, "dp_shard": shard, "dp_replicate": replicate, "pp": replicate * c["dp_replicate"], "ep": tp}


def traffic(job: Job, group: Group) -> tuple[Traffic, ...]:
    """Everything the group's candidates send, per stage."""
    return (*_tensor(job, group), *_context(job, group), *_expert(job, group), *_pipeline(job, group), *_data(job, group))


def _per_stage(group: Group, value_C: Reals) -> Reals:
    return np.repeat(np.asarray(value_C, np.float64)[:, None], len(group.stages), axis=1)


def _layer_passes_CS(group: Group) -> Reals:
    """Layers of each stage times micro-batches, (C, S)."""
    return group.layers_SK.sum(axis=1)[None, :] * group.candidates["accumulation"][:, None].astype(np.float64)


def _again(group: Group) -> Reals:
    """How often forward runs: once, or twice under full recompute, (C, 1)."""
    return np.where(group.candidates.is_word("recompute", "full"), 2.0, 1.0)[:, None]


def _tensor(job: Job, group: Group) -> tuple[Traffic, ...]:
    """Megatron cuts: two all-reduces forward and two backward per layer, or an all-gather and a reduce-scatter in place
    of each under sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2). The embedding and the
    head add one each on their stages; the reference head gathers its logits."""
    c = group.candidates
    hidden = _per_stage(group, tokens(job, c) * job.model.hidden * BYTES[job.formats.compute])
    blocks = 2.0 * _layer_passes_CS(group)
    edges = (group.is_first[None, :] * 1.0 + group.is_last[None, :] * 1.0) * c["accumulation"][:, None]
    sequence = (c["sequence_parallel"] > 0)[:, None]
    place = {"size": c["tp"], "stride": strides(c)["tp"], "behind": "nothing"}
    reduced = np.where(sequence, 0.0, (blocks * _again(group) + edges) + (blocks + edges))
    forward, backward = blocks * _again(group) + edges, blocks + edges
    logits = tokens(job, c) * job.model.vocab * BYTES[job.formats.compute]
    heads = group.is_last[None, :] * c["accumulation"][:, None].astype(np.float64)
    return (
        Traffic("tp", "all_reduce", hidden, reduced, **place),
        Traffic("tp", "all_gather", hidden, np.where(sequence, forward + backward, 0.0), **place),
        Traffic("tp", "reduce_scatter", hidden, np.where(sequence, forward + backward, 0.0), **place),
        Traffic("tp", "all_gather", _per_stage(group, logits), heads, **place),
    )


def _context(job: Job, group: Group) -> tuple[Traffic, ...]:
    """Ring: keys and values travel past every rank, forward once, backward with their gradients (Liu et al. 2023, arXiv
    2310.01889). All-to-all: queries, keys, values and the output change places, forward and backward (Jacobs et al.
    2023, arXiv 2309.14509)."""
    c, shape = group.candidates, job.model
    number = BYTES[job.formats.compute]
    kv = tokens(job, c) * 2 * shape.kv_heads * shape.head_dim * number / c["tp"]
    qkvo = tokens(job, c) * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim * number / c["tp"]
    ring = c.is_word("context_parallel", "ring")[:, None]
    passes = _layer_passes_CS(group)
    place = {"size": c["cp"], "stride": strides(c)["cp"]}
    turns = np.where(ring, passes * (_again(group) + 2.0), 0.0)
    return (
        Traffic("cp", "all_gather", _per_stage(group, kv * c["cp"]), turns, behind="attention", **place),
        Traffic("cp", "all_to_all", _per_stage(group, qkvo), np.where(ring, 0.0, passes * (_again(group) + 1.0)), behind="nothing", **place),
    )


def _expert(job: Job, group: Group) -> tuple[Traffic, ...]:
    """Tokens go to their experts and come back, forward and backward (GShard: Lepikhin et al. 2020, arXiv 2006.16668)."""
    moe, c = job.model.moe, group.candidates
    if moe is None:
        return ()
    width = moe.latent or job.model.hidden
    sent = tokens(job, c) / np.where(c["sequence_parallel"] > 0, c["tp"], 1) * moe.top_k * width * BYTES[job.formats.compute]
    is_moe = np.array([any(m.is_expert for m in layer.matrices) for layer in layers(job.model)])
    passes = (group.layers_SK * is_moe).sum(axis=1)[None, :] * c["accumulation"][:, None].astype(np.float64)
    return (
        Traffic("ep", "all_to_all", _per_stage(group, sent), 2.0 * passes * (_again(group) + 1.0), c["ep"] * c["etp"], strides(c)["ep"], "nothing"),
    )


def _pipeline(job: Job, group: Group) -> tuple[Traffic, ...]:
    """Hidden states forward and their gradients backward, once per micro-batch and chunk, between neighbouring stages."""
    c = group.candidates
    payload = tokens(job, c) * job.model.hidden * BYTES[job.formats.compute]
    neighbours = (~group.is_first[None, :]).astype(np.float64) + (~group.is_last[None, :]).astype(np.float64)
    wrap = np.where((c["virtual_stages"] > 1)[:, None], 2.0, neighbours)
    count = wrap * (c["accumulation"] * c["virtual_stages"])[:, None]
    return (Traffic("pp", "send", _per_stage(group, payload), count if group.pp > 1 else 0.0 * count, c["pp"], strides(c)["pp"], "nothing"),)


def _data(job: Job, group: Group) -> tuple[Traffic, ...]:
    """Gradients and, under ZeRO, weights (Rajbhandari et al. 2020, arXiv 1910.02054, section 7).

    Replicas: one all-reduce of the gradients. ZeRO-1 adds sending the updated weights. fully_shard: weights are
    gathered for forward and, under ZeRO-3, again for backward, gradients are reduce-scattered, for every micro-batch
    unless a pipeline keeps them; HSDP all-reduces the shards between replicas.
    """
    c = group.candidates
    weights, step = _stage_elements(job, group), strides(c)
    formats = job.formats
    compute, reduce, stored = (BYTES[name] for name in (formats.compute, formats.reduce, formats.parameter))
    shards = c["dp_shard"] * c["cp"]
    one = np.ones_like(weights)
    micro = np.where(c["pp"] > 1, 1, c["accumulation"])[:, None] * one
    zero = c["zero"][:, None]
    everyone = {"size": c.data_parallel * c["cp"], "stride": step["cp"]}
    inside, outside = {"size": shards, "stride": step["cp"]}, {"size": c["dp_replicate"], "stride": step["dp_replicate"]}
    gathered_again = np.where(zero == 3, c["accumulation"][:, None], 0) * one
    gathers = np.where(zero == 3, c["accumulation"][:, None], micro)
    return (
        Traffic("dp", "all_reduce", reduce * weights, np.where(zero < 2, one, 0.0), behind="backward", **everyone),
        Traffic("dp", "all_gather", stored * weights, np.where(zero == 1, one, 0.0), behind="nothing", **everyone),
        Traffic("dp", "all_gather", compute * weights, np.where(zero >= 2, gathers, 0.0), behind="forward", **inside),
        Traffic("dp", "all_gather", compute * weights, gathered_again, behind="backward", **inside),
        Traffic("dp", "reduce_scatter", reduce * weights, np.where(zero >= 2, micro, 0.0), behind="backward", **inside),
        Traffic("dp", "all_reduce", reduce * weights / shards[:, None], np.where(zero >= 2, micro, 0.0), behind="backward", **outside),
    )


def _stage_elements(job: Job, group: Group) -> Reals:
    """Elements on one rank of every stage, cut by tp and ep only, (C, S)."""
    c = group.candidates
    one = np.ones_like(c["tp"])
    first, last = outer_elements(job.model, c["tp"], one)
    tied = job.model.tied and group.pp == 1
    outer = first[:, None] * group.is_first[None, :] + (0.0 if tied else 1.0) * last[:, None] * group.is_last[None, :]
    return group.layers_of(dense_CK(job.model, c, one) + expert_CK(job.model, c, one)) + outer


def is_interleaved(c: Candidates) -> Column:
    """1 where the schedule is interleaved, (C,)."""
    return (c["schedule"] == code("schedule", "interleaved")).astype(np.int64)


def attends(shape: ModelShape) -> bool:
    """Whether the model has attention heads at all."""
    return shape.heads > 0
