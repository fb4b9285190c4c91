"""Slurm: the torchrun files and a batch script with one task per node, its port derived from the job's number."""

from __future__ import annotations

from pathlib import PurePosixPath

from strategist.document.plan import Plan
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.places import ranks_per_node
from strategist.emitters.quoting import exports
from strategist.emitters.torchrun import EXECUTOR_AXES, layout_comment, threads_line
from strategist.emitters.torchrun import write as write_torchrun


def batch_script(plan: Plan, options: Options) -> str:
    """The sbatch script. One task per node: torchrun starts the ranks, so eight tasks would start sixty-four.

    The whole node is asked for: a task has one CPU unless told, and the memory that the site gives by default. --exclusive allocates all
    CPUs of a node and --mem=0 all its memory; the one task, whose children the ranks are, is bound to none of them (Slurm 284c3b9 of
    2026-08-20: doc/man/man1/sbatch.1 and srun.1).
    """
    nodes, ranks = plan.cluster.nodes, ranks_per_node(plan)
    devices = [] if plan.strategy.backend == "gloo" else [f"#SBATCH --gpus-per-node={ranks}"]
    directives = [
        f"#SBATCH --job-name={options.job_name}",
        f"#SBATCH --nodes={nodes}",
        *_segments(plan),
        "#SBATCH --ntasks-per-node=1",
        *devices,
        "#SBATCH --exclusive",
        "#SBATCH --mem=0",
        "#SBATCH --output=%x-%j.out",
    ]
    port = str(options.master_port) if options.master_port else "$((20000 + SLURM_JOB_ID % 20000))"
    return (
        "#!/usr/bin/env bash\n"
        + "\n".join(directives)
        + f"\n{layout_comment(plan)}\nset -euo pipefail\n"
        + 'here="${SLURM_SUBMIT_DIR:-$PWD}"\n'
        + exports(options.env)
        + threads_line(plan)
        + _address(options)
        + f'export MASTER_PORT="{port}"\n'
        + "srun --kill-on-bad-exit=1 --cpu-bind=none bash -c '\n"
        + f'  exec torchrun --nnodes {nodes} --nproc-per-node {ranks} --node-rank "$SLURM_NODEID" \\\n'
        + '    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$0/train.py" "$@"\n'
        + '\' "$here" "$@"\n'
    )


def _segments(plan: Plan) -> list[str]:
    """How many nodes of a rack are taken together, where the plan counts on several racks that share fast links inside. Slurm 24.05 and
    later, on sites whose topology has blocks; others ignore it. It must divide the number of nodes, as plans take equal parts of racks."""
    nodes = plan.cluster.nodes
    rack = min(group.node.fast_domain // group.node.gpus for group in plan.cluster.groups)
    return [f"#SBATCH --segment={rack}"] if 1 < rack < nodes and nodes % rack == 0 else []


def _address(options: Options) -> str:
    """The first node's name: told, or the first one of the job. A failing scontrol ends the script."""
    if options.master_addr:
        return f'export MASTER_ADDR="{options.master_addr}"\n'
    return 'hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"\nexport MASTER_ADDR="${hosts%%$\'\\n\'*}"\n'


def write(plan: Plan, options: Options) -> Files:
    """plan.json, train.py and job.sbatch; submit from this folder."""
    files = dict(write_torchrun(plan, options))
    del files[PurePosixPath("launch.sh")]
    return files | {PurePosixPath("job.sbatch"): batch_script(plan, options)}


SLURM = Emitter(
    name="slurm",
    title="Slurm batch job that starts torchrun on every node",
    engine="strategist",
    versions="Slurm 20.11 or later, torch 2.13",
    write=write,
    axes=EXECUTOR_AXES,
    executables=("job.sbatch",),
)
