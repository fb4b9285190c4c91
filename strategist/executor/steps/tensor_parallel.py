"""Cut the matrices of each block over the tp axis."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

from strategist.errors import InternalError
from strategist.executor.job import Job
from strategist.executor.models import require_splittable


def tensor_parallel(model: nn.Module, job: Job) -> nn.Module:
    """`model` with its matrices as DTensors over tp, following the model's own table.

    Raises InternalError when an entry of the table names no module: torch only warns and leaves that module whole.
    """
    if job.plan.mesh.tp == 1:
        return model
    cuts = require_splittable(model, "tp")
    with_sequence = job.plan.strategy.sequence_parallel
    styles = cuts.tensor_styles(sequence_parallel=with_sequence)
    missing = set(styles) - {name for name, _ in model.named_modules()}
    if missing:
        raise InternalError(
            "INTERNAL", f"The tensor-parallel table names modules that are not there: {sorted(missing)}."
        )
    parallelize_module(model, job.mesh["tp"], styles)
    if with_sequence:
        cuts.spread_tokens(job.plan.mesh.tp, job.mesh.get_local_rank("tp"))
    cuts.tie()  # parallelize_module gave each end its own parameter
    embedding = cuts.embedding()
    if job.plan.strategy.compile and embedding is not None:
        embedding.register_forward_hook(_settled)
    return model


def _settled(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
    """Wait for the embedding's collective before a compiled block sees its output.

    An AsyncCollectiveTensor that enters a compiled block loses its gradient, under FSDP2 without an error.
    """
    return output.clone()
