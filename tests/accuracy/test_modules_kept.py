"""What the modules of Transformers keep of one layer, seen by torch, is what the memory model lists for who runs them operation by operation."""

from __future__ import annotations

from typing import Any

import pytest

from strategist.facts.act_forms import find_act_form
from strategist.facts.keeping import find_keeping
from strategist.facts.model import layer_sequence
from strategist.facts.model_config import shape_from_config
from strategist.facts.module_forms import find_module_form, kept_by_modules
from strategist.memory.saved import Habits, saved_tensors

pytestmark = pytest.mark.slow

SEQUENCES, TOKENS, LAYERS = 3, 56, 3
BYTES = {"float32": 4, "bfloat16": 2, "autocast": 2}
ASKED = {"float32": "wide", "bfloat16": "low", "autocast": "mixed"}
BASE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128,
    "max_position_embeddings": 64, "pad_token_id": 0, "head_dim": 32, "num_hidden_layers": LAYERS,
}  # fmt: skip
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 48}
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CHANGES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"layer_types": ["full_attention"] * (LAYERS + 1)},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "afmoe": {
        "num_dense_layers": 9,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "sliding_window": 64,
    },
    "biogpt": DRY,
    "phi3": {"resid_pdrop": 0.0},
    "phi": {"resid_pdrop": 0.0, "hidden_act": "gelu_new"},
    "gpt_neox": {"hidden_act": "gelu"},
    "stablelm": {"use_parallel_residual": True},
    "nemotron": {"hidden_act": "relu2"},
    "deepseek_v3": {
        **LATENT,
        "first_k_dense_replace": LAYERS + 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    "minicpm3": LATENT,
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "cohere2": {"layer_types": ["full_attention"] * (LAYERS + 1)},
    "youtu": LATENT,
}
"""What a type needs beside the sizes, and dropout that is off."""
WITHOUT = ("head_dim",)
"""Keys that latent attention has widths of its own for."""
NO_ROW = ("exchanged", "regathered", "summed")


def values_of(model_type: str, layers: int) -> dict[str, Any]:
    """A small configuration of so many layers."""
    values = {**BASE, **CHANGES.get(model_type, {}), "num_hidden_layers": layers}
    if "layer_types" in values:
        values["layer_types"] = values["layer_types"][:layers]
    return {key: value for key, value in values.items() if key not in WITHOUT or "kv_lora_rank" not in values}


def seen(model_type: str, layers: int, numbers: str) -> float:
    """Bytes per token that torch keeps from forward to backward of a model, each storage once, without weights and casts of weights."""
    import torch
    import transformers

    settings = transformers.CONFIG_MAPPING[model_type](**values_of(model_type, layers))
    model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa")
    model = model.train().to(torch.bfloat16 if numbers == "bfloat16" else torch.float32)
    sides = {(*weight.shape,)[::turn] for weight in model.parameters() for turn in (1, -1)}
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    held: dict[int, Any] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own and (*tensor.shape,) not in sides:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    words = torch.randint(5, 127, (SEQUENCES, TOKENS))
    cast = torch.autocast("cpu", torch.bfloat16, enabled=numbers == "autocast")
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), cast:
        model(input_ids=words, use_cache=False).logits.sum()
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values()) / (SEQUENCES * TOKENS)


def listed(model_type: str, numbers: str) -> float:
    """Bytes per token of the rows of the memory model for one layer."""
    shape = shape_from_config({**values_of(model_type, LAYERS), "model_type": model_type})
    form = find_act_form("transformers", shape.act_form or shape.mlp_act, ASKED[numbers])
    modules = find_module_form("transformers", shape.model_type)
    keeping = kept_by_modules(find_keeping("eager"), modules, ASKED[numbers], is_fused=True)
    habits = Habits(keeping, act_bytes=0.0 if form is None else form.kept_bytes, is_cast=numbers == "autocast")
    rows = saved_tensors(shape, layer_sequence(shape)[0], habits)
    kept = (row for row in rows if "none" in row.policies and not row.cut_only and row.cut not in NO_ROW and row.name != "masks")  # fmt: skip
    return sum(row.width * (1 if row.is_float8 else 4 if row.is_float32 else BYTES[numbers]) for row in kept)


@pytest.mark.parametrize(
    ("model_type", "numbers"),
    [
        ("llama", "float32"), ("llama", "bfloat16"), ("qwen3", "float32"), ("qwen3", "bfloat16"), ("olmo2", "float32"),
        ("gemma3_text", "float32"), ("nanochat", "bfloat16"), ("apertus", "float32"), ("apertus", "bfloat16"), ("qwen3_moe", "float32"),
        ("qwen3_moe", "bfloat16"), ("afmoe", "float32"), ("biogpt", "float32"), ("biogpt", "bfloat16"), ("youtu", "float32"), ("minicpm3", "float32"),
        ("phi3", "bfloat16"), ("phi", "float32"), ("gpt_neox", "float32"), ("stablelm", "bfloat16"), ("nemotron", "float32"), ("glm4", "float32"),
        ("persimmon", "float32"), ("gemma", "bfloat16"), ("gemma3_text", "bfloat16"), ("olmo", "bfloat16"), ("olmo2", "bfloat16"), ("afmoe", "bfloat16"),
        ("cohere", "float32"), ("cohere2", "bfloat16"), ("deepseek_v3", "bfloat16"), ("minimax_m2", "float32"),
        ("llama", "autocast"), ("qwen3", "autocast"), ("phi3", "autocast"), ("gpt_neox", "autocast"), ("stablelm", "autocast"), ("gemma", "autocast"),
    ],
)  # fmt: skip
def test_a_layer_keeps_what_torch_keeps_of_it(model_type: str, numbers: str) -> None:
    """To within a hundredth: norms on both sides of a part and on queries and keys, gates on attention, latents, activations of several
    operations, parts that stand side by side, values that are a view of more. The difference of two depths is one layer."""
    more = seen(model_type, LAYERS + 1, numbers) - seen(model_type, LAYERS, numbers)
    assert listed(model_type, numbers) == pytest.approx(more, rel=0.01)
