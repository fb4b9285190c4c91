"""Whether a shape is a Llama-like decoder: what our executor's reference model can be. Planning asks before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from strategist.facts.model import ModelShape

FREE = frozenset(
    {
        "name", "family", "layers", "hidden", "vocab", "ffn_hidden", "heads", "kv_heads", "head_dim", "tied", "max_seq",
        "qkv_bias", "window", "full_every", "parameters_stated", "basis", "source", "notes",
    }
)  # fmt: skip
"""Fields of a shape that may have any value; a window counts only where sequences are longer than it."""

CHOICES: dict[str, tuple[object, ...]] = {"kind": ("decoder",), "qk_norm": ("", "head")}
"""Fields with more values than their default. Every other field must have its default, which is Llama's."""

POSITIVE = ("layers", "hidden", "vocab", "ffn_hidden", "heads", "kv_heads", "head_dim")


def departures(shape: ModelShape) -> tuple[str, ...]:
    """What keeps `shape` from being a decoder of RMSNorm, rotary positions, attention over everything and a gated SiLU
    feed-forward part, such as Llama, Mistral, Qwen2 and Qwen3: fields with their values, none for such a decoder."""
    return (*_odd_fields(shape), *_odd_sizes(shape))


def _odd_fields(shape: ModelShape) -> Iterator[str]:
    for field in dataclasses.fields(shape):
        value = getattr(shape, field.name)
        if field.name not in FREE and value not in CHOICES.get(field.name, (field.default,)):
            yield field.name if dataclasses.is_dataclass(value) else f"{field.name} = {value}"


def _odd_sizes(shape: ModelShape) -> Iterator[str]:
    yield from (f"{name} = {getattr(shape, name)}" for name in POSITIVE if getattr(shape, name) < 1)
    if shape.kv_heads > 0 and shape.heads % shape.kv_heads:
        yield f"{shape.heads} heads over {shape.kv_heads} kv_heads"
    if shape.head_dim % 2:
        yield f"an odd head_dim = {shape.head_dim}"
