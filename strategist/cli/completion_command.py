"""`strategist completion`: completion scripts made from the same rows that the parsers are made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strategist.catalog import rows
from strategist.cli import COMMANDS
from strategist.cli.arguments import Command, Namespace, Positional
from strategist.cli.flags import COMMON, PLAN_FLAGS, Flag
from strategist.cli.output import show_text
from strategist.emitters import EMITTERS
from strategist.errors import InputError, did_you_mean

SHELLS = ("bash", "zsh", "fish")


COMMAND = Command(
    "completion",
    "Print shell completion.",
    COMMON,
    (Positional("shell", "bash, zsh or fish"),),
)


def run(options: Namespace) -> int:
    """Print the script for one shell."""
    if options.shell not in SHELLS:
        raise InputError(
            "CHOICE",
            f"There is no completion for {options.shell!r}.",
            flag="SHELL",
            value=options.shell,
            hint=did_you_mean(options.shell, SHELLS),
        )
    show_text({"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell]())
    return 0


def _values() -> Mapping[str, Sequence[str]]:
    """Words that can follow a flag."""
    names = {table: [row["name"] for row in rows(table)] for table in ("gpus", "nodes", "models")}
    by_flag = {
        "--gpu": names["gpus"],
        "--hardware": [*names["nodes"], "local", "cpu"],
        "--model": names["models"],
        "--to": [e.name for e in EMITTERS],
    }
    return by_flag | {flag.name: flag.choices for flag in PLAN_FLAGS if flag.choices}


def _flag_names(flags: Sequence[Flag]) -> str:
    return " ".join(flag.name for flag in flags)


def _bash() -> str:
    cases = "\n".join(
        f'    {flag}) COMPREPLY=($(compgen -W "{" ".join(values)}" -- "$word")); return;;'
        for flag, values in _values().items()
    )
    commands = " ".join(name for name, _ in COMMANDS)
    return f"""_strategist() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W "{commands}" -- "$word")); return; fi
  case "$before" in
{cases}
  esac
  case "$word" in
    -*) COMPREPLY=($(compgen -W "{_flag_names(PLAN_FLAGS)}" -- "$word"));;
    *) COMPREPLY=($(compgen -f -- "$word"));;
  esac
}}
complete -F _strategist strategist
"""


def _zsh() -> str:
    return "autoload -U +X bashcompinit && bashcompinit\n" + _bash()


def _fish() -> str:
    lines = [f"complete -c strategist -n __fish_use_subcommand -f -a {name} -d '{text}'" for name, text in COMMANDS]
    values = _values()
    for flag in PLAN_FLAGS:
        words = f" -x -a '{' '.join(values[flag.name])}'" if flag.name in values else " -r" if flag.metavar else ""
        lines.append(f"complete -c strategist -l {flag.name.lstrip('-')}{words}")
    return "\n".join(lines) + "\n"
