"""From words to options. The flags are rows of data, so reading them is one loop, and every complaint is one of our
errors with a code and a hint. (argparse would ask for translations and the terminal before it reads a word: 20 ms.)"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from strategist.cli.flags import Flag
from strategist.errors import InputError, did_you_mean
from strategist.records import dataclass, replace
from strategist.reports.lines import Line, line, table, wrapped

HELP = ("-h", "--help")
Namespace = SimpleNamespace


@dataclass(frozen=True, slots=True)
class Positional:
    """A word without a flag. An optional one may be left out; one that repeats stands last and takes all further words."""

    name: str
    help: str
    optional: bool = False
    repeats: bool = False


PLAN = Positional("plan", "a Plan file; - is standard input")


@dataclass(frozen=True, slots=True)
class Command:
    """What a command takes and says about itself."""

    name: str
    summary: str
    flags: tuple[Flag, ...]
    positionals: tuple[Positional, ...] = ()
    examples: tuple[str, ...] = ()


def wants_help(words: Sequence[str]) -> bool:
    """Whether help is asked for, in front of any `--`."""
    own = words[: list(words).index("--")] if "--" in words else words
    return any(word in HELP for word in own)


def parse(command: Command, words: Sequence[str]) -> Namespace:
    """The options of some words: every flag and positional as an attribute, None or False or () when not given.

    A value may begin with a dash (`--nodes -4`) as long as it is not a flag. Raises InputError UNKNOWN_KEY, MISSING,
    DUPLICATE_FLAG, PARSE.
    """
    flags = {flag.name: flag for flag in command.flags}
    values: dict[str, list[str]] = {flag.key: [] for flag in command.flags}
    rest: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("-") or word == "-":
            rest.append(word)
        elif name not in flags:
            raise _unknown(command, name)
        else:
            values[name.lstrip("-").replace("-", "_")].append(_value(flags[name], equals, value, waiting, flags))
    options = {flag.key: _settled(flag, values[flag.key]) for flag in command.flags}
    return Namespace(**options, **_named(command, rest))


OTHERS_WORDS: Mapping[str, str] = {
    "--output": "--out",
    "-o": "--out",
    "-q": "--quiet",
    "-v": "--verbose",
    "--gpus": "--gpus-per-node",
    "--num-gpus": "--gpus-per-node",
    "--ngpus": "--gpus-per-node",
    "--nproc-per-node": "--gpus-per-node",
    "--nnodes": "--nodes",
    "--num-nodes": "--nodes",
    "--batch-size": "--global-batch",
    "--global-batch-size": "--global-batch",
    "--train-batch-size": "--global-batch",
    "--gbs": "--global-batch",
    "--micro-batch-size": "--micro-batch",
    "--per-device-train-batch-size": "--micro-batch",
    "--gradient-accumulation-steps": "--grad-accum",
    "--context-length": "--seq-len",
    "--seq-length": "--seq-len",
    "--max-seq-len": "--seq-len",
    "--sequence-length": "--seq-len",
    "--dtype": "--precision",
    "--topk": "--top",
}
"""Flags by the names that launchers and frameworks have for them."""
LAYOUT = ("--pin", "--strategy")
"""Flags that take choices of the layout, the first that a command has."""


def _unknown(command: Command, name: str) -> InputError:
    return InputError(
        "UNKNOWN_KEY", f"strategist {command.name} does not know {name}.", flag=name, hint=_meant_flag(command, name)
    )


def _meant_flag(command: Command, name: str) -> str:
    """What to write in place of a flag that a command does not have: a choice of the layout belongs to the flag that takes layouts."""
    from strategist.space.grammar import ALIASES, KEYS  # only needed once something already went wrong

    known = [flag.name for flag in command.flags]
    choice, takes = name.lstrip("-").replace("-", "_"), next((flag for flag in LAYOUT if flag in known), None)
    if takes is not None and choice in (*KEYS, *ALIASES):
        return f"{choice} is a choice of the layout: write {takes} {choice}=VALUE."
    meant = OTHERS_WORDS.get(name.replace("_", "-"))
    return f"Did you mean {meant}?" if meant in known else did_you_mean(name, known)


def _meant_for(command: Command, word: str) -> str:
    """Where a word that stands alone may belong."""
    known = [flag.name for flag in command.flags]
    named = next((flag for flag in ("--model", "--hardware") if flag in known), None)
    return f"Values belong to flags; a model, say, to {named} {word}." if named == "--model" else "Remove it; values belong to flags."  # fmt: skip


def _value(flag: Flag, equals: str, value: str, waiting: list[str], flags: dict[str, Flag]) -> str:
    """The value after `=` or the next word; switches take none."""
    if not flag.metavar:
        if equals:
            raise InputError(
                "PARSE", f"{flag.name} takes no value.", flag=flag.name, value=value, hint="Leave the value out."
            )
        return ""
    if equals:
        return value
    if not waiting or waiting[0].partition("=")[0] in (*flags, *HELP):
        raise InputError(
            "MISSING", f"{flag.name} needs a value.", flag=flag.name, hint=f"Example: {flag.name} {flag.metavar}."
        )
    return waiting.pop(0)


def _settled(flag: Flag, given: list[str]) -> bool | str | tuple[str, ...] | None:
    if not flag.metavar:
        return bool(given)
    if flag.repeats:
        return tuple(given)
    if len(given) > 1:
        raise InputError(
            "DUPLICATE_FLAG",
            f"{flag.name} is given {len(given)} times.",
            flag=flag.name,
            value=given[-1],
            hint=f"Give it once{_as_list(flag, given)}.",
        )
    return given[0] if given else None


def _as_list(flag: Flag, given: list[str]) -> str:
    """How several values are given at once, where the flag takes several."""
    return f", with commas: {flag.name} {','.join(given)}" if flag.metavar.endswith(",...") else ""


def _named(command: Command, rest: Sequence[str]) -> dict[str, str | tuple[str, ...] | None]:
    """The words without flags by the names of the positionals."""
    for number, word in enumerate(rest):
        if not word.strip() and command.positionals:
            name = command.positionals[min(number, len(command.positionals) - 1)].name.upper()
            raise InputError("EMPTY", f"{name} is empty.", flag=name, value=word, hint=f"See `strategist {command.name} --help`.")  # fmt: skip
    needed = [positional.name for positional in command.positionals if not positional.optional]
    if len(rest) < len(needed):
        missing = needed[len(rest)]
        raise InputError(
            "MISSING",
            f"strategist {command.name} needs {missing.upper()}.",
            flag=missing.upper(),
            hint=f"See `strategist {command.name} --help`.",
        )
    if command.positionals and command.positionals[-1].repeats:
        last = len(command.positionals) - 1
        few = replace(command, positionals=command.positionals[:-1])
        return _named(few, rest[:last]) | {command.positionals[-1].name: tuple(rest[last:])}
    if len(rest) > len(command.positionals):
        extra = rest[len(command.positionals)]
        raise InputError(
            "PARSE",
            f"strategist {command.name} does not expect the word.",
            flag=command.name,
            value=extra,
            hint=_meant_for(command, extra),
        )
    padded = [*rest, *[None] * (len(command.positionals) - len(rest))]
    return {positional.name: word for positional, word in zip(command.positionals, padded, strict=True)}


def help_lines(command: Command, width: int) -> list[Line]:
    """The help page of a command: examples first."""
    places = "".join(f" {_place(p)}" for p in command.positionals)
    rows = [(p.name.upper(), p.help) for p in command.positionals]
    rows += [(f"{flag.name} {flag.metavar}".rstrip(), _explained(flag)) for flag in command.flags]
    examples = [piece for example in command.examples for piece in _typed(example, width)]
    return [
        *wrapped("", f"usage: strategist {command.name}{places} [FLAGS]", width, indent=0),
        *wrapped("", command.summary, width, indent=0),
        *([line(""), line("examples"), *examples] if examples else []),
        line(""),
        *table([*rows, ("-h, --help", "this page")], width),
    ]


def _place(positional: Positional) -> str:
    """A positional as usage lines show it."""
    word = positional.name.upper() + (" ..." if positional.repeats else "")
    return f"[{word}]" if positional.optional else word


def _typed(example: str, width: int) -> list[Line]:
    """A command to copy; where it does not fit, the shell's own sign says that it goes on."""
    pieces = textwrap.wrap(example, max(8, width - 6), break_long_words=False, break_on_hyphens=False)
    return [line(row) for row in ("  " + " \\\n    ".join(pieces)).splitlines()]


def _explained(flag: Flag) -> str:
    words = f" ({', '.join(flag.choices)})" if flag.choices else ""
    return flag.help + words + (" (may be repeated)" if flag.repeats else "")
