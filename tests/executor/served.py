"""What the ranks of a job with a parameter server do. In a module of its own, so that fresh processes can import it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategist.document.plan import Plan
from strategist.errors import ImpossibleError
from strategist.executor.build import build
from strategist.executor.models import model_from_shape
from strategist.executor.parameter_server import SERVER, beside_server
from strategist.executor.tables import tables_in
from strategist.executor.train import train
from strategist.runs.folder import write_whole
from tests.executor.workers import Outcome, session_of

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


def recommend(plan: Plan) -> Outcome:
    """Losses, final weights and gradient norms of the recommender."""
    with beside_server(torch.device("cpu")):
        session = session_of(plan, Recommender(), clip_norm=0.5)
        assert not any("bought" in name or "seen" in name for name, _ in session.parts.model.named_parameters())
        results = [session.step(batch) for batch in session.loader(Purchases(), shuffle=False)]
        return [r.loss for r in results], session.parameters_full(), [r.gradient_norm for r in results]


def losses_of(plan: Plan) -> list[float]:
    """What `train` gives, and that nothing of this rank's is left of a server."""
    losses = [step.loss for step in train(plan, 4).steps]
    assert not Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return losses


def losses_of_two(plan: Plan) -> tuple[list[float], list[float]]:
    """What two trainings give, one after the other."""
    return losses_of(plan), losses_of(plan)


def built_alone(plan: Plan) -> str:
    """What `build` says of a plan with a server."""
    try:
        build(plan, model_from_shape(plan.model))
    except ImpossibleError as refusal:
        return refusal.message
    return ""


def serve_for_ever(folder: str) -> None:
    """As a lone rank beside its server, whose number it writes into the folder."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/ddp", rank=0, world_size=1)
    with beside_server(torch.device("cpu")):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        write_whole(Path(folder) / "server", children[-1])
        time.sleep(600)


def refused_by(module: nn.Module) -> str:
    """What is said about a module whose tables no server can hold."""
    try:
        tables_in(module)
    except ImpossibleError as refusal:
        return refusal.message
    return SERVER
