"""What selective recompute runs again where a run names the modules (NVIDIA/Megatron-LM:
megatron/core/transformer/transformer_config.py, recompute_modules): each of them whole, whatever of it backward needs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from strategist.facts.hardware import Gpu
from strategist.facts.job import Job
from strategist.facts.layers import Layer
from strategist.facts.model import LayerKind
from strategist.facts.profile import BYTES
from strategist.records import replace
from strategist.space.candidates import Candidates, Reals
from strategist.space.shares import crowding, sequence_cut, tokens_of
from strategist.timing import compute
from strategist.timing.rates import memory_Bps

_UP = ("q_up", "kv_up")
_DENSE = ("gate", "up", "down")


def again_by_module(
    job: Job, layer: Layer, kind: LayerKind, c: Candidates, forward: Mapping[str, Reals]
) -> dict[str, Reals]:
    """Seconds of one layer's forward, (C,) by term, that the modules which a run names take again; `forward` is all of it. Named modules run
    whole, their last product too (NVIDIA/Megatron-LM: tensor_parallel/random.py, CheckpointFunction)."""
    gpu, named = job.cluster.slowest.gpu, job.profile.redoes
    redone = replace(layer, matrices=tuple(m for m in layer.matrices if _is_redone(m.name, m.is_expert, named)))
    routed = "moe" in named and kind.ffn == "moe"
    none = np.zeros(len(c))
    found = {
        "matmul": compute.matmul_of(job, gpu, redone, c),
        "attention": forward["attention"] if "core_attn" in named else none,
        "elementwise": _light(job, gpu, layer, kind, c) + compute.cast_seconds(job, gpu, redone, c),
        "host": forward["host"] * _launched(job, layer, redone, kind, c),
    }
    if "moe_dispatch" in forward:
        found["moe_dispatch"] = forward["moe_dispatch"] if routed else none
    return found


def _is_redone(name: str, is_expert: bool, named: tuple[str, ...]) -> bool:
    """Whether a matrix belongs to a module that runs again."""
    is_shared, is_projection = name.startswith("shared_"), name.startswith("latent_")
    return (
        ("moe" in named and (is_expert or is_shared or is_projection or name == "router"))
        or ("mlp" in named and name in _DENSE)
        or ("shared_experts" in named and is_shared)
        or ("mla_up_proj" in named and name in _UP)
    )


def _light(job: Job, gpu: Gpu, layer: Layer, kind: LayerKind, c: Candidates) -> Reals:
    """Seconds of the memory-bound kernels of these modules: norms on the residual stream, rotation behind the projections of latent
    attention, activations."""
    shape, kernels, named = job.model, job.profile.kernels, job.profile.redoes
    stream = kernels.norm * layer.norms * shape.hidden / sequence_cut(c) if "layernorm" in named else np.zeros(len(c))
    turned = kind.mixer == "mla" and "mla_up_proj" in named
    inside = kernels.rotary * (shape.heads + shape.kv_heads) * shape.head_dim if turned else 0.0
    active = (kernels.gated if shape.mlp_gated else kernels.plain) * _activated(job, kind, c)
    bytes_ = BYTES[job.formats.compute] * (stream + (inside + active) / c["tp"])
    return np.asarray(bytes_ * tokens_of(job, kind, c) / memory_Bps(gpu))


def _activated(job: Job, kind: LayerKind, c: Candidates) -> Reals:
    """Elements per token between the matrices of what runs again, (C,)."""
    shape, named = job.model, job.profile.redoes
    if kind.ffn == "dense":
        return np.full(len(c), float(shape.ffn_hidden * ("mlp" in named)))
    if kind.ffn != "moe" or shape.moe is None:
        return np.zeros(len(c))
    routed = shape.moe.top_k * shape.moe.ffn * crowding(job, c) * ("moe" in named or "moe_act" in named)
    return np.asarray(routed + shape.moe.shared_ffn * ("moe" in named or "shared_experts" in named))


def _launched(job: Job, layer: Layer, redone: Layer, kind: LayerKind, c: Candidates) -> Reals:
    """The share of a layer's launches in forward, (C,): those of a dense layer go with its matrices, what routing and experts add with them."""
    dense, again = (sum(not m.is_expert for m in one.matrices) for one in (layer, redone))
    all_launches = compute.launches(job, kind, c, "forward")
    plain = compute.launches(job, replace(kind, ffn="dense"), c, "forward")
    routed = (all_launches - plain) * ("moe" in job.profile.redoes)
    return np.asarray((plain * again / max(1, dense) + routed) / np.maximum(1.0, all_launches))
