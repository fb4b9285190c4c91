"""SkyPilot's task files. Keys as in SkyPilot 0.14.1, sky/utils/schemas.py, which refuses others."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from strategist.readers.foreign import Foreign, Reader, Source, Tables, section_of, told, whole
from strategist.readers.script import script_faults, script_of, unequal
from strategist.records import replace

SECTIONS = ("", "resources", "resources.any_of.*", "resources.ordered.*")
TABLES = Tables(
    framework="skypilot", title="SkyPilot 0.14", swallows=dict.fromkeys(SECTIONS, "its schema refuses the task")
)


def read(source: Source, ranks: int | None) -> Foreign:
    """What a task says, and its faults, those of the commands that it runs among them."""
    table = source.table
    script = script_of(replace(source, text=_commands(source)))
    nodes, devices = whole(table.get("num_nodes")) or 1, devices_of(section_of(table, "resources"))
    says = told(nodes=nodes, ranks=nodes * devices if devices else None)
    found = (*TABLES.unknown(table), *script_faults(script), *unequal(script, nodes, devices))
    return Foreign(says=says, findings=found)


def _commands(source: Source) -> str:
    """What it runs, under the variables that it sets before."""
    given = section_of(source.table, "envs").items()
    envs = [f"{name}={shlex.quote(str(word))}" for name, word in given if word is not None]
    return "\n".join((*envs, str(source.table.get("run", ""))))


def devices_of(resources: Mapping[str, Any]) -> int | None:
    """Accelerators of each node: NAME or NAME:COUNT, also as a table; None where there is a choice of several."""
    said = resources.get("accelerators")
    if isinstance(said, dict):
        return whole(next(iter(said.values()))) if len(said) == 1 else None
    if not isinstance(said, str) or said.startswith(("[", "{")):
        return None
    _, colon, count = said.partition(":")
    return whole(count) if colon else 1


def recognises(source: Source) -> bool:
    """A table of commands with machines to run them on."""
    return isinstance(source.table.get("run"), str) and bool({"resources", "num_nodes"} & set(source.table))


SKYPILOT = Reader(
    name="skypilot",
    title="SkyPilot 0.14",
    recognises=recognises,
    read=read,
    profile="strategist",
    commands=_commands,
)
