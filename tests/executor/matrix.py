"""The parity matrix: every strategy, and every product of strategies, in the formats, batches and models that they must be exact for.

A layout is one option of some axes: of one axis alone on 2, 4 and 8 ranks, of two axes on 2 ranks each, and of three so that any two
options meet in one; further every way to save memory beside each option, and experts, in whole or spread, beside each. A cell is a
layout with a precision, micro-batches per step, and one weight or two for the ends of the model; its run goes from samples of equal
to samples of unequal lengths, so it stands for both. In fp32 a layout meets every task, in bf16 two in which any two factors meet, on
eight ranks one. The models of transformers are looked at in layouts of their own, each with every family. Options are the words that the planner has for choices, so that a new one joins
by itself. What the planner's rules forbid is an illegal cell, by the first of them.

`python -m tests.executor.matrix` writes the table of illegal cells.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from strategist.document.plan import Plan
from strategist.executor.obstacles import Obstacle
from strategist.executor.support import layout_obstacles
from strategist.facts.clusters import load_cluster
from strategist.facts.hardware import Cluster, with_gpus
from strategist.facts.job import Job
from strategist.facts.model import ModelShape
from strategist.facts.profile import find_profile
from strategist.facts.runs import OF_CHUNKS
from strategist.facts.workload import Workload
from strategist.planner.situation import one, question
from strategist.planner.write import mesh_of, strategy_of
from strategist.rulebook.apply import columns, sentence
from strategist.rulebook.rule import Rule, load_rules
from strategist.space.candidates import WORDS, Candidates, code
from tests.executor.hugging_face import FAMILIES, shape_of
from tests.plans import make_plan, tiny_llama, tiny_mixtral

TABLE = Path(__file__).with_name("illegal_cells.jsonl")
GLOBAL_BATCH, SEQ_LEN = 32, 16
MOST_RANKS = 8
PRECISIONS, ACCUMULATIONS, TIED = ("fp32", "bf16"), (1, 4), (False, True)
RANKS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

Option = dict[str, int]
"""Columns of a candidate; an axis of 2 grows when the option is alone."""


def _worded(column: str, axis: str) -> dict[str, Option]:
    """An option on two ranks for each word of a column."""
    chunks = {word: {"virtual_stages": 2} if word in OF_CHUNKS else {} for word in WORDS[column][1:]}
    return {word: {axis: 2, column: code(column, word)} | own for word, own in chunks.items()}


IN_GROUPS: Option = {"cp": 4, "cp_inner": 2, "context_parallel": code("context_parallel", "hierarchical")}
"""A ring of groups that exchange heads takes two ranks of either."""
AXES: dict[str, dict[str, Option]] = {
    "pipeline": _worded("schedule", "pp"),
    "copies": {"ddp": {"dp_replicate": 2}},
    "shards": {f"zero{stage}": {"dp_shard": 2, "zero": stage} for stage in (1, 2, 3)},
    "sequence": _worded("context_parallel", "cp") | {"hierarchical": IN_GROUPS},
    "tensor": {"tp": {"tp": 2}, "tp-sp": {"tp": 2, "sequence_parallel": 1}},
}
SAVING: dict[str, Option] = {
    **{f"recompute-{word}": {"recompute": code("recompute", word)} for word in WORDS["recompute"][1:]},
    **{f"offload-{word}": {"offload": code("offload", word)} for word in WORDS["offload"][1:]},
    "tiled": {"tiling": 8},
}
EXPERTS: dict[str, Option] = {"moe": {}, "ep": {"ep": 2}}
"""A mixture in whole, and with its experts spread over the ranks of other axes."""
ALONE: dict[str, dict[str, Option]] = {
    "threads": {"threads": {"dp_replicate": 2, "replicas": 1}},
    "tables": {"server": {"dp_replicate": 2, "tables": 1}},
}
KNOWN = AXES | ALONE | {"saving": SAVING, "experts": EXPERTS}
OF_TRANSFORMERS: tuple[dict[str, str], ...] = (
    *({axis: option} for axis in ("pipeline", "copies", "shards") for option in AXES[axis]),
    {"tensor": "tp"},
    {"copies": "ddp", "shards": "zero3"},
    {"pipeline": "1f1b", "tensor": "tp"},
    {"pipeline": "interleaved", "tensor": "tp"},
    {"pipeline": "1f1b", "copies": "ddp"},
    {"pipeline": "1f1b", "shards": "zero3"},
    {"shards": "zero1", "tensor": "tp"},
    {"shards": "zero3", "tensor": "tp"},
    {"pipeline": "1f1b", "copies": "ddp", "tensor": "tp"},
    *(
        {"shards": "zero3", "saving": saving}
        for saving in ("recompute-full", "recompute-selective", "offload-parameters")
    ),
    {"tensor": "tp", "saving": "recompute-selective"},
    {"pipeline": "1f1b", "saving": "recompute-full"},
)
"""Layouts in which the models of transformers are looked at: sequence and context parallelism they do not have."""
OF_TRANSFORMERS_OFTEN: tuple[dict[str, str], ...] = (
    {"pipeline": "1f1b", "tensor": "tp"},
    {"copies": "ddp", "shards": "zero3"},
)
"""Those in the ci suite."""


@dataclass(frozen=True)
class Layout:
    """Options by axis, and the columns that they say together."""

    options: tuple[tuple[str, str], ...]
    columns: tuple[tuple[str, int], ...]

    @property
    def choice(self) -> Option:
        """Columns that differ from a plain candidate."""
        return dict(self.columns)

    @property
    def world(self) -> int:
        """Devices."""
        return int(np.prod([self.choice.get(axis, 1) for axis in RANKS]))

    @property
    def name(self) -> str:
        """Its options; the ranks too where an option alone has more than two."""
        words = "+".join(option for _, option in self.options) or "single"
        return f"{words} x{self.world}" if len(self.options) == 1 and self.world > 2 else words

    @property
    def factors(self) -> dict[str, Any]:
        """What is looked at two by two."""
        return dict(self.options)


@dataclass(frozen=True)
class Cell:
    """A layout and what it trains."""

    layout: Layout
    precision: str
    accumulation: int
    tied: bool
    family: str = ""
    """The model of transformers that is trained; none for the built-in one."""

    @property
    def factors(self) -> dict[str, Any]:
        """What is looked at two by two."""
        if self.family:
            return {"layout": self.layout.name, "family": self.family} | self.task
        return self.layout.factors | self.task

    @property
    def task(self) -> dict[str, Any]:
        """What is trained, whatever the layout."""
        return {"precision": self.precision, "accumulation": self.accumulation, "tied": self.tied}

    @property
    def layers(self) -> int:
        """As few as its stages need."""
        chosen = self.layout.choice
        return max(2, chosen.get("pp", 1) * chosen.get("virtual_stages", 1))

    @property
    def shape(self) -> ModelShape:
        """The model that it trains."""
        if self.family:
            return shape_of(self.family, self.layers, self.tied)
        make = tiny_mixtral if "experts" in self.layout.factors else tiny_llama
        return make(layers=self.layers, tied=self.tied)

    @property
    def row(self) -> Option:
        """Its columns that are not plain; experts in whole are cut like all else by tp."""
        chosen = self.layout.choice
        ranks = chosen.get("dp_replicate", 1) * chosen.get("dp_shard", 1)
        has_experts = self.layout.factors.get("experts") == "moe" or self.family == "mixtral"
        cut = {"etp": chosen["tp"]} if "tp" in chosen and has_experts else {}
        micro = GLOBAL_BATCH // (ranks * self.accumulation)
        return {"micro_batch": micro, "accumulation": self.accumulation} | cut | chosen

    @property
    def name(self) -> str:
        """All of it."""
        ends = "tied" if self.tied else "untied"
        return f"{self.family} {self.layout.name} {self.precision} accumulation {self.accumulation} {ends}".lstrip()

    @property
    def job(self) -> Job:
        """What a planner would be asked for it."""
        kinds: dict[str, Any] = {"precision": self.precision, "optimizer": "adamw"}
        return Job(
            cluster=ranks_of_one_node(self.layout.world), model=self.shape, profile=find_profile(), frontend="strategist",
            workload=Workload(seq_len=SEQ_LEN, global_batch=GLOBAL_BATCH, **kinds),
        )  # fmt: skip

    @property
    def plan(self) -> Plan:
        """The Plan that a planner would write for it."""
        return written(self.job, one(**self.row).row(0))


@cache
def ranks_of_one_node(count: int) -> Cluster:
    """A machine of so many CPU ranks, from the catalogue."""
    cluster = load_cluster("cpu")
    (group,) = cluster.groups
    return replace(cluster, groups=(replace(group, node=with_gpus(group.node, count)),))


def written(job: Job, row: Mapping[str, Any]) -> Plan:
    """A layout as the Plan that the executor would be given; its ledgers are of no interest here."""
    parts = {"cluster": job.cluster, "model": job.model, "workload": job.workload}
    return replace(make_plan(), **parts, mesh=mesh_of(row), strategy=strategy_of(job, row))


def layouts() -> tuple[Layout, ...]:
    """All of them, legal or not, in a fixed order."""
    single, pairs, triples = ([_combined(each) for each in _products(AXES, count)] for count in (1, 2, 3))
    alone = [*single, *(_combined(each) for each in _products(ALONE, 1))]
    grown = [_grown(layout, ranks) for layout in alone for ranks in (4, 8)]
    few = [{}, *_products(AXES, 1)]
    beside = [_combined(each | {axis: word}) for each in few for axis in ("saving", "experts") for word in KNOWN[axis]]
    spread = [_combined(each | {"experts": "ep"}) for each in _products(AXES, 2) if "shards" in each]
    of_three = covering([layout for layout in triples if layout.world <= MOST_RANKS])
    found = (_combined({}), *alone, *pairs, *grown, *of_three, *beside, *spread)
    return tuple(layout for layout in dict.fromkeys(found) if layout.world <= MOST_RANKS)


def _products(axes: Mapping[str, Mapping[str, Option]], count: int) -> Iterator[dict[str, str]]:
    """One option of each of `count` axes."""
    for some in combinations(axes, count):
        for options in product(*(axes[axis] for axis in some)):
            yield dict(zip(some, options, strict=True))


def _combined(chosen: Mapping[str, str]) -> Layout:
    together: Option = {}
    for axis, option in chosen.items():
        together |= KNOWN[axis][option]
    return Layout(tuple(chosen.items()), tuple(sorted(together.items())))


def _grown(layout: Layout, ranks: int) -> Layout:
    grown = {name: ranks if name in RANKS else size for name, size in layout.columns}
    return replace(layout, columns=tuple(sorted(grown.items())))


@cache
def cells_of_transformers() -> tuple[Cell, ...]:
    """Legal cells in which in either precision every family meets every layout, and either of them each accumulation and sort of ends."""
    found = (covering(_legal_of_transformers(OF_TRANSFORMERS, precision)) for precision in PRECISIONS)
    return tuple(cell for some in found for cell in some)


def _legal_of_transformers(some: Sequence[Mapping[str, str]], precision: str) -> list[Cell]:
    """Every family in some layouts, as far as that is legal."""
    every = tuple(Cell(*each) for each in product(map(_combined, some), (precision,), ACCUMULATIONS, TIED, FAMILIES))
    illegal = refusals(every)
    legal = [cell for cell in every if cell not in illegal]
    random.Random(precision).shuffle(legal)  # where a covering has a choice, it falls on any task
    return legal


@cache
def cells() -> tuple[Cell, ...]:
    """All of them, legal or not. What saves memory and how experts lie is looked at with every two of the other factors."""
    every = [cell for each in product(layouts(), PRECISIONS, ACCUMULATIONS, TIED) if _is_wanted(cell := Cell(*each))]
    plain = [cell for cell in every if not cell.layout.factors.keys() & {"saving", "experts"}]
    rest = [cell for cell in every if cell.layout.factors.keys() & {"saving", "experts"}]
    return (*plain, *covering(rest))


def _is_wanted(cell: Cell) -> bool:
    if cell.precision == "fp32":
        return True
    return (cell.accumulation, cell.tied) in (
        ((4, False),) if cell.layout.world == MOST_RANKS else ((1, True), (4, False))
    )


F = TypeVar("F", Layout, Cell)


def covering(some: Sequence[F], beside: frozenset[str] = frozenset()) -> tuple[F, ...]:
    """A few of some layouts or cells in which every two factors meet in all the ways in which they meet in any, or every factor and
    those that are named `beside`: the one with most pairs that are new first, and of several the first."""
    missing = {each: set(_pairs(each.factors, beside)) for each in some}
    found = []
    while missing:
        best = max(missing, key=lambda each: len(missing[each]))
        seen = missing.pop(best)
        found.append(best)
        missing = {each: left for each, pairs in missing.items() if (left := pairs - seen)}
    return tuple(found)


def _pairs(factors: Mapping[str, Any], beside: frozenset[str]) -> Iterator[Any]:
    for pair in combinations(sorted(factors.items()), 2):
        if not beside or not beside.isdisjoint(dict(pair)):
            yield pair


def sample() -> tuple[Cell, ...]:
    """Some legal cells on at most four ranks, with every option of every axis in both precisions, with and without accumulation, and
    with either model."""
    every = cells()
    illegal = refusals(every)
    few = [
        cell
        for cell in every
        if cell.layout.world <= 4 and cell not in illegal and cell.layout.factors.keys() <= AXES.keys()
    ]
    return covering(few, frozenset(every[0].task))


def sample_of_transformers() -> tuple[Cell, ...]:
    """Every family under tensor and pipeline parallelism and in shards of replicas, in fp32, each family and each layout with and
    without accumulation and with either sort of ends."""
    return covering(_legal_of_transformers(OF_TRANSFORMERS_OFTEN, "fp32"), frozenset({"family", "layout"}))


@cache
def refusals(some: tuple[Cell, ...]) -> dict[Cell, tuple[Rule, str]]:
    """The illegal ones, with the first rule that forbids each and what it says."""
    alike: dict[tuple[Any, ...], list[Cell]] = defaultdict(list)
    for cell in some:
        alike[cell.layout.world, cell.shape, cell.precision].append(cell)
    return {cell: found for group in alike.values() for cell, found in _refused(group)}


def _refused(alike: Sequence[Cell]) -> Iterator[tuple[Cell, tuple[Rule, str]]]:
    """The same of cells that differ in their layout alone."""
    facts, table = question(alike[0].job), stacked([cell.row for cell in alike])
    values = facts | columns(table)
    open_rows = np.ones(len(alike), dtype=np.bool_)
    for rule in load_rules("legality"):
        hits = open_rows & np.broadcast_to(np.asarray(rule.holds(values), dtype=np.bool_), open_rows.shape)
        open_rows &= ~hits
        for number in np.flatnonzero(hits):
            shown = facts | table.row(number) | {"dp": int(table.data_parallel[number])}
            yield alike[number], (rule, sentence(rule.because, shown))


def stacked(rows: Sequence[Option]) -> Candidates:
    """Some rows, each of the columns that are not plain, as one table."""
    plain = {name: int(column[0]) for name, column in one(replicas=0, tables=0, cp_inner=1).columns.items()}
    return Candidates({name: np.array([(plain | row)[name] for row in rows], np.int64) for name in plain})


def illegal_rows() -> list[dict[str, Any]]:
    """The table of illegal cells: for each layout and rule the values of the factors under which it holds, what the rule says of the
    first of them, its source, and what the executor says of the same Plan; nothing where it would run it."""
    together: dict[tuple[Layout, str], list[Cell]] = defaultdict(list)
    found = refusals(cells())
    for cell, (rule, _) in found.items():
        together[cell.layout, rule.id].append(cell)
    return [_illegal_row(some, *found[some[0]]) for some in together.values()]


def _illegal_row(some: Sequence[Cell], rule: Rule, because: str) -> dict[str, Any]:
    first = some[0]
    return {
        "layout": first.layout.name, "ranks": first.layout.world,
        **{name: sorted({cell.task[name] for cell in some}) for name in first.task},
        "rule": rule.id, "code": rule.code, "because": because, "source": rule.source,
        "executor": [f"{o.code} {o.place}: {o.sentence}" for o in obstacles_of(first)],
    }  # fmt: skip


def obstacles_of(cell: Cell) -> tuple[Obstacle, ...]:
    """What the executor says of a cell's Plan."""
    return layout_obstacles(cell.plan)


def main() -> None:
    """Write the table."""
    rows = illegal_rows()
    TABLE.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
