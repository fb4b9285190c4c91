"""nn.DataParallel: one process with a thread for each device, and a launch script for its node."""

from __future__ import annotations

from strategist.document.plan import Plan
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.executor_script import TRAIN_CALL, executor_script
from strategist.emitters.places import devices_per_node
from strategist.emitters.torchrun import Launcher, executor_files
from strategist.errors import ImpossibleError

TRAIN = executor_script(
    f"""
# One process: nn.DataParallel splits each micro-batch over the GPUs, copies the model to them and adds up on the first
# what they give back. The loss is computed inside, so that numbers come back and no logits. DDP is faster: plan again
# without replicas=threads, and emit to torchrun.
{TRAIN_CALL}""",
    how=", one process for all devices (nn.DataParallel)",
)


def one_process(plan: Plan) -> None:
    """Raise ImpossibleError UNSUPPORTED for a plan of several processes."""
    devices_per_node(plan)
    if plan.processes > 1:
        raise ImpossibleError(
            "UNSUPPORTED",
            f"data-parallel cannot express this plan: strategy.replicas = {plan.strategy.replicas}, and its {plan.processes} "
            "ranks are a process each.",
            flag="--to",
            value="data-parallel",
            hint="Emit it to torchrun, or plan with --pin replicas=threads.",
        )


def write(plan: Plan, options: Options) -> Files:
    """plan.json, train.py and launch.sh, for a plan of one process."""
    return executor_files(plan, options, TRAIN, Launcher(one_node="python3", many_nodes="python3"))


DATA_PARALLEL_SCRIPT = Emitter(
    name="data-parallel",
    title="a script of one process for all devices of a node (nn.DataParallel), with strategist's executor",
    engine="strategist",
    versions="torch 2.13",
    write=write,
    axes=("dp_replicate",),
    placed=one_process,
    executables=("launch.sh",),
)
