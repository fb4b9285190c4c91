"""The page that says what works asks the code, and leaves nothing out that a plan can hold."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from docs.status_page import LATER, TECHNIQUES, runnable_models, status_page
from strategist import load_model
from strategist.catalog import rows
from strategist.cli import COMMANDS
from strategist.document.plan import MESH_AXES, Plan
from strategist.executor.support import unsupported
from strategist.facts.workload import OPTIMIZERS, PRECISIONS
from strategist.space.candidates import WORDS
from tests.plans import make_plan, tiny_llama


def plans() -> dict[str, Plan | None]:
    """The plan of every row by its title."""
    return {technique.title: technique.plan for technique in TECHNIQUES}


def used(plan: Plan) -> Iterator[str]:
    """Every choice of a plan as `name=value`; degrees only as far as they are above 1."""
    yield from (axis for axis in (*MESH_AXES, "ep", "etp") if plan.mesh.size(axis) > 1)
    yield from (f"{name}={getattr(plan.strategy, name)}" for name in (*WORDS, "zero", "sequence_parallel"))
    yield from ("tiling",) if plan.strategy.tiling > 1 else ()
    yield from (plan.workload.precision, plan.strategy.optimizer)


def choices() -> Iterator[str]:
    """Every choice that there is."""
    yield from (*MESH_AXES, "ep", "etp", "tiling", *PRECISIONS, *OPTIMIZERS)
    yield from (f"{name}={word}" for name, words in WORDS.items() for word in words)
    yield from (f"zero={stage}" for stage in range(4))
    yield from (f"sequence_parallel={said}" for said in (False, True))


@pytest.mark.slow
def test_the_page_shows_every_choice() -> None:
    """Every axis, word, precision and optimizer that a plan can hold is used by the plan of some row."""
    shown = {choice for plan in plans().values() if plan for choice in used(plan)}
    assert set(choices()) <= shown


@pytest.mark.slow
def test_every_row_is_planned() -> None:
    """Each technique of the table has a plan, so a row can only say `no` further to the right."""
    assert [title for title, plan in plans().items() if plan is None] == []


@pytest.mark.slow
def test_a_promised_command_is_either_there_or_missing_by_name() -> None:
    """A command stands in the page's list of missing things exactly as long as the command line does not have it."""
    there, page = {name for name, _ in COMMANDS}, status_page()
    assert {name for name in LATER if f"- `strategist {name}`:" in page} == set(LATER) - there


def test_models_that_are_said_to_run_do() -> None:
    """The executor meets no obstacle in a plan for a model that the page counts, and meets one for any other."""
    names = {row["name"] for row in rows("models")}
    runs = set(runnable_models())
    assert {name for name in names if not unsupported(make_plan(load_model(name)))} == runs
    assert 0 < len(runs) < len(names)


@pytest.mark.slow
def test_every_layout_that_runs_is_compared_with_one_process() -> None:
    """The axes, ZeRO stage, schedule, recomputation and offload of each row that runs are those of some parity test; compression,
    which is not exact, equals one process of the same algorithm (tests/executor/test_compression.py)."""
    from tests.executor.test_parity import CASES

    compared = [make_plan(tiny_llama(**case.shape), **case.layout) for case in CASES]
    runs = [plan for plan in plans().values() if plan and not unsupported(plan)]
    assert {products(plan) for plan in runs} <= {products(plan) for plan in compared}
    tested = {choice for plan in compared for choice in used(plan)}
    assert {
        choice for plan in runs for choice in used(plan) if "=" in choice and not choice.startswith("compression=")
    } <= tested


def products(plan: Plan) -> tuple[int, frozenset[str]]:
    """The ZeRO stage and the axes that are cut."""
    return plan.strategy.zero, frozenset(axis for axis in MESH_AXES if plan.mesh.size(axis) > 1)
