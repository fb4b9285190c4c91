"""The command line: the only place that prints, reads arguments, writes files and exits."""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from strategist.errors import InternalError, StoppedError, StrategistError, require_known

if TYPE_CHECKING:
    from strategist.cli.arguments import Command

COMMANDS = (
    ("plan", "choose a layout, say why, and write a Plan"),
    ("explain", "show a Plan term by term"),
    ("trace", "run a Plan's program without its machines, byte by byte"),
    ("rehearse", "run one rank of a Plan on one real device"),
    ("check", "verify a Plan; seal a hand-written one"),
    ("diff", "say what differs between two Plans"),
    ("compare", "show plans or layouts side by side, term by term"),
    ("size", "find machines for a model, tokens and a deadline"),
    ("sweep", "show which family wins where: sizes, nodes, devices"),
    ("predict", "judge one given layout: legal, fits, memory and time"),
    ("validate", "judge another framework's configuration: typos, batch, launcher"),
    ("accuracy", "predict measured runs and show how far off we are"),
    ("calibrate", "fit factors of the time model to measured runs"),
    ("emit", "write launch files for a Plan"),
    ("run", "train with a Plan on this machine"),
    ("resume", "go on with a run, also on another layout"),
    ("status", "look at a run: loss, ranks, checkpoints, faults"),
    ("topology", "show or draw the machines"),
    ("catalog", "list the known gpus, nodes and models"),
    ("rule", "print a rule, or list them"),
    ("schema", "print the JSON schema of a Plan"),
    ("help", "explain an error code or a command"),
    ("completion", "print shell completion for bash, zsh or fish"),
    ("version", "print the version"),
)
"""Every command, in the order a person meets them, with its line of help. Each is a module of this folder."""

USAGE = """usage: strategist COMMAND [FLAGS]

examples
  strategist plan --model-size 7B
  strategist plan --model llama-3.1-8b --hardware dgx-h100:4 --out plan.json
  strategist emit plan.json --to torchrun --out job && strategist run plan.json

commands
{commands}

Every command has --help, --json and --no-color.

exit codes
  0  done
  1  our fault, or the machine's I/O
  2  bad input
  3  impossible
  4  stale plan
  5  checks failed
  6  training failed
  7  interrupted and saved; 130 interrupted, and nothing was saved
  8  differs
"""
PAGE_WIDTH = 80


def entry() -> NoReturn:
    """The console script: run, flush, and leave without tearing the interpreter down, which costs 20 ms and does nothing
    for a process that holds no threads and no open files (mypy leaves the same way)."""
    if sys.argv[1:2] == ["plan"] and "--verify" not in sys.argv:
        gc.disable()  # a plan makes many small records and no cycles, and the process ends with it; a trace makes cycles
        os.environ.setdefault(
            "OPENBLAS_NUM_THREADS", "1"
        )  # a plan has no large products: no threads that wait for them
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without our letters gets their numbers
        elif stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - closed by `>&-`; lives on
    code = main()
    sys.stderr.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in words[: words.index("--")] if "--" in words else "--json" in words
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except StrategistError as error:
        return _report(error, as_json)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        # people see their own ^C; a program that reads JSON is told
        return _report(_stopped(words), as_json) if as_json else StoppedError.exit_code
    except OSError as problem:
        return _report(
            InternalError(
                "IO",
                f"The machine refused: {problem.strerror or problem}.",
                value=problem.filename,
                hint="Check the disk and the permissions.",
            ),
            as_json,
        )
    except Exception as problem:
        if os.environ.get("STRATEGIST_DEBUG"):
            raise
        return _report(_bug(problem), as_json)


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        _usage(as_json="--json" in words)
        return 0 if words else 2
    name = "version" if words[0] == "--version" else words[0]
    known = [command for command, _ in COMMANDS]
    require_known(name, known, f"There is no command {name!r}.", "COMMAND")
    return _run(import_module(f"strategist.cli.{name}_command"), list(words[1:]))


def _usage(*, as_json: bool) -> None:
    """The page of all commands. It is written for eighty columns; narrower terminals get it wrapped."""
    if as_json:
        from strategist.cli.output import show_document

        show_document([{"command": name, "summary": text} for name, text in COMMANDS])
        return
    page = USAGE.format(commands="\n".join(f"  {name:<11} {text}" for name, text in COMMANDS))
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) < PAGE_WIDTH:
        from strategist.cli.output import width
        from strategist.reports.lines import hung, text_of

        page = text_of(piece for row in page.splitlines() for piece in hung(row, width())) + "\n"
    sys.stdout.write(page)


def _run(module: ModuleType, words: list[str]) -> int:
    """One command: its help page, or its work. What follows `--` belongs to somebody else's command."""
    from strategist.cli.arguments import help_lines, parse, wants_help
    from strategist.cli.output import show_document, show_lines, width

    command: Command = module.COMMAND
    if wants_help(words):
        show_document(command) if "--json" in words else show_lines(help_lines(command, width()))
        return 0
    own, foreign = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, None)
    options = parse(command, own)
    options.foreign = foreign
    code: int = module.run(options)
    return code


def _report(error: StrategistError, as_json: bool) -> int:
    from strategist.cli.output import show_error

    try:
        show_error(error, as_json=as_json)
        sys.stdout.flush()
    except OSError:  # stdout itself is what the machine refuses
        show_error(error, as_json=False)
    return error.exit_code


def _stopped(words: Sequence[str]) -> StoppedError:
    """What programs hear of a command that was stopped by hand."""
    said = f"strategist {words[0]}" if words else "strategist"
    return StoppedError(
        "INTERRUPTED",
        f"{said} was stopped before it was done.",
        flag="COMMAND",
        hint="Run it again; no answer was given.",
    )


def _bug(problem: Exception) -> InternalError:
    """What we say of a fault of our own."""
    place = problem.__traceback__
    while place and place.tb_next:
        place = place.tb_next
    where = f" ({os.path.basename(place.tb_frame.f_code.co_filename)}:{place.tb_lineno})" if place else ""
    return InternalError(
        "INTERNAL",
        f"strategist failed: {type(problem).__name__}: {problem}{where}.",
        hint="This is a bug of ours. Run again with STRATEGIST_DEBUG=1 and report what it prints.",
    )
