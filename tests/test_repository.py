"""The tree is tidy: nothing of the place where it was written, a README in every room, links that lead somewhere."""

from __future__ import annotations

import ipaddress
import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from strategist.catalog import rows
from tests.source import PACKAGE, ROOT

IGNORED = (
    ".git",
    ".venv",
    ".venv-plan",
    ".venv-frameworks",
    "__pycache__",
    "build",
    "dist",
    ".mypy_cache",
    ".ruff_cache",
    ".hypothesis",
)

FOREIGN = tuple(a + b for a, b in (("../", "shared"), ("/wo", "rk/"), ("/ro", "ot/"), ("/opt/", "wheels"), ("/opt/", "pypi"),
    ("--index", "-url"), ("--extra-index", "-url"), ("--find", "-links"), ("--trusted", "-host"), ("PIP_", "INDEX_URL")))  # fmt: skip
"""Paths of one machine and other people's registries, put together here so that this file does not hold them."""

URL = re.compile(r"https?://[^\s\"'`<>()\[\]{}|\\\\]+")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(
    r"(?<![\w/.-])(?:\.ci|benchmarks|docs|notebooks|rules|strategist|tests)/[\w./-]*\w\.(?:py|md|toml|jsonl?|csv|txt|ipynb)\b"
)


@cache
def files() -> tuple[Path, ...]:
    """Every file that belongs to the project: what git tracks or would track, or the whole tree where there is no git."""
    if not (ROOT / ".git").exists():
        return tuple(
            p for p in sorted(ROOT.rglob("*")) if p.is_file() and not set(p.relative_to(ROOT).parts) & set(IGNORED)
        )
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return tuple(ROOT / name for name in names if name and (ROOT / name).is_file())


def texts() -> Iterator[tuple[str, str]]:
    """Name and content of every file; all are text."""
    for path in files():
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8", errors="surrogateescape")


def pages() -> list[Path]:
    """Every page in Markdown."""
    return [path for path in files() if path.suffix == ".md"]


def test_no_file_names_the_place_where_it_was_written() -> None:
    """No file holds a path of one machine or the address of a registry."""
    assert [(name, word) for name, text in texts() for word in FOREIGN if word in text] == []


def test_every_address_is_public() -> None:
    """Every web address has a public host name without a port or a password."""
    hosts = {(name, urlsplit(url)) for name, text in texts() for url in URL.findall(text)}
    assert [(name, url.netloc) for name, url in hosts if not is_public(url.netloc)] == []


def is_public(place: str) -> bool:
    """True for a plain name with a top-level domain, false for numbers, ports, users and names of a local network."""
    try:
        ipaddress.ip_address(place)
    except ValueError:
        return bool(re.fullmatch(r"([\w-]+\.)+(?!local|internal|lan|corp|test|example)[a-z]{2,}", place))
    return False


@pytest.mark.parametrize(
    "place", ["10.0.0.1", "localhost", "registry:8080", "pypi.corp", "user:secret@example.org", "[::1]"]
)
def test_a_private_address_would_be_seen(place: str) -> None:
    """The guard refuses numbers, bare names, ports, users and local networks."""
    assert not is_public(place)
    assert is_public("docs.python.org")


def test_every_room_says_what_it_is_for() -> None:
    """Each folder of the package and each top-level folder with files of the project has a README."""
    folders = {ROOT / path.relative_to(ROOT).parts[0] for path in files() if len(path.relative_to(ROOT).parts) > 1}
    rooms = {path.parent for path in files() if PACKAGE in path.parents}
    shown = {folder for folder in folders if not folder.name.startswith(".")}
    assert [str(f.relative_to(ROOT)) for f in sorted(shown | rooms) if not (f / "README.md").is_file()] == []


@pytest.mark.parametrize("path", sorted((PACKAGE / "catalog/data").glob("*.jsonl")), ids=lambda path: path.stem)
def test_every_fact_has_a_source(path: Path) -> None:
    """Every row of every table of the catalogue says where it comes from, in words."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == len(rows(path.stem)) > 0
    assert [line for line in lines if not str(line.get("source", "")).strip()] == []


def test_every_link_leads_somewhere() -> None:
    """Every relative link of every page ends at a file or a folder of the project."""
    targets = ((page, target.partition("#")[0]) for page in pages() for target in LINK.findall(page.read_text("utf-8")))
    inside = ((page, target) for page, target in targets if target and "://" not in target)
    assert [(str(page.relative_to(ROOT)), t) for page, t in inside if not (page.parent / t).exists()] == []


def test_every_path_in_words_exists() -> None:
    """A page that mentions a file by its path in the tree mentions one that is there; pages of test data cite other trees."""
    own = (page for page in pages() if ROOT / "tests/data" not in page.parents)
    said = ((page, path) for page in own for path in PATH.findall(page.read_text("utf-8")))
    assert [(str(page.relative_to(ROOT)), path) for page, path in said if not (ROOT / path).exists()] == []


def test_every_decision_is_listed() -> None:
    """The index of decisions links each page once, and no two pages share a number."""
    folder = ROOT / "docs/decisions"
    there = sorted(path.name for path in folder.glob("*.md") if path.name != "README.md")
    assert sorted(LINK.findall((folder / "README.md").read_text("utf-8"))) == there
    assert len({name[:4] for name in there}) == len(there)
