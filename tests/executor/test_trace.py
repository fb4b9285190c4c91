"""Every strategy can be traced: the very program that trains runs under fake tensors at a world of 64 ranks and more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from strategist.document.plan import Plan
from strategist.facts.model import ModelShape
from strategist.facts.parameters import count
from strategist.facts.runs import V_SHAPED
from tests.plans import BFLOAT16, make_plan, tiny_gpt2, tiny_llama, tiny_mixtral

pytestmark = pytest.mark.slow

WIDTH = 64
SHAPE = tiny_llama(layers=4, tied=True, hidden=WIDTH, vocab=WIDTH, ffn_hidden=WIDTH, heads=16, kv_heads=16, head_dim=4)
"""Every matrix is 64 x 64 and every norm 64, so that all of them divide by 64: seven matrices and two norms a layer."""


def _held(plan: Plan, rank: int) -> int:
    """Parameters that one rank should hold: matrices cut by dp_shard, cp and tp, norms by dp_shard and cp."""
    mesh = plan.mesh
    stage = plan.strategy.stages[rank // mesh.stride("pp") % mesh.pp]
    shards = mesh.dp_shard * mesh.cp
    ends = (
        stage.embedding or stage.head if plan.model.tied else stage.embedding + stage.head
    )  # a tied end holds one copy
    matrices = 7 * stage.layer_count + ends
    norms = 2 * stage.layer_count + stage.head
    return matrices * WIDTH**2 // (shards * mesh.tp) + norms * WIDTH // shards


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ({"dp_shard": 64, "zero": 3, "accumulation": 2, "recompute": "full"}, (0, 63)),
        ({"dp_replicate": 4, "dp_shard": 16, "zero": 2, "recompute": "selective"}, (17,)),
        ({"dp_shard": 16, "zero": 3, "tp": 4, "sequence_parallel": True}, (5,)),
        ({"dp_replicate": 8, "tp": 8}, (9,)),
        ({"pp": 4, "dp_shard": 2, "zero": 3, "tp": 8, "sequence_parallel": True, "accumulation": 4}, (0, 20, 63)),
        ({"pp": 2, "dp_replicate": 32, "accumulation": 2, "schedule": "gpipe"}, (0, 63)),
        ({"pp": 2, "virtual_stages": 2, "dp_shard": 8, "zero": 3, "tp": 4, "accumulation": 4}, (0, 63)),
        ({"pp": 2, "virtual_stages": 2, "schedule": "looped_bfs", "dp_replicate": 32, "accumulation": 3}, (0, 63)),
        ({"pp": 4, "schedule": "zb_h1", "dp_shard": 16, "zero": 2, "accumulation": 4}, (0, 63)),
        ({"pp": 2, "virtual_stages": 2, "schedule": "zbv", "dp_shard": 32, "zero": 2, "accumulation": 4}, (0, 63)),
        (
            {"pp": 2, "virtual_stages": 2, "schedule": "dualpipev", "dp_shard": 32, "zero": 2, "accumulation": 5},
            (0, 63),
        ),
        ({"dp_shard": 64, "zero": 3, "offload": "parameters"}, (7,)),
        ({"cp": 4, "context_parallel": "ring", "dp_shard": 16, "zero": 3, "recompute": "full", "seq_len": 64}, (5,)),
        (
            {"cp": 8, "cp_inner": 2, "context_parallel": "hierarchical", "dp_shard": 8, "zero": 3, "seq_len": 64},
            (5,),
        ),
        ({"cp": 8, "context_parallel": "all-to-all", "tp": 2, "dp_shard": 4, "zero": 2, "seq_len": 64}, (21,)),
    ],
    ids=[
        "zero3",
        "hsdp",
        "fsdp-tp",
        "ddp-tp",
        "pp-fsdp-tp",
        "pp-ddp",
        "interleaved",
        "looped-bfs",
        "zb-h1",
        "zbv",
        "dualpipev",
        "offload",
        "ring",
        "hierarchical",
        "all-to-all",
    ],
)
def test_the_training_program_runs_under_fake_tensors(layout: dict[str, Any], ranks: tuple[int, ...]) -> None:
    """One rank of each kind does two whole steps, optimizer included, and holds exactly its share of the weights."""
    from tests.executor.harness import run_alone
    from tests.executor.tracing import trace_rank

    shape = replace(SHAPE, tied=layout.get("schedule") not in V_SHAPED)
    plan = make_plan(shape, **layout, formats=BFLOAT16)
    for rank in ranks:
        assert run_alone(trace_rank, plan, rank) == {"steps": 2, "held": _held(plan, rank)}


@pytest.mark.parametrize(
    "layout",
    [
        {"dp_shard": 64, "zero": 3, "recompute": "selective"},
        {"pp": 2, "dp_shard": 8, "zero": 2, "tp": 4, "sequence_parallel": True, "accumulation": 2, "recompute": "full"},
    ],
    ids=["zero3", "pp-fsdp-tp"],
)
@pytest.mark.parametrize("make", [tiny_gpt2, tiny_mixtral])
def test_other_architectures_run_under_fake_tensors(make: Callable[..., ModelShape], layout: dict[str, Any]) -> None:
    """A GPT-2 and a mixture with balanced counts do whole steps; under zero 3 a rank holds a 64th of each weight."""
    from tests.executor.harness import run_alone
    from tests.executor.tracing import trace_rank

    sizes = {"layers": 2, "hidden": WIDTH, "vocab": WIDTH, "kv_heads": 8, "head_dim": 8}
    own = {"moe": {"ffn": WIDTH, "shared_ffn": WIDTH}} if make is tiny_mixtral else {"ffn_hidden": WIDTH}
    shape = make(**sizes, **own)
    etp = layout.get("tp", 1) if shape.moe else 1
    plan = make_plan(shape, **layout, etp=etp, formats=BFLOAT16)
    for rank in (0, 63):
        traced = run_alone(trace_rank, plan, rank)
        assert traced["steps"] == 2
        assert plan.mesh.dp_shard < 64 or _sixty_fourths(shape, traced["held"])


def _sixty_fourths(shape: ModelShape, held: int) -> bool:
    """Every weight but the router's few rows divides by 64."""
    routers = shape.moe.experts * shape.moe.layers * WIDTH if shape.moe else 0
    return 0 <= held - (count(shape).total - routers) // 64 <= routers
