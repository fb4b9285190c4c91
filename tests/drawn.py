"""Layouts drawn from everything that rules and executor allow: any mesh, any option, any number of them at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

from strategist.document.plan import Plan, sequences_per_step
from strategist.executor.support import layout_obstacles
from strategist.facts.job import Job
from strategist.facts.runs import OF_CHUNKS
from strategist.planner.situation import question
from strategist.rulebook.apply import forbid
from strategist.rulebook.rule import Rule, load_rules
from strategist.space.candidates import Candidates
from tests.plans import uneven

SCHEDULES = ("1f1b", "1f1b", "gpipe", "interleaved", "looped_bfs", "zb_h1", "zbv")
Choice = dict[str, Any]
"""Fields of a mesh and a strategy by name."""


def mesh(dice: random.Random, *, stages: Sequence[int], shards: Sequence[int], experts: bool) -> Choice:
    """Ranks of every axis, `stages` and `shards` of pp and dp_shard, and what belongs to an axis."""
    pp, tp, cp = dice.choice(stages), dice.choice((1, 1, 2, 4)), dice.choice((1, 1, 1, 2))
    found: Choice = {"pp": pp, "tp": tp, "cp": cp, "dp_replicate": dice.choice((1, 1, 2))}
    found["dp_shard"] = dice.choice(shards)
    if found["dp_shard"] > 1:
        found["zero"] = dice.choice((1, 2, 3, 3))
    if tp > 1:
        found["sequence_parallel"] = dice.choice((False, True))
    if cp > 1:
        found["context_parallel"] = dice.choice(("ring", "all-to-all"))
    if pp > 1:
        found["schedule"] = dice.choice(SCHEDULES)
        found["virtual_stages"] = 2 if found["schedule"] in OF_CHUNKS else 1
        split = dice.choice(("even",) * 6 + ("weighted",))
        found["stage_split"] = split if found["virtual_stages"] == 1 else "even"
    if experts:
        found |= {"ep": dice.choice((1, 2, 4)), "etp": dice.choice((1, tp))}
    return found | {"micro_batch": dice.choice((1, 2, 3, 4)), "accumulation": pp * dice.choice((1, 2, 3, 4))}


def options(dice: random.Random) -> Choice:
    """What saves memory, beside any mesh."""
    recompute = dice.choice(("none", "selective", "full"))
    found: Choice = {
        "recompute": recompute,
        "offload": dice.choice(("none",) * 6 + ("optimizer", "parameters", "nvme")),
        "loss": dice.choice(("whole",) * 6 + ("chunked",)),
        "tiling": dice.choice((1,) * 12 + (2, 4, 8)),
    }
    some: tuple[Choice, ...] = ({}, {}, {"recompute_layers": 1}, {"recompute_layers": 2}, {"recompute_every": 2})
    return found | (dice.choice(some) if recompute == "full" else {})


def more(dice: random.Random, layout: Choice) -> Choice:
    """What replaces some choices of a layout: other layers again on every stage, exchanges of heads among two with a ring across them, and
    more micro-batches on one of two nodes. Drawn behind all others, which stay what they are."""
    found: Choice = {}
    if layout["pp"] > 1 and layout["recompute"] == "full" and dice.choice((False, True)):
        found["recompute_stages"] = tuple(dice.choice((0, 1, 2)) for _ in range(layout["pp"]))
        found |= {"recompute_layers": 0, "recompute_every": 0}
    if layout["cp"] > 1 and dice.choice((False, True)):
        found |= {"cp": 4, "context_parallel": "hierarchical", "cp_inner": 2}
    is_whole = layout["pp"] == layout["cp"] == 1 and layout["dp_replicate"] * layout["dp_shard"] > 1
    if is_whole and dice.choice((False, True)):
        first = dice.randrange(1, layout["dp_replicate"] * layout["dp_shard"])
        rest = layout["dp_replicate"] * layout["dp_shard"] - first
        found["uneven_batch"] = uneven((first, layout["accumulation"]), (rest, dice.randint(1, layout["accumulation"])))
    return found


def is_legal(job: Job, plan: Plan, row: Candidates) -> bool:
    """Whether the executor runs a plan and no rule forbids it on the machine of `job`, as large as it needs."""
    if layout_obstacles(plan):
        return False
    batch = sequences_per_step(plan.mesh, plan.strategy)
    facts = question(job) | {"gpus": plan.mesh.world, "global_batch": batch}
    keep, _ = forbid(_rules(), facts, row)
    return bool(keep[0])


@cache
def _rules() -> tuple[Rule, ...]:
    return load_rules("legality")
