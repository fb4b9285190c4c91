"""Scripts for Lightning's Fabric and Trainer: with DDP or FSDP2 and tensors cut by torch's styles, and with DeepSpeed."""

from __future__ import annotations

from strategist.emitters.hugging_face_script import (
    COMPRESS,
    COMPRESS_IMPORTS,
    ENGINE_OPTIMIZER,
    ENGINE_OPTIMIZER_IMPORTS,
    KEEP_MIXTURES_WHOLE,
    LEAVE,
    OPTIMIZER,
    script,
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
'''

_MACHINES = '''

def machines():
    """What Lightning asks about the ranks that torchrun starts."""
    return {
        "accelerator": "cuda" if strategy["backend"] == "nccl" else "cpu",
        "devices": int(os.environ["LOCAL_WORLD_SIZE"]),
        "num_nodes": int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
    }
'''

_LOADER_IMPORTS = (
    "from torch.utils.data import DataLoader, Dataset, DistributedSampler\n"
    "from transformers import AutoConfig, AutoModelForCausalLM\n"
)
_BATCHES = """    data = SyntheticTokens(model.config.vocab_size)
    sampler = DistributedSampler(data, fabric.world_size // mesh["tp"], fabric.global_rank // mesh["tp"], shuffle=False)
    loader = DataLoader(data, batch_size=strategy["micro_batch"], sampler=sampler)
    batches = iter(fabric.setup_dataloaders(loader, use_distributed_sampler=False))
"""
_REPORT = """        mean = fabric.all_reduce(torch.stack(losses).mean(), reduce_op="mean")
        if fabric.global_rank == 0:
            print(f"step {number}  loss {mean.item():.6f}", flush=True)
"""

FABRIC = script(
    "Lightning Fabric",
    "from lightning import Fabric\n"
    "from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy\n"
    + COMPRESS_IMPORTS
    + _CUT_IMPORTS
    + _LOADER_IMPORTS,
    OPTIMIZER
    + COMPRESS
    + _CUT.replace("CUT_ARGUMENTS", "cut, ").replace("DDPStrategy(process", "Replicas(process")
    + _MACHINES
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
'''
    + _BATCHES
    + """    for number in range(options.steps):
        losses = []
        for left in reversed(range(strategy["accumulation"])):
            with fabric.no_backward_sync(model, enabled=left > 0):
                loss = loss_of(model, next(batches))
                fabric.backward(loss / strategy["accumulation"])
            losses.append(loss.detach().float())
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
"""
    + _REPORT
    + LEAVE,
)

_MODULE = '''

class CausalLanguageModel(LightningModule):
    """A Hugging Face model that reports its loss once per optimizer step."""

    def __init__(self):
        super().__init__()
        self.model, self.losses = None, []

    def configure_model(self):
        if self.model is None:
            self.model = make_model()
CUT_MODEL
    def training_step(self, batch, index):
        loss = LOSS_OF_BATCH
        self.losses.append(loss.detach().float())
        return LOSS_OF_TRAINER

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
        return MAKE_OPTIMIZER(self.parameters())


WRAPPER_OF_MAINdef main():
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
"""Trainer's model and its start. Words in capitals are put in by `_module`."""


def _module(**words: str) -> str:
    text = _MODULE
    for place, word in words.items():
        text = text.replace(place, word)
    return text


TRAINER = script(
    "Lightning's Trainer",
    "from lightning import LightningModule, Trainer\n"
    "from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy\n" + _CUT_IMPORTS + _LOADER_IMPORTS,
    OPTIMIZER
    + _CUT.replace("CUT_ARGUMENTS", "")
    + _MACHINES
    + _module(
        CUT_MODEL="            if not REPLICAS:\n                cut(self.model, self.device_mesh)\n",
        LOSS_OF_BATCH="loss_of(self.model, batch)",
        LOSS_OF_TRAINER="loss",
        MAKE_OPTIMIZER="make_optimizer",
        WRAPPER_OF_MAIN="@loss_parallel()  # of logits that are cut by vocabulary; others never meet it\n",
    )
    + LEAVE,
)

_ENGINE = '''

def make_strategy():
    """DeepSpeed as deepspeed.json says."""
    config = json.loads((here / "deepspeed.json").read_text(encoding="utf-8"))
LEAVE_OUT    return DeepSpeedStrategy(config=config, process_group_backend=strategy["backend"])


def precision():
    """The format of weights; those of everything else stand in deepspeed.json."""
    return {"float32": "32-true", "bfloat16": "bf16-true", "float16": "16-true"}[formats["parameter"]]
'''

FABRIC_ENGINE = script(
    "Lightning Fabric and DeepSpeed",
    ENGINE_OPTIMIZER_IMPORTS
    + "from lightning import Fabric\nfrom lightning.fabric.strategies import DeepSpeedStrategy\n"
    + _LOADER_IMPORTS,
    OPTIMIZER
    + ENGINE_OPTIMIZER
    + KEEP_MIXTURES_WHOLE
    + _ENGINE.replace("LEAVE_OUT", "")
    + _MACHINES
    + """

def main():
    fabric = Fabric(strategy=make_strategy(), precision=precision(), **machines())
    fabric.launch()
    model = make_model()
    keep_mixtures_whole(model)
    model, _ = fabric.setup(model, make_engine_optimizer(model.parameters()), move_to_device=False)
    engine = fabric.strategy.model  # the step of the optimizer that Fabric gives back would not count micro-batches
"""
    + _BATCHES
    + """    for number in range(options.steps):
        losses = []
        for _ in range(strategy["accumulation"]):
            loss = model(**next(batches)).loss
            fabric.backward(loss)
            engine.step()  # counts micro-batches, and clips and updates after the last
            losses.append(loss.detach().float())
"""
    + _REPORT
    + LEAVE,
)

TRAINER_ENGINE = script(
    "Lightning's Trainer and DeepSpeed",
    ENGINE_OPTIMIZER_IMPORTS
    + "from lightning import LightningModule, Trainer\nfrom lightning.pytorch.strategies import DeepSpeedStrategy\n"
    + _LOADER_IMPORTS,
    OPTIMIZER
    + ENGINE_OPTIMIZER
    + KEEP_MIXTURES_WHOLE
    + _ENGINE.replace(
        "LEAVE_OUT", '    del config["gradient_accumulation_steps"]  # Trainer stops at it and writes its own\n'
    )
    + _MACHINES
    + _module(
        CUT_MODEL="            keep_mixtures_whole(self.model)\n",
        LOSS_OF_BATCH="self.model(**batch).loss",
        LOSS_OF_TRAINER='loss * strategy["accumulation"]  # by which Trainer divides it, and DeepSpeed once more',
        MAKE_OPTIMIZER="make_engine_optimizer",
        WRAPPER_OF_MAIN="",
    )
    + LEAVE,
)
