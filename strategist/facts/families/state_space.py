"""Mamba and Mamba-2 (Gu and Dao 2023, arXiv 2312.00752; Dao and Gu 2024, arXiv 2405.21060; transformers 5.23.0)."""

from __future__ import annotations

from strategist.facts.families.config import MAX_HEADS, MAX_VOCAB, MAX_WIDTH, Config, Family
from strategist.facts.model import MAX_LAYERS, ModelShape, Ssm


def _stack(config: Config, ssm: Ssm) -> ModelShape:
    config.only("use_bias", False)
    config.only("use_conv_bias", True)
    shape = ModelShape(
        name="",
        family="",
        kind="ssm",
        formula="ssm",
        layers=config.integer("num_hidden_layers", "n_layer", high=MAX_LAYERS),
        hidden=config.integer("hidden_size", "d_model", high=MAX_WIDTH),
        vocab=config.integer("vocab_size", high=MAX_VOCAB),
        tied=config.yes("tie_word_embeddings"),
        pos="none",
        norms_per_layer=1,
        ssm=ssm,
    )
    config.settle()
    return shape


def rank_of(config: Config, key: str) -> int:
    """Rank of the time-step map: a number, or "auto" for a sixteenth of the width, rounded up."""
    if config.values.get(key, config.class_defaults.get(key)) == "auto":
        hidden = config.integer("hidden_size", "d_model", high=MAX_WIDTH)
        return config.default(key, -(-hidden // 16))
    return config.integer(key, high=MAX_WIDTH)


def _mamba(config: Config) -> ModelShape:
    expand = config.optional("expand", high=1024) or 2
    config.only("intermediate_size", expand * config.integer("hidden_size", "d_model", high=MAX_WIDTH))
    ssm = Ssm(
        kind="mamba1",
        conv=config.optional("conv_kernel", high=1024) or 4,
        expand=expand,
        state=config.integer("state_size", high=MAX_WIDTH),
        dt_rank=rank_of(config, "time_step_rank"),
    )
    return _stack(config, ssm)


def _mamba2(config: Config) -> ModelShape:
    ssm = Ssm(
        kind="mamba2",
        conv=config.optional("conv_kernel", high=1024) or 4,
        state=config.integer("state_size", high=MAX_WIDTH),
        heads=config.integer("num_heads", high=MAX_HEADS),
        head_dim=config.integer("head_dim", high=MAX_WIDTH),
        groups=config.integer("n_groups", high=MAX_HEADS),
    )
    return _stack(config, ssm)


FAMILY = Family("state space", {"mamba": _mamba, "falcon_mamba": _mamba, "mamba2": _mamba2})
