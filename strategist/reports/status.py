"""A run as people look at it: where it is, each rank, its checkpoints, what went wrong."""

from __future__ import annotations

from strategist.reports.lines import Line, line, table, wrapped
from strategist.runs.status import RankStatus, RunStatus
from strategist.units import format_gib, format_seconds

LABEL = 12


def status_lines(status: RunStatus, width: int) -> list[Line]:
    """The report on one run folder."""
    loss = "" if status.loss is None else f", loss {status.loss:.4f}"
    ranks = [("rank", "doing", "step time", "memory"), *map(_rank, status.ranks)]
    return [
        *wrapped(
            "run", f"{status.state} on {status.layout}: step {status.done} of {status.steps}{loss}", width, indent=LABEL
        ),
        *table(ranks, width, right=(2, 3)),
        *wrapped("checkpoints", _checkpoints(status), width, indent=LABEL + 1),
        *(piece for fault in status.faults for piece in wrapped("fault", _fault(fault), width, indent=LABEL)),
        *([] if status.faults else [line("faults      none")]),
        *(
            piece
            for found in status.warnings
            for piece in wrapped("warning", str(found.get("sentence")), width, indent=LABEL)
        ),
    ]


def _rank(rank: RankStatus) -> tuple[str, ...]:
    doing = "nothing yet" if rank.phase is None else f"{rank.phase} of step {rank.step}"
    return (
        str(rank.rank),
        doing if rank.alive else f"ended, {doing}",
        "-" if rank.step_seconds is None else format_seconds(rank.step_seconds),
        "-" if rank.resident_bytes is None else format_gib(rank.resident_bytes),
    )


def _checkpoints(status: RunStatus) -> str:
    words = (f"{each.step} ({format_gib(each.bytes)})" if each.bytes else f"{each.step} (incomplete)" for each in status.checkpoints)  # fmt: skip
    return "after step " + ", ".join(words) if status.checkpoints else "none"


def _fault(fault: dict[str, object]) -> str:
    return f"attempt {fault.get('attempt')}: {fault.get('cause')} {fault.get('action')}, {fault.get('steps_lost')} steps lost"
