"""The package's own source as syntax trees, for tests that judge how it is written."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "strategist"


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name; a folder stands for its `__init__`."""
    return {dotted(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def dotted(path: Path) -> str:
    """The name by which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Every node of a tree; many tests look at the same ones."""
    return tuple(ast.walk(tree))


@cache
def imports(tree: ast.AST) -> tuple[str, ...]:
    """Everything that is imported below a node, by its dotted name."""
    found: list[str] = []
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom):
            found.extend(f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            found.extend(name.name for name in node.names)
    return tuple(found)


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call with the last part of what is called."""
    for node in nodes(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield node.func.id, node
            elif isinstance(node.func, ast.Attribute):
                yield node.func.attr, node


def texts(tree: ast.AST) -> Iterator[str]:
    """Every text that is written in the source."""
    for node in nodes(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
