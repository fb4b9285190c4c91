"""The sorts of layers, and how a row of them is spelled and spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

from strategist.errors import InputError, shown
from strategist.records import dataclass

Mixer = Literal[
    "attention",
    "sliding",
    "mla",
    "mamba1",
    "mamba2",
    "gated-delta",
    "short-conv",
    "lightning",
    "kimi-delta",
    "cross",
    "convolution",
    "none",
]
LINEAR: tuple[Mixer, ...] = ("mamba1", "mamba2", "gated-delta", "short-conv", "lightning", "kimi-delta")
"""Mixers whose work grows with the tokens alone, not with pairs of them."""
Ffn = Literal["dense", "moe", "none"]
T = TypeVar("T")

_MIXER_LETTERS: Mapping[Mixer, str] = {
    "attention": "*", "sliding": "s", "mla": "L", "mamba1": "M", "mamba2": "M", "gated-delta": "M",
    "short-conv": "M", "lightning": "M", "kimi-delta": "M", "none": ""
}  # fmt: skip
_FFN_LETTERS: Mapping[Ffn, str] = {"dense": "-", "moe": "E", "none": ""}


@dataclass(frozen=True, slots=True)
class LayerKind:
    """One sort of layer: how it mixes tokens, how it transforms each token, whether it also looks at an encoder. Blocks of convolutions
    differ in more than that: `block` is the place of the first one of a sort (facts/convolutions.py)."""

    mixer: Mixer
    ffn: Ffn
    cross: bool = False
    block: int = 0


def spell(kinds: Sequence[LayerKind]) -> str:
    """Layers as words, after the letters of Nemotron-H's `hybrid_override_pattern` (NVIDIA 2025, arXiv 2504.03624).

    `*` attention, `s` sliding or chunked attention, `L` latent attention, `M` state-space or linear mixer, `-` dense
    feed-forward, `E` experts: `M- ME *-` is three layers with both parts, `M - *` three with one part each.
    """
    return " ".join(_MIXER_LETTERS[kind.mixer] + _FFN_LETTERS[kind.ffn] for kind in kinds)


def read_spelling(text: str, count: int, linear: Mixer | None) -> tuple[LayerKind, ...]:
    """The `count` layers that `text` spells; `linear` is what `M` stands for in this model.

    Raises InputError CHOICE for an unknown word or another number of layers.
    """
    mixers: dict[str, Mixer] = {"*": "attention", "s": "sliding", "L": "mla", "": "none"}
    if linear is not None:
        mixers["M"] = linear
    ffns: dict[str, Ffn] = {letter: ffn for ffn, letter in _FFN_LETTERS.items()}
    known = {m + f: LayerKind(mixer, ffn) for m, mixer in mixers.items() for f, ffn in ffns.items() if m + f}
    words = text.split(" ")
    unknown = next((word for word in words if word not in known), None)
    if unknown is not None:
        raise _unreadable(f"the word {shown(unknown)!r} in it is unknown", text, known)
    if len(words) != count:
        raise _unreadable(f"it spells {len(words)} layers, and there are {count}", text, known)
    return tuple(known[word] for word in words)


def _unreadable(why: str, text: str, known: Mapping[str, LayerKind]) -> InputError:
    hint = f"Spell every layer with one of these words: {', '.join(known)}."
    return InputError(
        "CHOICE", f"The layer pattern cannot be read: {why}.", flag="$.model.pattern", value=text, hint=hint
    )


def spread(rare: int, rare_word: T, common: int, common_word: T) -> list[T]:
    """`rare` and `common` words in one list, the rare ones as far apart and as late as possible."""
    total = rare + common
    return [rare_word if (i + 1) * rare // total > i * rare // total else common_word for i in range(total)]


def merge(a: Sequence[T], b: Sequence[T]) -> list[T]:
    """One list in which both sequences run evenly."""
    total, merged, take_a, take_b = len(a) + len(b), [], iter(a), iter(b)
    for i in range(total):
        from_a = (i + 1) * len(a) // total > i * len(a) // total
        merged.append(next(take_a) if from_a else next(take_b))
    return merged
