"""A run of one's own as one more measured run: what `run --observe` wrote, and the Plan beside it."""

from __future__ import annotations

import os

from strategist.accuracy.express import Case, Measured
from strategist.accuracy.judge import Judged, predictions
from strategist.document.load import load_observed, load_plan
from strategist.document.write import digest
from strategist.errors import ImpossibleError, InputError, StaleError, shown
from strategist.planner.predict import filled, job_of, pins_of
from strategist.records import replace
from strategist.timing.calibrated import parts_of_one

FLAG = "OBSERVED"
PLAN = "plan.json"
"""The Plan of a run, in the folder of what was observed."""


def judged_run(path: str) -> Judged:
    """An observed run beside its prediction by the formulas alone. Raises InputError KIND for what another rung saw, StaleError DIGEST when the Plan
    beside it is another one, and what the documents raise."""
    seen = load_observed(path)
    if seen.rung != "run" or seen.slowest is None or seen.slowest.time is None:
        raise InputError(
            "KIND",
            f"OBSERVED: {shown(path)} holds no measured step of a run.",
            flag=FLAG,
            value=seen.rung,
            hint="Make one with `strategist run PLAN --out RUN --observe`.",
        )
    plan = load_plan(os.path.join(os.path.dirname(path), PLAN), FLAG)
    if digest(plan) != seen.plan:
        raise StaleError(
            "DIGEST",
            f"OBSERVED: the {PLAN} beside {shown(path)} is not the plan that was observed.",
            flag=FLAG,
            value=seen.plan,
            hint="Leave both files where the run wrote them.",
        )
    if plan.strategy.uneven_batch:
        raise ImpossibleError(
            "UNSUPPORTED",
            f"OBSERVED: {shown(path)} is a run of an uneven batch on devices of several kinds, and factors are those of one.",
            flag=FLAG,
            hint="Observe a run on devices of one kind.",
        )
    job = replace(job_of(plan), factors=())
    layout = filled(job, {pin.key: pin.value for pin in pins_of(plan)})
    times, _ = predictions(job, [layout])
    step_s = seen.slowest.time.step_ns / 1e9
    row = {
        "id": path,
        "source": "observed",
        "model": plan.model.name,
        "hardware": plan.cluster.slowest.gpu.name,
        "gpus_total": str(plan.mesh.world),
    }
    return Judged(
        row,
        Case(path, job, tuple(layout.items()), Measured(step_s, None, "", is_oom=False)),
        step_s=float(times.step[0]) / 1e9,
        parts=parts_of_one(times.exposed),
    )
