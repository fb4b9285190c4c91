"""LLaMA-Factory's own parser takes every file, and the emitted job trains on its own data path.

Its samples are those of its own tokenizer and packing, so that no other framework's losses can be equal: what is shown
is that both ranks train one model together, on the plan's batch, and that the loss falls.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from llamafactory.hparams import get_train_args
from transformers import AutoConfig, AutoModelForCausalLM

from strategist.document.plan import Plan
from tests.emitters.grid import distinct
from tests.frameworks.jobs import job_environment, write_job
from tests.plans import FLOAT32, make_plan

STEPS = 8
WITHOUT_AUDIO = Path(__file__).with_name("without_audio")


def told(folder: Path) -> dict[str, Any]:
    """What the command adds to the file."""
    return {
        "model_name_or_path": str(folder),
        "dataset": "words",
        "dataset_dir": str(folder),
        "output_dir": str(folder),
    }


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["llama-factory"])
def test_llama_factory_takes_every_file(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """get_train_args accepts each file of DDP with what the command adds, and reads the numbers that stand in it."""
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)  # no GPU is here
    kinds = set()
    for text, _ in distinct(target, "llama_factory.yaml"):
        document = yaml.safe_load(text)
        kinds.add("deepspeed" in document)
        document.pop("deepspeed", None)  # the file's own parser is DeepSpeed's: test_parsed.py
        model, data, training, fine_tuning, _ = get_train_args(document | told(tmp_path) | {"max_steps": 1})
        assert training.per_device_train_batch_size == document["per_device_train_batch_size"]
        assert training.gradient_accumulation_steps == document["gradient_accumulation_steps"]
        assert (data.cutoff_len, data.packing) == (document["cutoff_len"], True)
        assert (fine_tuning.stage, fine_tuning.finetuning_type) == ("pt", "full")
        assert model.disable_gradient_checkpointing == document["disable_gradient_checkpointing"]
    assert kinds == {False, True}


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["llama-factory"])
def test_llama_factory_refuses_a_misspelt_key(target: str, tmp_path: Path) -> None:
    """The parser that takes our files refuses a key that is none of its own."""
    document = yaml.safe_load(distinct(target, "llama_factory.yaml")[0][0])
    document.pop("deepspeed", None)
    with pytest.raises(ValueError, match="cutof_len"):
        get_train_args(document | told(tmp_path) | {"cutof_len": 8})


def material(folder: Path, configuration: Path, tokenizer: dict[str, str]) -> Path:
    """A model with weights and tokenizer, and a data set of one sentence again and again."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(configuration)).save_pretrained(folder)
    for name, text in tokenizer.items():
        (folder / name).write_text(text, encoding="utf-8")
    rows = [json.dumps({"text": " ".join(f"w{(index + k) % 8}" for k in range(16))}) for index in range(400)]
    (folder / "words.jsonl").write_text("\n".join(rows), encoding="utf-8")
    info = {"words": {"file_name": "words.jsonl", "columns": {"prompt": "text"}}}
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    return folder


def printed(folder: Path, plan: Plan, words: list[str]) -> str:
    """What the job says, started from another folder."""
    job = write_job(folder, "llama-factory", plan)
    done = subprocess.run(
        ["bash", str(job / "launch.sh"), *words], cwd=folder, env=job_environment(WITHOUT_AUDIO), capture_output=True, text=True,
        timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.proves("trained")
@pytest.mark.parametrize("target", ["llama-factory"])
def test_the_loss_falls_on_two_ranks(
    target: str, model_folder: Path, tokenizer_files: dict[str, str], tmp_path: Path
) -> None:
    """Two ranks train together on the plan's global batch: the loss of each step is printed once, and it falls."""
    plan = make_plan(dp_replicate=2, backend="gloo", formats=FLOAT32, micro_batch=2, accumulation=2)
    folder = material(tmp_path, model_folder, tokenizer_files)
    words = ["--model", str(folder), "--dataset", "words", "--dataset-dir", str(folder)]
    said = printed(tmp_path, plan, [*words, "--steps", str(STEPS), "--learning-rate", "1e-2"])
    losses = [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)$", said, re.MULTILINE)]
    assert len(losses) == STEPS
    assert losses[-1] < 0.7 * losses[0]
    total = re.search(r"Total train batch size \(w\. parallel, distributed & accumulation\) = (\d+)", said)
    assert total is not None
    assert int(total[1]) == plan.workload.global_batch
