"""Emitted jobs that train an encoder with a decoder whose targets have a length of their own: on two CPU ranks they give the losses of one
process."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from strategist.document.plan import Plan
from strategist.facts.model_config import shape_from_config
from tests.executor.pair_configs import config_of
from tests.frameworks.jobs import SEED, STEPS, trained
from tests.frameworks.one_process import RATE, trained_alone, words_for
from tests.plans import FLOAT32, make_plan

INPUTS, TARGETS, BATCH = 16, 10, 8
STARTS = {"decoder_start_token_id": 0, "pad_token_id": 0}
CASES: tuple[Any, ...] = (
    ("transformers", "t5", {"dp_replicate": 2, "backend": "gloo"}),
    ("accelerate", "bart", {"dp_shard": 2, "zero": 1, "recompute": "full"}),
    ("deepspeed", "t5", {"dp_shard": 2, "zero": 3, "backend": "gloo"}),
    pytest.param("transformers", "bart", {"dp_replicate": 2, "backend": "gloo", "recompute": "full"}, marks=pytest.mark.nightly),
    pytest.param("accelerate", "t5", {"dp_replicate": 2}, marks=pytest.mark.nightly),
    pytest.param("deepspeed", "bart", {"dp_shard": 2, "zero": 1, "backend": "gloo", "recompute": "full"}, marks=pytest.mark.nightly),
)  # fmt: skip


def plan_of(family: str, **choices: Any) -> Plan:
    """Two ranks, two micro-batches of two sequences each."""
    shape = shape_from_config(config_of(family))
    plan = make_plan(
        shape, seq_len=INPUTS, **{"formats": FLOAT32, "backend": "nccl", "micro_batch": 2, "accumulation": 2} | choices
    )
    return replace(plan, workload=replace(plan.workload, target_len=TARGETS))


def write_config(family: str, folder: Path) -> None:
    """A configuration as transformers reads it."""
    (folder / "config.json").write_text(json.dumps(config_of(family) | STARTS))


@cache
def one_process(family: str, folder: Path) -> tuple[float, ...]:
    """Losses of the same job in this process: plain PyTorch, each step the mean over its global batch."""
    import torch
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    torch.manual_seed(SEED)
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    update = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    return trained_alone(model, update, (_batch(range(at, at + BATCH)) for at in range(0, STEPS * BATCH, BATCH)))


def _batch(indices: Iterable[int]) -> dict[str, Any]:
    """The synthetic pairs at some indices, as the emitted scripts promise them."""
    import torch

    rows = []
    for index in indices:
        source = torch.Generator().manual_seed(SEED * 1_000_003 + index)
        rows.append([torch.randint(64, (length,), generator=source) for length in (INPUTS, TARGETS)])
    inputs, labels = (torch.stack(tokens) for tokens in zip(*rows, strict=True))
    return {"input_ids": inputs, "labels": labels}


@pytest.mark.parametrize(("target", "family", "layout"), CASES)
def test_losses_of_pairs_are_those_of_one_process(
    target: str, family: str, layout: dict[str, Any], tmp_path: Path
) -> None:
    """Transformers' own class for such models, and samples of two lengths, whoever trains."""
    write_config(family, tmp_path)
    losses = trained(tmp_path, target, plan_of(family, **layout), words_for(tmp_path))
    assert losses == pytest.approx(one_process(family, tmp_path), rel=1e-4)
