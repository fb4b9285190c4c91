"""A plan in motion: one optimizer step at a time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from strategist.document.plan import sequences_of, sequences_per_step
from strategist.errors import ImpossibleError, InputError, TrainingError
from strategist.executor.background import BackgroundSaver, host_copy
from strategist.executor.bundles import Bundle, bundles_of
from strategist.executor.checkpoint import State, load, make_room, named_parameters, save, whole_state
from strategist.executor.data import DataShare, data_loader, global_order
from strategist.executor.drive import StateOnDrive
from strategist.executor.engines import Engine
from strategist.executor.gradients import (
    add_terms,
    complete_gradients,
    gradient_norm,
    limit_factor,
    scale_gradients,
    share_expert_gradients,
)
from strategist.executor.job import Job
from strategist.executor.loss import Batch, count_tokens
from strategist.executor.loss_scale import LossScale
from strategist.executor.mesh import data_group, data_mesh, data_rank, pipeline_group
from strategist.executor.models.reference import constants_of_model
from strategist.executor.names import by_weight
from strategist.executor.precision import gradient_dtype
from strategist.executor.tables import Server
from strategist.executor.tensor_styles import held_whole
from strategist.executor.tied import TiedEnds
from strategist.executor.versions import versions
from strategist.facts.constants import PLAIN
from strategist.records import dataclass
from strategist.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step over the global batch, the same on every rank but for `seconds`.

    `loss` is the mean over `tokens` counted tokens; `gradient_norm` is taken before any limit. `loss_scale` is that of the
    step, where compute is float16; a step whose gradients overflowed has no norm and changed no weight.
    """

    loss: float
    tokens: int
    gradient_norm: float | None
    seconds: float
    loss_scale: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The live objects a session drives; `server` holds the tables of embeddings that no rank has."""

    model: nn.Module
    optimizer: Optimizer
    engine: Engine
    server: Server | None = None


RateOfStep = Callable[[int], float]
"""A schedule of learning rates as a function of the step, so that a checkpoint needs nothing but the step."""

READ_AHEAD = 2
"""Batches that are there before their step, as torch's own loader has them for each of its workers (prefetch_factor)."""

LOSS_SCALE = "loss_scale"
"""Its name in a checkpoint."""


class Session:
    """Live model, optimizer and schedule of one rank. Made by `build`; every rank must call the same methods."""

    def __init__(
        self,
        job: Job,
        parts: Parts,
        *,
        clip_norm: float | None,
        resources: ExitStack,
        rate_of_step: RateOfStep | None = None,
    ) -> None:
        self._rate_of_step = rate_of_step
        self._rates = [group["lr"] for group in parts.optimizer.param_groups]
        self.job, self.parts, self.clip_norm, self.steps = job, parts, clip_norm, 0
        optimizer = parts.optimizer
        self._background = BackgroundSaver(optimizer.drive.copy if isinstance(optimizer, StateOnDrive) else host_copy)
        self._resources = resources
        self._tied = TiedEnds(parts.model, job)
        self._parameters = list(
            parts.model.parameters()
        )  # the optimizer's own: walking through the modules takes longer than using them
        self._held_whole = held_whole(parts.model)
        self._data, self._pipeline = data_group(job.mesh), pipeline_group(job.mesh)
        self._ranks, self._tokens = data_mesh(job.mesh).size(), job.tokens_here
        self.loss_scale = LossScale() if job.plan.strategy.formats.compute == "float16" else None

    def step(self, batch: Mapping[str, Tensor]) -> StepResult:
        """Train on this data rank's share of one global batch, sequences first in every tensor.

        Raises ImpossibleError BATCH_SPLIT when the share has another size than the plan, InputError EMPTY when no label
        counts, TrainingError when loss or gradients are not finite and no smaller loss scale can help. In all these cases
        the weights are untouched.
        """
        begin = time.perf_counter()
        self._check_share(batch)
        loss, tokens, norm = self._backward(self._held_here(batch))
        read = self.job.instruments.read
        numbers = read(loss), int(read(tokens)), read(norm)
        scale = None if self.loss_scale is None else self.loss_scale.value
        is_good = self._judge(*numbers)
        if is_good:
            self._update(norm)
        self.steps += 1
        return StepResult(
            loss=numbers[0],
            tokens=numbers[1],
            gradient_norm=numbers[2] if is_good else None,
            seconds=time.perf_counter() - begin,
            loss_scale=scale,
        )

    def _check_share(self, batch: Mapping[str, Tensor]) -> None:
        expected = self.share.size
        for name, value in batch.items():
            if value.shape[0] != expected:
                raise ImpossibleError(
                    "BATCH_SPLIT",
                    f"{name} holds {counted(value.shape[0], 'sequence')}; the plan gives {expected} to this data rank "
                    f"({self.job.plan.batch_identity} over all).",
                    flag=name,
                    value=value.shape[0],
                    hint="Take batches from session.loader(dataset).",
                )

    def _held_here(self, batch: Mapping[str, Tensor]) -> Batch:
        """This rank's tokens of its sequences, on the device; images channels last, as convolutions on GPUs read them fastest."""
        if self.job.plan.mesh.cp > 1:
            batch = {name: self._tokens.part(name, value) for name, value in batch.items()}
        order = torch.channels_last if self.job.plan.model.is_convolutional else torch.preserve_format
        return {
            name: value.to(
                self.job.device, non_blocking=True, memory_format=order if value.dim() == 4 else torch.preserve_format
            )
            for name, value in batch.items()
        }

    def _backward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Mean loss, counted tokens and gradient norm of the global batch; gradients lie in the parameters."""
        self.job.instruments.phase("forward")
        tokens = count_tokens(batch)
        _add_up(tokens, self._data)
        times = self._ranks * self._loss_factor  # these ranks average their gradients
        scale = times / tokens.to(gradient_dtype(self.job.plan))
        loss = self.parts.engine.gradients(batch, scale)
        self.job.instruments.phase("reduce")
        _add_up(loss, self._data)
        _add_up(loss, self._pipeline)
        complete_gradients(self._parameters)
        if self._held_whole:
            add_terms(self._held_whole, self.job.mesh["tp"])
        if self.job.expert_mesh is not None:
            mesh = self.job.plan.mesh
            share_expert_gradients(self._parameters, mesh.ep * mesh.etp / mesh.tp)
        self._tied.add_gradients()
        twice = self._tied.duplicate
        norm = gradient_norm((p for p in self._parameters if p is not twice), self._pipeline)
        if self.parts.server is not None:
            norm = torch.hypot(norm, self.parts.server.norm().to(norm))
        return loss / times, tokens, norm / self._loss_factor

    @property
    def _loss_factor(self) -> float:
        """What the loss is multiplied by beside its weight."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def _judge(self, loss: float, tokens: int, norm: float) -> bool:
        """Stop before the update when it would spoil the weights: one NaN reaches every parameter through the norm. False
        for gradients that overflowed in float16 alone: this batch is passed over, with a smaller loss scale from now on."""
        if tokens == 0:
            self._forget()
            raise InputError(
                "EMPTY", "No label of the batch counts: all are -100.", flag="labels", hint="Leave such batches out."
            )
        if math.isfinite(loss) and math.isfinite(norm):
            return True
        self._forget()
        if not math.isfinite(loss) or self.loss_scale is None or not self.loss_scale.can_shrink:
            raise TrainingError(
                "TRAINING",
                f"Step {self.steps} has loss {loss} and gradient norm {norm}; the weights were not updated.",
                value=loss,
                hint="Look at this batch, or lower the learning rate.",
            )
        self.loss_scale.overflowed()
        return False

    def _forget(self) -> None:
        """Drop all gradients."""
        self._drop_gradients()
        if self.parts.server is not None:
            self.parts.server.forget()

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _update(self, norm: Tensor) -> None:
        self.job.instruments.phase("step")
        rate = 1.0 if self._rate_of_step is None else self._rate_of_step(self.steps)
        if self.parts.server is not None:
            self.parts.server.update(limit_factor(norm, self.clip_norm) / self._loss_factor, rate)
        if self.clip_norm is not None or self.loss_scale is not None:
            scale_gradients(self._parameters, limit_factor(norm, self.clip_norm) / self._loss_factor)
        if self.loss_scale is not None:
            self.loss_scale.went_well()
        if self._rate_of_step is not None:
            for group, own in zip(self.parts.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = own * rate
        self.parts.optimizer.step()
        self._drop_gradients()
        if self.job.device.type != "cpu":
            torch.accelerator.synchronize(self.job.device)

    @property
    def share(self) -> DataShare:
        """This rank's part of each global batch."""
        mesh, strategy = self.job.plan.mesh, self.job.plan.strategy
        own = sequences_of(mesh, strategy, data_rank(self.job.mesh))
        return DataShare(first=own.start, size=len(own), global_batch=sequences_per_step(mesh, strategy))

    def loader(
        self,
        dataset: Dataset[Any],
        *,
        seed: int = 0,
        shuffle: bool = True,
        sampler: Iterable[int] | None = None,
        first_step: int = 0,
        ahead: int | None = None,
    ) -> DataLoader[Any]:
        """This rank's batches of one pass over a map-style dataset, one per step.

        Samples are dicts of tensors. The pass begins at its step `first_step`: after `load`, at the steps that it had
        done. `sampler` gives global sample numbers, the same on every rank; it goes with
        shuffle=False. Where the plan's devices have memory of their own, batches are put into pinned memory and two of them are read
        `ahead` of their step; a dataset that draws from torch's own generator resumes bit by bit with 0 alone.
        Raises InputError CONFLICT, TOO_SMALL, or TYPE for a dataset without a length, RANGE for fewer than 0 ahead.
        """
        if ahead is not None and ahead < 0:
            raise InputError(
                "RANGE",
                f"ahead is {ahead}, and batches are read 0 or more ahead.",
                flag="ahead",
                value=ahead,
                hint="Give 0 to read each batch at its step, or leave it out for what suits the devices.",
            )
        if not hasattr(dataset, "__len__"):
            raise InputError(
                "TYPE",
                f"{type(dataset).__name__} has no length, so its samples cannot be shared out by number.",
                flag="dataset",
                hint="Give a dataset with __len__ and __getitem__.",
            )
        order = global_order(len(dataset), seed=seed, shuffle=shuffle, sampler=sampler)
        apart = self.job.device.type != "cpu"
        own = (READ_AHEAD if apart else 0) if ahead is None else ahead
        return data_loader(dataset, self.share, order, first_step, ahead=own, pinned=apart)

    def parameters_full(self) -> dict[str, Tensor]:
        """Every parameter of the whole model, unsharded, on the CPU of every rank; for checks on small models."""
        with _quiet_redistribution():
            named, bundles = named_parameters(self.parts.model), bundles_of(self.parts.model)
            parts = {name: self._whole(p, bundles.get(name)).cpu() for name, p in named.items()}
        mine = {name: torch.cat([parts[part] for part in slices]) for name, slices in by_weight(parts).items()}
        if self.parts.server is not None:
            mine |= self.parts.server.whole()
        if self._pipeline is None:
            return mine
        stages: list[Any] = [None] * self.job.plan.mesh.pp
        dist.all_gather_object(stages, mine, group=self._pipeline)
        return {name: value for stage in stages for name, value in stage.items()}

    def _whole(self, parameter: nn.Parameter, bundle: Bundle | None) -> Tensor:
        value = parameter.detach().to(self.job.device)  # offloaded ones rest where no collective reaches
        if bundle is not None:
            return bundle.gathered(value)
        return value.full_tensor() if isinstance(value, DTensor) else value.clone()

    def save(self, folder: str | Path, *, wait: bool = True) -> None:
        """Write parameters, optimizer state, loss scale, what compression owes, step and random numbers into a new folder, which any layout can load.

        Without `wait` only a copy is made now, in the host's memory or on the drive that optimizer state is put on, and written while
        training goes on; `finish_saving` waits for it. Raises InputError EXISTS for a folder that is there, InternalError IO when the machine refuses; on every rank.
        """
        self.job.instruments.phase("save")
        self.finish_saving()
        constants = constants_of_model(self.parts.model)
        facts = {
            "step": self.steps,
            "samples": self.steps * self.job.plan.workload.global_batch,
            "plan": self.job.plan.seal,
            "versions": versions(),
            "constants": None if constants == PLAIN else constants,
        }
        state = whole_state(self.parts.model, self.parts.optimizer, self._counters(), self.parts.server)
        if wait:
            make_room(Path(folder))
            save(Path(folder), state, facts)
        else:
            self._background.begin(Path(folder), state, facts)

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is still being written. Raises InternalError IO, on every rank, when it could not be."""
        self._background.finish()

    def _counters(self) -> State:
        """What the session counts beside steps: the loss scale in use and for how many steps in a row it has gone well."""
        if self.loss_scale is None:
            return {}
        return {LOSS_SCALE: torch.tensor([self.loss_scale.value, self.loss_scale.good_steps], dtype=torch.float64)}

    def load(self, folder: str | Path) -> None:
        """Go on from a checkpoint that `save` wrote, under this plan or another one for the same model.

        `steps` says how many steps were done. Raises, on every rank and with nothing changed, InputError for a folder
        that is no checkpoint, StaleError DIGEST for a damaged one, StaleError FACTS_DIFFER for one of another model or optimizer,
        whose 8-bit moments are in blocks of another cut of the weights, or whose compression left something out of gradients and
        is not the plan's. On another number of replicas each of them owes the mean of what those of the checkpoint owed.
        """
        self.job.instruments.phase("load")
        self.finish_saving()
        counters = self._counters()
        self.steps = load(Path(folder), self.parts.model, self.parts.optimizer, counters, self.parts.server).step
        if self.loss_scale is not None:
            value, good_steps = counters[LOSS_SCALE].tolist()
            self.loss_scale.value, self.loss_scale.good_steps = value, int(good_steps)

    def close(self) -> None:
        """Finish a checkpoint that is still being written, and leave the process group if `build` started it."""
        with self._resources:
            self.finish_saving()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.close()
            return
        with self._resources:
            try:
                self.finish_saving()
            except Exception as other:  # noqa: BLE001 - what it broke on first is what counts
                error.add_note(f"The checkpoint that was being written failed too: {other}")


def _add_up(value: Tensor, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.all_reduce(value, group=group)


@contextmanager
def _quiet_redistribution() -> Iterator[None]:
    """Without torch's advice that gathering over several axes is slow: here it happens once, on purpose."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
