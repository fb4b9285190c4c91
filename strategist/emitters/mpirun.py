"""mpirun of Open MPI: one command on one node starts the ranks of all; the script takes its numbers from MPI's variables.

Options as in Open MPI 4.1, mpirun(1). Variables reach other nodes by name (`-x`), so that no value is quoted twice.
"""

from __future__ import annotations

from strategist.document.plan import Plan
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.executor_script import TRAIN_CALL, executor_script
from strategist.emitters.places import ranks_per_node
from strategist.emitters.torchrun import EXECUTOR_AXES, Launcher, executor_files, exported_names, port_of

VARIABLES = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
}
"""What torch asks for, and what Open MPI calls it (mpirun(1), "Environment Variables")."""

TRAIN = executor_script(
    f"""
if "OMPI_COMM_WORLD_RANK" not in os.environ:
    raise SystemExit("Start this script by launch.sh: Open MPI's mpirun numbers the ranks.")
os.environ |= {{
{"".join(f'    "{name}": os.environ["{theirs}"],' + chr(10) for name, theirs in VARIABLES.items())}}}
{TRAIN_CALL}""",
    how=", its ranks started by Open MPI's mpirun",
)


def mpi_launcher(plan: Plan, options: Options) -> Launcher:
    """mpirun with as many ranks on every node as the plan has, not bound to cores: data loaders need some too.

    The hosts come from the batch system that gave them, or from the file that HOSTFILE names.
    """
    ranks = ranks_per_node(plan)
    names = ("MASTER_ADDR", "MASTER_PORT", *exported_names(plan, options))
    shared = " ".join(f"-x {name}" for name in names)
    share_cores = " --oversubscribe" if plan.strategy.backend == "gloo" else ""
    command = f"mpirun -np {plan.mesh.world} --map-by ppr:{ranks}:node --bind-to none{share_cores} \\\n  {shared}"
    return Launcher(
        one_node=f'env MASTER_ADDR=127.0.0.1 MASTER_PORT="{port_of(options)}" {command} python3',
        many_nodes=f'env MASTER_ADDR="$address" MASTER_PORT="$port" {command} \\\n'
        '  ${HOSTFILE:+--hostfile "$HOSTFILE"} python3',
        on_each_node=False,
    )


def write(plan: Plan, options: Options) -> Files:
    """plan.json, train.py and launch.sh. Raises ImpossibleError UNSUPPORTED when the nodes differ."""
    return executor_files(plan, options, TRAIN, mpi_launcher(plan, options))


MPIRUN = Emitter(
    name="mpirun",
    title="Open MPI's mpirun with strategist's executor",
    engine="strategist",
    versions="Open MPI 4.1, torch 2.13",
    write=write,
    axes=EXECUTOR_AXES,
    executables=("launch.sh",),
)
