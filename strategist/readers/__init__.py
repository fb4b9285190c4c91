"""Configurations of other frameworks, read: one reader each, in the Plan's words, with the faults that their own parsers miss."""

from __future__ import annotations

import os

from strategist.errors import InputError, shown
from strategist.readers.accelerate import ACCELERATE
from strategist.readers.axolotl import AXOLOTL
from strategist.readers.composer import COMPOSER
from strategist.readers.deepspeed import DEEPSPEED
from strategist.readers.epl import EPL
from strategist.readers.foreign import Foreign, Reader, Source
from strategist.readers.kubernetes import KUBERNETES
from strategist.readers.launched import LAUNCHED
from strategist.readers.llm_foundry import LLM_FOUNDRY
from strategist.readers.megatron import MEGATRON
from strategist.readers.megatron_bridge import MEGATRON_BRIDGE
from strategist.readers.nanotron import NANOTRON
from strategist.readers.ray import RAY
from strategist.readers.script import SCRIPT, is_script
from strategist.readers.skypilot import SKYPILOT
from strategist.readers.surroundings import PYTHON, REQUIREMENTS, is_pins, is_python
from strategist.readers.torchtitan import TORCHTITAN
from strategist.readers.transformers import DISTRIBUTED_READER, FACTORY_READER, SFT_READER, TRANSFORMERS
from strategist.reading import parse_json, parse_toml, parse_yaml, read_text

READERS: tuple[Reader, ...] = (
    REQUIREMENTS,
    RAY,
    PYTHON,
    MEGATRON,
    TORCHTITAN,
    LAUNCHED,
    SCRIPT,
    ACCELERATE,
    DEEPSPEED,
    FACTORY_READER,
    AXOLOTL,
    NANOTRON,
    LLM_FOUNDRY,
    COMPOSER,
    MEGATRON_BRIDGE,
    EPL,
    KUBERNETES,
    SKYPILOT,
    SFT_READER,
    TRANSFORMERS,
    DISTRIBUTED_READER,
)
"""Every reader; the first that recognises a file reads it."""

PARSERS = {".json": parse_json, ".yaml": parse_yaml, ".yml": parse_yaml, ".toml": parse_toml}


def open_source(path: str, flag: str) -> Source:
    """The file, parsed by its ending; scripts keep their text alone. Raises what `strategist.reading` raises."""
    text = read_text(path, flag)
    bare = Source(path=path, text=text)
    if is_pins(bare) or is_python(bare) or is_script(bare):
        return bare
    parser = PARSERS.get(os.path.splitext(path)[1].lower(), parse_json)
    return Source(path=path, text=text, value=parser(text, f"{flag} {shown(path)}"))


def reader_of(source: Source, flag: str) -> Reader:
    """The reader of a file. Raises InputError KIND when no framework is recognised in it."""
    found = next((reader for reader in READERS if reader.recognises(source)), None)
    if found is None:
        raise InputError(
            "KIND",
            f"{shown(source.path)} is no configuration that can be read.",
            flag=flag,
            value=source.path,
            hint=f"Known: {', '.join(reader.title for reader in READERS)}.",
        )
    return found


def read_foreign(source: Source, flag: str, ranks: int | None = None) -> tuple[Reader, Foreign]:
    """Who reads a file, and what it says for a number of ranks. Raises InputError KIND, PARSE."""
    reader = reader_of(source, flag)
    return reader, reader.read(source, ranks)
