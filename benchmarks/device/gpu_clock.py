"""How long work takes on a GPU, apart from how long its host takes to launch it.

The device is kept busy before each timed run, so that the host is ahead and no gap between kernels is in the time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Work = Callable[..., object]
Prepare = Callable[[], tuple[Any, ...]]

LEAD_CYCLES = 20_000_000
"""Cycles of the multiprocessors' clock for which the device is kept busy, about ten milliseconds."""


class GpuClock:
    """Times on one GPU; on the CPU, to try a script, the host's time stands for both."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"

    def wait(self) -> None:
        """Until the device has done everything."""
        if self._on_gpu:
            torch.cuda.synchronize()

    def timed(
        self, work: Work, prepare: Prepare = tuple, *, repeats: int = 9, warm_up: int = 3, leads: int = 1
    ) -> dict[str, float]:
        """Medians in microseconds: `device_us` from the first kernel to the last, `host_us` until all were launched. `prepare`
        makes what one run takes, outside the time; `leads` is how many times ten milliseconds the host is ahead."""
        spans = [self._once(work, prepare, leads) for _ in range(warm_up + repeats)][warm_up:]
        device, host = (statistics.median(column) for column in zip(*spans, strict=True))
        return {"device_us": round(device, 2), "host_us": round(host, 2)}

    def _once(self, work: Work, prepare: Prepare, leads: int) -> tuple[float, float]:
        given = prepare()
        self.wait()
        if not self._on_gpu:
            begin = time.perf_counter()
            work(*given)
            span = (time.perf_counter() - begin) * 1e6
            return span, span
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(LEAD_CYCLES * leads)
        start.record()
        begin = time.perf_counter()
        work(*given)
        launched = time.perf_counter() - begin
        end.record()
        self.wait()
        return start.elapsed_time(end) * 1e3, launched * 1e6

    def sustained(self, work: Work, seconds: float, batch: int) -> list[float]:
        """Microseconds of one `work()` in each second of a long run: a chip under its power limit slows down."""
        work()
        self.wait()
        seen: list[float] = []
        for _ in range(int(seconds)):
            begin, count = time.perf_counter(), 0
            while time.perf_counter() - begin < 1.0:
                for _ in range(batch):
                    work()
                self.wait()
                count += batch
            seen.append(round((time.perf_counter() - begin) / count * 1e6, 2))
        return seen
