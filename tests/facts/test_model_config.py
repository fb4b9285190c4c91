"""The configuration reader: exact counts on real files, strictness on wrong ones, and nothing in a file is executed."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strategist.catalog import rows
from strategist.errors import InputError
from strategist.facts.families import FAMILIES
from strategist.facts.families.config import class_defaults
from strategist.facts.families.vision_language import WRAPPERS
from strategist.facts.model import layer_sequence
from strategist.facts.model_config import shape_from_config
from strategist.facts.model_rows import find_model, shape_from_row
from strategist.facts.parameters import count

CONFIGS = Path(__file__).parent.parent / "data" / "configs"
EXPECTED = list(csv.DictReader((CONFIGS / "EXPECTED.csv").read_text().splitlines()))

OTHER_COUNT = {
    "flan-t5-xl.json": ("models_csv_params_total", "untied", "the file unties the head, as its checkpoint does; transformers 5.23 ties it"),
    "clip-vit-l-14.json": ("params_total_code", "text tower", "both towers are trained, so both are counted"),
}  # fmt: skip
"""Files whose count is not `params_language_code`: the column it is, a word of the file's own note, and our reason."""


def config(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((CONFIGS / name).read_text())
    return values


def refused(values: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        shape_from_config(values)
    assert caught.value.exit_code == 2
    return caught.value


@pytest.mark.parametrize("row", EXPECTED, ids=lambda row: str(row["file"]))
def test_count_equals_real_model_code(row: dict[str, str]) -> None:
    """Each configuration counts what its model class counts (the language tower of composite ones)."""
    column, word, _ = OTHER_COUNT.get(row["file"], ("params_language_code", "", ""))
    assert count(shape_from_config(config(row["file"]))).total == int(row[column])
    assert word in row["note"]


def test_published_bloom_says_its_width_in_a_word_of_its_own() -> None:
    """`n_embed`, which is also taken where both stand, as transformers takes it."""
    bloom = shape_from_row(find_model("bloom-7b1"))
    said = {
        "model_type": "bloom", "n_embed": bloom.hidden, "n_layer": bloom.layers, "num_attention_heads": bloom.heads,
        "seq_length": 2048, "vocab_size": bloom.vocab,
    }  # fmt: skip
    assert count(shape_from_config(said)).total == count(bloom).total
    assert shape_from_config({**said, "hidden_size": 64}).hidden == bloom.hidden


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 128, "max_position_embeddings": 64, "num_hidden_layers": 4}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "said", "total"),
    [
        ("seed_oss", {"head_dim": None}, 132160),
        ("ernie4_5", {"num_key_value_heads": None, "head_dim": 8}, 148032),
        ("smollm3", {"num_key_value_heads": None}, 148032),
    ],
)
def test_a_null_is_no_default(model_type: str, said: dict[str, Any], total: int) -> None:
    """transformers 5.23.0 takes a null for what it is, heads of hidden / heads and a key-value head for each, not for the class's
    default, which stands for keys that are absent."""
    values = {**SMALL, "model_type": model_type, "tie_word_embeddings": True, **said}
    nulls = count(shape_from_config(values)).total
    without = {key: value for key, value in values.items() if value is not None}
    assert nulls != count(shape_from_config(without)).total
    assert nulls == total


def test_two_names_of_one_fact_must_agree() -> None:
    """transformers takes the one or the other, so that either count may be wrong."""
    values = {**SMALL, "model_type": "mixtral", "num_local_experts": 8, "num_experts": 16, "num_experts_per_tok": 2}
    assert refused(values).code == "CONFLICT"
    assert shape_from_config({**values, "num_experts": 8}).moe is not None


GEMMA_4 = {**SMALL, "model_type": "gemma4_text", "head_dim": 16, "hidden_size_per_layer_input": 0}


def test_sizes_of_single_layers_are_read_or_refused() -> None:
    """transformers 5 writes Gemma 4's wider heads layer by layer; of other types nobody knows what such a list makes."""
    wide = {"per_layer_config": {"3": {"head_dim": 32}}}
    anew = shape_from_config({**GEMMA_4, **wide})
    assert count(anew) == count(shape_from_config({**GEMMA_4, "global_head_dim": 32}))
    assert refused({**GEMMA_4, "per_layer_config": {"2": {"head_dim": 32}}}).code == "CHOICE"
    assert refused({**SMALL, "model_type": "llama", **wide}).flag == "$.per_layer_config"


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("helium", {"head_dim": 16}),
        ("bamba", {"mamba_conv_bias": None}),
        ("bert", {"tie_word_embeddings": False}),
        ("modernbert", {"tie_word_embeddings": False}),
        ("olmo_hybrid", {"layer_types": ["linear_attention"] * 4}),
        ("openai-gpt", {"afn": "gelu_new"}),
        ("xglm", {"add_cross_attention": True}),
        ("afmoe", {"attention_bias": True}),
    ],
)
def test_what_the_class_builds_otherwise_is_refused(model_type: str, said: dict[str, Any]) -> None:
    """Heads that do not fill Helium's width, convolutions without a bias, heads that share no table."""
    assert refused({**SMALL, "model_type": model_type, **said}).code == "CHOICE"


BY_DEFAULT = {
    "nanochat": 256_573_440, "apertus": 6_979_596_352, "afmoe": 19_232_600_000, "granite_swa": 2_144_463_840,
    "granitemoe_swa": 37_039_117_312, "youtu": 1_961_560_064, "openai-gpt": 116_534_784, "minicpm3": 4_073_875_968,
    "persimmon": 9_397_175_296, "xglm": 564_463_616, "biogpt": 346_763_264, "olmo_hybrid": 7_430_870_688,
    "roberta-prelayernorm": 124_698_201, "gpt-sw3": 124_439_808, "kimi_linear": 49_133_074_464,
}  # fmt: skip
"""How many weights the modules of transformers 5.23.0 have that are built from the defaults of their configurations."""


@pytest.mark.parametrize("model_type", BY_DEFAULT)
def test_default_configurations_count_what_transformers_builds(model_type: str) -> None:
    """A file that says what its class has by default; with a masked-language head where the class has one."""
    kind = {"gpt-sw3": "gpt2"}.get(model_type, model_type)
    said = {**class_defaults(kind), "model_type": model_type, "architectures": ["SomeForCausalLM"]}
    said |= {"q_lora_rank": None} if model_type == "kimi_linear" else {}
    assert count(shape_from_config(said)).total == BY_DEFAULT[model_type]


def test_a_type_that_has_the_class_of_another_is_read_as_that() -> None:
    """GPT-SW3 is GPT-2 in every respect, its name for files of weights too."""
    said = {**class_defaults("gpt2"), "model_type": "gpt-sw3"}
    assert shape_from_config(said) == shape_from_config({**said, "model_type": "gpt2"})
    assert shape_from_config(said).family == "gpt2"


def test_an_activation_with_weights_of_its_own_is_read_where_they_are_counted() -> None:
    """xIELU trains two numbers in every layer of Apertus; another type's reader would leave them out."""
    values = {**SMALL, "model_type": "apertus", "hidden_act": "xielu"}
    assert count(shape_from_config(values)).total - count(shape_from_config({**values, "hidden_act": "silu"})).total == 2 * SMALL["num_hidden_layers"]  # fmt: skip
    assert refused({**values, "model_type": "llama"}).flag == "$.hidden_act"


KIMI = {
    **SMALL, "model_type": "kimi_linear", "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 1, "moe_intermediate_size": 48,
    "first_k_dense_replace": 1, "num_expert_group": 1, "topk_group": 1, "moe_layer_freq": 1,
}  # fmt: skip


def test_kimi_linear_says_its_linear_layers_in_an_object_of_their_own() -> None:
    """Published files count layers from one under `linear_attn_config`; transformers writes the same in words."""
    linear = {"head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 3}
    said = {"linear_attn_config": linear | {"full_attn_layers": [4], "kda_layers": [1, 2, 3]}}
    wide = {"linear_head_dim": 8, "linear_num_heads": 4, "linear_conv_kernel_dim": 3}
    words = wide | {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    published, written = (shape_from_config({**KIMI, **each}) for each in (said, words))
    assert layer_sequence(published) == layer_sequence(written)
    assert count(published) == count(written)
    assert [(kind.mixer, kind.ffn) for kind in layer_sequence(published)] == [("kimi-delta", "dense"), ("kimi-delta", "moe"), ("kimi-delta", "moe"), ("mla", "moe")]  # fmt: skip
    missing = {"linear_attn_config": linear | {"full_attn_layers": [4], "kda_layers": [1, 2]}}
    assert refused({**KIMI, **missing}).flag == "$.linear_attn_config.full_attn_layers"


@pytest.mark.parametrize("named", ["BartForCausalLM", "MBartForCausalLM"])
def test_a_decoder_without_its_encoder_is_refused(named: str) -> None:
    """It would be counted with an encoder that it does not have."""
    values = {"model_type": "bart", "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 8, "decoder_attention_heads": 8, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 64, "vocab_size": 128}  # fmt: skip
    assert shape_from_config({**values, "architectures": ["BartForConditionalGeneration"]}).enc_layers == 2
    assert refused({**values, "architectures": [named]}).flag == "$.architectures"


@pytest.mark.parametrize("named", ["BertLMHeadModel", "BertForCausalLM", "BertForMaskedLM"])
def test_encoders_named_after_another_loss_have_the_same_head(named: str) -> None:
    """One matrix, its norm and a bias for every word, and no pooler."""
    said = {**SMALL, "model_type": "bert", "type_vocab_size": 0}
    bare, topped = (count(shape_from_config({**said, "architectures": [each]})).total for each in ("BertModel", named))
    assert topped - bare == 2 * SMALL["hidden_size"] + SMALL["vocab_size"]


OWN_CODE = {
    "internlm2": ({"bias": False, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 92544, "max_position_embeddings": 32768, "hidden_act": "silu"}, 7_737_708_544),
    "exaone": ({"activation_function": "silu", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "num_layers": 32, "vocab_size": 102400, "max_position_embeddings": 32768, "tie_word_embeddings": False}, 7_818_448_896),
    "baichuan": ({"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 64000, "max_position_embeddings": 4096, "model_max_length": 4096}, 7_000_559_616),
    "chatglm": ({"num_layers": 28, "hidden_size": 4096, "ffn_hidden_size": 13696, "num_attention_heads": 32, "kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2, "padded_vocab_size": 65024, "seq_length": 8192, "add_qkv_bias": True, "add_bias_linear": False, "rmsnorm": True, "post_layer_norm": True, "tie_word_embeddings": False, "vocab_size": 65024}, 6_243_584_000),
    "qwen": ({"hidden_size": 4096, "intermediate_size": 22016, "num_attention_heads": 32, "num_hidden_layers": 32, "kv_channels": 128, "max_position_embeddings": 32768, "seq_length": 8192, "no_bias": True, "vocab_size": 151936, "tie_word_embeddings": False}, 7_721_324_544),
}  # fmt: skip
"""Published configurations of InternLM2 7B, EXAONE 3.5 7.8B, Baichuan 7B, ChatGLM3 6B and Qwen 7B, and how many weights those count who
load them: baichuan-inc/Baichuan-13B README.md (table of both models), PEFT's line `all params` for ChatGLM3, the total_size of Qwen-7B's
model.safetensors.index.json (15442649088 bytes of bf16) and that of InternLM2 7B (15475417088)."""


@pytest.mark.parametrize("model_type", OWN_CODE)
def test_types_with_code_of_their_own_count_what_was_published(model_type: str) -> None:
    """Read by their keys alone; what only that code knows is never run."""
    values, total = OWN_CODE[model_type]
    shape = shape_from_config({**values, "model_type": model_type, "auto_map": {"AutoModelForCausalLM": "modeling.X"}})
    assert count(shape).total == total
    assert any(note.startswith("W_REMOTE_CODE_IGNORED") for note in shape.notes)


def test_internvl_chat_names_its_language_model_in_a_word_of_its_own() -> None:
    """`llm_config`, whose own word of the table counts; InternVL2-8B's is InternLM2."""
    inner = {**OWN_CODE["internlm2"][0], "model_type": "internlm2", "vocab_size": 92553, "tie_word_embeddings": False}
    shape = shape_from_config(
        {"model_type": "internvl_chat", "llm_config": inner, "vision_config": {"hidden_size": 1024}}
    )
    assert count(shape).total == 7_737_708_544 + 2 * (92553 - 92544) * 4096
    assert any("$.vision_config not counted" in note for note in shape.notes)


@pytest.mark.parametrize("named", ["LlamaForSequenceClassification", "LlamaModel", "LlamaForCausalLMEagle3"])
def test_a_class_without_a_head_over_the_vocabulary_is_said(named: str) -> None:
    """A reward model, an embedder or a draft has `model_type` llama; what is counted otherwise than it has it is said with its weights."""
    values = {**SMALL, "model_type": "llama", "tie_word_embeddings": False}
    notes = " ".join(shape_from_config({**values, "architectures": [named]}).notes)
    assert f"architectures names {named}" in notes
    assert "8,192 weights" in notes
    for usual in (["LlamaForCausalLM"], ["LlamaModel", "LlamaForCausalLM"], None):
        assert "architectures" not in " ".join(shape_from_config({**values, "architectures": usual}).notes)


LFM2 = {
    "model_type": "lfm2", "block_auto_adjust_ff_dim": True, "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
    "conv_L_cache": 3, "conv_bias": False, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "max_position_embeddings": 128000,
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "vocab_size": 65536, "tie_embedding": True,
}  # fmt: skip


def test_lfm2_counts_its_card() -> None:
    """LiquidAI/LFM2-1.2B: 1,170,340,608 weights (as Lfm2ForCausalLM of transformers 5.23.0 has from this file), ten convolutions and six layers of attention, under the names of its file."""
    shape = shape_from_config(LFM2)
    assert count(shape).total == 1_170_340_608
    assert [kind.mixer for kind in layer_sequence(shape)].count("short-conv") == 10
    assert refused({**LFM2, "block_ffn_dim_multiplier": 1.5}).code == "CHOICE"


def test_quantised_weights_of_a_file_are_said() -> None:
    """The job has formats of its own."""
    values = {**SMALL, "model_type": "llama", "quantization_config": {"quant_method": "awq", "bits": 4}}
    assert any(note.startswith("quantization_config (awq) is not read") for note in shape_from_config(values).notes)


@pytest.mark.parametrize("said", [{"alibi": False}, {"qk_ln": True}, {"kv_n_heads": 2}])
def test_mpt_of_another_make_is_refused(said: dict[str, Any]) -> None:
    """transformers builds MPT with slopes, without norms of heads and with as many key-value heads as heads."""
    values = {
        "model_type": "mpt",
        "d_model": 64,
        "n_heads": 8,
        "n_layers": 4,
        "max_seq_len": 64,
        "vocab_size": 128,
        "no_bias": True,
    }
    assert shape_from_config({**values, "attn_config": {"alibi": True, "qk_ln": False, "kv_n_heads": 8}}).pos == "alibi"
    assert refused({**values, "attn_config": said}).code == "CHOICE"


def test_a_type_whose_models_differ_in_tying_must_say_it() -> None:
    """EXAONE 3.5 2.4B shares its table, the 7.8B does not."""
    values = {key: value for key, value in OWN_CODE["exaone"][0].items() if key != "tie_word_embeddings"}
    assert refused({**values, "model_type": "exaone"}).flag == "$.tie_word_embeddings"


def test_baichuan_13b_has_no_angles() -> None:
    """Its file names a length and no positions (alibi); its README counts 13,264,901,120."""
    values = {key: value for key, value in OWN_CODE["baichuan"][0].items() if key != "max_position_embeddings"}
    wide = {"hidden_size": 5120, "intermediate_size": 13696, "num_attention_heads": 40, "num_hidden_layers": 40}
    shape = shape_from_config({**values, **wide, "model_type": "baichuan"})
    assert (shape.pos, count(shape).total) == ("alibi", 13_264_901_120)


DEBERTA_V3_BASE = {
    "model_type": "deberta-v2", "hidden_act": "gelu", "hidden_size": 768, "intermediate_size": 3072, "max_position_embeddings": 512,
    "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": "p2c|c2p",
    "max_relative_positions": -1, "position_biased_input": False, "num_attention_heads": 12, "num_hidden_layers": 12,
    "type_vocab_size": 0, "vocab_size": 128100,
}  # fmt: skip


def test_deberta_v3_base_counts_its_card() -> None:
    """184 million (DebertaV2Model of transformers 5.23.0 has 183,831,552), 98 of them in the table of tokens."""
    shape = shape_from_config(DEBERTA_V3_BASE)
    assert count(shape).total == 183_831_552
    assert round(count(shape).embedding / 1e6) == 98
    assert any("disentangled" in note for note in shape.notes)


def test_all_47_configurations_are_there() -> None:
    """The test data hold 47 configurations, nine odd ones among them."""
    assert len(EXPECTED) == 47
    assert sum(row["file"].startswith("odd-") for row in EXPECTED) == 9


@pytest.mark.parametrize(("name", "model"), [("deepseek-v4-flash", "deepseek-v4-flash"), ("deepseek-v4-pro", "deepseek-v4-pro"), ("llama-4-scout", "llama-4-scout-text")])  # fmt: skip
def test_further_public_files_count_as_their_models_do(name: str, model: str) -> None:
    """Further public configurations count what model code counted for their catalogue rows."""
    assert count(shape_from_config(config(f"{name}.json"))).total == find_model(model)["params_hf_code"]


def test_configuration_and_catalogue_give_one_shape() -> None:
    """A model read from its configuration equals the same model from the catalogue, field by field."""
    told_apart = {"name", "family", "source", "notes"}
    for row in EXPECTED:
        if row["model_name"] and row["file"] != "bert-large-uncased.json":  # the row has a pooler, the file a head
            read, known = shape_from_config(config(row["file"])), shape_from_row(find_model(row["model_name"]))
            assert {f.name: getattr(read, f.name) for f in dataclasses.fields(read) if f.name not in told_apart} == {
                f.name: getattr(known, f.name) for f in dataclasses.fields(known) if f.name not in told_apart
            }, row["file"]


def test_every_model_type_of_the_catalogue_has_a_reader() -> None:
    """Every model_type in the catalogue is read, except the two that come without a transformers configuration."""
    known = {name for family in FAMILIES for name in family.readers} | set(WRAPPERS)
    named = {row["model_type"] for row in rows("models") if "model_type" in row}
    unread = {name for name in named if name not in known and f"{name}_text" not in known}
    assert unread == {"dit", "flux"}  # FLUX is read from diffusers' own file, DiT has none


def test_no_model_type_has_two_readers() -> None:
    """Each model_type belongs to exactly one family, and is not a composite one too."""
    names = [name for family in FAMILIES for name in family.readers]
    assert len(names) == len(set(names))
    assert not set(names) & set(WRAPPERS)


def test_flux_is_read_from_diffusers() -> None:
    """FLUX.1-dev's transformer configuration counts what the catalogue row does."""
    values = {"_class_name": "FluxTransformer2DModel", "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128, "num_attention_heads": 24, "in_channels": 64, "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True}  # fmt: skip
    assert count(shape_from_config(values)).total == find_model("flux.1-dev")["params_total"]


LLAMA = "llama-3.1-8b.json"


@pytest.mark.parametrize(
    ("change", "code", "path"),
    [
        ({"num_hidden_layers": -1}, "NEGATIVE", "$.num_hidden_layers"),
        ({"num_hidden_layers": 0}, "TOO_SMALL", "$.num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "TOO_LARGE", "$.num_hidden_layers"),
        ({"num_hidden_layers": 1e9}, "TOO_LARGE", "$.num_hidden_layers"),
        ({"num_hidden_layers": "32"}, "TYPE", "$.num_hidden_layers"),
        ({"num_hidden_layers": 32.0}, "TYPE", "$.num_hidden_layers"),
        ({"num_hidden_layers": True}, "TYPE", "$.num_hidden_layers"),
        ({"num_hidden_layers": None}, "MISSING", "$.num_hidden_layers"),
        ({"hidden_size": [4096]}, "TYPE", "$.hidden_size"),
        ({"hidden_size": 10**6 + 1}, "TOO_LARGE", "$.hidden_size"),
        ({"vocab_size": 10**8 + 1}, "TOO_LARGE", "$.vocab_size"),
        ({"vocab_size": 10**5000}, "TOO_LARGE", "$.vocab_size"),
        ({"num_key_value_heads": 3}, "DIVISIBILITY", "$.num_attention_heads"),
        ({"num_key_value_heads": 64}, "RANGE", "$.num_key_value_heads"),
        ({"num_attention_heads": 33, "num_key_value_heads": 33, "head_dim": None}, "DIVISIBILITY", "$.hidden_size"),
        ({"tie_word_embeddings": 1}, "TYPE", "$.tie_word_embeddings"),
        ({"hidden_act": "no-such-thing"}, "CHOICE", "$.hidden_act"),
        ({"model_type": "llama9"}, "UNKNOWN_ARCH", "$.model_type"),
        ({"model_type": None}, "MISSING", "$.model_type"),
        ({"model_type": 3}, "TYPE", "$.model_type"),
    ],
)
def test_wrong_values_are_refused_in_their_place(change: dict[str, Any], code: str, path: str) -> None:
    """A wrong value is refused with its code and JSON path, whatever type it has."""
    error = refused(config(LLAMA) | change)
    assert (error.code, error.flag) == (code, path)
    assert error.hint
    assert len(error.value or "") <= 60


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings"])  # fmt: skip
def test_missing_dimensions_are_never_guessed(key: str) -> None:
    """A dimension that a plain configuration lacks is E_MISSING although its class has a default."""
    values = config(LLAMA)
    del values[key]
    error = refused(values)
    assert (error.code, error.flag) == ("MISSING", f"$.{key}")


def test_all_problems_are_reported_together() -> None:
    """One refusal carries every problem of the file, the missing key after the wrong types."""
    values = config(LLAMA) | {"hidden_size": "4096", "vocab_size": -1}
    del values["intermediate_size"]
    error = refused(values)
    assert [e.code for e in (error, *error.also)] == ["TYPE", "NEGATIVE", "MISSING"]


def test_nested_paths_are_named() -> None:
    """A problem inside a composite configuration carries the path into it."""
    values = config("odd-gemma3-4b-nested.json")
    values["text_config"]["num_hidden_layers"] = "34"
    assert refused(values).flag == "$.text_config.num_hidden_layers"


@pytest.mark.parametrize("values", [[], "text", 7, None])
def test_only_objects_are_configurations(values: object) -> None:
    """Anything but an object is E_TYPE."""
    assert refused(values).code == "TYPE"


def test_unknown_architecture_is_shown_the_way_out() -> None:
    """An unknown model_type is not guessed: the answer names readers, --model and --model-size."""
    error = refused(config(LLAMA) | {"model_type": "llamma"})
    assert error.code == "UNKNOWN_ARCH"
    assert all(word in (error.hint or "") for word in ("llama", "--model", "--model-size", "encoder-decoders"))


def test_remote_code_is_ignored_and_told() -> None:
    """Keys that name code change nothing but a note; with an unknown model_type the file is refused."""
    trap = {"auto_map": {"AutoConfig": "evil.Evil"}, "trust_remote_code": True, "_attn_implementation_internal": "evil/repo"}  # fmt: skip
    plain, trapped = shape_from_config(config(LLAMA)), shape_from_config(config(LLAMA) | trap)
    assert dataclasses.replace(trapped, notes=plain.notes) == plain
    assert trapped.notes[0].startswith("W_REMOTE_CODE_IGNORED")
    assert all(key in trapped.notes[0] for key in trap)
    assert "evil" not in " ".join(trapped.notes)
    assert refused(config(LLAMA) | trap | {"model_type": "custom"}).code == "UNKNOWN_ARCH"


def test_defaults_that_were_used_are_told() -> None:
    """A key-value head count that the file leaves out is taken from the class and noted."""
    shape = shape_from_config(config("odd-llama-old-no-kv-heads.json"))
    assert shape.kv_heads == shape.heads == 32
    assert any("$.num_key_value_heads = 32" in note for note in shape.notes)


def test_composite_files_say_where_facts_came_from() -> None:
    """Vision-language files use the language tower's facts, whatever the vision tower says, and the notes name it."""
    values = config("odd-gemma3-27b-nested.json")
    values["vision_config"]["num_attention_heads"] = 1
    shape = shape_from_config(values)
    assert shape.heads == 32
    assert any("$.text_config" in note and "32 heads" in note for note in shape.notes)
    assert any("$.vision_config not counted" in note for note in shape.notes)


@pytest.mark.parametrize("name", ["mixtral-8x7b.json", "olmoe-1b-7b.json", "qwen3-30b-a3b.json"])
def test_one_expert_is_a_dense_model(name: str) -> None:
    """One expert that every token uses gives the dense shape; only its routers are counted beside it."""
    values = config(name)
    keys = {"num_experts", "num_local_experts"} & values.keys()
    shape = shape_from_config(values | dict.fromkeys(keys, 1) | {"num_experts_per_tok": 1})
    width = values.get("moe_intermediate_size", values["intermediate_size"])
    assert shape.moe is None
    assert shape.ffn_hidden == width
    assert {kind.ffn for kind in layer_sequence(shape)} == {"dense"}
    dense = dataclasses.replace(shape, extra_parameters=0)
    assert count(shape).total - count(dense).total == shape.layers * shape.hidden


def test_more_chosen_experts_than_there_are_is_refused() -> None:
    """A token cannot use more experts than the model has."""
    assert refused(config("mixtral-8x7b.json") | {"num_experts_per_tok": 9}).code == "RANGE"


@pytest.mark.parametrize(
    ("name", "change", "groups"),
    [("deepseek-v3.json", {}, (8, 4)), ("kimi-k2.json", {}, (1, 1)), ("deepseek-v2-lite.json", {"n_group": 8, "topk_group": 3}, (1, 1)), ("deepseek-v2-lite.json", {"n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"}, (8, 3)), ("mixtral-8x7b.json", {}, (1, 1))],
)  # fmt: skip
def test_groups_of_experts_are_those_that_the_router_chooses_among(name: str, change: dict[str, Any], groups: tuple[int, int]) -> None:  # fmt: skip
    """None where there is one group, or a method that looks at no groups, which is DeepSeek-V2's own."""
    moe = shape_from_config(config(name) | change).moe
    assert moe is not None
    assert (moe.groups, moe.top_groups) == groups


@pytest.mark.parametrize(("change", "code", "path"), [({"n_group": 7}, "DIVISIBILITY", "$.n_group"), ({"topk_group": 9}, "RANGE", "$.topk_group"), ({"n_group": 128, "topk_group": 2}, "RANGE", "$.num_experts_per_tok"), ({"n_group": "8"}, "TYPE", "$.n_group")])  # fmt: skip
def test_groups_that_no_router_can_choose_from_are_refused(change: dict[str, Any], code: str, path: str) -> None:
    """Groups of unequal size, more groups chosen than there are, and fewer experts in them than a token takes."""
    problem = refused(config("deepseek-v3.json") | change)
    assert (problem.code, problem.flag) == (code, path)


def test_too_many_experts_are_refused() -> None:
    """Expert counts beyond 65,536 are refused."""
    assert refused(config("mixtral-8x7b.json") | {"num_local_experts": 65537}).code == "TOO_LARGE"


def test_hybrid_patterns_are_honoured() -> None:
    """The layers of a hybrid are exactly those its pattern spells, also in the words newer files use."""
    values = config("nemotron-h-56b.json")
    words = {"M": "mamba", "*": "attention", "-": "mlp"}
    by_words = {key: value for key, value in values.items() if key != "hybrid_override_pattern"}
    by_words["layers_block_type"] = [words[letter] for letter in values["hybrid_override_pattern"]]
    assert shape_from_config(by_words) == shape_from_config(values)
    anew = {"mamba": "linear_attention", "attention": "full_attention"}  # as transformers 5 writes them
    in_new_words = [anew.get(word, word) for word in by_words["layers_block_type"]]
    assert shape_from_config({**by_words, "layers_block_type": in_new_words}) == shape_from_config(values)
    shorter = shape_from_config(values | {"hybrid_override_pattern": "MM*-"})
    assert [kind.mixer for kind in layer_sequence(shorter)] == ["mamba2", "mamba2", "attention", "none"]


def test_irregular_layer_types_are_kept() -> None:
    """Layer types that follow no rule are kept one by one."""
    values = config("gemma-2-9b.json")
    types = ["full_attention"] * 3 + ["sliding_attention"] * (values["num_hidden_layers"] - 3)
    shape = shape_from_config(values | {"layer_types": types, "sliding_window": 4096})
    assert [kind.mixer for kind in layer_sequence(shape)][:4] == ["attention"] * 3 + ["sliding"]
    assert refused(values | {"layer_types": types[1:]}).code == "RANGE"
    assert refused(values | {"layer_types": ["no"] * len(types)}).code == "CHOICE"


def test_hostile_names_are_never_echoed_raw() -> None:
    """A name with terminal escapes is escaped, and a path in it is cut to its last part."""
    shape = shape_from_config(config(LLAMA) | {"_name_or_path": "/home/someone/\x1b[31mevil\u202e</script>"})
    assert not set(shape.name) & {"\x1b", "\u202e", "/"}
    assert "someone" not in shape.name
    assert shape_from_config(config(LLAMA) | {"_name_or_path": "meta-llama/Llama-3.1-8B"}).name == "Llama-3.1-8B"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mamba2-2.7b.json", {"use_bias": True}),
        ("jamba-v0.1.json", {"mamba_proj_bias": True}),
        ("gpt2.json", {"add_cross_attention": True}),
        ("deepseek-v3.json", {"moe_layer_freq": 2}),
    ],
)
def test_variants_that_cannot_be_counted_are_refused(name: str, change: dict[str, Any]) -> None:
    """An option that changes the layers in a way no field expresses is refused, not ignored."""
    assert refused(config(name) | change).code == "CHOICE"


def test_a_class_default_that_cannot_be_counted_is_refused_too() -> None:
    """Gemma 4 without hidden_size_per_layer_input has its class's 256 of them, which is refused, not read as none."""
    values = {"model_type": "gemma4_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 64}  # fmt: skip
    error = refused(values)
    assert (error.code, error.flag) == ("CHOICE", "$.hidden_size_per_layer_input")
    assert shape_from_config(values | {"hidden_size_per_layer_input": 0}).layers == 6


def test_impossible_totals_are_refused() -> None:
    """Dimensions that are each within bounds but together exceed 1e14 parameters are refused."""
    big = {"hidden_size": 10**6, "num_hidden_layers": 4096, "num_attention_heads": 1000, "num_key_value_heads": 1000, "head_dim": None}  # fmt: skip
    assert refused(config(LLAMA) | big).code == "TOO_LARGE"


@pytest.mark.parametrize("grow", [lambda c: c | {"num_hidden_layers": 2 * c["num_hidden_layers"]}])
def test_depth_scales_layers_only(grow: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Twice the layers add exactly one more set of layers to the count."""
    values = config(LLAMA)
    one, two = count(shape_from_config(values)).total, count(shape_from_config(grow(values))).total
    shape = shape_from_config(values)
    outer = 2 * shape.vocab * shape.hidden + shape.hidden
    assert two - one == one - outer
