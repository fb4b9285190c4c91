"""Emitted jobs, started unchanged on two CPU ranks, give the losses of one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from strategist import emit
from strategist.document.plan import Plan
from tests.plans import BFLOAT16, FLOAT32, make_plan
from tests.source import ROOT

SHIM = Path(__file__).with_name("cpu_ranks")
STEPS = 3
SEED = 5
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


def trained(folder: Path, target: str, plan: Plan, words: Sequence[str]) -> list[float]:
    """The losses that the emitted job prints when it is started from another folder."""
    job = folder / "job"
    job.mkdir()
    for name, text in emit(plan, target).items():
        (job / name).write_text(text, encoding="utf-8")
    tools = Path(sys.executable).parent
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    env |= {"PATH": f"{tools}:{env['PATH']}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    shown = [str(ROOT), *([str(SHIM)] if plan.strategy.backend == "nccl" else [])]
    env["PYTHONPATH"] = os.pathsep.join(shown)
    command = ["bash", str(job / "launch.sh"), *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"^step (\d+)  loss ([\d.]+)\b", done.stdout, re.MULTILINE)
    assert [int(number) for number, _ in found] == list(range(STEPS))
    return [float(loss) for _, loss in found]


@pytest.mark.proves("trained")
@pytest.mark.parametrize(("target", "choices"), CASES, ids=lambda value: str(value)[:60])
def test_losses_are_those_of_one_process(
    target: str, choices: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    """Weights, samples and optimizer are the same, so every step's loss is, within 1e-4 and for bf16 within 5e-3."""
    plan = plan_of(choices)
    words = ("--model", str(model_folder), "--steps", str(STEPS), "--seed", str(SEED), "--learning-rate", str(RATE))
    alone = one_process(model_folder)
    tolerance = 1e-4 if plan.strategy.formats.compute == "float32" else 5e-3
    assert trained(tmp_path, target, plan, words) == pytest.approx(alone, rel=tolerance)
    assert max(alone) - min(alone) > 10 * 1e-4 * max(alone)


@pytest.mark.proves("trained")
@pytest.mark.parametrize("target", ["torchrun"])
@pytest.mark.parametrize("choices", [{"dp_shard": 2, "zero": 3}, {"tp": 2}], ids=str)
def test_our_own_job_gives_the_losses_of_one_rank(target: str, choices: dict[str, Any], tmp_path: Path) -> None:
    """The job on strategist's executor prints, on two ranks, what the emitted job of one rank prints."""
    batch = {"micro_batch": 2 if "tp" in choices else 1, "accumulation": 2, "backend": "gloo", "formats": FLOAT32}
    words = ("--steps", str(STEPS), "--seed", str(SEED))
    for name in ("alone", "together"):
        (tmp_path / name).mkdir()
    alone = trained(tmp_path / "alone", target, make_plan(**batch | {"micro_batch": 2}), words)
    together = trained(tmp_path / "together", target, make_plan(**batch | choices), words)
    assert together == pytest.approx(alone, rel=1e-4)
