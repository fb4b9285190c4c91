"""Strict reading of one `config.json`: every value is typed, bounded and accounted for, and every problem is collected.

Keys that a family does not ask for are ignored (configurations carry training and tokenizer settings); keys that it
asks for are never guessed. A default is used only where the model's own configuration class in transformers has it,
and the shape's notes list every default that was used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from strategist.catalog import rows
from strategist.errors import InputError, shown
from strategist.facts.model import ModelShape
from strategist.records import dataclass, field

T = TypeVar("T")

MAX_WIDTH = 10**6
MAX_FFN = 10**7
MAX_HEADS = 2**16
MAX_EXPERTS = 2**16
MAX_VOCAB = 10**8
MAX_TOKENS = 2**31

_LAST = ("DIVISIBILITY", "MISSING")
"""Codes reported after all others found in the same file: they are often only their consequence."""


@dataclass(slots=True)
class Ledger:
    """What reading one file brought up: problems, defaults that stood in for absent keys, and things to tell."""

    problems: list[InputError] = field(default_factory=list)
    defaults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@cache
def class_defaults(model_type: str) -> Mapping[str, Any]:
    """What the configuration class of a `model_type` has for keys that a file may leave out (catalogue data)."""
    return next((row["defaults"] for row in rows("config_defaults") if row["model_type"] == model_type), {})


class Config:
    """One object of a configuration file, at `path` in it.

    Wrong values are noted in the ledger and replaced by a harmless one, so that all problems of a file are reported
    together by `settle`. `class_defaults` are those of the model's configuration class in transformers; what a shape
    cannot do without is taken from them only inside composite configurations (`nested`), where transformers itself
    leaves out what equals the default.
    """

    def __init__(
        self,
        values: Mapping[Any, Any],
        flag: str,
        *,
        path: str = "$",
        ledger: Ledger | None = None,
        class_defaults: Mapping[str, Any] | None = None,
        nested: bool = False,
    ) -> None:
        self.values, self.flag, self.path, self.nested = values, flag, path, nested
        self.ledger = Ledger() if ledger is None else ledger
        self.class_defaults = class_defaults or {}

    def within(self, key: str, class_defaults: Mapping[str, Any] | None = None, *, nested: bool = False) -> Config:
        """The object under `key`, read into the same ledger; an absent one is a MISSING problem and reads as empty."""
        found = self.values.get(key)
        if found is None:
            self.refuse("MISSING", key, "is missing", hint="Add it; nothing is guessed.")
        elif not isinstance(found, Mapping):
            self.refuse("TYPE", key, "must be an object", value=_echo(found))
        values = found if isinstance(found, Mapping) else {}
        path = f"{self.path}.{key}"
        return Config(values, self.flag, path=path, ledger=self.ledger, class_defaults=class_defaults, nested=nested)

    def saying(self, **values: Any) -> Config:
        """The same object with these values instead of its own."""
        said = {**self.values, **values}
        return Config(said, self.flag, path=self.path, ledger=self.ledger, class_defaults=self.class_defaults, nested=self.nested)  # fmt: skip

    def refuse(self, code: str, key: str, rule: str, *, value: object = None, hint: str = "Correct it.") -> None:
        """Note a problem with the value at `key`."""
        place = f"{self.path}.{key}" if key else self.path
        error = InputError(code, f"{self.flag}: {place} {rule}.", flag=place, value=value, hint=hint)
        self.ledger.problems.append(error)

    def settle(self) -> None:
        """Raise the problems found so far as one InputError that carries the others in `also`."""
        if self.ledger.problems:
            first, *rest = sorted(self.ledger.problems, key=lambda error: error.code in _LAST)
            also = rest[:19]
            raise InputError(first.code, first.message, flag=first.flag, value=first.value, hint=first.hint, also=also)

    def has(self, key: str) -> bool:
        """True when the key is there and not null."""
        return self.values.get(key) is not None

    def integer(self, *keys: str, high: int, low: int = 1) -> int:
        """A required whole number in [low, high] under the first of `keys` that is present (they are synonyms)."""
        found = self.optional(*keys, high=high, low=low) if self.nested or self._present(keys) else None
        if found is None:
            self.refuse("MISSING", keys[0], "is missing", hint="Add it; nothing is guessed.")
            return low
        return found

    def optional(self, *keys: str, high: int, low: int = 1) -> int | None:
        """A whole number in [low, high]; an absent one is the class's default, None where it has none. A null is none, as it is in
        the class: it takes the default's place."""
        key = self._present(keys)
        if key:
            self._agree(keys)
            return self._bounded(key, self.values[key], low, high)
        if any(key in self.values for key in keys):
            return None
        default = next((self.class_defaults[key] for key in keys if key in self.class_defaults), None)
        return None if default is None else self.default(keys[0], int(default))

    def yes(self, key: str) -> bool:
        """A yes/no; an absent one is the class's default, and no where it has none; a null is no."""
        return self._typed(key, bool, "true or false", False)

    def word(self, key: str) -> str:
        """A text; an absent one is the class's default, and empty where it has none; a null is empty."""
        return self._typed(key, str, "a text", "")

    def chosen(self, key: str, known: Mapping[str, T]) -> T:
        """What the word under `key` stands for; a problem, and what the class's default stands for, where it is none of those known."""
        word = self.word(key)
        if word not in known:
            rule, hint = f"is {shown(word)!r}, which is not read", f"Known: {', '.join(known)}."
            self.refuse("CHOICE", key, rule, value=word, hint=hint)
        return known.get(word, known[self.class_defaults[key]])

    def only(self, key: str, value: object, why: str = "anything else changes what the layers are made of") -> None:
        """Accept `key` only when it, or the class's default where it is absent, is `value`: others change the layers."""
        found = self.values[key] if key in self.values else self.class_defaults.get(key)
        is_off = found is None and key in self.values and value is True  # a null is no
        if is_off or (found is not None and (type(found) is not type(value) or found != value)):
            rule = f"is {_echo(found)}; only {_echo(value)} can be read, since {why}"
            self.refuse("CHOICE", key, rule, value=_echo(found), hint="Pass a shape close to it with --model or --model-size.")  # fmt: skip

    def list_of(self, kind: type[T], key: str, *, limit: int) -> list[T] | None:
        """A list of at most `limit` values of one type, or None when absent."""
        found = self.values.get(key)
        if found is None:
            return None
        if not isinstance(found, (list, tuple)) or any(type(item) is not kind for item in found):
            self.refuse("TYPE", key, f"must be a list of {'texts' if kind is str else 'whole numbers'}", value=_echo(found))  # fmt: skip
            return None
        if len(found) > limit:
            self.refuse("TOO_LARGE", key, f"has {len(found)} entries; the limit is {limit}")
            return None
        return list(found)

    def default(self, key: str, value: T) -> T:
        """`value` standing in for an absent key, noted in the ledger."""
        self.ledger.defaults.append(f"{self.path}.{key} = {_echo(value)}")
        return value

    def divisible(self, number: int, key: str, divisor: int, by: str) -> None:
        """Note a problem unless `divisor` divides `number`."""
        if number % max(divisor, 1):
            rule = f"is {number}, which {by} ({divisor}) does not divide"
            self.refuse("DIVISIBILITY", key, rule, value=number, hint=f"Make {key} a multiple of {by}.")

    def at_most(self, number: int, key: str, limit: int, of: str) -> None:
        """Note a problem when `number` exceeds another value of the file."""
        if number > limit:
            self.refuse("RANGE", key, f"is {number}, more than {of} ({limit})", value=number)

    def _present(self, keys: Sequence[str]) -> str:
        return next((key for key in keys if self.has(key)), "")

    def _agree(self, keys: Sequence[str]) -> None:
        """Note a problem where two names of one fact have different values: which one counts depends on who reads the file."""
        first, *others = (key for key in keys if self.has(key))
        other = next((key for key in others if self.values[key] != self.values[first]), None)
        if other is not None:
            rule = f"is {_echo(self.values[first])} and {other}, another name of it, is {_echo(self.values[other])}"
            self.refuse("CONFLICT", first, rule, value=_echo(self.values[first]), hint="Keep one of them.")

    def _typed(self, key: str, kind: type[T], words: str, otherwise: T) -> T:
        found = self.values.get(key)
        if found is None:
            has_default = key in self.class_defaults and key not in self.values
            return self.default(key, self.class_defaults[key]) if has_default else otherwise
        if type(found) is not kind:
            self.refuse("TYPE", key, f"must be {words}", value=_echo(found))
            return otherwise
        return found

    def _bounded(self, key: str, found: object, low: int, high: int) -> int:
        if isinstance(found, float) and found > high:  # 1e9 layers are too many before they are not whole
            self.refuse(
                "TOO_LARGE", key, f"is {_echo(found)}; it must lie between {low} and {high}", value=_echo(found)
            )
            return low
        if type(found) is not int:
            self.refuse("TYPE", key, "must be a whole number", value=_echo(found), hint="Write it without quotes, point or exponent.")  # fmt: skip
            return low
        if low <= found <= high:
            return found
        code = "TOO_LARGE" if found > high else "NEGATIVE" if found < 0 else "TOO_SMALL"
        self.refuse(code, key, f"is {_echo(found)}; it must lie between {low} and {high}", value=_echo(found))
        return low


def _echo(value: object) -> str:
    """A value as it may be printed: scalars as JSON, anything larger by its type."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    return shown(json.dumps(value)) if value is None or isinstance(value, (str, int, float)) else type(value).__name__


@dataclass(frozen=True, slots=True)
class Family:
    """A group of architectures, and how the configuration of each `model_type` in it is read."""

    name: str
    readers: Mapping[str, Callable[[Config], ModelShape]]
