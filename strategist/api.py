"""The public names. Each does one thing, returns data, prints nothing, and raises StrategistError with a stable code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from strategist.ask import Asked, Given, check_headroom, complete
from strategist.document.plan import Hint, Plan, Policy
from strategist.errors import ImpossibleError, InputError, did_you_mean
from strategist.executor.support import unsupported
from strategist.facts.profile import frontends
from strategist.facts.workload import MAX_BATCH, MAX_SEQ_LEN, OPTIMIZERS, PRECISIONS, Workload
from strategist.planner import recommend as planner
from strategist.planner.ladder import smallest_machines
from strategist.planner.search import SearchLog

if TYPE_CHECKING:
    from pathlib import PurePosixPath

    from strategist.emitters.emitter import Options
    from strategist.executor.session import Session
    from strategist.reports.tree import Tree

__all__ = ["build", "emit", "explain", "recommend"]


def recommend(
    model: Any,
    hardware: Any = None,
    *,
    workload: Workload | None = None,
    policy: Policy = "hf",
    top: int = 5,
    **workload_fields: Any,
) -> Plan:
    """The Plan for training `model` on `hardware`: the same Plan that `strategist plan` writes.

    model: a size ("7B"), a catalogue name, a path to a config.json, a ModelShape, or an nn.Module (meta device is
    enough). hardware: "dgx-h100:4", a file, a Cluster, "local", or None for this machine or, without GPUs, an assumed
    one. Further fields: seq_len, global_batch, micro_batch, grad_accum, tokens, precision, optimizer, headroom, pin,
    forbid, objective, frontend, price_per_gpu_hour, rules.

    Raises InputError for unknown or contradictory input, NoPlanError when nothing fits.
    """
    fields = _fields(workload, workload_fields)
    asked = complete(Given(model=model, hardware=hardware, policy=policy, **fields))
    return finished(plan_for(asked, top=top), asked)


def _fields(workload: Workload | None, given: Mapping[str, Any]) -> dict[str, Any]:
    known = (
        "seq_len",
        "global_batch",
        "micro_batch",
        "grad_accum",
        "tokens",
        "precision",
        "optimizer",
        "headroom",
        "pin",
        "forbid",
        "objective",
        "frontend",
        "price_per_gpu_hour",
        "rules",
    )
    for name in given:
        if name not in known:
            raise InputError(
                "UNKNOWN_KEY",
                f"recommend() has no argument {name!r}.",
                flag=name,
                value=given[name],
                hint=did_you_mean(name, known),
            )
    fields = dict(given)
    if workload is not None:
        whole = {
            name: getattr(workload, name) for name in ("seq_len", "global_batch", "precision", "optimizer", "tokens")
        }
        fields = whole | fields
    _check_fields(fields)
    return fields


def _check_fields(fields: Mapping[str, Any]) -> None:
    bounds = {"seq_len": MAX_SEQ_LEN, "global_batch": MAX_BATCH, "micro_batch": MAX_BATCH, "grad_accum": MAX_BATCH}
    for name, high in bounds.items():
        value = fields.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high):
            raise InputError(
                "RANGE",
                f"{name} must be a whole number from 1 to {high}.",
                flag=name,
                value=value,
                hint=f"Example: {name}=1024.",
            )
    for name, words in (
        ("precision", PRECISIONS),
        ("optimizer", OPTIMIZERS),
        ("objective", ("time", "cost", "memory", "simplicity")),
        ("frontend", frontends()),
    ):
        if fields.get(name) is not None and fields[name] not in words:
            raise InputError(
                "CHOICE",
                f"{name} must be one of {', '.join(words)}.",
                flag=name,
                value=fields[name],
                hint=did_you_mean(str(fields[name]), words),
            )
    if fields.get("headroom") is not None:
        check_headroom(fields["headroom"], "headroom")


def plan_for(asked: Asked, *, top: int = 5, log: SearchLog | None = None) -> Plan:
    """The Plan for a complete question, with what our own executor cannot run yet said beside it; not yet finished."""
    plan = planner.recommend(asked.question, asked.request, asked.assumptions, top=top, log=log)
    missing = unsupported(plan)
    if missing:
        note = f"`strategist run` cannot execute this plan yet. {' '.join(missing)} --frontend strategist keeps to what it can."
        plan = replace(plan, hints=(*plan.hints, Hint(code="W_NOT_EXECUTABLE", sentence=note)))
    if plan.hardware_is_assumed:
        plan = replace(plan, ladder=smallest_machines(asked.question, plan.time.step.value))
    return plan


def finished(plan: Plan, asked: Asked) -> Plan:
    """The plan with the digest of its rules and facts, and sealed. Apart because hashing costs what a glance need not."""
    from strategist.document.write import sealed
    from strategist.planner.book import book_digest

    return sealed(replace(plan, book=book_digest(asked.question.rule_folders)))


def explain(plan: Plan) -> Tree:
    """The Plan as a tree of terms; `strategist.reports.text` draws it."""
    from strategist.reports.tree import plan_tree

    return plan_tree(plan)


def emit(plan: Plan, target: str, options: Options | None = None) -> Mapping[PurePosixPath, str]:
    """Files for a launcher, as names and texts; nothing is written.

    Raises InputError CHOICE for an unknown target, ImpossibleError UNSUPPORTED when it cannot express the plan.
    """
    from strategist.emitters import find_emitter
    from strategist.emitters.emitter import Options as NoOptions

    emitter = find_emitter(target)
    missing = unsupported(plan) if emitter.engine == "strategist" else ()
    if missing:
        raise ImpossibleError(
            "UNSUPPORTED",
            f"{emitter.name} cannot express this plan: {' '.join(missing)}",
            flag="--to",
            value=target,
            hint="Plan again with --pin or --forbid, or choose another target.",
        )
    return emitter.write(plan, options or NoOptions())


def build(plan: Plan, model: Any, make_optimizer: Any) -> Session:
    """Live torch objects for a Plan: see `strategist.executor.build`. Needs the extra `run`."""
    from strategist.executor.build import build as build_session

    return build_session(plan, model, make_optimizer)
