"""Forward and backward over the micro-batches of one step: a loop on one stage, or a schedule over several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.tensor.parallel import loss_parallel

from strategist.errors import ImpossibleError
from strategist.executor.chunks import chunks_of
from strategist.executor.job import Job
from strategist.executor.loss import Batch, Objective, count_tokens, only_input, own_loss, summed_token_loss
from strategist.executor.mesh import pipeline_group
from strategist.executor.models.head import Head
from strategist.executor.models.hugging_face import is_known
from strategist.executor.precision import compute_context
from strategist.executor.threads import LossInside, loss_over
from strategist.facts.runs import runs_of


class Engine(Protocol):
    """One way to get the gradients of a step."""

    def gradients(self, batch: Batch, scale: Tensor) -> Tensor:
        """Leave the gradients of `scale` times the summed loss in the parameters; give that product for this rank.

        A stage that does not compute the loss gives zero. Data-parallel ranks end with the mean of their gradients.
        """


def make_engine(model: nn.Module, job: Job, objective: Objective) -> Engine:
    """The engine that the plan's schedule asks for.

    Raises ImpossibleError UNSUPPORTED for a loss function of the user's when tp or cp leaves a rank parts of the outputs, or a pipeline
    other outputs than the whole model gives, or when the loss is computed inside the model, and for another model than the built-in one then.
    """
    if objective.chunked and (objective.mean_loss is not None or not any(isinstance(m, Head) for m in model.modules())):
        raise ImpossibleError(
            "UNSUPPORTED",
            "strategy.loss = chunked computes the token loss inside the head of the built-in model; this model or loss is another.",
            flag="$.strategy.loss",
            value="chunked",
            hint="Plan without loss=chunked.",
        )
    if objective.mean_loss is not None and job.splits_outputs:
        raise ImpossibleError(
            "UNSUPPORTED",
            "A loss function of your own needs whole outputs, and tp or cp leaves each rank a part of them.",
            flag="loss_fn",
            hint="Leave it out to train on labels, or plan with --pin tp=1 --pin cp=1.",
        )
    if job.plan.mesh.pp == 1:
        return LoopEngine(model, job, objective)
    if objective.mean_loss is own_loss or (objective.mean_loss is not None and any(map(is_known, chunks_of(model)))):
        raise ImpossibleError(
            "UNSUPPORTED",
            "The last stage of a pipeline gives logits alone, which the loss of a model of transformers, or a function for its outputs, is "
            "not made for.",
            flag="loss_fn",
            hint="Leave it out to train on labels, or plan with --pin pp=1.",
        )
    return PipelineEngine(model, job, objective)


def _loss_context(job: Job) -> AbstractContextManager[object]:
    """Forward and backward of a loss over logits that are cut by vocabulary must both happen inside this."""
    return loss_parallel() if job.plan.mesh.tp > 1 else nullcontext()


def loss_function(model: nn.Module, job: Job, objective: Objective) -> Callable[[Batch], Tensor]:
    """The loss of a micro-batch, added up over its counted tokens; over all devices where the process has a thread for each."""
    if job.threads == 1:
        return partial(objective.summed, model)
    return loss_over(job.instruments.threads(LossInside(model, objective, job.plan, job.device), job.threads))


class LoopEngine:
    """Micro-batches one after the other; gradients add up in the parameters.

    Replicas average after the last one only, DDP as FSDP2's. Shards are reduced after each, so that no rank ever holds
    unsharded gradients.
    """

    def __init__(self, model: nn.Module, job: Job, objective: Objective) -> None:
        self.model, self.job, self.loss_of = model, job, loss_function(model, job, objective)

    def gradients(self, batch: Batch, scale: Tensor) -> Tensor:
        """See Engine."""
        total = torch.zeros_like(scale)
        count = self.job.micro_batches
        for index, micro_batch in enumerate(_micro_batches(batch, count)):
            if count > 1:
                self._average_replicas(now=index == count - 1)
            with self._bucket_reduction(now=index == count - 1), _loss_context(self.job):
                with compute_context(self.job.plan, self.job.device):
                    loss = self.loss_of(micro_batch) * scale
                self.job.instruments.phase("backward")
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _average_replicas(self, *, now: bool) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_all_reduce(now)

    def _bucket_reduction(self, *, now: bool) -> AbstractContextManager[object]:
        if isinstance(self.model, self.job.instruments.replica) and not now:
            return self.model.no_sync()  # type: ignore[no-any-return, operator]
        return nullcontext()


def _stages(model: nn.Module, job: Job) -> list[PipelineStage]:
    """One stage of torch's per chunk."""
    pp, chunks, group = job.plan.mesh.pp, chunks_of(model), pipeline_group(job.mesh)
    numbers = runs_of(job.plan.strategy.schedule, pp, len(chunks), job.stage.index)
    return [
        job.instruments.make_stage(chunk, number, pp * len(chunks), job.device, group=group)
        for chunk, number in zip(chunks, numbers, strict=True)
    ]


OF_STAGES: Mapping[str, type[PipelineScheduleMulti]] = {
    "interleaved": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "zb_h1": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
"""Schedules that take all stages of a rank, however many."""


def _schedule(
    stages: list[PipelineStage], job: Job, loss_fn: Callable[[Tensor, Tensor], Tensor]
) -> PipelineScheduleSingle | PipelineScheduleMulti:
    kind, count = job.plan.strategy.schedule, job.plan.strategy.accumulation
    # scale_grads would divide by the number of micro-batches; the loss carries its own weight
    if kind in OF_STAGES:
        return OF_STAGES[kind]([*stages], count, loss_fn=loss_fn, scale_grads=False)
    single = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[kind]
    return single(stages[0], count, loss_fn=loss_fn, scale_grads=False)


def _micro_batches(batch: Batch, count: int) -> Iterator[Batch]:
    parts = {name: value.chunk(count) for name, value in batch.items()}
    return ({name: part[index] for name, part in parts.items()} for index in range(count))


class PipelineEngine:
    """This rank's stage of a pipeline. Micro-batches are the accumulation; FSDP2 reduces after the last one."""

    def __init__(self, model: nn.Module, job: Job, objective: Objective) -> None:
        self.job, self.scale, self.mean_loss = job, torch.ones((), device=job.device), objective.mean_loss
        self.micro_batches: tuple[Batch, ...] = ()
        self.schedule = _schedule(_stages(model, job), job, self._loss)

    def _loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        if self.mean_loss is None:
            return summed_token_loss(outputs, target) * self.scale
        micro_batch = self.micro_batches[int(target)]
        return self.mean_loss(outputs, micro_batch) * count_tokens(micro_batch) * self.scale

    def _target(self, batch: Batch) -> Tensor:
        """What torch cuts into micro-batches for the loss: the labels, or for a loss of the whole batch the micro-batches' numbers."""
        count = self.job.plan.strategy.accumulation
        if self.mean_loss is None:
            return batch["labels"]
        self.micro_batches = tuple(_micro_batches(batch, count))
        return torch.arange(count)

    def gradients(self, batch: Batch, scale: Tensor) -> Tensor:
        """See Engine. Outputs are not returned, because torch would keep the logits of every micro-batch."""
        self.scale = scale
        losses: list[Tensor] = []
        inputs = (only_input(batch),) if self.job.stage.embedding else ()
        ends: dict[str, Any] = {"target": self._target(batch), "losses": losses} if self.job.stage.head else {}
        with _loss_context(self.job):
            self.schedule.step(*inputs, **ends, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros_like(scale)
