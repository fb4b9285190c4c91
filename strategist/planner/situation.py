"""The words of the decision tables as numbers: does it fit, is it fast, is memory short. Each with its threshold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from strategist.catalog import rows
from strategist.facts.buildable import departures
from strategist.facts.job import Job
from strategist.facts.layers import sides_divide
from strategist.facts.model import LOOKED_UP, RUNS_IN_ORDER, ModelShape, layer_counts
from strategist.facts.profile import BYTES, engine_of
from strategist.facts.tables import served_tables
from strategist.facts.workload import FLOAT8_MULTIPLE
from strategist.memory.backward import Kept, is_kept
from strategist.memory.buffers import overhead
from strategist.memory.estimate import peak_memory
from strategist.records import dataclass
from strategist.space.candidates import MESH_COLUMNS, OPTION_COLUMNS, WORDS, Candidates, code, joined
from strategist.space.shares import dense_CK, expert_CK
from strategist.timing.collectives import bus_bandwidth, device_bandwidth_between_nodes
from strategist.timing.rates import shared_precisions, without_rate
from strategist.units import GB, GIB

Value = Any


@dataclass(frozen=True, slots=True)
class Threshold:
    """One border between yes and no, with its source."""

    name: str
    value: float
    unit: str
    source: str


def threshold(name: str) -> Threshold:
    """A threshold of the catalogue by name."""
    row = next(row for row in rows("thresholds") if row["name"] == name)
    return Threshold(name, float(row["value"]), row["unit"], row["source"])


def one(**values: int) -> Candidates:
    """A single candidate: everything plain except the given columns."""
    plain = dict.fromkeys((*MESH_COLUMNS, "micro_batch", "accumulation", "virtual_stages", "tiling"), 1)
    zeros = dict.fromkeys(set(OPTION_COLUMNS) - plain.keys(), 0)
    row = plain | zeros | values
    return Candidates({name: np.array([row[name]], np.int64) for name in (*MESH_COLUMNS, *OPTION_COLUMNS, *values)})


def question(job: Job, forbids: tuple[str, ...] = ()) -> dict[str, Value]:
    """Facts about the request that rules may ask for, before any candidate exists."""
    cluster, shape, work = job.cluster, job.model, job.workload
    node, buildable = cluster.groups[0].node, not departures(shape)
    return {
        "gpus": cluster.world,
        "nodes": cluster.nodes,
        "gpus_per_node": node.gpus,
        "fast_domain": min(node.fast_domain, cluster.world),
        "is_gpu": cluster.smallest.vendor != "CPU",
        "mixed_devices": len({group.node.gpu.name for group in cluster.groups}) > 1,
        "layers": shape.depth,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "ffn": shape.ffn_hidden,
        "vocab": 0 if LOOKED_UP in dict(shape.extra) else shape.vocab,
        "pads_vocabulary": job.profile.pads_vocabulary,
        "tied": shape.tied,
        "experts": shape.moe.experts if shape.moe else 0,
        "expert_ffn": shape.moe.ffn if shape.moe else 0,
        "has_experts": shape.moe is not None,
        "some_experts": len({kind.ffn == "moe" for kind in layer_counts(shape)}) > 1,
        "splittable": is_splittable(shape),
        "described": shape.kind != "module",
        "convolutional": shape.is_convolutional,
        "seq_len": work.seq_len,
        "target_len": work.targets if shape.enc_layers else 0,
        "global_batch": work.global_batch,
        "precision": work.precision,
        "optimizer": work.optimizer,
        "odd_sides": not sides_divide(shape, FLOAT8_MULTIPLE),
        "method": shape.method,
        "frozen": shape.frozen,
        "shared_ffn": shape.moe.shared_ffn if shape.moe else 0,
        "positions": shape.input_positions,
        "target_positions": shape.learned_positions if shape.enc_layers else 0,
        "rotary_positions": shape.rotary_positions,
        "norms_all_heads": shape.qk_norm == "full",
        "windowed": shape.window is not None and shape.window < work.seq_len,
        "buildable": buildable,
        "may_chunk_loss": buildable and job.profile.name == "strategist",
        "has_tables": bool(served_tables(shape)),
        "frontend": engine_of(job.frontend),
        "has_precision": without_rate(cluster, work.precision) is None,
        "precisions": shared_precisions(cluster),
    }


def is_splittable(shape: ModelShape) -> bool:
    """True for one uniform stack of layers that a pipeline can cut."""
    runs_in_order = shape.kind == "module" and bool(dict(shape.extra).get(RUNS_IN_ORDER))
    return runs_in_order or (shape.kind in ("decoder", "encoder", "hybrid", "ssm", "vit") and shape.enc_layers == 0)


def describe(job: Job, allow_recompute: bool = True) -> dict[str, Value]:
    """The whole situation: the question and every predicate, each with the numbers it rests on (GiB, GB/s)."""
    usable = job.usable_bytes
    (alone, leanest), widest = unsplit_bytes(job, allow_recompute), largest_layer_bytes(job)
    intra, inter = bus_bandwidth(job.cluster), device_bandwidth_between_nodes(job.cluster)
    fast_intra, fast_inter = threshold("fast_intra").value, threshold("fast_inter").value
    long = threshold("long_sequence").value
    return question(job) | {
        "peak_one_gpu": alone / GIB,
        "largest_layer": widest / GIB,
        "best_unsplit": leanest / GIB,
        "usable": usable / GIB,
        "intra_bandwidth": intra / GB,
        "inter_bandwidth": inter / GB,
        "intra_threshold": fast_intra,
        "inter_threshold": fast_inter,
        "fits_one_gpu": alone <= usable,
        "largest_layer_fits": widest <= usable,
        "fast_intra": intra / GB >= fast_intra,
        "fast_inter": inter / GB >= fast_inter,
        "memory_short": leanest > usable,
        "long_threshold": long,
        "long_sequence": job.workload.seq_len > long,
    }


def unsplit_bytes(job: Job, allow_recompute: bool = True) -> tuple[int, int]:
    """Two peaks at micro-batch 1 without tp, pp and offload: on one device without sharding, under the leanest recompute
    allowed; and of the leanest layout of all, ZeRO-3 over all devices, recompute if allowed."""
    levels = range(len(WORDS["recompute"]) if allow_recompute else 1)
    alone = [one(recompute=level, accumulation=job.workload.global_batch) for level in levels]
    world = job.cluster.world
    sharded = one(
        dp_shard=world, zero=3 if world > 1 else 0, recompute=code("recompute", "full") if allow_recompute else 0
    )
    peaks = peak_memory(job, joined([*alone, sharded])).device
    return int(peaks[:-1].min()), int(peaks[-1])


def largest_layer_bytes(job: Job) -> int:
    """Bytes of the widest single layer: compute-precision weights, their gradient as far as they are trained, and its activations at micro-batch 1.

    The vocabulary matrix counts as a layer; its activations are the logits.
    """
    alone = one()
    unit = np.ones(1, np.int64)
    compute = BYTES[job.formats.compute]
    weights = dense_CK(job.model, alone, unit) + expert_CK(job.model, alone, unit)
    blocks = (1.0 + job.trainable) * compute * weights + Kept(job, alone).rows(is_kept)
    seen = job.workload.targets if job.model.enc_layers else job.workload.seq_len
    head = (1.0 + job.trainable) * compute * job.model.vocab * job.model.hidden + compute * seen * job.model.vocab
    context = overhead("cpu_context_bytes" if job.cluster.smallest.vendor == "CPU" else "gpu_context_bytes")
    return int(max(float(blocks.max(initial=0.0)), head) + context)


def near_thresholds(situation: Mapping[str, Value]) -> tuple[str, ...]:
    """Predicates whose value lies within the declared factor of its threshold: a small error would flip them."""
    factor = threshold("near_factor").value
    pairs = (("intra_bandwidth", "intra_threshold"), ("inter_bandwidth", "inter_threshold"))
    asked = {"intra_bandwidth": situation["gpus_per_node"] > 1, "inter_bandwidth": situation["nodes"] > 1}
    near = [
        value
        for value, border in pairs
        if asked[value] and situation[border] / factor <= situation[value] <= situation[border] * factor
    ]
    return tuple(near)
