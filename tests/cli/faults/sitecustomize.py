"""Python loads this first in every process of a fault test: one rank then fails at one step and phase, as it was told.

STRATEGIST_TEST_FAULT is RANK:STEP:PHASE:KIND, or the same with `always` behind it; without that only the first attempt fails.
STEP may be `any`. The fault comes right after the rank said that the phase begins; some faults are what the rank will meet next.
"""

import os

if "STRATEGIST_TEST_FAULT" in os.environ and "RANK" in os.environ:
    import resource
    import signal
    import sys
    import time
    from typing import Any

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

    def _dry() -> None:
        """No more samples for this rank."""
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        def ended(_self: object) -> None:
            raise StopIteration

        _BaseDataLoaderIter.__next__ = ended  # type: ignore[method-assign,assignment]

    def _unreadable() -> None:
        """The next sample of this rank lies on a disk that went away."""
        from strategist.executor.data import SyntheticTokens

        def gone(_self: object, _index: int) -> None:
            raise ConnectionResetError("the disk of the samples went away")

        SyntheticTokens.__getitem__ = gone  # type: ignore[method-assign,assignment]

    def _leap() -> None:
        """The next logits of this rank are a thousand times as large."""
        import gc

        from strategist.executor.session import Session

        (session,) = (each for each in gc.get_objects() if type(each) is Session)

        def larger(_module: object, _inputs: object, output: Any) -> Any:
            hook.remove()
            return output * 1000

        hook = session.parts.model.register_forward_hook(larger)

    def _other_version() -> None:
        import strategist

        strategist.__version__ = "0.0.0-of-another-time"

    def _other_collective() -> None:
        """A reduction that the others know nothing of."""
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(3))

    def _kill_writing() -> None:
        """This rank dies when the files of this step are written and the manifest is not; a checkpoint that is still being
        written when the fault is asked for becomes whole."""
        from strategist.executor import checkpoint
        from strategist.runs.checkpoints import name_of

        whole = checkpoint._own_marks

        def dying(partial: Any) -> Any:
            if partial.name.endswith(name_of(int(STEP))):
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(partial)

        checkpoint._own_marks = dying

    def _full_folder() -> None:
        """What this rank writes down about its steps, and the log of all, go to a device that is full."""
        from pathlib import Path

        for path in (Path("RUN/log.txt"), Path(f"RUN/ranks/{RANK}.steps")):
            path.unlink(missing_ok=True)
            path.symlink_to("/dev/full")

    FAULTS = {
        "dry": _dry,
        "unreadable": _unreadable,
        "leap": _leap,
        "slow": lambda: time.sleep(1.0),
        "other-version": _other_version,
        "other-collective": _other_collective,
        "kill-writing": _kill_writing,
        "full-folder": _full_folder,
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
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
        if first and (os.environ["RANK"], phase) == (RANK, PHASE) and STEP in ("any", str(step)):
            with open("fault.at", "w", encoding="ascii") as file:
                file.write(str(time.time()))
            FAULTS[KIND]()

    BeatWriter.beat = _beat  # type: ignore[method-assign]
