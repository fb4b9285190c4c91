"""Which assumption, changed by how much, would change the choice? Every answer is a search of its own, on both sides of the
border: nothing is extrapolated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Any

from strategist.document.front import Sensitivity, Turn
from strategist.document.plan import Policy
from strategist.facts.calibration import Factor, Part
from strategist.facts.hardware import Node
from strategist.facts.job import MAX_HEADROOM, Job
from strategist.facts.workload import MAX_BATCH, MAX_SEQ_LEN
from strategist.planner.recommend import choice
from strategist.planner.search import Pace, Question, search
from strategist.records import dataclass, replace
from strategist.space.grammar import layout
from strategist.units import format_gib, format_rate

OCTAVE = 64
"""Steps in which a factor doubles: neighbours differ by 1.1 %."""
REACH = 2
"""Doublings and halvings that are looked at: from a quarter to four times what is assumed."""
STRIDE = OCTAVE // 2
"""Steps between the factors that are tried first; where the choice differs between two of them, the border is halved in."""
UNNAMED = ("micro_batch", "accumulation")
"""Choices that move with every batch, and that nobody means by another layout."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """Something that is assumed: its name, the flag that says it, its value, and the job under another one. One that is `whole`
    is only doubled and halved. `changed` gives None for a factor that has no job. The flag says values from `least` to `most`, and
    another those beyond."""

    name: str
    flag: str
    unit: str
    value: float
    words: Callable[[float], str]
    changed: Callable[[float], Job | None]
    is_whole: bool = False
    least: float = 0.0
    most: float = inf
    flag_beyond: str = ""

    def says(self, value: float) -> str:
        """The flag that says a value."""
        return self.flag if self.least <= value <= self.most else self.flag_beyond


@dataclass(frozen=True, slots=True)
class Answer:
    """What is chosen under some factor; without a layout nothing fits."""

    family: str | None = None
    layout: str | None = None
    step_s: float | None = None
    identity: str = ""


def sensitivity(asked: Question, policy: Policy, pace: Pace | None = None) -> Sensitivity:
    """The nearest factors of every assumption of a question, below and above 1, under which a policy chooses another layout.

    With a `pace` that is over, the assumptions that are left are named there as left out.
    """
    usual = _answer(asked, policy)
    turns: list[Turn] = []
    steady: list[str] = []
    every = assumptions(asked.job)
    for number, assumed in enumerate(every):
        if pace is not None and pace.is_over:
            pace.left_out.append(f"sensitivity to {assumed.name}")
            continue
        if pace is not None:
            pace.tick(f"sensitivity to {assumed.name}", number, len(every))
        found = [turn for side in (-1, 1) if (turn := _turn(asked, policy, assumed, usual, side)) is not None]
        turns += found
        steady += [] if found else [assumed.name]
    ordered = sorted(turns, key=lambda turn: (max(turn.factor, 1 / turn.factor), turn.assumption, turn.factor))
    return Sensitivity(low=2.0**-REACH, high=2.0**REACH, turns=tuple(ordered), steady=tuple(steady))


def assumptions(job: Job) -> list[Assumption]:
    """What the time and memory of a job rest on, as far as it matters on its machines; an image has no other length."""
    work = job.workload
    length = Assumption("sequence length", "--seq-len", "tokens", work.seq_len, _whole, lambda f: _with_work(job, "seq_len", f, MAX_SEQ_LEN), True)  # fmt: skip
    targets = Assumption("target length", "--target-len", "tokens", work.targets, _whole, lambda f: _with_work(job, "target_len", f, MAX_SEQ_LEN), True)  # fmt: skip
    return [
        *_links(job),
        Assumption("matmul rate", "--calibration", "", 1.0, _times, lambda f: with_factor(job, "matmul", 1 / f)),
        _memory(job),
        *([Assumption("overlap", "", "", 1.0, _times, lambda f: replace(job, overlap=f))] if job.cluster.world > 1 else []),
        *_experts(job),
        *([length] if job.model.unit == "tokens" else []),
        *([targets] if work.target_len is not None else []),
        Assumption("global batch", "--global-batch", "sequences", work.global_batch, _whole, lambda f: _with_work(job, "global_batch", f, MAX_BATCH), True),
    ]  # fmt: skip


def _memory(job: Job) -> Assumption:
    """What layouts may use of a device: from half of it to all of it by the headroom, else on devices that have less or more."""
    held = job.cluster.smallest.memory_bytes
    return Assumption(
        "usable memory per device", "--headroom", "B", job.usable_bytes, format_gib, lambda f: with_memory(job, f),
        least=(1 - MAX_HEADROOM) * held, most=held, flag_beyond=_says_machines(job, "--gpu-memory"),
    )  # fmt: skip


def _times(value: float) -> str:
    return f"{value:.2f}x"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _links(job: Job) -> Iterator[Assumption]:
    """The rates inside and between nodes, where there are such links and somebody knows their rate."""
    nodes = [group.node for group in job.cluster.groups]
    inside, between = max(node.intra_Bps for node in nodes), max(node.inter_Bps for node in nodes)
    if max(node.gpus for node in nodes) > 1 and inside:
        name = f"link inside a node ({nodes[0].topology})"
        yield Assumption(
            name, _says_machines(job, "--intra-bw"), "B/s", inside, format_rate, lambda f: _with_links(job, inside=f)
        )
    if job.cluster.nodes > 1 and between:
        name = "network between nodes"
        yield Assumption(
            name, _says_machines(job, "--inter-bw"), "B/s", between, format_rate, lambda f: _with_links(job, between=f)
        )


def _says_machines(job: Job, flag: str) -> str:
    """The flag that says a figure of the machines: its own beside --gpu, and a file where --hardware describes them, which no flag may contradict."""
    return flag if job.cluster.origin in ("flags", "assumed") else "--hardware FILE"


def _experts(job: Job) -> Iterator[Assumption]:
    """How many tokens the busiest rank's experts get, where ranks may share experts."""
    if job.model.moe is not None and job.cluster.world > 1:
        ratio = job.workload.expert_imbalance
        yield Assumption(
            "expert imbalance", "--expert-imbalance", "x", ratio, _times, lambda f: _with_imbalance(job, f)
        )


def _with_imbalance(job: Job, factor: float) -> Job | None:
    """The job with more or less balanced experts; None below balance, and beyond what tokens can choose."""
    ratio, moe = job.workload.expert_imbalance * factor, job.model.moe
    if moe is None or not 1.0 <= ratio <= moe.experts / moe.top_k:
        return None
    return replace(job, workload=replace(job.workload, expert_imbalance=ratio))


def _with_links(job: Job, inside: float = 1.0, between: float = 1.0) -> Job:
    """The job with other rates of its links."""
    cluster = job.cluster
    groups = tuple(replace(group, node=_wired(group.node, inside, between)) for group in cluster.groups)
    outer = tuple(replace(link, Bps=link.Bps * between) for link in cluster.links)
    return replace(job, cluster=replace(cluster, groups=groups, links=outer))


def _wired(node: Node, inside: float, between: float) -> Node:
    return replace(
        node,
        intra_Bps=node.intra_Bps * inside,
        pair_Bps=node.pair_Bps * inside,
        inter_Bps=node.inter_Bps * between,
        links=tuple(replace(link, Bps=link.Bps * inside) for link in node.links),
    )


def with_factor(job: Job, part: Part, factor: float) -> Job:
    """The job with the seconds of one part of a step multiplied, beside what a calibration says already."""
    return replace(job, factors=(*job.factors, Factor(part=part, value=factor)))


def with_memory(job: Job, factor: float) -> Job:
    """The job with more or less of its devices' memory to use."""
    return replace(job, headroom=1.0 - (1.0 - job.headroom) * factor)


def _with_work(job: Job, field: str, factor: float, most: int) -> Job | None:
    """The job with another whole number of something; None where there is none."""
    value = getattr(job.workload, field) * factor
    if value != int(value) or not 1 <= value <= most:
        return None
    changes: Mapping[str, Any] = {field: int(value)}
    return replace(job, workload=replace(job.workload, **changes))


def factor_of(step: int) -> float:
    """The factor of a step: 1 at 0."""
    return float(2.0 ** (step / OCTAVE))


def _turn(asked: Question, policy: Policy, assumed: Assumption, usual: Answer, side: int) -> Turn | None:
    """The first factor on one side of 1 under which another layout is chosen; None within reach."""
    stride = OCTAVE if assumed.is_whole else STRIDE
    holds = 0
    for step in range(side * stride, side * (REACH * OCTAVE + 1), side * stride):
        found = _under(asked, policy, assumed, step)
        if found is None:
            return None
        if found.identity != usual.identity:
            return _halved(asked, policy, assumed, usual, holds, step, found)
        holds = step
    return None


def _halved(
    asked: Question, policy: Policy, assumed: Assumption, usual: Answer, holds: int, turns: int, found: Answer
) -> Turn:
    """The border between a step that holds and one that does not."""
    while abs(turns - holds) > 1 and not assumed.is_whole:
        middle = (turns + holds) // 2
        seen = _under(asked, policy, assumed, middle)
        if seen is None or seen.identity == usual.identity:
            holds = middle
        else:
            turns, found = middle, seen
    return _told(assumed, usual, holds, turns, found)


def _told(assumed: Assumption, usual: Answer, holds: int, turns: int, found: Answer) -> Turn:
    factor = factor_of(turns)
    value = assumed.value * factor
    winner = "nothing fits" if found.layout is None else f"{found.identity} wins instead of {usual.identity}"
    return Turn(
        assumption=assumed.name,
        flag=assumed.says(value),
        unit=assumed.unit,
        assumed=assumed.value,
        value=value,
        factor=factor,
        holds_at=factor_of(holds),
        family=found.family,
        layout=found.layout,
        step_s=found.step_s,
        sentence=f"{winner} when the {assumed.name} is {_where(assumed, value, factor)}",
    )


def _where(assumed: Assumption, value: float, factor: float) -> str:
    """Where the border lies, in words."""
    if assumed.is_whole:
        return f"{assumed.words(value)} instead of {assumed.words(assumed.value)}"
    side = "under" if factor < 1 else "over"
    meant = f" ({assumed.words(value)} instead of {assumed.words(assumed.value)})" if assumed.unit else ""
    return f"{side} {factor:.2f} times what is assumed{meant}"


def _under(asked: Question, policy: Policy, assumed: Assumption, step: int) -> Answer | None:
    """What is chosen when an assumption is changed; None where there is no such job."""
    job = assumed.changed(factor_of(step))
    return None if job is None else _answer(replace(asked, job=job), policy)


def _answer(asked: Question, policy: Policy) -> Answer:
    found = search(asked, bests=True)
    if not len(found.fitting):
        return Answer(identity="nothing")
    chosen = choice(found, policy)
    row = found.candidates.row(chosen.row)
    named = layout({key: value for key, value in row.items() if key not in UNNAMED})
    return Answer(chosen.family, layout(row), found.step_seconds(chosen.row), named)
