"""What `emit` writes, read back by the readers, says what the plan says, and `validate` finds no fault in it."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from strategist.document.plan import Plan
from strategist.emitters import EMITTERS
from strategist.readers.deepspeed import BUCKET
from strategist.readers.foreign import Foreign
from strategist.readers.transformers import DISTRIBUTED
from tests.emitters.grid import targets, written
from tests.emitters.test_read_back import Said, facts
from tests.readers.reading import read_file

SAYS = {
    "accelerate": {"ranks", "zero", "offload", "compute"},
    "deepspeed": {"global_batch", "micro_batch", "accumulation", "zero", "offload", "parameter", "gradient", "reduce", "compute"},
    "trl": {
        "micro_batch", "accumulation", "zero", "offload", "compute", "optimizer", "recompute", "backend", "seq_len",
    },
    "llama-factory": {
        "micro_batch", "accumulation", "compute", "optimizer", "recompute", "backend", "seq_len", "method",
    },
    "transformers": {"micro_batch", "accumulation", "zero", "offload", "compute", "optimizer", "recompute", "backend"},
    "torchtitan": {
        "dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "zero", "micro_batch", "accumulation", "global_batch", "seq_len",
        "schedule", "sequence_parallel", "recompute", "offload", "compile", "parameter", "reduce", "compute",
    },
    "nanotron": {
        "tp", "pp", "cp", "zero", "micro_batch", "accumulation", "global_batch", "seq_len", "sequence_parallel", "recompute",
        "gradient", "reduce", "compute",
    },
    "llm-foundry": {
        "dp_replicate", "zero", "micro_batch", "accumulation", "global_batch", "seq_len", "recompute", "optimizer",
        "parameter", "gradient", "reduce", "compute",
    },
    "composer": {"micro_batch", "zero", "dp_replicate", "compute", "parameter", "gradient", "reduce", "backend"},
    "megatron-bridge": {
        "dp_replicate", "dp_shard", "tp", "cp", "pp", "zero", "micro_batch", "accumulation", "global_batch", "seq_len",
        "schedule", "virtual_stages", "sequence_parallel", "context_parallel", "recompute", "optimizer", "gradient", "reduce",
        "compute", "backend",
    },
    "epl": {"accumulation", "zero", "compute"},
    "kubernetes": {"nodes"},
    "skypilot": {"nodes"},
    "megatron": {
        "dp_replicate", "dp_shard", "tp", "cp", "pp", "zero", "micro_batch", "accumulation", "global_batch", "seq_len",
        "schedule", "virtual_stages", "sequence_parallel", "context_parallel", "recompute", "optimizer", "gradient", "reduce",
        "compute", "backend",
    },
}  # fmt: skip
"""What some file of each target says for every plan, so that a reader that says less is noticed."""


def read_all(folder: Path, target: str) -> list[tuple[Plan, list[Foreign]]]:
    """Every plan that a target writes files for, and what is read in them; the plan itself is not looked at."""
    found = []
    known: dict[tuple[str, str, int, str | None], Foreign] = {}
    for plan, files in written(target):
        read = []
        beside = files.get(PurePosixPath(DISTRIBUTED))
        (folder / DISTRIBUTED).unlink(missing_ok=True)
        if beside is not None:
            (folder / DISTRIBUTED).write_text(beside, encoding="utf-8")
        for name, text in files.items():
            key = (str(name), text, plan.mesh.world, beside)
            if str(name) != "plan.json" and key not in known:
                (folder / name).write_text(text, encoding="utf-8")
                known[key] = read_file(folder / name, plan.mesh.world)
            read += [known[key]] if key in known else []
        found.append((plan, read))
    return found


def meant(plan: Plan) -> Said:
    """What the plan says in the readers' words. Weights that are kept in fp32 may have a low copy beside them."""
    said = facts(plan) | {
        "ranks": plan.mesh.world,
        "nodes": plan.cluster.nodes,
        "global_batch": plan.workload.global_batch,
        "seq_len": plan.workload.seq_len,
        "method": plan.model.method,
        "dispatcher": "alltoall",  # what its traffic between experts is counted as
    }
    return said | {"kept": said["parameter"] if said["master"] == "none" else said["master"]}


SCRIPTS_ALONE = [emitter.name for emitter in EMITTERS if emitter.name not in SAYS]
"""Targets without a configuration file: their scripts read plan.json."""


MANIFESTS = ("kubernetes", "skypilot")
"""Targets whose files are long and say little of the plan."""


def slowly(name: str) -> Any:
    """A parameter of the slow suite."""
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", [*targets(name for name in SAYS if name not in MANIFESTS), *map(slowly, (*MANIFESTS, *SCRIPTS_ALONE))]
)
def test_emitted_files_pass_and_say_the_plan(target: str, tmp_path: Path) -> None:
    """No file of any plan has a fault; mesh, batch, formats and strategy that it says are the plan's, and it says enough."""
    for plan, read in read_all(tmp_path, target):
        assert [fault for foreign in read for fault in foreign.findings] == []
        said = {name: value for foreign in read for name, value in foreign.says.items()}
        engine = said.pop("engine", "deepspeed")
        assert said.pop("reduce_bucket", BUCKET) == BUCKET
        assert engine == "deepspeed" or plan.strategy.formats.parameter == "float32"
        by_deepspeed = target == "accelerate" and "global_batch" in said
        left = {"zero"} if any(plan.mesh.dp_shard > 1 and foreign.says.get("tp") for foreign in read) else set()
        assert set(said) | left >= SAYS.get("deepspeed" if by_deepspeed else target, set()), plan.strategy
        each = said.pop("layers_per_stage", None)
        if each is not None:
            said["virtual_stages"] = -(-plan.model.layers // each) // plan.mesh.pp
        if {"parameter", "master"} <= set(said):
            parameter, master = said.pop("parameter"), said.pop("master")
            said["kept"] = parameter if master == "none" else master
        assert {name: meant(plan)[name] for name in said} == said


@pytest.mark.parametrize(("layers", "word"), [(1, "1"), (2, "2"), (3, "full")])
def test_a_block_of_more_layers_than_a_chunk_has_is_all_of_them(layers: int, word: str, tmp_path: Path) -> None:
    """Megatron-LM counts the layers of every chunk from its first; beyond the last there are none."""
    words = "--recompute-granularity full --recompute-method block --num-layers 4 --pipeline-model-parallel-size 2"
    script = tmp_path / "launch.sh"
    script.write_text(
        f"torchrun pretrain_gpt.py {words} --recompute-num-layers {layers} --micro-batch-size 1\n", encoding="utf-8"
    )
    foreign = read_file(script, 2)
    assert foreign.says["recompute"] == word
