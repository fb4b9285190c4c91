"""Python loads this first in every process of a fault test: one rank then fails at one step and phase, as it was told.

STRATEGIST_TEST_FAULT is RANK:STEP:PHASE:KIND, or the same with `always` behind it; without that only the first attempt fails.
Nothing of the program is replaced: the fault comes right after the rank said that the phase begins.
"""

import os

if "STRATEGIST_TEST_FAULT" in os.environ and "RANK" in os.environ:
    import resource
    import signal
    import sys
    import time

    from strategist.runs.beats import BeatWriter

    RANK, STEP, PHASE, KIND, *ALWAYS = os.environ["STRATEGIST_TEST_FAULT"].split(":")

    def _raise() -> None:
        raise ValueError("the injected fault")

    def _poison() -> None:
        """A NaN in one weight of this rank."""
        import gc

        import torch

        from strategist.executor.session import Session

        (session,) = (each for each in gc.get_objects() if type(each) is Session)
        with torch.no_grad():
            next(session.parts.model.parameters()).fill_(float("nan"))

    FAULTS = {
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "raise": _raise,
        "hang": lambda: time.sleep(1000),
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "leave": lambda: sys.exit(0),
        "poison": _poison,
        "full-disk": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
        "term-parent": lambda: os.kill(os.getppid(), signal.SIGTERM),
        "int-parent": lambda: os.kill(os.getppid(), signal.SIGINT),
        "kill-parent": lambda: os.kill(os.getppid(), signal.SIGKILL),
    }
    said = BeatWriter.beat

    def _beat(self: BeatWriter, step: int, phase: str) -> None:
        said(self, step, phase)
        first = ALWAYS or os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and (os.environ["RANK"], str(step), phase) == (RANK, STEP, PHASE):
            FAULTS[KIND]()

    BeatWriter.beat = _beat  # type: ignore[method-assign]
