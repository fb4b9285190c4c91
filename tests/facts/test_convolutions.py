"""ResNets as blocks of convolutions: torch's own model says how many weights, products and elements there are."""

from __future__ import annotations

from typing import Any

import pytest

from strategist.errors import StrategistError
from strategist.facts.convolutions import blocks, numbers, numbers_behind
from strategist.facts.model import ModelShape
from strategist.facts.models import load_model
from strategist.facts.parameters import count


def _config(depths: list[int], **more: Any) -> dict[str, Any]:
    return {"model_type": "resnet", "hidden_sizes": [256, 512, 1024, 2048], "depths": depths, "num_labels": 10} | more


def _macs(shape: ModelShape) -> int:
    return sum(c.positions * c.matrix.weights for block in blocks(shape.extra) for c in block.convolutions)


@pytest.mark.parametrize(
    ("model", "billions"),
    [("resnet18", 1.81), ("resnet34", 3.66), ("resnet50", 4.09), ("resnet101", 7.80), ("resnet152", 11.51)],
)  # pytorch/vision: torchvision/models/resnet.py, _ops of the weights
def test_products_are_those_that_torchvision_states(model: str, billions: float) -> None:
    """Multiplications of one image of 224 pixels a side, classifier included, in billions."""
    shape = load_model(model)
    assert (_macs(shape) + shape.hidden * 1000) / 1e9 == pytest.approx(billions, abs=0.006)


@pytest.mark.slow
@pytest.mark.parametrize("image", [224, 65, 32])
@pytest.mark.parametrize("kind", ["bottleneck", "basic"])
@pytest.mark.parametrize("depths", [[3, 4, 6, 3], [1, 1, 1, 1], [2, 1, 3, 2]])
def test_weights_and_products_are_those_of_transformers(depths: list[int], kind: str, image: int) -> None:
    """Each weight of transformers' class is counted, and what torch counts as FLOP of its forward pass are two for each product."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes: dict[str, Any] = {"layer_type": kind} | ({"hidden_sizes": [64, 128, 256, 512]} if kind == "basic" else {})
    shape = load_model(_config(depths) | sizes | {"image_size": image})
    with torch.device("meta"):
        model = ResNetForImageClassification(ResNetConfig(**_config(depths) | sizes))
        with FlopCounterMode(display=False) as counter:
            model(pixel_values=torch.zeros(2, 3, image, image))
    assert count(shape).total == sum(weight.numel() for weight in model.parameters())
    assert counter.get_total_flops() == 2 * 2 * (_macs(shape) + shape.hidden * 10)


def test_a_configuration_without_a_side_of_images_is_assumed_to_be_the_usual_one() -> None:
    """ResNet's configurations name none; the shape says which was taken."""
    shape = load_model(_config([3, 4, 6, 3]))
    assert dict(shape.extra)["image"] == 224
    assert any("image_size = 224" in note for note in shape.notes)


def test_equal_blocks_are_one_sort_and_those_behind_a_block_are_known() -> None:
    """Of each stage the first block differs from the others."""
    extra = load_model("resnet50").extra
    assert numbers(extra) == (0, 1, 1, 3, 4, 4, 4, 7, 8, 8, 8, 8, 8, 13, 14, 14)
    assert numbers_behind(extra, 8) == (13, 14, 14)
    assert numbers_behind(extra, 14) == ()


@pytest.mark.parametrize(
    "wrong", [{"depths": [3, 4, 6]}, {"layer_type": "basic"}, {"image_size": -1}, {"downsample_in_bottleneck": True}]
)
def test_what_is_no_such_network_is_refused(wrong: dict[str, Any]) -> None:
    """Blocks of another sort are not read as bottlenecks."""
    with pytest.raises(StrategistError):
        load_model({**_config([3, 4, 6, 3]), **wrong})


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "last"), [("bottleneck", 2048), ("basic", 512)])
def test_a_live_network_without_a_configuration_is_known_by_its_weights(kind: str, last: int) -> None:
    """torchvision's networks carry none; one convolution more, and it is nobody's shape."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = [last // 8, last // 4, last // 2, last]
    with torch.device("meta"):
        bare = torch.nn.Sequential(
            ResNetForImageClassification(
                ResNetConfig(depths=[1, 2, 2, 1], hidden_sizes=sizes, layer_type=kind, num_labels=7)
            )
        )
        shape = load_model(bare)
        other = load_model(torch.nn.Sequential(bare, torch.nn.Conv2d(3, 3, 3)))
    assert (shape.kind, shape.layers, dict(shape.extra)["classes"]) == ("cnn", 6, 7)
    assert count(shape).total == sum(weight.numel() for weight in bare.parameters())
    assert "224 x 224" in shape.notes[-1]
    assert other.kind == "module"
