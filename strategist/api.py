"""The public names. Each does one thing, returns data, prints nothing, and raises StrategistError with a stable code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from strategist.ask import Asked, Given, check_headroom, complete
from strategist.document.plan import Hint, Plan, Policy
from strategist.errors import ImpossibleError, InputError, did_you_mean
from strategist.executor.support import unsupported
from strategist.facts.workload import MAX_BATCH, MAX_SEQ_LEN, OPTIMIZERS, PRECISIONS, Workload
from strategist.planner import recommend as planner
from strategist.planner.check import require_sound
from strategist.planner.ladder import smallest_machines
from strategist.planner.search import SearchLog

if TYPE_CHECKING:
    from pathlib import PurePosixPath

    from strategist.emitters.emitter import Options
    from strategist.executor.session import Session
    from strategist.reports.tree import Tree

__all__ = ["build", "emit", "explain", "recommend"]

WORKLOAD = (
    "seq_len", "global_batch", "micro_batch", "grad_accum", "tokens", "precision", "optimizer", "headroom",
    "price_per_gpu_hour",
)  # fmt: skip
CHOICE = ("objective", "pin", "forbid", "rules")
FIELDS = (*WORKLOAD, *CHOICE)
"""Further arguments of `recommend`, in the order of the command line's help."""


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
    forbid, objective, price_per_gpu_hour, rules.

    Raises InputError for unknown or contradictory input, NoPlanError when nothing fits.
    """
    fields = _fields(workload, workload_fields)
    said = _said({"model": model, "hardware": hardware, "policy": policy, "top": top} | fields)
    asked = complete(Given(model=model, hardware=hardware, policy=policy, said=said, **fields))
    return finished(plan_for(asked, top=top), asked)


def _fields(workload: Workload | None, given: Mapping[str, Any]) -> dict[str, Any]:
    for name in given:
        if name not in FIELDS:
            raise InputError(
                "UNKNOWN_KEY",
                f"recommend() has no argument {name!r}.",
                flag=name,
                value=given[name],
                hint=did_you_mean(name, FIELDS),
            )
    fields = dict(given)
    if workload is not None:
        whole = {
            name: getattr(workload, name) for name in ("seq_len", "global_batch", "precision", "optimizer", "tokens")
        }
        fields = whole | fields
    _check_fields(fields)
    return fields


def _said(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The question in the words and the order of the command line; what is as usual was not said."""
    usual = {"policy": "hf", "top": 5}
    named = ((name, values.get(name)) for name in ("model", "hardware", *WORKLOAD, "policy", *CHOICE, "top"))
    told = ((name, value) for name, value in named if value not in (None, ()) and value != usual.get(name))
    return tuple((f"--{name.replace('_', '-')}", _word(value)) for name, value in told)


def _word(value: Any) -> str:
    """A value as somebody would type it; live objects by the name of their type."""
    if isinstance(value, (str, int, float, os.PathLike)):
        return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    return ", ".join(value) if isinstance(value, tuple) else type(value).__name__


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
    plan = replace(plan, hints=(*plan.hints, *asked.notes, *_not_executable(plan)))
    if plan.hardware_is_assumed:
        plan = replace(plan, ladder=smallest_machines(asked.question, plan.time.step.value))
    return plan


def _not_executable(plan: Plan) -> tuple[Hint, ...]:
    missing = unsupported(plan)
    words = f"`strategist run` cannot execute this layout yet: {' '.join(missing)}"
    return (Hint(code="W_NOT_EXECUTABLE", sentence=words),) if missing else ()


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

    Raises InputError CHOICE for an unknown target, ImpossibleError FRAMEWORK_LEGALITY for a plan that is not sound and
    UNSUPPORTED when the target cannot express it.
    """
    from strategist.emitters import find_emitter
    from strategist.emitters.emitter import Options as NoOptions

    emitter = find_emitter(target)
    require_sound(plan)
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
