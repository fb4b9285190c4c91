"""The built-in model is the model of the papers: transformers' own classes, given the same weights, say the same.

The shape is read from the configuration that transformers saves, so reader, assembler and weights are judged at once.
"""

from __future__ import annotations

from typing import Any

import pytest

from strategist.facts.constants import constants_from
from strategist.facts.model_config import shape_from_config

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "intermediate_size": 48, "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "tie_word_embeddings": False,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 64, "n_positions": 32, "resid_pdrop": 0, "embd_pdrop": 0,
    "attn_pdrop": 0,
}  # fmt: skip
FEW = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "norm_topk_prob": True}
THETA: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}, "rms_norm_eps": 1e-3}
LLAMA3_1: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
"""Of head_dim 8: waves of 6 tokens stay as they are, those of 20 and 63 turn slower in part, those of 199 eight times slower."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2),
    "gpt2-wide": ("gpt2", GPT2 | {"n_inner": 80}),
    "llama": ("llama", SIZES),
    "llama-3": ("llama", SIZES | THETA),
    "llama-3.1": ("llama", SIZES | {"rope_parameters": LLAMA3_1, "max_position_embeddings": 128}),
    "llama-tied": ("llama", SIZES | {"tie_word_embeddings": True, "head_dim": 12}),
    "mistral": ("mistral", SIZES | {"sliding_window": None}),
    "mistral-window": ("mistral", SIZES | {"sliding_window": 5}),
    "qwen2": ("qwen2", SIZES),
    "qwen3": ("qwen3", SIZES | {"head_dim": 12}),
    "starcoder2": ("starcoder2", SIZES | {"norm_epsilon": 1e-5, "sliding_window": 7, "residual_dropout": 0}),
    "mixtral": ("mixtral", SIZES | {"num_local_experts": 4}),
    "olmoe": ("olmoe", SIZES | {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "qwen2-moe": ("qwen2_moe", SIZES | FEW | {"shared_expert_intermediate_size": 20}),
    "qwen3-moe": ("qwen3_moe", SIZES | FEW | {"mlp_only_layers": [0], "head_dim": 8}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str) -> None:
    """In float64, logits and the gradient of the token embedding agree within 1e-10, each weight being used."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from strategist.executor.models import model_from_shape
    from tests.executor.hugging_face import lifted_to_float64
    from tests.executor.renamed import renamed

    family, sizes = CASES[case]
    config = AutoConfig.for_model(family, **sizes, experts_implementation="eager")
    torch.manual_seed(7)
    tokens = torch.randint(64, (2, 14))
    with lifted_to_float64():
        theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter, 0.1, 0.3)
        expected = theirs(tokens, use_cache=False).logits
        expected.square().mean().backward()
    said = constants_from(config.to_dict(), {"norm_eps": None, "rope_theta": None}, case, rotary=family != "gpt2")
    ours = model_from_shape(shape_from_config(config.to_dict()), "cpu", torch.float64, constants=said)
    ours.load_state_dict(renamed(family, theirs.state_dict(), ours.state_dict()))
    logits = ours(tokens)
    logits.square().mean().backward()
    assert torch.allclose(logits, expected, rtol=0, atol=1e-10 * float(expected.detach().abs().max()))
    table, expected_table = ours.get_parameter("token_embedding.weight"), theirs.get_input_embeddings().weight
    assert torch.allclose(table.grad, expected_table.grad, rtol=0, atol=1e-10)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
