"""MosaicML's Composer: a training script on its Trainer, the arguments that the plan decides as JSON, and torchrun as launcher.

Replicas are DDP; ZeRO 2 and 3, also in replicated groups, are the FSDP of its `parallelism_config`. Names as in Composer
0.32.1, composer/trainer/trainer.py, composer/utils/parallelism.py and composer/distributed/mosaic_parallelism.py.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from strategist.document.plan import Dtype, Plan
from strategist.emitters.coverage import (
    DATA_PARALLEL,
    LOW,
    REDUCED_AS_KEPT,
    SHARDS_GO_WITH_ZERO,
    Clash,
    Coverage,
    causal_models,
)
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.hugging_face_script import OPTIMIZER, script
from strategist.emitters.serial import json_text
from strategist.emitters.torchrun import job_files

CONFIG = PurePosixPath("composer.json")
PRECISION: dict[Dtype, str] = {"float32": "fp32", "bfloat16": "amp_bf16", "float16": "amp_fp16"}
"""Composer's names of the formats of compute."""

WHY = {
    "mesh.tp": "Its tensor parallelism cuts models by their names, which no plan holds.",
    "mesh.pp": "It has no pipeline.",
    "mesh.cp": "It has no context parallelism.",
    "mesh.ep": "Its experts need megablocks' layers.",
    "strategy.zero": "ZeRO-1 is not in it.",
    "strategy.offload": "It refuses to keep shards on the host.",
    "strategy.compile": "Its compile_config was not tried.",
    "strategy.formats": "It keeps weights and gradients in fp32.",
    "workload.precision": "Its fp8 needs Transformer Engine's modules, and it has no fp4.",
}
"""Why Composer, and what stands on it, cannot say other values."""

FORMATS_AND_SHARDS = (
    SHARDS_GO_WITH_ZERO,
    REDUCED_AS_KEPT,
    Clash(
        holds=lambda plan: plan.strategy.zero > 0 and plan.strategy.formats.compute == "float16",
        sentence="strategy.formats of float16 and Composer's FSDP were not tried together.",
    ),
)

COVERAGE = Coverage(
    framework="Composer 0.32",
    values={**DATA_PARALLEL, "strategy.zero": (0, 2, 3)},
    why=WHY | {"strategy.recompute": "Transformers recomputes whole layers."},
    clashes=(
        *FORMATS_AND_SHARDS,
        Clash(
            holds=lambda plan: plan.strategy.zero > 0 and plan.strategy.backend == "gloo",
            sentence="strategy.zero of 2 or 3 needs devices: Composer shards on GPUs only.",
        ),
        Clash(
            holds=lambda plan: plan.strategy.formats.compute != "float32" and plan.strategy.backend == "gloo",
            sentence="strategy.formats of a low format need devices: Composer computes in them on GPUs only.",
        ),
        causal_models("Composer"),
    ),
    hint="Emit it to accelerate, deepspeed or torchrun, or pin another layout.",
)

TRAIN = script(
    "MosaicML's Composer",
    "from composer import Callback, Trainer\n"
    "from composer.algorithms import GradientClipping\n"
    "from composer.models import ComposerModel\n"
    "from composer.utils import dist\n"
    "from torch.utils.data import DataLoader, Dataset, DistributedSampler\n"
    "from transformers import AutoConfig, AutoModelForCausalLM\n",
    OPTIMIZER
    + '''

class CausalLanguageModel(ComposerModel):
    """A Hugging Face model whose layers are the units that are sharded."""

    def __init__(self):
        super().__init__()
        self.model = make_model()
        for module in self.model.modules():
            module._fsdp_wrap = module is self.model or type(module).__name__ in self.model._no_split_modules

    def forward(self, batch):
        return self.model(**batch)

    def loss(self, outputs, batch):
        return outputs.loss


class Report(Callback):
    """One line per optimizer step."""

    def __init__(self):
        self.losses = []

    def after_loss(self, state, logger):
        self.losses.append(state.loss.detach().float().clone())

    def batch_end(self, state, logger):
        mean = torch.stack(self.losses).mean()
        dist.all_reduce(mean)
        if dist.get_global_rank() == 0:
            print(f"step {state.timestamp.batch.value - 1}  loss {mean.item() / dist.get_world_size():.6f}", flush=True)
        self.losses = []


def main():
    os.environ.setdefault("NODE_RANK", os.environ["GROUP_RANK"])  # torchrun's name of what Composer asks for
    arguments = json.loads((here / "composer.json").read_text(encoding="utf-8"))
    model = CausalLanguageModel()
    data = SyntheticTokens(model.model.config.vocab_size)
    sampler = DistributedSampler(data, dist.get_world_size(), dist.get_global_rank(), shuffle=False)
    batch = strategy["micro_batch"] * strategy["accumulation"]
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=batch, sampler=sampler),
        optimizers=make_optimizer(model.parameters()),
        algorithms=[GradientClipping(clipping_type="norm", clipping_threshold=1.0)],
        callbacks=[Report()],
        max_duration=f"{options.steps}ba",
        seed=options.seed,
        progress_bar=False,
        **arguments,
    )
    trainer.fit()


main()
''',
)


def fsdp_section(plan: Plan, *, recompute: bool) -> dict[str, Any]:
    """Composer's section of FSDP. The kinds are one-dimensional or hybrid, whose degrees make the mesh.

    FULL keeps every format, DEFAULT casts weights only, PURE casts what is reduced too.
    """
    formats, hybrid = plan.strategy.formats, plan.mesh.dp_replicate > 1
    kinds = {2: ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"), 3: ("FULL_SHARD", "HYBRID_SHARD")}
    cast = "FULL" if formats.compute == "float32" else "PURE" if formats.reduce in LOW else "DEFAULT"
    degrees = {
        "data_parallel_shard_degree": plan.mesh.dp_shard,
        "data_parallel_replicate_degree": plan.mesh.dp_replicate,
    }
    return {
        "sharding_strategy": kinds[plan.strategy.zero][hybrid],
        **(degrees if hybrid else {}),
        "mixed_precision": cast,
        "activation_checkpointing": recompute,
        "activation_checkpointing_reentrant": False,
        "activation_cpu_offload": False,
        "use_orig_params": True,
    }


def composer_arguments(plan: Plan) -> dict[str, Any]:
    """Arguments of Composer's Trainer that the plan decides. Transformers recomputes, so its FSDP does not."""
    strategy = plan.strategy
    own: dict[str, Any] = {
        "device": "gpu" if strategy.backend == "nccl" else "cpu",
        "precision": PRECISION[strategy.formats.compute],
        "device_train_microbatch_size": strategy.micro_batch,
    }
    return own | ({"parallelism_config": {"fsdp": fsdp_section(plan, recompute=False)}} if strategy.zero else {})


def write(plan: Plan, options: Options) -> Files:
    """plan.json, composer.json, train.py and launch.sh."""
    return job_files(plan, options, TRAIN) | {CONFIG: json_text(composer_arguments(plan))}


COMPOSER = Emitter(
    name="composer",
    title="MosaicML's Composer with DDP or FSDP, a Hugging Face model",
    engine="composer",
    versions="Composer 0.32.1, transformers 5.23, torch 2.13",
    write=write,
    axes=COVERAGE.axes,
    coverage=COVERAGE,
    executables=("launch.sh",),
)
