"""Adapters beside a base of four bits, said once more: in one process, over plain matrices rounded as the paper says."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from strategist.document.plan import Plan
from strategist.executor.build import build
from strategist.executor.initialise import initialise
from strategist.executor.models import model_from_shape
from strategist.executor.models.four_bits import Packed
from strategist.facts.model import ModelShape
from tests.executor.eight import losses_of, rounded, torchs

LEARNING_RATE = 2e-4
"""Of the adapters of all but the largest models (Dettmers et al. 2023, arXiv 2305.14314, appendix B)."""
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The sixteen values (Dettmers et al. 2023, arXiv 2305.14314, appendix E)."""


def in_four_bits(matrix: Tensor) -> Tensor:
    """What four bits keep of a matrix: of each block of 64 in a row the nearest of sixteen values times the largest, which is kept
    in eight bits itself, block by block of 256, after the mean of all was taken off (section 3)."""
    blocks = matrix.float().flatten().split(64)
    largest = torch.stack([block.abs().max() for block in blocks])
    scales = rounded(largest - largest.mean(), signed=True) + largest.mean()
    table = torch.tensor(NF4)
    nearest = [(block[:, None] / most - table).abs().argmin(dim=1) for block, most in zip(blocks, largest, strict=True)]
    kept = [table[codes] * scale for codes, scale in zip(nearest, scales, strict=True)]
    return torch.cat(kept).view_as(matrix)


def _each_in_four_bits(weight: Tensor) -> Tensor:
    """The same of a matrix, or of those of all experts (F, E, H), one by one."""
    every = [weight] if weight.dim() == 2 else weight.unbind(1)
    rounded_ones = [in_four_bits(matrix.contiguous()) for matrix in every]
    return rounded_ones[0] if weight.dim() == 2 else torch.stack(rounded_ones, dim=1)


def agrees(kept: Tensor, matrix: Tensor) -> bool:
    """Whether weights are what four bits keep of a matrix. bitsandbytes finds the border between two values of a scale within some
    millionths of the largest, so one block in twenty may have the neighbouring value."""
    distance = (kept - in_four_bits(matrix)).abs() / matrix.abs().max()
    return bool((distance <= 1e-6).float().mean() >= 0.95 and distance.max() <= 0.01)


@cache
def trained_alone(
    shape: ModelShape, dtype: torch.dtype, *, is_rounded: bool = True, learning_rate: float = LEARNING_RATE
) -> list[float]:
    """Losses of one process whose frozen matrices are plain ones in the compute format, rounded or not; adapters are float32."""
    plain = replace(shape, adapters=replace(shape.adapters, method="lora"))  # type: ignore[type-var]
    model, exact = (model_from_shape(plain, "cpu", kind) for kind in (dtype, torch.float32))
    for each in (model, exact):
        initialise(each, 0)
    values = dict(exact.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data = values[name].clone()
            elif name.startswith("layers.") and parameter.dim() > 1 and is_rounded:
                parameter.copy_(_each_in_four_bits(values[name]))
    return losses_of(model, plain, torchs(model, learning_rate))


def brought_back(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Some matrix, what the executor's bytes say of it, and the gradient that a product with it gives its input of ones, summed."""
    from strategist.executor.models.four_bits import Levels

    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    packed = Packed(rows, columns, Levels())
    packed.bits.data.copy_(packed.bytes_of(matrix))
    x = torch.ones(3, columns, requires_grad=True)
    packed(x, None).sum().backward()
    assert x.grad is not None
    return matrix, packed.matrix(torch.float32), x.grad


def exported(plan: Plan, folder: Path) -> dict[str, Tensor]:
    """The weights of a new model, which lie in files under Hugging Face's names afterwards."""
    from strategist.executor.weights import export_weights

    session = build(plan, model_from_shape(plan.model), seed=1)
    session.save(folder / "checkpoint")
    export_weights(folder / "checkpoint", plan, folder / "files")
    return session.parameters_full()


def carried(plan: Plan, folder: Path) -> dict[str, Tensor]:
    """The base of a session that took its weights from files, by the names of the weights."""
    from strategist.executor.weights import import_weights

    session = build(plan, model_from_shape(plan.model))
    import_weights(session, folder)
    whole = session.parameters_full()
    found = {}
    for name, module in model_from_shape(plan.model, "cpu").named_modules():
        if isinstance(module, Packed):
            module.bits.data.copy_(whole[f"{name}.bits"])
            found[f"{name.removesuffix('.packed')}.weight"] = module.matrix(torch.float32)
    return found


def one_by_one(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights by name, those of stacked experts (F, E, H) as a matrix for each."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        every = weight.unbind(1) if weight.dim() == 3 else ()
        found |= {f"{name}.{expert}.weight": one.contiguous() for expert, one in enumerate(every)} or {name: weight}
    return found


def bytes_of_bases(plan: Plan) -> tuple[int, int]:
    """Bytes of a session's quantised base on this rank, and of all ranks together."""
    from strategist.executor.initialise import local_part

    model: nn.Module = build(plan, model_from_shape(plan.model)).parts.model
    bits = [parameter for parameter in model.parameters() if parameter.dtype == torch.uint8]
    return sum(local_part(each).numel() for each in bits), sum(each.numel() for each in bits)
