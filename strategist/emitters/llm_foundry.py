"""llm-foundry: the YAML of its training command, a script that gives it to the framework, and torchrun as launcher.

Replicas are DDP; ZeRO 2 and 3, also in replicated groups, are Composer's FSDP. The file is for `train.py` of its scripts
too, with NAME=VALUE words behind it. Keys as in llm-foundry 0.22.0, llmfoundry/utils/config_utils.py (TrainConfig), and the
sections as Composer 0.32.1 reads them.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from strategist.document.plan import Plan
from strategist.emitters.composer import FORMATS_AND_SHARDS, PRECISION, WHY, fsdp_section
from strategist.emitters.coverage import AUTOCAST, DATA_PARALLEL, FLOAT32, Clash, Coverage, causal_models
from strategist.emitters.deepspeed import CLIP_NORM
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.serial import yaml_text
from strategist.emitters.torchrun import job_files, layout_comment

CONFIG = PurePosixPath("llm_foundry.yaml")
RATE, DECAY = 3.0e-4, 0.1
"""As strategist's executor has them."""

COVERAGE = Coverage(
    framework="llm-foundry 0.22",
    values={
        **DATA_PARALLEL,
        "strategy.zero": (0, 2, 3),
        "strategy.formats": (FLOAT32, *(formats for formats in AUTOCAST if formats.compute == "bfloat16")),
        "strategy.optimizer": ("adamw",),
        "strategy.backend": ("nccl",),
        "workload.precision": ("fp32", "bf16"),
    },
    why=WHY
    | {
        "mesh.tp": "Its tp_config needs a strategy that is written for the model.",
        "strategy.recompute": "It recomputes whole layers.",
        "strategy.formats": "It keeps fp32 weights, and its float16 was not tried.",
        "strategy.optimizer": "It registers no SGD, and no AdamW of fewer bits.",
        "strategy.backend": "Its files were checked for GPUs only.",
    },
    clashes=(
        *FORMATS_AND_SHARDS,
        Clash(
            holds=lambda plan: plan.strategy.recompute == "full" and plan.strategy.zero == 0,
            sentence="strategy.recompute = full is a key of its FSDP, which strategy.zero of 2 or 3 brings.",
        ),
        causal_models("llm-foundry"),
    ),
    hint="Emit it to composer, accelerate or torchrun, or pin another layout.",
)

TRAIN = '''"""Train under llm_foundry.yaml. Model, tokenizer and data come from the command, all else from the file."""

import argparse
import json
import os
from pathlib import Path

from llmfoundry.command_utils import train_from_yaml

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True, help="folder or hub name of a transformers configuration")
parser.add_argument("--tokenizer", required=True, help="folder or hub name of a tokenizer")
parser.add_argument("--data", required=True, help="folder of a streaming data set with a split `train`")
parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
parser.add_argument("--seed", type=int, default=0, help="seed of weights and data")
parser.add_argument("words", nargs="*", help="further NAME=VALUE words of llm-foundry, such as save_folder=checkpoints")
options = parser.parse_args()

here = Path(__file__).parent
mesh = json.loads((here / "plan.json").read_text(encoding="utf-8"))["mesh"]
started = int(os.environ.get("WORLD_SIZE", "1"))
if started != mesh["dp_replicate"] * mesh["dp_shard"]:
    raise SystemExit(f"{started} processes were started; the plan has another number.")
os.environ.setdefault("NODE_RANK", os.environ["GROUP_RANK"])  # torchrun's name of what Composer asks for
told = {
    "model.pretrained_model_name_or_path": options.model,
    "tokenizer.name": options.tokenizer,
    "train_loader.dataset.local": options.data,
    "max_duration": f"{options.steps}ba",
    "seed": options.seed,
}
train_from_yaml(str(here / "llm_foundry.yaml"), [*(f"{name}={value}" for name, value in told.items()), *options.words])
'''


def llm_foundry_config(plan: Plan, job_name: str) -> dict[str, Any]:
    """The document of TrainConfig. Model, tokenizer, data and steps are not in a plan: the command adds them.

    Composer's AdamW takes its decay per step, not per step and learning rate.
    """
    strategy, length = plan.strategy, plan.workload.seq_len
    sharded = {"fsdp_config": fsdp_section(plan, recompute=strategy.recompute == "full")} if strategy.zero else {}
    return {
        "run_name": job_name,
        "max_seq_len": length,
        "model": {
            "name": "hf_causal_lm",
            "pretrained_model_name_or_path": None,
            "pretrained": False,
            "init_device": "mixed" if strategy.zero else "cpu",
        },
        "tokenizer": {"name": None, "kwargs": {"model_max_length": length}},
        "train_loader": {
            "name": "text",
            "dataset": {"local": None, "split": "train", "shuffle": True, "max_seq_len": length},
            "drop_last": True,
            "num_workers": 8,
        },
        "optimizer": {
            "name": "decoupled_adamw",
            "lr": RATE,
            "betas": [0.9, 0.95],
            "eps": 1.0e-8,
            "weight_decay": RATE * DECAY,
        },
        "scheduler": {"name": "constant_with_warmup", "t_warmup": "0ba"},
        "algorithms": {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": CLIP_NORM}},
        "max_duration": "20ba",
        "global_train_batch_size": plan.workload.global_batch,
        "device_train_microbatch_size": strategy.micro_batch,
        "device_eval_batch_size": strategy.micro_batch,
        "precision": PRECISION[strategy.formats.compute],
        "seed": 0,
        **sharded,
        "progress_bar": False,
        "log_to_console": True,
    }


def write(plan: Plan, options: Options) -> Files:
    """plan.json, llm_foundry.yaml, train.py and launch.sh."""
    comments = (layout_comment(plan).removeprefix("# "), "Model, tokenizer, data and steps come from the command.")
    return job_files(plan, options, TRAIN) | {CONFIG: yaml_text(llm_foundry_config(plan, options.job_name), comments)}


LLM_FOUNDRY = Emitter(
    name="llm-foundry",
    title="llm-foundry with DDP or FSDP: the file of its training command",
    engine="composer",
    versions="llm-foundry 0.22.0, Composer 0.32.1",
    write=write,
    axes=COVERAGE.axes,
    coverage=COVERAGE,
    executables=("launch.sh",),
)
