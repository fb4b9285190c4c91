"""One search: enumerate, refuse, weigh, time. What the planner, the fixes and the smaller clusters all run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from strategist.document.plan import Hint, Objective
from strategist.facts.job import Job
from strategist.facts.model import layer_counts
from strategist.planner.rank import best
from strategist.planner.situation import largest_layer_bytes, question
from strategist.planner.weigh import FEW, Weights
from strategist.records import dataclass, field, replace
from strategist.rulebook.apply import Refused, family_masks, forbid
from strategist.rulebook.rule import Rule, load_rules
from strategist.space.candidates import Candidates, Column, Mask, joined
from strategist.space.enumerate import Limits, in_blocks
from strategist.space.grammar import Pin
from strategist.space.stages import head_in_layers
from strategist.timing.estimate import StepTimes, least_step_ns, step_times

T = TypeVar("T")
FRONTEND = "frontend"
"""What stands in a rule's place where a front end cannot say a layout."""
AT_ONCE = 2**14
"""Legal layouts that are tried in less time than it takes to lose patience."""
VERY_MANY, BLOCK = 3 * 2**19, 2**19
"""Layouts of which, where there are more, those that rules refuse are not kept, and about how many of them are judged at a time: a
row takes some 150 bytes."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a search: how long it took and how many candidates it left."""

    name: str
    seconds: float
    survivors: int


@dataclass(slots=True)
class SearchLog:
    """The door every stage goes through, so that `--search-log` costs nothing extra."""

    stages: list[Stage] = field(default_factory=list)

    def run(self, name: str, work: Callable[[], T], survivors: Callable[[T], int]) -> T:
        """Run one stage and note its time and what it left."""
        start = time.perf_counter()
        result = work()
        self.stages.append(Stage(name, time.perf_counter() - start, survivors(result)))
        return result


Watch = Callable[[str, int, int, float | None], None]
"""Is told what is going on, how much of how much is done, and the seconds of the best step so far."""


class Pace:
    """How long a question may be worked on, and who watches. `left_out` collects what the time was too short for."""

    def __init__(self, seconds: float | None = None, watch: Watch | None = None):
        self.seconds, self.watch = seconds, watch
        self.start = time.perf_counter()
        self.left_out: list[str] = []

    @property
    def of_time(self) -> Pace | None:
        """This pace where the time is limited, for a part of a question of which only the whole is watched."""
        return None if self.seconds is None else self

    @property
    def is_over(self) -> bool:
        """Whether the time has run out."""
        return self.seconds is not None and time.perf_counter() - self.start >= self.seconds

    def tick(self, words: str, done: int, total: int, best_s: float | None = None) -> None:
        """Say how far the work is."""
        if self.watch is not None:
            self.watch(words, done, total, best_s)


class Frontend(Protocol):
    """A framework or launcher that can say some layouts and not others."""

    @property
    def name(self) -> str: ...  # noqa: D102

    def as_run(self, job: Job) -> Job:
        """The job as what it starts runs it."""
        ...

    def says(self, job: Job, candidates: Candidates) -> Mask:
        """Which layouts it can say, (C,)."""
        ...

    def obstacles(self, job: Job, candidates: Candidates, row: int) -> tuple[str, ...]:
        """Sentences about what it cannot say of one of them."""
        ...

    def nearest(self, job: Job, candidates: Candidates) -> int:
        """The row of which it can say the most."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is searched: the job, what is fixed, left out or added, the goal, and further rule folders.

    `ruled_out` are whole layouts, each as one pin per choice, that somebody knows not to be wanted; a `frontend` leaves only layouts
    that it can say."""

    job: Job
    pins: tuple[Pin, ...] = ()
    forbids: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    objective: Objective = "time"
    rule_folders: tuple[str, ...] = ()
    ruled_out: tuple[tuple[Pin, ...], ...] = ()
    frontend: Frontend | None = None


class Unsaid(NamedTuple):
    """Layouts that rules allow and a front end cannot say: how many, and the place of one of them in the enumerated list."""

    layouts: int
    example: int


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A finished search. `fitting` lists the rows of `legal` that fit; `times` and `families` belong to those rows,
    `legal_families` to all of `legal`. Not among `legal` are `unsaid` layouts, `slower` ones, which are behind the best of all
    their families, and `untried` ones, for which there was no time."""

    question: Question
    enumerated: int
    legal: Candidates
    refused: tuple[Refused, ...]
    enumerated_candidates: Candidates
    weights: Weights
    fitting: Column
    candidates: Candidates
    times: StepTimes
    families: Mapping[str, Mask]
    legal_families: Mapping[str, Mask]
    untried: int = 0
    slower: int = 0
    unsaid: Unsaid | None = None

    @property
    def misfits(self) -> Mask:
        """Which legal rows do not fit, shape of `legal`."""
        misses = np.ones(len(self.legal), dtype=np.bool_)
        misses[self.fitting] = False
        return misses

    def best_of(self, among: Mask | None = None) -> int | None:
        """The best fitting row, of all or of some; None when there is none."""
        rows = np.arange(len(self.fitting)) if among is None else np.flatnonzero(among)
        if not len(rows):
            return None
        return best(self.candidates, self.times.step, self.device_bytes, self.question.objective, rows)

    @property
    def device_bytes(self) -> Column:
        """Peak of every fitting row."""
        return self.weights.device[self.fitting]

    def step_seconds(self, row: int) -> float:
        """Predicted seconds per step of a fitting row."""
        return float(self.times.step[row]) / 1e9


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """The search on the machines that are used, how many devices are not, and what to say about it."""

    found: Found
    idle: int = 0
    hints: tuple[Hint, ...] = ()


def limits_of(question_: Question) -> Limits:
    """The bounds of the space for a question."""
    job = question_.job
    facts = question(job)
    return Limits(
        world=facts["gpus"],
        fast_domain=facts["fast_domain"] if facts["is_gpu"] else facts["gpus"],
        layers=facts["layers"],
        seq_len=facts["seq_len"],
        global_batch=facts["global_batch"],
        experts=facts["experts"],
        splittable=facts["splittable"],
        head=head_in_layers(job.model) if facts["gpus"] > 1 else 0.0,
        alike=len(layer_counts(job.model)) == 1,
        tiled=largest_layer_bytes(job) > job.usable_bytes,
        pins=question_.pins,
        forbids=question_.forbids,
        also=question_.also,
        target_len=facts["target_len"],
    )


def legality(question_: Question) -> tuple[Rule, ...]:
    """The rules that forbid, the user's included."""
    return load_rules("legality", question_.rule_folders)


def search(
    question_: Question,
    log: SearchLog | None = None,
    *,
    under_seconds: float | None = None,
    pace: Pace | None = None,
    bests: bool = False,
) -> Found:
    """Everything that is legal, what of it fits, and how long it takes; with `under_seconds` only layouts that may take less;
    with a `pace` as much of it as there is time for. With `bests` nobody asks for more than the best of a family or of several, by
    time: what cannot be that is left out."""
    _keep_memory()
    log = log or SearchLog()
    job = question_.job
    facts: dict[str, Any] = question(job)
    everything, enumerated, keep, refused = _judged(question_, facts, log)
    keep, unsaid = _sayable(question_, everything, keep, log)
    legal = _with_numbers(job, everything.where(keep), log)
    if under_seconds is not None:
        legal = legal.where(least_step_ns(job, legal) < 1e9 * under_seconds)
    everywhere = family_masks(legal, facts)
    if bests and len(legal) > FEW and has_bound(question_):
        tried = _best_first(job, legal, everywhere, log, pace)
    elif pace is None or len(legal) <= AT_ONCE:
        tried = _at_once(job, legal, log)
    else:
        tried = _paced(job, legal, log, pace)
    if tried.rows is not None:
        everywhere = {name: mask[tried.rows] for name, mask in everywhere.items()}
    return Found(
        question_,
        enumerated,
        tried.legal,
        refused,
        everything,
        tried.weights,
        tried.fitting,
        tried.candidates,
        tried.times,
        {name: mask[tried.fitting] for name, mask in everywhere.items()},
        everywhere,
        tried.untried,
        tried.slower,
        unsaid,
    )


def _sayable(question_: Question, everything: Candidates, keep: Mask, log: SearchLog) -> tuple[Mask, Unsaid | None]:
    """What of the layouts that rules allow the front end can say, and what it cannot."""
    frontend, allowed = question_.frontend, np.flatnonzero(keep)
    if frontend is None or not len(allowed):
        return keep, None
    says = log.run(
        "front end", lambda: frontend.says(question_.job, everything.where(allowed)), lambda said: int(said.sum())
    )
    if says.all():
        return keep, None
    left = keep.copy()
    left[allowed[~says]] = False
    return left, Unsaid(int((~says).sum()), int(allowed[np.argmin(says)]))


def _with_numbers(job: Job, legal: Candidates, log: SearchLog) -> Candidates:
    """The layouts, those whose stages run different layers again with how many."""
    if "recompute_depth" not in legal.columns:
        return legal
    from strategist.planner.depth import with_depths  # few ask for it

    return log.run("layers of every stage", lambda: with_depths(job, legal), len)


def has_bound(question_: Question) -> bool:
    """Whether a bound of the step says what cannot be best: where time decides."""
    return question_.objective in ("time", "cost")


class Tried(NamedTuple):
    """What became of legal layouts: see `Found`. `rows` says which of them `legal` still has, None that it has all."""

    legal: Candidates
    weights: Weights
    fitting: Column
    candidates: Candidates
    times: StepTimes
    untried: int = 0
    slower: int = 0
    rows: Column | None = None


def _at_once(job: Job, legal: Candidates, log: SearchLog) -> Tried:
    weights = log.run("memory", lambda: Weights(job, legal), lambda weighed: int(weighed.fits.sum()))
    fitting = np.flatnonzero(weights.fits)
    candidates = legal.where(fitting)
    times = log.run("time", lambda: step_times(job, candidates), lambda t: len(t.step))
    return Tried(legal, weights, fitting, candidates, times)


def _paced(job: Job, legal: Candidates, log: SearchLog, pace: Pace) -> Tried:
    from strategist.planner.paced import in_blocks  # most searches are over before anybody asks how far they are

    return log.run("memory, time", lambda: in_blocks(job, legal, pace), lambda tried: len(tried.fitting))


def _best_first(job: Job, legal: Candidates, families: Mapping[str, Mask], log: SearchLog, pace: Pace | None) -> Tried:
    from strategist.planner.best_first import best_first  # small searches are over without it

    return log.run("best first", lambda: best_first(job, legal, families, pace), lambda tried: len(tried.fitting))


def _asked_for(question_: Question) -> Iterator[Candidates]:
    """Every layout within the limits that was not ruled out, in blocks where these are very many."""
    for block in in_blocks(limits_of(question_), VERY_MANY, BLOCK):
        kept = block
        for choices in question_.ruled_out:
            kept = kept.where(~np.all([pin.holds(kept) for pin in choices], axis=0))
        yield kept


KEPT_BYTES = 2**25 - 2**14
"""The largest block that glibc learns from, and hardly less."""


@cache
def _keep_memory() -> None:
    """Have glibc keep what arrays give back: once it was given back such a block, which nobody wrote to, it keeps twice as much at the end
    of its heap (mallopt(3), M_MMAP_THRESHOLD). It would else return tens of megabytes between two groups of candidates, and every page that
    comes back is a fault. Others' allocators make nothing of it."""
    np.empty(KEPT_BYTES, np.uint8)


class Judged(NamedTuple):
    """Layouts, how many there were, which of them no rule forbids, and what each rule refused. Of very many those that are refused are not
    kept, but for an example of each rule in each block."""

    everything: Candidates
    enumerated: int
    keep: Mask
    refused: tuple[Refused, ...]


def _judged(question_: Question, facts: Mapping[str, Any], log: SearchLog) -> Judged:
    """Every layout, judged by the rules."""
    rules, blocks = legality(question_), _asked_for(question_)
    judged = _first(rules, facts, blocks, log)
    second = next(blocks, None)
    if second is None:
        return judged
    judged = _legal(judged)
    others = (_legal(_by_rules(rules, facts, block)) for block in chain([second], blocks))
    return log.run("the rest, in blocks", lambda: _together([judged, *others]), lambda one: int(one.keep.sum()))


def _first(rules: Sequence[Rule], facts: Mapping[str, Any], blocks: Iterator[Candidates], log: SearchLog) -> Judged:
    """The first block, judged; of most spaces it is all."""
    block = log.run("enumerate", lambda: next(blocks), len)
    return log.run("legality", lambda: _by_rules(rules, facts, block), lambda judged: int(judged.keep.sum()))


def _by_rules(rules: Sequence[Rule], facts: Mapping[str, Any], block: Candidates) -> Judged:
    keep, refused = forbid(rules, facts, block)
    return Judged(block, len(block), keep, refused)


def _legal(judged: Judged) -> Judged:
    """Judged layouts without what is refused, but for the examples."""
    kept = judged.keep.copy()
    kept[[one.example for one in judged.refused]] = True
    place = kept.cumsum() - 1
    refused = tuple(replace(one, example=int(place[one.example])) for one in judged.refused)
    own = joined([judged.everything.where(kept)])  # read now: rows that are taken later keep the whole block
    return Judged(own, judged.enumerated, judged.keep[kept], refused)


def _together(blocks: Sequence[Judged]) -> Judged:
    """Judged blocks as one; of each rule the first example stays."""
    refused: dict[str, Refused] = {}
    start = 0
    for block in blocks:
        for one in block.refused:
            known = refused.get(one.rule.id)
            refused[one.rule.id] = (
                replace(one, example=start + one.example)
                if known is None
                else replace(known, count=known.count + one.count)
            )
        start += len(block.everything)
    order = [rule for block in blocks for rule in (one.rule.id for one in block.refused)]
    return Judged(
        joined([block.everything for block in blocks]),
        sum(block.enumerated for block in blocks),
        np.concatenate([block.keep for block in blocks]),
        tuple(refused[name] for name in dict.fromkeys(order)),
    )
