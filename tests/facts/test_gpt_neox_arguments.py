"""Models read from GPT-NeoX's arguments are those of the catalogue that were trained with them."""

from __future__ import annotations

from typing import Any

import pytest

from strategist.catalog import rows
from strategist.errors import InputError
from strategist.facts.gpt_neox_arguments import shape_from_neox
from strategist.facts.model_rows import shape_from_row
from strategist.facts.parameters import count
from strategist.records import names_of

TRAINED = [row for row in rows("models") if row.get("model_type") == "gpt_neox"]
RANKS = {50304: 1, 50432: 2, 50688: 4}
"""Ranks of the model that its published vocabulary is padded for: 50,277 entries, in multiples of 128 for each."""
SAID_OTHERWISE = {"name", "family", "source", "basis", "notes", "parameters_stated", "extra", "act_form", "model_type"}
"""Fields that only the catalogue has, or words for them: GPT-NeoX has a kernel for its GELU, whatever a published configuration calls it."""
LLAMA: dict[str, Any] = {
    "num_layers": 32, "hidden_size": 4096, "intermediate_size": 32768, "num_attention_heads": 32, "max_position_embeddings": 2048,
    "pos_emb": "rotary", "norm": "rmsnorm", "activation": "swiglu", "mlp_multiple_of": 256, "no_weight_tying": True,
    "use_bias_in_mlp": False, "use_bias_in_attn_linear": False,
}  # fmt: skip


@pytest.mark.parametrize("name", [row["name"] for row in TRAINED])
def test_the_models_that_it_trained_are_read_from_its_arguments(name: str) -> None:
    """Field by field, with a vocabulary that is padded for the ranks that share it, to the last parameter."""
    shape = shape_from_row(next(row for row in TRAINED if row["name"] == name))
    said = {
        "num_layers": shape.layers, "hidden_size": shape.hidden, "num_attention_heads": shape.heads, "norm": "layernorm",
        "max_position_embeddings": shape.max_seq, "pos_emb": "rotary", "no_weight_tying": True, "gpt_j_residual": True,
        "model_parallel_size": RANKS[shape.vocab], "tokenizer_type": "HFTokenizer", "vocab_file": "/data/20B_tokenizer.json",
    }  # fmt: skip
    found = shape_from_neox(said, "FILE")
    assert {field for field in names_of(shape) if getattr(shape, field) != getattr(found, field)} <= SAID_OTHERWISE
    assert count(found).total == count(shape).total


def test_a_gated_part_is_a_third_of_what_is_said() -> None:
    """configs/llama/7B.yml says 32,768 and means Llama's 11,008; everything but the vocabulary is Llama's."""
    found = shape_from_neox(LLAMA, "FILE")
    assert (found.ffn_hidden, found.vocab) == (11008, 50304)
    of_llama = count(shape_from_row(next(row for row in rows("models") if row["name"] == "llama-2-7b"))).total
    assert count(found).total - 2 * 50304 * 4096 == of_llama - 2 * 32000 * 4096


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_num_experts", 8),
        ("use_qk_layernorm", True),
        ("norm", "scalenorm"),
        ("pos_emb", "rpe"),
        ("activation", "mish"),
        ("attention_config", [[["global", "mamba"], 16]]),
        ("tokenizer_type", "SPMTokenizer"),
        ("train_impl", "dpo"),
    ],
)
def test_what_is_not_read_is_refused_by_name(name: str, value: Any) -> None:
    """Nothing is left out."""
    with pytest.raises(InputError) as refusal:
        shape_from_neox({**LLAMA, name: value}, "FILE")
    assert refusal.value.flag == f"arguments.{name}"
