"""`strategist help CODE`: what an error or warning means and what to do; `strategist help COMMAND` is its page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module

from strategist.catalog import Row, rows
from strategist.cli import COMMANDS
from strategist.cli.arguments import Command, Namespace, Positional, help_lines
from strategist.cli.flags import COMMON
from strategist.cli.output import show_document, show_lines, width
from strategist.errors import InputError, did_you_mean, nearest
from strategist.reports.lines import table, wrapped

COMMAND = Command(
    "help",
    "Explain an error code, or list them all; or show the page of a command.",
    COMMON,
    (Positional("code", "such as E_UNIT, or a command such as plan", optional=True),),
    examples=("strategist help E_UNIT", "strategist help plan"),
)


def run(options: Namespace) -> int:
    """Explain one code, or list all of them, or show the page of a command."""
    commands = [name for name, _ in COMMANDS]
    if options.code in commands:
        command: Command = import_module(f"strategist.cli.{options.code}_command").COMMAND
        if options.json:
            show_document(command)
        else:
            show_lines(help_lines(command, width()), no_color=options.no_color)
        return 0
    known = {row["code"]: row for row in rows("error_codes")} | _advice()
    if options.code is None:
        chosen = list(known.values())
    else:
        word = options.code.upper()
        name = word if word.startswith(("E_", "W_")) else f"E_{word}"
        if name not in known:
            raise InputError(
                "CHOICE",
                f"There is no code {name}, nor a command of that name.",
                flag="CODE",
                value=options.code,
                hint=_near(options.code, name, known, commands),
            )
        chosen = [known[name]]
    if options.json:
        show_document(chosen)
    elif options.code is None:
        show_lines(
            table([(row["code"], row["meaning"]) for row in chosen], width(), indent=0), no_color=options.no_color
        )
    else:
        columns = width()
        lines = wrapped(chosen[0]["code"], chosen[0]["meaning"], columns, indent=22) + wrapped(
            "do", chosen[0]["action"], columns, indent=22
        )
        show_lines(lines, no_color=options.no_color)
    return 0


def _near(word: str, name: str, known: Iterable[str], commands: Sequence[str]) -> str:
    """The nearest commands, and where none is near the nearest codes."""
    return did_you_mean(word, commands) if nearest(word, commands) else did_you_mean(name, known)


def _advice() -> dict[str, Row]:
    """Warnings that are rules and have no code of their own: W_ and the rule's id."""
    from strategist.rulebook.rule import load_rules  # NumPy: the page of flags needs none of it

    found = (rule for rule in load_rules("advice") if not rule.code)
    return {
        f"W_{rule.id}": {
            "code": f"W_{rule.id}",
            "meaning": rule.name.replace("-", " "),
            "action": f"{rule.hint} See `strategist rule {rule.id}`.".strip(),
            "source": rule.source,
        }
        for rule in found
    }
