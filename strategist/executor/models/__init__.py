"""Models that the executor brings along, made from a ModelShape."""

from __future__ import annotations

import torch

from strategist.executor.models.llama import Llama
from strategist.executor.models.splittable import SplittableModel
from strategist.executor.support import model_obstacles, refuse
from strategist.facts.model import ModelShape

__all__ = ["SplittableModel", "model_from_shape"]


def model_from_shape(
    shape: ModelShape, device: torch.device | str = "meta", dtype: torch.dtype = torch.float32
) -> SplittableModel:
    """The reference model of this architecture, without values when `device` is meta.

    Raises ImpossibleError UNSUPPORTED for an architecture that is not a Llama-like decoder.
    """
    refuse(model_obstacles(shape))
    with torch.device(device):
        return Llama(shape).to(dtype)
