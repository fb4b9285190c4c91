"""Number formats of a plan as torch types, casts and policies."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

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
