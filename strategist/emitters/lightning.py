"""Lightning: scripts for Fabric and for Trainer, with torchrun as launcher.

Replicas alone are DDP; ZeRO 2 and 3 are FSDP2 under ModelParallelStrategy, in which ZeRO 2 keeps gathered weights after the
forward pass. Tensors are cut there by torch's styles after the plan of the Transformers model; beside them replicas are FSDP2's, too.
Names as in Lightning 2.6.6. There is no configuration file: the scripts read the plan.
"""

from __future__ import annotations

from strategist.document.plan import Plan
from strategist.emitters.coverage import (
    CUT_TENSORS,
    DATA_PARALLEL,
    EVERY,
    HOOKS,
    HOOKS_ARE_FOR_DDP,
    HOOKS_UNSCALED,
    NO_SHARDED_SCALER,
    NO_TOP_K,
    REDUCED_AS_KEPT,
    SHARDS_GO_WITH_ZERO,
    WHOLE_TOKENS,
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
        "mesh.tp": EVERY,
        "strategy.zero": (0, 2, 3),
    },
    why={
        "mesh.pp": "It has no pipeline.",
        "mesh.cp": "It has no context parallelism.",
        "mesh.ep": "It has no expert parallelism.",
        "strategy.sequence_parallel": WHOLE_TOKENS,
        "strategy.zero": "ZeRO-1 is DeepSpeed's.",
        "strategy.recompute": "Transformers recomputes whole layers.",
        "strategy.offload": "Offloading under its ModelParallelStrategy was not tried.",
        "strategy.compression": NO_TOP_K,
        "strategy.compile": "The script does not compile.",
        "strategy.formats": "The script keeps weights and gradients in fp32.",
        "workload.precision": "Its fp8 and fp4 need Transformer Engine's modules.",
    },
    clashes=(
        SHARDS_GO_WITH_ZERO,
        REDUCED_AS_KEPT,
        NO_SHARDED_SCALER,
        *CUT_TENSORS,
        HOOKS_ARE_FOR_DDP,
        HOOKS_UNSCALED,
        causal_models("Lightning"),
    ),
    hint="Emit it to accelerate, deepspeed or torchrun, or pin another layout.",
)

_CUT_IMPORTS = """from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
"""

_CUT = '''

class Whole(ParallelStyle):
    """Leave a module whole on each rank, as DTensors: clipping and AdamW take no mixture of these with other tensors."""

    def _apply(self, module, device_mesh):
        return distribute_module(module, device_mesh, None, self.enter, lambda module, output, mesh: output.to_local())

    @staticmethod
    def enter(module, inputs, device_mesh):
        return tuple(DTensor.from_local(tensor, device_mesh, [Replicate()], run_check=False) for tensor in inputs)


def tensor_styles(model):
    """Transformers' own plan for tensor parallelism in torch's styles; logits stay cut by vocabulary, as the loss takes them."""
    styles = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "embedding_rowwise": partial(RowwiseParallel, input_layouts=Replicate()),
        "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
        "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
        # a norm over the width of each head: every rank has its own heads
        "replicated_with_grad_allreduce": partial(SequenceParallel, sequence_dim=2, use_local_output=True),
    }
    unknown = set(model.tp_plan.values()) - set(styles)
    if unknown or not model.tp_plan:
        words = f"asks for {', '.join(sorted(unknown))}" if unknown else "has no plan for it"
        raise SystemExit(f"{type(model).__name__} {words}: this script cannot cut its tensors. Plan it with tp = 1.")
    chosen = {}
    for name, module in model.named_modules():
        kinds = [kind for pattern, kind in model.tp_plan.items() if fnmatch(name, pattern)]
        if kinds and module is model.get_output_embeddings():
            chosen[name] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        elif kinds:
            chosen[name] = styles[kinds[0]]()
        elif any(True for _ in module.parameters(recurse=False)):
            chosen[name] = Whole()
    return chosen


def cut(model, device_mesh):
    """Tensors over the plan's tensor axis, then FSDP2 over its data axes, one unit per layer and one for the rest."""
    axes = ("dp_replicate", "dp_shard", "tp")
    device_mesh = init_device_mesh(device_mesh.device_type, [mesh[axis] for axis in axes], mesh_dim_names=axes)
    if mesh["tp"] > 1:
        parallelize_module(model, device_mesh["tp"], tensor_styles(model))
        model.tie_weights()  # of which each end got a DTensor of its own
    if mesh["dp_replicate"] * mesh["dp_shard"] == 1:
        return model.to(device_mesh.device_type)
    compute, reduce = (getattr(torch, formats[name]) for name in ("compute", "reduce"))
    low = {} if formats["compute"] == "float32" else {"param_dtype": compute, "output_dtype": compute}
    choices = {
        "mesh": device_mesh["dp_shard"] if mesh["dp_replicate"] == 1 else device_mesh["dp_replicate", "dp_shard"],
        "reshard_after_forward": strategy["zero"] == 3,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce, **low),
    }
    for layer in [module for module in model.modules() if type(module).__name__ in model._no_split_modules]:
        fully_shard(layer, **choices)
    return fully_shard(model, **choices)


REPLICAS = strategy["zero"] == 0 and mesh["tp"] == 1


def make_strategy():
    """DDP for replicas alone; else FSDP2 and DTensors."""
    if REPLICAS:
        return DDPStrategy(process_group_backend=strategy["backend"])
    return ModelParallelStrategy(
        CUT_ARGUMENTSdata_parallel_size=mesh["dp_replicate"] * mesh["dp_shard"],
        tensor_parallel_size=mesh["tp"],
        process_group_backend=strategy["backend"],
    )


def loss_of(model, batch):
    """The model's loss, which of logits that are cut is a DTensor."""
    loss = model(**batch).loss
    return loss.to_local() if isinstance(loss, DTensor) else loss


def precision():
    """Autocast, but under FSDP2, whose own policy casts."""
    fsdp = not REPLICAS and mesh["dp_replicate"] * mesh["dp_shard"] > 1
    return {"float32": "32-true", "bfloat16": "bf16-mixed", "float16": "16-mixed"}[
        "float32" if fsdp else formats["compute"]
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
    + _CUT_IMPORTS
    + "from torch.utils.data import DataLoader, Dataset, DistributedSampler\n"
    "from transformers import AutoConfig, AutoModelForCausalLM\n",
    OPTIMIZER
    + COMPRESS
    + _CUT.replace("CUT_ARGUMENTS", "cut, ").replace("DDPStrategy(process", "Replicas(process")
    + '''

class Replicas(DDPStrategy):
    """DDP, whose hooks Fabric has no word for."""

    def setup_module(self, module):
        replica = super().setup_module(module)
        compress(replica)
        return replica


@loss_parallel()  # of logits that are cut by vocabulary; others never meet it
def main():
    fabric = Fabric(strategy=make_strategy(), precision=precision(), **machines())
    fabric.launch()
    model = fabric.setup(make_model())
    optimizer = fabric.setup_optimizers(make_optimizer(model.parameters()))
    data = SyntheticTokens(model.config.vocab_size)
    sampler = DistributedSampler(data, fabric.world_size // mesh["tp"], fabric.global_rank // mesh["tp"], shuffle=False)
    loader = DataLoader(data, batch_size=strategy["micro_batch"], sampler=sampler)
    batches = iter(fabric.setup_dataloaders(loader, use_distributed_sampler=False))
    for number in range(options.steps):
        losses = []
        for left in reversed(range(strategy["accumulation"])):
            with fabric.no_backward_sync(model, enabled=left > 0):
                loss = loss_of(model, next(batches))
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
    + _CUT_IMPORTS
    + "from torch.utils.data import DataLoader, Dataset, DistributedSampler\n"
    "from transformers import AutoConfig, AutoModelForCausalLM\n",
    OPTIMIZER
    + _CUT.replace("CUT_ARGUMENTS", "")
    + '''

class CausalLanguageModel(LightningModule):
    """A Hugging Face model that reports its loss once per optimizer step."""

    def __init__(self):
        super().__init__()
        self.model, self.losses = None, []

    def configure_model(self):
        if self.model is None:
            self.model = make_model()
            if not REPLICAS:
                cut(self.model, self.device_mesh)

    def training_step(self, batch, index):
        loss = loss_of(self.model, batch)
        self.losses.append(loss.detach().float())
        return loss

    def train_dataloader(self):
        data = SyntheticTokens(self.model.config.vocab_size)
        replicas, replica = self.trainer.world_size // mesh["tp"], self.global_rank // mesh["tp"]
        sampler = DistributedSampler(data, replicas, replica, shuffle=False)
        return DataLoader(data, batch_size=strategy["micro_batch"], sampler=sampler)

    def on_train_batch_end(self, *_):
        if len(self.losses) == strategy["accumulation"]:
            mean = self.trainer.strategy.reduce(torch.stack(self.losses).mean(), reduce_op="mean")
            if self.global_rank == 0:
                print(f"step {self.trainer.global_step - 1}  loss {mean.item():.6f}", flush=True)
            self.losses = []

    def configure_optimizers(self):
        return make_optimizer(self.parameters())


@loss_parallel()  # of logits that are cut by vocabulary; others never meet it
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
        title=f"{title} with DDP, FSDP2 or tensor parallelism, a Hugging Face model",
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
