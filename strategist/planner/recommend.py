"""The job, as one straight line: search, describe the situation, let the rules speak, rank, write the Plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strategist import __version__
from strategist.document.certificate import Certificate
from strategist.document.estimate import MemoryLedger, StageMemory
from strategist.document.front import Front
from strategist.document.plan import (
    Alternative,
    Decision,
    Hint,
    Plan,
    Policy,
    Quantity,
    Reason,
    Refusal,
    Request,
)
from strategist.errors import InputError, InternalError
from strategist.facts.adapters import as_trained
from strategist.facts.job import Job
from strategist.facts.parameters import count
from strategist.facts.profile import find_profile
from strategist.facts.resolved import Assumption
from strategist.facts.tables import served_elements
from strategist.planner.advice import tensor_parallel_links
from strategist.planner.check import faults
from strategist.planner.kinds import UNEVEN, is_mixed
from strategist.planner.search import FRONTEND, Found, Pace, Question, SearchLog, Use, legality, search
from strategist.planner.situation import describe, near_thresholds
from strategist.planner.weigh import shortfall
from strategist.planner.write import (
    economics,
    memory_ledger,
    mesh_of,
    near_job,
    near_the_limit,
    outside_known_errors,
    strategy_of,
    time_ledger,
)
from strategist.records import dataclass, replace
from strategist.rulebook.apply import family_masks, family_of, fired, forbid, placeholders, sentence
from strategist.rulebook.rule import Rule, load_families, load_rules
from strategist.rulebook.vocabulary import WORDS
from strategist.space.candidates import Candidates
from strategist.space.engines import own_job
from strategist.space.grammar import layout
from strategist.timing.estimate import step_times
from strategist.units import format_gib

if TYPE_CHECKING:
    from strategist.planner.uneven import Looked, Split

NO_PREFERRED = "No layout of the families that the rules prefer is both allowed and fits, so the time model decides among all that remain."


@dataclass(frozen=True, slots=True)
class Choice:
    """A winning row, its family, the rules that led to it, and the families that they named (none: all)."""

    row: int
    family: str
    reasons: tuple[Reason, ...]
    among: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Extras:
    """What a Plan says beyond the usual: the front of time, memory and cost; the account of the search; what would change
    the choice. With `idle` it may use a part of the machines; a `pace` says how long all of this may take."""

    front: bool = False
    certificate: bool = False
    sensitivity: bool = False
    idle: bool = False
    pace: Pace | None = None


def recommend(
    question: Question,
    request: Request,
    assumptions: Sequence[Assumption] = (),
    *,
    top: int = 5,
    log: SearchLog | None = None,
    extras: Extras | None = None,
) -> Plan:
    """The Plan for a question, unsealed.

    Raises NoPlanError when nothing is legal or nothing fits, with the chain of reasons and changes that were tried.
    """
    extras = extras or Extras()
    _can_be_answered(question, extras)
    whole, use = _used(question, request.policy, extras, log)
    looked = _uneven(whole, request.policy, extras) if len(question.job.cluster.groups) > 1 else None
    is_uneven = looked is not None and _wins(looked, whole, use.found, request.policy)
    found, idle = (whole, 0) if is_uneven else (use.found, use.idle)
    if not len(found.fitting):
        from strategist.planner.why_not import explain_failure  # only failures pay for it

        raise explain_failure(found, request)
    situation = describe(found.question.job, "recompute" not in question.forbids)
    by_rules, by_time = _by_rules(found, situation), _by_time(found)
    chosen, other = (by_rules, by_time) if request.policy == "hf" else (by_time, by_rules)
    account = _certificate(found, chosen, situation) if extras.certificate and not found.untried else None
    plan = _write(found, request, chosen, other, tuple(assumptions), situation, top)
    if is_uneven and looked is not None and looked.split is not None:
        plan = _with_uneven(plan, found, chosen, looked.split, situation, top)
    hints = (
        use.hints
        if extras.idle and not is_uneven
        else _fewer(found, chosen.row, request, extras.pace, looked, is_uneven)
    )
    plan = replace(plan, hints=(*plan.hints, *hints, *_no_kinds(question)), idle=idle, certificate=account)
    if found.question.frontend is not None:
        plan = replace(plan, unrestricted=_unrestricted(found, chosen.row, request.policy, extras.pace))
    if extras.front or extras.sensitivity or extras.pace is not None:
        plan = _with_extras(plan, found, request, extras)
    broken = faults(plan)
    if broken:
        raise InternalError(
            "INTERNAL",
            f"The plan breaks an invariant: {broken[0]}",
            hint="Please report this with the command you ran.",
        )
    return plan


def _can_be_answered(question: Question, extras: Extras) -> None:
    """Raise InputError CONFLICT for words that do not go together."""
    if UNEVEN not in question.also:
        return
    against = "--sensitivity" if extras.sensitivity else f"--objective {question.objective}"
    if extras.sensitivity or question.objective not in ("time", "cost"):
        raise InputError(
            "CONFLICT",
            f"--also {UNEVEN} is looked at behind the search, by time, and {against} is about the search's own layouts.",
            flag="--also",
            value=UNEVEN,
            hint="Leave one of them out.",
        )


def _used(question: Question, policy: Policy, extras: Extras, log: SearchLog | None) -> tuple[Found, Use]:
    """The search on all machines, and on those that are used where devices may stay idle."""
    bests = not extras.front  # the front may hold layouts that are the best of nothing
    found = search(question, log, pace=extras.pace, bests=bests)
    if not extras.idle:
        return found, Use(found)
    from strategist.planner.idle import best_use  # few allow it

    return found, best_use(found, policy, extras.pace, bests=bests)


def _uneven(whole: Found, policy: Policy, extras: Extras) -> Looked | None:
    """The best uneven batch over nodes of several kinds, where somebody asks for it or for how long other ways take; None where nobody does."""
    asked, pace = whole.question, extras.pace
    is_asked = UNEVEN in asked.also
    if not is_mixed(asked.job.cluster) or not len(whole.fitting) or (extras.idle and not is_asked):
        return None
    if asked.objective not in ("time", "cost") or any(pin.key == "accumulation" for pin in asked.pins):
        return None
    if pace is not None and pace.is_over:
        pace.left_out.append("an uneven batch")
        return None
    from strategist.planner.uneven import best_split  # few have machines of several kinds

    preferred = choice(whole, policy).among
    looked = best_split(asked, preferred)
    return looked if looked.split is not None or not preferred else replace(best_split(asked), is_preferred=False)


def _no_kinds(question: Question) -> tuple[Hint, ...]:
    """Why nobody looked at the uneven batch that was asked for."""
    if UNEVEN not in question.also or is_mixed(question.job.cluster):
        return ()
    alike = len(question.job.cluster.groups) == 1
    why = (
        "all nodes are of one kind" if alike else "nodes that are joined link by link are no clusters of one kind each"
    )
    return (Hint(code="W_UNEVEN", sentence=f"No uneven batch is possible: {why}."),)


def _wins(looked: Looked, whole: Found, used: Found, policy: Policy) -> bool:
    """Whether somebody asked for an uneven batch and it is sooner (objective cost: cheaper) than what the policy takes."""
    if looked.split is None or looked.split.is_even or not looked.is_preferred or UNEVEN not in whole.question.also:
        return False
    by_cost, row = whole.question.objective == "cost", choice(used, policy).row
    ours, theirs = (found.question.job.cluster.world if by_cost else 1 for found in (whole, used))
    return looked.split.step_ns * ours < int(used.times.step[row]) * theirs


def _with_uneven(
    plan: Plan, found: Found, chosen: Choice, split: Split, situation: Mapping[str, Any], top: int
) -> Plan:
    """The plan with an uneven batch in place of what would be chosen else, which becomes the first alternative."""
    job, row = own_job(found.question.job, split.candidate), split.candidate.row(0)
    time = time_ledger(job, split.times, 0)
    memory = memory_ledger(*split.tightest)
    families = family_masks(split.candidate, describe_for_rules(job))
    own = replace(found, candidates=split.candidate, times=split.times, families=families)
    family = family_of(families, 0)
    even = _fitting_alternative(found, chosen.family, chosen.row, time.step.value)
    others = (_compared(each, time.step.value) for each in _alternatives(found, chosen, top))
    return replace(
        plan,
        mesh=mesh_of(row),
        strategy=replace(strategy_of(job, row), uneven_batch=split.shares),
        memory=memory,
        time=time,
        economics=economics(job, plan.request, time.step.value),
        decision=replace(plan.decision, family=family, difference=plan.decision.other_step_s / time.step.value),
        alternatives=(even, *others),
        hints=_hints(own, row, situation, Choice(0, family, ()), memory),
    )


def _with_extras(plan: Plan, found: Found, request: Request, extras: Extras) -> Plan:
    """The plan with what else was asked for, as far as there is time, and with what there was none for."""
    pace = extras.pace
    if extras.front and pace is not None and pace.is_over:
        pace.left_out.append("the front of time, memory and cost")
    elif extras.front:
        plan = replace(plan, front=_front(found, request))
    if extras.sensitivity:
        from strategist.planner.sensitivity import sensitivity  # few ask for it, and it searches a hundred times

        plan = replace(plan, sensitivity=sensitivity(found.question, request.policy, pace))
    return plan if pace is None else _unfinished(plan, found, pace)


def _unfinished(plan: Plan, found: Found, pace: Pace) -> Plan:
    """The plan with what there was no time for; nobody may take it for the best."""
    layouts = f"{found.untried:,} of {found.untried + len(found.legal):,} layouts that no rule forbids"
    left = (*((layouts,) if found.untried else ()), *pace.left_out)
    if not left:
        return plan
    were = "was" if len(left) == 1 else "were"
    sentence = f"The time budget of {pace.seconds:g} s ran out: {', '.join(left)} {were} left untried. This is the best that was found until then; a better plan may exist."
    return replace(plan, unfinished=left, hints=(*plan.hints, Hint(code="W_TIME_BUDGET", sentence=sentence)))


def _unrestricted(found: Found, row: int, policy: Policy, pace: Pace | None) -> Alternative | None:
    """What the policy takes on the same machines, on our own executor, where no front end has to say it, and why this one cannot."""
    if pace is not None and pace.is_over:
        pace.left_out.append("what is faster without --frontend")
        return None
    free = search(without_frontend(found.question), pace=pace, bests=True)
    if not len(free.fitting):
        return None  # the time that was left was too short
    best = choice(free, policy)
    rival = _fitting_alternative(free, best.family, best.row, found.step_seconds(row))
    if found.question.job.profile != free.question.job.profile:
        rival = replace(rival, sentence=f"{rival.sentence} on {free.question.job.profile.title}")
    if rival.layout == layout(found.candidates.row(row)):
        compared = rival.sentence.removeprefix("fits, ")
        same = rival.step_s == found.step_seconds(row)
        return replace(rival, sentence="the same layout" if same else f"the same layout, {compared}")
    why = " ".join(why_unsaid(found.question, free.candidates, best.row))
    return replace(rival, sentence=f"{rival.sentence}, and cannot be said: {why}" if why else rival.sentence)


def without_frontend(asked: Question) -> Question:
    """The question for any framework."""
    job = replace(asked.job, frontend="any", profile=find_profile(), by_layout=None)
    return replace(asked, frontend=None, job=job if job.model.adapters is None else as_trained(job))


def why_unsaid(asked: Question, candidates: Candidates, row: int) -> Iterator[str]:
    """Sentences about what keeps a layout from the front end of a question: rules about what runs it, and what it cannot say."""
    alone, facts = candidates.where(np.array([row])), describe_for_rules(asked.job)
    _, refused = forbid(legality(asked), facts, alone)
    example = alone.row(0)
    dp = int(example["dp_replicate"]) * int(example["dp_shard"])
    yield from (sentence(each.rule.because, facts | example | {"dp": dp}) for each in refused)
    if asked.frontend is not None:
        yield from asked.frontend.obstacles(asked.job, alone, 0)


def choice(found: Found, policy: Policy) -> Choice:
    """What a policy takes of what fits. Raises InternalError when nothing does."""
    if policy == "fastest":
        return _by_time(found)
    return _by_rules(found, describe(found.question.job, "recompute" not in found.question.forbids))


def _by_rules(found: Found, situation: Mapping[str, Any]) -> Choice:
    """The decision table names tiers of families; the best of the first tier that fits wins. The tables do not speak of cp: where
    sequences are not long it joins only after every tier was asked without it."""
    rules = fired(load_rules("hf_decisions", found.question.rule_folders), situation)
    reasons = tuple(_reason(rule, situation) for rule in rules)
    tiers = [tuple(tier) for rule in rules for tier in rule.families]
    whole, everything = found.candidates["cp"] == 1, np.ones(len(found.candidates), np.bool_)
    without = () if situation["long_sequence"] else ((whole, names) for names in tiers)
    for scope, names in (*without, *((everything, _with_cp(names)) for names in tiers)):
        row = found.best_of(scope & np.any([found.families[name] for name in names], axis=0))
        if row is not None:
            return Choice(row, _family(found, row, names), reasons, names)
    silent = Reason(rule="gap", kind="gap", sentence=NO_PREFERRED, source="ours")
    by_time = _by_time(found)
    return Choice(by_time.row, by_time.family, (*reasons, silent))


def _with_cp(tier: tuple[str, ...]) -> tuple[str, ...]:
    """A tier that cp may join. A single replica whose sequences are cut is no DDP, but stands beside it: it is whole on every device too."""
    return (*tier, "cp") if "ddp" in tier and "cp" not in tier else tier


def _certificate(found: Found, chosen: Choice, situation: Mapping[str, Any]) -> Certificate:
    from strategist.planner.certify import certificate  # few ask for it

    is_whole = bool(chosen.among) and not situation["long_sequence"] and found.candidates["cp"][chosen.row] == 1
    return certificate(found, chosen.among, bool(is_whole))


def _front(found: Found, request: Request) -> Front:
    from strategist.planner.front import front  # few ask for it

    return front(found, request)


def _by_time(found: Found) -> Choice:
    row = found.best_of()
    if row is None:
        raise InternalError("INTERNAL", "A search without fitting candidates was ranked.", hint="Please report this.")
    reason = Reason(
        rule="model",
        kind="model",
        sentence=f"The time model ranks every layout that {'was tried and ' if found.untried else ''}fits.",
        source="strategist time model",
    )
    return Choice(row, _family(found, row), (reason,))


def _family(found: Found, row: int, preferred: Sequence[str] = ()) -> str:
    """The family's name for people: the preferred one the row belongs to, else the most special one."""
    named = next((name for name in preferred if found.families[name][row]), None)
    return named or family_of(found.families, row)


def _reason(rule: Rule, situation: Mapping[str, Any]) -> Reason:
    """A fired rule with its numbers filled in."""
    words = dict.fromkeys((*rule.words, *placeholders(rule.because)))
    return Reason(
        rule=rule.id,
        kind="gap" if rule.gap else "decision",
        sentence=sentence(rule.because, situation),
        source=rule.source,
        quantities=tuple(Quantity(name=word, value=float(situation[word]), unit=WORDS[word].unit) for word in words),
    )


def _write(
    found: Found,
    request: Request,
    chosen: Choice,
    other: Choice,
    assumptions: tuple[Assumption, ...],
    situation: Mapping[str, Any],
    top: int,
) -> Plan:
    candidate = found.candidates.where(np.array([chosen.row]))
    job, row = own_job(found.question.job, candidate), candidate.row(0)
    time = time_ledger(job, found.times, chosen.row)
    memory = memory_ledger(job, candidate)
    reasons = chosen.reasons if request.policy == "hf" else (*chosen.reasons, *other.reasons)
    return Plan(
        made_by=f"strategist {__version__}",
        request=request,
        cluster=job.cluster,
        model=job.model,
        workload=job.workload,
        assumptions=assumptions,
        mesh=mesh_of(row),
        strategy=strategy_of(job, row),
        memory=memory,
        time=time,
        economics=economics(job, request, time.step.value),
        decision=_decision(found, request, chosen, other),
        reasons=reasons,
        refusals=_refusals(found),
        alternatives=_alternatives(found, chosen, top),
        hints=_hints(found, row, situation, chosen, memory),
        factors=job.factors_that_apply,
        near=near_job(job),
    )


def _decision(found: Found, request: Request, chosen: Choice, other: Choice) -> Decision:
    rival: Policy = "fastest" if request.policy == "hf" else "hf"
    return Decision(
        policy=request.policy,
        objective=request.objective,
        family=chosen.family,
        other_policy=rival,
        other_family=other.family,
        other_layout=layout(found.candidates.row(other.row)),
        other_step_s=found.step_seconds(other.row),
        difference=found.step_seconds(other.row) / found.step_seconds(chosen.row),
    )


def _refusals(found: Found) -> tuple[Refusal, ...]:
    """Candidates dropped by each rule and by memory, with one example each."""
    situation = describe_for_rules(found.question.job)
    by_rule = []
    for refused in found.refused:
        example = found.enumerated_candidates.row(refused.example)
        data_parallel = int(example["dp_replicate"]) * int(example["dp_shard"])
        text = sentence(refused.rule.because, situation | example | {"dp": data_parallel})
        by_rule.append(Refusal(rule=refused.rule.id, count=refused.count, sentence=text, example=layout(example)))
    return (*by_rule, *_frontend_refusal(found), *_memory_refusal(found))


def describe_for_rules(job: Job) -> dict[str, Any]:
    """The question's words, for sentences about refused candidates."""
    from strategist.planner.situation import question

    return question(job)


def _frontend_refusal(found: Found) -> tuple[Refusal, ...]:
    """What rules allow and the front end cannot say."""
    frontend, unsaid = found.question.frontend, found.unsaid
    if frontend is None or unsaid is None:
        return ()
    why = " ".join(frontend.obstacles(found.question.job, found.enumerated_candidates, unsaid.example))
    example = layout(found.enumerated_candidates.row(unsaid.example))
    return (Refusal(rule=FRONTEND, count=unsaid.layouts, sentence=why, example=example),)


def _memory_refusal(found: Found) -> tuple[Refusal, ...]:
    dropped = np.flatnonzero(found.misfits)
    if not len(dropped):
        return ()
    (nearest,) = found.weights.leanest(dropped)
    job, size = found.question.job, int(found.weights.device[nearest])
    words = shortfall(job, size, int(found.weights.host[nearest]))
    text = f"{format_gib(size)} of {format_gib(job.usable_bytes)} usable: {words}."
    return (Refusal(rule="memory", count=len(dropped), sentence=text, example=layout(found.legal.row(nearest))),)


def _alternatives(found: Found, chosen: Choice, top: int) -> tuple[Alternative, ...]:
    """The best layout of every other family, fastest first; families that do not fit come last, by what they miss."""
    masks = {family.name: found.families[family.name] for family in load_families()}
    reference = found.step_seconds(chosen.row)
    fitting = []
    for name, mask in masks.items():
        row = found.best_of(mask)
        if row is not None and row != chosen.row and name == family_of(masks, row):
            fitting.append(_fitting_alternative(found, name, row, reference))
    fitting.sort(key=lambda a: (a.step_s or 0.0, a.layout))
    return (*fitting[:top], *_misfits(found, top))


def _fitting_alternative(found: Found, family: str, row: int, reference: float) -> Alternative:
    alternative = Alternative(
        family=family,
        layout=layout(found.candidates.row(row)),
        fits=True,
        step_s=found.step_seconds(row),
        peak_bytes=int(found.device_bytes[row]),
        relative_time=None,
        sentence="",
    )
    return _compared(alternative, reference)


def _compared(alternative: Alternative, reference: float) -> Alternative:
    """An alternative with its step beside one of `reference` seconds; one that does not fit as it is."""
    if alternative.step_s is None:
        return alternative
    ratio = alternative.step_s / reference
    words = "as fast" if abs(ratio - 1) < 0.005 else f"{ratio:.2f}x slower" if ratio > 1 else f"{1 / ratio:.2f}x faster"
    return replace(alternative, relative_time=ratio, sentence=f"fits, {words}")


def _misfits(found: Found, top: int) -> tuple[Alternative, ...]:
    """Families with legal layouts of which none fits, nearest miss first."""
    masks = found.legal_families
    fits = ~found.misfits
    without = [name for name, mask in masks.items() if mask.any() and not (mask & fits).any()]
    missed = []
    for name, row in zip(
        without, found.weights.leanest(*(np.flatnonzero(masks[name]) for name in without)), strict=True
    ):
        size = int(found.weights.device[row])
        words = shortfall(found.question.job, size, int(found.weights.host[row]))
        missed.append(
            Alternative(
                family=name,
                layout=layout(found.legal.row(row)),
                fits=False,
                step_s=None,
                peak_bytes=size,
                relative_time=None,
                sentence=f"does not fit: {words}",
            )
        )
    missed.sort(key=lambda a: (a.peak_bytes, a.family))
    return tuple(missed[:top])


def _hints(
    found: Found, row: Mapping[str, Any], situation: Mapping[str, Any], chosen: Choice, memory: MemoryLedger
) -> tuple[Hint, ...]:
    """Advice rules that fire for the chosen layout, whose stages hold so much, thresholds that are near, and what lies within known errors."""
    shares = _shares(found, chosen.row) | _rivals(found, chosen.row) | _table_share(found) | _logits_share(memory.worst)
    placed = tensor_parallel_links(found, chosen.row)
    values = {UNEVEN: 0, "loss": 0} | dict(situation) | _coded(found, chosen.row) | shares | placed
    advice = tuple(
        Hint(code=f"W_{rule.code or rule.id}", sentence=_advice(rule, values | dict(row)))
        for rule in fired(load_rules("advice", found.question.rule_folders), values)
    )
    near = tuple(
        Hint(
            code="W_NEAR_THRESHOLD",
            sentence=f"The {WORDS[name].meaning} ({situation[name]:.3g} {WORDS[name].unit}) lies within a factor of two "
            "of the threshold; a measured value could change the rule that decides.",
        )
        for name in near_thresholds(situation)
    )
    job = found.question.job
    return (*advice, *near, *near_the_limit(job, memory, fits=True), *outside_known_errors(job))


def _fewer(
    found: Found, row: int, request: Request, pace: Pace | None, looked: Looked | None, is_uneven: bool
) -> tuple[Hint, ...]:
    """Smaller clusters that are faster; of several kinds of nodes each alone, and an uneven batch."""
    if found.question.job.cluster.world == 1:
        return ()
    if pace is not None and pace.is_over:
        pace.left_out.append("whether fewer machines are faster")
        return ()
    from strategist.planner.fewer import best_kind_alone, smaller_cluster_hint, uneven_hint  # one device has no parts

    if is_uneven and looked is not None:
        return (uneven_hint(found, row, best_kind_alone(found, request.policy), looked, taken=True),)
    return smaller_cluster_hint(found, row, request, looked)


def _advice(rule: Rule, values: Mapping[str, Any]) -> str:
    return " ".join(part for part in (sentence(rule.because, values), sentence(rule.hint, values)) if part)


def _shares(found: Found, row: int) -> dict[str, float]:
    """Percent of the step that some terms take, and the data-parallel degree, for the sentences of advice."""
    step = float(found.times.step[row])
    names = ("tp", "dp", "bubble", "offload")
    shares = {f"{name}_share": 100.0 * float(found.times.exposed[name][row]) / step for name in names}
    ddp = _ddp_share(found, row) if found.candidates.in_threads else {}
    return shares | ddp | {"dp": int(found.candidates.data_parallel[row])}


def _rivals(found: Found, row: int) -> dict[str, float]:
    """What the best layouts take that advice would send people to, over what a layout takes; 0 where none of them fits."""
    cp, ddp = (found.best_of(mask) for mask in (found.candidates["cp"] > 1, found.families["ddp"]))
    step = found.times.step / found.times.step[row]
    ratios = {
        name: 0.0 if rival is None else float(step[rival]) for name, rival in (("cp_ratio", cp), ("ddp_ratio", ddp))
    }
    return ratios | {"other_cp": 1 if cp is None else int(found.candidates["cp"][cp])}


def _logits_share(fullest: StageMemory) -> dict[str, float]:
    """Percent of the fullest stage's memory at its peak that logits take."""
    return {"logits_share": 100.0 * fullest.term("logits") / fullest.device}


def _table_share(found: Found) -> dict[str, float]:
    """Percent of the weights that lie in tables of embeddings on every replica, of a module that nobody described."""
    shape = found.question.job.model
    if shape.kind != "module" or found.candidates.serves_tables:
        return {}
    return {"table_share": 100.0 * served_elements(shape).total / count(shape).total}


def _ddp_share(found: Found, row: int) -> dict[str, float]:
    """Percent of the step that processes would take for threads in the same layout."""
    as_processes = found.candidates.where(np.array([row])).without("replicas")
    return {"ddp_share": 100.0 * float(step_times(found.question.job, as_processes).step[0] / found.times.step[row])}


def _coded(found: Found, row: int) -> dict[str, int]:
    return {name: int(column[row]) for name, column in found.candidates.columns.items()}
