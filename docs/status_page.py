"""docs/status.md: what is planned, run, traced and emitted today, found out by asking the code; and what is missing."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import strategist
from benchmarks.bench_search import figures
from benchmarks.record import read
from strategist.catalog import rows
from strategist.cli import COMMANDS
from strategist.document.plan import Plan
from strategist.emitters import EMITTERS
from strategist.emitters.emitter import Options
from strategist.errors import ImpossibleError
from strategist.executor.architecture import model_obstacles
from strategist.executor.support import layout_obstacles, unsupported

ONE_GPU = {"gpu": "h100-sxm-80gb", "gpus_per_node": 1, "nodes": 1}
FSDP = "dp_shard=8,zero=3"
MIXED = {"nodes": [{"gpu": gpu, "gpu_count": 8, "count": 1} for gpu in ("h100-sxm-80gb", "a100-sxm-80gb")]}
UNEVEN = {"also": "uneven_batch", "global_batch": 256}


@dataclass(frozen=True)
class Technique:
    """A row of the table: a name, and the question whose plan uses that technique."""

    title: str
    pin: str
    hardware: Any = "dgx-h100"
    model: str = "llama-3.2-1b"
    more: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def plan(self) -> Plan | None:
        """The plan that this row stands for; None when no layout can be like this."""
        job = {"seq_len": 2048, "global_batch": 64, "top": 1, **self.more}
        try:
            return strategist.recommend(self.model, self.hardware, pin=self.pin or None, **job)
        except ImpossibleError:
            return None


TECHNIQUES = (
    Technique("one process", "", ONE_GPU),
    Technique("DDP", "dp_replicate=8"),
    Technique("DDP, gradients in bfloat16", "compression=bf16"),
    Technique("DDP, gradients in float16", "compression=fp16"),
    Technique("DDP, PowerSGD", "compression=powersgd"),
    Technique("DDP, top-k with error feedback", "compression=topk"),
    Technique("DDP, uneven batch", "zero=0,tp=1", MIXED, more=UNEVEN),
    Technique("ZeRO-1, uneven batch", "zero=1,tp=1", MIXED, more=UNEVEN),
    Technique("TP x DDP, uneven batch", "zero=0,tp=2", MIXED, more=UNEVEN),
    Technique("nn.DataParallel", "replicas=threads"),
    Technique("ZeRO-1", "dp_shard=8,zero=1"),
    Technique("ZeRO-2", "dp_shard=8,zero=2"),
    Technique("ZeRO-3", FSDP),
    Technique("HSDP", "dp_replicate=2,dp_shard=4,zero=3"),
    Technique("TP", "tp=8,sequence_parallel=0"),
    Technique("TP with sequence parallelism", "tp=8,sequence_parallel=1"),
    Technique("PP, GPipe", "pp=8,schedule=gpipe", more={"global_batch": 16}),  # it keeps the logits of each micro-batch
    Technique("PP, 1F1B", "pp=8,schedule=1f1b"),
    Technique("PP, weighted stages", "pp=4,dp_replicate=2,stage_split=weighted"),
    Technique("PP, balanced stages", "pp=4,dp_replicate=2,recompute=by-stage,stage_split=balanced"),
    Technique("PP, interleaved", "pp=4,dp_replicate=2,virtual_stages=2,schedule=interleaved"),
    Technique("PP, looped BFS", "pp=4,dp_replicate=2,virtual_stages=2,schedule=looped_bfs", more={"global_batch": 16}),
    Technique("PP, ZB-H1", "pp=4,dp_replicate=2,schedule=zb_h1"),
    Technique("PP, ZBV", "pp=2,dp_shard=4,zero=2,virtual_stages=2,schedule=zbv", model="llama-3.1-8b"),
    Technique("PP, DualPipeV", "pp=2,dp_shard=4,zero=2,virtual_stages=2,schedule=dualpipev", model="llama-3.1-8b"),
    Technique("TP x DDP", "tp=2,dp_replicate=4"),
    Technique("TP x FSDP", "tp=2,dp_shard=4,zero=3"),
    Technique("TP x FSDP, tokens whole", "tp=2,dp_shard=4,zero=3,sequence_parallel=0"),
    Technique("TP x ZeRO-1", "tp=2,dp_shard=4,zero=1"),
    Technique("PP x DDP", "pp=2,dp_replicate=4"),
    Technique("PP x FSDP", "pp=2,dp_shard=4,zero=3"),
    Technique("PP x TP x DDP", "pp=2,tp=2,dp_replicate=2"),
    Technique("PP x TP x FSDP", "pp=2,tp=2,dp_shard=2,zero=3"),
    Technique("PP x TP x ZeRO-1", "pp=2,tp=2,dp_shard=2,zero=1"),
    Technique("CP, ring", "cp=2,dp_shard=4,zero=3,context_parallel=ring"),
    Technique("CP, all-to-all", "cp=2,dp_shard=4,zero=3,context_parallel=all-to-all"),
    Technique("CP, hierarchical", "cp=4,cp_inner=2,dp_shard=2,zero=3,context_parallel=hierarchical"),
    Technique("TP x CP x FSDP", "tp=2,cp=2,dp_shard=2,zero=3,sequence_parallel=1,context_parallel=all-to-all"),
    Technique("EP", "ep=8,dp_shard=8,zero=3", model="olmoe-1b-7b"),
    Technique("EP x FSDP", "ep=4,dp_shard=8,zero=3", model="olmoe-1b-7b"),
    Technique("EP x PP", "ep=4,pp=2,dp_shard=4,zero=3", model="olmoe-1b-7b"),
    Technique("EP x TP, whole experts", "ep=8,etp=1,tp=2,dp_shard=4,zero=3", model="deepseek-moe-16b"),
    Technique("EP with tensor-parallel experts", "ep=4,etp=2,tp=2,dp_shard=4,zero=3", model="deepseek-moe-16b"),
    Technique("EP x DDP", "ep=8,dp_replicate=8", model="olmoe-1b-7b"),
    Technique("EP x ZeRO-1", "ep=4,dp_shard=8,zero=1", model="olmoe-1b-7b"),
    Technique("recompute selective", f"{FSDP},recompute=selective"),
    Technique("recompute full", f"{FSDP},recompute=full"),
    Technique("recompute full, 8 layers", f"{FSDP},recompute=8"),
    Technique("recompute full, every 2nd layer", f"{FSDP},recompute=every-2"),
    Technique("recompute full, layers by stage", "pp=4,dp_replicate=2,recompute=3/2/1/0"),
    Technique("offload optimizer", "dp_shard=8,zero=2,offload=optimizer"),
    Technique("offload parameters", f"{FSDP},offload=parameters"),
    Technique("offload to NVMe", f"{FSDP},offload=nvme"),
    Technique("memory-centric tiling", f"{FSDP},offload=parameters,tiling=8"),
    Technique("fp32", FSDP, more={"precision": "fp32"}),
    Technique("tf32", FSDP, more={"precision": "tf32"}),
    Technique("bf16", FSDP, more={"precision": "bf16"}),
    Technique("fp16", FSDP, more={"precision": "fp16"}),
    Technique("fp8", FSDP, more={"precision": "fp8"}),
    Technique("fp4", FSDP, "dgx-b200", more={"precision": "fp4"}),
    Technique("AdamW", FSDP, more={"optimizer": "adamw"}),
    Technique("8-bit AdamW", FSDP, more={"optimizer": "adamw8bit"}),
    Technique("Muon, DDP", "dp_replicate=8", more={"optimizer": "muon"}),
    Technique("Muon, ZeRO-1", "dp_shard=8,zero=1", more={"optimizer": "muon"}),
    Technique("Muon, ZeRO-3", FSDP, more={"optimizer": "muon"}),
    Technique("Muon, TP x FSDP", "tp=2,dp_shard=4,zero=3,sequence_parallel=1", more={"optimizer": "muon"}),
    Technique("SGD", FSDP, more={"optimizer": "sgd"}),
    Technique("loss in chunks", f"{FSDP},loss=chunked"),
    Technique("tables on a parameter server", "tables=server", model="tinyllama-1.1b"),
    Technique("LoRA, DDP", "dp_replicate=8", more={"method": "lora"}),
    Technique("LoRA, ZeRO-3", FSDP, more={"method": "lora"}),
    Technique("QLoRA, DDP", "dp_replicate=8", more={"method": "qlora"}),
    Technique("QLoRA, ZeRO-3", FSDP, more={"method": "qlora"}),
)
"""One row each: the strategies, their products, and the options."""

LATER: Mapping[str, str] = {
    "trace": "the real program of one rank under fake tensors: exact bytes and collectives",
    "rehearse": "one rank's real kernels on one GPU",
    "resume": "go on after an interruption, also on another layout",
    "status": "look at a running job",
    "size": "the machines for a model, tokens and a deadline",
    "sweep": "a table over sizes and machines",
    "compare": "plans side by side",
    "diff": "what changed between two plans",
    "doctor": "checks of a machine",
    "probe": "measure a machine's links and matmuls",
    "report": "a plan as HTML",
}
"""Commands that are promised; those that exist drop out of the page by themselves."""

MISSING = (
    "Of the search and the executor: ZB-H1 with several chunks a stage; ZB-H1, ZBV and DualPipeV with ZeRO-3, context parallelism, experts or "
    "recomputation; ZBV and DualPipeV of tied ends; passes of DualPipeV that overlap. Of the search: ZB-H1, ZBV, DualPipeV, looped BFS where chunks can be interleaved, and hierarchical context parallelism are looked at only when asked for (`--also`, `--pin`).",
    "Of uneven batches (`--also uneven_batch`): beside pp, cp, ep, ZeRO-2 and 3, adapters, fp8, offload, compression, threads and a parameter "
    "server; micro-batches of different sizes; `--strategy` of `predict` cannot say one; rehearsals; files of other frameworks; and no launcher "
    "checks that nodes were numbered in the order of the plan (docs/decisions/0146).",
    "Pipeline, context (but DeepSpeed's all-to-all) and expert parallelism in the files of Accelerate, DeepSpeed, Transformers, TRL, Lightning, "
    "LLaMA-Factory, axolotl, Composer and llm-foundry; tensor parallelism in those of LLaMA-Factory, axolotl, Composer, llm-foundry and EPL, and "
    "with sequence parallelism or experts in those of Accelerate, DeepSpeed, Transformers, TRL and Lightning (docs/decisions/0135); FSDP in those of "
    "LLaMA-Factory and axolotl; ZeRO in those of EPL.",
    "Of a parameter server (`tables=server`): several nodes or servers, and beside adapters, Muon, fp8, compressed gradients or threads "
    "(docs/decisions/0138).",
    "Emitted files of frameworks were parsed by them and trained with on two CPU ranks (`make test-frameworks`), not on GPUs. Times and "
    "bytes beside them are those of the plan's profile, not of that framework.",
    "Checkpoints of 8-bit AdamW under a layout whose parts are no whole blocks of 256 elements of each other's: refused, never decoded and encoded anew (docs/decisions/0106).",
    "A loss in chunks beside tp and pp, in files of other frameworks, and unasked in the search (docs/decisions/0112).",
    "Muon beside tp under ZeRO-1, offload, tiles, experts and adapters, and in files of other frameworks (docs/decisions/0115).",
    "Compressed gradients (`--pin compression=`) in files of frameworks other than Fabric, of Accelerate but PowerSGD, and rehearsals of them (docs/decisions/0102).",
    "Of layouts drawn at random (docs/decisions/0124) those whose peak is off by more than a thousandth and why it is known: docs/decisions/0120 to 0122, 0125 to 0127.",
    "Optimizer state on NVMe was run on CPU ranks with files in the system's folder for temporary ones; no drive's rate was measured.",
    "What is parsed and not trained with, by target: docs/targets.md. Of those Composer's FSDP, llm-foundry, Megatron-LM, Megatron-Bridge, nanotron, torchtitan and "
    "axolotl need GPUs; BytePS does not build and EPL needs TensorFlow 1.x.",
    "`validate` reads of Ray what its calls write out in plain values, of Kubernetes one manifest a file, and of both no values that a program or a chart fills in; "
    "a torchrun inside `bash -c` of a batch script is not looked at.",
    "Of rehearsals on a GPU (docs/decisions/0157): with torch 2.11 alone, which cannot show selective recomputation; Llama with tp = 2 and sequence parallelism ended "
    "in gradients that are no numbers, and why is not known; what a trace lacks, torch's room for cuBLAS and more of GPT-2. Planned with are attention, loss, updates, launches, odd rows (docs/decisions/0159) and units of FSDP2 (0161), not norms, nor what cutting tensors costs the host.",
    "Beside adapters (`--method`) no tp, pp, cp, ep, ZeRO-1, offload or fp16; none beside latent attention or state spaces, and in mixtures beside attention alone (docs/decisions/0224); they are not merged into "
    "weights, and of targets only LLaMA-Factory's and our own launchers say them. Beside weights of four bits no compiled blocks, no paged optimizer, and "
    "embedding and head stay in 16 or 32 bits; their kernels ran on CPUs only, and nothing of them was rehearsed.",
    "Of experts that get more tokens than others (`--expert-imbalance`): a ratio for each layer, tokens dropped over a capacity, experts of one rank that differ, rehearsals "
    "(docs/decisions/0152). Of axes that share ports between nodes (docs/decisions/0153): what is not hidden at all, links inside a node, and ports that some of a node's devices leave idle.",
    "Of encoders with decoders (docs/decisions/0215, 0220): a built-in model (`run` and `plan --verify` ask for a module of yours; torchrun and its kin write a script with one of "
    "transformers), pipelines, context and sequence parallelism in runs, experts; FSDP2 in scripts of Transformers and Accelerate, and files of other frameworks (of those scripts of "
    "Megatron-LM's pretrain_t5.py are read); the causal half of a decoder's own attention, relative positions, spectra of Whisper in traces.",
    "U-Nets: the catalogue counts their weights, and nothing plans, weighs or times them. Of ResNets (docs/decisions/0168): wide and grouped blocks, "
    "channels first, our executor's own model (a module of yours trains), other convolutional networks as live modules.",
    "Of machines that may stay idle: several, but not all, devices of a node whose links are listed one by one (and are more than a mesh), and nodes that are joined link by link "
    "other than single ones and whole groups behind the same switches (docs/decisions/0181).",
    "Of mixed nodes: stages of one pipeline on different kinds (each is priced on the kind where it takes longest), and links that are listed one by one (docs/decisions/0156).",
    "Of published runs: recompute of operations that nobody names, memory beside weights of four bits, activations on the host. Predicted reserved memory knows "
    "streams and large blocks (docs/decisions/0047), not what small tensors break up; frameworks with one buffer of gradients reserve a measured share.",
    "Whole experts beside tensor parallelism without sequence parallelism. Of the search: offload of experts apart beside replicas, "
    "whose reserved memory is up to 1.6 times what is predicted (docs/decisions/0163), and of the optimizer's state beside tp; `predict` answers both.",
    "Context parallelism by ring, also a hierarchical one, with windows, selective recompute or, on GPUs, fp32; recompute of layers in groups, of some layers "
    "beside adapters and tiling, of every so-many-th by stage, and of some layers unasked in the search (docs/decisions/0114, 0130, 0147); "
    "memory-centric tiling of experts, of embedding and head, beside tp, pp or selective recompute, and in files of other frameworks.",
    "Routers of sigmoids with a correction of who is chosen, and sparse mixers (GLM-4.5, MiniMax-M2, dots.llm1, EXAONE and Solar mixtures, Hunyuan V3, Phi-3.5-MoE): the executor's own model refuses them, with the hint to bring a module; they are planned and emitted.",
    "On GPUs the executor trained on one H100 without peers (docs/decisions/0158), and rehearsed with peers of noise; several ranks were tested on CPUs with gloo only, and NCCL never.",
    "Weights of mixtures other than Mixtral, OLMoE, Qwen2-MoE and Qwen3-MoE, and of those whose chosen experts' weights do not add up to one "
    "(`norm_topk_prob` false, as OLMoE-1B-7B-0924 and Qwen1.5-MoE have it): they are not imported, nor are weights whose rotary angles are scaled otherwise than "
    "Llama 3.1's or turn a part of each head. No plan carries the base of these angles: `run`, and files for Megatron-LM and nanotron, train with 10,000, and weights of another "
    "base come in where the model is built with it (docs/decisions/0182); a schedule of learning rates is a function of the step "
    "(`build(rate_of_step=...)`), not an object of torch's. What of faults is not promised stands in docs/reliability.md.",
    "Runs observed on a GPU: of one rank (docs/decisions/0158); on CPU ranks memory is the process', not by terms, and nothing hidden behind compute is seen.",
    "`run` starts the ranks of one machine; for several there are the emitted scripts, which were run with a stub launcher and "
    "on one machine only.",
)
"""What no table of the code knows to be missing."""


@cache
def status_page() -> str:
    """The page without its first line."""
    return "\n".join((*_techniques(), "", *_models(), "", *_later(), ""))


def _techniques() -> Iterator[str]:
    yield "# Status"
    yield ""
    yield from _paragraph(
        "Each row was asked a question with these choices pinned: is there a plan, does the executor accept it "
        "(`strategist/executor/support.py`; the parity tests train such plans against one process), is there a trace, does "
        "each target write files for it."
    )
    yield ""
    heads = ("technique", "planned", "run", "traced", *(f"emitted: {emitter.name}" for emitter in EMITTERS), "why not")
    yield f"| {' | '.join(heads)} |"
    yield "|" + "---|" * len(heads)
    for technique in TECHNIQUES:
        yield f"| {' | '.join((technique.title, *_answers(technique.plan)))} |"


def _answers(plan: Plan | None) -> tuple[str, ...]:
    if plan is None:
        return ("no", *("no",) * (2 + len(EMITTERS)), "no layout is legal")
    missing = unsupported(plan)
    known = (True, not missing, is_traced(plan), *(is_emitted(plan, emitter.name) for emitter in EMITTERS))
    why = " ".join(obstacle.sentence for obstacle in layout_obstacles(plan))
    return (*("yes" if said else "no" for said in known), why or " ".join(missing))


def is_traced(plan: Plan) -> bool:
    """Every plan that the executor runs can be traced, once there is a trace."""
    return is_command("trace") and not unsupported(plan)


DRIVE = Options(nvme_path="/local_nvme")
"""What a user adds for a plan that keeps state on a drive."""


def is_emitted(plan: Plan, target: str) -> bool:
    """True when the target writes files for the plan."""
    try:
        return bool(strategist.emit(plan, target, DRIVE if plan.strategy.offload == "nvme" else None))
    except ImpossibleError:
        return False


def is_command(name: str) -> bool:
    """True when the command line has that command."""
    return name in {command for command, _ in COMMANDS}


def _models() -> Iterator[str]:
    yield "## Models"
    yield ""
    shapes, runs = rows("models"), runnable_models()
    able = sorted({strategist.load_model(name).family for name in runs})
    yield from _paragraph(
        f"The catalogue has the shapes of {len(shapes)} models in {len({row['family'] for row in shapes})} families, and reads "
        f"their configurations. The executor's own model can be {len(runs)} of them, of the families {', '.join(able)}: "
        "pre-norm decoders of RMSNorm or LayerNorm, rotary or learned positions, full or windowed attention, and feed-forward "
        "parts or routed experts. Any other `torch.nn.Module` trains with data parallelism, and with pp where it is a `Sequential` whose blocks "
        "run in order; Hugging Face's Llama, "
        "Mistral, Mixtral, Qwen2, Qwen3 and GPT-2 with tp (not sequence parallelism, nor cp or ep) and pp too, which the parity matrix holds "
        "to the same bounds; with dropout or noise not under tp."
    )


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(text, 120, break_on_hyphens=False, break_long_words=False)


def runnable_models() -> list[str]:
    """Names of the catalogue's models that the executor's own model can be."""
    names = (row["name"] for row in rows("models"))
    return [name for name in names if not model_obstacles(strategist.load_model(name))]


def _later() -> Iterator[str]:
    yield "## Missing, by name"
    yield ""
    for name, words in LATER.items():
        if not is_command(name):
            yield f"- `strategist {name}`: {words}."
    yield from (f"- {sentence}" for sentence in MISSING)
    over = [f"{name}: {value:g} (bar {bar:g})" for name, (value, bar) in figures(read("search")).items() if value > bar]
    if over:
        yield f"- Bars of the search that its last measurement missed (benchmarks/README.md): {'; '.join(over)}."
