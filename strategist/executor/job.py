"""What every step of the construction may look at: the plan, the mesh, the device, and what a trace replaces."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from strategist.document.plan import Plan, Stage, sequences_of
from strategist.executor.drive import Drive
from strategist.executor.mesh import data_rank
from strategist.executor.sequence import TokenShare, token_share
from strategist.executor.tables import Server
from strategist.executor.threads import over_threads
from strategist.records import dataclass, field


def read_number(value: Tensor) -> float:
    """A number from the device; the only place where the training program waits for one."""
    return float(value)


def unheard(_phase: str) -> None:
    """Nobody watches this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruments:
    """The parts that a trace or a test exchanges; training uses them as they are.

    `read` turns a tensor into a number (fake tensors have none), `make_stage` makes the pipeline stage (a fake group
    cannot vote on shapes), `replica` averages the gradients of whole copies (DDP's reducer, in C++, reads real memory),
    `threads` spreads a module over the devices of one process, `compile_backend` is what torch.compile compiles for, `make_drive` opens the drive that optimizer state is put on (fake
    tensors have no bytes to put there). `server` holds the tables of embeddings of a plan that has them elsewhere. `phase` hears what this rank begins: forward, backward, reduce,
    step, save or load.
    """

    read: Callable[[Tensor], float] = read_number
    make_stage: Callable[..., PipelineStage] = PipelineStage
    replica: type[nn.Module] = DistributedDataParallel
    threads: Callable[[nn.Module, int], nn.Module] = over_threads
    compile_backend: str = "inductor"
    make_drive: Callable[[], Drive] = Drive
    server: Server | None = None
    phase: Callable[[str], None] = unheard


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rank's share of a plan, as its process sees it. `seed` decides the initial weights of a model that comes without any;
    `expert_mesh` is there when ranks share the experts, `context_mesh` when cp is hierarchical; `threads` are the devices that the process drives, one each."""

    plan: Plan
    mesh: DeviceMesh
    device: torch.device
    expert_mesh: DeviceMesh | None = None
    context_mesh: DeviceMesh | None = None
    threads: int = 1
    seed: int = 0
    instruments: Instruments = field(default_factory=Instruments)

    @property
    def micro_batches(self) -> int:
        """Micro-batches that this rank runs in a step."""
        mesh, strategy = self.plan.mesh, self.plan.strategy
        return len(sequences_of(mesh, strategy, data_rank(self.mesh))) // strategy.micro_batch

    @property
    def stage(self) -> Stage:
        """The pipeline stage that this rank owns."""
        return self.plan.strategy.stages[self.mesh.get_local_rank("pp")]

    @property
    def offloads_parameters(self) -> bool:
        """True when parameters, gradients and optimizer state rest in the host's memory, whatever the device is."""
        return self.plan.strategy.offload in ("parameters", "nvme")

    @property
    def keeps_state_on_drive(self) -> bool:
        """True when the optimizer's state rests in files and passes through the host's memory."""
        return self.plan.strategy.offload == "nvme"

    @property
    def offloads_optimizer(self) -> bool:
        """True when the optimizer's state rests in the host's memory and the update runs there."""
        return self.plan.strategy.offload == "optimizer"

    @property
    def tokens_here(self) -> TokenShare:
        """Which tokens of each sequence this rank holds: all of them without context parallelism."""
        return token_share(self.plan, self.mesh.get_local_rank("cp"))

    @property
    def splits_outputs(self) -> bool:
        """True when tensor or context parallelism leaves each rank a part of the model's outputs."""
        return self.plan.mesh.tp > 1 or self.plan.mesh.cp > 1
