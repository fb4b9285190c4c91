"""Llama and the decoders that differ from it in one or two choices (transformers 5.23.0: models/<type>/modeling_*.py)."""

from __future__ import annotations

from strategist.facts.families.config import Config, Family
from strategist.facts.families.decoder import (
    XIELU,
    activation,
    decoder,
    slides_but_every,
    slides_by_pattern,
    slides_everywhere,
    window_of,
    with_layer_types,
)
from strategist.facts.model import MAX_LAYERS, ModelShape
from strategist.records import replace


def _llama(config: Config) -> ModelShape:
    bias = config.yes("attention_bias")
    return decoder(config, qkv_bias=bias, o_bias=bias, mlp_bias=config.yes("mlp_bias"))


def _sliding_everywhere(config: Config) -> ModelShape:
    """Mistral and Phi-3: every layer slides when a window is given."""
    return slides_everywhere(config, decoder(config))


def _smollm3(config: Config) -> ModelShape:
    shape = replace(_llama(config), window=window_of(config) if config.yes("use_sliding_window") else None)
    interval = config.optional("no_rope_layer_interval", high=shape.layers) or 4
    slides = [(i + 1) % interval == 0 for i in range(shape.layers)]
    return with_layer_types(config, shape, slides)


def _glm(config: Config) -> ModelShape:
    return decoder(config, qkv_bias=config.yes("attention_bias"))


def _glm4(config: Config) -> ModelShape:
    return replace(_glm(config), norms_per_layer=4)


def _glm4v(config: Config) -> ModelShape:
    return decoder(config, qkv_bias=True, norms_per_layer=4)


def _arcee(config: Config) -> ModelShape:
    return replace(_llama(config), mlp_gated=False)


def _olmo(config: Config) -> ModelShape:
    return replace(_llama(config), norm="layernorm_nonparam")


def _olmo2(config: Config) -> ModelShape:
    return replace(_llama(config), qk_norm="full")


def _olmo3(config: Config) -> ModelShape:
    return slides_but_every(config, _olmo2(config), 4)


def _exaone4(config: Config) -> ModelShape:
    return slides_by_pattern(config, decoder(config, qk_norm="head"))


def _seed_oss(config: Config) -> ModelShape:
    bias, out_bias = config.yes("attention_bias"), config.yes("attention_out_bias")
    return decoder(config, qkv_bias=bias, o_bias=out_bias, mlp_bias=config.yes("mlp_bias"))


def _ernie4_5(config: Config) -> ModelShape:
    bias = config.yes("use_bias")
    return decoder(config, qkv_bias=bias, o_bias=bias, mlp_bias=bias)


def _hunyuan(config: Config) -> ModelShape:
    config.only("use_qk_norm", True)
    bias = config.yes("attention_bias")
    return decoder(config, qk_norm="head", qkv_bias=bias, o_bias=bias)


def _helium(config: Config) -> ModelShape:
    """Helium: its output matrix is as wide as the model on both sides, so that its heads together must be too."""
    shape = decoder(config, qkv_bias=config.yes("attention_bias"), mlp_bias=config.yes("mlp_bias"))
    if shape.heads * shape.head_dim != shape.hidden:
        rule = f"is {shape.head_dim}; {shape.heads} heads of it must be as wide as hidden_size ({shape.hidden})"
        config.refuse("CHOICE", "head_dim", rule, value=shape.head_dim)
    config.settle()
    return shape


def _stablelm(config: Config) -> ModelShape:
    parallel = config.yes("use_parallel_residual")
    norms, bias = 1 if parallel else 2, config.yes("use_qkv_bias")
    shape = decoder(config, norm="layernorm", norms_per_layer=norms, parallel_block=parallel, qkv_bias=bias)
    return replace(shape, qk_norm="per_head") if config.yes("qk_layernorm") else shape


def _ministral(config: Config) -> ModelShape:
    shape = replace(decoder(config), window=window_of(config))
    return with_layer_types(config, shape, [True] * shape.layers)


def _cohere2(config: Config) -> ModelShape:
    bias = config.yes("attention_bias")
    shape = decoder(config, norm="layernorm_nobias", norms_per_layer=1, parallel_block=True, qkv_bias=bias, o_bias=bias)
    return slides_but_every(config, shape, config.optional("sliding_window_pattern", high=MAX_LAYERS) or 4)


def _cohere(config: Config) -> ModelShape:
    shape = replace(_llama(config), norm="layernorm_nobias", norms_per_layer=1, parallel_block=True)
    return replace(shape, qk_norm="per_head") if config.yes("use_qk_norm") else shape


def _nemotron(config: Config) -> ModelShape:
    return replace(_llama(config), norm="layernorm", mlp_gated=False)


def _starcoder2(config: Config) -> ModelShape:
    bias = config.yes("use_bias")
    shape = decoder(config, norm="layernorm", mlp_gated=False, qkv_bias=bias, o_bias=bias, mlp_bias=bias)
    return slides_everywhere(config, shape)


def _cwm(config: Config) -> ModelShape:
    """CWM: the first of every four layers attends to everything."""
    return slides_but_every(config, _llama(config), 4, 0)


def _hyperclovax(config: Config) -> ModelShape:
    return replace(_llama(config), norms_per_layer=4 if config.yes("use_post_norm") else 2)


def _internlm3(config: Config) -> ModelShape:
    """InternLM3, whose published files call its biases `qkv_bias` (of the whole attention) and `bias`."""
    bias = config.yes("qkv_bias" if config.has("qkv_bias") else "attention_bias")
    mlp = config.yes("bias" if config.has("bias") else "mlp_bias")
    return decoder(config, qkv_bias=bias, o_bias=bias, mlp_bias=mlp)


def _apertus(config: Config) -> ModelShape:
    """Apertus: an ungated feed-forward part, whose xIELU (Huang and Schlag 2024, arXiv 2411.13010) trains two numbers in every layer."""
    bias = config.yes("attention_bias")
    is_trained = config.word("hidden_act") == XIELU
    act = {"mlp_act": XIELU} if is_trained else activation(config, "hidden_act")
    own = 2 if is_trained else 0
    return decoder(config, qk_norm="head", qkv_bias=bias, o_bias=bias, mlp_gated=False, layer_extra_parameters=own, **act)  # fmt: skip


def _nanochat(config: Config) -> ModelShape:
    """nanochat: RMSNorm without weights, of the tables' rows too, and of queries and keys behind their rotation."""
    bias = config.yes("attention_bias")
    norms = {"norm": "rmsnorm_nonparam", "qk_norm": "l2_noweight", "embed_norm": True}
    return decoder(config, qkv_bias=bias, o_bias=bias, mlp_gated=False, **norms)


def _granite_swa(config: Config) -> ModelShape:
    """Granite's layers with a sink per head; the first of every four attends to everything."""
    return slides_but_every(config, replace(_llama(config), attn_sinks=True), 4, 0)


FAMILY = Family(
    "llama",
    {
        "llama": _llama,
        "mistral": _sliding_everywhere,
        "phi3": _sliding_everywhere,
        "granite": _llama,
        "smollm3": _smollm3,
        "glm": _glm,
        "olmo": _olmo,
        "olmo2": _olmo2,
        "olmo3": _olmo3,
        "exaone4": _exaone4,
        "seed_oss": _seed_oss,
        "ernie4_5": _ernie4_5,
        "hunyuan_v1_dense": _hunyuan,
        "helium": _helium,
        "arcee": _arcee,
        "stablelm": _stablelm,
        "ministral": _ministral,
        "ministral3": _sliding_everywhere,
        "glm4": _glm4,
        "glm4v_text": _glm4v,
        "cohere2": _cohere2,
        "cohere": _cohere,
        "nemotron": _nemotron,
        "starcoder2": _starcoder2,
        "cwm": _cwm,
        "hyperclovax": _hyperclovax,
        "internlm3": _internlm3,
        "iquestcoder": _llama,
        "jais2": _nemotron,
        "apertus": _apertus,
        "nanochat": _nanochat,
        "granite_swa": _granite_swa,
    },
)
