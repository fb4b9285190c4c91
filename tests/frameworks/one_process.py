"""The job that frameworks' losses are compared with: plain PyTorch in one process, or in two where what they send is no longer exact,
and the words that start theirs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from strategist.document.plan import Plan
from strategist.executor.processes import leave_group
from tests.frameworks.jobs import SEED, STEPS
from tests.plans import FLOAT32, make_plan

LONGER = 5
"""Steps of jobs with PowerSGD, which is exact in the first two."""
RATE = 1e-2
"""High enough for the weights to move within the steps that are compared."""


def words_for(model_folder: Path, steps: int = STEPS) -> tuple[str, ...]:
    """Words of the emitted command: the model, and the steps, seed and rate of the job in one process."""
    return ("--model", str(model_folder), "--steps", str(steps), "--seed", str(SEED), "--learning-rate", str(RATE))


def plan_of(choices: dict[str, Any]) -> Plan:
    """Two ranks, two micro-batches of two sequences each."""
    return make_plan(**{"formats": FLOAT32, "backend": "nccl", "micro_batch": 2, "accumulation": 2} | choices)


@cache
def one_process(model_folder: Path, optimizer: str = "adamw", steps: int = STEPS) -> tuple[float, ...]:
    """Losses of the same job in this process, in fp32: plain PyTorch, each step the mean over its global batch."""
    plan = plan_of({"dp_replicate": 2})
    batch, length = plan.workload.global_batch, plan.workload.seq_len
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder), dtype=torch.float32)
    update = {
        "adamw": partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.1),
        "sgd": partial(torch.optim.SGD, momentum=0.9),
    }[optimizer](model.parameters(), lr=RATE)
    firsts = range(0, steps * batch, batch)
    every = (torch.stack([sample(model.config.vocab_size, length, at + i) for i in range(batch)]) for at in firsts)
    return trained_alone(model, update, ({"input_ids": tokens, "labels": tokens} for tokens in every))


def trained_alone(
    model: Any, update: torch.optim.Optimizer, batches: Iterable[Mapping[str, torch.Tensor]]
) -> tuple[float, ...]:
    """The loss of each batch, every one a step."""
    losses = []
    for batch in batches:
        loss = model(**batch).loss
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


def with_hook(model_folder: Path, compression: str, rank: int) -> tuple[float, ...]:
    """Losses of two processes of plain DDP that send gradients by one of torch's own hooks."""
    with NamedTemporaryFile() as file, NamedTemporaryFile() as found:
        mp.spawn(_rank_with_hook, args=(str(model_folder), compression, rank, file.name, found.name), nprocs=2)
        return tuple(torch.load(found.name, weights_only=True))


def _rank_with_hook(own: int, model_folder: str, compression: str, rank: int, meeting: str, found: str) -> None:
    """One of the two processes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group("gloo", store=dist.FileStore(meeting, 2), rank=own, world_size=2)
    plan = plan_of({"dp_replicate": 2})
    micro_batches, each = plan.strategy.accumulation, plan.strategy.micro_batch
    torch.manual_seed(SEED)
    config = AutoConfig.from_pretrained(model_folder)
    model = DistributedDataParallel(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    if compression == "powersgd":
        state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook)
    else:
        cast = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}[compression]
        model.register_comm_hook(None, lambda group, bucket: cast(group, bucket))
    update = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(LONGER):
        seen = torch.zeros(())
        for index in range(micro_batches):
            first = 2 * each * (step * micro_batches + index)
            rows = [sample(config.vocab_size, plan.workload.seq_len, first + 2 * row + own) for row in range(each)]
            tokens = torch.stack(rows)
            with nullcontext() if index == micro_batches - 1 else model.no_sync():
                loss = model(input_ids=tokens, labels=tokens).loss / micro_batches
                loss.backward()
            seen += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update.step()
        update.zero_grad()
        dist.all_reduce(seen)
        losses.append(seen.item() / 2)
    if own == 0:
        torch.save(losses, found)
    leave_group()
