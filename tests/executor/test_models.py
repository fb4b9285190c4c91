"""The built-in model is the architecture its shape describes."""

from __future__ import annotations

from typing import Any

import pytest

from strategist.catalog import rows
from strategist.errors import ImpossibleError
from strategist.executor.architecture import model_obstacles
from strategist.facts.layers import build_layer, norm_size
from strategist.facts.model import ModelShape, layer_sequence
from strategist.facts.models import load_model
from tests.plans import tiny_llama

pytestmark = pytest.mark.slow

SHAPES = (
    tiny_llama(),
    tiny_llama(name="tiny-qwen2", qkv_bias=True, tied=True),
    tiny_llama(name="tiny-qwen3", qk_norm="head", head_dim=6),
    tiny_llama(name="tiny-mistral", window=16, kv_heads=8),
)  # fmt: skip


def _ready(shape: ModelShape, seed: int = 0, dtype: str = "float32") -> Any:
    import torch

    from strategist.executor.initialise import initialise
    from strategist.executor.models import model_from_shape

    model = model_from_shape(shape, "cpu", getattr(torch, dtype))
    initialise(model, seed)
    return model


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_parameters_are_those_of_the_layers_the_facts_describe(shape: ModelShape) -> None:
    """Elements on meta add up to embedding, head, final norm and the layers' matrices and vectors."""
    from strategist.executor.models import model_from_shape

    layers = sum(build_layer(shape, kind).parameters for kind in layer_sequence(shape))
    ends = shape.vocab * shape.hidden * (1 if shape.tied else 2) + norm_size(shape, shape.hidden)
    model = model_from_shape(shape)
    assert sum(p.numel() for p in model.parameters()) == layers + ends
    assert all(p.is_meta for p in model.parameters())


def test_every_accepted_catalogue_model_has_its_counted_size() -> None:
    """Every row of the catalogue that the built-in model accepts is built with exactly the parameters it counts."""
    from strategist.executor.models import model_from_shape

    shapes = {row["name"]: (load_model(row["name"]), row["params_total"]) for row in rows("models")}
    accepted = {name: pair for name, pair in shapes.items() if not model_obstacles(pair[0])}
    assert {"llama-3-8b", "mistral-7b-v0.3", "qwen2.5-7b", "qwen3-8b"} <= accepted.keys()
    built = {
        name: sum(p.numel() for p in model_from_shape(shape).parameters()) for name, (shape, _) in accepted.items()
    }
    assert built == {name: counted for name, (_, counted) in accepted.items()}


def test_a_token_sees_only_what_came_before() -> None:
    """Changing token t changes logits from t on and none before."""
    import torch

    model = _ready(tiny_llama(), dtype="float64")
    tokens = torch.randint(64, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 64
    difference = (model(tokens) - model(changed)).detach().abs().amax(dim=(0, 2))
    assert float(difference[:7].max()) == 0.0
    assert float(difference[7:].min()) > 0.0


def test_attention_depends_on_distances_not_places() -> None:
    """Rotating queries and keys leaves their products a function of the distance between positions."""
    import torch

    from strategist.executor.models.llama import rope_tables, rotate

    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    cos, sin = rope_tables(20, 8, query)
    turned = [rotate(x.expand(1, 20, 1, 8), cos, sin)[0, :, 0] for x in (query, key)]
    products = turned[0] @ turned[1].T
    assert torch.allclose(products[3, 1], products[19, 17], rtol=0, atol=1e-12)
    assert not torch.allclose(products[3, 1], products[3, 2])


def test_grouped_queries_share_keys_and_values() -> None:
    """A model with fewer key heads equals one with all heads whose key and value weights are repeated."""
    import torch

    few, many = _ready(tiny_llama(kv_heads=4)), _ready(tiny_llama(kv_heads=8))
    weights = few.state_dict()
    for name in [n for n in weights if n.endswith((".k.weight", ".v.weight"))]:
        weights[name] = weights[name].unflatten(0, (4, 4)).repeat_interleave(2, dim=0).flatten(0, 1)
    many.load_state_dict(weights)
    tokens = torch.randint(64, (2, 12))
    assert torch.allclose(few(tokens), many(tokens), atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=lambda shape: shape.name)
def test_autocast_computes_what_cast_weights_compute(shape: ModelShape) -> None:
    """Under bfloat16 autocast the logits are bit for bit those of a model cast to bfloat16, as FSDP2 casts it."""
    import torch

    model, cast = _ready(shape), _ready(shape).to(torch.bfloat16)
    tokens = torch.randint(64, (2, 12))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
    assert logits.dtype == torch.bfloat16
    assert logits.equal(cast(tokens))


def test_stages_in_a_row_are_the_whole_model() -> None:
    """Cut into stages, with names kept, the model gives the same logits and the same initial weights."""
    import torch

    from strategist.executor.initialise import initialise
    from strategist.executor.models import model_from_shape

    whole, h = _ready(tiny_llama(tied=True), seed=5), torch.randint(64, (2, 12))
    logits, names = whole(h), set()
    for index, layers in enumerate((range(1), range(1, 2))):
        stage = model_from_shape(tiny_llama(tied=True), "cpu")
        stage.keep_stage(layers, embedding=index == 0, head=index == 1)
        initialise(stage, 5)
        h, names = stage(h), names | {name for name, _ in stage.named_parameters()}
    assert h.equal(logits)
    assert names == {name for name, _ in whole.named_parameters()}


def test_chunks_of_one_model_share_its_tensors() -> None:
    """Copying the structure copies no weight, and cutting the copy leaves the original as it was."""
    import torch

    from strategist.executor.chunks import copy_structure

    whole, tokens = _ready(tiny_llama(tied=True)), torch.randint(64, (2, 12))
    logits, chunk = whole(tokens), copy_structure(whole)
    assert all(mine is theirs for mine, theirs in zip(chunk.parameters(), whole.parameters(), strict=True))
    chunk.keep_stage(range(1), embedding=True, head=False)
    assert [name for name, _ in chunk.layers.named_children()] == ["0"]
    assert whole(tokens).equal(logits)


def test_names_lose_every_wrapper() -> None:
    """Recomputation, compilation and interleaving leave no trace in names, and nothing else is touched."""
    from strategist.executor.names import plain_name

    assert (
        plain_name("_chunk_1.layers.4._checkpoint_wrapped_module.mlp._orig_mod.up.weight") == "layers.4.mlp.up.weight"
    )
    assert plain_name("blocks.0_chunk_1.weight") == "blocks.0_chunk_1.weight"


def test_initial_weights_follow_from_seed_and_name() -> None:
    """The same seed gives the same weights, another seed others; norms are one and output projections are smaller."""
    first, same, other = _ready(tiny_llama(), 1), _ready(tiny_llama(), 1), _ready(tiny_llama(), 2)
    weights, again, different = (m.get_parameter("layers.0.attention.q.weight") for m in (first, same, other))
    assert weights.equal(again)
    assert not weights.equal(different)
    assert first.get_parameter("norm.weight").eq(1).all()
    assert first.get_parameter("layers.1.mlp.down.weight").std() < 0.7 * first.get_parameter("layers.1.mlp.up.weight").std()  # fmt: skip


def test_a_sequence_longer_than_the_window_is_refused() -> None:
    """Full attention stands in for a sliding window only as long as the window covers the sequence."""
    import torch

    model = _ready(tiny_llama(window=8))
    assert model(torch.zeros(1, 8, dtype=torch.long)).shape == (1, 8, 64)
    with pytest.raises(ImpossibleError, match="window of 8 tokens"):
        model(torch.zeros(1, 9, dtype=torch.long))
