"""torchrun: the plan, a short training script on our executor, and a launch script."""

from __future__ import annotations

from pathlib import PurePosixPath

from strategist.document.plan import Plan
from strategist.document.write import dump
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.executor_script import TRAIN_CALL, executor_script, script_of
from strategist.emitters.places import ranks_per_node
from strategist.emitters.quoting import exports
from strategist.errors import ImpossibleError, shown
from strategist.records import dataclass

DEFAULT_PORT = 29500
EXECUTOR_AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp")
"""Mesh axes that strategist's executor runs; a test holds them against what it refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Words before the training script: on the only node, and on many.

    $address and $port say there where ranks meet if `needs_address`. If `on_each_node`, every node runs the launch
    script and $node is its number; else one node runs it for all. `words` are the script's own, quoted for the shell,
    before those of the user; `settings` are lines before the command, `companions` lines that start what runs beside it
    on every one of many nodes, where $node, $address and $port are known.
    """

    one_node: str
    many_nodes: str
    on_each_node: bool = True
    needs_address: bool = True
    words: tuple[str, ...] = ()
    settings: str = ""
    companions: str = ""


TRAIN = executor_script(TRAIN_CALL)


def layout_comment(plan: Plan) -> str:
    """What the script starts, in one comment line, and in another who runs how much of an uneven batch."""
    mesh = plan.mesh
    axes = " x ".join(f"{axis} {mesh.size(axis)}" for axis in mesh.order if mesh.size(axis) > 1) or "one process"
    said = f"# {plan.model.depth}-layer {shown(plan.model.family)}: {axes}; {plan.batch_identity} sequences per step"
    return f"{said}\n{_order_comment(plan)}" if plan.strategy.uneven_batch else said


def _order_comment(plan: Plan) -> str:
    """Which nodes come first: ranks run as many micro-batches as the kind that stands here in their place."""
    nodes = (f"{group.count} x {shown(group.node.gpu.title)}" for group in plan.cluster.groups)
    each = zip(nodes, plan.strategy.uneven_batch, strict=True)
    words = ", then ".join(f"{kind} with {share.micro_batches}" for kind, share in each)
    return f"# Nodes are numbered in this order, by the micro-batches of their ranks: {words}"


def threads_line(plan: Plan) -> str:
    """CPU ranks share the cores; torchrun's own default of one thread is said aloud."""
    return 'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"\n' if plan.strategy.backend == "gloo" else ""


def exported_names(plan: Plan, options: Options) -> tuple[str, ...]:
    """Variables that the launch script exports, for launchers that carry them to other nodes by name."""
    told = tuple(name for name, _ in options.env)
    return told if not threads_line(plan) or "OMP_NUM_THREADS" in told else (*told, "OMP_NUM_THREADS")


def torchrun_launcher(plan: Plan) -> Launcher:
    """torchrun, which meets by itself on one node."""
    ranks = ranks_per_node(plan)
    return Launcher(
        one_node=f"torchrun --standalone --nnodes 1 --nproc-per-node {ranks}",
        many_nodes=f'torchrun --nnodes {plan.cluster.nodes} --nproc-per-node {ranks} --node-rank "$node" \\\n'
        '  --master-addr "$address" --master-port "$port"',
    )


def launch_script(plan: Plan, options: Options, launcher: Launcher | None = None) -> str:
    """One script for one node or many (the same on every node, NODE_RANK differs); torchrun unless told otherwise."""
    nodes, start = plan.cluster.nodes, launcher or torchrun_launcher(plan)
    head = f"#!/usr/bin/env bash\n{layout_comment(plan)}\nset -euo pipefail\n"
    here = 'here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"\n'
    settings = start.settings + exports(options.env) + threads_line(plan)
    script = "".join(f" \\\n  {word}" for word in ('"$here/train.py"', *start.words, '"$@"'))
    if not start.words:
        script = ' "$here/train.py" "$@"'
    if nodes == 1:
        return f"{head}{here}{settings}exec {start.one_node}{script}\n"
    meeting = _meeting(options) if start.needs_address else ""
    number = f'node="${{NODE_RANK:?set NODE_RANK to 0 .. {nodes - 1}}}"\n' if start.on_each_node else ""
    return f"{head}{here}{settings}{meeting}{number}{start.companions}exec {start.many_nodes}{script}\n"


def _meeting(options: Options) -> str:
    """Where the ranks of several nodes meet: told when emitting, or by the environment of the script."""
    address = options.master_addr or "${MASTER_ADDR:?set MASTER_ADDR to the first node}"
    return f'address="{address}"\nport="{port_of(options)}"\n'


def refuse_meeting_place(options: Options, reason: str) -> None:
    """Raise ImpossibleError UNSUPPORTED when a meeting place is told and the target has no place for it."""
    for flag, value in (("--master-addr", options.master_addr), ("--master-port", options.master_port)):
        if value is not None:
            raise ImpossibleError(
                "UNSUPPORTED",
                f"{reason}; {flag} has no place in its files.",
                flag=flag,
                value=value,
                hint=f"Leave {flag} away.",
            )


def port_of(options: Options) -> str:
    """The port where ranks meet, as the shell says it: what the environment has, or was told, or torchrun's own."""
    return f"${{MASTER_PORT:-{options.master_port or DEFAULT_PORT}}}"


def job_files(plan: Plan, options: Options, train: str, launcher: Launcher | None = None) -> dict[PurePosixPath, str]:
    """The files of every target of one script: the plan, the training script, and what starts it."""
    return {
        PurePosixPath("plan.json"): dump(plan),
        PurePosixPath("train.py"): train,
        PurePosixPath("launch.sh"): launch_script(plan, options, launcher),
    }


def executor_files(plan: Plan, options: Options, train: str, launcher: Launcher | None = None) -> Files:
    """The same where strategist's executor trains: the script is for the plan's model."""
    return job_files(plan, options, script_of(plan, train), launcher)


def write(plan: Plan, options: Options) -> Files:
    """plan.json, train.py and launch.sh."""
    return executor_files(plan, options, TRAIN)


TORCHRUN = Emitter(
    name="torchrun",
    title="PyTorch torchrun with strategist's executor",
    engine="strategist",
    versions="torch 2.13",
    write=write,
    axes=EXECUTOR_AXES,
    executables=("launch.sh",),
)
