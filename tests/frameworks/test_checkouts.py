"""Frameworks that no registry has read the emitted files with the code of a checkout: Megatron-LM, nanotron, BytePS.

The folder that CHECKOUTS names holds the checkouts, called like their repositories. Without it every test here fails and
proves nothing. What they import for GPUs alone is stood in for: reading words and files uses none of it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import typing
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import yaml

from strategist import emit
from strategist.emitters.emitter import Options
from tests.emitters.grid import COMMON, distinct, each_once, plan_on, written
from tests.emitters.stubs import zeros
from tests.frameworks.jobs import as_the_script_sets_it, job_environment, write_job
from tests.frameworks.stand_ins.sitecustomize import stand_in

stand_in("transformer_engine", "flash_attn", "apex", "torchvision")

TOLD = ("--train-iters", "4", "--lr", "3e-4", "--mock-data", "--tokenizer-type", "NullTokenizer")
"""What the command adds to Megatron-LM's arguments."""


def checkout(name: str) -> Path:
    """The folder of a checkout; a test without it fails."""
    folder = Path(os.environ.get("CHECKOUTS", "")) / name
    assert "CHECKOUTS" in os.environ and folder.is_dir(), f"CHECKOUTS names no folder with a checkout of {name}"
    return folder


class Device:
    """What Megatron-LM asks a GPU of its kind."""

    major, minor, multi_processor_count = 9, 0, 132


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron-LM's module of arguments, on a machine that seems to have an H100 and Python 3.12."""
    monkeypatch.syspath_prepend(str(checkout("Megatron-LM")))
    if not hasattr(typing, "override"):
        monkeypatch.setattr(typing, "override", lambda function: function, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: Device())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    from megatron.training import arguments

    return arguments


def words_of(script: str) -> list[str]:
    """The arguments that the launch script gives to train.py, without those of the user."""
    words = shlex.split(script.partition("\nexec ")[2].replace("\\\n", " "))
    return words[words.index("$here/train.py") + 1 : words.index("$@")]


def parsed(megatron: Any, words: list[str], world: int, script: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What Megatron-LM makes of the arguments at a number of ranks, in the environment that the script sets up."""
    as_the_script_sets_it(monkeypatch, script, world)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words, *TOLD])
    return megatron.validate_args(megatron.parse_args())


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["megatron"])
def test_megatron_takes_every_script(target: str, megatron: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parser and its validation accept the words of each launch script, with the plan's layout and batch in them."""
    plans = tuple(each_once(target, "launch.sh"))
    assert len(plans) > 20
    for plan, files in plans:
        script = files[PurePosixPath("launch.sh")]
        read = parsed(megatron, words_of(script), plan.mesh.world, script, monkeypatch)
        assert read.data_parallel_size == plan.mesh.data_parallel
        layout = (read.tensor_model_parallel_size, read.pipeline_model_parallel_size, read.context_parallel_size)
        assert layout == (plan.mesh.tp, plan.mesh.pp, plan.mesh.cp)
        assert (read.micro_batch_size, read.global_batch_size) == (
            plan.strategy.micro_batch,
            plan.workload.global_batch,
        )


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["megatron"])
def test_megatron_refuses_what_is_wrong(target: str, megatron: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser that takes our words refuses a misspelt one, and its validation a layout that does not divide."""
    plan, files = next(written(target))
    script = files[PurePosixPath("launch.sh")]
    for wrong in (["--micro-bach-size", "1"], ["--pipeline-model-parallel-size", "3"]):
        with pytest.raises((SystemExit, AssertionError, ValueError)):
            parsed(megatron, [*words_of(script), *wrong], plan.mesh.world, script, monkeypatch)


@pytest.fixture
def nanotron(monkeypatch: pytest.MonkeyPatch) -> Any:
    """nanotron's module of configurations."""
    monkeypatch.syspath_prepend(str(checkout("nanotron") / "src"))
    from nanotron import config

    return config


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["nanotron"])
def test_nanotron_takes_every_file(target: str, nanotron: Any, tmp_path: Path) -> None:
    """Its loader accepts each file and finds the plan's ranks, batch and format in it."""
    for text, world in distinct(target, "nanotron.yaml"):
        document = yaml.safe_load(text)
        (tmp_path / "nanotron.yaml").write_text(text, encoding="utf-8")
        read = nanotron.get_config_from_file(str(tmp_path / "nanotron.yaml"))
        layout = read.parallelism
        assert layout.dp * layout.tp * layout.pp * layout.context_parallel_size == world
        assert read.tokens.micro_batch_size == document["tokens"]["micro_batch_size"]
        assert read.optimizer.zero_stage == document["optimizer"]["zero_stage"]
        assert str(read.model.dtype) == f"torch.{document['model']['dtype']}"


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["nanotron"])
@pytest.mark.parametrize(("section", "wrong"), [("parallelism", "tq"), ("tokens", "micro_bach_size")])
def test_nanotron_refuses_a_misspelt_key(target: str, section: str, wrong: str, nanotron: Any, tmp_path: Path) -> None:
    """The loader that takes our files refuses a key that is none of its own."""
    document = yaml.safe_load(distinct(target, "nanotron.yaml")[0][0])
    document[section][wrong] = 1
    (tmp_path / "nanotron.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    with pytest.raises(Exception, match=wrong):
        nanotron.get_config_from_file(str(tmp_path / "nanotron.yaml"))


RECORD = """#!/usr/bin/env bash
printf '%s\\0' "$BYTEPS_LOCAL_RANK" "$BYTEPS_LOCAL_SIZE" "$@" > "$RECORDS/$DMLC_ROLE-${BYTEPS_LOCAL_RANK:-0}"
"""


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["byteps"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_byteps_launcher_starts_every_role(target: str, nodes: int, tmp_path: Path) -> None:
    """Its own launcher takes the variables of the launch script, and starts a process for each device, with the words as they are."""
    plan = plan_on(nodes, 4, **COMMON | {"dp_shard": 1, "zero": 0, "dp_replicate": 4 * nodes})
    job = write_job(tmp_path, target, plan, Options(env=(("BYTEPS_NUMA_ON", "0"),)))
    tools = tmp_path / "tools"
    tools.mkdir()
    launcher = f'#!/usr/bin/env bash\nexec {sys.executable} {checkout("byteps")}/launcher/launch.py "$@"\n'
    for name, text in {"bpslaunch": launcher, "python3": RECORD}.items():
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(0o755)
    env = job_environment() | {"RECORDS": str(tmp_path), "MASTER_ADDR": "n0", "NODE_RANK": "0"}
    env["PATH"] = f"{tools}:{env['PATH']}"
    command = ["bash", str(job / "launch.sh"), "--steps", "a b", "$x"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        words = [str(rank), "4", f"{job}/train.py", "--steps", "a b", "$x"]
        assert zeros(tmp_path / f"worker-{rank}") == words
    served = {path.name for path in tmp_path.glob("s*-0")}
    assert served == (set() if nodes == 1 else {"scheduler-0", "server-0"})


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["byteps"])
def test_byteps_launcher_refuses_a_missing_variable(target: str) -> None:
    """The launcher that takes our variables says which one is missing, for each that it asks for."""
    script = emit(plan_on(2, 4, **COMMON | {"dp_shard": 1, "zero": 0, "dp_replicate": 8}), target)
    asked = ("DMLC_NUM_SERVER", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_WORKER_ID")
    env = {"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2", "BYTEPS_NUMA_ON": "0", **dict.fromkeys(asked, "1")}
    env["PYTHONUNBUFFERED"] = "1"  # it leaves at once after its sentence
    for name in asked:
        assert name in script[PurePosixPath("launch.sh")]
        command = [sys.executable, str(checkout("byteps") / "launcher/launch.py"), "true"]
        less = {key: value for key, value in env.items() if key != name}
        done = subprocess.run(command, env=less, capture_output=True, text=True, timeout=60, check=False)
        assert f"The env {name} is missing" in done.stdout
