"""Which architectures the built-in reference model can be, said without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from strategist.executor.obstacles import Obstacle
from strategist.facts.model import ModelShape

FREE = frozenset(
    {
        "name", "family", "layers", "hidden", "vocab", "ffn_hidden", "heads", "kv_heads", "head_dim", "tied", "max_seq",
        "qkv_bias", "window", "full_every", "parameters_stated", "basis", "source", "notes",
    }
)  # fmt: skip
"""Fields of a shape that may have any value; windows are checked against the sequence when the model runs."""

CHOICES: dict[str, tuple[object, ...]] = {"kind": ("decoder",), "qk_norm": ("", "head")}
"""Fields with more values than their default. Every other field must have its default, which is Llama's."""

POSITIVE = ("layers", "hidden", "vocab", "ffn_hidden", "heads", "kv_heads", "head_dim")


def model_obstacles(shape: ModelShape) -> tuple[Obstacle, ...]:
    """Why the built-in reference model, a Llama-like decoder, cannot be this architecture; empty when it can."""
    odd = [*_odd_fields(shape), *_odd_sizes(shape)]
    if not odd:
        return ()
    return (
        Obstacle(
            code="UNSUPPORTED",
            place="model",
            value=shape.name,
            sentence=f"The built-in model cannot be {shape.name} ({', '.join(odd)}); it can be any decoder of RMSNorm, "
            "rotary positions, full attention and a gated SiLU feed-forward part, such as Llama, Mistral, Qwen2, Qwen3.",
            hint="Give your own module to build(); data-parallel plans run any.",
        ),
    )


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
