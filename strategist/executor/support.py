"""What the executor can run, said without torch, so that a planner or a command line may ask before anything starts.

An obstacle is *unsupported* (legal, but not built here), a *divisibility* or *batch split* problem (numbers that do not
go into each other), or a matter of *legality* (torch or the Plan's own meaning forbids it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from strategist.document.plan import MESH_AXES, NumberFormats, Plan, Strategy, sequences_per_step, shares_of
from strategist.errors import InputError
from strategist.executor.architecture import model_obstacles
from strategist.executor.context_support import context_obstacles
from strategist.executor.obstacles import Obstacle, indivisible, lacking
from strategist.executor.pipeline_support import IN_TWO_PARTS, pipeline_obstacles
from strategist.facts.adapters import ATTENTION, beside_experts
from strategist.facts.layers import sides_divide
from strategist.facts.tables import served_tables
from strategist.facts.workload import FLOAT8_MULTIPLE
from strategist.units import counted

FORMATS = (
    NumberFormats(parameter="float64", gradient="float64", reduce="float64", compute="float64"),
    NumberFormats(parameter="float32", gradient="float32", reduce="float32", compute="float32"),
    NumberFormats(parameter="float32", gradient="float32", reduce="float32", compute="bfloat16"),
    NumberFormats(parameter="float32", gradient="float32", reduce="bfloat16", compute="bfloat16"),
    NumberFormats(parameter="float32", gradient="float32", reduce="float32", compute="float16"),
)
"""Parameters at rest are their own master copy; a lower compute format is cast on the way in."""

FROZEN_FORMATS = (
    *FORMATS[:2],
    NumberFormats(parameter="bfloat16", gradient="float32", reduce="float32", compute="bfloat16"),
)
"""The same beside adapters, which rest in the format of their gradients: frozen weights rest as they compute."""

BACKENDS = ("nccl", "gloo")
SCHEDULES = ("none", "gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zbv", "dualpipev")
OFFLOADS = ("none", "optimizer", "parameters", "nvme")
PRECISIONS = ("bf16", "fp16", "tf32", "fp32", "fp8")

ASKED = (
    "model",
    "model.adapters",
    "model.enc_layers",
    "workload.seq_len",
    "workload.target_len",
    "workload.precision",
    "strategy.formats",
    "strategy.optimizer",
)
"""Places of a Plan that hold what was asked for. All others are choices of the planner, which can choose otherwise."""


def require_packages(what: str, method: str, precision: str = "bf16") -> None:
    """Raise InputError MISSING where torch, or what has weights of four bits under qlora or multiplies in fp8, is not installed; `what`
    needs it."""
    from importlib.util import find_spec  # a plan asks for no torch

    needed = {"torch": "run"} | ({"bitsandbytes": "qlora"} if method == "qlora" else {})
    needed |= {"torchao": "fp8"} if precision == "fp8" else {}
    for package, extra in needed.items():
        if find_spec(package) is None:
            raise InputError(
                "MISSING",
                f"{what} needs {package}, which is not installed here.",
                flag=package,
                hint=f"Install it: pip install 'strategist[{extra}]'.",
            )


def unsupported(plan: Plan) -> tuple[str, ...]:
    """Sentences saying why this executor cannot run `plan` with its built-in model; empty when it can."""
    return tuple(obstacle.sentence for obstacle in obstacles(plan))


def obstacles(plan: Plan) -> tuple[Obstacle, ...]:
    """Everything that keeps the executor from running `plan` with its built-in model."""
    return (*layout_obstacles(plan), *model_obstacles(plan.model, plan.workload.seq_len))


CUT_PAIRS = ("t5", "mt5", "bart", "mbart")
"""Families of encoders with a decoder whose matrices tp cuts (models/hugging_face_pairs.py)."""


def script_obstacles(plan: Plan) -> tuple[Obstacle, ...]:
    """Everything that keeps the executor from running `plan` by a script that is emitted for it: with its built-in model, or for an encoder
    with a decoder with one of transformers."""
    shape, tp = plan.model, plan.mesh.tp
    if shape.kind != "encdec":
        return obstacles(plan)
    uncut = Obstacle(
        code="UNSUPPORTED",
        place="mesh.tp",
        value=tp,
        sentence=f"The executor cuts matrices of {', '.join(CUT_PAIRS)} among encoders with a decoder; {shape.name} is of the family "
        f"{shape.family}, and tp is {tp}.",
        hint="Plan with --pin tp=1.",
    )
    return (*layout_obstacles(plan), *((uncut,) if tp > 1 and shape.family not in CUT_PAIRS else ()))


def way_out(missing: Sequence[Obstacle]) -> str:
    """What to change so that a plan with these obstacles can be run: what was asked for, or else the layout alone."""
    asked = dict.fromkeys(obstacle.hint for obstacle in missing if obstacle.place in ASKED)
    return " ".join(asked) or "Plan again with --frontend strategist, which keeps to layouts that can be run."


def layout_obstacles(plan: Plan) -> tuple[Obstacle, ...]:
    """Everything that keeps the executor from laying out any model as the plan says."""
    broken = tuple(_mesh(plan))  # nothing else can be asked about a mesh that is none
    checks = (
        _not_built,
        _two_stacks,
        _experts,
        _formats,
        _data_parallel,
        _threads,
        _tiling,
        _compression,
        _tables,
        _loss,
        _recompute,
        _muon,
        _float8,
        _offload,
        pipeline_obstacles,
        _batch,
        _uneven_batch,
        _adapters,
        _tensor_parallel,
        context_obstacles,
    )
    return broken or tuple(obstacle for check in checks for obstacle in check(plan))


def _mesh(plan: Plan) -> Iterator[Obstacle]:
    mesh = plan.mesh
    if sorted(mesh.order) != sorted(MESH_AXES):
        yield Obstacle(
            code="FRAMEWORK_LEGALITY",
            place="mesh.order",
            value=mesh.order,
            sentence=f"The mesh order must name {', '.join(MESH_AXES)}, each once; it names {', '.join(mesh.order)}.",
            hint="Leave the order to the planner.",
        )
    for axis in (*MESH_AXES, "ep", "etp"):
        if mesh.size(axis) < 1:
            yield Obstacle(
                code="FRAMEWORK_LEGALITY",
                place=f"mesh.{axis}",
                value=mesh.size(axis),
                sentence=f"mesh.{axis} = {mesh.size(axis)} is no degree; the smallest is 1.",
                hint="Use 1 for an axis that is not wanted.",
            )


def _not_built(plan: Plan) -> Iterator[Obstacle]:
    """Fields of which the executor knows a few values only."""
    strategy = plan.strategy
    rows: tuple[tuple[str, object, tuple[object, ...]], ...] = (
        ("workload.precision", plan.workload.precision, PRECISIONS),
        ("strategy.zero", strategy.zero, (0, 1, 2, 3)),
        ("strategy.schedule", strategy.schedule, SCHEDULES),
        ("strategy.offload", strategy.offload, OFFLOADS),
        ("strategy.backend", strategy.backend, BACKENDS),
    )
    for place, value, known in rows:
        if value not in known:
            choices = " or ".join(str(k) for k in known)
            yield Obstacle(
                code="UNSUPPORTED",
                place=place,
                value=value,
                sentence=f"The executor cannot run {place} = {value}; it runs {choices}.",
            )


def _two_stacks(plan: Plan) -> Iterator[Obstacle]:
    """An encoder and the decoder behind it: replicas and shards of any module, matrices cut by tp, and nothing that cuts a row of layers or
    their tokens."""
    mesh, s, shape = plan.mesh, plan.strategy, plan.model
    if not shape.enc_layers:
        return
    reasons = {
        f"pp {mesh.pp}, and what the encoder gives goes to every layer of the decoder": mesh.pp > 1,
        f"cp {mesh.cp}, and attention to the encoder asks with other tokens than it meets": mesh.cp > 1,
        "sequence_parallel, and attention of such a model looks at all tokens that it is given": s.sequence_parallel,
        f"loss {s.loss}, which the head of the built-in model computes": s.loss != "whole",
        f"model.method {shape.method}, and adapters stand in the built-in model": shape.method != "full",
    }
    lengths = f"{plan.workload.seq_len} inputs and {plan.workload.targets} targets"
    yield from lacking(
        "model.enc_layers",
        shape.enc_layers,
        f"The executor cannot train an encoder with a decoder ({shape.name}, {lengths}) here: the plan has",
        reasons,
        "Plan with replicas, ZeRO and, for T5, mT5, BART or mBART of transformers, tp without sequence_parallel.",
    )


def _experts(plan: Plan) -> Iterator[Obstacle]:
    if plan.mesh.ep > 1:
        yield from _spread_experts(plan)
        return
    wanted = plan.mesh.tp if plan.model.moe is not None else 1
    if plan.mesh.etp != wanted:
        what = "every expert over all tp ranks" if plan.model.moe is not None else "no experts, as the model has none"
        yield Obstacle(
            code="UNSUPPORTED",
            place="mesh.etp",
            value=plan.mesh.etp,
            sentence=f"The executor cuts {what}; the plan has tp {plan.mesh.tp} and etp {plan.mesh.etp}.",
            hint=f"Plan with --pin etp={wanted}.",
        )


def _spread_experts(plan: Plan) -> Iterator[Obstacle]:
    """Whole experts on neighbouring ranks, as units of their own; what else a plan may ask for is not built."""
    mesh, strategy, moe = plan.mesh, plan.strategy, plan.model.moe
    replicas = 1 if strategy.zero >= 1 else mesh.dp_replicate
    sharers, experts = replicas * mesh.dp_shard * mesh.cp * mesh.tp // mesh.etp, 0 if moe is None else moe.experts
    reasons = {
        f"tp {mesh.tp}, etp {mesh.etp}; etp must be 1 or tp": mesh.etp not in (1, mesh.tp),
        f"tp {mesh.tp} without sequence_parallel, so that all its ranks hold the same tokens and each would send them to whole "
        "experts": mesh.tp > mesh.etp and not strategy.sequence_parallel,
        f"{sharers} ranks that can share experts, which {mesh.ep} does not divide": sharers % mesh.ep != 0,
        f"{experts} experts, which {mesh.ep} does not divide": experts == 0 or experts % mesh.ep != 0,
        f"the order {', '.join(mesh.order)}": mesh.order != MESH_AXES,
    }
    yield from lacking(
        "mesh.ep",
        mesh.ep,
        f"The executor cannot spread experts over ep = {mesh.ep} here: the plan has",
        reasons,
        "Plan with an etp of 1 or tp and an ep that divides the ranks that share weights or, under zero 1, state; or with --pin ep=1.",
    )


def _formats(plan: Plan) -> Iterator[Obstacle]:
    formats = plan.strategy.formats
    if plan.model.adapters is not None:
        yield from _frozen_formats(formats, plan.model.method)
    elif formats not in FORMATS:
        said = f"parameters {formats.parameter}, gradients {formats.gradient}, reduction {formats.reduce}, compute {formats.compute}, master copy {formats.master}"  # fmt: skip
        yield Obstacle(
            code="UNSUPPORTED",
            place="strategy.formats",
            value=said,
            sentence=f"The executor cannot run {said}; it keeps parameters and gradients in float32 (float64) without "
            "another master copy, and computes in float32, bfloat16, float16 (float64).",
            hint="Plan with --precision bf16, fp16 or fp32.",
        )
    elif formats.parameter == "float64" and plan.strategy.optimizer == "adamw8bit":
        yield Obstacle(
            code="UNSUPPORTED",
            place="strategy.optimizer",
            value=plan.strategy.optimizer,
            sentence="8-bit AdamW computes in float32, and the plan keeps parameters in float64.",
            hint="Use --optimizer adamw, or parameters in float32.",
        )
    elif formats.reduce != formats.parameter and not uses_fsdp(plan):
        yield Obstacle(
            code="UNSUPPORTED",
            place="strategy.formats.reduce",
            value=formats.reduce,
            sentence=f"Gradients are reduced in {formats.parameter} by DDP and ZeRO-1, not in {formats.reduce}.",
            hint="Reduce in float32, or use zero 2 or 3.",
        )


def _frozen_formats(formats: NumberFormats, method: str) -> Iterator[Obstacle]:
    if method == "qlora" and formats.compute == "float64":
        yield Obstacle(
            code="UNSUPPORTED",
            place="strategy.formats",
            value=formats.compute,
            sentence="Weights of four bits are brought back to numbers of 16 or 32 bits, and the plan computes in float64.",
            hint="Plan with --precision bf16 or fp32.",
        )
    elif formats not in FROZEN_FORMATS:
        yield Obstacle(
            code="UNSUPPORTED",
            place="strategy.formats",
            value=formats.parameter,
            sentence=f"Beside adapters the executor keeps and computes frozen weights in float32 (float64) or bfloat16, and trains in "
            f"float32 (float64); the plan has weights in {formats.parameter}, compute in {formats.compute}, gradients in {formats.gradient}.",
            hint="Plan with --precision bf16 or fp32.",
        )


def _adapters(plan: Plan) -> Iterator[Obstacle]:
    """Beside adapters a model is replicated, or sharded by fully_shard."""
    mesh, strategy, method = plan.mesh, plan.strategy, plan.model.method
    if method == "full":
        return
    is_cut = max(mesh.tp, mesh.pp, mesh.cp, mesh.ep) > 1
    beside = beside_experts(plan.model)
    reasons = {
        f"tp {mesh.tp}, pp {mesh.pp}, cp {mesh.cp}, ep {mesh.ep}; all must be 1": is_cut,
        "zero 1; it must be 0, 2 or 3": strategy.zero == 1,
        f"offload {strategy.offload}": strategy.offload != "none",
        f"adapters beside {', '.join(beside)} of a mixture of experts; they stand beside its {', '.join(ATTENTION)} alone": bool(
            beside
        ),
    }
    yield from lacking(
        "model.adapters",
        method,
        "The executor cannot train adapters here: the plan has",
        reasons,
        "Plan with zero 0, 2 or 3 over data-parallel ranks alone, and the adapters that --method puts there by itself.",
    )
    if method == "qlora" and strategy.compile:
        yield Obstacle(
            code="UNSUPPORTED",
            place="strategy.compile",
            value=True,
            sentence="The executor does not compile blocks whose weights rest in four bits: nobody tried bitsandbytes' operations there.",
            hint="Leave compile out, or plan with --method lora.",
        )


def uses_fsdp(plan: Plan) -> bool:
    """True when parameters are wrapped by FSDP2 or its replicating twin, false for plain modules, DDP and ZeRO-1.

    With tp, pp or ep the twin is also used on one data rank when compute is lower than the parameters, because it brings
    the casts; in fp8 on any, as torchao's layers follow autocast on no CPU.
    """
    mesh, formats = plan.mesh, plan.strategy.formats
    if plan.strategy.zero >= 2 or plan.workload.precision == "fp8":
        return True
    splits_model = max(mesh.tp, mesh.pp, mesh.ep) > 1
    return splits_model and (mesh.data_parallel * mesh.cp > 1 or formats.compute != formats.parameter)


def _data_parallel(plan: Plan) -> Iterator[Obstacle]:
    mesh, zero = plan.mesh, plan.strategy.zero
    if zero == 0 and mesh.dp_shard > 1:
        yield Obstacle(
            code="FRAMEWORK_LEGALITY",
            place="strategy.zero",
            value=zero,
            sentence=f"zero = 0 shards nothing, yet dp_shard is {mesh.dp_shard}.",
            hint=f"Use dp_replicate = {mesh.dp_shard}, or zero 1, 2 or 3.",
        )


def _threads(plan: Plan) -> Iterator[Obstacle]:
    """nn.DataParallel copies whole modules, one process for all."""
    mesh, strategy = plan.mesh, plan.strategy
    if strategy.replicas == "processes":
        return
    if mesh.dp_replicate == 1 or mesh.dp_replicate != mesh.world or plan.cluster.nodes > 1 or strategy.zero > 0:
        yield Obstacle(
            code="FRAMEWORK_LEGALITY",
            place="strategy.replicas",
            value=strategy.replicas,
            sentence="replicas = threads is nn.DataParallel: whole replicas on the devices of one node, mesh.dp_replicate of "
            "them, under zero = 0 and without any other axis.",
            hint="Use replicas = processes.",
        )
    if strategy.compile or strategy.offload != "none" or plan.model.method != "full":
        yield Obstacle(
            code="UNSUPPORTED",
            place="strategy.replicas",
            value=strategy.replicas,
            sentence="Under strategy.replicas = threads the copies of a module are made anew for each batch; the executor neither "
            f"compiles nor offloads nor freezes there (compile {strategy.compile}, offload {strategy.offload}, model.method "
            f"{plan.model.method}).",
            hint="Use replicas = processes, or leave compile, offload and adapters out.",
        )


def _tables(plan: Plan) -> Iterator[Obstacle]:
    """A parameter server: whole replicas under DDP on one node, whose tables of embeddings are tables and nothing else."""
    mesh, s, shape, place = plan.mesh, plan.strategy, plan.model, "strategy.tables"
    if s.tables == "local":
        return
    if mesh.dp_replicate == 1 or mesh.dp_replicate != mesh.world or s.zero > 0 or plan.cluster.nodes > 1:
        yield Obstacle(
            code="FRAMEWORK_LEGALITY",
            place=place,
            value=s.tables,
            sentence="tables = server is a process beside DDP: whole replicas on the devices of one node, mesh.dp_replicate of them, "
            "under zero = 0 and without any other axis.",
            hint="Use tables = local.",
        )
    reasons = {
        f"replicas {s.replicas}": s.replicas != "processes",
        f"offload {s.offload}": s.offload != "none",
        f"compression {s.compression}": s.compression != "none",
        f"model.method {shape.method}": shape.method != "full",
        f"optimizer {s.optimizer}": s.optimizer == "muon",
        f"precision {plan.workload.precision}": plan.workload.precision == "fp8",
        "no table of embeddings that no other module shares": not served_tables(shape),
    }
    yield from lacking(
        place,
        s.tables,
        "The executor cannot run strategy.tables = server here: the plan has",
        reasons,
        "Use tables = local.",
    )


def keeps_errors(strategy: Strategy) -> bool:
    """Whether every replica remembers what compression left out of its gradients."""
    return strategy.compression in ("powersgd", "topk")


def _compression(plan: Plan) -> Iterator[Obstacle]:
    """Hooks of DDP, in float32, and what each of them needs to be told."""
    mesh, s, place = plan.mesh, plan.strategy, "strategy.compression"
    if s.compression != "none" and (
        mesh.dp_replicate in (1, 0) or mesh.dp_replicate != mesh.world or s.zero > 0 or s.replicas != "processes"
    ):
        yield Obstacle(
            code="FRAMEWORK_LEGALITY",
            place=place,
            value=s.compression,
            sentence=f"compression = {s.compression} is a hook of DDP, which nothing else calls: whole replicas as processes, "
            "mesh.dp_replicate of them, under zero = 0 and without any other axis.",
            hint="Use compression = none.",
        )
    if s.compression != "none":
        reasons = {
            f"parameters in {s.formats.parameter}; they must be in float32": s.formats.parameter != "float32",
            f"model.method {plan.model.method}; it must be full": plan.model.method != "full",
            "a loss scale that changes (float16), which what was left out has not": keeps_errors(s)
            and s.formats.compute == "float16",
        }
        yield from lacking(
            place,
            s.compression,
            f"The executor cannot compress gradients by {s.compression} here: the plan has",
            reasons,
            "Use compression = none.",
        )
    wrong = {
        f"compression_rank {s.compression_rank}": (s.compression == "powersgd") != (s.compression_rank > 0),
        f"compression_share {s.compression_share}": (s.compression == "topk") != (0.0 < s.compression_share <= 1.0),
    }
    yield from lacking(
        place,
        s.compression,
        f"compression = {s.compression} says nothing with",
        wrong,
        "powersgd takes a compression_rank from 1 on, topk a compression_share above 0 and up to 1, the others neither.",
    )


def _loss(plan: Plan) -> Iterator[Obstacle]:
    """A loss of a few tokens at a time is computed inside the model, by a rank that has the whole head."""
    mesh, strategy = plan.mesh, plan.strategy
    if strategy.loss == "chunked" and max(mesh.tp, mesh.pp) > 1:
        yield Obstacle(
            code="FRAMEWORK_LEGALITY",
            place="strategy.loss",
            value=strategy.loss,
            sentence=f"loss = chunked needs the whole head on every rank; the plan has tp {mesh.tp} and pp {mesh.pp}.",
            hint="Use loss = whole, whose logits tp cuts by vocabulary, or tp and pp of 1.",
        )


def _recompute(plan: Plan) -> Iterator[Obstacle]:
    """Full recompute of the first layers of every chunk, as many on every stage or each its own number, or of every so-many-th, is full
    recompute, and of layers that are there."""
    s = plan.strategy
    if not (s.recompute_layers or s.recompute_every or s.recompute_stages):
        return
    layers, chunks = plan.model.depth, plan.mesh.pp * s.virtual_stages
    depths, longest = s.recompute_stages, 1 + (layers - 2) // max(1, chunks - 1)  # where the last chunk has one layer
    if s.stage_split == "balanced":
        longest = max(stage.layer_count for stage in s.stages)
    every = "every so-many-th layer of a chunk, counted by {},"
    asked = (
        (
            "recompute_layers",
            s.recompute_layers,
            (s.recompute_layers,),
            1,
            layers // chunks,
            "{} layers of every chunk",
        ),
        ("recompute_every", s.recompute_every, (s.recompute_every,), 2, layers // chunks, every),
        ("recompute_stages", depths, depths, 0, longest, "{} layers of each chunk, stage by stage,"),
    )
    for name, said, numbers, least, most, what in asked:
        reasons = {
            f"recompute {s.recompute}": s.recompute != "full",
            f"a number below {least}": any(number < least for number in numbers),
            f"{most} layers in a chunk": any(number > most for number in numbers),
            f"tiling {s.tiling}": s.tiling > 1,
            "adapters": plan.model.adapters is not None,
            f"{plan.mesh.pp} stages": name == "recompute_stages" and len(depths) != plan.mesh.pp,
            "another way to say which layers": sum(bool(other[1]) for other in asked) > 1,
        }
        yield from lacking(
            f"strategy.{name}",
            said,
            f"The executor cannot run {what.format(said)} again: the plan has",
            reasons if said else {},
            "Use recompute = full with a number up to the layers of a chunk, without tiling and adapters; or of all layers.",
        )


def _muon(plan: Plan) -> Iterator[Obstacle]:
    """Muon needs whole matrices, of which fully_shard's ranks gather the rows, and tensor-parallel ones their parts: where each has
    those of all."""
    mesh, strategy = plan.mesh, plan.strategy
    if strategy.optimizer != "muon":
        return
    reasons = {
        f"tp {mesh.tp} beside zero 1, which deals matrices out": mesh.tp > 1 and strategy.zero == 1,
        f"offload {strategy.offload}": strategy.offload != "none",
        f"tiling {strategy.tiling}": strategy.tiling > 1,
        "routed experts": plan.model.moe is not None,
        f"model.method {plan.model.method}": plan.model.method != "full",
    }
    yield from lacking(
        "strategy.optimizer",
        strategy.optimizer,
        "The executor cannot run strategy.optimizer = muon here: the plan has",
        reasons,
        "Plan without offload and tiling, beside tp with another ZeRO stage than 1, or with --optimizer adamw.",
    )


def _float8(plan: Plan) -> Iterator[Obstacle]:
    """torchao's linear layers: whole matrices of dense blocks, in units of fully_shard or its replicating twin."""
    mesh, s, shape = plan.mesh, plan.strategy, plan.model
    if plan.workload.precision != "fp8":
        return
    lengths = {plan.workload.seq_len, plan.workload.targets if shape.enc_layers else plan.workload.seq_len}
    tokens = [s.micro_batch * length // max(1, mesh.cp) for length in sorted(lengths)]
    reasons = {
        f"compute {s.formats.compute}; it must be bfloat16": s.formats.compute != "bfloat16",
        f"tp {mesh.tp}": mesh.tp > 1,
        "routed experts": shape.moe is not None,
        f"model.method {shape.method}": shape.method != "full",
        f"tiling {s.tiling}": s.tiling > 1,
        f"replicas {s.replicas}": s.replicas != "processes",
        f"schedule {s.schedule}, whose backward comes in two parts": s.schedule in IN_TWO_PARTS,
        f"compression {s.compression}, a hook of DDP": s.compression != "none",
        **{
            f"{count} tokens in a micro-batch, which {FLOAT8_MULTIPLE} does not divide": count % FLOAT8_MULTIPLE != 0
            for count in tokens
        },
        f"matrices with sides that {FLOAT8_MULTIPLE} does not divide": not sides_divide(shape, FLOAT8_MULTIPLE),
    }
    yield from lacking(
        "workload.precision",
        "fp8",
        "The executor cannot run workload.precision = fp8 here: the plan has",
        reasons,
        "Use --precision bf16.",
    )


def _offload(plan: Plan) -> Iterator[Obstacle]:
    mesh, strategy = plan.mesh, plan.strategy
    if strategy.offload in ("parameters", "nvme") and (strategy.zero != 3 or mesh.tp > 1 or mesh.pp > 1):
        yield Obstacle(
            code="UNSUPPORTED",
            place="strategy.offload",
            value=strategy.offload,
            sentence=f"The executor offloads parameters with zero = 3 and tp and pp 1 only; the plan has zero "
            f"{strategy.zero}, tp {mesh.tp}, pp {mesh.pp}.",
            hint="Use zero 3 over data-parallel ranks alone, or no offload.",
        )
    if strategy.offload == "optimizer" and strategy.zero == 1:
        yield Obstacle(
            code="UNSUPPORTED",
            place="strategy.offload",
            value=strategy.offload,
            sentence="The executor cannot offload the optimizer under zero = 1, which deals its state out by whole tensors.",
            hint="Use zero 2 or 3, or no offload.",
        )


def _tiling(plan: Plan) -> Iterator[Obstacle]:
    """Slices are units that ZeRO-3 gives back one by one."""
    mesh, strategy = plan.mesh, plan.strategy
    if strategy.tiling == 1:
        return
    reasons = {
        "less than one slice": strategy.tiling < 1,
        f"zero {strategy.zero}; it must be 3": strategy.zero != 3,
        f"tp {mesh.tp}, pp {mesh.pp}; both must be 1": max(mesh.tp, mesh.pp) > 1,
        "routed experts": plan.model.moe is not None,
        "adapters": plan.model.adapters is not None,
        "recompute selective": strategy.recompute == "selective",
        "compile": strategy.compile,
    }
    yield from lacking(
        "strategy.tiling",
        strategy.tiling,
        f"The executor cannot run strategy.tiling = {strategy.tiling} here: the plan has",
        reasons,
        "Plan with zero 3 over data-parallel ranks alone and recompute none or full, or with --pin tiling=1.",
    )


def _batch(plan: Plan) -> Iterator[Obstacle]:
    asked, s = plan.workload.global_batch, plan.strategy
    smallest = min(s.micro_batch, *(share.micro_batches for share in shares_of(plan.mesh, s)))
    if smallest < 1 or asked != sequences_per_step(plan.mesh, s):
        yield Obstacle(
            code="BATCH_SPLIT",
            place="workload.global_batch",
            value=asked,
            sentence=f"The global batch is {counted(asked, 'sequence')}, but {plan.batch_identity}.",
            hint="Make the product equal to the global batch.",
        )


def _uneven_batch(plan: Plan) -> Iterator[Obstacle]:
    """Replicas that meet once a step, whole or cut by tp, each of which runs micro-batches of its own number."""
    mesh, s, place = plan.mesh, plan.strategy, "strategy.uneven_batch"
    if not s.uneven_batch:
        return
    said = ", ".join(f"{share.replicas} x {share.micro_batches}" for share in s.uneven_batch)
    replicas = sum(share.replicas for share in s.uneven_batch)
    if replicas != mesh.data_parallel or s.accumulation != max(share.micro_batches for share in s.uneven_batch):
        yield Obstacle(
            code="BATCH_SPLIT",
            place=place,
            value=said,
            sentence=f"The shares of the uneven batch ({said} micro-batches) have {replicas} replicas in all and the mesh "
            f"{mesh.data_parallel}; accumulation, {s.accumulation}, must be their largest number of micro-batches.",
            hint="Give every replica of the mesh its share.",
        )
    reasons = {
        f"zero {s.zero}, whose ranks meet in every micro-batch": s.zero > 1,
        f"pp {mesh.pp}, cp {mesh.cp}, ep {mesh.ep}; all must be 1": max(mesh.pp, mesh.cp, mesh.ep) > 1,
        f"the order {', '.join(mesh.order)}": mesh.order != MESH_AXES,
        f"replicas {s.replicas}": s.replicas != "processes",
        f"compression {s.compression}": s.compression != "none",
        f"tables {s.tables}": s.tables != "local",
        f"offload {s.offload}": s.offload != "none",
        f"model.method {plan.model.method}": plan.model.method != "full",
        "precision fp8": plan.workload.precision == "fp8",
    }
    yield from lacking(
        place,
        said,
        "The executor cannot run an uneven batch here: the plan has",
        reasons,
        "Plan without --also uneven_batch, or with zero 0 or 1 and none of these.",
    )


def _tensor_parallel(plan: Plan) -> Iterator[Obstacle]:
    tp, shape = plan.mesh.tp, plan.model
    rows = [("heads", shape.heads), ("kv_heads", shape.kv_heads), ("ffn_hidden", shape.ffn_hidden)]
    if shape.moe is not None:
        rows += [("moe.ffn", shape.moe.ffn)] * (plan.mesh.etp > 1) + [("moe.shared_ffn", shape.moe.shared_ffn)]
    for name, value in rows:
        if value % tp:
            yield indivisible(f"model.{name}", value, f"tp = {tp} cannot split {name} = {value} evenly", "tp")
    if shape.qk_norm == "full" and tp > 1:
        yield Obstacle(
            code="UNSUPPORTED",
            place="mesh.tp",
            value=tp,
            sentence=f"{shape.name} normalises queries and keys over all heads at once, and tp = {tp} leaves each rank a "
            "part of them.",
            hint="Plan with tp = 1.",
        )
    cp, seq = plan.mesh.cp, plan.workload.seq_len
    if plan.strategy.sequence_parallel and seq % (cp * tp):
        ranks = f"tp = {tp}" if cp == 1 else f"cp = {cp} and tp = {tp}"
        yield indivisible("workload.seq_len", seq, f"sequence parallelism over {ranks} cannot split {seq} tokens", "tp")
    if plan.strategy.sequence_parallel and tp == 1:
        yield Obstacle(
            code="FRAMEWORK_LEGALITY",
            place="strategy.sequence_parallel",
            value=True,
            sentence="Sequence parallelism spreads over the tp axis, and tp is 1.",
            hint="Switch it off, or use tp > 1.",
        )
