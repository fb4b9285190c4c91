"""The job that frameworks' losses are compared with: plain PyTorch in one process, and the words that start theirs."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from strategist.document.plan import Plan
from tests.frameworks.jobs import SEED, STEPS
from tests.plans import FLOAT32, make_plan

RATE = 1e-2
"""High enough for the weights to move within the steps that are compared."""


def words_for(model_folder: Path) -> tuple[str, ...]:
    """Words of the emitted command: the model, and the steps, seed and rate of the job in one process."""
    return ("--model", str(model_folder), "--steps", str(STEPS), "--seed", str(SEED), "--learning-rate", str(RATE))


def plan_of(choices: dict[str, Any]) -> Plan:
    """Two ranks, two micro-batches of two sequences each."""
    return make_plan(**{"formats": FLOAT32, "backend": "nccl", "micro_batch": 2, "accumulation": 2} | choices)


@cache
def one_process(model_folder: Path, optimizer: str = "adamw") -> tuple[float, ...]:
    """Losses of the same job in this process, in fp32: plain PyTorch, each step the mean over its global batch."""
    plan = plan_of({"dp_replicate": 2})
    batch, length = plan.workload.global_batch, plan.workload.seq_len
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder), dtype=torch.float32)
    update = {
        "adamw": partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.1),
        "sgd": partial(torch.optim.SGD, momentum=0.9),
    }[optimizer](model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        rows = [sample(model.config.vocab_size, length, step * batch + index) for index in range(batch)]
        tokens = torch.stack(rows)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    return tuple(losses)


def sample(vocabulary: int, length: int, index: int) -> torch.Tensor:
    """The synthetic sequence at an index, as the emitted scripts promise it."""
    generator = torch.Generator().manual_seed(SEED * 1_000_003 + index)
    return torch.randint(vocabulary, (length,), generator=generator)
