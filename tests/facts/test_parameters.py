"""Parameter counts: one source of truth, compared with the counts of real model code and with published totals."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from strategist.catalog import rows
from strategist.facts.layers import build_layer
from strategist.facts.model import ModelShape, Moe, layer_counts, layer_sequence
from strategist.facts.model_rows import shape_from_row
from strategist.facts.parameters import count, outer_parameters
from tests.examples import examples

FLAN = {"flan-t5-base", "flan-t5-large", "flan-t5-xl", "flan-t5-xxl"}


@cache
def catalogue() -> dict[str, tuple[dict[str, Any], ModelShape]]:
    return {row["name"]: (row, shape_from_row(row)) for row in rows("models")}


def test_every_model_states_its_source() -> None:
    """Every catalogue row of a model, a nickname, an anchor or a class default names where it comes from."""
    for table in ("models", "size_names", "size_ladder", "config_defaults"):
        assert [row for row in rows(table) if not row["source"].strip()] == []


def test_formula_equals_the_count_of_real_model_code() -> None:
    """Our count equals that of the real model class for every row that has one, the four FLAN-T5 rows excepted."""
    differing = {name for name, (row, shape) in catalogue().items() if "params_hf_code" in row and count(shape).total != row["params_hf_code"]}  # fmt: skip
    assert differing == FLAN


def test_flan_rows_say_why_they_differ() -> None:
    """The FLAN-T5 rows count the output head that their checkpoints store apart and transformers ties."""
    for name in FLAN:
        row, shape = catalogue()[name]
        assert "untied" in row["extra_note"]
        assert count(shape).total - row["params_hf_code"] == shape.vocab * shape.hidden


def test_counts_equal_the_rows() -> None:
    """Total, active and embedding parameters equal what each row states of them."""
    ours = {name: count(shape) for name, (_, shape) in catalogue().items()}
    stated = {name: (row["params_total"], row.get("params_active", ours[name].active), row.get("params_embedding", ours[name].embedding)) for name, (row, _) in catalogue().items()}  # fmt: skip
    assert {name: (c.total, c.active, c.embedding) for name, c in ours.items()} == stated


def test_few_rows_lack_a_formula() -> None:
    """Only models that are no stack of common layers rest on a stated total, and they say so."""
    stated = {name for name, (_, shape) in catalogue().items() if shape.parameters_stated is not None}
    assert stated == {"deepseek-v4-flash", "deepseek-v4-pro", "sdxl-unet", "sd1.5-unet", "sd3-medium", "sd3.5-large"}


def test_total_is_the_sum_of_layers_and_outer_parts() -> None:
    """For every model of the catalogue the total is the sum over its layers plus the parts outside them."""
    for _, shape in catalogue().values():
        layers = sum(build_layer(shape, kind).parameters for kind in layer_sequence(shape))
        outer = outer_parameters(shape)
        assert count(shape).total == layers + outer.total
        assert outer.total == outer.before + outer.after


def test_no_layer_has_negative_weights() -> None:
    """What is spread over the layers because no field explains it never makes a matrix or a vector negative."""
    for _, shape in catalogue().values():
        for kind in layer_counts(shape):
            layer = build_layer(shape, kind)
            assert min([m.weights for m in layer.matrices] + [v.size for v in layer.vectors], default=0) >= 0


def documented_extras(row: dict[str, Any], shape: ModelShape) -> int:
    """What `hub_note` says the hub's total has beyond the language model, as far as the row gives its size."""
    note = row.get("hub_note", "")
    extras = shape.other_tower_parameters if "vision tower" in note else 0
    extras += row["mtp_params"] if "MTP module" in note else 0
    extras += shape.vocab * shape.hidden if "lm_head stored twice" in note else 0
    return extras + (shape.layers * shape.head_dim // 2 if "rotary buffers" in note else 0)


def test_counts_agree_with_the_hub() -> None:
    """Count plus documented extras is within 0.007 % of the safetensors total wherever one was read."""
    gaps = {name: count(shape).total + documented_extras(row, shape) - row["hub_params"] for name, (row, shape) in catalogue().items() if "hub_params" in row}  # fmt: skip
    assert len(gaps) == 45
    assert {name: gap for name, gap in gaps.items() if abs(gap) > 0.00007 * catalogue()[name][0]["hub_params"]} == {}
    assert sum(gap == 0 for gap in gaps.values()) >= 40


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    head_dim, kv, groups = draw(st.sampled_from((8, 64, 128))), draw(st.integers(1, 8)), draw(st.integers(1, 4))
    layers = draw(st.integers(1, 12))
    experts = draw(st.integers(2, 16))
    moe = Moe(experts=experts, top_k=draw(st.integers(1, experts)), ffn=draw(st.integers(8, 512)), layers=draw(st.integers(1, layers)))  # fmt: skip
    return ModelShape(
        name="drawn",
        family="llama",
        kind="decoder",
        layers=layers,
        hidden=draw(st.integers(8, 512)),
        ffn_hidden=draw(st.integers(8, 1024)),
        heads=kv * groups,
        kv_heads=kv,
        head_dim=head_dim,
        vocab=draw(st.integers(8, 4096)),
        tied=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        mlp_gated=draw(st.booleans()),
        moe=draw(st.sampled_from((None, moe))),
    )


@examples(80)
@given(shapes())
def test_untying_adds_exactly_one_table(shape: ModelShape) -> None:
    """Untying the output head adds vocabulary times width and changes nothing else."""
    tied, untied = count(replace(shape, tied=True)), count(replace(shape, tied=False))
    assert untied.total - tied.total == untied.active - tied.active == shape.vocab * shape.hidden


@examples(80)
@given(shapes())
def test_active_parameters_never_exceed_the_total(shape: ModelShape) -> None:
    """A token meets at most every weight, and all of them exactly when it uses every expert."""
    counted = count(shape)
    assert counted.active <= counted.total
    if shape.moe is not None:
        everything = replace(shape, moe=replace(shape.moe, top_k=shape.moe.experts))
        assert count(everything).active == count(everything).total == counted.total


@examples(80)
@given(shapes())
def test_dense_llama_count_is_the_textbook_formula(shape: ModelShape) -> None:
    """A dense decoder's count equals the formula written out by hand (embedding, four attention maps, three of the MLP)."""
    s = replace(shape, moe=None, qkv_bias=False, mlp_gated=True)
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    layer = 2 * s.hidden * q + 2 * s.hidden * kv + 3 * s.hidden * s.ffn_hidden + 2 * s.hidden
    assert count(s).total == s.layers * layer + s.hidden + s.vocab * s.hidden * (1 if s.tied else 2)
