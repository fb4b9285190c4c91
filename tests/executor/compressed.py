"""What the ranks of the tests of compressed gradients do, and the same algorithms in one process, said once more in NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from strategist.document.plan import Plan, Strategy
from strategist.executor.build import build
from strategist.executor.compression import compress
from strategist.executor.data import SyntheticTokens
from strategist.executor.feedback import feedback_of
from strategist.executor.models import model_from_shape
from tests.plans import FLOAT32, make_plan

SHAPES = {"wide": (40, 30), "tall": (64, 24), "vector": (50,), "small": (6, 5)}
STEPS, RANKS = 6, 2
Gradients = dict[str, np.ndarray]


class Given(nn.Module):
    """A module whose gradients are the tensors that it is given."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.names = list(shapes)  # a ParameterDict has an order of its own
        self.weights = nn.ParameterDict({name: torch.zeros(shape) for name, shape in shapes.items()})

    def forward(self, *gradients: Tensor) -> Tensor:
        """The inner product of the weights and the tensors."""
        pairs = zip((self.weights[name] for name in self.names), gradients, strict=True)
        return torch.stack([(weight * gradient).sum() for weight, gradient in pairs]).sum()


def gradients_of(step: int, rank: int, shapes: dict[str, tuple[int, ...]] | None = None) -> Gradients:
    """Random tensors of float32, others on every rank in every step."""
    numbers = np.random.default_rng((step, rank))
    return {name: numbers.standard_normal(size).astype(np.float32) for name, size in (shapes or SHAPES).items()}


def exchanged(strategy: Strategy, shapes: dict[str, tuple[int, ...]] | None = None, rounds: int = 1) -> list[Gradients]:
    """What DDP leaves as gradients after each step, `rounds` micro-batches to a step."""
    module = Given(shapes or SHAPES)
    replica = DistributedDataParallel(module, gradient_as_bucket_view=True)
    compress(replica, strategy, dist.group.WORLD)
    found = []
    for step in range(STEPS):
        given = [torch.from_numpy(x) / rounds for x in gradients_of(step, dist.get_rank(), shapes).values()]
        for _ in range(rounds - 1):
            with replica.no_sync():
                replica(*given).backward()
        replica(*given).backward()
        found.append({name: weight.grad.numpy().copy() for name, weight in module.weights.items()})
        module.zero_grad(set_to_none=True)
    dist.barrier()  # torch's own hooks hold the group on gloo's thread as long as they are called back
    return found


def means(step: int) -> Gradients:
    """The exact means over the ranks."""
    every = [gradients_of(step, rank) for rank in range(RANKS)]
    return {name: np.mean([one[name] for one in every], axis=0, dtype=np.float64) for name in SHAPES}


def largest_by_one_process(share: float) -> list[Gradients]:
    """Top-k with error feedback over one bucket of all gradients, every rank in turn (Stich et al. 2018, algorithm 1)."""
    names, ends = list(SHAPES), np.cumsum([np.prod(shape) for shape in SHAPES.values()])[:-1]
    owed, found = [np.zeros(1)] * RANKS, []
    for step in range(STEPS):
        total = 0.0
        for rank in range(RANKS):
            own = np.concatenate([x.ravel() for x in gradients_of(step, rank).values()]).astype(np.float64) + owed[rank]
            order = np.argsort(-np.abs(own))[: max(1, round(share * own.size))]
            sent = np.zeros_like(own)
            sent[order] = own[order]
            owed[rank], total = own - sent, total + sent / RANKS
        parts = np.split(total, ends)
        found.append({name: part.reshape(SHAPES[name]) for name, part in zip(names, parts, strict=True)})
    return found


def trained(compression: str, rank: int = 0, share: float = 0.0, steps: int = 30) -> list[float]:
    """Losses of a tiny model that sees the same batch again and again, whose gradients are compressed."""
    torch.manual_seed(0)
    plan = make_plan(dp_replicate=RANKS, micro_batch=4, formats=FLOAT32)
    chosen = replace(plan.strategy, compression=compression, compression_rank=rank, compression_share=share)
    session = build(replace(plan, strategy=chosen), model_from_shape(plan.model))
    batch = next(iter(session.loader(SyntheticTokens(plan.model.vocab, 16, 8), shuffle=False)))
    return [session.step(batch).loss for _ in range(steps)]


def stopped_and_went_on(plan: Plan, folder: Path) -> tuple[list[float], dict[int, list[float]], list[float]]:
    """Losses of seven steps; of what checkpoints after some of them make of the rest; and of the rest where what is owed is forgotten."""
    whole = _stepped(plan, None, {steps: folder / str(steps) for steps in STOPS})
    resumed = {steps: _stepped(plan, folder / str(steps)) for steps in STOPS}
    return whole, resumed, _stepped(plan, folder / str(STOPS[-1]), forgets=True)


STOPS = (1, 2, 4)


def _stepped(
    plan: Plan, start: Path | None, saves: Mapping[int, Path] | None = None, *, forgets: bool = False
) -> list[float]:
    session = build(plan, model_from_shape(plan.model))
    if start is not None:
        session.load(start)
    owing = feedback_of(session.parts.model)
    if forgets and owing is not None:
        owing.take({name: value for name, value in owing.kept().items() if name in ("order", "steps")})
    data = SyntheticTokens(plan.model.vocab, plan.workload.seq_len, 7 * plan.workload.global_batch)
    losses = []
    for batch in session.loader(data, first_step=session.steps):
        losses.append(session.step(batch).loss)
        if saves and session.steps in saves:
            session.save(saves[session.steps])
    return losses


def owed_and_loss(plan: Plan, start: Path | None, target: Path | None) -> tuple[Gradients, float]:
    """What this rank owes after three steps, which are saved, or right after loading; and the loss of a step more."""
    session = build(plan, model_from_shape(plan.model))
    batch = next(iter(session.loader(SyntheticTokens(plan.model.vocab, 16, 8), shuffle=False)))
    if start is not None:
        session.load(start)
    for _ in range(3 if start is None else 0):
        session.step(batch)
    if target is not None:
        session.save(target)
    owing = feedback_of(session.parts.model)
    names = {} if owing is None else {n: v for n, v in owing.kept().items() if n.startswith(("owed/", "error/"))}
    return {name: value.numpy().copy() for name, value in names.items()}, session.step(batch).loss
