"""Every legal layout, by brute force: all combinations of the option values, thrown away unless they mean something.

What a combination must satisfy to mean something is written as one condition per choice (`_MEANINGFUL`), whatever the
order in which somebody else enumerates. `collapsed` then leaves out what a search need not look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise, product
from typing import Any

from strategist.facts.job import Job
from strategist.facts.layers import build_layer
from strategist.facts.model import LayerKind, layer_counts
from strategist.facts.profile import BYTES
from tests.oracle.legality import is_splittable, stack, violation
from tests.oracle.memory import devices_of, kept_bytes, overhead, stage_moments, usable_bytes
from tests.oracle.stages import IN_A_V, Layout, depths, stage_kinds
from tests.oracle.time import stage_time

MAX_MICRO_BATCH = 128
MAX_VIRTUAL_STAGES = 8
MIN_TOKENS_PER_CP_RANK = 1024
TILES = 8

MESH = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")
NAMES = (
    *MESH, "zero", "virtual_stages", "schedule", "micro_batch",
    "accumulation", "sequence_parallel", "context_parallel", "recompute", "offload", "tiling", "stage_split",
)  # fmt: skip


def as_key(layout: Layout) -> tuple[Any, ...]:
    """A layout as a hashable row."""
    return (
        *(layout[name] for name in NAMES), layout.get("cp_inner", 1), layout.get("recompute_layers", 0), *depths(layout),
        *(layout[f"stage_layers_{stage}"] for stage in range(layout["pp"]) if layout["stage_split"] == "balanced")
    )  # fmt: skip


def divisors(number: int) -> list[int]:
    """All divisors in ascending order."""
    return [d for d in range(1, number + 1) if number % d == 0]


def largest_layer_bytes(job: Job) -> float:
    """The widest layer, or the vocabulary, with its gradient and activations at micro-batch 1, plus the context."""
    shape, c, seq_len = job.model, BYTES[job.formats.compute], job.workload.seq_len
    alone = {"tp": 1, "etp": 1, "sequence_parallel": 0, "cp": 1, "micro_batch": 1, "recompute": "none"}
    alone |= {"context_parallel": "none", "zero": 0, "pp": 1, "ep": 1}
    blocks = [
        2 * c * build_layer(shape, kind).parameters + kept_bytes(job, alone, kind) for kind in layer_counts(shape)
    ]
    seen = (job.workload.target_len or seq_len) if shape.enc_layers else seq_len
    head = 2 * c * shape.vocab * shape.hidden + c * shape.vocab * seen
    device = "cpu" if job.cluster.smallest.vendor == "CPU" else "gpu"
    return max([head, *blocks]) + overhead(f"{device}_context_bytes")


def _fast_domain(job: Job) -> int:
    """Ranks that tp may span: those of the fast links, or all of one CPU machine."""
    world = job.cluster.world
    return world if job.cluster.smallest.vendor == "CPU" else min(job.cluster.groups[0].node.fast_domain, world)


def _meshes(job: Job) -> Iterator[dict[str, Any]]:
    """Every factorisation of the world into the dense axes, and every way to spread experts over the ranks of a stage."""
    world, moe = job.cluster.world, job.model.moe
    cp_most = max(1, job.workload.seq_len // MIN_TOKENS_PER_CP_RANK)
    ways = divisors(world)
    for pp, replicate, shard, cp, tp in product(ways, ways, ways, ways, ways):
        is_bounded = tp <= _fast_domain(job) and cp <= cp_most and (pp == 1 or is_splittable(job.model))
        if pp * replicate * shard * cp * tp != world or not is_bounded or pp > stack(job.model):
            continue
        for ep, etp in product(divisors(moe.experts) if moe else (1,), {1, tp} if moe else (1,)):
            if (world // pp) % (ep * etp) == 0:
                yield dict(zip(MESH, (pp, replicate, shard, cp, tp, ep, etp), strict=True))


def _zero_means_something(a: Layout) -> bool:
    """Plain replicas; one group that shares the optimizer state; groups of every size; a lone device that offloads."""
    sharing = a["dp_shard"] * a["cp"]
    ranks = a["dp_replicate"] * sharing
    is_lone = ranks * a["pp"] * a["tp"] == 1
    if a["zero"] == 0:
        return bool(a["dp_shard"] == 1)
    if a["zero"] == 1:
        return bool(a["dp_replicate"] == 1 and sharing > 1)
    return bool(sharing > 1 or (is_lone and a["offload"] != "none"))


def _schedule_means_something(a: Layout) -> bool:
    if a["pp"] == 1:
        return bool(a["schedule"] == "none" and a["virtual_stages"] == 1)
    if a["schedule"] in IN_A_V:
        return bool(a["virtual_stages"] == 2)
    return a["schedule"] != "none" and (a["schedule"] in ("interleaved", "looped_bfs")) == (a["virtual_stages"] > 1)


def _offload_means_something(a: Layout) -> bool:
    """Offloading belongs to whole layers, and not to experts apart with replicas: state leaves under stage 2, weights under stage 3,
    which where nothing else cuts anything gathers slices too."""
    is_whole = a["pp"] == a["tp"] == 1 and (a["dp_replicate"] == 1 or a["ep"] == 1)
    alone = is_whole and all(a[axis] == 1 for axis in ("cp", "ep", "dp_replicate"))
    if a["tiling"] > 1 and not (alone and a["zero"] == 3):
        return False
    home = {2: ("optimizer",), 3: ("parameters", "nvme")}.get(a["zero"], ())
    return a["offload"] == "none" or (is_whole and a["offload"] in home)


def _context_means_something(a: Layout) -> bool:
    """Spread sequences have a kind; groups inside cp that are neither one rank nor all of it are hierarchical, and nothing else is."""
    is_split = a["cp"] % a["cp_inner"] == 0 and a["cp_inner"] not in (1, a["cp"])
    if a["context_parallel"] == "hierarchical":
        return is_split
    return bool(a["cp_inner"] == 1 and (a["cp"] > 1) == (a["context_parallel"] != "none"))


_OPTIONS: Sequence[tuple[tuple[str, ...], Callable[[Layout], bool]]] = (
    (("zero", "offload", "tiling"), lambda a: _offload_means_something(a) and _zero_means_something(a)),
    (("sequence_parallel",), lambda a: a["tp"] > 1 or not a["sequence_parallel"]),
    (("context_parallel", "cp_inner"), lambda a: _context_means_something(a)),
    (("micro_batch",), lambda a: True),
    (("schedule", "virtual_stages"), _schedule_means_something),
    (("stage_split",), lambda a: a["stage_split"] == "even" or (a["schedule"] != "none" and a["virtual_stages"] == 1)),
    (("recompute",), lambda a: True),
)
"""Choices that are made together, and what they must satisfy given those before them."""

_VALUES: dict[str, Sequence[Any]] = {
    "zero": (0, 1, 2, 3),
    "offload": ("none", "optimizer", "parameters", "nvme"),
    "tiling": (1, TILES),
    "sequence_parallel": (0, 1),
    "context_parallel": ("none", "ring", "all-to-all", "hierarchical"),
    "schedule": ("none", "gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", *IN_A_V),
    "virtual_stages": range(1, MAX_VIRTUAL_STAGES + 1),
    "stage_split": ("even", "weighted"),
    "recompute": ("none", "selective", "full"),
}


def _extended(job: Job, a: dict[str, Any], level: int, also: Sequence[str]) -> Iterator[dict[str, Any]]:
    """All meaningful completions of a partial layout."""
    if level == len(_OPTIONS):
        yield a
        return
    names, means_something = _OPTIONS[level]
    if names == ("micro_batch",):
        dp = a["dp_replicate"] * a["dp_shard"]
        per_rank = job.workload.global_batch // dp
        sizes = divisors(per_rank) if job.workload.global_batch % dp == 0 else []
        choices = [(micro, per_rank // micro) for micro in sizes if micro <= MAX_MICRO_BATCH]
        names = ("micro_batch", "accumulation")
    else:
        inner = divisors(a["cp"]) if "hierarchical" in also else (1,)
        choices = list(product(*((_VALUES | {"cp_inner": inner})[name] for name in names)))
    for values in choices:
        further = a | dict(zip(names, values, strict=True))
        if means_something(further):
            yield from _extended(job, further, level + 1, also)


def legal_layouts(job: Job, also: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Every meaningful layout that no rule refuses, hierarchical ones where they are among `also`."""
    for mesh in _meshes(job):
        for layout in _extended(job, mesh, 0, also):
            if violation(job, layout) is None:
                yield layout


def is_collapsed(job: Job, layout: Layout, *, tiled: bool, also: Sequence[str] = ()) -> bool:
    """True for layouts that a search leaves out: GPipe where 1F1B can run, looped BFS where chunks can be interleaved, ZB-H1, ZBV and
    DualPipeV, all of these unless they are among `also`; tp without sequence parallelism where the
    sequence divides, tiling where the widest layer fits anyway, weighted stages that are those of an even split."""
    gpipe = layout["schedule"] == "gpipe" and layout["accumulation"] >= layout["pp"]
    looped = layout["schedule"] == "looped_bfs" and layout["accumulation"] % layout["pp"] == 0
    unasked = gpipe or looped or layout["schedule"] in ("zb_h1", *IN_A_V)
    lengths = (job.workload.seq_len, (job.workload.target_len or 0) if job.model.enc_layers else 0)
    divides = all(length % (layout["cp"] * layout["tp"]) == 0 for length in lengths)
    whole = layout["tp"] > 1 and not layout["sequence_parallel"] and divides
    weighted = layout["stage_split"] == "weighted"
    same = weighted and stage_kinds(job, layout) == stage_kinds(job, layout | {"stage_split": "even"})
    return (unasked and layout["schedule"] not in also) or whole or same or (layout["tiling"] > 1 and not tiled)


def plain_layouts(job: Job, also: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """One after the other, every legal layout that is not collapsed, those with numbers of layers left out."""
    tiled = "tiling" in also or largest_layer_bytes(job) > usable_bytes(job)
    return (layout for layout in legal_layouts(job, also) if not is_collapsed(job, layout, tiled=tiled, also=also))


def enumerate_layouts(job: Job, also: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What a search must look at: every legal layout that is not collapsed, with techniques that somebody asks for."""
    return with_numbers(job, list(plain_layouts(job, also)), also)


def with_numbers(job: Job, plain: list[dict[str, Any]], also: Sequence[str]) -> list[dict[str, Any]]:
    """Some layouts, and those of them that run all layers again with numbers of layers, where somebody asks for these."""
    full = [layout for layout in plain if layout["recompute"] == "full"]
    numbers = {
        "recompute_layers": _of_some_layers,
        "recompute_by_stage": _of_stages,
        "balanced_stages": _of_balanced_stages,
    }
    return plain + [some for word in also if word in numbers for layout in full for some in numbers[word](job, layout)]


def _of_some_layers(job: Job, layout: Layout) -> Iterator[dict[str, Any]]:
    """The layout with each number of layers of every chunk that is less than an equal share."""
    for number in range(1, stack(job.model)):
        some = dict(layout) | {"recompute_layers": number}
        if number * layout["pp"] * layout["virtual_stages"] < stack(job.model) and violation(job, some) is None:
            yield some


def _of_stages(job: Job, layout: Layout) -> Iterator[dict[str, Any]]:
    """The layout with the fewest layers of each stage with which it fits; all layers of all where one fits with none."""
    some = dict(layout) | {"recompute_depth": "by-stage"}
    if layout["pp"] == 1 or violation(job, some) is not None:
        return
    own = [len(kinds) // layout["virtual_stages"] for kinds in stage_kinds(job, layout)]
    numbers = range(max(own) + 1)
    takes = [devices_of(job, some | {f"recompute_stage_{stage}": n for stage in range(len(own))}) for n in numbers]
    fit = [[n for n in numbers if takes[n][stage] <= usable_bytes(job)] for stage in range(len(own))]
    yield some | {f"recompute_stage_{s}": fit[s][0] if all(fit) else own[s] for s in range(len(own))}


def _of_balanced_stages(job: Job, layout: Layout) -> Iterator[dict[str, Any]]:
    """The layout with that split of its layers, of all there are, under which the micro-batches are through first, every stage with the
    fewest layers again with which it fits; with equal stages that run all of them again where no split fits."""
    pp, m, (kind, *others) = layout["pp"], layout["accumulation"], layer_counts(job.model)
    some = dict(layout) | {"recompute_depth": "by-stage", "stage_split": "balanced"}
    is_one_chunk = layout["schedule"] in ("gpipe", "1f1b") and layout["stage_split"] == "even"
    if pp == 1 or others or not is_one_chunk or violation(job, some) is not None:
        return
    even = [len(kinds) for kinds in stage_kinds(job, layout)]
    own = [{n: _with_layers(job, some, stage, [kind] * n) for n in range(1, sum(even))} for stage in range(pp)]
    found = []
    for cuts in combinations(range(1, sum(even)), pp - 1):
        split = [end - first for first, end in pairwise((0, *cuts, sum(even)))]
        ways = [own[stage][n] for stage, n in enumerate(split)]
        fitting = [way for way in ways if way is not None]
        if len(fitting) == pp:
            times = [ns for ns, _ in fitting]
            found.append(((m - 1) * max(times) + sum(times), max(times), split, [again for _, again in fitting]))
    *_, split, again = min(found, default=(0, 0, even, even))
    numbers = {f"recompute_stage_{stage}": number for stage, number in enumerate(again)}
    yield some | numbers | {f"stage_layers_{stage}": number for stage, number in enumerate(split)}


def _with_layers(job: Job, layout: Layout, stage: int, kinds: list[LayerKind]) -> tuple[int, int] | None:
    """Nanoseconds of a micro-batch on a stage with these layers, and the fewest of them to run again with which it fits; None where it does not."""
    for again in range(len(kinds) + 1):
        tried = dict(layout) | {f"recompute_stage_{stage}": again}
        moments = stage_moments(job, tried, stage, kinds)
        if sum(max(moments, key=lambda terms: sum(terms.values()) - terms["slack"]).values()) <= usable_bytes(job):
            m = layout["accumulation"]
            return round(1e9 * (stage_time(job, tried, stage, kinds).seconds(m) / m)), again
    return None
