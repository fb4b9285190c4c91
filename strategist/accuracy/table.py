"""A table of measured runs as rows of text. Columns: benchmarks/truth/README.md; an empty cell is a fact nobody stated."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence

from strategist.accuracy.cells import Column, columns_of_header, has_decimal_commas, row_of
from strategist.errors import InputError, nearest, shown
from strategist.reading import parse_json, read_text

Run = Mapping[str, str]

NEEDED = ("hardware", "gpus_total", "model", "seq_len")
MAX_ROWS = 100_000
LISTED = 12
"""Columns of a header that an error names."""
SEPARATORS = ",;\t"
"""What stands between cells; of those that a header has as often, the first."""
LARGEST: Mapping[str, int] = {"": 2**17, "seq_len": 2**24, "global_batch_seqs": 2**24, "vocab": 2**24, "layers": 4096}
"""Cells beyond this are typing errors; the entry without a name holds for every other column."""


def read_runs(path: str, flag: str = "FILE") -> tuple[Run, ...]:
    """The rows of a CSV file with a header, its cells apart by commas, or by what else its header has most of, or of JSON objects, one a line or
    in a list. Raises what `read_text` and `parse_json` raise, and InputError PARSE for a row that does not match the header, MISSING for an absent
    column, DUPLICATE_KEY for a column or an id given twice, TOO_LARGE."""
    text = read_text(path, flag)
    is_json = text.lstrip()[:1] in ("{", "[")
    lines, separator = (_of_objects(text, path, flag), "") if is_json else _cells(text, path, flag)
    filled = [(number, cells) for number, cells in enumerate(lines, 1) if any(cell.strip() for cell in cells)]
    if not filled:
        raise InputError("EMPTY", f"{flag}: {shown(path)} has no header.", flag=flag, value=path, hint="Name the columns in the first line.")  # fmt: skip
    header, own = [name.strip() for name in filled[0][1]], filled[1:]
    columns = columns_of_header(header, flag, path)
    _check_header(columns, header, path, flag)
    commas = has_decimal_commas(columns, (cells for _, cells in own))
    runs = []
    for number, cells in own:
        if len(cells) != len(header):
            raise InputError(
                "PARSE",
                f"{flag}: row {number} of {shown(path)} has {len(cells)} cells, and the header names {len(header)}.",
                flag=flag,
                value=path,
                hint="Quote cells that contain commas.",
            )
        run = row_of(columns, cells, commas=commas, spreadsheet=separator == ";")
        runs.append({**run, "id": run.get("id") or f"row {number}"})
    _check_rows(runs, path, flag)
    return tuple(runs)


def _cells(text: str, path: str, flag: str) -> tuple[list[list[str]], str]:
    """The cells of every line, whatever ends it, and what stands between them."""
    lines = io.StringIO(text, newline=None)
    head = next((line for line in lines if line.strip()), "")
    lines.seek(0)
    separator = max(SEPARATORS, key=head.count)
    try:
        return list(csv.reader(lines, delimiter=separator)), separator
    except csv.Error as problem:
        raise InputError("PARSE", f"{flag}: {shown(path)} is no table: {problem}.", flag=flag, value=path, hint="Write it as CSV.") from None  # fmt: skip


def _of_objects(text: str, path: str, flag: str) -> list[list[str]]:
    """JSON objects as a header and lines of cells; what an object does not name is empty."""
    is_list = text.lstrip().startswith("[")
    lines = [] if is_list else [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    objects = (
        parse_json(text, flag) if is_list else [parse_json(line, f"{flag} line {number}") for number, line in lines]
    )
    if not objects or not all(isinstance(one, dict) for one in objects):
        raise InputError("PARSE", f"{flag}: {shown(path)} is no table: a run is a JSON object, one a line or in a list.", flag=flag, value=path, hint="Write it as CSV, or a JSON object a line.")  # fmt: skip
    header = list(dict.fromkeys(name for one in objects for name in one))
    return [header, *([_text(one.get(name)) for name in header] for one in objects)]


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _check_header(columns: Sequence[Column], header: Sequence[str], path: str, flag: str) -> None:
    """Raise InputError MISSING for the first column that is needed and not there; the others are in `also`."""
    names = [column.name for column in columns]
    faults = [
        InputError(
            "MISSING",
            f"{flag}: {shown(path)} has no column {name}.",
            flag=flag,
            value=path,
            hint=_meant(name, header),
        )
        for name in NEEDED
        if name not in names
    ]
    if faults:
        faults[0].also = tuple(faults[1:])
        raise faults[0]


def _meant(name: str, header: Sequence[str]) -> str:
    """What to do about a column that is not there: the nearest that are, or how to name it beside all that are."""
    close = nearest(name, header)
    has = ", ".join(shown(own) for own in header[:LISTED])
    more = f" and {len(header) - LISTED} more" if len(header) > LISTED else ""
    return f"Did you mean {' or '.join(close)}?" if close else f"Name that column {name}; the header has {has}{more}."


def _check_rows(runs: list[dict[str, str]], path: str, flag: str) -> None:
    if not runs:
        raise InputError("EMPTY", f"{flag}: {shown(path)} has a header and no rows.", flag=flag, value=path, hint="Add measured runs.")  # fmt: skip
    if len(runs) > MAX_ROWS:
        raise InputError("TOO_LARGE", f"{flag}: more than {MAX_ROWS} rows.", flag=flag, value=path, hint="Split the file.")  # fmt: skip
    seen: set[str] = set()
    for run in runs:
        if run["id"] in seen:
            raise InputError("DUPLICATE_KEY", f"{flag}: the id {shown(run['id'])} stands twice.", flag=flag, value=run["id"], hint="Give each run its own id.")  # fmt: skip
        seen.add(run["id"])


class Unexpressed(Exception):
    """A run that cannot be predicted; the text is the missing fact or the technique that the model lacks."""


def number(run: Run, name: str) -> float | None:
    """A cell as a positive number; None when it is empty. Raises Unexpressed for other text."""
    text = run.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise Unexpressed(f"{name} is not a number: {shown(text)}") from None
    if not math.isfinite(value) or value <= 0:
        raise Unexpressed(f"{name} is not a positive number: {shown(text)}")
    return value


def whole(run: Run, name: str) -> int | None:
    """A cell as a whole number from 1; None when it is empty. Raises Unexpressed for other text and for
    numbers beyond `LARGEST`."""
    value = number(run, name)
    if value is not None and value != int(value):
        raise Unexpressed(f"{name} is not a whole number: {shown(run[name])}")
    if value is not None and value > LARGEST.get(name, LARGEST[""]):
        raise Unexpressed(f"{name} is larger than any run's: {shown(run[name])}")
    return None if value is None else int(value)


def needed(run: Run, name: str) -> int:
    """A whole number that must be there. Raises Unexpressed."""
    value = whole(run, name)
    if value is None:
        raise Unexpressed(f"{name} is not stated")
    return value
