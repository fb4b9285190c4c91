"""From words to a namespace: argparse underneath, but every complaint is one of our errors with a code and a hint."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import NoReturn

from strategist.cli.flags import Flag
from strategist.errors import InputError, did_you_mean


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises InputError instead of printing usage and leaving."""

    flags: tuple[Flag, ...] = ()

    def error(self, message: str) -> NoReturn:
        """Translate argparse's complaint."""
        unknown = re.match(r"unrecognized arguments: (.*)", message)
        if unknown:
            word = unknown[1].split(" ")[0]
            raise InputError(
                "UNKNOWN_KEY", f"{self.prog} does not know {word}.", flag=word, hint=_unknown_hint(word, self.flags)
            )
        value = re.match(r"argument ([^:/]+).*: expected one argument", message)
        if value:
            raise InputError("MISSING", f"{value[1]} needs a value.", flag=value[1], hint=f"See `{self.prog} --help`.")
        missing = re.match(r"the following arguments are required: (.*)", message)
        if missing:
            raise InputError(
                "MISSING", f"{self.prog} needs {missing[1]}.", flag=missing[1], hint=f"See `{self.prog} --help`."
            )
        raise InputError("PARSE", f"{self.prog}: {message}.", hint=f"See `{self.prog} --help`.")


def _unknown_hint(word: str, flags: Sequence[Flag]) -> str:
    names = [name for flag in flags for name in (flag.name, flag.alias) if name]
    return did_you_mean(word, names) if word.startswith("-") else "Remove it; values belong to flags."


def build_parser(
    command: str,
    summary: str,
    flags: Sequence[Flag],
    positionals: Sequence[tuple[str, str, str]] = (),
    epilog: str = "",
) -> Parser:
    """The parser of one command. A positional is (name, help, how many: "1", "?" or "*")."""
    parser = Parser(
        prog=f"strategist {command}",
        description=summary,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.flags = tuple(flags)
    for name, text, count in positionals:
        parser.add_argument(name, help=text, nargs=None if count == "1" else count)
    for flag in flags:
        names = [flag.name] + ([flag.alias] if flag.alias else [])
        text = flag.help.replace("%", "%%") + (f" ({', '.join(flag.choices)})" if flag.choices else "")
        if not flag.metavar:
            parser.add_argument(*names, action="store_true", help=text, dest=flag.key)
        else:
            parser.add_argument(*names, action="append", metavar=flag.metavar, help=text, dest=flag.key)
    return parser


def parse(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """The namespace of some words: single flags once, values that begin with a dash kept as values.

    Raises InputError UNKNOWN_KEY, MISSING, DUPLICATE_FLAG.
    """
    namespace = parser.parse_args(_joined(words, parser.flags))
    for flag in parser.flags:
        values = getattr(namespace, flag.key)
        if not flag.metavar or flag.repeats:
            continue
        if values is not None and len(values) > 1:
            raise InputError(
                "DUPLICATE_FLAG",
                f"{flag.name} is given {len(values)} times.",
                flag=flag.name,
                value=values[-1],
                hint="Give it once.",
            )
        setattr(namespace, flag.key, values[0] if values else None)
    return namespace


def _joined(words: Sequence[str], flags: Sequence[Flag]) -> list[str]:
    """`--flag -7B` as `--flag=-7B`: a value may look like an option as long as it is not one."""
    valued = {name for flag in flags if flag.metavar for name in (flag.name, flag.alias) if name}
    known = {name for flag in flags for name in (flag.name, flag.alias) if name} | {"-h", "--help", "--"}
    joined: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if word == "--":
            return [*joined, word, *waiting]
        if word in valued and waiting and waiting[0].startswith("-") and waiting[0].split("=")[0] not in known:
            word = f"{word}={waiting.pop(0)}"
        joined.append(word)
    return joined
