"""The house stands: imports go down only, siblings never meet, and what is heavy is loaded only where it is used.

Judged twice: on the source as it is written, and on what processes really loaded, which sees every hidden import too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter

import pytest

from tests.cli.harness import completed, process
from tests.source import imports, modules

FLOORS: tuple[tuple[str, ...], ...] = (
    ("catalog",),
    ("facts",),
    ("space", "document"),
    ("rulebook", "memory", "timing", "runs"),
    ("planner", "emitters", "reports", "executor", "readers"),
    ("accuracy",),
    ("measure",),
)
"""Rooms from the ground up; those on one floor never import each other."""

GROUND = ("errors", "units", "columns", "records", "reading", "writing")
"""Below the rooms; these may use each other."""

ROOF = ("fields", "frontend", "ask", "sizing", "sweep", "verify", "api", "judging", "cli", "__main__", "")
"""Above the rooms, each allowed to use those before it; the last is the package itself, which names the api's homes."""

NOWHERE: frozenset[str] = frozenset()
HOMES: Mapping[str, frozenset[str]] = {
    "torch": frozenset({"executor", "measure"}),
    "transformers": NOWHERE,
    "safetensors": frozenset({"executor"}),
    "scipy": frozenset({"accuracy"}),
    "rich": frozenset({"cli"}),
    "networkx": frozenset({"facts"}),
    "pynvml": frozenset({"facts"}),
    "yaml": frozenset({"reading", "emitters"}),
    "pydantic": frozenset({"reading", "document"}),
}
"""Packages from elsewhere and the rooms that may import them (docs/decisions/0002-dependencies.md)."""

HEAVY = tuple(HOMES)


def room_of(module: str) -> str:
    """The room of a module: `strategist.facts.gpus` lies in `facts`."""
    return module.split(".")[1] if "." in module else ""


def rooms_used() -> Iterator[tuple[str, str]]:
    """(room, room it imports from) for every import inside the package, those in functions included."""
    for module, tree in modules().items():
        for name in imports(tree):
            used = room_of(name)
            if name.startswith("strategist.") and used != room_of(module) and used != "__version__":
                yield room_of(module), used


def height(room: str) -> int:
    """The floor of a room."""
    floors = (GROUND, *FLOORS, *((name,) for name in ROOF))
    return next(number for number, rooms in enumerate(floors) if room in rooms)


def test_every_room_has_a_floor() -> None:
    """A new folder or module of the package says first where it stands."""
    rooms = {room_of(module) for module in modules()}
    assert rooms == {*GROUND, *ROOF, *(room for floor in FLOORS for room in floor)}


def test_imports_go_down_only() -> None:
    """No room imports one above it or beside it."""
    wrong = {(a, b) for a, b in rooms_used() if height(a) <= height(b) and not (a in GROUND and b in GROUND)}
    assert wrong == set()


def test_no_module_waits_for_itself() -> None:
    """Modules that load each other on import form no circle."""
    graph = {name: set(_loaded_with(name, tree)) for name, tree in modules().items()}
    assert len(tuple(TopologicalSorter(graph).static_order())) == len(graph)


def _loaded_with(module: str, tree: ast.Module) -> Iterator[str]:
    """Modules of the package that are loaded with a module: imports outside functions and outside TYPE_CHECKING."""
    at_once = (node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)))
    for node in at_once:
        for name in imports(node):
            found = name if name in modules() else name.rpartition(".")[0]
            if found in modules() and found not in (module, "strategist"):
                yield found


@pytest.mark.parametrize("package", HOMES)
def test_heavy_packages_have_few_homes(package: str) -> None:
    """A package from elsewhere is imported in its rooms only."""
    users = {
        room_of(module) for module, tree in modules().items() for name in imports(tree) if name.split(".")[0] == package
    }
    assert users <= HOMES[package]


@pytest.mark.parametrize("package", sorted(set(HOMES) - {"torch"}))
def test_heavy_packages_are_imported_inside_functions(package: str) -> None:
    """Nothing but the executor loads a heavy package because a module was imported."""
    for module, tree in modules().items():
        at_once = {name.split(".")[0] for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)) for name in imports(node)}  # fmt: skip
        assert package not in at_once, module


def test_a_planted_import_is_seen() -> None:
    """The guard sees an import upwards wherever it hides in the source."""
    planted = ast.parse("def f():\n    if True:\n        from strategist.planner import search")
    assert [room_of(name) for name in imports(planted)] == ["planner"]
    assert height("timing") < height("planner")


def loaded(program: str) -> set[str]:
    """The modules of a new process after it ran a program."""
    ran = completed((sys.executable, "-c", f"import sys\n{program}\nprint(*sorted(sys.modules), file=sys.stderr)"))
    assert ran.code == 0, ran.err
    return set(ran.err.split())


def test_importing_strategist_loads_nothing() -> None:
    """`import strategist` adds one module beside the standard library's: no other part of ours, nobody else's."""
    new = loaded("import strategist") - loaded("")
    assert {name for name in new if name.split(".")[0] not in sys.stdlib_module_names} == {"strategist"}


PLANNING = (
    "from strategist.cli import main; main(['plan', '--model-size', '7B'])",
    "from strategist.cli import main; main(['plan', '--json', '--model', 'mixtral-8x7b', '--hardware', 'dgx-h100:4'])",
    "from strategist import recommend; recommend('llama-3.1-405b', 'dgx-h100:256', seq_len=8192, global_batch=2048)",
)


@pytest.mark.parametrize("program", PLANNING)
def test_planning_loads_nothing_heavy(program: str) -> None:
    """A plan is found without torch, transformers, networkx, scipy, rich or a schema library in the process."""
    assert {name.split(".")[0] for name in loaded(program)} & set(HEAVY) == set()


def test_help_loads_no_arithmetic() -> None:
    """The page of commands needs neither NumPy nor the planner."""
    names = loaded("from strategist.cli import main; main(['--help'])")
    assert not names & {"numpy", "strategist.api", "strategist.planner"}
    assert process("--help").code == 0
