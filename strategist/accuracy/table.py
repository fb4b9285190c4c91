"""A table of measured runs as rows of text. Columns: benchmarks/truth/README.md; an empty cell is a fact nobody stated."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence

from strategist.document.calibration import UnreadColumn
from strategist.errors import InputError, did_you_mean, nearest, shown
from strategist.reading import read_text

Run = Mapping[str, str]

NEEDED = ("id", "hardware", "gpus_total", "model", "seq_len")
COLUMNS = (
    *NEEDED, "source", "url_or_repo_path", "table", "quality", "notes", "derived_fields",
    "gpu_mem_gb", "gpus_per_node", "intra_node", "inter_node", "gpu_class",
    "params_b", "layers", "first_dense", "hidden", "ffn_hidden", "heads", "kv_heads", "head_dim", "vocab", "experts", "experts_active",
    "moe_ffn_hidden", "model_kind", "task",
    "global_batch_seqs", "micro_batch_seqs", "grad_accum",
    "dp", "tp", "pp", "vp", "cp", "ep", "zero_stage_or_fsdp", "zero_class", "sharding_detail", "sequence_parallel", "recompute",
    "recompute_class", "offload",
    "framework", "precision", "precision_class", "optimizer", "compile", "attention_impl",
    "step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "hfu", "tflops_formula_note", "peak_mem_gb", "mem_kind", "mem_unit_src",
    "oom",
)  # fmt: skip
"""Every column that a table may have (benchmarks/truth/README.md says what they hold); others are not read, and `accuracy` says so."""
CALLED: Mapping[str, str] = {
    "accelerator": "hardware", "activation_checkpointing": "recompute", "batch_size": "global_batch_seqs", "dp_size": "dp", "dtype": "precision",
    "gbs": "global_batch_seqs", "gpu": "hardware", "gpu_count": "gpus_total", "gpus": "gpus_total", "iteration_time": "step_time_s",
    "mbs": "micro_batch_seqs", "n_gpus": "gpus_total", "num_gpus": "gpus_total", "pipeline_parallel": "pp", "pp_size": "pp",
    "sequence_length": "seq_len", "tensor_parallel": "tp", "tp_size": "tp", "world_size": "gpus_total", "zero": "zero_class",
    "zero_stage": "zero_class",
}  # fmt: skip
"""Columns by names that people have for them, which no letters of theirs give away."""
MAX_ROWS = 100_000
SEPARATORS = ",;\t"
"""What stands between cells; of those that a header has as often, the first."""
LARGEST: Mapping[str, int] = {"": 2**17, "seq_len": 2**24, "global_batch_seqs": 2**24, "vocab": 2**24, "layers": 4096}
"""Cells beyond this are typing errors; the entry without a name holds for every other column."""


def read_runs(path: str, flag: str = "FILE") -> tuple[Run, ...]:
    """The rows of a CSV file with a header, its cells apart by commas, or by what else its header has most of. Raises what `read_text`
    raises, and InputError PARSE for a row that does not match the header, MISSING for an absent column, DUPLICATE_KEY for a column or an
    id given twice, TOO_LARGE."""
    lines = _cells(read_text(path, flag), path, flag)
    header = [name.strip() for name in lines[0]]
    _check_header(header, path, flag)
    runs = []
    for number, cells in enumerate(lines[1:], 2):
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(header):
            raise InputError(
                "PARSE",
                f"{flag}: row {number} of {shown(path)} has {len(cells)} cells, and the header names {len(header)}.",
                flag=flag,
                value=path,
                hint="Quote cells that contain commas.",
            )
        runs.append(dict(zip(header, (cell.strip() for cell in cells), strict=True)))
    _check_rows(runs, path, flag)
    return tuple(runs)


def unread_columns(runs: Sequence[Run]) -> tuple[UnreadColumn, ...]:
    """The columns of a table that nothing reads, each with the columns that may have been meant."""
    return tuple(UnreadColumn(name, _meant(name)) for name in (runs[0] if runs else ()) if name not in COLUMNS)


def _meant(name: str) -> tuple[str, ...]:
    word = name.lower().replace(" ", "_").replace("-", "_")
    return (CALLED[word],) if word in CALLED else nearest(word, COLUMNS, 2)


def _cells(text: str, path: str, flag: str) -> list[list[str]]:
    """The cells of every line, whatever ends it."""
    lines = io.StringIO(text, newline=None)
    head = lines.readline()
    lines.seek(0)
    try:
        return list(csv.reader(lines, delimiter=max(SEPARATORS, key=head.count)))
    except csv.Error as problem:
        raise InputError("PARSE", f"{flag}: {shown(path)} is no table: {problem}.", flag=flag, value=path, hint="Write it as CSV.") from None  # fmt: skip


def _check_header(header: list[str], path: str, flag: str) -> None:
    for name in header:
        if header.count(name) > 1:
            raise InputError("DUPLICATE_KEY", f"{flag}: the column {shown(name)} stands twice.", flag=flag, value=path, hint="Name each column once.")  # fmt: skip
    faults = [_missing(name, header, path, flag) for name in NEEDED if name not in header]
    if faults:
        first, *rest = faults
        first.also = tuple(rest)
        raise first


def _missing(name: str, header: list[str], path: str, flag: str) -> InputError:
    """What is wrong with a table without a column that it needs, and the column that may stand for it."""
    meant = [other for other in header if other not in COLUMNS and name in _meant(other)]
    hint = f"Did you mean {' or '.join(map(shown, meant))}? Call it {name}." if meant else did_you_mean(name, header)
    return InputError("MISSING", f"{flag}: {shown(path)} has no column {name}.", flag=flag, value=path, hint=hint)


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
