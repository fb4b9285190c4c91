"""Every word a rule may use: what it means and in which unit. A rule with any other word is refused when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from strategist.records import dataclass

Scope = Literal["situation", "candidate"]


@dataclass(frozen=True, slots=True)
class Word:
    """One name. `situation` words have one value per question, `candidate` words one per layout."""

    meaning: str
    scope: Scope
    unit: str = ""


def _situation(meaning: str, unit: str = "") -> Word:
    return Word(meaning, "situation", unit)


def _candidate(meaning: str, unit: str = "") -> Word:
    return Word(meaning, "candidate", unit)


WORDS: Mapping[str, Word] = {
    "gpus": _situation("devices in the cluster"),
    "nodes": _situation("hosts in the cluster"),
    "gpus_per_node": _situation("devices per host"),
    "fits_one_gpu": _situation(
        "the whole job fits one device: micro-batch 1, no sharding, no offload, recompute allowed"
    ),
    "largest_layer_fits": _situation("the widest layer's weights, gradient and activations fit one device"),
    "fast_intra": _situation("an all-reduce over a node's devices reaches the threshold of bus bandwidth"),
    "fast_inter": _situation("each device reaches the threshold of bandwidth to other nodes"),
    "memory_short": _situation(
        "without tp and pp even ZeRO-3 over all devices with recompute does not fit, or only with offload"
    ),
    "peak_one_gpu": _situation("peak bytes of the job on one device", "GiB"),
    "largest_layer": _situation("bytes the widest layer needs", "GiB"),
    "usable": _situation("bytes a plan may use on one device", "GiB"),
    "intra_bandwidth": _situation("achieved all-reduce bus bandwidth inside a node", "GB/s"),
    "intra_threshold": _situation("bus bandwidth from which a node counts as fast", "GB/s"),
    "inter_bandwidth": _situation("achieved bandwidth per device between nodes, one direction", "GB/s"),
    "inter_threshold": _situation("bandwidth per device from which the network counts as fast", "GB/s"),
    "best_unsplit": _situation("peak bytes of the leanest layout without tp, pp and offload", "GiB"),
    "mixed_devices": _situation("the cluster has more than one kind of device"),
    "has_experts": _situation("the model routes tokens to experts"),
    "some_experts": _situation("some of the model's layers route tokens to experts and others do not"),
    "layers": _situation("layers that a pipeline can split"),
    "hidden": _situation("width of the residual stream"),
    "heads": _situation("attention heads, 0 without attention"),
    "kv_heads": _situation("key-value heads, 0 without attention"),
    "ffn": _situation("hidden width of the dense feed-forward part, 0 without one"),
    "vocab": _situation("vocabulary entries that the model gives, 0 where it gives labels or hidden states"),
    "pads_vocabulary": _situation("the framework makes the output head a multiple of 64 entries wide"),
    "tied": _situation("embedding and head are one matrix"),
    "experts": _situation("routed experts per layer, 0 for dense models"),
    "expert_ffn": _situation("hidden width of one expert, 0 for dense models"),
    "splittable": _situation("the model is one uniform stack that a pipeline can cut"),
    "described": _situation("the model is an architecture, not a module of which only weights and blocks are known"),
    "convolutional": _situation(
        "the layers are blocks of convolutions, which count an image as a sequence of one token"
    ),
    "parameters": _situation("all parameters of the model"),
    "seq_len": _situation("tokens per sequence"),
    "target_len": _situation("tokens per sequence of a decoder behind an encoder, 0 for models of one stack"),
    "global_batch": _situation("sequences per optimizer step"),
    "long_sequence": _situation("sequences are longer than the threshold from which context parallelism is considered"),
    "long_threshold": _situation("sequence length above which context parallelism is considered", "tokens"),
    "precision": _situation("number format asked for"),
    "optimizer": _situation("optimizer asked for"),
    "odd_sides": _situation("some matrix of the layers has a side that 16 does not divide"),
    "method": _situation("what is trained: full (all weights), lora or qlora (adapters beside frozen weights)"),
    "frozen": _situation("weights of a live module that are not trained (requires_grad), 0 where all are"),
    "shared_ffn": _situation("hidden width of all shared experts, 0 without them"),
    "positions": _situation("tokens that a table of learned positions has rows for, 0 without one"),
    "target_positions": _situation(
        "tokens that a table of learned positions of a decoder behind an encoder has rows for, 0 without one"
    ),
    "rotary_positions": _situation("tokens that a rotary model was made for, 0 for others and where nobody says"),
    "norms_all_heads": _situation("queries and keys are normalised over all heads at once"),
    "windowed": _situation("some layers look at a window that is shorter than the sequences"),
    "buildable": _situation(
        "a decoder that strategist's own executor can build: pre-norm, dense or with routed experts"
    ),
    "may_chunk_loss": _situation("what is planned for can compute the loss of a few tokens at a time"),
    "frontend": _situation("framework whose limits count: any, or a name of the catalogue"),
    "purpose": _situation("what the job is for: research, production, performance, debugging or unsure"),
    "has_precision": _situation("the device multiplies in the number format asked for"),
    "precisions": _situation("number formats in which all devices multiply"),
    "fast_domain": _situation("devices joined by the fastest links"),
    "is_gpu": _situation("the device is a GPU, not the CPU"),
    "has_tables": _situation("the model has tables of embeddings that no other part shares"),
    "table_share": _situation("share of the weights in tables of embeddings, of a module that nobody described", "%"),
    "pp": _candidate("pipeline stages"),
    "dimensions": _candidate("kinds of parallelism that more than one rank takes part in, of dp, tp, pp, cp and ep"),
    "dp": _candidate("ranks that see different samples: dp_replicate x dp_shard"),
    "dp_replicate": _candidate("replicas of the sharding group"),
    "dp_shard": _candidate("ranks that shard one replica"),
    "cp": _candidate("ranks that share one sequence"),
    "tp": _candidate("ranks that share one layer"),
    "ep": _candidate("ranks that share the experts"),
    "etp": _candidate("ranks that share one expert"),
    "zero": _candidate("ZeRO stage, 0 to 3"),
    "virtual_stages": _candidate("chunks of layers per pipeline stage"),
    "schedule": _candidate("pipeline schedule"),
    "micro_batch": _candidate("sequences per micro-batch and data rank"),
    "accumulation": _candidate("micro-batches per optimizer step"),
    "sequence_parallel": _candidate("1 when norms and residuals are cut along the sequence"),
    "context_parallel": _candidate("kind of context parallelism"),
    "cp_inner": _candidate("neighbours along cp that exchange heads before a ring across them, 1 for none"),
    "recompute": _candidate("activation recomputation"),
    "recompute_layers": _candidate("layers of every chunk that full recompute runs again, 0 for all"),
    "recompute_every": _candidate(
        "every how-many-th layer of a chunk full recompute runs again, 0 for all, or the first"
    ),
    "uneven_batch": _candidate("1 where replicas on faster nodes run more micro-batches, else 0"),
    "recompute_depth": _candidate("as many layers run again on every stage, or each stage has its own number"),
    "recompute_deepest": _candidate(
        "most layers of a chunk that any stage runs again where each has its own number, else 0"
    ),
    "offload": _candidate("what lives in host memory or on NVMe"),
    "tiling": _candidate("pieces that the widest matrices are computed in"),
    "stage_split": _candidate(
        "how layers are spread over stages: evenly, with the output head counted, or so that none is slower for what it runs again"
    ),
    "replicas": _candidate("whole replicas as processes (DDP) or as threads of one process (nn.DataParallel)"),
    "compression": _candidate("what DDP does to gradients before it sends them"),
    "loss": _candidate("loss of whole logits, or of the logits of a few tokens at a time"),
    "tables": _candidate("tables of embeddings on every replica, or on a parameter server"),
    "ddp_share": _candidate("share of the step that the same layout takes with processes for threads", "%"),
    "ddp_ratio": _candidate("step of the best DDP layout that fits over this one's, 0 where there is none"),
    "cp_ratio": _candidate("step of the best layout with cp that fits over this one's, 0 where there is none"),
    "other_cp": _candidate("cp of that layout, else 1"),
    "tp_share": _candidate("share of the step that exposed tensor parallel collectives take", "%"),
    "tp_bandwidth": _candidate(
        "achieved all-reduce bus bandwidth of the ranks that share a layer, where they lie", "GB/s"
    ),
    "dp_share": _candidate("share of the step that exposed data parallel collectives take", "%"),
    "bubble_share": _candidate("share of the step that the pipeline is idle", "%"),
    "logits_share": _candidate("share of a device's memory at its peak that logits take", "%"),
    "offload_share": _candidate("share of the step that offloading takes", "%"),
}
