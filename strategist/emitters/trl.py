"""TRL: SFTConfig as JSON, a script around SFTTrainer, and torchrun as launcher.

SFTConfig is TrainingArguments with other defaults and more fields, so that what Transformers' Trainer can express, SFTTrainer
can. Keys as in TRL 1.16.0, trl/trainer/sft_config.py and base_config.py.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from strategist.document.plan import Plan
from strategist.emitters import transformers
from strategist.emitters.coverage import causal_models
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.serial import json_text
from strategist.emitters.torchrun import job_files
from strategist.records import replace

CONFIG = PurePosixPath("sft.json")


COVERAGE = replace(
    transformers.COVERAGE,
    framework="TRL 1.16",
    values={place: values for place, values in transformers.COVERAGE.values.items() if place != "workload.target_len"},
    clashes=(*transformers.CLASHES, causal_models("TRL")),
)

TRAIN = transformers.trainer_script(
    "TRL's SFTTrainer",
    "from datasets import Dataset as Table\n"
    "from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, TrainerCallback\n"
    "from trl import SFTConfig, SFTTrainer\n",
    arguments="SFTConfig",
    trainer="SFTTrainer",
    config=CONFIG,
    more="    rows = [{name: row.tolist() for name, row in data[index].items()} for index in range(len(data))]\n"
    "    data = Table.from_list(rows)  # TRL asks for its columns\n"
    "    tokenizer = AutoTokenizer.from_pretrained(options.model)\n",
    words=", processing_class=tokenizer",
)


def sft_config(plan: Plan) -> dict[str, Any]:
    """Fields of SFTConfig: those of TrainingArguments, and sequences that come whole, in tokens and with labels."""
    own = {
        "max_length": plan.workload.seq_len,
        "packing": False,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }
    recompute = {"gradient_checkpointing": False}  # TRL's own default is True
    return recompute | transformers.training_arguments(plan) | own


def write(plan: Plan, options: Options) -> Files:
    """plan.json, sft.json, train.py, launch.sh, and distributed.json where Transformers itself cuts the model."""
    return job_files(plan, options, TRAIN) | {CONFIG: json_text(sft_config(plan))} | transformers.cut_file(plan)


TRL = Emitter(
    name="trl",
    title="TRL's SFTTrainer with DDP, FSDP2 or tensor parallelism, a Hugging Face model and its tokenizer",
    engine="transformers",
    versions="TRL 1.16, transformers 5.23, Accelerate 1.15, torch 2.13",
    write=write,
    axes=COVERAGE.axes,
    coverage=COVERAGE,
    executables=("launch.sh",),
)
