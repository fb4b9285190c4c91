"""What is to be trained: sequence, batch, number formats, optimizer."""

from __future__ import annotations

from typing import Literal

from strategist.records import dataclass

Precision = Literal["bf16", "fp16", "tf32", "fp32", "fp8", "fp4"]
Optimizer = Literal["adamw", "adamw8bit", "muon", "sgd"]

PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "tf32", "fp32", "fp8", "fp4")
FLOAT8_MULTIPLE = 16
"""What the sides of both matrices of a product divide by where devices multiply in 8 bits (PyTorch 2.13
aten/src/ATen/native/cuda/ScaledBlas.cpp, _scaled_mm_out_cuda)."""
OPTIMIZERS: tuple[Optimizer, ...] = ("adamw", "adamw8bit", "muon", "sgd")

METHODS = ("full", "lora", "qlora")
"""All weights are trained, or adapters beside frozen ones, which rest in four bits under the last."""

MAX_SEQ_LEN = 2**24
MAX_BATCH = 2**31
MAX_RANK = 4096
MAX_IMBALANCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training job. `global_batch` counts sequences per optimizer step; `tokens` is the length of the whole run.
    `target_len` counts the tokens of a decoder's sequence behind an encoder, whose inputs have `seq_len`; None means as many.
    `expert_imbalance` is how many tokens the busiest of the ranks that share a layer's experts gets, over the mean of them: 1 is balance."""

    seq_len: int = 4096
    global_batch: int = 256
    precision: Precision = "bf16"
    optimizer: Optimizer = "adamw"
    tokens: int | None = None
    expert_imbalance: float = 1.0
    target_len: int | None = None

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step consumes; behind an encoder those of the inputs alone (Raffel et al. 2020, T5, arXiv 1910.10683,
        section 3.1.2: 128 sequences of 512 are 2^16 tokens, whatever their targets)."""
        return self.seq_len * self.global_batch

    @property
    def targets(self) -> int:
        """Tokens of a decoder's sequence."""
        return self.seq_len if self.target_len is None else self.target_len

    @property
    def target_share(self) -> float:
        """Tokens of a decoder's sequence over those of the inputs in front of it."""
        return self.targets / self.seq_len
