"""What one rank of each stage holds and works on. Columns of candidates (C) against stages (S) and layer sorts (K).

Candidates are taken in groups that share `pp` and `virtual_stages`, so that the layers of every stage are one small
table and everything else broadcasts against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import compress
from operator import not_
from typing import Any

import numpy as np

from strategist.columns import on_stages, record_of, remembered
from strategist.facts.job import Job
from strategist.facts.layers import Layer, build_layer
from strategist.facts.model import LayerKind, ModelShape
from strategist.facts.parameters import behind_head, outer_parameters, table_width
from strategist.facts.runs import V_SHAPED, stage_of_head
from strategist.facts.tables import served_elements
from strategist.records import cached_property, dataclass, replace
from strategist.space.candidates import (
    OF_LAYERS,
    OF_MESH,
    WORDS,
    Candidates,
    Column,
    Mask,
    Reals,
    code,
    distinct,
    total_of,
)
from strategist.space.stages import (
    every_layer_counts,
    first_layer_counts,
    head_in_layers,
    kinds,
    representative_stages,
    stage_layer_counts,
)


@dataclass(frozen=True, eq=False)
class Group:
    """Candidates that share `pp` and the layers of every stage.

    `rows` are their places in the whole list, `stages` the stage numbers looked at, `layers_SK` the layers of each sort
    on each of them, `stands_for` how many stages each one stands for. `meshes` are one candidate per distinct mesh and `mesh_of` the place of each candidate's mesh among
    them: a few hundred rows stand for a million. Where matrices `is_tiled`, each candidate stands for itself. `again_SK` are the
    layers that full recompute runs again where those are not all. `among` is the whole list, where it is known, `every_mesh` the meshes of
    it, and `mesh_at` the places of the group's among these.
    """

    rows: Column
    candidates: Candidates
    pp: int
    stages: Column
    layers_SK: Column
    stands_for: Reals
    meshes: Candidates
    mesh_of: Column
    every_mesh: Candidates
    mesh_at: Column
    is_tiled: bool = False
    again_SK: Column | None = None
    schedule: str = "none"
    among: Candidates | None = None

    @cached_property
    def is_v_shaped(self) -> bool:
        """Whether stages have a run of layers on the way down and one on the way up."""
        return self.schedule in V_SHAPED

    @cached_property
    def known(self) -> dict[object, Any]:
        """What was worked out of these candidates already: see `strategist.columns.remembered`."""
        return {}

    @cached_property
    def is_first(self) -> Mask:
        """Stages that hold the embedding, shape (S,)."""
        return self.stages == 0

    @cached_property
    def is_last(self) -> Mask:
        """Stages that hold the head and the loss, shape (S,)."""
        return self.stages == stage_of_head(self.schedule, self.pp)

    @cached_property
    def turns_back(self) -> Mask:
        """Stages that hand a run's results to themselves, shape (S,)."""
        return (self.stages == self.pp - 1) & self.is_v_shaped

    @cached_property
    def layers_S(self) -> Column:
        """How many layers every stage owns, of all sorts together, shape (S,)."""
        return np.asarray(self.layers_SK.sum(axis=1))

    @cached_property
    def has_layers(self) -> Mask:
        """Stages that own a layer, shape (S,)."""
        return np.asarray((self.layers_SK > 0).any(axis=1))

    @property
    def redone_SK(self) -> Column:
        """The layers of each sort that recomputation, whatever its policy, looks at, (S, K)."""
        return self.layers_SK if self.again_SK is None else self.again_SK

    def redone_of(self, values_CK: Reals) -> Reals:
        """The same sum over the layers that recomputation looks at."""
        return (
            self.layers_of(values_CK) if self.again_SK is None else (self.again_SK.astype(np.float64) @ values_CK.T).T
        )

    def layers_of(self, values_CK: Reals) -> Reals:
        """Sum over the layers of each stage of a per-layer amount: (C, K) to (C, S)."""
        if self.layers_SK.shape[1] == 1:
            return on_stages(values_CK[:, 0], self.layers_SK[:, 0])
        return (self.layers_SK.astype(np.float64) @ values_CK.T).T


SPLITS, WEIGHTED = len(WORDS["stage_split"]), code("stage_split", "weighted")
BLOCK = 2**16
"""Entries (rows times stages) looked at together: few enough that the columns of one block stay in a core's cache."""


def groups(job: Job, candidates: Candidates, *, every_stage: bool = False) -> Iterator[Group]:
    """The candidates in blocks of at most `BLOCK` entries with equal `pp` and equal layers per stage, which the job, or a layout, may state.

    With one sort of layer the virtual stages do not change how many layers a stage owns, because interleaving needs
    equal chunks.
    """
    shape = job.model
    keys = _keys(job, candidates)
    later_hold_more = bool(candidates.is_word("schedule", *V_SHAPED, "zb_h1").any())
    every = candidates.recompute_every
    every_stage = every_stage or later_hold_more
    first_of_mesh, mesh_of_all = distinct(candidates.mesh)
    every_mesh, in_order = candidates.where(first_of_mesh), np.sort(keys)
    for key in in_order[np.diff(in_order, prepend=-1) > 0].tolist():
        is_partly, key_of_stages = divmod(key, SOME_AGAIN)
        (pp, sort_of_split), virtual = divmod(key_of_stages >> 20, SPLITS), key % IN_A_V
        is_tiled, schedule = key % 2**20 >= TILED, ("none", *V_SHAPED)[key % TILED // IN_A_V]
        head = head_in_layers(shape) if sort_of_split == WEIGHTED else 0.0
        alike = np.flatnonzero(keys == key)
        split = job.split or candidates.split_of(int(alike[0]))
        table = stage_layer_counts(shape, pp, virtual, split, head, schedule)
        whole = np.arange(pp), np.ones(pp)
        stages, stands_for = (
            whole if every_stage or is_partly or split else representative_stages(shape, pp, virtual, head)
        )
        size = max(1, BLOCK // len(stages))
        for start in range(0, len(alike), size):
            rows = alike[start : start + size]
            own = candidates.where(rows)
            meshes, numbers = (own, np.arange(len(own))) if is_tiled else (every_mesh, mesh_of_all[rows])
            first, mesh_of = distinct(numbers)
            group = Group(
                rows,
                own,
                pp,
                stages,
                table[stages],
                stands_for,
                meshes.where(numbers[first]),
                mesh_of,
                meshes,
                numbers[first],
                is_tiled,
                schedule=schedule,
                among=candidates,
            )
            if is_partly:
                firsts = job.recompute_layers or own.depths_of(0)
                again = (
                    every_layer_counts(shape, pp, virtual, every, split, head)
                    if every
                    else first_layer_counts(shape, pp, virtual, firsts, split, head)
                )
                group = replace(group, again_SK=again[stages])
            yield group


def _keys(job: Job, candidates: Candidates) -> Column:
    """A number for each number of stages and layers of every stage, and whatever else keeps candidates apart, (C,)."""
    shape = job.model
    turning = total_of((1 + place) * candidates.is_word("schedule", word) for place, word in enumerate(V_SHAPED))
    some_again = _some_again(job, candidates)
    apart = turning > 0 if some_again is None else (turning > 0) | (some_again > 0)
    uniform = len(kinds(shape)) == 1
    virtual_stages = np.where(apart, candidates["virtual_stages"], 1) if uniform else candidates["virtual_stages"]
    keys: Column = (candidates["pp"] * SPLITS + candidates["stage_split"]) * 2**20 + virtual_stages + IN_A_V * turning
    if some_again is not None:
        keys += SOME_AGAIN * some_again
    tiles = candidates["tiling"] > 1
    if tiles.any():
        keys += TILED * (tiles & _gives_back_slices(shape, candidates))
    return keys


def _some_again(job: Job, c: Candidates) -> Column | None:
    """A number above 0 for each set of layers that full recompute runs alone, and 0 for all layers or none, (C,); None where nobody asks."""
    if c.recompute_every or job.recompute_layers:
        return np.ones(len(c), np.int64)
    asked = [name for name in OF_LAYERS if name in c.columns]
    if not asked:
        return None
    alike = c["recompute_layers"] if "recompute_layers" in asked else np.zeros(len(c), np.int64)
    return np.asarray(np.where(c.depth > 0, alike.max(initial=0) + c.depth, alike))


def part_of(group: Group, rows: Column) -> Group:
    """Some of a group's candidates."""
    own = group.candidates.where(rows)
    return replace(group, rows=group.rows[rows], candidates=own, mesh_of=group.mesh_of[rows])


@dataclass(frozen=True, slots=True, eq=False)
class Sorts:
    """Candidates of a group that agree in some columns: one of each sort as a group, its place among all, and the place of each
    candidate's sort."""

    group: Group
    firsts: Column
    place: Column


ALIKE = 2
"""How many candidates of a sort make it worth while."""


def sorts_by(group: Group, columns: Iterable[Column | str]) -> Sorts | None:
    """The sorts of candidates that agree in some columns, or in those of some names; None where they would not help."""
    firsts, place = group.candidates.sorts(tuple(columns))
    if ALIKE * len(firsts) > len(place):
        return None
    return Sorts(part_of(group, firsts), firsts, place)


def sorts_by_meshes(group: Group, of_meshes: Sequence[Column], columns: Sequence[Column | str]) -> Sorts | None:
    """The same of candidates that also agree in columns of the group's meshes. What a mesh and its ZeRO stage say, these and names among the
    `columns`, is one number, which a few hundred rows are looked at for."""
    are_said = [isinstance(column, str) and column in OF_MESH for column in columns]
    number = group.meshes.sorts((*compress(columns, are_said), *of_meshes))[1].take(group.mesh_of)
    return sorts_by(group, (number, *compress(columns, map(not_, are_said))))


def holds_early_C(c: Candidates) -> Mask:
    """Where chunks take turns and ZeRO-3 holds units of some while others work, (C,)."""
    takes_turns = c.is_word("schedule", "interleaved") & (c["virtual_stages"] > 1)
    return takes_turns & (c["zero"] == 3)


IN_A_V, TILED, SOME_AGAIN = 2**17, 2**19, 2**40
"""Added to the key of layouts whose stages come back in turn, once or twice by the schedule, whose matrices are tiled, and of which some
layers alone run again, once for each set of them; more virtual stages, and more pipeline stages, than any layout has."""


def _gives_back_slices(shape: ModelShape, c: Candidates) -> Mask:
    """Where units are gathered and given back one by one, so that a slice can be one, (C,). Slices of routed experts are not counted."""
    return (c["zero"] == 3) & (c["pp"] == 1) & (shape.moe is None)


def pieces_C(group: Group) -> Column:
    """Pieces in which layers are gathered that are counted as one unit, (C,): routed experts, whose slices nothing here counts."""
    tiling = group.candidates["tiling"]
    return np.ones_like(tiling) if group.is_tiled else tiling


def ceil_div(value: Column | int, divisor: Column | int) -> Column:
    """Whole-number division rounded up."""
    return -(-np.asarray(value, np.int64) // divisor)


@dataclass(frozen=True, slots=True, eq=False)
class Matrices:
    """The matrices of one layer as columns, (M,) each; `dense_copies` are none of routed experts."""

    outputs: Column
    inputs: Column
    copies: Column
    dense_copies: Column
    used: Column
    positions: Column
    read: Column
    is_column: Mask
    is_row: Mask
    is_whole: Mask
    bias: Mask
    is_expert: Mask
    of_targets: Mask


@cache
def matrices_of(layer: Layer) -> Matrices:
    """The columns of a layer."""
    every = layer.matrices
    return Matrices(
        outputs=np.array([m.outputs for m in every], np.int64),
        inputs=np.array([m.inputs for m in every], np.int64),
        copies=np.array([m.copies for m in every], np.int64),
        dense_copies=np.array([0 if m.is_expert else m.copies for m in every], np.int64),
        used=np.array([m.used for m in every], np.int64),
        positions=np.array([m.positions for m in every], np.int64),
        read=np.array([m.read for m in every], np.int64),
        is_column=np.array([m.cut == "column" for m in every], np.bool_),
        is_row=np.array([m.cut == "row" for m in every], np.bool_),
        is_whole=np.array([m.cut == "whole" for m in every], np.bool_),
        bias=np.array([m.bias for m in every], np.bool_),
        is_expert=np.array([m.is_expert for m in every], np.bool_),
        of_targets=np.array([m.of_targets for m in every], np.bool_),
    )


def matrix_elements(layer: Layer, c: Candidates, shards: Column) -> Column:
    """Elements of one copy of each matrix on the fullest rank: cut by tp (experts by etp), then sharded over dim 0 with
    padding, (C, M).

    Source: torch.distributed.fsdp.fully_shard shards every parameter on dim 0 and pads to equal pieces.
    """
    rows, width = matrix_shape(layer, c)
    return ceil_div(rows, shards[:, None]) * width


def matrix_shape(layer: Layer, c: Candidates) -> tuple[Column, Column]:
    """Rows of one copy of each matrix on a rank, and elements of a row with that of the bias: cut by tp, (C, M) each."""
    m = matrices_of(layer)
    cut = np.where(m.is_expert, c["etp"][:, None], c["tp"][:, None])
    rows = ceil_div(m.outputs, np.where(m.is_column, cut, 1))
    width = ceil_div(m.inputs, np.where(m.is_row, cut, 1))
    return rows, width + m.bias


def copies_here(layer: Layer, c: Candidates) -> Column:
    """Copies of each matrix on the fullest rank: experts are spread over ep, (C, M)."""
    m = matrices_of(layer)
    return ceil_div(m.copies, np.where(m.is_expert, c["ep"][:, None], 1))


def dense_elements(layer: Layer, c: Candidates, shards: Column) -> Reals:
    """Elements of one layer on the fullest rank, routed experts left out, shape (C,)."""
    total = matrix_elements(layer, c, shards) @ matrices_of(layer).dense_copies
    return (total + vector_elements(layer, c, shards)).astype(np.float64)


def vector_elements(layer: Layer, c: Candidates, shards: Column) -> Column:
    """Elements of what a layer has beside its matrices on the fullest rank, shape (C,)."""
    total = np.zeros((), np.int64)
    for vector in layer.vectors:
        total = total + ceil_div(ceil_div(vector.size, c["tp"]) if vector.cut else vector.size, shards)
    return total


def expert_elements(layer: Layer, ep: Column, etp: Column, shards: Column) -> Reals:
    """Elements of the routed experts of one layer on the fullest rank, shape (C,). Their hidden width is cut, and sharded with
    padding, because fully_shard shards dim 0 and that is where the executor's experts have it."""
    total = np.zeros(len(ep), np.float64)
    for matrix in layer.matrices:
        if matrix.is_expert:
            is_column = matrix.cut == "column"
            width, other = (matrix.outputs, matrix.inputs) if is_column else (matrix.inputs, matrix.outputs)
            bias = (ceil_div(width, etp) if is_column else other) if matrix.bias else 0
            one = ceil_div(ceil_div(width, etp), shards) * other + ceil_div(bias, shards)
            total += ceil_div(matrix.copies, ep) * one
    return total


@cache
def layers(shape: ModelShape) -> tuple[Layer, ...]:
    """One built layer per sort, in the order of `kinds`."""
    return tuple(build_layer(shape, kind) for kind in kinds(shape))


@remembered
def state_shards(candidates: Candidates) -> Column:
    """Ranks that share one copy of the dense weights' state under ZeRO, shape (C,)."""
    return candidates["dp_shard"] * candidates["cp"]


def dense_CK(shape: ModelShape, candidates: Candidates, shards: Column) -> Reals:
    """Dense elements of one layer of each sort on the fullest rank, (C, K)."""
    return np.stack([dense_elements(layer, candidates, shards) for layer in layers(shape)], axis=1)


def expert_CK(shape: ModelShape, candidates: Candidates, shards: Column) -> Reals:
    """Routed-expert elements of one layer of each sort on the fullest rank, (C, K)."""
    if shape.moe is None:
        return np.zeros((len(candidates), len(kinds(shape))))
    columns = [expert_elements(layer, candidates["ep"], candidates["etp"], shards) for layer in layers(shape)]
    return np.stack(columns, axis=1)


def outer_elements(shape: ModelShape, tp: Column, shards: Column) -> tuple[Reals, Reals]:
    """Elements before the first and behind the last layer on the fullest rank, each (C,), an untied head assumed.

    The vocabulary is cut by `tp` (rows of the embedding, columns of the head); the rest is whole.
    """
    outer = outer_parameters(shape)
    table = vocabulary_elements(shape, tp, shards)
    before = table + ceil_div(outer.before - outer.embedding, shards)
    behind = table + ceil_div(max(0, behind_head(shape)), shards)
    return before.astype(np.float64), behind.astype(np.float64)


def vocabulary_elements(shape: ModelShape, tp: Column, shards: Column) -> Column:
    """Elements of one vocabulary matrix on the fullest rank, (C,)."""
    return ceil_div(ceil_div(shape.vocab, tp), shards) * table_width(shape)


def _ends(shape: ModelShape, candidates: Candidates, shards: Column) -> Reals:
    """Elements before and behind the layers, (2, C, 2): in a pipeline, and on one stage. A tied head is the embedding again: one stage
    alone holds it once, the last stage of a pipeline holds a copy. Tables on a parameter server are on none."""
    before, behind = outer_elements(shape, candidates["tp"], shards)
    if candidates.serves_tables:
        served = served_elements(shape)
        before, behind = before - served.before, behind - served.extra
    alone = behind - vocabulary_elements(shape, candidates["tp"], shards) if shape.tied else behind
    return np.stack([np.stack([before, last], axis=1) for last in (behind, alone)])


def _on_ends(group: Group, ends: Reals) -> tuple[Reals, Reals]:
    """Elements before and behind the layers, (C, 2), on each stage, (C, S) each."""
    return on_stages(ends[:, 0], group.is_first), on_stages(ends[:, 1], group.is_last)


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """Elements of layers of each sort, whole and of a rank of those that share state, of routed experts apart, (C, K) each; and of what
    lies before and behind the layers, (2, C, 2)."""

    layer: Reals
    part: Reals
    experts: Reals
    experts_part: Reals
    ends: Reals
    ends_part: Reals


@remembered
def _sizes(shape: ModelShape, c: Candidates) -> Sizes:
    """The sizes of some meshes, whatever stages they are spread over."""
    one, shards, sharers = np.ones_like(c["tp"]), state_shards(c), expert_shards(c)
    return Sizes(
        *(dense_CK(shape, c, shared) for shared in (one, shards)),
        *(expert_CK(shape, c, shared) for shared in (one, sharers)),
        *(_ends(shape, c, shared) for shared in (one, shards)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Elements:
    """Parameter elements of one rank on every stage, (C, S): `whole` are cut by tp, ep and pp only, `sharded` by ZeRO's
    group too; `layers`, `before` and `behind` (the layers) are the parts of `whole`, `experts` a part of `layers`;
    `widest` is the widest single layer, or slice where matrices are tiled, (C,). `padded_` ones are all ranks' `sharded` parts together: what is gathered and
    reduced where weights are sharded."""

    whole: Reals
    sharded: Reals
    layers: Reals
    experts: Reals
    before: Reals
    behind: Reals
    widest: Reals
    padded_layers: Reals
    padded_experts: Reals
    padded_before: Reals
    padded_behind: Reals
    padded_widest: Reals

    def padded(self, pads: Mask) -> Elements:
        """The same with padding where `pads` (C, 1) says so."""
        return self if self.is_even else PaddedElements(self, pads)

    @property
    def is_even(self) -> bool:
        """Whether no shard of any candidate is padded."""
        pairs = (
            (self.padded_layers, self.layers),
            (self.padded_before, self.before),
            (self.padded_behind, self.behind),
        )
        return all(padded is plain for padded, plain in pairs)

    def of(self, rows: Column) -> Elements:
        """Those of some candidates."""
        found: Elements = record_of(self, rows)
        return found


class ElementsWhenRead(Elements):
    """Elements that are worked out when they are read: a field without a value is `found`, once."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        value = self.found(name)
        object.__setattr__(self, name, value)
        return value

    def found(self, name: str) -> Reals:
        """The value of a field."""
        raise NotImplementedError(name)


class PaddedElements(ElementsWhenRead):
    """Elements with padding where `pads` (C, 1) says so."""

    __slots__ = ("_bare", "_pads")

    def __init__(self, bare: Elements, pads: Mask) -> None:
        object.__setattr__(self, "_bare", bare)
        object.__setattr__(self, "_pads", pads)

    def found(self, name: str) -> Reals:
        """See above."""
        if name == "whole":
            return self.layers + self.before + self.behind
        if name in ("layers", "experts", "before", "behind"):
            return np.where(self._pads, getattr(self._bare, f"padded_{name}"), getattr(self._bare, name))
        if name == "widest":
            return np.where(self._pads[:, 0], self._bare.padded_widest, self._bare.widest)
        same: Reals = getattr(self._bare, name)
        return same


class ElementsOfMeshes(ElementsWhenRead):
    """Elements of candidates, of each of whose meshes they are known."""

    __slots__ = ("_mesh_of", "_meshes")

    def __init__(self, meshes: Elements, mesh_of: Column) -> None:
        object.__setattr__(self, "_meshes", meshes)
        object.__setattr__(self, "_mesh_of", mesh_of)

    def found(self, name: str) -> Reals:
        """See above."""
        values, plain = getattr(self._meshes, name), name.removeprefix("padded_")
        alike = plain != name and values is getattr(self._meshes, plain)
        whole: Reals = getattr(self, plain) if alike else values.T.take(self._mesh_of, axis=-1).T
        return whole

    @property
    def is_even(self) -> bool:
        """See above."""
        return self._meshes.is_even

    def of(self, rows: Column) -> Elements:
        """See above."""
        return ElementsOfMeshes(self._meshes, self._mesh_of.take(rows))


def elements(shape: ModelShape, group: Group) -> Elements:
    """Count the parameters of every stage: once per mesh, then spread over the candidates."""
    c, at, sizes = group.meshes, group.mesh_at, _sizes(shape, group.every_mesh)
    one, shards, sharers = np.ones_like(c["tp"]), state_shards(c), expert_shards(c)
    layer = sizes.layer[at]
    part = _of_slices(shape, c, shards) if group.is_tiled else sizes.part[at]
    padded = part * shards[:, None]
    none: Reals = np.zeros((len(group.stages), len(c))).T
    experts, padded_experts = none, none
    if shape.moe is not None:
        expert, expert_part = sizes.experts[at], sizes.experts_part[at]
        padded_expert = expert_part * sharers[:, None]
        layer, part, padded = layer + expert, part + expert_part, padded + padded_expert
        experts, padded_experts = group.layers_of(expert), group.layers_of(padded_expert)
    present = np.asarray((group.layers_SK > 0).any(axis=0))[None, :]
    before, behind = _on_ends(group, sizes.ends[int(group.pp == 1)][at])
    ends = _on_ends(group, sizes.ends_part[int(group.pp == 1)][at])
    layers_CS = group.layers_of(layer)
    per_mesh = {
        "whole": layers_CS + before + behind,
        "sharded": group.layers_of(part) + total_of(ends),
        "layers": layers_CS,
        "experts": experts,
        "before": before,
        "behind": behind,
        "widest": np.where(present, layer, 0.0).max(axis=1),
        "padded_layers": group.layers_of(padded),
        "padded_experts": padded_experts,
        "padded_before": ends[0] * shards[:, None],
        "padded_behind": ends[1] * shards[:, None],
        "padded_widest": np.where(present, padded, 0.0).max(axis=1),
    }
    if group.is_tiled:
        per_mesh["widest"], per_mesh["padded_widest"] = (_widest_slice(shape, c, n) for n in (one, shards))
    for name in [name for name in per_mesh if name.startswith("padded_")]:
        plain = per_mesh[name.removeprefix("padded_")]
        if np.array_equal(per_mesh[name], plain):
            per_mesh[name] = plain
    return ElementsOfMeshes(Elements(**per_mesh), group.mesh_of)


def _of_slices(shape: ModelShape, c: Candidates, shards: Column) -> Reals:
    """Elements of a layer whose matrices are tiled, (C, K)."""
    from strategist.space.tiles import layer_CK  # most searches look at no tiles

    return layer_CK(shape, c, shards)


def _widest_slice(shape: ModelShape, c: Candidates, shards: Column) -> Reals:
    from strategist.space.tiles import widest_C

    return widest_C(shape, c, shards)


@remembered
def expert_shards(c: Candidates) -> Column:
    """Ranks that share the state of one expert shard under ZeRO: its replicas, HSDP's outer axis left out, (C,)."""
    return np.maximum(1, c.expert_dp // c["dp_replicate"])


@remembered
def sequence_cut(c: Candidates) -> Column:
    """Ranks that share the residual stream: tp under sequence parallelism, else one, (C,)."""
    return np.where(c["sequence_parallel"] > 0, c["tp"], 1)


@remembered
def routed_cut(c: Candidates) -> Column:
    """Ranks that share the tokens which are sent to experts: those of `sequence_cut` as far as they do not cut the experts too, (C,)."""
    return np.maximum(1, sequence_cut(c) // c["etp"])


@remembered
def crowding(job: Job, c: Candidates) -> Reals:
    """Tokens of the busiest of the ranks that share a layer's experts over the mean of them, (C,): as assumed, and no more than
    all tokens. One rank alone has the mean. No capacity drops any (Lepikhin et al. 2020, GShard, arXiv 2006.16668, section 2.2, sets one)."""
    return np.minimum(job.workload.expert_imbalance, c["ep"])


@remembered
def tokens(job: Job, c: Candidates) -> Reals:
    """Tokens of one micro-batch on one rank, (C,); behind an encoder those of the inputs."""
    return c["micro_batch"] * (job.workload.seq_len / c["cp"])


@remembered
def targets(job: Job, c: Candidates) -> Reals:
    """Tokens of one micro-batch on one rank that the head gives something for, (C,): a decoder's behind an encoder."""
    return tokens(job, c) * target_share(job)


def target_share(job: Job) -> float:
    """Tokens of the decoder over those of the encoder, 1 for models of one stack."""
    return job.workload.target_share if job.model.enc_layers else 1.0


def tokens_of(job: Job, kind: LayerKind, c: Candidates) -> Reals:
    """Tokens of one micro-batch on one rank that a layer of this kind works on, (C,)."""
    return targets(job, c) if kind.cross else tokens(job, c)


def length_of(job: Job, kind: LayerKind) -> int:
    """Tokens of a sequence that a layer of this kind works on."""
    return job.workload.targets if kind.cross else job.workload.seq_len


@cache
def decodes_K(shape: ModelShape) -> Mask:
    """Which sorts of layers are those of a decoder behind an encoder, (K,)."""
    return np.array([kind.cross for kind in kinds(shape)], np.bool_)


def of_layers(job: Job, each_C: Reals) -> Reals:
    """An amount that goes with tokens, as every sort of layer has it, (C,) to (C, K), or to (C, 1) where all have as many."""
    share = target_share(job)
    if share == 1.0:
        return each_C[:, None]
    return each_C[:, None] * np.where(decodes_K(job.model), share, 1.0)


@remembered
def is_plain_data_parallel(job: Job, c: Candidates) -> Mask:
    """Candidates that torch's DistributedDataParallel (or no wrapper at all) runs: zero < 2, no tp, no pp, and where a framework has
    units no ep, shape (C,). Matrices that cast to fp8 on their own leave no other casts to autocast: they lie in units."""
    if job.casts_apart:
        return np.zeros(len(c), np.bool_)
    plain: Mask = (c["zero"] < 2) & (c["tp"] == 1) & (c["pp"] == 1)
    return plain & (c["ep"] == 1) if job.profile.has_units else plain


@remembered
def is_managed(job: Job, c: Candidates) -> Mask:
    """Candidates whose weights lie in units of fully_shard or replicate, shape (C,): all but plain data parallelism and
    those with one data rank that compute in the format the weights are stored in (nothing to share, nothing to cast).
    Frameworks without units have them from ZeRO-2 on."""
    alone = (c.data_parallel * c["cp"] == 1) & (job.formats.compute == job.formats.parameter)
    return ~is_plain_data_parallel(job, c) & ~alone & ((c["zero"] >= 2) | job.profile.has_units)


def near_turn(job: Job, c: Candidates, whole: Reals) -> Reals:
    """How many of the `whole` weights of each stage ZeRO-3 has not let go of when forward turns into backward, (C, S): the last ones that
    forward read, where the profile has a distance within which a weight is kept. To get back to a weight, work passes those behind it
    twice, and thrice where forward runs again (deepspeedai/DeepSpeed: deepspeed/runtime/zero/partitioned_param_coordinator.py,
    __params_to_release, walks through modules in the order in which they run). Pipelines do not go with that."""
    passes = np.where(c.is_word("recompute", "full"), 3.0, 2.0)
    reach = np.where((c["zero"] == 3) & (c["pp"] == 1), job.profile.reuse_distance / passes, 0.0)
    return np.minimum(reach[:, None], whole)
