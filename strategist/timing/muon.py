"""Seconds of Muon's update: Newton-Schulz iterations on whole matrices, what is read and written around them, AdamW for the rest."""

from __future__ import annotations

import numpy as np

from strategist.columns import on_stages
from strategist.facts.hardware import Gpu
from strategist.facts.job import Job
from strategist.facts.profile import BYTES
from strategist.space.candidates import Reals
from strategist.space.shares import Elements, Group, layers
from strategist.space.turned import ITERATIONS, WIDTH, Turned, elements_CS, owned_CS, turned
from strategist.timing.compute import product_seconds
from strategist.timing.rates import memory_Bps, peak_FLOPs, share


def muon_seconds(job: Job, group: Group, counts: Elements) -> Reals:
    """Seconds of the update, (C,), on the stage that takes longest. Every rank of a stage turns all of its matrices, whoever
    holds their rows (Liu et al. 2025, arXiv 2502.16982, section 2.3)."""
    gpu, shape = job.cluster.slowest.gpu, job.model
    own, all_ = owned_CS(shape, group), elements_CS(shape, group)
    rest = np.where((group.candidates["zero"] >= 1)[:, None], counts.sharded, counts.whole) - own
    stored, gradient = BYTES[job.formats.parameter], BYTES[job.formats.gradient]
    adamw = 2.0 * (stored + job.profile.state_bytes("adamw", job.workload.precision)) + 2.0 * gradient
    moved = (share("muon_update_bytes", gpu) + gradient) * own + share("muon_whole_bytes", gpu) * all_ + adamw * rest
    turning = [(t.copies * _turning_CM(gpu, t)).sum(axis=1) for t in _matrices(group, job)]
    seconds = moved / memory_Bps(gpu) + sum(
        on_stages(each, group.layers_SK[:, sort].astype(np.float64)) for sort, each in enumerate(turning)
    )
    return np.asarray(seconds.max(axis=1))


def _matrices(group: Group, job: Job) -> list[Turned]:
    return [turned(layer, group.candidates) for layer in layers(job.model)]


def _turning_CM(gpu: Gpu, matrix: Turned) -> Reals:
    """Seconds of turning each matrix: of n x m, n <= m, an iteration makes X X^T, A A and (b A + c A A) X: 4 n^2 m + 2 n^3 FLOP
    (Jordan et al. 2024, kellerjordan.github.io/posts/muon, runtime analysis: at most 6 n^2 m), in bfloat16, or as fp32 where a
    device multiplies no bfloat16."""
    n, m = matrix.short.astype(np.float64), matrix.long.astype(np.float64)
    precision = "bf16" if peak_FLOPs(gpu, "bf16") else "fp32"
    products = ((n, n, m), (n, n, n), (n, m, n))
    return ITERATIONS * np.sum([product_seconds(gpu, precision, WIDTH, *sizes) for sizes in products], axis=0)
