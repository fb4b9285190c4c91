"""Parameter counts of families that are not a stack of `build_layer` layers: one closed formula each.

Each was compared with the count of the real model class built without weights (transformers 5.23.0, diffusers 0.42.1,
facebookresearch/DiT: models.py); the catalogue's `params_hf_code` is that count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from strategist.facts.model import ModelShape
from strategist.facts.parameters import count
from strategist.records import replace

FACTS_OF: Mapping[str, tuple[str, ...]] = {
    "vit": ("channels", "patch", "classes"),
    "dit": ("input", "channels", "patch", "classes"),
    "resnet": ("depths_0", "depths_1", "depths_2", "depths_3", "classes", "image"),
}
"""What only one family has (`ModelShape.extra`) and its weights are counted from, by formula (facts/parameters.py, facts/convolutions.py)."""


def whole_model(shape: ModelShape) -> int | None:
    """All weights by the closed formula of the shape's family, or None when the family has none."""
    formula = _FORMULAS.get(shape.formula)
    return None if formula is None else formula(shape, dict(shape.extra))


def completed(shape: ModelShape) -> ModelShape:
    """The shape with the weights that its closed formula, or its stated total, has beyond its layers and outer parts.

    They go to the layers evenly where the family repeats one block, else to the whole model, so that `count` is exact.
    """
    if shape.formula == "dit":
        return replace(shape, layer_extra_parameters=modulation(shape.hidden))
    total = shape.parameters_stated or whole_model(shape)
    if total is None:
        return shape
    missing = total - count(shape).total
    per_layer = missing // shape.layers if shape.layers and shape.kind != "dual-encoder" else 0
    extra = shape.extra_parameters + missing - per_layer * shape.layers
    return replace(shape, layer_extra_parameters=per_layer, extra_parameters=extra)


def modulation(hidden: int) -> int:
    """Weights of the adaLN-zero map in one DiT block: shift, scale and gate for both halves, with biases."""
    return 6 * hidden * hidden + 6 * hidden


def _linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def _clip(shape: ModelShape, extra: Mapping[str, int]) -> int:
    """CLIP (Radford et al. 2021, arXiv 2103.00020): text tower, vision tower, two projections, one temperature."""
    text, vision = extra["text_hidden"], extra["vision_hidden"]
    positions = (extra["vision_image"] // extra["vision_patch"]) ** 2 + 1
    text_tower = (shape.vocab + extra["text_ctx"]) * text + extra["text_layers"] * _clip_layer(text, extra["text_ffn"])
    vision_tower = 3 * extra["vision_patch"] ** 2 * vision + vision + positions * vision
    vision_tower += extra["vision_layers"] * _clip_layer(vision, extra["vision_ffn"]) + 4 * vision
    return text_tower + 2 * text + vision_tower + (text + vision) * extra["proj"] + 1


def _clip_layer(hidden: int, ffn: int) -> int:
    return 4 * _linear(hidden, hidden) + _linear(hidden, ffn) + _linear(ffn, hidden) + 4 * hidden


def _flux(shape: ModelShape, extra: Mapping[str, int]) -> int:
    """FLUX.1: `double` blocks with a stream each for image and text, then `single` blocks over both (diffusers)."""
    h, ffn = shape.hidden, 4 * shape.hidden
    embedder = _linear(256, h) + _linear(h, h)
    total = _linear(extra["in_channels"], h) + _linear(extra["context_dim"], h) + _linear(extra["pooled_dim"], h)
    total += _linear(h, h) + embedder * (2 if extra["guidance"] else 1)
    stream = _linear(h, 6 * h) + 4 * _linear(h, h) + 2 * shape.head_dim + _linear(h, ffn) + _linear(ffn, h)
    single = _linear(h, 3 * h) * 2 + 2 * shape.head_dim + _linear(h, ffn) + _linear(h + ffn, h)
    return total + extra["double"] * 2 * stream + extra["single"] * single + _linear(h, 2 * h) + _linear(h, extra["in_channels"])  # fmt: skip


_FORMULAS: Mapping[str, Callable[[ModelShape, Mapping[str, int]], int]] = {
    "clip": _clip,
    "flux": _flux,
}
