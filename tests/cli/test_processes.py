"""What only a process of its own can show: closed pipes, missing homes, signals, memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.cli.harness import PROGRAM, SMALL, Outcome, completed, process

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("words", [("plan", *SMALL), ("plan", "--json", *SMALL), ("catalog", "models"), ("--help",)])
@pytest.mark.parametrize("reader", ["true", "head -n 1 >/dev/null"])
def test_closed_pipes(words: tuple[str, ...], reader: str) -> None:
    """A reader that stops early ends us quietly with 0 or 141."""
    line = " ".join((*PROGRAM, *words)) + f" | {reader}; echo ${{PIPESTATUS[0]}}"
    ran = completed(("bash", "-c", line))
    assert ran.out.strip() in ("0", "141")
    assert ran.err == ""


def shell(line: str) -> Outcome:
    """A line of bash in which `strategist` is ours."""
    return completed(("bash", "-c", f'strategist() {{ {" ".join(PROGRAM)} "$@"; }}; {line}'))


@pytest.mark.parametrize("words", ["plan", "plan --json"])
def test_closed_streams(words: str) -> None:
    """Without a stdout a plan is still made; without a stderr an error still has its exit code, and stdout stays clean."""
    ran = shell(f"strategist {words} {' '.join(SMALL)} >&-")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    ran = shell("strategist plan --model nonsense 2>&-")
    assert (ran.code, ran.out, ran.err) == (2, "", "")


@pytest.mark.parametrize("words", ["plan", "plan --json", "explain --json missing.json", "--help"])
def test_a_full_stdout(words: str) -> None:
    """A stdout that takes nothing is the machine's I/O: exit 1 and one sentence on stderr, or the error that came first."""
    ran = shell(f"strategist {words} {' '.join(SMALL) if words.startswith('plan') else ''} >/dev/full")
    assert ran.code == (2 if words.startswith("explain") else 1)
    assert ran.err.startswith(("E_IO", "E_FILE_NOT_FOUND"))
    assert "Traceback" not in ran.err


def test_no_home(tmp_path: Path) -> None:
    """Without HOME, in a folder that may not be written to, the same plan comes out: nothing is cached anywhere."""
    tmp_path.chmod(0o500)
    ran = process("plan", "--json", *SMALL, cwd=tmp_path, HOME=None, XDG_CACHE_HOME="/proc/none", TMPDIR="/proc/none")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == process("plan", "--json", *SMALL).out
    assert os.listdir(tmp_path) == []


def test_a_narrow_terminal() -> None:
    """Twenty columns are enough for every word."""
    ran = process("plan", *SMALL, COLUMNS="20")
    assert (ran.code, ran.err) == (0, "")
    assert max(len(row) for row in ran.out.splitlines()) <= 20


def test_interrupts() -> None:
    """Ctrl-C ends a command with 130 and no traceback, and tells whoever reads JSON."""
    program = (
        "import os, signal, sys, threading, strategist.cli as cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background is born deaf to it
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "cli._dispatch = lambda words: signal.pause()\n"
        "raise SystemExit(cli.main(sys.argv[1:]))\n"
    )
    ran = completed((sys.executable, "-c", program))
    assert (ran.code, ran.out, ran.err) == (130, "", "")
    ran = completed((sys.executable, "-c", program, "size", "--json"))
    assert (ran.code, ran.error["code"], ran.err) == (130, "E_INTERRUPTED", "")
    assert "strategist size" in ran.error["message"]


def test_debugging_shows_the_traceback() -> None:
    """A fault of ours is one sentence, and a traceback only when it is asked for."""
    program = (
        "import strategist.cli as cli\n"
        "cli._dispatch = lambda words: 1 / 0\n"
        "raise SystemExit(cli.main(['plan', '--json']))\n"
    )
    quiet = completed((sys.executable, "-c", program))
    assert (quiet.code, quiet.error["code"]) == (1, "E_INTERNAL")
    assert "division by zero" in quiet.error["message"]
    assert "Traceback" in completed((sys.executable, "-c", program), STRATEGIST_DEBUG="1").err


WEIGHED = (
    "import resource, subprocess, sys\n"
    "ran = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
    "print(ran.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
)
"""Runs a command and prints its exit code and peak memory in KiB. A process starts with its parent's peak as its own, so
a small one stands between this process and the command."""


def test_a_hundred_thousand_nodes_in_little_memory() -> None:
    """The largest cluster that can be asked for is answered in less than 1 GiB, a larger one refused in under 200 MiB."""
    for nodes, limit, ends in (("131072", 2**30, (0, 3)), ("1000000000", 200 * 2**20, (2,))):
        words = ("plan", "--json", "--model-size", "7B", "--gpu", "h100", "--nodes", nodes)
        ran = completed((sys.executable, "-c", WEIGHED, *PROGRAM, *words))
        code, kilobytes = ran.out.split()
        assert int(code) in ends
        assert int(kilobytes) * 1024 < limit


def test_nothing_is_opened_that_was_not_named(tmp_path: Path) -> None:
    """Planning starts no process, opens no socket and writes no file: an audit hook sees every attempt."""
    program = (
        "import sys\n"
        "def hook(event, args):\n"
        "    bad = event.startswith(('subprocess.', 'socket.', 'os.system', 'os.exec', 'os.posix_spawn', 'pickle.'))\n"
        "    writes = event == 'open' and isinstance(args[1], str) and set(args[1]) & set('wax+')\n"
        "    if bad or writes:\n"
        "        sys.stderr.write(f'{event} {args}\\n')\n"
        "        sys.stderr.flush()\n"
        "sys.addaudithook(hook)\n"
        "import strategist.cli as cli\n"
        "raise SystemExit(cli.main(sys.argv[1:]))\n"
    )
    config = Path(__file__).parents[1] / "data/configs/llama-2-7b.json"
    ran = completed((sys.executable, "-c", program, "plan", "--model-config", str(config), "--hardware", "dgx-h100"))
    assert (ran.code, ran.err) == (0, "")


def test_a_plan_has_one_thread() -> None:
    """The console script keeps NumPy from starting threads for products that a plan does not have; the library leaves the
    environment as it was."""
    start = "import os, sys; os.environ.pop('OPENBLAS_NUM_THREADS', None); sys.argv[:1] = ['strategist', 'plan', '--quiet'];"
    script = (
        "os._exit = lambda code: print(code, len(os.listdir('/proc/self/task')));"
        "from strategist.cli import entry; entry()"
    )
    library = "import strategist; strategist.recommend(*sys.argv[4::2]); print('OPENBLAS_NUM_THREADS' in os.environ)"
    ran = [completed((sys.executable, "-c", start + program, *SMALL)) for program in (script, library)]
    assert [(one.code, one.out, one.err) for one in ran] == [(0, "0 1\n", ""), (0, "False\n", "")]
