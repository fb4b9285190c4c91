"""Rows without normalised columns: their free text stands for the same classes, and cards of two dies for two devices."""

from __future__ import annotations

import pytest

from benchmarks.held_out import RUNS
from strategist.accuracy.classes import precision_of, with_classes
from strategist.accuracy.judge import Judged, judge
from strategist.accuracy.table import Run, read_runs
from strategist.facts.parameters import count
from strategist.facts.profile import BYTES, find_profile, profile_of
from tests.cli.harness import RUN

PUBLISHED: tuple[Run, ...] = read_runs(str(RUNS))
PIPELINE = {"pp": "4", "dp": "2", "zero_class": "1", "framework": "megatron-core", "grad_accum": "4", "global_batch_seqs": "8"}  # fmt: skip
FRONTIER = {
    "hardware": "MI250X", "gpus_total": "16", "gpus_per_node": "8", "gpu_mem_gb": "64", "framework": "Megatron-DeepSpeed",
    "tp": "8", "dp": "2", "zero_class": "1", "precision": "fp16", "model": "llama-2-7b", "seq_len": "2048", "step_time_s": "",
    "tokens_per_s_per_gpu": "600",
}  # fmt: skip


def _judged(change: dict[str, str]) -> Judged:
    (one,) = judge([{**RUN, **change}])
    return one


@pytest.mark.parametrize(("column", "text"), [("zero_class", "zero_stage_or_fsdp"), ("recompute_class", "recompute")])
def test_words_stand_for_the_class_that_somebody_gave_them(column: str, text: str) -> None:
    """Of every published row that has both, the text alone stands for the class."""
    both = [run for run in PUBLISHED if run[column] and run[text]]
    assert len(both) > 100
    assert {(run[text], run[column], with_classes({**run, column: ""})[column]) for run in both} == {
        (run[text], run[column], run[column]) for run in both
    }


def test_precisions_are_read_off_the_text() -> None:
    """Of every published row with both, but one that names two formats, the text stands for the class."""
    both = [run for run in PUBLISHED if run["precision_class"] and run["precision"] not in ("", "fp16/bf16-mixed")]
    assert {
        run["precision"] for run in both if precision_of(run) != precision_of({**run, "precision_class": ""})
    } == set()


@pytest.mark.parametrize(("words", "precision"), [("bfloat16", "bf16"), ("AMP O1", "fp16"), ("torch.float16", "fp16"), ("float8 tensorwise", "fp8")])  # fmt: skip
def test_other_spellings_of_a_precision(words: str, precision: str) -> None:
    """Formats are known by torch's names and by amp's."""
    assert precision_of({"precision": words}) == precision


def test_a_stated_policy_counts_without_its_class() -> None:
    """A row that says "full" and leaves the class out is one that is computed again in full."""
    classed = _judged({"recompute_class": "full"})
    worded = _judged({"recompute_class": "", "recompute": "full activation checkpointing"})
    silent = _judged({"recompute_class": "", "recompute": ""})
    assert (
        (worded.step_s, worded.peak_bytes) == (classed.step_s, classed.peak_bytes) != (silent.step_s, silent.peak_bytes)
    )


@pytest.mark.parametrize(("change", "reason"), [({"recompute_class": "", "recompute": "a few tensors"}, "a few tensors"), ({**PIPELINE, "sharding_detail": "DualPipe"}, "dualpipe")])  # fmt: skip
def test_words_that_name_nothing_known_are_a_reason(change: dict[str, str], reason: str) -> None:
    """A policy or schedule without a model is skipped with its words, not taken for the framework's habit."""
    one = _judged(change)
    assert one.case is None
    assert reason in one.skipped


def test_a_named_schedule_counts() -> None:
    """GPipe holds all micro-batches, 1F1B few; ZB-H1 has less of a bubble."""
    plain, gpipe, zero_bubble = (_judged({**PIPELINE, "sharding_detail": said}) for said in ("", "GPipe", "ZB-H1"))
    assert gpipe.peak_bytes > plain.peak_bytes
    assert zero_bubble.step_s < plain.step_s


def test_a_named_exchange_counts() -> None:
    """Ulysses is the all-to-all, a row that names neither is a ring."""
    ring, named, exchange = (
        _judged({"cp": "4", "dp": "2", "grad_accum": "4", "zero_class": "1", "sharding_detail": said, "framework": framework})
        for said, framework in (("", "megatron-core"), ("ring", "megatron-core"), ("Ulysses", "megatron-core"))
    )  # fmt: skip
    assert ring.step_s == named.step_s != exchange.step_s


def test_a_named_optimizer_counts_where_its_state_is_known() -> None:
    """Moments of eight bits take less; an optimizer that nobody measured in the framework is taken for AdamW."""
    adamw, eight, muon = (_judged({"optimizer": said}).peak_bytes for said in ("AdamW", "AdamW8bit", "Muon"))
    assert eight < adamw == muon


def test_a_card_of_two_dies_is_two_devices() -> None:
    """Eight cards of 128 GB are sixteen devices of 64 GB: the same prediction, and the same measured step at twice the rate."""
    dies = _judged(FRONTIER)
    cards = _judged(
        {**FRONTIER, "gpus_total": "8", "gpus_per_node": "4", "gpu_mem_gb": "128", "tokens_per_s_per_gpu": "1200"}
    )
    assert dies.job.cluster.world == cards.job.cluster.world == 16
    assert (dies.step_s, dies.peak_bytes) == (cards.step_s, cards.peak_bytes)
    assert dies.measured_s == pytest.approx(cards.measured_s)


def test_what_drives_a_new_chip_is_no_old_framework() -> None:
    """Megatron-LM on Hopper is that of Transformer Engine; on Ampere, where nothing says which, that of its paper."""
    found = [profile_of("Megatron-LM", arch) for arch in ("", "Ampere", "Hopper")]
    assert [profile.name for profile in found if profile] == ["megatron-2021", "megatron-2021", "megatron-core"]


@pytest.mark.parametrize(
    ("said", "profile"),
    [("", "megatron-2021"), ("unfused (no flash)", "megatron-2021"), ("FlashAttention 2", "megatron-core")],
)
def test_what_calls_flash_attention_is_no_old_framework(said: str, profile: str) -> None:
    """Megatron-LM on Ampere whose row says flash attention is no release that lacks it."""
    run = {"framework": "Megatron-LM", "attention_impl": said, "hardware": "A100-SXM-80GB", "step_time_s": "9"}
    assert _judged(run).job.profile.name == profile


def test_a_source_is_known_where_its_framework_is_not() -> None:
    """Submissions to MLPerf name a release of PyTorch or a driver; what they run is known by the benchmark."""
    said = {"framework": "PyTorch 2.9", "zero_class": "0"}
    profiles = [_judged({**said, "source": source}).job.profile.name for source in ("mlperf-training-v9", "a blog")]
    assert profiles == ["nemo", "hf-trainer"]


@pytest.mark.parametrize(
    ("framework", "name"),
    [("torchtitan (Primus 26.4)", "fsdp2-compiled"), ("Primus (Megatron-LM)", "megatron-core"), ("torchtitan", "fsdp2-compiled")],
)  # fmt: skip
def test_primus_is_what_it_starts(framework: str, name: str) -> None:
    """AMD's launcher has torchtitan and Megatron behind it, and a run says which."""
    assert _judged({"framework": framework}).job.profile.name == name


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"framework": "DeepSpeed 0.14", "zero_stage_or_fsdp": "ZeRO-3"}, "deepspeed-zero3"),
        ({"framework": "HF Trainer+DeepSpeed", "zero_stage_or_fsdp": "stage 3"}, "deepspeed-zero3"),
        ({"framework": "accelerate", "zero_stage_or_fsdp": "ZeRO-3"}, "deepspeed-zero3"),
        ({"framework": "HF Trainer+DeepSpeed", "zero_stage_or_fsdp": "ZeRO-3", "compile": "no"}, "deepspeed-zero3"),
        ({"framework": "HF Trainer+DeepSpeed", "zero_stage_or_fsdp": "ZeRO-2"}, "deepspeed"),
        (
            {"framework": "HF Trainer+DeepSpeed", "zero_stage_or_fsdp": "ZeRO-1", "precision": "tf32"},
            "deepspeed-autocast-copies",
        ),
        ({"framework": "PyTorch Lightning DeepSpeed", "zero_stage_or_fsdp": "ZeRO-0"}, "deepspeed"),
        ({"framework": "PyTorch Lightning DDP", "zero_stage_or_fsdp": "DDP"}, "hf-trainer"),
        ({"framework": "accelerate", "zero_stage_or_fsdp": "FSDP full shard"}, "hf-trainer"),
        ({"framework": "Megatron-DeepSpeed", "zero_stage_or_fsdp": "ZeRO-3"}, "megatron-deepspeed"),
        ({"framework": "GPT-NeoX with DeepSpeed", "zero_stage_or_fsdp": "ZeRO-3"}, "megatron-deepspeed"),
        ({"framework": "DeepSpeed", "zero_stage_or_fsdp": "ZeRO-3", "tp": "2", "dp": "4"}, "megatron-deepspeed"),
    ],
)
def test_modules_that_deepspeed_fetches_are_no_megatron(said: dict[str, str], name: str) -> None:
    """ZeRO-3 of DeepSpeed's engine, by its own name or in a trainer of Hugging Face, fetches torch's modules one by one, and its host is what
    such runs wait for; FSDP, lower stages and Megatron's layers have other hosts."""
    found = _judged({"zero_class": "", **said}).job.profile
    assert (found.name, found.kernels.name == "deepspeed-modules") == (name, name == "deepspeed-zero3")


PLAIN = {"framework": "HF Trainer", "zero_class": "0", "seq_len": "512", "model": "gpt2", "step_time_s": "1"}


@pytest.mark.parametrize(
    ("said", "attention"),
    [
        ({"hardware": "Tesla V100", "gpu_mem_gb": "32"}, "unfused"),
        ({"hardware": "RTX 2080 Ti"}, "unfused"),
        ({"hardware": "Tesla V100", "gpu_mem_gb": "32", "attention_impl": "sdpa"}, "flash"),
        ({"hardware": "NVIDIA A100-SXM4-80GB"}, "flash"),
        ({"hardware": "AMD Instinct MI300X OAM"}, "flash"),
        ({"attention_impl": "from scratch, writes scores out"}, "unfused"),
        *(
            ({"framework": "DeepLearningExamples BERT", "attention_impl": words}, "flash")
            for words in ("fused attention of apex (fmha)", "memory-efficient (xFormers)")
        ),
        *(
            ({"framework": "DeepLearningExamples BERT", "attention_impl": words}, "cudnn")
            for words in ("cuDNN fused attention", "flash (cuDNN)", "flash-attn 3", "FA3")
        ),
        ({"framework": "DeepLearningExamples BERT", "attention_impl": "fused softmax"}, "unfused"),
        ({"framework": "PyTorch, Transformer Engine"}, "cudnn"),
    ],
)
def test_silence_about_attention_means_what_a_card_can(said: dict[str, str], attention: str) -> None:
    """FlashAttention never came to Volta, nor its second version to Turing: runs there that say nothing wrote their scores."""
    assert _judged({**PLAIN, "precision": "fp16", **said}).job.profile.attention == attention


def test_modules_of_transformer_engine_are_fused_beside_any_loop() -> None:
    """A run names them beside its framework or among its techniques; what a compiler made stays its own."""
    beside = _judged({**PLAIN, "framework": "PyTorch, Transformer Engine"}).job.profile
    among = _judged({**PLAIN, "sharding_detail": "TE"}).job.profile
    assert beside == among
    assert (
        beside.kernels.name
        == _judged({**PLAIN, "sharding_detail": "fused kernels"}).job.profile.kernels.name
        == "fused"
    )
    assert _judged({**PLAIN, "framework": "JAX Pax (Transformer Engine)"}).job.profile.kernels.name == "compiled"


@pytest.mark.parametrize("framework", ["Megatron-Core", "PyTorch, Transformer Engine", "NeMo 24.07", "HF Trainer"])
def test_kernels_that_no_compiler_made_do_not_go_with_it(framework: str) -> None:
    """A run says that torch.compile is off: what was fused by hand stays fused, and what a compiler would have made is what torch runs."""
    silent, off = (_judged({**PLAIN, "framework": framework, "compile": word}).job.profile for word in ("", "no"))
    assert silent == off
    compiled, eager = (_judged({"framework": "torchtitan", "compile": word}).job.profile for word in ("", "no"))
    assert (compiled.kernels.name, eager.kernels.name) == ("compiled", "eager-composite")


def test_layers_that_are_computed_again_are_counted_where_nothing_cuts_them() -> None:
    """A policy says how many of a model's layers are, which without stages is all there is to say."""
    none, some, full = (
        _judged({"recompute_class": "", "recompute": said}) for said in ("none", "12 of 32 layers", "full")
    )
    assert some.job.recompute_layers == (12,)
    assert none.step_s < some.step_s < full.step_s
    cut = _judged({**PIPELINE, "recompute_class": "", "recompute": "12 of 32 layers"})
    assert cut.skipped == "which layers are computed again is not stated"


def test_weights_as_narrow_as_products_weigh_half() -> None:
    """A plain loop in pure bf16 holds weights, gradients, both moments and the buckets in which gradients are added up in it; sharded modules
    that compute in it do not."""
    mixed, pure = (_judged({**PLAIN, "precision": words}) for words in ("bf16-mixed", "bf16-pure"))
    weights = 124_439_808
    assert 8 * weights < mixed.peak_bytes - pure.peak_bytes < 12 * weights
    assert pure.job.profile.formats_for("bf16").parameter == "bfloat16"
    assert (
        _judged({"framework": "composer", "precision": "bf16-pure"}).job.profile.formats_for("bf16").parameter
        == "float32"
    )


@pytest.mark.parametrize(
    ("model", "seq_len"), [("bert-large-uncased", "512"), ("BERT-large", "512"), ("bert-base-uncased", "128")]
)
def test_an_encoder_that_is_tuned_scores_no_vocabulary(model: str, seq_len: str) -> None:
    """A catalogued encoder answers with a head of its own when it is tuned, and multiplies by no table of tokens, which stays."""
    said = {**PLAIN, "model": model, "model_kind": "encoder", "seq_len": seq_len}
    trained, tuned = (_judged({**said, "task": task}) for task in ("pretrain", "sft"))
    assert (trained.job.model.vocab, tuned.job.model.vocab) == (30522, 2)
    assert count(tuned.job.model).total == pytest.approx(count(trained.job.model).total, rel=0.01)
    assert tuned.step_s < trained.step_s


@pytest.mark.parametrize(
    ("said", "card"),
    [
        ({"hardware": "A100", "gpu_mem_gb": "40"}, "a100-sxm-40gb"),
        ({"hardware": "A100 80GB", "intra_node": "PCIe Gen4"}, "a100-pcie-80gb"),
        ({"hardware": "Tesla V100", "gpu_mem_gb": "32", "precision": "fp16"}, "v100-sxm2-32gb"),
        ({"hardware": "NVIDIA GeForce RTX 3090"}, "rtx-3090"),
        ({"hardware": "A6000"}, "rtx-a6000"),
        ({"hardware": "AMD Instinct MI300X OAM"}, "mi300x"),
        ({"hardware": "8xH100"}, "h100-sxm-80gb"),
        ({"hardware": "NVIDIA H100 80GB HBM3"}, "h100-sxm-80gb"),
        ({"hardware": "NVIDIA A100-SXM4-80GB x8"}, "a100-sxm-80gb"),
        ({"hardware": "GB300 NVL72"}, "gb300"),
        ({"hardware": "H100 NVL"}, "h100-nvl-94gb"),
        ({"hardware": "A800", "intra_node": "PCIe Gen4"}, "a800-pcie-80gb"),
        ({"hardware": "A800"}, "a800-sxm-80gb"),
    ],
)
def test_cards_are_known_by_their_usual_names(said: dict[str, str], card: str) -> None:
    """A card's memory and form stand in its name, or in the row beside it; makers' names change nothing."""
    assert _judged({**said, "step_time_s": "60"}).job.cluster.slowest.gpu.name == card


@pytest.mark.parametrize(
    ("said", "zero"),
    [
        ({"zero_stage_or_fsdp": "0"}, 0),
        ({"zero_stage_or_fsdp": "1"}, 1),
        ({"zero_stage_or_fsdp": "2"}, 2),
        ({"zero_stage_or_fsdp": "3"}, 3),
        ({"zero_stage_or_fsdp": "NO_SHARD"}, 0),
        ({"framework": "Hugging Face accelerate + FSDP"}, 3),
        ({"framework": "Hugging Face Trainer, DeepSpeed ZeRO-2"}, 2),
    ],
)
def test_sharding_is_known_by_its_number_or_by_the_framework(said: dict[str, str], zero: int) -> None:
    """A bare stage is one, and where its column is empty the framework's name may say it."""
    case = _judged({"zero_class": "", **said}).case
    assert dict(case.layout)["zero"] == zero


@pytest.mark.parametrize(("said", "precision"), [("16-mixed", "fp16"), ("bf16-true", "bf16"), ("32-true", "fp32")])
def test_lightning_s_words_are_precisions(said: str, precision: str) -> None:
    """Source: Lightning-AI/pytorch-lightning: src/lightning/fabric/plugins/precision/precision.py, _PRECISION_INPUT_STR."""
    assert _judged({"precision": said, "step_time_s": "60"}).case.job.workload.precision == precision


@pytest.mark.parametrize("name", ["TITAN Xp", "Max 1550", "Ascend 910B", "K80"])
def test_a_card_that_nobody_described_is_no_other(name: str) -> None:
    """Whatever little a row says beside its name."""
    assert _judged({"hardware": name}).skipped.endswith("is not in the catalogue")


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("Llama2-7B-chat", "llama-2-7b"),
        ("Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("DeepSeek V3 671B", "deepseek-v3"),
        ("ViT-L/16", "vit-l-16"),
        ("Mamba 2.8B", "mamba-2.8b"),
        ("BERT large", "bert-large-uncased"),
        ("Nemotron V3 Nano 30B (26.02)", "nemotron-3-nano-30b-a3b"),
        ("Qwen3 MoE 30B", "qwen3-30b-a3b"),
        ("Kimi K2 1T", "kimi-k2"),
    ],
)
def test_models_are_known_by_their_usual_names(said: str, name: str) -> None:
    """How a model was tuned, and its size behind a name that needs none, change no shape."""
    assert _judged({"model": said, "seq_len": "512", "step_time_s": "", "oom": "1"}).job.model.name == name


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"model": "GPT-2 1.5B"}, "layers is not stated"),
        ({"model": "Mamba-2 8B"}, "layers is not stated"),
        ({"model": "gpt2", "params_b": "1.5"}, "layers is not stated"),
        ({"model": "ResNet-50"}, "resnet50 takes images"),
        ({"model": "sdxl-unet"}, "a unet is neither a stack"),
    ],
)
def test_a_model_of_another_size_or_make_is_a_reason(said: dict[str, str], reason: str) -> None:
    """A name that fits is not enough where the size does not, and images are no sequences of 512 tokens."""
    assert reason in _judged({**said, "seq_len": "512"}).skipped


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"model": "ResNet-50 v1.5"}, ""),
        ({"model": "microsoft/resnet-101", "task": "image classification"}, ""),
        ({"model": "resnet18", "seq_len": "224"}, ""),
        ({"model": "ResNet-50", "tp": "2", "dp": "4"}, "tp 2 of blocks of convolutions"),
        ({"model": "ResNeXt-101"}, "layers is not stated"),
    ],
)
def test_runs_of_resnets_count_images(said: dict[str, str], reason: str) -> None:
    """They need no length; what cuts sequences, matrices or stacks is no run of one."""
    found = _judged(
        {"seq_len": "", "gpus_total": "8", "dp": "8", "step_time_s": "", "tokens_per_s_per_gpu": "2000", **said}
    )
    assert reason in found.skipped
    assert bool(found.skipped) == bool(reason), found.skipped


def test_a_name_of_several_cards_is_a_reason() -> None:
    """Where memory decides which card it is and is not stated, the reason lists the cards."""
    one = _judged({"hardware": "A100"})
    assert one.case is None
    assert "a100-sxm-40gb" in one.skipped
    assert "a100-pcie-80gb" in one.skipped


@pytest.mark.parametrize(("task", "is_known"), [("continued pretraining", True), ("finetune", True), ("full", True), ("rlhf", False)])  # fmt: skip
def test_whatever_trains_all_weights_is_one_task(task: str, is_known: bool) -> None:
    """Fine-tuning of all weights is training; what needs other models beside it is not."""
    assert (_judged({"task": task}).case is not None) is is_known


def _same(one: Judged, other: Judged) -> bool:
    """Whether two rows are one question."""
    return one.case is not None and other.case is not None and (one.step_s, one.peak_bytes) == (other.step_s, other.peak_bytes)  # fmt: skip


@pytest.mark.parametrize("task", ["LoRA", "sft (LoRA)", "lora finetune"])
def test_adapters_are_known_by_any_spelling(task: str) -> None:
    """A row is no full training because somebody writes capitals."""
    assert _same(_judged({"task": task}), _judged({"task": "lora"}))
    assert not _same(_judged({"task": task}), _judged({"task": "sft"}))
    assert _same(_judged({"task": "QLoRA fine-tuning"}), _judged({"task": "qlora"}))


@pytest.mark.parametrize(
    ("column", "words", "meant"),
    [
        ("compile", ("True", "1", "torch.compile", "inductor"), "yes"),
        ("compile", ("False", "0", "eager", "off"), "no"),
        ("attention_impl", ("eager", "math", "naive attention", "standard"), "unfused"),
        ("offload", ("no", "False", "0", "n/a", "-"), "none"),
        ("offload", ("params", "optimizer+params to CPU"), "parameters"),
        ("zero_stage_or_fsdp", ("Z2", "z-2", "ZeRO 2"), "ZeRO-2"),
        ("zero_stage_or_fsdp", ("distopt", "dist-opt", "distributed optimizer"), "ZeRO-1"),
        ("oom", ("yes", "True", "OOM"), "1"),
    ],
)  # fmt: skip
def test_words_of_a_row_count_in_any_spelling(column: str, words: tuple[str, ...], meant: str) -> None:
    """What means the same is the same question, and another one than a row without the word, where that says something."""
    framework = "torchtitan" if meant == "no" else "FSDP2"  # which compile, and do not
    emptied = {"zero_stage_or_fsdp": "zero_class", "oom": "step_time_s"}.get(column)
    bare = {"framework": framework} | ({emptied: ""} if emptied else {})
    expected = _judged({**bare, column: meant})
    assert all(_same(_judged({**bare, column: word}), expected) for word in words)
    if column not in ("oom", "offload") or meant == "parameters":
        assert not _same(expected, _judged({**bare, column: ""}))


@pytest.mark.parametrize("word", ["False", "0", "off", "no"])
def test_sequences_that_are_not_cut_are_not(word: str) -> None:
    """Megatron-Core cuts them unless a row says no, however it says that."""
    cut = {"framework": "megatron-core", "tp": "4", "dp": "2", "zero_class": "1", "grad_accum": "4"}
    assert _same(_judged({**cut, "sequence_parallel": word}), _judged({**cut, "sequence_parallel": "no"}))
    assert not _same(_judged({**cut, "sequence_parallel": word}), _judged(cut))


def test_state_in_the_host_s_memory_is_weighed() -> None:
    """It needs less room on the device, and takes longer."""
    whole, moved, named = (_judged(change) for change in ({}, {"offload": "optimizer"}, {"zero_class": "2", "zero_stage_or_fsdp": "ZeRO-Offload"}))  # fmt: skip
    assert moved.peak_bytes < whole.peak_bytes
    assert moved.step_s > whole.step_s
    assert named.case is not None
    assert dict(named.case.layout)["offload"] == dict(moved.case.layout)["offload"] if moved.case else False


@pytest.mark.parametrize(
    ("words", "meant"),
    [("DGX H100", "h100-sxm-80gb"), ("HGX H100", "h100-sxm-80gb"), ("H100 SXM5", "h100-sxm-80gb"), ("A100-80G", "a100-sxm-80gb"), ("A100_80GB", "a100-sxm-80gb")],
)  # fmt: skip
def test_cards_are_known_by_the_names_of_machines_and_forms(words: str, meant: str) -> None:
    """A machine's name stands for its cards, whatever joins the words."""
    assert _same(_judged({"hardware": words, "step_time_s": "9"}), _judged({"hardware": meant, "step_time_s": "9"}))


def test_a_type_of_node_brings_its_network() -> None:
    """What `--hardware` takes is a row's hardware too: two of Amazon's nodes of A100s have a quarter of the links that a DGX has."""
    two = {"gpus_total": "16", "dp": "16", "gpus_per_node": "", "global_batch_seqs": "16", "step_time_s": "9"}
    named, card = (_judged({**two, "hardware": name}) for name in ("p4d.24xlarge", "a100-sxm-40gb"))
    assert named.job.cluster.groups[0].node.name == "aws-p4d.24xlarge"
    assert named.job.cluster.slowest.gpu == card.job.cluster.slowest.gpu
    assert named.step_s > card.step_s


@pytest.mark.parametrize(
    ("framework", "profile"), [("nanotron 0.4", "nanotron"), ("OneFlow", "oneflow"), ("LiBai", "oneflow")]
)
def test_frameworks_of_their_own_have_habits_of_their_own(framework: str, profile: str) -> None:
    """nanotron pads no vocabulary, OneFlow writes scores out; neither is what its techniques would make one think."""
    found = _judged({"framework": framework, "tp": "2", "dp": "4", "zero_class": "0"}).job.profile
    assert (found.name, found.pads_vocabulary, found.attention == "unfused") == (
        profile, profile == "oneflow", profile == "oneflow"
    )  # fmt: skip


@pytest.mark.parametrize(
    "detail", ["chunked cross entropy", "Liger kernels", "FusedLinearCrossEntropy", "CEWithChunkedOutputLoss"]
)
def test_a_named_chunked_loss_counts(detail: str) -> None:
    """Logits of a few tokens at a time take less room, and as much time or more; ranks that hold a part of the head do not do it."""
    plain, chunked = _judged({}), _judged({"sharding_detail": detail})
    assert chunked.peak_bytes < plain.peak_bytes
    assert chunked.step_s >= plain.step_s
    cut = {"tp": "2", "dp": "4"}
    assert _judged({**cut, "sharding_detail": detail}).peak_bytes == _judged(cut).peak_bytes


def test_embedding_and_loss_may_be_stages_of_their_own() -> None:
    """Megatron counts each as a layer where it is told to: 94 layers go on 32 stages of 3 chunks, 93 do not."""
    deep = {
        **PIPELINE,
        "gpus_total": "256",
        "pp": "32",
        "vp": "3",
        "dp": "8",
        "grad_accum": "32",
        "global_batch_seqs": "256",
    }
    wide = {**deep, "model": "qwen3-235b-a22b", "hardware": "h200"}
    assert not _judged({**wide, "layers": "94", "step_time_s": "60"}).skipped
    assert "layers for pp 32 x vp 3" in _judged({**wide, "layers": "93"}).skipped


def test_scripts_of_their_time_are_known_by_name() -> None:
    """NVIDIA's pretraining of BERT sends its gradients after backward, its fine-tuning in between; Megatron-LM of 2019 has no fused softmax."""
    bert = {
        "model": "bert-base-uncased", "model_kind": "encoder", "seq_len": "128", "precision": "fp16", "zero_class": "0", "gpus_total": "16",
        "hardware": "v100-sxm2-16gb", "dp": "16", "global_batch_seqs": "16", "inter_node": "IB 1x100 Gb/s EDR per node",
    }  # fmt: skip
    once, along = (
        _judged({**bert, "framework": f"DeepLearningExamples {script}"})
        for script in ("run_pretraining.py", "run_squad.py")
    )
    assert (once.job.profile.hides, along.job.profile.hides) == ((), ("gradients",))
    assert once.step_s > along.step_s
    old, new = (
        _judged({"framework": name, "zero_class": "0"}).job.profile
        for name in ("DeepSpeed Megatron-LM v0.2", "Megatron-DeepSpeed")
    )
    assert (old.kernels.name, new.kernels.name) == ("eager-composite", "megatron-deepspeed")


def test_nvidia_s_bert_of_mlperf_is_no_other_bert() -> None:
    """Its weights and gradients have two bytes, its optimizer's shards the fp32 ones, and its layers fewer kernels."""
    found = _judged(
        {**PLAIN, "framework": "NVIDIA BERT of MLPerf, run_pretraining.py (PyTorch 23.09)", "precision": "fp16"}
    ).job.profile
    own = found.formats_for("fp16")
    assert (found.name, own.parameter, own.reduce, found.zero) == ("mlperf-bert", "float16", "float16", 1)
    assert found.head_tokens == 0.15  # only masked tokens come to its head
    plain = find_profile("ddp-apex-once").kernels
    assert (found.kernels.plain, found.kernels.dropout) < (plain.plain, plain.dropout)


def test_frozen_weights_may_rest_in_fp8() -> None:
    """Nobody updates them; adapters and what is trained whole are another matter."""
    lora = {
        **PLAIN,
        "framework": "NeMo",
        "task": "lora",
        "precision": "fp8",
        "hardware": "h100-sxm-80gb",
        "model": "llama-2-7b",
    }
    said = "fp8 weights (fp8_params)"
    wide, narrow = (_judged({**lora, "sharding_detail": words}) for words in ("", said))
    assert wide.peak_bytes - narrow.peak_bytes == pytest.approx(6.74e9 * 1.05, rel=0.05)
    whole, same = (_judged({**lora, "task": "pretrain", "sharding_detail": words}).peak_bytes for words in ("", said))
    assert whole == same
    assert _judged({**lora, "precision": "bf16", "sharding_detail": said}).job.formats.parameter == "bfloat16"


def test_nemo_of_2023_is_another_on_hopper() -> None:
    """There it called Transformer Engine; on A100 it wrote scores."""
    said = {**PIPELINE, "framework": "NVIDIA NeMo Megatron Release 23.04", "step_time_s": "60"}
    hopper, ampere = (
        _judged({**said, "hardware": card}).job.profile.name for card in ("h100-sxm-80gb", "a100-sxm-80gb")
    )
    assert (hopper, ampere) == ("nemo", "megatron-2022")


@pytest.mark.parametrize(
    ("words", "Gbps"),
    [
        ("8x ConnectX-7 IB NDR 400Gb/s", 3200),
        ("Management: 1x Bluefield-2 DPU Ethernet 100Gb/Sec, Compute: 8x ConnectX-7 InfiniBand NDR 400Gb/Sec", 3200),
        ("Storage: 2x ConnectX-7 IB NDR 400Gb/s, Compute: 8x ConnectX-7 IB NDR 400Gb/s", 3200),
        ("Storage: 4x ConnectX-7 IB NDR 400Gb/s, Compute: 2x ConnectX-6 IB HDR 200Gb/s", 400),
        ("1x Ethernet 100Gb/Sec, 8x NVIDIA Quantum-2 CX7 InfiniBand (400Gb/s)", 3200),
        ("Management: 1 x 25 Gb / Sec Ethernet, Compute: 1 x ConnectX - 6 IB HDR100 100 Gb / Sec", 100),
        ("2x Cornelis Networks Omni-Path HFI Adapter 100 Series 100Gb/Sec", 200),
        ("IB 8x200 Gb/s HDR per node (1 per GPU)", 1600),
        ("RoCE 1600 Gb/s per node", 1600),
    ],
)
def test_of_several_networks_the_one_for_the_job_counts(words: str, Gbps: int) -> None:
    """Else the fastest: storage and management have their own."""
    two_nodes = {
        **PLAIN,
        "hardware": "h100-sxm-80gb",
        "gpus_total": "16",
        "gpus_per_node": "8",
        "dp": "16",
        "global_batch_seqs": "16",
        "inter_node": words,
    }
    (node,) = {group.node for group in _judged(two_nodes).job.cluster.groups}
    assert node.inter_Bps == pytest.approx(Gbps * 1e9 / 8)


def test_the_card_of_marenostrum_is_no_h100_of_80_gigabytes() -> None:
    """Its memory is half as fast and 64 GB."""
    (gpu,) = {group.node.gpu for group in _judged({"hardware": "H100-SXM-64GB"}).job.cluster.groups}
    assert (gpu.name, gpu.memory_Bps < 2e12) == ("h100-hbm2e-64gb", True)


@pytest.mark.parametrize(
    ("words", "topology", "GBps"),
    [
        ("PCIe 4.0 x16", "pcie-host", 31.5),
        ("PCIe Gen4 x8", "pcie-host", 15.75),
        ("PCIe 4.0 x8, P2P disabled (~6 GB/s)", "pcie-host", 15.75),
        ("PCIe3 x16", "pcie-host", 15.75),
        ("PCIe", "pcie-host", 31.5),
        ("NVLink bridge (NV4, ~56 GB/s p2p each way)", "nvlink-pairs", 56.0),
    ],
)
def test_slots_and_bridges_are_read_off_what_joins_the_cards(words: str, topology: str, GBps: float) -> None:
    """Generation and lanes make a slot's rate, whatever somebody copied at over it; a bridge makes a pair of two cards."""
    pair = {"hardware": "RTX-3090Ti-24GB", "gpus_total": "2", "gpus_per_node": "2", "dp": "2", "global_batch_seqs": "2"}
    node = _judged({**pair, "step_time_s": "60", "intra_node": words}).job.cluster.groups[0].node
    assert (node.topology, node.intra_Bps) == (topology, pytest.approx(GBps * 1e9))


MOONLIGHT = {
    "framework": "Megatron-Bridge", "model": "Moonlight-16B-A3B", "seq_len": "4096", "gpus_total": "8", "tp": "2", "dp": "4", "ep": "8",
    "zero_class": "1", "micro_batch_seqs": "1", "global_batch_seqs": "4", "grad_accum": "1", "step_time_s": "0.5", "tokens_per_s_per_gpu": "",
}  # fmt: skip


def test_moments_of_sixteen_bits_take_half_their_room() -> None:
    """A precision-aware optimizer keeps fp32 masters beside them; another's state has nothing to make narrower."""
    wide, narrow = (_judged({**MOONLIGHT, "optimizer": said}) for said in ("Adam", "Adam (bf16 gradients and moments)"))
    states = (dict(one.job.profile.optimizer_state_bytes)["adamw"] for one in (wide, narrow))
    assert tuple(states) == (12, 8)
    assert narrow.peak_bytes < wide.peak_bytes
    litgpt = {"framework": "LitGPT", "precision": "bf16-true"}
    assert len({_judged({**litgpt, "optimizer": said}).peak_bytes for said in ("AdamW", "AdamW (bf16 moments)")}) == 1


def test_a_dense_module_is_none_of_experts() -> None:
    """`mlp` runs one dense layer of 27 again, which saves its share and nothing of the experts."""
    plain, mlp = (
        _judged({**MOONLIGHT, "recompute": f"selective:{named}", "recompute_class": "selective"})
        for named in ("mla_up_proj", "mla_up_proj,mlp")
    )
    one_layer = 4096 * 2 * (2 * 11264 / 2) + 4096 * 11264 / 2 * 2
    assert 0 < plain.peak_bytes - mlp.peak_bytes < 1.1 * one_layer


T5 = {
    "model": "t5-v1.1-xl", "model_kind": "encdec", "params_b": "2.85", "layers": "24", "hidden": "2048", "ffn_hidden": "5120", "heads": "32",
    "head_dim": "64", "vocab": "32128", "seq_len": "512",
}  # fmt: skip


def test_an_encoder_and_a_decoder_are_built_from_columns_with_as_many_tokens_as_each_sees() -> None:
    """Widths that a row states make T5 1.1 (google/t5-v1_1-xl: 2.85e9); a decoder of another length takes less where it is shorter."""
    one = _judged(T5)
    assert one.case is not None, one.skipped
    assert one.job.model.enc_layers == 24
    assert count(one.job.model).total == pytest.approx(2.85e9, rel=0.01)
    assert _judged({**T5, "target_len": "512"}).step_s == one.step_s
    for said in ({"target_len": "128"}, {"notes": "512 tokens to the encoder, 128 to the decoder"}):
        short = _judged({**T5, **said})
        assert (short.job.workload.seq_len, short.job.workload.target_len) == (512, 128)
        assert (short.step_s or 0.0) < (one.step_s or 0.0)
    assert (
        _judged({"target_len": "128"}).job.workload.target_len is None
    )  # of a model without an encoder it says nothing


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"pp": "2", "dp": "4", "gpus_total": "8"}, "under pp 2"),
        ({"cp": "2", "dp": "4", "gpus_total": "8"}, "under cp 2"),
        ({"experts": "8", "experts_active": "1", "moe_ffn_hidden": "5120"}, "with experts"),
    ],
)
def test_targets_of_another_length_that_nothing_describes_are_skipped_with_the_reason(
    said: dict[str, str], reason: str
) -> None:
    """Stages of two lengths, ranks of one sequence, and experts behind an encoder."""
    skipped = _judged({**T5, "target_len": "128", **said}).skipped
    assert skipped == f"targets of 128 tokens behind inputs of 512 {reason}"


def test_nemo_frees_narrow_gradients_where_nothing_is_shared_out() -> None:
    """NVIDIA/NeMo v1.10.0, optimizer_with_main_params.py: each is added to the master's in fp32 and let go of: 18 bytes a weight, not 20."""
    said = {
        "framework": "NeMo Megatron",
        "precision": "bf16 (megatron O2)",
        "recompute": "none",
        "recompute_class": "none",
        "hardware": "A100-SXM-80GB",
        "step_time_s": "9",
    }
    alone, shared = (_judged({**said, "zero_class": stage}).job.profile for stage in ("0", "1"))
    for profile, held in ((alone, 18), (shared, 20)):
        formats, states = profile.formats_for("bf16"), dict(profile.optimizer_state_bytes)["adamw"]
        assert BYTES[formats.parameter] + BYTES[formats.gradient] + states == held
