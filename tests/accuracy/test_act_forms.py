"""Activations of several operations: what they keep and move follows from the model's own word and from who runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from strategist.accuracy.judge import predictions
from strategist.facts.job import Job
from strategist.facts.model_config import shape_from_config
from strategist.facts.model_rows import find_model, shape_from_row
from strategist.facts.profile import find_kernels
from strategist.memory.saved import habits_of, saved_tensors
from strategist.records import replace
from strategist.space.stages import kinds
from tests.accuracy.test_memory import judged

IN_TRANSFORMERS = {"framework": "HF Trainer", "zero_class": "0", "seq_len": "512", "step_time_s": "1", "dp": "8", "pp": "1", "tp": "1"}  # fmt: skip


def job_of(folder: Path, **cells: str) -> Job:
    """The job of a run of Transformers' modules."""
    case = judged(folder, **IN_TRANSFORMERS | cells).case
    assert case is not None
    return case.job


def kept_bytes(job: Job) -> float:
    """Bytes per token and number between the matrices that operations of the activation keep beside its input and result."""
    layer = saved_tensors(job.model, kinds(job.model)[0], habits_of(job))
    return sum(row.width for row in layer if row.name == "ffn_operations") / job.model.ffn_hidden


@pytest.mark.parametrize(("model", "precision", "kept"), [("gpt2", "fp16-pure", 6), ("gpt2", "fp16-mixed", 12), ("gpt2", "fp32", 12), ("pythia-1b", "fp16-pure", 0), ("bert-large-uncased", "fp32", 0)])  # fmt: skip
def test_operations_of_transformers_keep_what_torch_keeps_of_them(
    model: str, precision: str, kept: int, tmp_path: Path
) -> None:
    """GPT-2's GELU keeps the factors of its product and its tanh, in float32 under autocast; one that is a kernel keeps nothing."""
    assert kept_bytes(job_of(tmp_path, model=model, precision=precision)) == kept


@pytest.mark.parametrize("framework", ["Megatron-LM", "nanoGPT", "DeepSpeed transformer kernels"])
def test_who_has_kernels_of_their_own_keeps_nothing_of_it(framework: str, tmp_path: Path) -> None:
    """The same model elsewhere."""
    assert kept_bytes(job_of(tmp_path, framework=framework, model="gpt2", precision="fp16-mixed")) == 0


def test_compiled_modules_keep_nothing_of_it(tmp_path: Path) -> None:
    """Memory-bound operations are computed again in backward, inside the kernels that need them."""
    assert kept_bytes(job_of(tmp_path, model="gpt2", precision="fp16-mixed", compile="inductor")) == 0


def test_bytes_and_seconds_follow_from_the_form(tmp_path: Path) -> None:
    """Without its own GELU, GPT-2 takes less of both: six bytes per number."""
    one = judged(
        tmp_path,
        **IN_TRANSFORMERS,
        model="gpt2-xl",
        precision="fp16-pure",
        micro_batch_seqs="8",
        global_batch_seqs="64",
    )
    assert one.case is not None
    job, layout = one.case.job, dict(one.case.layout)
    plain = replace(job, model=replace(job.model, act_form=""))
    tokens = layout["micro_batch"] * job.workload.seq_len
    (times, peaks), (shorter, smaller) = (predictions(each, [layout]) for each in (job, plain))
    assert (
        peaks.terms["activations"][0] - smaller.terms["activations"][0]
        == 6 * tokens * job.model.ffn_hidden * job.model.layers
    )
    assert times.step[0] > shorter.step[0]


def test_operations_come_back_before_backward_where_layers_are_computed_again(tmp_path: Path) -> None:
    """Full recomputation keeps none of it between the passes, and has all of one layer's in backward."""
    one = judged(
        tmp_path,
        **IN_TRANSFORMERS,
        model="gpt2-xl",
        precision="fp16-pure",
        recompute="full",
        recompute_class="full",
        optimizer="AdamW fused",
    )
    assert one.case is not None
    job, layout = one.case.job, dict(one.case.layout)
    plain = replace(job, model=replace(job.model, act_form=""))
    tokens = layout["micro_batch"] * job.workload.seq_len
    held, without = (predictions(each, [layout])[1].device[0] for each in (job, plain))
    assert 0 < held - without <= 6 * tokens * job.model.ffn_hidden * 1.01


@pytest.mark.parametrize(("name", "form"), [("gpt2-xl", "gelu_new"), ("gpt-neox-20b", "gelu_fast"), ("flan-t5-xl", "gelu_new"), ("bloom-7b1", ""), ("llama-3-8b", "")])  # fmt: skip
def test_the_catalogue_says_which_gelu_a_model_has(name: str, form: str) -> None:
    """By the word of its configuration, where that says more than the activation itself."""
    assert shape_from_row(find_model(name)).act_form == form


def test_a_configuration_says_which_gelu_a_model_has() -> None:
    """GPT-2's class has gelu_new where the file says nothing; a word in the file is taken as it is."""
    said = {"model_type": "gpt2", "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 100}
    assert shape_from_config(said).act_form == "gelu_new"
    told = shape_from_config(said | {"activation_function": "gelu"})
    assert (told.mlp_act, told.act_form) == ("gelu", "")


def test_a_run_may_say_that_its_gelu_is_one_of_operations(tmp_path: Path) -> None:
    """As releases of Transformers were before torch had a kernel for it."""
    cells = {"model": "bert-large-uncased", "precision": "fp16-pure"}
    assert kept_bytes(job_of(tmp_path, **cells, sharding_detail="gelu_python")) == 4


def test_kernels_without_a_library_have_no_forms(tmp_path: Path) -> None:
    """A profile whose kernels are its own runs any activation in one."""
    job = job_of(tmp_path, model="gpt2", precision="fp16-pure")
    own = replace(job, profile=replace(job.profile, kernels=find_kernels("eager")))
    assert kept_bytes(own) == 0
