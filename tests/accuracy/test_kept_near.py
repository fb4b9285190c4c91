"""Weights that DeepSpeed's ZeRO-3 does not let go of between forward and backward, because backward comes back to them soon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strategist.accuracy.judge import predictions
from strategist.facts.job import Job
from strategist.facts.parameters import count
from strategist.records import replace
from strategist.space.candidates import Candidates
from strategist.space.shares import elements, groups, near_turn
from strategist.space.traffic import traffic
from tests.accuracy.test_memory import judged

ZERO_3 = {"framework": "HF Trainer+DeepSpeed", "precision": "bf16", "dp": "8", "pp": "1", "tp": "1", "zero_class": "3", "seq_len": "512", "step_time_s": "1"}  # fmt: skip


def asked(folder: Path, model: str, recompute: str) -> tuple[Job, dict[str, int]]:
    """A job of DeepSpeed's ZeRO-3 on Transformers' modules, and its layout."""
    one = judged(folder, **ZERO_3, model=model, recompute=recompute, recompute_class=recompute)
    assert one.case is not None
    return one.case.job, dict(one.case.layout)


def without(job: Job) -> Job:
    """The same where every module's weights go when it has run."""
    return replace(job, profile=replace(job.profile, reuse_distance=0))


def columns(layout: dict[str, int]) -> Candidates:
    """One layout."""
    return Candidates({name: np.array([value]) for name, value in layout.items()})


def gathered(job: Job, layout: dict[str, int]) -> dict[str, float]:
    """Bytes that a rank gathers in forward and for backward."""
    (group,) = groups(job, columns(layout))
    sent: dict[str, float] = {"forward": 0.0, "backward": 0.0}
    for item in traffic(job, group, elements(job.model, group)):
        if item.op == "all_gather" and item.behind in sent:
            sent[item.behind] += float((item.payload_CS * item.count_CS).sum())
    return sent


@pytest.mark.parametrize(("recompute", "passes"), [("none", 2), ("full", 3)])
def test_the_last_weights_lie_there_at_the_turn(recompute: str, passes: int, tmp_path: Path) -> None:
    """As many as work passes on its way back, once more where forward runs again: a share of the distance, in any model larger than that."""
    job, layout = asked(tmp_path, "llama-2-7b", recompute)
    whole = np.array([[float(count(job.model).total)]])
    assert near_turn(job, columns(layout), whole) == pytest.approx(1e9 / passes)
    held, bare = (predictions(each, [layout])[1].device[0] for each in (job, without(job)))
    assert 0 < held - bare <= 2 * 1e9 / passes


def test_a_small_model_is_gathered_once(tmp_path: Path) -> None:
    """All of it is there when backward begins."""
    job, layout = asked(tmp_path, "gpt2", "none")
    assert gathered(job, layout)["backward"] == 0
    assert gathered(without(job), layout)["backward"] > 0
    assert gathered(job, layout)["forward"] == gathered(without(job), layout)["forward"]


def test_of_a_large_one_most_is_gathered_again(tmp_path: Path) -> None:
    """What lies near the turn is spared, behind norm and head."""
    job, layout = asked(tmp_path, "llama-2-7b", "none")
    ends = job.model.hidden * (job.model.vocab + 1)
    spared = gathered(without(job), layout)["backward"] - gathered(job, layout)["backward"]
    assert spared == pytest.approx(2 * (0.5e9 - ends) * layout["accumulation"], rel=1e-3)


@pytest.mark.parametrize("changes", [{"zero_class": "2"}, {"framework": "torchtitan"}])
def test_nobody_else_keeps_them(changes: dict[str, Any], tmp_path: Path) -> None:
    """Neither ZeRO-2, which never lets go, nor fully_shard, which always does."""
    one = judged(tmp_path, **{**ZERO_3, **changes}, model="llama-2-7b")
    assert one.case is not None
    layout = dict(one.case.layout)
    assert (near_turn(one.case.job, columns(layout), np.array([[7e9]])) == 0).all()
