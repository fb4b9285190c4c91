"""Tiny Hugging Face models, and what ranks and one process do with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from strategist.document.plan import Plan
from strategist.executor.build import build
from strategist.executor.data import SyntheticTokens
from strategist.executor.optimizers import default_optimizer

LAYERS, STEPS, GLOBAL_BATCH, SEQ_LEN, LEARNING_RATE = 4, 4, 8, 16, 1e-2
DATA = SyntheticTokens(64, SEQ_LEN, STEPS * GLOBAL_BATCH)


def tiny(family: str, tied: bool, seed: int = 0) -> Any:
    """A float64 model of four layers with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, vocab_size=64, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def train_tiny(plan: Plan, family: str, tied: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final parameters under the plan; every rank starts from other weights, and rank 0's count."""
    model = tiny(family, tied, seed=torch.distributed.get_rank())
    session = build(plan, model, default_optimizer(plan, LEARNING_RATE), clip_norm=0.5)
    losses = [session.step(batch).loss for batch in session.loader(DATA, shuffle=False)]
    return losses, session.parameters_full()


def train_alone(family: str, tied: bool) -> tuple[list[float], dict[str, Tensor]]:
    """The same by one process with plain torch."""
    model, losses = tiny(family, tied), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(STEPS):
        samples = [DATA[i] for i in range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)]
        inputs, labels = (torch.stack([s[name] for s in samples]) for name in ("input_ids", "labels"))
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}
