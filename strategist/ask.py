"""From what somebody gave, on the command line or in Python, to a complete question; every gap becomes an assumption."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from strategist.document.plan import Hint, Objective, Policy, Request
from strategist.errors import ImpossibleError, InputError, shown
from strategist.facts.calibration import Factor, Near, shipped_factors
from strategist.facts.clusters import cluster_from_flags, cpu_cluster, resolve_cluster
from strategist.facts.gpus import LIBRARIES, backend_of
from strategist.facts.hardware import Cluster, with_gpus
from strategist.facts.job import Job
from strategist.facts.model import ModelShape
from strategist.facts.models import load_model, load_model_config
from strategist.facts.parameters import count
from strategist.facts.profile import AUTO, as_made, engine_of, find_profile
from strategist.facts.resolved import Assumption, Resolved
from strategist.facts.sizes import SizedModel, is_size, shape_for_size, with_positions
from strategist.facts.workload import MAX_BATCH, Precision, Workload
from strategist.planner.search import Frontend, Question
from strategist.records import dataclass, field, replace
from strategist.space.grammar import DEPTHS, Pin, parse_also, parse_forbids, parse_pins
from strategist.units import counted, format_count

DEFAULT_SEQ_LEN, DEFAULT_GLOBAL_BATCH, CPU_GLOBAL_BATCH = 4096, 256, 32
ASSUMED_GPU, ASSUMED_GPUS = "h100-sxm-80gb", 8
DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""One of these exists wherever a driver for GPUs runs (Linux, WSL, ROCm); without them nothing is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What was said, typed. None means: not said. `said` keeps the words as they were written, for the record."""

    model_size: str | None = None
    model: Any = None
    model_config: str | None = None
    hardware: Any = None
    gpu: str | None = None
    gpus_per_node: int | None = None
    nodes: int | None = None
    gpu_memory_bytes: int | None = None
    intra_Bps: float | None = None
    inter_Bps: float | None = None
    seq_len: int | None = None
    target_len: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    grad_accum: int | None = None
    tokens: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    method: str | None = None
    lora_rank: int | None = None
    lora_targets: str | None = None
    expert_imbalance: float | None = None
    headroom: float = 0.05
    price_per_gpu_hour: float | None = None
    policy: Policy = "hf"
    objective: Objective = "time"
    frontend: str = "any"
    purpose: str | None = None
    framework: str | None = None
    calibration: str | None = None
    uncalibrated: bool = False
    strategy: str | None = None
    pin: str | None = None
    forbid: str | None = None
    also: str | None = None
    rules: tuple[str, ...] = ()
    time_budget: float | None = None
    said: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A complete question, how it was asked, what had to be assumed, and what was noticed on the way;
    and how many seconds the answer may take."""

    question: Question
    request: Request
    assumptions: tuple[Assumption, ...] = field(default=())
    notes: tuple[Hint, ...] = field(default=())
    time_budget: float | None = None


def complete(given: Given) -> Asked:
    """Fill every gap. Raises InputError for what is missing, conflicting or unknown, ImpossibleError for devices that
    torch cannot drive."""
    given = _with_purpose(given)
    model, from_model = _model(given)
    _is_a_stack(model)
    machines = machines_of(given)
    _can_meet(machines.cluster)
    work, from_work = _workload(given, model, machines.cluster)
    model, from_method = _trained(given, model)
    pins = tuple(_pins(given))
    forbids = parse_forbids(given.forbid) if given.forbid is not None else ()
    also = parse_also(given.also) if given.also is not None else ()
    _no_contradiction(pins, forbids, also)
    profile = find_profile(given.framework or "strategist")
    job = Job(
        cluster=machines.cluster,
        model=as_made(model, profile),
        workload=work,
        profile=profile,
        headroom=given.headroom,
        frontend=given.frontend,
    )
    frontend = frontend_named(given.frontend)
    job = _as_trained(job) if model.adapters is not None or model.frozen else job
    if frontend is not None and given.framework is None:
        job = frontend.as_run(job)
    job, from_runs = _calibrated(job, given)
    question = Question(
        job=job,
        pins=pins,
        forbids=forbids,
        also=also,
        objective=given.objective,
        rule_folders=given.rules,
        frontend=frontend,
    )
    return Asked(
        question=question,
        request=_request(given, pins, forbids, also),
        assumptions=(
            *machines.assumptions,
            *from_model,
            *from_work,
            *from_method,
            *from_runs,
            *_inexact(pins),
            *_as_run(given, job),
        ),
        notes=(*(_as_hint(text) for text in (*machines.notes, *model.notes)), *_partly(model)),
        time_budget=given.time_budget,
    )


def _can_meet(cluster: Cluster) -> None:
    """Raise ImpossibleError UNSUPPORTED_DEVICE for devices that torch cannot drive, and for those of several vendors: NCCL, RCCL and gloo are
    libraries of their own, and a group of ranks has one of them."""
    for group in cluster.groups:
        backend_of(group.node.gpu)
    first, *others = (group.node.gpu for group in cluster.groups)
    other = next((gpu for gpu in others if gpu.vendor != first.vendor), None)
    if other is not None:
        raise ImpossibleError(
            "UNSUPPORTED_DEVICE",
            f"{first.title} speaks through {LIBRARIES[first.vendor]} and {other.title} through {LIBRARIES[other.vendor]}; no collective joins both.",
            flag="--hardware",
            value=f"{first.name}, {other.name}",
            hint="Plan for the nodes of one vendor.",
        )


def _trained(given: Given, model: ModelShape) -> tuple[ModelShape, tuple[Assumption, ...]]:
    """The model with adapters where the method asks for them. Raises InputError CONFLICT for words about adapters that nobody asked
    for, and what `with_adapters` raises."""
    adapters = {"--lora-rank": given.lora_rank, "--lora-targets": given.lora_targets}
    if given.method in ("lora", "qlora"):
        from strategist.facts.adapters import asked_adapters  # few train adapters

        return asked_adapters(model, given.method, given.lora_rank, given.lora_targets)
    for flag, value in adapters.items():
        if value is not None:
            raise InputError(
                "CONFLICT", f"{flag} is about adapters, and all weights are trained.", flag=flag, value=value, hint="Add --method lora or qlora."
            )  # fmt: skip
    return model, ()


def _as_trained(job: Job) -> Job:
    from strategist.facts.adapters import as_trained

    return as_trained(job)


def _partly(model: ModelShape) -> Iterator[Hint]:
    """What is said of a live module some of whose weights are frozen: which ones is not counted."""
    if model.frozen:
        total = count(model).total
        sentence = f"{total - model.frozen:,} of {total:,} weights are trained (requires_grad): gradients, optimizer state and products for gradients are theirs, as an even share of every layer; activations and backward are those of gradients that reach the first layer, which is too much where it and all before it are frozen."
        yield Hint(code="W_FROZEN", sentence=sentence)


WORTH_SAYING = 0.005
"""Factors nearer to one are in the times and in the Plan, and not among the assumptions."""


def _calibrated(job: Job, given: Given) -> tuple[Job, tuple[Assumption, ...]]:
    """The job under its calibration, and which factors that are. Raises as `calibrated_by`."""
    own = calibrated_by(given)
    job = replace(job, factors=own.factors, near=own.near)
    moved = job.on_parts
    if not moved and given.calibration is None:
        return job, ()
    words = ", ".join(f"{part} x{value:.3f}" for part, value in sorted(moved.items()) if abs(value - 1) >= WORTH_SAYING)
    near = (
        f"every part within {WORTH_SAYING:.1%} of the formulas" if moved else "no factor for this device or framework"
    )
    value = f"{words or near}, from {own.runs}"
    return job, (Assumption(what="calibration", value=value, flag="--calibration", basis="derived"),)


class Calibrated(NamedTuple):
    """Factors, how far one's own runs lie from predictions under them, and the runs that they rest on."""

    factors: tuple[Factor, ...]
    near: tuple[Near, ...] = ()
    runs: str = "none"


def calibrated_by(given: Given) -> Calibrated:
    """The calibration of a question, one's own or what ships. Raises what `load_calibration` raises, and
    InputError CONFLICT for a calibration that is not to be used."""
    if given.uncalibrated and given.calibration is not None:
        raise InputError(
            "CONFLICT", "--uncalibrated asks for the formulas alone, and --calibration for factors on them.", flag="--calibration", value=given.calibration, hint="Leave one of them out."
        )  # fmt: skip
    if given.uncalibrated:
        return Calibrated(())
    if given.calibration is None:
        return Calibrated(shipped_factors(), runs="published runs")
    from strategist.document.load import load_calibration

    found = load_calibration(given.calibration)
    return Calibrated(found.factors, found.near, f"{found.runs} runs")


def _with_purpose(given: Given) -> Given:
    """A question whose front end rules choose limits no layout, and says what the job is for. Raises InputError CONFLICT for a purpose
    that decides nothing."""
    if given.frontend == AUTO:
        return replace(given, frontend="any", purpose=given.purpose or "unsure")
    if given.purpose is None:
        return given
    raise InputError(
        "CONFLICT",
        f"--purpose {given.purpose} chooses a front end, and --frontend {given.frontend} leaves none to choose.",
        flag="--purpose",
        value=given.purpose,
        hint="Write --frontend auto, or leave --purpose out.",
    )


def frontend_named(name: str) -> Frontend | None:
    """The front end of that name where it is a target of `emit`; None for those that rules alone know."""
    if name in ("any", "strategist"):
        return None
    from strategist.frontend import Target  # every target's module: few questions name one

    return Target(name)


def _inexact(pins: tuple[Pin, ...]) -> tuple[Assumption, ...]:
    """What is given up by those who ask for compressed gradients."""
    words = [pin.word for pin in pins if pin.key == "compression" and pin.value]
    if not words:
        return ()
    from strategist.facts.compression import loss_of_exactness  # few ask for it

    return tuple(loss_of_exactness(word) for word in words)


def _as_run(given: Given, job: Job) -> tuple[Assumption, ...]:
    """Whose buffers and kernels are counted for a front end that is not ours."""
    if engine_of(given.frontend) in ("any", "strategist"):
        return ()
    limits = f"{given.frontend} limits the layouts"
    value = f"{limits}; bytes and seconds are those of {job.profile.title}"
    return (Assumption(what="framework", value=value, flag="--frontend", basis="assumed", source=job.profile.source),)


def _request(given: Given, pins: tuple[Pin, ...], forbids: tuple[str, ...], also: tuple[str, ...]) -> Request:
    return Request(
        given=given.said,
        policy=given.policy,
        objective=given.objective,
        headroom=given.headroom,
        pins=tuple((pin.key, pin.word) for pin in pins),
        forbids=forbids,
        also=also,
        frontend=given.frontend,
        purpose=given.purpose or "",
        price_per_gpu_hour=given.price_per_gpu_hour,
    )


def _model(given: Given) -> tuple[ModelShape, tuple[Assumption, ...]]:
    ways = {"--model-size": given.model_size, "--model": given.model, "--model-config": given.model_config}
    named = [flag for flag, value in ways.items() if value is not None]
    if not named:
        raise InputError(
            "MISSING",
            "No model was named.",
            flag="--model-size",
            hint="Give --model-size 7B, --model NAME or --model-config config.json.",
        )
    if len(named) > 1:
        raise InputError(
            "CONFLICT",
            f"{' and '.join(named)} each name a model.",
            flag=named[0],
            value=ways[named[0]],
            hint="Choose one.",
        )
    if given.model_size is not None:
        return _sized(given.model_size, given.seq_len)
    if given.model_config is not None:
        return load_model_config(given.model_config), ()
    if isinstance(given.model, str) and is_size(given.model):
        return _sized(given.model, given.seq_len)
    model = load_model(given.model)
    return model, tuple(_alike(model))


def _alike(model: ModelShape) -> Iterator[Assumption]:
    """That a variant of a model has the shape of the one that the catalogue has."""
    if model.called:
        value = f"{shown(model.called)} has the shape of {model.name}"
        yield Assumption(what="model", value=value, flag="--model-config FILE", basis="assumed", source=model.source)


def _is_a_stack(model: ModelShape) -> None:
    """Raise InputError UNKNOWN_ARCH for a model whose memory and time nobody here can predict: no layers of a width."""
    if not model.hidden or not model.layers:
        raise InputError(
            "UNKNOWN_ARCH",
            f"{model.name} ({model.kind}) is no stack of equally wide layers, and memory and time are known for stacks and for ResNets alone.",
            flag="--model",
            value=model.name,
            hint="Pass a module whose blocks are alike, such as a transformer, or a ResNet."
            if model.kind == "module"
            else "Its facts can be looked up with `strategist catalog models`; for a plan name a transformer or a state-space model.",
        )


def _sized(text: str, seq_len: int | None) -> tuple[ModelShape, tuple[Assumption, ...]]:
    """A model of a size, with as many positions as sequences need: nobody said how many it has."""
    sized = shape_for_size(text, "--model-size")
    shape = sized.shape if seq_len is None else with_positions(sized.shape, seq_len)
    total = count(shape).total
    how = "a real model" if sized.how == "nickname" else "a shape interpolated between real models"
    if shape.learned_positions > sized.shape.learned_positions:
        how = f"with {shape.learned_positions:,} learned positions, but for these a real model,"
    value = f"{text} = {shape.name}, {how} of {total:,} parameters{_spread(sized)}"
    return shape, (
        Assumption(
            what="model",
            value=value,
            flag="--model NAME or --model-config FILE",
            basis="assumed",
            source=shape.source,
        ),
    )


def _spread(sized: SizedModel) -> str:
    spread = sized.spread
    if spread is None:
        return "; no real model of that size is in the catalogue"
    low, high = (format_count(n) for n in spread.parameters)
    widths = spread.layers_x_hidden
    return f"; {spread.models} real shapes of that size count {low} to {high}, with layers x width {widths[0]:,} to {widths[1]:,}: activations differ by up to a factor {widths[1] / widths[0]:.1f}"


def _as_hint(text: str) -> Hint:
    """A remark of the readers of models and machines; warnings begin with their code and a colon."""
    code, _, sentence = text.partition(": ")
    return Hint(code=code, sentence=sentence) if code.startswith("W_") else Hint(code="note", sentence=text)


def machines_of(given: Given) -> Resolved:
    """The machines that were named, or assumed. Raises InputError CONFLICT when they are described twice."""
    shaped = {name: getattr(given, name) for name in ("gpu_memory_bytes", "intra_Bps", "inter_Bps")}
    described = given.gpu is not None or any(value is not None for value in shaped.values())
    if given.hardware is not None:
        if described:
            raise InputError(
                "CONFLICT",
                "--hardware already describes the machines; --gpu, --gpu-memory, --intra-bw and --inter-bw do so too.",
                flag="--hardware",
                hint="Use one way.",
            )
        return _named_machines(given)
    if given.gpu is not None:
        return cluster_from_flags(given.gpu, given.gpus_per_node, given.nodes, **shaped)
    return _assumed_machines(given, shaped, described)


def _named_machines(given: Given) -> Resolved:
    """Machines by name, file or probe; only `local` may be given another number of ranks."""
    is_local = isinstance(given.hardware, str) and given.hardware.strip(" ").lower() == "local"
    if (given.gpus_per_node is None or is_local) and given.nodes is None:
        resolved = resolve_cluster(given.hardware)
        return resolved if given.gpus_per_node is None else _with_ranks(resolved, given.gpus_per_node)
    flag = "--nodes" if given.nodes is not None else "--gpus-per-node"
    raise InputError(
        "CONFLICT",
        f"--hardware already says how many machines there are, and {flag} does too.",
        flag=flag,
        hint="Write --hardware NODE:COUNT, or use --gpu --gpus-per-node --nodes.",
    )


def _with_ranks(resolved: Resolved, ranks: int) -> Resolved:
    """This machine with fewer GPUs, or with any number of CPU ranks."""
    node = resolved.cluster.groups[0].node
    if node.gpu.vendor == "CPU":
        again = cpu_cluster(ranks, memory_bytes=node.ram_bytes)
        shared = _sharing_cores(again.cluster, os.cpu_count() or 1)
        return replace(again, cluster=replace(shared, origin="probed"))
    if ranks > node.gpus:
        raise InputError(
            "TOO_LARGE",
            f"This machine has {node.gpus} GPUs.",
            flag="--gpus-per-node",
            value=ranks,
            hint=f"At most {node.gpus}.",
        )
    smaller = with_gpus(node, ranks)
    group = replace(resolved.cluster.groups[0], node=smaller)
    return replace(resolved, cluster=replace(resolved.cluster, groups=(group,)))


def _sharing_cores(cluster: Cluster, cores: int) -> Cluster:
    """CPU ranks of a machine with fewer cores than ranks: each gets its part of the cores and of the memory's rate."""
    group = cluster.groups[0]
    share = min(1.0, cores / group.node.gpus)
    device = group.node.gpu
    slower = replace(
        device,
        fp32_FLOPs=(device.fp32_FLOPs or 0.0) * share,
        bf16_FLOPs=(device.bf16_FLOPs or 0.0) * share,
        memory_Bps=device.memory_Bps * share,
        basis="measured" if share == 1.0 else "derived",
    )
    return replace(cluster, groups=(replace(group, node=replace(group.node, gpu=slower)),))


def _assumed_machines(given: Given, shaped: Mapping[str, Any], described: bool) -> Resolved:
    """This machine's own GPUs when it has some; otherwise a named assumption."""
    own = None if described else _own_gpus(given)
    if own is not None:
        return own
    gpus, nodes = given.gpus_per_node or ASSUMED_GPUS, given.nodes or 1
    resolved = cluster_from_flags(ASSUMED_GPU, gpus, nodes, **shaped)
    words = f"{nodes} node{'s' * (nodes > 1)} x {gpus} x {resolved.cluster.groups[0].node.gpu.title}"
    said = Assumption(what="hardware", value=words, flag="--hardware NODE:COUNT, or --gpu --gpus-per-node --nodes")
    cluster = replace(resolved.cluster, origin="assumed")
    return Resolved(cluster=cluster, assumptions=(said, *resolved.assumptions), notes=resolved.notes)


def _own_gpus(given: Given) -> Resolved | None:
    """This machine's GPUs, as many and as often as asked for; None when it has none."""
    if not any(os.path.exists(path) for path in DEVICE_FILES):
        return None
    from strategist.facts.local import has_gpu

    if not has_gpu():
        return None
    resolved = resolve_cluster("local")
    one = resolved if given.gpus_per_node is None else _with_ranks(resolved, given.gpus_per_node)
    if given.nodes is None:
        return one
    group = replace(one.cluster.groups[0], count=given.nodes)
    return replace(one, cluster=replace(one.cluster, groups=(group,)))


def _workload(given: Given, shape: ModelShape, cluster: Cluster) -> tuple[Workload, tuple[Assumption, ...]]:
    seq_len = _length(given, shape)
    on_cpu = cluster.smallest.vendor == "CPU"
    batch = given.global_batch or _usual_batch(
        given, cluster.world, CPU_GLOBAL_BATCH if on_cpu else DEFAULT_GLOBAL_BATCH
    )
    precision: Any = given.precision or _usual_precision(cluster)
    optimizer: Any = given.optimizer or "adamw"
    work = Workload(
        seq_len=seq_len,
        global_batch=batch,
        precision=precision,
        optimizer=optimizer,
        tokens=given.tokens,
        expert_imbalance=_imbalance(given, shape),
        target_len=_target_len(given, shape),
    )
    said = {"sequence length": (given.seq_len, seq_len, "--seq-len"), "global batch": (given.global_batch, counted(batch, "sequence"), "--global-batch"), "precision": (given.precision, f"{precision} compute, fp32 state", "--precision"), "optimizer": (given.optimizer, optimizer, "--optimizer")}  # fmt: skip
    if shape.is_convolutional:
        side = dict(shape.extra)["image"]
        said["sequence length"] = (
            given.seq_len,
            f"1: an image of {side} x {side} pixels, channels last",
            "--model-config FILE with image_size",
        )
        said["global batch"] = (given.global_batch, f"{batch} images", "--global-batch")
    assumed = (
        Assumption(what=what, value=str(value), flag=flag) for what, (told, value, flag) in said.items() if told is None
    )
    return work, (*assumed, *_as_long(work, shape), *_balanced(given, shape, cluster))


def _target_len(given: Given, shape: ModelShape) -> int | None:
    """Tokens of a decoder's sequence behind an encoder, as said. Raises InputError CONFLICT where there is no such decoder, and UNSUPPORTED where
    it has experts, whose copies of other tokens nothing counts."""
    flag = "--target-len"
    if given.target_len is None:
        return None
    if not shape.enc_layers:
        raise InputError(
            "CONFLICT",
            f"{flag} is about a decoder behind an encoder, and {shape.name} has one stack of layers.",
            flag=flag,
            value=given.target_len,
            hint="Leave it out, or name an encoder-decoder such as t5-base or bart-large.",
        )
    if shape.moe is not None:
        raise InputError(
            "UNSUPPORTED",
            f"Targets of another length have no model where layers have experts, as those of {shape.name}.",
            flag=flag,
            value=given.target_len,
            hint="Leave it out: targets are then as long as the inputs.",
        )
    return given.target_len


def _as_long(work: Workload, shape: ModelShape) -> Iterator[Assumption]:
    """That targets are as long as inputs, where nobody said otherwise."""
    if shape.enc_layers and work.target_len is None:
        value = f"{work.targets}, as many tokens as the inputs have"
        yield Assumption(what="target length", value=value, flag="--target-len")


def _usual_precision(cluster: Cluster) -> Precision:
    """fp32 on CPUs; else bf16 where all devices multiply in it, fp16 where all do so faster than in fp32, and fp32 where not."""
    gpus = [group.node.gpu for group in cluster.groups]
    if any(gpu.vendor == "CPU" for gpu in gpus):
        return "fp32"
    if all(gpu.bf16_FLOPs for gpu in gpus):
        return "bf16"
    return "fp16" if all((gpu.fp16_FLOPs or 0.0) > (gpu.fp32_FLOPs or 0.0) for gpu in gpus) else "fp32"


def _imbalance(given: Given, shape: ModelShape) -> float:
    """Tokens of the busiest rank's experts over the mean. Raises InputError CONFLICT where a model has no routed experts, and
    TOO_LARGE for more than every token's choice of the same ones: it chooses different experts, so that a rank with one of
    them gets it once at most."""
    ratio = given.expert_imbalance or 1.0
    flag = "--expert-imbalance"
    if ratio > 1.0 and shape.moe is None:
        raise InputError(
            "CONFLICT", f"{flag} is about routed experts, and {shape.name} has none.", flag=flag, value=f"{ratio:g}", hint="Leave it out, or name a mixture of experts."
        )  # fmt: skip
    if shape.moe is not None and ratio > shape.moe.experts / shape.moe.top_k:
        raise InputError(
            "TOO_LARGE",
            f"A token of {shape.name} chooses {shape.moe.top_k} of {shape.moe.experts} experts, so no rank gets more than {shape.moe.experts / shape.moe.top_k:g} times the mean.",
            flag=flag,
            value=ratio,
            hint=f"At most {shape.moe.experts / shape.moe.top_k:g}.",
        )
    return ratio


def _balanced(given: Given, shape: ModelShape, cluster: Cluster) -> tuple[Assumption, ...]:
    """That experts of all ranks get as many tokens, where ranks may share experts and nobody said otherwise."""
    if shape.moe is None or cluster.world == 1 or given.expert_imbalance is not None:
        return ()
    value = "1, routed experts of every rank get as many tokens"
    return (Assumption(what="expert imbalance", value=value, flag="--expert-imbalance"),)


def _length(given: Given, shape: ModelShape) -> int:
    """Tokens of a sequence, as said or as usual. Raises InputError CONFLICT where convolutions take an image as one."""
    if shape.is_convolutional and given.seq_len not in (None, 1):
        image = dict(shape.extra)["image"]
        raise InputError(
            "CONFLICT",
            f"--seq-len is about tokens, and {shape.name} looks at whole images of {image} x {image} pixels: one counts as one sequence of one token.",
            flag="--seq-len",
            value=given.seq_len,
            hint="Leave --seq-len out; --global-batch and --micro-batch count images.",
        )
    return given.seq_len or _usual_length(shape)


def _usual_length(shape: ModelShape) -> int:
    """4096 tokens, or what the model was built for when that is less; images have as many as their patches, to convolutions one is one."""
    if shape.is_convolutional:
        return 1
    if shape.kind == "vit":
        return shape.pos_rows or shape.max_seq
    return min(DEFAULT_SEQ_LEN, shape.max_seq) if shape.max_seq else DEFAULT_SEQ_LEN


def _usual_batch(given: Given, world: int, usual: int) -> int:
    """The usual number of sequences, raised to the next multiple of what the devices take at once so that every layout stays open, of two or four
    times that where it is many, so that micro-batches have divisors; what all devices that no cut is fixed for take where micro-batch and
    accumulation are both fixed. Raises InputError TOO_LARGE beyond any batch."""
    pins = {pin.key: pin.value for pin in _pins(given)}
    cut = math.prod(pins.get(axis, 1) for axis in ("tp", "pp", "cp"))
    each = pins.get("micro_batch", 1) * pins.get("accumulation", 1)
    is_whole = {"micro_batch", "accumulation"} <= set(pins) and world % cut == 0
    unit = world * each
    batch = each * (world // cut) if is_whole else _with_divisors(-(-usual // unit)) * unit
    if batch > MAX_BATCH:
        raise InputError(
            "TOO_LARGE",
            f"{each} sequences of each of {world} devices in a step are more than {MAX_BATCH}, the most of any batch.",
            flag="--global-batch",
            value=each,
            hint="Choose a smaller micro-batch or fewer of them, or say --global-batch.",
        )
    return batch


def _with_divisors(times: int) -> int:
    """As many times or a few more: from five on even, and from 17 on a multiple of four; powers of two stay."""
    step = 4 if times > 16 else 2 if times > 4 else 1
    return -(-times // step) * step


def _pins(given: Given) -> Iterator[Pin]:
    """Fixed choices of --pin or --strategy, --micro-batch and --grad-accum."""
    text, source = (given.pin, "--pin") if given.strategy is None else (given.strategy, "--strategy")
    pins = parse_pins(text, source) if text is not None else ()
    yield from pins
    for key, value, flag in (
        ("micro_batch", given.micro_batch, "--micro-batch"),
        ("accumulation", given.grad_accum, "--grad-accum"),
    ):
        if value is None:
            continue
        if any(pin.key == key for pin in pins):
            raise InputError(
                "CONFLICT", f"{flag} and {source} {key} both fix the {key}.", flag=flag, value=value, hint="Use one."
            )
        yield Pin(key, value, str(value))


def _no_contradiction(pins: tuple[Pin, ...], forbids: tuple[str, ...], also: tuple[str, ...]) -> None:
    for word in also:
        keys = {"tiling": "tiling", "uneven_batch": "accumulation", **dict.fromkeys(DEPTHS, "recompute")}
        key = keys.get(word, "schedule")
        against = [f"--forbid {name}" for name in forbids if name in (word, key)]
        against += [f"--pin {p.key}={p.word}" for p in pins if p.key == key]
        if against:
            raise InputError(
                "CONFLICT",
                f"--also {word} and {against[0]} contradict each other.",
                flag="--also",
                value=word,
                hint="Drop one.",
            )
    for pin in pins:
        if pin.key in forbids and pin.value > (
            0 if pin.key in ("zero", "offload", "recompute", "sequence_parallel") else 1
        ):
            raise InputError(
                "CONFLICT",
                f"--pin {pin.key}={pin.word} and --forbid {pin.key} contradict each other.",
                flag="--pin",
                value=pin.word,
                hint="Drop one.",
            )
