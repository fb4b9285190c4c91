"""One answer, five commands: what a plan says of itself, `predict`, `explain`, `check`, `compare` and `diff` say too."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from strategist.document.load import load_plan
from strategist.reports.brief import brief
from strategist.reports.lines import text_of
from strategist.units import format_gib, format_seconds
from tests.cli.harness import call
from tests.examples import cases_of

MIXED = {
    "nodes": [
        {"name": "fast", "count": 1, "gpu": "h100-sxm-80gb", "gpu_count": 4, "intra_bw": "450GB/s", "inter_bw": "50GB/s"},
        {"name": "slow", "count": 1, "gpu": "a100-sxm-80gb", "gpu_count": 4, "intra_bw": "300GB/s", "inter_bw": "25GB/s"},
    ]
}  # fmt: skip
"""Machines of two kinds."""
MODELS = ("gpt2", "llama-3.2-1b", "llama-3.1-8b", "olmoe-1b-7b", "mixtral-8x7b", "bert-base-uncased", "vit-l-16", "mamba-130m", "t5-base", "resnet-50", "deepseek-v2-lite", "gemma-2-9b", "gpt-oss-20b", "qwen3-next-80b-a3b")  # fmt: skip
MACHINES = ("dgx-h100", "dgx-h100:2", "aws-g5.12xlarge", "cpu:4", "dgx-b200", "dgx-a100-80gb:3", "mixed")
MORE = (
    (), (), ("--uncalibrated",), ("--headroom", "0.2"), ("--policy", "fastest"), ("--objective", "memory"), ("--precision", "fp8"), ("--precision", "fp32"), ("--optimizer", "sgd"), ("--optimizer", "adamw8bit"),
    ("--optimizer", "muon"), ("--method", "lora"), ("--method", "qlora"), ("--also", "tiling"), ("--also", "uneven_batch"), ("--also", "zb_h1"), ("--pin", "pp=2"), ("--pin", "tp=2,recompute=full"), ("--pin", "cp=2"), ("--frontend", "deepspeed"),
    ("--frontend", "megatron"), ("--frontend", "auto"), ("--expert-imbalance", "1.3"), ("--allow-idle",), ("--tokens", "1B", "--price-per-gpu-hour", "2.5"), ("--forbid", "zero"), ("--pin", "offload=optimizer"),
)  # fmt: skip
"""What else may be said, a word at a time or two."""


def questions() -> st.SearchStrategy[tuple[str, ...]]:
    """A model, machines, sizes, and up to two further wishes."""
    wishes = st.tuples(st.sampled_from(MORE), st.sampled_from(MORE)).filter(lambda two: not two[0] or two[0] != two[1])
    sizes = st.sampled_from(((), ("--seq-len", "512"), ("--global-batch", "24"), ("--seq-len", "1000", "--global-batch", "8"), ("--micro-batch", "3")))  # fmt: skip
    return st.builds(
        lambda model, machine, size, two: ("--model", model, "--hardware", machine, *size, *two[0], *two[1]),
        st.sampled_from(MODELS),
        st.sampled_from(MACHINES),
        sizes,
        wishes,
    )


def leaf(tree: dict[str, Any], name: str) -> float:
    """The largest predicted figure of the branches of `explain` that are called so: each stage has its own peak."""
    return max(branch["predicted"] for branch in tree["children"] if str(branch["name"]).startswith(name))


def disagreements(words: tuple[str, ...], folder: Path) -> list[str] | None:
    """Every figure that a command says differently from the plan; None where there is no plan."""
    (folder / "mixed.json").write_text(json.dumps(MIXED), encoding="utf-8")
    path = folder / "plan.json"
    words = tuple(str(folder / "mixed.json") if word == "mixed" else word for word in words)
    told = call("plan", *words, "--json")
    assert told.code in (0, 2, 3), told
    if told.code:
        return None
    path.write_text(told.out, encoding="utf-8")
    plan, found = told.document, []

    def same(what: str, one: object, other: object) -> None:
        if one != other:
            found.append(f"{what}: {one} in the plan, {other}")

    predicted = call("predict", str(path), "--json")
    if predicted.code:
        return [f"predict: {predicted}"]
    for key in ("mesh", "strategy", "memory", "time", "workload"):
        same(f"predict {key}", plan[key], predicted.document[key])
    same("predict fits", True, predicted.document["fits"] and predicted.document["legal"])
    explained = call("explain", str(path), "--json").document
    same("explain seal", "sealed", explained["seal"])
    same("explain step", plan["time"]["step_ns"], leaf(explained["tree"], "step"))
    peak = plan["memory"]["peak"]["value"]
    same("explain peak", peak, leaf(explained["tree"], "peak memory"))
    checked = call("check", str(path), "--json")
    same("check", {"sound": True, "seal": "sealed"}, checked.document)
    same("diff", 0, call("diff", str(path), str(path)).code)
    compared = call("compare", str(path), str(path), "--json")
    same("compare", 0, compared.code)
    if not compared.code:
        for side in compared.document["sides"]:
            same("compare step", plan["time"]["step"], side["time"])
            same("compare peak", plan["memory"]["peak"], side["memory"])
    text = " ".join(text_of(brief(load_plan(str(path)), 80)).split())
    for said in (f"step {format_seconds(plan['time']['step']['value'])}", f"memory {format_gib(peak)}"):
        same("brief", True, said in text)
    return found


@pytest.mark.slow
@settings(max_examples=cases_of(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(words=questions())
def test_every_command_says_what_the_plan_says(words: tuple[str, ...]) -> None:
    """Step, peak, ledgers and degrees of a drawn job are those of its plan in every command, and the plan is sound."""
    with tempfile.TemporaryDirectory() as folder:
        found = disagreements(words, Path(folder))
    event("a plan" if found is not None else "none")
    assert not found, f"{' '.join(words)}: {found}"
