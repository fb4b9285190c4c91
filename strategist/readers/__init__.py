"""Configurations of other frameworks, read: one reader each, in the Plan's words, with the faults that their own parsers miss."""

from __future__ import annotations

from strategist.errors import InputError, shown
from strategist.readers.accelerate import ACCELERATE
from strategist.readers.axolotl import AXOLOTL
from strategist.readers.beside import files_given
from strategist.readers.composer import COMPOSER
from strategist.readers.deepspeed import DEEPSPEED
from strategist.readers.epl import EPL
from strategist.readers.foreign import Foreign, Reader, Source
from strategist.readers.gpt_neox import GPT_NEOX
from strategist.readers.kubernetes import KUBERNETES
from strategist.readers.launched import LAUNCHED, LAUNCHER
from strategist.readers.llm_foundry import LLM_FOUNDRY
from strategist.readers.megatron import MEGATRON, MEGATRON_DEEPSPEED
from strategist.readers.megatron_bridge import MEGATRON_BRIDGE
from strategist.readers.nanotron import NANOTRON
from strategist.readers.programs import RECIPE
from strategist.readers.ray import RAY
from strategist.readers.script import SCRIPT, is_script
from strategist.readers.skypilot import SKYPILOT
from strategist.readers.surroundings import PYTHON, REQUIREMENTS, is_pins, is_python
from strategist.readers.torchtitan import TORCHTITAN
from strategist.readers.torchtune import TORCHTUNE
from strategist.readers.transformers import DISTRIBUTED_READER, FACTORY_READER, SFT_READER, TRANSFORMERS
from strategist.reading import parse_document, read_text
from strategist.records import replace

IN_JOBS = (MEGATRON_DEEPSPEED, MEGATRON, TORCHTITAN, TORCHTUNE, LAUNCHED)
"""Who reads the commands that a job runs."""
FOR_PROGRAMS = (FACTORY_READER, AXOLOTL, NANOTRON, LLM_FOUNDRY, TORCHTITAN, GPT_NEOX)
"""Who reads a file that such commands give to a program."""

READERS: tuple[Reader, ...] = (
    REQUIREMENTS,
    RAY,
    PYTHON,
    *IN_JOBS,
    SCRIPT,
    ACCELERATE,
    GPT_NEOX,
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
    RECIPE,
    SFT_READER,
    TRANSFORMERS,
    DISTRIBUTED_READER,
)
"""Every reader; the first that recognises a file reads it."""


def open_source(path: str, flag: str) -> Source:
    """The file, parsed by its ending; scripts keep their text alone. Raises what `strategist.reading` raises."""
    text = read_text(path, flag)
    bare = Source(path=path, text=text)
    if is_pins(bare) or is_python(bare) or is_script(bare):
        return bare
    return Source(path=path, text=text, value=parse_document(path, text, f"{flag} {shown(path)}"))


def reader_of(source: Source, flag: str) -> Reader:
    """The reader of a file; of a job, one that knows what its commands say too. Raises InputError KIND when no framework is recognised
    in it."""
    found = next((reader for reader in READERS if reader.recognises(source)), None)
    if found is None:
        raise InputError(
            "KIND",
            f"{shown(source.path)} is no configuration that can be read.",
            flag=flag,
            value=source.path,
            hint=f"Known: {', '.join(reader.title for reader in READERS)}.",
        )
    return _with_commands(found, source)


def _with_commands(job: Reader, source: Source) -> Reader:
    """The reader of a job with layout, model, kernels and formats of the program that its commands start, where that is known."""
    text = job.commands(source)
    found = _started_by(Source(path=source.path, text=f"#!/bin/sh\n{text}")) if text else None
    if found is None:
        return job
    program, inside = found

    def read(source: Source, ranks: int | None) -> Foreign:
        own = job.read(source, ranks)
        count = own.says.get("ranks")
        said = program.read(inside, ranks or (count if isinstance(count, int) else None))
        # how many ranks there are the job says, and looks itself whether that agrees
        more = (fault for fault in said.findings if fault not in own.findings and fault.place != LAUNCHER)
        return Foreign(says={**said.says, **own.says}, findings=(*own.findings, *more), unsaid=said.unsaid)

    return replace(
        job,
        read=read,
        model=lambda _, flag: program.model(inside, flag),
        profile=program.profile,
        says_gradients=program.says_gradients,
    )


def _started_by(commands: Source) -> tuple[Reader, Source] | None:
    """Who reads the program that commands start, and what: the commands, or a file that the program is given."""
    program = next((reader for reader in IN_JOBS if reader.recognises(commands)), None)
    if program is not None:
        return program, commands
    given = (
        (reader, inside) for inside in files_given(commands) for reader in FOR_PROGRAMS if reader.recognises(inside)
    )
    return next(given, None)
