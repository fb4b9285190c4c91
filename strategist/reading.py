"""The only way text from outside comes in: safe file reading, strict JSON, YAML and TOML, strict types.

The standard parsers are too kind: `json` keeps the last of two equal keys and accepts NaN, YAML reads 010 as 8 and
expands aliases, pydantic turns "8" into 8. Everything here refuses such input with a code and a place.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, TextIO, TypeVar

from strategist.errors import InputError, StrategistError, near_and_known, shown, wrong_type

STANDARD_INPUT = "-"
"""What stands for standard input in place of a file's name, by the custom of every shell."""
SIZE_LIMIT = 16 * 2**20
DEPTH_LIMIT = 64
ERROR_LIMIT = 20

T = TypeVar("T")


def read_text(path: str, flag: str) -> str:
    """The text of one regular UTF-8 file of at most 16 MiB; never blocks, never follows into devices. `-` is standard input, where
    something is piped into it.

    Raises InputError TYPE, EMPTY, FILE_NOT_FOUND, NOT_A_FILE, PERMISSION, NAME_TOO_LONG, EMPTY_FILE, FILE_TOO_LARGE, ENCODING, MISSING.
    """
    path = path_of(path, flag)
    if not path.strip():
        raise InputError("EMPTY", f"{flag} is empty.", flag=flag, value=path, hint="Name a file.")
    is_piped = path == STANDARD_INPUT
    if is_piped and (sys.stdin is None or sys.stdin.isatty()):
        raise InputError(
            "MISSING",
            f"{flag}: nothing is piped into standard input.",
            flag=flag,
            value=path,
            hint="Example: strategist plan --model-size 7B --json | strategist explain -.",
        )
    data = _piped(sys.stdin) if is_piped else _held(path, flag)
    path = "standard input" if is_piped else path
    if len(data) > SIZE_LIMIT:
        raise InputError(
            "FILE_TOO_LARGE",
            f"{flag}: {shown(path)} is larger than 16 MiB.",
            flag=flag,
            value=path,
            hint="Give the configuration, not the weights.",
        )
    if not data.strip():
        raise InputError(
            "EMPTY_FILE", f"{flag}: {shown(path)} is empty.", flag=flag, value=path, hint="Write the file first."
        )
    return _decode(data, path, flag)


def path_of(path: object, flag: str) -> str:
    """A path as text. Raises InputError TYPE for what is none."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise wrong_type(flag, path, "a path", '"plan.json"')
    return os.fsdecode(path)


@lru_cache(maxsize=1)
def _piped(stream: TextIO) -> bytes:
    """What is piped into a stream, one byte more than the limit at most; kept, because it can be read only once."""
    return stream.buffer.read(SIZE_LIMIT + 1)


def _held(path: str, flag: str) -> bytes:
    """The bytes of a regular file, one more than the limit at most."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as problem:
        raise _open_error(problem, path, flag) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(
            "NOT_A_FILE",
            f"{flag}: {shown(path)} is not a regular file.",
            flag=flag,
            value=path,
            hint="Give a file.",
        )
    with open(descriptor, "rb") as file:
        return file.read(SIZE_LIMIT + 1)


def _open_error(problem: OSError | ValueError, path: str, flag: str) -> StrategistError:
    number = problem.errno if isinstance(problem, OSError) else None
    known = {
        errno.ENOENT: ("FILE_NOT_FOUND", "does not exist", "Check the path."),
        errno.ENOTDIR: ("FILE_NOT_FOUND", "does not exist", "Check the path."),
        errno.EISDIR: ("NOT_A_FILE", "is a folder", "Name a file inside it."),
        errno.EACCES: ("PERMISSION", "may not be read", "Check its permissions."),
        errno.EPERM: ("PERMISSION", "may not be read", "Check its permissions."),
        errno.ENAMETOOLONG: ("NAME_TOO_LONG", "has too long a name", "Shorten it."),
        errno.ENXIO: ("NOT_A_FILE", "is not a regular file", "Give a file."),
        None: ("CONTROL_CHAR", "contains a null character", "Remove it."),
    }
    code, words, hint = known.get(number, ("FILE_NOT_FOUND", f"cannot be opened ({problem})", "Check the path."))
    return InputError(code, f"{flag}: {shown(path)} {words}.", flag=flag, value=path, hint=hint)


def _decode(data: bytes, path: str, flag: str) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(
            "ENCODING", f"{flag}: {shown(path)} is UTF-16.", flag=flag, value=path, hint="Save it as UTF-8."
        )
    if data.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        raise InputError(
            "JSON",
            f"{flag}: {shown(path)} holds pickled or zipped data, not text; it was not loaded.",
            flag=flag,
            value=path,
            hint="Give the JSON configuration.",
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise InputError(
            "ENCODING",
            f"{flag}: {shown(path)} is not UTF-8 (byte {problem.start}).",
            flag=flag,
            value=path,
            hint="Save it as UTF-8.",
        ) from None


def parse_json(text: str, flag: str, *, may_be_unbounded: bool = False) -> Any:
    """The value of a JSON text. Raises InputError JSON (with line and column), NOT_FINITE, DUPLICATE_KEY.

    Where numbers `may_be_unbounded`, Infinity and -Infinity are read as Python's own `json` writes them.
    """

    def refuse_constant(word: str) -> Any:
        if may_be_unbounded and word.endswith("Infinity"):
            return float(word)
        raise InputError(
            "NOT_FINITE",
            f"{flag} contains {word}; only finite numbers are allowed.",
            flag=flag,
            value=word,
            hint="Write a number.",
        )

    def finite(word: str) -> float:
        number = float(word)
        if not math.isfinite(number):
            refuse_constant(shown(word))
        return number

    def whole(word: str) -> int:
        if len(word) > 30:
            raise InputError(
                "TOO_LARGE",
                f"{flag} contains a number of {len(word)} digits.",
                flag=flag,
                value=word,
                hint="Write a smaller number.",
            )
        return int(word)

    try:
        value = json.loads(
            text, object_pairs_hook=_unique(flag), parse_constant=refuse_constant, parse_float=finite, parse_int=whole
        )
    except json.JSONDecodeError as problem:
        raise InputError(
            "JSON",
            f"{flag} is not JSON: {problem.msg.removesuffix(' at')} at line {problem.lineno}, column {problem.colno}.",
            flag=flag,
            hint="Check commas, quotes and brackets there.",
        ) from None
    except RecursionError:
        raise InputError(
            "JSON", f"{flag} is nested too deeply; the limit is {DEPTH_LIMIT} levels.", flag=flag, hint="Flatten it."
        ) from None
    return _shallow(value, flag)


def _unique(flag: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built = dict(pairs)
        if len(built) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise InputError(
                "DUPLICATE_KEY",
                f"{flag}: the key {shown(twice)!r} stands twice in one object.",
                flag=flag,
                value=twice,
                hint="Remove one.",
            )
        return built

    return build


def _shallow(value: Any, flag: str) -> Any:
    level = [value]
    for _ in range(DEPTH_LIMIT + 1):
        level = [child for item in level for child in _children(item)]
        if not level:
            return value
    raise InputError("JSON", f"{flag} is nested deeper than {DEPTH_LIMIT} levels.", flag=flag, hint="Flatten it.")


def _children(item: Any) -> Sequence[Any]:
    if isinstance(item, dict):
        return list(item.values())
    return item if isinstance(item, list) else ()


def parse_toml(text: str, flag: str) -> dict[str, Any]:
    """The table of a TOML text. Raises InputError TOML with line and column."""
    import tomllib  # pure Python and slow to load; few paths need it

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        code = "DUPLICATE_KEY" if "overwrite" in str(problem) else "TOML"
        raise InputError(
            code, f"{flag} is not TOML: {problem}.", flag=flag, hint="Check quotes and brackets there."
        ) from None
    except RecursionError:
        raise InputError("TOML", f"{flag} is nested too deeply.", flag=flag, hint="Flatten it.") from None


_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_GROUPED = re.compile(r"[-+]?[1-9][0-9]{0,2}(?:_[0-9]{3})+")
"""Thousands apart, which nobody means for a word: PyYAML and OmegaConf, by which frameworks read their files, take it for the number."""
_REAL = re.compile(r"[-+]?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_LOOKS_NUMERIC = re.compile(r"[-+]?[0-9][0-9_xXoObBa-fA-F:.eE+-]*")


def parse_yaml(text: str, flag: str) -> Any:
    """The value of a YAML text: no tags, no aliases, no duplicate keys, and only numbers that JSON would also accept, or with thousands apart.

    Raises InputError YAML, YAML_ALIAS, DUPLICATE_KEY, TYPE (for 010, 1_00, 12:30 and their like), NOT_FINITE.
    """
    import yaml  # 20 ms, needed only for YAML files

    try:
        node = _compose(yaml, text, flag)
        return _shallow(None if node is None else _yaml_value(yaml, node, flag, 0), flag)
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InputError(
            "YAML",
            f"{flag} is not YAML: {getattr(problem, 'problem', problem)}{place}.",
            flag=flag,
            hint="Check the indentation there.",
        ) from None
    except RecursionError:
        raise InputError("YAML", f"{flag} is nested too deeply.", flag=flag, hint="Flatten it.") from None


def _compose(yaml: Any, text: str, flag: str) -> Any:
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise InputError(
                "YAML_ALIAS",
                f"{flag} uses a YAML anchor or alias; they are refused.",
                flag=flag,
                hint="Write the value out.",
            )
        if getattr(event, "tag", None) not in (None, "!"):
            raise InputError(
                "YAML",
                f"{flag} uses the YAML tag {shown(event.tag)!r}; tags are refused and nothing was executed.",
                flag=flag,
                value=event.tag,
                hint="Remove the tag.",
            )
    return yaml.compose(text, Loader=yaml.SafeLoader)


def _yaml_value(yaml: Any, node: Any, flag: str, depth: int) -> Any:
    if depth > DEPTH_LIMIT:
        raise InputError("YAML", f"{flag} is nested deeper than {DEPTH_LIMIT} levels.", flag=flag, hint="Flatten it.")
    if isinstance(node, yaml.MappingNode):
        return _unique(flag)([(str(k.value), _yaml_value(yaml, v, flag, depth + 1)) for k, v in node.value])
    if isinstance(node, yaml.SequenceNode):
        return [_yaml_value(yaml, item, flag, depth + 1) for item in node.value]
    return node.value if node.style in ("'", '"', "|", ">") else _yaml_scalar(node.value, flag)


def _yaml_scalar(word: str, flag: str) -> Any:
    if word in ("null", "~", ""):
        return None
    if word in ("true", "false"):
        return word == "true"
    if (_WHOLE.fullmatch(word) or _GROUPED.fullmatch(word)) and len(word) <= 30:
        return int(word)
    if _REAL.fullmatch(word) and math.isfinite(float(word)):
        return float(word)
    if word.lower() in (".nan", ".inf", "-.inf", "+.inf") or _REAL.fullmatch(word):
        raise InputError(
            "NOT_FINITE",
            f"{flag} contains {shown(word)}; only finite numbers are allowed.",
            flag=flag,
            value=word,
            hint="Write a number.",
        )
    is_text = word.count(".") > 1 or word.endswith("+")  # 192.168.0.1 or 4+, which no dialect takes for a number
    if (
        not is_text
        and _LOOKS_NUMERIC.fullmatch(word)
        and not any(c.isalpha() for c in word.lower().replace("e", "").replace("x", ""))
    ):
        raise InputError(
            "TYPE",
            f"{flag} contains {shown(word)}, which YAML dialects read as different numbers.",
            flag=flag,
            value=word,
            hint="Write a plain decimal number, or quote it.",
        )
    return word


def read_document(path: str, flag: str) -> Any:
    """The value of a JSON, YAML or TOML file, by its ending, or of standard input, by its first line; anything else is read as JSON."""
    path = path_of(path, flag)
    return parse_document(path, read_text(path, flag), flag)


def read_model_config(path: str, flag: str) -> Any:
    """The value of a model's configuration. As `read_document`, but JSON may have Infinity: configurations of state-space models do
    (`time_step_limit` of Mamba 2 has no upper end), and transformers writes it so."""
    path = path_of(path, flag)
    text = read_text(path, flag)
    parse = parser_of(path, text)
    return parse_json(text, flag, may_be_unbounded=True) if parse is parse_json else parse(text, flag)


PARSERS: dict[str, Callable[[str, str], Any]] = {
    ".json": parse_json,
    ".yaml": parse_yaml,
    ".yml": parse_yaml,
    ".toml": parse_toml,
}
"""Who reads a document, by the ending of its file."""


def parse_document(path: str, text: str, flag: str) -> Any:
    """The value of a text that was read from `path`."""
    return parser_of(path, text)(text, flag)


def parser_of(path: str, text: str) -> Callable[[str, str], Any]:
    """Who reads a document: by the ending of its file, or of standard input by its first line."""
    if path == STANDARD_INPUT:
        return _by_first_line(text)
    return PARSERS.get(os.path.splitext(path)[1].lower(), parse_json)


_TOML_LINE = re.compile(r"""\[\[?\s*[A-Za-z_"'][\w."' -]*\]|[\w."'-]+\s*=""")
_YAML_LINE = re.compile(r"""(---|-|%YAML.*|[\w.'"/ -]+:)(\s|$)""")


def _by_first_line(text: str) -> Callable[[str, str], Any]:
    """Who reads a document without a name: its first line that is no remark is a table's or a setting's in TOML, a key's or an item's in
    YAML, else it is JSON."""
    first = next((line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    if _TOML_LINE.match(first):
        return parse_toml
    return parse_yaml if _YAML_LINE.match(first) else parse_json


def checked(kind: type[T], value: Any, flag: str) -> T:
    """`value` as an instance of the dataclass `kind`: strict types, no unknown keys, finite numbers, tuples from lists.

    Raises InputError with the JSON path of the first problem; up to 20 further ones ride along in `also`.
    """
    from pydantic import ValidationError  # the door is the only place that pays for pydantic

    try:
        return _door(kind).model_validate_json(json.dumps({"root": value})).root  # type: ignore[arg-type, no-any-return]
    except ValidationError as problem:
        raise _refusal(problem.errors(), kind, flag) from None


@cache
def _door(kind: type) -> Any:
    """pydantic's model for one dataclass; making it takes longer than using it."""
    from pydantic import ConfigDict, create_model

    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    return create_model("Door", __config__=config, root=(kind, ...))


_PRIORITY = ("TYPE", "CHOICE", "RANGE", "UNKNOWN_KEY", "MISSING")


def _refusal(problems: Sequence[Any], kind: type, flag: str) -> InputError:
    errors = [_one_refusal(problem, kind, flag) for problem in problems[:ERROR_LIMIT]]
    first, *rest = sorted(errors, key=lambda e: _PRIORITY.index(e.code))
    return InputError(first.code, first.message, flag=first.flag, value=first.value, hint=first.hint, also=rest)


def _one_refusal(problem: Any, kind: type, flag: str) -> InputError:
    place = [
        part for part in problem["loc"][1:] if not (isinstance(part, str) and part.startswith(("function-", "tuple[")))
    ]
    path = "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{shown(part)}" for part in place)
    sort, value = problem["type"], problem.get("input")
    if sort in ("unexpected_keyword_argument", "extra_forbidden"):
        return InputError(
            "UNKNOWN_KEY",
            f"{flag}: {path} is not a known key.",
            flag=path,
            value=place[-1],
            hint=near_and_known(str(place[-1]), keys) if (keys := _keys(kind, place[:-1])) else "Remove it.",
        )
    if sort in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return InputError("MISSING", f"{flag}: {path} is missing.", flag=path, hint="Add it.")
    if sort == "literal_error":
        return InputError(
            "CHOICE",
            f"{flag}: {path} must be {problem['ctx']['expected']}.",
            flag=path,
            value=value,
            hint="Choose one of these.",
        )
    return InputError(
        "TYPE",
        f"{flag}: {path}: {problem['msg']}.",
        flag=path,
        value=json.dumps(value, default=str),
        hint="Correct the type.",
    )


def _keys(kind: Any, place: Sequence[Any]) -> tuple[str, ...]:
    """Field names of the dataclass at `place` inside `kind`; empty when the place is not one dataclass."""
    import typing

    for part in place:
        if isinstance(part, int):
            kind = next((a for a in typing.get_args(kind) if a is not Ellipsis), None)
        else:
            kind = typing.get_type_hints(kind).get(part) if hasattr(kind, "__dataclass_fields__") else None
        kind = (
            next((a for a in typing.get_args(kind) if a is not type(None)), kind)
            if type(None) in typing.get_args(kind)
            else kind
        )
    return tuple(getattr(kind, "__dataclass_fields__", ()))
