"""Files that a configuration names: what they add to it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from strategist.document.judgement import Finding, Said
from strategist.errors import InputError
from strategist.readers.deepspeed import engine_of, said_by, uncounted
from strategist.readers.foreign import Says, Source
from strategist.readers.script import script_of
from strategist.reading import PARSERS, parse_document, read_text

TAKEN = ("zero", "offload", "tp", "cp", "context_parallel", "micro_batch", "accumulation", "optimizer", "reduce_bucket")
"""What of DeepSpeed's file counts where the file that names it is silent; formats are the latter's, which fills them in."""


def engine_says(source: Source, named: Any, *more: str) -> dict[str, Said]:
    """How states are kept by the DeepSpeed file that is named in `source`, whole or by path, and `more` of what it says; whose ZeRO it is alone
    where it cannot be read."""
    table = _engine_of(source, named)
    says = said_by(table, None) if table else {}
    return {"engine": engine_of(table)} | {name: says[name] for name in (*TAKEN, *more) if name in says}


def over_engine(engine: Says, own: Says) -> dict[str, Said]:
    """What a file says beside its DeepSpeed file, whose optimizer counts where it names one: Trainer then makes none (Transformers 5.23.0,
    integrations/deepspeed.py, deepspeed_optim_sched)."""
    return {**engine, **own, **{name: word for name, word in engine.items() if name == "optimizer"}}


def engine_faults(source: Source, named: Any) -> Iterator[Finding]:
    """What predictions do not count of the DeepSpeed file that is named in `source`."""
    yield from uncounted(_engine_of(source, named), "deepspeed: ")


def _engine_of(source: Source, named: Any) -> Mapping[str, Any]:
    return named if isinstance(named, dict) else table_named(source, named) if isinstance(named, str) else {}


def table_named(source: Source, path: str) -> Mapping[str, Any]:
    """The table in a file that is named in `source`; empty where there is none that can be read."""
    found = source_named(source, path)
    return {} if found is None else found.table


def source_named(source: Source, path: str) -> Source | None:
    """The file with a table that is named in `source`, from the folders that a framework may have been started in."""
    for place in (os.path.join(folder, path) for folder in _folders(source.path)):
        try:
            text = read_text(place, "FILE")
            found = Source(path=place, text=text, value=parse_document(place, text, path))
        except InputError:  # not there, or not readable: the file that names it may stand elsewhere
            continue
        if isinstance(found.value, dict):
            return found
    return None


def files_given(commands: Source) -> Iterator[Source]:
    """Files with tables that the words of a script name, behind an equals sign too."""
    words = (word.rpartition("=")[2] for word in script_of(commands).words)
    yield from filter(None, (source_named(commands, word) for word in words if word.endswith(tuple(PARSERS))))


def _folders(path: str) -> Iterator[str]:
    """Where a framework may have been started that reads the file at `path`: here, beside it, or in a folder above it."""
    yield os.curdir
    yield from map(str, Path(os.path.abspath(path)).parents)
