"""Signals as things to read: an exception in the middle of starting a process would lose that process."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType

HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """For the duration, SIGINT, SIGTERM and SIGHUP only go onto a list; `ready` becomes readable when one came.

    Only the main thread may listen to signals; elsewhere the list stays empty.
    """

    def __init__(self) -> None:
        self.came: list[int] = []
        self.ready, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> Signals:
        self._listens = threading.current_thread() is threading.main_thread()
        if self._listens:
            self._wakeup = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, self._note) for number in HEARD}
        return self

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.came.append(number)

    def take(self) -> list[int]:
        """The signals since the last call."""
        came, self.came = self.came, []
        with suppress(BlockingIOError):  # its bytes may have been read with those of the signal before
            os.read(self.ready, 4096)
        return came

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._listens:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup)
        os.close(self.ready)
        os.close(self._wake)
