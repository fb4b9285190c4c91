"""One rank's side of a supervised run: heartbeats, rows of steps, checkpoints at the interval, and the agreement to stop."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from strategist.document.write import as_document
from strategist.errors import InterruptError, StrategistError
from strategist.executor.processes import is_collateral, text_of
from strategist.executor.scalars import Scalars
from strategist.executor.session import Session, StepResult
from strategist.records import dataclass
from strategist.runs.beats import BeatWriter
from strategist.runs.checkpoints import keep_newest, name_of
from strategist.runs.folder import RunFolder, append_row, write_whole
from strategist.runs.verdict import Failure

PHASES_OF_WORK = ("forward", "backward")
"""Phases whose beginning tells whether a rank is late: what comes before them is its own work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """When to save: after every `every` steps and after the last one; the newest `keep` checkpoints stay. `in_background`
    goes on training while one is written."""

    every: int
    keep: int
    in_background: bool = False


class Watch:
    """What a rank tells its supervisor, through files of the run folder.

    Made first of all in a rank's process. `start` is the checkpoint to go on from. With `saving` the rank answers SIGTERM
    at the end of a step: all ranks agree on the step, save, and raise InterruptError.
    """

    def __init__(
        self, folder: RunFolder, *, start: Path | None = None, saving: Saving | None = None, scalars: bool = False
    ) -> None:
        self.folder, self.start, self.saving = folder, start, saving
        self.rank, self.steps, self.asked = int(os.environ.get("RANK", "0")), 0, False
        self._began: dict[str, float] = {}
        self._writes, self._wants_scalars = True, scalars
        self._scalars: Scalars | None = None
        self._stack = open(folder.of_rank(self.rank, "stack"), "w", encoding="utf-8")  # noqa: SIM115 - lives as long as we
        faulthandler.register(signal.SIGUSR1, file=self._stack, all_threads=False)
        faulthandler.enable(file=self._stack, all_threads=False)  # a rank that crashes says where
        self._beats = BeatWriter(folder.of_rank(self.rank, "beat"), self.rank)
        self.phase("start")  # whoever hangs from here on can be asked where it is
        if saving is not None:
            signal.signal(signal.SIGTERM, self._hear)

    def _hear(self, _number: int, _frame: object) -> None:
        self.asked = True

    def phase(self, name: str) -> None:
        """Say that this rank begins something."""
        if name in PHASES_OF_WORK:
            self._began.setdefault(name, round(time.monotonic(), 6))
        self._beats.beat(self.steps, name)

    def begin(self, session: Session) -> None:
        """Go on from the checkpoint, if there is one."""
        if self.start is not None:
            session.load(self.start)
        self.steps = session.steps
        if self._wants_scalars:
            self._scalars = Scalars(self.folder, self.rank, self.steps)

    def after_step(self, session: Session, result: StepResult, *, is_last: bool) -> None:
        """Write the step down; save when it is time. Raises InterruptError on every rank when one was asked to stop."""
        self._write_down(result, session.job.plan.mesh.pp)
        self.steps = session.steps
        stops = self.saving is not None and self._any_asked(session)
        is_end = stops or is_last
        if self.saving is not None and (is_end or session.steps % self.saving.every == 0):
            self._save(session, self.saving, is_end=is_end)
        if self._scalars and is_end:
            self._scalars.close()
        if stops and not is_last:
            raise InterruptError(
                "INTERRUPTED",
                f"Stopped on request after {session.steps} steps.",
                value=session.steps,
                hint=f"Go on with `strategist resume {self.folder.path}`.",
            )

    def _write_down(self, result: StepResult, stages: int) -> None:
        """One row; a folder that cannot be written to is said once, and training goes on. In a pipeline stages end their work
        one after the other, so only its beginning tells who is late."""
        began, self._began = self._began, {}
        if self._scalars:
            self._scalars.step(self.steps, result)
        if not self._writes:
            return
        row = {
            "step": self.steps, "loss": result.loss, "seconds": result.seconds, "gradient_norm": result.gradient_norm,
            "began": began if stages == 1 else {name: at for name, at in began.items() if name == "forward"},
        }  # fmt: skip
        try:
            append_row(self.folder.of_rank(self.rank, "steps"), row)
        except OSError as problem:
            self._writes = False
            sys.stderr.write(f"rank {self.rank} cannot write down its steps: {problem}\n")

    def _any_asked(self, session: Session) -> bool:
        """Whether any rank was asked to stop: one number per step, so that all stop after the same one."""
        if session.job.plan.mesh.world == 1:
            return self.asked
        asked = torch.tensor(int(self.asked), device=session.job.device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return bool(asked.item())

    def _save(self, session: Session, saving: Saving, *, is_end: bool) -> None:
        """Old checkpoints go when a newer one is complete: at the end, or when the next one begins."""
        session.save(self.folder.checkpoints / name_of(session.steps), wait=not saving.in_background)
        if is_end:
            session.finish_saving()
        if self._scalars:
            self._scalars.saved(session.steps)
        if self.rank == 0:
            keep_newest(self.folder.checkpoints, saving.keep)

    def failed(self, error: StrategistError) -> None:
        """Leave this rank's own account of its end."""
        cause = error.__cause__
        text = text_of(cause) if cause else error.message
        failure = Failure(
            rank=self.rank,
            collateral=is_collateral(cause),
            text=text,
            deterministic=cause is None and error.code != "IO",
        )
        write_whole(self.folder.of_rank(self.rank, "failure"), json.dumps(as_document(failure)))
