"""Where the processes of a plan are: launchers start equally many on every node."""

from __future__ import annotations

from strategist.document.plan import Plan
from strategist.errors import ImpossibleError


def ranks_per_node(plan: Plan) -> int:
    """Processes on every node, one for each device. Raises ImpossibleError UNSUPPORTED when the nodes differ, and for replicas
    that are threads of one process."""
    devices = devices_per_node(plan)
    if plan.processes < plan.mesh.world:
        raise ImpossibleError(
            "UNSUPPORTED",
            f"A process for every device cannot express this plan: strategy.replicas = {plan.strategy.replicas}.",
            flag="--to",
            hint="Emit it to data-parallel, or plan without replicas=threads.",
        )
    return devices


def devices_per_node(plan: Plan) -> int:
    """Devices of every node. Raises ImpossibleError UNSUPPORTED when the nodes differ."""
    counts = {group.node.gpus for group in plan.cluster.groups}
    if len(counts) != 1:
        raise ImpossibleError(
            "UNSUPPORTED",
            "torchrun starts equally many processes on every node; this cluster's nodes differ.",
            flag="--to",
            hint="Plan for nodes with equally many devices.",
        )
    return counts.pop()


def refuse_uneven_batch(plan: Plan, target: str) -> None:
    """Raise ImpossibleError UNSUPPORTED for an uneven batch where the target says which node is which."""
    if plan.strategy.uneven_batch:
        raise ImpossibleError(
            "UNSUPPORTED",
            f"{target} cannot express this plan: strategy.uneven_batch needs nodes of each kind in the order of its shares, and {target} "
            "numbers nodes itself.",
            flag="--to",
            value=target,
            hint="Emit it to torchrun, and start launch.sh on each node with its number.",
        )
