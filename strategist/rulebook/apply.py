"""Apply rules: which candidates are forbidden and by what, which rules fire in a situation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from strategist.errors import RuleError
from strategist.records import dataclass
from strategist.rulebook.expression import names
from strategist.rulebook.rows import PLACE
from strategist.rulebook.rule import Rule, load_families
from strategist.space.candidates import (
    NOT_ASKED,
    OF_LAYERS,
    OF_MESH,
    OPTION_COLUMNS,
    Candidates,
    Mask,
    deepest,
    distinct,
)


@dataclass(frozen=True, slots=True)
class Refused:
    """Candidates that one rule refuses first: how many, and the place of one of them in the judged list."""

    rule: Rule
    count: int
    example: int


OPTIONS = frozenset((*OPTION_COLUMNS, *OF_LAYERS, "recompute_deepest")) - {"zero"}
"""Choices that a mesh leaves open. Rules that read none of them are asked once per mesh."""


def columns(candidates: Candidates) -> dict[str, Any]:
    """Candidate words as columns, (C,), with those that nobody asked for."""
    found = candidates.columns
    return {**NOT_ASKED, **found, "dp": candidates.data_parallel, "recompute_deepest": deepest(found)}


def forbid(
    rules: Sequence[Rule], situation: Mapping[str, Any], candidates: Candidates
) -> tuple[Mask, tuple[Refused, ...]]:
    """Mask of the candidates that no rule forbids, and per rule those it refused first. Shape (C,)."""
    first, mesh_of = distinct(candidates.mesh)
    of_meshes, options = (dict(situation) | columns(c) for c in (candidates.where(first), candidates))
    keep = np.ones(len(candidates), dtype=np.bool_)
    refused = []
    for rule in rules:
        by_mesh = OPTIONS.isdisjoint(rule.words)
        holds = np.asarray(rule.holds(of_meshes if by_mesh else options), dtype=np.bool_)
        if not holds.any():
            continue
        hit = keep & (holds[mesh_of] if by_mesh and holds.ndim else holds)
        count = int(hit.sum())
        if count:
            refused.append(Refused(rule, count, int(np.argmax(hit))))
            keep &= ~hit
    return keep, tuple(refused)


def fired(rules: Sequence[Rule], values: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Rules whose words all have a value here and that hold, in the order of the book."""
    return tuple(rule for rule in rules if values.keys() >= set(rule.words) and bool(np.all(rule.holds(values))))


def sentence(template: str, values: Mapping[str, Any]) -> str:
    """A template with its {name} and {name:format} places filled in. Raises RuleError for a name without a value."""

    def fill(match: re.Match[str]) -> str:
        if match[1] not in values:
            hint = "Use words that have a value where the rule is asked."
            raise RuleError(
                "RULE", f"The word {match[1]!r} of a sentence has no value here.", value=match[1], hint=hint
            )
        value = values[match[1]]
        plain = value.item() if isinstance(value, np.generic) else value
        return format(plain, match[2] or ("" if isinstance(plain, str) else "g" if isinstance(plain, float) else ""))

    return PLACE.sub(fill, template)


def placeholders(template: str) -> tuple[str, ...]:
    """Names that a template mentions."""
    return tuple(match[1] for match in PLACE.finditer(template))


@cache
def _read_by_families() -> frozenset[str]:
    """The choices that tell families apart."""
    words = frozenset().union(*(names(family.when) for family in load_families()))
    return words | {"dp_replicate", "dp_shard"} if "dp" in words else words


def family_masks(candidates: Candidates, situation: Mapping[str, Any]) -> dict[str, Mask]:
    """For every family the mask of its members, (C,): asked once for layouts that agree in what families read."""
    of_mesh = OF_MESH if "mesh" in candidates.columns else ()
    read = [name for name in candidates.columns if name in _read_by_families().difference(of_mesh)]
    first, sort = candidates.alike(*read, *(("mesh",) if of_mesh else ()))
    values, size = dict(situation) | columns(candidates.where(first)), len(first)
    return {
        f.name: np.broadcast_to(np.asarray(f.holds(values), dtype=np.bool_), (size,)).take(sort)
        for f in load_families()
    }


def family_of(masks: Mapping[str, Mask], index: int) -> str:
    """The most special family that one candidate belongs to."""
    return next((name for name, mask in masks.items() if mask[index]), "other")
