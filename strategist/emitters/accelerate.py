"""Accelerate: its YAML for `accelerate launch`, a training script, and a launch script.

One process group of replicas is DDP; ZeRO 2 and 3 are FSDP2, in which ZeRO 2 keeps gathered weights after the forward pass;
ZeRO 1 and an offloaded optimizer, on the host or on a drive, are DeepSpeed's, whose own JSON lies beside the YAML. Tensors, with the shards beside them, are cut by
Transformers before Accelerate sees the model: Accelerate 1.15 shards a model whose tensors are cut with a class that Transformers
5.23 no longer has. Keys as in Accelerate 1.15.0, commands/config/config_args.py, commands/launch.py and utils/launch.py.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from strategist.document.plan import Plan, Strategy
from strategist.emitters import deepspeed, transformers
from strategist.emitters.coverage import (
    EVERY,
    HOOKS,
    HOOKS_ARE_FOR_DDP,
    HOOKS_UNSCALED,
    NO_SHARDED_SCALER,
    PAIRS_NOT_IN_UNITS,
    REDUCED_AS_KEPT,
    WHOLE_TOKENS,
    Clash,
    Coverage,
    language_models,
    only_where,
)
from strategist.emitters.emitter import Emitter, Files, Options
from strategist.emitters.hugging_face_script import (
    CUT,
    CUT_IMPORTS,
    KEEP_MIXTURES_WHOLE,
    OPTIMIZER,
    SETTLE,
    script,
    script_of,
)
from strategist.emitters.serial import yaml_text
from strategist.emitters.torchrun import Launcher, job_files, layout_comment

CONFIG = PurePosixPath("accelerate.yaml")
MIXED_PRECISION = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
"""Accelerate's names of formats of compute. Weights and gradients stay fp32 beside each of them."""


def by_deepspeed(strategy: Strategy) -> bool:
    """Whether DeepSpeed does the work: what FSDP2 has no word for."""
    return strategy.offload in ("optimizer", "nvme") or strategy.zero == 1 or strategy.formats in deepspeed.MASTERED


def engine_of(plan: Plan) -> str:
    """Accelerate's distributed_type for a plan."""
    if by_deepspeed(plan.strategy):
        return "DEEPSPEED"
    if plan.mesh.world == 1:
        return "NO"
    return "FSDP" if plan.strategy.zero and plan.mesh.tp == 1 else "MULTI_GPU"


def _by_deepspeed(plan: Plan) -> bool:
    return engine_of(plan) == "DEEPSPEED"


def _beside_tp(plan: Plan) -> bool:
    """Replicas of shards are Accelerate's own elsewhere."""
    return plan.mesh.tp > 1


COVERAGE = Coverage(
    framework="Accelerate 1.15",
    values=dict(deepspeed.COVERAGE.values)
    | {
        "mesh.tp": EVERY,
        "strategy.compile": EVERY,
        "strategy.backend": ("nccl",),
        "mesh.cp": (1,),
        "strategy.context_parallel": ("none",),
        **HOOKS,
        "strategy.compression": ("none", "powersgd"),
    },
    why={
        "mesh.pp": "It pipelines through Megatron-LM only.",
        "mesh.cp": "Its context parallelism leaves the cut of a batch to the script.",
        "mesh.ep": "It has no key for experts outside Megatron-LM.",
        "strategy.sequence_parallel": WHOLE_TOKENS,
        "strategy.recompute": "Transformers recomputes whole layers.",
        "strategy.compression": "Of its hooks PowerSGD was trained with alone.",
        "strategy.backend": "On CPUs `accelerate launch` starts one process whatever the file says.",
        "strategy.formats": "It keeps fp32 weights, or with DeepSpeed low weights beside fp32 masters.",
        "workload.precision": "Its fp8 and fp4 need a recipe, which no plan holds.",
    },
    clashes=(
        *(
            only_where(_by_deepspeed, clash)
            for clash in deepspeed.COVERAGE.clashes
            if clash is not deepspeed.NEEDS_ZERO_3
        ),
        Clash(
            holds=lambda plan: (
                plan.strategy.offload == "parameters" and (plan.strategy.zero != 3 or plan.mesh.dp_shard == 1)
            ),
            sentence="strategy.offload = parameters needs strategy.zero = 3 and mesh.dp_shard above 1: it is an option of FSDP2.",
        ),
        Clash(
            holds=lambda plan: engine_of(plan) == "DEEPSPEED" and plan.strategy.compile,
            sentence="strategy.compile is not mapped for DeepSpeed, which strategy.zero = 1 and an offloaded optimizer need.",
        ),
        Clash(
            holds=lambda plan: plan.mesh.dp_shard == 1 and plan.strategy.zero > 0 and engine_of(plan) != "DEEPSPEED",
            sentence="strategy.zero = 2 and 3 need mesh.dp_shard above 1.",
        ),
        Clash(
            holds=lambda plan: plan.mesh.dp_shard > 1 and plan.strategy.zero == 0,
            sentence="mesh.dp_shard above 1 needs strategy.zero of 1 to 3.",
        ),
        Clash(
            holds=lambda plan: engine_of(plan) == "DEEPSPEED" and plan.mesh.tp > 1,
            sentence="mesh.tp is cut by Transformers, without DeepSpeed, which strategy.zero = 1 and an offloaded optimizer need.",
        ),
        REDUCED_AS_KEPT,
        NO_SHARDED_SCALER,
        *(only_where(_beside_tp, clash) for clash in transformers.CUT_CLASHES),
        HOOKS_ARE_FOR_DDP,
        HOOKS_UNSCALED,
        language_models("Accelerate"),
        only_where(lambda plan: engine_of(plan) != "DEEPSPEED", PAIRS_NOT_IN_UNITS),
    ),
)

TRAIN = script(
    "Accelerate",
    "from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin\n"
    "from accelerate.utils import DDPCommunicationHookType\n"
    "from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy\n"
    "from torch.utils.data import DataLoader, Dataset\n"
    "from transformers import AutoConfig, AutoModelForCausalLM\n" + CUT_IMPORTS,
    OPTIMIZER
    + KEEP_MIXTURES_WHOLE
    + CUT
    + '''

def make_hooks():
    """What DDP does to gradients before it sends them, for which accelerate.yaml has no key."""
    if strategy["compression"] == "none":
        return []
    # PowerSGD is exact until DDP has made its buckets anew, after the first step.
    low_rank = {"matrix_approximation_rank": strategy["compression_rank"], "start_powerSGD_iter": 2}
    return [DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.POWER_SGD, comm_state_option=low_rank)]


def make_accelerator():
    """What accelerate.yaml says, and the format of reduction, for which it has no key."""
    steps = strategy["accumulation"]
    if os.environ.get("ACCELERATE_USE_FSDP") != "true" or formats["compute"] == "float32":
        return Accelerator(gradient_accumulation_steps=steps, kwargs_handlers=make_hooks())
    compute, reduce = (getattr(torch, formats[name]) for name in ("compute", "reduce"))
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, output_dtype=compute)
    plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
    return Accelerator(gradient_accumulation_steps=steps, fsdp_plugin=plugin)


def main():
    accelerator = make_accelerator()
    if accelerator.num_processes != mesh["dp_replicate"] * mesh["dp_shard"] * mesh["tp"]:
        raise SystemExit(f"{accelerator.num_processes} processes were started; the plan has another number.")
    model = make_model()
    if mesh["tp"] > 1:
        model = cut(model, accelerator.device)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":  # whose file has no names of classes: the model says them
        keep_mixtures_whole(model)
    data = SyntheticTokens(model.config.vocab_size)
    loader = DataLoader(data, batch_size=strategy["micro_batch"])
    optimizer = make_optimizer(model.parameters())  # DeepSpeed's own for the host is made of torch's AdamW by Accelerate
    if mesh["tp"] > 1:  # nothing is left for Accelerate to wrap but autocast
        model = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        optimizer, loader = accelerator.prepare(optimizer, loader)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    number, losses = 0, []
    for batch in loader:
        with accelerator.accumulate(model):
            if isinstance(model, FSDPModule) and mesh["tp"] > 1:
                model.set_requires_gradient_sync(accelerator.sync_gradients)
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach().float())
        if accelerator.sync_gradients:
            mean = accelerator.reduce(torch.stack(losses).mean(), "mean")
            if accelerator.is_main_process:
                print(f"step {number}  loss {mean.item():.6f}", flush=True)
            number, losses = number + 1, []
    accelerator.wait_for_everyone()
'''
    + f"    {SETTLE}\n"
    + """    accelerator.end_training()


main()
""",
    recompute="""    if strategy["recompute"] == "full" and os.environ.get("ACCELERATE_USE_FSDP") != "true":
        model.gradient_checkpointing_enable({"use_reentrant": False})  # FSDP2's own is set in accelerate.yaml
""",
)


def accelerate_config(plan: Plan) -> dict[str, Any]:
    """The document that `accelerate launch --config_file` reads; ranks of nodes and their address come from the command."""
    engine = engine_of(plan)
    document: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": engine,
        "num_machines": plan.cluster.nodes,
        "num_processes": plan.mesh.world,
        "use_cpu": False,
        "debug": False,
        "rdzv_backend": "static",
        "same_network": True,
        "main_training_function": "main",
    }
    sections = {"FSDP": _fsdp, "DEEPSPEED": _deepspeed}
    document |= sections[engine](plan) if engine in sections else {}
    if engine != "DEEPSPEED":  # whose own file says it, and may not be contradicted
        document["mixed_precision"] = MIXED_PRECISION[plan.strategy.formats.compute]
    if plan.mesh.tp > 1:
        # Ranks of other samples, and those that share them; how they share weights says distributed.json.
        document["parallelism_config"] = {
            "parallelism_config_dp_shard_size": plan.mesh.data_parallel,
            "parallelism_config_tp_size": plan.mesh.tp,
        }
    if plan.strategy.compile:
        document["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    return document


def _fsdp(plan: Plan) -> dict[str, Any]:
    strategy, mesh = plan.strategy, plan.mesh
    section = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": strategy.zero == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": strategy.offload == "parameters",
        "fsdp_activation_checkpointing": strategy.recompute == "full",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    sizes = {
        "parallelism_config_dp_replicate_size": mesh.dp_replicate,
        "parallelism_config_dp_shard_size": mesh.dp_shard,
    }
    return {"fsdp_config": section} | ({"parallelism_config": sizes} if mesh.dp_replicate > 1 else {})


def _deepspeed(plan: Plan) -> dict[str, Any]:
    """Everything else of DeepSpeed stands in its own file: Accelerate refuses keys that are said twice."""
    launcher = {"deepspeed_multinode_launcher": "standard"} if plan.cluster.nodes > 1 else {}
    return {"deepspeed_config": {"deepspeed_config_file": str(deepspeed.CONFIG), "zero3_init_flag": False} | launcher}


def _launcher(plan: Plan) -> Launcher:
    """The words of `accelerate launch` for one node and for one of many."""
    file = f' --deepspeed_config_file "$here/{deepspeed.CONFIG}"' if engine_of(plan) == "DEEPSPEED" else ""
    head = f'accelerate launch --config_file "$here/{CONFIG}"{file}'
    return Launcher(
        one_node=head,
        many_nodes=f'{head} --machine_rank "$node" \\\n  --main_process_ip "$address" --main_process_port "$port"',
    )


def write(plan: Plan, options: Options) -> Files:
    """plan.json, accelerate.yaml, train.py, launch.sh, deepspeed.json where DeepSpeed does the work, and distributed.json where Transformers
    cuts tensors."""
    comments = (layout_comment(plan).removeprefix("# "), "The format of reduction has no key: train.py sets it.")
    files = job_files(plan, options, script_of(plan, TRAIN), _launcher(plan)) | {
        CONFIG: yaml_text(accelerate_config(plan), comments)
    }
    if engine_of(plan) == "DEEPSPEED":
        files |= deepspeed.own_file(plan, options)
    return files | (transformers.cut_file(plan) if plan.mesh.tp > 1 else {})


ACCELERATE = Emitter(
    name="accelerate",
    title="Accelerate with DDP, FSDP2, tensor parallelism or DeepSpeed, a Hugging Face model",
    engine="accelerate",
    versions="Accelerate 1.15, transformers 5.23, DeepSpeed 0.19.8, torch 2.13",
    write=write,
    axes=COVERAGE.axes,
    coverage=COVERAGE,
    executables=("launch.sh",),
    names_drive=True,
    by_deepspeed=by_deepspeed,
)
