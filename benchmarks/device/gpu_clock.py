"""How long work takes on a GPU, apart from how long its host takes to launch it.

The device is kept busy before each timed run, so that the host is ahead and no gap between kernels is in the time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from strategist.measure.clocks import clock_of

Work = Callable[..., object]
Prepare = Callable[[], tuple[Any, ...]]


class GpuClock:
    """Times on one GPU; on the CPU, to try a script, the host's time stands for both."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self.wait = self._clock.settle

    def timed(self, work: Work, prepare: Prepare = tuple, *, repeats: int = 9, warm_up: int = 3) -> dict[str, float]:
        """Medians in microseconds: `device_us` from the first kernel to the last, `host_us` until all were launched. `prepare`
        makes what one run takes, outside the time."""
        spans = [self._once(work, prepare) for _ in range(warm_up + repeats)][warm_up:]
        device, host = (statistics.median(column) for column in zip(*spans, strict=True))
        return {"device_us": round(device, 2), "host_us": round(host, 2)}

    def both_ways(
        self, forward: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor], **options: int
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Times of a forward pass and of the backward pass of what it gives, from random gradients. `leaves` get gradients, made
        anew: adding into those that are there is work of its own."""
        there = self.timed(forward, **options)
        grad = torch.randn_like(forward())

        def prepared() -> tuple[torch.Tensor]:
            for leaf in leaves:
                leaf.grad = None
            return (forward(),)

        return there, self.timed(lambda out: out.backward(grad), prepared, **options)

    def _once(self, work: Work, prepare: Prepare) -> tuple[float, float]:
        given, clock = prepare(), self._clock
        clock.settle()
        clock.lead()
        start, begin = clock.mark(), time.perf_counter()
        work(*given)
        launched, end = time.perf_counter() - begin, clock.mark()
        clock.settle()
        return clock.ns(start, end) / 1e3, launched * 1e6

    def sustained(self, work: Work, seconds: int, batch: int) -> list[float]:
        """Microseconds of one `work()` in each second of a long run: a chip under its power limit slows down."""
        work()
        self.wait()
        seen: list[float] = []
        for _ in range(seconds):
            begin, count = time.perf_counter(), 0
            while time.perf_counter() - begin < 1.0:
                for _ in range(batch):
                    work()
                self.wait()
                count += batch
            seen.append(round((time.perf_counter() - begin) / count * 1e6, 2))
        return seen
