"""Alibaba's EPL, which nobody maintains: its configuration, a script with its annotations, and a launch script.

Replicas follow from the number of devices, stages are annotations around the model's parts. Keys as in EPL at commit
d38b527 (2023-03-31), epl/config.py, and names as in epl/__init__.py; it needs TensorFlow 1.x, whose graphs it rewrites.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from strategist.document.plan import Plan
from strategist.emitters.coverage import EVERY, FLOAT32, Clash, Coverage
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.places import ranks_per_node
from strategist.emitters.serial import json_text
from strategist.emitters.torchrun import Launcher, job_files, refuse_meeting_place
from strategist.records import replace

CONFIG = PurePosixPath("epl.json")
UNMAINTAINED = "unmaintained since 2023-03-31; use torchrun, megatron or torchtitan"
ORDERS = {"none": "PreferBackward", "1f1b": "PreferBackward", "gpipe": "PreferForward"}
"""EPL's names of what a stage does first: the backward passes that are ready, or all forward passes."""

COVERAGE = Coverage(
    framework="EPL 0.3",
    values={
        "mesh.dp_replicate": EVERY,
        "mesh.pp": EVERY,
        "strategy.schedule": tuple(ORDERS),
        "strategy.stage_split": EVERY,
        "strategy.micro_batch": EVERY,
        "strategy.accumulation": EVERY,
        "strategy.formats": (FLOAT32, replace(FLOAT32, compute="float16")),
        "strategy.optimizer": ("adamw", "sgd"),
        "strategy.backend": ("nccl",),
        "workload.precision": ("fp32", "fp16"),
    },
    why={
        "mesh.dp_shard": "Its ZeRO wants a process for each device and no accumulation, which the script does not have.",
        "mesh.tp": "Its split needs operators that are written for it.",
        "mesh.cp": "It has no context parallelism.",
        "mesh.ep": "Its experts need operators that are written for it.",
        "strategy.zero": "Its ZeRO wants a process for each device and no accumulation, which the script does not have.",
        "strategy.schedule": "Its pipelines prefer backward or forward passes.",
        "strategy.recompute": "It searches for what it keeps by itself.",
        "strategy.offload": "It offloads all weights or none, and no optimizer.",
        "strategy.compile": "It rewrites TensorFlow's graphs itself.",
        "strategy.formats": "It keeps fp32 weights and computes in fp32 or float16.",
        "strategy.optimizer": "It has TensorFlow's optimizers.",
        "strategy.backend": "It trains on GPUs.",
        "workload.precision": "It knows none of bf16, fp8 and fp4.",
    },
    clashes=(
        Clash(
            holds=lambda plan: plan.cluster.nodes > 1 and ranks_per_node(plan) % plan.mesh.pp > 0,
            sentence="mesh.pp must divide the devices of a node: its replicas are placed inside nodes.",
        ),
    ),
    hint="Emit it to torchrun, which is maintained.",
)

TRAIN = f'''"""Train under epl.json and plan.json with EPL ({UNMAINTAINED}).

The model is a function of your own in TensorFlow 1.x: FUNCTION(stages, micro_batch, seq_len) builds the graph of one
micro-batch and returns its loss. `stages` has a pair (scope, layers) for each stage: what belongs to the layers, numbered
as in the list, is built inside `with scope:`, the embedding in the first and the head in the last.
"""

import argparse
import importlib
import json
from pathlib import Path

import epl
import tensorflow as tf
from epl.ops.adam_weight_decay_optimizer import AdamWeightDecayOptimizer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True, help="MODULE:FUNCTION that builds the graph")
parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
parser.add_argument("--learning-rate", type=float, default=3e-4, help="of the optimizer, constant")
options = parser.parse_args()

here = Path(__file__).parent
plan = json.loads((here / "plan.json").read_text(encoding="utf-8"))
strategy, workload = plan["strategy"], plan["workload"]
epl.init(epl.Config(json.loads((here / "epl.json").read_text(encoding="utf-8"))))

stages = []
for number, stage in enumerate(strategy["stages"]):
    layers = [layer for first, end in stage["layers"] for layer in range(first, end)]
    stages.append((epl.replicate(device_count=1, name="stage_%d" % number), layers))
module, _, function = options.model.partition(":")
loss = getattr(importlib.import_module(module), function)(stages, strategy["micro_batch"], workload["seq_len"])
epl.add_to_collection(loss, epl.GraphKeys.GLOBAL_MEAN_OBJECTS)

if strategy["optimizer"] == "sgd":
    optimizer = tf.train.MomentumOptimizer(options.learning_rate, momentum=0.9)
else:
    optimizer = AdamWeightDecayOptimizer(options.learning_rate, weight_decay_rate=0.1, beta_1=0.9, beta_2=0.95)
# Not clipped: with several micro-batches EPL would clip each replica's gradients before they are averaged.
update = optimizer.minimize(loss, global_step=tf.train.get_or_create_global_step())

# A pipeline runs all micro-batches of a step at once; without one EPL updates after every so many runs.
runs = 1 if len(stages) > 1 else strategy["accumulation"]
with tf.train.MonitoredTrainingSession() as session:
    for number in range(options.steps):
        losses = [session.run([loss, update])[0] for _ in range(runs)]
        print("step %d  loss %.6f" % (number, sum(losses) / runs), flush=True)
'''


def epl_config(plan: Plan) -> dict[str, Any]:
    """Keys of epl.Config. Without stages its num_micro_batch is the accumulation of gradients."""
    strategy = plan.strategy
    low = {"amp.level": "O1", "amp.loss_scale": "dynamic"} if strategy.formats.compute == "float16" else {}
    return {
        "pipeline.num_micro_batch": strategy.accumulation,
        "pipeline.strategy": ORDERS[strategy.schedule],
        "communication.gradients_reduce_method": "mean",
        "cluster.device_place_prefer_intra_node": True,
        **low,
    }


def epl_launcher(plan: Plan) -> Launcher:
    """One process for each node, which has all its devices. TensorFlow learns from TF_CONFIG where the others are.

    EPL's own epl-launch gives a script no words, so its variables are set here as it sets them.
    """
    nodes, ranks = plan.cluster.nodes, ranks_per_node(plan)
    devices = ",".join(map(str, range(ranks)))
    task = '{"cluster":{"worker":["%s"]},"task":{"type":"worker","index":%s}}'
    alone = task % ("127.0.0.1:29500", 0)
    return Launcher(
        one_node=f"env CUDA_VISIBLE_DEVICES={devices} TF_CONFIG='{alone}' \\\n  python3",
        many_nodes=f'env CUDA_VISIBLE_DEVICES={devices} TF_CONFIG="$task" python3',
        needs_address=False,
        settings=f"# EPL is {UNMAINTAINED}.\n",
        companions=f"""workers="${{WORKERS:?set WORKERS to HOST:PORT of all {nodes} nodes, separated by commas}}"
printf -v task '{task}' "${{workers//,/\\",\\"}}" "$node"
""",
    )


def write(plan: Plan, options: Options) -> Files:
    """plan.json, epl.json, train.py and launch.sh."""
    refuse_meeting_place(options, "EPL's processes find each other by WORKERS, the list of all nodes")
    return job_files(plan, options, TRAIN, epl_launcher(plan)) | {CONFIG: json_text(epl_config(plan))}


EPL = Emitter(
    name="epl",
    title=f"Alibaba's EPL, a TensorFlow graph of yours ({UNMAINTAINED})",
    engine="epl",
    versions="EPL 0.3.0, d38b527 of 2023-03-31",
    write=write,
    axes=COVERAGE.axes,
    coverage=COVERAGE,
    executables=("launch.sh",),
)
