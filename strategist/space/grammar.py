"""The one strategy grammar: `tp=4,pp=2,recompute=full`. Read by --pin, --strategy, comparisons and the Plan's layout line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from strategist.errors import InputError, near_and_known, require_known
from strategist.records import dataclass
from strategist.space.candidates import BY_STAGE, LAYERS_OF, NOT_ASKED, OF_STAGE, WORDS, Candidates, Mask
from strategist.units import parse_integer, plain_text

DEGREES = (
    "dp_replicate",
    "dp_shard",
    "cp",
    "cp_inner",
    "tp",
    "pp",
    "ep",
    "etp",
    "virtual_stages",
    "micro_batch",
    "accumulation",
)
KEYS = (
    *DEGREES,
    "zero",
    "sequence_parallel",
    "tiling",
    "schedule",
    "context_parallel",
    "recompute",
    "recompute_layers",
    "recompute_every",
    "recompute_depth",
    "offload",
    "stage_split",
    "replicas",
    "compression",
    "loss",
    "tables",
    "dp",
)
ALIASES: Mapping[str, str] = {
    "vp": "virtual_stages",
    "mbs": "micro_batch",
    "grad_accum": "accumulation",
    "sp": "sequence_parallel",
}
MAX_DEGREE = 131072 * 1024
EVERY = "every-"
"""What stands before the number of `recompute=every-2`: every second layer."""
MAX_DIGITS = 4
"""Digits of the number of a stage."""
RULED, BETWEEN = "by-stage", "/"
"""`recompute=by-stage` leaves the numbers of layers to the rule (planner/depth.py), `recompute=4/3/1/0` says them, stage by stage."""
BALANCED = "balanced"
"""`stage_split=balanced` leaves the layers of every stage to the rule (planner/balance.py), `stage_split=9/10/10/11` says them."""


@dataclass(frozen=True, slots=True)
class Pin:
    """One fixed choice. `value` is the number that stands for it in the column; `word` is how it was written."""

    key: str
    value: int
    word: str

    def holds(self, candidates: Candidates) -> Mask:
        """Candidates that make this choice, (C,)."""
        if self.key.startswith(BY_STAGE) and self.key not in candidates.columns:
            return np.full(len(candidates), True)  # the rule finds it, and finds the same again
        if self.key in NOT_ASKED and self.key not in candidates.columns:
            return np.full(len(candidates), self.value == NOT_ASKED[self.key])
        column = candidates.data_parallel if self.key == "dp" else candidates[self.key]
        return column == self.value


def parse_pins(text: str, flag: str = "--pin") -> tuple[Pin, ...]:
    """The choices of `key=value,key=value`. Raises InputError PARSE, CHOICE, RANGE, INTEGER, DUPLICATE_KEY."""
    pins = tuple(pin for part in plain_text(text, flag).split(",") for pin in _pins(part, flag))
    keys = [pin.key for pin in pins]
    for key in keys:
        if keys.count(key) > 1:
            raise InputError(
                "DUPLICATE_KEY", f"{flag} fixes {key} twice.", flag=flag, value=text, hint="Give each choice once."
            )
    return pins


def _pins(part: str, flag: str) -> tuple[Pin, ...]:
    """One choice; `recompute=N` is two, full recompute and of how many layers, and so are `recompute=every-N` and `recompute=by-stage`;
    `recompute=N/M` has a third for every stage. `stage_split=N/M` is one and another for every stage."""
    key, equals, value = (piece.strip(" ") for piece in part.partition("="))
    if not equals or not key:
        raise InputError("PARSE", f"{flag} expects key=value.", flag=flag, value=part, hint="Example: tp=4,pp=2.")
    name = known_key(key, flag)
    if name == "recompute" and value.isascii() and value.isdigit():
        return _pin(name, "full", flag), _pin("recompute_layers", value, flag)
    if name == "recompute" and value.startswith(EVERY):
        return _pin(name, "full", flag), _pin("recompute_every", value.removeprefix(EVERY), flag)
    if name == "recompute" and (value == RULED or BETWEEN in value):
        numbers = () if value == RULED else value.split(BETWEEN)
        return _pin(name, "full", flag), _pin("recompute_depth", RULED, flag), *_by_number(OF_STAGE, numbers, flag)
    if name == "stage_split" and BETWEEN in value:
        return _pin(name, BALANCED, flag), *_by_number(LAYERS_OF, value.split(BETWEEN), flag)
    return (_pin(name, value, flag),)


def _by_number(prefix: str, numbers: Sequence[str], flag: str) -> tuple[Pin, ...]:
    """A choice for every stage."""
    return tuple(_pin(f"{prefix}{stage}", number.strip(" "), flag) for stage, number in enumerate(numbers))


def _pin(name: str, value: str, flag: str) -> Pin:
    if name in WORDS:
        return Pin(name, _word(name, value, flag), value)
    bounds = {
        "zero": (0, 3),
        "sequence_parallel": (0, 1),
        "recompute_every": (2, MAX_DEGREE),
        "cp_inner": (2, MAX_DEGREE),
    }
    low, high = bounds.get(name, (0 if name.startswith(OF_STAGE) else 1, MAX_DEGREE))
    number = parse_integer(value, f"{flag} {name}", low=0, high=MAX_DEGREE, example=f"{name}={max(low, 1)}")
    if not low <= number <= high:
        raise InputError(
            "RANGE",
            f"{flag}: {name} must lie between {low} and {high}.",
            flag=flag,
            value=value,
            hint=f"Example: {name}={max(low, 1)}.",
        )
    return Pin(name, number, value)


def known_key(key: str, flag: str) -> str:
    """The canonical name of a choice. Raises InputError CHOICE with the nearest names."""
    name = ALIASES.get(key.lower(), key.lower().replace("-", "_"))
    if name not in KEYS and not _is_of_stage(name):
        raise InputError(
            "CHOICE",
            f"{flag}: {key!r} is not a choice of the layout.",
            flag=flag,
            value=key,
            hint=near_and_known(key, KEYS),
        )
    return name


def _is_of_stage(name: str) -> bool:
    """Whether a key is `recompute_stage_` or `stage_layers_` and the number of a stage."""
    number = name.removeprefix(OF_STAGE).removeprefix(LAYERS_OF)
    is_number = number.isascii() and number.isdigit() and len(number) <= MAX_DIGITS
    return name in (f"{OF_STAGE}{number}", f"{LAYERS_OF}{number}") and is_number and str(int(number)) == number


def _word(name: str, value: str, flag: str) -> int:
    known = WORDS[name]
    require_known(value, known, f"{flag}: {value!r} is not a value of {name}.", flag)
    return known.index(value)


FORBIDDABLE = (
    "tp",
    "pp",
    "cp",
    "ep",
    "dp",
    "zero",
    "hsdp",
    "offload",
    "recompute",
    "sequence_parallel",
    "interleaved",
    "gpipe",
    "looped_bfs",
    "tiling",
)


DEPTHS: Mapping[str, str] = {
    "recompute_layers": "recompute_layers",
    "recompute_by_stage": "recompute_depth",
    "balanced_stages": "recompute_depth",
}
"""Full recompute of some layers, each with the choice that it makes: of the first N of every chunk for each N, or of every stage as many as
it needs, with the layers that the stages have else, or with such that none is slower for it."""
ADDABLE = ("gpipe", "looped_bfs", "zb_h1", "zbv", "dualpipev", "tiling", "hierarchical", "uneven_batch", *DEPTHS)
"""Techniques that a search leaves out, everywhere or where others do as well, unless somebody asks for them. An uneven batch is looked at
behind the search (planner/uneven.py)."""


def parse_forbids(text: str, flag: str = "--forbid") -> tuple[str, ...]:
    """Techniques to leave out, such as `pp,offload`. Raises InputError CHOICE with the nearest names, DUPLICATE_KEY."""
    return _techniques(text, flag, FORBIDDABLE, "left out")


def parse_also(text: str, flag: str = "--also") -> tuple[str, ...]:
    """Techniques to look at beside those of every search, such as `zb_h1,zbv`. Raises InputError CHOICE with the nearest names, DUPLICATE_KEY."""
    return _techniques(text, flag, ADDABLE, "added")


def _techniques(text: str, flag: str, known: tuple[str, ...], done: str) -> tuple[str, ...]:
    words = tuple(part.strip(" ").lower().replace("-", "_") for part in plain_text(text, flag).split(","))
    for word in words:
        if word not in known:
            raise InputError(
                "CHOICE",
                f"{flag}: {word!r} is not a technique that can be {done}.",
                flag=flag,
                value=word,
                hint=near_and_known(word, known),
            )
        if words.count(word) > 1:
            raise InputError("DUPLICATE_KEY", f"{flag} names {word} twice.", flag=flag, value=text, hint="Name each technique once.")  # fmt: skip
    return words


def forbidden(word: str, candidates: Candidates) -> Mask:
    """Candidates that use a technique, (C,)."""
    if word in ("tp", "pp", "cp", "ep"):
        return candidates[word] > 1
    if word == "dp":
        return candidates.data_parallel > 1
    if word == "hsdp":
        return (candidates["dp_replicate"] > 1) & (candidates["dp_shard"] > 1)
    if word in WORDS["schedule"]:
        return candidates.is_word("schedule", word)
    return candidates[word] > (1 if word == "tiling" else 0)


def layout(row: Mapping[str, int | str]) -> str:
    """One layout in the grammar: degrees above 1 and choices away from their plain value, in a fixed order."""
    for name, before in (("recompute_layers", ""), ("recompute_every", EVERY)):
        if row.get(name):  # recompute=N and recompute=every-N say both
            row = {key: f"{before}{row[name]}" if key == "recompute" else row[key] for key in row if key != name}
    if row.get("recompute_depth") == RULED:
        row = {**row, "recompute": _by_stage(row, OF_STAGE, RULED), "recompute_depth": "alike"}
    if row.get("stage_split") == BALANCED:
        row = {**row, "stage_split": _by_stage(row, LAYERS_OF, BALANCED)}
    plain: Mapping[str, int | str] = {
        "zero": 0,
        "sequence_parallel": 0,
        "schedule": "none",
        "context_parallel": "none",
        "recompute": "none",
        "recompute_layers": 0,
        "recompute_every": 0,
        "recompute_depth": "alike",
        "offload": "none",
        "stage_split": "even",
        "replicas": "processes",
        "compression": "none",
        "loss": "whole",
        "tables": "local",
    }
    always = ("micro_batch", "accumulation")
    shown = [key for key in (*KEYS[:-1],) if key in row and (key in always or row[key] != plain.get(key, 1))]
    degrees = [key for key in ("pp", "dp_replicate", "dp_shard", "cp", "cp_inner", "tp", "ep", "etp") if key in shown]
    rest = [key for key in shown if key not in degrees]
    return ", ".join(f"{key}={row[key]}" for key in (*degrees, *rest)) or "single"


def _by_stage(row: Mapping[str, int | str], prefix: str, ruled: str) -> str:
    """What a row says of each stage; a word where it leaves that to the rule."""
    numbers = [row.get(f"{prefix}{stage}") for stage in range(int(row["pp"]))]
    return ruled if None in numbers else BETWEEN.join(map(str, numbers))
