"""What torch 2.13 was seen to break, to get silently wrong, or to crash on: no plan that says it is started, or no plan can say it.

Each case was run with torch's own tools on CPU ranks. The rules refuse it when planning, and the executor a Plan written by hand.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from strategist.executor.support import layout_obstacles
from strategist.facts.workload import Workload
from strategist.planner.situation import question
from strategist.rulebook.apply import columns, fired
from strategist.rulebook.rule import load_rules
from strategist.space.candidates import code
from tests.executor.matrix import Cell, Layout, stacked, written
from tests.plans import make_plan, tiny_llama, tiny_mixtral

ONE_F, LOOPED = ({"pp": 2, "schedule": code("schedule", word)} for word in ("1f1b", "interleaved"))
CASES: dict[str, tuple[dict[str, Any], dict[str, int], str]] = {
    "heads that tp does not divide: the reshape of attention fails": ({"heads": 6, "kv_heads": 2}, {"tp": 4, "micro_batch": 8}, "LEG101"),
    "heads of keys and values fewer than tp: the same": ({"kv_heads": 2}, {"tp": 4, "micro_batch": 8}, "LEG102"),
    "a feed-forward width that tp does not divide: torch's ranks disagree about a dim": ({"ffn_hidden": 50}, {"tp": 4, "micro_batch": 8}, "LEG103"),
    "more tp ranks than rows of the vocabulary": ({"vocab": 2}, {"tp": 4, "micro_batch": 8}, "LEG104"),
    "a sequence that tp does not divide, under sequence parallelism: one rank crashes": ({"seq_len": 18}, {"tp": 4, "sequence_parallel": 1, "micro_batch": 8}, "LEG301"),
    "fewer micro-batches than stages under 1F1B: ValueError": ({}, ONE_F | {"micro_batch": 8}, "LEG203"),
    "micro-batches that interleaving does not divide": ({"layers": 4, "batch": 12}, LOOPED | {"virtual_stages": 2, "micro_batch": 4, "accumulation": 3}, "LEG204"),
    "a batch that data ranks do not divide": ({"batch": 7}, {"dp_replicate": 2, "micro_batch": 3}, "LEG401"),
    "layers that chunks do not divide": ({"layers": 6}, LOOPED | {"virtual_stages": 2, "micro_batch": 2, "accumulation": 4}, "LEG202"),
    "experts that ep does not divide": ({"experts": 3}, {"dp_shard": 2, "zero": 3, "ep": 2, "micro_batch": 4}, "LEG106"),
    "heads that an exchange over cp does not divide": ({"kv_heads": 2}, {"cp": 4, "context_parallel": 2, "micro_batch": 8}, "LEG303"),
    "weights offloaded inside a tensor-parallel group": ({}, {"tp": 2, "dp_shard": 2, "zero": 3, "offload": 2, "micro_batch": 4}, "LEG615"),
    "a ring with a policy of operations to keep": ({}, {"cp": 2, "context_parallel": 1, "recompute": 1, "micro_batch": 8}, "LEG619"),
    "a ring over windows": ({"window": 7}, {"cp": 2, "context_parallel": 1, "micro_batch": 8}, "LEG619"),
    "nn.DataParallel beside anything: on CPUs it does nothing": ({}, {"dp_replicate": 2, "replicas": 1, "micro_batch": 4}, "LEG711"),
}  # fmt: skip
"""What was seen: a model and a job, columns of a layout, and the rule that refuses it."""
PLANNED_ONLY = {"LEG104", "LEG711"}
"""The executor pads a vocabulary, and its threads on CPUs are there for tests; a planner has no reason for either."""


CODED_OTHERWISE = {"LEG106": "UNSUPPORTED"}
"""The executor says in one sentence all that keeps experts from being spread."""


def _job(asked: dict[str, Any], world: int) -> Any:
    own = dict(asked)
    seq_len, batch, experts = own.pop("seq_len", 16), own.pop("batch", 8), own.pop("experts", 0)
    shape = tiny_mixtral(moe={"experts": experts}, **own) if experts else tiny_llama(**own)
    cell = Cell(Layout((), (("dp_replicate", world),)), "fp32", 1, False)
    work = Workload(seq_len=seq_len, global_batch=batch, precision="fp32", optimizer="adamw")
    return replace(cell.job, model=shape, workload=work)


@pytest.mark.parametrize(("asked", "row", "rule"), CASES.values(), ids=CASES)
def test_what_torch_breaks_is_refused_by_a_rule_before_launch(
    asked: dict[str, Any], row: dict[str, int], rule: str
) -> None:
    """The rule holds for the layout, and the Plan of that layout meets an obstacle of the rule's code."""
    layout = stacked([row])
    job = _job(asked, int(layout.world[0]))
    values = question(job) | {name: int(np.ravel(column)[0]) for name, column in columns(layout).items()}
    found = {each.id: each for each in fired(load_rules("legality"), values)}
    assert rule in found
    if rule not in PLANNED_ONLY:
        codes = {obstacle.code for obstacle in layout_obstacles(written(job, layout.row(0)))}
        assert CODED_OTHERWISE.get(rule, found[rule].code) in codes


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_no_stage_of_a_pipeline_is_wrapped_by_ddp(schedule: str) -> None:
    """DDP inside a pipeline crashes or is silently wrong: copies of stages are held together by FSDP2's own replication."""
    from tests.executor.harness import run_ranks
    from tests.executor.workers import kinds_of_modules

    plan = make_plan(tiny_llama(), pp=2, dp_replicate=2, schedule=schedule, accumulation=2)
    for kinds in run_ranks(4, kinds_of_modules, plan):
        assert "DistributedDataParallel" not in kinds
        assert any("FSDP" in kind or "Replicate" in kind for kind in kinds)


@pytest.mark.slow
def test_steps_stand_in_the_order_that_torch_needs() -> None:
    """Recomputation before tensor parallelism hides the names of its table, and FSDP2's weights cannot be cut: silently wrong or
    an error. Tensor parallelism comes first, then recomputation, compilation, sharding."""
    from strategist.executor.build import LAYOUT_STEPS

    names = [step.__name__ for step in LAYOUT_STEPS]
    wanted = ["expert_parallel", "tensor_parallel", "recompute", "compile_blocks", "shard_data"]
    assert [name for name in names if name in wanted] == wanted
