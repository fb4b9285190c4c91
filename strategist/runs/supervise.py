"""One run from outside: start the ranks, hear them, judge their end, start again from the newest complete checkpoint."""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from strategist.document.write import as_document
from strategist.errors import InterruptError, TrainingError
from strategist.records import dataclass, replace
from strategist.runs.beats import SLOW, Beat, read_beat
from strategist.runs.checkpoints import Checkpoint, checkpoints_in, newest_complete, set_aside, sweep
from strategist.runs.folder import RunFolder, append_row
from strategist.runs.health import Health
from strategist.runs.launch import Ranks, environment_of
from strategist.runs.signals import Signals
from strategist.runs.verdict import Evidence, Failure, Verdict, judge

SAVED = 7
"""Exit code of a rank that saved and stopped because it was asked to."""

TICK_SECONDS = 0.2
GRACE_SECONDS = 5.0
"""How long the others may take to say what they know after one rank failed; they look for its words for three."""
SLOW_SECONDS = 120.0
"""How long ranks may at least take to start, meet, build, load or save, however short a step's heartbeat is."""
PATIENCE_SECONDS = 30.0
"""How long a foreign program may take to end after SIGTERM, as with torchrun."""
TAIL = 20
CRASHES = tuple(-number for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE))
"""Exit codes of ranks that wrote their stack when they crashed (Python's faulthandler)."""

Commands = Callable[[Checkpoint | None], Sequence[str]]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to start and how to treat it. `reports` says that the ranks write heartbeats and their own words, `saves` that
    they answer SIGTERM with a checkpoint."""

    command: Commands
    world: int
    folder: RunFolder
    reports: bool
    saves: bool
    heartbeat_s: float
    max_restarts: int = 0


def supervise(launch: Launch, on_row: Say, remark: Say) -> tuple[str, ...]:
    """Run to the end; the last rows that the ranks said. `on_row` gets each row, `remark` what we did ourselves.

    Raises TrainingError with the verdict when it failed for good, InterruptError when it saved on request,
    KeyboardInterrupt or SystemExit (128 + signal) when it was ended without saving.
    """
    before: list[Verdict] = []
    start = _start_point(launch, remark)
    while True:
        run = _Attempt(launch, len(before), on_row, remark)
        verdict = run.go(start)
        if verdict is None:
            return tuple(run.tail)
        start = _start_point(launch, remark)
        verdict = _decided(verdict, before, start, may_restart=len(before) < launch.max_restarts)
        append_row(launch.folder.verdicts, as_document(verdict))
        if verdict.action != "restart":
            raise _failed(verdict, run.tail)
        before.append(verdict)
        remark(f"{verdict.cause} Starting again ({len(before)} of {launch.max_restarts}).")


def _start_point(launch: Launch, remark: Say) -> Checkpoint | None:
    """The checkpoint to start from; says which newer ones were passed over and why, and frees their names."""
    for name in sweep(launch.folder.checkpoints):
        remark(f"swept {name}, which was never finished")
    checkpoint, passed = newest_complete(launch.folder.checkpoints)
    for each in passed:
        remark(f"passed over {each.path.name}: {each.why}")
        set_aside(each.path)
    return checkpoint


def _decided(verdict: Verdict, before: Sequence[Verdict], start: Checkpoint | None, *, may_restart: bool) -> Verdict:
    """The verdict with what is done about it: the same end in the same step twice is an end for good."""
    again = any((old.rank, old.step) == (verdict.rank, verdict.step) for old in before)
    if again:
        verdict = replace(verdict, retry="will fail again")
    reached = max((int(place.rpartition(" ")[2]) for place in verdict.last_events.values()), default=0)
    gives_up = verdict.retry == "will fail again" or not may_restart
    return replace(
        verdict,
        action="stop" if gives_up else "restart",
        checkpoint=start.path.name if start else None,
        steps_lost=max(0, reached - (start.step if start else 0)),
    )


def _failed(verdict: Verdict, tail: Sequence[str]) -> TrainingError:
    spoken = [row for row in tail if row.strip()][-3:]
    return TrainingError(
        "TRAINING",
        f"The training processes failed: {verdict.cause}",
        value=verdict.rank,
        hint=f"A retry {verdict.retry if verdict.retry != 'unknown' else 'may or may not succeed'}. "
        f"The ranks' last lines: {' / '.join(spoken) or 'none'}",
    )


class _Attempt:
    """One start of all ranks, until they ended."""

    def __init__(self, launch: Launch, number: int, on_row: Say, remark: Say) -> None:
        self.launch, self.number, self.on_row, self.remark = launch, number, on_row, remark
        self.tail: list[str] = []
        self.asked: list[int] = []
        self.first_ends: dict[int, int] = {}
        self.deadline: float | None = None

    def go(self, checkpoint: Checkpoint | None) -> Verdict | None:
        """Start the ranks and wait; None when they did all that was asked."""
        self._clear()
        with tempfile.TemporaryDirectory(prefix="strategist-meet-") as meeting, Signals() as signals:
            environment = environment_of(self.launch.world, self.number, Path(meeting, "store"))
            self.began = time.monotonic()
            self.health = Health(self.launch.folder, self.launch.world)
            with Ranks(self.launch.command(checkpoint), self.launch.world, environment) as ranks:
                trouble = self._follow(ranks, signals)
                for row in ranks.last_words():
                    self._heard(row)
                ends, evidence = dict(ranks.ends), self._evidence(ranks, trouble) if trouble else None
            self.asked += signals.take()
            if evidence is not None:
                evidence = replace(evidence, failures=self._failures())
        self._answer(ends)
        return judge(evidence, self.number) if evidence is not None else None

    def _clear(self) -> None:
        """Take away what the ranks of an earlier attempt said about themselves, except their steps."""
        folder = self.launch.folder
        folder.ranks.mkdir(exist_ok=True)
        for path in folder.ranks.iterdir():
            if path.suffix != ".steps":
                path.unlink()

    def _follow(self, ranks: Ranks, signals: Signals) -> str | None:
        """Hear the ranks until all ended or something is wrong; what kind of wrong, if any."""
        while True:
            for row in ranks.wait(TICK_SECONDS, signals.ready):
                self._heard(row)
            self._warn()
            for number in signals.take():
                self._asked_to_end(number, ranks)
            if self.deadline is not None and time.monotonic() > self.deadline:
                return None
            if any(self._is_wrong(rank, code) for rank, code in ranks.ends.items()):
                return self._after_a_failure(ranks, signals)
            if ranks.over:
                return None
            if self.launch.reports and self._is_silent(ranks):
                return "silent"

    def _warn(self) -> None:
        """Pass on what the steps have to say, and keep it where it can be kept."""
        for found in self.health.look():
            self.remark(f"warning: {found.sentence}")
            try:
                append_row(self.launch.folder.warnings, as_document(found))
            except OSError as problem:
                self.remark(f"the warning cannot be written down: {problem}")

    def _heard(self, row: str) -> None:
        self.tail = [*self.tail, row][-TAIL:]
        self.on_row(row)

    def _asked_to_end(self, number: int, ranks: Ranks) -> None:
        """The first request is passed on; the second ends everything at once."""
        self.asked.append(number)
        if len(self.asked) > 1:
            self.deadline = 0.0
        elif self.launch.saves:
            self.remark("stopping after this step, with a checkpoint; once more ends at once")
            ranks.tell(signal.SIGTERM)
        else:
            self.deadline = time.monotonic() + PATIENCE_SECONDS
            ranks.tell(signal.SIGTERM)

    def _is_wrong(self, rank: int, code: int) -> bool:
        if self.asked and not self.launch.saves:
            return False
        beat = self._beat(rank) if self.launch.reports else None
        if beat is not None and (code == 0 or beat.phase == "done"):  # what happens after the work is done harms nobody
            return beat.phase != "done"
        return code not in ((0, SAVED) if self.launch.saves else (0,))

    def _after_a_failure(self, ranks: Ranks, signals: Signals) -> str:
        """Let the others say what they know, or end in their own way."""
        end = time.monotonic() + (GRACE_SECONDS if self.launch.reports else PATIENCE_SECONDS)
        self.first_ends = dict(ranks.ends)
        if not self.launch.reports:
            ranks.tell(signal.SIGTERM)
        while not ranks.over and time.monotonic() < end and not signals.came:
            for row in ranks.wait(TICK_SECONDS, signals.ready):
                self._heard(row)
        return "failed"

    def _is_silent(self, ranks: Ranks) -> bool:
        """Whether some rank has said nothing for longer than it may."""
        return any(
            seconds > (max(self.launch.heartbeat_s, SLOW_SECONDS) if is_slow else self.launch.heartbeat_s)
            for seconds, is_slow in self._silences(ranks)
        )

    def _silences(self, ranks: Ranks) -> Iterator[tuple[float, bool]]:
        """Seconds since the latest word of each rank that is not done, and whether it does what may take long."""
        now = time.monotonic()
        for rank in range(self.launch.world):
            beat = self._beat(rank)
            if rank not in ranks.ends and (beat is None or beat.phase != "done"):
                yield now - (beat.at if beat else self.began), beat is None or beat.phase in SLOW

    def _beat(self, rank: int) -> Beat | None:
        return read_beat(self.launch.folder.of_rank(rank, "beat"))

    def _evidence(self, ranks: Ranks, trouble: str) -> Evidence:
        """What can be seen of the ranks while they still stand."""
        beats = {rank: beat for rank in range(self.launch.world) if (beat := self._beat(rank))}
        if trouble != "silent":
            ends = dict(ranks.ends) if self.launch.reports else self.first_ends  # foreign ones we ended ourselves
            stacks = {rank: place for rank, code in ends.items() if code in CRASHES and (place := self._stack(rank))}
            return Evidence(world=self.launch.world, beats=beats, ends=ends, failures={}, stacks=stacks)
        stopped = tuple(rank for rank, process in enumerate(ranks.processes) if _state(process.pid) in "Tt")
        ranks.tell(signal.SIGUSR1)
        time.sleep(1.0)
        stacks = {rank: place for rank in range(self.launch.world) if (place := self._stack(rank))}
        return Evidence(
            world=self.launch.world, beats=beats, ends=dict(ranks.ends), failures={}, stopped=stopped, stacks=stacks,
            silent_seconds=max((seconds for seconds, _ in self._silences(ranks)), default=0.0),
        )  # fmt: skip

    def _stack(self, rank: int) -> str:
        """The innermost place of a rank's main thread, as faulthandler wrote it: file, line and function."""
        try:
            text = self.launch.folder.of_rank(rank, "stack").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return next((row.strip() for row in text.splitlines() if row.startswith('  File "')), "")

    def _failures(self) -> dict[int, Failure]:
        found = {}
        for rank in range(self.launch.world):
            path = self.launch.folder.of_rank(rank, "failure")
            if path.is_file():
                found[rank] = Failure(**json.loads(path.read_text(encoding="utf-8")))
        return found

    def _answer(self, ends: dict[int, int]) -> None:
        """After a request to end: say how it was met."""
        if self.launch.saves and set(ends.values()) == {SAVED} and len(self.asked) <= 1:
            # None when somebody asked the ranks themselves.
            step = checkpoints_in(self.launch.folder.checkpoints)[0].step
            raise InterruptError(
                "INTERRUPTED",
                f"Stopped on request after {step} steps; all of them are saved.",
                value=step,
                hint=f"Go on with `strategist resume {self.launch.folder.path}`.",
            )
        if not self.asked:
            return
        if set(ends.values()) == {0} and len(ends) == self.launch.world:  # it was done before it heard
            return
        self._say_what_is_lost()
        if self.asked[0] == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.asked[0])

    def _say_what_is_lost(self) -> None:
        if self.launch.saves:
            found = checkpoints_in(self.launch.folder.checkpoints)
            words = f"the newest checkpoint is that of step {found[0].step}" if found else "there is no checkpoint"
            self.remark(f"ended without saving; {words}")
        elif self.launch.reports:
            self.remark(
                "ended, and nothing of it was saved; `strategist run PLAN --out RUN --save-every N` keeps checkpoints"
            )


def _state(pid: int) -> str:
    """The letter for a process' state (proc(5)); a dash where nobody says."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return "-"
