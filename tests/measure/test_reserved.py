"""What the formulas say of streams and idle blocks is what the model of the allocator does with the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from strategist.facts.job import Job
from strategist.facts.models import load_model
from strategist.facts.profile import find_profile
from strategist.facts.workload import Workload
from strategist.measure.caching_allocator import CachingAllocator
from strategist.memory.estimate import Ledger, ledger
from strategist.memory.logits import idle_bytes_CS
from strategist.space.shares import Group, elements, groups
from tests.strategies import candidates, machine

LAYOUT = {
    "pp": 1, "dp_replicate": 1, "dp_shard": 8, "cp": 1, "tp": 1, "ep": 1, "etp": 1, "zero": 3, "offload": "none", "tiling": 1,
    "sequence_parallel": 0, "context_parallel": "none", "micro_batch": 1, "accumulation": 1, "schedule": "none", "virtual_stages": 1,
    "recompute": "none", "stage_split": "even",
}  # fmt: skip
SEQ_LEN = 4096


def _question(model: str, layers: int, precision: str) -> tuple[Job, Group]:
    """A model cut to some layers under ZeRO-3 on eight devices."""
    shape = replace(load_model(model), layers=layers, parameters_stated=None)
    work = Workload(seq_len=SEQ_LEN, global_batch=8, precision=precision, optimizer="adamw")
    job = Job(cluster=machine("dgx-h100"), model=shape, workload=work, profile=find_profile())
    return job, next(groups(job, candidates([LAYOUT])))


def _table(model: str, layers: int, precision: str) -> Ledger:
    return ledger(*_question(model, layers, precision))


def _handed_over(sizes: Sequence[int]) -> int:
    """Bytes that a stream reserves when each buffer is taken before the one before it is given back."""
    allocator = CachingAllocator()
    for name, size in enumerate(sizes):
        allocator.allocate(name, size)
        if name:
            allocator.free(name - 1)
    return allocator.reserved


@pytest.mark.parametrize("layers", [2, 6])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "mistral-7b-v0.1", "llama-2-7b", "gemma-2b"])
def test_the_stream_of_gathering_holds_the_buffers_that_nothing_else_fits_into(model: str, layers: int) -> None:
    """Embedding, an even number of layers, and the head of an untied model, gathered in float32 one behind the other, leave what
    the formula says."""
    job, group = _question(model, layers, "fp32")
    counts = elements(job.model, group)
    before, behind, layer = (4 * int(part) for part in (counts.before[0, 0], counts.behind[0, 0], counts.widest[0]))
    ends = ([before + behind], []) if job.model.tied else ([before], [behind])
    assert _handed_over([*ends[0], *[layer] * layers, *ends[1]]) == ledger(job, group).pools.gathering[0, 0]


def test_the_loss_leaves_the_logits_idle() -> None:
    """Logits in bfloat16, their float32 copy, log-probabilities, and in backward two float32 gradients: what is free then is what
    the formula calls idle."""
    job, group = _question("llama-3.1-8b", 4, "bf16")
    entries = SEQ_LEN * job.model.vocab
    allocator = CachingAllocator()
    logits, copy, log_probabilities, their_gradient, gradient = range(5)
    for name, size in ((logits, 2), (copy, 4), (log_probabilities, 4)):
        allocator.allocate(name, size * entries)
    for name in (logits, copy):
        allocator.free(name)
    for name in (their_gradient, gradient):
        allocator.allocate(name, 4 * entries)
    assert allocator.reserved - allocator.allocated == idle_bytes_CS(job, group)[0, 0]


def test_reduced_gradients_lie_beside_what_the_loss_holds() -> None:
    """What all streams reserve is at least what the loss holds in one, the sharded gradients in another and the gathered units in the
    third: no stream lends its blocks."""
    table = _table("llama-3.1-8b", 4, "bf16")
    at_loss = max(
        float(total.max()) for total, moving in zip(table.allocated, table.moving, strict=True) if moving.is_loss
    )
    streams = at_loss + table.pools.settled[0, 0] + table.pools.gathering[0, 0]
    assert table.reserved[0, 0] >= streams > table.fullest[0, 0]
