"""ZeRO++ beside a plan: what `--zeropp` writes into DeepSpeed's file, and where it is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from strategist import emit
from strategist.document.plan import Plan
from strategist.document.write import dump
from strategist.emitters import EMITTERS
from strategist.emitters.emitter import Options
from strategist.emitters.zero_plus_plus import second_copy_bytes
from strategist.errors import StrategistError
from strategist.facts.parameters import count
from tests.cli.harness import call
from tests.emitters.grid import COMMON, outcomes, plan_on
from tests.plans import BFLOAT16

FILE = PurePosixPath("deepspeed.json")
HALVES = replace(
    BFLOAT16, parameter="float16", gradient="float16", reduce="float16", compute="float16", master="float32"
)
KEYS = {
    "hpz": ("zero_hpz_partition_size", 4),
    "qwz": ("zero_quantized_weights", True),
    "qgz": ("zero_quantized_gradients", True),
}


def on_nodes(**said: Any) -> Plan:
    """ZeRO-3 in fp16 over two nodes of four devices."""
    return plan_on(2, 4, **COMMON | {"formats": HALVES} | said)


def section(plan: Plan, target: str, *words: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(emit(plan, target, Options(zeropp=words))[FILE])["zero_optimization"]
    return document


@pytest.mark.parametrize("target", ["deepspeed", "accelerate", "fabric", "trainer"])
@pytest.mark.parametrize("words", [("hpz",), ("qwz",), ("qgz",), ("qgz", "hpz", "qwz")], ids="+".join)
def test_words_become_keys_and_nothing_else_changes(target: str, words: tuple[str, ...]) -> None:
    """Each word is one key of zero_optimization, in the files of every target that hands this plan to DeepSpeed."""
    plain, more = section(on_nodes(), target), section(on_nodes(), target, *words)
    assert more == plain | dict(KEYS[word] for word in words)


@pytest.mark.parametrize(
    ("plan", "words", "sentence"),
    [
        (on_nodes(zero=2), ("hpz",), "ZeRO-3 alone"),
        (on_nodes(zero=2), ("qwz",), "strategy.zero = 2"),
        (on_nodes(offload="parameters", formats=BFLOAT16), ("hpz",), "strategy.offload = parameters"),
        (on_nodes(tp=2, dp_shard=4, formats=BFLOAT16), ("qwz",), "mesh.tp = 2"),
        (on_nodes(cp=2, dp_shard=4, context_parallel="all-to-all", formats=BFLOAT16), ("hpz",), "mesh.cp = 2"),
        (on_nodes(formats=BFLOAT16), ("qgz",), "here they are float32"),
        (plan_on(1, 8, **COMMON | {"formats": HALVES}), ("qgz",), "1 of 8"),
        (plan_on(1, 8, **COMMON), ("hpz",), "1 of 8"),
        (plan_on(8, 1, **COMMON), ("hpz",), "8 of 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_words_without_effect_or_proof_are_refused(plan: Plan, words: tuple[str, ...], sentence: str) -> None:
    """Stages below 3, what was not tried, gradients that the kernel would misread, and nodes that there is nothing to tell apart."""
    assert FILE in emit(plan, "deepspeed")
    with pytest.raises(StrategistError) as refused:
        emit(plan, "deepspeed", Options(zeropp=words))
    assert refused.value.code == "UNSUPPORTED"
    assert sentence in refused.value.message


@pytest.mark.slow
@pytest.mark.parametrize("target", [emitter.name for emitter in EMITTERS])
def test_targets_without_deepspeed_refuse_every_word(target: str) -> None:
    """Of the plans that a target has files for, one without DeepSpeed's file is refused with a word, not written without it."""
    files = [
        (plan, found) for plan, found in outcomes(target).values() if isinstance(found, dict) and FILE not in found
    ]
    if target == "deepspeed":
        assert not files
        return
    for plan, _ in files[:3]:
        with pytest.raises(StrategistError, match="without DeepSpeed") as refused:
            emit(plan, target, Options(zeropp=("qwz",), nvme_path="/x" if plan.strategy.offload == "nvme" else None))
        assert refused.value.code == "UNSUPPORTED"
    assert files


def test_the_second_copy_needs_its_room() -> None:
    """One byte less than the plan and a fourth of all weights hold together is too little, and the sentence has the figures."""
    plan = on_nodes()
    copy = second_copy_bytes(plan)
    assert copy == -(-count(plan.model).total * 2 // 4)
    needed = plan.memory.worst.device + copy
    enough, short = (replace(plan, memory=replace(plan.memory, usable_bytes=size)) for size in (needed, needed - 1))
    assert section(enough, "deepspeed", "hpz")["zero_hpz_partition_size"] == 4
    with pytest.raises(StrategistError, match="second copy of the weights shared by the 4 devices"):
        emit(short, "deepspeed", Options(zeropp=("hpz",)))


def test_an_unknown_word_is_an_error_with_the_nearest() -> None:
    """From Python as from the command line."""
    with pytest.raises(StrategistError, match="no 'hpzz'") as refused:
        emit(on_nodes(), "deepspeed", Options(zeropp=("hpzz",)))
    assert (refused.value.code, "hpz" in (refused.value.hint or "")) == ("CHOICE", True)


def test_the_command_line_says_what_the_words_change(tmp_path: Path) -> None:
    """`emit --zeropp` writes the keys and tells memory and numbers that the plan does not."""
    (tmp_path / "plan.json").write_text(dump(on_nodes()), encoding="utf-8")
    words = ("emit", str(tmp_path / "plan.json"), "--to", "deepspeed", "--out", str(tmp_path / "job"))
    done = call(*words, "--zeropp", "hpz,qwz", "--json")
    assert done.code == 0
    notes = " ".join(json.loads(done.out)["notes"])
    assert "more on each device than the plan says" in notes
    assert "weights as integers of 8 bits: losses" in notes
    assert json.loads((tmp_path / "job/deepspeed.json").read_text())["zero_optimization"]["zero_quantized_weights"]
    for wrong in ("", "hpz,", "HPZ", "hpz qwz"):
        assert call(*words, "--force", "--zeropp", wrong).code == 2
