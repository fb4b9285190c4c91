"""Files for BytePS and EPL, which nobody maintains: every name in them stands in their sources, and every file says so."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from strategist import emit
from strategist.document.plan import Plan
from strategist.emitters import find_emitter
from strategist.readers.foreign import keys_of
from tests.emitters.grid import COMMON, plan_on, written
from tests.emitters.stubs import Ran, zeros
from tests.emitters.test_launching import launched
from tests.emitters.test_read_back import Said, facts

MODULES = {"byteps": ("bps", "byteps.torch"), "epl": ("epl", "epl")}
"""What the scripts call the module that they use, and the section of the table that has its names."""


def replicas(nodes: int, ranks: int = 2, **said: Any) -> Plan:
    """A plan of replicas over some nodes."""
    return plan_on(nodes, ranks, **COMMON | {"dp_shard": 1, "zero": 0, "dp_replicate": nodes * ranks} | said)


@pytest.mark.parametrize("target", MODULES)
def test_every_file_says_that_it_is_unmaintained(target: str) -> None:
    """The list of targets, the launch script and the training script name the day of the last commit and what to use."""
    files = emit(replicas(1), target)
    for text in (find_emitter(target).title, files[PurePosixPath("launch.sh")], files[PurePosixPath("train.py")]):
        assert re.search(r"unmaintained since 20\d\d-\d\d-\d\d; use torchrun", text)


@pytest.mark.parametrize("target", MODULES)
def test_scripts_use_names_of_the_sources(target: str) -> None:
    """Whatever the training script takes from the framework's module is a name that the module's source has."""
    alias, section = MODULES[target]
    tree = ast.parse(emit(replicas(1), target)[PurePosixPath("train.py")])
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == alias
    }
    assert {"init"} < used <= set(keys_of(target, section))


def test_variables_of_byteps_are_those_of_its_launcher(tmp_path: Path) -> None:
    """Each DMLC_ and BYTEPS_ variable that a worker gets is one that BytePS knows, on one node and on two."""
    for nodes in (1, 2):
        ran = run_of_byteps(tmp_path / str(nodes), nodes)
        told = {name for name in ran.calls[0].env if name.startswith(("DMLC_", "BYTEPS_"))}
        assert {"DMLC_ROLE", "DMLC_NUM_WORKER", "DMLC_PS_ROOT_PORT"} < told <= set(keys_of("byteps", "environment"))


def run_of_byteps(folder: Path, nodes: int, number: int = 0) -> Ran:
    """The launch script of one of some nodes of four devices."""
    plan = replicas(nodes, 4)
    return launched(folder, "byteps", plan, words=("--steps", "a b"), MASTER_ADDR="n0", NODE_RANK=str(number))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_byteps_has_a_server_on_every_node(number: int, tmp_path: Path) -> None:
    """Of several nodes each is one worker and one server, and the first has the scheduler; the words arrive unchanged."""
    ran = run_of_byteps(tmp_path, 3, number)
    (call,) = ran.calls
    roles = {path.name.removeprefix("role-"): zeros(path) for path in (tmp_path / "log").glob("role-*")}
    assert set(roles) == {"worker", "server"} | ({"scheduler"} if number == 0 else set())
    assert all(told == ["3", "3", "n0"] for told in roles.values())
    assert (call.env["DMLC_WORKER_ID"], call.env["NVIDIA_VISIBLE_DEVICES"]) == (str(number), "0,1,2,3")
    assert call.argv == [f"{tmp_path}/job/train.py", "--steps", "a b"]


def test_byteps_on_one_node_starts_no_server(tmp_path: Path) -> None:
    """A single worker needs neither a scheduler nor servers."""
    run_of_byteps(tmp_path, 1)
    assert [path.name for path in (tmp_path / "log").glob("role-*")] == ["role-worker"]


def from_epl(text: str) -> Said:
    """What EPL's configuration says."""
    said = json.loads(text)
    order = {"PreferBackward": ("none", "1f1b"), "PreferForward": ("gpipe",)}[said["pipeline.strategy"]]
    return {
        "accumulation": said["pipeline.num_micro_batch"],
        "schedule": order,
        "compute": {None: "float32", "O1": "float16"}[said.get("amp.level")],
    }


@pytest.mark.slow
def test_epl_says_what_the_plan_says() -> None:
    """Every key is one of EPL's, and what they say is the plan's, for every plan of the grid."""
    seen = set()
    for plan, files in written("epl"):
        text = files[PurePosixPath("epl.json")]
        assert set(json.loads(text)) <= set(keys_of("epl"))
        said, meant = from_epl(text), facts(plan)
        assert meant["schedule"] in said.pop("schedule")
        assert {name: meant[name] for name in said} == said
        seen |= {(name, value) for name, value in said.items()}
    assert {("compute", "float16"), ("accumulation", 4)} <= seen


@pytest.mark.parametrize(("nodes", "workers"), [(1, ["127.0.0.1:29500"]), (2, ["n0:2222", "n1:2222"])])
def test_epl_tells_tensorflow_the_nodes(nodes: int, workers: list[str], tmp_path: Path) -> None:
    """TF_CONFIG is a document that names every node and the number of this one, which has all its devices."""
    ran = launched(tmp_path, "epl", replicas(nodes, 4), NODE_RANK="1", WORKERS=",".join(workers))
    (call,) = ran.calls
    index = 1 if nodes > 1 else 0
    expected = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
    assert json.loads(call.env["TF_CONFIG"]) == expected
    assert call.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert call.argv == [f"{tmp_path}/job/train.py"]


def test_epl_needs_the_list_of_nodes(tmp_path: Path) -> None:
    """Without it several nodes start nothing."""
    ran = launched(tmp_path, "epl", replicas(2), NODE_RANK="0")
    assert (ran.code != 0, ran.calls, "set WORKERS" in ran.err) == (True, [], True)
