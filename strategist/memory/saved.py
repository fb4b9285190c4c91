"""Tensors that autograd keeps from forward to backward, per token and per sort of layer.

Each row is one tensor of strategist's own reference block (executor/models), or of the block of the framework whose
habits are asked for (catalogue: keeping): what it is, its width in elements per token, how parallelism cuts it, its
format, and under which recompute policies it is kept. The list follows Korthikanti et al. 2022 (arXiv 2205.05198, section 4), with flash attention (Dao et al. 2022, arXiv 2205.14135: only q, k, v, the
output and one log-sum-exp per head remain). Selective recompute keeps the results of matrix products, of attention and
of reductions (executor/steps/recompute.py); full recompute keeps the input of the layer alone.

cut "sequence": the residual stream, divided by tp only under sequence parallelism; "heads": divided by tp always;
"whole": gathered before a column-cut matrix or partial after a row-cut one, never divided; "dispatched": tokens that
were sent to experts, a rank's own part of the sequence unless the experts are cut as well; "exchanged": tensors that exist only
where an all-to-all changes heads for tokens behind attention, cut like heads; "regathered": whole, but only where tokens that go
to experts are cut, and shared experts need all of them, or where those of an encoder are, and every layer of a decoder does; "summed": cut like the sequence, and only where ranks add up the results of
experts that are cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Literal

from strategist.facts.convolutions import Block, Convolution, blocks
from strategist.facts.job import Job
from strategist.facts.keeping import Keeping, find_keeping
from strategist.facts.layers import build_layer
from strategist.facts.model import Adapters, LayerKind, Mla, ModelShape, Moe, Ssm
from strategist.facts.module_forms import find_module_form, kept_by_modules
from strategist.facts.profile import BYTES, Light, act_form_of, numbers_of
from strategist.records import dataclass, replace
from strategist.space.shares import target_share

Cut = Literal["sequence", "heads", "whole", "dispatched", "exchanged", "regathered", "summed", "autocast"]
Part = Literal["mixer", "ffn", "inside", "product", "entry", "rest", "exchanged"]
Policy = Literal["none", "selective", "full"]

POLICIES: tuple[Policy, ...] = ("none", "selective", "full")
ALWAYS: tuple[Policy, ...] = POLICIES
PLAIN: tuple[Policy, ...] = ("none",)
COSTLY: tuple[Policy, ...] = ("none", "selective")
REPLACED: tuple[Policy, ...] = ("selective",)
"""Kept under every policy; only without recompute; unless recompute is full; only by selective recompute."""


FROZEN = ("ffn_input", "ffn_product", "expert_input", "expert_product", "shared_product")
"""Inputs of matrices without adapters: a frozen matrix needs none (adapters stand beside the matrices of attention)."""

REDONE: Mapping[str, tuple[str, ...]] = {
    "core_attn": ("scores", "log_sum_exp", "cross_scores", "cross_log_sum_exp"),
    "mla_up_proj": ("query", "key", "value"),
    "layernorm": ("qkv_input", "latent_input", "ffn_input", "cross_qkv_input"),
    "moe_act": ("expert_product",),
    "mlp": ("gate", "up", "ffn_hidden", "ffn_activated", "ffn_operations", "ffn_product"),
    "shared_experts": ("shared_product",),
    "moe": ("router", "expert", "shared", "gate", "up"),
}
"""Rows that selective recompute runs again, by the modules a run names (NVIDIA/Megatron-LM:
megatron/core/transformer/transformer_config.py, recompute_modules)."""
_KINDS: Mapping[str, str] = {"mlp": "dense", "moe": "moe", "moe_act": "moe", "shared_experts": "moe"}
"""The layers that have such a module; any layer has the others. Experts are no `mlp` (the same file)."""


@dataclass(frozen=True, slots=True)
class Saved:
    """One kept tensor: `width` elements per token; `is_float32` rows are statistics of 4 bytes, `is_float8` rows of one
    byte; `policies` keep it. `part` says when backward is through with it: "product" feeds the last matrix of the
    feed-forward part, "inside" lies between its matrices, "entry" is what the layer begins with, "rest" is let go of with the
    whole layer, "exchanged" feeds the matrix behind attention and nothing else. `cut_only` rows exist only where tensor parallelism cuts the layer;
    rows that `arrive` are of tokens that came to a rank's experts, more than it sent where these get more than others'."""

    name: str
    width: float
    cut: Cut
    policies: tuple[Policy, ...] = PLAIN
    is_float32: bool = False
    part: Part = "ffn"
    is_float8: bool = False
    cut_only: bool = False
    arrives: bool = False


@dataclass(frozen=True, slots=True)
class Habits:
    """What decides which tensors are kept: the framework's row, what its selective recompute runs again, how many scores
    per head a token's query writes out (0: none are) and how many bytes are kept of each, bytes per element of inputs of matrices that are kept as cast (0: none are), which modules selective
    recompute runs again, whether the matrices beside adapters are frozen, whether some ranks' experts get more tokens than others', whether
    autocast casts what float32 norms give, how many tokens a decoder behind an encoder has for each of the inputs, and how many bytes an activation of
    several operations keeps of each number beyond its input and result."""

    keeping: Keeping
    light: Light = "elementwise"
    scores: int = 0
    score_bytes: float = 0.0
    cast_width: float = 0.0
    redoes: tuple[str, ...] = ()
    is_frozen: bool = False
    is_crowded: bool = False
    is_cast: bool = False
    target_share: float = 1.0
    act_bytes: float = 0.0


def habits_of(job: Job) -> Habits:
    """The habits of a job's framework, at its sequence length and precision."""
    profile, work = job.profile, job.workload
    cast_width = job.cast_width if profile.keeping.float8_inputs else 0.0
    scores = work.seq_len if profile.attention == "unfused" else 0
    crowded = work.expert_imbalance > 1
    each = score_bytes(job) if scores else 0.0
    is_cast = profile.keeping.wide_softmax and _is_autocast(job)
    form = act_form_of(profile.kernels, job.model, job.formats)
    modules = find_module_form(profile.kernels.modules, job.model.model_type)
    return Habits(
        keeping=kept_by_modules(profile.keeping, modules, numbers_of(job.formats), is_fused=not scores),
        light=profile.light,
        scores=scores,
        score_bytes=each,
        cast_width=cast_width,
        redoes=profile.redoes,
        is_frozen=job.adapters,
        is_crowded=crowded,
        is_cast=is_cast,
        target_share=target_share(job),
        act_bytes=0.0 if form is None else form.kept_bytes,
    )


def has_wide_softmax(job: Job) -> bool:
    """Whether softmax runs in float32 and what it gave is cast to the compute format: in Transformers' gated models by their own code
    (huggingface/transformers: models/llama/modeling_llama.py, eager_attention_forward), and in any under autocast (pytorch:
    docs/source/amp.rst, CUDA ops that can autocast to float32)."""
    return job.profile.keeping.wide_softmax and (job.model.mlp_gated or _is_autocast(job))


def _is_autocast(job: Job) -> bool:
    """Whether weights are in a wider format than what they multiply in."""
    return BYTES[job.formats.compute] < BYTES[job.formats.parameter]


def score_bytes(job: Job) -> float:
    """Bytes that unfused attention keeps of a score: what softmax gave, which its own backward reads; with dropout, in models of plain
    MLPs, a mask; and what the product with the values reads, where that is another tensor: a cast copy, or what dropout left."""
    keeping, compute = job.profile.keeping, BYTES[job.formats.compute]
    is_wide, drops = has_wide_softmax(job), not job.model.mlp_gated and keeping.drops_scores
    probabilities = BYTES["float32"] if is_wide else compute
    is_read_apart = drops or probabilities != compute
    return probabilities + (1.0 if drops else 0.0) + (compute if is_read_apart else 0.0)


@cache
def saved_tensors(shape: ModelShape, kind: LayerKind, habits: Habits | None = None) -> tuple[Saved, ...]:
    """The kept tensors of one layer, in forward order; the first is the layer's input, which every policy keeps. Without
    `habits`, of strategist's own block. Widths are per token of the inputs: in a decoder behind an encoder all but the keys and values of
    the latter are as much less as its own tokens are fewer."""
    if kind.mixer == "convolution":
        return _convolutions(blocks(shape.extra)[kind.block])
    habits = habits or Habits(find_keeping())
    keeping = habits.keeping
    mixer = _mixer(shape, kind, keeping) if kind.mixer != "none" else ()
    share = habits.target_share if kind.cross else 1.0
    cross: tuple[Saved, ...] = ()
    if kind.cross:
        cross = (*_attention(shape, keeping, "cross_", 1.0 / share), *_scores(shape, habits, "cross_"))
        cross += (Saved("cross_memory", shape.hidden / share, "regathered"),) if keeping.gathered_inputs else ()
    ffn = _ffn(shape, kind, keeping) if kind.ffn != "none" else ()
    scores = _scores(shape, habits, keys=share) if kind.mixer in ("attention", "sliding", "mla") else ()
    mixed = (row if row.part == "exchanged" else replace(row, part="mixer") for row in (*mixer, *cross, *scores))
    adapters = _adapters(shape, kind, keeping) if habits.is_frozen else ()
    if shape.adapters is not None:
        adapters = _beside_frozen(shape, shape.adapters, kind)
    under_autocast = _under_autocast(shape, kind, keeping) if habits.is_cast else ()
    first, *rest = (*mixed, *ffn, *_operations(shape, kind, habits), *_masks(shape, kind, keeping), *under_autocast, *adapters)  # fmt: skip
    every = (replace(first, policies=ALWAYS, part="entry"), *rest)
    if share != 1.0:
        every = tuple(replace(row, width=row.width * share) for row in every)
    stored = (_cast(row, habits.cast_width) for row in every) if habits.cast_width else every
    frozen = _frozen(shape) if shape.adapters is not None else FROZEN if habits.is_frozen else ()
    trained = (row for row in stored if not row.name.startswith(frozen))
    return tuple(row for row in (_redone(row, habits, kind) for row in trained) if row.policies)


def _convolutions(block: Block) -> tuple[Saved, ...]:
    """What a block of convolutions keeps for one image: every convolution its input, which is what the ReLU before it gave and keeps
    too; every batch norm its input (pytorch: tools/autograd/derivatives.yaml: convolution, native_batch_norm, relu)."""
    inside = (*block.chain, *block.shortcut)
    return (
        Saved("block_input", block.chain[0].read, "whole", ALWAYS, part="entry"),
        Saved("convolved", sum(convolution.made for convolution in inside), "whole", COSTLY),
        Saved("activated", sum(convolution.made for convolution in block.chain[:-1]), "whole"),
        *(row for stem in block.stem for row in _in_front(block, stem)),
    )


def _in_front(block: Block, stem: Convolution) -> tuple[Saved, ...]:
    """What is kept in front of the first block, none of which is computed again: the image, what the first convolution and its ReLU
    gave, and the place of each pixel that pooling took, eight bytes (same file: max_pool2d_with_indices)."""
    return (
        Saved("image", stem.read, "whole", ALWAYS),
        Saved("first_convolved", stem.made, "whole", ALWAYS),
        Saved("first_activated", stem.made, "whole", ALWAYS),
        Saved("places", 2 * block.pooled, "whole", ALWAYS, is_float32=True),
    )


def _named(habits: Habits, kind: LayerKind) -> tuple[str, ...]:
    """What the names of rows that selective recompute runs again begin with: of the modules that a layer of this kind has."""
    modules = habits.redoes or ("core_attn",)
    return tuple(name for module in modules if _KINDS.get(module, kind.ffn) == kind.ffn for name in REDONE[module])


def _redone(row: Saved, habits: Habits, kind: LayerKind) -> Saved:
    """The row under what a framework's selective recompute runs again: attention's scores alone, every second matrix too
    (pytorch/torchtitan: torchtitan/distributed/activation_checkpoint.py, matrices are counted in the order they run), or
    what strategist's own does. Every second layer whole is an average of two policies (memory/backward.py)."""
    light = habits.light
    if light == "elementwise":
        return row
    if row.policies == REPLACED:
        is_every_second = light == "alternate" and row.name == "ffn_result"
        return row if is_every_second else replace(row, policies=())
    if light == "attention":
        again = row.name.startswith(_named(habits, kind))
        return row if row.policies == ALWAYS else replace(row, policies=PLAIN if again else COSTLY)
    if light == "alternate" and row.name in ("key", "up", "qk_norm_input"):
        return replace(row, policies=PLAIN)
    return replace(row, policies=COSTLY) if light == "alternate" and row.name == "query" else row


def _cast(row: Saved, width: float) -> Saved:
    """An input of a matrix that runs in fp8 or fp4 is kept as cast, `width` bytes an element; attention keeps its own copy
    of its output."""
    if row.name.endswith(("_product", "_input")) and "norm" not in row.name:
        return replace(row, width=row.width * width, is_float8=True)
    return row


def _scores(shape: ModelShape, habits: Habits, prefix: str = "", keys: float = 1.0) -> tuple[Saved, ...]:
    """What unfused attention keeps of its scores, in units of one byte; `keys` for every token of the inputs."""
    width = shape.heads * habits.scores * keys * habits.score_bytes
    return (Saved(f"{prefix}scores", width, "heads", is_float8=True),) if width else ()


def _adapters(shape: ModelShape, kind: LayerKind, keeping: Keeping) -> tuple[Saved, ...]:
    """What adapters keep of the inputs of the matrices beside which they stand, in units of one byte; queries, keys and values
    share one input."""
    dense = (m for m in build_layer(shape, kind).matrices if not m.is_expert and m.name not in ("k", "v"))
    width = keeping.adapter_bytes * sum(m.inputs for m in dense if keeping.adapts_all or m.name == "q")
    return (Saved("adapters", width, "whole", is_float8=True),) if width else ()


READERS: Mapping[str, tuple[str, ...]] = {
    "qkv_input": ("q", "k", "v"),
    "ffn_input": ("gate", "up"),
    "ffn_product": ("down",),
    "expert_input": (),
    "expert_product": (),
    "shared_input": (),
    "shared_product": (),
}
"""Beside which matrices that read a row adapters may stand, where nothing else keeps it: a frozen matrix needs no input in backward. None stand
beside those of experts, and a router's row is the experts'."""


def _frozen(shape: ModelShape) -> tuple[str, ...]:
    """Rows that nothing reads in backward, because none of the matrices that read them has an adapter."""
    targets = shape.adapters.targets if shape.adapters is not None else ()
    also = READERS["ffn_input"] if shape.shares_norm else ()
    read = {**READERS, "qkv_input": (*READERS["qkv_input"], *also)}
    return tuple(row for row, readers in read.items() if not set(readers) & set(targets))


def _beside_frozen(shape: ModelShape, adapters: Adapters, kind: LayerKind) -> tuple[Saved, ...]:
    """What adapters keep beside the inputs of their matrices: what A gives; under selective recompute, which keeps the results
    of all products, what the frozen matrices give too."""
    parts: Mapping[Part, tuple[str, ...]] = {"mixer": ("q", "k", "v", "o"), "inside": ("gate", "up"), "rest": ("down",)}
    matrices = {matrix.name: matrix for matrix in build_layer(shape, kind).matrices}
    rows = []
    for part, names in parts.items():
        own = [matrices[name] for name in names if name in adapters.targets and name in matrices]
        rows += [
            Saved(f"{part}_adapters", len(own) * adapters.rank, "whole", COSTLY, part=part),
            Saved(f"{part}_frozen_results", sum(matrix.outputs for matrix in own), "whole", REPLACED, part=part),
        ]
    return tuple(rows)


def _operations(shape: ModelShape, kind: LayerKind, habits: Habits) -> tuple[Saved, ...]:
    """What the operations of a dense part's activation keep beside its input and result, where it is several, in units of one byte."""
    width = habits.act_bytes * shape.ffn_hidden if kind.ffn == "dense" else 0.0
    return (Saved("ffn_operations", width, "heads", part="inside", is_float8=True),) if width else ()


def _masks(shape: ModelShape, kind: LayerKind, keeping: Keeping) -> tuple[Saved, ...]:
    """Masks of the dropout behind each part of a layer, one byte per element."""
    parts = (kind.mixer != "none") + kind.cross + (kind.ffn != "none")
    width = 0.0 if shape.mlp_gated else parts * keeping.mask_bytes * shape.hidden
    return (Saved("masks", width, "sequence", is_float8=True),) if width else ()


def _under_autocast(shape: ModelShape, kind: LayerKind, keeping: Keeping) -> tuple[Saved, ...]:
    """What weights in float32 make of the residual stream where plain modules run under autocast: sums and norms are in float32, two bytes
    more of each norm's input, and each matrix has a cast copy of its own of what a norm gave, since only weights' copies are found again
    (pytorch: aten/src/ATen/autocast_mode.cpp, cached_cast; docs/source/amp.rst). GPT-2's kin read it with one matrix of attention, and so do those that part what one matrix gave into views."""
    gated = shape.mlp_gated and not keeping.projected
    apart = gated or shape.kind != "decoder"
    entry = Saved("wide_entry", 2 * shape.hidden, "autocast", ALWAYS, part="rest", is_float8=True)
    copies = Saved("qkv_copies", 2 * shape.hidden * apart, "autocast", part="mixer")
    if kind.ffn == "none":
        return entry, copies
    again = not shape.parallel_block  # else it is the stream that attention's norm reads
    between = Saved("wide_ffn_norm_input", 2 * shape.hidden * again, "autocast", is_float8=True)
    return (
        entry,
        copies,
        between,
        Saved("ffn_copies", shape.hidden * ((gated and kind.ffn != "moe") + shape.shares_norm), "autocast"),
    )


def _norm(shape: ModelShape, name: str, keeping: Keeping) -> tuple[Saved, ...]:
    return (
        Saved(f"{name}_input", shape.hidden, "sequence"),
        Saved(f"{name}_statistics", _beside_norm(shape, shape.hidden, 1, keeping), "sequence", is_float32=True),
    )


def _beside_norm(shape: ModelShape, width: float, norms: float, keeping: Keeping) -> float:
    """What norms of so many elements in all keep beside their input, in numbers of float32: statistics of each, and the copies of who runs
    them operation by operation. Half of RMSNorm's feed the product with a weight, which not every such norm has."""
    copies = keeping.norm_bytes / 4.0 * width
    if not shape.norm.startswith("rms"):
        return 2 * norms + copies
    has_weight = shape.norm == "rmsnorm"
    return norms + keeping.rms_bytes / 4.0 * width * (1.0 if has_weight else 0.5) + copies


def _behind(shape: ModelShape, name: str, keeping: Keeping) -> tuple[Saved, ...]:
    """The norm behind a part of a layer that has norms on both sides: what the part gave is its input (Gemma Team 2024, arXiv 2408.00118,
    section 2)."""
    if shape.mix is not None or shape.norms_per_layer < 4:
        return ()
    return _norm(shape, f"{name}_post_norm", keeping)


def _gathered(keeping: Keeping) -> Cut:
    """How the input of a column-cut matrix is kept."""
    return "whole" if keeping.gathered_inputs else "sequence"


def _projected(shape: ModelShape, name: str, part: Part = "ffn") -> tuple[Saved, Saved]:
    """The result of a matrix that writes back to the residual stream, and the sum of the ranks' results; only selective
    recompute keeps them. What the feed-forward part gives is never asked for again: recomputation stops before it."""
    return (
        Saved(f"{name}_result", shape.hidden, "whole", REPLACED, part=part),
        Saved(f"{name}_sum", shape.hidden, "sequence", REPLACED, part=part, cut_only=True),
    )


def _mixer(shape: ModelShape, kind: LayerKind, keeping: Keeping) -> tuple[Saved, ...]:
    if shape.mla is not None and kind.mixer == "mla":
        norm = _norm(shape, "mixer_norm", keeping)
        return (*norm, *_latent(shape, shape.mla, keeping), *_projected(shape, "mixer"))
    if shape.ssm is not None and kind.mixer == shape.ssm.kind:
        norm = _norm(shape, "mixer_norm", keeping)
        return (*norm, *_state_space(shape, shape.ssm, keeping), *_projected(shape, "mixer"))
    return _attention(shape, keeping, "")


def _attention(shape: ModelShape, keeping: Keeping, prefix: str, keys: float = 1.0) -> tuple[Saved, ...]:
    """Rows of one attention that has so many `keys` and values for every query."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim * keys
    is_changed = shape.pos == "rope" or bool(shape.qk_norm)  # between the matrices and attention itself
    normed_qk = _normed_heads(shape, q + kv, keeping, prefix) if shape.qk_norm else ()
    copied = (Saved(f"{prefix}attention_copy", q, "heads"),) if keeping.copied_output else ()
    results = Saved(f"{prefix}query_and_key_results", q + kv, "heads", REPLACED)
    is_view = keeping.projected and shape.pos == "rope" and not shape.qk_norm
    return (
        *_norm(shape, f"{prefix}attention_norm", keeping),
        Saved(f"{prefix}qkv_input", shape.hidden, _gathered(keeping)),
        *normed_qk,
        *((Saved(f"{prefix}projected", q + kv, "heads"),) if is_view else ()),
        *((results,) if is_changed and not shape.qk_norm else ()),
        Saved(f"{prefix}query", q, "heads", PLAIN if is_changed else COSTLY),
        Saved(f"{prefix}key", kv, "heads", PLAIN if is_changed else COSTLY),
        Saved(f"{prefix}value", kv, "heads", COSTLY),
        Saved(f"{prefix}attention_output", q, "heads", COSTLY),
        *copied,
        Saved(f"{prefix}log_sum_exp", shape.heads, "heads", COSTLY, is_float32=True),
        *(_gated_heads(q, prefix) if shape.attn_gate else ()),
        Saved(f"{prefix}exchanged_output", q, "exchanged", part="exchanged"),
        *_projected(shape, f"{prefix}attention"),
        *_behind(shape, f"{prefix}attention", keeping),
    )


def _normed_heads(shape: ModelShape, width: float, keeping: Keeping, prefix: str) -> tuple[Saved, ...]:
    """What norms of queries and keys, of so many elements together, keep: over each head, or over all heads at once."""
    norms = 2 if shape.qk_norm == "full" else shape.heads + shape.kv_heads
    beside = _beside_norm(shape, width, norms, keeping)
    return (
        Saved(f"{prefix}qk_norm_input", width, "heads", COSTLY),
        Saved(f"{prefix}qk_norm_statistics", beside, "heads", is_float32=True),
    )


def _gated_heads(width: float, prefix: str) -> tuple[Saved, Saved]:
    """The sigmoid on what attention gives: its result, which is its own backward's too, and the product that the last matrix reads (Qiu et
    al. 2025, arXiv 2505.06708, section 2.2)."""
    return (
        Saved(f"{prefix}attention_gate", width, "heads", COSTLY),
        Saved(f"{prefix}attention_gated", width, "heads"),
    )


def _latent(shape: ModelShape, mla: Mla, keeping: Keeping) -> tuple[Saved, ...]:
    qk, latents = shape.heads * (mla.qk_nope + mla.qk_rope), mla.q_lora + mla.kv_lora
    return (
        Saved("latent_input", shape.hidden, _gathered(keeping)),
        Saved("latent_query", 2 * mla.q_lora, "whole"),
        Saved("latent_key_value", 2 * mla.kv_lora + mla.qk_rope, "whole"),
        Saved(
            "latent_statistics", _beside_norm(shape, latents, 2 if mla.q_lora else 1, keeping), "whole", is_float32=True
        ),
        Saved("query", qk, "heads"),
        Saved("key", qk, "heads"),
        Saved("value", shape.heads * mla.v_dim, "heads"),
        Saved("attention_output", shape.heads * mla.v_dim, "heads", COSTLY),
        *(
            (Saved("attention_copy", shape.heads * (mla.qk_nope + mla.v_dim), "heads"),)
            if keeping.copied_output
            else ()
        ),
        Saved("log_sum_exp", shape.heads, "heads", COSTLY, is_float32=True),
    )


def _state_space(shape: ModelShape, ssm: Ssm, keeping: Keeping) -> tuple[Saved, ...]:
    layer = build_layer(shape, LayerKind(ssm.kind, "none"))
    projected = sum(matrix.outputs for matrix in layer.matrices if matrix.name not in ("out", "o"))
    inner = next(matrix.inputs for matrix in layer.matrices if matrix.name == "out")
    return (
        Saved("mixer_input", shape.hidden, _gathered(keeping)),
        Saved("projected", 2 * projected, "heads"),
        Saved("mixer_output", 2 * inner, "heads", COSTLY),
    )


def _ffn(shape: ModelShape, kind: LayerKind, keeping: Keeping) -> tuple[Saved, ...]:
    norm = () if shape.shares_norm else _norm(shape, "ffn_norm", keeping)
    if shape.parallel_block:  # the stream that both parts read is listed with attention's norm
        norm = norm[1:]
    behind = _behind(shape, "ffn", keeping)
    if kind.ffn == "moe" and shape.moe is not None:
        return (*norm, *_experts(shape, shape.moe, keeping), *behind)
    mlp = _mlp(shape, shape.ffn_hidden, keeping)
    return (
        *norm,
        *(() if shape.shares_norm else (Saved("ffn_input", shape.hidden, _gathered(keeping)),)),
        *mlp,
        *_projected(shape, "ffn", "rest"),
        *behind,
    )


def _mlp(shape: ModelShape, width: float, keeping: Keeping, name: str = "ffn") -> tuple[Saved, ...]:
    """Gated: gate, up, act(gate) where it is kept, and their product; plain: the value before and after the activation.
    The backward of ReLU needs its result alone; the value before it is kept where selective recompute makes the result again."""
    product = Saved(f"{name}_product", width, "heads", part="product")
    if not shape.mlp_gated and shape.mlp_act in ("relu", "relu2"):
        squared = (Saved(f"{name}_activated", width, "heads", part="inside"),) if shape.mlp_act == "relu2" else ()
        return (Saved(f"{name}_hidden", width, "heads", REPLACED, part="inside"), *squared, product)
    if not shape.mlp_gated:
        return (Saved(f"{name}_hidden", width, "heads", COSTLY, part="inside"), product)
    return (
        Saved("gate", width, "heads", COSTLY, part="inside"),
        Saved("up", width, "heads", COSTLY, part="inside"),
        *((Saved(f"{name}_activated", width, "heads", part="inside"),) if keeping.activated else ()),
        product,
    )


def _experts(shape: ModelShape, moe: Moe, keeping: Keeping) -> tuple[Saved, ...]:
    """Every token is copied to its `top_k` experts and their outputs are weighted. Ours keep the router's scores and weights
    (float32, and as they multiply) and three lists of `top_k` places, eight bytes each; others float32 scores."""
    if keeping.name == OURS:
        return _own_experts(shape, moe, keeping)
    width = moe.latent or shape.hidden
    shared = _mlp(shape, moe.shared_ffn, keeping, "shared") if moe.shared_ffn else ()
    sent: Cut = "whole" if keeping.gathered_inputs else "dispatched"
    return (
        Saved("ffn_input", shape.hidden, _gathered(keeping)),
        Saved("router_scores", 2 * moe.experts, "whole", COSTLY, is_float32=True),
        Saved("expert_input", moe.top_k * width, sent, arrives=True),
        *_at_experts(shape, moe, keeping),
        *((Saved("expert_output", moe.top_k * width, "whole"),) if keeping.expert_outputs else ()),
        *shared,
    )


OURS = "own"
"""The row of `keeping` that is our executor's."""


def _own_experts(shape: ModelShape, moe: Moe, keeping: Keeping) -> tuple[Saved, ...]:
    width, k = moe.latent or shape.hidden, moe.top_k
    return (
        Saved("ffn_input", shape.hidden, "dispatched"),
        Saved("router_scores", moe.experts, "dispatched", COSTLY),
        Saved("router_weights", k, "dispatched"),
        Saved("router_shares_and_places", k + 3 * 2 * k, "dispatched", is_float32=True),
        Saved("expert_input", k * width, "dispatched", part="inside", arrives=True),
        *_at_experts(shape, moe, keeping),
        Saved("expert_result", k * width, "dispatched", REPLACED, part="inside", arrives=True),
        Saved("expert_output", k * width, "dispatched", part="inside"),
        *(_shared_experts(shape, moe, keeping) if moe.shared_ffn else ()),
        Saved("ffn_sum", shape.hidden, "summed", REPLACED, part="rest"),
    )


def _at_experts(shape: ModelShape, moe: Moe, keeping: Keeping) -> tuple[Saved, ...]:
    """What lies between the matrices of routed experts."""
    return tuple(replace(row, arrives=True) for row in _mlp(shape, moe.top_k * moe.ffn, keeping, "expert"))


def _shared_experts(shape: ModelShape, moe: Moe, keeping: Keeping) -> tuple[Saved, ...]:
    """A feed-forward part that every token uses. Where a gate weighs its result, that is kept; elsewhere recomputation stops before
    it. Beside whole experts each rank gathers its input, and gets its own tokens' part of the result."""
    policies = COSTLY if moe.shared_gate else REPLACED
    part: Part = "inside" if moe.shared_gate else "rest"
    return (
        Saved("shared_input", shape.hidden, "regathered", part="inside"),
        *(_of_shared(row) for row in _mlp(shape, moe.shared_ffn, keeping, "shared")),
        Saved("shared_part", shape.hidden, "regathered", REPLACED, part=part),
        Saved("shared_result", shape.hidden, "dispatched", policies, part=part),
    )


def _of_shared(row: Saved) -> Saved:
    """The row, named like the others of shared experts: it is made when the routed ones are through."""
    return row if row.name.startswith("shared_") else replace(row, name=f"shared_{row.name}")
