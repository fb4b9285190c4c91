"""Scenarios drawn from everything that the executor can build and that rules and executor allow: any model of the catalogue, any mesh,
any option. The grid shows terms one by one; these show what happens when they meet.

Models are cut to few layers, some to few words as well, so that terms that others hide can be largest.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from strategist.catalog import rows
from strategist.executor.architecture import model_obstacles
from strategist.executor.pipeline_support import OF_CHUNKS
from strategist.executor.support import layout_obstacles
from strategist.facts.clusters import load_cluster
from strategist.facts.model import ModelShape
from strategist.facts.models import load_model
from strategist.planner.situation import question
from strategist.rulebook.apply import forbid
from strategist.rulebook.rule import Rule, load_rules
from tests.measure.grid import Scenario, candidates_of, job_of, plan_of

WIDEST, LONGEST, FEW_WORDS = 8192, 8192, 2048
"""Hidden sizes that are drawn, positions that models get, and the vocabulary of those with few words."""
SCHEDULES = ("1f1b", "1f1b", "gpipe", "interleaved", "looped_bfs", "zb_h1", "zbv")


def drawn(seed: int, count: int) -> Iterator[Scenario]:
    """`count` legal scenarios of a seed, always the same."""
    found = number = 0
    while found < count:
        scenario = _scenario(f"drawn-{seed}-{number}")
        number += 1
        if _is_legal(scenario):
            found += 1
            yield scenario


def _scenario(name: str) -> Scenario:
    dice = random.Random(name)
    shape = dice.choice(_shapes())
    layout = _mesh(dice, shape) | _options(dice)
    shape = _cut(dice, shape, layout)
    return Scenario(
        name, shape, dice.choice((512, 1000, 1024, 2048, 4096)), dice.choice(("bf16", "bf16", "fp32", "fp16")), layout
    )


@cache
def _shapes() -> tuple[ModelShape, ...]:
    """Models that the executor builds, whose layers are not spelt one by one."""
    every = (load_model(row["name"]) for row in rows("models"))
    return tuple(s for s in every if not model_obstacles(s) and not s.pattern and s.hidden <= WIDEST)


def _mesh(dice: random.Random, shape: ModelShape) -> dict[str, Any]:
    pp, tp, cp = dice.choice((1, 1, 1, 2, 4)), dice.choice((1, 1, 2, 4)), dice.choice((1, 1, 1, 2))
    layout: dict[str, Any] = {"pp": pp, "tp": tp, "cp": cp, "dp_replicate": dice.choice((1, 1, 2))}
    layout["dp_shard"] = dice.choice((1, 4, 6, 8))
    if layout["dp_shard"] > 1:
        layout["zero"] = dice.choice((1, 2, 3, 3))
    if tp > 1:
        layout["sequence_parallel"] = dice.choice((False, True))
    if cp > 1:
        layout["context_parallel"] = dice.choice(("ring", "all-to-all"))
    if pp > 1:
        layout["schedule"] = dice.choice(SCHEDULES)
        layout["virtual_stages"] = 2 if layout["schedule"] in OF_CHUNKS else 1
        layout["stage_split"] = dice.choice(("even",) * 6 + ("weighted",))
    if shape.moe is not None:
        layout |= {"ep": dice.choice((1, 2, 4)), "etp": dice.choice((1, tp))}
    return layout | {"micro_batch": dice.choice((1, 2, 3, 4)), "accumulation": pp * dice.choice((1, 2, 3, 4))}


def _options(dice: random.Random) -> dict[str, Any]:
    recompute = dice.choice(("none", "selective", "full"))
    layout: dict[str, Any] = {
        "recompute": recompute,
        "offload": dice.choice(("none",) * 6 + ("optimizer", "parameters", "nvme")),
        "optimizer": dice.choice(("adamw",) * 5 + ("adamw8bit", "muon", "sgd")),
        "loss": dice.choice(("whole",) * 6 + ("chunked",)),
        "tiling": dice.choice((1,) * 12 + (2, 4, 8)),
    }
    if recompute == "full":
        layout["recompute_layers"] = dice.choice((0, 0, 1, 2, 3))
    return layout


def _cut(dice: random.Random, shape: ModelShape, layout: dict[str, Any]) -> ModelShape:
    """Few layers, on every chunk at least one; of a mixture's perhaps one dense."""
    chunks = layout["pp"] * layout.get("virtual_stages", 1)
    layers = chunks * dice.choice((1, 2)) if chunks > layout["pp"] else chunks * dice.choice((1, 2, 2, 3)) + dice.choice((0, 1))  # fmt: skip
    moe = shape.moe
    if moe is not None:
        dense = dice.choice((0, min(moe.first_dense, layers - 1, 1)))
        moe = replace(moe, layers=layers - dense, first_dense=dense)
    return replace(
        shape,
        layers=layers,
        moe=moe,
        max_seq=LONGEST,
        pos_rows=LONGEST if shape.pos == "learned" else shape.pos_rows,
        vocab=dice.choice((shape.vocab, shape.vocab, FEW_WORDS)),
        parameters_stated=None,
    )


def _is_legal(scenario: Scenario) -> bool:
    """Whether no rule forbids it on GPUs, and the executor runs it."""
    plan = plan_of(scenario)
    if layout_obstacles(plan):
        return False
    mesh = plan.mesh
    batch = plan.strategy.micro_batch * plan.strategy.accumulation * mesh.data_parallel
    facts = question(replace(job_of(scenario, plan), cluster=load_cluster("dgx-h100")))
    keep, _ = forbid(_rules(), facts | {"gpus": mesh.world, "global_batch": batch}, candidates_of(plan))
    return bool(keep[0])


@cache
def _rules() -> tuple[Rule, ...]:
    return load_rules("legality")
