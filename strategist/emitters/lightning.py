"""Lightning: scripts for Fabric and for Trainer, with torchrun as launcher.

Replicas are DDP; ZeRO 2 and 3 are FSDP2 under ModelParallelStrategy, in which ZeRO 2 keeps gathered weights after the
forward pass. Names as in Lightning 2.6.6. There is no configuration file: the scripts read the plan.
"""

from __future__ import annotations

from strategist.document.plan import Plan
from strategist.emitters.coverage import (
    DATA_PARALLEL,
    HOOKS,
    HOOKS_ARE_FOR_DDP,
    HOOKS_UNSCALED,
    NO_SHARDED_SCALER,
    NO_TOP_K,
    REDUCED_AS_KEPT,
    SHARDS_GO_WITH_ZERO,
    Clash,
    Coverage,
    causal_models,
)
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.hugging_face_script import COMPRESS, COMPRESS_IMPORTS, LEAVE, OPTIMIZER, script
from strategist.emitters.torchrun import job_files
from strategist.records import replace

COVERAGE = Coverage(
    framework="Lightning 2.6",
    values={
        **DATA_PARALLEL,
        **HOOKS,
        "strategy.zero": (0, 2, 3),
    },
    why={
        "mesh.tp": "Its ModelParallelStrategy cuts tensors by their names, which no plan holds.",
        "mesh.pp": "It has no pipeline.",
        "mesh.cp": "It has no context parallelism.",
        "mesh.ep": "It has no expert parallelism.",
        "strategy.zero": "ZeRO-1 is DeepSpeed's.",
        "strategy.recompute": "Transformers recomputes whole layers.",
        "strategy.offload": "Offloading under its ModelParallelStrategy was not tried.",
        "strategy.compression": NO_TOP_K,
        "strategy.compile": "The script does not compile.",
        "strategy.formats": "The script keeps weights and gradients in fp32.",
        "workload.precision": "Its fp8 and fp4 need Transformer Engine's modules.",
    },
    clashes=(
        Clash(
            holds=lambda plan: plan.mesh.dp_shard > 1 and plan.mesh.dp_replicate > 1,
            sentence="mesh.dp_replicate beside mesh.dp_shard has no place in ModelParallelStrategy, whose mesh is data by tensor.",
        ),
        SHARDS_GO_WITH_ZERO,
        REDUCED_AS_KEPT,
        NO_SHARDED_SCALER,
        HOOKS_ARE_FOR_DDP,
        HOOKS_UNSCALED,
        causal_models("Lightning"),
    ),
    hint="Emit it to accelerate, deepspeed or torchrun, or pin another layout.",
)

_SHARD = '''

def shard(model, device_mesh):
    """FSDP2 over the data axis, one unit per layer and one for the rest, with the plan's formats."""
    compute, reduce = (getattr(torch, formats[name]) for name in ("compute", "reduce"))
    low = {} if formats["compute"] == "float32" else {"param_dtype": compute, "output_dtype": compute}
    choices = {
        "mesh": device_mesh["data_parallel"],
        "reshard_after_forward": strategy["zero"] == 3,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce, **low),
    }
    for layer in [module for module in model.modules() if type(module).__name__ in model._no_split_modules]:
        fully_shard(layer, **choices)
    return fully_shard(model, **choices)


def make_strategy():
    """DDP for replicas, FSDP2 for shards."""
    if strategy["zero"] == 0:
        return DDPStrategy(process_group_backend=strategy["backend"])
    return ModelParallelStrategy(
        SHARD_ARGUMENTSdata_parallel_size=mesh["dp_shard"], tensor_parallel_size=1, process_group_backend=strategy["backend"]
    )


def precision():
    """Autocast under DDP; under FSDP2 its own policy casts."""
    return {"float32": "32-true", "bfloat16": "bf16-mixed", "float16": "16-mixed"}[
        "float32" if strategy["zero"] else formats["compute"]
    ]


def machines():
    """What Lightning asks about the ranks that torchrun starts."""
    return {
        "accelerator": "cuda" if strategy["backend"] == "nccl" else "cpu",
        "devices": int(os.environ["LOCAL_WORLD_SIZE"]),
        "num_nodes": int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
    }
'''

FABRIC = script(
    "Lightning Fabric",
    "from lightning import Fabric\n"
    "from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy\n"
    + COMPRESS_IMPORTS
    + "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard\n"
    "from torch.utils.data import DataLoader, Dataset, DistributedSampler\n"
    "from transformers import AutoConfig, AutoModelForCausalLM\n",
    OPTIMIZER
    + COMPRESS
    + _SHARD.replace("SHARD_ARGUMENTS", "shard, ").replace("DDPStrategy(process", "Replicas(process")
    + '''

class Replicas(DDPStrategy):
    """DDP, whose hooks Fabric has no word for."""

    def setup_module(self, module):
        replica = super().setup_module(module)
        compress(replica)
        return replica


def main():
    fabric = Fabric(strategy=make_strategy(), precision=precision(), **machines())
    fabric.launch()
    model = fabric.setup(make_model())
    optimizer = fabric.setup_optimizers(make_optimizer(model.parameters()))
    data = SyntheticTokens(model.config.vocab_size)
    sampler = DistributedSampler(data, fabric.world_size, fabric.global_rank, shuffle=False)
    loader = DataLoader(data, batch_size=strategy["micro_batch"], sampler=sampler)
    batches = iter(fabric.setup_dataloaders(loader, use_distributed_sampler=False))
    for number in range(options.steps):
        losses = []
        for left in reversed(range(strategy["accumulation"])):
            with fabric.no_backward_sync(model, enabled=left > 0):
                loss = model(**next(batches)).loss
                fabric.backward(loss / strategy["accumulation"])
            losses.append(loss.detach().float())
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = fabric.all_reduce(torch.stack(losses).mean(), reduce_op="mean")
        if fabric.global_rank == 0:
            print(f"step {number}  loss {mean.item():.6f}", flush=True)
'''
    + LEAVE,
)

TRAINER = script(
    "Lightning's Trainer",
    "from lightning import LightningModule, Trainer\n"
    "from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy\n"
    "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard\n"
    "from torch.utils.data import DataLoader, Dataset, DistributedSampler\n"
    "from transformers import AutoConfig, AutoModelForCausalLM\n",
    OPTIMIZER
    + _SHARD.replace("SHARD_ARGUMENTS", "")
    + '''

class CausalLanguageModel(LightningModule):
    """A Hugging Face model that reports its loss once per optimizer step."""

    def __init__(self):
        super().__init__()
        self.model, self.losses = None, []

    def configure_model(self):
        if self.model is None:
            self.model = make_model()
            if strategy["zero"]:
                shard(self.model, self.device_mesh)

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.losses.append(loss.detach().float())
        return loss

    def train_dataloader(self):
        data = SyntheticTokens(self.model.config.vocab_size)
        sampler = DistributedSampler(data, self.trainer.world_size, self.global_rank, shuffle=False)
        return DataLoader(data, batch_size=strategy["micro_batch"], sampler=sampler)

    def on_train_batch_end(self, *_):
        if len(self.losses) == strategy["accumulation"]:
            mean = self.trainer.strategy.reduce(torch.stack(self.losses).mean(), reduce_op="mean")
            if self.global_rank == 0:
                print(f"step {self.trainer.global_step - 1}  loss {mean.item():.6f}", flush=True)
            self.losses = []

    def configure_optimizers(self):
        return make_optimizer(self.parameters())


def main():
    trainer = Trainer(
        strategy=make_strategy(),
        precision=precision(),
        accumulate_grad_batches=strategy["accumulation"],
        gradient_clip_val=1.0,
        max_steps=options.steps,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **machines(),
    )
    trainer.fit(CausalLanguageModel())
'''
    + LEAVE,
)


def target(name: str, title: str, train: str, coverage: Coverage) -> Emitter:
    """A target of one script."""

    def write(plan: Plan, options: Options) -> Files:
        return job_files(plan, options, train)

    return Emitter(
        name=name,
        title=f"{title} with DDP or FSDP2, a Hugging Face model",
        engine="lightning",
        versions="Lightning 2.6, transformers 5.23, torch 2.13",
        write=write,
        axes=coverage.axes,
        coverage=coverage,
        executables=("launch.sh",),
    )


FABRIC_TARGET = target("fabric", "Lightning Fabric", FABRIC, COVERAGE)
TRAINER_TARGET = target(
    "trainer",
    "Lightning's Trainer",
    TRAINER,
    replace(
        COVERAGE,
        values={place: values for place, values in COVERAGE.values.items() if place not in HOOKS},
        why={
            **COVERAGE.why,
            "strategy.compression": "Trainer's option for hooks of DDP is without effect on CPUs, so it was not tried.",
        },
    ),
)
