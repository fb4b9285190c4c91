"""Plans built by hand: complete and valid documents whose predictions are trivial."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from strategist.document.estimate import (
    MEMORY_TERMS,
    TIME_TERMS,
    Estimate,
    MemoryLedger,
    MemoryTerm,
    StageMemory,
    TimeLedger,
    TimeTerm,
)
from strategist.document.plan import Decision, Economics, Mesh, NumberFormats, Plan, Request, Share, Stage, Strategy
from strategist.facts.hardware import Cluster, Gpu, Node, NodeGroup
from strategist.facts.model import ModelShape, Moe
from strategist.facts.runs import V_SHAPED
from strategist.facts.workload import Workload
from strategist.space.stages import chunk_bounds, head_in_layers

FLOAT64 = NumberFormats(parameter="float64", gradient="float64", reduce="float64", compute="float64")
FLOAT32 = NumberFormats(parameter="float32", gradient="float32", reduce="float32", compute="float32")
BFLOAT16 = NumberFormats(parameter="float32", gradient="float32", reduce="float32", compute="bfloat16")

MESH_FIELDS = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp", "order")


def tiny_llama(**changes: Any) -> ModelShape:
    """A Llama of 2 layers that trains in milliseconds; heads, widths and vocabulary divide by 4."""
    shape = ModelShape(
        name="tiny-llama", family="llama3", kind="decoder", layers=2, hidden=32, vocab=64, ffn_hidden=48, heads=8,
        kv_heads=4, head_dim=4, max_seq=64,
    )  # fmt: skip
    return replace(shape, **changes)


def tiny_gpt2(**changes: Any) -> ModelShape:
    """A GPT-2 of the same size: learned positions, LayerNorm, biases, plain GELU, one weight for both ends."""
    shape = tiny_llama(
        name="tiny-gpt2", family="gpt2", kv_heads=8, tied=True, pos="learned", pos_rows=64, norm="layernorm",
        mlp_gated=False, mlp_act="gelu", mlp_bias=True, qkv_bias=True, o_bias=True,
    )  # fmt: skip
    return replace(shape, **changes)


def tiny_mixtral(*, moe: dict[str, Any] | None = None, **changes: Any) -> ModelShape:
    """A Llama of the same size whose feed-forward parts are 4 experts, 2 for each token; `moe` changes fields of Moe."""
    layers = changes.get("layers", 2)
    experts = Moe(**{"experts": 4, "top_k": 2, "ffn": 24, "layers": layers} | (moe or {}))
    return replace(tiny_llama(name="tiny-mixtral", family="mixtral", ffn_hidden=0, moe=experts), **changes)


def make_plan(shape: ModelShape | None = None, *, seq_len: int = 16, **choices: Any) -> Plan:
    """A Plan for `shape` on a CPU node; `choices` are fields of Mesh and Strategy, the rest follows from them.

    `global_batch` may be given to break the batch identity, `stages` to break the stage layout.
    """
    shape = shape or tiny_llama()
    mesh = Mesh(**{name: choices.pop(name) for name in MESH_FIELDS if name in choices})
    asked = choices.pop("global_batch", None)
    virtual = choices.get("virtual_stages", 1)
    schedule = "interleaved" if virtual > 1 else "1f1b"
    weighted = weighted_stages(shape, mesh.pp) if choices.get("stage_split") == "weighted" else None
    defaults: dict[str, Any] = {
        "schedule": schedule if mesh.pp > 1 else "none",
        "stages": weighted or even_stages(shape.depth, mesh.pp, virtual, choices.get("schedule", schedule)),
        "formats": FLOAT64,
        "backend": "gloo",
    }
    strategy = Strategy(**(defaults | choices))
    product = strategy.micro_batch * sum(s.replicas * s.micro_batches for s in strategy.uneven_batch)
    product = product or strategy.micro_batch * strategy.accumulation * mesh.data_parallel
    optimizer: Any = strategy.optimizer
    workload = Workload(seq_len=seq_len, global_batch=asked or product, precision="fp32", optimizer=optimizer)
    nodes = [share.replicas * mesh.tp for share in strategy.uneven_batch] or [mesh.world]
    return Plan(
        made_by="tests", book="tests", request=Request(), cluster=cpu_cluster(*nodes), model=shape,
        workload=workload, assumptions=(), mesh=mesh, strategy=strategy, memory=_memory(mesh.pp), time=_time(),
        economics=Economics(gpu_hours_per_step=0.0), decision=_decision(), reasons=(), refusals=(), alternatives=(),
        hints=(),
    )  # fmt: skip


def even_stages(layers: int, pp: int, virtual: int = 1, schedule: str = "1f1b") -> tuple[Stage, ...]:
    """`layers` in `pp` x `virtual` runs that the stages own in turn, the first ones a layer longer when it does not divide."""
    count, edges = pp * virtual, [0]
    for index in range(count):
        edges.append(edges[-1] + layers // count + (index < layers % count))
    runs = tuple(pairwise(edges))
    if schedule in V_SHAPED:
        pairs = tuple((runs[i], runs[count - 1 - i]) for i in range(pp))
        return tuple(Stage(index=i, layers=own, embedding=i == 0, head=i == 0) for i, own in enumerate(pairs))
    return tuple(Stage(index=i, layers=runs[i::pp], embedding=i == 0, head=i == pp - 1) for i in range(pp))


def weighted_stages(shape: ModelShape, pp: int) -> tuple[Stage, ...]:
    """The layers in `pp` runs, the last of which is shorter because of the head."""
    runs = chunk_bounds(shape.depth, pp, head_in_layers(shape))
    return tuple(Stage(index=i, layers=(run,), embedding=i == 0, head=i == pp - 1) for i, run in enumerate(runs))


def stages_of(*lengths: int) -> tuple[Stage, ...]:
    """Stages of one chunk each with so many layers."""
    edges = [0, *accumulate(lengths)]
    runs = enumerate(pairwise(edges))
    return tuple(Stage(index=i, layers=(run,), embedding=i == 0, head=i == len(lengths) - 1) for i, run in runs)


def uneven(*shares: tuple[int, int]) -> tuple[Share, ...]:
    """Shares of an uneven batch: (replicas, micro-batches) of each kind of nodes."""
    return tuple(Share(replicas=replicas, micro_batches=number) for replicas, number in shares)


def cpu_cluster(*ranks: int) -> Cluster:
    """One CPU node for each number of ranks."""
    groups = tuple(NodeGroup(node=_cpu_node(count), count=1) for count in ranks)
    return Cluster(groups=groups, origin="file")


def _cpu_node(world: int) -> Node:
    cpu = Gpu(name="cpu", title="CPU", vendor="any", arch="cpu", memory_bytes=2**33, memory_Bps=1e10, fp32_FLOPs=1e11)
    return Node(
        name="cpu-node", gpu=cpu, gpus=world, fast_domain=world, topology="memory", intra_Bps=1e10, pair_Bps=1e10,
        inter_Bps=1e9,
    )  # fmt: skip


def _memory(pp: int) -> MemoryLedger:
    terms = tuple(MemoryTerm(name, 1) for name in MEMORY_TERMS)
    stages = tuple(StageMemory(i, "backward", terms) for i in range(pp))
    total = len(MEMORY_TERMS)
    peak = Estimate(total, total, total, "B", "assumed")
    return MemoryLedger(stages=stages, peak=peak, capacity_bytes=2**33, usable_bytes=2**32)


def _time() -> TimeLedger:
    terms = tuple(TimeTerm(name, 1) for name in TIME_TERMS)
    step_ns = len(TIME_TERMS)
    step = Estimate(step_ns * 1e-9, step_ns * 1e-9, step_ns * 1e-9, "s", "assumed")
    return TimeLedger(terms=terms, step_ns=step_ns, step=step, tokens_per_second=1.0, mfu=0.0, model_FLOP=1.0)


def _decision() -> Decision:
    return Decision(
        policy="hf", objective="time", family="by hand", other_policy="fastest", other_family="by hand",
        other_layout="", other_step_s=1e-9, difference=1.0,
    )  # fmt: skip
