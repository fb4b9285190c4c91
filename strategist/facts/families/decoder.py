"""What most decoders' configurations have in common: the key names of Llama, sliding layers, experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strategist.errors import shown
from strategist.facts.families.config import MAX_EXPERTS, MAX_FFN, MAX_HEADS, MAX_TOKENS, MAX_VOCAB, MAX_WIDTH, Config
from strategist.facts.layer_kind import LayerKind, Mixer
from strategist.facts.model import MAX_LAYERS, ModelShape, Moe, arranged, layer_sequence
from strategist.records import replace

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu2", "quick_gelu": "quick_gelu"}
XIELU = "xielu"
"""An activation with weights of its own, which only a reader that counts them may read."""
_MIXERS: dict[str, Mixer] = {
    "full_attention": "attention",
    "sliding_attention": "sliding",
    "chunked_attention": "sliding",
    "linear_attention": "gated-delta",
}


def decoder(config: Config, **facts: Any) -> ModelShape:
    """The shape of a decoder whose configuration uses Llama's key names; `facts` are what its architecture fixes.

    Raises InputError with every problem found in the file.
    """
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    common: dict[str, Any] = {
        "layers": config.integer("num_hidden_layers", high=MAX_LAYERS),
        "hidden": config.integer("hidden_size", high=MAX_WIDTH),
        "heads": heads,
        "vocab": config.integer("vocab_size", high=MAX_VOCAB),
        "max_seq": config.integer("max_position_embeddings", high=MAX_TOKENS),
        "tied": config.yes("tie_word_embeddings"),
    }
    if "mlp_act" not in facts:
        common |= activation(config, "hidden_act", "hidden_activation", "mlp_hidden_act")
    if "kv_heads" not in facts:
        common["kv_heads"] = config.optional("num_key_value_heads", high=MAX_HEADS) or config.default(
            "num_key_value_heads", heads
        )
    if "ffn_hidden" not in facts:
        common["ffn_hidden"] = config.integer("intermediate_size", high=MAX_FFN)
    width = facts.pop("head_dim", 0) or config.optional("head_dim", high=MAX_WIDTH) or 0
    return checked_heads(config, ("num_attention_heads", "num_key_value_heads"), width, **common | facts)


def checked_heads(config: Config, keys: tuple[str, str], width: int, **fields: Any) -> ModelShape:
    """A shape whose heads fit together; `width` 0 means hidden / heads, `keys` name heads and key-value heads.

    Raises InputError with everything found so far: RANGE for more key-value heads than heads, DIVISIBILITY where they
    do not share evenly.
    """
    config.settle()
    heads, kv, hidden = fields["heads"], fields["kv_heads"], fields["hidden"]
    config.at_most(kv, keys[1], heads, keys[0])
    if kv <= heads:
        config.divisible(heads, keys[0], kv, keys[1])
    if not width:
        config.divisible(hidden, "hidden_size", heads, keys[0])
    config.settle()
    return ModelShape(**{"name": "", "family": "", "kind": "decoder"} | fields, head_dim=width or hidden // heads)


def activation(config: Config, *keys: str) -> dict[str, str]:
    """The activation of the feed-forward part in our words, every variant of GELU being gelu, and the variant as the file calls it."""
    key = next((key for key in keys if config.has(key) or key in config.class_defaults), keys[0])
    word = config.word(key)
    if word.startswith("gelu"):
        return {"mlp_act": "gelu", "act_form": word.removeprefix("gelu") and word}
    if word not in _ACTIVATIONS:
        known = ", ".join(("gelu", *_ACTIVATIONS))
        config.refuse("CHOICE", key, f"is {shown(word)!r}, which is not a known activation", value=word, hint=f"Known: {known}.")  # fmt: skip
    return {"mlp_act": _ACTIVATIONS.get(word, word)}


def window_of(config: Config) -> int | None:
    """`sliding_window` in tokens; None when it is null, or absent without a default."""
    return config.optional("sliding_window", high=MAX_TOKENS)


def slides_everywhere(config: Config, shape: ModelShape) -> ModelShape:
    """The shape with every layer sliding when a window is given."""
    window = window_of(config)
    return shape if window is None else replace(shape, window=window, full_every=0)


def slides_but_every(config: Config, shape: ModelShape, period: int, place: int = -1) -> ModelShape:
    """The shape with the window of the file, and with full attention in one layer of every `period`: the last, or that at `place`. A list
    under `layer_types` wins."""
    windowed = replace(shape, window=window_of(config))
    return with_layer_types(config, windowed, [i % period != place % period for i in range(shape.layers)])


def slides_by_pattern(config: Config, shape: ModelShape) -> ModelShape:
    """The same with the period under `sliding_window_pattern`, 4 without; it may be spelt in letters (LLLG) in files that list
    `layer_types`, which say it then."""
    period = None if config.has("layer_types") else config.optional("sliding_window_pattern", high=MAX_LAYERS)
    return slides_but_every(config, shape, period or 4)


def with_layer_types(config: Config, shape: ModelShape, slides: Sequence[bool]) -> ModelShape:
    """The shape with its layers in the order of `layer_types`; when that is absent, sliding where `slides` is true."""
    mixers = layer_types(config, shape.layers) or ["sliding" if sliding else "attention" for sliding in slides]
    if shape.window is None:
        mixers = ["attention" if mixer == "sliding" else mixer for mixer in mixers]
    kinds = layer_sequence(shape)
    return arranged(shape, [LayerKind(m, kind.ffn) for m, kind in zip(mixers, kinds, strict=True)])


def layer_types(config: Config, layers: int) -> list[Mixer] | None:
    """The mixers that `layer_types` names, one per layer; None when it is absent. Raises InputError CHOICE, RANGE."""
    named = config.list_of(str, "layer_types", limit=MAX_LAYERS)
    unknown = next((word for word in named or () if word not in _MIXERS), None)
    if unknown is not None:
        config.refuse("CHOICE", "layer_types", f"contains {shown(unknown)!r}", value=unknown, hint=f"Known: {', '.join(_MIXERS)}.")  # fmt: skip
    if named is not None and len(named) != layers:
        config.refuse("RANGE", "layer_types", f"has {len(named)} entries for {layers} layers", value=len(named), hint="Give one entry per layer.")  # fmt: skip
    config.settle()
    return None if named is None else [_MIXERS[word] for word in named]


GROUPS = ("n_group", "topk_group")
"""In how many groups experts lie, and in how many of them those of a token (transformers 5.23.0: DeepseekV3TopkRouter)."""


def experts(
    config: Config,
    *keys: str,
    chosen_key: str = "num_experts_per_tok",
    group_keys: tuple[str, str] = GROUPS,
    **facts: Any,
) -> Moe:
    """Routed experts: how many (under one of `keys`), how many of them each token uses, and in how many groups they lie."""
    count = config.integer(*keys, high=MAX_EXPERTS)
    chosen = config.optional(chosen_key, high=MAX_EXPERTS)
    if chosen is None:
        config.refuse("MISSING", chosen_key, "is missing", hint="Add it; nothing is guessed.")
    config.settle()
    config.at_most(chosen or 0, chosen_key, count, keys[0])
    config.settle()
    groups, of_these = _groups(config, group_keys, count, chosen or 0, chosen_key)
    return Moe(**{"experts": count, "top_k": chosen, "layers": 0, "groups": groups, "top_groups": of_these} | facts)


def _groups(config: Config, keys: tuple[str, str], count: int, chosen: int, chosen_key: str) -> tuple[int, int]:
    """What stands under these keys; one of one where a router makes no groups, as DeepSeek-V2's does whose method is greedy
    (transformers 5.23.0: DeepseekV2TopkRouter)."""
    groups, of_these = (config.optional(key, high=MAX_EXPERTS) for key in keys)
    if groups is None or of_these is None or groups == 1 or config.word("topk_method") == "greedy":
        return 1, 1
    config.at_most(of_these, keys[1], groups, keys[0])
    if count % groups:
        config.refuse("DIVISIBILITY", keys[0], f"is {groups}, which does not divide {count} experts", value=groups)
    config.settle()
    config.at_most(chosen, chosen_key, of_these * (count // groups), f"the experts of {of_these} groups")
    config.settle()
    return groups, of_these


def experts_beside_shared(config: Config, shared: str, *keys: str, **facts: Any) -> Moe:
    """Routed experts beside as many shared ones of the same width as `shared` says."""
    count = config.optional(shared, high=MAX_EXPERTS, low=0) or 0
    width = config.integer("moe_intermediate_size", high=MAX_FFN)
    return experts(config, *keys, ffn=width, shared_ffn=count * width, **facts)


def shared_gated_experts(config: Config) -> Moe:
    """Routed experts beside one shared expert behind a gate, as Qwen has them."""
    return experts(
        config,
        "num_experts",
        "num_local_experts",
        ffn=config.integer("moe_intermediate_size", high=MAX_FFN),
        shared_ffn=config.integer("shared_expert_intermediate_size", high=MAX_FFN),
        shared_gate=True,
    )


def with_experts(config: Config, shape: ModelShape, moe: Moe, placed: Sequence[bool]) -> ModelShape:
    """The shape with experts in the layers where `placed` is true.

    One expert that every token uses is a dense layer: such a model is given as one, its routers counted as extra.
    """
    leading = next((i for i, has in enumerate(placed) if has), len(placed))
    count = sum(placed)
    moe = replace(moe, layers=count, first_dense=leading if count == len(placed) - leading else 0)
    if not count:
        return shape
    if _is_dense(shape, moe):
        config.ledger.notes.append("One expert that every token uses is a dense layer; its routers are counted apart.")
        width, routers = moe.ffn + moe.shared_ffn, count * shape.hidden
        return replace(shape, ffn_hidden=width, mlp_bias=False, extra_parameters=shape.extra_parameters + routers)
    dense_width = shape.ffn_hidden if count < shape.layers else 0
    kinds = [LayerKind(kind.mixer, "moe" if has else "dense") for kind, has in zip(layer_sequence(shape), placed, strict=True)]  # fmt: skip
    return arranged(replace(shape, moe=moe, ffn_hidden=dense_width), kinds)


def _is_dense(shape: ModelShape, moe: Moe) -> bool:
    everywhere = moe.experts == moe.top_k == 1 and moe.layers == shape.layers
    return everywhere and not (moe.shared_gate or moe.latent or moe.expert_bias or moe.router_bias)


def first_dense(config: Config, layers: int) -> list[bool]:
    """Which layers have experts: as `mlp_layer_types` says ("sparse"), else all after the first `first_k_dense_replace`."""
    named = config.list_of(str, "mlp_layer_types", limit=MAX_LAYERS)
    first = config.optional("first_k_dense_replace", high=MAX_LAYERS, low=0) or 0
    if named is None:
        return [index >= first for index in range(layers)]
    if len(named) != layers:
        config.refuse("RANGE", "mlp_layer_types", f"has {len(named)} entries for {layers} layers", hint="Give one entry per layer.")  # fmt: skip
    unknown = next((word for word in named if word not in ("dense", "sparse")), None)
    if unknown is not None:
        config.refuse("CHOICE", "mlp_layer_types", f"contains {shown(unknown)!r}", value=unknown, hint="Known: dense, sparse.")  # fmt: skip
    config.settle()
    return [word == "sparse" for word in named]


def sparse_steps(config: Config, layers: int) -> list[bool]:
    """Which layers have experts under `decoder_sparse_step` and `mlp_only_layers` (Qwen's rule)."""
    step = config.optional("decoder_sparse_step", high=MAX_LAYERS) or 1
    dense = set(config.list_of(int, "mlp_only_layers", limit=MAX_LAYERS) or ())
    return [index not in dense and (index + 1) % step == 0 for index in range(layers)]
