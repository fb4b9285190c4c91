"""Tiny models of transformers: their configurations, which need no transformers, their shapes, and the models themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from strategist.facts.model import ModelShape
from strategist.facts.model_config import shape_from_config

if TYPE_CHECKING:
    import torch

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4, "intermediate_size": 48, "vocab_size": 64,
    "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "n_embd": 32, "n_head": 8, "vocab_size": 64, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen2": SIZES,
    "qwen3": SIZES,
    "mistral": SIZES,
    "mixtral": SIZES | {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": GPT2,
}
"""`model_type` and what is said of a tiny model."""


def config_of(family: str, layers: int, tied: bool) -> dict[str, Any]:
    """The configuration of a tiny model."""
    depth = "n_layer" if family == "gpt2" else "num_hidden_layers"
    return FAMILIES[family] | {"model_type": family, depth: layers, "tie_word_embeddings": tied}


def shape_of(family: str, layers: int, tied: bool) -> ModelShape:
    """What the planner reads in it."""
    return shape_from_config(config_of(family, layers, tied))


def tiny(shape: ModelShape, dtype: torch.dtype, seed: int, **changes: Any) -> Any:
    """A model of such a shape with random weights, in training mode; its experts one by one in float64, which torch's product of
    groups does not know."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    words = config_of(shape.family, shape.layers, shape.tied) | {"vocab_size": shape.vocab} | changes
    if dtype == torch.float64:
        words["experts_implementation"] = "eager"
    config = AutoConfig.for_model(words.pop("model_type"), **words)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


@contextmanager
def lifted_to_float64() -> Iterator[None]:
    """transformers lifts norms, angles and routers to float32, whatever the model's format; here to float64."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield
