"""Whatever the layout, training is the training of one process: the executor's one promise, in float64.

In float64 a right layout differs by rounding (1e-15); a missing reduction or a wrong scale differs by 1e-4 and more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from strategist.facts.model import Adapters, ModelShape
from tests.examples import by_night
from tests.plans import even_stages, make_plan, stages_of, tiny_gpt2, tiny_llama, tiny_mixtral, uneven

pytestmark = pytest.mark.slow

LOSS_BOUND, PARAMETER_BOUND, NORM_BOUND = 1e-12, 1e-9, 1e-11


@dataclass(frozen=True)
class Case:
    """A layout and what it trains; the micro-batch follows from the global batch."""

    name: str
    layout: dict[str, Any]
    shape: dict[str, Any] = field(default_factory=dict)
    ragged: bool = False
    clip: float | None = None
    model: Callable[..., ModelShape] = tiny_llama


PLAIN = {"dp_replicate": 2}
SHARDED = {"dp_shard": 2, "zero": 3}
ZERO1 = {"dp_shard": 2, "zero": 1}
V2 = {"pp": 2, "virtual_stages": 2}
BFS = V2 | {"schedule": "looped_bfs"}
ZB = {"pp": 2, "schedule": "zb_h1", "accumulation": 4}
ZBV = V2 | {"schedule": "zbv", "accumulation": 4}
DUAL = V2 | {"schedule": "dualpipev", "accumulation": 4}
SP = {"tp": 2, "sequence_parallel": True}
TP_MOE = {"tp": 2, "etp": 2}
CHUNKED = {"loss": "chunked"}
FIRST = {"recompute": "full", "recompute_layers": 1}
SECOND = {"recompute": "full", "recompute_every": 2}
SHARED_EXPERT = {"moe": {"shared_ffn": 16, "shared_gate": True}}
FIRST_DENSE = {"ffn_hidden": 48, "layers": 4, "moe": {"first_dense": 1, "layers": 3, "shared_ffn": 16}}
RING, SWAP = ({"cp": 2, "context_parallel": kind} for kind in ("ring", "all-to-all"))
SPLIT = {"cp": 4, "context_parallel": "hierarchical", "cp_inner": 2}
WINDOWED = {"window": 5, "full_every": 2, "pos": "rope", "pos_rows": 0, "kv_heads": 4}

CASES = (
    Case("single", {"accumulation": 2, "recompute": "selective"}),
    Case("ddp2", PLAIN | {"accumulation": 4}, ragged=True),
    Case("threads2", PLAIN | {"replicas": "threads", "accumulation": 2, "recompute": "full"}, {"tied": True}, ragged=True, clip=0.5),
    Case("threads4", PLAIN | {"dp_replicate": 4, "replicas": "threads", "recompute": "selective"}, ragged=True, clip=0.5),
    Case("ddp2-full-clip", PLAIN | {"recompute": "full"}, {"tied": True}, clip=0.5),
    Case("zero1", {"dp_shard": 2, "zero": 1, "accumulation": 2}, ragged=True, clip=0.5),
    Case("zero2", {"dp_shard": 2, "zero": 2, "accumulation": 2, "recompute": "selective"}, ragged=True),
    Case("zero3", SHARDED | {"recompute": "full"}, {"tied": True}),
    Case("fsdp4", {"dp_shard": 4, "zero": 3, "accumulation": 2}, {"vocab": 63}, ragged=True, clip=0.5),
    Case("hsdp", SHARDED | PLAIN, {"tied": True, "qkv_bias": True}, clip=0.5),
    Case("tp2", {"tp": 2, "accumulation": 2}, {"qk_norm": "head"}, ragged=True, clip=0.5),
    Case("tp2-sp", SP | {"recompute": "full"}, {"tied": True, "qk_norm": "head"}, clip=0.5),
    Case("tp4-sp", {"tp": 4, "sequence_parallel": True, "recompute": "selective"}, {"qkv_bias": True, "vocab": 62}),
    Case("pp2-gpipe", {"pp": 2, "schedule": "gpipe", "accumulation": 4}, {"tied": True}, clip=0.5),
    Case("pp2-1f1b", {"pp": 2, "accumulation": 4, "recompute": "full"}, ragged=True, clip=0.5),
    Case("pp4-1f1b", {"pp": 4, "accumulation": 8, "recompute": "selective", "stages": even_stages(6, 4)}, {"layers": 6}),
    Case("pp2-weighted", {"pp": 2, "accumulation": 4, "stage_split": "weighted"}, {"layers": 6, "vocab": 640}, clip=0.5),
    Case("pp4-tied", {"pp": 4, "accumulation": 4}, {"tied": True, "layers": 4}, ragged=True, clip=0.5),
    Case("fsdp2-tp2", SHARDED | SP | {"recompute": "full"}, {"tied": True, "vocab": 62}, ragged=True, clip=0.5),
    Case("fsdp2-tp2-plain", {"dp_shard": 2, "zero": 2, "tp": 2, "accumulation": 2}, {"qk_norm": "head"}, clip=0.5),
    Case("ddp2-tp2", PLAIN | {"tp": 2, "accumulation": 2, "recompute": "selective"}, {"tied": True}, clip=0.5),
    Case("pp2-tp2", {"pp": 2, "accumulation": 4} | SP, {"tied": True, "qk_norm": "head"}, ragged=True, clip=0.5),
    Case("pp2-ddp2", PLAIN | {"pp": 2, "accumulation": 2}, {"tied": True}, ragged=True),
    Case("pp2-tp2-ddp2", PLAIN | SP | {"pp": 2, "accumulation": 2}, {"tied": True}, ragged=True, clip=0.5),
    Case("pp2-fsdp2", SHARDED | {"pp": 2, "accumulation": 4, "recompute": "full"}, ragged=True, clip=0.5),
    Case("pp2-zero2", {"pp": 2, "dp_shard": 2, "zero": 2, "accumulation": 4, "schedule": "gpipe"}, clip=0.5),
    Case("pp2-tp2-fsdp2", SHARDED | SP | {"pp": 2, "accumulation": 2}, {"tied": True}, ragged=True, clip=0.5),
    Case("ddp2-first", PLAIN | FIRST | {"accumulation": 2}, {"tied": True}, ragged=True, clip=0.5),
    Case("zero3-first-compiled", SHARDED | FIRST | {"compile": True}, {"layers": 3}, ragged=True),
    Case("pp2-v2-first", V2 | FIRST | {"accumulation": 4}, {"layers": 8}, ragged=True, clip=0.5),
    Case("pp2-fsdp2-first", SHARDED | FIRST | {"pp": 2, "accumulation": 4, "recompute_layers": 2}, {"layers": 6}, ragged=True, clip=0.5),
    Case("ddp2-second", PLAIN | SECOND | {"accumulation": 2}, {"layers": 3, "tied": True}, ragged=True, clip=0.5),
    Case("zero3-second-compiled", SHARDED | SECOND | {"compile": True}, {"layers": 4}, ragged=True),
    Case("pp2-v2-second", V2 | SECOND | {"accumulation": 4}, {"layers": 8}, ragged=True, clip=0.5),
    Case("pp2-fsdp2-second", SHARDED | SECOND | {"pp": 2, "accumulation": 4}, {"layers": 6}, ragged=True, clip=0.5),
    Case("pp2-by-stage", {"pp": 2, "accumulation": 4, "recompute": "full", "recompute_stages": (2, 0)}, {"layers": 6, "tied": True}, ragged=True, clip=0.5),
    Case("pp4-by-stage", {"pp": 4, "accumulation": 8, "recompute": "full", "recompute_stages": (2, 1, 1, 0)}, {"layers": 8}, ragged=True, clip=0.5),
    Case("pp3-balanced", {"pp": 3, "accumulation": 4, "recompute": "full", "recompute_stages": (1, 2, 0), "stage_split": "balanced", "stages": stages_of(2, 3, 1)}, {"layers": 6, "tied": True}, ragged=True, clip=0.5),
    Case("pp2-v2-by-stage", V2 | {"accumulation": 4, "recompute": "full", "recompute_stages": (2, 1)}, {"layers": 8}, ragged=True, clip=0.5),
    Case("pp2-fsdp2-by-stage", SHARDED | {"pp": 2, "schedule": "gpipe", "accumulation": 4, "recompute": "full", "recompute_stages": (1, 3)}, {"layers": 6}, ragged=True, clip=0.5),
    Case("fsdp2-tp2-compiled", SHARDED | SP | {"compile": True}, {"qk_norm": "head"}, clip=0.5),
    Case("pp2-compiled", {"pp": 2, "accumulation": 4, "compile": True, "recompute": "full"}, ragged=True),
    Case("pp2-v2", V2 | {"accumulation": 4, "recompute": "full"}, {"layers": 4}, ragged=True, clip=0.5),
    Case("pp2-v2-tied", V2 | {"accumulation": 2}, {"layers": 4, "tied": True}, ragged=True, clip=0.5),
    Case("pp2-v2-tp2", V2 | SP | {"accumulation": 2}, {"layers": 4, "qk_norm": "head"}, ragged=True, clip=0.5),
    Case("pp2-v2-fsdp2", V2 | SHARDED | {"accumulation": 4, "recompute": "selective"}, {"layers": 4}, clip=0.5),
    Case("pp4-v2", V2 | {"pp": 4, "accumulation": 8}, {"layers": 8}, ragged=True, clip=0.5),
    Case("pp2-v2-zero2", V2 | {"dp_shard": 2, "zero": 2, "accumulation": 2}, {"layers": 4}, ragged=True, clip=0.5),
    Case("pp2-v2-ddp2", V2 | PLAIN | {"accumulation": 4}, {"layers": 4, "tied": True}, ragged=True, clip=0.5),
    Case("pp2-bfs", BFS | {"accumulation": 4, "recompute": "full"}, {"layers": 4, "tied": True}, ragged=True, clip=0.5),
    Case("pp2-bfs-fsdp2", BFS | SHARDED | {"accumulation": 4, "recompute": "selective"}, {"layers": 4}, ragged=True, clip=0.5),
    Case("pp2-bfs-ddp2", BFS | PLAIN | {"accumulation": 2}, {"layers": 4}, ragged=True, clip=0.5),
    Case("pp4-bfs", BFS | {"pp": 4, "accumulation": 8}, {"layers": 8, "tied": True}, ragged=True, clip=0.5),
    Case("pp2-zb", ZB, {"tied": True}, ragged=True, clip=0.5),
    Case("pp4-zb", ZB | {"pp": 4, "accumulation": 8}, {"layers": 4, "qk_norm": "head"}, ragged=True, clip=0.5),
    Case("pp2-zb-ddp2", ZB | PLAIN | {"accumulation": 2}, ragged=True, clip=0.5),
    Case("pp2-zb-zero2", ZB | SHARDED | {"zero": 2}, {"tied": True}, ragged=True, clip=0.5),
    Case("pp2-zb-tp2", ZB | SP, ragged=True, clip=0.5),
    Case("pp2-zbv", ZBV, {"layers": 4}, ragged=True, clip=0.5),
    Case("pp4-zbv", ZBV | {"pp": 4, "accumulation": 8}, {"layers": 8, "qk_norm": "head"}, ragged=True, clip=0.5),
    Case("pp2-zbv-ddp2", ZBV | PLAIN, {"layers": 4}, ragged=True, clip=0.5),
    Case("pp2-zbv-zero2", ZBV | SHARDED | {"zero": 2}, {"layers": 4}, ragged=True, clip=0.5),
    Case("pp2-zbv-tp2", ZBV | SP, {"layers": 4}, ragged=True, clip=0.5),
    Case("pp2-dual", DUAL | {"accumulation": 8}, {"layers": 4}, ragged=True, clip=0.5),
    Case("pp4-dual", DUAL | {"pp": 4, "accumulation": 8}, {"layers": 8, "qk_norm": "head"}, ragged=True, clip=0.5),
    Case("pp2-dual-ddp2", DUAL | PLAIN, {"layers": 4}, ragged=True, clip=0.5),
    Case("pp2-dual-zero2", DUAL | SHARDED | {"zero": 2}, {"layers": 4}, ragged=True, clip=0.5),
    Case("pp2-dual-tp2", DUAL | SP, {"layers": 4}, ragged=True, clip=0.5),
    Case("zero3-offload", SHARDED | {"accumulation": 2, "offload": "parameters"}, ragged=True, clip=0.5),
    Case("zero3-offload-nvme", SHARDED | {"accumulation": 2, "offload": "nvme"}, ragged=True, clip=0.5),
    Case("fsdp4-offload-nvme", {"dp_shard": 4, "zero": 3, "offload": "nvme", "recompute": "full"}, {"vocab": 63, "tied": True}, ragged=True, clip=0.5),
    Case("hsdp-offload-nvme", SHARDED | PLAIN | {"offload": "nvme"}, ragged=True),
    Case("zero3-tiled", SHARDED | {"tiling": 3, "accumulation": 2}, {"qkv_bias": True, "qk_norm": "head"}, ragged=True, clip=0.5),
    Case("single-tiled-full", {"zero": 3, "tiling": 4, "recompute": "full", "offload": "parameters"}, {"tied": True}, ragged=True, clip=0.5),
    Case("fsdp4-tiled-nvme", {"dp_shard": 4, "zero": 3, "tiling": 2, "offload": "nvme", "recompute": "full"}, {"ffn_hidden": 42}, ragged=True, clip=0.5),
    Case("hsdp-tiled", SHARDED | PLAIN | {"tiling": 8, "offload": "parameters"}, ragged=True, clip=0.5),
    Case("cp2-tiled", RING | {"zero": 3, "tiling": 5}, {"tied": True}, ragged=True, clip=0.5),
    Case("single-offload-optimizer", {"offload": "optimizer", "accumulation": 2}, {"tied": True}, ragged=True, clip=0.5),
    Case("ddp2-offload-optimizer", PLAIN | {"offload": "optimizer"}, ragged=True, clip=0.5),
    Case("zero2-offload-optimizer", {"dp_shard": 2, "zero": 2, "offload": "optimizer"}, {"vocab": 63}, ragged=True, clip=0.5),
    Case("fsdp2-tp2-offload-optimizer", SHARDED | SP | {"offload": "optimizer"}, {"tied": True}, ragged=True, clip=0.5),
    Case("cp2-pp2-offload-optimizer", RING | {"pp": 2, "offload": "optimizer", "accumulation": 2}, {"tied": True}, clip=0.5),
    Case("zero1-replicas", PLAIN | ZERO1 | {"accumulation": 2}, {"tied": True}, ragged=True, clip=0.5),
    Case("tp2-zero1", ZERO1 | SP | {"accumulation": 2, "recompute": "full"}, {"qk_norm": "head"}, ragged=True, clip=0.5),
    Case("pp2-zero1", ZERO1 | {"pp": 2, "accumulation": 4}, {"tied": True}, ragged=True, clip=0.5),
    Case("pp2-v2-zero1", ZERO1 | V2 | {"accumulation": 2}, {"layers": 4}, ragged=True, clip=0.5),
    Case("pp2-tp2-zero1", ZERO1 | SP | {"pp": 2, "accumulation": 4}, {"vocab": 62}, ragged=True, clip=0.5),
    Case("tp2-zero1-replicas", ZERO1 | PLAIN | {"tp": 2, "accumulation": 2}, ragged=True, clip=0.5),
    Case("cp2-ring", RING | {"accumulation": 2, "recompute": "full"}, {"tied": True}, ragged=True, clip=0.5),
    Case("cp4-ring", RING | {"cp": 4}, {"qk_norm": "head"}, ragged=True, clip=0.5),
    Case("cp2-all-to-all", SWAP | {"accumulation": 2, "recompute": "selective"}, {"qk_norm": "full"}, ragged=True, clip=0.5),
    Case("cp4-all-to-all", SWAP | {"cp": 4, "recompute": "full"}, {"tied": True}, ragged=True, clip=0.5),
    Case("cp4-hierarchical", SPLIT | {"accumulation": 2, "recompute": "full"}, {"tied": True}, ragged=True, clip=0.5),
    Case("cp4-hierarchical-zero3", SPLIT | {"zero": 3, "compile": True}, {"qk_norm": "head"}, ragged=True, clip=0.5),
    Case("cp4-hierarchical-zero1", SPLIT | {"zero": 1, "accumulation": 2}, {"qk_norm": "full", "kv_heads": 8}, ragged=True, clip=0.5),
    Case("cp4-hierarchical-tp2", SPLIT | SP, {"kv_heads": 8}, ragged=True, clip=0.5),
    Case("cp4-hierarchical-ddp2", SPLIT | PLAIN | {"accumulation": 2}, {"qkv_bias": True}, ragged=True, clip=0.5),
    Case("cp8-hierarchical", SPLIT | {"cp": 8}, ragged=True, clip=0.5),
    Case("cp2-ring-ddp2", RING | PLAIN | {"accumulation": 2}, {"qkv_bias": True}, ragged=True, clip=0.5),
    Case("cp2-all-to-all-ddp2", SWAP | PLAIN | {"compile": True}, ragged=True, clip=0.5),
    Case("cp2-ring-fsdp2", RING | SHARDED | {"accumulation": 2}, ragged=True, clip=0.5),
    Case("cp2-all-to-all-fsdp2", SWAP | SHARDED | {"recompute": "selective"}, {"tied": True, "vocab": 63}, ragged=True, clip=0.5),
    Case("cp2-ring-zero3", RING | {"zero": 3, "compile": True}, ragged=True, clip=0.5),
    Case("cp2-ring-zero2", RING | {"zero": 2, "accumulation": 2}, ragged=True, clip=0.5),
    Case("cp2-all-to-all-hsdp", SWAP | PLAIN | {"zero": 3}, {"tied": True}, ragged=True, clip=0.5),
    Case("cp2-ring-zero1", RING | ZERO1 | {"accumulation": 2}, ragged=True, clip=0.5),
    Case("cp2-ring-tp2", RING | SP, {"qk_norm": "head", "tied": True}, ragged=True, clip=0.5),
    Case("cp2-all-to-all-tp2", SWAP | {"tp": 2, "accumulation": 2}, {"kv_heads": 8}, ragged=True, clip=0.5),
    Case("cp2-all-to-all-fsdp2-tp2", SWAP | SHARDED | SP, ragged=True, clip=0.5),
    Case("pp2-cp2-ring", RING | {"pp": 2, "accumulation": 4}, {"tied": True}, ragged=True, clip=0.5),
    Case("hsdp-tp2", SHARDED | PLAIN | {"tp": 2}, {"qk_norm": "head"}, clip=0.5),
    Case("ddp2-server", PLAIN | {"tables": "server", "accumulation": 2}, {"vocab": 97}, ragged=True, clip=0.5),
    Case("single-chunked", CHUNKED | {"accumulation": 2, "recompute": "selective"}, ragged=True, clip=0.5),
    Case("ddp2-chunked", CHUNKED | PLAIN | {"accumulation": 2}, {"tied": True, "vocab": 97}, ragged=True, clip=0.5),
    Case("threads2-chunked", CHUNKED | PLAIN | {"replicas": "threads"}, {"tied": True}, ragged=True, clip=0.5),
    Case("zero1-chunked", CHUNKED | ZERO1 | {"recompute": "full"}, {"vocab": 100}, ragged=True, clip=0.5),
    Case("zero2-chunked", CHUNKED | {"dp_shard": 2, "zero": 2, "accumulation": 2}, {"vocab": 97}, ragged=True, clip=0.5),
    Case("zero3-chunked-offload", CHUNKED | SHARDED | {"offload": "parameters"}, {"vocab": 31}, ragged=True, clip=0.5),
    Case("hsdp-chunked", CHUNKED | SHARDED | PLAIN, {"tied": True, "vocab": 161}, ragged=True, clip=0.5),
    Case("cp2-ring-chunked", CHUNKED | RING | SHARDED, {"vocab": 97}, ragged=True, clip=0.5),
)  # fmt: skip


GPT = (
    Case("single", {"accumulation": 2, "recompute": "selective"}, ragged=True),
    Case("ddp2", PLAIN | {"recompute": "full"}, ragged=True, clip=0.5),
    Case("zero1", {"dp_shard": 2, "zero": 1, "accumulation": 2}, ragged=True),
    Case("zero2", {"dp_shard": 2, "zero": 2, "accumulation": 2}, {"tied": False, "lm_head_bias": True}, ragged=True),
    Case("zero3-offload", SHARDED | {"offload": "parameters"}, {"tied": False}, ragged=True, clip=0.5),
    Case("hsdp", SHARDED | PLAIN | {"recompute": "selective"}, {"vocab": 63}, clip=0.5),
    Case("zero3-tiled", SHARDED | {"tiling": 7, "recompute": "full"}, {"tied": False}, ragged=True, clip=0.5),
    Case("tp2", {"tp": 2, "accumulation": 2, "recompute": "selective"}, ragged=True, clip=0.5),
    Case("tp2-sp", SP | {"recompute": "full"}, {"tied": False, "lm_head_bias": True}, ragged=True, clip=0.5),
    Case("tp2-window", {"tp": 2}, WINDOWED | {"norm": "layernorm_nonparam", "mlp_act": "relu2"}, clip=0.5),
    Case("fsdp2-tp2", SHARDED | SP, {"norm": "layernorm_nobias"}, ragged=True, clip=0.5),
    Case("pp2-tp2", {"pp": 2, "schedule": "gpipe", "accumulation": 4} | SP, ragged=True, clip=0.5),
    Case("pp2-v2-fsdp2", V2 | SHARDED | {"accumulation": 4, "recompute": "full"}, {"layers": 4}, ragged=True, clip=0.5),
    Case("pp2-zb-zero1", ZB | ZERO1, ragged=True, clip=0.5),
    Case("pp2-zbv-zero1", ZBV | ZERO1, {"layers": 4, "tied": False}, ragged=True, clip=0.5),
    Case("cp2-ring", RING, ragged=True, clip=0.5),
    Case("cp2-ring-tp2", RING | SP, {"tied": False}, ragged=True, clip=0.5),
    Case("zero3-chunked", CHUNKED | SHARDED | {"accumulation": 2}, {"tied": False, "lm_head_bias": True}, ragged=True, clip=0.5),
    Case("cp2-all-to-all-window", SWAP, WINDOWED | {"norm": "layernorm_nobias"}, ragged=True, clip=0.5),
)  # fmt: skip

MOE = (
    Case("single", {"accumulation": 2, "recompute": "selective"}, SHARED_EXPERT, ragged=True),
    Case("threads2", PLAIN | {"replicas": "threads", "accumulation": 2}, ragged=True, clip=0.5),
    Case("ddp2", PLAIN | {"accumulation": 2, "recompute": "full"}, ragged=True, clip=0.5),
    Case("zero2", {"dp_shard": 2, "zero": 2, "accumulation": 2, "recompute": "selective"}, ragged=True, clip=0.5),
    Case("fsdp4", {"dp_shard": 4, "zero": 3, "recompute": "full"}, {"moe": {"experts": 3, "ffn": 22}}, ragged=True, clip=0.5),
    Case("zero3-offload", SHARDED | {"offload": "parameters"}, SHARED_EXPERT, clip=0.5),
    Case("hsdp", SHARDED | PLAIN, FIRST_DENSE | {"qk_norm": "full"}, ragged=True, clip=0.5),
    Case("tp2", TP_MOE | {"accumulation": 2, "recompute": "selective"}, SHARED_EXPERT, ragged=True, clip=0.5),
    Case("tp2-sp", TP_MOE | SP | {"recompute": "full"}, FIRST_DENSE, ragged=True, clip=0.5),
    Case("fsdp2-tp2", TP_MOE | SHARDED | SP, SHARED_EXPERT, ragged=True, clip=0.5),
    Case("pp2-tp2", {"pp": 2, "accumulation": 4} | TP_MOE | SP, {"mlp_gated": False, "tied": True}, ragged=True, clip=0.5),
    Case("pp2-v2-fsdp2", V2 | SHARDED | {"accumulation": 4, "recompute": "full"}, FIRST_DENSE, ragged=True, clip=0.5),
    Case("ddp2-compiled", PLAIN | {"compile": True}, SHARED_EXPERT, ragged=True, clip=0.5),
    Case("cp2-ring-fsdp2", RING | SHARDED, SHARED_EXPERT, ragged=True, clip=0.5),
    Case("cp4-hierarchical-ep2", SPLIT | {"zero": 3, "ep": 2}, SHARED_EXPERT, ragged=True, clip=0.5),
    Case("ep2", SHARDED | {"ep": 2, "accumulation": 2, "recompute": "full"}, SHARED_EXPERT, ragged=True, clip=0.5),
    Case("ep2-fsdp4", {"dp_shard": 4, "zero": 3, "ep": 2, "recompute": "selective"}, ragged=True, clip=0.5),
    Case("ep4-zero2", {"dp_shard": 4, "zero": 2, "ep": 4, "accumulation": 2, "recompute": "selective"}, {"moe": {"top_k": 1}}, ragged=True, clip=0.5),
    Case("ep2-hsdp", SHARDED | PLAIN | {"ep": 2}, FIRST_DENSE, ragged=True, clip=0.5),
    Case("ep2-cp2", RING | {"zero": 3, "ep": 2, "recompute": "full"}, SHARED_EXPERT, ragged=True, clip=0.5),
    Case("pp2-ep2", {"pp": 2, "dp_shard": 2, "zero": 3, "ep": 2, "accumulation": 2}, FIRST_DENSE, ragged=True, clip=0.5),
    Case("ep2-etp2", TP_MOE | SHARDED | {"ep": 2, "accumulation": 2}, SHARED_EXPERT, ragged=True, clip=0.5),
    Case("ep2-etp2-sp", TP_MOE | SP | SHARDED | {"ep": 2, "recompute": "full"}, FIRST_DENSE, ragged=True, clip=0.5),
    Case("tp2-ep2", SP | SHARDED | {"ep": 2, "accumulation": 2}, SHARED_EXPERT, ragged=True, clip=0.5),
    Case("tp2-ep4", SP | {"dp_shard": 2, "zero": 2, "ep": 4, "recompute": "selective"}, FIRST_DENSE, ragged=True, clip=0.5),
    Case("tp2-ep2-alone", SP | {"ep": 2, "accumulation": 2}, ragged=True, clip=0.5),
    Case("ep2-ddp2", PLAIN | {"ep": 2, "accumulation": 2}, SHARED_EXPERT, ragged=True, clip=0.5),
    Case("ep2-ddp4", {"dp_replicate": 4, "ep": 2, "recompute": "full"}, FIRST_DENSE, ragged=True, clip=0.5),
    Case("ep2-zero1", ZERO1 | {"ep": 2, "accumulation": 2, "recompute": "full"}, SHARED_EXPERT, ragged=True, clip=0.5),
    Case("ep2-zero1-4", {"dp_shard": 4, "zero": 1, "ep": 2}, FIRST_DENSE, ragged=True, clip=0.5),
    Case("ep2-zero1-replicas", ZERO1 | PLAIN | {"ep": 2, "accumulation": 2}, ragged=True, clip=0.5),
    Case("tp2-ep4-zero1", SP | ZERO1 | {"ep": 4}, SHARED_EXPERT, ragged=True, clip=0.5),
    Case("ep2-etp2-zero1", TP_MOE | ZERO1 | {"ep": 2, "accumulation": 2}, ragged=True, clip=0.5),
    Case("pp2-ep2-zero1", {"pp": 2, "dp_shard": 2, "zero": 1, "ep": 2, "accumulation": 2}, FIRST_DENSE, ragged=True, clip=0.5),
    Case("ep2-cp2-zero1", RING | {"zero": 1, "ep": 2}, ragged=True, clip=0.5),
    Case("ep2-zero2-offload-optimizer", {"dp_shard": 4, "zero": 2, "ep": 2, "offload": "optimizer"}, SHARED_EXPERT, ragged=True, clip=0.5),
    Case("ep2-zero3-offload", SHARDED | {"ep": 2, "offload": "parameters", "accumulation": 2}, ragged=True, clip=0.5),
    Case("ep2-zero3-offload-nvme", SHARDED | {"ep": 2, "offload": "nvme"}, SHARED_EXPERT, ragged=True, clip=0.5),

)  # fmt: skip
UNEVEN = (
    Case("ddp2", PLAIN | {"accumulation": 3, "uneven_batch": uneven((1, 3), (1, 1))}, {"tied": True}, ragged=True, clip=0.5),
    Case("ddp3", {"dp_replicate": 3, "accumulation": 4, "recompute": "full", "uneven_batch": uneven((1, 4), (2, 2))}, ragged=True, clip=0.5),
    Case("ddp2-chunked-compiled", PLAIN | CHUNKED | {"accumulation": 7, "compile": True, "uneven_batch": uneven((1, 1), (1, 7))}, {"vocab": 97}, ragged=True, clip=0.5),
    Case("zero1", ZERO1 | {"accumulation": 3, "recompute": "selective", "uneven_batch": uneven((1, 1), (1, 3))}, ragged=True, clip=0.5),
    Case("zero1-3-muon", {"dp_shard": 3, "zero": 1, "accumulation": 2, "optimizer": "muon", "uneven_batch": uneven((2, 1), (1, 2))}, ragged=True, clip=0.5),
    Case("ddp2-tp2", PLAIN | SP | {"accumulation": 3, "uneven_batch": uneven((1, 3), (1, 1))}, {"tied": True}, ragged=True, clip=0.5),
    Case("zero1-tp2", ZERO1 | {"tp": 2, "accumulation": 3, "uneven_batch": uneven((1, 1), (1, 3))}, ragged=True, clip=0.5),
    Case("gpt-ddp2", PLAIN | {"accumulation": 3, "uneven_batch": uneven((1, 1), (1, 3))}, ragged=True, clip=0.5, model=tiny_gpt2),
    Case("moe-ddp2", PLAIN | {"accumulation": 3, "uneven_batch": uneven((1, 3), (1, 1))}, SHARED_EXPERT, ragged=True, clip=0.5, model=tiny_mixtral),
)  # fmt: skip
ADAPTED = {"adapters": Adapters(rank=3, alpha=6, targets=("q", "k", "v", "o", "gate", "up", "down"))}
OF_ATTENTION = {"adapters": Adapters(rank=3, alpha=6, targets=("q", "k", "v", "o"))}
LORA = (
    Case("single", {"accumulation": 2, "recompute": "selective"}, ADAPTED, ragged=True),
    Case("ddp2", PLAIN | {"accumulation": 2}, ADAPTED, ragged=True, clip=0.5),
    Case("zero2", {"dp_shard": 2, "zero": 2, "accumulation": 2, "recompute": "selective"}, ADAPTED | {"tied": True}, clip=0.5),
    Case("zero3", SHARDED | {"recompute": "full"}, ADAPTED | {"vocab": 63, "qkv_bias": True}, ragged=True, clip=0.5),
    Case("fsdp4-some", {"dp_shard": 4, "zero": 3}, {"adapters": Adapters(rank=2, alpha=4, targets=("q", "v"))}, clip=0.5),
    Case("hsdp", SHARDED | PLAIN, ADAPTED | {"qk_norm": "head"}, ragged=True, clip=0.5),
    Case("moe-ddp2", PLAIN | {"accumulation": 2}, OF_ATTENTION, ragged=True, clip=0.5, model=tiny_mixtral),
    Case("moe-zero3", SHARDED | {"recompute": "selective"}, OF_ATTENTION | SHARED_EXPERT, ragged=True, clip=0.5, model=tiny_mixtral),
    Case("gpt-hsdp", SHARDED | PLAIN | {"recompute": "full"}, {"adapters": Adapters(rank=4, alpha=4, targets=("q", "k", "v", "o", "up", "down"))}, clip=0.5, model=tiny_gpt2),
)  # fmt: skip
MUON = (
    Case("single", {"accumulation": 2, "recompute": "selective"}, ragged=True, clip=0.5),
    Case("ddp2", PLAIN | {"accumulation": 2}, {"tied": True}, ragged=True),
    Case("threads2", PLAIN | {"replicas": "threads"}, ragged=True, clip=0.5),
    Case("zero1", ZERO1 | {"accumulation": 2}, {"qkv_bias": True}, ragged=True, clip=0.5),
    Case("pp2-zero1", ZERO1 | {"pp": 2, "accumulation": 4}, {"tied": True}, ragged=True, clip=0.5),
    Case("zero2", {"dp_shard": 2, "zero": 2, "accumulation": 2}, {"qkv_bias": True}, ragged=True, clip=0.5),
    Case("fsdp4", {"dp_shard": 4, "zero": 3, "recompute": "full"}, {"ffn_hidden": 42, "vocab": 63}, ragged=True, clip=0.5),
    Case("hsdp", SHARDED | PLAIN, {"tied": True, "qk_norm": "head"}, ragged=True, clip=0.5),
    Case("pp2-v2-ddp2", V2 | PLAIN | {"accumulation": 2}, {"layers": 4}, ragged=True, clip=0.5),
    Case("pp2-fsdp2", SHARDED | {"pp": 2, "accumulation": 4}, {"tied": True}, ragged=True, clip=0.5),
    Case("cp2-ring-fsdp2", RING | SHARDED, {"ffn_hidden": 42}, ragged=True, clip=0.5),
    Case("gpt-zero3", SHARDED | {"loss": "chunked"}, {"tied": False}, ragged=True, clip=0.5, model=tiny_gpt2),
    Case("tp2-ddp2", {"tp": 2} | PLAIN | {"accumulation": 2}, {"qkv_bias": True}, ragged=True, clip=0.5),
    Case("tp2-fsdp2", SHARDED | {"tp": 2, "sequence_parallel": True}, {"ffn_hidden": 42, "tied": True}, ragged=True, clip=0.5),
    Case("pp2-tp2", {"pp": 2, "tp": 2, "accumulation": 4}, ragged=True, clip=0.5),
    Case("gpt-tp2-fsdp2", SHARDED | {"tp": 2}, {"tied": False}, ragged=True, clip=0.5, model=tiny_gpt2),
)  # fmt: skip
CASES += tuple(replace(case, name=f"muon-{case.name}", layout=case.layout | {"optimizer": "muon"}) for case in MUON)
CASES += tuple(replace(case, name=f"lora-{case.name}") for case in LORA)
CASES += tuple(replace(case, name=f"uneven-{case.name}") for case in UNEVEN)
CASES += tuple(replace(case, name=f"gpt-{case.name}", model=tiny_gpt2) for case in GPT)
CASES += tuple(replace(case, name=f"moe-{case.name}", model=tiny_mixtral) for case in MOE)


BY_NIGHT = (
    "tp2-zero1-replicas", "pp2-tp2-zero1", "uneven-zero1-tp2", "lora-hsdp", "lora-gpt-hsdp", "gpt-hsdp", "gpt-pp2-v2-fsdp2", "gpt-fsdp2-tp2",
    "pp2-tp2-ddp2", "cp4-hierarchical-ddp2", "cp4-hierarchical-zero1", "cp8-hierarchical", "pp4-dual", "pp4-zbv", "pp4-bfs", "pp4-by-stage",
    "hsdp-offload-nvme", "fsdp4-tiled-nvme", "hsdp-tiled", "hsdp-chunked", "pp2-zbv-tp2", "pp2-dual-tp2", "pp2-dual-ddp2", "pp2-zbv-ddp2",
    "cp2-all-to-all-hsdp", "gpt-pp2-tp2", "gpt-pp2-zbv-zero1", "gpt-cp2-ring-tp2", "moe-tp2-ep4-zero1", "moe-ep2-zero1-4", "moe-pp2-tp2",
    "muon-tp2-ddp2", "muon-threads2", "muon-pp2-zero1", "muon-cp2-ring-fsdp2", "muon-pp2-tp2", "muon-gpt-tp2-fsdp2", "muon-pp2-fsdp2", "muon-hsdp",
    "moe-hsdp", "moe-cp2-ring-fsdp2", "moe-ep2-hsdp", "moe-pp2-ep2", "moe-ep2-cp2", "moe-ep2-etp2-sp", "moe-ep2-etp2", "moe-tp2-ep4",
    "moe-tp2-ep2-alone", "moe-ep2-ddp4", "moe-ep2-zero2-offload-optimizer", "moe-ep2-zero3-offload-nvme", "cp4-hierarchical-zero3",
    "zero3-second-compiled", "cp2-all-to-all-ddp2", "uneven-ddp2-chunked-compiled", "gpt-zero3-tiled", "hsdp-tp2", "moe-pp2-ep2-zero1",
    "cp2-all-to-all-fsdp2-tp2", "moe-ep4-zero2", "cp4-hierarchical-tp2", "pp2-fsdp2-first", "pp2-fsdp2-second", "pp2-v2-tp2", "moe-fsdp2-tp2",
    "gpt-pp2-zb-zero1", "moe-ep2-zero1-replicas", "moe-pp2-v2-fsdp2", "cp2-tiled", "pp2-bfs-fsdp2", "fsdp2-tp2-plain", "moe-cp4-hierarchical-ep2",
    "pp2-zb-tp2", "uneven-ddp2-tp2", "pp2-bfs-ddp2", "pp2-v2-zero2", "pp2-v2-ddp2", "pp2-v2-first", "pp2-v2-second", "pp2-v2-by-stage", "gpt-zero1",
    "zero1-chunked", "muon-pp2-v2-ddp2", "fsdp2-tp2-offload-optimizer", "pp2-cp2-ring",
)  # fmt: skip
"""Cases whose parts are all in others that the ci suite runs."""


@pytest.mark.parametrize(
    "case", by_night(CASES, (case for case in CASES if case.name in BY_NIGHT)), ids=lambda case: case.name
)
def test_training_equals_one_process(case: Case) -> None:
    """Losses, gradient norms and final parameters of five steps are those of one process, on every rank."""
    from tests.executor.harness import run_ranks
    from tests.executor.reference import GLOBAL_BATCH, Task, trained_by_one_process
    from tests.executor.workers import train_task

    optimizer = case.layout.get("optimizer", "adamw")
    task = Task(case.model(**case.shape), ragged=case.ragged, clip_norm=case.clip, optimizer=optimizer)
    plan = make_plan(task.shape, **_with_micro_batch(case.layout, GLOBAL_BATCH))
    losses, parameters, norms = trained_by_one_process(task)
    for got_losses, got_parameters, got_norms in run_ranks(plan.processes, train_task, plan, task):
        assert got_losses == pytest.approx(losses, abs=LOSS_BOUND, rel=0)
        assert got_norms == pytest.approx(norms, abs=NORM_BOUND, rel=0)
        assert got_parameters.keys() == parameters.keys()
        furthest = max(float((got_parameters[name] - value).abs().max()) for name, value in parameters.items())
        assert furthest <= PARAMETER_BOUND


def _with_micro_batch(layout: dict[str, Any], batch: int) -> dict[str, Any]:
    parts = layout.get("accumulation", 1) * layout.get("dp_replicate", 1) * layout.get("dp_shard", 1)
    if "uneven_batch" in layout:
        parts = sum(share.replicas * share.micro_batches for share in layout["uneven_batch"])
    return layout | {"micro_batch": batch // parts}
