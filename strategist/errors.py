"""Every error a user can meet.

StrategistError            a code, a sentence, and what to do next        exit code
├─ InputError              something given is missing or impossible       2
├─ RuleError               a rule file cannot be read                     2
├─ ImpossibleError         valid, but it cannot be done                   3
│  └─ NoPlanError          nothing fits; carries the refusals             3
├─ StaleError              the plan no longer matches the world           4
├─ TrainingError           the job itself failed                          6
├─ InterruptError          stopped on request; work was saved             7
└─ InternalError           an invariant of ours broke, or the machine's I/O  1

`CODES` is the closed list of codes; a test compares it with `docs/errors.md` and with every code raised in the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

CODES = (
    # input
    "EMPTY", "PARSE", "UNIT", "RANGE", "CHOICE", "TYPE", "INTEGER", "NEGATIVE", "TOO_SMALL", "TOO_LARGE", "NOT_FINITE",
    "CONTROL_CHAR", "NAME", "NAME_TOO_LONG", "MISSING", "CONFLICT", "DUPLICATE_FLAG", "DUPLICATE_KEY", "UNKNOWN_KEY",
    "KIND", "GRID_TOO_LARGE",
    # lookup
    "UNKNOWN_GPU", "UNKNOWN_NODE", "UNKNOWN_MODEL", "UNKNOWN_ARCH", "AMBIGUOUS", "UNSUPPORTED_DEVICE", "OFFLINE",
    # files
    "FILE_NOT_FOUND", "NOT_A_FILE", "PERMISSION", "EMPTY_FILE", "FILE_TOO_LARGE", "ENCODING", "JSON", "YAML",
    "YAML_ALIAS", "TOML", "EXISTS", "IO", "PATH_ESCAPE", "CODE_IGNORED",
    # plan
    "SCHEMA_VERSION", "DIGEST", "FACTS_DIFFER", "ASSUMED_HARDWARE",
    # choice
    "DIVISIBILITY", "BATCH_SPLIT", "HARDWARE_FEATURE", "FRAMEWORK_LEGALITY", "TOPOLOGY", "NO_PATH", "NO_PLAN",
    "UNSUPPORTED",
    # run
    "HOSTNAME", "ENV_DENIED", "NO_CHECKPOINT", "TRAINING", "INTERRUPTED",
    # ours
    "RULE", "INTERNAL",
)  # fmt: skip

ECHO_LIMIT = 60
THEIRS_LIMIT = 400
"""Characters of what somebody's own model says when it fails: names, sizes and paths stand at its end."""


class StrategistError(Exception):
    """An error with a stable code.

    `message` says what is wrong and what is allowed; `hint` says what to do; `flag` is the CLI flag or JSON path that
    carried the value; `also` holds further errors found in the same input, each one complete in itself.
    """

    exit_code = 1

    def __init__(
        self,
        code: str,
        message: str,
        *,
        flag: str | None = None,
        value: object = None,
        hint: str | None = None,
        also: Sequence[StrategistError] = (),
    ) -> None:
        if code not in CODES:
            raise ValueError(f"error code {code!r} is not in the closed list strategist.errors.CODES")
        super().__init__(message)
        self.code, self.message, self.flag, self.hint, self.also = code, message, flag, hint, tuple(also)
        self.value = None if value is None else shown(value)

    def __reduce__(self) -> tuple[object, ...]:
        """Errors travel between processes with everything they say."""
        return _remade, (type(self), self.message, self.__dict__)

    def as_document(self) -> dict[str, object]:
        """The `error` object printed under `--json`."""
        body: dict[str, object] = {
            "code": f"E_{self.code}",
            "message": self.message,
            "flag": self.flag,
            "value": self.value,
            "hint": self.hint,
        }
        if self.also:
            body["also"] = [error.as_document() for error in self.also]
        return body


def _remade(kind: type[StrategistError], message: str, state: dict[str, object]) -> StrategistError:
    error = kind.__new__(kind, message)
    error.__dict__.update(state)
    return error


class InputError(StrategistError):
    """Something the user gave is missing, malformed or out of bounds."""

    exit_code = 2


def wrong_type(name: str, value: object, kind: str, example: str) -> InputError:
    """An argument that is no `kind`, such as "a text"; only plain values are echoed, of others the type is named."""
    said = value if isinstance(value, (str, bytes, int, float, list, tuple, dict)) else type(value).__name__
    return InputError("TYPE", f"{name} must be {kind}.", flag=name, value=said, hint=f"Example: {example}.")


def require_type(kind: type, name: str, value: object, words: str, example: str) -> None:
    """Raise InputError TYPE for a value that is no instance of `kind`."""
    if not isinstance(value, kind):
        raise wrong_type(name, value, words, example)


def require_function(name: str, value: object, example: str) -> None:
    """Raise InputError TYPE for what cannot be called; nothing at all is left out."""
    if value is not None and not callable(value):
        raise wrong_type(name, value, "a function", f"{name}={example}")


class RuleError(StrategistError):
    """A rule file cannot be read or uses words that do not exist."""

    exit_code = 2


class ImpossibleError(StrategistError):
    """The request is well formed, but what it asks for cannot be done."""

    exit_code = 3


class NoPlanError(ImpossibleError):
    """No candidate survives. `chain` is the because-chain; `fixes` are changes that were re-planned and found to fit."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "NO_PLAN",
        chain: Sequence[str] = (),
        fixes: Sequence[str] = (),
        flag: str | None = None,
        value: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(code, message, flag=flag, value=value, hint=hint)
        self.chain, self.fixes = tuple(chain), tuple(fixes)

    def as_document(self) -> dict[str, object]:
        """The `error` object, with the because-chain and the verified fixes."""
        return super().as_document() | {"because": list(self.chain), "fixes": list(self.fixes)}


class StaleError(StrategistError):
    """The plan was edited, is of another version, or does not match this machine."""

    exit_code = 4


class TrainingError(StrategistError):
    """The training processes failed."""

    exit_code = 6


class InterruptError(StrategistError):
    """The job was stopped on request after it saved its work."""

    exit_code = 7


class StoppedError(StrategistError):
    """Somebody stopped a command before it was done: 128 + SIGINT, as shells say it."""

    exit_code = 130


class InternalError(StrategistError):
    """An invariant of strategist broke, or the machine's I/O failed."""

    exit_code = 1


def is_hostile(character: str) -> bool:
    """True for characters that can steer a terminal: control (Cc), bidirectional and other format marks (Cf)."""
    if character.isascii():
        return not character.isprintable()
    import unicodedata  # a megabyte of tables, and most texts are ASCII

    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


def shown(value: object, limit: int = ECHO_LIMIT) -> str:
    """`value` made safe to echo: hostile characters escaped, at most `limit` characters."""
    text = str(value)
    clipped = text if len(text) <= limit else text[: limit - 3] + "..."
    return escaped(clipped)


def escaped(text: str) -> str:
    """`text` with characters that could steer a terminal written as their numbers."""
    return "".join(c.encode("unicode_escape").decode("ascii") if is_hostile(c) else c for c in text)


def nearest(word: str, known: Iterable[str], count: int = 3) -> tuple[str, ...]:
    """Up to `count` known names closest to `word`, best first: those that go on where it ends, shortest first, then by letters."""
    import difflib  # only needed once something already went wrong

    names = {name.lower(): name for name in known}
    begun = word.lower()
    longer = sorted((name for name in names if _is_beginning(begun, name)), key=lambda name: (len(name), name))
    alike = difflib.get_close_matches(begun, list(names), n=count, cutoff=0.5)
    return tuple(names[name] for name in dict.fromkeys((*longer, *alike)))[:count]


def _is_beginning(word: str, name: str) -> bool:
    """Whether a name begins with a word of three letters or more, and goes on with another word or a letter or two."""
    rest = name.removeprefix(word)
    return len(word) > 2 and rest != name and bool(rest) and (len(rest) < 3 or not rest[0].isalnum())


def require_known(word: str, known: Iterable[str], sentence: str, flag: str | None = None) -> None:
    """Raise InputError CHOICE with this sentence, and the nearest of the known words as its hint, for a word that is none of them."""
    names = tuple(known)
    if word not in names:
        raise InputError("CHOICE", sentence, flag=flag, value=word, hint=did_you_mean(word, names))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint sentence naming the closest known words, or all of them when the list is short."""
    names = tuple(known)
    otherwise = f"Known: {', '.join(names)}." if len(names) <= 12 else f"There are {len(names)} known names."
    return _meant(word, names) or otherwise


def near_and_known(word: str, known: Sequence[str]) -> str:
    """A hint that names the closest known words, and all of them however many there are."""
    return f"{_meant(word, known)} Known: {', '.join(known)}.".lstrip()


def _meant(word: str, known: Sequence[str]) -> str:
    """A question for the closest known words; nothing where none is close."""
    close = nearest(word, known)
    return f"Did you mean {' or '.join(close)}?" if close else ""
