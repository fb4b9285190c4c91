"""What a plan says of fewer machines: true of all that the whole could do, and in words that can be typed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from strategist import Plan, recommend
from strategist.units import format_seconds
from tests.cli.harness import call

pytestmark = pytest.mark.slow

FORMS: tuple[dict[str, str], ...] = (
    {"--model": "gpt2", "--gpu": "rtx-4090", "--gpus-per-node": "4", "--nodes": "1", "--intra-bw": "2GB/s", "--global-batch": "8"},
    {"--model": "gpt2", "--gpu": "rtx-4090", "--gpus-per-node": "6", "--nodes": "2", "--inter-bw": "10Gb/s"},
    {"--model": "gpt2", "--hardware": "lambda-8x-h100:2", "--global-batch": "64"},
    {"--model": "gpt2", "--hardware": "Lambda 8x H100:2", "--global-batch": "48"},
    {"--model": "gpt2", "--hardware": "ws-4x-4090", "--global-batch": "4"},
    {"--model": "gpt2", "--hardware": "FILE", "--global-batch": "8"},
    {"--model": "gpt2", "--hardware": "lambda-8x-h100:2", "--objective": "cost", "--global-batch": "64"},
    {"--model": "gpt2", "--hardware": "lambda-8x-h100:2", "--policy": "fastest", "--global-batch": "64"},
)  # fmt: skip
"""Jobs that a part of the machines does sooner, each asked for in another way."""
FILE = {"format": "strategist-hardware/1", "gpu": "rtx-4090", "gpus_per_node": 4, "intra_bw": "2GB/s"}


def words_of(flags: dict[str, str]) -> list[str]:
    """The command line of some flags."""
    return ["plan", "--seq-len", "1024", "--json", *(word for pair in flags.items() for word in pair)]


@pytest.mark.parametrize("flags", FORMS, ids=lambda flags: " ".join(flags.values()))
def test_the_advice_yields_the_time_that_it_states(flags: dict[str, str], tmp_path: Path) -> None:
    """What W_FEWER says to ask can be typed in place of the same flags, and gives the seconds that it states; where other numbers of
    devices are looked at too, no more than these."""
    if flags.get("--hardware") == "FILE":
        path = tmp_path / "mine.json"
        path.write_text(json.dumps(FILE), encoding="utf-8")
        flags = flags | {"--hardware": str(path)}
    document = call(*words_of(flags)).document
    (advice,) = [hint["sentence"] for hint in document["hints"] if hint["code"].startswith("W_FEWER")]
    stated = advice.partition("predicted at ")[2].partition(" per step")[0]
    said = shlex.split(advice.partition("Ask again with ")[2].removesuffix("."))
    if said[0] == "--allow-idle,":
        again = call(*words_of(flags), "--allow-idle").document
        assert again["time"]["step_ns"] / 1e9 <= seconds_in(stated)
        assert again["idle"] > 0
    else:
        again = call(*words_of(flags | dict(zip(said[::2], said[1::2], strict=True)))).document
        assert format_seconds(again["time"]["step_ns"] / 1e9) == stated
    assert again["time"]["step_ns"] < document["time"]["step_ns"]


def seconds_in(text: str) -> float:
    """The most that a time which is written so short can be."""
    number, unit = text.split()
    return float(number) * {"ms": 1e-3, "s": 1.0}[unit] * 1.01


SILENT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama-2-7b", {"gpu": "a10g", "gpus_per_node": 8, "intra_bw": "8GB/s"}),
    ("llama-3.2-3b", {"gpu": "rtx-4090", "gpus_per_node": 4, "intra_bw": "13GB/s"}),
)
"""Models, and boxes with slow links, whose preferred layout is slower on all machines than on some, while another family on all is faster than both."""


@pytest.mark.parametrize(("model", "box"), SILENT, ids=str)
def test_fewer_machines_are_not_called_faster_than_another_family_on_all(
    model: str, box: dict[str, Any], tmp_path: Path
) -> None:
    """Where a part beats what the rules take on the whole but not the whole's fastest layout, nobody is told to use fewer machines; who
    allows idle devices gets the part, and is told what all of them could do."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"format": "strategist-hardware/1"} | box), encoding="utf-8")
    asked: dict[str, Any] = {"model": model, "hardware": str(path), "global_batch": 256, "seq_len": 2048}
    plan, part = recommend(**asked), recommend(**asked, allow_idle=True)
    fastest = recommend(**asked, policy="fastest")
    assert plan.time.step_ns > part.time.step_ns > fastest.time.step_ns
    assert not [hint for hint in plan.hints if hint.code.startswith("W_FEWER")]
    (idle,) = [hint.sentence for hint in part.hints if hint.code == "W_IDLE"]
    assert format_seconds(fastest.time.step_ns / 1e9) in idle
    assert "--policy fastest" in idle


@pytest.mark.parametrize("objective", ["time", "cost"])
def test_fewer_machines_beat_every_layout_of_the_whole(objective: str) -> None:
    """Where fewer machines are said to be faster or cheaper, the stated step beats the fastest layout of all of them."""
    for hardware in ("lambda-8x-h100:2", "dgx-h100:4", "aws-g5.48xlarge:4"):
        asked: dict[str, Any] = {"model": "gpt2", "hardware": hardware, "seq_len": 1024, "global_batch": 8}
        plan = recommend(**asked, objective=objective)
        fastest = recommend(**asked, policy="fastest")
        for hint in plan.hints:
            if hint.code == "W_FEWER_NODES":
                stated = seconds_in(hint.sentence.partition("predicted at ")[2].partition(" per step")[0])
                number = hint.sentence.rpartition(":")[2].removesuffix(".")
                share = int(number) / plan.cluster.nodes if objective == "cost" else 1.0
                assert stated / 1.02 * share < fastest.time.step_ns / 1e9
                is_faster = hint.sentence.startswith("Fewer machines are faster")
                assert not is_faster or stated / 1.02 < fastest.time.step_ns / 1e9


def peak(plan: Plan) -> float:
    """Bytes of the fullest device."""
    return plan.memory.peak.value


def test_idle_devices_cost_no_memory_where_memory_is_the_objective() -> None:
    """With objective memory no device holds more for others being idle, and no part of the machines holds less."""
    asked: dict[str, Any] = {"model": "gpt2-xl", "seq_len": 1024, "global_batch": 64, "objective": "memory"}
    whole = recommend(**asked, hardware="ws-4x-4090")
    part = recommend(**asked, hardware="ws-4x-4090", allow_idle=True)
    alone = [recommend(**asked, hardware={**FILE, "gpus_per_node": count}) for count in (2, 4)]
    assert peak(part) <= peak(whole)
    assert peak(recommend(**asked, hardware=FILE, allow_idle=True)) <= min(map(peak, alone))
