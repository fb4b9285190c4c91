"""Is the layout of a Plan really the best of its space? Every layout is enumerated, judged, weighed and timed again, alone.

Nothing of the search is used but the formulas of one layout's ledger and step: no columns of candidates, no bound, no ranking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from strategist.document.certificate import RuledOut
from strategist.document.plan import Plan
from strategist.errors import ImpossibleError, StaleError
from strategist.facts.job import Job
from strategist.memory.estimate import device_bytes_CS, peak_memory
from strategist.planner.depth import ROUNDED
from strategist.planner.predict import job_of, pins_of
from strategist.planner.rank import complexity
from strategist.planner.search import FRONTEND, Frontend, Question, legality, limits_of
from strategist.planner.situation import describe, one, question
from strategist.planner.weigh import fits
from strategist.records import dataclass, replace
from strategist.rulebook.apply import family_masks, fired
from strategist.rulebook.rule import load_rules
from strategist.space.brute_force import Row, every_layout
from strategist.space.candidates import NOT_ASKED, OF_STAGE, WORDS, code, deepest
from strategist.space.grammar import layout, parse_pins
from strategist.space.stages import chunk_lengths
from strategist.timing.estimate import step_times

MAX_WORLD = 64
"""Devices of the largest machines whose layouts are tried one at a time: minutes, tens of them for mixtures of experts (docs/answers.md)."""

Watch = Callable[[int, int], None]
"""Told after each layout: how many of how many are done."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One layout that fits: its row, nanoseconds of its step, bytes of its peak, how much it asks of people, its families."""

    row: Row
    step_ns: int
    peak_bytes: int
    complexity: int
    families: tuple[str, ...]

    @property
    def layout(self) -> str:
        """The layout in the grammar of --pin."""
        return layout({name: WORDS[name][value] if name in WORDS else value for name, value in self.row.items()})


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence that trying everything confirmed or not."""

    sentence: str
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Recheck:
    """What trying everything found: counts, the best layout of all that fit, and what it says of the plan's claims."""

    enumerated: int
    refused: tuple[RuledOut, ...]
    legal: int
    fitting: int
    best_layout: str
    best_step_ns: int
    best_peak_bytes: int
    claims: tuple[Claim, ...]

    @property
    def holds(self) -> bool:
        """Whether every claim was confirmed."""
        return all(claim.holds for claim in self.claims)


def recheck(plan: Plan, watch: Watch | None = None, frontend: Frontend | None = None) -> Recheck:
    """Try every layout of the plan's question again; `frontend` is that of its request where it is a target of `emit`.

    Raises ImpossibleError UNSUPPORTED for more than 64 devices and for plans that rest on more than the kept rules and
    formulas, StaleError FACTS_DIFFER for a plan of other rules or facts, or of a question that has no answer any more.
    """
    _can_be_rechecked(plan)
    asked = _question(plan, frontend)
    rows, limits = [], limits_of(asked)
    refused: dict[str, int] = {}
    enumerated = 0
    rules, facts = legality(asked), question(asked.job)
    for row in every_layout(limits):
        enumerated += 1
        values = (
            dict(NOT_ASKED)
            | facts
            | row
            | {"dp": row["dp_replicate"] * row["dp_shard"], "recompute_deepest": deepest(row)}
        )
        first = next((rule.id for rule in rules if rule.holds(values)), None) or _unsaid(asked, row)
        if first is None:
            rows.append(row)
        else:
            refused[first] = refused.get(first, 0) + 1
    fitting = list(_fitting(asked.job, facts, rows, watch))
    if not fitting:
        raise _stale("no layout of its question fits any more")
    best = min(fitting, key=_key(plan))
    names = (*(rule.id for rule in rules), FRONTEND)
    counted = tuple(RuledOut(name, refused[name]) for name in names if name in refused)
    return Recheck(
        enumerated=enumerated,
        refused=counted,
        legal=len(rows),
        fitting=len(fitting),
        best_layout=best.layout,
        best_step_ns=best.step_ns,
        best_peak_bytes=best.peak_bytes,
        claims=(
            *_counts(plan, enumerated, counted, len(rows), len(fitting)),
            *_best_claims(plan, fitting, best),
            *(
                _uneven_claims(plan, asked, fitting)
                if plan.strategy.uneven_batch
                else [_scope_claim(plan, asked, fitting)]
            ),
        ),
    )


def _can_be_rechecked(plan: Plan) -> None:
    """Raise as `recheck` says."""
    from strategist.planner.book import book_digest

    said = dict(plan.request.given)
    words: tuple[str, ...] = tuple(flag for flag in ("--rules",) if flag in said)
    if plan.verification is not None:
        words = (*words, "--verify")
    if words:
        raise ImpossibleError(
            "UNSUPPORTED", f"A plan that was made with {words[0]} cannot be tried again from its file alone.",
            flag="--exhaustive", value=words[0], hint=f"Plan without {words[0]}.",
        )  # fmt: skip
    if plan.unfinished:
        raise ImpossibleError(
            "UNSUPPORTED", "The search of this plan ran out of time: it does not claim to be the best of anything.",
            flag="--exhaustive", value="--time-budget", hint="Plan without --time-budget.",
        )  # fmt: skip
    if plan.cluster.world > MAX_WORLD:
        raise ImpossibleError(
            "UNSUPPORTED", f"Every layout is tried alone, which is possible for up to {MAX_WORLD} devices.",
            flag="--exhaustive", value=plan.cluster.world, hint="Check a plan for fewer devices.",
        )  # fmt: skip
    if plan.book and plan.book != book_digest():
        raise _stale("it was made with other rules or facts")


def _stale(why: str) -> StaleError:
    return StaleError(
        "FACTS_DIFFER", f"The plan cannot be tried again: {why}.", flag="PLAN", hint="Plan again with this version."
    )


def _unsaid(asked: Question, row: Row) -> str | None:
    """The word for what the front end of the question cannot say; None for a layout that it can."""
    can = asked.frontend is None or not asked.frontend.obstacles(asked.job, one(**row), 0)
    return None if can else FRONTEND


def _question(plan: Plan, frontend: Frontend | None) -> Question:
    """The question that the plan answers."""
    asked = plan.request
    pins = parse_pins(",".join(f"{key}={word}" for key, word in asked.pins)) if asked.pins else ()
    job = job_of(plan)
    return Question(
        job=job if frontend is None else frontend.as_run(job),
        pins=pins,
        forbids=asked.forbids,
        also=asked.also,
        objective=asked.objective,
        frontend=frontend,
    )


def _fitting(job: Job, facts: dict[str, Any], rows: Sequence[Row], watch: Watch | None) -> Iterator[Tried]:
    """Every layout that fits, each weighed and timed alone."""
    for number, asked in enumerate(rows, 1):
        row = _numbered(job, asked)
        alone = one(**row)
        peaks = peak_memory(job, alone)
        if fits(job, alone, peaks.device, peaks.host)[0]:
            masks = family_masks(alone, facts)
            families = tuple(name for name, mask in masks.items() if mask[0])
            step_ns, asks = int(step_times(job, alone).step[0]), int(complexity(alone)[0])
            yield Tried(row, step_ns, int(peaks.device[0]), asks, families)
        if watch is not None:
            watch(number, len(rows))


def _numbered(job: Job, row: Row) -> Row:
    """A layout whose stages differ in how many layers run again, where nobody says in how many, with the numbers of the rule
    (planner/depth.py): of each stage the first with which it fits, or of all all of their layers where some stage fits with none."""
    if not row.get("recompute_depth") or any(name.startswith(OF_STAGE) for name in row):
        return row
    if WORDS["stage_split"][row["stage_split"]] == "balanced":
        from strategist.planner.exhaustive_balance import balanced_row  # few plans look at them

        return balanced_row(job, row)
    own = chunk_lengths(job.model, row["pp"], row["virtual_stages"], bool(row["stage_split"]))
    fit = [_fits_with(job, row, number) for number in range(max(own) + 1)]
    fewest = [next((number for number, stages in enumerate(fit) if stages[stage]), None) for stage in range(row["pp"])]
    numbers = own if None in fewest else fewest
    return row | {f"{OF_STAGE}{stage}": number or 0 for stage, number in enumerate(numbers)}


def _fits_with(job: Job, row: Row, number: int) -> list[bool]:
    """Which stages of a layout fit when all of them run so many layers of each chunk again."""
    again = {"recompute_layers": number} if number else {"recompute": code("recompute", "none")}
    held = device_bytes_CS(job, one(**row | {"recompute_depth": 0} | again), row["pp"])[0]
    return [bool(size + ROUNDED <= job.usable_bytes) for size in held]


def _key(plan: Plan) -> Callable[[Tried], tuple[int, ...]]:
    """What is better by the plan's objective: the smaller tuple."""
    keys: dict[str, Callable[[Tried], tuple[int, ...]]] = {
        "time": lambda t: (t.step_ns, t.complexity, t.peak_bytes),
        "cost": lambda t: (t.step_ns, t.complexity, t.peak_bytes),
        "memory": lambda t: (t.peak_bytes, t.step_ns, t.complexity),
        "simplicity": lambda t: (t.complexity, t.step_ns, t.peak_bytes),
    }
    return keys[plan.request.objective]


def _counts(plan: Plan, enumerated: int, refused: tuple[RuledOut, ...], legal: int, fitting: int) -> Iterator[Claim]:
    """The certificate's counts, where the plan has one."""
    account = plan.certificate
    if account is None:
        return
    for name, stated, found in (("enumerated", account.enumerated, enumerated), ("legal", account.legal, legal)):
        yield Claim(f"{stated:,} layouts are {name}; counted {found:,}", stated == found)
    evaluated, slower = account.evaluated, account.slower
    unknown = f", and of {slower:,} slower ones that were left out nobody said" if slower else ""
    yield Claim(
        f"{evaluated:,} layouts are fitting{unknown}; counted {fitting:,}", evaluated <= fitting <= evaluated + slower
    )
    yield Claim("each rule refuses as many as stated", account.refused == refused)


def _best_claims(plan: Plan, fitting: Sequence[Tried], best: Tried) -> Iterator[Claim]:
    """The best of the whole space, as the plan names it: in its certificate, or as the faster policy's answer."""
    account, key = plan.certificate, _key(plan)
    if account is not None:
        named = next((t for t in fitting if t.layout == account.best_layout), None)
        holds = named is not None and key(named) == key(best) and named.step_ns == account.best_step_ns
        yield Claim(f"nothing that fits is better than {account.best_layout}", holds)
        for own in account.bests:
            rivals = [t for t in fitting if own.family in t.families and (t.row["cp"] == 1 or not own.whole_sequences)]
            named = next((t for t in rivals if t.layout == own.layout), None)
            whole = " with cp = 1" if own.whole_sequences else ""
            yield Claim(
                f"nothing of {own.family}{whole} that fits is better than {own.layout}",
                named is not None and named.step_ns == own.step_ns and key(named) == min(map(key, rivals)),
            )


def _uneven_claims(plan: Plan, asked: Question, fitting: Sequence[Tried]) -> Iterator[Claim]:
    """An uneven batch is the best of all of them, and better than what the plan's policy would choose else."""
    from strategist.planner.exhaustive_uneven import uneven_claims  # few plans have one

    families, scope = _scope(plan, asked, fitting)
    even_ns = min(scope, key=_key(plan)).step_ns
    of_any_size = replace(asked, pins=tuple(pin for pin in asked.pins if pin.key != "micro_batch"))
    found = uneven_claims(plan, asked, every_layout(limits_of(of_any_size)), families, even_ns)
    yield from (Claim(sentence, holds) for sentence, holds in found)


def _scope_claim(plan: Plan, asked: Question, fitting: Sequence[Tried]) -> Claim:
    """The plan's own layout is the best of those that its policy chooses from."""
    families, scope = _scope(plan, asked, fitting)
    own = dict(NOT_ASKED) | {pin.key: pin.value for pin in pins_of(plan)}
    chosen = next((t for t in scope if t.row == {key: own.get(key) for key in t.row}), None)
    where = f" in the families {', '.join(families)}" if families else ""
    better = [t for t in scope if chosen is not None and _key(plan)(t) < _key(plan)(chosen)]
    if chosen is None:
        return Claim(f"the plan's layout is among the {len(scope):,} that it was chosen from{where}", False)
    same = chosen.step_ns == plan.time.step_ns and chosen.peak_bytes == plan.memory.worst.device
    if not same:
        return Claim("the plan's layout takes as long and as much as it says", False)
    if better:
        nearest = min(better, key=_key(plan)).layout
        return Claim(
            f"nothing that fits{where} is better than the plan's layout, but {len(better):,} are, such as {nearest}",
            False,
        )
    return Claim(f"nothing of the {len(scope):,} that fit{where} is better than the plan's layout", True)


def _scope(plan: Plan, asked: Question, fitting: Sequence[Tried]) -> tuple[tuple[str, ...], Sequence[Tried]]:
    """What the plan's policy chooses from: the first tier of families of which something fits without cp; where sequences are long
    or no tier has such a layout, the first of which something fits at all, and then cp alone counts where DDP does; everything where no
    rule names a family that fits, or time alone decides."""
    if plan.request.policy == "fastest":
        return (), fitting
    situation = describe(asked.job, "recompute" not in asked.forbids)
    tiers = [tuple(tier) for rule in fired(load_rules("hf_decisions"), situation) for tier in rule.families]
    for joins in (True,) if situation["long_sequence"] else (False, True):
        for tier in tiers:
            names = (*tier, "cp") if joins and "ddp" in tier else tier
            members = [t for t in fitting if (joins or t.row["cp"] == 1) and set(names) & set(t.families)]
            if members:
                return names, members
    return (), fitting
