"""Bytes of one layout, one stage and one moment at a time (docs/memory_model.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from strategist.catalog import rows
from strategist.facts.job import Job
from strategist.facts.model import LayerKind
from strategist.facts.profile import BYTES
from strategist.memory.saved import saved_tensors
from tests.oracle.parameters import Held, held
from tests.oracle.stages import Layout, stage_kinds

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


def kept_per_token(job: Job, layout: Layout, kind: LayerKind, policy: str) -> float:
    """Bytes per token that one layer keeps for backward under a recompute policy."""
    ways = {"sequence": sequence_cut(layout), "heads": layout["tp"], "whole": 1}
    compute = BYTES[job.formats.compute]
    total = 0.0
    for tensor in saved_tensors(job.model, kind):
        if policy in tensor.policies:
            total += tensor.width * (4 if tensor.is_float32 else compute) / ways[tensor.cut]
    return total


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


def _activations(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind]) -> float:
    T, c, h = tokens(job, layout), BYTES[job.formats.compute], job.model.hidden
    per_token = {kind: kept_per_token(job, layout, kind, layout["recompute"]) for kind in set(kinds)}
    kept = sum(T * per_token[kind] for kind in kinds)
    if stage == 0:
        kept += 8 * T
    if stage == layout["pp"] - 1:
        kept += T * (h * c + 4) / sequence_cut(layout) + T * h * c
    return in_flight(layout, stage) * kept


def _logits(job: Job, layout: Layout, stage: int) -> float:
    if stage != layout["pp"] - 1:
        return 0.0
    c = BYTES[job.formats.compute]
    columns = -(-job.model.vocab // layout["tp"])
    return tokens(job, layout) * columns * (8 + 2 * c if c < 4 else 8 + 4)


def _temporaries(job: Job, layout: Layout, kinds: Sequence[LayerKind]) -> float:
    shape, T, c = job.model, tokens(job, layout), BYTES[job.formats.compute]
    routed = shape.moe.top_k * shape.moe.ffn if shape.moe else 0
    width = max(shape.ffn_hidden, routed, shape.heads * shape.head_dim)
    inside = T * c * ((3 if shape.mlp_gated else 2) * width / layout["tp"] + 2 * shape.hidden)
    policy = layout["recompute"]
    brought_back = [
        T * (kept_per_token(job, layout, kind, "none") - kept_per_token(job, layout, kind, policy))
        for kind in set(kinds)
    ]
    return inside + max([0.0, *brought_back])


def _gathered(job: Job, layout: Layout, whole: Held) -> tuple[float, float, float]:
    """Unsharded units in flight: at the loss, when backward starts, when backward ends."""
    one_data_rank = layout["dp_replicate"] * layout["dp_shard"] * layout["cp"] == 1
    if is_plain(layout) or (one_data_rank and job.formats.compute == job.formats.parameter):
        return 0.0, 0.0, 0.0
    c, r, tied = BYTES[job.formats.compute], BYTES[job.formats.reduce], job.model.tied
    zero, tiling = layout["zero"], layout["tiling"]
    blocks = whole.layers if zero < 3 else min(2 * whole.widest / tiling, whole.layers)
    kept = whole.behind if zero == 3 and not tied else whole.before + whole.behind
    at_loss = c * (blocks + kept)
    backward = at_loss + (c + r) * max(whole.widest / tiling, 0 if tied else whole.behind)
    backward += c * (whole.before + whole.behind) if tied else 0
    at_end = ((1 if zero == 3 and not tied else 2) * c + r) * (whole.before + (whole.behind if tied else 0))
    return at_loss, backward, at_end


def _gradients(job: Job, layout: Layout, whole: Held, sharded: Held) -> float:
    if layout["zero"] >= 2 and layout["pp"] > 1 and layout["accumulation"] > 1:
        return job.trainable * BYTES[job.formats.reduce] * whole.all
    if layout["offload"] in ("parameters", "nvme"):
        return 0.0
    return job.trainable * BYTES[job.formats.gradient] * (sharded if layout["zero"] >= 2 else whole).all


def _pipeline_buffers(job: Job, layout: Layout, stage: int) -> float:
    pp = layout["pp"]
    if pp == 1:
        return 0.0
    neighbours = 1 if stage in (0, pp - 1) else 2
    sent = tokens(job, layout) * job.model.hidden * BYTES[job.formats.compute]
    return float(neighbours * layout["accumulation"] * layout["virtual_stages"] * sent)


def _runtime(job: Job, layout: Layout) -> float:
    device = "cpu" if job.cluster.smallest.vendor == "CPU" else "gpu"
    axes = sum(layout[axis] > 1 for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"))
    return overhead(f"{device}_context_bytes") + overhead(f"{device}_communicator_bytes") * axes


def stage_moments(job: Job, layout: Layout, stage: int, kinds: Sequence[LayerKind]) -> list[dict[str, int]]:
    """The terms of one stage at each of the four moments, in whole bytes."""
    whole = held(job.model, layout, stage, kinds, sharded=False)
    sharded = held(job.model, layout, stage, kinds, sharded=True)
    weights_away = layout["offload"] in ("parameters", "nvme")
    stored, state = BYTES[job.formats.parameter], job.trainable * job.profile.state_bytes(job.workload.optimizer)
    at_rest = _gradients(job, layout, whole, sharded)
    early = at_rest if layout["accumulation"] > 1 else 0.0
    casts = is_plain(layout) and job.formats.compute != job.formats.parameter
    always = {
        "parameters": 0.0 if weights_away else stored * (sharded if layout["zero"] >= 2 else whole).all,
        "optimizer": 0.0 if layout["offload"] != "none" else state * (sharded if layout["zero"] >= 1 else whole).all,
        "bucket_buffers": BYTES[job.formats.compute] * whole.all if casts else 0.0,
        "pipeline_buffers": _pipeline_buffers(job, layout, stage),
        "runtime": _runtime(job, layout),
    }
    kept = _activations(job, layout, stage, kinds)
    at_loss, backward, at_end = _gathered(job, layout, whole)
    loss = {"gradients": early, "activations": kept, "logits": _logits(job, layout, stage), "gather_buffers": at_loss}
    first = {
        "gradients": early,
        "activations": kept,
        "gather_buffers": backward,
        "temporaries": _temporaries(job, layout, kinds),
    }
    moments = (loss, first, {"gradients": at_rest, "gather_buffers": at_end}, {"gradients": at_rest})
    return [_ledger(always | moment) for moment in moments]


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
