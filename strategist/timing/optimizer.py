"""Seconds of the update: bytes moved on the device, or over the host link and through host memory when offloaded."""

from __future__ import annotations

import numpy as np

from strategist.facts.hardware import Node
from strategist.facts.job import Job
from strategist.facts.profile import BYTES
from strategist.space.candidates import Candidates, Reals
from strategist.timing.rates import memory_Bps, share


def update_seconds(job: Job, c: Candidates, elements_C: Reals) -> Reals:
    """Seconds of an update on the device over the elements this rank owns, (C,); offloaded state does not count.

    Source: memory-bound kernels: read weight, gradient, moments; write weight, moments; plus what reads gradients for their
    norm, and reads and writes them to limit it (torch/nn/utils/clip_grad.py).
    """
    moved = _moved_bytes(job) + BYTES[job.formats.gradient] * job.profile.gradient_passes
    on_device = c.is_word("offload", "none")
    return np.where(on_device, moved * elements_C / memory_Bps(job.cluster.slowest.gpu), 0.0)


_LAMB = 20.0
"""Bytes per element that LAMB moves beside AdamW's: its first stage writes the change in fp32, norms of weights and of changes read both, and so does its
second stage (NVIDIA/apex: csrc/multi_tensor_lamb.cu)."""


def _moved_bytes(job: Job) -> float:
    """Bytes that an update of AdamW or LAMB moves per element, in as many kernels as the framework cuts it into; of other optimizers those that it touches.

    Operations of torch, of weights w, gradients g and moments S wide: decay 2 w, the first moment S + g, the second S + (S + g), its root, the two corrections
    of that 3 S, and the quotient 2 w + S (pytorch/pytorch v2.7: torch/optim/adamw.py and adam.py, _multi_tensor_adam; Composer's DecoupledAdamW has one more:
    composer/optim/decoupled_weight_decay.py).
    """
    if job.workload.optimizer != "adamw" or job.profile.update_kernels == "one":
        return touched_bytes(job)
    if job.profile.update_kernels == "partitions":
        return _partition_bytes(job)
    if job.profile.update_kernels == "stages":
        return touched_bytes(job) + _LAMB
    return 4.0 * BYTES[job.formats.parameter] + 2.0 * BYTES[job.formats.gradient] + 7.0 * job.state_bytes


def _partition_bytes(job: Job) -> float:
    """Bytes per element of an update of DeepSpeed's ZeRO, of weights w and gradients g wide, beside the norm's reading: gradients in float64 are written and read (16), then
    copied into one tensor (2 g) and, where they are of 16 bits, into float32 (g + 4); that is scaled (8), Adam reads the gradient and reads and writes
    weight and moments in float32 (28), and the weight is copied (4 + w); in fp16 gradients are summed in float32 before, for overflows (g + 8)
    (deepspeedai/DeepSpeed 022f223: deepspeed/runtime/zero/stage_1_and_2.py, get_grad_norm_direct and step; stage3.py, _prepare_fp32_grad_for_sub_group)."""
    weight, gradient = BYTES[job.formats.parameter], BYTES[job.formats.gradient]
    widened = gradient + _FP32 if gradient < _FP32 else 0.0
    checked = gradient + 2.0 * _FP32 if job.formats.compute == "float16" else 0.0
    return checked + 16.0 + 2.0 * gradient + widened + 2.0 * _FP32 + 7.0 * _FP32 + _FP32 + weight


_FP32 = 4.0


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
