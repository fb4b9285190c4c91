"""Number formats of a plan as torch types, casts and policies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from strategist.document.plan import NumberFormats, Plan
from strategist.executor.support import uses_fsdp

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parameter_dtype(plan: Plan) -> torch.dtype:
    """The type of the weights at rest."""
    return DTYPES[plan.strategy.formats.parameter]


def gradient_dtype(plan: Plan) -> torch.dtype:
    """The type of gradients, and of weights that are trained beside frozen ones."""
    return DTYPES[plan.strategy.formats.gradient]


def sharding_policy(formats: NumberFormats) -> MixedPrecisionPolicy:
    """The casts FSDP2 makes: parameters on gathering, gradients on reduction; none when all formats are one."""
    if formats.compute == formats.parameter == formats.gradient:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=DTYPES[formats.compute], reduce_dtype=DTYPES[formats.reduce])


def compute_context(plan: Plan, device: torch.device) -> AbstractContextManager[object]:
    """Autocast for what FSDP2 does not cast: single process, DDP and ZeRO-1 in a lower compute format."""
    formats = plan.strategy.formats
    if formats.compute == formats.parameter or uses_fsdp(plan):
        return nullcontext()
    return torch.autocast(device.type, DTYPES[formats.compute])


@contextmanager
def products_of_fp32(plan: Plan) -> Iterator[None]:
    """While it lasts, matrices of float32 are multiplied as the plan says: in tf32, or exactly under fp32. Other precisions leave
    torch's setting alone, which is the process' own.

    Torch has an older and a newer name for it, and refuses to say by the older what was set by the newer. It is asked by the newer, which
    always answers, and set by the older, which sets both.
    """
    before = "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"
    wanted = {"tf32": "high", "fp32": "highest"}.get(plan.workload.precision, before)
    if wanted == before:
        yield
        return
    torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
