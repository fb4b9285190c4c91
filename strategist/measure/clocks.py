"""When something happened on a device: perf_counter on the CPU, events on a GPU's stream."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

LEAD_CYCLES = 100_000_000
"""Cycles for which a GPU is kept busy before it is timed, about a twentieth of a second: the host gets that far ahead."""


class Clock(Protocol):
    """Marks on the stream that is current, and the time between them once the device has come past both."""

    def mark(self) -> Any:
        """The present of the current stream."""

    def ns(self, begin: Any, end: Any) -> int:
        """Nanoseconds between two marks of one stream, after `settle`."""

    def settle(self) -> None:
        """Wait until the device has done everything."""

    def is_main(self) -> bool:
        """Whether the current stream is the one that the program computes on."""

    def lead(self) -> None:
        """Let the host run ahead, so that no operation's time has launching in it."""


class CpuClock:
    """Operations are done when they return, so there is nothing to wait for and one stream."""

    def mark(self) -> int:
        """See Clock."""
        return time.perf_counter_ns()

    def ns(self, begin: int, end: int) -> int:
        """See Clock."""
        return end - begin

    def settle(self) -> None:
        """See Clock."""

    def is_main(self) -> bool:
        """See Clock."""
        return True

    def lead(self) -> None:
        """See Clock."""


class CudaClock:
    """CUDA events. Made on the stream that the program computes on."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._main = device, torch.cuda.current_stream(device)

    def mark(self) -> torch.cuda.Event:
        """See Clock."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def ns(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> int:
        """See Clock."""
        return round(float(begin.elapsed_time(end)) * 1e6)

    def settle(self) -> None:
        """See Clock."""
        torch.cuda.synchronize(self._device)

    def is_main(self) -> bool:
        """See Clock."""
        return torch.cuda.current_stream(self._device) == self._main

    def lead(self) -> None:
        """See Clock."""
        torch.cuda._sleep(LEAD_CYCLES)  # type: ignore[no-untyped-call]


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    return CpuClock() if device.type == "cpu" else CudaClock(device)
