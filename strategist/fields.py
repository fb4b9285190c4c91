"""The arguments of `recommend`: which there are, of what type, within which bounds.

The command line reads text (`cli/given.py`); Python gives values. Both stay within the same bounds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from math import isfinite
from numbers import Integral, Real
from typing import Any

from strategist.errors import InputError, did_you_mean, near_and_known, wrong_type
from strategist.facts.job import MAX_HEADROOM
from strategist.facts.profile import AUTO, PURPOSES, frontends
from strategist.facts.workload import (
    MAX_BATCH,
    MAX_IMBALANCE,
    MAX_RANK,
    MAX_SEQ_LEN,
    METHODS,
    OPTIMIZERS,
    PRECISIONS,
    Workload,
)

MAX_TOKENS, MAX_PRICE, MAX_TOP, MAX_BUDGET = 10**18, 10**6, 50, 10**6
POLICIES = ("hf", "fastest")
OBJECTIVES = ("time", "cost", "memory", "simplicity")

Check = Callable[[str, Any], Any]


def checked_fields(workload: Workload | None, given: Mapping[str, Any], function: str = "recommend") -> dict[str, Any]:
    """The arguments that were given to a function, None left out, those of a Workload underneath.

    Raises InputError UNKNOWN_KEY for a name that is no argument of it, TYPE and RANGE and CHOICE for its value.
    """
    known = [name for name in FIELDS if name not in UNASKED.get(function, ())]
    for name in given:
        if name not in known:
            hint = near_and_known(name, known)
            raise InputError("UNKNOWN_KEY", f"{function}() has no argument {name!r}.", flag=name, value=name, hint=hint)
    if workload is not None and not isinstance(workload, Workload):
        raise _wrong("workload", workload, "a Workload", "Workload(seq_len=4096)")
    own = ["seq_len", "target_len", "global_batch", "precision", "optimizer", "tokens"]
    if workload is not None and workload.expert_imbalance != 1.0:  # balance need not be said
        own.append("expert_imbalance")
    fields = {name: getattr(workload, name) for name in own} if workload is not None else {}
    fields |= given
    return {name: FIELDS[name](name, value) for name, value in fields.items() if value is not None}


def _wrong(name: str, value: Any, kind: str, example: str) -> InputError:
    return wrong_type(name, value, kind, f"{name}={example}")


def whole(high: int) -> Check:
    """A whole number from 1."""

    def check(name: str, value: Any) -> int:
        kind = f"a whole number from 1 to {high}"
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise _wrong(name, value, kind, "8")
        number = int(value)
        if not 1 <= number <= high:
            raise InputError("RANGE", f"{name} must be {kind}.", flag=name, value=value, hint=f"Example: {name}=8.")
        return number

    return check


def real(high: float, example: str, low: float = 0.0) -> Check:
    """A finite number, from 0 unless something else is said."""

    def check(name: str, value: Any) -> float:
        kind = f"a number from {low:g} to {high:g}"
        if isinstance(value, bool) or not isinstance(value, Real):
            raise _wrong(name, value, kind, example)
        number = float(value)
        if not (isfinite(number) and low <= number <= high):
            raise InputError(
                "RANGE", f"{name} must be {kind}.", flag=name, value=value, hint=f"Example: {name}={example}."
            )
        return number

    return check


def choice(words: tuple[str, ...]) -> Check:
    """One of some words."""

    def check(name: str, value: Any) -> str:
        if value not in words:
            hint = did_you_mean(str(value), words)
            raise InputError("CHOICE", f"{name} must be one of {', '.join(words)}.", flag=name, value=value, hint=hint)
        return str(value)

    return check


def text(example: str) -> Check:
    """A text; its grammar is judged where it is read."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise _wrong(name, value, "a text", example)
        return value

    return check


def path(example: str) -> Check:
    """A path, as a text or as Python has it."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, (str, os.PathLike)):
            raise _wrong(name, value, "a path", example)
        return os.fspath(value)

    return check


def yes_or_no(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise _wrong(name, value, "True or False", "True")
    return value


def _folders(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(folder, (str, os.PathLike)) for folder in value):
        raise _wrong(name, value, "a list of folders", '["my_rules"]')
    return tuple(os.fspath(folder) for folder in value)


WORKLOAD: Mapping[str, Check] = {
    "seq_len": whole(MAX_SEQ_LEN),
    "target_len": whole(MAX_SEQ_LEN),
    "global_batch": whole(MAX_BATCH),
    "micro_batch": whole(MAX_BATCH),
    "grad_accum": whole(MAX_BATCH),
    "tokens": whole(MAX_TOKENS),
    "precision": choice(PRECISIONS),
    "optimizer": choice(OPTIMIZERS),
    "method": choice(METHODS),
    "lora_rank": whole(MAX_RANK),
    "lora_targets": text('"q,v"'),
    "expert_imbalance": real(MAX_IMBALANCE, "1.5", 1.0),
    "headroom": real(MAX_HEADROOM, "0.05"),
    "price_per_gpu_hour": real(MAX_PRICE, "2.5"),
}
CHOICE: Mapping[str, Check] = {
    "objective": choice(OBJECTIVES),
    "frontend": choice((*frontends(), AUTO)),
    "purpose": choice(PURPOSES),
    "pin": text('"tp=4,pp=2"'),
    "calibration": path('"calibration.json"'),
    "uncalibrated": yes_or_no,
    "forbid": text('"pp,offload"'),
    "also": text('"zb_h1,zbv"'),
    "rules": _folders,
}
UNRECORDED: Mapping[str, Check] = {"time_budget": real(MAX_BUDGET, "10")}
"""How long a search may take is no part of the question: no plan records it, and what was left out is said otherwise."""
FIELDS: Mapping[str, Check] = {**WORKLOAD, **CHOICE, **UNRECORDED}
"""Every further argument, in the order of the command line's help."""
UNASKED: Mapping[str, tuple[str, ...]] = {
    "predict": ("tokens", "price_per_gpu_hour", "objective", "purpose", "pin", "forbid", "also", "time_budget"),
}
"""Those that mean nothing to a function: a layout that is given leaves nothing to choose."""


def checked_policy(value: Any) -> Any:
    """hf or fastest. Raises InputError CHOICE."""
    return choice(POLICIES)("policy", value)


def checked_top(value: Any) -> int:
    """How many alternatives to show. Raises InputError TYPE, RANGE."""
    count: int = whole(MAX_TOP)("top", value)
    return count
