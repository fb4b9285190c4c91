"""Models read from Megatron-LM's arguments are those of the catalogue that the arguments were written for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategist.catalog import rows
from strategist.errors import InputError
from strategist.facts.megatron_arguments import shape_from_arguments
from strategist.facts.model import ModelShape
from strategist.facts.model_rows import shape_from_row
from strategist.facts.parameters import count
from strategist.records import names_of
from tests.examples import examples

NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
POSITIONS = {"learned": "learned_absolute", "rope": "rope", "none": "none"}
SAID_OTHERWISE = (
    "name",
    "family",
    "source",
    "basis",
    "act_form",
    "model_type",
    "notes",
    "parameters_stated",
    "other_tower_parameters",
    "max_seq",
    "extra",
    "pattern",
)
"""What arguments do not say of a model, or the catalogue says in words of its own."""


def written(shape: ModelShape) -> dict[str, str]:
    """The arguments that somebody writes for a shape."""
    said = {
        "--num-layers": str(shape.layers),
        "--hidden-size": str(shape.hidden),
        "--num-attention-heads": str(shape.heads),
        "--max-position-embeddings": str(shape.pos_rows or shape.max_seq or 2048),
        "--vocab-size": str(shape.vocab),
        "--normalization": NORMS[shape.norm],
        "--position-embedding-type": POSITIONS[shape.pos],
        "--ffn-hidden-size": str(shape.ffn_hidden or 4 * shape.hidden),
    }
    said |= dict.fromkeys(_switches(shape), "")
    if shape.mla is not None:
        parts = {"q-lora-rank": shape.mla.q_lora, "kv-lora-rank": shape.mla.kv_lora, "qk-head-dim": shape.mla.qk_nope}
        parts |= {"qk-pos-emb-head-dim": shape.mla.qk_rope, "v-head-dim": shape.mla.v_dim}
        said |= {f"--{name}": str(width) for name, width in parts.items() if width}
    else:
        said |= {"--num-query-groups": str(shape.kv_heads), "--kv-channels": str(shape.head_dim)}
    if shape.moe is not None:
        dense, moe = shape.moe.first_dense, shape.moe
        said |= {"--num-experts": str(moe.experts), "--moe-router-topk": str(moe.top_k)}
        said |= {"--moe-ffn-hidden-size": str(moe.ffn), "--moe-layer-freq": f"([0]*{dense}+[1]*{moe.layers})"}
        said |= {"--moe-shared-expert-intermediate-size": str(moe.shared_ffn)} if moe.shared_ffn else {}
        if moe.groups > 1:
            said |= {"--moe-router-num-groups": str(moe.groups), "--moe-router-group-topk": str(moe.top_groups)}
    return said


def _switches(shape: ModelShape) -> Iterator[str]:
    yield from ("--swiglu",) if shape.mlp_gated else ()
    yield from () if shape.tied else ("--untie-embeddings-and-output-weights",)
    yield from () if shape.o_bias else ("--disable-bias-linear",)
    yield from ("--add-qkv-bias",) if shape.qkv_bias and not shape.o_bias else ()
    yield from ("--qk-layernorm",) if shape.qk_norm or shape.mla is not None else ()
    yield "--group-query-attention" if shape.mla is None else "--multi-latent-attention"
    yield from ("--moe-shared-expert-gate",) if shape.moe is not None and shape.moe.shared_gate else ()


def _is_written(shape: ModelShape) -> bool:
    """Whether Megatron-LM's arguments can say the shape: one kind of layer, biases everywhere or nowhere but at queries."""
    same_biases = shape.mlp_bias == shape.o_bias and (shape.qkv_bias or not shape.o_bias) and shape.k_bias
    plain = shape.window is None and shape.full_heads is None and shape.ssm is None and not shape.lm_head_bias
    usual = (
        shape.norms_per_layer == 2
        and not shape.parallel_block
        and shape.final_norm
        and not shape.embed_norm
        and not shape.attn_sinks
    )
    norms = shape.qk_norm in ("", {"rmsnorm": "head", "layernorm": "head_ln"}.get(shape.norm))
    experts = shape.moe is None or (
        not shape.moe.router_bias and not shape.moe.expert_bias and not shape.moe.latent and not shape.mlp_bias
        and shape.moe.first_dense + shape.moe.layers == shape.layers
    )  # fmt: skip
    latent = shape.mla is None or not (
        shape.mla.index_heads or shape.mla.shared_kv or shape.mla.o_rank or shape.qkv_bias
    )
    width = not shape.v_dim and not shape.emb_dim and not shape.attn_gate and not shape.layer_extra_parameters
    act = shape.mlp_act == ("silu" if shape.mlp_gated else "gelu")
    known = shape.norm in NORMS and shape.pos in POSITIONS and not shape.extra_parameters and act
    return (
        shape.kind == "decoder" and same_biases and plain and usual and norms and experts and latent and width and known
    )


SHAPES = [shape for shape in map(shape_from_row, rows("models")) if shape.formula == "stack" and _is_written(shape)]


def test_most_decoders_are_written() -> None:
    """A test of nothing would pass: at least sixty of the catalogue's models are among those compared, with experts and with latents."""
    assert len(SHAPES) >= 60
    assert sum(shape.moe is not None for shape in SHAPES) >= 10
    assert sum(shape.mla is not None for shape in SHAPES) >= 3


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_arguments_say_the_model(shape: ModelShape) -> None:
    """Every fact that parts of strategist read is the catalogue's, and so are the weights."""
    found = shape_from_arguments(written(shape), "PLAN")
    assert count(found).total == count(shape).total
    told = [name for name in names_of(ModelShape) if name not in SAID_OTHERWISE]
    differing = {name: (getattr(found, name), getattr(shape, name)) for name in told}
    assert {name: pair for name, pair in differing.items() if pair[0] != pair[1]} == {}


GPT = {"--num-layers": "12", "--hidden-size": "768", "--num-attention-heads": "12", "--max-position-embeddings": "1024"}


def test_what_is_absent_is_what_the_parser_takes() -> None:
    """Learned positions, biases, layer norms, a plain activation four times as wide, tied ends: GPT-2."""
    found = shape_from_arguments(GPT | {"--tokenizer-type": "GPT2BPETokenizer"}, "PLAN")
    gpt2 = next(row for row in rows("models") if row["name"] == "gpt2")
    assert count(found).total == count(shape_from_row(gpt2)).total == 124_439_808


def test_a_gated_part_is_two_thirds_as_wide() -> None:
    """Of 4 x 768 two thirds are 2,048 and of 4 x 12,288 32,768, whole multiples of 64; of 4 x 4,096 they are 10,922, and 10,880 is one."""
    widths = {
        hidden: shape_from_arguments(
            GPT | {"--hidden-size": str(hidden), "--num-attention-heads": "32", "--swiglu": "", "--vocab-size": "100"},
            "PLAN",
        ).ffn_hidden
        for hidden in (768, 4096, 12288)
    }
    assert widths == {768: 2048, 4096: 10880, 12288: 32768}


def test_a_vocabulary_is_that_of_the_tokenizer() -> None:
    """One that is named after a model of the catalogue, where no argument says how many entries it has."""
    tokenizer = {"--tokenizer-type": "HuggingFaceTokenizer", "--tokenizer-model": "meta-llama/Llama-3.1-8B"}
    assert shape_from_arguments(GPT | tokenizer, "PLAN").vocab == 128_256


@pytest.mark.parametrize(
    ("more", "code", "word"),
    [
        ({}, "MISSING", "--vocab-size"),
        ({"--vocab-size": "100", "--hidden-size": "$HIDDEN"}, "TYPE", "--hidden-size"),
        ({"--vocab-size": "100", "--mtp-num-layers": "1"}, "CHOICE", "--mtp-num-layers"),
        ({"--vocab-size": "100", "--normalization": "BatchNorm"}, "CHOICE", "--normalization"),
        ({"--vocab-size": "100", "--num-attention-heads": "7"}, "DIVISIBILITY", "--hidden-size"),
        (
            {"--vocab-size": "100", "--num-experts": "8", "--moe-layer-freq": "[0]*2+[1]*9"},
            "CHOICE",
            "--moe-layer-freq",
        ),
        ({"--vocab-size": "100", "--num-experts": "8", "--moe-layer-freq": "exit(1)"}, "CHOICE", "--moe-layer-freq"),
        ({"--vocab-size": "100", "--num-experts": "8", "--moe-router-topk": "9"}, "RANGE", "--moe-router-topk"),
        (
            {"--vocab-size": "100", "--num-layers": "4096", "--hidden-size": "960000", "--num-experts": "65536"},
            "TOO_LARGE",
            "PLAN",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_read_is_said(more: dict[str, str], code: str, word: str) -> None:
    """The error names the argument."""
    with pytest.raises(InputError) as caught:
        shape_from_arguments(GPT | more, "PLAN")
    assert caught.value.code == code
    assert word in f"{caught.value.message} {caught.value.flag}"


@pytest.mark.parametrize(
    ("pattern", "experts"),
    [
        ("1", 12),
        ("2", 6),
        ("3", 4),
        ("[0]*1+[1]*11", 11),
        ("([0]*3+[1]*9)*1", 9),
        ("[0,1]*6", 6),
        ("([1, 0, 0]*4)", 4),
        ("([1]*3+[0]*1)*3", 9),
    ],
)
def test_a_pattern_places_experts(pattern: str, experts: int) -> None:
    """A number counts from the first layer; lists are written in Python's words."""
    found = shape_from_arguments(
        GPT | {"--vocab-size": "100", "--num-experts": "8", "--moe-layer-freq": pattern}, "PLAN"
    )
    assert found.moe is not None
    assert found.moe.layers == experts


NAMES = sorted(
    {
        *GPT,
        *written(SHAPES[0]),
        "--num-experts",
        "--moe-layer-freq",
        "--kv-channels",
        "--multi-latent-attention",
        "--swiglu",
    }
)
WORDS = st.sampled_from(["", "0", "1", "8", "768", "100", "9" * 30, "-1", "[1]*9999999", "rope", "RMSNorm"]) | st.text(
    max_size=6
)


@examples(200)
@given(st.dictionaries(st.sampled_from(NAMES), WORDS))
def test_any_arguments_are_a_model_or_refused(said: dict[str, str]) -> None:
    """Whatever stands behind an argument."""
    try:
        found = shape_from_arguments(GPT | said, "PLAN")
    except InputError as error:
        assert error.message
        return
    assert count(found).total > 0
