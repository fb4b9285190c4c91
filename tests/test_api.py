"""The public names in Python: the same answers as the command line, the same codes, and nothing printed."""

from __future__ import annotations

import contextlib
import errno
import inspect
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strategist
from strategist import Plan, StrategistError, Workload, load_cluster, load_model, load_plan, recommend
from strategist.cli import COMMANDS
from strategist.cli.flags import PLAN_FLAGS
from strategist.document.write import dump, seal_state
from strategist.fields import FIELDS
from tests.cli.bad_inputs import FLAT, LLAMA
from tests.cli.harness import call, plan_file, plan_text
from tests.plans import make_plan

QUESTIONS: tuple[dict[str, Any], ...] = (
    {"model": "7B", "hardware": "dgx-h100"},
    {"model": "llama-debug", "hardware": "cpu:4"},
    {"model": "llama-3.1-8b", "hardware": "dgx-h100:4", "seq_len": 8192, "global_batch": 1024},
    {"model": "llama-3.1-8b", "hardware": "dgx-h100:4", "seq_len": 8192, "global_batch": 1024, "tokens": 10**12},
    {"model": "mixtral-8x7b", "hardware": "dgx-h100:4", "pin": "ep=8", "policy": "fastest", "top": 2},
    {"model": "gpt2-xl", "hardware": "dgx-a100-80gb", "headroom": 0.25, "objective": "memory", "forbid": "offload"},
    {"model": "llama-2-7b", "hardware": "dgx-h100", "price_per_gpu_hour": 2.5, "micro_batch": 2, "optimizer": "sgd"},
    {"model": "llama-debug"},
)


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_recommend_is_plan(question: dict[str, Any]) -> None:
    """`recommend` and `plan --json` give the same bytes for the same question."""
    words = [word for key, value in question.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    assert dump(recommend(**question)) == plan_text(*words)


def test_recommend_prints_nothing() -> None:
    """Neither stream is written to."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        plan = recommend(**QUESTIONS[0])
    assert (out.getvalue(), err.getvalue()) == ("", "")
    assert isinstance(plan, Plan)
    assert seal_state(plan) == "sealed"


def layout(plan: Plan) -> tuple[Any, ...]:
    """What was chosen."""
    return plan.mesh, plan.strategy, plan.time, plan.memory


def test_every_way_to_name_a_model(tmp_path: Path) -> None:
    """A configuration as mapping, as path and as shape is one model."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8")
    answers = [layout(recommend(m, "dgx-h100")) for m in (LLAMA, str(path), path, load_model(str(path)))]
    assert answers.count(answers[0]) == 4
    assert recommend(path, "dgx-h100").request.given == (("--model", str(path)), ("--hardware", "dgx-h100"))
    assert recommend(LLAMA, "dgx-h100").request.given[0] == ("--model", "dict")


def test_every_way_to_name_machines(tmp_path: Path) -> None:
    """A hardware file as mapping, as path and as Cluster is one cluster."""
    path = tmp_path / "machines.json"
    path.write_text(FLAT, encoding="utf-8")
    answers = [layout(recommend("1B", h)) for h in (json.loads(FLAT), str(path), path, load_cluster(str(path)))]
    assert answers.count(answers[0]) == 4


def test_a_workload_is_its_fields() -> None:
    """A Workload says the same as its fields, and a field beside it wins."""
    work = Workload(seq_len=2048, global_batch=64, precision="bf16", optimizer="sgd")
    whole = recommend("1B", "dgx-h100", workload=work)
    fields = recommend("1B", "dgx-h100", seq_len=2048, global_batch=64, precision="bf16", optimizer="sgd")
    assert dump(whole) == dump(fields)
    assert recommend("1B", "dgx-h100", workload=work, seq_len=1024).workload.seq_len == 1024


def test_numbers_of_numpy_are_numbers() -> None:
    """What counts as a number in Python is one here, and is written as one."""
    ours = recommend("1B", "dgx-h100", seq_len=np.int64(2048), headroom=np.float32(0.25))  # type: ignore[arg-type]
    assert dump(ours) == dump(recommend("1B", "dgx-h100", seq_len=2048, headroom=0.25))


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"model": 5}, "TYPE"),
    ({"model": None}, "MISSING"),
    ({"model": ""}, "EMPTY"),
    ({"model": {}}, "MISSING"),
    ({"hardware": 5}, "TYPE"),
    ({"hardware": []}, "TYPE"),
    ({"hardware": ""}, "EMPTY"),
    ({"hardware": {}}, "MISSING"),
    ({"nope": 1}, "UNKNOWN_KEY"),
    ({"seq_len": 4.5}, "TYPE"),
    ({"seq_len": "4096"}, "TYPE"),
    ({"seq_len": 0}, "RANGE"),
    ({"global_batch": True}, "TYPE"),
    ({"global_batch": 2**32}, "RANGE"),
    ({"tokens": "1T"}, "TYPE"),
    ({"tokens": -5}, "RANGE"),
    ({"headroom": "x"}, "TYPE"),
    ({"headroom": float("nan")}, "RANGE"),
    ({"headroom": 0.6}, "RANGE"),
    ({"price_per_gpu_hour": float("inf")}, "RANGE"),
    ({"precision": "bf17"}, "CHOICE"),
    ({"objective": ["time"]}, "CHOICE"),
    ({"policy": None}, "CHOICE"),
    ({"top": 0}, "RANGE"),
    ({"top": "5"}, "TYPE"),
    ({"pin": 3}, "TYPE"),
    ({"pin": ""}, "EMPTY"),
    ({"forbid": ("tp",)}, "TYPE"),
    ({"rules": "folder"}, "TYPE"),
    ({"rules": ("no such folder",)}, "FILE_NOT_FOUND"),
    ({"workload": {}}, "TYPE"),
    ({"micro_batch": 2, "pin": "micro_batch=2"}, "CONFLICT"),
)


@pytest.mark.parametrize(("change", "code"), WRONG, ids=lambda value: str(value))
def test_wrong_arguments(change: dict[str, Any], code: str) -> None:
    """A wrong argument is a StrategistError with a code and a hint, never another exception."""
    with pytest.raises(StrategistError) as caught:
        recommend(**({"model": "llama-debug", "hardware": "cpu:2"} | change))
    assert (caught.value.code, caught.value.exit_code, bool(caught.value.hint)) == (code, 2, True)


PLAN = make_plan()
ODD: tuple[tuple[str, tuple[Any, ...], dict[str, Any]], ...] = (
    ("load_plan", (None,), {}),
    ("load_plan", ({"format": "strategist-plan/1"},), {}),
    ("load_observed", (3,), {}),
    ("save_plan", ("plan.json", "other.json"), {}),
    ("save_plan", (PLAN, None), {}),
    ("explain", ("plan.json",), {}),
    ("explain", (PLAN, "run.json"), {}),
    ("emit", ("plan.json", "torchrun"), {}),
    ("emit", (PLAN, 3), {}),
    ("emit", (PLAN, "torchrun", {"job_name": "x"}), {}),
    ("trace", ("plan.json",), {}),
    ("trace", (PLAN,), {"ranks": 0}),
    ("trace", (PLAN,), {"on_rank": 3}),
    ("rehearse", ("plan.json",), {}),
    ("rehearse", (PLAN,), {"steps": "3"}),
    ("rehearse", (PLAN,), {"steps": 2.5}),
    ("rehearse", (PLAN,), {"device": 0}),
    ("predict", ("7B", "dgx-h100"), {"strategy": None}),
    ("predict", ("7B", "dgx-h100"), {"strategy": {"tp": 8}}),
    ("predict", ("7B", "dgx-h100"), {"strategy": "tp=8", "framework": 3}),
    ("recommend", ("7B", "dgx-h100"), {"verify": "yes"}),
    ("recommend", ("7B", "dgx-h100"), {"pareto": 1}),
)
"""Values of types that a function does not take: the name of a Plan's file for a Plan, above all."""


@pytest.mark.parametrize(("function", "values", "named"), ODD, ids=lambda value: str(value)[:40])
def test_values_of_other_types_are_refused(
    function: str, values: tuple[Any, ...], named: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every public function says which argument is wrong and what it takes; nothing is written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StrategistError, match="must be") as caught:
        getattr(strategist, function)(*values, **named)
    assert (caught.value.code, caught.value.exit_code, bool(caught.value.hint)) == ("TYPE", 2, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_build_refuses_values_of_other_types() -> None:
    """The same of the function that imports torch: the module, and then what stands beside it."""
    from torch.nn import Linear

    odd: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
        (("plan.json", None), {}),
        ((PLAN, "llama-debug"), {}),
        ((PLAN, Linear(1, 1), "adamw"), {}),
        ((PLAN, Linear(1, 1)), {"loss_fn": "mse"}),
    )
    for values, named in odd:
        with pytest.raises(StrategistError, match="must be") as caught:
            strategist.build(*values, **named)
        assert (caught.value.code, caught.value.exit_code, bool(caught.value.hint)) == ("TYPE", 2, True)


@pytest.mark.parametrize("name", ["pin", "forbid", "tokens", "objective", "time_budget", "nope"])
def test_predict_takes_nothing_that_it_does_not_use(name: str) -> None:
    """A layout that is given leaves nothing to choose: what would choose is no argument."""
    with pytest.raises(StrategistError, match=r"predict\(\) has no argument") as caught:
        strategist.predict("7B", "dgx-h100", strategy="tp=8", **{name: 1})
    assert caught.value.code == "UNKNOWN_KEY"


def test_paths_may_be_paths(tmp_path: Path) -> None:
    """Python names files by Path too, wherever the command line takes a file."""
    rules = tmp_path / "rules"
    rules.mkdir()
    (rules / "advice.toml").write_text("", encoding="utf-8")
    with pytest.raises(StrategistError) as caught:
        recommend("7B", "dgx-h100", calibration=tmp_path / "none.json")
    assert caught.value.code == "FILE_NOT_FOUND"
    with pytest.raises(StrategistError) as caught:
        recommend("7B", "dgx-h100", rules=[rules / "none"])
    assert caught.value.code == "FILE_NOT_FOUND"


@pytest.mark.parametrize("change", [{"from_the_future": 1}, {"hints": None}])
def test_plans_of_other_versions_say_so(change: dict[str, Any], tmp_path: Path) -> None:
    """A key that this version lacks, or misses, is laid to the version that made the plan, where that is another one."""
    document = json.loads(dump(make_plan()))
    document = {key: value for key, value in (document | change).items() if value is not None}
    path = tmp_path / "plan.json"
    for made_by, code in (("strategist 9.9.9", "SCHEMA_VERSION"), (f"strategist {strategist.__version__}", None)):
        path.write_text(json.dumps(document | {"made_by": made_by}), encoding="utf-8")
        with pytest.raises(StrategistError) as caught:
            load_plan(str(path))
        assert caught.value.code == (code or ("MISSING" if "hints" in change else "UNKNOWN_KEY"))
        assert ("strategist 9.9.9" in caught.value.message) == (code is not None)


def test_emit_gives_texts() -> None:
    """emit returns names and texts and writes nothing; an unknown target and an unsound plan are refused."""
    files = strategist.emit(make_plan(dp_shard=2, zero=3), "torchrun")
    assert sorted(str(name) for name in files) == ["launch.sh", "plan.json", "train.py"]
    with pytest.raises(StrategistError, match="no target"):
        strategist.emit(make_plan(), "nothing")
    with pytest.raises(StrategistError, match="not sound"):
        strategist.emit(make_plan(global_batch=7), "torchrun")


def test_explain_gives_a_tree(tmp_path: Path) -> None:
    """The tree's leaves add up to the step and to the peak."""
    path = tmp_path / "plan.json"
    path.write_text(plan_text("--model", "7B", "--hardware", "dgx-h100"), encoding="utf-8")
    plan = load_plan(str(path))
    step, peak = strategist.explain(plan).children
    assert (step.predicted, peak.predicted) == (plan.time.step_ns, plan.memory.worst.device)
    for tree in (step, peak):
        assert sum(child.predicted or 0 for child in tree.children) == tree.predicted


def test_a_tree_prints_as_the_terminal_does(tmp_path: Path) -> None:
    """Printed, the tree is the part of `strategist explain` that holds every term; a branch of it is drawn with its root."""
    path = plan_file(tmp_path, "--model", "7B", "--hardware", "dgx-h100")
    tree = strategist.explain(load_plan(path))
    assert str(tree) in call("explain", path).out
    step, peak = tree.children
    assert [str(branch).splitlines()[1].split()[0] for branch in (step, peak)] == ["step", "peak"]


def test_a_saved_plan_is_that_of_the_command_line(tmp_path: Path) -> None:
    """What `save_plan` writes has the bytes of `plan --out` and is loaded as the same Plan; a file that is there stays, and a folder that is
    not gives an error with a code."""
    plan = recommend(**QUESTIONS[0])
    strategist.save_plan(plan, tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_text(encoding="utf-8") == dump(plan)
    assert load_plan(str(tmp_path / "plan.json")) == plan
    (tmp_path / "plan.json").write_text("mine", encoding="utf-8")
    places = {
        "plan.json": "EXISTS", "none/plan.json": "FILE_NOT_FOUND", "plan.json/p": "FILE_NOT_FOUND", "x" * 300: "NAME_TOO_LONG",
    }  # fmt: skip
    for name, code in places.items():
        with pytest.raises(StrategistError) as refused:
            strategist.save_plan(plan, tmp_path / name)
        assert refused.value.code == code
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert (tmp_path / "plan.json").read_text(encoding="utf-8") == "mine"


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is full there is an error and no half of a plan."""

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StrategistError, match="No space left") as failed:
        strategist.save_plan(make_plan(), tmp_path / "plan.json")
    assert (failed.value.code, list(tmp_path.iterdir())) == ("IO", [])


@pytest.mark.slow
def test_build_is_that_of_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every argument of the executor's `build` but that of traces is one of the public name, with the same default, and arrives there."""
    from strategist.executor import build as home

    inner = dict(inspect.signature(home.build).parameters)
    del inner["instruments"]
    outer = inspect.signature(strategist.build).parameters
    assert [(name, p.kind, p.default) for name, p in outer.items()] == [
        (n, p.kind, p.default) for n, p in inner.items()
    ]
    told = {name: object() for name in inner}
    got = inspect.signature(home.build)
    monkeypatch.setattr(home, "build", lambda *args, **more: got.bind(*args, **more).arguments)
    assert strategist.build(**told) == told


ACTIONS = {"recommend": "plan", "explain": "explain", "emit": "emit", "build": "run"}
"""What Python does, and the command that does the same."""

SPELT_ONLY = {
    "model_size", "model_config", "gpu", "gpus_per_node", "nodes", "gpu_memory", "intra_bw", "inter_bw", "search_log", "config", "out",
    "force", "json", "quiet", "verbose", "no_color",
}  # fmt: skip
"""Flags of `plan` without an argument of that name: Python names models and machines with two arguments, and prints nothing."""


def test_python_and_the_command_line_share_their_names() -> None:
    """Every argument of `recommend` is a flag of `plan` spelt with dashes, and every flag that decides is an argument."""
    named = [name for name, p in inspect.signature(recommend).parameters.items() if p.kind is not p.VAR_KEYWORD]
    assert {*named, *FIELDS} - {"workload"} == {flag.key for flag in PLAN_FLAGS} - SPELT_ONLY
    assert set(ACTIONS) <= set(strategist.__all__)
    assert set(ACTIONS.values()) <= {name for name, _ in COMMANDS}


def test_public_names_are_there() -> None:
    """Every public name can be loaded, is listed by dir(), and another one is an AttributeError."""
    assert [name for name in strategist.__all__ if not hasattr(strategist, name)] == []
    assert dir(strategist) == sorted(strategist.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = strategist.nothing


HOPELESS: tuple[tuple[str, ...], ...] = (
    ("--model-size", "70B", "--gpu", "rtx-4090", "--gpus-per-node", "1", "--nodes", "1"),
    ("--model-size", "70B", "--gpu", "a10g", "--gpus-per-node", "4", "--nodes", "1", "--seq-len", "8192"),
    ("--model-size", "7B", "--gpu", "h100", "--gpus-per-node", "8", "--nodes", "1", "--pin", "dp=8,zero=0"),
    ("--model", "mixtral-8x7b", "--hardware", "dgx-h100", "--forbid", "offload"),
    (
        "--model-size",
        "405B",
        "--hardware",
        "gb200-nvl72:1",
        "--seq-len",
        "65536",
        "--forbid",
        "offload,recompute,pp,cp",
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("question", HOPELESS, ids=" ".join)
def test_every_fix_is_true(question: tuple[str, ...]) -> None:
    """Where nothing fits the chain of reasons names flags, and each change that is offered gives a plan when it is made."""
    error = call("plan", "--json", *question).error
    assert all("--" in link for link in error["because"][:4])
    assert error["fixes"]
    for fix in error["fixes"]:
        assert call("plan", *changed(question, fix)).code == 0


def changed(question: tuple[str, ...], fix: str) -> list[str]:
    """The question with the change that a fix asks for."""
    told = dict(zip(question[::2], question[1::2], strict=True))
    changes = re.findall(r"(--[a-z-]+) ([^ )]+)", fix[: fix.index("  fits:")])
    if fix.startswith("without "):
        for flag in ("--pin", "--forbid"):
            told.pop(flag, None)
        changes = []
    if any(flag == "--model-size" for flag, _ in changes):
        told.pop("--model", None)
    told |= dict(changes)
    return [word for pair in told.items() for word in pair]
