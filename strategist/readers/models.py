"""The models that files describe or name, for those who name none beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from strategist.facts.model import ModelShape
from strategist.facts.models import load_model
from strategist.readers.foreign import Source, tables_at

ModelOf = Callable[[Source, str], ModelShape | None]


def named_at(key: str, section: str = "") -> ModelOf:
    """Who looks up the name or path at a key, of a section. Raises what `load_model` raises, with the key's place."""

    def read(source: Source, flag: str) -> ModelShape | None:
        found = next(tables_at(source.table, section), {}).get(key)
        place = f"{section}.{key}" if section else key
        return load_model(found, f"{flag}: {place}") if isinstance(found, str) and found else None

    return read


def of_arguments(arguments: Callable[[Source], Mapping[str, str]]) -> ModelOf:
    """Who reads Megatron-LM's arguments, where they say how deep a model is."""

    def read(source: Source, flag: str) -> ModelShape | None:
        said = arguments(source)
        if "--num-layers" not in said:
            return None
        # families are loaded only when one is read
        from strategist.facts.megatron_arguments import shape_from_arguments

        return shape_from_arguments(said, flag)

    return read
