"""Emitted jobs, started unchanged on two CPU ranks, give the losses of one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from strategist.document.plan import Plan
from tests.frameworks.jobs import FSDP, SEED, STEPS, WORDS, executor_plan, trained
from tests.plans import BFLOAT16, FLOAT32, make_plan

RATE = 1e-2
"""High enough for the weights to move within the steps that are compared."""

CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("accelerate", {"dp_replicate": 2}),
    ("accelerate", {"dp_shard": 2, "zero": 1}),
    ("accelerate", {"dp_shard": 2, "zero": 2}),
    ("accelerate", {"dp_shard": 2, "zero": 3, "formats": BFLOAT16, "recompute": "full"}),
    ("deepspeed", {"dp_replicate": 2, "backend": "gloo"}),
    ("deepspeed", {"dp_shard": 2, "zero": 1, "backend": "gloo"}),
    ("deepspeed", {"dp_shard": 2, "zero": 2, "backend": "gloo", "offload": "optimizer"}),
    ("deepspeed", {"dp_shard": 2, "zero": 3, "backend": "gloo", "formats": BFLOAT16, "recompute": "full"}),
    ("transformers", {"dp_replicate": 2, "backend": "gloo"}),
    ("transformers", {"dp_shard": 2, "zero": 3, "recompute": "full"}),
    ("trl", {"dp_replicate": 2, "backend": "gloo"}),
    ("trl", {"dp_shard": 2, "zero": 3, "recompute": "full"}),
    ("fabric", {"dp_replicate": 2, "backend": "gloo"}),
    ("fabric", {"dp_shard": 2, "zero": 3, "backend": "gloo", "formats": BFLOAT16, "recompute": "full"}),
    ("trainer", {"dp_replicate": 2, "backend": "gloo"}),
    ("trainer", {"dp_shard": 2, "zero": 2, "backend": "gloo"}),
)


def plan_of(choices: dict[str, Any]) -> Plan:
    """Two ranks, two micro-batches of two sequences each."""
    return make_plan(**{"formats": FLOAT32, "backend": "nccl", "micro_batch": 2, "accumulation": 2} | choices)


@cache
def one_process(model_folder: Path) -> tuple[float, ...]:
    """Losses of the same job in this process, in fp32: plain PyTorch, each step the mean over its global batch."""
    plan = plan_of({"dp_replicate": 2})
    batch, length = plan.workload.global_batch, plan.workload.seq_len
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder), dtype=torch.float32)
    update = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
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


@pytest.mark.proves("trained")
@pytest.mark.parametrize(("target", "choices"), CASES, ids=lambda value: str(value)[:60])
def test_losses_are_those_of_one_process(
    target: str, choices: dict[str, Any], model_folder: Path, tokenizer_files: dict[str, str], tmp_path: Path
) -> None:
    """Weights, samples and optimizer are the same, so every step's loss is, within 1e-4 and for bf16 within 5e-3."""
    plan = plan_of(choices)
    for name, text in tokenizer_files.items() if target == "trl" else ():
        (model_folder / name).write_text(text, encoding="utf-8")
    words = ("--model", str(model_folder), "--steps", str(STEPS), "--seed", str(SEED), "--learning-rate", str(RATE))
    alone = one_process(model_folder)
    tolerance = 1e-4 if plan.strategy.formats.compute == "float32" else 5e-3
    assert trained(tmp_path, target, plan, words) == pytest.approx(alone, rel=tolerance)
    assert max(alone) - min(alone) > 10 * 1e-4 * max(alone)


@pytest.mark.proves("trained")
@pytest.mark.parametrize(
    ("target", "choices"),
    [
        ("torchrun", FSDP),
        ("torchrun", {"tp": 2}),
        ("mp-spawn", FSDP),
        ("mpirun", FSDP),
        ("data-parallel", {"dp_replicate": 2, "replicas": "threads"}),
        ("parameter-server", {"dp_replicate": 2}),
    ],
    ids=str,
)
def test_our_own_job_gives_the_losses_of_one_rank(
    target: str, choices: dict[str, Any], losses_of_one_rank: list[float], tmp_path: Path
) -> None:
    """The job on strategist's executor prints, on two ranks, what the emitted job of one rank prints."""
    assert trained(tmp_path, target, executor_plan(choices), WORDS) == pytest.approx(losses_of_one_rank, rel=1e-4)
