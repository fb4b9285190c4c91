"""The executor's own program at a world size that no test machine has: fake tensors, fake collectives, one process."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from strategist.document.plan import Plan
from strategist.executor.build import lay_out
from strategist.executor.models import model_from_shape
from strategist.measure.program import batch_for, fake_world, job_for, live_session


def trace_rank(plan: Plan, rank: int) -> dict[str, int]:
    """Two steps of one rank's program under fake tensors: steps done, and elements of parameters held."""
    with fake_world(plan, rank):
        job = job_for(plan, torch.device("cpu"))
        model = lay_out(model_from_shape(plan.model, routing="balanced"), job)
        with FakeTensorMode(allow_non_fake_inputs=True):
            session = live_session(model, job)
            for _ in range(2):
                session.step(batch_for(plan, session.share.size))
            held = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
    return {"steps": session.steps, "held": held}
