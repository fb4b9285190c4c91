"""torch.multiprocessing.spawn: a script that starts the ranks of its node as its own children, and a launch script."""

from __future__ import annotations

from strategist.document.plan import Plan
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.executor_script import TRAIN_CALL, executor_script
from strategist.emitters.torchrun import EXECUTOR_AXES, Launcher, executor_files

BODY = f'''

def run_rank(local_rank: int, ranks: int, port: str) -> None:
    """One rank of this node, with the variables that torchrun would have set."""
    rank = int(os.environ.get("NODE_RANK", "0")) * ranks + local_rank
    os.environ |= {{"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(plan.mesh.world)}}
    os.environ |= {{"MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"), "MASTER_PORT": port}}
    {TRAIN_CALL.rstrip()}


def free_port() -> str:
    """A port that nobody uses; good enough for the ranks of one node."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


if __name__ == "__main__":
    ranks = plan.mesh.world // plan.cluster.nodes
    mp.spawn(run_rank, args=(ranks, os.environ.get("MASTER_PORT") or free_port()), nprocs=ranks)
'''


def spawn_script(how: str) -> str:
    """A training script that starts the ranks of its node; `how` are words of its first line."""
    return executor_script(BODY, how=how, standard=("import socket",), others=("import torch.multiprocessing as mp",))


TRAIN = spawn_script(", its ranks started by mp.spawn")


def spawn_launcher(options: Options) -> Launcher:
    """Python on every node; the script starts the ranks and is told the meeting place by variables."""
    told = f"env MASTER_PORT={options.master_port} " if options.master_port else ""
    return Launcher(
        one_node=f"{told}python3",
        many_nodes='env NODE_RANK="$node" MASTER_ADDR="$address" MASTER_PORT="$port" python3',
    )


def write(plan: Plan, options: Options) -> Files:
    """plan.json, train.py and launch.sh."""
    return executor_files(plan, options, TRAIN, spawn_launcher(options))


MP_SPAWN = Emitter(
    name="mp-spawn",
    title="a script that starts its ranks by torch.multiprocessing.spawn, with strategist's executor",
    engine="strategist",
    versions="torch 2.13",
    write=write,
    axes=EXECUTOR_AXES,
    executables=("launch.sh",),
)
