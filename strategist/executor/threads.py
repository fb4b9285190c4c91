"""nn.DataParallel: one process, a thread for every device, and the loss inside what they run.

On GPUs this is torch's own class. On CPUs torch's class runs the module once, as if it were not there; `HostThreads` does there
what it does on GPUs, so that a plan's program can be held against one process. Nothing is faster for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from strategist.document.plan import Plan
from strategist.executor.loss import Batch, Objective
from strategist.executor.precision import compute_context
from strategist.records import replace


def as_process(plan: Plan) -> Plan:
    """The plan as its one process sees it: replicas that are threads are one rank with all their sequences."""
    if plan.processes == plan.mesh.world:
        return plan
    s = plan.strategy
    whole = replace(s, replicas="processes", micro_batch=s.micro_batch * plan.mesh.dp_replicate)
    return replace(plan, mesh=replace(plan.mesh, dp_replicate=1), strategy=whole)


class LossInside(nn.Module):
    """A model that gives the loss of its part of a micro-batch, added up, shape (1,): a number comes back from each device, not
    its logits. Autocast is entered here, because it is known to the thread alone that enters it."""

    def __init__(self, model: nn.Module, objective: Objective, plan: Plan, device: torch.device) -> None:
        super().__init__()
        self.model, self.objective, self.plan, self.device = model, objective, plan, device

    def forward(self, **batch: Tensor) -> Tensor:
        """The summed loss of some sequences, shape (1,)."""
        with compute_context(self.plan, self.device):
            return self.objective.summed(self.model, batch).reshape(1)


def over_threads(module: nn.Module, count: int) -> nn.Module:
    """`module` on `count` devices: its batch split, its results one behind the other on the first of them."""
    if torch.cuda.is_available():
        return nn.DataParallel(module, device_ids=list(range(count)))
    return HostThreads(module, count)


def loss_over(module: nn.Module) -> Callable[[Batch], Tensor]:
    """The loss of a micro-batch, added up over the devices."""
    return lambda batch: module(**batch).sum()


def split(batch: Batch, count: int) -> Iterator[dict[str, Tensor]]:
    """The parts of a batch, as torch.chunk cuts them along the first dimension: none is longer than the first, and where there is
    too little for all there are fewer parts."""
    parts = {name: value.chunk(count) for name, value in batch.items()}
    return (dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True))


class HostThreads(nn.Module):
    """What nn.DataParallel does, on the CPU: the first thread has the module itself, the others copies whose weights come anew
    from it for every batch, so that its gradients are the sum over all."""

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__()
        self.module, self.count = module, count
        self._copies = [copy.deepcopy(module) for _ in range(count - 1)]

    def forward(self, **batch: Tensor) -> Tensor:
        """The results of all threads in order, joined along the first dimension."""
        parts = list(split(batch, self.count))
        replicas = [self.module, *(self._anew(each) for each in self._copies)][: len(parts)]
        with ThreadPoolExecutor(len(parts)) as pool:
            return torch.cat(list(pool.map(_run, replicas, parts)))

    def _anew(self, replica: nn.Module) -> nn.Module:
        """A copy with the module's weights and buffers of now; backward goes through them to the module's own. They stay until the
        next batch, because recomputation asks for them again."""
        clones = {id(own): own.clone() for own in (*self.module.parameters(), *self.module.buffers())}
        for own, theirs in zip(self.module.modules(), replica.modules(), strict=True):
            for held, places in ((own._parameters, theirs._parameters), (own._buffers, theirs._buffers)):
                for name, tensor in held.items():
                    if tensor is not None:
                        places.pop(name, None)
                        setattr(theirs, name, clones[id(tensor)])
        return replica


def _run(module: nn.Module, batch: Batch) -> Tensor:
    result: Tensor = module(**batch)
    return result
