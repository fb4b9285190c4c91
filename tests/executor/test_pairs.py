"""Encoders with decoders whose targets have a length of their own, trained by ranks: in float64 each layout is one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from strategist.document.plan import Plan
from strategist.facts.model_config import shape_from_config
from tests.cli.harness import call
from tests.executor.harness import run_alone, run_ranks
from tests.executor.pair_configs import config_of
from tests.plans import make_plan, uneven

pytestmark = pytest.mark.slow

LOSS_BOUND, WEIGHT_BOUND = 1e-12, 1e-9
REPLICAS: dict[str, dict[str, Any]] = {
    "accumulation": {"micro_batch": 2, "accumulation": 4},
    "recompute": {"micro_batch": 8, "recompute": "full"},
    "ddp": {"dp_replicate": 2, "micro_batch": 2, "accumulation": 2},
    "ddp-recompute": {"dp_replicate": 2, "micro_batch": 4, "recompute": "selective"},
    "zero-1": {"dp_shard": 2, "zero": 1, "micro_batch": 4},
    "zero-2": {"dp_shard": 2, "zero": 2, "micro_batch": 2, "accumulation": 2},
    "zero-3": {"dp_shard": 2, "zero": 3, "micro_batch": 4},
    "zero-3-recompute": {"dp_shard": 2, "zero": 3, "micro_batch": 4, "recompute": "full"},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2, "zero": 3, "micro_batch": 2},
}
CUT: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2, "micro_batch": 8},
    "tp-recompute": {"tp": 2, "micro_batch": 4, "accumulation": 2, "recompute": "full"},
    "tp-4": {"tp": 4, "micro_batch": 8},
    "tp-ddp": {"tp": 2, "dp_replicate": 2, "micro_batch": 4},
    "tp-zero-1": {"tp": 2, "dp_shard": 2, "zero": 1, "micro_batch": 4},
    "tp-zero-2": {"tp": 2, "dp_shard": 2, "zero": 2, "micro_batch": 4},
    "tp-zero-3": {"tp": 2, "dp_shard": 2, "zero": 3, "micro_batch": 4, "recompute": "selective"},
}
LAYOUTS = REPLICAS | CUT


def plan_of(family: str, layout: dict[str, Any], targets: int | None = 10, inputs: int = 16, **changes: Any) -> Plan:
    """A plan for a tiny model."""
    plan = make_plan(replace(shape_from_config(config_of(family)), **changes), seq_len=inputs, **layout)
    return replace(plan, workload=replace(plan.workload, target_len=targets))


@cache
def alone(family: str, plan: Plan) -> Any:
    """What one process makes of the plan's samples."""
    from tests.executor.pairs import train_pair_alone

    return run_alone(train_pair_alone, family, plan)


def assert_trained_like_one_process(family: str, plan: Plan) -> None:
    """Losses and weights of every rank."""
    from tests.executor.pairs import train_pair

    expected_losses, expected = alone(family, plan_of(family, {"micro_batch": 8}, plan.workload.target_len))
    for losses, weights in run_ranks(plan.processes, train_pair, family, plan):
        assert losses == pytest.approx(expected_losses, abs=LOSS_BOUND, rel=0)
        assert weights.keys() == expected.keys()
        assert max(float((weights[name] - value).abs().max()) for name, value in expected.items()) <= WEIGHT_BOUND


BY_DAY = {("t5", "ddp"), ("t5", "zero-3-recompute"), ("t5", "tp"), ("bart", "zero-2"), ("bart", "tp-zero-3")}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=() if (family, layout) in BY_DAY else pytest.mark.nightly)
        for family in ("t5", "bart")
        for layout in LAYOUTS
    ],
)
def test_inputs_and_targets_of_two_lengths_train_as_in_one_process(family: str, layout: str) -> None:
    """Sixteen tokens for the encoder and ten for the decoder: five losses and the weights behind them."""
    assert_trained_like_one_process(family, plan_of(family, LAYOUTS[layout]))


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["mt5", "mbart"])
@pytest.mark.parametrize("targets", [None, 24])
def test_targets_as_long_as_the_inputs_and_longer_ones_too(family: str, targets: int | None) -> None:
    """Tables of embeddings that head and halves share or do not share, norms in front and behind."""
    assert_trained_like_one_process(family, plan_of(family, CUT["tp-zero-3"], targets))


@pytest.mark.nightly
def test_unlike_nodes_train_pairs_too() -> None:
    """Replicas that run one and three micro-batches."""
    layout = {"dp_replicate": 2, "micro_batch": 2, "accumulation": 3, "uneven_batch": uneven((1, 3), (1, 1))}
    assert_trained_like_one_process("t5", plan_of("t5", layout))


def test_a_script_needs_no_data_of_its_own() -> None:
    """`train` makes pairs of the plan's lengths, and a decoder learns what follows them."""
    from tests.executor.pairs import train_on_synthetic_pairs

    losses = run_alone(train_on_synthetic_pairs, plan_of("t5", {"micro_batch": 8}))
    assert len(losses) == 5
    assert losses[-1] < losses[0]


def test_synthetic_targets_begin_where_the_inputs_end() -> None:
    """The decoder is given the last token of the inputs first, and learns the one behind each that it is given."""
    from strategist.executor.data import SyntheticPairs, SyntheticTokens

    pair, whole = SyntheticPairs(64, 16, 10, 4)[3], SyntheticTokens(64, 25, 4)[3]
    assert [len(pair[name]) for name in ("input_ids", "decoder_input_ids", "labels")] == [16, 10, 10]
    assert pair["decoder_input_ids"][0] == pair["input_ids"][-1]
    assert pair["decoder_input_ids"][1:].tolist() == pair["labels"][:-1].tolist() == whole["labels"][15:-1].tolist()


def test_a_written_script_trains_on_two_ranks(tmp_path: Path) -> None:
    """Planned by the command line, written for torchrun, and started as it is: a T5 cut over two ranks, with the dropout of its
    configuration left out."""
    config, plan, job = tmp_path / "config.json", tmp_path / "plan.json", tmp_path / "job"
    config.write_text(
        json.dumps(config_of("t5") | {"architectures": ["T5ForConditionalGeneration"], "dropout_rate": 0.1})
    )
    asked = "--hardware local --gpus-per-node 2 --seq-len 16 --target-len 10 --global-batch 8 --precision fp32 --pin tp=2,sequence_parallel=0"
    assert call("plan", "--model-config", str(config), *asked.split(), "--out", str(plan)).code == 0
    assert call("emit", str(plan), "--to", "torchrun", "--out", str(job)).code == 0
    beside = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    command = [str(job / "launch.sh"), "--model", str(tmp_path), "--steps", "3"]
    ran = subprocess.run(command, env=os.environ | beside, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert [line.split()[:2] for line in ran.stdout.splitlines() if line.startswith("step")] == [
        ["step", str(number)] for number in range(3)
    ]


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "dropout under tp": ("t5", CUT["tp"], {"dropout_rate": 0.1}, "would each draw"),
    "another family under tp": ("blenderbot", CUT["tp"], {}, "nobody said how BlenderbotForConditionalGeneration may be cut"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_pairs_of_transformers_cannot_do_is_refused_when_a_session_is_built(case: str) -> None:
    """On every rank, in a sentence."""
    from tests.executor.pairs import refusal

    family, layout, changes, words = REFUSED[case]
    for code, sentence in run_ranks(2, refusal, family, plan_of(family, layout), changes):
        assert (code, words in sentence) == ("UNSUPPORTED", True), sentence
