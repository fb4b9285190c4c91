"""Muon in the executor; that it trains as one process does is in test_parity.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plans import make_plan, tiny_gpt2, tiny_llama

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("shape", [tiny_llama(tied=True, qk_norm="head"), tiny_gpt2(lm_head_bias=True, tied=False)])
def test_hidden_matrices_are_those_that_plans_count(shape: Any) -> None:
    """The executor finds as many elements in matrices of layers as the facts say: no table, no head, no norm, no bias."""
    from strategist.executor.models import model_from_shape
    from strategist.executor.muon import hidden_matrices as found
    from strategist.facts.parameters import hidden_matrices as counted

    model = model_from_shape(shape)
    assert sum(matrix.numel() for matrix in found(model)) == counted(shape)


def test_a_model_without_layers_is_refused() -> None:
    """Nothing is trained by AdamW in silence."""
    from torch import nn

    from strategist.errors import ImpossibleError
    from strategist.executor.build import build

    with pytest.raises(ImpossibleError, match="Muon updates matrices"):
        build(make_plan(optimizer="muon"), nn.Linear(4, 4))
