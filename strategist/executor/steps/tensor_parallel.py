"""Cut the matrices of each block over the tp axis."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

from strategist.errors import InternalError
from strategist.executor.job import Job
from strategist.executor.models.splittable import SplittableModel
from strategist.executor.steps.pipeline_split import splittable


def tensor_parallel(model: nn.Module, job: Job) -> nn.Module:
    """`model` with its matrices as DTensors over tp, following the model's own table.

    Raises InternalError when an entry of the table names no module: torch only warns and leaves that module whole.
    """
    if job.plan.mesh.tp == 1:
        return model
    model = splittable(model, "tp")
    with_sequence = job.plan.strategy.sequence_parallel
    styles = model.tensor_styles(sequence_parallel=with_sequence)
    missing = set(styles) - {name for name, _ in model.named_modules()}
    if missing:
        raise InternalError(
            "INTERNAL", f"The tensor-parallel table names modules that do not exist: {sorted(missing)}."
        )
    parallelize_module(model, job.mesh["tp"], styles)
    model.sequence_shards = job.plan.mesh.tp if with_sequence else 1
    model.tie()  # parallelize_module gives each end its own parameter
    if job.plan.strategy.compile:
        _settle_embedding(model)
    return model


def _settle_embedding(model: SplittableModel) -> None:
    """Wait for the embedding's collective before a compiled block sees its output.

    An AsyncCollectiveTensor that enters a compiled block loses its gradient, without an error under FSDP2.
    """

    def settled(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return output.clone()

    for name, module in model.named_modules():
        if name == model.embedding_name():
            module.register_forward_hook(settled)
