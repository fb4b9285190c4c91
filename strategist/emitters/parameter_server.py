"""A parameter server: a script that starts a plan's DDP ranks, the first of which starts the process that holds the tables of embeddings."""

from __future__ import annotations

from strategist.document.plan import Plan
from strategist.emitters.coverage import DATA_PARALLEL, EVERY, Clash, Coverage
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.mp_spawn import spawn_launcher, spawn_script
from strategist.emitters.torchrun import executor_files

TRAIN = spawn_script(""", its ranks started by mp.spawn.

Tables of embeddings lie on a parameter server, a process that rank 0 starts: workers pull the rows that their sequences name and
push their gradients (torch.distributed.rpc); all other weights are under DDP""")

COVERAGE = Coverage(
    framework="torch.distributed.rpc's parameter server",
    values={
        **DATA_PARALLEL,
        "mesh.dp_shard": (1,),
        "strategy.recompute": ("none", "selective", "full"),
        "strategy.recompute_layers": EVERY,
        "strategy.recompute_every": EVERY,
        "strategy.compile": (False, True),
        "strategy.tables": ("server",),
        "strategy.loss": ("whole", "chunked"),
        "strategy.optimizer": ("adamw", "adamw8bit", "sgd"),
    },
    why={
        "strategy.recompute_stages": "Its workers are no stages of a pipeline.",
        "mesh.dp_shard": "Weights beside the tables are under DDP.",
        "strategy.zero": "Weights beside the tables are under DDP.",
        "strategy.replicas": "Every worker is a process.",
        "strategy.tables": "Its server is there to hold them: plan with --pin tables=server.",
    },
    clashes=(
        Clash(
            holds=lambda plan: plan.cluster.nodes > 1,
            sentence="The script starts workers and server on one node; mesh.dp_replicate spans several.",
        ),
    ),
    hint="Plan with --pin tables=server, or emit it to torchrun.",
)


def write(plan: Plan, options: Options) -> Files:
    """plan.json, train.py and launch.sh."""
    return executor_files(plan, options, TRAIN, spawn_launcher(options))


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
