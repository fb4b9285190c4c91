"""Seconds of Muon's update: Newton-Schulz iterations on whole matrices, what is read and written around them, AdamW for the rest."""

from __future__ import annotations

from functools import cache

import numpy as np

from strategist.columns import on_stages
from strategist.facts.hardware import Gpu
from strategist.facts.job import Job
from strategist.facts.lots import Lot
from strategist.facts.profile import BYTES
from strategist.space.candidates import Column, Reals
from strategist.space.deals import most_of_lots_CS
from strategist.space.shares import Elements, Group, layers
from strategist.space.turned import ITERATIONS, WIDTH, came_CS, owned_CS, turned
from strategist.timing.compute import product_seconds
from strategist.timing.rates import memory_Bps, peak_FLOPs, share


def muon_seconds(job: Job, group: Group, counts: Elements) -> Reals:
    """Seconds of the update, (C,), on the stage that takes longest. Every rank of a stage turns all of its matrices, whoever
    holds their rows and parts (Liu et al. 2025, arXiv 2502.16982, section 2.3); where torch's ZeRO-1 deals whole ones out, each rank its own,
    and the slowest counts."""
    gpu, shape, deals = job.cluster.slowest.gpu, job.model, group.candidates["zero"] == 1
    own = owned_CS(shape, group)
    rest = np.where((group.candidates["zero"] >= 2)[:, None], counts.sharded, counts.whole) - own
    each = [turned(layer, group.candidates) for layer in layers(shape)]
    turning = [(t.copies * _turning_seconds(gpu, t.short, t.long)).sum(axis=1) for t in each]
    seconds = _moving_seconds(job, own, came_CS(shape, group), rest) + sum(
        on_stages(part, group.layers_SK[:, sort].astype(np.float64)) for sort, part in enumerate(turning)
    )
    if deals.any():
        dealt = most_of_lots_CS(shape, group, deals, lambda lot: _lot_seconds(job, lot))
        seconds = np.where(deals[:, None], dealt, seconds)
    return np.asarray(seconds.max(axis=1))


def _moving_seconds(job: Job, own: Reals, whole: Reals, rest: Reals) -> Reals:
    """Seconds of what is read and written of hidden matrices, of which a rank has the momentum of `own` elements, and of the `rest`."""
    gpu = job.cluster.slowest.gpu
    stored, gradient = BYTES[job.formats.parameter], BYTES[job.formats.gradient]
    adamw = 2.0 * (stored + job.profile.state_bytes("adamw", job.workload.precision)) + 2.0 * gradient
    moved = (share("muon_update_bytes", gpu) + gradient) * own + share("muon_whole_bytes", gpu) * whole + adamw * rest
    return np.asarray(moved / memory_Bps(gpu))


def _lot_seconds(job: Job, lot: Lot) -> float:
    """Seconds of the update of what torch's ZeRO-1 deals to one rank."""
    elements = np.asarray(float(lot.elements))
    moving = float(_moving_seconds(job, elements, elements, np.asarray(float(lot.others))))
    gpu = job.cluster.slowest.gpu
    return moving + sum(number * _seconds_of_one(gpu, min(sides), max(sides)) for sides, number in lot.matrices)


@cache
def _seconds_of_one(gpu: Gpu, short: int, long: int) -> float:
    return float(_turning_seconds(gpu, np.asarray(short), np.asarray(long)))


def _turning_seconds(gpu: Gpu, short: Column, long: Column) -> Reals:
    """Seconds of turning matrices: of n x m, n <= m, an iteration makes X X^T, A A and (b A + c A A) X: 4 n^2 m + 2 n^3 FLOP
    (Jordan et al. 2024, kellerjordan.github.io/posts/muon, runtime analysis: at most 6 n^2 m), in bfloat16, or as fp32 where a
    device multiplies no bfloat16."""
    n, m = short.astype(np.float64), long.astype(np.float64)
    precision = "bf16" if peak_FLOPs(gpu, "bf16") else "fp32"
    products = ((n, n, m), (n, n, n), (n, m, n))
    return np.asarray(
        ITERATIONS * np.sum([product_seconds(gpu, precision, WIDTH, *sizes) for sizes in products], axis=0)
    )
