"""What stands around a job: pinned packages that do not load together, and folders that hide a package."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator

from strategist.document.judgement import Finding
from strategist.errors import InputError, shown
from strategist.readers.foreign import Foreign, Reader, Source, finding

_PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*===?\s*([0-9][\w.+!-]*)", re.MULTILINE)
BROKEN = {("torch", "2.13.0"): {"torchvision": "0.28.0", "torchaudio": "2.11.0"}}
"""Versions that were seen not to load beside a torch (measured on CPUs)."""

MARK = "pyvenv.cfg"
"""The file that a virtual environment has in its folder."""


def read_pins(source: Source, ranks: int | None) -> Foreign:
    """Pinned packages that do not load together."""
    pins = {name.lower().replace("_", "-"): version.partition("+")[0] for name, version in _PIN.findall(source.text)}
    return Foreign(says={}, findings=tuple(_companions(pins)))


def _companions(pins: dict[str, str]) -> Iterator[Finding]:
    for (name, version), companions in BROKEN.items():
        for package, seen in companions.items():
            if pins.get(name) == version and pins.get(package) == seen:
                yield finding("torch-companions", package, package=package, version=seen, torch=version)


def read_imports(source: Source, ranks: int | None) -> Foreign:
    """Folders beside the script that hide a package which it imports. Raises InputError PARSE for what is not Python."""
    return Foreign(says={}, findings=tuple(shadows(tree_of(source), source.path)))


def tree_of(source: Source) -> ast.Module:
    """The script, parsed. Raises InputError PARSE for what is not Python."""
    try:
        return ast.parse(source.text)
    except (SyntaxError, ValueError, RecursionError) as problem:
        raise InputError(
            "PARSE",
            f"{shown(source.path)} is not Python: {shown(problem)}.",
            flag="FILE",
            value=source.path,
            hint="Check that line.",
        ) from None


def shadows(tree: ast.Module, path: str) -> Iterator[Finding]:
    """Folders beside the script of that path that hide a package which it imports."""
    folder = os.path.dirname(path)
    for package in sorted(set(_imported(tree))):
        if os.path.isfile(os.path.join(folder, package, MARK)):
            yield finding("shadowed-package", f"{package}/", folder=f"{package}/", package=package)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Top-level names of everything that the script imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def is_pins(source: Source) -> bool:
    """A list of requirements, by its name."""
    name = os.path.basename(source.path)
    return name.startswith(("requirements", "constraints")) and name.endswith((".txt", ".in"))


def is_python(source: Source) -> bool:
    """A Python script, by its ending."""
    return source.path.endswith(".py")


REQUIREMENTS = Reader(
    name="requirements", title="pinned packages", recognises=is_pins, read=read_pins, profile="strategist"
)
PYTHON = Reader(name="python", title="Python script", recognises=is_python, read=read_imports, profile="strategist")
