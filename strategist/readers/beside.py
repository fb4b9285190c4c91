"""Files that a configuration names: what they add to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from strategist.document.judgement import Said
from strategist.errors import InputError
from strategist.readers.deepspeed import said_by
from strategist.readers.foreign import Source
from strategist.reading import parse_json, parse_yaml, read_text

TAKEN = ("zero", "offload", "tp", "cp", "context_parallel", "micro_batch", "accumulation")
"""What of DeepSpeed's file counts where the file that names it is silent; formats are the latter's, which fills them in."""


def engine_says(source: Source, named: Any) -> dict[str, Said]:
    """How states are kept by the DeepSpeed file that is named in `source`, whole or by path; nothing where it cannot be read."""
    table = named if isinstance(named, dict) else table_named(source, named) if isinstance(named, str) else {}
    says = said_by(table, None) if table else {}
    return {name: says[name] for name in TAKEN if name in says}


def path_named(source: Source, path: str) -> str | None:
    """Where a file lies that is named in `source`, from the folders that a framework may have been started in."""
    return next(
        (found for folder in _folders(source.path) if os.path.isfile(found := os.path.join(folder, path))), None
    )


def table_named(source: Source, path: str) -> dict[str, Any]:
    """The table in a JSON or YAML file that is named in `source`, from the folders that a framework may have been started in; empty
    where there is none that can be read."""
    parse = parse_yaml if path.endswith((".yaml", ".yml")) else parse_json
    for folder in _folders(source.path):
        try:
            value = parse(read_text(os.path.join(folder, path), "FILE"), path)
        except InputError:  # not there, or not readable: the file that names it may stand elsewhere
            continue
        if isinstance(value, dict):
            return value
    return {}


def _folders(path: str) -> Iterator[str]:
    """Where a framework may have been started that reads the file at `path`: here, beside it, or in a folder above it."""
    yield os.curdir
    yield from map(str, Path(os.path.abspath(path)).parents)
