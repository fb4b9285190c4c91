"""Whether our executor's reference model can be an architecture. Planning asks before anything runs."""

from __future__ import annotations

from collections.abc import Iterator

from strategist.facts.model import ModelShape, Moe, layer_counts
from strategist.records import defaults_of, is_record, names_of

FREE = frozenset(
    {
        "name", "family", "layers", "hidden", "vocab", "ffn_hidden", "heads", "kv_heads", "head_dim", "tied", "max_seq",
        "pos_rows", "mlp_gated", "mlp_bias", "qkv_bias", "o_bias", "lm_head_bias", "window", "full_every", "pattern", "moe",
        "parameters_stated", "basis", "source", "notes", "called", "adapters", "act_form",
        "model_type", "parallel_block",
    }
)  # fmt: skip
"""Fields of a shape that may have any value; some are looked at more closely below. Every form of GELU is one kernel here."""

OWN_MODULE = "Give a module of yours to build() in a script, `strategist run PLAN -- python SCRIPT`; data-parallel plans run any."
"""What to do with a model that nothing here is built for."""

CHOICES: dict[str, tuple[object, ...]] = {
    "kind": ("decoder",),
    "norm": ("rmsnorm", "layernorm", "layernorm_nobias", "layernorm_nonparam"),
    "pos": ("rope", "learned"),
    "qk_norm": ("", "head", "full"),
    "mlp_act": ("silu", "gelu", "relu", "relu2"),
}
"""Fields with more values than their default. Every other field must have its default, which is Llama's."""

OTHER_WIRING = {
    "olmo2": "norms behind attention and feed-forward part",
    "olmo3": "norms behind attention and feed-forward part",
    "flex-olmo": "norms behind attention and feed-forward part",
    "exaone4": "norms behind attention and feed-forward part",
    "hunyuan-v1-dense": "norms of queries and keys behind rotary positions",
    "hunyuan-v1-moe": "norms of queries and keys behind rotary positions",
    "vaultgemma": "scores of attention and of the vocabulary that are capped",
    "llama4": "attention in chunks",
    "llama4-text": "attention in chunks",
}
"""Families whose layers are put together in a way that no field of a shape expresses: other tensors are kept and computed.

Read in transformers 5.23.0, src/transformers/models/<family>/modeling_<family>.py. Factors that only scale (of embeddings,
attention or residuals) and how much of a head is rotated are not told apart.
"""

SIGMOID = "a router of sigmoids, with a correction of who is chosen"
OTHER_ROUTERS = {
    "dots1": SIGMOID,
    "exaone-moe": SIGMOID,
    "glm": SIGMOID,
    "glm4-moe": SIGMOID,
    "glm4v-moe-text": SIGMOID,
    "hy-v3": SIGMOID,
    "minimax": SIGMOID,
    "minimax-m2": SIGMOID,
    "solar-open": SIGMOID,
    "phi3": "a router that samples (sparse mixer)",
    "phimoe": "a router that samples (sparse mixer)",
}
"""Families whose mixtures weigh experts otherwise than by a softmax of their scores, which no field of a shape expresses: our router would train
another model. Read in transformers 5.23.0, src/transformers/models/<family>/modeling_<family>.py. Whether chosen experts' weights add up to one is
not told apart (docs/decisions/0105)."""

POSITIVE = ("layers", "hidden", "vocab", "heads", "kv_heads", "head_dim")


def departures(shape: ModelShape) -> tuple[str, ...]:
    """What keeps `shape` from being a decoder that the reference model can be: wiring, or fields with their values; none
    for a pre-norm decoder such as GPT-2, Llama, Mistral, Qwen, Mixtral. Of another kind of model nothing else is said."""
    if shape.kind not in CHOICES["kind"]:
        return (f"kind = {shape.kind}",)
    return (*odd_wiring(shape), *_odd_fields(shape), *_odd_sizes(shape)) or tuple(_odd_layers(shape))


def odd_wiring(shape: ModelShape) -> Iterator[str]:
    """How its layers are put together where that is not one norm and one part behind the other, or how its router weighs experts."""
    family = shape.family.replace("_", "-")
    if shape.parallel_block:
        yield "attention and feed-forward part side by side"
    if family in OTHER_WIRING:
        yield OTHER_WIRING[family]
    if shape.moe is not None and family in OTHER_ROUTERS:
        yield OTHER_ROUTERS[family]


def _odd_fields(shape: ModelShape) -> Iterator[str]:
    usual = defaults_of(ModelShape)
    for name in names_of(ModelShape):
        value = getattr(shape, name)
        if name not in FREE and value not in CHOICES.get(name, (usual.get(name),)):
            yield name if is_record(value) else f"{name} = {value}"


def _odd_sizes(shape: ModelShape) -> Iterator[str]:
    yield from (f"{name} = {getattr(shape, name)}" for name in POSITIVE if getattr(shape, name) < 1)
    if shape.kv_heads > 0 and shape.heads % shape.kv_heads:
        yield f"{shape.heads} heads over {shape.kv_heads} kv_heads"
    if shape.pos == "rope" and shape.head_dim % 2:
        yield f"an odd head_dim = {shape.head_dim}"
    if (shape.pos == "learned") != (shape.pos_rows > 0):
        yield f"{shape.pos_rows} rows of positions with pos = {shape.pos}"
    if shape.moe is not None:
        yield from _odd_experts(shape.moe)


def _odd_experts(moe: Moe) -> Iterator[str]:
    yield from (
        f"moe.{name} = {value}" for name in ("latent", "router_bias", "expert_bias") if (value := getattr(moe, name))
    )
    if moe.groups > 1:
        yield f"moe.groups = {moe.groups}"
    if moe.ffn < 1 or not 1 <= moe.top_k <= moe.experts:
        yield f"{moe.top_k} of {moe.experts} experts of width {moe.ffn}"


def _odd_layers(shape: ModelShape) -> Iterator[str]:
    """What layers are made of; asked only where the fields say nothing against it."""
    kinds = set(layer_counts(shape))
    yield from sorted({f"{kind.mixer} layers" for kind in kinds if kind.mixer not in ("attention", "sliding")})
    if any(kind.ffn == "none" or (kind.ffn == "dense" and shape.ffn_hidden < 1) for kind in kinds):
        yield f"ffn_hidden = {shape.ffn_hidden}"
    if any(kind.mixer == "sliding" for kind in kinds) and (shape.window or 0) < 1:
        yield f"window = {shape.window}"
