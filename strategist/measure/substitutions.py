"""What is not run as it is, and what stands for it: the table in the catalogue, and which rows a trace used.

On a plan for GPUs (backend nccl) the trace reports what CUDA does, although it runs on the CPU; on a plan for CPU ranks
(gloo) it reports what the CPU does, so that a real allocator there can be held against it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, _collective_utils
from torch.distributed.tensor import placement_types as placements

from strategist.catalog import rows
from strategist.document.plan import Plan
from strategist.document.substitution import Substitution
from strategist.executor.support import uses_fsdp
from strategist.measure.hooks import instead
from strategist.measure.program import shortened
from strategist.measure.recorder import Record

FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


def is_for_cuda(plan: Plan) -> bool:
    """Whether the plan's ranks are GPUs."""
    return plan.strategy.backend == "nccl"


def substitutions_used(plan: Plan, record: Record, noticed: set[str]) -> tuple[Substitution, ...]:
    """The rows of the table that this trace leans on; `noticed` are those that only running can tell."""
    s, cuda = plan.strategy, is_for_cuda(plan)
    shards = uses_fsdp(plan)
    in_threads = s.replicas == "threads"
    replicated = plan.mesh.data_parallel > 1 and not shards and not in_threads
    tests = {
        "ddp-reducer": replicated,
        "threads-of-devices": in_threads,
        "tables-elsewhere": s.tables == "server",
        "pipeline-shapes": plan.mesh.pp > 1,
        "flash-attention": cuda and FLASH in record.operators,
        "averaging-collectives": cuda and shards,
        "host-copies": s.offload != "none",
        "compiled-blocks": s.compile,
        "balanced-experts": plan.model.moe is not None,
        "repeated-micro-batches": shortened(plan) != plan,
    }
    used = noticed | {name for name, is_used in tests.items() if is_used}
    return tuple(row for row in table() if row.name in used)


def table() -> tuple[Substitution, ...]:
    """Every substitution that there is."""
    return tuple(Substitution(**row) for row in rows("substitutions"))


@contextmanager
def cuda_ways(plan: Plan) -> Iterator[set[str]]:
    """Inside, operations of which CUDA has another form than the CPU take that form; gives the names of those that ran."""
    noticed: set[str] = set()
    with ExitStack() as replaced:
        if is_for_cuda(plan):
            replaced.enter_context(instead(nn.functional, "rms_norm", _noting(noticed, nn.functional.rms_norm)))
            exchange = _exchanging(noticed)
            replaced.enter_context(instead(_collective_utils, "shard_dim_alltoall", exchange))
            replaced.enter_context(instead(placements, "shard_dim_alltoall", exchange))
        yield noticed


def _noting(noticed: set[str], composite: Any) -> Any:
    def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        if weight is None or isinstance(x, DTensor) or isinstance(weight, DTensor):
            return composite(x, shape, weight, eps)  # type: ignore[no-any-return]
        noticed.add("fused-rms-norm")
        return FusedRmsNorm.apply(x, weight, len(shape))  # type: ignore[no-any-return, no-untyped-call]

    return rms_norm


class FusedRmsNorm(torch.autograd.Function):
    """The shapes of CUDA's kernel: what it makes, what it keeps and what its backward makes. It computes nothing."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, dims: int) -> Tensor:
        """A result like x (..., H); kept are x, the weight and one float32 number per row."""
        statistics = torch.empty((*x.shape[:-dims], *[1] * dims), dtype=torch.float32, device=x.device)
        context.save_for_backward(x, weight, statistics)
        return torch.empty_like(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gradients like x and like the weight."""
        _, weight, _ = context.saved_tensors
        return torch.empty_like(gradient), torch.empty_like(weight), None


def _exchanging(noticed: set[str]) -> Any:
    def shard_dim_alltoall(x: Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> Tensor:
        noticed.add("shard-exchange")
        group = mesh.get_group(mesh_dim).group_name
        return torch.ops._dtensor.shard_dim_alltoall(x, gather_dim, shard_dim, group)  # type: ignore[no-any-return]

    return shard_dim_alltoall


def attention_workspace(func: Any, args: Any) -> int:
    """Bytes that CUDA's flash attention takes inside its backward beside its results; 0 for every other operation.

    float32 per row and head: the dot product of output and gradient, and the queries' gradient; rows rounded up to 128,
    head width to 32 (64 above 128). With grouped queries the gradients of keys and values exist once per query head.
    """
    if func._schema.name != f"{FLASH}_backward":
        return 0
    _, query, key, *_ = args
    batch, heads, rows_q, width = query.shape
    rows_q, step = -(-rows_q // 128) * 128, 32 if width <= 128 else 64
    inside = 4 * batch * heads * rows_q * (1 + -(-width // step) * step)
    unreduced = 2 * batch * heads * key.shape[2] * width * query.element_size() if key.shape[1] != heads else 0
    return int(inside + unreduced)
