"""Scenarios drawn from everything that the executor can build and that rules and executor allow: any model of the catalogue, any mesh,
any option. The grid shows terms one by one; these show what happens when they meet.

Models are cut to few layers, some to few words as well, so that terms that others hide can be largest.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from strategist.catalog import rows
from strategist.executor.architecture import model_obstacles
from strategist.facts.clusters import load_cluster
from strategist.facts.model import ModelShape
from strategist.facts.models import load_model
from tests.drawn import Choice, is_legal, mesh, more, options
from tests.measure.grid import Scenario, candidates_of, job_of, plan_of

WIDEST, LONGEST, FEW_WORDS = 8192, 8192, 2048
"""Hidden sizes that are drawn, positions that models get, and the vocabulary of those with few words."""


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
    layout = mesh(dice, stages=(1, 1, 1, 2, 4), shards=(1, 4, 6, 8), experts=shape.moe is not None) | options(dice)
    layout["optimizer"] = dice.choice(("adamw",) * 5 + ("adamw8bit", "muon", "sgd"))
    seq_len, precision = dice.choice((512, 1000, 1024, 2048, 4096)), dice.choice(("bf16", "bf16", "fp32", "fp16"))
    shape = _cut(dice, shape, layout)
    later = {
        name: choice for name, choice in more(dice, layout).items() if name != "uneven_batch"
    }  # a rank has no share
    return Scenario(name, shape, seq_len, precision, layout | later)


@cache
def _shapes() -> tuple[ModelShape, ...]:
    """Models that the executor builds, whose layers are not spelt one by one."""
    every = (load_model(row["name"]) for row in rows("models"))
    return tuple(s for s in every if not model_obstacles(s) and not s.pattern and s.hidden <= WIDEST)


def _cut(dice: random.Random, shape: ModelShape, layout: Choice) -> ModelShape:
    """Few layers, at least one for every chunk; of a mixture's perhaps one dense."""
    pp, virtual = layout["pp"], layout.get("virtual_stages", 1)
    even, odd = pp * virtual * dice.choice((1, 2)), pp * dice.choice((1, 2, 2, 3)) + dice.choice((0, 1))
    layers, moe = even if virtual > 1 else odd, shape.moe
    if moe is not None:
        dense = dice.choice((0, min(moe.first_dense, layers - 1, 1)))
        moe = replace(moe, layers=layers - dense, first_dense=dense)
    rows_of_positions = LONGEST if shape.pos == "learned" else shape.pos_rows
    vocab = dice.choice((shape.vocab, shape.vocab, FEW_WORDS))
    return replace(
        shape, layers=layers, moe=moe, max_seq=LONGEST, pos_rows=rows_of_positions, vocab=vocab, parameters_stated=None
    )


def _is_legal(scenario: Scenario) -> bool:
    plan = plan_of(scenario)
    job = replace(job_of(scenario, plan), cluster=load_cluster("dgx-h100"))
    return is_legal(job, plan, candidates_of(plan))
