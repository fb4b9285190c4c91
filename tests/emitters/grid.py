"""Plans that every target is asked about: each axis with each option, and what the target answered."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import PurePosixPath
from typing import Any

import pytest

from strategist import StrategistError, emit
from strategist.document.plan import MESH_AXES, NumberFormats, Plan
from strategist.facts.gpus import gpu_by_id
from strategist.facts.model import ModelShape
from tests.plans import BFLOAT16, FLOAT32, FLOAT64, make_plan, tiny_llama, tiny_mixtral, uneven

AXES: tuple[dict[str, Any], ...] = (
    {},
    {"dp_replicate": 2},
    {"dp_replicate": 2, "replicas": "threads"},
    {"dp_replicate": 2, "tables": "server"},
    {"dp_shard": 2, "zero": 1},
    {"dp_shard": 2, "zero": 2},
    {"dp_shard": 2, "zero": 3},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"tp": 2, "dp_shard": 2, "zero": 3},
    {"pp": 2},
    {"pp": 2, "dp_replicate": 2},
    {"pp": 2, "tp": 2, "dp_shard": 2, "zero": 3},
    {"cp": 2, "context_parallel": "all-to-all"},
    {"cp": 4, "context_parallel": "hierarchical", "cp_inner": 2},
    {"dp_shard": 2, "zero": 3, "ep": 2},
    {"dp_shard": 2, "zero": 1, "ep": 2},
    {"tp": 2, "dp_shard": 2, "zero": 3, "etp": 2, "sequence_parallel": True},
    {"pp": 2, "virtual_stages": 2, "schedule": "interleaved"},
    {"pp": 2, "virtual_stages": 2, "schedule": "looped_bfs"},
    {"pp": 2, "schedule": "zb_h1"},
    {"pp": 2, "virtual_stages": 2, "schedule": "zbv", "accumulation": 4},
    {"pp": 2, "virtual_stages": 2, "schedule": "dualpipev", "accumulation": 4},
)
UNEVEN: tuple[dict[str, Any], ...] = tuple(
    axes | {"accumulation": 3, "uneven_batch": uneven((1, 3), (1, 1))}
    for axes in ({"dp_replicate": 2}, {"dp_shard": 2, "zero": 1}, {"dp_replicate": 2, "tp": 2})
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"micro_batch": 2, "accumulation": 4},
    {"recompute": "full"},
    {"recompute": "full", "recompute_layers": 1},
    {"recompute": "full", "recompute_every": 2},
    {"recompute": "selective"},
    {"offload": "optimizer"},
    {"tiling": 8},
    {"loss": "chunked"},
    {"optimizer": "sgd"},
    {"optimizer": "adamw8bit"},
    {"optimizer": "muon"},
    {"backend": "gloo"},
    {"compile": True},
    {"context_parallel": "ring"},
    {"offload": "parameters"},
    {"formats": NumberFormats(parameter="float32", gradient="float32", reduce="float32", compute="float16")},
    {"formats": BFLOAT16},
    {"formats": replace(BFLOAT16, reduce="bfloat16")},
    {"formats": replace(BFLOAT16, parameter="bfloat16", master="float32")},
    {"formats": FLOAT64},
    {"order": tuple(reversed(MESH_AXES))},
)


WALKED_FAST = ("torchrun", "megatron", "accelerate")
"""Targets whose whole grid is walked in the fast suite too: our own executor, one command line and one table. The others are walked in ci."""


def targets(names: Iterable[str]) -> list[Any]:
    """Parameters of a test that walks the grid of each of these targets."""
    return [name if name in WALKED_FAST else pytest.param(name, marks=pytest.mark.slow) for name in names]


COMMON: dict[str, Any] = {"formats": FLOAT32, "backend": "nccl"}
"""What every target can say."""


@cache
def grid() -> tuple[tuple[str, Plan], ...]:
    """Every axis with every option, each with a label; axes that cut experts have a model with experts."""
    return tuple(_plans())


def _plans() -> Iterator[tuple[str, Plan]]:
    for axes, options in (*product(AXES, OPTIONS), ({"dp_replicate": 4}, {}), *((axes, {}) for axes in UNEVEN)):
        pipeline = {"accumulation": 4} if axes.get("pp", 1) > 1 else {}
        choices = COMMON | pipeline | axes | options
        shape = tiny_mixtral if {"ep", "etp"} & set(axes) else tiny_llama
        yield json.dumps({key: str(value) for key, value in choices.items()}), plan_for(shape(layers=8), **choices)


def plan_for(shape: ModelShape | None = None, **choices: Any) -> Plan:
    """A plan by hand, on H100s, or beside them A100s, where it talks through nccl."""
    plan = make_plan(shape, **choices)
    if plan.strategy.backend != "nccl":
        return plan
    devices = ("h100-sxm-80gb", "a100-sxm-80gb")
    groups = (
        replace(group, node=replace(group.node, gpu=gpu_by_id(device)))
        for group, device in zip(plan.cluster.groups, devices, strict=False)
    )
    return replace(plan, cluster=replace(plan.cluster, groups=tuple(groups)))


def plan_on(nodes: int, ranks: int = 2, **said: Any) -> Plan:
    """A sharded plan on some equal nodes; of CPUs, or with `said` of something else."""
    plan = plan_for(**{"dp_shard": nodes * ranks, "zero": 3} | said)
    group = plan.cluster.groups[0]
    node = replace(group.node, gpus=ranks, fast_domain=ranks)
    return replace(plan, cluster=replace(plan.cluster, groups=(replace(group, node=node, count=nodes),)))


@cache
def outcomes(target: str) -> dict[str, tuple[Plan, dict[PurePosixPath, str] | StrategistError]]:
    """What a target does with every plan of the grid."""
    found: dict[str, tuple[Plan, dict[PurePosixPath, str] | StrategistError]] = {}
    for label, plan in grid():
        try:
            found[label] = plan, dict(emit(plan, target))
        except StrategistError as refusal:
            found[label] = plan, refusal
    return found


def written(target: str) -> Iterator[tuple[Plan, dict[PurePosixPath, str]]]:
    """The plans of the grid that a target has files for, and the files."""
    for plan, outcome in outcomes(target).values():
        if isinstance(outcome, dict):
            yield plan, outcome


def each_once(target: str, name: str) -> Iterator[tuple[Plan, dict[PurePosixPath, str]]]:
    """The plans that a target has files for, one for each text of one file and each number of ranks."""
    seen = set()
    for plan, files in written(target):
        key = (files.get(PurePosixPath(name)), plan.mesh.world)
        if key[0] is not None and key not in seen:
            seen.add(key)
            yield plan, files


def distinct(target: str, name: str) -> list[tuple[str, int]]:
    """The different texts of one file over the grid, each with the number of ranks that it is for."""
    return sorted((files[PurePosixPath(name)], plan.mesh.world) for plan, files in each_once(target, name))
