"""Give each rank of the ep axis some of the experts of every layer."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from strategist.errors import ImpossibleError
from strategist.executor.experts_apart import ExpertGroup
from strategist.executor.job import Job
from strategist.executor.models.experts import Experts, MixtureOfExperts
from strategist.executor.tensor_styles import distribute


def expert_parallel(model: nn.Module, job: Job) -> nn.Module:
    """`model` with its experts cut over ep, whole ones on each rank, and tokens sent to where they are.

    Raises ImpossibleError UNSUPPORTED for a model without experts of our own.
    """
    if job.expert_mesh is None:
        return model
    mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    if not mixtures and job.plan.mesh.pp == 1:
        raise ImpossibleError(
            "UNSUPPORTED",
            f"ep spreads experts, and {type(model).__name__} has none that this executor knows.",
            flag="$.mesh.ep",
            value=job.plan.mesh.ep,
            hint="Plan with --pin ep=1, or use the built-in model.",
        )
    for mixture in mixtures:
        _spread(mixture, job.expert_mesh, job.plan.workload.expert_imbalance)
    return model


def _spread(mixture: MixtureOfExperts, mesh: DeviceMesh, imbalance: float) -> None:
    """Leave this rank some of the experts, or with etp a part of each of those. Their hidden width, dim 0, is what etp cuts. Where
    routing is not by scores it stands for the rank that gets `imbalance` times the tokens of the mean one."""
    are_cut = mesh["etp"].size() > 1
    own, placements = (mesh["ep", "etp"], (Shard(1), Shard(0))) if are_cut else (mesh["ep"], (Shard(1),))
    for name, _ in list(mixture.experts.named_parameters()):
        distribute(mixture.experts, name, own, *placements)
    is_even = mixture.router.routing != "scored"
    group = mesh["ep"].get_group()
    mixture.apart = ExpertGroup(group, is_even=is_even, are_cut=are_cut, crowding=min(imbalance, group.size()))


def spread_experts(block: nn.Module) -> Iterator[Experts]:
    """The experts in a block that several ranks share."""
    for module in block.modules():
        if isinstance(module, MixtureOfExperts) and module.apart is not None:
            yield module.experts
