"""--out: a file appears whole or not at all, and what was there before is never lost by accident."""

from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from strategist import writing
from strategist.errors import InputError, InternalError
from strategist.writing import Written, made_folder, write_file, write_files
from tests.cli.harness import PROGRAM, SMALL, Outcome, call, environment, plan_file, plan_text


def save(path: Path, *words: str) -> Outcome:
    """A small plan, written to a path."""
    return call("plan", *SMALL, "--json", "--out", str(path), *words)


def test_the_file_is_what_json_prints(tmp_path: Path) -> None:
    """--out writes the bytes that --json prints, readable for others, and leaves no other file."""
    ran = save(tmp_path / "p.json")
    assert ran.code == 0
    assert (tmp_path / "p.json").read_text(encoding="utf-8") == ran.out == plan_text(*SMALL)
    assert stat.S_IMODE((tmp_path / "p.json").stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == ["p.json"]


def test_the_report_is_printed_too(tmp_path: Path) -> None:
    """Without --json the report goes to stdout and the remark about the file to stderr."""
    ran = call("plan", *SMALL, "--out", str(tmp_path / "p.json"))
    assert "RECOMMENDED" in ran.out
    assert ran.err == f"wrote {tmp_path / 'p.json'}\n"


@pytest.mark.parametrize("force", [False, True])
def test_existing_files(tmp_path: Path, force: bool) -> None:
    """An existing file is kept, byte for byte, unless --force says otherwise."""
    old = tmp_path / "p.json"
    old.write_text("old", encoding="utf-8")
    ran = save(old, *(["--force"] if force else []))
    assert ran.code == (0 if force else 2)
    assert (old.read_text(encoding="utf-8") == "old") is not force
    assert os.listdir(tmp_path) == ["p.json"]


def test_a_link_is_an_existing_file(tmp_path: Path) -> None:
    """A link to nowhere is not written through; with --force the link is replaced and its target stays."""
    target, link = tmp_path / "target", tmp_path / "link.json"
    link.symlink_to(target)
    assert save(link).error["code"] == "E_EXISTS"
    target.write_text("kept", encoding="utf-8")
    assert save(link, "--force").code == 0
    assert target.read_text(encoding="utf-8") == "kept"
    assert not link.is_symlink()


@pytest.mark.parametrize("force", [False, True])
def test_devices_and_pipes_are_not_replaced(tmp_path: Path, force: bool) -> None:
    """What is no file stays what it is, with --force too: root would lose /dev/null."""
    os.mkfifo(tmp_path / "pipe")
    assert save(tmp_path / "pipe", *(["--force"] if force else [])).error["code"] == "E_NOT_A_FILE"
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_file_that_appears_meanwhile_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the check and the last step somebody else writes the file: theirs stays, ours leaves nothing."""
    path = tmp_path / "p.json"
    publish = writing._publish

    def late(temporary: str, target: str, *, force: bool) -> None:
        path.write_text("theirs", encoding="utf-8")
        publish(temporary, target, force=force)

    monkeypatch.setattr(writing, "_publish", late)
    with pytest.raises(InputError, match="exists"):
        write_file(str(path), "ours", "--out")
    assert os.listdir(tmp_path) == ["p.json"]
    assert path.read_text(encoding="utf-8") == "theirs"


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda folder: str(folder), "E_NOT_A_FILE"),
        (lambda folder: str(folder / "no" / "p.json"), "E_FILE_NOT_FOUND"),
        (lambda folder: "", "E_EMPTY"),
        (lambda folder: str(folder / "a\x07b"), "E_CONTROL_CHAR"),
        (lambda folder: str(folder / ("é" * 200)), "E_NAME_TOO_LONG"),
        (lambda folder: "/proc/p.json", "E_FILE_NOT_FOUND E_PERMISSION E_IO"),
    ],
)
def test_bad_targets(tmp_path: Path, make: Callable[[Path], str], code: str) -> None:
    """A target that cannot be is refused before any planning, and nothing is created."""
    ran = call("plan", *SMALL, "--json", "--out", make(tmp_path))
    assert ran.error["code"] in code.split()
    assert ran.error["flag"] == "--out"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_several_files_go_out_together_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """Whichever of three files cannot be published, what stood there stands there, a link as a link, and nothing else does."""
    (tmp_path / "b").symlink_to("elsewhere")
    (tmp_path / "c").write_text("old", encoding="utf-8")
    calls: list[str] = []
    publish = writing._publish

    def full(temporary: str, target: str, *, force: bool) -> None:
        calls.append(target)
        if len(calls) == fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        publish(temporary, target, force=force)

    monkeypatch.setattr(writing, "_publish", full)
    files = [Written(str(tmp_path / name), f"new {name}", 0o755) for name in "abc"]
    with pytest.raises(InternalError, match="No space left"):
        write_files(files, "--out", force=True)
    assert sorted(os.listdir(tmp_path)) == ["b", "c"]
    assert (tmp_path / "b").is_symlink()
    assert (tmp_path / "c").read_text(encoding="utf-8") == "old"
    monkeypatch.undo()
    write_files(files, "--out", force=True)
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == {
        n: f"new {n}" for n in "abc"
    }


def test_targets_of_emit_are_written_together(tmp_path: Path) -> None:
    """One file that stands in the way stops all; a folder that was made for files that cannot be written is taken away."""
    plan, folder = plan_file(tmp_path), tmp_path / "job"
    folder.mkdir()
    (folder / "train.py").write_text("mine", encoding="utf-8")
    refused = call("emit", plan, "--to", "torchrun", "--out", str(folder), "--json")
    assert (refused.error["code"], os.listdir(folder)) == ("E_EXISTS", ["train.py"])
    with pytest.raises(RuntimeError), made_folder(str(tmp_path / "new"), "--out"):
        raise RuntimeError
    assert not (tmp_path / "new").exists()
    assert call("emit", plan, "--to", "torchrun", "--out", str(folder), "--force").code == 0
    assert len(os.listdir(folder)) > 1


def test_folders_without_permission() -> None:
    """A folder that may not be written to is E_PERMISSION; root, who may write anywhere, asks as nobody."""
    folder = tempfile.mkdtemp()
    os.chmod(folder, 0o555)
    me = os.geteuid()
    try:
        if me == 0:
            os.seteuid(65534)
        with pytest.raises(InputError) as caught:
            write_file(os.path.join(folder, "p.json"), "text", "--out")
    finally:
        os.seteuid(me)
        os.rmdir(folder)
    assert caught.value.code == "PERMISSION"


@pytest.mark.slow
@pytest.mark.parametrize("force", [False, True])
def test_a_full_disk(tmp_path: Path, force: bool) -> None:
    """When the machine refuses to write further, the exit code is 1, no part remains and the old file is intact."""
    path = tmp_path / "p.json"
    if force:
        path.write_text("old", encoding="utf-8")
    words = [*PROGRAM, "plan", *SMALL, "--json", "--out", str(path), *(["--force"] if force else [])]
    ran = subprocess.run(
        words, env=environment(), capture_output=True, text=True, check=False, timeout=60, preexec_fn=_small_files
    )
    assert (ran.returncode, '"E_IO"' in ran.stdout, ran.stderr) == (1, True, "")
    assert os.listdir(tmp_path) == (["p.json"] if force else [])
    assert not force or path.read_text(encoding="utf-8") == "old"


def _small_files() -> None:
    """No file of more than 4 KiB: a write beyond it fails as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def test_io_errors_name_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other refusal of the machine is E_IO with its own words, and the temporary file is gone."""

    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(InternalError, match="Input/output error"):
        write_file(str(tmp_path / "p.json"), "text", "--out")
    assert os.listdir(tmp_path) == []


def test_emit_writes_all_or_refuses(tmp_path: Path) -> None:
    """One file in the way and no file is written; --force replaces them all; scripts are executable."""
    plan, folder = plan_file(tmp_path), tmp_path / "job"
    folder.mkdir()
    (folder / "train.py").write_text("mine", encoding="utf-8")
    words = ("emit", plan, "--to", "torchrun", "--out", str(folder))
    assert call(*words, "--json").error["code"] == "E_EXISTS"
    assert os.listdir(folder) == ["train.py"]
    ran = call(*words, "--force", "--json")
    assert sorted(os.listdir(folder)) == ["launch.sh", "plan.json", "train.py"]
    assert ran.document["files"] == sorted(str(folder / name) for name in os.listdir(folder))
    assert os.access(folder / "launch.sh", os.X_OK)
    assert not os.access(folder / "plan.json", os.X_OK)


def test_emit_into_a_file(tmp_path: Path) -> None:
    """A folder that is a file is told as such."""
    plan = plan_file(tmp_path)
    ran = call("emit", plan, "--to", "torchrun", "--out", plan, "--json")
    assert (ran.code, ran.error["code"]) == (2, "E_NOT_A_FILE")


RUN, SCRIPT, FILES = "strategist run plan.json", "strategist run plan.json -- python train.py", "job/launch.sh"


@pytest.mark.parametrize(
    ("model", "target", "start"),
    [
        ("llama-3.2-1b", "torchrun", RUN),
        ("t5-3b", "accelerate", FILES),
        ("mamba-2.8b", "fabric", FILES),
        ("gpt-neox-20b", None, SCRIPT),
    ],
)
def test_what_comes_next_is_possible(
    model: str, target: str | None, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that a report ends with writes files. `run` stands there alone only where the built-in model is the one that was planned,
    and where no front end can say the plan, with a program that brings the module."""
    monkeypatch.chdir(tmp_path)
    job = ("--hardware", "dgx-h100", "--seq-len", "512", "--global-batch", "64")
    said = call("plan", "--model", model, *job, "--out", "plan.json").out
    words = " ".join(said[said.index("\nnext") :].split())
    assert words.endswith(start)
    assert ("strategist emit" in words) == (target is not None)
    if target is not None:
        assert f"strategist emit plan.json --to {target} --out job" in words
        assert call("emit", "plan.json", "--to", target, "--out", "job").code == 0
        assert (tmp_path / FILES).exists()
