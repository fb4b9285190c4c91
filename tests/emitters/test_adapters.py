"""Plans for adapters: every target writes them or says why not, and LLaMA-Factory's file says all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from strategist import StrategistError, emit
from strategist.document.plan import NumberFormats, Plan
from strategist.emitters import EMITTERS
from strategist.facts.model import Adapters
from strategist.readers.foreign import keys_of
from tests.emitters.grid import plan_for
from tests.plans import FLOAT32, tiny_gpt2, tiny_llama, tiny_mixtral
from tests.readers.reading import read_file

LORA = Adapters(rank=4, alpha=8, targets=("q", "v", "down"))
FROZEN = NumberFormats(parameter="bfloat16", gradient="float32", reduce="float32", compute="bfloat16")


def lora(method: Any = "lora", **choices: Any) -> Plan:
    """Adapters beside a Llama on two replicas."""
    words: dict[str, Any] = {"dp_replicate": 2, "formats": FROZEN, "backend": "nccl"}
    plan = plan_for(tiny_llama(adapters=replace(LORA, method=method)), **words | choices)
    return replace(plan, workload=replace(plan.workload, precision="bf16"))


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("emitter", EMITTERS, ids=lambda emitter: emitter.name)
def test_every_target_carries_adapters_or_refuses_them_by_name(emitter: Any, method: str) -> None:
    """Launchers of our own program carry the plan; a framework's files say the method, or the refusal names it: of the two
    programs of ours without adapters too, one of which no plan for adapters is made for."""
    try:
        files = emit(lora(method), emitter.name)
    except StrategistError as refusal:
        assert emitter.engine != "strategist" or emitter.name in ("data-parallel", "parameter-server")
        reason = "strategy.replicas = processes" if emitter.name == "data-parallel" else f"model.method = {method}"
        assert (refusal.exit_code, reason in refusal.message) == (3, True)
    else:
        assert emitter.engine == "strategist" or emitter.name == "llama-factory"
        assert '"targets"' in files[PurePosixPath("plan.json")]


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_llama_factory_says_what_the_plan_says(method: str, tmp_path: Path) -> None:
    """Rank, alpha, no dropout, the matrices by their names in transformers, four bits where asked: known keys, and the reader finds
    the same in them."""
    text = emit(lora(method), "llama-factory")[PurePosixPath("llama_factory.yaml")]
    said = yaml.safe_load(text)
    assert set(said) <= set(keys_of("llama-factory"))
    assert (said["finetuning_type"], said["lora_rank"], said["lora_alpha"], said["lora_dropout"]) == ("lora", 4, 8, 0.0)
    assert said["lora_target"] == "q_proj,v_proj,down_proj"
    assert (said.get("quantization_bit"), said.get("double_quantization")) == (
        (4, True) if method == "qlora" else (None, None)
    )
    path = tmp_path / "llama_factory.yaml"
    path.write_text(text, encoding="utf-8")
    says = read_file(path, 2).says
    assert (says["method"], says["lora_rank"], says["lora_targets"]) == (method, 4, "q,v,down")


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"dp_replicate": 1, "dp_shard": 2, "zero": 3}, "strategy.zero above 0"),
        ({"formats": replace(FROZEN, parameter="float32")}, "strategy.formats"),
    ],
)
def test_llama_factory_refuses_what_its_file_would_say_otherwise(choices: dict[str, Any], words: str) -> None:
    """ZeRO is DeepSpeed's there, and frozen weights rest as they compute; weights of full training do not."""
    with pytest.raises(StrategistError, match=words):
        emit(lora(**choices), "llama-factory")
    with pytest.raises(StrategistError, match=r"model\.method"):
        emit(plan_for(tiny_llama(), dp_replicate=2, formats=FROZEN, backend="nccl"), "llama-factory")
    with pytest.raises(StrategistError, match=r"model\.family"):
        shape = tiny_gpt2(adapters=replace(LORA, targets=("q", "v")))
        emit(plan_for(shape, dp_replicate=2, formats=FLOAT32, backend="nccl"), "llama-factory")


def test_llama_factory_leaves_experts_in_sixteen_bits() -> None:
    """Nothing there packs stacked experts, so it takes adapters of a mixture in sixteen bits alone."""
    some = replace(LORA, targets=("q", "v"))
    plan, packed = (
        plan_for(tiny_mixtral(adapters=replace(some, method=method)), dp_replicate=2, formats=FROZEN, backend="nccl")
        for method in ("lora", "qlora")
    )
    assert "lora_target: q_proj,v_proj" in emit(plan, "llama-factory")[PurePosixPath("llama_factory.yaml")]
    with pytest.raises(StrategistError, match="qlora beside experts"):
        emit(packed, "llama-factory")
