"""Candidates: one row per layout, one column per choice. Arithmetic over a million of them is arithmetic on columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, reduce
from typing import Any

import numpy as np

from strategist.columns import Column, Mask, Reals
from strategist.records import cached_property, dataclass

__all__ = [
    "MESH_COLUMNS",
    "OF_MESH",
    "OPTION_COLUMNS",
    "WORDS",
    "Candidates",
    "Column",
    "Mask",
    "Reals",
    "code",
    "deepest",
    "distinct",
    "joined",
    "total_of",
]

MESH_COLUMNS = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")
OF_MESH = (*MESH_COLUMNS, "zero")
"""Columns that the number of a mesh (`Candidates.mesh`) says."""
OPTION_COLUMNS = (
    "zero", "virtual_stages", "schedule", "micro_batch", "accumulation", "sequence_parallel", "context_parallel",
    "recompute", "offload", "tiling", "stage_split",
)  # fmt: skip

WORDS: Mapping[str, tuple[str, ...]] = {
    "schedule": ("none", "gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zbv", "dualpipev"),
    "context_parallel": ("none", "ring", "all-to-all", "hierarchical"),
    "recompute": ("none", "selective", "full"),
    "offload": ("none", "optimizer", "parameters", "nvme"),
    "stage_split": ("even", "weighted", "balanced"),
    "replicas": ("processes", "threads"),
    "compression": ("none", "bf16", "fp16", "powersgd", "topk"),
    "loss": ("whole", "chunked"),
    "tables": ("local", "server"),
    "recompute_depth": ("alike", "by-stage"),
}
"""Columns that stand for words hold the position of the word in its tuple. Those of ASKED are there only where somebody asked for
another word than the first, or a number above 0, and then of one word or number in all rows."""

_CUTS = ("pp", "dp_shard", "cp", "tp", "ep", "etp")
ASKED: Mapping[str, tuple[str, ...]] = {
    "replicas": _CUTS,
    "compression": _CUTS,
    "loss": ("pp", "tp"),
    "tables": _CUTS,
    "recompute_layers": (),
    "recompute_every": (),
    "recompute_depth": (),
    "uneven_batch": ("pp", "cp", "ep", "etp"),
}
"""What is never chosen unasked: threads, which are slower, compression, which is not exact, a loss in chunks, which few frameworks have, tables
of embeddings on a server, whose rows every micro-batch waits for, and full recompute of the first few layers of every chunk alone, as many
on every stage or each its own number, or of every so-many-th; with the axes that it cannot stand beside.
An uneven batch (1) is looked at behind the search, on nodes of several kinds."""
OF_LAYERS = ("recompute_layers", "recompute_every", "recompute_depth")
"""Those that say of which layers full recompute runs forward again."""
OF_STAGE = "recompute_stage_"
"""What stands before the number of a stage in the name of the column that says of how many layers of each of its chunks, where these
differ by stage."""
LAYERS_OF = "stage_layers_"
"""What stands before the number of a stage in the name of the column that says how many layers it owns, where stages are balanced."""
BY_STAGE = (OF_STAGE, LAYERS_OF)
"""Both: columns that hold a number for one stage, and are the same in all rows of one `depth`."""
HIDDEN = ("mesh", "depth")
"""Columns that number the rows that agree in some others: no choices."""
OF_REPLICAS = ("replicas", "compression", "tables")
"""Those that mean something only where there are several replicas."""
NOT_ASKED: Mapping[str, int] = {**dict.fromkeys(ASKED, 0), "cp_inner": 1}
"""What such columns hold where they are not there; `cp_inner` is there only where hierarchical context parallelism is looked at."""
RINGS, EXCHANGES = ("ring", "hierarchical"), ("all-to-all", "hierarchical")
"""Kinds of context parallelism in which keys and values travel, and those in which ranks exchange heads for tokens."""


@cache
def code(column: str, word: str) -> int:
    """The number that stands for a word in a column."""
    return WORDS[column].index(word)


class RowsOf(Mapping[str, Column]):
    """Some rows of a table's columns, each taken when it is read for the first time: most formulas read few of them. Some rows of these are
    taken from the same table."""

    def __init__(self, table: Mapping[str, Column], rows: Column) -> None:
        self._table: Mapping[str, Column] = table._table if isinstance(table, RowsOf) else table
        self._rows: Column = table._rows.take(rows) if isinstance(table, RowsOf) else rows
        self._taken: dict[str, Column] = {}

    def __getitem__(self, name: str) -> Column:
        if name not in self._taken:
            self._taken[name] = self._table[name].take(self._rows)
        return self._taken[name]

    def without(self, name: str) -> RowsOf:
        """The same rows with zeros in one column."""
        own = RowsOf({**self._table, name: np.zeros_like(self._table[name])}, self._rows)
        own._taken = {other: column for other, column in self._taken.items() if other != name}
        return own

    def __contains__(self, name: object) -> bool:
        return name in self._table

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


@dataclass(frozen=True, eq=False)
class Candidates:
    """Layouts as int64 columns of equal length, shape (C,). Compare rows, not objects."""

    columns: Mapping[str, Column]

    @cached_property
    def known(self) -> dict[object, Any]:
        """What was worked out of these layouts already: see `strategist.columns.remembered`."""
        return {}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    @cached_property
    def data_parallel(self) -> Column:
        """Ranks that see different samples, shape (C,)."""
        return self["dp_replicate"] * self["dp_shard"]

    @cached_property
    def exchanging(self) -> Column:
        """Neighbours along cp that exchange heads for tokens, shape (C,): all of an all-to-all, `cp_inner` where it is hierarchical, or
        each rank of a ring alone; so many groups as this goes into cp are a ring."""
        inner = self.columns.get("cp_inner", 1)
        return np.where(self.is_word("context_parallel", "all-to-all"), self["cp"], inner)

    @property
    def choices(self) -> tuple[str, ...]:
        """Every degree and option that rows may differ in, in the order of the columns."""
        return (*MESH_COLUMNS, *OPTION_COLUMNS, *(("cp_inner",) if "cp_inner" in self.columns else ()))

    @property
    def in_threads(self) -> bool:
        """Whether the replicas of every row are threads of one process."""
        return "replicas" in self.columns and bool(self["replicas"].any())

    @property
    def compression(self) -> str:
        """What is done to the gradients of every row before they are sent."""
        return str(self.word("compression", 0)) if "compression" in self.columns else "none"

    @property
    def chunks_loss(self) -> bool:
        """Whether every row computes its loss from the logits of a few tokens at a time."""
        return "loss" in self.columns and bool(self["loss"].any())

    @property
    def serves_tables(self) -> bool:
        """Whether the tables of embeddings of every row lie on a parameter server."""
        return "tables" in self.columns and bool(self["tables"].any())

    @property
    def recompute_every(self) -> int:
        """Every how-many-th layer of each chunk full recompute runs again, in every row; 0 for all of them, or for the first."""
        return int(self["recompute_every"].max(initial=0)) if "recompute_every" in self.columns else 0

    @cached_property
    def depth(self) -> Column:
        """A number per distinct set of what is said stage by stage, layers that run again and layers, (C,): 0 where stages are alike."""
        known = self.columns.get("depth")
        if known is not None:
            return known
        names = [name for name in self.columns if name.startswith(BY_STAGE)]
        asked = np.flatnonzero(self["recompute_depth"]) if "recompute_depth" in self.columns else self["pp"][:0]
        numbers, found = np.zeros(len(self), np.int64), dict[tuple[int, ...], int]()
        table = (
            np.stack([self[name][asked] for name in names], axis=1) if names else np.zeros((len(asked), 0), np.int64)
        )
        numbers[asked] = [found.setdefault(tuple(each), len(found) + 1) for each in table.tolist()]
        return numbers

    def depths_of(self, row: int) -> tuple[int, ...]:
        """How many of the first layers of each of its chunks every stage of one row runs again under full recompute: where stages are
        alike the same of all, and else as many as the row says of each; a number that is missing is 0."""
        stages = range(int(self["pp"][row]))
        if not ("recompute_depth" in self.columns and self["recompute_depth"][row]):
            return tuple(
                int(self["recompute_layers"][row]) if "recompute_layers" in self.columns else 0 for _ in stages
            )
        columns = (self.columns.get(f"{OF_STAGE}{stage}") for stage in stages)
        return tuple(0 if column is None else int(column[row]) for column in columns)

    def split_of(self, row: int) -> tuple[int, ...]:
        """How many layers every stage of one row owns, where its stages are balanced and the numbers are known; nothing else."""
        if not self.is_balanced(row) or f"{LAYERS_OF}0" not in self.columns:
            return ()
        return tuple(int(self[f"{LAYERS_OF}{stage}"][row]) for stage in range(int(self["pp"][row])))

    def is_balanced(self, row: int) -> bool:
        """Whether the stages of one row own layers as these and what runs again make them equally long."""
        return int(self["stage_split"][row]) == code("stage_split", "balanced")

    @property
    def world(self) -> Column:
        """Ranks used, shape (C,)."""
        return self["pp"] * self.data_parallel * self["cp"] * self["tp"]

    @cached_property
    def expert_dp(self) -> Column:
        """Replicas of each expert shard, shape (C,)."""
        return self.data_parallel * self["cp"] * self["tp"] // (self["ep"] * self["etp"])

    @property
    def mesh(self) -> Column:
        """A number per distinct mesh and ZeRO stage, (C,): what depends on these alone is worked out once per number."""
        known = self.columns.get("mesh")
        return np.arange(len(self), dtype=np.int64) if known is None else known

    def where(self, keep: Mask | Column) -> Candidates:
        """The rows that a mask marks or that an index column lists, in that order."""
        rows: Any = np.flatnonzero(keep) if keep.dtype == np.bool_ else keep
        return Candidates(RowsOf(self.columns, rows))

    def without(self, name: str) -> Candidates:
        """The rows with no choice made in one column of words."""
        columns = self.columns
        if isinstance(columns, RowsOf):
            return Candidates(columns.without(name))
        return Candidates({**columns, name: np.zeros_like(columns[name])})

    def runs(self, ignored: str) -> tuple[Column, Column]:
        """The first row of every run of neighbours that differ in one column at most, and the number of each row's run."""
        begins = np.zeros(len(self), dtype=np.bool_)
        begins[:1] = True
        told = (ignored, *((*MESH_COLUMNS, "zero") if "mesh" in self.columns else ()))
        for name in (name for name in self.columns if name not in told):
            column = self[name]
            begins[1:] |= column[1:] != column[:-1]
        return np.flatnonzero(begins), begins.cumsum() - 1

    def alike(self, *names: str) -> tuple[Column, Column]:
        """A row of each sort, and every row's sort, where rows that agree in the named columns are of one sort."""
        return self.sorts(names)

    def sorts(self, columns: Sequence[Column | str]) -> tuple[Column, Column]:
        """The same of some columns, which need not be choices, or their names."""
        if not len(self):
            return np.arange(0), np.arange(0)
        number, count = np.zeros(len(self), np.int64), 1
        for column in columns:
            least, most = self._range(column) if isinstance(column, str) else _range(column)
            if most > least:
                number, count = _fewer(number, count, most + 1 - least)
                own = (self[column] if isinstance(column, str) else column) - least
                own, width = _fewer(own, most + 1 - least, count)
                number, count = number * width + own, count * width
        return distinct(number)

    def _range(self, name: str) -> tuple[int, int]:
        """The least and the most of a column, which several sorts ask for."""
        if ("range", name) not in self.known:
            self.known["range", name] = _range(self[name])
        found: tuple[int, int] = self.known["range", name]
        return found

    def row(self, index: int) -> dict[str, int | str]:
        """One layout with its words spelt out."""
        return {name: self.word(name, index) for name in self.columns if name not in HIDDEN}

    def word(self, name: str, index: int) -> int | str:
        """One entry: the word where the column stands for words, else the number."""
        value = int(self.columns[name][index])
        return WORDS[name][value] if name in WORDS else value

    def is_word(self, name: str, *words: str) -> Mask:
        """Rows whose column stands for one of the words, shape (C,)."""
        if (name, words) not in self.known:
            column = self.columns[name]
            self.known[name, words] = reduce(np.logical_or, [column == code(name, word) for word in words])
        hit: Mask = self.known[name, words]
        return hit


def _range(column: Column) -> tuple[int, int]:
    return int(column.min()), int(column.max())


def deepest(columns: Mapping[str, Any]) -> Any:
    """The most layers that any stage of a layout runs again where each has its own number, (C,) or of one layout; 0 where none has."""
    return reduce(np.maximum, [columns[name] for name in columns if name.startswith(OF_STAGE)], 0)


COUNTED = 2**4
"""Numbers are counted if the largest of them is not more than so many times their count: in a third of the time of a sort and less."""


def _fewer(number: Column, count: int, times: int) -> tuple[Column, int]:
    """Numbers below `count`, and what they are below; where with `times` as many they could not be counted their places among those that are there."""
    if count == 1 or count * times <= COUNTED * len(number):
        return number, count
    first, place = distinct(number)
    return place, len(first)


def distinct(numbers: Column) -> tuple[Column, Column]:
    """Where each distinct number stands first, and each row's place among them (numpy's `unique` loads masked arrays)."""
    most = numbers.max(initial=0)
    if most < COUNTED * len(numbers):
        first = np.full(most + 1, -1)
        first[numbers[::-1]] = np.arange(len(numbers) - 1, -1, -1)
        there = np.flatnonzero(first >= 0)
        firsts = first.take(there)
        first[there] = np.arange(len(there))
        return firsts, first.take(numbers)
    ordered, in_order = _ascending(numbers)
    is_new = np.ones(len(numbers), np.bool_)
    is_new[1:] = in_order[1:] != in_order[:-1]
    place = np.empty_like(ordered)
    place[ordered] = is_new.cumsum() - 1
    return ordered[is_new], place


def _ascending(numbers: Column) -> tuple[Column, Column]:
    """Where the numbers stand in ascending order, equal ones as they come, and the numbers in that order. Numbers with their places behind
    them are sorted in a tenth of the time that an order takes."""
    bits = len(numbers).bit_length()
    if numbers.max(initial=0) >> (62 - bits):
        ordered = numbers.argsort(kind="stable")
        return ordered, numbers[ordered]
    placed = np.sort((numbers << bits) | np.arange(len(numbers)))
    return placed & ((1 << bits) - 1), placed >> bits


def joined(parts: Sequence[Candidates]) -> Candidates:
    """All rows of several blocks, in order. The blocks have the same columns."""
    return Candidates({name: np.concatenate([part[name] for part in parts]) for name in parts[0].columns})


def total_of(parts: Iterable[Any]) -> Any:
    """The sum of some arrays, one behind the other, without stacking them; from the second on into the same memory."""
    total, own = None, False
    for part in parts:
        if total is None:
            total = part
        elif own and total.shape == part.shape and total.dtype == part.dtype:
            total += part
        else:
            total, own = total + part, True
    return total
