"""A parameter server: a script that starts a plan's DDP ranks and one process more, which holds the tables of embeddings."""

from __future__ import annotations

from strategist.document.plan import Plan
from strategist.emitters.coverage import DATA_PARALLEL, EVERY, Clash, Coverage
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.executor_script import executor_script
from strategist.emitters.torchrun import Launcher, job_files

TRAIN = executor_script(
    '''

def run_rank(rank: int, workers: int, folder: str) -> None:
    """A worker, with the variables that torchrun would have set; the rank behind the workers is the server.

    Workers pull the rows that their sequences name and push their gradients; all other weights are under DDP.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers)}
    meeting = Path(folder).as_uri() + "/rpc"
    train_with_server(plan, rank, meeting, options.steps, seed=options.seed, on_step=report)


def free_port() -> str:
    """A port that nobody uses; good enough for the ranks of one node."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


if __name__ == "__main__":
    workers = plan.mesh.world
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT") or free_port()}
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(workers, folder), nprocs=workers + 1)
''',
    how=", its tables of embeddings on a parameter server",
    standard=("import socket", "import tempfile"),
    others=(
        "import torch.multiprocessing as mp",
        "from strategist.executor.parameter_server import train_with_server",
    ),
    train="from strategist.executor.train import StepResult",
)

COVERAGE = Coverage(
    framework="torch.distributed.rpc's parameter server",
    values={
        **DATA_PARALLEL,
        "mesh.dp_shard": (1,),
        "strategy.recompute": ("none", "selective", "full"),
        "strategy.recompute_layers": EVERY,
        "strategy.recompute_every": EVERY,
        "strategy.compile": (False, True),
    },
    why={
        "mesh.dp_shard": "Weights beside the tables are under DDP.",
        "strategy.zero": "Weights beside the tables are under DDP.",
        "strategy.replicas": "Every worker is a process.",
    },
    clashes=(
        Clash(
            holds=lambda plan: plan.cluster.nodes > 1,
            sentence="The script starts workers and server on one node; mesh.dp_replicate spans several.",
        ),
        Clash(
            holds=lambda plan: plan.model.tied,
            sentence="model.tied: the head shares its weight with the table, which the server would have alone.",
        ),
    ),
    hint="Plan with --pin dp_replicate=N,zero=0 on one node, or emit it to torchrun.",
)


def write(plan: Plan, options: Options) -> Files:
    """plan.json, train.py and launch.sh."""
    told = f"env MASTER_PORT={options.master_port} " if options.master_port else ""
    return job_files(plan, options, TRAIN, Launcher(one_node=f"{told}python3", many_nodes="python3"))


PARAMETER_SERVER = Emitter(
    name="parameter-server",
    title="DDP on workers, tables of embeddings on a server (torch.distributed.rpc), with strategist's executor",
    engine="strategist",
    versions="torch 2.13",
    write=write,
    axes=COVERAGE.axes,
    coverage=COVERAGE,
    executables=("launch.sh",),
)
