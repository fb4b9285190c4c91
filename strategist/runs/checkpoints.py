"""Checkpoints as files: a manifest with the digest of every file, written last, in a folder that was renamed last.

torch's loader does not notice a flipped bit and unpickles whatever stands in `.metadata`; so nothing is loaded that the
manifest does not list, and nothing whose digest differs.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from strategist.document.write import dump
from strategist.errors import InputError, StrategistError, shown
from strategist.facts.constants import Constants
from strategist.reading import checked, read_document
from strategist.records import dataclass

FORMAT = "strategist-checkpoint/1"
MANIFEST = "manifest.json"
PARTIAL = ".partial-"
"""Before the name of a checkpoint that is being written or taken away."""

NAME = re.compile(r"step-(\d{9})")
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*|\.metadata")


@dataclass(frozen=True, slots=True)
class FileMark:
    """What a file must be: its size in bytes and its SHA-256."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds. `step` optimizer steps were done, over `samples` sequences, on `world` ranks. `constants`
    are those of the model where they are not plain."""

    format: str
    step: int
    samples: int
    world: int
    plan: str | None
    files: dict[str, FileMark]
    versions: dict[str, str]
    constants: Constants | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder that bears the name of a checkpoint."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Passed:
    """A checkpoint that was passed over, and why, in a sentence."""

    path: Path
    why: str


def name_of(step: int) -> str:
    """The folder name of the checkpoint after so many steps."""
    return f"step-{step:09d}"


def checkpoints_in(folder: Path) -> tuple[Checkpoint, ...]:
    """Folders that bear the name of a checkpoint, newest first; whether they are complete is another question."""
    if not folder.is_dir():
        return ()
    found = ((NAME.fullmatch(entry.name), entry) for entry in folder.iterdir())
    return tuple(
        sorted((Checkpoint(int(m[1]), entry) for m, entry in found if m), key=lambda each: each.step, reverse=True)
    )


def newest_complete(folder: Path) -> tuple[Checkpoint | None, tuple[Passed, ...]]:
    """The newest checkpoint whose every file is what its manifest says, and the newer ones that are not."""
    passed: list[Passed] = []
    for checkpoint in checkpoints_in(folder):
        why = flaw(checkpoint.path)
        if why is None:
            return checkpoint, tuple(passed)
        passed.append(Passed(checkpoint.path, why))
    return None, tuple(passed)


def flaw(path: Path) -> str | None:
    """The first reason not to load a checkpoint, as a sentence; None when it is complete."""
    try:
        manifest = read_manifest(path)
    except StrategistError as problem:
        return problem.message
    return next(flaws_of_files(path, manifest, list(manifest.files)), None)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint. Raises InputError for a missing or malformed one, or one that names other folders."""
    manifest = checked(Manifest, read_document(str(path / MANIFEST), MANIFEST), MANIFEST)
    foreign = [name for name in manifest.files if not FILE_NAME.fullmatch(name) or name == MANIFEST]
    if manifest.format != FORMAT or foreign or ".metadata" not in manifest.files:
        raise InputError(
            "KIND",
            f"{shown(str(path / MANIFEST))} is not the manifest of a checkpoint of this version.",
            flag=MANIFEST,
            value=foreign[0] if foreign else manifest.format,
            hint="Name a checkpoint that strategist wrote.",
        )
    return manifest


def flaws_of_files(path: Path, manifest: Manifest, names: list[str]) -> Iterator[str]:
    """A sentence for each of the named files that is not what the manifest says."""
    for name in names:
        try:
            found = mark_of(path / name)
        except OSError as problem:
            yield f"{name} cannot be read ({problem.strerror})."
            continue
        if found.size != manifest.files[name].size:
            yield f"{name} has {found.size:,} bytes, its manifest says {manifest.files[name].size:,}."
        elif found != manifest.files[name]:
            yield f"{name} has another digest than its manifest says."


def mark_of(path: Path) -> FileMark:
    """Size and digest of a regular file; links are not followed. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "it is not a regular file")
        return FileMark(status.st_size, hashlib.file_digest(file, "sha256").hexdigest())


def publish(partial: Path, target: Path, manifest: Manifest) -> None:
    """Write the manifest, force everything to the disk, and give the folder its name. Raises OSError."""
    with open(partial / MANIFEST, "x", encoding="utf-8") as file:
        file.write(dump(manifest))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(partial)
    os.rename(partial, target)
    sync_folder(target.parent)


def sync_folder(path: Path) -> None:
    """Force the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def keep_newest(folder: Path, count: int) -> None:
    """Take away all but the newest `count` checkpoints; one that is half gone no longer bears a checkpoint's name."""
    for old in checkpoints_in(folder)[count:]:
        set_aside(old.path)
        shutil.rmtree(folder / (PARTIAL + old.path.name))


def set_aside(path: Path) -> None:
    """Take a checkpoint's name away, so that nobody takes it for one; the next `sweep` takes the rest."""
    aside = path.with_name(PARTIAL + path.name)
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)


def sweep(folder: Path) -> tuple[str, ...]:
    """Take away what interrupted writers left behind; its names."""
    left = sorted(folder.glob(PARTIAL + "*")) if folder.is_dir() else []
    for path in left:
        shutil.rmtree(path)
    return tuple(path.name for path in left)
