"""Parse and print bytes, rates, counts, seconds. Inside the package: bytes, seconds, FLOP, B/s, FLOP/s; nothing else.

Numbers follow one ASCII grammar and are read as `Decimal`, so 6.738415616B is exactly 6738415616 and nothing that
Python's `int()` or `float()` would let pass (underscores, full-width digits, "inf") gets through.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from math import ceil

from strategist.errors import InputError, is_hostile, shown

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
GB = 10**9

_DECIMAL = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_BYTES = {"B": 1} | {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")} | {f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")}  # fmt: skip
_BITS = {f"{p}b": Decimal(1000 ** (i + 1)) / 8 for i, p in enumerate("KMGT")}
_DURATION = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}

Units = Mapping[str, int]
"""What limits are said in, and how much each is; the first is the smallest."""
_MEMORY, _RATES, _TIMES, _COUNTS = {"B": 1, "TiB": TIB}, {"MB/s": 10**6, "GB/s": 10**9}, {"s": 1, "d": 86400}, {"": 1, "T": 10**12}  # fmt: skip

_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE]([+-]?[0-9]+))?")
_SIGNED = re.compile(r"-\s*[0-9.]")
_NOT_FINITE = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)


def plain_text(text: str, flag: str, example: str = "") -> str:
    """`text` without outer blanks; refuses emptiness and characters that steer a terminal or a shell."""
    if any(is_hostile(c) for c in text):
        raise InputError(
            "CONTROL_CHAR",
            f"{flag} contains a control or formatting character.",
            flag=flag,
            value=text,
            hint="Remove it.",
        )
    stripped = text.strip(" ")
    if not stripped:
        hint = f"Example: {flag} {example}." if example else "Give a value or leave the flag out."
        raise InputError("EMPTY", f"{flag} is empty.", flag=flag, value=text, hint=hint)
    return stripped


def _split(text: str, flag: str, example: str, accepted: str = "") -> tuple[Decimal, str]:
    """Number and unit of `text`; the unit is returned as written. `accepted` lists the forms for the complaint."""
    text = plain_text(text, flag, example)
    if _SIGNED.match(text):
        raise InputError("NEGATIVE", f"{flag} must not be negative.", flag=flag, value=text, hint=f"Example: {example}.")  # fmt: skip
    if _NOT_FINITE.fullmatch(text):
        raise InputError("NOT_FINITE", f"{flag} must be a finite number.", flag=flag, value=text, hint=f"Example: {example}.")  # fmt: skip
    match = _NUMBER.match(text)
    if match is None:
        raise InputError("PARSE", f"{flag} is not a number: {shown(text)}.{accepted}", flag=flag, value=text, hint=f"Example: {example}.")  # fmt: skip
    exponent = match[2]
    if exponent is not None and len(exponent.lstrip("+-")) > 3:
        raise _bound_error("TOO_SMALL" if exponent.startswith("-") else "TOO_LARGE", text, flag, "", example)
    return Decimal(match[0]), text[match.end() :].strip(" ")


def _bound_error(code: str, text: object, flag: str, limit: str, example: str) -> InputError:
    word = "large" if code == "TOO_LARGE" else "small"
    allowed = f" The {'limit' if word == 'large' else 'smallest allowed'} is {limit}." if limit else ""
    return InputError(code, f"{flag} is too {word}.{allowed}", flag=flag, value=text, hint=f"Example: {example}.")


def _bounded(
    value: Decimal,
    text: str,
    flag: str,
    low: int | Decimal,
    high: int | Decimal,
    example: str,
    units: Units | None = None,
) -> Decimal:
    units = units or {"": 1}
    if value > high:
        raise _bound_error("TOO_LARGE", text, flag, _limit(high, units), example)
    if value < low:
        raise _bound_error("TOO_SMALL", text, flag, _limit(low, units), example)
    return value


def _limit(bound: int | Decimal, units: Units) -> str:
    """Limits are round numbers, in the largest unit that they are one of, as a flag takes them; what people could count on is written out."""
    unit, each = max(((unit, each) for unit, each in units.items() if bound >= each), key=lambda one: one[1], default=next(iter(units.items())))  # fmt: skip
    said = bound if each == 1 else int(bound // each)
    return f"{said if said < 10**10 else f'{float(said):.6g}'.replace('e+', 'e')}{unit}"


def parse_integer(text: str, flag: str, *, low: int = 1, high: int, example: str) -> int:
    """A whole number in [low, high]. Raises InputError INTEGER for 1.5, 8.0 and 1e3; PARSE for lists and ranges."""
    number, rest = _split(text, flag, example)
    if rest:
        kind = "Lists are for `sweep`." if rest[0] in ";," else "Ranges are not accepted." if rest[0] == ":" else f"Example: {example}."  # fmt: skip
        raise InputError("PARSE", f"{flag} must be one whole number.", flag=flag, value=text, hint=kind)
    if number > high:
        raise _bound_error("TOO_LARGE", text, flag, _limit(high, {"": 1}), example)
    if not text.strip(" ").isdigit():
        raise InputError("INTEGER", f"{flag} must be a whole number written with digits only.", flag=flag, value=text, hint=f"Example: {example}.")  # fmt: skip
    return int(_bounded(number, text, flag, low, high, example))


def parse_count(text: str, flag: str, *, low: int, high: int, example: str) -> int:
    """A count such as 350M, 7B, 1.5T, 6738415616 or 7e9, decimal-exact.

    Raises InputError: UNIT for byte units (7GiB), PARSE for anything else that is not K, M, B or T, INTEGER when the
    product is not whole.
    """
    accepted = " Accepted: 350M, 7B, 1.5T, 6738415616, 7e9."
    number, unit = _split(text, flag, example, accepted)
    if unit.upper() not in _DECIMAL and unit:
        if unit in _BYTES or unit in _BITS:
            raise InputError("UNIT", f"{flag} counts things, not bytes.", flag=flag, value=text, hint=f"Example: {example}.")  # fmt: skip
        hint = "Use B for 1e9." if unit.upper() == "G" else f"Write it without separators, for example {example}."
        raise InputError("PARSE", f"{flag} is not a count: {shown(text)}.{accepted}", flag=flag, value=text, hint=hint)  # fmt: skip
    value = _bounded(number * _DECIMAL.get(unit.upper(), 1), text, flag, low, high, example, _COUNTS)
    if value != value.to_integral_value():
        raise InputError("INTEGER", f"{flag} must come out whole, and {shown(text)} does not.", flag=flag, value=text, hint=f"Example: {example}.")  # fmt: skip
    return int(value)


def parse_real(text: str, flag: str, *, low: Decimal = Decimal(0), high: Decimal, example: str) -> float:
    """A plain number in [low, high] without a unit. Raises InputError RANGE outside."""
    number, rest = _split(text, flag, example)
    if rest:
        raise InputError("PARSE", f"{flag} must be a plain number.", flag=flag, value=text, hint=f"Example: {example}.")  # fmt: skip
    if not low <= number <= high:
        raise InputError("RANGE", f"{flag} must lie between {low} and {high}.", flag=flag, value=text, hint=f"Example: {example}.")  # fmt: skip
    return float(number)


def _with_unit(text: str, flag: str, table: Mapping[str, int | Decimal], wrong: str, example: str) -> Decimal:
    number, unit = _split(text, flag, example)
    if unit not in table:
        said = f"{shown(unit)} is not a unit of it" if unit else "a unit is missing"
        raise InputError("UNIT", f"{flag}: {said}. {wrong}", flag=flag, value=text, hint=f"Example: {example}.")
    return number * table[unit]


def parse_bytes(text: str, flag: str, *, low: int = 1, high: int = 16 * TIB, example: str = "80GiB") -> int:
    """A memory size in bytes: GB is 1e9 bytes, GiB is 2**30. Raises InputError UNIT without a unit or for bits."""
    wrong = "Gigabits do not measure memory; did you mean GB?" if text.rstrip(" ").endswith("b") else "Say GiB (2**30) or GB (1e9)."  # fmt: skip
    value = _with_unit(text, flag, _BYTES, wrong, example)
    return int(_bounded(value, text, flag, low, high, example, _MEMORY))


LOWEST_RATE_BPS, HIGHEST_RATE_BPS = 10**6, 10**15
"""Links between devices are no slower: the first Ethernet had 10 Mb/s."""


def parse_rate(text: str, flag: str, *, example: str = "400Gb/s") -> float:
    """A data rate in bytes per second, one direction. 400Gb/s equals 50GB/s. Raises InputError UNIT without a unit."""
    table = {f"{u}{per}": factor for u, factor in (_BYTES | _BITS).items() for per in ("/s", "ps")}
    value = _with_unit(text, flag, table, "Say bits or bytes: Gb/s or GB/s.", example)
    return float(_bounded(value, text, flag, LOWEST_RATE_BPS, HIGHEST_RATE_BPS, example, _RATES))


DAY = 86400
LONGEST = 10**10
"""Seconds of the longest duration that can be said."""


def parse_duration(text: str, flag: str, *, example: str = "30d", high: int = LONGEST) -> float:
    """A duration in seconds: 90s, 30min, 12h, 30d, 2w."""
    value = _with_unit(text, flag, _DURATION, "Say s, min, h, d or w.", example)
    return float(_bounded(value, text, flag, Decimal("0.001"), high, example, _TIMES))


def three_digits(value: float) -> str:
    """A figure with three significant digits, or all digits before the point: `12.9`, `0.85`, `1510`; never `1.51e+03`."""
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def format_gib(value: float) -> str:
    """Bytes as GiB with three significant digits: `79.6 GiB`; below a tenth of a GiB as MiB, and so on down."""
    for factor, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(value) >= 0.1 * factor:
            return f"{three_digits(value / factor)} {unit}"
    return f"{value:.0f} B"


def counted(number: int, noun: str, words: str = "") -> str:
    """A number of things, as it stands or in `words`: `1 run`, `24 runs`, `1.05 M tokens`; of nouns whose plural ends in s."""
    return f"{words or number} {noun}{'' if number == 1 else 's'}"


def format_count(value: float) -> str:
    """A count with three significant digits and K, M, B or T: `6.74 B`."""
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{three_digits(value / factor)} {suffix}"
    return f"{value:.0f}"


def format_seconds(value: float) -> str:
    """Seconds with three significant digits in the fitting unit: `12.9 s`, `850 ms`, `17 us`."""
    for factor, suffix in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= factor:
            return f"{three_digits(value / factor)} {suffix}"
    return f"{three_digits(value / 1e-9)} ns" if value else "0 s"


def format_duration(value: float) -> str:
    """A long duration in two parts: `38 d 6 h`, `34 h 10 min`, `12 min`."""
    minutes = round(value / 60)
    if minutes >= 2 * 1440:
        return f"{minutes // 1440} d {minutes % 1440 // 60} h"
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min" if minutes else format_seconds(value)


def as_flag(seconds: float) -> str:
    """The shortest duration as long, in whole units of which there are ten or more, in the words of `parse_duration`: `39d`, `14h`, `1s`."""
    unit, each = next(((unit, each) for unit, each in (("d", DAY), ("h", 3600), ("min", 60)) if seconds > 9 * each), ("s", 1))  # fmt: skip
    return f"{max(1, ceil(seconds / each))}{unit}"


def format_rate(value: float) -> str:
    """Bytes per second as GB/s: `450 GB/s`."""
    return f"{three_digits(value / GB)} GB/s"
