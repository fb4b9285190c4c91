"""Layouts drawn from all that is legal, many options at once, odd numbers of ranks, layers and words: they train like one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from math import prod

import pytest

from strategist.document.plan import Plan
from strategist.facts.job import Job
from strategist.facts.model import ModelShape
from strategist.facts.profile import find_profile
from tests.drawn import is_legal, mesh, more, options
from tests.executor.matrix import RANKS, SEQ_LEN
from tests.measure.grid import candidates_of
from tests.plans import make_plan, tiny_gpt2, tiny_llama, tiny_mixtral

pytestmark = pytest.mark.slow

SEED, COUNT, OFTEN = 1, 40, 8
"""Of what is drawn; each OFTEN-th of COUNT plans is trained in ci too."""
MOST_RANKS = 8


def _drawn(count: int) -> Iterator[Plan]:
    """`count` legal plans of more than one rank, always the same."""
    found = number = 0
    while found < count:
        dice = random.Random(f"{SEED}-{number}")
        number += 1
        shape = _shape(dice)
        layout = mesh(dice, stages=(1, 1, 2, 3, 4), shards=(1, 2, 3, 4), experts=shape.moe is not None) | options(dice)
        layout |= more(dice, layout)
        if not 1 < prod(layout[axis] for axis in RANKS) <= MOST_RANKS:
            continue
        if shape.layers < layout["pp"] * layout.get("virtual_stages", 1):
            continue
        plan = make_plan(shape, seq_len=SEQ_LEN, **layout)
        job = Job(
            cluster=plan.cluster, model=shape, workload=plan.workload, profile=find_profile(), frontend="strategist"
        )
        if is_legal(job, plan, candidates_of(plan)):
            found += 1
            yield plan


def _shape(dice: random.Random) -> ModelShape:
    layers, vocab, tied = dice.choice((2, 3, 4, 5)), dice.choice((64, 61, 72)), dice.choice((False, True))
    kind = dice.choice(("gpt2", "llama", "llama", "mixtral", "mixtral"))
    if kind == "gpt2":
        return tiny_gpt2(layers=layers, vocab=vocab, tied=tied)
    dense = dice.choice((0, 0, 1))
    moe = {"layers": layers - dense, "first_dense": dense, "shared_ffn": dice.choice((0, 0, 16))}
    shape = tiny_mixtral(layers=layers, moe=moe) if kind == "mixtral" else tiny_llama(layers=layers)
    parts = {"qk_norm": dice.choice(("", "", "head")), "qkv_bias": dice.choice((False, True))}
    return replace(shape, vocab=vocab, tied=tied, kv_heads=dice.choice((1, 2, 4, 8)), window=dice.choice((None, None, 7)), **parts)  # fmt: skip


def _name(plan: Plan) -> str:
    """What differs from a plain layout of the shape."""
    sizes = [f"{axis}{plan.mesh.size(axis)}" for axis in (*RANKS, "ep") if plan.mesh.size(axis) > 1]
    s = plan.strategy
    words = [word for word in (s.schedule, s.context_parallel, s.recompute, s.offload) if word != "none"]
    words += ["by-stage"] * bool(s.recompute_stages) + ["uneven"] * bool(s.uneven_batch)
    return "-".join([plan.model.name, f"{plan.model.layers}l", *sizes, f"zero{s.zero}", *words, f"x{s.accumulation}"])


def _marked() -> Iterator[object]:
    for number, plan in enumerate(_drawn(COUNT)):
        marks = (pytest.mark.nightly,) if number % OFTEN else ()
        yield pytest.param(plan, id=f"{number}-{_name(plan)}", marks=marks)


@pytest.mark.parametrize("plan", tuple(_marked()))
def test_what_is_legal_trains_like_one_process(plan: Plan) -> None:
    """Losses and weights of five steps in float64, over samples of equal and then of unequal lengths."""
    from tests.executor.cells import EXACT, Job, assert_trained_like_one_process

    assert_trained_like_one_process([Job(plan, EXACT)])
