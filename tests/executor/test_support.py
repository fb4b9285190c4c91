"""What cannot run is said before anything starts, in sentences with the numbers in them, and without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from strategist import recommend
from strategist.document.plan import NumberFormats, Plan, Stage
from strategist.errors import ImpossibleError
from strategist.executor.architecture import model_obstacles
from strategist.executor.obstacles import refuse
from strategist.executor.support import layout_obstacles, obstacles, script_obstacles, unsupported, way_out
from strategist.facts.model import Mla, ModelShape, Moe
from tests.plans import BFLOAT16, FLOAT32, FLOAT64, even_stages, make_plan, tiny_gpt2, tiny_llama, tiny_mixtral, uneven

DEEP = tiny_llama(layers=8)

RUNNABLE: tuple[dict[str, Any], ...] = (
    {"dp_shard": 3, "zero": 1, "tp": 2, "accumulation": 4, "uneven_batch": uneven((2, 4), (1, 1))},
    {},
    {"dp_replicate": 8, "formats": BFLOAT16, "accumulation": 2},
    {"dp_shard": 8, "zero": 1, "formats": FLOAT32},
    {"dp_shard": 4, "dp_replicate": 2, "zero": 3, "tp": 2, "sequence_parallel": True},
    {"pp": 2, "tp": 2, "dp_shard": 2, "zero": 2, "accumulation": 2, "recompute": "selective", "formats": FLOAT64},
    {"pp": 2, "schedule": "gpipe", "dp_replicate": 2},
    {"shape": DEEP, "pp": 2, "virtual_stages": 4, "tp": 2, "dp_shard": 2, "zero": 3, "accumulation": 4},
    {"shape": DEEP, "pp": 2, "virtual_stages": 2, "schedule": "looped_bfs", "accumulation": 3, "recompute": "full"},
    {"pp": 2, "schedule": "zb_h1", "accumulation": 4, "dp_shard": 2, "zero": 2, "tp": 2, "sequence_parallel": True},
    {
        "shape": DEEP,
        "pp": 4,
        "virtual_stages": 2,
        "schedule": "zbv",
        "accumulation": 7,
        "dp_shard": 2,
        "zero": 2,
        "tp": 2,
    },
    {"shape": DEEP, "pp": 2, "virtual_stages": 2, "schedule": "dualpipev", "accumulation": 4, "dp_shard": 4, "zero": 1},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 3, "offload": "parameters", "formats": BFLOAT16},
    {"cp": 4, "context_parallel": "ring", "dp_shard": 2, "zero": 3, "recompute": "full"},
    {
        "cp": 2,
        "context_parallel": "all-to-all",
        "tp": 2,
        "sequence_parallel": True,
        "dp_replicate": 2,
        "recompute": "selective",
    },
    {"cp": 8, "cp_inner": 4, "context_parallel": "hierarchical", "zero": 3, "recompute": "full"},
    {"dp_shard": 2, "zero": 2, "tp": 2, "offload": "optimizer"},
    {"dp_shard": 2, "zero": 3, "formats": replace(FLOAT32, compute="float16")},
    {"shape": tiny_gpt2(), "tp": 2, "dp_shard": 2, "zero": 3, "sequence_parallel": True},
    {"shape": tiny_mixtral(), "ep": 2, "dp_shard": 4, "zero": 3, "recompute": "full"},
    {
        "shape": tiny_mixtral(),
        "ep": 4,
        "cp": 2,
        "context_parallel": "ring",
        "dp_shard": 2,
        "zero": 2,
        "pp": 2,
        "accumulation": 2,
    },
    {"shape": tiny_mixtral(), "tp": 2, "etp": 2, "pp": 2, "dp_shard": 2, "zero": 2, "accumulation": 2},
    {"shape": tiny_mixtral(), "ep": 2, "tp": 2, "etp": 2, "dp_shard": 2, "dp_replicate": 2, "zero": 1},
)

FP8 = NumberFormats(parameter="float32", gradient="float32", reduce="float32", compute="float8")
FP16 = NumberFormats(parameter="float32", gradient="float32", reduce="float32", compute="float16")
REDUCE_FP16 = replace(FP16, reduce="float16")
REDUCE16 = NumberFormats(parameter="float32", gradient="float32", reduce="bfloat16", compute="bfloat16")
HALF = NumberFormats(parameter="bfloat16", gradient="bfloat16", reduce="float32", compute="bfloat16", master="float32")
OVERLAP = (
    Stage(index=0, layers=((0, 1),), embedding=True, head=False),
    Stage(index=1, layers=((0, 2),), embedding=False, head=True),
)
RING, SWAP = ({"cp": 2, "context_parallel": kind} for kind in ("ring", "all-to-all"))
SPLIT = {"cp": 4, "context_parallel": "hierarchical", "cp_inner": 2}
ZB = {"pp": 2, "schedule": "zb_h1", "accumulation": 2}
BY_STAGE = {"shape": DEEP, "pp": 2, "accumulation": 2, "recompute": "full", "recompute_stages": (2, 0)}
ZBV = {"shape": DEEP, "pp": 2, "virtual_stages": 2, "schedule": "zbv", "accumulation": 3}
DUAL = ZBV | {"schedule": "dualpipev"}
V2 = {"shape": DEEP, "pp": 2, "virtual_stages": 2}
UNEVEN = {"dp_replicate": 2, "accumulation": 3, "uneven_batch": uneven((1, 3), (1, 1))}
SWAPPED = tuple(replace(stage, layers=stage.layers[::-1]) for stage in even_stages(8, 2, 2))

REFUSED: tuple[tuple[dict[str, Any], str, str, str], ...] = (
    ({"cp": 2}, "FRAMEWORK_LEGALITY", "strategy.context_parallel", "cp = 2"),
    ({"context_parallel": "ring"}, "FRAMEWORK_LEGALITY", "strategy.context_parallel", "cp = 1"),
    (RING | {"seq_len": 18}, "DIVISIBILITY", "workload.seq_len", "multiple of 4 tokens"),
    (RING | {"seq_len": 20, "tp": 4, "sequence_parallel": True}, "DIVISIBILITY", "workload.seq_len", "cp = 2 and tp = 4"),
    (RING | {"recompute": "selective"}, "UNSUPPORTED", "strategy.context_parallel", "selective recompute"),
    (RING | {"backend": "nccl", "formats": FLOAT32}, "UNSUPPORTED", "strategy.context_parallel", "float32"),
    (SWAP | {"cp": 8}, "DIVISIBILITY", "model.kv_heads", "kv_heads = 4"),
    (SPLIT | {"cp_inner": 1}, "FRAMEWORK_LEGALITY", "strategy.cp_inner", "cp_inner = 1 of cp = 4"),
    (SPLIT | {"cp_inner": 4}, "FRAMEWORK_LEGALITY", "strategy.cp_inner", "cp_inner = 4 of cp = 4"),
    (SPLIT | {"cp_inner": 3}, "FRAMEWORK_LEGALITY", "strategy.cp_inner", "cp_inner = 3 of cp = 4"),
    (RING | {"cp_inner": 2}, "FRAMEWORK_LEGALITY", "strategy.cp_inner", "'ring' does not go"),
    (SPLIT | {"tp": 4}, "DIVISIBILITY", "model.kv_heads", "tp = 4 and cp_inner = 2"),
    (SPLIT | {"seq_len": 20}, "DIVISIBILITY", "workload.seq_len", "multiple of 8 tokens"),
    (SPLIT | {"recompute": "selective"}, "UNSUPPORTED", "strategy.context_parallel", "selective recompute"),
    (SPLIT | {"backend": "nccl", "formats": FLOAT32}, "UNSUPPORTED", "strategy.context_parallel", "float32"),
    (SWAP | {"cp": 2, "tp": 4}, "DIVISIBILITY", "model.kv_heads", "tp = 4 and cp = 2"),
    ({"ep": 2, "dp_shard": 2, "zero": 3}, "UNSUPPORTED", "mesh.ep", "0 experts"),
    ({"shape": tiny_mixtral(), "ep": 2, "dp_shard": 1, "dp_replicate": 2, "zero": 1}, "UNSUPPORTED", "mesh.ep", "2 does not divide"),
    ({"shape": tiny_mixtral(), "ep": 2, "dp_shard": 2, "zero": 3, "tp": 2}, "UNSUPPORTED", "mesh.ep", "without sequence_parallel"),
    ({"shape": tiny_mixtral(), "ep": 2, "dp_shard": 2, "zero": 3, "tp": 4, "etp": 2}, "UNSUPPORTED", "mesh.ep", "tp 4, etp 2"),
    ({"shape": tiny_mixtral(), "ep": 4, "dp_shard": 2, "zero": 3}, "UNSUPPORTED", "mesh.ep", "4 does not divide"),
    ({"shape": tiny_mixtral(), "ep": 2, "dp_shard": 1, "dp_replicate": 2, "zero": 3}, "UNSUPPORTED", "mesh.ep", "2 does not divide"),
    ({"shape": tiny_mixtral(), "ep": 3, "dp_shard": 3, "zero": 3}, "UNSUPPORTED", "mesh.ep", "4 experts"),
    ({"etp": 2, "tp": 2}, "UNSUPPORTED", "mesh.etp", "no experts"),
    ({"pp": 2, "schedule": "interleaved", "accumulation": 2}, "FRAMEWORK_LEGALITY", "strategy.virtual_stages", "= 1"),
    ({"pp": 2, "virtual_stages": 0, "accumulation": 2}, "FRAMEWORK_LEGALITY", "strategy.virtual_stages", "= 0"),
    ({"virtual_stages": 2}, "FRAMEWORK_LEGALITY", "strategy.virtual_stages", "'none' does not go"),
    (V2 | {"schedule": "1f1b", "accumulation": 2}, "FRAMEWORK_LEGALITY", "strategy.virtual_stages", "'1f1b' does not go"),
    (V2 | {"accumulation": 2, "stages": even_stages(8, 2)}, "FRAMEWORK_LEGALITY", "strategy.stages", "4 unbroken runs"),
    (V2 | {"accumulation": 2, "stages": SWAPPED}, "FRAMEWORK_LEGALITY", "strategy.stages", "in order"),
    (V2 | {"virtual_stages": 3, "accumulation": 2}, "DIVISIBILITY", "strategy.virtual_stages", "8 layers"),
    (V2 | {"accumulation": 3}, "BATCH_SPLIT", "strategy.accumulation", "a multiple of 2"),
    ({"pp": 2, "schedule": "looped_bfs", "accumulation": 2}, "FRAMEWORK_LEGALITY", "strategy.virtual_stages", "= 1"),
    (V2 | {"schedule": "looped_bfs"}, "BATCH_SPLIT", "strategy.accumulation", "at least 2 micro-batches"),
    (V2 | {"schedule": "zb_h1", "accumulation": 2}, "FRAMEWORK_LEGALITY", "strategy.virtual_stages", "'zb_h1' does not go"),
    (ZB | {"accumulation": 3}, "BATCH_SPLIT", "strategy.accumulation", "a multiple of 2"),
    (BY_STAGE | {"recompute_stages": (8, 0)}, "UNSUPPORTED", "strategy.recompute_stages", "7 layers in a chunk"),
    (BY_STAGE | {"recompute_stages": (2, -1)}, "UNSUPPORTED", "strategy.recompute_stages", "a number below 0"),
    (BY_STAGE | {"recompute_stages": (2, 1, 0)}, "UNSUPPORTED", "strategy.recompute_stages", "2 stages"),
    (BY_STAGE | {"recompute": "selective"}, "UNSUPPORTED", "strategy.recompute_stages", "recompute selective"),
    (BY_STAGE | {"recompute_layers": 2}, "UNSUPPORTED", "strategy.recompute_stages", "another way"),
    (ZB | {"recompute": "full"}, "FRAMEWORK_LEGALITY", "strategy.schedule", "recompute = full"),
    (ZB | {"recompute": "selective"}, "FRAMEWORK_LEGALITY", "strategy.schedule", "recompute = selective"),
    (ZB | {"dp_shard": 2, "zero": 3}, "UNSUPPORTED", "strategy.schedule", "zero = 3"),
    (ZB | {"cp": 2, "context_parallel": "ring"}, "UNSUPPORTED", "strategy.schedule", "cp = 2"),
    (ZB | {"shape": tiny_mixtral()}, "UNSUPPORTED", "strategy.schedule", "4 experts"),
    (ZB | {"compile": True}, "FRAMEWORK_LEGALITY", "strategy.schedule", "compile"),
    (ZBV | {"accumulation": 2}, "BATCH_SPLIT", "strategy.accumulation", "at least 3 micro-batches"),
    (DUAL, "BATCH_SPLIT", "strategy.accumulation", "at least 4 micro-batches"),
    (DUAL | {"accumulation": 4, "recompute": "selective"}, "FRAMEWORK_LEGALITY", "strategy.schedule", "recompute = selective"),
    (DUAL | {"accumulation": 4, "compile": True}, "FRAMEWORK_LEGALITY", "strategy.schedule", "compile"),
    (ZBV | {"virtual_stages": 4}, "FRAMEWORK_LEGALITY", "strategy.virtual_stages", "'zbv' does not go"),
    (ZBV | {"stages": even_stages(8, 2, 2)}, "FRAMEWORK_LEGALITY", "strategy.stages", "come back in turn"),
    (ZBV | {"recompute": "full"}, "FRAMEWORK_LEGALITY", "strategy.schedule", "recompute = full"),
    (ZBV | {"dp_shard": 2, "zero": 3}, "UNSUPPORTED", "strategy.schedule", "zero = 3"),
    (ZBV | {"shape": tiny_llama(layers=8, tied=True)}, "UNSUPPORTED", "strategy.schedule", "tied ends"),
    ({"offload": "optimizer", "dp_shard": 2, "zero": 1}, "UNSUPPORTED", "strategy.offload", "zero = 1"),
    ({"offload": "parameters"}, "UNSUPPORTED", "strategy.offload", "zero 0"),
    ({"offload": "nvme", "dp_shard": 2, "zero": 2}, "UNSUPPORTED", "strategy.offload", "zero 2"),
    ({"offload": "parameters", "zero": 3, "tp": 2}, "UNSUPPORTED", "strategy.offload", "tp 2"),
    ({"offload": "parameters", "zero": 3, "pp": 2, "accumulation": 2}, "UNSUPPORTED", "strategy.offload", "pp 2"),
    ({"tiling": 4}, "UNSUPPORTED", "strategy.tiling", "4"),
    ({"optimizer": "adamw8bit", "formats": FLOAT64}, "UNSUPPORTED", "strategy.optimizer", "float64"),
    ({"optimizer": "muon", "tp": 2, "dp_shard": 2, "zero": 1}, "UNSUPPORTED", "strategy.optimizer", "tp 2"),
    ({"optimizer": "muon", "offload": "optimizer"}, "UNSUPPORTED", "strategy.optimizer", "offload optimizer"),
    ({"optimizer": "muon", "zero": 3, "tiling": 4}, "UNSUPPORTED", "strategy.optimizer", "tiling 4"),
    ({"optimizer": "muon", "shape": tiny_mixtral()}, "UNSUPPORTED", "strategy.optimizer", "routed experts"),
    ({"backend": "mpi"}, "UNSUPPORTED", "strategy.backend", "mpi"),
    ({"formats": FP8}, "UNSUPPORTED", "strategy.formats", "float8"),
    ({"formats": REDUCE_FP16}, "UNSUPPORTED", "strategy.formats", "reduction float16"),
    ({"formats": HALF}, "UNSUPPORTED", "strategy.formats", "bfloat16"),
    ({"formats": REDUCE16, "dp_replicate": 2}, "UNSUPPORTED", "strategy.formats.reduce", "bfloat16"),
    ({"zero": 0, "dp_shard": 2}, "FRAMEWORK_LEGALITY", "strategy.zero", "dp_shard is 2"),
    ({"pp": 2, "schedule": "none", "accumulation": 2}, "FRAMEWORK_LEGALITY", "strategy.schedule", "pp = 2"),
    ({"schedule": "1f1b"}, "FRAMEWORK_LEGALITY", "strategy.schedule", "pp = 1"),
    ({"sequence_parallel": True}, "FRAMEWORK_LEGALITY", "strategy.sequence_parallel", "tp is 1"),
    ({"pp": 2, "accumulation": 2, "stages": even_stages(2, 1)}, "FRAMEWORK_LEGALITY", "strategy.stages", "2 unbroken"),
    ({"pp": 2, "accumulation": 2, "stages": OVERLAP}, "FRAMEWORK_LEGALITY", "strategy.stages", "0 to 2"),
    ({"pp": 2, "accumulation": 1}, "BATCH_SPLIT", "strategy.accumulation", "at least 2 micro-batches"),
    ({"dp_replicate": 2, "global_batch": 7}, "BATCH_SPLIT", "workload.global_batch", "7 sequences"),
    ({"tp": 0, "global_batch": 1}, "FRAMEWORK_LEGALITY", "mesh.tp", "mesh.tp = 0"),
    ({"order": ("tp", "pp")}, "FRAMEWORK_LEGALITY", "mesh.order", "names tp, pp"),
    ({"tp": 3}, "DIVISIBILITY", "model.heads", "heads = 8"),
    ({"tp": 8}, "DIVISIBILITY", "model.kv_heads", "kv_heads = 4"),
    (UNEVEN | {"dp_shard": 2, "dp_replicate": 1, "zero": 3}, "UNSUPPORTED", "strategy.uneven_batch", "zero 3"),
    (UNEVEN | {"pp": 2}, "UNSUPPORTED", "strategy.uneven_batch", "pp 2"),
    (UNEVEN | RING, "UNSUPPORTED", "strategy.uneven_batch", "cp 2"),
    (UNEVEN | {"offload": "optimizer"}, "UNSUPPORTED", "strategy.uneven_batch", "offload optimizer"),
    (UNEVEN | {"compression": "bf16", "formats": FLOAT32}, "UNSUPPORTED", "strategy.uneven_batch", "compression bf16"),
    (UNEVEN | {"replicas": "threads"}, "UNSUPPORTED", "strategy.uneven_batch", "replicas threads"),
    (UNEVEN | {"tables": "server"}, "UNSUPPORTED", "strategy.uneven_batch", "tables server"),
    (UNEVEN | {"order": ("tp", "cp", "dp_shard", "dp_replicate", "pp")}, "UNSUPPORTED", "strategy.uneven_batch", "the order tp"),
    (UNEVEN | {"dp_replicate": 3}, "BATCH_SPLIT", "strategy.uneven_batch", "2 replicas in all and the mesh 3"),
    (UNEVEN | {"accumulation": 2}, "BATCH_SPLIT", "strategy.uneven_batch", "accumulation, 2"),
    (UNEVEN | {"global_batch": 5}, "BATCH_SPLIT", "workload.global_batch", "5 sequences"),
    (UNEVEN | {"uneven_batch": uneven((1, 3), (1, 0))}, "BATCH_SPLIT", "workload.global_batch", "accumulation 0"),
    ({"tp": 4, "sequence_parallel": True, "seq_len": 18}, "DIVISIBILITY", "workload.seq_len", "18 tokens"),
)  # fmt: skip


@pytest.mark.parametrize("choices", RUNNABLE)
def test_a_legal_plan_meets_no_obstacle(choices: dict[str, Any]) -> None:
    """Every product of data, tensor and pipeline parallelism that adds up is accepted."""
    assert unsupported(make_plan(**choices)) == ()


@pytest.mark.parametrize(("choices", "code", "place", "said"), REFUSED)
def test_an_obstacle_names_field_value_and_way_out(choices: dict[str, Any], code: str, place: str, said: str) -> None:
    """A refused plan yields the fitting code, the path of the field, and the offending value in a sentence."""
    obstacle = next(o for o in layout_obstacles(make_plan(**choices)) if o.place == place)
    assert obstacle.code == code
    assert said in obstacle.sentence
    assert obstacle.hint.endswith(".")


@pytest.mark.parametrize(
    ("precision", "shape", "choices", "said"),
    [
        ("fp4", tiny_llama(), {}, "fp4"),
        ("fp8", tiny_llama(), {"formats": FLOAT32}, "compute float32"),
        ("fp8", tiny_llama(), {"tp": 2}, "tp 2"),
        ("fp8", tiny_mixtral(moe={"ffn": 32, "experts": 16}), {}, "routed experts"),
        ("fp8", tiny_llama(), {"dp_shard": 2, "zero": 3, "tiling": 2}, "tiling 2"),
        ("fp8", tiny_llama(), {"dp_replicate": 2, "replicas": "threads"}, "threads"),
        ("fp8", tiny_llama(), {"dp_replicate": 2, "compression": "bf16"}, "compression bf16"),
        ("fp8", tiny_llama(), {"pp": 2, "schedule": "zb_h1", "accumulation": 4}, "zb_h1"),
        ("fp8", tiny_llama(ffn_hidden=40), {}, "sides"),
        ("fp8", tiny_llama(), {"seq_len": 24}, "24 tokens"),
    ],
)
def test_scaled_matmuls_are_refused_where_nobody_runs_them(
    precision: Any, shape: ModelShape, choices: dict[str, Any], said: str
) -> None:
    """fp8 keeps bfloat16 tensors between its matmuls, so the formats alone do not tell; each reason is named, and nothing is refused
    without any."""
    plan = make_plan(shape, **({"formats": BFLOAT16} | choices))
    (obstacle,) = layout_obstacles(replace(plan, workload=replace(plan.workload, precision=precision)))
    assert (obstacle.code, obstacle.place) == ("UNSUPPORTED", "workload.precision")
    assert said in obstacle.sentence
    easy = make_plan(formats=BFLOAT16)
    assert not layout_obstacles(replace(easy, workload=replace(easy.workload, precision="fp8")))


def test_ffn_width_must_divide() -> None:
    """A feed-forward width that tp does not divide is refused by name."""
    plan = make_plan(tiny_llama(ffn_hidden=50), tp=4)
    assert [o.place for o in layout_obstacles(plan)] == ["model.ffn_hidden"]


def test_refuse_raises_the_first_and_carries_the_rest() -> None:
    """All obstacles of a plan arrive in one error, each complete."""
    with pytest.raises(ImpossibleError) as caught:
        refuse(layout_obstacles(make_plan(offload="nvme", tiling=4)))
    assert caught.value.flag == "$.strategy.tiling"
    assert [error.flag for error in caught.value.also] == ["$.strategy.offload"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"moe": Moe(experts=8, top_k=2, ffn=64, layers=2, latent=16)}, "moe.latent = 16"),
        ({"moe": Moe(experts=8, top_k=2, ffn=64, layers=2, router_bias=True)}, "moe.router_bias = True"),
        ({"moe": Moe(experts=8, top_k=9, ffn=64, layers=2)}, "9 of 8 experts"),
        ({"moe": Moe(experts=8, top_k=2, ffn=64, layers=1), "ffn_hidden": 0}, "ffn_hidden = 0"),
        ({"parallel_block": True}, "side by side"),
        ({"family": "olmo2"}, "norms behind"),
        ({"norms_per_layer": 4}, "norms_per_layer = 4"),
        ({"norm": "batchnorm"}, "norm = batchnorm"),
        ({"pos": "alibi"}, "pos = alibi"),
        ({"pos": "learned"}, "0 rows of positions"),
        ({"pattern": "*- *"}, "ffn_hidden = 48"),
        ({"mla": Mla(q_lora=0, kv_lora=8, qk_nope=4, qk_rope=4, v_dim=4)}, "mla"),
        ({"window": 0, "full_every": 0}, "window = 0"),
        ({"kind": "encoder"}, "kind = encoder"),
        ({"qk_norm": "per_head"}, "qk_norm = per_head"),
        ({"mlp_act": "quick_gelu"}, "mlp_act = quick_gelu"),
        ({"v_dim": 2}, "v_dim = 2"),
        ({"ffn_hidden": 0}, "ffn_hidden = 0"),
        ({"kv_heads": 3}, "8 heads over 3 kv_heads"),
        ({"extra_parameters": 5}, "extra_parameters = 5"),
    ],
)
def test_an_architecture_that_the_built_in_model_cannot_be_is_refused(change: dict[str, Any], said: str) -> None:
    """The built-in model says which part of an architecture it cannot be."""
    (obstacle,) = model_obstacles(tiny_llama(**change))
    assert said in obstacle.sentence
    assert unsupported(make_plan(tiny_llama(**change))) == (obstacle.sentence,)


@pytest.mark.parametrize(
    ("plan", "place", "said"),
    [
        (make_plan(tiny_llama(qk_norm="full"), tp=2), "mesh.tp", "over all heads"),
        (make_plan(tiny_gpt2(), seq_len=65), "workload.seq_len", "64 learned positions"),
        (make_plan(tiny_llama(window=7), **RING), "strategy.context_parallel", "windows of 7 tokens"),
        (make_plan(tiny_mixtral(), tp=2), "mesh.etp", "tp 2 and etp 1"),
        (make_plan(tiny_mixtral(moe={"ffn": 25}), tp=2, etp=2), "model.moe.ffn", "moe.ffn = 25"),
        (make_plan(tiny_mixtral(moe={"shared_ffn": 5}), tp=2, etp=2), "model.moe.shared_ffn", "moe.shared_ffn = 5"),
    ],
)
def test_a_layout_that_the_model_does_not_allow_is_refused(plan: Plan, place: str, said: str) -> None:
    """Norms over all heads, tables of positions and experts each have layouts that do not go with them."""
    found = obstacles(plan)
    assert [(o.place, said in o.sentence) for o in found] == [(place, True)]
    assert unsupported(plan) == (found[0].sentence,)


def a_pair(targets: int | None = 10, *, tokens: int = 16, **layout: Any) -> Plan:
    """A plan for a tiny encoder with a decoder."""
    shape = tiny_llama(
        name="tiny-t5", family="t5", kind="encdec", formula="encdec", enc_layers=3, kv_heads=8, pos="relative"
    )
    plan = make_plan(shape, seq_len=tokens, **layout)
    return replace(plan, workload=replace(plan.workload, target_len=targets))


@pytest.mark.parametrize("targets", [None, 10, 40])
@pytest.mark.parametrize(
    "layout",
    [
        {"micro_batch": 4, "accumulation": 2},
        {"dp_replicate": 4, "recompute": "full"},
        {"dp_replicate": 2, "dp_shard": 2, "zero": 3, "recompute": "selective"},
        {"dp_shard": 2, "zero": 1, "tp": 4},
        {"dp_shard": 2, "zero": 3, "tp": 2, "formats": BFLOAT16},
    ],
)
def test_encoders_with_decoders_are_laid_out_whatever_the_targets_length(
    layout: dict[str, Any], targets: int | None
) -> None:
    """Replicas, shards and matrices cut by tp; a script is given a model of transformers, as there is no built-in one."""
    plan = a_pair(targets, **layout)
    assert layout_obstacles(plan) == script_obstacles(plan) == ()
    assert [obstacle.place for obstacle in obstacles(plan)] == ["model"]


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"pp": 2, "accumulation": 2}, "pp 2"),
        ({"cp": 2, "context_parallel": "all-to-all"}, "cp 2"),
        ({"tp": 2, "sequence_parallel": True}, "sequence_parallel"),
        ({"loss": "chunked"}, "loss chunked"),
    ],
)
def test_what_cuts_rows_of_layers_or_their_tokens_is_refused_for_two_halves(layout: dict[str, Any], said: str) -> None:
    """In one sentence with both lengths and the field, and with what to plan instead."""
    (found,) = layout_obstacles(a_pair(**layout))
    assert (found.code, found.place) == ("UNSUPPORTED", "model.enc_layers")
    assert f"(tiny-t5, 16 inputs and 10 targets) here: the plan has {said}" in found.sentence
    assert "tp without sequence_parallel" in way_out((found,))


def test_a_script_cuts_matrices_of_tried_families_alone() -> None:
    """Other encoders with decoders are replicated or sharded."""
    plan = a_pair(tp=2)
    other = replace(plan, model=replace(plan.model, family="marian"))
    (found,) = script_obstacles(other)
    assert "tiny-t5 is of the family marian, and tp is 2" in found.sentence
    assert script_obstacles(replace(a_pair(dp_replicate=2), model=other.model)) == ()


def test_products_of_eight_bits_look_at_both_lengths() -> None:
    """Rows of a decoder's matrices are its own tokens."""
    fp8 = {"precision": "fp8"}
    plan = a_pair(10, micro_batch=1, formats=BFLOAT16)
    said = " ".join(
        obstacle.sentence for obstacle in layout_obstacles(replace(plan, workload=replace(plan.workload, **fp8)))
    )
    assert "10 tokens in a micro-batch, which 16 does not divide" in said
    assert "16 tokens in a micro-batch, which" not in said


def test_stages_of_an_encoder_and_its_decoder_are_all_their_layers() -> None:
    """The one stage of a T5 owns every layer of both, so that its stages are no obstacle: the model is."""
    plan = recommend("t5-base", "dgx-h100", seq_len=512)
    assert plan.strategy.stages[0].layers == ((0, plan.model.enc_layers + plan.model.layers),)
    assert "strategy.stages" not in {obstacle.place for obstacle in obstacles(plan)}


def test_asking_does_not_import_torch() -> None:
    """`strategist.executor.support` and the executor package itself load without torch."""
    script = "import sys, strategist.executor, strategist.executor.support; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
