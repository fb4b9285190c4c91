"""Configurations of frameworks' own registries and model sections, weighed: each comes to what the same job comes to that is written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from strategist.errors import InputError
from strategist.facts.parameters import count
from strategist.readers import open_source, reader_of
from tests.cli.harness import call

TITAN = "torchrun --nproc_per_node 8 --nnodes 4 -m torchtitan.train --module llama3"
TOML = """
[model]
name = "llama3"
flavor = "8B"
{model}
[training]
local_batch_size = 1
[parallelism]
[activation_checkpoint]
mode = "full"
{more}
"""


def weighed(folder: Path, name: str, text: str, *more: str) -> dict[str, Any]:
    """What `predict` makes of a file."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    found: dict[str, Any] = call("predict", str(path), *more, "--json").document
    return found


def parameters(folder: Path, name: str, table: dict[str, Any]) -> int:
    """Parameters of the model that a file describes."""
    path = folder / name
    path.write_text(yaml.safe_dump(table), encoding="utf-8")
    source = open_source(str(path), "FILE")
    shape = reader_of(source, "FILE").model(source, "FILE")
    assert shape is not None
    return count(shape).total


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two predictions are of the same job."""
    return all(one[part] == other[part] for part in ("mesh", "workload", "memory", "time"))


@pytest.mark.parametrize(
    ("line", "out"),
    [
        ("--config llama3_70b", "--training.local_batch_size 8 --training.seq_len 8192 --parallelism.tensor_parallel_degree 8 activation-checkpoint:full"),
        ("--config llama3_70b --training.local_batch_size 2 activation-checkpoint:none", "--training.local_batch_size 2 --training.seq_len 8192 --parallelism.tensor_parallel_degree 8 activation-checkpoint:none"),
        ("--config llama3_8b", "--training.local_batch_size 1 --training.seq_len 8192 activation-checkpoint:selective"),
    ],
)  # fmt: skip
def test_a_registered_configuration_says_what_it_sets(line: str, out: str, tmp_path: Path) -> None:
    """Its degrees, batch, length and recomputation count as if they stood in the line, whose own words win."""
    words = ("--hardware", "dgx-h100:4")
    model = "llama-3.1-70b" if "70b" in line else "llama-3.1-8b"
    registered = weighed(tmp_path, "a.sh", f"#!/bin/bash\n{TITAN} {line}\n", *words)
    written = weighed(tmp_path, "b.sh", f"#!/bin/bash\n{TITAN} {out}\n", *words, "--model", model)
    assert same(registered, written)


def test_a_registered_configuration_that_nobody_knows_is_said(tmp_path: Path) -> None:
    """What it sets cannot be counted."""
    path = tmp_path / "a.sh"
    path.write_text(f"{TITAN} --config my_own --training.local_batch_size 1 --training.seq_len 128\n", encoding="utf-8")
    found = call("validate", str(path), "--json").document[0]["findings"]
    assert [fault["rule"] for fault in found] == ["titan-config"]


@pytest.mark.parametrize("word", ["quantize.linear.float8", "float8"])
def test_torchtitan_s_float8_is_counted(word: str, tmp_path: Path) -> None:
    """Its converter runs matrices in fp8, as --precision fp8 beside the file does."""
    words = ("--hardware", "dgx-h100")
    of_file = weighed(tmp_path, "a.toml", TOML.format(model=f'converters = ["{word}"]', more=""), *words)
    plain = TOML.format(model="", more="")
    assert same(of_file, weighed(tmp_path, "b.toml", plain, *words, "--precision", "fp8"))
    assert of_file["time"] != weighed(tmp_path, "b.toml", plain, *words)["time"]


def test_a_registered_float8_is_counted_with_its_compiler(tmp_path: Path) -> None:
    """llama3_405b is compiled, in fp8, its embeddings and head apart."""
    found = weighed(tmp_path, "a.sh", f"{TITAN} --config llama3_405b\n", "--hardware", "dgx-h100:4")
    assert found["workload"]["precision"] == "fp8"
    plain = weighed(tmp_path, "a.sh", f"{TITAN} --config llama3_405b --compile.no-enable\n", "--hardware", "dgx-h100:4")
    assert found["memory"]["peak"]["value"] < plain["memory"]["peak"]["value"]


@pytest.mark.parametrize(
    ("more", "profile"),
    [("enable = true", "fsdp2-compiled"), ('enable = true\ncomponents = ["loss"]', "fsdp2"), ("enable = false", "fsdp2")],
)  # fmt: skip
def test_a_compiled_model_of_torchtitan_is_counted_as_such(more: str, profile: str, tmp_path: Path) -> None:
    """As with the profile of that name; one whose loss alone is compiled is not."""
    text, words = TOML.format(model="", more=f"[compile]\n{more}"), ("--hardware", "dgx-h100")
    other = TOML.format(model="", more="")
    found, beside = weighed(tmp_path, "a.toml", text, *words), weighed(tmp_path, "b.toml", other, *words, "--framework", profile)  # fmt: skip
    assert same(found, beside)
    assert found["framework"] == profile


NEOX: dict[str, Any] = {
    "pipe_parallel_size": 2, "model_parallel_size": 2, "num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16,
    "seq_length": 1024, "max_position_embeddings": 1024, "pos_emb": "rotary", "no_weight_tying": True,
    "optimizer": {"type": "Adam", "params": {"lr": 0.0001}}, "zero_optimization": {"stage": 1},
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8, "checkpoint_activations": True,
    "fp16": {"enabled": True},
}  # fmt: skip
"""A configuration of GPT-NeoX."""


def of_neox(folder: Path, **changes: Any) -> dict[str, Any]:
    """What `predict` says of it on one node."""
    return weighed(folder, "model.yml", yaml.safe_dump({**NEOX, **changes}), "--hardware", "dgx-a100-80gb")


def test_gpt_neox_cuts_the_model_before_it_replicates(tmp_path: Path) -> None:
    """8 ranks of 2 stages of 2 ranks are 2 replicas, each with 4 sequences 8 times."""
    found = of_neox(tmp_path)
    mesh, strategy = found["mesh"], found["strategy"]
    assert [mesh[axis] for axis in ("pp", "tp", "dp_shard")] == [2, 2, 2]
    assert (strategy["zero"], strategy["recompute"], strategy["schedule"]) == (1, "full", "1f1b")
    assert (found["workload"]["global_batch"], found["workload"]["precision"]) == (4 * 8 * 2, "fp16")


def test_gpt_neox_takes_dashes_for_underscores(tmp_path: Path) -> None:
    """In every name of the file."""
    dashes = {key.replace("_", "-"): value for key, value in NEOX.items()}
    assert same(weighed(tmp_path, "a.yml", yaml.safe_dump(dashes), "--hardware", "dgx-a100-80gb"), of_neox(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": None},
        {"train_batch_size": 64},
        {"precision": "fp16", "fp16": {"loss_scale": 0}},
        {"attention_config": [[["global"], 8]]},
    ],
)
def test_gpt_neox_says_the_same_in_other_words(changes: dict[str, Any], tmp_path: Path) -> None:
    """A micro-batch that the batch leaves, a precision by its word, the usual layers."""
    assert same(of_neox(tmp_path, **changes), of_neox(tmp_path))


def test_gpt_neox_s_flash_attention_keeps_no_scores(tmp_path: Path) -> None:
    """Each of 4 layers of the first stage keeps at least 2 bytes for every score of 4 sequences and 8 heads, unless attention is fused."""
    plain, flash = (
        of_neox(tmp_path, attention_config=[[[kind], 8]], checkpoint_activations=False) for kind in ("global", "flash")
    )
    assert plain["memory"]["peak"]["value"] - flash["memory"]["peak"]["value"] >= 4 * 2 * 4 * 8 * 1024**2


def test_gpt_neox_s_eight_bit_adam_is_counted(tmp_path: Path) -> None:
    """bitsandbytes' Adam under a switch of its own."""
    assert of_neox(tmp_path, use_bnb_optimizer=True)["workload"]["optimizer"] == "adamw8bit"


def test_a_batch_in_a_section_is_no_deepspeed_file(tmp_path: Path) -> None:
    """Programs of reinforcement learning have DeepSpeed's words in sections of their own, and other meanings for them."""
    table = {"data": {"train_batch_size": 1024}, "actor": {"zero_optimization": {"stage": 3}}}
    assert weighed(tmp_path, "a.yaml", yaml.safe_dump(table), "--hardware", "dgx-h100")["error"]["code"] == "E_KIND"


def of_nanotron(folder: Path, **model: Any) -> int:
    """Parameters of the model of a configuration of nanotron."""
    shape = {
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
        "vocab_size": 32000, "max_position_embeddings": 1024, "hidden_act": "silu", "tie_word_embeddings": True,
    }  # fmt: skip
    table = {
        "parallelism": {"dp": 8, "pp": 1, "tp": 1, "pp_engine": "1f1b"},
        "model": {"dtype": "bfloat16", "model_config": {**shape, **model}},
        "tokens": {"micro_batch_size": 1, "batch_accumulation_per_replica": 2, "sequence_length": 512},
    }
    return parameters(folder, "nanotron.yaml", table)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("layers", [[-1], [1, 3]])
def test_nanotron_s_mixtures_have_their_experts(shared: bool, layers: list[int], tmp_path: Path) -> None:
    """Three matrices for each expert and a router take the place of the dense part, beside them a shared expert and its gate; what no
    family here is, is refused rather than taken for a dense model."""
    moe = {"num_experts": 8, "top_k": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 512}
    qwen: dict[str, Any] = {"is_qwen2_config": True}
    qwen["moe_config"] = {**moe, "enable_shared_expert": shared, "layers": layers}
    if layers != [-1] and not shared:
        with pytest.raises(InputError, match="moe_config"):
            of_nanotron(tmp_path, **qwen)
        return
    dense = of_nanotron(tmp_path)
    each = 8 * 3 * 256 * 128 + 8 * 256 + (3 * 256 * 512 + 256 if shared else 0) - 3 * 256 * 768
    assert of_nanotron(tmp_path, **qwen) - dense == each * (4 if layers == [-1] else 2)


def test_nanotron_s_biases_are_those_of_its_classes(tmp_path: Path) -> None:
    """Qwen2Config's stand beside queries, keys and values; LlamaConfig has the key and never looks at it."""
    plain = of_nanotron(tmp_path)
    assert of_nanotron(tmp_path, is_qwen2_config=True, attention_bias=True) - plain == 4 * 3 * 256
    assert of_nanotron(tmp_path, is_llama_config=True, attention_bias=True) == plain


@pytest.mark.parametrize("layers", [3, "all", {"a": 1}])
def test_layers_of_a_mixture_that_are_no_list_are_refused(layers: object, tmp_path: Path) -> None:
    """nanotron's class has a list of them."""
    with pytest.raises(InputError, match=r"moe_config\.layers"):
        of_nanotron(tmp_path, num_hidden_layers=10**17, moe_config={"layers": layers})


@pytest.mark.parametrize("key", ["is_llamoe_config", "is_starcoder2_config", "moe_num_experts"])
def test_models_of_nanotron_that_are_not_read_are_refused(key: str, tmp_path: Path) -> None:
    """By the key that says so."""
    with pytest.raises(InputError, match=key):
        of_nanotron(tmp_path, **{key: 4})


def test_llm_foundry_s_own_model_is_read_through_its_variables(tmp_path: Path) -> None:
    """The same job in words of its own and in variables; its sequences are as long as the variable says."""
    model = {"name": "mpt_causal_lm", "d_model": 256, "n_heads": 4, "n_layers": 4, "vocab_size": 50368}
    table: dict[str, Any] = {
        "model": {**model, "max_seq_len": 512}, "device_train_microbatch_size": 2, "global_train_batch_size": 32, "train_loader": {},
        "max_seq_len": 512, "fsdp_config": {"sharding_strategy": "FULL_SHARD"}, "device_eval_batch_size": 2,
    }  # fmt: skip
    named = {
        **table, "variables": {"length": 512}, "max_seq_len": "${variables.length}",
        "model": {**model, "max_seq_len": "${max_seq_len}"},
    }  # fmt: skip
    words = ("--hardware", "dgx-h100")
    found = weighed(tmp_path, "a.yaml", yaml.safe_dump(named), *words)
    assert found["workload"]["seq_len"] == 512
    assert same(found, weighed(tmp_path, "b.yaml", yaml.safe_dump(table), *words))


@pytest.mark.parametrize(
    ("changes", "words"),
    [({}, None), ({"seq_lenght": 8}, "1 of them a failure"), ({"optimizer": {"type": "Lion"}}, "none of them failures")],
)  # fmt: skip
def test_a_prediction_says_how_many_faults_its_file_has(
    changes: dict[str, Any], words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, with the command that names them; nothing of a file without any."""
    monkeypatch.chdir(tmp_path)
    Path("m.yml").write_text(yaml.safe_dump({**NEOX, **changes}), encoding="utf-8")
    text = " ".join(call("predict", "m.yml", "--hardware", "dgx-a100-80gb").out.split())
    assert ("faults" in text) == (words is not None)
    assert words is None or f"faults 1 in m.yml, {words}: strategist validate m.yml" in text
