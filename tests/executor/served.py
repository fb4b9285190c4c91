"""What the processes of a job with a parameter server do. In a module of its own, so that fresh processes can import it."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategist.document.plan import Plan
from strategist.errors import ImpossibleError
from strategist.executor.parameter_server import SERVER, meet, served_session
from strategist.executor.processes import leave_group
from strategist.executor.session import Session
from strategist.executor.watch import Saving, Watch
from strategist.runs.folder import RunFolder
from tests.executor.reference import LEARNING_RATE, Task, dataset_of
from tests.executor.workers import Outcome

ROWS, BAG, WIDTH = 50, 8, 6


class Recommender(nn.Module):
    """A small recommender: two tables of embeddings, bags of ids in, a tower of dense layers, a score for each of ROWS items.

    Sequences of 2 x BAG ids: the first half names what was bought, the second what was looked at.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.bought = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", dtype=torch.float64)
        self.seen = nn.EmbeddingBag(ROWS, WIDTH, mode="mean", dtype=torch.float64)
        self.tower = nn.Sequential(nn.Linear(2 * WIDTH, 16), nn.ReLU(), nn.Linear(16, ROWS)).double()

    def forward(self, input_ids: Tensor) -> Tensor:
        """Ids (B, 2 BAG) to scores (B, 1, ROWS)."""
        bags = self.bought(input_ids[:, :BAG]), self.seen(input_ids[:, BAG:])
        scores: Tensor = self.tower(torch.cat(bags, dim=1))
        return scores.unsqueeze(1)


class Purchases(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Which item is bought next depends on those before."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= len(self):
            raise IndexError(index)
        ids = torch.randint(ROWS, (2 * BAG,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids[:1] * 7 % ROWS}


def serve_or_train(plan: Plan, task: Task | None, folder: str) -> Outcome | None:
    """A worker's losses, final weights and gradient norms: of a task of tokens, or of the recommender; nothing for the server."""
    rank = _take_a_number(Path(folder))
    workers = plan.mesh.world
    with meet(rank, workers, f"file://{folder}/rpc"):
        if rank == workers:
            return None
        dist.init_process_group("gloo", init_method=f"file://{folder}/ddp", rank=rank, world_size=workers)
        try:
            return _train(plan, task, Path(folder))
        finally:
            leave_group()


def _take_a_number(folder: Path) -> int:
    """The first number that no other process has taken."""
    for number in count():
        try:
            (folder / f"rank{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return number
    raise AssertionError


def _train(plan: Plan, task: Task | None, folder: Path) -> Outcome:
    choices: dict[str, Any] = {"clip_norm": 0.5, "learning_rate": LEARNING_RATE}
    if task is None:
        session, data = served_session(plan, Recommender, **choices), Purchases()
        batches = session.loader(data, shuffle=False)
    else:
        session = served_session(plan, seed=task.seed, **choices)
        batches = session.loader(dataset_of(task), seed=task.seed)
    assert not any("table" in name or "bought" in name for name, _ in session.parts.model.named_parameters())
    _assert_nothing_is_saved(session, folder / f"run{dist.get_rank()}")
    results = [session.step(batch) for batch in batches]
    return [r.loss for r in results], session.parameters_full(), [r.gradient_norm for r in results]


def _assert_nothing_is_saved(session: Session, folder: Path) -> None:
    """A run that would save is refused before its first step, and leaves nothing."""
    run = RunFolder(str(folder))
    run.of_rank(0, "beat").parent.mkdir(parents=True)
    with pytest.raises(ImpossibleError, match="parameter server"):
        Watch(run, saving=Saving(every=1, keep=1)).begin(session)
    assert not run.checkpoints.exists()


def refused_by(module: nn.Module) -> str:
    """What is said about a module whose tables no server can hold."""
    from strategist.executor.parameter_server import tables_in

    try:
        tables_in(module)
    except ImpossibleError as refusal:
        return refusal.message
    return SERVER
