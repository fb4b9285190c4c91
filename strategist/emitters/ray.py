"""Ray Train: a script whose TorchTrainer starts one worker for each rank, on a Ray cluster or on this machine alone.

Names as in Ray 2.60.0, python/ray/train/v2/api/config.py and python/ray/train/torch/config.py.
"""

from __future__ import annotations

from strategist.document.plan import Plan
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.executor_script import TRAIN_CALL, executor_script
from strategist.emitters.places import ranks_per_node, refuse_uneven_batch
from strategist.emitters.torchrun import EXECUTOR_AXES, Launcher, executor_files, exported_names, refuse_meeting_place

TRAIN = executor_script(
    f'''

def run_rank() -> None:
    """One worker. Ray has joined the process group and set the variables that torchrun would have set."""
    {TRAIN_CALL}

def scaling() -> ScalingConfig:
    """One worker for each rank, packed: neighbours in rank order stay on one node as long as it has room."""
    on_gpus = plan.strategy.backend == "nccl"
    strict = "STRICT_PACK" if plan.cluster.nodes == 1 else "PACK"
    resources = {{"CPU": 1, "GPU": 1}} if on_gpus else {{"CPU": 1}}
    return ScalingConfig(
        num_workers=plan.mesh.world, use_gpu=on_gpus, resources_per_worker=resources, placement_strategy=strict
    )


if __name__ == "__main__":
    names = os.environ.get("RANK_VARIABLES", "").split()  # launch.sh exports them: workers start elsewhere
    cluster = "auto" if plan.cluster.nodes > 1 else None  # several nodes need a cluster that runs; see RAY_ADDRESS
    ray.init(address=cluster, runtime_env={{"env_vars": {{name: os.environ[name] for name in names}}}})
    trainer = TorchTrainer(
        run_rank, torch_config=TorchConfig(backend=plan.strategy.backend), scaling_config=scaling()
    )
    trainer.fit()
''',
    how=", its ranks started by Ray Train",
    others=(
        "import ray",
        "from ray.train import ScalingConfig",
        "from ray.train.torch import TorchConfig, TorchTrainer",
    ),
)


def ray_launcher(plan: Plan, options: Options) -> Launcher:
    """Python on one node, whatever the number of nodes; the names of variables for the workers come with it."""
    command = f'env RANK_VARIABLES="{" ".join(exported_names(plan, options))}" python3'
    return Launcher(one_node=command, many_nodes=command, on_each_node=False, needs_address=False)


def write(plan: Plan, options: Options) -> Files:
    """plan.json, train.py and launch.sh. Raises ImpossibleError UNSUPPORTED for a told meeting place."""
    refuse_meeting_place(options, "Ray chooses where ranks meet")
    return executor_files(plan, options, TRAIN, ray_launcher(plan, options))


def placed(plan: Plan) -> int:
    """Ranks per node. Raises ImpossibleError UNSUPPORTED as `ranks_per_node`, and for uneven batches."""
    refuse_uneven_batch(plan, "ray")
    return ranks_per_node(plan)


RAY = Emitter(
    name="ray",
    title="Ray Train with strategist's executor",
    engine="strategist",
    versions="Ray 2.60, torch 2.13",
    write=write,
    placed=placed,
    axes=EXECUTOR_AXES,
    executables=("launch.sh",),
)
