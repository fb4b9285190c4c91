"""Adapters are what the paper says they are: a product of two small matrices that is added to a frozen one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from strategist.executor.support import layout_obstacles
from strategist.facts.model import Adapters
from tests.plans import FLOAT32, make_plan, tiny_gpt2, tiny_llama, tiny_mixtral

EVERY = ("q", "k", "v", "o", "gate", "up", "down")
ADAPTERS = Adapters(rank=3, alpha=6, targets=EVERY)


@pytest.mark.slow
@pytest.mark.parametrize("model", [tiny_llama, tiny_gpt2])
def test_an_adapted_model_is_the_model_of_the_merged_weights(model: Any) -> None:
    """With W + (alpha / rank) B A in place of W a plain model gives the same logits in float64, and by the chain rule the gradients
    of A and B are (alpha / rank) B' dW and (alpha / rank) dW A'; frozen weights have none."""
    import torch

    from strategist.executor.initialise import initialise
    from strategist.executor.models import model_from_shape

    shape = replace(
        model(), adapters=replace(ADAPTERS, targets=tuple(t for t in EVERY if t != "gate" or model().mlp_gated))
    )
    adapted = model_from_shape(shape, "cpu", torch.float64)
    initialise(adapted, 5)
    plain = model_from_shape(model(), "cpu", torch.float64)
    named = dict(adapted.named_parameters())
    pairs = {name.removesuffix(".adapter.a"): name for name in named if name.endswith(".adapter.a")}
    scale = ADAPTERS.alpha / ADAPTERS.rank
    tokens = torch.randint(0, shape.vocab, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain.load_state_dict({name: named[name] for name, _ in plain.named_parameters()}, strict=False)
        plain.tie()
        assert torch.equal(adapted(tokens), plain(tokens))  # B is zero at first
        for name in pairs:
            a, b = (named[f"{name}.adapter.{which}"] for which in "ab")
            b.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
            plain.get_parameter(f"{name}.weight").add_(scale * b @ a)
    for each in (adapted, plain):
        each(tokens).square().mean().backward()
    assert torch.allclose(adapted(tokens), plain(tokens), rtol=0, atol=1e-13)
    assert len(pairs) == shape.layers * len(shape.adapters.targets)
    for name in pairs:
        a, b, whole = (
            named[f"{name}.adapter.a"],
            named[f"{name}.adapter.b"],
            plain.get_parameter(f"{name}.weight").grad,
        )
        assert torch.allclose(a.grad, scale * b.T @ whole, rtol=0, atol=1e-13)
        assert torch.allclose(b.grad, scale * whole @ a.T, rtol=0, atol=1e-13)
    assert all((parameter.grad is None) == (".adapter." not in name) for name, parameter in named.items())


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"tp": 2}, "tp 2"),
        ({"pp": 2, "accumulation": 2}, "pp 2"),
        ({"cp": 2, "context_parallel": "ring"}, "cp 2"),
        ({"dp_shard": 2, "zero": 1}, "zero 1"),
        ({"dp_shard": 2, "zero": 2, "offload": "optimizer"}, "offload optimizer"),
        ({"formats": replace(FLOAT32, compute="bfloat16")}, "compute in bfloat16"),
    ],
)
def test_layouts_that_nobody_tried_beside_adapters_are_refused(layout: dict[str, Any], words: str) -> None:
    """Each is named in a sentence; without adapters none is in the way."""
    shape = tiny_llama(adapters=ADAPTERS)
    assert any(words in obstacle.sentence for obstacle in layout_obstacles(make_plan(shape, **layout)))
    assert not layout_obstacles(make_plan(tiny_llama(), **layout))


@pytest.mark.parametrize("beside", ["gate", "down"])
def test_adapters_beside_experts_are_refused(beside: str) -> None:
    """A plan that puts adapters where a mixture's experts are is not trained without them; beside attention it is no obstacle."""
    some = replace(ADAPTERS, targets=("q", "v"))
    (found,) = layout_obstacles(make_plan(tiny_mixtral(adapters=replace(some, targets=("q", beside)))))
    assert (found.code, f"beside {beside} of a mixture" in found.sentence) == ("UNSUPPORTED", True)
    assert not layout_obstacles(make_plan(tiny_mixtral(adapters=some)))


@pytest.mark.slow
def test_weights_of_hugging_face_fill_the_frozen_part() -> None:
    """Adapters are no tensors of theirs: the same names go to the same parameters as without them."""
    from strategist.executor.weights import entries

    assert entries(tiny_llama(adapters=ADAPTERS)) == entries(tiny_llama())
