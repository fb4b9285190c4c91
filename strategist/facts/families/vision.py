"""ViT, DeiT, DINOv2, CLIP and ResNet from transformers configurations, FLUX from a diffusers one (transformers 5.23.0, diffusers 0.42.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strategist.facts.closed_formulas import completed
from strategist.facts.convolutions import MAX_SIDE
from strategist.facts.families.config import (
    MAX_FFN,
    MAX_HEADS,
    MAX_TOKENS,
    MAX_VOCAB,
    MAX_WIDTH,
    Config,
    Family,
    class_defaults,
)
from strategist.facts.families.decoder import activation, checked_heads
from strategist.facts.model import MAX_LAYERS, ModelShape
from strategist.records import replace

USUAL_IMAGE = 224
"""Side of the crops that ResNets are trained on (He et al. 2015, arXiv 1512.03385, section 3.4); their configurations name none."""
RESNET_WIDTHS = {"bottleneck": 2048, "basic": 512}
"""Channels that the classifier reads, by the sort of blocks (same paper, table 1)."""


def _square(config: Config, key: str) -> int:
    """One side of a square given as a number or as two equal ones."""
    found = config.values.get(key)
    if isinstance(found, (list, tuple)) and len(found) == 2 and found[0] == found[1] and type(found[0]) is int:
        config = Config({key: found[0]}, config.flag, path=config.path, ledger=config.ledger)
    return config.optional(key, high=MAX_SIDE) or config.integer(key, high=MAX_SIDE)


def _patches(config: Config) -> tuple[int, int, int]:
    """Patch side, image side, and how many patches an image has."""
    patch, image = _square(config, "patch_size"), _square(config, "image_size")
    config.at_most(patch, "patch_size", image, "image_size")
    return patch, image, (image // max(patch, 1)) ** 2


def _labels(config: Config) -> int:
    """Classes of the classifier: `num_labels`, or the entries of `id2label`, or transformers' two."""
    if config.has("num_labels"):
        return config.integer("num_labels", high=MAX_VOCAB)
    named = config.values.get("id2label")
    if named is not None and not isinstance(named, Mapping):
        config.refuse("TYPE", "id2label", "must be an object", value=type(named).__name__)
    return len(named) if isinstance(named, Mapping) and named else config.default("num_labels", 2)


def _vit(config: Config) -> ModelShape:
    return _patched(config, _labels(config), config.integer("intermediate_size", high=MAX_FFN))


def _patched(config: Config, classes: int, width: int, tokens: int = 1) -> ModelShape:
    """A ViT with so many labels, feed-forward width and tokens beside the patches."""
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    patch, image, patches = _patches(config)
    channels = config.optional("num_channels", high=MAX_WIDTH) or 3
    extra = {"patch": patch, "image": image, "channels": channels, "classes": classes, "cls": tokens}
    return checked_heads(
        config,
        ("num_attention_heads", "num_attention_heads"),
        0,
        kind="vit",
        formula="vit",
        layers=config.integer("num_hidden_layers", high=MAX_LAYERS),
        hidden=config.integer("hidden_size", high=MAX_WIDTH),
        ffn_hidden=width,
        heads=heads,
        kv_heads=heads,
        vocab=0,
        tied=True,
        max_seq=patches + tokens,
        pos="learned",
        pos_rows=patches + tokens,
        norm="layernorm",
        mlp_gated=False,
        **activation(config, "hidden_act"),
        mlp_bias=True,
        qkv_bias=config.yes("qkv_bias"),
        o_bias=True,
        extra=tuple(sorted(extra.items())),
    )


def _deit(config: Config) -> ModelShape:
    """DeiT: a token of distillation beside the class token; with a teacher it has a classifier of its own."""
    classes, named = _labels(config), config.list_of(str, "architectures", limit=16) or []
    shape = _patched(config, classes, config.integer("intermediate_size", high=MAX_FFN), tokens=2)
    second = classes * (shape.hidden + 1) if any(name.endswith("WithTeacher") for name in named) else 0
    return replace(shape, extra_parameters=second)


def _dinov2(config: Config) -> ModelShape:
    """DINOv2: scales behind attention and feed-forward part, a token for masked patches, a classifier of class token and mean.
    Registers, tokens without positions, are counted as rows of the table of positions."""
    config.only("use_swiglu_ffn", False)
    ratio, hidden = config.optional("mlp_ratio", high=64) or 4, config.integer("hidden_size", high=MAX_WIDTH)
    classes = _labels(config)
    config.ledger.notes.append(f"Counted with a classifier of {classes} labels.")
    registers = config.optional("num_register_tokens", high=MAX_TOKENS, low=0) or 0
    masked = 1 if config.yes("use_mask_token") or "use_mask_token" not in config.class_defaults else 0
    shape = _patched(config, classes, ratio * hidden)
    beside = (masked + classes) * hidden
    shape = replace(shape, layer_extra_parameters=2 * hidden, extra_parameters=beside)
    return replace(shape, max_seq=shape.max_seq + registers, pos_rows=shape.pos_rows + registers)


def _clip(config: Config) -> ModelShape:
    """CLIP: the layers are the vision tower's; the text tower is counted beside them."""
    text, vision = (
        _tower(config, "text_config", "clip_text_model"),
        _tower(config, "vision_config", "clip_vision_model"),
    )
    projection = config.optional("projection_dim", high=MAX_WIDTH) or 0
    patch, image, _ = _patches(vision)
    sizes = {name: _tower_sizes(tower) for name, tower in (("text", text), ("vision", vision))}
    vocab, context = (
        text.integer("vocab_size", high=MAX_VOCAB),
        text.integer("max_position_embeddings", high=MAX_TOKENS),
    )
    extra = {f"{name}_{key}": value for name, tower in sizes.items() for key, value in tower.items()}
    extra |= {"proj": projection, "text_ctx": context, "vision_patch": patch, "vision_image": image}
    tower = sizes["vision"]
    act = activation(vision, "hidden_act")
    shape = checked_heads(
        vision,
        ("num_attention_heads", "num_attention_heads"),
        0,
        kind="dual-encoder",
        formula="clip",
        layers=tower["layers"],
        hidden=tower["hidden"],
        ffn_hidden=tower["ffn"],
        heads=tower["heads"],
        kv_heads=tower["heads"],
        vocab=vocab,
        tied=True,
        max_seq=context,
        pos="learned",
        norm="layernorm",
        mlp_gated=False,
        **act,
        mlp_bias=True,
        qkv_bias=True,
        o_bias=True,
        extra=tuple(sorted(extra.items())),
    )
    return completed(shape)


def _tower(config: Config, key: str, model_type: str) -> Config:
    return config.within(key, class_defaults(model_type), nested=True)


def _tower_sizes(tower: Config) -> dict[str, int]:
    return {
        "hidden": tower.integer("hidden_size", high=MAX_WIDTH),
        "layers": tower.integer("num_hidden_layers", high=MAX_LAYERS),
        "heads": tower.integer("num_attention_heads", high=MAX_HEADS),
        "ffn": tower.integer("intermediate_size", high=MAX_FFN),
    }


def _resnet(config: Config) -> ModelShape:
    """ResNets of the usual widths, four stages deep: of bottlenecks (50, 101, 152) or of blocks of two convolutions (18, 34)."""
    kind = config.word("layer_type")
    if kind not in RESNET_WIDTHS:
        config.refuse("CHOICE", "layer_type", f"must be {' or '.join(RESNET_WIDTHS)}", value=kind)
    config.only("embedding_size", 64)
    last = RESNET_WIDTHS.get(kind, 0)
    for key, usual in (("hidden_sizes", [last // 8, last // 4, last // 2, last]), ("num_channels", 3)):
        config.only(key, usual)
    for key in ("downsample_in_first_stage", "downsample_in_bottleneck"):
        config.only(key, False)
    depths = config.list_of(int, "depths", limit=4)
    if depths is None or len(depths) != 4 or not all(1 <= depth <= MAX_LAYERS // 4 for depth in depths):
        config.refuse("RANGE", "depths", "must be four whole numbers of at least 1", value=len(depths or ()))
    image = config.optional("image_size", high=MAX_SIDE) or config.default("image_size", USUAL_IMAGE)
    classes = _labels(config)
    config.settle()
    return resnet(kind, depths or (), classes, image)


def resnet(kind: str, depths: Sequence[int], classes: int, image: int = USUAL_IMAGE) -> ModelShape:
    """A ResNet with so many blocks of a sort (RESNET_WIDTHS) in each of its four stages, for images of so many pixels a side."""
    extra = {f"depths_{stage}": depth for stage, depth in enumerate(depths)} | {"classes": classes, "image": image}
    extra |= {"basic": 1} if kind == "basic" else {}
    return ModelShape(
        name="",
        family="resnet",
        kind="cnn",
        formula="resnet",
        layers=sum(depths),
        hidden=RESNET_WIDTHS[kind],
        vocab=0,
        tied=True,
        pos="none",
        norm="batchnorm",
        final_norm=False,
        mlp_gated=False,
        mlp_act="relu",
        extra=tuple(sorted(extra.items())),
    )


def _flux(config: Config) -> ModelShape:
    """FLUX.1 as diffusers writes it; the two sorts of blocks are counted as equal ones."""
    heads, width = (
        config.integer("num_attention_heads", high=MAX_HEADS),
        config.integer("attention_head_dim", high=4096),
    )
    double, single = (config.integer(f"num_{sort}", high=MAX_LAYERS // 2) for sort in ("layers", "single_layers"))
    extra = {
        "double": double,
        "single": single,
        "in_channels": config.integer("in_channels", high=MAX_WIDTH),
        "context_dim": config.integer("joint_attention_dim", high=MAX_WIDTH),
        "pooled_dim": config.integer("pooled_projection_dim", high=MAX_WIDTH),
        "guidance": int(config.yes("guidance_embeds")),
    }
    config.settle()
    shape = ModelShape(
        name="",
        family="",
        kind="dit",
        formula="flux",
        layers=double + single,
        hidden=heads * width,
        ffn_hidden=4 * heads * width,
        heads=heads,
        kv_heads=heads,
        head_dim=width,
        vocab=0,
        tied=True,
        norm="layernorm_nonparam",
        qk_norm="head",
        mlp_gated=False,
        mlp_act="gelu",
        mlp_bias=True,
        qkv_bias=True,
        o_bias=True,
        extra=tuple(sorted(extra.items())),
    )
    return completed(shape)


FAMILY = Family(
    "vision",
    {
        "vit": _vit,
        "vit_msn": _vit,
        "deit": _deit,
        "dinov2": _dinov2,
        "dinov2_with_registers": _dinov2,
        "clip": _clip,
        "resnet": _resnet,
        "FluxTransformer2DModel": _flux,
    },
)
