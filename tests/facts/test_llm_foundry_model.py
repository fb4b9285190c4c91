"""Models read from llm-foundry's configurations are those that it published, and by hand what it builds unasked."""

from __future__ import annotations

from typing import Any

import pytest

from strategist.catalog import rows
from strategist.errors import InputError
from strategist.facts.llm_foundry_model import shape_from_mpt
from strategist.facts.model_rows import shape_from_row
from strategist.facts.parameters import count
from strategist.records import names_of

PUBLISHED = [row for row in rows("models") if row.get("model_type") == "mpt"]
SAID_OTHERWISE = {"name", "family", "source", "basis", "notes", "parameters_stated", "extra", "model_type"}
SMALL: dict[str, Any] = {"name": "mpt_causal_lm", "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "vocab_size": 1000}  # fmt: skip


def parameters(**changes: Any) -> int:
    """Those of a small model."""
    return count(shape_from_mpt({**SMALL, **changes}, "FILE", "model")).total


@pytest.mark.parametrize("name", [row["name"] for row in PUBLISHED])
def test_published_models_are_read_from_its_words(name: str) -> None:
    """Without biases and with ALiBi, as their own configurations say."""
    shape = shape_from_row(next(row for row in PUBLISHED if row["name"] == name))
    said = {
        "d_model": shape.hidden, "n_heads": shape.heads, "n_layers": shape.layers, "vocab_size": shape.vocab, "no_bias": True,
        "max_seq_len": shape.max_seq, "attn_config": {"alibi": True},
    }  # fmt: skip
    found = shape_from_mpt(said, "FILE", "model")
    assert {field for field in names_of(shape) if getattr(shape, field) != getattr(found, field)} <= SAID_OTHERWISE
    assert count(found).total == count(shape).total


def test_what_it_builds_unasked_has_biases_and_learned_positions() -> None:
    """Two matrices of four widths and four of one, with a bias for each column, two norms a layer, one at the end, and tied ends."""
    layer = 12 * 64 * 64 + (4 + 1) * 64 + (3 + 1) * 64 + 2 * 2 * 64
    assert parameters() == 1000 * 64 + 128 * 64 + 2 * layer + 2 * 64


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"tie_word_embeddings": False}, 1000 * 64),
        ({"attn_config": {"rope": True}}, -128 * 64),
        ({"learned_pos_emb": False}, -128 * 64),
        ({"expansion_ratio": 2}, -2 * (2 * 2 * 64 * 64 + 2 * 64)),
        ({"ffn_config": {"ffn_hidden_size": 128}}, -2 * (2 * 2 * 64 * 64 + 2 * 64)),
        ({"ffn_config": {"ffn_type": "mptglu"}}, 2 * (4 * 64 * 64 + 4 * 64)),
        ({"attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 2}}, -2 * (64 * 64 + 64)),
        ({"attn_config": {"attn_type": "multiquery_attention"}}, -2 * 2 * 3 * 16 * (64 + 1)),
        ({"no_bias": True}, -2 * (9 * 64 + 2 * 64) - 64),
        ({"no_bias": True, "attention_bias": True}, -2 * (6 * 64 + 2 * 64) - 64),
        ({"norm_type": "rmsnorm"}, -5 * 64),
    ],
)
def test_choices_add_what_they_add(changes: dict[str, Any], more: int) -> None:
    """Each against the model without it, to the last parameter."""
    assert parameters(**changes) - parameters() == more


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"ffn_config": {"ffn_type": "mb_dmoe"}}, "model.ffn_config.ffn_type"),
        ({"attn_config": {"qk_ln": True}}, "model.attn_config.qk_ln"),
        ({"block_overrides": {"order": []}}, "model.block_overrides"),
        ({"expansion_ratio": 1.001}, "model.expansion_ratio"),
        ({"norm_type": "other"}, "model.norm_type"),
    ],
)
def test_what_is_not_read_is_refused_by_name(changes: dict[str, Any], place: str) -> None:
    """Nothing is left out."""
    with pytest.raises(InputError) as refusal:
        parameters(**changes)
    assert refusal.value.flag == place
