"""Emitted scripts, run with launchers that only write down how they were called."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from strategist import Plan, StrategistError, emit
from strategist.emitters import EMITTERS
from strategist.emitters.emitter import Options
from strategist.errors import is_hostile
from tests.cli.harness import call, hand_written
from tests.emitters.grid import COMMON, plan_for, plan_on
from tests.emitters.stubs import Call, Ran, run_script, zeros
from tests.examples import examples

TARGETS = {emitter.name: emitter.executables[0] for emitter in EMITTERS}
"""Every target, and its script."""
ADDRESS = {"accelerate": ("--main_process_ip", "--main_process_port")}
"""Names of a launcher's options for the meeting place, where they are not torchrun's."""
MEETS_BY_ITSELF = {"ray": "Ray chooses where ranks meet", "epl": "the list of all nodes"}
"""Targets that take no meeting place, with their reason."""
BY_VARIABLES = {
    "mp-spawn": ("MASTER_ADDR", "MASTER_PORT"),
    "mpirun": ("MASTER_ADDR", "MASTER_PORT"),
    "byteps": ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"),
}
"""Targets whose ranks learn the meeting place from variables, and which."""
REPLICAS: dict[str, Any] = {"dp_shard": 1, "zero": 0}
WITHOUT_ZERO_3: dict[str, dict[str, Any]] = {
    "nanotron": {"zero": 1},
    "byteps": REPLICAS,
    "epl": REPLICAS,
    "data-parallel": {"zero": 0, "dp_shard": 1, "dp_replicate": 2, "replicas": "threads"},
    "parameter-server": {"zero": 0, "dp_shard": 1, "dp_replicate": 2, "tables": "server"},
}
"""What targets say that cannot say ZeRO-3."""
ON_ONE_NODE = ("data-parallel", "parameter-server")
"""Targets whose jobs stay on one node."""
HOSTILE = (
    "$(touch canary)", "`touch canary`", "'; touch canary; '", '"; touch canary; "', "a b  c", "\\", "\\n", "!!", "*", "~",
    "$HOME", "${IFS}", "-n", "--help", "a=b", "#", "é ∑ 日本", "'", '"', "", " ", "&& touch canary", "| touch canary",
    "> canary", "{a,b}", "x'\"'y", "%x-%j", "\\$(touch canary)",
)  # fmt: skip
"""Values that do something to a careless script."""


@cache
def representatives() -> tuple[str, ...]:
    """One target for each different script, also with hostile variables: what runs for it holds for those that share it."""
    chosen: dict[tuple[str, ...], str] = {}
    options = Options(env=hostile_variables())
    for target, script in TARGETS.items():
        texts = [
            emit(plan_of(target, nodes), target, options)[PurePosixPath(script)]
            for nodes in ((1,) if target in ON_ONE_NODE else (1, 2))
        ]
        chosen.setdefault(tuple(texts), target)
    return tuple(chosen.values())


def hostile_variables() -> tuple[tuple[str, str], ...]:
    """A variable for each hostile value."""
    return tuple((f"NCCL_TEST_{number}", value) for number, value in enumerate(HOSTILE))


def plan_of(target: str, nodes: int) -> Plan:
    """A sharded plan on GPUs that the target can say."""
    said = WITHOUT_ZERO_3.get(target, {})
    replicas = {"dp_replicate": nodes * 2} if said is REPLICAS else {}
    return plan_on(nodes, **COMMON | said | replicas)


def launched(
    folder: Path, target: str, plan: Plan, options: Options | None = None, words: Sequence[str] = (), **variables: str
) -> Ran:
    """Emit into a folder and run the script from another one."""
    job, elsewhere = folder / "job", folder / "elsewhere"
    for path in (job, elsewhere):
        path.mkdir(parents=True, exist_ok=True)
    for name, text in emit(plan, target, options).items():
        (job / name).write_text(text, encoding="utf-8")
    nodes = plan.cluster.nodes
    return run_script(
        job / TARGETS[target], *words, log=folder / "log", cwd=elsewhere, nodes=nodes, variables=variables
    )


def no_canary(folder: Path) -> bool:
    """Nothing that a hostile value asked for has happened."""
    return not [path for path in folder.rglob("*") if "canary" in path.name]


def test_one_node(tmp_path: Path) -> None:
    """torchrun on one node: standalone rendezvous, as many ranks as the node has, our script, the user's words."""
    ran = launched(tmp_path, "torchrun", plan_on(1, 4), words=("--steps", "3", "a b", "$x"))
    assert (ran.code, ran.err) == (0, "")
    assert [call.argv for call in ran.calls] == [
        [
            "--standalone",
            "--nnodes",
            "1",
            "--nproc-per-node",
            "4",
            f"{tmp_path}/job/train.py",
            "--steps",
            "3",
            "a b",
            "$x",
        ]
    ]


def test_several_nodes(tmp_path: Path) -> None:
    """torchrun on several nodes: the same script on each, told apart by NODE_RANK."""
    ran = launched(tmp_path, "torchrun", plan_on(3), words=("--seed", "1"), MASTER_ADDR="node001", NODE_RANK="2")
    assert (ran.code, ran.err) == (0, "")
    assert ran.calls[0].argv == [
        "--nnodes", "3", "--nproc-per-node", "2", "--node-rank", "2", "--master-addr", "node001", "--master-port", "29500",
        f"{tmp_path}/job/train.py", "--seed", "1",
    ]  # fmt: skip


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "NODE_RANK"])
def test_what_a_node_must_know(missing: str, tmp_path: Path) -> None:
    """Without the first node's name or its own number a node stops with a sentence and starts nothing."""
    known = {"MASTER_ADDR": "node001", "NODE_RANK": "0"}
    del known[missing]
    ran = launched(tmp_path, "torchrun", plan_on(2), **known)
    assert (ran.code != 0, ran.calls, f"set {missing}" in ran.err) == (True, [], True)


@pytest.mark.parametrize(
    "target", [target for target in representatives() if target not in (*MEETS_BY_ITSELF, *ON_ONE_NODE)]
)
def test_told_rendezvous(target: str, tmp_path: Path) -> None:
    """--master-addr and --master-port are what the launcher gets, as options or as variables."""
    options = Options(master_addr="fe80::1", master_port=12345)
    calls = launched(tmp_path, target, plan_of(target, 2), options, NODE_RANK="0").calls
    assert {meeting_place(target, call) for call in calls} == {("fe80::1", "12345")}


def meeting_place(target: str, call: Call) -> tuple[str, str]:
    """Address and port that a launcher was told."""
    if target in BY_VARIABLES:
        host, number = BY_VARIABLES[target]
        return call.env[host], call.env[number]
    address, port = ADDRESS.get(target, ("--master-addr", "--master-port"))
    return call.option(address), call.option(port)


@pytest.mark.parametrize("target", MEETS_BY_ITSELF)
@pytest.mark.parametrize("options", [Options(master_addr="node001"), Options(master_port=12345)])
def test_a_meeting_place_without_a_place_is_refused(target: str, options: Options) -> None:
    """What finds it by itself refuses one that is told, and does not drop it."""
    with pytest.raises(StrategistError, match=MEETS_BY_ITSELF[target]) as refused:
        emit(plan_of(target, 1), target, options)
    assert (refused.value.code, refused.value.exit_code) == ("UNSUPPORTED", 3)


def test_spawn_is_told_the_node(tmp_path: Path) -> None:
    """mp.spawn's script gets the node's number and the meeting place by variables, on each node."""
    ran = launched(tmp_path, "mp-spawn", plan_on(3), words=("--seed", "1"), MASTER_ADDR="node001", NODE_RANK="2")
    told = {name: ran.calls[0].env[name] for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")}
    assert told == {"NODE_RANK": "2", "MASTER_ADDR": "node001", "MASTER_PORT": "29500"}
    assert ran.calls[0].argv == [f"{tmp_path}/job/train.py", "--seed", "1"]


def test_mpirun_starts_all_ranks_and_carries_variables(tmp_path: Path) -> None:
    """One mpirun for all nodes: as many ranks on each as the plan has, hosts from a file, every variable by name."""
    options = Options(env=(("NCCL_DEBUG", "INFO"), ("NCCL_IB_HCA", "a b")))
    ran = launched(tmp_path, "mpirun", plan_on(3, 2), options, ("--seed", "1"), MASTER_ADDR="n1", HOSTFILE="my hosts")
    names = ["MASTER_ADDR", "MASTER_PORT", "NCCL_DEBUG", "NCCL_IB_HCA", "OMP_NUM_THREADS"]
    assert [call.argv for call in ran.calls] == [
        ["-np", "6", "--map-by", "ppr:2:node", "--bind-to", "none", "--oversubscribe",
         *(word for name in names for word in ("-x", name)), "--hostfile", "my hosts", "python3",
         f"{tmp_path}/job/train.py", "--seed", "1"]
    ]  # fmt: skip


def test_ray_carries_variables(tmp_path: Path) -> None:
    """Workers start elsewhere: the script is told which of its variables are theirs."""
    ran = launched(tmp_path, "ray", plan_on(2), Options(env=(("NCCL_DEBUG", "INFO"),)))
    assert ran.calls[0].env["RANK_VARIABLES"].split() == ["NCCL_DEBUG", "OMP_NUM_THREADS"]


def test_accelerate_is_told_the_node_and_its_files(tmp_path: Path) -> None:
    """accelerate launch gets the file beside the script from whatever folder it is called, and the node's number."""
    for zero, more in ((3, []), (1, ["--deepspeed_config_file", f"{tmp_path}/1/job/deepspeed.json"])):
        plan = plan_on(2, **COMMON)
        plan = replace(plan, strategy=replace(plan.strategy, zero=zero))
        ran = launched(tmp_path / str(zero), "accelerate", plan, Options(master_addr="node001"), NODE_RANK="1")
        assert ran.calls[0].argv == [
            "launch", "--config_file", f"{tmp_path}/{zero}/job/accelerate.yaml", *more, "--machine_rank", "1",
            "--main_process_ip", "node001", "--main_process_port", "29500", f"{tmp_path}/{zero}/job/train.py",
        ]  # fmt: skip


def test_slurm_starts_one_task_per_node(tmp_path: Path) -> None:
    """sbatch asks for one task per node; each starts torchrun with the node's number, the first node's name and one port."""
    ran = launched(tmp_path, "slurm", plan_on(3, 4), Options(job_name="llama-8b"), words=("--steps", "3", "a b"))
    assert (ran.code, ran.err) == (0, "")
    assert [call.argv for call in ran.calls] == [
        ["--nnodes", "3", "--nproc-per-node", "4", "--node-rank", str(node), "--master-addr", "node001", "--master-port",
         "34567", f"{tmp_path}/job/train.py", "--steps", "3", "a b"]
        for node in range(3)
    ]  # fmt: skip
    assert zeros(tmp_path / "log/srun.argv")[:2] == ["--kill-on-bad-exit=1", "--cpu-bind=none"]
    script = (tmp_path / "job/job.sbatch").read_text(encoding="utf-8")
    directives = [row.removeprefix("#SBATCH ") for row in script.splitlines() if row.startswith("#SBATCH")]
    whole_nodes = ["--exclusive", "--mem=0"]  # all cores and all memory: a task has one core otherwise
    assert directives == ["--job-name=llama-8b", "--nodes=3", "--ntasks-per-node=1", *whole_nodes, "--output=%x-%j.out"]


@pytest.mark.parametrize(("nodes", "domain", "segments"), [(4, 4, ["2"]), (4, 2, []), (2, 4, []), (3, 4, [])])
def test_slurm_takes_the_nodes_of_a_rack_together(nodes: int, domain: int, segments: list[str]) -> None:
    """A plan for several racks that share fast links counts on equal parts of them; the scheduler gave any nodes."""
    plan = replace_backend(plan_on(nodes, 2), "nccl")
    group = plan.cluster.groups[0]
    rack = replace(group, node=replace(group.node, fast_domain=domain))
    (text,) = (text for name, text in emit(replace(plan, cluster=replace(plan.cluster, groups=(rack,))), "slurm").items() if name.suffix == ".sbatch")  # fmt: skip
    assert [line.partition("=")[2] for line in text.splitlines() if line.startswith("#SBATCH --segment")] == segments


def test_slurm_asks_for_devices() -> None:
    """A plan for GPUs asks for as many as it uses on each node; CPU ranks ask for none."""
    with_gpus = emit(replace_backend(plan_on(2, 4), "nccl"), "slurm")
    text = next(text for name, text in with_gpus.items() if name.suffix == ".sbatch")
    assert "#SBATCH --gpus-per-node=4\n" in text
    assert "OMP_NUM_THREADS" not in text


@pytest.mark.parametrize(
    ("choices", "outside", "inside"),
    [
        ({"tp": 2}, None, "1"),
        ({"tp": 2}, "32", "32"),
        ({"dp_shard": 2, "zero": 3}, "1", None),
        ({"dp_replicate": 2}, "8", "8"),
    ],
)
def test_megatron_gets_the_connections_of_its_layout(
    choices: dict[str, Any], outside: str | None, inside: str | None, tmp_path: Path
) -> None:
    """Cuts of tensors get one connection unless somebody asks for more; Megatron-FSDP, which refuses one, never gets it."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    ran = launched(tmp_path, "megatron", plan_for(**COMMON | choices), **({name: outside} if outside else {}))
    assert ran.calls[0].env.get(name) == inside


def test_megatron_runs_its_own_script(tmp_path: Path) -> None:
    """train.py runs pretrain_gpt.py of the checkout with every word, and says what is missing without one."""
    (tmp_path / "pretrain_gpt.py").write_text("import sys\nprint(sys.argv[1:], sys.path[0])\n", encoding="utf-8")
    script = tmp_path / "train.py"
    script.write_text(emit(plan_for(**COMMON), "megatron")[PurePosixPath("train.py")], encoding="utf-8")
    command = [sys.executable, str(script), "--bf16", "a b"]
    done = subprocess.run(command, env={"MEGATRON_LM": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"['--bf16', 'a b'] {tmp_path}\n")
    without = subprocess.run(command, env={}, capture_output=True, text=True, check=False)
    assert (without.returncode, "Set MEGATRON_LM" in without.stderr) == (1, True)


def replace_backend(plan: Plan, backend: str) -> Plan:
    """The plan with another backend."""
    return replace(plan, strategy=replace(plan.strategy, backend=backend))  # type: ignore[arg-type]


@pytest.mark.parametrize("job", ["0", "1", "19999", "20000", "4294967295"])
def test_slurm_ports_come_from_the_job(job: str, tmp_path: Path) -> None:
    """Two jobs on one machine differ in their port, and every port is one that may be used."""
    plan = plan_on(1)
    (tmp_path / "job").mkdir()
    for name, text in emit(plan, "slurm").items():
        (tmp_path / "job" / name).write_text(text.replace("SLURM_JOB_ID", "JOB"), encoding="utf-8")
    ran = run_script(tmp_path / "job/job.sbatch", log=tmp_path / "log", cwd=tmp_path, variables={"JOB": job})
    assert int(ran.calls[0].option("--master-port")) == 20000 + int(job) % 20000


def test_a_failing_scontrol_stops_the_job(tmp_path: Path) -> None:
    """Without the first node's name nothing is started."""
    (tmp_path / "job").mkdir()
    for name, text in emit(plan_on(2), "slurm").items():
        (tmp_path / "job" / name).write_text(text.replace("show hostnames", "show nothing"), encoding="utf-8")
    ran = run_script(tmp_path / "job/job.sbatch", log=tmp_path / "log", cwd=tmp_path, nodes=2)
    assert (ran.code != 0, ran.calls) == (True, [])


@pytest.mark.parametrize("target", representatives())
def test_hostile_values_arrive_unchanged(target: str, tmp_path: Path) -> None:
    """Every value of a variable and every word for the script arrives byte for byte, and none of them runs."""
    env = hostile_variables()
    ran = launched(tmp_path, target, plan_of(target, 1), Options(env=env), words=HOSTILE)
    assert (ran.code, ran.err) == (0, "")
    assert [(name, ran.calls[0].env[name]) for name, _ in env] == list(env)
    assert ran.calls[0].script[-len(HOSTILE) :] == list(HOSTILE)
    assert no_canary(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", representatives())
@pytest.mark.parametrize("name", ["a b", "$(touch canary)", "x'y\"z", "-n", "é*"])
def test_hostile_folders(target: str, name: str, tmp_path: Path) -> None:
    """The job's folder may be called anything."""
    ran = launched(tmp_path / name, target, plan_of(target, 1))
    assert ran.calls[0].script[0] == f"{tmp_path}/{name}/job/train.py"
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("target", representatives())
def test_hostile_plans(target: str, tmp_path: Path) -> None:
    """A plan from a stranger whose model is called like a command starts nothing but the job."""
    plan = plan_of(target, 1)
    model = replace(plan.model, family="x\ntouch canary\n#", name="$(touch canary)")
    ran = launched(tmp_path, target, replace(plan, model=model))
    assert (ran.code, len(ran.calls)) == (0, 1)
    assert no_canary(tmp_path)


@pytest.mark.slow
@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=40).filter(lambda t: not any(map(is_hostile, t))))
def test_any_value_arrives_unchanged(tmp_path_factory: pytest.TempPathFactory, value: str) -> None:
    """Whatever is accepted as a value arrives as it is."""
    folder = tmp_path_factory.mktemp("job")
    for target in representatives():
        ran = launched(folder / target, target, plan_of(target, 1), Options(env=(("NCCL_X", value),)), words=(value,))
        assert (ran.calls[0].env["NCCL_X"], ran.calls[0].script[-1]) == (value, value)


def test_variables_of_the_command_line(tmp_path: Path) -> None:
    """What `emit --env` takes reaches the ranks."""
    path = hand_written(tmp_path, dp_shard=2, zero=3)
    words = ("--env", "NCCL_SOCKET_IFNAME=eth0,eth1", "--env", "MY_VAR=a b", "--allow-env")
    assert call("emit", path, "--to", "torchrun", "--out", str(tmp_path / "job"), *words).code == 0
    ran = run_script(tmp_path / "job/launch.sh", log=tmp_path / "log", cwd=tmp_path)
    found: Call = ran.calls[0]
    assert (found.env["NCCL_SOCKET_IFNAME"], found.env["MY_VAR"]) == ("eth0,eth1", "a b")
    assert found.env["OMP_NUM_THREADS"] == "1"
