"""OmegaConf's references in a configuration, such as ${variables.max_seq_len}: llm-foundry and torchtune put values in before they look."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from strategist.readers.foreign import tables_at

_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")
ROUNDS = 4
"""How often what was put in is looked at again: references to references of more than sixteen are none that somebody wrote."""
LONGEST = 200
"""Characters of a text that has references, and of what becomes of it: longer ones are paths and prose, of which nothing is read."""


def resolved(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table with the values in it that its references name. What names a table, the environment, nothing, or itself in the end stays
    as it is written."""
    found = dict(table)
    for _ in range(ROUNDS):
        found = {key: _put_in(value, found) for key, value in found.items()}
    return found


def _put_in(value: Any, root: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _put_in(inner, root) for key, inner in value.items()}
    if isinstance(value, list):
        return [_put_in(inner, root) for inner in value]
    return _text(value, root) if isinstance(value, str) and "${" in value and len(value) <= LONGEST else value


def _text(word: str, root: Mapping[str, Any]) -> Any:
    """A text with values put in; one that is a reference and nothing else becomes the value, which may be a number."""
    alone = _REFERENCE.fullmatch(word)
    if alone:
        return _named(alone, root)
    text = _REFERENCE.sub(lambda match: str(_named(match, root)), word)
    return text if len(text) <= LONGEST else word


def _named(match: re.Match[str], root: Mapping[str, Any]) -> str | int | float:
    """The word or number that a reference names; the reference where there is none."""
    section, _, key = match[1].rpartition(".")
    found = next(tables_at(root, section), {}).get(key)
    return found if isinstance(found, (str, int, float)) else match[0]
