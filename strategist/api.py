"""The public names. Each does one thing, returns data, prints nothing, and raises StrategistError with a stable code."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any

from strategist.ask import Asked, Given, complete
from strategist.document.plan import Hint, Plan, Policy
from strategist.errors import ImpossibleError, require_function, require_type, wrong_type
from strategist.executor.support import obstacles, script_obstacles, way_out
from strategist.facts.profile import engine_of
from strategist.facts.workload import Workload
from strategist.fields import CHOICE, WORKLOAD, checked_fields, checked_policy, checked_top, yes_or_no
from strategist.planner import recommend as planner
from strategist.planner.check import require_sound
from strategist.planner.ladder import smallest_machines
from strategist.planner.search import Pace, SearchLog
from strategist.records import replace

if TYPE_CHECKING:
    from pathlib import PurePosixPath

    from strategist.document.observed import Observed, RankObservation
    from strategist.document.prediction import Prediction
    from strategist.emitters.emitter import Options
    from strategist.executor.loss import LossFn
    from strategist.executor.optimizers import MakeOptimizer
    from strategist.executor.session import RateOfStep, Session
    from strategist.planner.recommend import Extras
    from strategist.reports.tree import Tree
    from strategist.verify import Watch

__all__ = ["build", "emit", "explain", "predict", "recommend", "rehearse", "trace"]


def recommend(  # noqa: PLR0913 - each is a word of the public surface
    model: Any,
    hardware: Any = None,
    *,
    workload: Workload | None = None,
    policy: Policy = "hf",
    top: int = 5,
    verify: bool = False,
    pareto: bool = False,
    certificate: bool = False,
    sensitivity: bool = False,
    allow_idle: bool = False,
    **workload_fields: Any,
) -> Plan:
    """The Plan for training `model` on `hardware`: the same Plan that `strategist plan` writes.

    model: a size ("7B"), a catalogue name, a path to a config.json, a ModelShape, or an nn.Module (meta device is
    enough). hardware: "dgx-h100:4", a file, a Cluster, "local", or None for this machine or, without GPUs, an assumed
    one. Further fields: seq_len, target_len, global_batch, micro_batch, grad_accum, tokens, precision, optimizer, expert_imbalance, headroom,
    pin, forbid, also, objective, frontend, purpose (with frontend="auto"), price_per_gpu_hour, rules, calibration, uncalibrated, time_budget (seconds). `verify` traces the chosen layout and the next,
    puts traced bytes into the Plan, and takes a layout that is traced to fit; it needs the extra `run`. `pareto`
    adds the front of time, memory and cost, `certificate` the account of the search,
    `sensitivity` which assumption, changed by how much, would change the choice. With `allow_idle` the plan may use a part of
    the machines. A plan that a time budget cut short says so in `unfinished`.

    Raises InputError for unknown or contradictory input, NoPlanError when nothing fits.
    """
    for name, switch in (("verify", verify), ("pareto", pareto), ("certificate", certificate), ("sensitivity", sensitivity), ("allow_idle", allow_idle)):  # fmt: skip
        yes_or_no(name, switch)
    fields = checked_fields(workload, workload_fields)
    who, count = checked_policy(policy), checked_top(top)
    said = _said({"model": model, "hardware": hardware, "policy": who, "top": count} | fields)
    asked = complete(Given(model=model, hardware=hardware, policy=who, said=said, **fields))
    pace = None if asked.time_budget is None else Pace(asked.time_budget)
    extras = planner.Extras(pareto, certificate, sensitivity, allow_idle, pace)
    planned = verified_plan_for if verify else plan_for
    plan = planned(asked, top=count, extras=extras)
    return finished(plan, asked)


def predict(
    model: Any,
    hardware: Any = None,
    *,
    strategy: str,
    framework: str = "strategist",
    workload: Workload | None = None,
    **workload_fields: Any,
) -> Prediction:
    """What one given layout costs, whether a rule forbids it and whether it fits: the answer of `strategist predict`.

    strategy: "dp=8,tp=2,pp=4,vp=2,mbs=1,zero=1,recompute=selective"; what it leaves open is plain, dp fills the machines
    and accumulation the batch. framework: the profile whose kernels and formats count. Model, hardware and further
    fields as for `recommend`. An illegal or too large layout is an answer, not an error.

    Raises InputError for unknown or contradictory input, ImpossibleError for degrees that do not fit the machines.
    """
    require_type(str, "strategy", strategy, "a text", 'strategy="dp=8,tp=2,zero=1"')
    require_type(str, "framework", framework, "a text", 'framework="strategist"')
    fields = checked_fields(workload, workload_fields, "predict")
    asked = complete(Given(model=model, hardware=hardware, strategy=strategy, framework=framework, **fields))
    return predicted(asked)


def _require_plan(plan: object) -> None:
    """Raise InputError TYPE for what is no Plan, such as the name of its file."""
    require_type(Plan, "plan", plan, "a Plan", 'plan=load_plan("plan.json")')


def predicted(asked: Asked) -> Prediction:
    """The prediction for a complete question whose pins are the layout."""
    from strategist.planner.predict import predict as predict_layout

    question = asked.question
    return predict_layout(
        question.job, question.pins, asked.assumptions, asked.notes, question.rule_folders, question.frontend
    )


def _said(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The question in the words and the order of the command line; what is as usual was not said."""
    usual = {"policy": "hf", "top": 5}
    named = ((name, values.get(name)) for name in ("model", "hardware", *WORKLOAD, "policy", *CHOICE, "top"))
    told = ((name, value) for name, value in named if value not in (None, (), False) and value != usual.get(name))
    return tuple((f"--{name.replace('_', '-')}", _word(value)) for name, value in told)


def _word(value: Any) -> str:
    """A value as somebody would type it; live objects by the name of their type."""
    if value is True:
        return "yes"
    if isinstance(value, (str, int, float, os.PathLike)):
        return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    return ", ".join(value) if isinstance(value, tuple) else type(value).__name__


def plan_for(asked: Asked, *, top: int = 5, log: SearchLog | None = None, extras: Extras | None = None) -> Plan:
    """The Plan for a complete question, with what our own executor cannot run yet said beside it; not yet finished."""
    plan = planner.recommend(asked.question, asked.request, asked.assumptions, top=top, log=log, extras=extras)
    needs_another = _not_executable(plan)
    plan = replace(plan, hints=(*plan.hints, *_unlooked(asked, extras), *asked.notes, *needs_another))
    if purpose := asked.request.purpose or ("unsure" if needs_another else None):
        from strategist.frontend import chosen_frontend  # every target's module: few questions ask for one

        plan = replace(plan, frontend=chosen_frontend(plan, purpose, asked.question.rule_folders))
    if plan.hardware_is_assumed:
        plan = replace(plan, ladder=smallest_machines(asked.question, plan.time.step.value))
    return plan


def verified_plan_for(
    asked: Asked,
    *,
    top: int = 5,
    log: SearchLog | None = None,
    extras: Extras | None = None,
    watch: Watch | None = None,
) -> Plan:
    """The Plan for a complete question, traced to fit; not yet finished. Raises what `strategist.verify.verified` raises."""
    from strategist.verify import verified

    return verified(asked, lambda question: plan_for(question, top=top, log=log, extras=extras), watch)


def _unlooked(asked: Asked, extras: Extras | None) -> tuple[Hint, ...]:
    """Which parts of machines that may stay idle were not looked at."""
    if extras is None or not extras.idle:
        return ()
    from strategist.planner.fewer import unlooked  # few allow it

    return unlooked(asked.question.job.cluster)


def _not_executable(plan: Plan) -> tuple[Hint, ...]:
    """What our own executor cannot run yet, and what to change; nothing of a plan that is for another."""
    missing = obstacles(plan) if engine_of(plan.request.frontend) in ("any", "strategist") else ()
    words = ["`strategist run` cannot execute this plan yet.", *(obstacle.sentence for obstacle in missing)]
    return (Hint(code="W_NOT_EXECUTABLE", sentence=" ".join([*words, way_out(missing)])),) if missing else ()


def finished(plan: Plan, asked: Asked) -> Plan:
    """The plan with the digest of its rules and facts, and sealed. Apart because hashing costs what a glance need not."""
    from strategist.document.write import sealed
    from strategist.planner.book import book_digest

    return sealed(replace(plan, book=book_digest(asked.question.rule_folders)))


def explain(plan: Plan, *observed: Observed) -> Tree:
    """The Plan as a tree of terms, beside what other rungs saw of it; `strategist.reports.text` draws it.

    Raises StaleError DIGEST for an observation of another plan.
    """
    from strategist.document.observed import Observed
    from strategist.reports.tree import plan_tree

    _require_plan(plan)
    for seen in observed:
        require_type(Observed, "observed", seen, "an Observed", 'load_observed("trace.json")')
    return plan_tree(plan, observed)


def trace(
    plan: Plan,
    model: Any = None,
    *,
    ranks: str = "first,middle,last",
    on_rank: Callable[[RankObservation], None] | None = None,
) -> Observed:
    """Bytes, collectives and FLOP of the program that `plan` would train, at its true world size, without its machines.

    `model` replaces the built-in one: a module on the meta device, or a function that makes one. See
    `strategist.measure.trace`. Needs the extra `run`.
    """
    _require_program(plan, ranks, on_rank)
    from strategist.measure.trace import trace as trace_plan

    return trace_plan(plan, model, ranks=ranks, on_rank=on_rank)


def rehearse(
    plan: Plan,
    model: Any = None,
    *,
    ranks: str = "first,middle,last",
    steps: int = 5,
    device: str | None = None,
    on_rank: Callable[[RankObservation], None] | None = None,
) -> Observed:
    """Seconds by term and measured bytes of the program that `plan` would train, on one real device without its peers.

    `model` replaces the built-in one: a module, or a function that makes one. See `strategist.measure.rehearse`. Needs
    the extra `run`.
    """
    _require_program(plan, ranks, on_rank)
    if isinstance(steps, bool) or not isinstance(steps, Integral):
        raise wrong_type("steps", steps, "a whole number", "steps=5")
    if device is not None:
        require_type(str, "device", device, "a text", 'device="cpu"')
    from strategist.measure.rehearse import rehearse as rehearse_plan

    return rehearse_plan(plan, model, ranks=ranks, steps=int(steps), device=device, on_rank=on_rank)


def _require_program(plan: object, ranks: object, on_rank: object) -> None:
    """Raise InputError TYPE for words of `trace` and `rehearse` that are none."""
    _require_plan(plan)
    require_type(str, "ranks", ranks, "a text", 'ranks="first,last"')
    require_function("on_rank", on_rank, "print")


def emit(plan: Plan, target: str | None = None, options: Options | None = None) -> Mapping[PurePosixPath, str]:
    """Files for a launcher, as names and texts; nothing is written. Without a target those of the front end that the plan is for, or that
    the rules choose for it (rules/frontends.toml). options: what `strategist emit` has flags for, `strategist.emitters.emitter.Options(job_name=...)`.

    Raises InputError CHOICE for an unknown target and NAME, HOSTNAME, RANGE, CONTROL_CHAR for options, ImpossibleError
    FRAMEWORK_LEGALITY for a plan that is not sound and UNSUPPORTED when the target cannot express it.
    """
    from strategist.emitters import emit as emit_files
    from strategist.emitters import find_emitter
    from strategist.emitters.emitter import Options

    _require_plan(plan)
    if options is not None:
        require_type(Options, "options", options, "strategist.emitters.emitter.Options", 'Options(job_name="llama-8b")')
    if target is not None:
        require_type(str, "target", target, "a text", 'target="torchrun"')
    if target is None:
        from strategist.frontend import target_of

        target, _ = target_of(plan)
    emitter = find_emitter(target)
    require_sound(plan)
    missing = script_obstacles(plan) if emitter.engine == "strategist" else ()
    if missing:
        raise ImpossibleError(
            "UNSUPPORTED",
            f"{emitter.name} cannot express this plan: {' '.join(obstacle.sentence for obstacle in missing)}",
            flag="--to",
            value=target,
            hint=f"{way_out(missing)} Or choose another target.",
        )
    return emit_files(plan, target, options)


def build(
    plan: Plan,
    model: Any,
    make_optimizer: MakeOptimizer | None = None,
    *,
    loss_fn: LossFn | None = None,
    clip_norm: float | None = None,
    rate_of_step: RateOfStep | None = None,
    seed: int = 0,
) -> Session:
    """Live torch objects for a Plan: this rank's part of `model`, its optimizer and its schedule. Needs the extra `run`; every rank calls it.

    model: an nn.Module, also on the meta device. make_optimizer: a function of parameter groups that gives a torch optimizer; without it the
    plan's. loss_fn: `loss_fn(outputs, batch)` gives the mean loss of one micro-batch; without it the model gives logits and learns
    `labels`. clip_norm: the norm that gradients are limited to; without it they are not. rate_of_step: `rate_of_step(step)`, counted from 0,
    is what learning rates are multiplied by in a step. seed: of the initial weights of a model without values.

    Raises ImpossibleError for what the executor cannot run, before anything starts, and StaleError for another number of ranks than the
    plan's.
    """
    from strategist.executor.build import build as build_session

    return build_session(
        plan, model, make_optimizer, loss_fn=loss_fn, clip_norm=clip_norm, rate_of_step=rate_of_step, seed=seed
    )
