"""The last rung of the ladder as files: what each rank saw of a run, put together into one Observed."""

from __future__ import annotations

from strategist import __version__
from strategist.document.observed import Observed, RankObservation
from strategist.document.plan import Plan
from strategist.document.write import digest
from strategist.reading import checked, read_document
from strategist.records import dataclass
from strategist.runs.folder import RunFolder

LEFT_OUT, WATCHED = 2, 3
"""Steps that are not observed, because the first makes states and buffers and the second uses them for the first time; and
steps under the stopwatch after them. Later ones are undisturbed."""

LEAST_STEPS = LEFT_OUT + WATCHED + 1
"""Steps from which on there is something to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank leaves in the run folder: the torch it ran, what it ran on, and what it saw."""

    torch: str
    device: str
    rank: RankObservation


def observed_run(folder: RunFolder, plan: Plan) -> Observed | None:
    """What all ranks of a run saw of its plan; None where the last attempt was too short for some. Raises InputError for
    files that are no such records."""
    paths = [folder.of_rank(rank, "observed") for rank in range(plan.mesh.world)]
    if not all(path.is_file() for path in paths):
        return None
    records = [checked(RankRecord, read_document(str(path), "RUN"), "RUN") for path in paths]
    return Observed(
        made_by=f"strategist {__version__}",
        rung="run",
        plan=digest(plan),
        torch=records[0].torch,
        model=plan.model.name,
        ranks=tuple(record.rank for record in records),
        device=records[0].device,
    )
