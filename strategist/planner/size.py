"""The inverse question: which machines train a model on so many tokens by a deadline. The least, the cheapest, the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil

from strategist.document.plan import Request
from strategist.document.sizing import Machines
from strategist.errors import NoPlanError
from strategist.facts.hardware import Cluster
from strategist.planner.fewer import seconds_at_best
from strategist.planner.goodput import goodput
from strategist.planner.search import Found, Pace, Question, search
from strategist.records import dataclass
from strategist.rulebook.apply import family_of
from strategist.space.grammar import layout
from strategist.units import DAY, LONGEST, as_flag, format_duration

EIGHTHS = (5, 6, 7)
"""Eighths of the next power of two of nodes that are tried too where the most nodes that may be had are less than it."""
ROUNDS = (4, 8)
"""Between a size that is too slow and the next, in time, so many equal parts are looked at first, and then, between the last
of these that is too slow and the first in time, so many: of up to 64 nodes every number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of device: the question on so many devices per node and nodes, the sizes to try (devices per node, nodes) in
    ascending order, and what one device costs per hour."""

    gpu: str
    ask: Callable[[int, int], Question]
    sizes: tuple[tuple[int, int], ...]
    price_per_gpu_hour: float | None = None


def sizes(gpus_per_node: int, most_nodes: int, *, parts: bool) -> tuple[tuple[int, int], ...]:
    """(devices per node, nodes): powers of two of a node's devices (where parts of a node may be had), then of nodes, and at last as
    many nodes as may be had."""
    powers = [2**k for k in range(max(gpus_per_node, most_nodes).bit_length())]
    some = [(n, 1) for n in powers if n < gpus_per_node] if parts else []
    whole = [n for n in powers if n <= most_nodes]
    more = {*(2 * whole[-1] * eighths // 8 for eighths in EIGHTHS), most_nodes}
    last = sorted(n for n in more if whole[-1] < n <= most_nodes)
    return (*some, *((gpus_per_node, n) for n in (*whole, *last)))


def looked_at(
    kind: Kind, deadline_s: float | None, pace: Pace | None = None, known: Sequence[Machines] = ()
) -> Iterator[Machines]:
    """Machines of one kind with their runs: from the first size that may be in time, for as long as more are faster or none is in time; and
    sizes between the last that is too slow and the first in time. A `pace` counts as soon as some of those that are `known` by then are
    in time: when its time has run out no further size is tried; who watches it hears of every size."""
    before: Machines | None = None
    for number, (below, size) in enumerate(zip((None, *kind.sizes[:-1]), kind.sizes, strict=True)):
        if pace is not None:
            pace.tick(f"{size[0] * size[1]:,} x {kind.gpu}", number, len(kind.sizes), None if before is None else before.step_s)  # fmt: skip
        if not _may_do(kind, size, deadline_s):
            continue
        own = pace.of_time if pace is not None and any(machines.in_time for machines in known) else None
        if own is not None and own.is_over:
            own.left_out.append(f"{size[0] * size[1]:,} and more x {kind.gpu}")
            return
        found = _machines(kind, size, deadline_s, own)
        if found is None:
            continue
        yield found
        if below is not None and found.in_time and (before is None or not before.in_time):
            yield from _between(kind, below, size, deadline_s, pace and pace.of_time)
        is_slower = before is not None and before.in_time and found.run_seconds >= before.run_seconds
        if is_slower and _is_power(size[1]):
            return
        before = found


def _may_do(kind: Kind, size: tuple[int, int], deadline_s: float | None) -> bool:
    """Whether some layout may be in time."""
    return deadline_s is None or _run_at_least(kind.ask(*size)) <= deadline_s


def _is_power(nodes: int) -> bool:
    """Whether so many nodes divide as well as half of them: others may be slower than fewer and than more."""
    return nodes & (nodes - 1) == 0


def largest_looked_at(kinds: Sequence[Kind], deadline_s: float | None) -> Iterator[Machines]:
    """The largest machines of every kind on which something fits, where no size could be in time: how long the run would take."""
    for kind in kinds:
        found = (_machines(kind, size, deadline_s, None) for size in reversed(kind.sizes))
        yield from filter(None, [next((machines for machines in found if machines is not None), None)])


def require_legal(kinds: Sequence[Kind]) -> None:
    """Raise the error of the largest machines where no layout of any kind is allowed on them, so that memory is not to blame."""
    largest = [search(kind.ask(*kind.sizes[-1]), bests=True) for kind in kinds]
    if not any(len(found.legal) for found in largest):
        from strategist.planner.why_not import explain_failure  # only failures pay for it

        raise explain_failure(largest[0], Request())


def _between(
    kind: Kind, below: tuple[int, int], size: tuple[int, int], deadline_s: float | None, pace: Pace | None
) -> Iterator[Machines]:
    """Fewer nodes than a size in time, but more than the size below it, until the least in time is known."""
    per_node, low, high = size[0], below[1], size[1]
    for parts in ROUNDS if below[0] == per_node else ():
        timely = [high]
        for nodes in evenly(low, high, parts):
            if not _may_do(kind, (per_node, nodes), deadline_s):
                continue
            if pace is not None and pace.is_over:
                pace.left_out.append(f"{per_node * nodes:,} to {per_node * high - 1:,} x {kind.gpu}")
                return
            found = _machines(kind, (per_node, nodes), deadline_s, pace)
            if found is not None:
                yield found
                timely += [nodes] if found.in_time else []
                if found.in_time and parts == ROUNDS[-1]:
                    return
        tried = [low, *evenly(low, high, parts), high]
        high = min(timely)
        low = tried[tried.index(high) - 1]


def evenly(low: int, high: int, parts: int) -> list[int]:
    """Whole numbers between two, which they cut into so many parts of about one length."""
    return sorted({low + (high - low) * part // parts for part in range(parts)} - {low})


def _steps(asked: Question) -> int:
    """Optimizer steps of the run."""
    work = asked.job.workload
    return ceil((work.tokens or 0) / work.tokens_per_step)


def _run_at_least(asked: Question) -> float:
    """Seconds that no layout and no luck can undercut."""
    return seconds_at_best(asked.job) * _steps(asked)


def _machines(kind: Kind, size: tuple[int, int], deadline_s: float | None, pace: Pace | None) -> Machines | None:
    """The fastest layout on some machines and its run; None where nothing is legal or fits."""
    asked = kind.ask(*size)
    found = search(asked, pace=pace, bests=True)
    if pace is not None and found.untried:
        pace.left_out.append(f"{found.untried:,} layouts on {asked.job.cluster.world:,} x {kind.gpu}")
    row = found.best_of()
    return None if row is None else _described(kind, found, row, deadline_s)


def _described(kind: Kind, found: Found, row: int, deadline_s: float | None) -> Machines:
    asked = found.question
    cluster: Cluster = asked.job.cluster
    share = goodput(asked.job)
    run = found.step_seconds(row) * _steps(asked) / share.share
    hours, price = run * cluster.world / 3600, kind.price_per_gpu_hour
    return Machines(
        gpu=cluster.smallest.name,
        gpus=cluster.world,
        nodes=cluster.nodes,
        family=family_of(found.families, row),
        layout=layout(found.candidates.row(row)),
        step_s=found.step_seconds(row),
        peak_bytes=int(found.device_bytes[row]),
        goodput=share,
        run_seconds=run,
        gpu_hours=hours,
        price_per_gpu_hour=price,
        cost=None if price is None else hours * price,
        in_time=deadline_s is None or run <= deadline_s,
    )


@dataclass(frozen=True, slots=True)
class Answers:
    """The machines with the fewest devices, the cheapest if that can be said, and the fastest."""

    least: Machines
    cheapest: Machines | None
    fastest: Machines


def answers(found: Sequence[Machines], deadline_s: float | None) -> Answers:
    """The three answers. Raises NoPlanError when nothing fits or nothing is in time."""
    if not found:
        raise NoPlanError(
            "This model fits on no machines that were looked at.",
            flag="--gpu",
            hint="Give more --nodes, another --gpu, or a shorter --seq-len.",
        )
    fastest = min(found, key=lambda m: (m.run_seconds, m.gpus))
    timely = [m for m in found if m.in_time]
    if not timely:
        words = f"{format_duration(fastest.run_seconds)} on {fastest.gpus:,} x {fastest.gpu}"
        raise NoPlanError(
            f"Nothing that was looked at is in time; the fastest takes {words}.",
            flag="--deadline",
            value=None if deadline_s is None else format_duration(deadline_s),
            hint=f"{_deadline_that_would_do(fastest)}more --nodes or another --gpu may be faster.",
        )
    return Answers(min(timely, key=lambda m: (m.gpus, m.run_seconds)), _cheapest(timely), fastest)


def _deadline_that_would_do(fastest: Machines) -> str:
    """The first round deadline that the fastest machines meet, as one writes it; nothing where it is beyond what can be said."""
    if fastest.run_seconds > LONGEST - DAY:
        return ""
    return f"--deadline {as_flag(fastest.run_seconds)} would do; "


def _cheapest(timely: Sequence[Machines]) -> Machines | None:
    """By money where every price is known; by device-hours where all devices are alike."""
    if all(m.cost is not None for m in timely):
        return min(timely, key=lambda m: (m.cost or 0.0, m.gpus))
    alike = len({m.gpu for m in timely}) == 1
    return min(timely, key=lambda m: (m.gpu_hours, m.gpus)) if alike else None
