"""Hierarchical context parallelism in files: Megatron-LM says it and is heard, our own launchers run it, the others refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strategist.document.plan import Plan
from strategist.emitters import EMITTERS, emit
from strategist.emitters.megatron import megatron_arguments
from strategist.errors import ImpossibleError
from tests.emitters.grid import plan_for
from tests.plans import BFLOAT16, tiny_llama
from tests.readers.reading import read_file

SPLIT = {"cp": 8, "cp_inner": 4, "context_parallel": "hierarchical", "backend": "nccl", "formats": BFLOAT16}


def plan() -> Plan:
    """Eight ranks that share sequences, two groups of four."""
    return plan_for(tiny_llama(layers=4), seq_len=32, **SPLIT)


def test_megatron_gets_the_sizes_from_the_inside_out() -> None:
    """The first size is that of the groups that exchange heads, the second that of the rings; other kinds have none."""
    said = {name: words for name, *words in megatron_arguments(plan())}
    assert said["--cp-comm-type"] == ["a2a+p2p"]
    assert said["--hierarchical-context-parallel-sizes"] == ["4", "2"]
    ring = plan_for(tiny_llama(layers=4), seq_len=32, **SPLIT | {"context_parallel": "ring", "cp_inner": 1})
    assert "--hierarchical-context-parallel-sizes" not in {name for name, *_ in megatron_arguments(ring)}


def test_its_script_read_back_says_the_plan(tmp_path: Path) -> None:
    """The reader hears kind and size in the emitted script, and finds no fault."""
    for name, text in emit(plan(), "megatron").items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    read = read_file(tmp_path / "launch.sh", 8)
    assert read.findings == ()
    assert [read.says[name] for name in ("cp", "context_parallel", "cp_inner")] == [8, "hierarchical", 4]


@pytest.mark.parametrize(
    ("sizes", "kind", "inner"), [("4 2", "hierarchical", 4), ("1 8", "ring", None), ("8 1", "all-to-all", None)]
)
def test_groups_of_one_or_all_are_heard_as_what_they_are(
    sizes: str, kind: str, inner: int | None, tmp_path: Path
) -> None:
    """Megatron-LM takes sizes of one; with those it is a ring or an all-to-all. A recipe's list is heard as the arguments are."""
    words = "--num-layers 4 --pipeline-model-parallel-size 1 --context-parallel-size 8 --cp-comm-type a2a+p2p"
    script = f"torchrun pretrain_gpt.py {words} --hierarchical-context-parallel-sizes {sizes} --micro-batch-size 1\n"
    model = {
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 8,
        "cp_comm_type": "a2a+p2p",
        "hierarchical_context_parallel_sizes": [int(size) for size in sizes.split()],
    }
    texts = {"launch.sh": script, "bridge.json": json.dumps({"model": model, "train": {"micro_batch_size": 1}})}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        read = read_file(tmp_path / name, 8)
        assert (read.says["context_parallel"], read.says.get("cp_inner")) == (kind, inner)


SAY_IT = {"torchrun", "slurm", "mp-spawn", "mpirun", "ray", "kubernetes", "skypilot", "megatron"}


@pytest.mark.parametrize("target", [emitter.name for emitter in EMITTERS])
def test_a_target_says_it_or_says_that_it_cannot(target: str) -> None:
    """Our own launchers and Megatron-LM write files; every other target names the field."""
    if target in SAY_IT:
        assert emit(plan(), target)
        return
    threads = "|ranks are a process each" if target == "data-parallel" else ""
    with pytest.raises(
        ImpossibleError, match=rf"cannot say (strategy\.context_parallel = hierarchical|mesh\.cp = 8){threads}"
    ):
        emit(plan(), target)
