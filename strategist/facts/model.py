"""What a model is made of: one flat, frozen record per architecture, and the layers it stacks.

The record holds what a configuration file says. Parameter counts, FLOPs and bytes are functions of it
(`facts/parameters.py`, `memory/`, `timing/`), never fields that somebody computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

from strategist.errors import InputError
from strategist.facts.convolutions import numbers
from strategist.facts.layer_kind import Ffn, LayerKind, Mixer, merge, read_spelling, spell, spread
from strategist.facts.model_parts import Adapters, Heads, Mix, Mla, Moe, Ssm
from strategist.records import dataclass, replace

Kind = Literal[
    "decoder", "encoder", "encdec", "encdec-audio", "vit", "hybrid", "ssm", "dual-encoder", "dit", "cnn", "unet", "module"
]  # fmt: skip
Norm = Literal[
    "rmsnorm", "layernorm", "layernorm_nobias", "layernorm_nonparam", "rmsnorm_nonparam", "batchnorm", "none"
]
QkNorm = Literal["", "head", "head_ln", "full", "per_head", "l2_noweight"]
Position = Literal["rope", "learned", "relative", "alibi", "sincos-fixed", "none"]

__all__ = [
    "LOOKED_UP", "MAX_LAYERS", "RUNS_IN_ORDER", "Adapters", "Heads", "LayerKind", "Mix", "Mla", "ModelShape", "Moe", "Norm", "Position", "QkNorm", "Ssm", "arranged", "layer_counts", "layer_sequence", "loss_chunk",
]  # fmt: skip

RUNS_IN_ORDER = "runs_in_order"
"""In `extra` of a module whose parts run one behind the other, so that a pipeline can cut it."""

LOOKED_UP = "looked_up_parameters"
"""In `extra` of a module without an output head: those of its `extra_parameters` that are a table, of which no product reads a row."""

MAX_LAYERS = 4096
"""More layers than any model has; what claims more is refused before anything is built from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One architecture. Widths count elements, `layers` counts decoder (or only) layers, `max_seq` counts tokens.

    `window` is the span of sliding or chunked layers (None: all layers attend to everything) and `full_every` n makes
    every n-th layer attend to everything (0: none does). `pattern` spells the layers out where counts alone would order
    them differently (`layer_kind.spell`). `extra_parameters` are weights of the whole model that no other field explains and
    `layer_extra_parameters` those of every single layer; `extra` keeps what only one family has. `emb_dim` is the width
    of the token table where it is not the model's, `v_dim` the width of a value head where it is not `head_dim` (0: it
    is), `full_heads` the heads of full-attention layers where sliding ones have others. `act_form` is the word that configurations have for
    the activation where it says more than `mlp_act` (`gelu_new` is a gelu; facts/act_forms.py knows which of them are many operations). `model_type` is the word that
    Transformers has for its modules of this architecture (facts/module_forms.py knows what these keep of their own). In a `parallel_block` attention and
    the feed-forward part read the same stream, through one norm or one each (Wang, Komatsuzaki 2021, GPT-J). With `adapters` the weights are frozen
    and small matrices beside them are trained, which count as matrices of the layers. `tables` are rows and width of every
    table of embeddings in a module that nobody described, whose weights the other fields count. `called` is the name that was said where
    the catalogue has another model of the same shape. `vocab` is what the model gives
    for a token: labels where a live module has a head for these, 0 where it gives hidden states. `frozen` of its weights are
    not trained though they have no adapters (`requires_grad` of a live module).
    """

    name: str
    family: str
    kind: Kind
    layers: int
    hidden: int
    vocab: int
    formula: str = "stack"
    enc_layers: int = 0
    ffn_hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    v_dim: int = 0
    full_heads: Heads | None = None
    tied: bool = False
    emb_dim: int = 0
    max_seq: int = 0
    pos: Position = "rope"
    pos_rows: int = 0
    norm: Norm = "rmsnorm"
    norms_per_layer: int = 2
    parallel_block: bool = False
    final_norm: bool = True
    embed_norm: bool = False
    qk_norm: QkNorm = ""
    mlp_gated: bool = True
    mlp_act: str = "silu"
    act_form: str = ""
    model_type: str = ""
    mlp_bias: bool = False
    qkv_bias: bool = False
    k_bias: bool = True
    o_bias: bool = False
    lm_head_bias: bool = False
    attn_sinks: bool = False
    attn_gate: bool = False
    window: int | None = None
    full_every: int = 1
    pattern: str = ""
    moe: Moe | None = None
    mla: Mla | None = None
    ssm: Ssm | None = None
    mix: Mix | None = None
    extra_parameters: int = 0
    layer_extra_parameters: int = 0
    extra: tuple[tuple[str, int], ...] = ()
    parameters_stated: int | None = None
    other_tower_parameters: int = 0
    basis: Literal["measured", "derived", "datasheet", "assumed"] = "datasheet"
    source: str = ""
    notes: tuple[str, ...] = ()
    called: str = ""
    adapters: Adapters | None = None
    tables: tuple[tuple[int, int], ...] = ()
    frozen: int = 0

    @property
    def depth(self) -> int:
        """Layers in all, of an encoder and of the decoder behind it."""
        return self.enc_layers + self.layers

    @property
    def shares_norm(self) -> bool:
        """Whether attention and the feed-forward part of a layer read the result of one norm."""
        return self.parallel_block and self.norms_per_layer == 1

    @property
    def learned_positions(self) -> int:
        """Tokens that a table of learned positions has rows for, 0 without one. Tables of OPT, RoBERTa and BART start a row or two
        late, so that not all of their rows are for tokens; those of CLIP are counted elsewhere."""
        known = [count for count in (self.pos_rows, self.max_seq) if count]
        return min(known, default=0) if self.pos == "learned" else 0

    @property
    def input_positions(self) -> int:
        """The same for what an encoder reads in front of a decoder, else for all: that of sound has a longer table than its decoder
        (facts/families/encoder_decoder.py)."""
        frames = dict(self.extra).get("enc_pos_rows", 0) if self.kind == "encdec-audio" else 0
        return frames or self.learned_positions

    @property
    def rotary_positions(self) -> int:
        """Tokens that somebody made a rotary model for, 0 for others: beyond them its angles are new to it."""
        return self.max_seq if self.pos == "rope" else 0

    @property
    def method(self) -> str:
        """What is trained: full (everything), lora or qlora (adapters alone)."""
        return "full" if self.adapters is None else self.adapters.method

    @property
    def unit(self) -> Literal["tokens", "images"]:
        """What a rate counts: to convolutions an image is a sequence of one token."""
        return "images" if self.is_convolutional else "tokens"

    @property
    def is_convolutional(self) -> bool:
        """Whether its layers are blocks of convolutions (facts/convolutions.py), of whole images."""
        return self.formula == "resnet"


@cache
def layer_sequence(shape: ModelShape) -> tuple[LayerKind, ...]:
    """The layers in order, encoder first; `len` is `enc_layers + layers`.

    Raises InputError TOO_LARGE beyond `MAX_LAYERS`, CHOICE for a `pattern` that does not spell the layers and CONFLICT
    for a `mix` that does not add up to them.
    """
    if shape.depth > MAX_LAYERS:
        raise InputError(
            "TOO_LARGE",
            f"The model has more than {MAX_LAYERS} layers.",
            flag="$.model.layers",
            value=shape.layers,
            hint="Check the number of layers.",
        )
    if shape.pattern:
        return read_spelling(shape.pattern, shape.layers, shape.ssm.kind if shape.ssm else None)
    if shape.is_convolutional:
        return tuple(LayerKind("convolution", "none", block=number) for number in numbers(shape.extra))
    if shape.mix is not None and shape.ssm is not None:
        return _hybrid_sequence(shape, shape.mix, shape.ssm)
    encoder = (LayerKind("attention", "dense"),) * shape.enc_layers
    experts = _expert_layers(shape)
    return encoder + tuple(
        _kind(_mixer(shape, i), _ffn(shape, experts[i]), shape.enc_layers > 0) for i in range(shape.layers)
    )


_kind = cache(LayerKind)
"""One object for all layers of a sort: they are counted and compared over and over."""


@cache
def layer_counts(shape: ModelShape) -> Mapping[LayerKind, int]:
    """How many layers there are of each sort, in order of first appearance."""
    return Counter(layer_sequence(shape))


def loss_chunk(tokens: Any, hidden: int, vocab: int) -> Any:
    """How many of some tokens, a number or a column, a chunked loss looks at together: their logits are about as large as the
    hidden states of all (Hsu et al. 2024, Liger Kernel, arXiv 2410.10989, section 3.2)."""
    return -(-tokens // max(1, -(-vocab // hidden)))


def arranged(shape: ModelShape, kinds: Sequence[LayerKind]) -> ModelShape:
    """`shape` with its layers in exactly this order: by `full_every` where that says it, else spelled out."""
    wanted = tuple(kinds)
    full = next((i + 1 for i, kind in enumerate(wanted) if kind.mixer == "attention"), 0)
    for candidate in (shape, replace(shape, full_every=full)):
        if layer_sequence(candidate) == wanted:
            return candidate
    return replace(shape, pattern=spell(wanted))


def _mixer(shape: ModelShape, index: int) -> Mixer:
    if shape.ssm is not None:
        return shape.ssm.kind
    if shape.mla is not None:
        return "mla"
    if shape.window is None:
        return "attention"
    is_full = shape.full_every > 0 and (index + 1) % shape.full_every == 0
    return "attention" if is_full else "sliding"


def _ffn(shape: ModelShape, has_experts: bool) -> Ffn:
    if has_experts:
        return "moe"
    return "dense" if shape.ffn_hidden and shape.ssm is None else "none"


def _expert_layers(shape: ModelShape) -> list[bool]:
    """Which layers have experts: the even spread of `moe.layers` over what follows the first dense layers."""
    if shape.moe is None:
        return [False] * shape.layers
    first = min(shape.moe.first_dense, shape.layers)
    count = min(shape.moe.layers, shape.layers - first)
    return [False] * first + spread(count, True, shape.layers - first - count, False)


def _hybrid_sequence(shape: ModelShape, mix: Mix, ssm: Ssm) -> tuple[LayerKind, ...]:
    """Spread the rarer mixers and the expert layers evenly over the stack."""
    mixers: list[Mixer] = spread(mix.attention, "attention", mix.linear, ssm.kind)
    ffns: list[Ffn] = spread(mix.moe, "moe", mix.mlp, "dense")
    if len(mixers) == shape.layers >= len(ffns):  # a mixer, and mostly a feed-forward part, in every layer
        return tuple(LayerKind(m, f) for m, f in zip(mixers, ffns + ["none"] * (len(mixers) - len(ffns)), strict=True))
    if len(mixers) + len(ffns) != shape.layers:
        raise InputError(
            "CONFLICT",
            f"The mix of {len(mixers)} mixers and {len(ffns)} feed-forward parts does not make {shape.layers} layers.",
            flag="$.model.mix",
            hint="Every layer has one part, or every layer has a mixer.",
        )
    return tuple(merge([LayerKind(m, "none") for m in mixers], [LayerKind("none", f) for f in ffns]))
