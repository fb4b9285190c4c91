"""What a rank writes for TensorBoard: torch's own writer, one folder per rank."""

from __future__ import annotations

from typing import Any

from strategist.executor.session import StepResult
from strategist.runs.beats import resident_bytes
from strategist.runs.folder import RunFolder, rows_of

FLUSH_SECONDS = 10
"""What a killed rank may take with it."""


class Scalars:
    """Scalars of one rank from one step on: step time in seconds and resident memory in bytes; from rank 0 also loss, gradient
    norm, loss scale, the step of each checkpoint, and how many verdicts the run has had so far."""

    def __init__(self, folder: RunFolder, rank: int, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard

        place = folder.tensorboard / f"rank-{rank}"
        self._is_first = rank == 0
        self._writer: Any = SummaryWriter(str(place), purge_step=first_step, flush_secs=FLUSH_SECONDS)
        if self._is_first:
            self._write("faults", len(tuple(rows_of(folder.verdicts))), first_step)

    def step(self, number: int, result: StepResult) -> None:
        """One step that was done."""
        self._write("step_seconds", result.seconds, number)
        self._write("resident_bytes", resident_bytes(), number)
        if not self._is_first:
            return
        for name in ("loss", "gradient_norm", "loss_scale"):
            value = getattr(result, name)
            if value is not None:
                self._write(name, value, number)

    def saved(self, step: int) -> None:
        """A checkpoint after so many steps began."""
        if self._is_first:
            self._write("checkpoint", step, step)

    def close(self) -> None:
        """Bring everything to the disk."""
        self._writer.close()

    def _write(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)
