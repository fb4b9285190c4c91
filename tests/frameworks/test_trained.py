"""Emitted jobs, started unchanged on two CPU ranks, give the losses of one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strategist.emitters.emitter import Options
from tests.emitters.grid import plan_on
from tests.frameworks.jobs import FSDP, WORDS, executor_plan, trained, trained_on_nodes
from tests.frameworks.one_process import LONGER, one_process, plan_of, with_hook, words_for
from tests.plans import BFLOAT16, FLOAT32, make_plan, tiny_mixtral

ULYSSES: dict[str, Any] = {"cp": 2, "context_parallel": "all-to-all", "accumulation": 4, "backend": "gloo"}
"""Two ranks that share each sequence: twice the micro-batches make up the same batch."""

TENSORS: dict[str, Any] = {"tp": 2, "accumulation": 4}
"""Two ranks that share each tensor: twice the micro-batches make up the same batch."""

HYBRID: dict[str, Any] = {"dp_replicate": 2, "dp_shard": 2, "zero": 3, "micro_batch": 1}
MASTERS = replace(BFLOAT16, parameter="bfloat16", master="float32")


def seldom(*values: Any) -> Any:
    """A case whose parts are in others, or that takes minutes: `make test-frameworks` runs it, continuous integration does not."""
    return pytest.param(*values, marks=pytest.mark.nightly)


PRODUCTS: tuple[Any, ...] = (
    ("fabric", {"tp": 2, "dp_shard": 2, "zero": 3, "backend": "gloo"}, True),
    seldom("fabric", HYBRID | {"backend": "gloo"}, False),
    ("trainer", {"tp": 2, "dp_replicate": 2, "backend": "gloo"}, False),
    seldom("deepspeed", {"tp": 2, "dp_shard": 2, "zero": 1, "backend": "gloo"}, False),
    ("deepspeed", {"tp": 2, "dp_shard": 2, "zero": 3, "backend": "gloo"}, True),
    ("transformers", {"tp": 2, "dp_shard": 2, "zero": 2}, True),
    seldom("transformers", HYBRID, False),
    seldom("accelerate", {"tp": 2, "dp_shard": 2, "zero": 3}, False),
    ("accelerate", HYBRID, False),
)
"""Meshes of four ranks with several axes, and whether one weight is at both ends of the model."""

CASES: tuple[Any, ...] = (
    ("accelerate", {"dp_replicate": 2}),
    ("accelerate", {"dp_shard": 2, "zero": 1}),
    seldom("accelerate", {"dp_shard": 2, "zero": 2}),
    seldom("accelerate", {"dp_shard": 2, "zero": 2, "offload": "optimizer"}),  # DeepSpeed builds its kernel first
    ("accelerate", {"dp_shard": 2, "zero": 3, "formats": BFLOAT16, "recompute": "full"}),
    ("deepspeed", {"dp_replicate": 2, "backend": "gloo"}),
    seldom("deepspeed", {"dp_shard": 2, "zero": 1, "backend": "gloo"}),
    seldom("deepspeed", {"dp_shard": 2, "zero": 2, "backend": "gloo", "offload": "optimizer"}),  # the same
    ("deepspeed", {"dp_shard": 2, "zero": 3, "backend": "gloo", "formats": BFLOAT16, "recompute": "full"}),
    seldom("deepspeed", ULYSSES),
    ("deepspeed", ULYSSES | {"zero": 3, "recompute": "full"}),
    ("transformers", {"dp_replicate": 2, "backend": "gloo"}),
    ("transformers", {"dp_shard": 2, "zero": 3, "recompute": "full"}),
    ("trl", {"dp_replicate": 2, "backend": "gloo"}),
    seldom("trl", {"dp_shard": 2, "zero": 3, "recompute": "full"}),
    ("fabric", {"dp_replicate": 2, "backend": "gloo"}),
    ("fabric", {"dp_shard": 2, "zero": 3, "backend": "gloo", "formats": BFLOAT16, "recompute": "full"}),
    ("trainer", {"dp_replicate": 2, "backend": "gloo"}),
    seldom("trainer", {"dp_shard": 2, "zero": 2, "backend": "gloo"}),
    ("fabric", {"dp_shard": 2, "zero": 3, "offload": "parameters", "formats": BFLOAT16}),
    ("trainer", {"dp_shard": 2, "zero": 1, "formats": MASTERS}),
    ("accelerate", TENSORS),
    ("deepspeed", TENSORS | {"backend": "gloo", "formats": BFLOAT16, "recompute": "full"}),
    seldom("deepspeed", {"tp": 2, "dp_shard": 2, "zero": 1, "backend": "gloo", "formats": MASTERS}),
    seldom("transformers", TENSORS | {"recompute": "full"}),
    seldom("trl", TENSORS),
    seldom("fabric", TENSORS | {"backend": "gloo", "formats": BFLOAT16, "recompute": "full"}),
    seldom("trainer", TENSORS | {"backend": "gloo"}),
)


def changed(model_folder: Path, folder: Path, **changes: Any) -> Path:
    """The folder of a model whose configuration is another in these fields."""
    (folder / "model").mkdir()
    configuration = json.loads((model_folder / "config.json").read_text(encoding="utf-8")) | changes
    (folder / "model/config.json").write_text(json.dumps(configuration), encoding="utf-8")
    return folder / "model"


@pytest.mark.proves("trained")
@pytest.mark.parametrize(("target", "choices"), CASES, ids=lambda value: str(value)[:60])
def test_losses_are_those_of_one_process(
    target: str, choices: dict[str, Any], model_folder: Path, tokenizer_files: dict[str, str], tmp_path: Path
) -> None:
    """Weights, samples and optimizer are the same, so every step's loss is, within 1e-4 and for bf16 within 5e-3."""
    plan = plan_of(choices)
    for name, text in tokenizer_files.items() if target == "trl" else ():
        (model_folder / name).write_text(text, encoding="utf-8")
    alone = one_process(model_folder, plan.strategy.optimizer)
    tolerance = 1e-4 if plan.strategy.formats.compute == "float32" else 5e-3
    assert trained(tmp_path, target, plan, words_for(model_folder)) == pytest.approx(alone, rel=tolerance)
    assert max(alone) - min(alone) > 10 * 1e-4 * max(alone)


@pytest.mark.proves("trained")
@pytest.mark.parametrize(("target", "choices", "tied"), PRODUCTS, ids=lambda value: str(value)[:60])
def test_gradients_of_products_are_those_of_one_process(
    target: str, choices: dict[str, Any], tied: bool, model_folder: Path, tmp_path: Path
) -> None:
    """With SGD, whose step is as long as the clipped gradient, losses are those of one process: a norm over some of the ranks, a
    gradient that is counted twice, or ends of one weight that part would be seen."""
    folder = changed(model_folder, tmp_path, tie_word_embeddings=tied)
    found = trained(tmp_path, target, plan_of(choices | {"optimizer": "sgd"}), words_for(folder))
    assert found == pytest.approx(one_process(folder, "sgd"), rel=1e-5)


@pytest.mark.proves("trained")
@pytest.mark.parametrize(
    ("target", "choices"),
    [("deepspeed", ULYSSES), ("fabric", {"dp_shard": 2}), seldom("trainer", {"dp_shard": 2})],
    ids=lambda value: str(value)[:60],
)
def test_gradients_that_are_not_clipped_have_their_length(
    target: str, choices: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    """With small weights, whose gradient is not clipped, and SGD, whose step is as long as the gradient, losses are those of one process:
    a gradient that were averaged over the ranks of a sequence, counted twice, or divided twice by the micro-batches would be seen."""
    folder = changed(model_folder, tmp_path, initializer_range=0.02)
    plan = plan_of(choices | {"zero": 1, "optimizer": "sgd"})
    assert trained(tmp_path, target, plan, words_for(folder)) == pytest.approx(one_process(folder, "sgd"), rel=1e-5)


@pytest.mark.proves("trained")
@pytest.mark.parametrize("target", ["deepspeed"])
def test_a_mixture_under_zero_3_gives_the_losses_of_one_process(
    target: str, model_folder: Path, tmp_path: Path
) -> None:
    """Experts that are gathered whole, of a family whose mixture DeepSpeed does not know by itself. With so many experts for so few
    tokens some get none on a rank."""
    experts = {
        "num_experts": 32,
        "num_experts_per_tok": 2,
        "model_type": "olmoe",
        "architectures": ["OlmoeForCausalLM"],
    }
    folder = changed(model_folder, tmp_path, **experts)
    choices = {"dp_shard": 2, "zero": 3, "micro_batch": 2, "accumulation": 2, "formats": FLOAT32, "backend": "gloo"}
    plan = make_plan(tiny_mixtral(), **choices)
    assert trained(tmp_path, target, plan, words_for(folder)) == pytest.approx(one_process(folder), rel=1e-4)


@pytest.mark.proves("trained")
@pytest.mark.parametrize("target", ["deepspeed"])
def test_a_second_copy_of_weights_changes_no_loss(target: str, model_folder: Path, tmp_path: Path) -> None:
    """ZeRO++'s hpz on two nodes of two ranks: backward passes gather inside a node, and losses are those of one process. Matrices are
    wide, because DeepSpeed leaves those of less than 100,000 elements whole."""
    folder = changed(model_folder, tmp_path, intermediate_size=4096)
    plan = plan_on(2, 2, micro_batch=1, accumulation=2, formats=FLOAT32, backend="gloo")
    found = trained_on_nodes(tmp_path, target, plan, words_for(folder), Options(zeropp=("hpz",)))
    assert found == pytest.approx(one_process(folder), rel=1e-4)


@pytest.mark.proves("trained")
@pytest.mark.parametrize(
    ("target", "compression"),
    [("accelerate", "powersgd"), seldom("fabric", "powersgd"), ("fabric", "bf16")],
)
def test_compressed_gradients_are_those_of_torchs_hooks(
    target: str, compression: str, model_folder: Path, tmp_path: Path
) -> None:
    """Losses are those of plain DDP with the same hook, and with PowerSGD no longer those of exact gradients: a framework that
    forgets the hook fails here."""
    choices = {"dp_replicate": 2, "compression": compression, "compression_rank": 1 if compression == "powersgd" else 0}
    plan = plan_of(choices if target == "accelerate" else choices | {"backend": "gloo"})
    hooked = with_hook(model_folder, compression, 1)
    found = trained(tmp_path, target, plan, words_for(model_folder, LONGER), steps=LONGER)
    assert found == pytest.approx(hooked, rel=1e-4)
    exact = one_process(model_folder, steps=LONGER)
    apart = max(abs(one - other) / other for one, other in zip(hooked, exact, strict=True))
    assert apart > 10 * 1e-4 if compression == "powersgd" else apart < 5e-3


@pytest.mark.proves("trained")
@pytest.mark.parametrize(
    ("target", "choices"),
    [
        ("torchrun", FSDP),
        ("torchrun", {"tp": 2}),
        ("mp-spawn", FSDP),
        ("mpirun", FSDP),
        ("data-parallel", {"dp_replicate": 2, "replicas": "threads"}),
        ("parameter-server", {"dp_replicate": 2, "tables": "server"}),
    ],
    ids=str,
)
def test_our_own_job_gives_the_losses_of_one_rank(
    target: str, choices: dict[str, Any], losses_of_one_rank: list[float], tmp_path: Path
) -> None:
    """The job on strategist's executor prints, on two ranks, what the emitted job of one rank prints."""
    assert trained(tmp_path, target, executor_plan(choices), WORDS) == pytest.approx(losses_of_one_rank, rel=1e-4)
