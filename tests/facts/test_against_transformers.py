"""Our reader beside transformers' own model classes, built without weights, on small random configurations.

transformers is an independent oracle here and no dependency of the package.
"""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import pytest

from strategist.catalog import rows
from strategist.errors import InputError
from strategist.facts.families.vision_language import WRAPPERS
from strategist.facts.layers import build_layer
from strategist.facts.model import layer_sequence
from strategist.facts.model_config import shape_from_config
from strategist.facts.parameters import count

pytestmark = pytest.mark.slow

BASE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 128, "max_position_embeddings": 64, "pad_token_id": 0}  # fmt: skip
EXPERTS = {"num_experts": [4, 8], "num_experts_per_tok": [2], "moe_intermediate_size": [48], "decoder_sparse_step": [1, 2, 3], "mlp_only_layers": [[], [0], [1, 3]]}  # fmt: skip
LATENT = {"kv_lora_rank": [32], "q_lora_rank": [None, 24], "qk_nope_head_dim": [16], "qk_rope_head_dim": [8], "v_head_dim": [16], "n_routed_experts": [8], "num_experts_per_tok": [2], "n_shared_experts": [1, 2], "moe_intermediate_size": [48], "first_k_dense_replace": [0, 1, 2], "num_key_value_heads": [8], "n_group": [1], "topk_group": [1]}  # fmt: skip
LINEAR = {"linear_conv_kernel_dim": [4], "linear_key_head_dim": [8], "linear_value_head_dim": [16], "linear_num_key_heads": [4], "linear_num_value_heads": [8], "head_dim": [16], "full_attention_interval": [2, 4]}  # fmt: skip
SHARED = {"shared_expert_intermediate_size": [80]}
BIAS = {"attention_bias": [True, False]}
FEW = {"num_local_experts": [4], "num_experts_per_tok": [2], "head_dim": [16]}
FEW_WIDE = {"num_local_experts": [4], "num_experts_per_tok": [2]}
NOT_LLAMAS: dict[str, list[Any]] = {
    key: []
    for key in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "max_position_embeddings",
    )
}
DENSE_LATENT = {
    key: LATENT[key]
    for key in (
        "kv_lora_rank",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "num_key_value_heads",
    )
}

VARIANTS: dict[str, dict[str, list[Any]]] = {
    "llama": BIAS | {"mlp_bias": [True, False], "head_dim": [8, 16]},
    "mistral": {"sliding_window": [None, 32], "head_dim": [8, 16]},
    "granite": BIAS | {"mlp_bias": [True, False]},
    "olmo": BIAS,
    "olmo2": BIAS,
    "olmo3": BIAS | {"sliding_window": [16]},
    "exaone4": {"sliding_window": [16], "sliding_window_pattern": [2, 4], "head_dim": [8]},
    "seed_oss": BIAS | {"attention_out_bias": [True, False], "mlp_bias": [True, False], "head_dim": [8, 16]},
    "ernie4_5": {"use_bias": [True, False], "head_dim": [8, 16]},
    "hunyuan_v1_dense": BIAS | {"head_dim": [8, 16]},
    "helium": BIAS | {"mlp_bias": [True, False], "head_dim": [8]},
    "arcee": BIAS | {"mlp_bias": [True, False]},
    "stablelm": {"use_qkv_bias": [True, False], "qk_layernorm": [True, False], "use_parallel_residual": [True, False]},
    "ministral": {"sliding_window": [None, 16], "head_dim": [8, 16]},
    "ministral3": {"sliding_window": [None, 16], "head_dim": [8, 16]},
    "glm4": BIAS | {"head_dim": [8, 16]},
    "cohere2": BIAS | {"sliding_window": [16]},
    "gpt_bigcode": {"n_embd": [64], "n_layer": [4], "n_head": [8], "n_inner": [None, 96], "n_positions": [64], "multi_query": [True, False]} | NOT_LLAMAS,
    "cohere": BIAS | {"use_qk_norm": [True, False]},
    "nemotron": BIAS | {"mlp_bias": [True, False]},
    "starcoder2": {"use_bias": [True, False]},
    "phi": {"qk_layernorm": [True, False]},
    "phi3": {},
    "glm": BIAS | {"head_dim": [8, 16]},
    "smollm3": BIAS | {"mlp_bias": [True, False]},
    "gpt_neox": BIAS,
    "qwen2": {},
    "qwen3": BIAS | {"head_dim": [8, 16]},
    "qwen2_moe": EXPERTS | SHARED | {"qkv_bias": [True, False]},
    "qwen3_moe": EXPERTS | BIAS | {"head_dim": [16]},
    "gemma": BIAS | {"head_dim": [16]},
    "gemma2": BIAS | {"head_dim": [16]},
    "gemma3_text": BIAS | {"head_dim": [16]},
    "gemma4_text": {"head_dim": [16], "global_head_dim": [32], "hidden_size_per_layer_input": [0], "attention_k_eq_v": [True, False], "num_global_key_value_heads": [2], "enable_moe_block": [True, False], "num_experts": [4], "top_k_experts": [2], "moe_intermediate_size": [48]},
    "mixtral": FEW,
    "phimoe": {"num_local_experts": [4], "num_experts_per_tok": [2], "lm_head_bias": [True, False]} | BIAS,
    "olmoe": {"num_experts": [4], "num_experts_per_tok": [2]} | BIAS,
    "flex_olmo": {"num_experts": [4], "num_experts_per_tok": [2]} | BIAS,
    "granitemoe": {"num_local_experts": [4], "num_experts_per_tok": [2]} | BIAS,
    "granitemoeshared": {"num_local_experts": [4], "num_experts_per_tok": [2], "shared_intermediate_size": [0, 80]} | BIAS,
    "solar_open": {"n_routed_experts": [4], "num_experts_per_tok": [2], "n_shared_experts": [1, 2], "moe_intermediate_size": [48], "head_dim": [16]} | BIAS,
    "exaone_moe": {"num_experts": [4], "num_experts_per_tok": [2], "num_shared_experts": [1, 2], "moe_intermediate_size": [48], "first_k_dense_replace": [0, 1, 2], "sliding_window": [16], "head_dim": [8]},
    "ernie4_5_moe": {"moe_num_experts": [4], "moe_k": [2], "moe_num_shared_experts": [0, 2], "moe_intermediate_size": [48], "moe_layer_start_index": [0, 1], "moe_layer_end_index": [-1, 2], "moe_layer_interval": [1, 2]},
    "hunyuan_v1_moe": {"num_experts": [4], "moe_topk": [2, 3], "head_dim": [16]} | BIAS,
    "minimax_m2": FEW,
    "gpt_oss": FEW | BIAS,
    "llama4_text": FEW | BIAS | {"intermediate_size_mlp": [112], "interleave_moe_layer_step": [1, 2, 3], "use_qk_norm": [True]},
    "mimo_v2_flash": {"head_dim": [16], "v_head_dim": [8], "n_routed_experts": [8], "num_experts_per_tok": [2], "moe_intermediate_size": [48], "num_key_value_heads": [2]},
    "deepseek_v2": LATENT | BIAS,
    "deepseek_v3": LATENT | BIAS,
    "kimi_k2": LATENT | {"hidden_act": ["silu"]},
    "dots1": BIAS | {"n_routed_experts": [8], "num_experts_per_tok": [2], "n_shared_experts": [1, 2], "moe_intermediate_size": [48], "first_k_dense_replace": [0, 2], "sliding_window": [None, 16], "max_window_layers": [2, 62]},
    "glm4_moe_lite": LATENT | BIAS | {"first_k_dense_replace": [1]},
    "deepseek_v32": LATENT | {"q_lora_rank": [24], "index_n_heads": [4], "index_head_dim": [16]},
    "glm_moe_dsa": LATENT | {"q_lora_rank": [24], "index_n_heads": [4], "index_head_dim": [16]},
    "glm4_moe": BIAS | {"n_routed_experts": [8], "num_experts_per_tok": [2], "n_shared_experts": [1], "moe_intermediate_size": [48], "first_k_dense_replace": [0, 2], "use_qk_norm": [True, False], "head_dim": [16]},
    "jamba": {"num_hidden_layers": [8], "num_experts": [1, 4], "num_experts_per_tok": [1], "attn_layer_period": [4], "attn_layer_offset": [1, 2], "mamba_d_state": [8], "mamba_dt_rank": ["auto", 6], "use_mamba_kernels": [False], "mamba_d_conv": [4], "mamba_expand": [2], "expert_layer_period": [2], "expert_layer_offset": [1]},
    "nemotron_h": {"num_hidden_layers": [], "hybrid_override_pattern": ["M-M*-ME", "M*M-"], "head_dim": [16], "ssm_state_size": [8], "mamba_num_heads": [8], "mamba_head_dim": [16], "n_groups": [2], "conv_kernel": [4], "n_routed_experts": [4], "num_experts_per_tok": [2], "moe_intermediate_size": [48], "moe_shared_expert_intermediate_size": [80], "moe_latent_size": [None, 32]},
    "granitemoehybrid": {"num_local_experts": [0, 4], "num_experts_per_tok": [2], "shared_intermediate_size": [80], "layer_types": [["mamba", "attention", "mamba", "mamba"], ["attention"] * 4, ["mamba"] * 4], "num_hidden_layers": [4], "mamba_n_heads": [8], "mamba_d_state": [8], "mamba_n_groups": [1, 2], "mamba_d_conv": [4], "mamba_expand": [2], "position_embedding_type": [None, "rope"]} | BIAS,
    "bamba": {"num_hidden_layers": [4], "attn_layer_indices": [[1], [0, 3]], "mamba_n_heads": [8], "mamba_d_state": [8], "mamba_n_groups": [1, 2], "mamba_d_conv": [4], "mamba_expand": [2]} | BIAS | {"mlp_bias": [True, False]},
    "lfm2": {"num_hidden_layers": [4], "layer_types": [["conv", "full_attention", "conv", "conv"], ["conv", "conv", "full_attention", "full_attention"]], "block_auto_adjust_ff_dim": [True, False], "block_multiple_of": [16], "conv_L_cache": [3, 4]},
    "lfm2_moe": {"num_hidden_layers": [4], "layer_types": [["conv", "full_attention", "conv", "conv"]], "num_experts": [4], "num_experts_per_tok": [2], "moe_intermediate_size": [48], "num_dense_layers": [1, 2], "conv_L_cache": [3]},
    "minimax": {"num_hidden_layers": [4], "layer_types": [["full_attention", "linear_attention"] * 2, ["linear_attention"] * 3 + ["full_attention"]], "num_local_experts": [4], "num_experts_per_tok": [2], "head_dim": [8, 16]},
    "qwen3_next": EXPERTS | SHARED | LINEAR | BIAS,
    "qwen3_5_text": LINEAR | BIAS,
    "mamba": {"num_attention_heads": [], "intermediate_size": [], "state_size": [8], "time_step_rank": ["auto", 6]},
    "cwm": {"sliding_window": [16], "head_dim": [8, 16], "mlp_bias": [True, False]},
    "hyperclovax": BIAS | {"mlp_bias": [True, False], "use_post_norm": [True, False], "head_dim": [None, 16]},
    "internlm3": {"attention_bias": [False], "mlp_bias": [False], "head_dim": [8, 16]},
    "iquestcoder": BIAS | {"mlp_bias": [True, False], "head_dim": [8, 16]},
    "jais2": BIAS | {"mlp_bias": [True, False], "head_dim": [8, 16]},
    "vaultgemma": BIAS | {"head_dim": [16], "sliding_window": [16]},
    "hy_v3": BIAS | {"num_experts": [4], "num_experts_per_tok": [2], "num_shared_experts": [1, 2], "moe_intermediate_size": [48], "head_dim": [16]},
    "mellum": BIAS | {"num_experts": [4], "num_experts_per_tok": [2], "moe_intermediate_size": [48], "head_dim": [16], "sliding_window": [16]},
    "falcon_mamba": {"num_attention_heads": [], "intermediate_size": [], "state_size": [8], "time_step_rank": ["auto", 6]},
    "codegen": {"n_embd": [64], "n_layer": [4], "n_head": [8], "n_inner": [None, 96], "n_positions": [64], "rotary_dim": [4]} | NOT_LLAMAS,
    "apertus": BIAS | {"hidden_act": ["xielu", "silu"]},
    "nanochat": BIAS | {"head_dim": [8, 16]},
    "granite_swa": BIAS | {"mlp_bias": [True, False], "sliding_window": [16]},
    "granitemoe_swa": FEW_WIDE | {"shared_intermediate_size": [0, 80], "sliding_window": [16]} | BIAS,
    "afmoe": {"num_experts": [4], "num_experts_per_tok": [2], "num_shared_experts": [1, 2], "moe_intermediate_size": [48], "num_dense_layers": [0, 1, 2], "head_dim": [16], "sliding_window": [16], "global_attn_every_n_layers": [2, 4]},
    "youtu": DENSE_LATENT | BIAS,
    "minicpm3": DENSE_LATENT | BIAS | {"v_head_dim": [None, 16], "mlp_bias": [True, False]},
    "gpt-sw3": {"n_embd": [64], "n_layer": [4], "n_head": [8], "n_inner": [None, 96], "n_positions": [64]} | NOT_LLAMAS,
    "openai-gpt": {"n_embd": [64], "n_layer": [4], "n_head": [8], "n_positions": [64], "afn": ["gelu", "relu", "swish"]} | NOT_LLAMAS,
    "persimmon": {"qk_layernorm": [True, False], "num_key_value_heads": []},
    "xglm": {"d_model": [64], "num_layers": [4], "attention_heads": [8], "ffn_dim": [96], "max_position_embeddings": [64]} | {key: [] for key in NOT_LLAMAS if key != "max_position_embeddings"},
    "biogpt": {"num_key_value_heads": [], "hidden_act": ["gelu", "relu"]},
    "olmo_hybrid": LINEAR | BIAS | {"full_attention_interval": [], "head_dim": [], "linear_num_key_heads": [None, 4], "linear_num_value_heads": [None, 8], "linear_key_head_dim": [None, 8], "linear_value_head_dim": [None, 16]},
    "kimi_linear": DENSE_LATENT | {"num_local_experts": [8], "num_experts_per_tok": [2], "n_shared_experts": [1, 2], "moe_intermediate_size": [48], "linear_num_heads": [4], "linear_head_dim": [8], "linear_conv_kernel_dim": [3, 4], "first_k_dense_replace": [1, 2], "n_group": [1], "topk_group": [1]},
    "mamba2": {"num_attention_heads": [], "state_size": [8], "num_heads": [8], "head_dim": [16], "n_groups": [2]},
    "opt": {"ffn_dim": [96], "word_embed_proj_dim": [64, 32], "do_layer_norm_before": [True, False], "enable_bias": [True, False], "layer_norm_elementwise_affine": [True, False]},
    "falcon": {"new_decoder_architecture": [True, False], "multi_query": [True, False], "parallel_attn": [True, False], "bias": [True, False], "alibi": [True, False]},
}  # fmt: skip

ENCODER = {key: value for key, value in BASE.items() if key != "num_key_value_heads"} | {
    "num_hidden_layers": 4,
    "tie_word_embeddings": True,
}
TWO_TOWERS = {"vocab_size": 128, "d_model": 64, "encoder_layers": 3, "decoder_layers": 4, "encoder_attention_heads": 8, "decoder_attention_heads": 8, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip
T5 = {"vocab_size": 128, "d_model": 64, "d_kv": 8, "d_ff": 96, "num_layers": 4, "num_heads": 8, "relative_attention_num_buckets": 16, "pad_token_id": 0, "n_positions": 512}  # fmt: skip
PATCHED = ENCODER | {"image_size": 32, "patch_size": 8, "num_labels": 5}
HEADS = ("AutoModel", "AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForPreTraining")
OTHERS: dict[str, tuple[tuple[str, ...], dict[str, Any], list[dict[str, Any]]]] = {
    "bert": (HEADS, ENCODER, [{"type_vocab_size": 0}, {"type_vocab_size": 3}]),
    "roberta": (HEADS[:3], ENCODER, [{}]),
    "camembert": (HEADS[:3], ENCODER, [{}]),
    "data2vec-text": (HEADS[:3], ENCODER, [{}]),
    "ernie": (HEADS, ENCODER, [{}, {"use_task_id": True}]),
    "megatron-bert": (HEADS, ENCODER, [{}]),
    "roberta-prelayernorm": (HEADS[:3], ENCODER, [{}]),
    "xlm-roberta-xl": (HEADS[:3], ENCODER, [{}]),
    "distilbert": (HEADS[:2], {"vocab_size": 128, "dim": 64, "hidden_dim": 96, "n_layers": 4, "n_heads": 8, "max_position_embeddings": 64}, [{}]),
    "electra": (HEADS, ENCODER | {"embedding_size": 64}, [{}, {"embedding_size": 32}]),
    "mpnet": (HEADS[:2], ENCODER, [{}, {"relative_attention_num_buckets": 16}]),
    "deberta-v2": (HEADS[:2], ENCODER, [
        {}, {"relative_attention": True, "position_buckets": 16, "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": "p2c|c2p", "position_biased_input": False, "max_relative_positions": -1},
        {"relative_attention": True, "pos_att_type": ["c2p"], "max_relative_positions": 24, "type_vocab_size": 2}, {"relative_attention": True, "pos_att_type": "p2c|c2p", "conv_kernel_size": 3, "conv_act": "gelu"},
    ]),
    "esm": (HEADS[:2], ENCODER | {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32}, [{"position_embedding_type": "rotary", "emb_layer_norm_before": False, "token_dropout": True}, {"emb_layer_norm_before": True}]),
    "nomic_bert": (HEADS[:2], ENCODER, [{}]),
    "gte": (HEADS[:2], ENCODER, [{}, {"type_vocab_size": 0}]),
    "eurobert": (("AutoModelForMaskedLM",), BASE | {"num_hidden_layers": 4}, [{"tie_word_embeddings": False}, {"attention_bias": True, "mlp_bias": True}]),
    "modernbert": (("AutoModelForMaskedLM",), ENCODER, [{}, {"decoder_bias": False}]),
    "modernbert-decoder": (("AutoModelForCausalLM",), ENCODER, [{}, {"decoder_bias": False, "global_attn_every_n_layers": 2}]),
    "vit": (("AutoModelForImageClassification",), PATCHED, [{}, {"qkv_bias": False}]),
    "vit_msn": (("AutoModelForImageClassification",), PATCHED, [{}]),
    "deit": (("DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"), PATCHED | {"pooler_output_size": 64, "pooler_act": "tanh"}, [{}]),
    "dinov2": (("AutoModelForImageClassification",), PATCHED, [{"mlp_ratio": 2}, {"use_mask_token": False}, {"use_swiglu_ffn": True}]),
    "dinov2_with_registers": (("AutoModelForImageClassification",), PATCHED, [{"num_register_tokens": 3}, {"use_swiglu_ffn": True}]),
    "t5": (("AutoModelForSeq2SeqLM",), T5, [{}, {"feed_forward_proj": "gated-gelu"}]),
    "mt5": (("AutoModelForSeq2SeqLM",), T5, [{}, {"feed_forward_proj": "relu", "num_decoder_layers": 2}]),
    "umt5": (("AutoModelForSeq2SeqLM",), T5, [{"tie_word_embeddings": True}, {"num_decoder_layers": 2, "tie_word_embeddings": True}]),
    "bart": (("AutoModelForSeq2SeqLM",), TWO_TOWERS, [{}, {"tie_word_embeddings": False}]),
    "plbart": (("AutoModelForSeq2SeqLM",), TWO_TOWERS, [{}]),
    "mvp": (("AutoModelForSeq2SeqLM",), TWO_TOWERS, [{}, {"use_prompt": True}]),
    "mbart": (("AutoModelForSeq2SeqLM",), TWO_TOWERS, [{}]),
    "blenderbot": (("AutoModelForSeq2SeqLM",), TWO_TOWERS, [{}]),
    "blenderbot-small": (("AutoModelForSeq2SeqLM",), TWO_TOWERS, [{}]),
    "pegasus": (("AutoModelForSeq2SeqLM",), TWO_TOWERS, [{}]),
    "marian": (("AutoModelForSeq2SeqLM",), TWO_TOWERS, [{}, {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 96, "tie_word_embeddings": False}]),
    "m2m_100": (("AutoModelForSeq2SeqLM",), TWO_TOWERS, [{}]),
}  # fmt: skip
"""Encoders and encoder-decoders: the classes that put different heads on them, a small configuration, and changes of it."""

FITTING: dict[str, dict[str, Any]] = {
    "gemma4": {"hidden_size_per_layer_input": 0},
    "glm4v_moe": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16},
}
VISION: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model", "num_attention_heads": 16}},
}
"""What the text and vision parts of a composite need to be built."""

SAME_CLASS = {"kimi_k2": "deepseek_v3"}
"""Types whose files name another type's architecture: Kimi-K2's says DeepseekV3ForCausalLM."""


def drawn(model_type: str, seed: int) -> dict[str, Any]:
    """One configuration of a type; an empty list of choices leaves the key out."""
    source = random.Random(f"{model_type} {seed}")
    values = BASE | {"num_hidden_layers": source.choice([4, 6, 8]), "tie_word_embeddings": source.choice([True, False])}
    for key, choices in VARIANTS[model_type].items():
        if choices:
            values[key] = source.choice(choices)
        else:
            values.pop(key, None)
    return values


@pytest.mark.parametrize("model_type", VARIANTS)
def test_counts_equal_transformers(model_type: str) -> None:
    """Total and every single layer count what the model class in transformers has."""
    import torch
    import transformers

    for seed in range(3):
        values = drawn(model_type, seed)
        settings = transformers.CONFIG_MAPPING[SAME_CLASS.get(model_type, model_type)](**values)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(settings)
        model.tie_weights()
        shape = shape_from_config(values | {"model_type": model_type})
        assert count(shape).total == sum(weight.numel() for weight in model.parameters()), values
        layers = [build_layer(shape, kind).parameters for kind in layer_sequence(shape)]
        blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == len(layers))
        assert [sum(weight.numel() for weight in block.parameters()) for block in blocks] == layers, values


@pytest.mark.parametrize("model_type", OTHERS)
def test_encoders_count_what_their_heads_have(model_type: str) -> None:
    """Encoders and encoder-decoders with each head that `architectures` may name, as written and as saved; at least the first of
    the changes is read, what else is refused must not be read wrong."""
    import torch
    import transformers

    heads, base, changes = OTHERS[model_type]
    for head, change in ((head, change) for head in heads for change in changes):
        settings = transformers.CONFIG_MAPPING[model_type](**base | change)
        kind = getattr(transformers, head)
        with torch.device("meta"):
            model = getattr(kind, "from_config", kind)(settings)
        model.tie_weights()
        total = sum(weight.numel() for weight in model.parameters())
        named = {"model_type": model_type, "architectures": [type(model).__name__]}
        for written in (base | change, settings.to_dict()):
            with contextlib.suppress(*([InputError] if change is not changes[0] else [])):
                assert count(shape_from_config(written | named)).total == total, (head, change)


OWN_CODE = {"internvl_chat", "kimi_vl"}
"""Composite types that transformers has no class for."""


@pytest.mark.parametrize("model_type", sorted(set(WRAPPERS) - OWN_CODE))
def test_language_towers_share_their_table_where_transformers_does(model_type: str) -> None:
    """The language tower of a composite model, for what either level may say of its table. Types that the published files of a wrapper
    do not have as text are built with the one they have."""
    import torch
    import transformers

    wrapper, kind = WRAPPERS[model_type], transformers.CONFIG_MAPPING[model_type]
    text = drawn(wrapper.text_type, 0) if wrapper.text_type in VARIANTS else dict(BASE, num_hidden_layers=4)
    text = {key: value for key, value in text.items() if key != "tie_word_embeddings"} | {
        "model_type": wrapper.text_type
    }
    text |= FITTING.get(model_type, {})
    for top, inner in ((None, None), (True, False), (False, True), (None, True), (False, None)):
        said = [{} if word is None else {"tie_word_embeddings": word} for word in (top, inner)]
        values = {"text_config": text | said[1]} | said[0] | VISION.get(model_type, {})
        try:
            with torch.device("meta"):
                model = transformers.AutoModelForImageTextToText.from_config(kind(**json.loads(json.dumps(values))))
        except ImportError as missing:
            pytest.skip(str(missing))
        model.tie_weights()
        parts = [
            weight
            for name, weight in model.named_parameters()
            if any(part in name for part in ("language_model", "text_model", "lm_head"))
        ]
        total = sum(weight.numel() for weight in parts)
        assert count(shape_from_config(values | {"model_type": model_type})).total == total, (top, inner)


WRITTEN_ONLY = {
    "architectures", "dtype", "id2label", "label2id", "problem_type", "transformers_version", "chunk_size_feed_forward",
    "is_encoder_decoder", "output_attentions", "output_hidden_states", "return_dict", "_name_or_path", "model_type",
}  # fmt: skip
"""Keys that every configuration has and that change no weight."""


def changed(value: object) -> list[Any]:
    """Other values that somebody's file may have for a key; a null above all."""
    if isinstance(value, bool):
        return [None, not value]
    return [None, 2 * value or 2] if isinstance(value, int) else [1, 16] if value is None else [None]


@pytest.mark.parametrize("model_type", VARIANTS)
def test_no_key_is_read_wrong(model_type: str) -> None:
    """Every key of a configuration set to null, or to another value: what the class can build from it we count as it does, or
    refuse. Both as somebody wrote it and as the class writes it."""
    import torch
    import transformers

    kind = transformers.CONFIG_MAPPING[SAME_CLASS.get(model_type, model_type)]
    first = drawn(model_type, 0)
    for key, value in kind(**first).to_dict().items():
        for other in [] if key in WRITTEN_ONLY or isinstance(value, (dict, float)) else changed(value):
            try:
                settings = kind(**{**first, key: other})
                with torch.device("meta"):
                    model = transformers.AutoModelForCausalLM.from_config(settings)
            except Exception:  # noqa: BLE001 - whatever the class refuses is no model
                continue
            model.tie_weights()
            total = sum(weight.numel() for weight in model.parameters())
            for written in ({**first, key: other}, settings.to_dict()):
                with contextlib.suppress(InputError):
                    assert count(shape_from_config({**written, "model_type": model_type})).total == total, (key, other)


def test_class_defaults_equal_transformers() -> None:
    """Every class default in the catalogue is the configuration class's own."""
    import dataclasses

    import transformers

    for row in rows("config_defaults"):
        if row["source"].startswith(f"transformers {transformers.__version__}"):
            kind = transformers.CONFIG_MAPPING[row["model_type"]]
            fields = {field.name: field.default for field in dataclasses.fields(kind)}
            aliases = getattr(kind, "attribute_map", {})
            stated = {key: fields[aliases.get(key, key)] for key in row["defaults"] if aliases.get(key, key) in fields}
            assert stated == {key: row["defaults"][key] for key in stated}, row["model_type"]
