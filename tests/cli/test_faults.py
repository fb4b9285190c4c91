"""What clusters do to training, done on purpose: the verdict names the rank that failed, and the run goes on or ends truly.

Every case runs the command line with real ranks; `faults/sitecustomize.py` makes one rank fail at one step and phase.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from strategist.runs.checkpoints import checkpoints_in, newest_complete
from strategist.runs.folder import RunFolder, rows_of
from strategist.runs.supervise import SLOW_SECONDS
from tests.cli.harness import PROGRAM, ROOT, Outcome, environment, plan_file
from tests.cli.test_run import PATIENCE_SECONDS, QUICK, _hears_signals, marked

STEPS, EVERY = 6, 2
VERDICT_SECONDS = 10
"""What the reliability page promises for a verdict on a rank that says nothing, after its heartbeat is overdue."""
ORPHANS_DIE_WITHIN_SECONDS = 5
"""What the reliability page promises for ranks whose supervisor was killed."""


@dataclass
class Faulted:
    """A run folder, how the command ended, and what it left."""

    folder: RunFolder
    done: Outcome
    mark: str

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        return list(rows_of(self.folder.verdicts))

    @property
    def losses(self) -> dict[int, float]:
        """The loss of each step; where a step was repeated, that of the last time."""
        return {row["step"]: row["loss"] for row in rows_of(self.folder.of_rank(0, "steps"))}


def commanded(
    *words: str, cwd: Path, fault: str | None = None, more: Mapping[str, str] | None = None
) -> tuple[Outcome, str]:
    """`strategist WORDS` with a fault, and the variable that all of its processes carry."""
    name, value = "STRATEGIST_TEST_MARK", uuid.uuid4().hex
    places = f"{ROOT}:{ROOT / 'tests/cli/faults'}"
    done = subprocess.run(
        (*PROGRAM, *words), env=environment(**{name: value, "PYTHONPATH": places, "STRATEGIST_TEST_FAULT": fault, **(more or {})}), cwd=cwd,
        capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False, preexec_fn=_hears_signals,
    )  # fmt: skip
    return Outcome(done.returncode, done.stdout, done.stderr), f"{name}={value}"


def faulted(
    tmp_path: Path, fault: str | None, *words: str, more: Mapping[str, str] | None = None, pinned: Sequence[str] = ()
) -> Faulted:
    """A run of six steps with a checkpoint after every second, under a fault."""
    path = plan_file(tmp_path, *QUICK, *pinned)
    wanted = ("run", path, "--steps", str(STEPS), "--out", "RUN", "--save-every", str(EVERY), *words)
    done, mark = commanded(*wanted, cwd=tmp_path, fault=fault, more=more)
    return Faulted(RunFolder(str(tmp_path / "RUN")), done, mark)


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the same run without a fault."""
    run = faulted(tmp_path_factory.mktemp("unharmed"), None)
    assert run.done.code == 0, run.done.err
    assert sorted(run.losses) == list(range(STEPS))
    return run.losses


def assert_clean(run: Faulted) -> None:
    """No process, no lock, no half checkpoint, no temporary file is left; what bears a checkpoint's name is complete."""
    assert marked(run.mark) == []
    assert not run.folder.lock.exists()
    assert [*run.folder.root.rglob("*.partial")] == []
    found, passed = newest_complete(run.folder.checkpoints)
    assert (found is not None, passed) == (True, ())
    assert "Traceback" not in run.done.err


HEALED = {
    "killed in a step": ("1:3:backward:kill", "SIGKILL", 2),
    "killed while saving": ("1:4:save:kill", "SIGKILL", 2),
    "an exception": ("1:3:data:raise", "ValueError: the injected fault", 2),
    "left early": ("0:3:data:leave", "left in data of step 3", 2),
    "failed before the first checkpoint": ("1:1:step:kill", "in step of step 1", 0),
    "a full disk": ("0:4:save:full-disk", "disk is full", 2),
    "data that ran out": ("1:3:data:dry", "the data ended before samples", 2),
    "data that cannot be read": ("1:3:data:unreadable", "cannot be read: ConnectionResetError: the disk", 2),
}
CI = "killed in a step"


@pytest.mark.parametrize(
    ("fault", "words", "checkpoint"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.slow if name == CI else pytest.mark.nightly)
        for name, case in HEALED.items()
    ],
)
def test_a_restart_ends_as_if_nothing_had_happened(
    fault: str, words: str, checkpoint: int, tmp_path: Path, unharmed: dict[int, float]
) -> None:
    """After one fault the ranks start again from the newest complete checkpoint, lose fewer steps than lie between two, and
    every loss is bit by bit that of the run without a fault; the verdict names the rank and the place."""
    run = faulted(tmp_path, fault, "--max-restarts", "1")
    assert run.done.code == 0, run.done.err
    (verdict,) = run.verdicts
    assert words in verdict["cause"]
    assert verdict["rank"] == int(fault[0])
    assert (verdict["action"], verdict["evidence"]) == ("restart", "observed")
    assert verdict["checkpoint"] == (f"step-{checkpoint:09d}" if checkpoint else None)
    assert verdict["steps_lost"] <= EVERY
    assert run.losses == unharmed
    assert_clean(run)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["kill", "raise", "leave"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_fault_anywhere_is_healed(seed: int, kind: str, tmp_path: Path, unharmed: dict[int, float]) -> None:
    """Whatever rank, step and phase a seed names: the verdict names them too, and the losses are those without the fault."""
    draw = random.Random(f"{kind} {seed}")
    rank, step = draw.randrange(2), draw.randrange(1, STEPS)
    phase = draw.choice(("data", "forward", "backward", "reduce", "step"))
    run = faulted(tmp_path, f"{rank}:{step}:{phase}:{kind}", "--max-restarts", "1")
    assert run.done.code == 0, run.done.err
    (verdict,) = run.verdicts
    assert (verdict["rank"], verdict["step"]) == (rank, step)
    assert verdict["last_events"][str(rank)] == f"{phase} of step {step}"
    assert run.losses == unharmed
    assert_clean(run)


@pytest.mark.slow
def test_a_fault_while_a_checkpoint_is_written_in_the_background(tmp_path: Path, unharmed: dict[int, float]) -> None:
    """A rank that dies when its files are written and the manifest is not, while training goes on, leaves the older checkpoint;
    the run goes on from there, loses at most two intervals, and every loss is that of the run without a fault."""
    run = faulted(tmp_path, "1:4:save:kill-writing", "--max-restarts", "1", "--async-save")
    assert run.done.code == 0, run.done.err
    (verdict,) = run.verdicts
    assert "SIGKILL" in verdict["cause"]
    assert (verdict["rank"], verdict["checkpoint"]) == (1, f"step-{EVERY:09d}")
    assert verdict["steps_lost"] <= 2 * EVERY
    assert run.losses == unharmed
    assert [each.step for each in checkpoints_in(run.folder.checkpoints)] == [6, 4]
    assert_clean(run)


FATAL = {
    "hanging": ("1:3:data:hang", ("--heartbeat", "15"), "said nothing for", 1),
    "hanging beside the others": ("1:3:backward:hang", ("--heartbeat", "6"), "sitecustomize.py", 1),
    "crashed": ("1:3:backward:crash", (), "SIGSEGV) in backward of step 3: File", 1),
    "stopped": ("1:3:forward:stop", ("--heartbeat", "6"), "stopped by a signal", 1),
    "not a number": ("1:3:data:poison", ("--max-restarts", "5"), "the weights were not updated", 0),
    "never meets the others": ("1:0:start:hang", ("--heartbeat", "6"), "sitecustomize.py", 1),
    "other versions": ("1:0:start:other-version", (), "0.0.0-of-another-time on rank 1", 0),
    "the same fault again and again": ("1:1:data:raise:always", ("--max-restarts", "5"), "the injected fault", 1),
}


@pytest.mark.parametrize(
    ("fault", "words", "cause", "rank"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.slow if name == "hanging" else pytest.mark.nightly)
        for name, case in FATAL.items()
    ],
)
def test_the_end_says_who_and_why(fault: str, words: tuple[str, ...], cause: str, rank: int, tmp_path: Path) -> None:
    """A fault that stays ends with 6 and the rank that caused it, not the one that waited for it; a retry is not tried more
    often than it can help."""
    run = faulted(tmp_path, fault, *words)
    assert run.done.code == 6, run.done.err
    last = run.verdicts[-1]
    assert cause in last["cause"]
    assert cause.split()[0] in run.done.err
    assert (last["rank"], last["action"]) == (rank, "stop")
    assert len(run.verdicts) == (2 if "always" in fault else 1)
    assert marked(run.mark) == []
    assert not run.folder.lock.exists()
    if int(fault[2]) > EVERY:
        assert_clean(run)
    if "--heartbeat" in words:
        patience = max(int(words[1]), SLOW_SECONDS if ":start:" in fault else 0)
        assert (
            run.folder.verdicts.stat().st_mtime - float((tmp_path / "fault.at").read_text())
            <= patience + VERDICT_SECONDS
        )


@pytest.mark.slow
def test_a_request_to_stop_saves_and_another_layout_goes_on(tmp_path: Path, unharmed: dict[int, float]) -> None:
    """SIGTERM in the middle of a step ends with 7 after that step, with a checkpoint of it; `resume` on one rank instead of
    two does the rest with the same losses, and `status` says so."""
    run = faulted(tmp_path, "1:2:forward:term-parent")
    assert run.done.code == 7, run.done.err
    assert "E_INTERRUPTED" in run.done.err
    assert "strategist resume" in run.done.err
    assert [each.step for each in checkpoints_in(run.folder.checkpoints)] == [3, 2]
    assert_clean(run)
    single = ("--model", "llama-debug", "--hardware", "cpu:1", "--seq-len", "32", "--global-batch", "4")
    other = plan_file(tmp_path, *single, name="other.json")
    done, mark = commanded("resume", "RUN", "--plan", other, "--json", cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    assert done.document["report"]["world"] == 1
    assert len(done.document["report"]["steps"]) == STEPS - 3
    assert run.losses == pytest.approx(unharmed, abs=5e-3)  # bf16 on one rank instead of two
    assert marked(mark) == []
    status, _ = commanded("status", "RUN", "--json", cwd=tmp_path)
    assert (status.document["state"], status.document["done"], status.document["steps"]) == ("finished", STEPS, STEPS)
    again, _ = commanded("resume", "RUN", "--json", cwd=tmp_path)
    assert (again.code, again.document["done"]) == (0, STEPS)


@pytest.mark.nightly
def test_collectives_that_differ_are_told_apart(tmp_path: Path) -> None:
    """With torch's own comparison of collectives switched on, a reduction on one rank that the others know nothing of ends the
    run in that step, with torch's description of what each rank was doing."""
    debug, sharded = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, ("--pin", "zero=3")  # DDP crashes in torch under it
    run = faulted(tmp_path, "1:3:reduce:other-collective", more=debug, pinned=sharded)
    assert run.done.code == 6, run.done.err
    assert run.verdicts[-1]["step"] == 3
    assert "Detected mismatch between collectives on ranks" in run.verdicts[-1]["cause"]
    assert {f"Rank {rank} is running collective" in run.verdicts[-1]["cause"] for rank in (0, 1)} == {True}
    assert_clean(run)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "kind", "rank"), [("1:any:data:slow:always", "slow", 1), ("1:9:forward:leap", "leap", None)]
)
def test_what_does_not_stop_a_run_is_said(fault: str, kind: str, rank: int | None, tmp_path: Path) -> None:
    """A rank that is late in every step is named with its score; a loss that leaps is said. Nothing is restarted or changed."""
    path = plan_file(tmp_path, *QUICK)
    done, mark = commanded("run", path, "--steps", "12", "--out", "RUN", cwd=tmp_path, fault=fault)
    assert done.code == 0, done.err
    folder = RunFolder(str(tmp_path / "RUN"))
    found = [row for row in rows_of(folder.warnings) if row["kind"] == kind]
    assert [row["rank"] for row in found] == [rank]
    assert found[0]["step"] < 50
    assert (0.0 <= found[0]["score"] <= 0.9) if kind == "slow" else found[0]["step"] == 9
    assert " ".join(found[0]["sentence"].split()) in " ".join(done.err.split())
    assert list(rows_of(folder.verdicts)) == []
    status, _ = commanded("status", "RUN", "--json", cwd=tmp_path)
    assert found[0] in status.document["warnings"]
    assert marked(mark) == []


@pytest.mark.slow
def test_nothing_that_only_looks_on_can_stop_a_run(tmp_path: Path, unharmed: dict[int, float]) -> None:
    """The log and one rank's rows lie on a full device, and nobody reads what is printed: the run trains as if nothing had
    happened."""
    path = plan_file(tmp_path, *QUICK)
    wanted = ("run", path, "--steps", str(STEPS), "--out", "RUN", "--save-every", str(EVERY))
    places = f"{ROOT}:{ROOT / 'tests/cli/faults'}"
    own = environment(PYTHONPATH=places, STRATEGIST_TEST_FAULT="1:1:data:full-folder")
    with subprocess.Popen(
        (*PROGRAM, *wanted), env=own, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        process.stderr.close()
        assert process.wait(PATIENCE_SECONDS) == 0
    run = Faulted(RunFolder(str(tmp_path / "RUN")), Outcome(0, "", ""), "")
    assert run.losses == unharmed
    assert [each.step for each in checkpoints_in(run.folder.checkpoints)] == [6, 4]
    assert run.verdicts == []


@pytest.mark.nightly
def test_a_driver_that_hangs_is_not_waited_for(tmp_path: Path, unharmed: dict[int, float]) -> None:
    """With bindings of NVML that never answer a run trains as if nothing had happened, and who looks at the machine is told."""
    (tmp_path / "stub").mkdir()
    stub = "import time\nclass NVMLError(Exception): ...\ndef nvmlInit(): time.sleep(1000)\n"
    (tmp_path / "stub" / "pynvml.py").write_text(stub, encoding="utf-8")
    hanging = {"PYTHONPATH": f"{tmp_path / 'stub'}:{ROOT}"}
    run = faulted(tmp_path, None, more=hanging)
    assert run.done.code == 0, run.done.err
    assert run.losses == unharmed
    seen, _ = commanded("plan", "--model", "llama-debug", "--hardware", "local", cwd=tmp_path, more=hanging)
    assert seen.code == 0, seen.err
    assert "NVML did not answer" in " ".join((seen.out + seen.err).split())


@pytest.mark.nightly
def test_one_rank_that_is_asked_to_stop_stops_all(tmp_path: Path) -> None:
    """A cluster may signal a rank and not its supervisor: all ranks save after the same step, and the run ends with 7."""
    run = faulted(tmp_path, "1:2:forward:term")
    assert run.done.code == 7, run.done.err
    assert [each.step for each in checkpoints_in(run.folder.checkpoints)] == [3, 2]
    assert run.verdicts == []
    assert_clean(run)


@pytest.mark.nightly
def test_a_second_request_ends_at_once(tmp_path: Path) -> None:
    """The first Ctrl-C waits for a step that never ends; the second ends everything, says what is lost, and the last complete
    checkpoint is intact."""
    mark = f"STRATEGIST_TEST_MARK={uuid.uuid4().hex}"
    places = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/cli/faults'}", "STRATEGIST_TEST_FAULT": "1:3:data:hang"}
    name, _, value = mark.partition("=")
    wanted = ("run", plan_file(tmp_path, *QUICK), "--steps", str(STEPS), "--out", "RUN", "--save-every", str(EVERY))
    with subprocess.Popen(
        (*PROGRAM, *wanted), env=environment(**{name: value}, **places), cwd=tmp_path, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, preexec_fn=_hears_signals,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        for row in _until(process.stderr, "step 2:"):
            assert "Traceback" not in row
        process.send_signal(signal.SIGINT)
        for row in _until(process.stderr, "stopping after this step"):
            assert "Traceback" not in row
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(PATIENCE_SECONDS) == 130
    assert "the newest checkpoint is that of step 2" in rest
    assert_clean(Faulted(RunFolder(str(tmp_path / "RUN")), Outcome(130, "", rest), mark))


def _until(stream: Any, word: str) -> Iterator[str]:
    for row in stream:
        yield row
        if word in row:
            return


@pytest.mark.nightly
def test_ranks_die_with_their_supervisor_and_the_run_goes_on(tmp_path: Path, unharmed: dict[int, float]) -> None:
    """kill -9 of `run` ends the ranks through the kernel; the next `resume` finds the folder free and finishes it."""
    run = faulted(tmp_path, "0:3:data:kill-parent")
    assert run.done.code == -signal.SIGKILL
    end = time.monotonic() + ORPHANS_DIE_WITHIN_SECONDS
    while marked(run.mark) and time.monotonic() < end:
        time.sleep(0.1)
    assert marked(run.mark) == []
    done, mark = commanded("resume", "RUN", cwd=tmp_path)
    assert done.code == 0, done.err
    assert run.losses == unharmed
    assert_clean(Faulted(run.folder, done, mark))


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["1:4:save:kill", "0:5:step:kill"])
def test_damaged_checkpoints_are_passed_over(fault: str, tmp_path: Path, unharmed: dict[int, float]) -> None:
    """When the newest checkpoint lost a byte after the run had failed, `resume` says so, takes the one before, and the losses
    are those of the run without a fault."""
    run = faulted(tmp_path, fault)
    assert run.done.code == 6
    newest = checkpoints_in(run.folder.checkpoints)[0]
    with open(newest.path / "__1_0.distcp", "r+b") as file:
        file.truncate(1000)
    done, _ = commanded("resume", "RUN", cwd=tmp_path)
    if newest.step == EVERY:  # it was the only one
        assert (done.code, "E_NO_CHECKPOINT" in done.err, newest.path.name in done.err) == (2, True, True)
        return
    assert done.code == 0, done.err
    assert f"passed over {newest.path.name}: __1_0.distcp has 1,000 bytes" in " ".join(done.err.split())
    assert run.losses == unharmed


@pytest.mark.nightly
def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    """`resume` beside a running `run` ends with 2 and the number of the process that holds the folder; that one goes on."""
    path = plan_file(tmp_path, *QUICK)
    wanted = ("run", path, "--steps", "1000000", "--out", "RUN", "--save-every", "1")
    with subprocess.Popen(
        (*PROGRAM, *wanted), env=environment(), cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for _ in _until(process.stderr, "step 3:"):
            continue
        refused, _ = commanded("resume", "RUN", "--json", cwd=tmp_path)
        assert (refused.code, refused.error["code"]) == (2, "E_CONFLICT")
        assert f"process {process.pid} on " in refused.error["message"]
        running, _ = commanded("status", "RUN", "--json", cwd=tmp_path)
        assert running.document["state"] == "running"
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(PATIENCE_SECONDS) == 7


def test_the_injector_is_where_python_looks() -> None:
    """A process of a fault test loads the injector before its program."""
    places = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/cli/faults'}",
        "STRATEGIST_TEST_FAULT": "1:0:data:kill",
        "RANK": "1",
    }
    said = subprocess.run(
        (sys.executable, "-c", "import json, sitecustomize as s; print(json.dumps([s.RANK, s.PHASE, s.KIND]))"),
        env=environment(**places), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(said.stdout) == ["1", "data", "kill"]
