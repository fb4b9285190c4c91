"""The built-in model is the architecture its shape describes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from strategist.catalog import rows
from strategist.errors import ImpossibleError
from strategist.executor.architecture import model_obstacles
from strategist.facts.model import ModelShape
from strategist.facts.models import load_model
from strategist.facts.parameters import count
from tests.plans import tiny_gpt2, tiny_llama, tiny_mixtral

pytestmark = pytest.mark.slow

SHAPES = (
    tiny_llama(),
    tiny_llama(name="tiny-qwen2", qkv_bias=True, tied=True),
    tiny_llama(name="tiny-qwen3", qk_norm="head", head_dim=6),
    tiny_llama(name="tiny-mistral", window=5, full_every=2, kv_heads=8),
    tiny_gpt2(),
    tiny_mixtral(),
    tiny_mixtral(
        name="tiny-deepseek", ffn_hidden=48, layers=3, qk_norm="full",
        moe={"layers": 2, "first_dense": 1, "shared_ffn": 16, "shared_gate": True},
    ),
)  # fmt: skip


def _ready(shape: ModelShape, seed: int = 0, dtype: str = "float32") -> Any:
    import torch

    from strategist.executor.initialise import initialise
    from strategist.executor.models import model_from_shape

    model = model_from_shape(shape, "cpu", getattr(torch, dtype))
    initialise(model, seed)
    return model


def _size(shape: ModelShape) -> int:
    from strategist.executor.models import model_from_shape

    return sum(p.numel() for p in model_from_shape(shape).parameters() if p.is_meta)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_parameters_are_those_of_the_layers_the_facts_describe(shape: ModelShape) -> None:
    """Elements on meta add up to the shape's ends and to its layers' matrices and vectors."""
    assert _size(shape) == count(shape).total


def test_every_model_of_the_catalogue_is_built_to_size_or_refused_by_part() -> None:
    """Every row that the built-in model accepts has exactly the parameters it counts; every other names what is missing."""
    shapes = [load_model(row["name"]) for row in rows("models")]
    refused = {shape.name: obstacles[0] for shape in shapes if (obstacles := model_obstacles(shape))}
    accepted = [shape for shape in shapes if shape.name not in refused]
    claimed = {"gpt2", "llama-3-8b", "mistral-7b-v0.3", "qwen3-8b", "starcoder2-7b", "mixtral-8x7b", "qwen3-30b-a3b"}
    assert claimed | {"opt-13b", "olmoe-1b-7b", "deepseek-moe-16b", "glm-4-9b"} <= {shape.name for shape in accepted}
    assert {shape.name: _size(shape) for shape in accepted} == {s.name: count(s).total for s in accepted}
    assert "mla" in refused["deepseek-v3"].sentence
    assert all("router of sigmoids" in refused[name].sentence for name in ("glm-4.5", "glm-4.5-air", "minimax-m2"))
    assert "sparse mixer" in refused["phi-3.5-moe"].sentence
    assert "pos = alibi" in refused["bloom-7b1"].sentence
    assert all(f"{name} (" in obstacle.sentence for name, obstacle in refused.items())


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

    from strategist.executor.models.positions import rope_tables, rotate

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


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
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


def test_initial_weights_are_drawn_one_at_a_time() -> None:
    """Beside a model that stands, drawing its weights takes the memory of the largest one, not of two."""
    from strategist.executor.initialise import initialise
    from strategist.measure.allocator import profiled

    model = _ready(tiny_llama())
    before, peak = profiled(lambda: lambda: initialise(model, 1))
    largest = max(parameter.nbytes for parameter in model.parameters())
    assert largest <= peak - before < 1.5 * largest


def test_a_window_ends_what_a_token_sees() -> None:
    """One layer with a window of 5 sees 5 tokens, and each further one 4 more; nothing beyond."""
    import torch

    for layers, reach in ((1, 5), (3, 13)):
        model = _ready(tiny_llama(window=5, full_every=0, layers=layers), dtype="float64")
        tokens = torch.randint(64, (1, 20))
        changed = tokens.clone()
        changed[:, 2] = (changed[:, 2] + 1) % 64
        difference = (model(tokens) - model(changed)).detach().abs().amax(dim=(0, 2))
        seen = torch.arange(20)[difference > 0]
        assert seen.tolist() == list(range(2, 2 + reach))


def test_a_sequence_longer_than_the_table_of_positions_is_refused() -> None:
    """A GPT-2 has as many places as its table has rows."""
    import torch

    model = _ready(tiny_gpt2(pos_rows=8))
    assert model(torch.zeros(1, 8, dtype=torch.long)).shape == (1, 8, 64)
    with pytest.raises(ImpossibleError, match="8 learned positions"):
        model(torch.zeros(1, 9, dtype=torch.long))


def _mixture(routing: str) -> Any:
    """The experts of one layer, and 10 tokens for them."""
    import torch

    from strategist.executor.initialise import initialise
    from strategist.executor.models import model_from_shape

    model = model_from_shape(tiny_mixtral(moe={"experts": 3}), "cpu", torch.float64, routing=routing)
    initialise(model, 0)
    tokens = torch.randn(10, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return model.layers["0"].mlp, tokens


def test_every_token_gets_the_weighted_sum_of_its_best_experts() -> None:
    """The mixture equals, token by token, what its two highest scores say, computed one expert after the other."""
    import torch
    from torch.nn.functional import silu

    mixture, tokens = _mixture("scored")
    gate, up, down = (getattr(mixture.experts, name).unbind(1) for name in ("gate", "up", "down"))
    for token, got in zip(tokens, mixture(tokens[None])[0], strict=True):
        scores = mixture.router.weight @ token
        best = scores.topk(2).indices
        weights = scores[best].softmax(0)
        terms = [w * ((silu(gate[e] @ token) * (up[e] @ token)) @ down[e]) for w, e in zip(weights, best, strict=True)]
        assert torch.allclose(got, sum(terms), rtol=0, atol=1e-14)


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    """Experts that nobody chose take part in backward, so that data-parallel ranks reduce the same parameters."""
    mixture, tokens = _mixture("crowded")
    mixture(tokens[None]).sum().backward()
    assert mixture.experts.up.grad[:, 2].eq(0).all()
    assert mixture.experts.up.grad[:, :2].ne(0).all()


@pytest.mark.parametrize(("routing", "counts"), [("balanced", [7, 7, 6]), ("crowded", [10, 10, 0])])
def test_counts_for_tracing_are_known_without_values(routing: str, counts: list[int]) -> None:
    """Balanced experts share the pairs of token and expert evenly, crowded ones are as few as can be; no token meets one
    expert twice, and the mixture runs on fake tensors, which scored routing cannot."""
    from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

    (mixture, tokens), (scored, _) = _mixture(routing), _mixture("scored")
    choice = mixture.router.choose(tokens)
    assert choice.counts == counts == choice.experts.flatten().bincount(minlength=3).tolist()
    assert all(len(set(pair)) == 2 for pair in choice.experts.tolist())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert mixture(mode.from_tensor(tokens)[None]).shape == (1, 10, 32)
        with pytest.raises(DynamicOutputShapeException):
            scored(mode.from_tensor(tokens)[None])


def test_configurations_whose_router_is_another_are_refused() -> None:
    """Every mixture that transformers weighs by sigmoids, or samples from, is refused where the rest of it could be built, and those of a softmax are not
    refused for their router."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    for name in ("dots1", "exaone_moe", "glm4_moe", "hy_v3", "minimax_m2", "solar_open", "phimoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "granitemoe", "dbrx", "mellum"):  # fmt: skip
        text = (Path(spec.origin).parent / f"models/{name}/modeling_{name}.py").read_text(encoding="utf-8")
        is_other = "sparsemixer" in text or "e_score_correction_bias" in text
        assert bool(model_obstacles(tiny_mixtral(family=name))) is is_other, name
        assert not model_obstacles(tiny_llama(family=name))
