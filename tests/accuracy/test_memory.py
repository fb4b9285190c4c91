"""What a published run's framework keeps moves its predicted peak, and nothing else does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from strategist.accuracy.express import Case
from strategist.accuracy.judge import Judged, judge
from strategist.accuracy.table import read_runs
from strategist.catalog import rows
from strategist.facts.models import load_model
from strategist.facts.parameters import count
from strategist.facts.profile import as_made, find_profile, frameworks
from strategist.memory.estimate import Ledger, ledger
from strategist.readers import READERS
from strategist.space.candidates import Candidates
from strategist.space.shares import groups
from tests.cli.harness import RUN, runs_file

MEGATRON: Mapping[str, str] = {
    **RUN, "framework": "Megatron-Core", "hardware": "h200-sxm", "model": "llama-3-8b", "dp": "2", "pp": "2", "tp": "2",
    "zero_class": "1", "micro_batch_seqs": "1", "global_batch_seqs": "8", "recompute_class": "none", "gpus_total": "8",
}  # fmt: skip


def judged(folder: Path, **changes: str) -> Judged:
    """The Megatron run with other cells."""
    (one,) = judge(read_runs(runs_file(folder, {**MEGATRON, **changes})))
    assert one.case is not None, one.skipped
    return one


def allocated(one: Judged) -> int:
    """Bytes that tensors hold."""
    return one.peak_bytes - one.slack_bytes - one.runtime_bytes


def test_every_row_of_keeping_belongs_to_a_framework() -> None:
    """No row is left over, and every framework has one; a few are those of a framework's runs or files alone."""
    own = {find_profile(name).keeping.name for name in frameworks()}
    of_runs = {row["keeping"] for row in rows("framework_names") if "keeping" in row}
    of_files = {reader.keeping for reader in READERS if reader.keeping}
    assert own | of_runs | of_files == {row["name"] for row in rows("keeping")}


def test_a_loss_on_the_logits_themselves_needs_no_float32_copy(tmp_path: Path) -> None:
    """On the last stage the fused loss saves exactly its float32 copy, four bytes per token and vocabulary entry of a rank."""
    plain, fused = (judged(tmp_path, framework=f"Megatron-Core{words}") for words in ("", ", CE fusion"))
    copy = 4 * 8192 * 128256 // 2
    assert 0 < plain.last_bytes - fused.last_bytes <= copy


def test_stages_as_listed_hold_what_they_list(tmp_path: Path) -> None:
    """The rule's own stages listed change nothing; one layer more on the first stage, which is the fullest, makes the peak
    larger, and as many on the last one make the last stage larger."""
    ruled, same, first, last = (
        judged(tmp_path, sharding_detail=words)
        for words in ("", '{"layers":[16,16]}', '{"layers":[17,15]}', '{"layers":[15,17]}')
    )
    assert (same.peak_bytes, same.last_bytes, same.step_s) == (ruled.peak_bytes, ruled.last_bytes, ruled.step_s)
    assert first.peak_bytes > ruled.peak_bytes
    assert first.last_bytes < ruled.last_bytes < last.last_bytes


def test_lists_that_are_no_split_of_the_model_are_not_read(tmp_path: Path) -> None:
    """Stages that do not add up to the model's layers, or are not as many as stated, leave the rule in place."""
    ruled = judged(tmp_path)
    for words in ('{"layers":[16,15]}', '{"layers":[32]}', '{"layers":[8,8,8,8]}'):
        assert judged(tmp_path, sharding_detail=words).peak_bytes == ruled.peak_bytes


@pytest.mark.parametrize("modules", ["mlp", "layernorm", "layernorm,mlp"])
def test_modules_that_are_computed_again_are_not_kept(modules: str, tmp_path: Path) -> None:
    """Selective recompute of Megatron runs attention's core again, which flash attention keeps nothing of; with modules named
    it keeps less."""
    nothing, core, named = (
        judged(tmp_path, recompute_class=kind, recompute=words)
        for kind, words in (("none", "none"), ("selective", "selective"), ("selective", f"selective:{modules}"))
    )
    assert allocated(named) < allocated(core) <= allocated(nothing)


def test_silence_about_recompute_is_read_as_what_fits(tmp_path: Path) -> None:
    """A run too large without recompute fits where its row is silent, not where it says none; its time stays the same."""
    large = {
        "model": "llama-3-70b",
        "hardware": "h100-sxm-80gb",
        "gpus_total": "32",
        "tp": "4",
        "pp": "4",
        "seq_len": "16384",
        "step_time_s": "60",
    }
    silent, said = (judged(tmp_path, **large, recompute_class=word) for word in ("", "none"))
    assert not said.fits and not said.assumed
    assert silent.fits and silent.assumed == "full"
    assert silent.step_s == said.step_s


def test_silence_decides_nothing_where_recipes_do_not_choose(tmp_path: Path) -> None:
    """A framework whose recipes never recompute is judged without it."""
    large = {
        "framework": "litgpt",
        "hardware": "a10g",
        "gpus_total": "1",
        "dp": "1",
        "tp": "1",
        "pp": "1",
        "zero_class": "0",
        "step_time_s": "100",
    }
    assert not judged(tmp_path, **large, recompute_class="").fits


def test_adapters_spare_the_inputs_of_frozen_matrices(tmp_path: Path) -> None:
    """Training adapters leaves no gradient buffer, no moments, and fewer activations than training everything."""
    full, adapters = (judged(tmp_path, task=task) for task in ("pretrain", "lora"))
    assert allocated(adapters) < allocated(full)


def test_a_figure_of_the_last_stage_is_compared_with_the_last_stage(tmp_path: Path) -> None:
    """With more micro-batches in flight on the first stage, the last holds less than the peak."""
    one = judged(tmp_path, peak_mem_gb="50", mem_kind="allocated, last pipeline stage")
    assert one.comparable_bytes("allocated, last pipeline stage") < one.comparable_bytes("allocated")


LITGPT: Mapping[str, str] = {
    "framework": "LitGPT", "gpus_total": "1", "dp": "1", "tp": "1", "pp": "1", "zero_class": "0", "global_batch_seqs": "1",
    "seq_len": "512", "recompute_class": "none",
}  # fmt: skip


def test_adapters_beside_every_matrix_keep_the_input_of_every_matrix(tmp_path: Path) -> None:
    """Beside queries and values alone they keep one input less for the output, gate, up and down matrices of every layer: three
    bytes of each element, a copy and a mask."""
    few, all_ = (
        judged(tmp_path, **LITGPT, task="lora", sharding_detail=words) for words in ("", "adapters on every matrix")
    )
    assert few.case is not None
    shape = few.case.job.model
    inputs = 3 * shape.hidden + shape.ffn_hidden
    assert allocated(all_) - allocated(few) == 3 * 512 * shape.layers * inputs


def test_a_framework_that_unties_ends_makes_a_second_table() -> None:
    """LitGPT's model of a tied shape has the vocabulary's table twice; of others it is the same."""
    litgpt, tied, untied = find_profile("litgpt"), load_model("gemma-2b"), load_model("llama-3-8b")
    assert count(as_made(tied, litgpt)).total - count(tied).total == tied.vocab * tied.hidden
    assert as_made(untied, litgpt) == untied
    assert as_made(tied, find_profile()) == tied


def test_an_update_of_all_weights_at_once_holds_their_roots(tmp_path: Path) -> None:
    """Training everything on a short sequence, LitGPT peaks in the update, with weights, gradients, two moments and the roots of
    one in bfloat16."""
    one = judged(tmp_path, **{**LITGPT, "seq_len": "64"}, task="sft")
    assert one.case is not None
    weights = count(one.case.job.model).total
    assert 5 * 2 * weights <= allocated(one) <= 5.01 * 2 * weights


def _live_bytes_of_outputs(micro_batches: int, copy: int) -> list[tuple[str, int]]:
    """DeepSpeed's last stage, one forward and one backward pass at a time over two steps: bytes of every tensor of the vocabulary that somebody
    still refers to, per token and entry, in 16 bits. What a buffer held is let go of when new outputs are put there, not before; the loss
    turns a float32 tensor into its own gradient, that of the outputs (`copy` 0) or one of its own (`copy` 4)."""
    output = 2 if copy else 4
    buffers, seen = [0, 0], []
    for number in 2 * list(range(micro_batches)):
        if not copy:
            seen.append(("cast", sum(buffers) + 2 + output))
        buffers[number % 2] = output
        seen.append(("loss", sum(buffers) + copy))
        seen.append(("its backward", sum(buffers) + copy + 2))
        seen.append(("head", sum(buffers) + 2))
        seen.append(("layers", sum(buffers)))
    return seen


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
@pytest.mark.parametrize("framework", ["Megatron-DeepSpeed", "GPT-NeoX"])
def test_outputs_of_a_pipeline_of_deepspeed_lie_in_its_buffers(
    framework: str, micro_batches: int, tmp_path: Path
) -> None:
    """At each instant the last stage holds as many bytes of the vocabulary as a walk through DeepSpeed's buffers finds."""
    one = judged(
        tmp_path,
        framework=framework,
        precision="bf16",
        gpus_total="4",
        tp="1",
        global_batch_seqs=f"{2 * micro_batches}",
        step_time_s="60",
    )
    assert one.case is not None
    walked = _live_bytes_of_outputs(micro_batches, copy=4 if framework == "GPT-NeoX" else 0)
    worst = {name: max(held for event, held in walked if event == name) for name, _ in walked}
    table = _last_stage(one.case)
    entries = 8192 * 128256
    logits = [
        terms["logits"][0, -1] / entries
        for terms in (moving.whole().terms for moving in table.moving)
        if "logits" in terms
    ]
    assert logits[:3] == [worst.get("cast", worst["loss"]), worst["its backward"], worst["head"]]
    assert set(logits[3:]) == {worst["layers"]}


def _last_stage(case: Case) -> Ledger:
    """Bytes of every instant of one run."""
    layout = Candidates({name: np.array([value], np.int64) for name, value in case.layout})
    (group,) = groups(case.job, layout, every_stage=True)
    return ledger(case.job, group)


TRAINER: Mapping[str, str] = {
    **RUN, "framework": "HF Trainer (TRL SFTTrainer)", "hardware": "a100-sxm-80gb", "model": "mistral-7b-v0.1", "gpus_total": "1", "dp": "1", "tp": "1",
    "pp": "1", "zero_class": "", "seq_len": "4096", "micro_batch_seqs": "1", "global_batch_seqs": "1", "recompute_class": "full",
    "attention_impl": "flash-attn 2", "optimizer": "AdamW", "precision": "bf16-pure", "step_time_s": "30",
}  # fmt: skip
SHARDED: Mapping[str, str] = {
    **TRAINER, "gpus_total": "2", "gpus_per_node": "2", "dp": "2", "global_batch_seqs": "2", "zero_stage_or_fsdp": "FSDP FULL_SHARD", "zero_class": "3", "precision": "bf16",
    "task": "lora", "sharding_detail": "LoRA rank 16 on q_proj, v_proj",
}  # fmt: skip


def trained(run: Mapping[str, str], **changes: str) -> Judged:
    """A run of Hugging Face's trainer with other cells."""
    (one,) = judge([{**run, **changes}])
    assert one.case is not None, one.skipped
    return one


@pytest.mark.parametrize(("precision", "each"), [("bf16-pure", 2), ("bf16-mixed", 4)])
def test_an_update_of_torch_holds_the_roots_of_all_second_moments(precision: str, each: int) -> None:
    """A trainer's run of a short sequence peaks in the update, with weights, gradients, two moments and the roots of one, each as wide as the
    weights; an update in one kernel has none, and nor has another library's."""
    short = {"precision": precision, "seq_len": "128", "hardware": "b200-sxm"}
    one = trained(TRAINER, **short)
    weights = count(one.job.model).total
    assert 5 * each * weights <= allocated(one) <= 5.01 * each * weights
    for said in ("AdamW fused", "adamw_apex_fused", "PagedAdamW8bit", "AdamW (CPU)", "LAMB"):
        assert allocated(trained(TRAINER, **short, optimizer=said)) < 4.6 * each * weights, said


def test_a_published_update_is_met_to_a_thousandth() -> None:
    """Mistral-7B in pure bf16, all weights: 72.43 GB on one A100, 36.23 GB on two (foundation-model-stack/fms-acceleration: a100_80gb.csv)."""
    alone = trained(TRAINER, micro_batch_seqs="4", global_batch_seqs="4")
    two = trained(SHARDED, task="sft", sharding_detail="", precision="bf16-pure", micro_batch_seqs="2", global_batch_seqs="4")  # fmt: skip
    assert allocated(alone) == pytest.approx(72434837504, rel=1e-3)
    assert allocated(two) == pytest.approx(36225939968, rel=1e-3)


def test_a_fused_loss_makes_one_float32_tensor_of_the_vocabulary_less() -> None:
    """What fuses the loss saves four bytes per token and entry where that is the peak; torchtitan's compiled loss has nothing to save."""
    wide = {"seq_len": "8192", "micro_batch_seqs": "4", "global_batch_seqs": "4", "model": "llama-3-8b", "task": "lora"}
    eager, fused = (trained(TRAINER, **wide, sharding_detail=words) for words in ("", "fused kernels"))
    assert allocated(eager) - allocated(fused) == pytest.approx(4 * 4 * 8192 * 128256, rel=1e-6)
    compiled = {"framework": "Megatron-Core, CE fusion", "zero_class": "0"}
    assert len({allocated(trained(TRAINER, **compiled, sharding_detail=words)) for words in ("", "fused kernels")}) == 1


OWN_LOOP = {"framework": "HF transformers under PyTorch FSDP1 (own loop)"}


@pytest.mark.parametrize(
    "changes", [OWN_LOOP, {"zero_stage_or_fsdp": "FSDP2"}, {"zero_stage_or_fsdp": "ZeRO-3"}, {"task": "sft"}]
)
def test_layers_that_are_through_are_let_go_elsewhere(changes: Mapping[str, str]) -> None:
    """Loops that checkpoint without leaves, FSDP2, DeepSpeed, and weights that are all trained hold nothing of them."""
    assert trained(SHARDED).job.profile.holds_passed
    assert not trained(SHARDED, **changes).job.profile.holds_passed


def test_fsdp1_holds_what_came_into_layers_with_frozen_weights() -> None:
    """Under a trainer's checkpoints eight sequences more take the inputs and their gradients of all 32 layers but the one at work, elsewhere the inputs alone."""
    one_more = {"sharding_detail": "LoRA rank 16 on q_proj, v_proj; Liger"}
    batches = [{"micro_batch_seqs": f"{n}", "global_batch_seqs": f"{2 * n}"} for n in (8, 16)]
    held, let_go = (
        [allocated(trained(SHARDED, **one_more, **batch, **loop)) for batch in batches] for loop in ({}, OWN_LOOP)
    )
    stream = 8 * 2 * 4096 * 4096
    assert 30 * stream <= (held[1] - held[0]) - (let_go[1] - let_go[0]) <= 31 * stream
