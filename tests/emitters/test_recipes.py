"""A recipe of Megatron-Bridge says what the plan says, and says it in no other way than the arguments of Megatron-LM."""

from __future__ import annotations

import json
from pathlib import PurePosixPath

import pytest

from strategist import emit
from strategist.emitters.megatron import megatron_arguments
from strategist.emitters.megatron_bridge import OTHER_NAME, SAME_NAME, places_of
from strategist.facts.models import load_model
from strategist.readers.foreign import Source
from strategist.readers.torchtitan import TORCHTITAN
from tests.emitters.grid import COMMON, plan_for, written
from tests.emitters.test_read_back import Files, Said, facts

SHARDING = {None: 1, "optim_grads": 2, "optim_grads_params": 3}
SAME = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size",
}  # fmt: skip


def from_megatron_bridge(files: Files) -> Said:
    """The sections of the container; what is not in them is the container's own default."""
    text = json.loads(files[PurePosixPath("megatron_bridge.json")])
    model, ddp, numbers = text["model"], text["ddp"], text["mixed_precision"]
    low = "bfloat16" if numbers.get("bf16") else "float16" if numbers.get("fp16") else "float32"
    gradient = "float32" if numbers["grad_reduce_in_fp32"] else low
    zero = SHARDING[ddp.get("data_parallel_sharding_strategy")] if ddp.get("use_distributed_optimizer") else 0
    experts = (
        {axis: model[f"{word}_parallel_size"] for axis, word in EXPERTS.items()} if "num_moe_experts" in model else {}
    )
    in_part = model.get("recompute_method") == "block"
    return {name: model[field] for name, field in SAME.items()} | experts | {
        "virtual_stages": model.get("virtual_pipeline_model_parallel_size", 1),
        "sequence_parallel": model.get("sequence_parallel", False),
        "context_parallel": {None: "none", "p2p": "ring", "a2a": "all-to-all"}[model.get("cp_comm_type")],
        "recompute": str(model["recompute_num_layers"]) if in_part else model.get("recompute_granularity", "none"),
        "seq_len": model["seq_length"],
        "micro_batch": text["train"]["micro_batch_size"],
        "batch": text["train"]["global_batch_size"],
        "optimizer": {"adam": "adamw", "sgd": "sgd"}[text["optimizer"]["optimizer"]],
        "compute": low, "gradient": gradient, "reduce": gradient, "zero": zero,
    }  # fmt: skip


EXPERTS = {"ep": "expert_model", "etp": "expert_tensor"}


@pytest.mark.slow
def test_recipes_say_what_the_plan_says() -> None:
    """Every number and choice of the container is the plan's, for every plan of the grid, on every axis that it has."""
    seen = set()
    for plan, files in written("megatron-bridge"):
        said, meant = from_megatron_bridge(files), facts(plan)
        assert {name: meant[name] for name in said} == said
        seen |= {(name, str(value)) for name, value in said.items()}
    axes = {(axis, "2") for axis in ("tp", "pp", "cp", "ep", "etp")}
    assert axes | {("zero", "1"), ("zero", "3"), ("compute", "float16"), ("virtual_stages", "2")} <= seen


@pytest.mark.slow
def test_every_argument_has_one_place() -> None:
    """Each argument that Megatron-LM gets for a plan has a place in the container, and no place is left without one."""
    names = {name for places in SAME_NAME.values() for name in places}
    assert names.isdisjoint(OTHER_NAME)
    used = {
        argument[0]: places_of(argument)
        for plan, _ in written("megatron-bridge")
        for argument in megatron_arguments(plan)
    }
    assert set(used) <= names | set(OTHER_NAME)
    assert (used["--attention-dropout"], used["--hidden-dropout"]) == (
        (("model", "attention_dropout", 0.0),),
        (("model", "hidden_dropout", 0.0),),
    )
    with pytest.raises(KeyError):
        places_of(("--misspelt-argument", "1"))


@pytest.mark.parametrize(
    ("target", "name", "words"),
    [
        ("megatron", "launch.sh", ("--rotary-base", "--norm-epsilon")),
        ("megatron-bridge", "launch.sh", ("rotary_base", "layernorm_epsilon")),
        ("nanotron", "nanotron.yaml", ("rope_theta", "rms_norm_eps")),
    ],
)
def test_files_say_what_converted_weights_need(target: str, name: str, words: tuple[str, ...]) -> None:
    """No plan carries the base of rotary angles: a comment names what weights of others may need, and nothing else says a base."""
    text = emit(plan_for(**COMMON), target)[PurePosixPath(name)]
    comments = [row for row in text.splitlines() if row.startswith("# ")]
    assert all(any(word in row for row in comments) for word in words)
    assert not any(word in row for row in text.splitlines() if not row.startswith("# ") for word in words)


NAMED = {
    "llama-3.1-8b": ["--module llama3", "--config llama3_8b"],
    "qwen3-0.6b": ["--module qwen3", "--config qwen3_0_6b"],
}


def test_torchtitan_is_told_a_model_that_it_has() -> None:
    """Of a model of its registry launch.sh says the names and the reader finds the same model; of another one a comment says that it has none."""
    script = PurePosixPath("launch.sh")
    for name, words in NAMED.items():
        shape = load_model(name)
        text = emit(plan_for(shape, **COMMON), "torchtitan")[script]
        assert [row.strip(" \\") for row in text.splitlines() if row.startswith("  --")] == words
        assert TORCHTITAN.model(Source(path="launch.sh", text=text), "FILE") == shape
    text = emit(plan_for(load_model("gpt2"), **COMMON), "torchtitan")[script]
    assert "# torchtitan 0.3.0 brings no configuration of gpt2:" in text
    assert "--module " not in text.partition("exec")[2]
