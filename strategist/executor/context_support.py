"""Whether a plan's context parallelism can be run, said without torch."""

from __future__ import annotations

from collections.abc import Iterator

from strategist.document.plan import Plan
from strategist.executor.obstacles import Obstacle, indivisible, lacking


def context_obstacles(plan: Plan) -> Iterator[Obstacle]:
    """Everything about cp and its kind that keeps the executor from running `plan`."""
    cp, kind = plan.mesh.cp, plan.strategy.context_parallel
    if (cp > 1) != (kind != "none"):
        yield Obstacle(
            code="FRAMEWORK_LEGALITY",
            place="strategy.context_parallel",
            value=kind,
            sentence=f"Context parallelism of kind {kind!r} does not go with cp = {cp}.",
            hint="Sequences over several ranks need ring, all-to-all or hierarchical; whole ones none.",
        )
    elif not _is_cut_soundly(plan):
        inner = plan.strategy.cp_inner
        yield Obstacle(
            code="FRAMEWORK_LEGALITY",
            place="strategy.cp_inner",
            value=inner,
            sentence=f"Context parallelism of kind {kind!r} does not go with cp_inner = {inner} of cp = {cp}.",
            hint="Hierarchical context parallelism needs a divisor of cp above 1 and below cp; other kinds need 1.",
        )
    elif cp > 1:
        yield from _divisibility(plan)
        yield from () if kind == "all-to-all" else _ring(plan)


def _is_cut_soundly(plan: Plan) -> bool:
    """Whether cp has several groups of several ranks, or is of a kind that has none."""
    cp, inner = plan.mesh.cp, plan.strategy.cp_inner
    if plan.strategy.context_parallel != "hierarchical":
        return inner == 1
    return 1 < inner < cp and cp % inner == 0


def _divisibility(plan: Plan) -> Iterator[Obstacle]:
    cp, tp, seq, heads = plan.mesh.cp, plan.mesh.tp, plan.workload.seq_len, plan.model.kv_heads
    if seq % (2 * cp):
        yield indivisible(
            "workload.seq_len", seq, f"cp = {cp} needs a multiple of {2 * cp} tokens; {seq} is none", "cp"
        )
    axis, among = ("cp", cp) if plan.strategy.context_parallel == "all-to-all" else ("cp_inner", plan.strategy.cp_inner)
    if heads % (tp * among) and among > 1:
        ranks = f"{axis} = {among}" if tp == 1 else f"tp = {tp} and {axis} = {among}"
        yield indivisible(
            "model.kv_heads", heads, f"all-to-all over {ranks} cannot share out kv_heads = {heads} evenly", axis
        )


def _ring(plan: Plan) -> Iterator[Obstacle]:
    """What keys and values that travel cannot do here: each block's log-sum-exps are needed, and its mask is all or causal."""
    shape, strategy, seq = plan.model, plan.strategy, plan.workload.seq_len
    reasons = {
        f"{shape.name} looks at windows of {shape.window} tokens": shape.window is not None and shape.window < seq,
        "selective recompute would keep every block of it": strategy.recompute == "selective",
        "GPUs have no such kernel for float32": strategy.backend == "nccl" and strategy.formats.compute == "float32",
    }
    yield from lacking(
        "strategy.context_parallel",
        strategy.context_parallel,
        f"The executor cannot run mesh.cp = {plan.mesh.cp} by ring attention here:",
        reasons,
        "Plan with --pin context_parallel=all-to-all.",
    )
