"""A Sweep as a table per device: sizes downwards, nodes across, and in each cell the family that wins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from strategist.document.sweep import Cell, Sweep
from strategist.reports.lines import HELD, Line, hung, line, table, wrapped

INDENT = 12
NOTHING = "-"
"""In cells where nothing is legal and fits."""
UNFINISHED = "?"
"""In cells for which a time budget was too short."""


def sweep_text(found: Sweep, width: int = 80) -> list[Line]:
    """The whole report in lines of at most `width` columns."""
    devices = list(dict.fromkeys(cell.gpu for cell in found.cells))
    return [
        *(row for number, one in enumerate(found.assumptions, 1) for row in wrapped(f"assumed A{number}", f"{one.what}: {one.value}   set:{HELD}{one.flag}", width, indent=INDENT, style="dim")),
        *(row for gpu in devices for row in _diagram(gpu, [cell for cell in found.cells if cell.gpu == gpu], width)),
        line(""),
        *wrapped("", f"The family that wins by policy {found.policy}, with the percentage of the device's peak (MFU); {NOTHING}: nothing fits.", width, indent=0, style="dim"),
        *(wrapped("", f"{UNFINISHED}: the time budget ran out; the best that was found until then, if any.", width, indent=0, style="warn") if any(cell.unfinished for cell in found.cells) else ()),
    ]  # fmt: skip


def _diagram(gpu: str, cells: Sequence[Cell], width: int) -> Iterator[Line]:
    """One device's table; as sentences where the terminal is too narrow for it."""
    sizes = list(dict.fromkeys(cell.model_size for cell in cells))
    nodes = list(dict.fromkeys(cell.nodes for cell in cells))
    words = {(cell.model_size, cell.nodes): _word(cell) for cell in cells}
    per_node = cells[0].gpus // cells[0].nodes
    yield line("")
    yield from wrapped(
        "",
        f"{gpu}, {per_node} per node, {cells[0].precision}; nodes across, model size down",
        width,
        indent=0,
        style="key",
    )
    rows = [("", *map(str, nodes), ""), *((size, *(words[size, n] for n in nodes), "") for size in sizes)]
    needed = sum(max(len(row[i]) for row in rows) + 2 for i in range(len(rows[0]))) + 2
    if needed <= width:
        yield from table(rows, max(width, needed + 20))
        return
    for size, n in ((size, n) for size in sizes for n in nodes):
        yield from hung(f"  {size} on {n} node{'s' * (n > 1)}: {words[size, n]}", width)


def _word(cell: Cell) -> str:
    if cell.family is None:
        return UNFINISHED if cell.unfinished else NOTHING
    return f"{cell.family} {100 * (cell.mfu or 0.0):.0f} %{cell.unfinished * f' {UNFINISHED}'}"
