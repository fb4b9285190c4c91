"""Seconds of the update: bytes moved on the device, or over the host link and through host memory when offloaded."""

from __future__ import annotations

import numpy as np

from strategist.facts.hardware import Node
from strategist.facts.job import Job
from strategist.facts.profile import BYTES
from strategist.space.candidates import Candidates, Reals
from strategist.timing.rates import memory_Bps, share


def update_seconds(job: Job, c: Candidates, elements_C: Reals) -> Reals:
    """Seconds of a fused update on the device over the elements this rank owns, (C,); offloaded state does not count.

    Source: a memory-bound kernel: read weight, gradient, moments; write weight, moments; plus what reads gradients for their
    norm, and reads and writes them to limit it (torch/nn/utils/clip_grad.py).
    """
    moved = touched_bytes(job) + BYTES[job.formats.gradient] * job.profile.gradient_passes
    on_device = c.is_word("offload", "none")
    return np.where(on_device, moved * elements_C / memory_Bps(job.cluster.slowest.gpu), 0.0)


def touched_bytes(job: Job) -> float:
    """Bytes that an update reads and writes per element. Our own 8-bit one is no single kernel, as others' are (bitsandbytes'
    csrc/kernels.cu, kOptimizerStatic8bit2StateBlockwise): its operations are counted."""
    if job.profile.kernels.name == "own" and job.workload.optimizer == "adamw8bit":
        return share("eight_bit_update_bytes", job.cluster.slowest.gpu)
    return 2.0 * (BYTES[job.formats.parameter] + job.state_bytes) + BYTES[job.formats.gradient]


def offload_seconds(job: Job, c: Candidates, owned_C: Reals) -> Reals:
    """Seconds that offloading adds to a step, (C,): transfers over the host link, the host's update, NVMe traffic.

    Optimizer offload sends gradients down and weights up once (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840).
    Parameter offload also brings the owned weights up for forward and backward of every micro-batch and sends
    gradients down each time (ZeRO-Infinity, Rajbhandari et al. 2021, arXiv 2104.07857). None of it is assumed hidden.
    """
    node = job.cluster.slowest
    link = (node.gpu.host_Bps or node.gpu.memory_Bps) * share("host_link_share", node.gpu)
    stored, gradient = BYTES[job.formats.parameter], BYTES[job.formats.gradient]
    micro = c["accumulation"].astype(np.float64)
    update = touched_bytes(job) * owned_C / share("host_update_Bps", node.gpu)
    once = (gradient + stored) * owned_C / link + update
    every = micro * (2.0 * stored + gradient) * owned_C / link + update
    disk = 2.0 * job.state_bytes * owned_C / _disk_Bps(node)
    return np.choose(c["offload"], [np.zeros(len(c)), once, every, every + disk])


def _disk_Bps(node: Node) -> float:
    """NVMe rate per device; a node without a known drive cannot offload there, so the rate is vanishing."""
    return (node.nvme_read_Bps or 1.0) / node.gpus
