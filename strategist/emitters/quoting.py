"""Values in scripts: names from a whitelist, values quoted, line breaks refused. Quoting alone does not protect comment
directives such as #SBATCH, so what goes there is whitelisted too."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from strategist.catalog import rows
from strategist.emitters.emitter import Options
from strategist.emitters.zero_plus_plus import checked_words
from strategist.errors import InputError, did_you_mean, is_hostile
from strategist.units import parse_integer, plain_text

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HOST = re.compile(
    r"(?=.{1,253}$)([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)*[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?|[0-9a-fA-F:]{2,45}"
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_FOLDER = re.compile(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}){1,16}")
MAX_VALUE = 4096


def job_name(text: str, flag: str = "--job-name") -> str:
    """A name of letters, digits, dot, dash and underscore. Raises InputError CONTROL_CHAR, EMPTY, NAME."""
    name = plain_text(text, flag, "llama-8b")
    if not _JOB_NAME.fullmatch(name):
        suggestion = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:64] or "job"
        raise InputError(
            "NAME",
            f"{flag} may hold letters, digits, dot, dash and underscore, 64 at most.",
            flag=flag,
            value=text,
            hint=f"Example: {suggestion}.",
        )
    return name


def fitting_name(name: str, pattern: re.Pattern[str], words: str, flag: str = "--job-name") -> str:
    """A checked job name, when a target takes it too. Raises InputError NAME; `words` say what the target takes."""
    return _fitting(name, pattern, "NAME", f"{flag}: {words}.", flag, "llama-8b")


def _fitting(text: str, pattern: re.Pattern[str], code: str, sentence: str, flag: str, example: str) -> str:
    """The text, where all of it fits a pattern."""
    if not pattern.fullmatch(text):
        raise InputError(code, sentence, flag=flag, value=text, hint=f"Example: {example}.")
    return text


def host_name(text: str, flag: str = "--master-addr") -> str:
    """A host name or an IP address. Raises InputError HOSTNAME."""
    host = plain_text(text, flag, "node001")
    return _fitting(
        host, _HOST, "HOSTNAME", f"{flag} is not a host name or an IP address.", flag, "node001 or 10.0.0.1"
    )


def port(text: str, flag: str = "--master-port") -> int:
    """A port from 1024 to 65535. Raises InputError RANGE, INTEGER."""
    number = parse_integer(text, flag, low=0, high=10**6, example="29500")
    if not 1024 <= number <= 65535:
        words = "Ports below 1024 are privileged." if number < 1024 else "There is no such port."
        raise InputError(
            "RANGE", f"{flag} must lie between 1024 and 65535. {words}", flag=flag, value=text, hint="Example: 29500."
        )
    return number


def drive_folder(text: str, flag: str = "--nvme-path") -> str:
    """An absolute folder of plain names. Raises InputError NAME, CONTROL_CHAR, EMPTY."""
    folder, words = plain_text(text, flag, "/local_nvme"), "letters, digits, dot, dash and underscore"
    return _fitting(folder, _FOLDER, "NAME", f"{flag} is not an absolute folder of {words}.", flag, "/local_nvme")


def environment(pairs: Sequence[str], *, allow_all: bool, flag: str = "--env") -> tuple[tuple[str, str], ...]:
    """NAME=VALUE pairs as (name, value). Raises InputError CONTROL_CHAR, PARSE, NAME, ENV_DENIED, DUPLICATE_KEY."""
    checked = tuple(_variable(pair, allow_all, flag) for pair in pairs)
    names = [name for name, _ in checked]
    for name in names:
        if names.count(name) > 1:
            raise InputError("DUPLICATE_KEY", f"{flag} sets {name} twice.", flag=flag, value=name, hint="Set it once.")
    return checked


def _variable(pair: str, allow_all: bool, flag: str) -> tuple[str, str]:
    if any(is_hostile(c) for c in pair):
        raise InputError(
            "CONTROL_CHAR",
            f"{flag} contains a line break or another control character.",
            flag=flag,
            value=pair,
            hint="Remove it.",
        )
    name, equals, value = pair.partition("=")
    if not equals or len(value) > MAX_VALUE:
        raise InputError(
            "PARSE",
            f"{flag} expects NAME=VALUE with at most {MAX_VALUE} characters.",
            flag=flag,
            value=pair,
            hint="Example: NCCL_P2P_DISABLE=1.",
        )
    if not _VARIABLE.fullmatch(name):
        raise InputError(
            "NAME",
            f"{flag}: {name!r} cannot name a variable.",
            flag=flag,
            value=name,
            hint="Use letters, digits and underscore.",
        )
    allowed = [row["pattern"] for row in rows("environment")]
    if not allow_all and not any(_matches(name, pattern) for pattern in allowed):
        raise InputError(
            "ENV_DENIED",
            f"{flag}: {name} is not on the list of variables that launch scripts may set.",
            flag=flag,
            value=name,
            hint=f"{did_you_mean(name, allowed)} Add --allow-env to set it all the same.",
        )
    return name, value


def checked_options(options: Options) -> Options:
    """The options, when every value may stand in a script: Python callers pass the same door as the command line.

    Which variables may be set is the caller's decision here; what they are called and what they hold is not.
    """
    job_name(options.job_name)
    if options.master_addr is not None:
        host_name(options.master_addr)
    if options.master_port is not None:
        port(str(options.master_port))
    if options.nvme_path is not None:
        drive_folder(options.nvme_path)
    checked_words(options.zeropp)
    environment([f"{name}={value}" for name, value in options.env], allow_all=True)
    return options


def _matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def exports(env: Sequence[tuple[str, str]]) -> str:
    """One quoted `export` line per variable."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env)
