"""What each term of the time model says about frameworks and devices, as sentences about whole layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from benchmarks.device.report import kernels
from strategist.facts.adapters import as_trained, with_adapters
from strategist.facts.attention import attention_FLOP
from strategist.facts.clusters import load_cluster
from strategist.facts.gpus import gpu_by_id
from strategist.facts.groups import group_bandwidth, group_columns
from strategist.facts.job import Job
from strategist.facts.model import layer_sequence
from strategist.facts.models import load_model
from strategist.facts.parameters import count
from strategist.facts.profile import (
    Adapts,
    Hides,
    Profile,
    UpdateKernels,
    find_profile,
    frameworks,
    profile_of,
    with_dispatcher,
    with_habits,
)
from strategist.facts.routing import called
from strategist.facts.workload import Workload
from strategist.planner.predict import filled
from strategist.planner.situation import one
from strategist.space.grammar import parse_pins
from strategist.space.traffic import Op
from strategist.timing.collectives import cluster_tiers, links
from strategist.timing.compute import attention_family, matmul_seconds, product_seconds
from strategist.timing.estimate import StepTimes, step_times
from strategist.timing.rates import kept_share, large_share, matmul_rates, memory_Bps, share

DP_TERMS = ("tp", "cp", "ep", "pp", "dp")


def job(profile: Profile | None = None, **changes: Any) -> Job:
    """A question about 16 H100."""
    work = Workload(seq_len=4096, global_batch=64)
    asked = Job(cluster=load_cluster("dgx-h100:2"), model=load_model("llama-3.1-8b"), workload=work, profile=profile or find_profile())  # fmt: skip
    return replace(asked, **changes)


def timed(asked: Job, strategy: str = "dp=16,zero=3") -> StepTimes:
    """The times of one layout."""
    return step_times(asked, one(**filled(asked, {pin.key: pin.value for pin in parse_pins(strategy)})))


def seconds(times: StepTimes, term: str) -> float:
    """Exposed seconds of a term."""
    return float(times.exposed[term][0]) / 1e9


def test_launches_that_wait_cost_their_issue_on_top() -> None:
    """A CPU that waits for every kernel adds the issue of each one, however long kernels run, once more for those run again; one
    that runs ahead adds nothing to large layers."""
    waiting, free = replace(find_profile(), launches_wait=True), timed(job())
    kernels, layers = find_profile().kernels, job().model.layers
    for recompute, passes in (("none", 1), ("full", 2)):
        bound = timed(job(waiting), f"dp=16,zero=1,mbs=1,recompute={recompute}")
        launches = 4 * layers * (passes * kernels.forward + kernels.backward)
        assert seconds(bound, "host") == pytest.approx(launches * kernels.host_s, rel=1e-6)
    assert seconds(free, "host") == 0.0


@pytest.mark.parametrize("attention", ["flash1", "unfused"])
def test_older_attention_is_slower(attention: Any) -> None:
    """FlashAttention-1 and written scores cost more than FlashAttention-2; nothing but attention changes."""
    new, old = timed(job()), timed(job(with_habits(find_profile(), attention=attention)))
    assert seconds(old, "attention") > 1.25 * seconds(new, "attention")
    assert all(seconds(old, term) == seconds(new, term) for term in ("matmul", "elementwise", "loss"))


def test_written_scores_grow_with_the_square_of_the_sequence() -> None:
    """Twice the sequence and half the batch is twice the time of unfused attention; flash gains a little on the way."""
    unfused = with_habits(find_profile(), attention="unfused")
    times = [timed(job(unfused, workload=Workload(seq_len=s, global_batch=262144 // s))) for s in (2048, 4096)]
    assert seconds(times[1], "attention") == pytest.approx(2 * seconds(times[0], "attention"), rel=1e-6)
    flash = [timed(job(workload=Workload(seq_len=s, global_batch=262144 // s))) for s in (2048, 4096)]
    assert 1.5 < seconds(flash[1], "attention") / seconds(flash[0], "attention") < 2.0


def test_heads_that_do_not_feed_tensor_cores_run_on_the_fp32_units() -> None:
    """Written scores of heads 4 numbers wider take their FLOP at the rate of the fp32 units, those of 8 wider at the tensor
    cores'; a kernel that keeps scores on the chip pads them."""
    unfused = with_habits(find_profile(), attention="unfused")
    model, cluster = load_model("llama-3.1-8b"), load_cluster("dgx-a100-80gb:2")
    gpu, work = cluster.slowest.gpu, Workload(seq_len=4096, global_batch=64)

    def attention(profile: Profile, width: int) -> float:
        return seconds(timed(job(profile, model=replace(model, head_dim=width), cluster=cluster)), "attention")

    scores = 12.0 * model.layers * model.heads * work.seq_len**2 * work.global_batch / 16
    slow = scores / (gpu.fp32_FLOPs or 0.0) / share("batched_matmul_share", gpu)
    fast = slow * (gpu.fp32_FLOPs or 0.0) / (gpu.bf16_FLOPs or 1.0)
    ragged, narrow, wide = (attention(unfused, width) for width in (132, 128, 136))
    assert wide - narrow == pytest.approx(8 * fast, rel=1e-6)
    assert ragged - narrow == pytest.approx(132 * slow - 128 * fast, rel=1e-6)
    assert attention(find_profile(), 132) < 1.1 * attention(find_profile(), 128)


def test_a_gradient_in_fp32_is_copied_and_added() -> None:
    """DeepSpeed's BF16_Optimizer moves 12 bytes per weight and micro-batch more than frameworks that add up in one format."""
    plain, copied = (
        timed(job(find_profile(name)), "dp=16,zero=1,mbs=1") for name in ("megatron-deepspeed", "deepspeed-bf16")
    )
    asked = job()
    moved = 12.0 * count(asked.model).total * 4 / memory_Bps(asked.cluster.slowest.gpu)
    assert seconds(copied, "elementwise") - seconds(plain, "elementwise") == pytest.approx(moved, rel=1e-3)


@pytest.mark.parametrize(("seq_len", "is_full"), [(4096, True), (128, False)])
def test_more_messages_fill_the_links_more_often_if_they_are_large(seq_len: int, is_full: bool) -> None:
    """Half the micro-batch is twice the messages: each costs its start-up, and one of 4 MiB or more also what fills the links;
    smaller ones pay that by their bytes, of which there are as many."""
    asked = job(workload=Workload(seq_len=seq_len, global_batch=64))
    whole, halved = (timed(asked, f"tp=8,dp=2,zero=0,sp=0,mbs={micro}") for micro in (2, 1))
    link = group_bandwidth(cluster_tiers(asked.cluster), 8)
    messages, of_losses = 16 * (4 * asked.model.layers + 2), 16 * 3
    more = (messages + of_losses) * 2 * link.latency_s + messages * link.fill_s * is_full
    assert seconds(halved, "tp") - seconds(whole, "tp") == pytest.approx(more, rel=1e-6)


def test_rows_that_do_not_fill_lines_cost() -> None:
    """A product with a width of 64 n + 8 takes longer than the wider one of 64 (n + 1); a CPU does not mind."""
    asked, m = job(), np.array([8192.0])
    ragged, whole = (matmul_seconds(asked, gpu_by_id("a100-sxm-80gb"), m, np.array([n]), np.array([5120.0])) for n in (5064.0, 5120.0))  # fmt: skip
    assert ragged > whole
    cpu = gpu_by_id("cpu")
    ragged, whole = (matmul_seconds(asked, cpu, m, np.array([n]), np.array([5120.0])) for n in (5064.0, 5120.0))
    assert ragged < whole


@pytest.mark.parametrize("name", ["h100-sxm-80gb", "b200-sxm-180gb", "a100-sxm-80gb", "a100-sxm-40gb"])
def test_long_runs_do_not_beat_measured_products(name: str) -> None:
    """A large bf16 product runs no faster than the best one measured on random data, fp8 faster than bf16 and below its
    peak."""
    gpu = gpu_by_id(name)
    large = np.array([16384.0])
    bf16 = float(matmul_rates(gpu, "bf16").at(large, large)[0])
    assert bf16 <= 1.05 * (gpu.matmul_measured_FLOPs or 0.0)
    if gpu.fp8_FLOPs:
        assert bf16 < float(matmul_rates(gpu, "fp8").at(large, large)[0]) < gpu.fp8_FLOPs


def test_products_of_fp32_do_not_wait_for_whole_rows() -> None:
    """A head of 50,257 columns takes as long a column as one of 50,304 where no tensor cores multiply; a convolution of three colours does not."""
    gpu, m, depth = gpu_by_id("v100-sxm2-32gb"), np.array([4096.0]), np.array([1024.0])

    def slower(precision: str, odd: float, even: float, k: np.ndarray, read: np.ndarray | None = None) -> float:
        number = 4.0 if precision == "fp32" else 2.0
        one, other = (product_seconds(gpu, precision, number, m, np.array([n]), k, read) / n for n in (odd, even))
        return float((one / other)[0])

    assert slower("fp32", 50257.0, 50304.0, depth) == pytest.approx(1.0, rel=1e-3)
    assert slower("fp16", 50257.0, 50304.0, depth) > 2.0
    assert slower("fp32", 1023.0, 1024.0, np.array([147.0]), m) == pytest.approx(
        1.0, rel=1e-3
    )  # both wait: of 147 numbers no row is whole
    assert float(product_seconds(gpu, "fp32", 4.0, m, depth, np.array([147.0]), m)[0]) > float(
        product_seconds(gpu, "fp32", 4.0, m, depth, np.array([147.0]))[0]
    )


def test_attention_follows_what_a_device_reaches() -> None:
    """A card of the same peak whose products reach less of it, for want of power, takes as much longer for attention; a
    share without a measured device is taken as it is."""
    full, limited = gpu_by_id("h100-sxm-80gb"), gpu_by_id("h100-hbm2e-96gb")
    assert full.matmul_measured_FLOPs and limited.matmul_measured_FLOPs
    slower = kept_share("cudnn_forward_share", full) / kept_share("cudnn_forward_share", limited)
    assert slower == pytest.approx(full.matmul_measured_FLOPs / limited.matmul_measured_FLOPs, rel=1e-3)
    assert kept_share("flash1_forward_share", limited) == 1.0


@pytest.mark.parametrize(("attention", "least"), [("flash", 1.05), ("cudnn", 1.3), ("flash1", 1.0)])
def test_narrow_heads_are_slower(attention: Any, least: float) -> None:
    """The same FLOP in heads of half the width take longer, most where exponentials bind; FlashAttention-1 does not mind."""
    wide = job(with_habits(find_profile(), attention=attention))
    shape = wide.model
    narrow = replace(wide, model=replace(shape, heads=2 * shape.heads, kv_heads=2 * shape.kv_heads, head_dim=shape.head_dim // 2))  # fmt: skip
    ratio = seconds(timed(narrow), "attention") / seconds(timed(wide), "attention")
    assert least <= ratio < 1.6
    assert attention != "flash1" or ratio == pytest.approx(1.0)


@pytest.mark.parametrize(("name", "like"), [("l4", "l40s"), ("h100-pcie-80gb", "h100-sxm-80gb"), ("a10", "rtx-a6000"), ("a800-pcie-80gb", "a100-sxm-80gb")])  # fmt: skip
def test_cards_with_less_power_for_their_peak_reach_less_of_it(name: str, like: str) -> None:
    """A card that nobody measured reaches a smaller share of its peak than the measured one of its process, as it has less
    power for it; given plenty it reaches what products reach that power does not limit."""
    card, other = gpu_by_id(name), gpu_by_id(like)
    assert 0.3 < large_share(card) < large_share(other)
    plenty = replace(card, tdp_W=20.0 * (card.tdp_W or 0.0))
    assert large_share(card) < large_share(plenty) == share("cool_share", card) < 1.0


def test_narrow_products_of_mi355x_are_as_slow_as_measured() -> None:
    """Experts of DeepSeek-V2-Lite are 2,048 x 1,408: at 4,096 to 8,192 rows products with a side of 512 to 1,536 reach 797 TFLOP/s in the middle, those of
    8,192 and more 1,494 (ROCm/aiter: aiter/configs, *bf16_tuned_gemm.csv of 256 compute units)."""
    for name in ("mi355x", "mi350x"):
        rates = matmul_rates(gpu_by_id(name), "bf16")
        narrow, wide = (float(rates.at(np.array([4096.0]), np.array([side]))[0]) for side in (1408.0, 8192.0))
        assert 0.5 < narrow / wide < 0.75


@pytest.mark.parametrize("name", ["rtx-4090", "a10g", "l4"])
def test_small_devices_are_full_with_small_products(name: str) -> None:
    """Of what it reaches with large products, a device of an architecture's reference at a fraction of the peak keeps more
    at a small one."""
    own, other = (matmul_rates(gpu_by_id(gpu), "bf16") for gpu in (name, {"a10g": "a100-sxm-80gb"}.get(name, "l40s")))
    small, large = np.array([1024.0]), np.array([8192.0])
    kept = [float(rates.at(small, small)[0] / rates.at(large, large)[0]) for rates in (own, other)]
    assert kept[0] > kept[1]


def test_fp8_buys_matmuls_with_casts() -> None:
    """In fp8 matmuls take less and memory-bound work more, unless the framework casts nothing."""
    half, eight = (timed(job(workload=Workload(seq_len=4096, global_batch=64, precision=p))) for p in ("bf16", "fp8"))  # type: ignore[arg-type]
    assert seconds(eight, "matmul") < seconds(half, "matmul")
    assert seconds(eight, "elementwise") > seconds(half, "elementwise")
    bare = job(
        replace(find_profile(), casts_fp8=False), workload=Workload(seq_len=4096, global_batch=64, precision="fp8")
    )
    assert seconds(timed(bare), "elementwise") == seconds(half, "elementwise")


def test_fp4_buys_more_with_dearer_casts() -> None:
    """On a device that multiplies in fp4, matrices take less time than in fp8, but more than their own peak allows; tensors
    are read twice to be cast, and what is kept of them takes 4.5 bits in place of 8."""
    cluster = load_cluster("dgx-b200:2")
    works = (Workload(seq_len=4096, global_batch=64, precision=p) for p in ("fp8", "fp4"))  # type: ignore[arg-type]
    eight, four = (replace(job(find_profile("megatron-core"), workload=work), cluster=cluster) for work in works)
    assert 1 < seconds(timed(eight), "matmul") / seconds(timed(four), "matmul") < 2
    assert seconds(timed(four), "elementwise") > seconds(timed(eight), "elementwise")
    assert four.cast_width / eight.cast_width == 4.5 / 8


def test_single_operations_of_an_update_cost_what_a_fused_one_saved() -> None:
    """GPT-2 with 163 million weights in fp32 and batches of 8 on one A100 went from 27,648 to 28,399 tokens/s when AdamW was fused: 7.8 ms of 296
    (rasbt/LLMs-from-scratch: ch05/10_llm-training-speed/README.md, steps 2 and 3), launches among them."""
    shape, cluster = replace(load_model("gpt2"), tied=False, parameters_stated=None), load_cluster("dgx-a100-40gb")
    asked = job(
        find_profile("hf-trainer"), model=shape, cluster=cluster, workload=Workload(seq_len=1024, global_batch=64)
    )
    fused = replace(asked, profile=replace(asked.profile, update_kernels="one"))
    saved = seconds(timed(asked, "dp=8,mbs=8"), "optimizer") - seconds(timed(fused, "dp=8,mbs=8"), "optimizer")
    tokens = 8 * 1024
    assert 0.7 < saved / (tokens / 27648 - tokens / 28399) < 1.05


def test_modules_of_transformers_move_what_autocast_widens_and_single_operations_repeat() -> None:
    """GPT-2's GELU is nine operations by its tanh and float32 under autocast, BERT's is one in 16 bits; so autocast costs GPT-2 more, and BERT's layers least of all
    (huggingface/transformers: activations.py, NewGELUActivation; pytorch: aten/src/ATen/autocast_mode.h)."""

    def moved(name: str, profile: str) -> float:
        asked = job(find_profile(profile), model=load_model(name), workload=Workload(seq_len=512, global_batch=64))
        return seconds(timed(asked, "dp=16,mbs=4"), "elementwise")

    low, mixed = (moved("gpt2-medium", profile) for profile in ("deepspeed", "hf-trainer"))
    plain, widened = (moved("bert-large-uncased", profile) for profile in ("deepspeed", "hf-trainer"))
    assert mixed / low > 1.5
    assert low / plain > 2
    assert widened > plain
    assert mixed - low > widened - plain


def test_zero_2_of_deepspeed_keeps_weights_and_reduces_all_gradients_for_every_micro_batch() -> None:
    """Weights stay whole, so that with one micro-batch ZeRO-2 sends what ZeRO-1 does; with four, all gradients three times more
    (deepspeed/runtime/zero/stage_1_and_2.py, allreduce_and_scatter)."""
    asked = job(find_profile("deepspeed"))

    def sent(strategy: str) -> float:
        times = timed(asked, strategy)
        return float(times.exposed["dp"][0] + times.hidden["dp"][0])

    gradients = sent("dp=16,zero=0,mbs=4")
    assert sent("dp=16,zero=2,mbs=4") == pytest.approx(sent("dp=16,zero=1,mbs=4"), rel=1e-6)
    assert sent("dp=16,zero=2,mbs=1") == pytest.approx(sent("dp=16,zero=1,mbs=1") + 3 * gradients, rel=1e-6)


def test_adapters_in_single_operations_move_their_input_twice_and_their_result_six_times_more() -> None:
    """Beside one product that scales and adds, operations of torch drop the input (2 numbers and a byte of mask in either pass), write the scaled result, read it
    again with the frozen one and write the sum, and scale the gradient (huggingface/peft: src/peft/tuners/lora/layer.py)."""
    shape = with_adapters(load_model("llama-3.1-8b"), "lora", 16, ("q", "down"))
    asked = as_trained(job(find_profile("hf-trainer"), model=shape))

    def moved(adapts: Any) -> float:
        kernels = replace(asked.profile.kernels, adapts=adapts)
        times = timed(replace(asked, profile=replace(asked.profile, kernels=kernels)), "dp=16,mbs=1")
        return seconds(times, "elementwise")

    joint, compiled, apart, widened = (moved(adapts) for adapts in get_args(Adapts))
    numbers = 4 * 4096 * 32  # of one width, in a step of four micro-batches through all layers
    inputs, outputs = numbers * (4096 + 14336), numbers * (4096 + 4096)
    rate = memory_Bps(asked.cluster.slowest.gpu) / 2
    assert (compiled - joint) * rate == pytest.approx(4 * outputs, rel=1e-3)
    assert (apart - joint) * rate == pytest.approx(5 * inputs + 6 * outputs, rel=1e-3)
    assert (widened - apart) * rate == pytest.approx(16 * inputs, rel=1e-3)


def test_adapters_in_float32_widen_no_input_that_is_wide_or_of_quantised_matrices() -> None:
    """In float32 there is nothing to cast, and bitsandbytes' layers take the input as autocast has it (huggingface/peft: src/peft/tuners/lora/bnb.py)."""
    for method, precision, is_slower in (("lora", "bf16", True), ("lora", "fp32", False), ("qlora", "bf16", False)):
        shape = with_adapters(load_model("llama-3.1-8b"), method, 16, ("q", "v"))
        work = Workload(seq_len=4096, global_batch=64, precision=precision)
        asked = as_trained(job(find_profile("hf-trainer"), model=shape, workload=work))
        kernels = (replace(asked.profile.kernels, adapts=word) for word in ("apart", "widened"))
        apart, widened = (
            seconds(timed(replace(asked, profile=replace(asked.profile, kernels=own)), "dp=16,mbs=1"), "elementwise")
            for own in kernels
        )
        assert (widened > apart) is is_slower


def test_updates_of_lamb_and_single_operations_move_more() -> None:
    """One kernel moves 28 bytes of a weight in fp32, LAMB's two stages 48, torch's operations 80, DeepSpeed's partitions 68; other optimizers do not ask."""
    asked = job(find_profile("hf-trainer"), workload=Workload(seq_len=4096, global_batch=64))

    def update(kernels: Any, optimizer: Any = "adamw") -> float:
        own = replace(asked, workload=replace(asked.workload, optimizer=optimizer))
        return seconds(timed(replace(own, profile=replace(own.profile, update_kernels=kernels)), "dp=16"), "optimizer")

    one, stages, operations, partitions = (update(kernels) for kernels in get_args(UpdateKernels))
    norms = asked.profile.gradient_passes * 4.0
    assert stages / one == pytest.approx((48 + norms) / (28 + norms), rel=1e-6)
    assert operations / one == pytest.approx((80 + norms) / (28 + norms), rel=1e-6)
    assert partitions / one == pytest.approx((68 + norms) / (28 + norms), rel=1e-6)
    assert update("operations", "sgd") == update("one", "sgd")


@pytest.mark.parametrize("precision", ["fp8", "fp4"])
def test_the_output_head_is_not_cast(precision: Any) -> None:
    """What a larger vocabulary adds to the products of a step in fp8 or fp4 is what it adds in bf16: the head is no layer of the engine that casts."""
    cluster = load_cluster("dgx-b200:2")

    def added(word: Any) -> float:
        asked = job(workload=Workload(seq_len=4096, global_batch=64, precision=word), cluster=cluster)
        more = replace(asked, model=replace(asked.model, vocab=2 * asked.model.vocab))
        return seconds(timed(more), "matmul") - seconds(timed(asked), "matmul")

    assert added(precision) == pytest.approx(added("bf16"), rel=1e-6)


def test_products_in_four_bits_gain_on_eight_what_was_measured() -> None:
    """The twelve products of a layer of 4,096 and 16,384 with 15,872 tokens took 7.161 ms in MXFP8 and 3.764 ms in NVFP4 on a B300 (NVIDIA/TransformerEngine:
    docs/examples/gemm_profiling), large ones 1.63 to 1.93 times as long on a B200 (triton-lang/triton pull request 9697)."""
    m, sides = np.array([15872.0]), ((12288.0, 4096.0), (4096.0, 4096.0), (16384.0, 4096.0), (4096.0, 16384.0))
    for name, low, high in (("b300-sxm-288gb", 1.85, 1.95), ("b200-sxm-180gb", 1.63, 1.93)):
        eight, four = (
            sum(
                float(product_seconds(gpu_by_id(name), word, 2.0, m, np.array([n]), np.array([k]))[0]) for n, k in sides
            )
            for word in ("fp8", "fp4")
        )
        assert low < eight / four < high


@pytest.mark.parametrize(("precision", "measured"), [("bf16", 616.42), ("fp8", 1143.18)])
def test_typical_products_of_mi325x_take_as_long_as_amd_measured(precision: Any, measured: float) -> None:
    """Ten products of DeepSeek-V3, each for 30 s on one MI325X, weighed by their FLOP (ROCm/rocm-blogs: Completing the GPU Performance Picture)."""
    gpu, sides = gpu_by_id("mi325x"), ((2112, 7168), (3072, 1536), (7168, 2048), (4608, 7168), (7168, 256))
    shapes = [(np.array([float(m)]), np.array([float(n)]), np.array([float(k)])) for m in (32, 32768) for n, k in sides]
    number = {"bf16": 2.0, "fp8": 1.0}[precision]
    spent = sum(float(product_seconds(gpu, precision, number, m, n, k)[0]) for m, n, k in shapes)
    assert sum(float((2 * m * n * k)[0]) for m, n, k in shapes) / spent / 1e12 == pytest.approx(measured, rel=0.02)


def test_what_is_cast_before_it_is_gathered_costs_less() -> None:
    """Under sequence parallelism a rank that casts its own tokens sends half the bytes of the gathers and casts a part of
    them; adapters, scales per row and bf16 leave everything as it was."""
    asked = job(find_profile("megatron-core"), workload=Workload(seq_len=4096, global_batch=64, precision="fp8"))
    late = replace(asked, profile=replace(asked.profile, gathers_fp8=False))
    early, later, beside = (timed(one, "dp=4,tp=4,zero=1,sp=1") for one in (asked, late, replace(asked, adapters=True)))
    assert seconds(early, "tp") < 0.85 * seconds(later, "tp")
    assert seconds(early, "elementwise") < seconds(later, "elementwise")
    assert seconds(beside, "tp") == seconds(later, "tp")
    assert not with_habits(asked.profile, cast_bytes=8.0).gathers_fp8


def test_a_small_model_waits_for_its_launches() -> None:
    """With little work per kernel a step takes at least the time to launch every kernel of every layer."""
    asked = job(model=load_model("gpt2"), workload=Workload(seq_len=64, global_batch=16))
    kernels = asked.profile.kernels
    floor = 12 * (kernels.forward + kernels.backward) * kernels.host_s
    times = timed(asked, "dp=16,mbs=1")
    busy = sum(seconds(times, term) for term in ("matmul", "attention", "elementwise", "loss", "host"))
    assert floor <= busy * (1 + 1e-6) < 2 * floor
    assert seconds(timed(replace(asked, profile=with_habits(find_profile(), kernels="compiled")), "dp=16,mbs=1"), "host") < seconds(times, "host")  # fmt: skip


@pytest.mark.parametrize("habit", ["gradients", "weights", "updates", "tensor", "pipeline"])
def test_what_a_framework_hides_it_does_not_wait_for(habit: Hides) -> None:
    """With a habit of overlap no layout is slower, some layout is faster, and what is hidden and exposed adds up to the
    same traffic, or in a pipeline, where another stage may be the one that waits longest, to no more than most have."""
    open_, hiding = (job(replace(find_profile(), hides=hides)) for hides in ((), (habit,)))
    gained = []
    for strategy in ("dp=16,zero=3", "dp=16,zero=1", "tp=8,sp=1", "pp=4,vp=2,dp=4"):
        before, after = timed(open_, strategy), timed(hiding, strategy)
        traffic = [sum(int(t.exposed[n][0]) + int(t.hidden[n][0]) for n in DP_TERMS) for t in (before, after)]
        assert traffic[0] == pytest.approx(traffic[1], abs=20) or ("pp" in strategy and traffic[0] > traffic[1])
        assert int(after.step[0]) <= int(before.step[0])
        gained.append(int(after.step[0]) < int(before.step[0]))
    assert any(gained)


@pytest.mark.parametrize(("light", "terms"), [("alternate", {"matmul": 0.5, "elementwise": 1.0}), ("half-blocks", {"matmul": 0.5, "attention": 0.5}), ("attention", {"attention": 1.0, "matmul": 0.0})])  # fmt: skip
def test_selective_recompute_means_what_the_framework_means(light: Any, terms: dict[str, float]) -> None:
    """What runs again is the stated share of forward, which full recompute runs again whole."""
    asked = job(replace(find_profile(), light=light))
    full, selective = (timed(asked, f"dp=16,zero=3,recompute={level}") for level in ("full", "selective"))
    for term, part in terms.items():
        assert int(selective.again[term][0]) == pytest.approx(part * int(full.again[term][0]), abs=2)


def test_frozen_weights_have_no_gradient() -> None:
    """Without trained weights backward costs one product per matrix instead of two, nothing is reduced or updated; adapters
    bring memory-bound work back."""
    whole, frozen = timed(job(), "dp=16"), timed(job(trainable=0.0), "dp=16")
    assert seconds(frozen, "matmul") == pytest.approx(2 / 3 * seconds(whole, "matmul"), rel=1e-6)
    assert seconds(frozen, "optimizer") == 0.0
    assert seconds(frozen, "dp") + float(frozen.hidden["dp"][0]) < 0.01 * (seconds(whole, "dp") + float(whole.hidden["dp"][0]))  # fmt: skip
    assert seconds(timed(job(trainable=0.0, adapters=True), "dp=16"), "elementwise") > seconds(frozen, "elementwise")


def _part_of_exchange(model: str, ep: int, **habits: bool) -> float:
    """The exposed exchange of a mixture's experts on two nodes of eight, over what it is when every copy travels, whole and in the open."""
    plain = job(model=load_model(model))
    leaner = replace(plain, profile=with_dispatcher(find_profile(), **habits))
    layout = f"dp=16,zero=1,ep={ep}"
    return seconds(timed(leaner, layout), "ep") / seconds(timed(plain, layout), "ep")


def test_merged_copies_travel_less() -> None:
    """With every token's copies merged per rank the exchange of experts inside a node shrinks, the more the fewer ranks there are; between two
    nodes less than two of eight copies of a token leave for either."""
    inside = [_part_of_exchange("qwen3-30b-a3b", ep, merges=True) for ep in (2, 4, 8)]
    assert 0 < inside[0] < inside[1] < inside[2] < 1
    assert _part_of_exchange("qwen3-30b-a3b", 16, merges=True) == pytest.approx(2 / 8, rel=0.1)


def test_on_a_fast_network_what_a_node_passes_on_takes_longest() -> None:
    """However fast the network, devices of a node have to hand on what came for the others."""
    merging = replace(job(model=load_model("qwen3-30b-a3b")), profile=with_dispatcher(find_profile(), merges=True))
    nodes = merging.cluster.groups[0]
    fast = replace(merging, cluster=replace(merging.cluster, groups=(replace(nodes, node=replace(nodes.node, inter_Bps=1e15)),)))  # fmt: skip
    across, inside = (seconds(timed(fast, f"dp=16,zero=1,ep={ep}"), "ep") for ep in (16, 8))
    ranks = [called(merging.model.moe, ep) for ep in (16, 8) if merging.model.moe is not None]
    assert across / inside == pytest.approx(ranks[0] / ranks[1], rel=0.02)


def test_groups_of_experts_lessen_what_goes_between_nodes() -> None:
    """Tokens of DeepSeek-V3 call on four of eight groups, so that fewer copies go to eight nodes than where any experts may be chosen;
    where every copy travels for itself, groups change nothing."""
    cluster, shape = load_cluster("dgx-h100:8"), load_model("deepseek-v3")
    assert shape.moe is not None
    free = replace(shape, moe=replace(shape.moe, groups=1, top_groups=1))
    for merges, part in ((True, called(shape.moe, 8) / called(free.moe or shape.moe, 8)), (False, 1.0)):
        profile = with_dispatcher(find_profile(), merges=merges)
        times = (timed(job(profile, model=model, cluster=cluster), "dp=64,zero=3,ep=64") for model in (shape, free))
        limited, any_ = (seconds(each, "ep") for each in times)
        assert limited / any_ == pytest.approx(part, rel=0.01)


def test_half_of_the_ways_in_fp8_is_a_quarter_of_the_bytes_less() -> None:
    """Tokens and gradients go to experts in a byte and its scale, and come back in two."""
    assert _part_of_exchange("qwen3-30b-a3b", 16, fp8=True) == pytest.approx((1 + 1 / 32 + 2) / 4, rel=0.01)


def test_experts_of_one_micro_batch_hide_behind_another() -> None:
    """Not those of the only one, and the more there are the less is in the open; interleaved stages run more of them alone."""
    model = job(model=load_model("qwen3-30b-a3b"), workload=Workload(seq_len=4096, global_batch=256))
    hiding = replace(model, profile=with_dispatcher(find_profile(), overlaps=True))

    def part(layout: str) -> float:
        return seconds(timed(hiding, layout), "ep") / seconds(timed(model, layout), "ep")

    alone, some, many = (part(f"dp=16,zero=1,ep=8,mbs={mbs}") for mbs in (16, 4, 1))
    assert alone == 1.0
    assert 1.0 > some > many > 1 / 16
    assert part("pp=2,vp=4,dp=8,zero=1,ep=8,mbs=4") > part("pp=2,dp=8,zero=1,ep=8,mbs=4")


def test_chunks_in_turn_give_gradients_time_to_travel() -> None:
    """Where chunks of a stage take turns of pp micro-batches, what one has made is reduced while the others run theirs, so that less is in the
    open; units of FSDP wait for it, and a chunk alone has its own backward and no more."""

    nodes = load_cluster("dgx-h100:16").groups[0]
    slow = replace(load_cluster("dgx-h100:16"), groups=(replace(nodes, node=replace(nodes.node, inter_Bps=5e10)),))

    def part(name: str, chunks: int) -> float:
        times = timed(job(find_profile(name), cluster=slow), f"tp=2,pp=4,vp={chunks},dp=16,zero=1,mbs=1")
        shown, hidden = (float(where["dp"][0]) for where in (times.exposed, times.hidden))
        return shown / (shown + hidden)

    one_chunk, two = (part("nemo", chunks) for chunks in (1, 2))
    assert one_chunk > 1.1 * two
    assert part("fsdp2", 2) >= part("fsdp2", 1)


def test_a_head_of_masked_tokens_costs_their_share() -> None:
    """Where 15 of 100 tokens are picked out before the head, the loss moves 15 of 100 bytes, and the head's product takes less."""
    picks = find_profile("mlperf-bert")
    assert picks.head_tokens == 0.15
    assert {find_profile(name).head_tokens for name in frameworks() if name != picks.name} == {1.0}
    few, every = (timed(job(replace(picks, head_tokens=part))) for part in (0.15, 1.0))
    assert seconds(few, "loss") == pytest.approx(0.15 * seconds(every, "loss"), rel=1e-6)
    head = load_model("llama-3.1-8b").vocab * 4096.0 * 4 * 4096 * 6  # four micro-batches; FLOP of all three products
    assert seconds(every, "matmul") - seconds(few, "matmul") > 0.85 * head / 989e12
    assert seconds(few, "attention") == seconds(every, "attention")


def test_weights_sent_rank_by_rank_pay_a_start_up_for_each() -> None:
    """Broadcasting updated weights once per rank of the ZeRO group costs as many start-ups as there are ranks, where gathering
    them costs one; the bytes are the same."""
    ranks, whole = (replace(find_profile("internevo"), updates=how) for how in ("ranks", "whole"))
    for size in (4, 16):
        each, once = (
            seconds(timed(job(own), f"dp_replicate={16 // size},dp_shard={size},zero=1"), "dp")
            for own in (ranks, whole)
        )
        link = group_columns(cluster_tiers(job().cluster), np.array([size]), np.array([1]))
        assert each - once == pytest.approx(
            (size - 1) * float((link.latency_s + link.fill_s + link.walk_s)[0]), rel=1e-3
        )


@pytest.mark.parametrize("op", get_args(Op))
def test_rings_through_nodes_walk(op: Op) -> None:
    """What NCCL only has as a ring pays for the walk, and for flags at most half the rate or what NCCL says of them; an exchange and a send do not."""
    many, two = (links(load_cluster(f"dgx-h100:{nodes}"), one(dp_shard=8 * nodes)) for nodes in (64, 2))
    found, link = many.seconds(op, "shards"), many.columns["shards"]
    if op == "all_reduce":
        return  # has trees: the next test
    if op not in ("all_gather", "reduce_scatter", "broadcast", "reduce"):
        assert (float(found.walk[0]), float(found.otherwise[0])) == (0.0, 0.0)
        return
    assert float(found.walk[0]) == float(link.walk_s[0]) > float(two.seconds(op, "shards").walk[0]) > 0.0
    moved = 511 / 512
    assert float((found.per_byte + found.otherwise)[0]) == pytest.approx(moved / min(float(link.ring_Bps[0]) / 2, 35e9))


def all_reduce_seconds(nodes: int, payload: float) -> float:
    """Seconds of one all-reduce over all devices of so many nodes of 8, without what fills the links."""
    found = links(load_cluster(f"dgx-h100:{nodes}"), one(dp_replicate=8 * nodes)).seconds("all_reduce", "replicas")
    return float((found.latency + payload * found.per_byte + np.minimum(found.walk, payload * found.otherwise))[0])


def test_an_all_reduce_goes_up_a_tree_where_that_is_sooner() -> None:
    """Doubling the nodes doubles a walk around all of them and adds two steps to a tree, there and back: small messages grow by these, and large
    ones stay on the ring, whose rate is higher."""
    steps = [all_reduce_seconds(2 * nodes, 8.0) - all_reduce_seconds(nodes, 8.0) for nodes in (16, 256, 4096)]
    assert steps == pytest.approx([2 * 5.0e-6] * 3, rel=1e-2)
    many = links(load_cluster("dgx-h100:64"), one(dp_replicate=512))
    ring = many.columns["replicas"]
    around = 2.0 * float(ring.latency_s[0]) + 4e9 * float(many.seconds("all_reduce", "replicas").per_byte[0])
    assert all_reduce_seconds(64, 4e9) == pytest.approx(around, rel=1e-9)
    assert all_reduce_seconds(1, 8.0) == pytest.approx(2.0 * group_bandwidth(cluster_tiers(load_cluster("dgx-h100")), 8).latency_s, rel=1e-3)  # fmt: skip


def test_racks_are_taken_in_equal_parts() -> None:
    """A job on 64 trays of racks of 18 meets domains of 16 trays, one on 36 whole racks, one on 7 its own 7."""
    spans = [load_cluster(f"dgx-gb200-nvl72-tray:{nodes}").groups[0].node.fast_domain for nodes in (64, 36, 7, 19)]
    assert spans == [64, 72, 72, 72]


@pytest.mark.parametrize(
    ("words", "profile"),
    [("NeMo 24.07", "nemo"), ("torchtitan", "fsdp2-compiled"), ("Megatron-LM 2021", "megatron-2021"), ("Megatron-DeepSpeed", "megatron-deepspeed"), ("composer+torch FSDP1 (llm-foundry)", "fsdp1"), ("composer 0.12.1 + torch FSDP1", "fsdp1-autocast"), ("composer 0.14.0", "fsdp1"), ("cobol", None)],
)  # fmt: skip
def test_frameworks_are_recognised_by_their_own_words(words: str, profile: str | None) -> None:
    """The most special row of the catalogue that a framework's name contains decides; unknown ones have no profile."""
    found = profile_of(words)
    assert (found.name if found else None) == profile
    assert profile is None or profile in frameworks()


def families(machine: str = "dgx-h100", model: str = "llama-3.1-8b", **work: Any) -> set[str]:
    """Which kernels run the attention of a model's layers."""
    asked = job(cluster=load_cluster(machine), model=load_model(model))
    asked = replace(asked, workload=replace(asked.workload, **work))
    return {attention_family(asked, asked.cluster.slowest.gpu, kind) for kind in layer_sequence(asked.model)}


def test_torch_calls_cudnn_for_attention_where_it_prefers_it() -> None:
    """On Hopper in half precision; in fp32, on Ampere and under a window attention is FlashAttention-2's."""
    assert families() == {"cudnn"}
    assert families("dgx-a100-80gb") == families(precision="fp32") == {"attention"}
    assert families(model="gemma-2-9b") == {"cudnn", "attention"}


@pytest.mark.parametrize(("attention", "kernel", "family"), [("flash2", "flash", "attention"), ("cudnn",) * 3])
def test_attention_of_an_h100_is_what_one_took(attention: Any, kernel: str, family: str) -> None:
    """Causal rows of 512 to 4k tokens, both passes together, but for what a long run leaves of short ones: short rows have less of the rate
    of long ones, and in backward much less."""
    card, model = gpu_by_id("h100-sxm-80gb"), load_model("llama-3.1-8b")
    (kind,) = set(layer_sequence(model))
    kept, found = kept_share(f"{family}_forward_share", card), []
    for row in kernels("h100-second", "attention"):
        if (row["kernel"], row["head_dim"]) != (kernel, 128):
            continue
        length = row["length"]
        asked = job(
            with_habits(find_profile(), attention=attention), workload=Workload(seq_len=length, global_batch=64)
        )
        tokens = 64 * length / asked.cluster.world
        FLOP = 3.5 * attention_FLOP(model, kind, length) * tokens * model.layers
        planned = FLOP / (kept * seconds(timed(asked), "attention"))
        measured = 3.5e12 / (1 / row["forward_TFLOPs"] + 2.5 / row["backward_TFLOPs"])
        assert planned == pytest.approx(measured, rel=0.1)
        found.append(length)
    assert {512, 1024, 2048, 4096} <= set(found)


@pytest.mark.parametrize("model", ["mistral-7b-v0.1", "gemma-2-9b"])
def test_attention_counts_the_keys_that_a_query_meets(model: str) -> None:
    """The i-th query meets min(i, window) keys: counted one by one, to half a key in the mean; so a wider window is never cheaper, and one as
    wide as the sequence is none. Queries that look both ways meet the whole window."""
    shape, length = load_model(model), 512
    kinds = {kind.mixer: kind for kind in layer_sequence(shape)}
    each = 4.0 * shape.heads * shape.head_dim
    found = []
    for window in (1, 2, 64, 256, 511, 512, 4096):
        met = sum(min(number, window) for number in range(1, length + 1)) / length
        found.append(attention_FLOP(replace(shape, window=window), kinds["sliding"], length) / each)
        assert found[-1] == pytest.approx(met, abs=0.51)
        both = attention_FLOP(replace(shape, window=window, kind="encoder"), kinds["sliding"], length) / each
        assert both == min(window, length)
    assert found == sorted(found)
    assert found[-1] == found[-2] == length / 2


@pytest.mark.parametrize("cluster", ["dgx-b200", "dgx-b300"])
def test_flash_attention_2_has_no_kernel_of_its_own_for_blackwell(cluster: str) -> None:
    """It runs there at about H100's rate, where cuDNN is three times as fast; a graphics card of that architecture keeps its share."""
    there = replace(job(), cluster=load_cluster(f"{cluster}:2"))
    hopper, flash, cudnn = (
        seconds(timed(replace(each, profile=with_habits(find_profile(), attention=name))), "attention")
        for each, name in ((job(), "flash2"), (there, "flash2"), (there, "cudnn"))
    )
    assert 0.8 < flash / hopper < 1.25
    assert flash > 3 * cudnn
    card, server = (gpu_by_id(name) for name in ("rtx-5090", "b200-sxm-180gb"))
    assert card.arch == server.arch
    assert share("attention_forward_share", card) > 2 * share("attention_forward_share", server)


@pytest.mark.parametrize(
    ("machine", "kernel"), [("dgx-h100", "attention"), ("dgx-b200", "cudnn"), ("dgx-b300", "cudnn")]
)
def test_torch_of_any_year_calls_cudnn_on_blackwell(machine: str, kernel: str) -> None:
    """A torch loop of the years before Hopper was among them, too; who names FlashAttention-2 gets it."""
    asked = job(cluster=load_cluster(machine))
    gpu, (kind, *_) = asked.cluster.slowest.gpu, layer_sequence(asked.model)
    called = [
        attention_family(replace(asked, profile=with_habits(asked.profile, attention=name)), gpu, kind)
        for name in ("flash", "flash2")
    ]
    assert called == [kernel, "attention"]


def test_a_ring_calls_flash_attention_itself() -> None:
    """Heads that are exchanged meet cuDNN, keys that travel do not."""
    ring, exchange = (
        seconds(timed(job(), f"dp=2,cp=8,context_parallel={way}"), "attention") for way in ("ring", "all-to-all")
    )
    assert ring > 1.5 * exchange


def test_attention_is_planned_at_what_a_card_runs_it_at() -> None:
    """Rates of cuDNN on an H100 at full length are those that were measured in short runs, within an eighth."""
    gpu = gpu_by_id("h100-sxm-80gb")
    for passes in ("forward", "backward"):
        measured = max(row[f"{passes}_TFLOPs"] for row in kernels("h100", "attention") if row["head_dim"] == 128)
        assert share(f"cudnn_{passes}_share", gpu) * (gpu.bf16_FLOPs or 0.0) == pytest.approx(measured * 1e12, rel=0.12)


def test_an_odd_vocabulary_slows_its_head_where_nobody_pads_it() -> None:
    """A head of 50,257 entries takes longer than one of 50,304, whose rows fill whole lines, by what such products lose; frameworks
    that pad it make the same products of both, and CPUs do not mind."""
    gpt2 = load_model("gpt2")
    odd, even = (replace(gpt2, vocab=entries) for entries in (50257, 50304))

    def products(profile: Profile, **changes: Any) -> list[float]:
        works = (job(profile, model=model, **changes) for model in (odd, even))
        return [seconds(timed(work, "dp=16,mbs=4"), "matmul") for work in works]

    own, fused = find_profile(), find_profile("megatron-core")
    slow, fast = products(own)
    assert slow > 1.3 * fast
    assert len(set(products(fused))) == 1
    on_cpus = products(own, cluster=load_cluster("cpu:16"))
    assert on_cpus[0] == pytest.approx(on_cpus[1], rel=1e-3)


def test_a_host_that_falls_behind_catches_up_while_head_and_loss_run() -> None:
    """Of a small model that waits for its host, a longer head and loss take from that wait what they add to the step, where kernels say so,
    until nothing is left of it in backward; where they do not, the wait stays what it was."""
    gpt2, own = load_model("gpt2"), find_profile()
    layerwise = replace(own, kernels=replace(own.kernels, catches_up=False))

    def waits(profile: Profile, vocab: int) -> tuple[float, float]:
        found = timed(job(profile, model=replace(gpt2, vocab=vocab)), "dp=16,mbs=1")
        return seconds(found, "host"), float(found.step[0]) / 1e9

    (none, step), (some, longer), (less, _) = (waits(own, 64 * entries) for entries in (1, 100, 700))
    assert none > some > less > 0.0
    assert longer == pytest.approx(step, rel=0.05)
    assert waits(layerwise, 64)[0] == pytest.approx(waits(layerwise, 44800)[0])


def test_a_small_model_waits_for_gathers_and_reductions_of_its_units() -> None:
    """Under ZeRO-3 a host gathers each layer twice and reduces it once, and both ends, which are one unit, once each; a host that is ahead
    of large layers costs nothing, and frameworks whose hosts nobody measured pay for none."""
    asked, each = (
        job(model=load_model("gpt2"), workload=Workload(seq_len=64, global_batch=16)),
        find_profile().kernels.unit_s,
    )
    waits = {zero: seconds(timed(asked, f"dp=16,zero={zero},mbs=1"), "host") for zero in (1, 3)}
    calls = 3 * 12 + 2
    shown = float(timed(asked, "dp=16,zero=3,mbs=1").exposed["dp"][0]) / 1e9
    assert waits[3] - waits[1] + shown == pytest.approx(calls * each, rel=1e-3)
    assert seconds(timed(job(), "dp=16,zero=3,mbs=4"), "host") == 0.0
    others = replace(asked, profile=replace(asked.profile, kernels=replace(asked.profile.kernels, unit_s=0.0)))
    assert seconds(timed(others, "dp=16,zero=3,mbs=1"), "host") == waits[1]


def test_hooks_of_modules_run_again_with_their_layer() -> None:
    """DeepSpeed's ZeRO-3 calls the hooks of a layer's modules whenever it runs: under full recompute the host of a small model gathers each
    layer once more than without, and that of fully_shard does not."""
    gpt2 = load_model("gpt2")

    def more(name: str) -> float:
        asked = job(find_profile(name), model=gpt2, workload=Workload(seq_len=64, global_batch=16))
        full, none = (timed(asked, f"dp=16,zero=3,mbs=1,recompute={word}") for word in ("full", "none"))
        return (float(full.step[0]) - float(none.step[0])) / 1e9

    deepspeed, plain = (find_profile(name).kernels for name in ("deepspeed-zero3", "fsdp2"))
    launches = plain.forward * plain.host_s * 12
    assert more("fsdp2") == pytest.approx(launches, rel=0.05)
    assert more("deepspeed-zero3") == pytest.approx(launches + 12 * deepspeed.unit_s, rel=0.05)


def test_stages_that_take_turns_wait_for_every_message() -> None:
    """Of two stages each sends and receives one message of every micro-batch: in DeepSpeed's engine one waits for the other, and what the last
    stage received and the first one sent and received is gathered."""
    turns = find_profile("megatron-deepspeed")
    each, both = (
        timed(job(profile, workload=Workload(global_batch=64)), "pp=2,tp=8,mbs=1,zero=0")
        for profile in (replace(turns, sends="shards"), turns)
    )
    assert seconds(both, "pp") == pytest.approx(2.0 * seconds(each, "pp"))
    assert seconds(both, "tp") > seconds(each, "tp")
    assert seconds(both, "matmul") == seconds(each, "matmul")


def test_recipes_that_are_measured_keep_what_they_say() -> None:
    """Every performance recipe of Megatron-Bridge takes Transformer Engine's loss, which holds no logits in fp32; NeMo of 2024 has Megatron's."""
    bridge, nemo = (profile_of(words) for words in ("Megatron-Bridge, NeMo container 25.11", "NeMo 24.07"))
    assert bridge is not None
    assert nemo is not None
    assert (bridge.name, bridge.keeping.forward_float32) == ("nemo", 0)
    assert (nemo.name, nemo.keeping.forward_float32) == ("nemo", 1)


def test_named_modules_run_again_and_nothing_else() -> None:
    """Selective recompute of the feed-forward part repeats its products, which are most of a layer's, and leaves attention alone; by its own
    name attention alone runs again. NVIDIA/Megatron-LM: megatron/core/transformer/transformer_config.py, recompute_modules."""
    layout, shape = "tp=4,dp=4,zero=1,recompute=selective", job().model
    mlp, attention = (
        timed(job(with_habits(find_profile("nemo"), redoes=(name,))), layout) for name in ("mlp", "core_attn")
    )
    plain = timed(job(find_profile("nemo")), "tp=4,dp=4,zero=1")
    assert int(mlp.again["attention"][0]) == int(attention.again["matmul"][0]) == 0
    heads = 2 * shape.hidden * (shape.heads + shape.kv_heads) * shape.head_dim
    ffn = 3 * shape.hidden * shape.ffn_hidden
    forward = seconds(plain, "matmul") / 3  # with the head, whose products do not run again
    assert 0.8 < mlp.again["matmul"][0] / 1e9 / (forward * ffn / (ffn + heads)) < 1.0
