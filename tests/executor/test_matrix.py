"""The parity matrix: every legal cell trains like one process, and every illegal one is refused for the reason that the planner gives."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations, product

import pytest

from tests.examples import by_night
from tests.executor.matrix import (
    ACCUMULATIONS,
    AXES,
    MOST_RANKS,
    PRECISIONS,
    TABLE,
    TIED,
    Cell,
    Layout,
    cells,
    cells_of_transformers,
    illegal_rows,
    obstacles_of,
    refusals,
    sample,
    sample_of_transformers,
)  # fmt: skip

pytestmark = pytest.mark.slow

ONLY_PLANNED = {"LEG501", "LEG711"}
"""Rules about what a planner should not choose, and the executor can run all the same: an optimizer on the host inside a pipeline,
and nn.DataParallel without devices; tests/executor/test_parity.py trains both."""
EVERY = cells()
ILLEGAL = refusals(EVERY)
OF_TRANSFORMERS = sample_of_transformers()
BY_DAY = {"tp": ("llama", "gpt2", "mixtral", "qwen3"), "zero3": ("llama", "gpt2")}
LEFT_TO_NIGHTS = [
    cell
    for cell in OF_TRANSFORMERS
    if not any(how in cell.layout.name and cell.family in some for how, some in BY_DAY.items())
]
"""Families that others stand for by day: mistral and qwen2 are cut as llama is, and shards are alike for all."""
BY_LAYOUT: dict[Layout, list[Cell]] = defaultdict(list)
for _cell in (*EVERY, *cells_of_transformers()):
    if _cell not in ILLEGAL:
        BY_LAYOUT[_cell.layout].append(_cell)


def _assert_trains_like_one_process(some: Sequence[Cell]) -> None:
    from tests.executor.cells import assert_trained_like_one_process, jobs_of

    assert_trained_like_one_process([job for cell in some for job in jobs_of(cell)])


@pytest.mark.parametrize("cell", sample(), ids=lambda cell: cell.name)
def test_a_sample_of_the_matrix_trains_like_one_process(cell: Cell) -> None:
    """Every option of every axis in both precisions, with one and four micro-batches, with one weight and two for the ends: losses of 20
    steps, and in float64 losses and weights of five, over samples of equal and then of unequal lengths."""
    _assert_trains_like_one_process([cell])


@pytest.mark.parametrize("cell", by_night(OF_TRANSFORMERS, LEFT_TO_NIGHTS), ids=lambda cell: cell.name)
def test_models_of_transformers_train_like_one_process(cell: Cell) -> None:
    """The same for every family of transformers that the executor cuts, with every name as transformers has it: under tensor and
    pipeline parallelism, and in shards of replicas. Ranks come with other values, of which those of the first count."""
    _assert_trains_like_one_process([cell])


@pytest.mark.nightly
@pytest.mark.parametrize("layout", BY_LAYOUT, ids=lambda layout: layout.name)
def test_every_legal_cell_trains_like_one_process(layout: Layout) -> None:
    """All legal cells of a layout, one after the other on the same ranks; those of transformers' models, too."""
    _assert_trains_like_one_process(BY_LAYOUT[layout])


def test_the_executor_runs_exactly_the_legal_cells() -> None:
    """No legal cell meets an obstacle; every illegal one meets one of the rule's own code, unless the rule is one for planners alone."""
    assert [cell.name for some in BY_LAYOUT.values() for cell in some if obstacles_of(cell)] == []
    for cell, (rule, because) in ILLEGAL.items():
        codes = {obstacle.code for obstacle in obstacles_of(cell)}
        assert rule.code in codes or rule.id in ONLY_PLANNED, (cell.name, because, codes)


def test_the_table_of_illegal_cells_is_what_the_rules_say() -> None:
    """The committed table is the one that the rules make now, each row with the planner's sentence, its source, and the executor's own."""
    committed = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]
    assert committed == illegal_rows(), "python -m tests.executor.matrix writes it anew"
    assert all(row["executor"] for row in committed if row["rule"] not in ONLY_PLANNED)
    assert all(row["because"] and row["source"] for row in committed)


def test_the_matrix_has_every_factor_in_every_state() -> None:
    """A layout of axes alone is looked at with every task in fp32, and on up to four ranks with any two values of two factors; no two
    cells have one name."""
    of_axes: dict[Layout, list[Cell]] = defaultdict(list)
    for cell in EVERY:
        if cell.layout.factors.keys() <= AXES.keys():
            of_axes[cell.layout].append(cell)
    pairs = {pair for task in product(PRECISIONS, ACCUMULATIONS, TIED) for pair in combinations(enumerate(task), 2)}
    for layout, some in of_axes.items():
        tasks = [(cell.precision, cell.accumulation, cell.tied) for cell in some]
        assert [task[1:] for task in tasks if task[0] == "fp32"] == list(product(ACCUMULATIONS, TIED))
        met = {pair for task in tasks for pair in combinations(enumerate(task), 2)}
        assert met == pairs or layout.world == MOST_RANKS
    assert len({cell.name for cell in EVERY}) == len(EVERY)
