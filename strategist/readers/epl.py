"""EPL's configuration: one table of section.key. Keys as in EPL d38b527 (2023-03-31), epl/config.py, whose class takes any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from strategist.document.judgement import Finding
from strategist.readers.foreign import (
    Foreign,
    Reader,
    Says,
    Source,
    Tables,
    finding,
    keys_of,
    told,
    unknown_word,
    whole,
)

TABLES = Tables(framework="epl", title="EPL 0.3", swallows={"": "its class takes it all the same"})
WORDS = {
    "zero.level": ("", "v0", "v1"),
    "amp.level": ("", "o1"),
    "pipeline.strategy": ("preferforward", "preferbackward", "preferbackwardoptimizer"),
    "communication.gradients_reduce_method": ("mean", "sum"),
}
"""What its code compares the texts of these keys with, in small letters; other texts switch off or stop."""

SCHEDULES = {"preferforward": "gpipe", "preferbackward": "1f1b"}
STAGES = {"v0": 1, "v1": 2}
"""What each level of its ZeRO shards: states of the optimizer, and gradients too."""


def read(source: Source, ranks: int | None) -> Foreign:
    """What a file says, and its faults. Degrees follow from the script's annotations and the devices that there are."""
    table = source.table
    return Foreign(says=_says(table), findings=(*TABLES.unknown(table), *_words(table), *_zero(table)))


def _word(table: Mapping[str, Any], key: str) -> str:
    return str(table.get(key, "")).lower()


def _says(table: Mapping[str, Any]) -> Says:
    stages = whole(table.get("pipeline.num_stages"))
    return told(
        accumulation=whole(table.get("pipeline.num_micro_batch")),
        pp=stages,
        schedule=SCHEDULES.get(_word(table, "pipeline.strategy")) if stages and stages > 1 else None,
        zero=STAGES.get(_word(table, "zero.level"), 0),
        compute="float16" if _word(table, "amp.level") == "o1" else "float32",
    )


def _words(table: Mapping[str, Any]) -> Iterator[Finding]:
    for key, known in WORDS.items():
        if key in table:
            yield from unknown_word(key, "EPL", _word(table, key), known)


def _zero(table: Mapping[str, Any]) -> Iterator[Finding]:
    """ZeRO of several stages, which is switched off."""
    stages = whole(table.get("pipeline.num_stages"))
    if _word(table, "zero.level") in STAGES and stages and stages > 1:
        yield finding("epl-zero", "zero.level", level=_word(table, "zero.level"), stages=stages)


def recognises(source: Source) -> bool:
    """A table with a key of EPL's, whose keys all are of sections that EPL has."""
    sections = {key.partition(".")[0] for key in keys_of("epl")}
    known = bool(set(source.table) & set(keys_of("epl")))
    return known and all("." in key and key.partition(".")[0] in sections for key in source.table)


EPL = Reader(name="epl", title="EPL 0.3", recognises=recognises, read=read, profile="strategist")
