"""Models: those the executor brings along, made from a ModelShape, and those of others that it knows how to cut."""

from __future__ import annotations

import torch
from torch import nn

from strategist.executor.architecture import model_obstacles
from strategist.executor.models.decoder import Decoder
from strategist.executor.models.experts import Routing
from strategist.executor.models.hugging_face import HuggingFaceCuts, is_known
from strategist.executor.models.hugging_face_pairs import PairCuts, is_pair
from strategist.executor.models.reference import ReferenceModel
from strategist.executor.models.sequential import SequentialCuts
from strategist.executor.obstacles import refuse
from strategist.executor.splittable import Splittable, nobody_said
from strategist.facts.constants import PLAIN, Constants
from strategist.facts.model import ModelShape

__all__ = ["ReferenceModel", "Routing", "model_from_shape", "require_splittable", "splittable"]


def model_from_shape(
    shape: ModelShape,
    device: torch.device | str = "meta",
    dtype: torch.dtype = torch.float32,
    *,
    routing: Routing = "scored",
    constants: Constants = PLAIN,
) -> ReferenceModel:
    """The reference model of this architecture, without values when `device` is meta.

    `constants` are those of weights that come in (`weights.constants_of`). `routing` other than "scored" is for tracing experts: shapes then do not depend on values. Raises ImpossibleError
    UNSUPPORTED for an architecture that it cannot be.
    """
    refuse(model_obstacles(shape))
    with torch.device(device):
        return Decoder(shape, routing, constants).to(dtype)


def splittable(model: nn.Module) -> Splittable | None:
    """How `model` is cut, or None when nobody said."""
    if isinstance(model, Splittable):
        return model
    if isinstance(model, nn.Sequential):
        return SequentialCuts(model)
    if is_pair(model):
        return PairCuts(model)
    return HuggingFaceCuts(model) if is_known(model) else None


def require_splittable(model: nn.Module, axis: str) -> Splittable:
    """How `model` is cut; raises ImpossibleError UNSUPPORTED for a module of which nobody said."""
    cuts = splittable(model)
    if cuts is None:
        raise nobody_said(model, axis)
    return cuts
