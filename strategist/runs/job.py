"""What a run was asked to do: written once, read by `resume` and `status`."""

from __future__ import annotations

from collections.abc import Iterator

from strategist.document.plan import Plan
from strategist.errors import InputError, StaleError, shown
from strategist.reading import checked, read_document
from strategist.records import dataclass
from strategist.runs.folder import RunFolder

FORMAT = "strategist-run/1"
DEFAULT_KEEP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """The job of a run folder: `steps` in all, a checkpoint after every `save_every`, of which the newest `keep`
    stay, written while training goes on if `async_save`; `observe` asks for time and memory in the Plan's terms, `tensorboard` for
    scalars."""

    format: str = FORMAT
    steps: int
    seed: int = 0
    save_every: int | None = None
    keep: int = DEFAULT_KEEP
    observe: bool = False
    async_save: bool = False
    tensorboard: bool = False


def read_job(folder: RunFolder) -> JobRecord:
    """The job of a run folder. Raises InputError KIND for a folder that is none."""
    if not folder.job.is_file():
        raise InputError(
            "KIND",
            f"{shown(folder.path)} is not a run folder: it has no {folder.job.name}.",
            flag="RUN",
            value=folder.path,
            hint="Name a folder that `strategist run PLAN --out RUN` made.",
        )
    job = checked(JobRecord, read_document(str(folder.job), "RUN"), "RUN")
    if job.format != FORMAT or job.steps < 1 or job.keep < 1 or (job.save_every or 1) < 1:
        raise InputError(
            "KIND",
            f"{shown(str(folder.job))} is not the job of a run of this version.",
            flag="RUN",
            value=job.format,
            hint="Start a new run.",
        )
    return job


def require_same_job(before: Plan, after: Plan) -> None:
    """Raise StaleError FACTS_DIFFER unless another plan trains the same model on the same batches in the same formats."""
    differences = list(_differences(before, after))
    if differences:
        raise StaleError(
            "FACTS_DIFFER",
            f"The other plan is for another job: {'; '.join(differences)}.",
            flag="--plan",
            hint="Plan again with the same model, sequence length, global batch, precision and optimizer.",
        )


def _differences(before: Plan, after: Plan) -> Iterator[str]:
    if before.model != after.model:
        yield f"model {after.model.name} differs from the run's {before.model.name}"
    for name in ("seq_len", "target_len", "global_batch", "precision", "optimizer"):
        old, new = getattr(before.workload, name), getattr(after.workload, name)
        if old != new:
            yield f"{name} {new} instead of {old}"
    if before.strategy.formats.parameter != after.strategy.formats.parameter:
        yield f"parameters in {after.strategy.formats.parameter} instead of {before.strategy.formats.parameter}"
