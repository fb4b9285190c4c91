"""The notebooks run from top to bottom in a real kernel and say what a Plan says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from strategist import explain, recommend
from tests.cli.harness import environment
from tests.source import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
HEAVY = ("torch", "transformers", "networkx", "scipy", "rich")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_without_outputs(path: Path) -> None:
    """A committed notebook holds no output and no execution count, so nothing in it can become untrue."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell for cell in cells if cell.outputs or cell.execution_count] == []


def executed(path: Path, folder: Path) -> list[str]:
    """What each code cell printed, in a kernel of this interpreter that stands in an empty folder; the last one lists
    the heavy packages that were loaded."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(f"import sys; print(sorted({set(HEAVY)} & set(sys.modules)))"))
    place = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, kernel_name="python3", timeout=120, resources=place)
    client.execute(env=environment())
    return ["".join(_printed(cell)) for cell in notebook.cells if cell.cell_type == "code"]


def _printed(cell: Any) -> Iterator[str]:
    for output in cell.outputs:
        assert (output.output_type, output.name) == ("stream", "stdout"), output
        yield output.text


@pytest.mark.slow
def test_the_first_notebook_says_what_the_plan_says(tmp_path: Path) -> None:
    """Every cell runs; layout, terms, tree and files are those of the Plan; the impossible job is refused with fixes;
    neither torch nor any other heavy package is loaded and nothing is written."""
    plan = recommend("7B", "dgx-h100", seq_len=4096, global_batch=256)
    _, question, answer, terms, tree, others, own, refused, files, heavy = executed(NOTEBOOKS[0], tmp_path)
    assert [row.partition("  [")[0] for row in question.splitlines()] == [
        f"{a.what}: {a.value}" for a in plan.assumptions
    ]
    assert answer.startswith(f"{plan.decision.family} | dp_shard {plan.mesh.dp_shard} | ")
    assert all(f"[{reason.rule}] {reason.sentence}\n" in answer for reason in plan.reasons)
    assert [row.split()[0] for row in terms.splitlines()] == [*(term.name for term in plan.memory.worst.terms), "sum"]
    assert tree == f"{explain(plan)}\n"
    assert [row.split()[0] for row in others.splitlines()[: len(plan.alternatives)]] == [
        a.family for a in plan.alternatives
    ]
    assert ": 32 GPUs\n" in own
    assert "because " in refused
    assert " fits: " in refused
    assert [row.partition(":")[0] for row in files.splitlines()] == ["plan.json", "train.py", "launch.sh"]
    assert heavy == "[]\n"
    assert list(tmp_path.iterdir()) == []
