"""`strategist catalog`: the facts strategist ships with."""

from __future__ import annotations

from typing import Any

from strategist.catalog import Row, rows
from strategist.cli.arguments import Command, Namespace, Positional
from strategist.cli.flags import COMMON
from strategist.cli.output import show_document, show_lines, width
from strategist.errors import require_known
from strategist.reports.lines import Line, table, wrapped
from strategist.units import format_count

TABLES = ("gpus", "nodes", "models")


COMMAND = Command(
    "catalog",
    "List the known gpus, nodes and models.",
    COMMON,
    (
        Positional("table", "gpus, nodes or models"),
        Positional("name", "one row", optional=True),
    ),
)


def run(options: Namespace) -> int:
    """List a table, or print one row with every fact and its source."""
    require_known(options.table, TABLES, f"There is no table {options.table!r}.", "TABLE")
    found = list(rows(options.table)) if options.name is None else [_row(options.table, options.name)]
    if options.json:
        show_document(found)
    elif options.name is None:
        show_lines(table([_summary(options.table, row) for row in found], width(), indent=0), no_color=options.no_color)
    else:
        show_lines(_page(found[0]), no_color=options.no_color)
    return 0


def _row(table_name: str, wanted: str) -> Row:
    """The row of a name, by every name that `plan` takes. Raises UNKNOWN_GPU, UNKNOWN_NODE, UNKNOWN_MODEL, AMBIGUOUS."""
    from strategist.facts.gpus import find_gpu
    from strategist.facts.model_rows import find_model
    from strategist.facts.nodes import find_node

    if table_name == "models":
        return find_model(wanted, "NAME")
    name = (find_gpu(wanted, "NAME") if table_name == "gpus" else find_node(wanted, "NAME")).value.name
    return next(row for row in rows(table_name) if row["name"] == name)


def _summary(name: str, row: Row) -> tuple[str, ...]:
    if name == "gpus":
        peak = row.get("bf16_TFLOPs") or row.get("fp16_TFLOPs") or row.get("fp32_TFLOPs")
        return row["name"], f"{row['memory_marketing_GB']} GB", f"{peak} TFLOP/s", f"{row.get('scaleup', 'pcie')}"
    if name == "nodes":
        return (
            row["name"],
            f"{row['gpus_per_node']} x {row['gpu']}",
            row["topology"],
            f"{row.get('inter_node_Gbps', '?')} Gb/s between nodes",
        )
    return row["name"], format_count(row["params_total"]), f"{row.get('layers', '?')} layers", row["kind"]


def _page(row: Row) -> list[Line]:
    columns = width()
    return [piece for key, value in row.items() for piece in wrapped(key, _words(value), columns, indent=30)]


def _words(value: Any) -> str:
    return ", ".join(str(item) for item in value) if isinstance(value, list) else str(value)
