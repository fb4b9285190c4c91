"""The parts that training scripts for Hugging Face models share, whatever framework trains them.

A script reads plan.json beside it and nothing is baked in: batch, number formats, recompute and optimizer come from
there, so that an edited plan and its script never disagree. It needs no strategist on the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping

from strategist.document.plan import Plan
from strategist.emitters.coverage import PAIR
from strategist.emitters.emitter import rewritten

OPTIMIZER = '''

def make_optimizer(parameters):
    """The plan's optimizer with the hyperparameters that strategist's executor has."""
    if strategy["optimizer"] == "sgd":
        return torch.optim.SGD(parameters, lr=options.learning_rate, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
'''

ENGINE_OPTIMIZER_IMPORTS = "from deepspeed.ops.adam import DeepSpeedCPUAdam\n"
ENGINE_OPTIMIZER = '''

def make_engine_optimizer(parameters):
    """The plan's optimizer, which is DeepSpeed's own where it works in the host's memory."""
    if strategy["offload"] == "none":
        return make_optimizer(parameters)
    return DeepSpeedCPUAdam(parameters, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
'''
"""For scripts whose ranks all have DeepSpeed."""

KEEP_MIXTURES_WHOLE = '''

def keep_mixtures_whole(model):
    """Let ZeRO-3 gather all experts of a layer at once, and give gradients to those without tokens: each rank has other tokens, and one
    that gathered its own experts alone would wait for the others for ever."""
    from deepspeed.utils import set_z3_leaf_modules

    if strategy["zero"] == 3 and plan["model"]["moe"] is not None:
        parts = {type(module): [type(part).__name__ for part in module.children()] for module in model.modules()}
        mixtures = [kind for kind, names in parts.items() if any(name.endswith("Experts") for name in names)]
        if not mixtures:
            raise SystemExit(f"{type(model).__name__} has no module with experts: give set_z3_leaf_modules the class of its mixture.")
        set_z3_leaf_modules(model, mixtures)
'''
"""For scripts in which DeepSpeed shards weights. 0.19 knows the mixtures of three families by itself; Transformers calls the stacked
weights of experts `...Experts` in all of them, and a mixture is the module that has these."""

COMPRESS_IMPORTS = (
    "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook\n"
    "from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook\n"
)
COMPRESS = '''

def compress(replica):
    """Let DDP send gradients as the plan says, by torch's own hooks."""
    if strategy["compression"] == "powersgd":  # exact until DDP has made its buckets anew, after the first step
        state = PowerSGDState(None, matrix_approximation_rank=strategy["compression_rank"], start_powerSGD_iter=2)
        replica.register_comm_hook(state, powerSGD_hook)
    elif strategy["compression"] != "none":
        cast = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}[strategy["compression"]]
        replica.register_comm_hook(None, lambda group, bucket: cast(group, bucket))  # by itself bf16 is for NCCL alone
'''
"""For frameworks that hand hooks to DDP on some devices alone, or not at all."""

CUT_IMPORTS = "from transformers.distributed import DistributedConfig\n"
CUT = '''

def cut(model, device):
    """Transformers' own parallelism, with trained weights: AutoModelForCausalLM.from_pretrained(..., distributed_config=config)."""
    config = DistributedConfig.from_dict(json.loads((here / "distributed.json").read_text(encoding="utf-8")))
    if strategy["zero"] != 3:  # gathered weights stay until the backward pass is over
        config.fsdp_plan = dict.fromkeys(model.fsdp_plan, "keep_full_weight")
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:  # cut by itself, and tied anew
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    config, _, device_mesh = model.prepare_distribute_model(config)
    model = model.maybe_distribute_model(model, config, device_mesh)
    model.tie_weights()
    return model.to(device)
'''
"""For layouts of which Accelerate's own sharding knows nothing: tensors that are cut, and replicas of shards."""

REPORT = '''

class Report(TrainerCallback):
    """One line per optimizer step."""

    def on_log(self, arguments, state, control, logs=None, **_):
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step - 1}  loss {float(logs['loss']):.6f}", flush=True)
'''

SETTLE = "time.sleep(0.2)  # gloo's threads need Python's lock to let go of the last tensors: a group that goes before waits for ever"
"""What stands before groups end. Seen without it under Accelerate's DDP: the reducer, deleted with Python's lock held, ends the group,
which waits for its thread, which waits for the lock (torch 2.13, c10d::Reducer::~Reducer and ProcessGroupGloo::runLoop)."""
LEAVE = f"""    if torch.distributed.is_initialized():  # a process that ends with open groups may abort
        {SETTLE}
        torch.distributed.destroy_process_group()


main()
"""
"""How scripts of frameworks that leave the groups open end."""

_HEAD = '''"""Train under plan.json with {title}. Yours to edit: the plan is read, nothing is baked in."""

{imports}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True, help="folder or hub name of a transformers configuration")
parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
parser.add_argument("--seed", type=int, default=0, help="seed of weights and data")
parser.add_argument("--learning-rate", type=float, default=3e-4, help="of the optimizer, constant")
options = parser.parse_args()

here = Path(__file__).parent
plan = json.loads((here / "plan.json").read_text(encoding="utf-8"))
mesh, strategy, workload = plan["mesh"], plan["strategy"], plan["workload"]
formats = strategy["formats"]


class SyntheticTokens(Dataset):
    """Random sequences, the same at each index on every rank. Replace it by your data: items with input_ids and labels."""

    def __init__(self, vocabulary):
        self.vocabulary = vocabulary

    def __len__(self):
        return options.steps * workload["global_batch"]

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + index)
        tokens = torch.randint(self.vocabulary, (workload["seq_len"],), generator=generator)
        return {{"input_ids": tokens, "labels": tokens}}


def make_model():
    """The model with fresh weights. For trained ones: AutoModelForCausalLM.from_pretrained(options.model)."""
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(options.model), dtype=getattr(torch, formats["parameter"])
    )
'''

_TOKENS = """        tokens = torch.randint(self.vocabulary, (workload["seq_len"],), generator=generator)
        return {"input_ids": tokens, "labels": tokens}
"""
_PAIR: Mapping[str, str] = {
    "AutoModelForCausalLM": "AutoModelForSeq2SeqLM",
    _TOKENS: """        lengths = workload["seq_len"], workload.get("target_len", workload["seq_len"])
        inputs, labels = (torch.randint(self.vocabulary, (length,), generator=generator) for length in lengths)
        return {"input_ids": inputs, "labels": labels}
""",
    "    trainer = ": """    model.accepts_loss_kwargs = False  # its loss is the mean of a micro-batch, though it takes any word
    trainer = """,
}
"""What stands in a script in place of what, where the plan is for an encoder with a decoder."""


def script_of(plan: Plan, script: str) -> str:
    """A script for the plan's model: for decoders as it is."""
    return rewritten(script, _PAIR) if plan.model.kind == PAIR else script


_TOOLS = (("fnmatch", "fnmatch"), ("functools", "partial"))
"""Functions of the standard library that some scripts use: module and name."""

RECOMPUTE = """    if strategy["recompute"] == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
"""


def script(title: str, imports: str, body: str, *, recompute: str = RECOMPUTE) -> str:
    """A training script. `imports` follow the standard library's, of which `os` and `time` are there if they are used; `recompute` ends
    `make_model`; `body` trains."""
    own = "import os\n" if "os.environ" in recompute + body else ""
    own += "import time\n" if "time.sleep" in body else ""
    tools = "".join(f"from {module} import {name}\n" for module, name in _TOOLS if f"{name}(" in body)
    lines = f"import argparse\nimport json\n{own}{tools}from pathlib import Path\n\nimport torch\n{imports}"
    head = _HEAD.format(title=title, imports=lines.rstrip("\n"))
    return f"{head}{recompute}    return model\n{body}"
