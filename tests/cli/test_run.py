"""`strategist run` with real processes: the promise to a laptop, other people's scripts, ends without orphans."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from strategist.document.load import load_plan
from tests.cli.harness import PROGRAM, Outcome, call, environment, plan_file

QUICK = ("--model", "llama-debug", "--hardware", "cpu:2", "--seq-len", "32", "--global-batch", "4")
"""A question whose steps take a fraction of a second."""

PATIENCE_SECONDS = 300
"""A machine that runs other things beside these tests is slow; nothing is measured here."""


def ran(*words: str, cwd: Path | None = None) -> Outcome:
    """`strategist WORDS` as a process of its own, with time to start ranks."""
    done = subprocess.run(
        (*PROGRAM, *words), env=environment(), cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )  # fmt: skip
    return Outcome(done.returncode, done.stdout, done.stderr)


def on_terminal(*words: str, cwd: Path) -> Outcome:
    """The same with a terminal for stderr, as somebody at a keyboard has."""
    keyboard, screen = pty.openpty()
    done = subprocess.Popen(
        (*PROGRAM, *words), env=environment(TERM="xterm", COLUMNS="100"), cwd=cwd, stdout=subprocess.PIPE, stderr=screen
    )
    os.close(screen)
    shown: list[bytes] = []
    reader = threading.Thread(target=_read_all, args=(keyboard, shown))
    reader.start()
    out, _ = done.communicate(timeout=PATIENCE_SECONDS)
    reader.join()
    os.close(keyboard)
    return Outcome(done.returncode, out.decode(), b"".join(shown).decode())


def _read_all(keyboard: int, shown: list[bytes]) -> None:
    while True:
        try:
            piece = os.read(keyboard, 65536)
        except OSError:  # how Linux says that nobody writes to a terminal any more
            return
        if not piece:
            return
        shown.append(piece)


@pytest.mark.slow
def test_the_promise_to_a_laptop(tmp_path: Path) -> None:
    """Plan for four CPU ranks with tp=2,pp=2 and run: twenty steps with a bar on the terminal, the loss falls, and
    predicted and measured stand side by side on stdout."""
    question = ("--model", "llama-debug", "--hardware", "local", "--gpus-per-node", "4", "--pin", "tp=2,pp=2")
    assert ran("plan", *question, "--out", "p.json", cwd=tmp_path).code == 0
    done = on_terminal("run", "p.json", cwd=tmp_path)
    assert done.code == 0, done.err
    head, columns, *rows = done.out.splitlines()
    assert head.startswith("20 steps on 4 ranks, loss ")
    first, last = (float(word) for word in head.split("loss ")[1].split(" to "))
    assert last < first - 1
    assert columns.split() == ["predicted", "measured", "ratio"]
    assert [row.split("  ")[1] for row in rows] == ["step", "tokens/s", "peak memory device"]
    assert "20/20" in done.err
    assert "step 3:" not in done.err  # beside a bar a line per step is noise
    assert "Traceback" not in done.err


@pytest.mark.slow
def test_json_is_one_document_with_the_terms_of_the_plan(tmp_path: Path) -> None:
    """--json prints one document: each term with the Plan's prediction, the run's measurement and their ratio, and the
    report that they follow from; nothing else, not even progress."""
    path = plan_file(tmp_path, *QUICK)
    done, plan = ran("run", path, "--steps", "4", "--json"), load_plan(path)
    assert (done.code, done.err) == (0, "")
    document = done.document
    terms = {term["term"]: term for term in document["terms"]}
    steps, memory = document["report"]["steps"], document["report"]["memory"]
    seconds = median(step["seconds"] for step in steps[1:])
    assert document["plan"] == plan.seal
    assert (len(steps), len(memory)) == (4, 2)
    assert (terms["step"]["predicted"], terms["step"]["measured"]) == (plan.time.step.value, seconds)
    assert terms["tokens_per_second"]["measured"] == pytest.approx(32 * 4 / seconds)
    assert terms["peak_memory_device"]["predicted"] == plan.memory.worst.device
    assert terms["peak_memory_device"]["measured"] == max(rank["resident_bytes"] for rank in memory)
    assert all(term["ratio"] == term["predicted"] / term["measured"] for term in terms.values())


@pytest.mark.slow
def test_the_emitted_script_is_a_command_to_run(tmp_path: Path) -> None:
    """`run p.json -- python train.py` starts the emitted script once per rank, passes its words on, and leaves stdout to
    the document."""
    path = plan_file(tmp_path, *QUICK)
    assert call("emit", path, "--to", "torchrun", "--out", str(tmp_path / "job")).code == 0
    done = ran("run", path, "--json", "--", "python", "train.py", "--steps", "3", cwd=tmp_path / "job")
    assert done.code == 0, done.err
    assert done.document["command"] == ["python", "train.py", "--steps", "3"]
    assert (done.document["ranks"], done.document["exit"]) == (2, 0)
    assert [row.split("  ")[0] for row in done.err.splitlines() if row.startswith("step ")] == [
        "step 0",
        "step 1",
        "step 2",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [("python", "-u", "say.py"), ("say.py",), ("bash", "-c", 'echo "rank $RANK of $WORLD_SIZE"')]
)
def test_any_command_is_run_once_per_rank(tmp_path: Path, command: tuple[str, ...]) -> None:
    """Python with flags, a script alone and a program that is not Python: each is started as typed, once per rank."""
    say = "import os\nos.write(1, f\"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n\".encode())\n"
    (tmp_path / "say.py").write_text(say)
    done = ran("run", plan_file(tmp_path, *QUICK), "--", *command, cwd=tmp_path)
    assert (done.code, done.out) == (0, ""), done.err
    assert sorted(row for row in done.err.splitlines() if row.startswith("rank")) == ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.slow
def test_a_script_that_fails_is_a_failed_training(tmp_path: Path) -> None:
    """When one rank of somebody's script raises, run ends with 6 and the rank's words, under --json as a document."""
    (tmp_path / "broken.py").write_text(
        "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('no data here')\n"
    )
    done = ran("run", plan_file(tmp_path, *QUICK), "--json", "--", "python", "broken.py", cwd=tmp_path)
    assert (done.code, done.error["code"]) == (6, "E_TRAINING")
    assert "no data here" in done.error["message"] + done.err


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("own", [True, False], ids=["built-in", "script"])
def test_an_end_leaves_no_orphans(tmp_path: Path, number: int, code: int, own: bool) -> None:
    """Ctrl-C, kill and a closed terminal end every rank before they end us, without a traceback of ours."""
    mark = f"STRATEGIST_TEST_MARK={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    (tmp_path / "sleeper.py").write_text("import time\nprint('step 1: up', flush=True)\ntime.sleep(1000)\n")
    job = ("--steps", "1000000") if own else ("--", "python", "sleeper.py")
    path = plan_file(tmp_path, *QUICK)
    process = subprocess.Popen(
        (*PROGRAM, "run", path, *job), env=environment(**{name: value}), cwd=tmp_path, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, preexec_fn=_hears_signals,
    )  # fmt: skip
    assert process.stderr is not None
    patience = threading.Timer(PATIENCE_SECONDS, _kill, (mark,))
    patience.start()
    try:
        for row in process.stderr:
            if row.startswith("step 1"):
                break
        assert len(marked(mark)) >= 3  # we and two ranks
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.wait(PATIENCE_SECONDS) == code
        assert marked(mark) == []
        assert "strategist/cli" not in rest
        assert ("nothing of it was saved" in rest) == own  # what becomes of a script's work its owner knows
    finally:
        patience.cancel()
        _kill(mark)
        process.wait()
        process.stderr.close()


def _hears_signals() -> None:
    """A job in the background is born deaf to some signals; what we start here is not."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _kill(mark: str) -> None:
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Living processes that carry a variable in their environment: those that we started, whatever their session."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal() and _carries(entry, mark)]


def _carries(entry: Path, mark: str) -> bool:
    try:
        is_marked = mark.encode() in (entry / "environ").read_bytes().split(b"\0")
        return is_marked and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # it ended while we looked
        return False


def _more_gpus(plan: dict[str, Any]) -> None:
    plan["strategy"]["backend"] = "nccl"


REFUSALS: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], Any] | None, tuple[str, ...], int, str, str]] = {
    "assumed hardware": (("--model", "llama-debug"), None, (), 4, "E_ASSUMED_HARDWARE", "--accept-hardware"),
    "other hardware": (("--model", "llama-debug", "--hardware", "dgx-h100"), None, (), 4, "E_FACTS_DIFFER", "--accept-hardware"),
    "more nodes": (("--model", "llama-debug", "--hardware", "dgx-h100:2"), None, (), 4, "E_FACTS_DIFFER", "emit"),
    "more ranks than GPUs": (
        ("--model", "llama-debug"), None, ("--accept-hardware",), 3, "E_UNSUPPORTED_DEVICE", "--hardware local",
    ),
    "more ranks than GPUs, sealed by hand": (QUICK, _more_gpus, ("--allow-edited",), 3, "E_UNSUPPORTED_DEVICE", "emit"),
    "a broken seal": (QUICK, lambda plan: plan.update(made_by="me"), (), 4, "E_DIGEST", "check PLAN --seal"),
    "no seal": (QUICK, lambda plan: plan.update(seal=None), (), 4, "E_DIGEST", "--allow-edited"),
    "a layout it lacks": (
        ("--model", "llama-debug", "--hardware", "cpu:2", "--seq-len", "2048", "--pin", "offload=parameters,tiling=8,recompute=selective"), None, (), 3, "E_UNSUPPORTED",
        "--frontend strategist",
    ),
    "a model it lacks": (("--model", "bloom-560m", "--hardware", "cpu:2", "--seq-len", "32"), None, (), 3, "E_UNSUPPORTED", "-- python"),
}  # fmt: skip
"""What is wrong -> question, edit, further words of run, exit code, error code, and a piece of the way out."""


@pytest.mark.parametrize(("question", "edit", "words", "exit_code", "code", "way"), REFUSALS.values(), ids=REFUSALS)
def test_run_refuses_with_code_and_way_out(
    tmp_path: Path, question: tuple[str, ...], edit: Any, words: tuple[str, ...], exit_code: int, code: str, way: str
) -> None:
    """Nothing starts for a plan that cannot be trusted or run here; the error says how to go on."""
    path = plan_file(tmp_path, *question)
    if edit is not None:
        plan = json.loads(Path(path).read_text(encoding="utf-8"))
        edit(plan)
        Path(path).write_text(json.dumps(plan), encoding="utf-8")
    done = call("run", path, *words, "--json")
    assert (done.code, done.error["code"]) == (exit_code, code)
    assert way in done.error["hint"]
