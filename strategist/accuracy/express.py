"""From a row to a question the model can answer: job, layout, and what was measured."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial

from strategist.accuracy.classes import (
    adapters_of,
    adapters_stated,
    context_parallel_of,
    offload_of,
    optimizer_of,
    precision_of,
    schedule_of,
    switch_of,
    with_classes,
)
from strategist.accuracy.machines import Machines, cluster_of, launches_wait, machines_of
from strategist.accuracy.shapes import shape_of
from strategist.accuracy.table import Run, Unexpressed, needed, number, whole
from strategist.errors import ImpossibleError
from strategist.facts.adapters import DEFAULT_RANK, as_trained, usual_targets, with_adapters
from strategist.facts.gpus import gpu_by_id
from strategist.facts.job import Job
from strategist.facts.model import ModelShape
from strategist.facts.profile import (
    ENGINE,
    ZERO_3,
    Attention,
    Hides,
    Profile,
    Unpacks,
    UpdateKernels,
    as_made,
    deepspeed_profile,
    find_profile,
    merges_copies,
    profile_of,
    with_dispatcher,
    with_frozen_base,
    with_fused_loss,
    with_habits,
    with_narrow_weights,
    with_states,
)
from strategist.facts.workload import Precision, Workload
from strategist.memory.saved import REDONE
from strategist.records import dataclass, replace
from strategist.space.candidates import code
from strategist.timing.estimate import model_FLOP
from strategist.timing.rates import peak_FLOPs, without_rate

PLAIN = "hf-trainer"
"""The profile of a plain loop over modules of torch."""
_REPLICATED = {"megatron-2022": "nemo-2022-replicas"}
"""The profile of frameworks whose optimizer is another one where nothing is shared out."""
RECOMPUTE = ("none", "selective", "full")
_ZERO_GROUP = re.compile(r"(?:zero1=|FSDP group )(\d+)")
"""How many ranks share the state, where that is less than all."""
_SCALED = (("rowwise_with_gw_hp", 3.0), ("rowwise", 8.0))
"""Recipes of fp8 with a scale for every row, and the bytes that each element of a matrix' input moves to be cast: read and
written once where the weight gradient stays in half precision, else also turned and cast again. Source: pytorch/ao:
torchao/testing/training/roofline_utils.py, get_tensor_memory_traffic_ovhd_s."""
_DECODES = re.compile(r"(\d+) (?:tokens )?to the decoder")
_LONGEST = re.compile(r"longest example (\d+) tokens")
_ENGINE = re.compile(r"\bTE\b|\bTransformer Engine\b")
"""Transformer Engine's modules, named among the techniques of a run or beside its framework."""
_FUSED_UPDATE = re.compile(r"\bfused adamw?\b", re.IGNORECASE)
_BEFORE_WIDENED = re.compile(r"\btorch (?:1\.\d+|2\.[0-2])\b", re.IGNORECASE)
"""Releases of torch from before peft 0.11 of May 2024, which makes adapters in float32."""
_TRAINER = re.compile(r"\btrainer\b|sfttrainer|\btrl\b|llama-?factory", re.IGNORECASE)
"""Hugging Face's trainer and those that are made of it."""
_OWN_UPDATE = re.compile(r"fused|apex|cpu|paged|8[ _-]?bit|backward|adafactor|_hf\b")
"""Updates other than torch's of all weights at once: one kernel's, another library's, the host's, that of weight after weight."""
_FUSES = re.compile(r"\bfused kernels\b", re.IGNORECASE)
"""Norms, rotation, activation and loss in one kernel each, whoever's they are."""
_HIDES_EXPERTS = re.compile(
    r"\boverlap_moe_expert_parallel_comm\b|\bep[ -](?:comm(?:unication)? )?overlap\b", re.IGNORECASE
)
"""Traffic of experts behind passes over other micro-batches (NVIDIA/Megatron-LM: overlap_moe_expert_parallel_comm)."""
_NARROW_BASE = re.compile(r"\bfp8[ _-](?:weights|params?|model_init)\b", re.IGNORECASE)
"""Frozen weights that rest in fp8 (NVIDIA/NeMo: fp8_params)."""
_DISPATCHES_FP8 = re.compile(r"\bfp8[ -]dispatch", re.IGNORECASE)
_LIBRARY = re.compile(r"\bhf\b|hugging ?face|transformers|\bgemini\b", re.IGNORECASE)
_OWN_MODULES = re.compile(r"xtuner|habana", re.IGNORECASE)
"""Runs of Transformers' modules as they are, ColossalAI's Gemini's among them (hpcaitech/ColossalAI v0.2.0: examples/language/gpt/model_zoo.py); XTuner and
Optimum Habana put kernels of their own in their place (InternLM/xtuner: xtuner/model/modules/dispatch; huggingface/optimum-habana:
optimum/habana/transformers/modeling_utils.py). Nobody counted what the modules of a plain loop move."""
_MEGATRON = re.compile(r"megatron|neox|largescale")
"""Frameworks whose own kernels DeepSpeed drives."""
_WRITTEN_OUT = re.compile(r"^(?:eager|math|standard|naive|vanilla|native|none|no|from scratch|hand-?written)\b")
"""Attention that writes its scores, by the names that torch, Transformers, papers and those who wrote it themselves have for it."""
_FUSES_FROM = 8.0
"""The first compute capability on which fused attention is what runs where nobody speaks of it: FlashAttention never came to Volta, its second
version not to Turing (Tri Dao in Dao-AILab/flash-attention issues 148 and 562; torch's own copy asks for sm80 too: pytorch/pytorch:
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_flash_attention_hardware_support)."""
_PURE = re.compile(r"\b(?:pure|true)\b")
"""Weights, gradients and moments in the format of the products, as torch's model.to(torch.bfloat16) leaves them."""
_NARROW_MOMENTS = re.compile(r"\b(?:bf16|bfloat16)\b[^;]*\bmoments?\b", re.IGNORECASE)
"""Both moments of Adam in 16 bits beside wider masters (NVIDIA/Megatron-LM: --use-precision-aware-optimizer with --exp-avg-dtype and
--exp-avg-sq-dtype bf16; DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.3)."""
_MOMENTS, _OF_16_BITS = 8.0, 4.0
"""Bytes of both, per weight."""
_ONE_KERNEL = re.compile(
    r"\bflash|\bsdpa\b|\bfmha\b|\bcudnn\b|\bmemory[ -]efficient\b|\bfused (?:multi-?head )?attention\b"
)
"""Attention in one kernel, by the names that torch, apex, cuDNN and xFormers have for it; a "fused softmax" writes its scores."""
_FLASH_1 = re.compile(r"flash[ -]?att(?:entio)?n[ -]?(?:v ?)?1\b|\bfa-?1\b|\bflash ?v?1\b")
_CUDNN = re.compile(r"\bcudnn|flash[ -]?att(?:entio)?n[ -]?(?:v ?)?3\b|\bfa-?3\b")
"""Attention of cuDNN, and FlashAttention-3, which is as fast (Shah et al. 2024, arXiv 2407.08608, figures 5 and 6)."""
_CHUNKED = re.compile(
    r"chunked (?:output |cross|loss)|cewithchunked|\bliger|linear ?cross ?entropy|cut cross", re.IGNORECASE
)
"""A loss that never has the logits of all tokens at once, by the names that torchtune, Liger and others have for it (Hsu et al. 2024,
arXiv 2410.10989; pytorch/torchtune: torchtune/modules/loss/ce_chunked_output_loss.py)."""
_ENDS = 2
"""How many stages may hold no layer, but the embedding and the loss, which Megatron counts as one each where it is told to (NVIDIA/Megatron-LM:
--account-for-embedding-in-pipeline-split, --account-for-loss-in-pipeline-split)."""
_STAGE_LAYERS = re.compile(r'"layers": ?\[([\d, ]+)\]')
_STAGE_FIRSTS = re.compile(r'"ckpt_layers": ?\[([\d, ]+)\]')
"""How many layers of every stage are computed again."""
_SOME_LAYERS = re.compile(r"^(?:full on )?(\d+) (?:of \d+ )?layers\b")
"""How many layers are computed again where there are no stages."""
ADAPTERS = 0.002
"""Share of the weights in adapters of rank 16 on the matrices of attention (Hu et al. 2021, arXiv 2106.09685, table 4:
0.01 to 0.2 %); too little to matter for time or memory."""
ADAPTS_ALL = "adapters on every matrix"
"""How a row says where its adapters stand, if not beside queries and values alone."""
TASKS = re.compile(r"^$|pre-?train|sft|fine-?tun|continued|classif|^full$|lora")
"""What is trained whole, or beside frozen weights."""
SCORED = ("A", "B", "")
_RATES = {
    "tokens_per_s_per_gpu": "tokens",
    "tokens_per_s": "tokens",
    "sequences_per_s": "sequences",
    "steps_per_s": "steps",
}
"""Columns that say how fast a run is, and what they count."""
_APART = 3.0
"""Two figures of one row that are so many times each other are not of one run, or not in these units."""
_MANY = 1e4
"""From here on a number of times is said in three digits."""
_TOO_MUCH = 10.0
"""A peak of so many times the device's memory is in another unit."""
_TOO_LITTLE = 1e-4
"""One of so little of it, too: some megabytes, where a context alone takes hundreds."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run's owner saw: seconds per step, peak bytes and what they count, and whether it ran out of memory."""

    step_s: float | None
    peak_bytes: float | None
    mem_kind: str
    is_oom: bool


@dataclass(frozen=True, slots=True)
class Case:
    """One run as a question: the job, the layout as numbers of the candidate columns, what was measured, and whether the row
    says what is computed again (`layout` holds the framework's default otherwise)."""

    id: str
    job: Job
    layout: tuple[tuple[str, int], ...]
    measured: Measured
    states_recompute: bool = True


def express(run: Run) -> Case:
    """The question of one row. Raises Unexpressed with the fact that is missing or the technique that has no model."""
    _scored(run)
    run = with_classes(run)
    _modelled(run)
    machines = machines_of(run)
    profile = _profile(run, machines)
    shape = as_made(shape_of(run), profile)
    run = _of_images(run, shape) if shape.is_convolutional else run
    profile = replace(
        profile,
        launches_wait=launches_wait(run, machines),
        reduce_bucket=0,  # no row states it
        holds_passed=_holds_passed(run),
    )
    layout = _layout(run, profile, machines)
    batch = layout["micro_batch"] * layout["accumulation"] * layout["dp_replicate"] * layout["dp_shard"]
    measured = _measured(run, machines, batch)
    method = adapters_of(run)
    shape = _adapted(shape, run, profile, measured)
    known = tuple(name for name, _ in profile.optimizer_state_bytes)
    work = Workload(
        seq_len=_seq_len(run),
        global_batch=batch,
        precision=_precision(run),
        optimizer=optimizer_of(run, known),
        target_len=_target_len(run, shape, layout),
    )
    is_lora = method == "lora" and shape.adapters is None
    trainable = ADAPTERS if is_lora else 1.0
    cluster = cluster_of(machines)
    profile = _frozen(run, profile) if is_lora else profile
    job = Job(
        cluster=cluster,
        model=shape,
        workload=work,
        profile=profile,
        trainable=trainable,
        adapters=is_lora,
        split=_split(run, shape, layout["pp"]),
        recompute_layers=_firsts(run, layout),
    )
    job = job if shape.adapters is None else as_trained(job)
    _legal_sizes(shape, layout)
    if lacking := without_rate(cluster, work.precision):
        raise Unexpressed(f"{lacking.name} does not multiply in {work.precision}")
    _possible(job, measured, 1.0 if run.get("recompute_class", "") == "full" else 0.0)
    return Case(run["id"], job, tuple(layout.items()), measured, _states_recompute(run))


def _holds_passed(run: Run) -> bool:
    """Whether FSDP1 holds layers with frozen weights under a trainer of Hugging Face, whose checkpoints begin with leaves of their own: FSDP1 hooks what
    comes into such a layer, and a hooked leaf stays, with its gradient, until backward is over (pytorch/pytorch: torch/distributed/fsdp/_runtime_utils.py,
    _register_post_backward_reshard_only_hook; torch/utils/checkpoint.py, CheckpointFunction; huggingface/transformers: modeling_utils.py,
    gradient_checkpointing_enable, use_reentrant). A leaf was counted anew with torch 2.13; other loops checkpoint without them."""
    sharding, is_sharded = run.get("zero_stage_or_fsdp", "").lower(), run.get("zero_class", "") in ("2", "3", "hsdp")
    is_first = "fsdp" in sharding and not re.search(
        r"fsdp ?v?2|fully_shard", sharding + run.get("framework", "").lower()
    )
    return bool(adapters_of(run)) and is_sharded and is_first and bool(_TRAINER.search(run.get("framework", "")))


def _frozen(run: Run, profile: Profile) -> Profile:
    """The profile for adapters, as a row says where they stand and how what they stand beside rests."""
    detail = run.get("sharding_detail", "")
    is_narrow = precision_of(run) in ("fp8", "fp4") and _NARROW_BASE.search(detail)
    return with_frozen_base(profile, adapts_all=ADAPTS_ALL in detail, stored="float8" if is_narrow else "")


def _possible(job: Job, measured: Measured, again: float) -> None:
    """Raises Unexpressed for a step in which the devices would have had to multiply faster than their peak in its format:
    its batch, its devices, its format or its time are not what the row says. Frozen weights have no gradient of their own; `again` is the
    part of forward that is computed twice."""
    gpu, precision = job.cluster.slowest.gpu, job.workload.precision
    formats = ("bf16", "fp16") if precision in ("bf16", "fp16") else (precision,)
    peak = max(peak_FLOPs(gpu, word) or 0.0 for word in formats)
    useful = model_FLOP(job) * (2.0 + job.trainable + again) / 3.0
    ratio = useful / (measured.step_s * peak * job.cluster.world) if measured.step_s and peak else 0.0
    if ratio > 1.0:
        raise Unexpressed(
            f"the row contradicts itself: its step takes {ratio:{'.1f' if ratio < _MANY else '.3g'}} times the devices' peak in {precision}"
        )


def _adapted(shape: ModelShape, run: Run, profile: Profile, measured: Measured) -> ModelShape:
    """The model with the adapters that its run states; without rank and matrices a share of weights stands for those beside weights that are not
    quantised. Raises Unexpressed for quantised layers without plain attention, and for LitGPT's where nothing but memory was measured, which
    hold up to four bytes more of every matrix' input than weights and adapters account for (its config hub, rows litgpthub-0007 to 0045 of the
    memory table)."""
    method, stated = adapters_of(run), adapters_stated(run)
    if not method or (method == "lora" and stated is None):
        return shape
    if method == "qlora" and measured.step_s is None and profile.keeping.adapter_bytes:
        raise Unexpressed("task qlora: what is kept beside weights of four bits has no model")
    rank, targets = stated or (DEFAULT_RANK, usual_targets(shape))
    try:
        return with_adapters(shape, method, rank, targets)
    except ImpossibleError as problem:
        if method == "lora":
            return shape
        raise Unexpressed(f"task qlora: {problem.message}") from None


def _scored(run: Run) -> None:
    quality = run.get("quality", "")
    if quality.upper() not in SCORED:
        raise Unexpressed(f"quality {quality}: read off a chart, contradictory, or without a layout")


def _modelled(run: Run) -> None:
    """Techniques without a model."""
    task = run.get("task", "")
    if not TASKS.search(task.lower()):
        raise Unexpressed(f"task {task}: what is trained has no model")
    if run.get("recompute_class", "") == "partial" and not _halves(run) and not _some_layers(run):
        is_by_operation = "recomputed_ops" in run.get("sharding_detail", "")
        named = "which operations are computed again is not stated"
        raise Unexpressed(named if is_by_operation else "which layers are computed again is not stated")


def _profile(run: Run, machines: Machines) -> Profile:
    said = f"{run.get('framework', '')} {run.get('precision', '')}"
    arch = gpu_by_id(machines.gpu).arch
    called = partial(profile_of, arch=arch, is_flash=_calls_flash(run))
    profile = called(said) or called(run.get("source", "")) or _likely_profile(run)
    profile = _with_moments(run, _under_deepspeed(run, _replicated(run, profile)))
    detail = run.get("sharding_detail", "")
    has_engine = _has_engine(run, profile)
    fused = "fused" if has_engine or _FUSES.search(detail) else None
    compiles = switch_of(run, "compile", "xla")
    loses_its_own = compiles is False and profile.kernels.name == "compiled"
    kernels = "compiled" if compiles else fused or ("eager-composite" if loses_its_own else None)
    profile = with_fused_loss(profile) if _FUSES.search(detail) else profile
    hides: tuple[Hides, ...] = ("tensor",) if "async" in detail.lower() else ()
    overlaps, fp8 = (bool(words.search(detail)) for words in (_HIDES_EXPERTS, _DISPATCHES_FP8))
    profile = with_dispatcher(profile, merges=merges_copies(detail), fp8=fp8, overlaps=overlaps)
    kernels_of_update = _update_kernels(run, machines, profile.update_kernels)
    copies = profile.update_copies * _takes_all_at_once(run, machines)
    profile = replace(profile, update_kernels=kernels_of_update, update_copies=copies)
    if not _LIBRARY.search(said) or _OWN_MODULES.search(said):
        profile = replace(profile, kernels=replace(profile.kernels, modules=""))
    if _BEFORE_WIDENED.search(said):
        profile = replace(profile, kernels=replace(profile.kernels, adapts="apart"))
    return with_habits(
        profile,
        kernels=kernels,
        attention=_attention(run, profile, machines, has_engine=has_engine),
        hides=hides,
        redoes=_redoes(run),
        cast_bytes=next((moved for word, moved in _SCALED if word in run.get("precision", "")), None),
        light="half-blocks" if _halves(run) else None,
        unpacks=_unpacks(run),
    )


def _update_kernels(run: Run, machines: Machines, own: UpdateKernels) -> UpdateKernels:
    """How the update is cut, where a row says so, else as the framework's `own`, which DeepSpeed cuts around one kernel in any case; LAMB's stages by its name. Optimum Habana updates in one kernel (use_fused_adam of its GaudiConfig)."""
    said, detail = run.get("optimizer", "").lower(), run.get("sharding_detail", "")
    if "lamb" in said:
        return "stages"
    is_one = "fused" in said or _FUSED_UPDATE.search(detail) or machines.gpu.startswith("gaudi")
    return "one" if is_one and own != "partitions" else own


def _takes_all_at_once(run: Run, machines: Machines) -> bool:
    """Whether torch's AdamW takes all weights at once, as it does on GPUs unless it is told to be one kernel or to go from weight to weight, and
    nobody's other update has its name."""
    said = run.get("optimizer", "").lower() or "adamw"
    is_other = _OWN_UPDATE.search(said) or _FUSED_UPDATE.search(run.get("sharding_detail", ""))
    return said.startswith("adam") and not is_other and gpu_by_id(machines.gpu).vendor in ("NVIDIA", "AMD")


def _replicated(run: Run, profile: Profile) -> Profile:
    """The profile where every rank updates all weights in half precision with another optimizer than those that share them out."""
    is_whole = run.get("zero_class", "") == "0" and precision_of(run) == "bf16"
    return find_profile(_REPLICATED[profile.name]) if is_whole and profile.name in _REPLICATED else profile


def _with_moments(run: Run, profile: Profile) -> Profile:
    """The profile where a run names moments of 16 bits; the rest of its state is as wide as ever."""
    state = dict(profile.optimizer_state_bytes)["adamw"]
    is_narrow = state >= _MOMENTS and _NARROW_MOMENTS.search(run.get("optimizer", ""))
    return with_states(profile, "adamw", state - _MOMENTS + _OF_16_BITS, 0.0) if is_narrow else profile


def _unpacks(run: Run) -> Unpacks:
    """Whose weights of four bits a run's are. Raises Unexpressed where AutoGPTQ's, brought back, are kept until backward."""
    if "gptq" not in run.get("precision", "").lower():
        return "nf4"
    if run.get("recompute_class", "") != "full":
        raise Unexpressed("GPTQ without recomputation: what is kept of unpacked weights has no model")
    return "gptq"


def _under_deepspeed(run: Run, profile: Profile) -> Profile:
    """The profile where DeepSpeed drives modules of torch or a trainer of Hugging Face or Lightning: its ZeRO-3 of them, or the formats of its
    engine; else a plain loop's, with weights as narrow as the products where the run calls that pure."""
    if _fetches_modules(run, profile):
        return find_profile(ZERO_3)
    if profile.name != PLAIN:
        return profile
    said, stage = run.get("framework", "").lower(), run.get("zero_class", "")
    if "deepspeed" in said and not _is_cut(run) and stage in ("0", "1", "2"):
        return find_profile(deepspeed_profile(ENGINE, precision_of(run), int(stage), alone=True))
    if _PURE.search(run.get("precision", "").lower()):
        stored = profile.formats_for(precision_of(run)).compute
        return with_narrow_weights(profile, stored, reduce=stored)
    return profile


def _has_engine(run: Run, profile: Profile) -> bool:
    """Whether layers are Transformer Engine's modules; compilers of JAX fuse around its attention."""
    beside = run.get("framework", "") if profile.kernels.name != "compiled" else ""
    return any(_ENGINE.search(words) for words in (run.get("sharding_detail", ""), beside))


def _fetches_modules(run: Run, profile: Profile) -> bool:
    """Whether DeepSpeed's ZeRO-3 drives modules of torch: its engine or a trainer of Hugging Face names it, or its name of the stage, and no
    Megatron cuts matrices or stages."""
    said, text = run.get("framework", "").lower(), run.get("zero_stage_or_fsdp", "").lower()
    is_named = "deepspeed" in said or (profile.name == PLAIN and "fsdp" not in said + text and "zero" in text)
    return is_named and run.get("zero_class", "") == "3" and not _is_cut(run) and not _MEGATRON.search(said)


def _is_cut(run: Run) -> bool:
    """Whether matrices or stages are cut."""
    return any((whole(run, name) or 1) > 1 for name in ("tp", "pp"))


def _likely_profile(run: Run) -> Profile:
    """What stands for a framework nobody has described, by its techniques: cut matrices or pipelines are Megatron's
    business, sharded weights fully_shard's, the rest a plain loop's."""
    is_cut = any((whole(run, name) or 1) > 1 for name in ("tp", "pp", "cp", "ep"))
    is_sharded = run.get("zero_class", "") in ("2", "3", "hsdp")
    return find_profile("megatron-core" if is_cut else "fsdp2" if is_sharded else PLAIN)


def _attention(run: Run, profile: Profile, machines: Machines, *, has_engine: bool) -> Attention | None:
    """Whether scores are written out, or which kernel is called, where the row says; the profile knows better than "flash". Silence about cards
    that are too old for such kernels means that scores are written out."""
    said, detail = run.get("attention_impl", "").lower(), run.get("sharding_detail", "")
    if _writes_scores(said):
        return "unfused"
    if _FLASH_1.search(said):
        return "flash1"
    if "flash-attn 2" in said:
        return "flash2"
    if _CUDNN.search(said) or (has_engine and not any(words in detail for words in ("SDPA", "FlexAttn"))):
        return "cudnn"
    gpu = gpu_by_id(machines.gpu)
    if not said and gpu.vendor == "NVIDIA" and float(gpu.compute_capability or _FUSES_FROM) < _FUSES_FROM:
        return "unfused"
    return "flash" if _ONE_KERNEL.search(said) and profile.attention == "unfused" else None


def _writes_scores(said: str) -> bool:
    return any(words in said for words in ("unfused", "no flash", "not flash")) or bool(_WRITTEN_OUT.search(said))


def _calls_flash(run: Run) -> bool:
    """Whether a row says that flash attention is called."""
    said = run.get("attention_impl", "").lower()
    return "flash" in said and not _writes_scores(said)


def _precision(run: Run) -> Precision:
    if "layers bf16" in run.get("precision", ""):
        raise Unexpressed("a part of the layers in bf16 beside the others has no model")
    return precision_of(run)


def _layout(run: Run, profile: Profile, machines: Machines) -> dict[str, int]:
    """The candidate's columns."""
    world = machines.nodes * machines.gpus_per_node
    if world > 1 and not any(run.get(name, "") for name in ("dp", "tp", "pp")):
        raise Unexpressed("dp, tp and pp are not stated")
    tp, pp, cp, vp = (whole(run, name) or 1 for name in ("tp", "pp", "cp", "vp"))
    if world % (tp * pp * cp):
        raise Unexpressed(f"tp {tp} x pp {pp} x cp {cp} does not divide {world} GPUs")
    dp = world // (tp * pp * cp)
    stated = whole(run, "dp")
    if stated not in (None, dp):
        raise Unexpressed(
            f"the row contradicts itself: dp {stated} x tp {tp} x pp {pp} x cp {cp} is not {world} GPUs, which dp {dp} would be"
        )
    zero, replicate = _zero(run, profile, dp, machines)
    micro, accumulation = _batch(run, dp)
    ep = whole(run, "ep") or 1
    return {
        "pp": pp, "dp_replicate": replicate, "dp_shard": dp // replicate, "cp": cp, "tp": tp,
        "ep": ep, "etp": tp if ep > 1 and dp * cp * tp % (ep * tp) == 0 and ep * tp <= dp * cp else 1,
        "zero": zero, "virtual_stages": vp, "micro_batch": micro, "accumulation": accumulation,
        "schedule": code("schedule", schedule_of(run, pp, vp)),
        "sequence_parallel": _sequence_parallel(run, profile, tp),
        "context_parallel": code("context_parallel", context_parallel_of(run, cp)),
        "recompute": _recompute(run, profile), "offload": _offload(run, machines), "tiling": 1, "stage_split": 0,
        **_loss(run, tp * pp),
    }  # fmt: skip


def _loss(run: Run, cuts: int) -> dict[str, int]:
    """The column of a chunked loss where the row names one and every rank has the whole head; none otherwise."""
    is_chunked = cuts == 1 and _CHUNKED.search(run.get("sharding_detail", ""))
    return {"loss": code("loss", "chunked")} if is_chunked else {}


def _offload(run: Run, machines: Machines) -> int:
    """The candidate's word for it. Raises Unexpressed for drives that nobody described."""
    said = offload_of(run)
    if said == "nvme" and cluster_of(machines).slowest.nvme_read_Bps is None:
        raise Unexpressed("offload to drives whose rates are not known")
    return code("offload", said)


def _split(run: Run, shape: ModelShape, pp: int) -> tuple[int, ...]:
    """Layers of every stage, where the row lists as many as it has stages and they add up ("layers":[13,11])."""
    split = _stated(run, _STAGE_LAYERS)
    return split if len(split) == pp and sum(split) == shape.layers else ()


def _stated(run: Run, numbers: re.Pattern[str]) -> tuple[int, ...]:
    """A number for every stage, where the row lists them."""
    found = numbers.search(run.get("sharding_detail", ""))
    return tuple(int(number) for number in found[1].split(",")) if found else ()


def _some_layers(run: Run) -> tuple[int, ...]:
    """How many layers of every stage are computed again, as a list says or, of a model that no stages cut, its policy."""
    alone = _SOME_LAYERS.search(run.get("recompute", "").lower()) if (whole(run, "pp") or 1) == 1 else None
    return _stated(run, _STAGE_FIRSTS) or ((int(alone[1]),) if alone else ())


def _firsts(run: Run, layout: Mapping[str, int]) -> tuple[int, ...]:
    """How many layers of every stage full recompute runs again, where that is a part of them. Raises Unexpressed for a row that says
    it of another number of stages than it has."""
    if run.get("recompute_class", "") != "partial" or _halves(run):
        return ()
    firsts = _some_layers(run)
    if len(firsts) != layout["pp"]:
        raise Unexpressed(
            f"layers that are computed again are stated of {len(firsts)} stages, not of pp {layout['pp']}"
        )
    return firsts


def _zero(run: Run, profile: Profile, dp: int, machines: Machines) -> tuple[int, int]:
    """(stage, replicas of the sharding group)."""
    said = run.get("zero_class", "")
    text = run.get("zero_stage_or_fsdp", "")
    if said == "hsdp":
        inside = min(dp, machines.gpus_per_node)
        return 3, max(1, dp // inside)
    stage = int(said) if said in ("0", "1", "2", "3") else profile.zero
    if dp * (whole(run, "cp") or 1) == 1:
        return stage if profile.name == ZERO_3 else 0, 1  # hooks of modules run beside one device, too
    if text and not said:
        raise Unexpressed(f"zero_stage_or_fsdp {text}: neither replicas nor a stage of ZeRO that has a model")
    group = _ZERO_GROUP.search(run.get("sharding_detail", ""))
    if stage and group and dp % int(group[1]) == 0:
        return stage, dp // int(group[1])
    return stage, dp if stage == 0 else 1


def _seq_len(run: Run) -> int:
    """Tokens of a sequence; where only memory was measured and lengths vary, those of the longest, which it belongs to."""
    longest = _LONGEST.search(run.get("notes", ""))
    return int(longest[1]) if longest and not run.get("seq_len", "") and not _has_time(run) else needed(run, "seq_len")


def _target_len(run: Run, shape: ModelShape, layout: Mapping[str, int]) -> int | None:
    """Tokens of a decoder's sequence, where the run states that they are other than those of the encoder in front of it. Raises Unexpressed
    where nothing says what such a run does: cut into stages, over ranks of one sequence, or with experts."""
    said = _DECODES.search(run.get("notes", ""))
    targets = int(said[1]) if said else whole(run, "target_len")
    if not shape.enc_layers or targets in (None, whole(run, "seq_len")):
        return None
    lengths = f"targets of {targets} tokens behind inputs of {run.get('seq_len', '')}"
    cut = next((axis for axis in ("pp", "cp") if layout[axis] > 1), "")
    if cut:
        raise Unexpressed(f"{lengths} under {cut} {layout[cut]}")
    if shape.moe is not None:
        raise Unexpressed(f"{lengths} with experts")
    return targets


def _of_images(run: Run, shape: ModelShape) -> Run:
    """The row of a network of convolutions, where an image is a sequence of one token; some write the side of images for a length."""
    if whole(run, "seq_len") not in (None, 1, dict(shape.extra)["image"]):
        raise Unexpressed(f"sequences of {run['seq_len']}: {shape.name} takes images")
    return {**run, "seq_len": "1"}


def _has_time(run: Run) -> bool:
    return any(run.get(name, "") for name in ("step_time_s", *_RATES))


def _batch(run: Run, dp: int) -> tuple[int, int]:
    """(micro_batch, accumulation). Where only memory was measured, one micro-batch stands for a batch nobody stated."""
    micro, batch, rounds = (whole(run, name) for name in ("micro_batch_seqs", "global_batch_seqs", "grad_accum"))
    if micro is None and (batch is None or rounds is None):
        raise Unexpressed("micro_batch_seqs is not stated")
    if micro is None:
        micro = max(1, (batch or 1) // (dp * (rounds or 1)))
    if batch is None:
        if rounds is None and _has_time(run):
            raise Unexpressed("global_batch_seqs and grad_accum are not stated")
        return micro, rounds or 1
    if batch % (micro * dp) and rounds is None:
        raise Unexpressed(f"global_batch_seqs {batch} is no multiple of micro_batch_seqs {micro} x dp {dp}")
    due = -(-batch // (micro * dp))
    if rounds not in (None, due):
        raise Unexpressed(
            f"the row contradicts itself: micro_batch_seqs {micro} x dp {dp} x grad_accum {rounds} is not global_batch_seqs {batch}"
        )
    return micro, due


def _sequence_parallel(run: Run, profile: Profile, tp: int) -> int:
    said = switch_of(run, "sequence_parallel")
    return 0 if tp == 1 else int(profile.sequence_parallel if said is None else said)


def _states_recompute(run: Run) -> bool:
    """Whether the row names a policy, and not only that nothing but the framework's default was asked for."""
    return run.get("recompute_class", "") in RECOMPUTE and "default" not in run.get("recompute", "")


def _redoes(run: Run) -> tuple[str, ...]:
    """Modules that selective recompute runs again, where the row lists them ("selective:layernorm,moe_act")."""
    kind, _, modules = run.get("recompute", "").replace(" ", "").partition(":")
    return tuple(name for name in modules.split(",") if name in REDONE) if kind == "selective" else ()


def _halves(run: Run) -> bool:
    """Whether every second layer is computed again, whole."""
    return "every other layer" in run.get("recompute", "")


def _recompute(run: Run, profile: Profile) -> int:
    said = run.get("recompute_class", "")
    if said == "partial":
        said = "selective" if _halves(run) else "full"
    return code("recompute", said if said in RECOMPUTE else profile.recompute)


def _measured(run: Run, machines: Machines, batch: int) -> Measured:
    """Step time as printed, else from a rate, of a batch of whole micro-batches. Raises Unexpressed for a row without any figure, and for one
    whose figures contradict each other."""
    step, by_rate = number(run, "step_time_s"), _step_by_rate(run, machines, batch)
    stated = whole(run, "global_batch_seqs") or batch
    if step is not None and stated < batch:  # the last micro-batch is smaller, as Composer and Trainer allow
        step *= batch / stated
    is_oom = switch_of(run, "oom") is True
    if step is not None and by_rate is not None and not 1 / _APART < step / by_rate[0] < _APART:
        raise Unexpressed(
            f"the row contradicts itself: {by_rate[1]} means a step {_APART:.0f} times as long as step_time_s says, or as short"
        )
    if step is None and by_rate is not None:
        step = by_rate[0]
    if step is not None and is_oom:
        raise Unexpressed(f"the row contradicts itself: it went out of memory, and its step takes {step:.3g} s")
    peak = number(run, "peak_mem_gb")
    if step is None and peak is None and not is_oom:
        has_rate = any(number(run, name) for name in ("tflops_per_gpu", "mfu") if run.get(name, ""))
        more = ": FLOP rates follow too many conventions to be compared" if has_rate else ""
        raise Unexpressed(f"neither a step time, a token rate nor a memory figure is stated{more}")
    _possible_peak(peak, machines)
    return Measured(step, None if peak is None else peak * 1e9, run.get("mem_kind", ""), is_oom)


def _step_by_rate(run: Run, machines: Machines, batch: int) -> tuple[float, str] | None:
    """Seconds of a step by the first rate that the row states, and its column. Raises Unexpressed for a rate that no number of seconds comes to."""
    for name, steps in _RATES.items():
        rate = number(run, name)
        if rate is not None:
            sequences, tokens = batch, batch * needed(run, "seq_len")
            share = machines.counted_gpus if name == "tokens_per_s_per_gpu" else 1.0
            step = {"steps": 1, "sequences": sequences, "tokens": tokens}[steps] / (rate * share)
            if not 0.0 < step < math.inf:
                raise Unexpressed(f"the row contradicts itself: {name} means a step of {step:.0f} s")
            return step, name
    return None


def _possible_peak(peak_GB: float | None, machines: Machines) -> None:
    """Raises Unexpressed for a figure in terabytes, and for one in megabytes: published ones that count more than the device has, counted on paper, stay below twice its memory."""
    memory = cluster_of(machines).smallest.memory_bytes / 1e9
    if peak_GB is not None and peak_GB < _TOO_LITTLE * memory:
        raise Unexpressed(
            f"the row contradicts itself: its peak is less than {_TOO_LITTLE:g} of the device's memory, as one in TB would be"
        )
    if peak_GB is not None and peak_GB > _TOO_MUCH * memory:
        raise Unexpressed(
            f"the row contradicts itself: its peak is more than {_TOO_MUCH:.0f} times the device's memory, as one in MB would be"
        )


def _legal_sizes(shape: ModelShape, layout: dict[str, int]) -> None:
    """What no arithmetic can express, whatever ran."""
    layers = shape.depth
    cut = next((axis for axis in ("tp", "cp", "pp", "ep") if layout[axis] > 1), "") if shape.is_convolutional else ""
    if cut:
        raise Unexpressed(f"{cut} {layout[cut]} of blocks of convolutions")
    if layout["pp"] * layout["virtual_stages"] > layers + _ENDS:
        raise Unexpressed(f"{layers} layers for pp {layout['pp']} x vp {layout['virtual_stages']}")
    ranks = layout["dp_shard"] * layout["dp_replicate"] * layout["cp"] * layout["tp"]
    if layout["ep"] > 1 and shape.moe is None:
        raise Unexpressed(f"ep {layout['ep']} of a model without experts")
    if layout["ep"] > 1 and ranks % (layout["ep"] * layout["etp"]):
        raise Unexpressed(f"ep {layout['ep']} on {ranks} ranks of a stage")
