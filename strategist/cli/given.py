"""Values of flags, from words to types. All faults are collected, so that one run shows all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from strategist.ask import Given
from strategist.cli.arguments import Namespace
from strategist.cli.flags import HARDWARE, PLAN_FLAGS, Flag
from strategist.errors import ECHO_LIMIT, InputError, StrategistError, did_you_mean, near_and_known, shown
from strategist.facts.flags import parse_gpus_per_node, parse_nodes
from strategist.facts.job import MAX_HEADROOM
from strategist.facts.workload import MAX_BATCH, MAX_IMBALANCE, MAX_RANK, MAX_SEQ_LEN
from strategist.fields import MAX_BUDGET, MAX_PRICE, MAX_TOKENS, MAX_TOP, UNRECORDED
from strategist.reading import ERROR_LIMIT, parse_toml, read_text
from strategist.units import parse_bytes, parse_count, parse_integer, parse_rate, parse_real, plain_text

SYNONYMS: Mapping[str, str] = {
    "fastest": "time",
    "speed": "time",
    "cheapest": "cost",
    "price": "cost",
    "simplest": "simplicity",
}

Reader = Callable[[str, str], Any]


def choice(words: Sequence[str]) -> Reader:
    """A reader for one word of a closed list."""

    def read(text: str, flag: str) -> str:
        word = plain_text(text, flag).lower()
        if word not in words:
            near = SYNONYMS.get(word)
            hint = f"Did you mean {near}?" if near in words else did_you_mean(word, words)
            raise InputError("CHOICE", f"{flag} must be one of {', '.join(words)}.", flag=flag, value=text, hint=hint)
        return word

    return read


def whole(low: int, high: int, example: str) -> Reader:
    """A reader for whole numbers."""
    return lambda text, flag: parse_integer(text, flag, low=low, high=high, example=example)


def real(high: Decimal, example: str, low: Decimal = Decimal(0)) -> Reader:
    """A reader for plain numbers, from 0 unless something else is said."""
    return lambda text, flag: parse_real(text, flag, low=low, high=high, example=example)


def words(example: str) -> Reader:
    """A reader for plain text."""
    return lambda text, flag: plain_text(text, flag, example)


READERS: Mapping[str, Reader] = {
    "model_size": words("7B"),
    "model": words("llama-3.1-8b"),
    "model_config": words("config.json"),
    "hardware": words("dgx-h100:4"),
    "gpu": words("h100-sxm-80gb"),
    "gpus_per_node": parse_gpus_per_node,
    "nodes": parse_nodes,
    "gpu_memory": parse_bytes,
    "intra_bw": lambda text, flag: parse_rate(text, flag, example="450GB/s"),
    "inter_bw": lambda text, flag: parse_rate(text, flag, example="400Gb/s"),
    "seq_len": whole(1, MAX_SEQ_LEN, "4096"),
    "target_len": whole(1, MAX_SEQ_LEN, "128"),
    "global_batch": whole(1, MAX_BATCH, "256"),
    "micro_batch": whole(1, MAX_BATCH, "2"),
    "grad_accum": whole(1, MAX_BATCH, "16"),
    "tokens": lambda text, flag: parse_count(text, flag, low=1, high=MAX_TOKENS, example="1T"),
    "lora_rank": whole(1, MAX_RANK, "16"),
    "expert_imbalance": real(Decimal(MAX_IMBALANCE), "1.5", Decimal(1)),
    "headroom": real(Decimal(str(MAX_HEADROOM)), "0.05"),
    "price_per_gpu_hour": real(Decimal(MAX_PRICE), "2.50"),
    "top": whole(1, MAX_TOP, "5"),
    "time_budget": real(Decimal(MAX_BUDGET), "10"),
}
FIELDS: Mapping[str, str] = {"gpu_memory": "gpu_memory_bytes", "intra_bw": "intra_Bps", "inter_bw": "inter_Bps"}
YES = ("uncalibrated",)
"""Flags without a value that say something about the question."""
TEXTUAL = ("calibration", "lora_targets", "pin", "strategy", "forbid", "also", "rules")


def given_from(namespace: Namespace, flags: Sequence[Flag] = PLAN_FLAGS) -> tuple[Given, int]:
    """The typed values of a command's flags and how many alternatives to show. Raises InputError; further faults ride
    along in `also`."""
    told = _with_config(namespace, flags)
    values = _typed(told, flags)
    top = values.pop("top", 5)
    said = tuple(
        (flag.name, _said(told[flag.key]))
        for flag in flags
        if flag.key not in UNRECORDED and told.get(flag.key) not in (None, (), False)
    )
    return Given(**values, said=said), top


def values_from(namespace: Namespace, flags: Sequence[Flag], further: Mapping[str, Reader]) -> dict[str, Any]:
    """The typed values of a command's flags by their keys; `further` reads those that mean something else than elsewhere.
    Raises as `given_from`."""
    return _typed(_with_config(namespace, flags), flags, {**READERS, **further})


def several(read: Reader) -> Reader:
    """A reader for values parted by commas."""
    return lambda text, flag: tuple(read(part, flag) for part in plain_text(text, flag).split(","))


def _typed(
    told: Mapping[str, Any], flags: Sequence[Flag] = PLAN_FLAGS, readers: Mapping[str, Reader] = READERS
) -> dict[str, Any]:
    """Every value read; all faults at once."""
    values: dict[str, Any] = {}
    faults: list[StrategistError] = []
    for flag in flags:
        text = told.get(flag.key)
        if text in (None, (), False):
            continue
        try:
            values[FIELDS.get(flag.key, flag.key)] = _read(flag, text, readers)
        except StrategistError as fault:
            faults.append(fault)
    _raise_all(faults)
    return values


def given_from_hardware(namespace: Namespace) -> Given:
    """The typed machine flags alone."""
    return Given(**_typed({flag.key: getattr(namespace, flag.key) for flag in HARDWARE}))


def _said(value: Any) -> str:
    if value is True:
        return "yes"
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _read(flag: Flag, text: Any, readers: Mapping[str, Reader]) -> Any:
    if flag.key in (*TEXTUAL, *YES):
        return text
    reader = choice(flag.choices) if flag.choices else readers[flag.key]
    return reader(text, flag.name)


def _raise_all(faults: Sequence[StrategistError]) -> None:
    if not faults:
        return
    first, *rest = faults
    if rest:
        raise InputError(
            first.code, first.message, flag=first.flag, value=first.value, hint=first.hint, also=rest[: ERROR_LIMIT - 1]
        )
    raise first


def _with_config(namespace: Namespace, flags: Sequence[Flag]) -> dict[str, Any]:
    """Words of the command line over words of the config file."""
    said = {key: getattr(namespace, key) for key in _settings(flags)}
    if namespace.config is None:
        return said
    written = _config(namespace.config, _settings(flags))
    return {key: value if value not in (None, (), False) else written.get(key) for key, value in said.items()}


def _settings(flags: Sequence[Flag]) -> list[str]:
    """Keys of the flags that say something about the question."""
    return [flag.key for flag in flags if is_asking(flag) and flag.key not in ("out", "config")]


def is_asking(flag: Flag) -> bool:
    """Whether a flag says something about the question, or where the answer goes: it has a value, or stands in YES."""
    return bool(flag.metavar) or flag.key in YES


def _config(path: str, known: Sequence[str]) -> dict[str, Any]:
    """Flags of a TOML file, by their names without dashes. Raises InputError TOML, UNKNOWN_KEY with file and line, TYPE."""
    text = read_text(path, "--config")
    table = parse_toml(text, f"--config {shown(path)}")
    for key in table:
        if key not in known:
            raise InputError(
                "UNKNOWN_KEY",
                f"{shown(path)}, line {_line_of(text, key)}: {shown(key)!r} is not a setting.",
                flag="--config",
                value=key,
                hint=near_and_known(key, known),
            )
    return {key: _as_words(path, key, value) for key, value in table.items()}


def _line_of(text: str, key: str) -> int:
    return next((n for n, row in enumerate(text.splitlines(), 1) if row.strip().strip('["').startswith(key)), 1)


def _as_words(path: str, key: str, value: Any) -> Any:
    if key == "rules":
        return tuple(str(item) for item in value) if isinstance(value, list) else (str(value),)
    if key in YES and isinstance(value, bool):
        return value
    if key in YES or isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise InputError(
            "TYPE",
            f"{shown(path)}: {key} must be {'true or false' if key in YES else 'a text or a number'}.",
            flag="--config",
            value=str(value)[:ECHO_LIMIT],
            hint=f"Write {key} = true." if key in YES else f'Write {key} = "...".',
        )
    return str(value)
