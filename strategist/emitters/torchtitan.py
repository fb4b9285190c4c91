"""torchtitan: flags over its own configuration registry, a short script that hands both to it, and torchrun as launcher.

FSDP2 carries every mesh, also that of replicas alone, so that its number formats hold everywhere: fp32 weights, gradients
and reduction. ZeRO 2 keeps gathered weights after the forward pass. Keys as in torchtitan 0.3.0, config/configs.py, trainer.py
and distributed/pipeline_parallel.py; up to 0.2 the same choices stood in a TOML file, which 0.3 no longer reads.
"""

from __future__ import annotations

from math import ceil
from pathlib import PurePosixPath
from typing import Any

from strategist.catalog import rows
from strategist.document.plan import Plan
from strategist.emitters.coverage import (
    DATA_PARALLEL,
    EVEN_STAGES,
    EVERY,
    EXPERTS_OF_A_MODEL,
    FLOAT32,
    SHARDS_GO_WITH_ZERO,
    Clash,
    Coverage,
    causal_models,
)
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.serial import json_text
from strategist.emitters.torchrun import Launcher, job_files, torchrun_launcher
from strategist.errors import shown
from strategist.records import replace

CONFIG = PurePosixPath("torchtitan.json")
SCHEDULES = {
    "none": "1F1B",
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""torch's names of pipeline schedules; without a pipeline the name is not read."""

RESHARD = {0: "default", 2: "never", 3: "always"}
"""What happens to gathered weights after the forward pass, by ZeRO stage."""

COVERAGE = Coverage(
    framework="torchtitan 0.3",
    values={
        **DATA_PARALLEL,
        "mesh.tp": EVERY,
        "mesh.pp": EVERY,
        "mesh.ep": EVERY,
        "strategy.zero": tuple(RESHARD),
        "strategy.virtual_stages": EVERY,
        "strategy.schedule": tuple(SCHEDULES),
        "strategy.sequence_parallel": EVERY,
        "strategy.offload": ("none", "parameters"),
        "strategy.formats": (FLOAT32, replace(FLOAT32, compute="bfloat16")),
        "strategy.optimizer": ("adamw",),
        "strategy.backend": ("nccl",),
        "strategy.compile": EVERY,
        "workload.precision": ("fp32", "bf16"),
    },
    why={
        "mesh.cp": "Its context parallelism gathers keys and values or rotates them as the model's attention decides.",
        "mesh.etp": "Its experts are cut by whole experts only.",
        "strategy.zero": "ZeRO-1 is not in it: FSDP2 reduces gradients to shards.",
        "strategy.stage_split": "It takes whole layers off the ends, not the weight of the head.",
        "strategy.recompute": "Its selective policy runs every second matrix product again, the plan's runs none.",
        "strategy.recompute_every": "It counted layers up to 0.2 (selective_ac_option); 0.3 recomputes all or none.",
        "strategy.offload": "It offloads parameters, gradients and optimizer together.",
        "strategy.optimizer": "Its registry makes AdamW.",
        "strategy.formats": "It keeps fp32 weights and gradients, and reduces in fp32.",
        "strategy.backend": "It finds the device by itself and has no option for CPUs.",
        "workload.precision": "Its fp8 and fp4 need converters in the registry's function, which no plan holds.",
    },
    clashes=(
        Clash(
            holds=lambda plan: plan.strategy.offload != "none" and plan.strategy.zero != 3,
            sentence="strategy.offload = parameters needs strategy.zero = 3: it is an option of FSDP2.",
        ),
        Clash(
            holds=lambda plan: plan.model.moe is not None and plan.mesh.tp > 1,
            sentence="mesh.tp beside experts would cut them too, which a plan with mesh.etp = 1 does not.",
        ),
        Clash(
            holds=lambda plan: plan.strategy.virtual_stages > 1 and _stage_count(plan) != _runs(plan),
            sentence="mesh.pp x strategy.virtual_stages is a number of stages that no whole number of layers per stage gives.",
        ),
        EVEN_STAGES,
        EXPERTS_OF_A_MODEL,
        SHARDS_GO_WITH_ZERO,
        causal_models("torchtitan"),
    ),
)

TRAIN = '''"""Train under plan.json with torchtitan. Yours to edit: the flags stand in torchtitan.json, nothing is baked in.

Name the model by torchtitan's registry where launch.sh does not, and give what the plan does not say as torchtitan's own flags:
launch.sh --module llama3 --config llama3_8b --training.steps 1000
"""

import json
import sys
from pathlib import Path

from torchtitan.train import main


def words(flags):
    """The flags as words: switches by their name or its negation, everything else by name and value."""
    for name, value in flags.items():
        section, _, key = name.rpartition(".")
        if isinstance(value, bool):
            yield f"--{section}.{key}" if value else f"--{section}.no-{key}"
        else:
            yield from (f"--{name}", str(value))


layout = json.loads((Path(__file__).parent / "torchtitan.json").read_text(encoding="utf-8"))
sys.argv[1:] = [*sys.argv[1:], *words(layout["flags"]), f"activation-checkpoint:{layout['activation-checkpoint']}"]
main()
'''


def _runs(plan: Plan) -> int:
    """Runs of layers over all stages."""
    return plan.mesh.pp * plan.strategy.virtual_stages


def _stage_count(plan: Plan) -> int:
    """Stages that torchtitan makes of the layers per stage that stand in its flags."""
    return ceil(plan.model.layers / ceil(plan.model.layers / _runs(plan)))


def torchtitan_flags(plan: Plan) -> dict[str, Any]:
    """Flags by section and key. In a pipeline all micro-batches of a step are one local batch."""
    mesh, strategy = plan.mesh, plan.strategy
    local = strategy.micro_batch * (strategy.accumulation if mesh.pp > 1 else 1)
    flags = {
        "training.seq_len": plan.workload.seq_len,
        "training.local_batch_size": local,
        "training.global_batch_size": plan.workload.global_batch,
        "training.dtype": "float32",
        "training.mixed_precision_param": strategy.formats.compute,
        "training.mixed_precision_reduce": strategy.formats.reduce,
        "training.enable_cpu_offload": strategy.offload == "parameters",
        "training.disable_cuda_graphs": True,
        "parallelism.data_parallel_replicate_degree": mesh.dp_replicate,
        "parallelism.data_parallel_shard_degree": mesh.dp_shard,
        "parallelism.fsdp_reshard_after_forward": RESHARD[strategy.zero],
        "parallelism.tensor_parallel_degree": mesh.tp,
        "parallelism.enable_sequence_parallel": strategy.sequence_parallel,
        "parallelism.context_parallel_degree": mesh.cp,
        "parallelism.expert_parallel_degree": mesh.ep,
        "parallelism.pipeline_parallel_degree": mesh.pp,
        "parallelism.spmd_backend": "partial_dtensor",
        "compile.enable": strategy.compile,
    }
    return flags | (_pipeline(plan) if mesh.pp > 1 else {})


def _pipeline(plan: Plan) -> dict[str, Any]:
    """The pipeline's flags. Stages are even: no layers are taken off the first and the last one."""
    looped = {"parallelism.pipeline_parallel_layers_per_stage": ceil(plan.model.layers / _runs(plan))}
    return {
        "parallelism.pipeline_parallel_schedule": SCHEDULES[plan.strategy.schedule],
        "parallelism.pipeline_parallel_microbatch_size": plan.strategy.micro_batch,
        "parallelism.pipeline_parallel_first_stage_less_layers": 0,
        "parallelism.pipeline_parallel_last_stage_less_layers": 0,
    } | (looped if plan.strategy.virtual_stages > 1 else {})


def write(plan: Plan, options: Options) -> Files:
    """plan.json, torchtitan.json, train.py and launch.sh."""
    document = {"flags": torchtitan_flags(plan), "activation-checkpoint": plan.strategy.recompute}
    return job_files(plan, options, TRAIN, _launcher(plan)) | {CONFIG: json_text(document)}


def _launcher(plan: Plan) -> Launcher:
    """torchrun with the model's name in the registry, or with a comment where it has none; of two names torchtitan takes the last
    (config/manager.py), so that the user's win."""
    known = (row for row in rows("torchtitan_models") if row["model"] == plan.model.name and "module" in row)
    row = next(known, None)
    if row is None:
        said = f"# torchtitan 0.3.0 brings no configuration of {shown(plan.model.name)}: name yours with --module and --config.\n"
        return replace(torchrun_launcher(plan), settings=said)
    return replace(torchrun_launcher(plan), words=(f"--module {row['module']}", f"--config {row['config']}"))


TORCHTITAN = Emitter(
    name="torchtitan",
    title="torchtitan: flags over a model of its registry",
    engine="torchtitan",
    versions="torchtitan 0.3, torch 2.13",
    write=write,
    axes=COVERAGE.axes,
    coverage=COVERAGE,
    executables=("launch.sh",),
)
