"""Megatron-LM's arguments in a launch script. As in Megatron-LM d98e8a6 (2026-08-22), megatron/training/arguments.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from strategist.document.judgement import Finding, Said
from strategist.errors import shown
from strategist.readers.beside import engine_says
from strategist.readers.foreign import (
    Foreign,
    Reader,
    Says,
    Source,
    Unsaid,
    batch_faults,
    finding,
    keys_of,
    odd_arguments,
    told,
    unsaid,
    whole,
    without,
)
from strategist.readers.models import of_arguments
from strategist.readers.script import Script, is_script, named_words, script_faults, script_of, started
from strategist.records import replace

SIGNS = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--use-distributed-optimizer",
    "--num-layers",
)
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
NARROW = {"--fp4-format": "float4", "--fp8-format": "float8"}
OPTIMIZERS = {"adam": "adamw", "sgd": "sgd"}
AWARE = "--use-precision-aware-optimizer"
AWARE_FORMATS = ("--main-params-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype")
FORMAT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""The optimizer that keeps masters and moments in other formats, its arguments, and the bytes of those."""

CP_KINDS = {"p2p": "ring", "a2a": "all-to-all", "a2a+p2p": "hierarchical"}
LAUNCHER = (
    "--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--master-port", "--standalone", "--rdzv-backend",
    "--rdzv-endpoint", "--rdzv-id", "--max-restarts", "--log-dir", "--tee", "--redirects", "--rdzv-conf", "--no-python",
)  # fmt: skip
"""Options of torchrun, which stand among the words too."""

DEEPSPEED, DEEPSPEED_FILES = "--deepspeed", ("--deepspeed_config", "--deepspeed-config")
ITS_OWN = (
    DEEPSPEED, "--zero-", "--no-pipeline-parallel", "--ds-", "--data-impl", "--no-query-key-layer-scaling", "--moe-", "--mlp-type", "--topk",
    "--expert-interval", "--enable-expert-tensor-parallelism", "--create-moe-param-group", "--lr-decay-tokens", "--train-tokens",
)  # fmt: skip
"""How the arguments begin that Megatron-DeepSpeed adds to Megatron's, or has kept."""

RANKS_OF_EXPERTS, CUTS_EXPERTS = "--moe-expert-parallel-size", "--enable-expert-tensor-parallelism"
GROUPS, ULYSSES = "--num-key-value-heads", "--ds-sequence-parallel-size"
"""What Megatron-DeepSpeed calls expert parallelism, tensor parallelism of experts, grouped queries and context parallelism (4efb479, megatron/arguments.py)."""

SIZES = (
    "--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--num-query-groups", GROUPS, "--kv-channels",
    "--max-position-embeddings", "--vocab-size", "--padded-vocab-size", "--num-experts", "--moe-router-topk", "--moe-ffn-hidden-size",
    "--moe-shared-expert-intermediate-size", "--topk", "--expert-interval",
)  # fmt: skip
"""Arguments that say how large a model is."""

MESH = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
NUMBERS = {
    "--tensor-model-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--context-parallel-size": "cp",
    ULYSSES: "cp",
    RANKS_OF_EXPERTS: "ep",
    "--hierarchical-context-parallel-sizes": "cp_inner",
    "--expert-model-parallel-size": "ep",
    "--expert-tensor-parallel-size": "etp",
    "--num-virtual-stages-per-pipeline-rank": "virtual_stages",
    "--num-layers-per-virtual-pipeline-stage": "virtual_stages",
    "--num-distributed-optimizer-instances": "dp_shard",
    "--micro-batch-size": "micro_batch",
    "--global-batch-size": "global_batch",
    "--seq-length": "seq_len",
    "--encoder-seq-length": "seq_len",
    "--recompute-num-layers": "recompute",
    "--zero-stage": "zero",
    **dict.fromkeys(SIZES, "model"),
}
"""Arguments that are numbers, and the choices that they make."""

WORDS = {
    "--recompute-granularity": "recompute",
    "--recompute-method": "recompute",
    "--data-parallel-sharding-strategy": "zero",
    "--cp-comm-type": "context_parallel",
}
"""Arguments that are words, and the choices that they make."""

BY_PP, REPLICAS = ("schedule", "virtual_stages"), ("dp_replicate", "dp_shard")
"""What follows from the number of stages, and from how states are kept."""
DEFAULT_TOKENIZER = ("pretrain_gpt.py", "pretrain_hybrid.py", "pretrain_mamba.py", "pretrain_vlm.py")
"""Programs that have GPT-2's tokenizer where no other is named (args_defaults of each, in Megatron-LM and Megatron-DeepSpeed)."""
TWO_STACKS = "pretrain_t5.py"
"""The program whose decoder has a sequence of its own; others look at no --decoder-seq-length (NVIDIA/Megatron-LM: pretrain_t5.py)."""

Arguments = Mapping[str, str]


def arguments_of(script: Script) -> dict[str, str]:
    """Names of Megatron's style and the word behind each; switches have an empty one."""
    found = {name: word or "" for name, word in named_words(_after_the_program(script.words))}
    return {name: word for name, word in found.items() if name.replace("_", "-") not in LAUNCHER}


def _own_arguments() -> tuple[str, ...]:
    """Every argument that Megatron-LM's parser knows."""
    return tuple(name for section in ("switches", "values", "lists") for name in keys_of("megatron", section))


def _after_the_program(words: tuple[str, ...]) -> tuple[str, ...]:
    """Words from the first of Megatron's own on: what stands before them is the launcher's or another command's."""
    known = set(_own_arguments())
    first = next((index for index, word in enumerate(words) if word.partition("=")[0] in known), len(words))
    return words[first:]


def read(source: Source, ranks: int | None) -> Foreign:
    """What a script says, and its faults for a number of ranks: told, or those that it starts."""
    script = script_of(source)
    written, world = arguments_of(script), ranks or started(script)
    said = in_megatron_s_words(written)
    says, open_ones = says_of(said, world), unsaid_of(written)
    if script.runs(TWO_STACKS):
        says = {**says, **told(target_len=whole(said.get("--decoder-seq-length")))}
    if is_by_deepspeed(said):
        says = {**says, **_engine(source, said, _data_parallel(said, world))}
    found = [*script_faults(script), *_unknown(said), *mesh_faults(said, says, world), *_aware(said), *_optimizer(said)]
    if is_whole(script):
        says = {**says, **_usual_batch(said)}
        found += [*_absent(said), *needs(said), *_connections(said, script), *fsdp_checkpoint(said)]
    return Foreign(says=said_alone(says, open_ones), findings=tuple(found), unsaid=open_ones)


def in_megatron_s_words(said: Arguments) -> dict[str, str]:
    """Arguments of Megatron-DeepSpeed by the names that Megatron-LM has for them; those of Megatron-LM as they are."""
    if not is_by_deepspeed(said):
        return dict(said)
    found = {name: word for name, word in said.items() if name not in (GROUPS, ULYSSES)}
    if GROUPS in said:
        found |= {"--group-query-attention": "", "--num-query-groups": said[GROUPS]}
    if ULYSSES in said:
        found |= {"--context-parallel-size": said[ULYSSES], "--cp-comm-type": "a2a"}
    norm = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}.get(said.get("--normalization", ""))
    return _with_its_experts(found | ({"--normalization": norm} if norm else {}))


def _with_its_experts(said: dict[str, str]) -> dict[str, str]:
    """Experts of Megatron-DeepSpeed: one is none; they stand in the last of every so many layers, take one token each unless they are told
    otherwise, and are cut by tensor parallelism when asked alone (4efb479, megatron/model/transformer.py and megatron/arguments.py)."""
    found = {name: word for name, word in said.items() if (name, word) != ("--mlp-type", "standard")}
    if said.get("--num-experts", "1") == "1":
        found.pop("--num-experts", None)
        return found
    layers, each = whole(said.get("--num-layers")) or 0, whole(said.get("--expert-interval", "2")) or 1
    return found | {
        "--moe-router-topk": said.get("--topk", "1"),
        "--moe-layer-freq": f"([0]*{each - 1}+[1])*{layers // each}+[0]*{layers % each}",
        "--expert-model-parallel-size": said.get(RANKS_OF_EXPERTS, "1"),
        "--expert-tensor-parallel-size": said.get("--tensor-model-parallel-size", "1") if CUTS_EXPERTS in said else "1",
    }


def _usual_batch(said: Arguments) -> Says:
    """The parser fills in a global batch of one micro-batch of every data-parallel rank."""
    return {} if {"--global-batch-size", "--step-batch-size-schedule"} & set(said) else {"accumulation": 1}


def unsaid_of(said: Arguments) -> tuple[Unsaid, ...]:
    """What arguments leave to whoever starts the script. Experts are cut as dense layers are, unless they are said to be cut otherwise."""
    found = unsaid(said, NUMBERS, WORDS)
    if "--num-experts" in said and "--expert-tensor-parallel-size" not in said and not is_by_deepspeed(said):
        found += tuple(replace(one, choice="etp") for one in found if one.choice == "tp")
    return found


def said_alone(says: Says, open_ones: tuple[Unsaid, ...]) -> dict[str, Said]:
    """What is said beside choices that are left open, and beside what follows from them."""
    left = {one.choice for one in open_ones}
    stages = BY_PP if "pp" in left else ()
    return without(says, open_ones, *stages, *(REPLICAS if left & {"zero", "dp_shard"} else ()))


def model_arguments(source: Source) -> Arguments:
    """The arguments of a script that describe a model, with the tokenizer that its program has unasked."""
    script = script_of(source)
    said = in_megatron_s_words(arguments_of(script))
    if is_whole(script) and any(script.runs(program) for program in DEFAULT_TOKENIZER):
        said.setdefault("--tokenizer-type", "GPT2BPETokenizer")
    return said


def is_by_deepspeed(said: Arguments) -> bool:
    """Whether the program is Megatron-DeepSpeed: DeepSpeed keeps the states, and its arguments stand among Megatron's."""
    return DEEPSPEED in said


def _engine(source: Source, said: Arguments, dp: int | None) -> Says:
    """How DeepSpeed keeps states: as its file says, where that can be read, or the stage among the arguments, which is 1 unasked
    (deepspeedai/Megatron-DeepSpeed: megatron/arguments.py, --zero-stage)."""
    named = next((said[name] for name in DEEPSPEED_FILES if name in said), None)
    says = engine_says(source, named)
    stage = says.get("zero", whole(said.get("--zero-stage", "1")) or 0)
    kept: Says = {"zero": stage} | told(offload=says.get("offload"))
    return kept if dp is None else {**kept, "dp_replicate": 1 if stage else dp, "dp_shard": dp if stage else 1}


def is_whole(script: Script) -> bool:
    """Whether the script starts one of Megatron's training programs by itself: only then what is absent is missing."""
    programs = [word.rpartition("/")[2] for word in script.words if word.endswith(".py")]
    sources = {"source", "."} & set(script.words)
    return not sources and any(name.startswith("pretrain_") or name == "train.py" for name in programs)


def mesh_faults(said: Arguments, says: Says, world: int | None) -> Iterator[Finding]:
    """Faults of degrees, once all of them are numbers: a variable of the shell may hold anything."""
    if not _says_its_mesh(said):
        return
    yield from _world(said, world)
    yield from _batch(says, _data_parallel(said, world))
    yield from _pairs(said)


def _says_its_mesh(said: Arguments) -> bool:
    return all(name not in said or whole(said[name]) for name in MESH)


def _degree(said: Arguments, name: str) -> int:
    return whole(said.get(name)) or 1


def _model_ranks(said: Arguments) -> int:
    return prod(_degree(said, name) for name in MESH)


def _data_parallel(said: Arguments, world: int | None) -> int | None:
    if not _says_its_mesh(said):
        return None
    model = _model_ranks(said)
    return world // model if world and world % model == 0 else None


def says_of(said: Arguments, world: int | None) -> Says:
    """What arguments say at a number of ranks."""
    pp, dp = _degree(said, "--pipeline-model-parallel-size"), _data_parallel(said, world)
    micro, batch = whole(said.get("--micro-batch-size")), whole(said.get("--global-batch-size"))
    virtual = whole(said.get("--num-virtual-stages-per-pipeline-rank")) or _virtual(said, pp)
    cp = _degree(said, "--context-parallel-size")
    kind, inner = _context(said, cp)
    says = told(
        tp=_degree(said, "--tensor-model-parallel-size"),
        pp=pp,
        cp=cp,
        virtual_stages=virtual,
        schedule="none" if pp == 1 else "interleaved" if virtual > 1 else "1f1b",
        context_parallel=kind,
        cp_inner=inner,
        micro_batch=micro,
        global_batch=batch,
        seq_len=whole(said.get("--seq-length", said.get("--encoder-seq-length"))),
        accumulation=batch // (micro * dp) if batch and micro and dp and batch % (micro * dp) == 0 else None,
        optimizer=OPTIMIZERS.get(said.get("--optimizer", "adam")),
        recompute=_recompute(said, pp * virtual),
        ranks=world,
        backend=said.get("--distributed-backend", "nccl"),
    )
    says["sequence_parallel"] = "--sequence-parallel" in said
    if "--optimizer-cpu-offload" in said and said.get("--optimizer-offload-fraction", "1") in ("1", "1.0"):
        says["offload"] = "optimizer"
    if "--num-experts" in said:
        says["ep"] = _degree(said, "--expert-model-parallel-size")
        says["etp"] = whole(said.get("--expert-tensor-parallel-size")) or _degree(said, "--tensor-model-parallel-size")
        says |= _ways_to_experts(said)
    return says | _sharding(said, dp) | _numbers(said) | _states(said)


def _ways_to_experts(said: Arguments) -> dict[str, Any]:
    """What sends tokens to their experts, whether that goes on behind other micro-batches, and whether both ways there are in fp8 (Megatron-LM
    d98e8a6, megatron/core/transformer/transformer_config.py)."""
    kind = said.get("--moe-token-dispatcher-type", "allgather")
    formats = (said.get("--moe-dispatch-fwd-dtype"), said.get("--moe-combine-bwd-dtype"))
    return told(
        dispatcher=said.get("--moe-flex-dispatcher-backend", "deepep") if kind == "flex" else kind,
        overlaps_experts="--overlap-moe-expert-parallel-comm" in said or None,
        dispatches_fp8=formats == ("mxfp8", "mxfp8") or None,
    )


def _context(said: Arguments, cp: int) -> tuple[str | None, int | None]:
    """The kind of context parallelism, and how many neighbours exchange heads before a ring: with one of them it is a ring, with all of
    them an all-to-all."""
    kind = CP_KINDS.get(said.get("--cp-comm-type", "p2p")) if cp > 1 else "none"
    if kind != "hierarchical":
        return kind, None
    inner = whole(said.get("--hierarchical-context-parallel-sizes"))
    ends: Mapping[int | None, str] = {1: "ring", cp: "all-to-all"}
    return (ends[inner], None) if inner in ends else (kind, inner)


def _recompute(said: Arguments, chunks: int) -> str:
    """The policy, or the number of layers of each of so many chunks that the block method runs again, where it is no more than they
    have."""
    if {"--checkpoint-activations", "--deepspeed-activation-checkpointing"} & set(said):  # of releases before 3.0
        return "full"
    policy = "selective" if "--recompute-activations" in said else said.get("--recompute-granularity", "")
    first, layers = whole(said.get("--recompute-num-layers")), whole(said.get("--num-layers"))
    if policy == "full" and said.get("--recompute-method") == "block" and first:
        return "full" if layers and first * chunks > layers else str(first)
    return policy if policy in ("full", "selective") else "none"


def _virtual(said: Arguments, pp: int) -> int:
    """Virtual stages where the layers of each are given."""
    each, layers = whole(said.get("--num-layers-per-virtual-pipeline-stage")), whole(said.get("--num-layers"))
    return layers // pp // each if each and layers else 1


def _sharding(said: Arguments, dp: int | None) -> dict[str, Any]:
    zero = 1 if "--use-distributed-optimizer" in said else 0
    if "--use-megatron-fsdp" in said:
        zero = STAGES.get(said.get("--data-parallel-sharding-strategy", "no_shard"), 0)
    if dp is None:
        return {"zero": zero}
    instances = whole(said.get("--num-distributed-optimizer-instances")) or 1
    replicate = instances if zero else dp
    return {"zero": zero, "dp_replicate": replicate, "dp_shard": dp // replicate}


def _numbers(said: Arguments) -> dict[str, str]:
    """Formats: low weights lie beside fp32 masters; gradients of bf16 are fp32 unless said otherwise; products may be in narrower ones."""
    low = "bfloat16" if "--bf16" in said else "float16" if "--fp16" in said else None
    if low is None:
        return dict.fromkeys(("parameter", "gradient", "reduce", "compute"), "float32") | {"master": "none"}
    narrow = "--grad-reduce-in-bf16" in said or said.get("--main-grads-dtype") == "bf16"
    fine = "--accumulate-allreduce-grads-in-fp32" in said or (low == "bfloat16" and not narrow)
    gradient = "float32" if fine else low
    compute = next((word for name, word in NARROW.items() if name in said), low)
    return {"parameter": low, "gradient": gradient, "reduce": gradient, "compute": compute, "master": "float32"}


def _states(said: Arguments) -> dict[str, Any]:
    """Bytes of masters and moments per weight under the precision-aware optimizer, and of what it makes in fp32 of those in other formats
    while it updates. Masters in fp32 of weights in bf16 are kept as the 16 bits that those lack, unless an fp8 recipe other than delayed
    scaling has Megatron keep them (megatron/core/optimizer/optimizer_config.py and distrib_optimizer.py)."""
    low = {"--bf16", "--fp16"} & set(said)
    if AWARE not in said or not low or "--optimizer-cpu-offload" in said or said.get("--optimizer", "adam") != "adam":
        return {}
    master, *moments = (said.get(name, "fp32") for name in AWARE_FORMATS)
    if not {master, *moments} <= set(FORMAT_BYTES):
        return {}
    by_megatron = "--fp8-format" in said and said.get("--fp8-recipe", "delayed") != "delayed"
    halved = master == "fp32" and "--bf16" in said and not by_megatron
    made = sum(FORMAT_BYTES["fp32"] for word in (master, *moments) if word != "fp32")
    return {
        "state_bytes": (2 if halved else FORMAT_BYTES[master]) + sum(FORMAT_BYTES[word] for word in moments),
        "update_bytes": made,
    }


def _aware(said: Arguments) -> Iterator[Finding]:
    """What the precision-aware optimizer needs, and what needs it."""
    narrow = [name for name in ("--main-grads-dtype", *AWARE_FORMATS) if said.get(name, "fp32") != "fp32"]
    wanted = dict.fromkeys(narrow[:1], AWARE) if AWARE not in said else {}
    if AWARE in said and said.get("--optimizer", "adam") != "adam":
        wanted[AWARE] = "--optimizer adam"
    elif AWARE in said and not {"--use-distributed-optimizer", "--use-megatron-fsdp"} & set(said):
        wanted[AWARE] = "--use-distributed-optimizer"
    yield from (finding("megatron-precision-aware", key, key=key, needs=needs) for key, needs in wanted.items())


def _optimizer(said: Arguments) -> Iterator[Finding]:
    """An optimizer whose states nobody counted here."""
    if said.get("--optimizer", "adam") not in OPTIMIZERS:
        yield finding("uncounted-optimizer", "--optimizer", word=shown(said["--optimizer"]))


def _unknown(said: Arguments) -> Iterator[Finding]:
    known = _own_arguments()
    added = ITS_OWN if is_by_deepspeed(said) else ()
    odd = (name for name in said if name not in known and "$" not in name and not name.startswith(added))
    yield from odd_arguments(odd, known, "Megatron-LM")


def _batch(says: Says, dp: int | None) -> Iterator[Finding]:
    """The batch: accumulation is what the global batch leaves, so it must divide."""
    batch, micro = says.get("global_batch"), says.get("micro_batch")
    if isinstance(batch, int) and isinstance(micro, int) and dp and batch % (micro * dp):
        yield from batch_faults(
            {"global_batch": batch, "micro_batch": micro, "accumulation": max(1, batch // micro // dp)}, dp
        )


def _absent(said: Arguments) -> Iterator[Finding]:
    """An argument that must be there."""
    if "--micro-batch-size" not in said:
        why = "its parser has no default for it"
        yield finding("missing-key", "--micro-batch-size", title="Megatron-LM", key="--micro-batch-size", why=why)


def needs(said: Arguments) -> Iterator[Finding]:
    """Arguments that ask for others, which are absent."""
    if said.get("--recompute-granularity") == "full" and "--recompute-method" not in said:
        yield finding("megatron-recompute-method", "--recompute-granularity")
    if _degree(said, "--expert-model-parallel-size") > 1 and "--num-experts" not in said:
        ep = _degree(said, "--expert-model-parallel-size")
        yield finding("megatron-experts", "--expert-model-parallel-size", ep=ep)
    if said.get("--cp-comm-type") == "a2a+p2p" and "--hierarchical-context-parallel-sizes" not in said:
        yield finding("megatron-hierarchical-sizes", "--cp-comm-type")


def _world(said: Arguments, world: int | None) -> Iterator[Finding]:
    if world and world % _model_ranks(said):
        yield finding("ranks-divide", "--tensor-model-parallel-size", ranks=world, product=_model_ranks(said))


def _connections(said: Arguments, script: Script) -> Iterator[Finding]:
    """One connection for cuts of tensors and sequences, of Megatron-DeepSpeed's for sequence parallelism alone (4efb479,
    megatron/arguments.py), never one for Megatron-FSDP: the environment follows the layout."""
    tp, cp = _degree(said, "--tensor-model-parallel-size"), _degree(said, "--context-parallel-size")
    value = script.variables.get(CONNECTIONS)
    if {"--use-megatron-fsdp", "--use-torch-fsdp2"} & set(said):
        if value == "1":
            yield finding("megatron-fsdp-connections", CONNECTIONS)
    elif value != "1" and ("--sequence-parallel" in said if is_by_deepspeed(said) else max(tp, cp) > 1):
        yield finding("megatron-connections", CONNECTIONS, tp=tp, cp=cp)


def fsdp_checkpoint(said: Arguments) -> Iterator[Finding]:
    """A form of checkpoints that Megatron-FSDP does not write."""
    form = said.get("--ckpt-format", "torch_dist")
    if "--use-megatron-fsdp" in said and form != "fsdp_dtensor":
        yield finding("megatron-fsdp-checkpoint", "--ckpt-format", format=form)


def _pairs(said: Arguments) -> Iterator[Finding]:
    """Arguments that need each other."""
    tp, heads = _degree(said, "--tensor-model-parallel-size"), whole(said.get("--num-attention-heads"))
    if heads and heads % tp:
        yield finding("heads-divide", "--num-attention-heads", tp=tp, heads=heads)
    if "--sequence-parallel" in said and tp == 1:
        yield finding("sequence-parallel-alone", "--sequence-parallel")


def recognises(source: Source) -> bool:
    """A script with two of Megatron's arguments."""
    return is_script(source) and sum(sign in source.text for sign in SIGNS) >= 2


def recognises_by_deepspeed(source: Source) -> bool:
    """The same with DeepSpeed's own switch."""
    return recognises(source) and is_by_deepspeed(arguments_of(script_of(source)))


MEGATRON = Reader(
    name="megatron",
    title="Megatron-LM",
    recognises=recognises,
    read=read,
    profile="megatron-core",
    says_gradients=True,
    model=of_arguments(model_arguments),
)
MEGATRON_DEEPSPEED = replace(
    MEGATRON,
    name="megatron-deepspeed",
    title="Megatron-DeepSpeed",
    recognises=recognises_by_deepspeed,
    profile="megatron-deepspeed",
)
