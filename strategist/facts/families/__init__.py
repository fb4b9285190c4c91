"""Readers of Hugging Face config.json files, one module per group of architectures.

`FAMILIES` is the whole list; the order is the one in which they are named to a user who brings an unknown one.
"""

from __future__ import annotations

from strategist.facts.families import (
    deepseek,
    deepseek_v4,
    encoder_decoder,
    encoders,
    gemma,
    gpt,
    hybrids,
    llama,
    mixtures,
    own_code,
    qwen,
    state_space,
    vision,
)
from strategist.facts.families.config import Family

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    qwen.FAMILY,
    gemma.FAMILY,
    mixtures.FAMILY,
    deepseek.FAMILY,
    deepseek_v4.FAMILY,
    hybrids.FAMILY,
    state_space.FAMILY,
    gpt.FAMILY,
    encoders.FAMILY,
    encoder_decoder.FAMILY,
    vision.FAMILY,
    own_code.FAMILY,
)
