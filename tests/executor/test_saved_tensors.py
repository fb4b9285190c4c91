"""What autograd keeps of a layer on the CPU is what the memory model says it keeps, as far as the device has no say.

Device-bound are RMSNorm, which is one operation on GPUs and several on the CPU (so LayerNorm stands in for it here), and
what recomputation keeps, which no hook sees.
"""

from __future__ import annotations

from typing import Any

import pytest

from strategist.facts.model import ModelShape, layer_sequence
from strategist.memory.saved import saved_tensors
from tests.plans import tiny_gpt2, tiny_llama, tiny_mixtral

pytestmark = pytest.mark.slow

SEQUENCES, TOKENS = 2, 24
FLOAT, INTEGER = 4, 8


def _kept_per_token(shape: ModelShape) -> float:
    """Bytes that the first layer keeps in float32 besides weights and what all layers share, each storage once."""
    import torch

    from strategist.executor.initialise import initialise
    from strategist.executor.models import model_from_shape
    from strategist.executor.models.positions import places

    model: Any = model_from_shape(shape, "cpu", routing="balanced")
    initialise(model, 0)
    hidden = torch.randn(SEQUENCES, TOKENS, shape.hidden, requires_grad=True)
    shared = places(shape, TOKENS, hidden)
    others = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *shared) if t is not None}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model.layers["0"](hidden, shared)
    assert output.requires_grad
    return sum(size for place, size in kept.items() if place not in others) / (SEQUENCES * TOKENS)


def _listed_per_token(shape: ModelShape, *, but: tuple[str, ...] = ()) -> float:
    """Bytes of the rows of memory/saved.py that one rank keeps without recomputation."""
    rows = saved_tensors(shape, layer_sequence(shape)[0])
    here = (
        row for row in rows if row.cut not in ("exchanged", "regathered") and not row.name.startswith(but or ("-",))
    )
    return sum(FLOAT * row.width for row in here if "none" in row.policies)


@pytest.mark.parametrize(
    "shape",
    [
        tiny_gpt2(),
        tiny_gpt2(mlp_act="relu2", head_dim=6),
        tiny_llama(norm="layernorm"),
        tiny_llama(norm="layernorm", kv_heads=2, head_dim=8, ffn_hidden=56),
        tiny_llama(norm="layernorm", qkv_bias=True, mlp_act="gelu"),
        tiny_llama(norm="layernorm", window=7, full_every=0),
    ],
)
def test_a_dense_layer_keeps_what_the_memory_model_lists(shape: ModelShape) -> None:
    """To the byte: inputs and statistics of norms, inputs of matrices, queries, keys, values, attention's output with its
    log-sum-exp, the feed-forward part before and after its activation."""
    assert _kept_per_token(shape) == _listed_per_token(shape)


@pytest.mark.parametrize("moe", [{}, {"top_k": 3}, {"shared_ffn": 16}])
def test_experts_keep_what_the_memory_model_lists(moe: dict[str, Any]) -> None:
    """Beside the router, to the byte: each token's input once per expert, what experts compute inside, what they give."""
    shape = tiny_mixtral(moe=moe, norm="layernorm")
    assert shape.moe is not None
    k, experts = shape.moe.top_k, shape.moe.experts
    router = FLOAT * (experts + k) + INTEGER * 3 * k  # scores, weights; chosen experts, the order, and the order back
    assert _kept_per_token(shape) - router == pytest.approx(_listed_per_token(shape, but=("router",)), rel=1e-12)


def test_rmsnorm_keeps_one_more_stream_on_the_cpu() -> None:
    """The reason for leaving RMSNorm out: without a fused operation its normalised input is kept before the weight."""
    shape = tiny_llama()
    more = _kept_per_token(shape) - _listed_per_token(shape)
    assert more == 2 * FLOAT * shape.hidden
