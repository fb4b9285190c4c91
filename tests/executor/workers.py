"""What the ranks of a test do. In a module of its own, so that fresh processes can import it."""

from __future__ import annotations

from torch import Tensor

from strategist.document.plan import Plan
from strategist.executor.build import build
from strategist.executor.job import Instruments
from strategist.executor.models import model_from_shape
from strategist.executor.optimizers import default_optimizer
from tests.executor.reference import LEARNING_RATE, Task, dataset_of


def train_task(plan: Plan, task: Task) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """Losses, final parameters and gradient norms of the task under the plan's layout."""
    session = build(
        plan,
        model_from_shape(task.shape),
        default_optimizer(plan, LEARNING_RATE),
        clip_norm=task.clip_norm,
        seed=task.seed,
        instruments=Instruments(compile_backend="aot_eager"),
    )
    results = [session.step(batch) for batch in session.loader(dataset_of(task), seed=task.seed)]
    return [r.loss for r in results], session.parameters_full(), [r.gradient_norm for r in results]
