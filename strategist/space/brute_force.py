"""Every candidate again, one at a time: all values of all choices, thrown away unless each condition holds.

Says what a layout must satisfy to mean something, whatever the order in which `enumerate.py` builds the same set; slow, and meant
to be: `check --exhaustive` holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

from strategist.facts.runs import V_SHAPED
from strategist.space.candidates import LAYERS_OF, NOT_ASKED, OF_STAGE, WORDS
from strategist.space.enumerate import MAX_MICRO_BATCH, MAX_VIRTUAL_STAGES, MIN_TOKENS_PER_CP_RANK, TILES, Limits

Row = dict[str, int]
Condition = Callable[[Limits, Mapping[str, int]], bool]


def every_layout(limits: Limits) -> Iterator[Row]:
    """Every row of the space as numbers (words by their places), under the pins and without forbidden techniques."""
    for mesh in _meshes(limits):
        for row in _grown(limits, [mesh]):
            if _as_pinned(limits, row) and not any(_uses(word, row) for word in limits.forbids):
                yield row


def _meshes(limits: Limits) -> Iterator[Row]:
    """Degrees whose product is the world, within their bounds; a pinned degree has no other bound."""
    ways = [n for n in range(1, limits.world + 1) if limits.world % n == 0]
    most = {
        "pp": limits.layers if limits.splittable else 1,
        "tp": limits.fast_domain,
        "cp": max(1, limits.seq_len // MIN_TOKENS_PER_CP_RANK),
    }
    for pp, tp, cp, replicate, shard in product(*[ways] * 5):
        row = {"pp": pp, "tp": tp, "cp": cp, "dp_replicate": replicate, "dp_shard": shard}
        is_bounded = all(limits.pinned(axis) == row[axis] or row[axis] <= most[axis] for axis in most)
        if pp * tp * cp * replicate * shard == limits.world and is_bounded:
            yield from (row | experts for experts in _expert_degrees(limits, row))


def _expert_degrees(limits: Limits, row: Row) -> Iterator[Row]:
    """Degrees of experts that divide them and the ranks of a stage; without experts there is one row."""
    if not limits.experts:
        yield {"ep": limits.pinned("ep") or 1, "etp": 1}
        return
    for ep, etp in product(range(1, limits.experts + 1), {1, row["tp"]}):
        if limits.experts % ep == 0 and (limits.world // row["pp"]) % (ep * etp) == 0:
            yield {"ep": ep, "etp": etp}


def _zero(limits: Limits, row: Mapping[str, int]) -> bool:
    """Plain replicas; one group that shares optimizer state; groups of any size; a lone device that offloads."""
    sharing = row["dp_shard"] * row["cp"]
    if row["zero"] == 0:
        return row["dp_shard"] == 1
    if row["zero"] == 1:
        return row["dp_replicate"] == 1 and sharing > 1
    return sharing > 1 or limits.world == 1


def _offload(limits: Limits, row: Mapping[str, int]) -> bool:
    """State leaves under ZeRO-2 and weights under ZeRO-3 where no layer is cut, nor experts beside replicas; a lone device shards
    nothing, so there ZeRO without offloading means nothing. Slices are for weights that only ZeRO cuts, of layers too wide."""
    whole = row["zero"] >= 2 and row["pp"] == row["tp"] == 1 and (row["dp_replicate"] == 1 or row["ep"] == 1)
    alone = whole and row["cp"] == row["ep"] == row["dp_replicate"] == 1
    word = WORDS["offload"][row["offload"]]
    is_asked = bool(limits.pinned("tiling")) or "tiling" in limits.also
    may_tile = alone and row["zero"] == 3 and (limits.tiled or is_asked)
    if row["tiling"] > 1 and not may_tile:
        return False
    if word == "none":
        return not (alone and row["dp_shard"] == 1)
    homes = ("optimizer",) if row["zero"] == 2 else ("parameters", "nvme")
    return whole and word in homes


def _batch(limits: Limits, row: Mapping[str, int]) -> bool:
    """micro-batch x accumulation x dp is the batch; where dp does not divide it one row stands for the refusal."""
    dp = row["dp_replicate"] * row["dp_shard"]
    micro, rounds = row["micro_batch"], row["accumulation"]
    if limits.global_batch % dp:
        return micro == 1 and rounds == max(1, limits.global_batch // dp)
    allowed = micro <= MAX_MICRO_BATCH or micro == limits.pinned("micro_batch")
    return allowed and micro * rounds * dp == limits.global_batch


def _schedule(limits: Limits, row: Mapping[str, int]) -> bool:
    """A pipeline has a schedule. GPipe is for batches of fewer rounds than stages and 1F1B for the others, unless asked for;
    stages of several chunks have equally many layers, unless pinned, and looped BFS is for more rounds than stages where they are
    no multiple; ZB-H1, and in a V two chunks of ZBV and DualPipeV, where somebody says so."""
    word, virtual = WORDS["schedule"][row["schedule"]], row["virtual_stages"]
    if row["pp"] == 1 or word == "none":
        return row["pp"] == 1 and word == "none" and virtual == 1
    divides = limits.layers % (row["pp"] * virtual) == 0 or limits.pinned("virtual_stages") == virtual
    is_asked = limits.pinned("schedule") == row["schedule"] or word in limits.also
    if word in ("interleaved", "looped_bfs"):
        fits = row["accumulation"] < row["pp"] or row["accumulation"] % row["pp"] == 0
        is_seen = word == "interleaved" or not fits or is_asked
        return virtual > 1 and divides and is_seen
    if word in ("zb_h1", *V_SHAPED):
        is_cut = virtual == 1 if word == "zb_h1" else virtual == 2 and divides
        return is_cut and is_asked
    is_short = row["accumulation"] < row["pp"]
    return virtual == 1 and (is_short == (word == "gpipe") or is_asked)


def _split(limits: Limits, row: Mapping[str, int]) -> bool:
    """Stages of one chunk are weighted where giving the last one fewer layers than its equal share makes the most loaded
    stage lighter, or where somebody says so. Balanced stages are those of GPipe and 1F1B."""
    if WORDS["stage_split"][row["stage_split"]] == "balanced":
        return limits.balances and WORDS["schedule"][row["schedule"]] in ("gpipe", "1f1b")
    layers, others = limits.layers, row["pp"] - 1
    if row["stage_split"] == 0:
        return True
    if WORDS["stage_split"][limits.pinned("stage_split") or 0] == "weighted":
        return others > 0 and row["virtual_stages"] == 1
    equal = layers // row["pp"]
    loads = [max(own + limits.head, -(-(layers - own) // max(1, others))) for own in range(1, equal + 1)]
    return others > 0 and row["virtual_stages"] == 1 and bool(loads) and min(loads) < loads[-1]


def _sequence(limits: Limits, row: Mapping[str, int]) -> bool:
    """Beside tp the sequence is cut wherever it divides, unless somebody says otherwise."""
    if row["tp"] == 1:
        return row["sequence_parallel"] == 0
    pinned = limits.pinned("sequence_parallel")
    divides = limits.divides(row["cp"] * row["tp"]) and "sequence_parallel" not in limits.forbids
    return row["sequence_parallel"] == (int(divides) if pinned is None else pinned)


def _context(limits: Limits, row: Mapping[str, int]) -> bool:
    """Rings or all-to-alls where the sequence is spread, neither where it is not. Where somebody asks, exchanges among some
    neighbours with a ring across them: more than one of them, and fewer than all."""
    cp, inner = row["cp"], row.get("cp_inner", 1)
    if WORDS["context_parallel"][row["context_parallel"]] == "hierarchical":
        return 1 < inner < cp and cp % inner == 0
    return (cp > 1) == (row["context_parallel"] > 0) and inner == 1


def _replicas(_limits: Limits, row: Mapping[str, int]) -> bool:
    """Threads of one process, and ranks that compress their gradients, hold whole replicas, and each has its own sequences."""
    return row["dp_replicate"] > 1 and all(row[axis] == 1 for axis in ("pp", "dp_shard", "cp", "tp", "ep", "etp"))


def _whole_head(_limits: Limits, row: Mapping[str, int]) -> bool:
    """A loss in chunks is computed by ranks that have the whole head."""
    return row["tp"] == row["pp"] == 1


def _full(_limits: Limits, row: Mapping[str, int]) -> bool:
    """Some layers are those of full recompute."""
    return WORDS["recompute"][row["recompute"]] == "full"


def _layers(limits: Limits, row: Mapping[str, int]) -> bool:
    """All layers or none, or a number of a chunk's that is asked for, or below an equal share where all numbers are."""
    number = row["recompute_layers"]
    below = number * row["pp"] * row["virtual_stages"] < limits.layers
    return not number or (_full(limits, row) and (below or limits.pinned("recompute_layers") == number))


def _depth(limits: Limits, row: Mapping[str, int]) -> bool:
    """Stages that are alike; or stages of a pipeline that differ, as many as numbers where somebody says them, and then no number for all."""
    if not row["recompute_depth"]:
        return True
    stages = row["pp"] == len(limits.depths) if limits.depths else row["pp"] > 1
    alone = bool(limits.pinned("recompute_depth")) or not row.get("recompute_layers")
    is_balanced = WORDS["stage_split"][row["stage_split"]] == "balanced"
    if not (is_balanced or "recompute_by_stage" in limits.also or limits.pinned("recompute_depth")):
        return False
    return _full(limits, row) and stages and alone


def _balanced(_limits: Limits, row: Mapping[str, int]) -> bool:
    """Balanced stages run different layers again."""
    return WORDS["stage_split"][row["stage_split"]] != "balanced" or bool(row.get("recompute_depth"))


def _said(stage: int) -> Condition:
    """Layers of a stage are those that somebody says where stages are balanced, and none elsewhere."""

    def holds(limits: Limits, row: Mapping[str, int]) -> bool:
        own = limits.split[stage] if WORDS["stage_split"][row["stage_split"]] == "balanced" else 0
        return row[f"{LAYERS_OF}{stage}"] == own

    return holds


def _choices(limits: Limits, row: Mapping[str, int]) -> Sequence[tuple[dict[str, Sequence[int]], Condition]]:
    """Choices that are made together with all their values, and what they must satisfy given those before them."""
    rounds = range(1, limits.global_batch + 1)
    inner = {"cp_inner": range(1, limits.world + 1)} if limits.splits_cp else {}
    dp = row["dp_replicate"] * row["dp_shard"]
    per_rank = [n for n in rounds if (limits.global_batch // dp) % n == 0] or [1]
    places = {name: range(len(words)) for name, words in WORDS.items()}
    conditions: Mapping[str, Condition] = {
        "replicas": _replicas, "compression": _replicas, "loss": _whole_head, "tables": _replicas,
        "recompute_layers": _layers, "recompute_every": _full, "recompute_depth": _depth,
    }  # fmt: skip
    asked: list[tuple[dict[str, Sequence[int]], Condition]] = [
        ({name: (value,)}, condition) for name, condition in conditions.items() if (value := limits.pinned(name))
    ]
    if "recompute_layers" in limits.also:
        asked.append(({"recompute_layers": range(limits.layers)}, _layers))
    if "recompute_by_stage" in limits.also or "balanced_stages" in limits.also:
        asked.append(({"recompute_depth": range(2)}, _depth))
    asked += [({f"{OF_STAGE}{stage}": (number,)}, _depth) for stage, number in enumerate(limits.depths)]
    asked += [({f"{LAYERS_OF}{stage}": (0, own)}, _said(stage)) for stage, own in enumerate(limits.split)]
    asked.append(({}, _balanced))
    return (
        ({"zero": range(4)}, _zero),
        ({"offload": places["offload"], "tiling": sorted({1, limits.pinned("tiling") or TILES})}, _offload),
        ({"micro_batch": per_rank, "accumulation": per_rank}, _batch),
        ({"schedule": places["schedule"], "virtual_stages": range(1, MAX_VIRTUAL_STAGES + 1)}, _schedule),
        ({"stage_split": places["stage_split"]}, _split),
        ({"sequence_parallel": (0, 1)}, _sequence),
        ({"context_parallel": places["context_parallel"], **inner}, _context),
        ({"recompute": places["recompute"]}, lambda limits, row: True),
        *asked,
    )


def _grown(limits: Limits, rows: list[Row]) -> list[Row]:
    """Some rows of one mesh with every choice made in every way that means something."""
    for values, means_something in _choices(limits, rows[0]):
        ways = [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]
        rows = [row | way for row in rows for way in ways if means_something(limits, row | way)]
        if not rows:
            return rows
    return rows


def _as_pinned(limits: Limits, row: Mapping[str, int]) -> bool:
    """Whether every pin holds; `dp` is the product of both degrees."""
    values = {**NOT_ASKED, **row, "dp": row["dp_replicate"] * row["dp_shard"]}
    return all(values[pin.key] == pin.value for pin in limits.pins)


def _uses(word: str, row: Mapping[str, int]) -> bool:
    """Whether a row uses a technique that may be forbidden."""
    if word == "dp":
        return row["dp_replicate"] * row["dp_shard"] > 1
    if word == "hsdp":
        return row["dp_replicate"] > 1 and row["dp_shard"] > 1
    if word in WORDS["schedule"]:
        return WORDS["schedule"][row["schedule"]] == word
    plain = 1 if word in ("tp", "pp", "cp", "ep", "tiling") else 0
    return row[word] > plain
