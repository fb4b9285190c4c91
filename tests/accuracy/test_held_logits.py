"""Logits that a training loop has a name for: they lie there until the next micro-batch gives others."""

from __future__ import annotations

from pathlib import Path

from strategist.accuracy.judge import predictions
from strategist.facts.profile import find_profile
from strategist.records import replace
from tests.accuracy.test_memory import judged

GEMINI = {"framework": "ColossalAI 0.1.13 Gemini", "precision": "fp16", "dp": "8", "pp": "1", "tp": "1", "step_time_s": "1", "seq_len": "512"}  # fmt: skip


def test_the_loop_of_gemini_holds_its_logits_through_backward(tmp_path: Path) -> None:
    """Where layers are the worst, as many bytes more as one micro-batch has logits."""
    one = judged(tmp_path, **GEMINI, model="gpt2-xl", zero_class="3", recompute="full", recompute_class="full")
    assert one.case is not None
    job, layout = one.case.job, dict(one.case.layout)
    drops = replace(job, profile=replace(job.profile, keeping=replace(job.profile.keeping, holds_logits=False)))
    held, without = (predictions(each, [layout])[1].terms["logits"][0] for each in (job, drops))
    logits = 2 * layout["micro_batch"] * job.workload.seq_len * job.model.vocab
    assert held - without in (0, logits)
    assert held >= logits
    assert job.profile.keeping.name == "gemini"


def test_gemini_runs_the_modules_of_transformers_and_other_runs_of_colossal_do_not(tmp_path: Path) -> None:
    """Its GPT example is Transformers' GPT-2."""
    one = judged(tmp_path, **GEMINI, model="gpt2-xl", zero_class="3")
    assert one.case is not None
    assert one.case.job.profile == replace(find_profile("gemini"), attention=one.case.job.profile.attention)
    assert one.case.job.kernels.plain > 10
    other = judged(tmp_path, **GEMINI | {"framework": "ColossalAI"}, model="gpt2-xl", zero_class="1")
    assert other.case is not None
    assert other.case.job.profile.name == "internevo"
