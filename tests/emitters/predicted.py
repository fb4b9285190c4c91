"""Plans for front ends, and what `predict` says of the files that are emitted for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strategist import recommend
from strategist.ask import Given
from strategist.document.plan import Plan
from strategist.document.prediction import Prediction
from strategist.emitters import emit as emit_files
from strategist.emitters.emitter import Options
from strategist.errors import ImpossibleError
from strategist.judging import predicted_source
from strategist.planner.predict import pins_of
from strategist.readers import open_source, reader_of
from strategist.space.candidates import WORDS
from strategist.space.grammar import KEYS

FILES: Mapping[str, str] = {
    "accelerate": "accelerate.yaml",
    "deepspeed": "deepspeed.json",
    "transformers": "training.json",
    "trl": "sft.json",
    "llama-factory": "llama_factory.yaml",
    "axolotl": "axolotl.yaml",
    "composer": "composer.json",
    "llm-foundry": "llm_foundry.yaml",
    "torchtitan": "torchtitan.json",
    "megatron": "launch.sh",
    "megatron-bridge": "megatron_bridge.json",
    "nanotron": "nanotron.yaml",
    "epl": "epl.json",
}
ON_DRIVES = ("accelerate", "deepspeed")
"""The file of each target that readers know, by name."""


def plan_and_prediction(folder: Path, target: str, **question: Any) -> tuple[Plan, Prediction] | None:
    """A plan for a target and the prediction of its file, where what the file leaves to others is said beside it; None where the target can say
    nothing that fits."""
    try:
        plan = recommend(**question, frontend=target)
    except ImpossibleError:
        return None
    drive = "/mnt/drive" if plan.strategy.offload == "nvme" and target in ON_DRIVES else None
    for name, text in emit_files(plan, target, Options(nvme_path=drive)).items():
        (folder / name).write_text(text, encoding="utf-8")
    source = open_source(str(folder / FILES[target]), "FILE")
    says = reader_of(source, "FILE").read(source, plan.cluster.world).says
    beside = [
        f"{pin.key}={pin.word if pin.key in WORDS else pin.value}"
        for pin in pins_of(plan)
        if pin.key in KEYS and pin.key not in says and pin.key != "accumulation"
    ]
    given = Given(
        model=plan.model,
        hardware=plan.cluster,
        seq_len=plan.workload.seq_len,
        global_batch=plan.workload.global_batch,
        optimizer=None if "optimizer" in says else plan.workload.optimizer,
        strategy=",".join(beside) or None,
    )
    found, _ = predicted_source(source, given, "FILE")
    return plan, found
