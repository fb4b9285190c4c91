"""Tables of runs: every fault has a code, every row an answer."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategist.accuracy.cells import known_columns, unread_columns
from strategist.accuracy.judge import judge, predictions
from strategist.accuracy.report import accuracy_text
from strategist.accuracy.scores import grouped
from strategist.accuracy.table import read_runs
from strategist.errors import InputError
from strategist.facts.adapters import QUANTISED_BYTES, TARGETS
from strategist.facts.clusters import load_cluster
from strategist.facts.layers import build_layer
from strategist.facts.model import LayerKind
from strategist.facts.tiers import group_bandwidth, tiers
from strategist.reports.lines import text_of
from strategist.timing.rates import memory_Bps
from tests.accuracy.published import published
from tests.cli.harness import ROOT, RUN, runs_file
from tests.strategies import CI

WILD = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        (
            "0",
            "1",
            "2",
            "3",
            "7",
            "64",
            "1e999",
            "nan",
            "-1",
            "1.5",
            "1e30",
            "99999999999",
            "none",
            "lora",
            "fp8",
            "full",
        )
    ),
)
HEADER = "id,hardware,gpus_total,model,seq_len"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("id,model\n1,x\n", "MISSING"),
        (f"{HEADER}\n1,h100,8\n", "PARSE"),
        (f"{HEADER},id\n1,h100,8,m,1,1\n", "DUPLICATE_KEY"),
        (f"{HEADER}\n1,h100,8,m,1\n1,h100,8,m,1\n", "DUPLICATE_KEY"),
        (f"{HEADER}\n", "EMPTY"),
        ("", "EMPTY_FILE"),
        (",,\n,,\n", "EMPTY"),
        (f"{HEADER}\n1,{'h' * 200_000},8,m,1\n", "PARSE"),
    ],
)
def test_broken_tables_are_refused_with_a_code(text: str, code: str, tmp_path: Path) -> None:
    """A table without a column, with ragged rows, with a column or an id twice, or without rows is an input error."""
    path = tmp_path / "runs.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_runs(str(path))
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"hardware": "abacus"}, "abacus"),
        ({"hardware": "v100-sxm2-32gb"}, "bf16"),
        ({"micro_batch_seqs": "", "global_batch_seqs": "8"}, "micro_batch_seqs"),
        ({"dp": ""}, "dp, tp and pp"),
        ({"precision": "int3"}, "int3"),
        ({"precision": ""}, "precision is not stated"),
        ({"ep": "2"}, "ep 2 of a model without experts"),
        ({"step_time_s": ""}, "step time"),
        ({"step_time_s": "fast"}, "step_time_s"),
        ({"step_time_s": "0.001"}, "contradicts itself"),
        ({"tp": "3"}, "tp 3"),
        ({"dp": "4"}, "contradicts itself: dp 4 x tp 1 x pp 1 x cp 1 is not 8 GPUs"),
        ({"dp": "8", "cp": "2", "seq_len": "16384"}, "which dp 4 would be"),
        ({"grad_accum": "4"}, "contradicts itself: micro_batch_seqs 1 x dp 8 x grad_accum 4"),
        ({"gpus_total": "12"}, "12"),
        ({"quality": "C"}, "quality C"),
        (
            {
                "task": "qlora",
                "framework": "LitGPT",
                "step_time_s": "",
                "tokens_per_s_per_gpu": "",
                "peak_mem_gb": "9",
                "mem_kind": "allocated",
            },
            "four bits",
        ),
        ({"task": "qlora", "model": "deepseek-v2-lite", "heads": "", "params_b": ""}, "plain attention"),
        ({"recompute_class": "partial"}, "which layers"),
        ({"recompute_class": "partial", "sharding_detail": '{"ckpt_layers":[1,0,0]}'}, "3 stages"),
        ({"model": "unheard-of"}, "unheard-of"),
        ({"hardware": ""}, "hardware is not stated"),
        ({"model": ""}, "neither model nor layers is stated"),
        ({"heads": "7"}, "heads is 7, and llama-3-8b has 32"),
        ({"experts": "8"}, "experts is 8, and llama-3-8b has none"),
        ({"params_b": "70"}, "params_b is 70, and llama-3-8b has 8.03"),
        ({"gpu_mem_gb": "40"}, "contradicts itself: gpu_mem_gb is 40, and h100-sxm-80gb has 85.5"),
        ({"step_time_s": "1e-300"}, "e+299 times the devices' peak"),
        ({"step_time_s": "", "tokens_per_s_per_gpu": "1e308"}, "tokens_per_s_per_gpu means a step of 0 s"),
        ({"tokens_per_s_per_gpu": "1e308"}, "tokens_per_s_per_gpu means a step of 0 s"),
        ({"peak_mem_gb": "1e-308"}, "less than 0.0001 of the device's memory"),
        ({"oom": "1"}, "it went out of memory, and its step takes 1.2 s"),
        ({"zero_class": "", "zero_stage_or_fsdp": "ZeRO++"}, "ZeRO++"),
        ({"offload": "cpu"}, "offload cpu"),
        ({"offload": "activations"}, "no model"),
        ({"zero_class": "", "zero_stage_or_fsdp": "ZeRO-3 Offload"}, "which state moves"),
        ({"compile": "sometimes"}, "compile sometimes"),
        ({"oom": "perhaps"}, "oom perhaps"),
        ({"step_time_s": "", "tflops_per_gpu": "400"}, "FLOP rates"),
        ({"precision": "fp32", "step_time_s": "1.2"}, "peak in fp32"),
        ({"pp": "8", "vp": "8", "dp": "1", "zero_class": "0"}, "pp 8 x vp 8"),
    ],
)
def test_a_row_that_cannot_be_expressed_says_which_fact_is_missing(
    change: dict[str, str], fact: str, tmp_path: Path
) -> None:
    """No row is dropped silently: the reason names the cell or the technique."""
    (one,) = judge(read_runs(runs_file(tmp_path, {**RUN, **change})))
    assert one.case is None
    assert fact in one.skipped


def test_every_column_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    """And which of the table's columns is near; columns by names that people have for them are there."""
    path = tmp_path / "runs.csv"
    path.write_text("id,gpu,n_gpu,models,length\n1,h100,8,m,1\n", encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_runs(str(path))
    faults = (caught.value, *caught.value.also)
    assert [fault.message.rsplit(" ", 1)[1] for fault in faults] == ["gpus_total.", "model.", "seq_len."]
    assert "models" in faults[1].hint


@pytest.mark.parametrize("name", ["training", "memory", "convolutions"])
def test_every_column_of_ours_is_known(name: str) -> None:
    """Published runs have no column that is not on the list, and what describes the columns has all of the list."""
    folder = ROOT / "benchmarks/truth"
    header = (folder / f"{name}.csv").read_text(encoding="utf-8").partition("\n")[0].split(",")
    assert set(header) <= set(known_columns())
    described = (folder / "README.md").read_text(encoding="utf-8")
    assert [column for column in known_columns() if f"`{column}`" not in described] == []


@pytest.mark.parametrize("separator", [";", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_tables_of_other_programs_are_read(separator: str, end: str, tmp_path: Path) -> None:
    """Spreadsheets write semicolons or tabs, and end lines as their systems do: the rows are the same."""
    plain = read_runs(runs_file(tmp_path, RUN))
    path = tmp_path / "exported.csv"
    lines = (separator.join(part) for part in (plain[0].keys(), plain[0].values()))
    path.write_bytes(end.join((*lines, "")).encode())
    assert read_runs(str(path)) == plain


@pytest.mark.parametrize("separator", [",", ";"])
def test_empty_lines_and_columns_without_a_name_are_no_part_of_a_table(separator: str, tmp_path: Path) -> None:
    """Lines above the header, the numbers that data frames put in front of each line, and separators at the end of all: the rows are the same, and
    no column is called unread."""
    plain = read_runs(runs_file(tmp_path, RUN))
    lines = (separator.join(("", *plain[0])), separator.join(("0", *plain[0].values())))
    path = tmp_path / "frame.csv"
    path.write_text("\n".join(("", separator, *(line + separator for line in lines))), encoding="utf-8")
    (run,) = read_runs(str(path))
    assert {name: cell for name, cell in run.items() if name} == plain[0]
    assert unread_columns(run) == ()


@pytest.mark.slow
@CI
@given(st.dictionaries(st.sampled_from(sorted({*RUN} - {"id"})), WILD, max_size=3))
def test_wild_cells_are_answered(change: dict[str, str]) -> None:
    """Whatever stands in a row, the answer is a finite prediction or a reason."""
    (one,) = judge([{**RUN, **change}])
    assert one.skipped or (math.isfinite(one.step_s) and one.step_s > 0 and one.peak_bytes > 0)


def test_unknown_frameworks_are_taken_for_the_likely_one() -> None:
    """A framework without a row is judged by its techniques: cut matrices, sharded weights, or neither."""
    found = []
    for change in ({"tp": "8", "dp": "1", "zero_class": "0"}, {}, {"zero_class": "0"}):
        (one,) = judge([{**RUN, "framework": "unheard-of", **change}])
        assert one.case is not None
        found.append(one.case.job.profile.name)
    assert found == ["megatron-core", "fsdp2", "hf-trainer"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"sharding_detail": "TE + DeepEP"}, ("fused", "cudnn", "alternate", True)),
        ({"sharding_detail": "TE + FlexAttn", "compile": "yes"}, ("compiled", "flash", "alternate", False)),
        ({"attention_impl": "flash-attn 2", "framework": "lit-gpt"}, ("eager", "flash2", "half-blocks", False)),
        ({"recompute": "selective(every other layer)", "recompute_class": "partial"}, ("eager-composite", "flash", "half-blocks", False)),
    ],
)  # fmt: skip
def test_named_techniques_count(change: dict[str, str], expected: tuple[str, str, str, bool]) -> None:
    """Kernels, attention, recomputation and dispatch are those that a row names, whatever its framework's habits."""
    (one,) = judge([{**RUN, "framework": "fsdp2", **change}])
    profile = one.job.profile
    assert (profile.kernels.name, profile.attention, profile.light, profile.merges_copies) == expected


@pytest.mark.parametrize(
    ("nodes", "network", "waits"),
    [(21, "Omni-Path (Jean Zay)", True), (20, "Omni-Path (Jean Zay)", False), (48, "InfiniBand HDR", False)],
)
def test_launches_wait_where_a_machine_hung_otherwise(nodes: int, network: str, waits: bool) -> None:
    """More than 20 nodes of A100 on Jean Zay ran with launches that wait; fewer nodes and other networks did not."""
    size = {
        "gpus_total": str(8 * nodes),
        "gpus_per_node": "8",
        "dp": str(8 * nodes),
        "global_batch_seqs": str(8 * nodes),
    }
    (one,) = judge([{**RUN, **size, "hardware": "A100-SXM-80GB", "inter_node": network, "step_time_s": "99"}])
    assert one.job.profile.launches_wait is waits


@pytest.mark.slow
def test_waiting_launches_cost_what_was_measured_beside_a_run_without() -> None:
    """On 80 GPUs, 512 sequences of the 200B model, BLOOM's team measured 97.20 TFLOPs, and 91.04 with CUDA_LAUNCH_BLOCKING=1: the
    predicted loss, from launches of another source, is within a fifth of theirs."""
    alone = next(one for one in published() if one.run["id"] == "bloom-0002")
    layout = {**dict(alone.case.layout), "accumulation": 512} if alone.case else {}
    waiting = replace(alone.job, profile=replace(alone.job.profile, launches_wait=True))
    free, bound = (predictions(job, [layout])[0].step[0] for job in (alone.job, waiting))
    assert bound / free - 1 == pytest.approx(97.20 / 91.04 - 1, rel=0.2)


def test_a_part_of_a_node_has_the_links_of_the_node() -> None:
    """Two of a node's eight A100 talk through its switch; a machine of four has a fourth of that between two."""
    few = {"hardware": "a100-sxm-80gb", "gpus_total": "2", "dp": "2", "global_batch_seqs": "2", "step_time_s": "9"}
    part, machine = (judge([{**RUN, **few, "gpus_per_node": count}])[0].job.cluster for count in ("8", "4"))
    assert (part.world, machine.world) == (2, 2)
    whole = load_cluster("dgx-a100-80gb")
    pair, of_four, of_eight = (group_bandwidth(tiers(cluster), 2).ring_Bps for cluster in (part, machine, whole))
    assert pair == of_eight > 2 * of_four


@pytest.mark.slow
def test_every_published_row_is_answered() -> None:
    """Each row of the published tables is predicted or skipped with a reason, and nine in ten of those of quality A and B
    are predicted."""
    judged = published()
    assert all((one.case is None) == bool(one.skipped) for one in judged)
    assert all(one.step_s > 0 and one.peak_bytes > 0 for one in judged if one.case is not None)
    scored = [one for one in judged if one.run["quality"] in ("A", "B")]
    assert sum(one.case is not None for one in scored) >= 0.9 * len(scored)


def test_a_token_rate_stands_for_a_step_time(tmp_path: Path) -> None:
    """A row that states tokens per second and device means the step that takes that long for its batch."""
    rated = {**RUN, "id": "run-2", "step_time_s": "", "tokens_per_s_per_gpu": str(8 * 8192 / 8 / 1.2)}
    one, other = judge(read_runs(runs_file(tmp_path, RUN, rated)))
    assert one.case is not None and other.case is not None
    assert other.case.measured.step_s == pytest.approx(one.case.measured.step_s)
    assert other.step_s == one.step_s


def test_a_last_micro_batch_that_is_smaller_counts_for_what_it_holds() -> None:
    """Forty sequences a device in micro-batches of 16 and one of 8 take as long each as 48 in three do; a rate says so by itself."""
    parts = {**RUN, "global_batch_seqs": str(40 * int(RUN["dp"])), "micro_batch_seqs": "16", "grad_accum": "3"}
    whole = {**parts, "global_batch_seqs": str(48 * int(RUN["dp"]))}
    rate = {"step_time_s": "", "tokens_per_s_per_gpu": "9000"}
    smaller, larger = (judge([{**row, "step_time_s": said}]) for row, said in ((parts, "5"), (whole, "6")))
    assert smaller[0].measured_s == pytest.approx(larger[0].measured_s)
    by_rate = [judge([{**row, **rate}])[0].measured_s for row in (parts, whole)]
    assert by_rate[0] == pytest.approx(by_rate[1])


def test_weights_of_four_bits_take_time_to_unpack_and_less_room() -> None:
    """A run with frozen weights in four bits is slower than one with adapters beside whole weights, and holds less."""
    whole, packed = judge([{**RUN, "id": task, "task": task} for task in ("lora", "qlora")])
    assert packed.step_s > whole.step_s
    assert packed.peak_bytes < whole.peak_bytes


def test_autogptq_unpacks_by_operations_of_torch_and_once_per_forward() -> None:
    """Six operations move 16.5 bytes per weight where bitsandbytes' kernel moves 2.5, in forward and as it runs again, and none in backward; without
    recomputation all unpacked weights wait for backward, which has no model."""
    row = {**RUN, "task": "qlora", "recompute": "full", "recompute_class": "full"}
    nf4, gptq = judge([row, {**row, "id": "gptq", "precision": "bf16+int4 (GPTQ)"}])
    weights = sum(
        m.weights for m in build_layer(nf4.job.model, LayerKind("attention", "dense")).matrices if not m.is_adapter
    )
    more = (
        (2 * 16.5 - 3 * (QUANTISED_BYTES + 2.0))
        * weights
        * nf4.job.model.layers
        / memory_Bps(nf4.job.cluster.slowest.gpu)
    )
    layout = dict(gptq.case.layout) if gptq.case else {}
    assert gptq.step_s - nf4.step_s == pytest.approx(layout["accumulation"] * more, rel=0.05)
    (kept,) = judge([{**row, "precision": "bf16+int4 (GPTQ)", "recompute": "none", "recompute_class": "none"}])
    assert "GPTQ without recomputation" in kept.skipped


@pytest.mark.parametrize(
    ("words", "targets"),
    [
        ("LoRA rank 8 on q_proj, v_proj", ("q", "v")),
        ("LoRA rank 8 on linear_qkv, linear_proj", ("q", "k", "v", "o")),
        ("adapters on every matrix, r=8", TARGETS),
    ],
)
def test_adapters_stand_where_a_row_says(words: str, targets: tuple[str, ...]) -> None:
    """With their rank and their matrices they are the planner's own; without, a share of the weights stands for them."""
    stated, silent = judge([{**RUN, "id": one, "task": "lora", "sharding_detail": one} for one in (words, "")])
    adapters = stated.job.model.adapters
    assert adapters is not None and (adapters.rank, adapters.targets) == (8, targets)
    assert silent.job.model.adapters is None
    (packed,) = judge([{**RUN, "task": "qlora", "sharding_detail": words}])
    assert packed.job.model.adapters is not None and packed.job.model.adapters.targets == targets


@pytest.mark.parametrize(("detail", "merges"), [("", True), ("alltoall dispatcher", False), ("DeepEP", True)])
def test_a_row_knows_its_dispatcher_better_than_its_framework(detail: str, merges: bool) -> None:
    """Recipes of NeMo merge copies unless a run names an all-to-all."""
    (one,) = judge([{**RUN, "framework": "NeMo", "sharding_detail": detail}])
    assert one.job.profile.merges_copies is merges


@pytest.mark.parametrize(
    ("detail", "expected"),
    [
        ("flex dispatcher: HybridEP", (True, False, False)),
        ("flex dispatcher: DeepEP; overlap_moe_expert_parallel_comm", (True, False, True)),
        ("alltoall dispatcher; EP overlap", (False, False, True)),
        ("DeepEP, FP8 dispatch", (True, True, False)),
        ("interleaved, no expert parallelism", (False, False, False)),
    ],
)
def test_a_row_names_how_tokens_get_to_experts(detail: str, expected: tuple[bool, bool, bool]) -> None:
    """Its dispatcher, formats on the way and what the way hides behind, by the words of Megatron-Core and DeepEP."""
    (one,) = judge([{**RUN, "framework": "Megatron-Core", "sharding_detail": detail}])
    profile = one.job.profile
    assert (profile.merges_copies, profile.dispatches_fp8, "experts" in profile.hides) == expected


def test_a_run_of_four_bits_that_went_out_of_memory_gets_a_verdict() -> None:
    """Nothing but OOM is stated of it, which is what its peak is compared with; Llama-2-70B in four bits is too large for 24 GB and not for 80."""
    cells = {
        "task": "qlora",
        "framework": "HF Trainer",
        "model": "llama-2-70b",
        "gpus_total": "1",
        "dp": "1",
        "zero_class": "",
        "oom": "1",
    }
    cells |= {
        "global_batch_seqs": "1",
        "seq_len": "2048",
        "step_time_s": "",
        "sharding_detail": "LoRA rank 16 on q_proj, v_proj",
    }
    small, large = (judge([{**RUN, **cells, "hardware": card}])[0] for card in ("rtx-4090", "h100-sxm-80gb"))
    assert small.case is not None and small.case.measured.is_oom
    assert large.fits and not small.fits


def test_a_missing_column_is_asked_for_by_the_names_that_are_there(tmp_path: Path) -> None:
    """What a table has is shown where nothing is close, and what may have been meant where something is."""
    path = tmp_path / "runs.csv"
    path.write_text("hardware,gpus_total,model,sequence\na100-sxm-80gb,8,llama-3-8b,4096\n", encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_runs(str(path))
    assert caught.value.code == "MISSING" and "sequence" in (caught.value.hint or "")
    path.write_text("machine,gpus_total,model,seq_len\na100-sxm-80gb,8,llama-3-8b,4096\n", encoding="utf-8")
    with pytest.raises(InputError, match="has no column hardware") as caught:
        read_runs(str(path))
    assert "the header has machine, gpus_total" in (caught.value.hint or "")


def test_many_reasons_are_summed_up(tmp_path: Path) -> None:
    """A column whose every cell is wrong in its own way does not fill the screen; every row is still counted."""
    runs = [{**RUN, "id": f"run-{n}", "seq_len": f"{n} tokens"} for n in range(60)]
    lines = accuracy_text(grouped(judge(runs), ("source",))[:1], (), 200, quiet=False)
    text = text_of(lines)
    assert "36: 36 other reasons" in text
    assert text.count("skipped") == 25
