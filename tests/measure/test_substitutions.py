"""Nothing is replaced in silence: every substitution is a row of the table, and traces name those they used."""

from __future__ import annotations

from typing import Any

import pytest

from strategist.catalog import rows
from tests.executor.harness import run_alone
from tests.measure.recordings import traced
from tests.plans import BFLOAT16, FLOAT32, make_plan, tiny_llama, tiny_mixtral

pytestmark = pytest.mark.slow

SHAPE = tiny_llama(layers=4)
EXPECTED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "one rank": ({}, {"fused-rms-norm", "flash-attention"}),
    "ddp": ({"dp_replicate": 2}, {"fused-rms-norm", "flash-attention", "ddp-reducer"}),
    "threads": (
        {"dp_replicate": 2, "replicas": "threads"},
        {"fused-rms-norm", "flash-attention", "threads-of-devices"},
    ),
    "zero 1": ({"dp_shard": 2, "zero": 1}, {"fused-rms-norm", "flash-attention", "ddp-reducer"}),
    "many": (
        {"dp_shard": 2, "zero": 3, "accumulation": 4},
        {"fused-rms-norm", "flash-attention", "averaging-collectives", "repeated-micro-batches"},
    ),
    "offload": (
        {"dp_shard": 2, "zero": 3, "offload": "parameters"},
        {"fused-rms-norm", "flash-attention", "averaging-collectives", "host-copies"},
    ),
    "compiled": ({"compile": True}, {"fused-rms-norm", "flash-attention", "compiled-blocks"}),
    "experts": (
        {"dp_shard": 2, "zero": 3, "shape": tiny_mixtral(layers=2)},
        {"fused-rms-norm", "flash-attention", "averaging-collectives", "balanced-experts"},
    ),
    "server": (
        {"dp_replicate": 2, "tables": "server"},
        {"fused-rms-norm", "flash-attention", "ddp-reducer", "tables-elsewhere"},
    ),
    "pipeline": (
        {"pp": 2, "accumulation": 2},
        {"fused-rms-norm", "flash-attention", "averaging-collectives", "pipeline-shapes"},
    ),
}
ELSEWHERE = {"shard-exchange", "fake-collectives"}
"""Rows that no trace of the built-in model needs: one has its test below, one belongs to rehearsals (test_rehearsal.py)."""


@pytest.mark.parametrize("name", EXPECTED)
def test_a_trace_names_what_it_used(name: str) -> None:
    """On a plan for GPUs each trace lists exactly the rows that it leans on."""
    layout, expected = EXPECTED[name]
    choices = {"shape": SHAPE, "formats": BFLOAT16, "backend": "nccl"} | layout
    seen = traced(make_plan(choices.pop("shape"), **choices))
    assert {row.name for row in seen.substitutions} == expected


def test_every_row_is_proven_here() -> None:
    """The table holds no row that no test uses, and each says why and where it is written."""
    proven = set().union(*(used for _, used in EXPECTED.values())) | ELSEWHERE
    assert {row["name"] for row in rows("substitutions")} == proven
    assert all(row["sentence"].endswith(".") and row["source"] for row in rows("substitutions"))


def test_plans_for_cpu_ranks_replace_nothing_of_the_cpu() -> None:
    """On gloo the CPU's own way is the truth."""
    assert traced(make_plan(SHAPE, formats=FLOAT32)).substitutions == ()


def test_a_change_of_the_cut_is_one_exchange_on_gpus() -> None:
    """From cut by rows to cut by columns: gloo gathers everything, NCCL exchanges parts, and the trace says the latter."""
    assert run_alone(_exchange, "gloo") == (["all_gather"], set())
    assert run_alone(_exchange, "nccl") == (["all_to_all"], {"shard-exchange"})


def _exchange(backend: str) -> tuple[list[str], set[str]]:
    import torch
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor import DTensor, Shard

    from strategist.measure.modules import ModuleClock
    from strategist.measure.program import fake_world, job_for
    from strategist.measure.recorder import Recorder
    from strategist.measure.substitutions import cuda_ways

    plan = make_plan(tp=2, formats=FLOAT32, backend=backend)
    with fake_world(plan, 0), cuda_ways(plan) as noticed:
        mesh = job_for(plan, torch.device("cpu")).mesh["tp"]
        clock = ModuleClock(nn.Module())
        with FakeTensorMode(allow_non_fake_inputs=True), Recorder(clock, lambda _: "tp", lambda *_: 0) as recorder:
            part = DTensor.from_local(torch.zeros(4, 8), mesh, [Shard(0)], run_check=False)
            part.redistribute(placements=[Shard(1)])
        return [message.name for message in recorder.record.messages], noticed
