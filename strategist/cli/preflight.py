"""What must be true before a single process starts: seal, invariants, hardware, and a layout the executor knows."""

from __future__ import annotations

from importlib.util import find_spec

from strategist.document.plan import Plan
from strategist.document.write import seal_state
from strategist.errors import ImpossibleError, InputError, StaleError
from strategist.executor.support import obstacles, require_packages, way_out
from strategist.facts.clusters import resolve_cluster
from strategist.planner.check import require_sound
from strategist.units import counted


def preflight(plan: Plan, *, allow_edited: bool, accept_hardware: bool, own_job: bool) -> None:
    """Raise for the first thing that forbids running the plan on this machine."""
    _seal(plan, allow_edited)
    require_sound(plan)
    _hardware(plan, accept_hardware)
    _devices(plan)
    missing = obstacles(plan) if own_job else ()
    if missing:
        raise ImpossibleError(
            "UNSUPPORTED",
            f"The executor cannot run this plan: {' '.join(obstacle.sentence for obstacle in missing)}",
            flag="PLAN",
            hint=way_out(missing),
        )
    require_packages("Running", plan.model.method, plan.workload.precision)


def require_tensorboard() -> None:
    """Raise InputError MISSING where the package that writes scalars is not installed."""
    if find_spec("tensorboard") is None:
        raise InputError(
            "MISSING",
            "Scalars for TensorBoard need its package, which is not installed here.",
            flag="--tensorboard",
            hint="Install it: pip install 'strategist[tensorboard]'.",
        )


def _seal(plan: Plan, allow_edited: bool) -> None:
    state = seal_state(plan)
    if state == "sealed" or allow_edited:
        return
    words = "was edited after it was sealed" if state == "edited" else "has no seal"
    raise StaleError(
        "DIGEST",
        f"The plan {words}.",
        flag="PLAN",
        hint="Check and seal it with `strategist check PLAN --seal`, or add --allow-edited.",
    )


def _hardware(plan: Plan, accept: bool) -> None:
    if plan.hardware_is_assumed and not accept:
        raise StaleError(
            "ASSUMED_HARDWARE",
            "The plan is for assumed hardware that nobody confirmed.",
            flag="PLAN",
            hint="Plan again with --hardware local or the name of these machines, or confirm them with --accept-hardware.",
        )
    differences = [] if accept else _differences(plan)
    if differences:
        raise StaleError(
            "FACTS_DIFFER",
            f"This machine is not the one the plan was made for: {'; '.join(differences)}.",
            flag="PLAN",
            hint="Plan again with --hardware local, emit the plan for the cluster, or add --accept-hardware.",
        )


def _devices(plan: Plan) -> None:
    """One GPU per rank, which no acceptance replaces. CPU ranks are processes: any number of them can start."""
    if plan.strategy.backend == "gloo":
        return
    node = resolve_cluster("local").cluster.groups[0].node
    here = 0 if node.gpu.vendor == "CPU" else node.gpus
    if here < plan.mesh.world:
        raise ImpossibleError(
            "UNSUPPORTED_DEVICE",
            f"The plan needs {counted(plan.mesh.world, 'GPU')}, one per rank, and this machine has {here}.",
            flag="PLAN",
            value=plan.mesh.world,
            hint="Plan again with --hardware local, or emit the plan for the machines that have them.",
        )


def _differences(plan: Plan) -> list[str]:
    """Each fact of the plan that this machine does not share. CPU ranks are processes: any number of them can start."""
    if plan.cluster.nodes > 1:
        return [f"the plan needs {plan.cluster.nodes} nodes and `run` starts one (emit it for torchrun or slurm)"]
    planned = plan.cluster.groups[0].node
    if planned.gpu.vendor == "CPU":
        return []
    found = resolve_cluster("local").cluster.groups[0].node
    differences = []
    if found.gpu.name != planned.gpu.name:
        differences.append(f"device {found.gpu.title} instead of {planned.gpu.title}")
    if found.gpu.vendor == "CPU" or found.gpus < planned.gpus:
        have = 0 if found.gpu.vendor == "CPU" else found.gpus
        differences.append(f"{counted(have, 'GPU')} instead of {planned.gpus}")
    return differences
