"""How much of a long run is progress: checkpoints, failures, and the work that each failure takes back.

J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer Systems 22
(2006) 303-312, for failures as a Poisson process; the square root is J. W. Young's (Communications of the ACM 17, 1974).
"""

from __future__ import annotations

from math import exp, sqrt

from strategist.catalog import Row, rows
from strategist.document.sizing import Goodput
from strategist.facts.adapters import QUANTISED_BYTES, adapter_parameters, quantised_weights
from strategist.facts.job import Job
from strategist.facts.parameters import count
from strategist.facts.profile import BYTES


def goodput(job: Job) -> Goodput:
    """The share of a run on the job's machines that is progress, under checkpoints as often as is best.

    A checkpoint holds weights and optimizer state and is written while training waits; failures come per device and stop
    every device.
    """
    world = job.cluster.world
    between_failures = seconds_between_failures(job.cluster.slowest.gpu.arch) / world
    write = checkpoint_bytes(job) / (float(_row("checkpoint_rate")["Bps_per_gpu"]) * world)
    restart = float(_row("restart")["seconds"])
    interval = best_interval(write, between_failures)
    return Goodput(
        share=progress(interval, write, between_failures, restart),
        seconds_between_failures=between_failures,
        interval_s=interval,
        checkpoint_s=write,
        restart_s=restart,
    )


def _row(name: str, arch: str = "default") -> Row:
    found = {row.get("arch", "default"): row for row in rows("reliability") if row["name"] == name}
    return found.get(arch, found["default"])


def seconds_between_failures(arch: str) -> float:
    """Mean seconds from failure to failure of a job on one device of an architecture, or of any where none is known."""
    seen = _row("interruptions", arch)
    return float(seen["days"]) * 86400 * float(seen["gpus"]) / float(seen["interruptions"])


def checkpoint_bytes(job: Job) -> float:
    """Bytes of all weights, frozen ones too, as they rest, and of all optimizer state, master copies among it."""
    total, weight = count(job.model).total, BYTES[job.formats.parameter]
    wider = adapter_parameters(job.model) * (BYTES[job.formats.gradient] - weight)
    spared = quantised_weights(job.model) * (weight - QUANTISED_BYTES)
    return total * (weight + job.trainable * job.state_bytes) + wider - spared


def best_interval(write: float, between_failures: float) -> float:
    """Seconds of work between two checkpoints that make a run shortest; Daly 2006: with d = `write` and
    M = `between_failures`, sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d for d < 2M, else M."""
    if write >= 2 * between_failures:
        return between_failures
    part = write / (2 * between_failures)
    return sqrt(2 * write * between_failures) * (1 + sqrt(part) / 3 + part / 9) - write


def progress(interval: float, write: float, between_failures: float, restart: float) -> float:
    """Seconds of work per second of a run that writes a checkpoint every `interval` seconds; Daly 2006: the run
    takes M exp(R / M) (exp((t + d) / M) - 1) / t seconds per second of work."""
    m = between_failures
    return interval / (m * exp(restart / m) * (exp((interval + write) / m) - 1))
