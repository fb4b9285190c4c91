"""`strategist completion`: completion scripts made from the same rows that the parsers are made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module

from strategist.catalog import rows
from strategist.cli import COMMANDS
from strategist.cli.arguments import Command, Namespace, Positional
from strategist.cli.flags import COMMON, Flag
from strategist.cli.output import show_document, show_text
from strategist.emitters import EMITTERS
from strategist.errors import require_known
from strategist.rulebook.rule import BOOKS, load_rules

SHELLS = ("bash", "zsh", "fish")


COMMAND = Command(
    "completion",
    "Print shell completion.",
    COMMON,
    (Positional("shell", "bash, zsh or fish"),),
    examples=("source <(strategist completion bash)",),
)


def run(options: Namespace) -> int:
    """Print the script for one shell."""
    require_known(options.shell, SHELLS, f"There is no completion for {options.shell!r}.", "SHELL")
    script = {"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell]()
    if options.json:
        show_document({"shell": options.shell, "script": script})
    else:
        show_text(script)
    return 0


@cache
def _flags() -> Mapping[str, tuple[Flag, ...]]:
    """The flags of every command."""
    return {name: import_module(f"strategist.cli.{name}_command").COMMAND.flags for name, _ in COMMANDS}


def _values() -> Mapping[str, Sequence[str]]:
    """Words that can follow a flag."""
    by_flag: dict[str, Sequence[str]] = {
        "--gpu": _names("gpus"),
        "--hardware": [*_names("nodes"), "local", "cpu"],
        "--model": _names("models"),
        "--to": [emitter.name for emitter in EMITTERS],
    }
    for flags in _flags().values():
        for flag in flags:
            if flag.choices:  # one flag may have more words in one command than in another
                by_flag[flag.name] = tuple(dict.fromkeys((*by_flag.get(flag.name, ()), *flag.choices)))
    return by_flag


def _names(table: str) -> list[str]:
    return [row["name"] for row in rows(table)]


def _words() -> Mapping[str, Sequence[str]]:
    """Words that can follow a command."""
    return {
        "catalog": ("gpus", "nodes", "models"),
        "completion": SHELLS,
        "help": [*(row["code"] for row in rows("error_codes")), *(name for name, _ in COMMANDS)],
        "rule": [rule.id for book in BOOKS for rule in load_rules(book)],
    }


def _bash() -> str:
    after = "\n".join(f"    {flag}) words='{' '.join(values)}';;" for flag, values in _values().items())
    own = _words()
    within = "\n".join(
        f"    {name}) flags='{' '.join(flag.name for flag in flags)} --help' words='{' '.join(own.get(name, ()))}';;"
        for name, flags in _flags().items()
    )
    return f"""_strategist() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" flags='' words=''
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W '{" ".join(_flags())}' -- "$word"))
    return
  fi
  if [ "$word" = '=' ]; then
    word=''
  elif [ "$before" = '=' ]; then
    before="${{COMP_WORDS[COMP_CWORD-2]}}"
  fi
  case "$before" in
{after}
  esac
  if [ -n "$words" ]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{within}
  esac
  case "$word" in
    -*) COMPREPLY=($(compgen -W "$flags" -- "$word"));;
    *) COMPREPLY=($(compgen -W "$words" -- "$word"));;
  esac
}}
complete -o default -F _strategist strategist
"""


def _zsh() -> str:
    return "autoload -U +X bashcompinit && bashcompinit\n" + _bash()


def _fish() -> str:
    lines = [
        f"complete -c strategist -n __fish_use_subcommand -f -a {name} -d '{_quoted(text)}'" for name, text in COMMANDS
    ]
    values, own = _values(), _words()
    for name, flags in _flags().items():
        inside = f"complete -c strategist -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{inside} -f -a '{' '.join(own[name])}'"] if name in own else []
        for flag in flags:
            after = f" -x -a '{' '.join(values[flag.name])}'" if flag.name in values else " -r" if flag.metavar else ""
            lines.append(f"{inside} -l {flag.name.lstrip('-')}{after}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Text between single quotes of fish."""
    return text.replace("\\", "\\\\").replace("'", "\\'")
