"""Every candidate, each once. Choices that mean nothing (a schedule without stages, sequence parallelism without tp)
collapse to their plain value, so no layout is looked at twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product

import numpy as np

from strategist.facts.runs import V_SHAPED
from strategist.records import dataclass
from strategist.space.candidates import (
    ASKED,
    LAYERS_OF,
    OF_LAYERS,
    OF_MESH,
    OF_REPLICAS,
    OF_STAGE,
    OPTION_COLUMNS,
    Candidates,
    Column,
    Mask,
    code,
    joined,
)
from strategist.space.grammar import DEPTHS, Pin, forbidden
from strategist.space.stages import layers_of_the_last

MAX_MICRO_BATCH = 128
MAX_VIRTUAL_STAGES = 8
MIN_TOKENS_PER_CP_RANK = 1024
TILES = 8
OF_OPTIONS = OPTION_COLUMNS[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds the space: ranks, the fastest domain (tp stays inside unless pinned), sizes of the model and batch.

    `tiled` adds memory-centric tiling, which is worth looking at only when the widest layer does not fit a device. `head`
    is as how many layers the output head counts when stages are weighted, and layers that are all `alike` may be balanced. `also` are techniques to look at that are left out else.
    `target_len` are tokens of a decoder's sequence behind an encoder, 0 in models of one stack.
    """

    world: int
    fast_domain: int
    layers: int
    seq_len: int
    global_batch: int
    experts: int = 0
    splittable: bool = True
    head: float = 0.0
    alike: bool = False
    tiled: bool = False
    pins: tuple[Pin, ...] = ()
    forbids: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    target_len: int = 0

    def pinned(self, key: str) -> int | None:
        """The value a choice is fixed to."""
        return next((pin.value for pin in self.pins if pin.key == key), None)

    @property
    def depths(self) -> tuple[int, ...]:
        """How many layers of its chunks every stage is asked to run again, stage by stage; nothing where nobody says it."""
        return self._by_number(OF_STAGE)

    @property
    def split(self) -> tuple[int, ...]:
        """How many layers every stage is asked to own, stage by stage; nothing where nobody says it."""
        return self._by_number(LAYERS_OF)

    @property
    def balances(self) -> bool:
        """Whether stages are looked at that are balanced: beside numbers of layers to run again that are left to the rule, or both numbers
        as somebody says them."""
        if self.split or self.depths:
            is_said = bool(self.split and self.pinned("recompute_depth")) and sum(self.split) == self.layers
            return is_said and len(self.split) == len(self.depths)
        is_pinned = self.pinned("stage_split") == code("stage_split", "balanced") and self.pinned("recompute_depth")
        return self.alike and ("balanced_stages" in self.also or bool(is_pinned))

    def _by_number(self, prefix: str) -> tuple[int, ...]:
        """What is said stage by stage, 0 of a stage that is left out."""
        said = {pin.key: pin.value for pin in self.pins if pin.key.startswith(prefix)}
        last = max((int(key.removeprefix(prefix)) for key in said), default=-1)
        return tuple(said.get(f"{prefix}{stage}", 0) for stage in range(last + 1))

    def divides(self, parts: int) -> bool:
        """Whether every sequence divides into so many parts."""
        return self.seq_len % parts == 0 and self.target_len % parts == 0

    def wants(self, schedule: str) -> bool:
        """Whether somebody asks for a schedule, alone or beside others."""
        return schedule in self.also or self.pinned("schedule") == code("schedule", schedule)

    @property
    def splits_cp(self) -> bool:
        """Whether somebody asks for hierarchical context parallelism, alone or beside the other kinds."""
        is_pinned = self.pinned("context_parallel") == code("context_parallel", "hierarchical")
        return "hierarchical" in self.also or is_pinned or self.pinned("cp_inner") is not None


def divisors(number: int) -> tuple[int, ...]:
    """All divisors in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def enumerate_candidates(limits: Limits) -> Candidates:
    """The whole space under the pins and without the forbidden techniques, in a fixed order."""
    return _filled(limits, list(_mesh_groups(limits)), 0)


def in_blocks(limits: Limits, at_once: int, most: int) -> Iterator[Candidates]:
    """The same space: in one block where it holds at most `at_once` layouts before pins and forbidden techniques, else in one of about so
    many and others of at most `most`, or of one group of meshes."""
    own: list[Part] = []
    rows = meshes = 0
    for part in _mesh_groups(limits):
        size = len(part[0]) * part[1].shape[1]
        if own and rows + size > at_once:
            yield _filled(limits, own, meshes)
            meshes += sum(len(members) for members, _ in own)
            own, rows, at_once = [], 0, most
        own.append(part)
        rows += size
    yield _filled(limits, own, meshes)


def _filled(limits: Limits, parts: Sequence[Part], meshes_so_far: int) -> Candidates:
    """All layouts of some groups of meshes, which are numbered from `meshes_so_far` on."""
    names = (*OF_MESH, *(("cp_inner",) if limits.splits_cp else ()), *OF_OPTIONS, "mesh")
    columns = np.empty((len(names), sum(len(members) * options.shape[1] for members, options in parts)), np.int64)
    rows_so_far = 0
    for members, options in parts:
        rows = len(members) * options.shape[1]
        _fill(columns[:, rows_so_far : rows_so_far + rows], members, options, meshes_so_far)
        meshes_so_far, rows_so_far = meshes_so_far + len(members), rows_so_far + rows
    everything = Candidates(dict(zip(names, columns, strict=True)))
    for word in limits.also:
        if word in DEPTHS and not limits.pinned(DEPTHS[word]):
            everything = _with_depths(everything, word, limits)
    for name in ASKED:
        value = limits.pinned(name)
        if value:
            everything = as_asked(everything, name, value, limits.depths)
    if limits.balances:
        everything = _balanced(everything, limits)
    keep = np.ones(len(everything), dtype=np.bool_)
    for pin in limits.pins:
        keep &= pin.holds(everything)
    for word in limits.forbids:
        keep &= ~forbidden(word, everything)
    return everything if keep.all() else everything.where(keep)


def _with_depths(everything: Candidates, word: str, limits: Limits) -> Candidates:
    """The layouts, and behind them those of full recompute once more, with fewer layers: with every number of them below an equal share
    of a chunk's, or in pipelines, those of balanced stages or the others, with as many on every stage as the rule finds."""
    chunks = everything["pp"] * everything["virtual_stages"]
    full = np.flatnonzero(_runs_all_again(everything))
    if word == "recompute_layers":
        fewer = np.maximum(0, -(-limits.layers // chunks[full]) - 1)
        rows, name = full.repeat(fewer), word
        values = 1 + np.arange(len(rows)) - (fewer.cumsum() - fewer).repeat(fewer)
    else:
        is_balanced = everything.is_word("stage_split", "balanced")[full]
        rows = full[(everything["pp"][full] > 1) & (is_balanced == (word == "balanced_stages"))]
        name = "recompute_depth"
        values = np.ones_like(rows)
    own = [everything, everything.where(rows)]
    numbers = everything.columns.get(name, np.zeros(len(everything), np.int64)), values
    return joined([Candidates({**c.columns, name: column}) for c, column in zip(own, numbers, strict=True)])


def _balanced(everything: Candidates, limits: Limits) -> Candidates:
    """The layouts without balanced stages that run as many layers again as all others, and with the layers that somebody says of them."""
    own = everything.is_word("stage_split", "balanced")
    found = everything.where(~own | (everything["recompute_depth"] > 0))
    own = found.is_word("stage_split", "balanced")
    said = {f"{LAYERS_OF}{stage}": np.where(own, layers, 0) for stage, layers in enumerate(limits.split)}
    return Candidates({**found.columns, **said})


def _runs_all_again(everything: Candidates) -> Mask:
    """Layouts of full recompute of all layers, (C,)."""
    some = [everything[name] > 0 for name in OF_LAYERS if name in everything.columns]
    return np.asarray(
        everything.is_word("recompute", "full") & ~np.any([np.zeros(len(everything), np.bool_), *some], axis=0)
    )


def as_asked(everything: Candidates, name: str, value: int, depths: tuple[int, ...] = ()) -> Candidates:
    """Layouts that can make a choice that is never looked at unasked: a loss in chunks those that leave the head whole on every rank,
    threads and compression those of whole replicas and nothing else, recompute of some layers those of full recompute, and where these
    differ by stage pipelines, of as many stages as numbers where somebody says them."""
    alone = np.ones(len(everything), np.bool_)
    for axis in ASKED[name]:
        alone &= everything[axis] == 1
    if name in OF_LAYERS:
        alone &= everything.is_word("recompute", "full")
    if name in OF_REPLICAS:
        alone &= everything["dp_replicate"] > 1
    said = {name: value}
    if name == "recompute_depth":
        alone &= everything["pp"] == len(depths) if depths else everything["pp"] > 1
        said |= {f"{OF_STAGE}{stage}": number for stage, number in enumerate(depths)}
    found = everything.where(alone)
    return Candidates({**found.columns, **{key: np.full(len(found), held, np.int64) for key, held in said.items()}})


Mesh = tuple[int, ...]
"""pp, dp_replicate, dp_shard, cp, tp, ep, etp, zero, and cp_inner where it is looked at."""
Way = tuple[int, int, int]
"""Schedule, virtual stages and split of stages."""
Part = tuple[list[Mesh], Column]
"""Meshes with the options that all of them have, a column for each choice."""


def _mesh_groups(limits: Limits) -> Iterator[Part]:
    """Meshes that share their option list: same dp, and the same axes above one."""
    groups: dict[tuple[object, ...], list[Mesh]] = {}
    for mesh in _split_meshes(limits) if limits.splits_cp else meshes(limits):
        pp, replicate, shard, cp, tp, ep = mesh[:6]
        home, alone = _home(mesh), replicate * cp * ep == 1
        key = pp, replicate * shard, cp > 1, tp > 1, home, home and alone, max(mesh[8:], default=1) > 1
        groups.setdefault(key, []).append(mesh)
    schedules = cache(
        partial(_schedules, limits)
    )  # of a few numbers of stages and of micro-batches, which most groups have
    for members in groups.values():
        yield members, _options(limits, members[0], schedules)


def meshes(limits: Limits) -> Iterator[Mesh]:
    """Every way to factor the world into axes, with the ZeRO stages that make sense on it."""
    for pp, tp, cp in product(_pp_sizes(limits), _tp_sizes(limits), _cp_sizes(limits)):
        if limits.world % (pp * tp * cp):
            continue
        dp = limits.world // (pp * tp * cp)
        for replicate, shard, zero in _data_splits(dp, cp, is_alone=pp * tp == 1):
            for ep, etp in _expert_splits(limits, dp * cp * tp, tp):
                yield pp, replicate, shard, cp, tp, ep, etp, zero


def _split_meshes(limits: Limits) -> Iterator[Mesh]:
    """Meshes with the innermost ranks of cp that exchange heads: one alone stands for a ring and an all-to-all over all of cp."""
    for mesh in meshes(limits):
        cp = mesh[OF_MESH.index("cp")]
        yield from ((*mesh, inner) for inner in divisors(cp) if inner < cp or cp == 1)


def _pp_sizes(limits: Limits) -> Sequence[int]:
    most = limits.layers if limits.splittable else 1
    return _sizes(limits, "pp", most)


def _tp_sizes(limits: Limits) -> Sequence[int]:
    return _sizes(limits, "tp", limits.fast_domain)


def _cp_sizes(limits: Limits) -> Sequence[int]:
    return _sizes(limits, "cp", max(1, limits.seq_len // MIN_TOKENS_PER_CP_RANK))


def _sizes(limits: Limits, axis: str, most: int) -> Sequence[int]:
    """Divisors of the world up to a bound; a pinned size stands alone, whatever the bound."""
    pinned = limits.pinned(axis)
    if pinned is not None:
        return (pinned,)
    return (1,) if axis in limits.forbids else tuple(d for d in divisors(limits.world) if d <= most)


def _data_splits(dp: int, cp: int, is_alone: bool) -> Iterator[tuple[int, int, int]]:
    """(dp_replicate, dp_shard, zero): plain replicas, one sharding group, or groups of every size (HSDP).

    Without data ranks ZeRO means nothing, except that a lone device offloads under stage 2 or 3.
    """
    if dp * cp == 1:
        yield from ((1, 1, zero) for zero in ((0, 2, 3) if is_alone else (0,)))
        return
    yield dp, 1, 0
    yield 1, dp, 1
    for zero in (2, 3):
        yield from ((dp // shard, shard, zero) for shard in divisors(dp) if shard * cp > 1)


def _expert_splits(limits: Limits, ranks: int, tp: int) -> Iterator[tuple[int, int]]:
    if limits.experts == 0:
        pinned = limits.pinned("ep")
        yield pinned or 1, 1
        return
    for etp in sorted({1, tp}):
        for ep in divisors(limits.experts):
            if ranks % (ep * etp) == 0 and ("ep" not in limits.forbids or ep == 1):
                yield ep, etp


def _options(limits: Limits, mesh: Mesh, schedules: Callable[[int, int], Sequence[Way]]) -> Column:
    """Columns in the order of OPTION_COLUMNS without `zero`, for meshes of one group: how the batch goes through the stages, and beside each
    of these everything that does not ask how."""
    pp, replicate, shard, cp, tp = mesh[:5]
    whole = ("ring", "all-to-all") if cp > 1 else ("none",)
    kinds = [code("context_parallel", kind) for kind in (("hierarchical",) if max(mesh[8:], default=1) > 1 else whole)]
    ways = [
        (virtual, schedule, micro, accumulation, split)
        for micro, accumulation in _batches(limits, replicate * shard)
        for schedule, virtual, split in schedules(pp, accumulation)
    ]
    others = [
        (sequence, kind, recompute, offload, tiles)
        for sequence in sequence_cuts(limits, cp, tp)
        for recompute, (offload, tiles), kind in product(range(3), _offloads(limits, mesh), kinds)
    ]
    way, other = (np.array(rows, np.int64).reshape(len(rows), 5).T for rows in (ways, others))
    found = np.empty((len(OF_OPTIONS), len(ways), len(others)), np.int64)
    found[:4], found[4:9], found[9] = way[:4, :, None], other[:, None, :], way[4, :, None]
    return found.reshape(len(OF_OPTIONS), -1)


def _batches(limits: Limits, dp: int) -> Iterator[tuple[int, int]]:
    """(micro_batch, accumulation) with micro_batch x accumulation x dp = global_batch; one row when it does not divide,
    so that the refusal can be counted."""
    if limits.global_batch % dp:
        yield 1, max(1, limits.global_batch // dp)
        return
    per_rank = limits.global_batch // dp
    pinned = limits.pinned("micro_batch")
    for micro in divisors(per_rank):
        if micro <= MAX_MICRO_BATCH or micro == pinned:
            yield micro, per_rank // micro


def sequence_cuts(limits: Limits, cp: int, tp: int) -> Sequence[int]:
    """Sequence parallelism or not. It moves the same bytes, holds less and computes less, so going without is looked at
    only where the sequence does not divide, or when pinned."""
    if tp == 1:
        return (0,)
    pinned = limits.pinned("sequence_parallel")
    if pinned is not None:
        return (pinned,)
    divides = limits.divides(cp * tp) and "sequence_parallel" not in limits.forbids
    return (1,) if divides else (0,)


def _schedules(limits: Limits, pp: int, accumulation: int) -> Sequence[Way]:
    """See `_ways`."""
    return tuple(_ways(limits, pp, accumulation))


def _ways(limits: Limits, pp: int, accumulation: int) -> Iterator[Way]:
    """(schedule, virtual stages, split). GPipe idles as long as 1F1B and holds at least as much, so it is looked at only
    where 1F1B has too few micro-batches, or when asked for; looped BFS idles as long as
    interleaving and is looked at only where the micro-batches fill the stages but are no multiple of them, or when asked for; ZB-H1,
    ZBV and DualPipeV only when asked for (docs/decisions/0098-zero-bubble.md, 0116-zbv.md, 0123-dualpipev.md); a weighted split
    only where it differs from an even one, or when pinned; balanced stages beside those that run different layers again."""
    if pp == 1:
        yield code("schedule", "none"), 1, 0
        return
    gpipe, one_f_one_b = code("schedule", "gpipe"), code("schedule", "1f1b")
    splits = [code("stage_split", "even")]
    if is_weightable(limits, pp) or limits.pinned("stage_split") == code("stage_split", "weighted"):
        splits.append(code("stage_split", "weighted"))
    unequal = [*splits, code("stage_split", "balanced")] if limits.balances else splits
    if accumulation < pp or limits.wants("gpipe"):
        yield from ((gpipe, 1, split) for split in unequal)
    if accumulation >= pp or limits.wants("1f1b"):
        yield from ((one_f_one_b, 1, split) for split in unequal)
    if limits.wants("zb_h1"):
        yield from ((code("schedule", "zb_h1"), 1, split) for split in splits)
    if limits.layers % (2 * pp) == 0 or limits.pinned("virtual_stages") == 2:
        yield from ((code("schedule", schedule), 2, 0) for schedule in V_SHAPED if limits.wants(schedule))
    looped = [code("schedule", "interleaved")]
    if (accumulation > pp and accumulation % pp) or limits.wants("looped_bfs"):
        looped.append(code("schedule", "looped_bfs"))
    for virtual in range(2, MAX_VIRTUAL_STAGES + 1):
        if limits.layers % (pp * virtual) == 0 or limits.pinned("virtual_stages") == virtual:
            yield from ((schedule, virtual, 0) for schedule in looped)


def is_weightable(limits: Limits, pp: int) -> bool:
    """Whether the head takes layers from the last stage."""
    return layers_of_the_last(limits.layers, pp, limits.head) < limits.layers // pp


def _home(mesh: Mesh) -> int:
    """The ZeRO stage under which something can leave the device, 0 where nothing does: where a layer is cut, and where ranks that hold
    different experts have replicas, whose reserved memory is not understood (docs/decisions/0163-offload-beside-other-axes.md)."""
    pp, replicate, _, _, tp, ep, _, zero = mesh[:8]
    return zero if zero >= 2 and pp == tp == 1 and (replicate == 1 or ep == 1) else 0


def _offloads(limits: Limits, mesh: Mesh) -> Sequence[tuple[int, int]]:
    """(offload, tiling): optimizer state leaves under ZeRO-2 and weights under ZeRO-3; slices are for weights that nothing
    but ZeRO cuts."""
    _, replicate, shard, cp, _, ep = mesh[:6]
    home = _home(mesh)
    if not home:
        return ((0, 1),)
    plain = ((0, 1),) if replicate * shard * cp > 1 else ()
    if home == 2:
        return (*plain, (code("offload", "optimizer"), 1))
    homes = (*plain, (code("offload", "parameters"), 1), (code("offload", "nvme"), 1))
    pinned = limits.pinned("tiling")
    if replicate * cp * ep > 1 or (not pinned and not limits.tiled and "tiling" not in limits.also):
        return homes
    return tuple((home, tiles) for home, _ in homes for tiles in ((pinned,) if pinned else (1, TILES)))


def _fill(columns: Column, members: list[Mesh], options: Column, first_mesh: int) -> None:
    """Write the product of some meshes and their options, in the order of OF_MESH and OF_OPTIONS; meshes are numbered from `first_mesh` on."""
    size, choices = len(members[0]), options.shape[1]
    mesh = np.array(members, dtype=np.int64).T
    by_mesh = columns.reshape(len(columns), len(members), choices)
    by_mesh[:size] = mesh[:, :, None]
    by_mesh[size:-1] = options[:, None, :]
    by_mesh[-1] = np.arange(first_mesh, first_mesh + len(members))[:, None]
