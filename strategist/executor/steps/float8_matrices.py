"""Let the matrices of each block multiply in 8 bits: torchao's linear layers, scaled anew for every tensor."""

from __future__ import annotations

from torch import nn

from strategist.errors import ImpossibleError
from strategist.executor.blocks import find_blocks
from strategist.executor.job import Job
from strategist.facts.workload import FLOAT8_MULTIPLE


def float8_matrices(model: nn.Module, job: Job) -> nn.Module:
    """`model` with the linear layers of its blocks in fp8; embedding, norms and head compute as without.

    Each product casts what it reads: inputs and weights to e4m3, gradients to e5m2, with one scale per tensor from its largest
    element (Micikevicius et al. 2022, arXiv 2209.05433, section 3). Raises ImpossibleError UNSUPPORTED for a module without
    linear layers whose sides divide by 16, which the devices' 8-bit products ask for.
    """
    if job.plan.workload.precision != "fp8":
        return model
    if not sum(_cast_in(block) for block in find_blocks(model).blocks.values()):
        raise ImpossibleError(
            "UNSUPPORTED",
            f"fp8 is for the linear layers of like blocks with sides that divide by {FLOAT8_MULTIPLE}, and {type(model).__name__} "
            "has none.",
            flag="$.workload.precision",
            value="fp8",
            hint="Plan with --precision bf16.",
        )
    return model


def _cast_in(block: nn.Module) -> int:
    """Exchange the linear layers of a block that can be; how many."""
    from torchao.float8 import convert_to_float8_training  # an extra: only plans in fp8 need it

    found = [module for module in block.modules() if _is_castable(module)]
    convert_to_float8_training(block, module_filter_fn=lambda module, _name: _is_castable(module))
    return len(found)


def _is_castable(module: nn.Module) -> bool:
    """A linear layer that 8-bit products can be for."""
    if not isinstance(module, nn.Linear):
        return False
    return module.in_features % FLOAT8_MULTIPLE == 0 and module.out_features % FLOAT8_MULTIPLE == 0
