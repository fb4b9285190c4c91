"""Asks every minor release of a framework which keys it knows, and writes catalog/data/key_ranges.jsonl anew.

`python -m tests.frameworks.key_ranges` downloads the last release of each minor version and reads classes in its sources; nothing of it runs.
What to write in place of a key that is gone is nobody's data but ours: it is kept from the table as it stands.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strategist.catalog import rows
from strategist.facts.key_ranges import OVER, number
from tests.source import ROOT

TABLE = ROOT / "strategist/catalog/data/key_ranges.jsonl"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
Keys = Callable[[str], set[str]]


def fields(*names: str) -> Keys:
    """The annotated fields of some classes of a source."""

    def read(text: str) -> set[str]:
        classes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef) and node.name in names)
        held = (each for kind in classes for each in kind.body if isinstance(each, ast.AnnAssign))
        return {
            each.target.id for each in held if isinstance(each.target, ast.Name) and not each.target.id.startswith("_")
        }

    return read


def options(prefix: str) -> Keys:
    """The long options of a parser that begin so."""
    return lambda text: {name for name in re.findall(r'"--(\w+)"', text) if name.startswith(prefix)}


@dataclass(frozen=True)
class Place:
    """A section of a framework's files, and where its sources say what may stand there, from a minor release on."""

    framework: str
    section: str
    path: str
    keys: Keys
    since: str


PLACES = (
    Place("transformers", "", "transformers/training_args.py", fields("TrainingArguments"), "4.36"),
    Place("trl", "", "trl/trainer/sft_config.py", fields("SFTConfig"), "0.9"),
    Place("accelerate", "", "accelerate/commands/config/config_args.py", fields("BaseConfig", "ClusterConfig"), "0.25"),
    Place("accelerate", "fsdp_config", "accelerate/commands/launch.py", options("fsdp_"), "0.25"),
    Place("accelerate", "parallelism_config", "accelerate/commands/launch.py", options("parallelism_config_"), "0.25"),
    Place("deepspeed", "zero_optimization", "deepspeed/runtime/zero/config.py", fields("DeepSpeedZeroConfig"), "0.9"),
    Place(
        "deepspeed",
        "zero_optimization.offload_optimizer",
        "deepspeed/runtime/zero/offload_config.py",
        fields("DeepSpeedZeroOffloadOptimizerConfig"),
        "0.9",
    ),
)


def minor(release: str) -> str:
    """A release without its last part."""
    return ".".join(release.split(".")[:2])


def last_releases(package: str, since: str) -> list[str]:
    """The last release of each minor version, in order."""
    told = subprocess.run((*PIP, "index", "versions", package), capture_output=True, text=True, check=True).stdout
    listed = next(line for line in told.splitlines() if line.startswith("Available versions:")).partition(":")[2]
    plain = sorted((name.strip() for name in listed.split(",") if re.fullmatch(r"[\d.]+", name.strip())), key=number)
    return [*{minor(name): name for name in plain if number(minor(name)) >= number(since)}.values()]


def sources(package: str, release: str, paths: Sequence[str]) -> dict[str, str]:
    """Some files of a release. Raises KeyError for one that is not in it."""
    with tempfile.TemporaryDirectory() as folder:
        fetch = (*PIP, "download", "-q", "--no-deps", "--no-build-isolation", f"{package}=={release}", "-d", folder)
        subprocess.run(fetch, capture_output=True, check=False)  # a source package is there although it cannot be built
        (file,) = Path(folder).iterdir()
        if file.suffix == ".whl":
            with zipfile.ZipFile(file) as wheel:
                return {path: wheel.read(path).decode() for path in paths}
        with tarfile.open(file) as packed:
            inside = {name.partition("/")[2]: name for name in packed.getnames()}
            return {path: _read(packed, inside[path]) for path in paths}


def _read(packed: tarfile.TarFile, name: str) -> str:
    member = packed.extractfile(name)
    if member is None:
        raise KeyError(name)
    return member.read().decode()


def ranges(
    place: Place, known: Mapping[str, set[str]], instead: Mapping[tuple[str, str, str], str]
) -> Iterator[dict[str, Any]]:
    """A row for each key that not all releases know, which come in order."""
    releases = list(known)
    for key in sorted(set().union(*known.values())):
        have = [release for release in releases if key in known[release]]
        first, last = (None if have[edge] == releases[edge] else minor(have[edge]) for edge in (0, -1))
        if first is None and last is None:
            continue
        row = {"framework": place.framework, "section": place.section, "key": key, "first": first, "last": last}
        row["instead"] = instead.get((place.framework, place.section, key)) if last is not None else None
        row["looked_at"] = f"{minor(releases[0])} to {minor(releases[-1])}"
        row["source"] = f"{place.framework}: {place.path}, in the last release of each minor version"
        yield {name: value for name, value in row.items() if value is not None}


def main() -> None:
    """Write the table."""
    instead = {
        (row["framework"], row["section"], row["key"]): row["instead"] for row in rows("key_ranges") if "instead" in row
    }
    found: list[dict[str, Any]] = []
    newest: dict[str, set[str]] = {}
    for package in dict.fromkeys(place.framework for place in PLACES):
        own = [place for place in PLACES if place.framework == package]
        texts = {
            release: sources(package, release, [place.path for place in own])
            for release in last_releases(package, own[0].since)
        }
        for place in own:
            below = newest.get(OVER.get(package, ""), set())
            known = {release: place.keys(text[place.path]) - below for release, text in texts.items()}
            newest.setdefault(package, next(reversed(known.values())))
            found += ranges(place, known, instead)
    TABLE.write_text("".join(f"{json.dumps(row)}\n" for row in found), encoding="utf-8")


if __name__ == "__main__":
    main()
