"""Documents as JSON: readable for people, canonical for the seal. No schema library is needed to write one."""

from __future__ import annotations

import json
from typing import Any

from strategist.document.plan import Plan
from strategist.records import is_record, names_of, replace

EXACT = 2**53
"""Whole numbers below it are the same as float and as int."""
SILENT: dict[str, Any] = {
    "adapters": None,
    "cp_inner": 1,
    "uneven_batch": [],
    "recompute_stages": [],
    "expert_imbalance": 1,
    "target_len": None,
    "constants": None,
    "frozen": 0,
    "near": [],
}
"""Fields that are written only where they say something, so that plans without them stay what they were to the byte, and the values
that say nothing."""


def as_document(value: Any) -> Any:
    """`value` as plain dicts, lists and scalars, in field order.

    A whole float is written without its `.0` (as RFC 8785 does), because a fact that came in as 900 and one that came
    in as 900.0 are equal and must have one text and one seal.
    """
    if is_record(value):
        found = {name: as_document(getattr(value, name)) for name in names_of(type(value))}
        silent = [name for name, nothing in SILENT.items() if name in found and found[name] == nothing]
        return {name: item for name, item in found.items() if name not in silent} if silent else found
    if isinstance(value, dict):
        return {key: as_document(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [as_document(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < EXACT:
        return int(value)
    return value


def dump(document: Any) -> str:
    """A document as indented JSON with a final newline, byte-identical for equal documents."""
    return json.dumps(as_document(document), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


UNSIGNED = ("seal",)
"""Fields of a document that no seal covers."""
LATER = ("verification", "front", "certificate", "sensitivity", "idle", "unfinished", "unrestricted")
"""Fields that are younger than the first seals: they are signed where they say something."""
LATER_INSIDE: dict[str, dict[str, Any]] = {
    "strategy": {
        "replicas": "processes",
        "compression": "none",
        "compression_rank": 0,
        "compression_share": 0,
        "loss": "whole",
        "tables": "local",
        "recompute_layers": 0,
        "recompute_every": 0,
    },
    "certificate": {"slower": 0, "bests": []},
    "request": {"also": []},
    "model": {"tables": []},
}
"""The same inside some of the fields, with the values that say nothing."""


def digest(document: Any) -> str:
    """`sha256:...` over the canonical JSON (sorted keys, no blanks, ASCII) of everything but the seal itself."""
    import hashlib  # loads OpenSSL; plans that are only looked at need no digest

    body = as_document(document)
    if isinstance(body, dict):
        body = {
            key: value
            for key, value in body.items()
            if key not in UNSIGNED and not (key in LATER and _says_nothing(value))
        }
    for name, silent in LATER_INSIDE.items() if isinstance(body, dict) else ():
        if isinstance(body.get(name), dict):
            body[name] = {k: v for k, v in body[name].items() if k not in silent or silent[k] != v}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode("ascii")).hexdigest()


def _says_nothing(value: Any) -> bool:
    return value is None or value == 0 or value == []


def sealed(plan: Plan) -> Plan:
    """The plan with its seal set."""
    return replace(plan, seal=digest(plan))


def seal_state(plan: Plan) -> str:
    """`sealed`, `unsealed` (hand-written) or `edited` (the digest no longer matches)."""
    if plan.seal is None:
        return "unsealed"
    return "sealed" if plan.seal == digest(plan) else "edited"
