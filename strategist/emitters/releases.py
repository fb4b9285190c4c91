"""From which releases of a framework on the keys of emitted files are known: versions before the tested ones may have all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from strategist.emitters.emitter import Files
from strategist.facts.key_ranges import first_release, number

OF_FILES = {
    "accelerate.yaml": "accelerate",
    "deepspeed.json": "deepspeed",
    "training.json": "transformers",
    "sft.json": "trl",
}
"""Whose keys stand in a file."""


def releases_needed(files: Files) -> Iterator[str]:
    """A sentence for each file that has a key which is younger than the releases that were looked at."""
    for name, framework in OF_FILES.items():
        text = files.get(PurePosixPath(name))
        if text is None:
            continue
        sections = _sections(text, name)
        young = [found for section, keys in sections.items() if (found := first_release(framework, section, keys))]
        if young:
            last = max(young, key=lambda key: number(str(key.first)))
            yield f"{name} needs {last.framework} {last.first} or later, which knows {last.key}."


def _sections(text: str, file: str) -> Mapping[str, Any]:
    """The keys at the top of a document and in each of its tables, by the table's place."""
    if file.endswith(".yaml"):
        import yaml  # emitted by it a moment ago

        document = yaml.safe_load(text)
    else:
        document = json.loads(text)
    tables = {key: value for key, value in document.items() if isinstance(value, dict)}
    inner = {
        f"{key}.{name}": part for key, table in tables.items() for name, part in table.items() if isinstance(part, dict)
    }
    return {"": document, **tables, **inner}
