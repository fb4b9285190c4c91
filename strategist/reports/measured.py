"""What a run measured beside what its Plan predicted, under the Plan's own terms. The two are never mixed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any, Literal

from strategist.document.plan import Plan
from strategist.records import dataclass
from strategist.reports.lines import Line, line, table
from strategist.units import format_count, format_gib, format_seconds

Report = Mapping[str, Any]
"""Rank 0's account of a run, as `strategist.executor` writes it: steps, memory of every rank, versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One term of the Plan on two rungs: `predicted` by the Plan, `measured` by the run, in `unit` (s, tokens/s, B)."""

    term: str
    unit: Literal["s", "tokens/s", "B"]
    predicted: float
    measured: float
    how: str

    @property
    def ratio(self) -> float:
        """Predicted over measured, as every rung of the ladder has it."""
        return self.predicted / self.measured


def compared(plan: Plan, report: Report) -> tuple[Compared, ...]:
    """Step, rate and memory. The first step is left out of the median because it allocates and compiles."""
    steps = report["steps"]
    settled = [step["seconds"] for step in steps[1:]] or [steps[0]["seconds"]]
    seconds = median(settled)
    how = f"median of {len(settled)} steps, the first left out" if len(steps) > 1 else "the only step"
    rate = plan.workload.tokens_per_step / seconds
    return (
        Compared(term="step", unit="s", predicted=plan.time.step.value, measured=seconds, how=how),
        Compared(term="tokens_per_second", unit="tokens/s", predicted=plan.time.tokens_per_second, measured=rate, how=how),
        _memory(plan, report),
    )  # fmt: skip


def _memory(plan: Plan, report: Report) -> Compared:
    """What the allocator reserved on GPUs, which excludes the runtime; the resident set of the process on CPU ranks."""
    ranks, stages = report["memory"], plan.memory.stages
    if all(rank["reserved_bytes"] for rank in ranks):
        name, predicted = "reserved", max(stage.reserved for stage in stages)
        most, how = max(rank["reserved_bytes"] for rank in ranks), "peak reserved by the allocator, fullest rank"
    else:
        name, predicted = "device", max(stage.device for stage in stages)
        most, how = max(rank["resident_bytes"] for rank in ranks), "peak resident set, fullest rank"
    return Compared(term=f"peak_memory_{name}", unit="B", predicted=predicted, measured=most, how=how)


def measured_lines(plan: Plan, report: Report, width: int) -> list[Line]:
    """Predicted beside measured, one row per term, and how the loss went."""
    losses, ranks = [step["loss"] for step in report["steps"]], report["world"]
    head = f"{len(losses)} steps on {ranks} rank{'s' * (ranks > 1)}, loss {losses[0]:.4f} to {losses[-1]:.4f}"
    rows = [
        ("", "predicted", "measured", "ratio", ""),
        *(_row(each, plan.model.unit) for each in compared(plan, report)),
    ]
    return [line(head), *_rows(rows, width)]


def _row(each: Compared, unit: str) -> tuple[str, ...]:
    words = {"s": format_seconds, "tokens/s": format_count, "B": format_gib}[each.unit]
    label = each.term.replace("tokens", unit).replace("_per_second", "/s").replace("_", " ")
    return label, words(each.predicted), words(each.measured), f"{each.ratio:.2f}", each.how


def _rows(rows: list[tuple[str, ...]], width: int) -> Iterator[Line]:
    """Without the last column where it would be folded."""
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    told = rows if sum(widths) + 2 * 5 <= width else [(*row[:3], row[3].rjust(widths[3])) for row in rows]
    yield from table(told, width, right=(1, 2, 3))
