"""Types that are published with code of their own (`trust_remote_code`): InternLM2, EXAONE, Baichuan, ChatGLM, Qwen 1.

Nothing of that code is run. Keys and layers: internlm/internlm2-7b modeling_internlm2.py, LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct
modeling_exaone.py, baichuan-inc/Baichuan2-7B-Base modeling_baichuan.py, zai-org/chatglm3-6b modeling_chatglm.py, Qwen/Qwen-7B
modeling_qwen.py. Each was checked with the number of weights that a published model has (tests/facts/test_model_config.py).
"""

from __future__ import annotations

from strategist.facts.families.config import MAX_FFN, MAX_HEADS, MAX_TOKENS, MAX_VOCAB, MAX_WIDTH, Config, Family
from strategist.facts.families.decoder import activation, checked_heads, decoder
from strategist.facts.model import MAX_LAYERS, ModelShape


def _internlm2(config: Config) -> ModelShape:
    bias = config.yes("bias")
    return decoder(config, qkv_bias=bias, o_bias=bias)


def _exaone(config: Config) -> ModelShape:
    """Llama's layers under other names."""
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    return checked_heads(
        config,
        ("num_attention_heads", "num_key_value_heads"),
        config.optional("head_dim", high=MAX_WIDTH) or 0,
        layers=config.integer("num_layers", "num_hidden_layers", high=MAX_LAYERS),
        hidden=config.integer("hidden_size", high=MAX_WIDTH),
        ffn_hidden=config.integer("intermediate_size", high=MAX_FFN),
        heads=heads,
        kv_heads=config.optional("num_key_value_heads", high=MAX_HEADS) or config.default("num_key_value_heads", heads),
        vocab=config.integer("vocab_size", high=MAX_VOCAB),
        max_seq=config.integer("max_position_embeddings", high=MAX_TOKENS),
        tied=_said_tied(config),
        **activation(config, "activation_function"),
    )


def _said_tied(config: Config) -> bool:
    """Whether the head is the table, which a file must say where its models differ in it."""
    if not config.has("tie_word_embeddings"):
        config.refuse("MISSING", "tie_word_embeddings", "is missing", hint="Add it; nothing is guessed.")
    return config.yes("tie_word_embeddings")


def _baichuan(config: Config) -> ModelShape:
    """Llama's layers; the 13B, whose file names no positions but a length, has slopes on its scores instead of angles."""
    if config.has("max_position_embeddings"):
        return decoder(config)
    length = config.integer("model_max_length", high=MAX_TOKENS)
    return decoder(config.saying(max_position_embeddings=length), pos="alibi")


def _chatglm(config: Config) -> ModelShape:
    """ChatGLM2, ChatGLM3 and GLM-4 before transformers had it: gated feed-forward, few key-value heads, a padded vocabulary."""
    for key, value in (("rmsnorm", True), ("multi_query_attention", True), ("add_bias_linear", False), ("post_layer_norm", True), ("tie_word_embeddings", False)):  # fmt: skip
        config.only(key, value)
    return checked_heads(
        config,
        ("num_attention_heads", "multi_query_group_num"),
        config.integer("kv_channels", high=MAX_WIDTH),
        layers=config.integer("num_layers", "num_hidden_layers", high=MAX_LAYERS),
        hidden=config.integer("hidden_size", high=MAX_WIDTH),
        ffn_hidden=config.integer("ffn_hidden_size", high=MAX_FFN),
        heads=config.integer("num_attention_heads", high=MAX_HEADS),
        kv_heads=config.integer("multi_query_group_num", high=MAX_HEADS),
        vocab=config.integer("padded_vocab_size", "vocab_size", high=MAX_VOCAB),
        max_seq=config.integer("seq_length", high=MAX_TOKENS),
        qkv_bias=config.yes("add_qkv_bias"),
    )


def _qwen(config: Config) -> ModelShape:
    """Qwen 1: `intermediate_size` is the width of gate and value together; queries, keys and values have biases, nothing else."""
    config.only("no_bias", True)
    both = config.integer("intermediate_size", high=MAX_FFN)
    config.divisible(both, "intermediate_size", 2, "2")
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    positions = config.integer("max_position_embeddings" if config.has("max_position_embeddings") else "seq_length", high=MAX_TOKENS)  # fmt: skip
    return checked_heads(
        config,
        ("num_attention_heads", "num_attention_heads"),
        config.integer("kv_channels", high=MAX_WIDTH),
        layers=config.integer("num_hidden_layers", high=MAX_LAYERS),
        hidden=config.integer("hidden_size", high=MAX_WIDTH),
        ffn_hidden=both // 2,
        heads=heads,
        kv_heads=heads,
        vocab=config.integer("vocab_size", high=MAX_VOCAB),
        max_seq=positions,
        tied=config.yes("tie_word_embeddings"),
        qkv_bias=True,
    )


FAMILY = Family(
    "models with code of their own",
    {"internlm2": _internlm2, "exaone": _exaone, "baichuan": _baichuan, "chatglm": _chatglm, "qwen": _qwen},
)
