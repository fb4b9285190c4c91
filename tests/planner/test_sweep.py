"""The phase diagram: every cell is the answer that `plan` gives to its question."""

from __future__ import annotations

import pytest

from tests.cli.harness import call

SIZES, NODES, GPUS = ("350M", "7B"), ("1", "2"), ("h100-sxm-80gb", "a10g")
JOB = ("--seq-len", "2048", "--global-batch", "16", "--gpus-per-node", "2", "--forbid", "offload,recompute")
GRID = ("sweep", "--model-size", ",".join(SIZES), "--nodes", ",".join(NODES), "--gpu", ",".join(GPUS), *JOB)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["hf", pytest.param("fastest", marks=pytest.mark.slow)])
def test_every_cell_is_a_plan(policy: str) -> None:
    """Family, step and tokens per second of each cell are those of its plan; where nothing fits `plan` ends with 3."""
    cells = call(*GRID, "--policy", policy, "--json").document["cells"]
    asked = [(gpu, size, nodes) for gpu in GPUS for size in SIZES for nodes in NODES]
    assert [(cell["gpu"], cell["model_size"], str(cell["nodes"])) for cell in cells] == asked
    for cell, (gpu, size, nodes) in zip(cells, asked, strict=True):
        words = ("--model-size", size, "--gpu", gpu, "--nodes", nodes, *JOB, "--policy", policy)
        ran = call("plan", *words, "--json")
        assert ran.code == (3 if cell["family"] is None else 0)
        if cell["family"] is not None:
            plan = ran.document
            assert cell["family"] == plan["decision"]["family"]
            assert cell["step_s"] == pytest.approx(plan["time"]["step"]["value"])
            assert cell["tokens_per_second"] == pytest.approx(plan["time"]["tokens_per_second"])
            assert cell["gpus"] == 2 * int(nodes)
    assert {cell["family"] is None for cell in cells} == {True, False}


def test_pins_hold_in_every_cell() -> None:
    """What is pinned is in the layout of every cell that has one."""
    cells = call(*GRID, "--pin", "tp=2", "--json").document["cells"]
    layouts = [cell["layout"] for cell in cells if cell["layout"]]
    assert layouts
    assert all("tp=2" in layout for layout in layouts)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [20, 80])
def test_every_cell_is_shown_at_any_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each winner is printed however narrow the terminal is, and no line is wider than it."""
    monkeypatch.setenv("COLUMNS", str(columns))
    ran = call(*GRID)
    cells = call(*GRID, "--json").document["cells"]
    assert max(map(len, ran.out.splitlines())) <= columns
    shown = " ".join(ran.out.split())
    assert all(cell["family"] in shown for cell in cells if cell["family"])
    assert all(gpu in shown for gpu in GPUS)


@pytest.mark.parametrize(
    ("words", "code", "flag"),
    [
        (("--nodes", ",".join(map(str, range(1, 402)))), "E_GRID_TOO_LARGE", "--model-size"),
        (("--nodes", "1,0"), "E_TOO_SMALL", "--nodes"),
        (("--nodes", "1,,2"), "E_EMPTY", "--nodes"),
        (("--nodes", "1;2"), "E_PARSE", "--nodes"),
        (("--model-size", "7B,x"), "E_PARSE", "--model-size"),
        (("--gpu", "h100-sxm,h1000-sxm"), "E_UNKNOWN_GPU", "--gpu"),
        (("--hardware", "dgx-h100"), "E_UNKNOWN_KEY", "--hardware"),
    ],
    ids=str,
)
def test_refusals(words: tuple[str, ...], code: str, flag: str) -> None:
    """Too many cells, and a fault in any entry of a list, are refused with the flag."""
    ran = call("sweep", "--model-size", "350M", *words, "--json") if "--model-size" not in words else call("sweep", *words, "--json")  # fmt: skip
    assert (ran.code, ran.error["code"], ran.error["flag"]) == (2, code, flag)
    assert ran.error["hint"]


def test_devices_before_bf16_say_in_what_they_compute() -> None:
    """Cells of one sweep may differ in the number format that was assumed; each says its own."""
    ran = call("sweep", "--model-size", "350M", "--nodes", "1", "--gpu", "a100-sxm-40gb,t4", "--json")
    assert [cell["precision"] for cell in ran.document["cells"]] == ["bf16", "fp16"]
    told = call("sweep", "--model-size", "350M", "--nodes", "1", "--gpu", "a100-sxm-40gb,t4").out
    assert "per node, fp16;" in told
    assert "per node, bf16;" in told
