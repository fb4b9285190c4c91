"""A run folder survives those who write it: whole files, complete checkpoints, one supervisor."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strategist.document.write import dump
from strategist.errors import InputError, StaleError
from strategist.runs.beats import BeatWriter, read_beat
from strategist.runs.checkpoints import (
    FORMAT,
    MANIFEST,
    PARTIAL,
    Manifest,
    checkpoints_in,
    keep_newest,
    mark_of,
    name_of,
    newest_complete,
    publish,
    sweep,
)  # fmt: skip
from strategist.runs.folder import append_row, rows_of, write_whole
from strategist.runs.job import require_same_job
from strategist.runs.launch import Ranks, environment_of
from strategist.runs.lock import is_held, locked
from strategist.runs.signals import Signals
from tests.plans import make_plan, tiny_gpt2


def checkpoint(folder: Path, step: int) -> Path:
    """A complete checkpoint of some bytes."""
    partial = folder / (PARTIAL + name_of(step))
    partial.mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp"):
        (partial / name).write_bytes(bytes(range(256)) * (step + 1))
    files = {path.name: mark_of(path) for path in partial.iterdir()}
    manifest = Manifest(format=FORMAT, step=step, samples=8 * step, world=1, plan=None, files=files, versions={})
    publish(partial, folder / name_of(step), manifest)
    return folder / name_of(step)


def test_the_newest_complete_checkpoint_wins(tmp_path: Path) -> None:
    """Broken newer ones are passed over, each with its reason; a folder without its name is no checkpoint."""
    good, cut, flipped, bare = (checkpoint(tmp_path, step) for step in (4, 8, 12, 16))
    os.truncate(cut / "__0_0.distcp", 3)
    data = bytearray((flipped / "__0_0.distcp").read_bytes())
    data[70] ^= 4
    (flipped / "__0_0.distcp").write_bytes(data)
    (bare / MANIFEST).unlink()
    checkpoint(tmp_path, 20).rename(tmp_path / (PARTIAL + name_of(20)))
    found, passed = newest_complete(tmp_path)
    assert found is not None
    assert (found.step, found.path) == (4, good)
    assert [each.path for each in passed] == [bare, flipped, cut]
    assert [word in each.why for each, word in zip(passed, (MANIFEST, "digest", "3 bytes"), strict=True)] == [True] * 3


def test_old_checkpoints_go_and_leftovers_are_swept(tmp_path: Path) -> None:
    """The newest stay; what a writer left unfinished is taken away by name, and nothing else."""
    for step in (2, 4, 6, 8):
        checkpoint(tmp_path, step)
    (tmp_path / (PARTIAL + name_of(10))).mkdir()
    (tmp_path / "mine.txt").write_text("x")
    keep_newest(tmp_path, 2)
    assert [each.step for each in checkpoints_in(tmp_path)] == [8, 6]
    assert sweep(tmp_path) == (PARTIAL + name_of(10),)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", name_of(6), name_of(8)]


def test_nothing_is_published_over_a_checkpoint(tmp_path: Path) -> None:
    """The rename fails when a checkpoint of that step is there, and that one stays complete."""
    checkpoint(tmp_path, 4)
    with pytest.raises(OSError, match="not empty"):
        checkpoint(tmp_path, 4)
    found, passed = newest_complete(tmp_path)
    assert (found is not None, passed) == (True, ())


HOLDER = "import sys, time\nfrom pathlib import Path\nfrom strategist.runs.lock import locked\nwith locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(100)\n"


def test_a_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    """Another process is refused with the holder's number; once the holder is killed, the folder is free."""
    path = tmp_path / "lock"
    with subprocess.Popen((sys.executable, "-c", HOLDER, str(path)), stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert is_held(path)
        with pytest.raises(InputError, match=f"process {holder.pid} on "), locked(path):
            pass
        holder.kill()
    assert not is_held(path)
    with locked(path):
        assert is_held(path)
    assert not path.exists()


def test_a_lock_that_was_taken_away_is_not_a_lock(tmp_path: Path) -> None:
    """Whoever waited for a file that its holder removed makes a new one: two never hold the same name."""
    path = tmp_path / "lock"
    stale = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(stale, fcntl.LOCK_EX)
    path.unlink()
    with locked(path), pytest.raises(InputError), locked(path):
        pass
    os.close(stale)


def test_a_beat_is_read_as_it_was_written(tmp_path: Path) -> None:
    """The latest beat replaces the one before, whatever their lengths; a file that is none says nothing."""
    writer = BeatWriter(tmp_path / "0.beat", 0)
    writer.beat(123456789, "backward")
    writer.beat(7, "data")
    beat = read_beat(tmp_path / "0.beat")
    assert beat is not None
    assert (beat.rank, beat.pid, beat.step, beat.phase) == (0, os.getpid(), 7, "data")
    assert 0 <= time.monotonic() - beat.at < 60
    assert beat.resident_bytes > 2**20
    (tmp_path / "0.beat").write_text('{"rank": 0}')
    assert read_beat(tmp_path / "0.beat") is read_beat(tmp_path / "1.beat") is None


def test_unfinished_rows_are_passed_over(tmp_path: Path) -> None:
    """A process that dies in the middle of a line loses that line only."""
    path = tmp_path / "rows"
    append_row(path, {"step": 1})
    with path.open("a") as file:
        file.write('{"step": 2, "lo\n[3]\n')
    append_row(path, {"step": 4})
    assert [row["step"] for row in rows_of(path)] == [1, 4]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    """What cannot be encoded is not written: the old text stays, and no temporary file."""
    path = tmp_path / "a.json"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.json", "old")]


def test_another_job_is_refused_with_every_difference() -> None:
    """Model, batch and sequence length decide what is learned; the layout does not."""
    before = make_plan(dp_replicate=2, micro_batch=4)
    require_same_job(before, make_plan(tp=2, micro_batch=8))
    with pytest.raises(StaleError, match=r"model tiny-gpt2.*seq_len 32.*global_batch 2") as refused:
        require_same_job(before, make_plan(tiny_gpt2(), seq_len=32, micro_batch=2))
    assert refused.value.exit_code == 4


@pytest.mark.parametrize(
    "change", [{"format": "strategist-checkpoint/2"}, {"files": {"../x": {"size": 1, "sha256": "0"}}}, {"more": 1}]
)
def test_a_foreign_manifest_is_a_flaw(change: dict[str, object], tmp_path: Path) -> None:
    """Another version, a path that leaves the folder, an unknown key: none is read as a checkpoint."""
    path = checkpoint(tmp_path, 4)
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(dump(manifest | change))
    found, passed = newest_complete(tmp_path)
    assert found is None
    assert passed[0].why.endswith((".", "?"))


def test_signals_are_listed_in_order_and_none_is_lost() -> None:
    """While they are heard, signals interrupt nothing; afterwards the handlers of before are back."""
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert select.select([signals.ready], [], [], 5)[0]
        assert signals.take() == [signal.SIGTERM]
        for number in (signal.SIGHUP, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert signals.take() == [signal.SIGHUP, signal.SIGINT]
        assert signals.take() == []
        assert not select.select([signals.ready], [], [], 0)[0]
    assert signal.getsignal(signal.SIGTERM) is before


def test_ranks_say_their_numbers_and_leave_nobody(tmp_path: Path) -> None:
    """Each rank hears its number and the others' count, what it says is heard whole, its end is known by its code, and what it
    started ends with it."""
    program = (
        "import os, subprocess, sys; child = subprocess.Popen(['sleep', '100']);"
        "os.write(1, f\"{os.environ['RANK']} of {os.environ['WORLD_SIZE']} {child.pid}\\n\".encode()); sys.exit(int(os.environ['RANK']) * 3)"
    )
    rows: list[str] = []
    with Ranks((sys.executable, "-S", "-c", program), 2, environment_of(2, 0, tmp_path / "store")) as ranks:
        while not ranks.over:
            rows += ranks.wait(0.05)
        rows += ranks.last_words()
        children = [int(row.split()[3]) for row in rows]
        assert all(Path(f"/proc/{pid}").exists() for pid in children)
    assert sorted(row.rpartition(" ")[0] for row in rows) == ["0 of 2", "1 of 2"]
    assert ranks.ends == {0: 0, 1: 3}
    for pid in children:
        while Path(f"/proc/{pid}").exists() and state(pid) != "Z":
            time.sleep(0.01)


def state(pid: int) -> str:
    """The letter of a process' state."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
