"""What Kubernetes and SkyPilot start on each node is the job, told its number and the first node's name."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from strategist import Plan, StrategistError, emit
from strategist.catalog import rows
from strategist.document.plan import Hint
from strategist.emitters.emitter import Options
from strategist.facts.gpus import gpu_by_id
from tests.emitters.grid import COMMON, plan_on
from tests.emitters.stubs import run_script


def started(
    folder: Path, target: str, script: str, variables: Mapping[str, str], options: Options | None = None
) -> Any:
    """How torchrun was called when a node runs `script` where the files of a plan for two nodes lie."""
    job = folder / "job"
    job.mkdir()
    for name, text in emit(plan_on(2, **COMMON), target, options).items():
        (job / name).write_text(text, encoding="utf-8")
    start = folder / "start.sh"
    start.write_text(script.replace("/job/", f"{job}/"), encoding="utf-8")
    ran = run_script(start, log=folder / "log", cwd=job, variables=variables)
    assert (ran.code, ran.err) == (0, "")
    (call,) = ran.calls
    assert call.script == [f"{job}/train.py"]
    return {name: call.option(f"--{name}") for name in ("node-rank", "master-addr", "master-port", "nnodes")}


def manifest(name: str, options: Options | None = None) -> Any:
    """A manifest for two nodes."""
    return yaml.safe_load(emit(plan_on(2, **COMMON), "kubernetes", options)[PurePosixPath(name)])


OPERATORS = {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "first", "RANK": "1", "MASTER_ADDR": "first"}
"""What the operators of TrainJob and of PyTorchJob put into the environment of the second node."""


@pytest.mark.parametrize("name", ["trainjob.yaml", "pytorchjob.yaml"])
def test_operators_tell_a_node_where_it_stands(name: str, tmp_path: Path) -> None:
    """The pod's command hands the operator's variables and the told port to the launch script."""
    options = Options(master_port=12345)
    spec = manifest(name, options)["spec"]
    container = spec["trainer"] if "trainer" in spec else worker(spec)
    told = started(tmp_path, "kubernetes", shlex.join(container["command"]), OPERATORS, options)
    assert told == {"node-rank": "1", "master-addr": "first", "master-port": "12345", "nnodes": "2"}


def worker(spec: Any) -> Any:
    """The container of a PyTorchJob's second node, whose named port is the one where ranks meet."""
    (container,) = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "pytorchjob-port", "containerPort": 12345, "protocol": "TCP"}]
    return container


def test_a_job_set_names_its_first_node(tmp_path: Path) -> None:
    """JobSet calls pods by set, job and numbers under the set's own domain; the environment says so, and the number."""
    options = Options(job_name="llama-8b")
    (job,) = manifest("jobset.yaml", options)["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    rank, *told = container["env"]
    assert rank["valueFrom"]["fieldRef"]["fieldPath"].endswith("['batch.kubernetes.io/job-completion-index']")
    variables = {"NODE_RANK": "1"} | {variable["name"]: variable["value"] for variable in told}
    found = started(tmp_path, "kubernetes", shlex.join(container["command"]), variables, options)
    first = f"llama-8b-{job['name']}-0-0.llama-8b"
    assert found == {"node-rank": "1", "master-addr": first, "master-port": "29500", "nnodes": "2"}


def test_files_of_a_job_are_those_that_are_mounted() -> None:
    """The kustomization brings each file of the job, under the name that every manifest mounts where its command looks."""
    files = emit(plan_on(2, **COMMON), "kubernetes", Options(job_name="x"))
    bring = yaml.safe_load(files[PurePosixPath("kustomization.yaml")])
    (made,) = bring["configMapGenerator"]
    assert {PurePosixPath(name) for name in made["files"]} == {name for name in files if name.suffix != ".yaml"}
    assert set(bring["resources"]) < {str(name) for name in files}
    for name in ("jobset.yaml", "trainjob.yaml", "pytorchjob.yaml"):
        text = files[PurePosixPath(name)]
        assert f"name: {made['name']}\n" in text
        assert "mountPath: /job\n" in text
        assert "/job/launch.sh" in text


def test_skypilot_tells_a_node_where_it_stands(tmp_path: Path) -> None:
    """The task's command takes the number and the first of the addresses from SkyPilot's variables."""
    task = yaml.safe_load(emit(plan_on(2, **COMMON), "skypilot")[PurePosixPath("task.yaml")])
    variables = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    told = started(tmp_path, "skypilot", task["run"], variables)
    assert told == {"node-rank": "1", "master-addr": "10.0.0.1", "master-port": "29500", "nnodes": "2"}


@pytest.mark.parametrize(
    ("target", "name"),
    [("kubernetes", "Llama"), ("kubernetes", "a_b"), ("kubernetes", "8b"), ("kubernetes", "a" * 41), ("kubernetes", "a-"),
     ("skypilot", "a-"), ("skypilot", "a...b")],
)  # fmt: skip
def test_names_that_a_cluster_does_not_take(target: str, name: str) -> None:
    """A job's name that this target would refuse is refused when emitting."""
    with pytest.raises(StrategistError) as refused:
        emit(plan_on(1, **COMMON), target, Options(job_name=name))
    assert (refused.value.code, refused.value.flag) == ("NAME", "--job-name")


def on(gpu: str) -> Plan:
    """A plan for one node of such devices; a name of nobody's stands for a device of an unknown vendor."""
    plan = plan_on(1, **COMMON)
    (group,) = plan.cluster.groups
    known = gpu in {row["name"] for row in rows("gpus")}
    device = gpu_by_id(gpu) if known else replace(group.node.gpu, name=gpu, vendor=gpu)
    node = replace(group.node, gpu=device)
    return replace(plan, cluster=replace(plan.cluster, groups=(replace(group, node=node),)))


@pytest.mark.parametrize(
    ("target", "gpu", "words"),
    [("kubernetes", "abacus", "no resource name"), ("skypilot", "h100-pcie-80gb", "no name for the device")],
)
def test_devices_without_a_name_are_refused(target: str, gpu: str, words: str) -> None:
    """A device that Kubernetes or SkyPilot has no name for is refused, not left away."""
    with pytest.raises(StrategistError, match=words) as refused:
        emit(on(gpu), target)
    assert (refused.value.code, refused.value.exit_code) == ("UNSUPPORTED", 3)


def test_devices_are_called_as_the_cluster_calls_them() -> None:
    """AMD's devices are asked for by their own resource, and each name for SkyPilot stands for a GPU of the catalogue."""
    assert "amd.com/gpu: '2'" in emit(on("mi300x"), "kubernetes")[PurePosixPath("jobset.yaml")]
    assert {row["gpu"] for row in rows("skypilot_accelerators")} <= {row["name"] for row in rows("gpus")}


def test_what_no_config_map_holds_is_refused() -> None:
    """A plan of more than a mebibyte does not become a ConfigMap that the cluster would refuse."""
    plan = plan_on(1, **COMMON)
    with pytest.raises(StrategistError, match="a ConfigMap holds 1048576"):
        emit(replace(plan, hints=(Hint(code="W_TEST", sentence="x" * 2**20),)), "kubernetes")
