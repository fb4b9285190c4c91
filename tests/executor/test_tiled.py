"""A layer in slices is the layer, and no slice is larger than it may be."""

from __future__ import annotations

from itertools import product

import pytest

from strategist.facts.tiling import rows_of, slices_of


def test_slices_hold_at_most_their_share_of_the_largest_matrix() -> None:
    """But for rounding to whole rows no slice holds more than a tiling-th of the largest matrix, and one slice fewer would hold more;
    together they are the matrix."""
    for outputs, inputs, more, tiling in product((1, 7, 64, 1000), (1, 48), (0, 5, 10_000), (1, 2, 3, 8)):
        largest = outputs * inputs + more
        count = int(slices_of(outputs, inputs, largest, tiling))
        rows = rows_of(outputs, count)
        assert (len(rows), sum(rows)) == (count, outputs)
        assert max(rows) - min(rows) <= 1
        assert min(rows) * inputs <= largest / tiling or count == outputs
        assert count == 1 or outputs * inputs / (count - 1) > largest / tiling


@pytest.mark.slow
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("slices", [1, 2, 5, 13])
def test_a_tiled_layer_is_the_layer(slices: int, has_bias: bool) -> None:
    """In float64 outputs and all gradients of a layer in slices are those of one piece to 1e-12."""
    import torch
    from torch import nn

    from strategist.executor.tiled_linear import TiledLinear

    torch.manual_seed(slices)
    whole = nn.Linear(11, 13, bias=has_bias, dtype=torch.float64)
    tiled = TiledLinear(whole, slices)
    x = torch.randn(2, 3, 11, dtype=torch.float64)
    given = torch.randn(2, 3, 13, dtype=torch.float64)
    found = []
    for layer in (whole, tiled):
        own = x.clone().requires_grad_()
        y = layer(own)
        y.backward(given)
        gradients = [torch.cat([p.grad for n, p in layer.named_parameters() if n.endswith(kind)]) for kind in ("weight", "bias")[: 1 + has_bias]]  # fmt: skip
        found.append((y, own.grad, *gradients))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=0.0, atol=1e-12)


@pytest.mark.slow
def test_slices_of_a_block_go_by_the_names_of_its_layers() -> None:
    """Every parameter of a tiled model is a slice of one of the bare model, and slices of one lie below each other in it."""
    from strategist.executor.checkpoint import named_parameters
    from strategist.executor.models import model_from_shape
    from strategist.executor.names import by_weight
    from strategist.executor.tiled_linear import tile
    from tests.plans import tiny_gpt2

    bare, tiled = model_from_shape(tiny_gpt2()), model_from_shape(tiny_gpt2())
    for block in tiled.layers.values():
        tile(block, 3)
    own, slices = named_parameters(bare), named_parameters(tiled)
    found = by_weight(slices)
    assert found.keys() == own.keys()
    for name, parts in found.items():
        assert sum(len(slices[part]) for part in parts) == len(own[name])
    assert max(len(parts) for parts in found.values()) == 3
