"""Looking up models: names, ids, paths, sizes and mappings through the one door, and what an unknown name is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from strategist.catalog import rows
from strategist.errors import InputError
from strategist.facts.model import ModelShape
from strategist.facts.models import find_model, load_model
from strategist.records import replace

CONFIGS = Path(__file__).parent.parent / "data" / "configs"


def refused(source: object) -> InputError:
    with pytest.raises(InputError) as caught:
        load_model(source)  # type: ignore[arg-type]
    return caught.value


def test_every_model_is_found_by_every_name_it_has() -> None:
    """Each row answers to its own name and to its Hugging Face id with and without the organisation."""
    for row in rows("models"):
        names = [row["name"], row.get("hf_id", row["name"]), row.get("hf_id", row["name"]).rpartition("/")[2]]
        assert {find_model(name)["name"] for name in names} == {row["name"]}


@pytest.mark.parametrize(
    "spelling",
    ["llama-3.1-8b", "llama3.1:8b", "Llama-3.1-8B", "meta-llama/Llama-3.1-8B", "LLAMA 3.1 8B", "llama_3.1_8b", "llama31-8b", " llama-3.1-8b "],
)  # fmt: skip
def test_spelling_does_not_matter(spelling: str) -> None:
    """Case, blanks, dashes, underscores, colons and dots make no difference."""
    assert find_model(spelling)["name"] == "llama-3.1-8b"


def test_dots_still_tell_models_apart() -> None:
    """Where only a dot distinguishes two models, it does; without one the plain name wins or both are named."""
    assert find_model("opt-1.3b")["name"] == "opt-1.3b"
    assert find_model("opt-13b")["name"] == "opt-13b"
    assert find_model("OPT 13B")["name"] == "opt-13b"
    assert find_model("gpt3_1.3b")["name"] == "gpt3-1.3b"


@pytest.mark.parametrize(
    ("variant", "base"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("NousResearch/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"),
        ("mistralai/Mistral-7B-Instruct-v0.1", "mistral-7b-v0.1"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("allenai/OLMo-2-1124-7B-Instruct", "olmo-2-1124-7b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama-3.1-8b"),
        ("DeepSeek-R1-Distill-Qwen-32B", "qwen2.5-32b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b"),
        ("qwen2.5-coder:32b", "qwen2.5-32b"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-30b-a3b"),
        ("deepseek-ai/DeepSeek-V3.1-Base", "deepseek-v3"),
        ("lmsys/vicuna-13b-v1.5", "llama-2-13b"),
    ],
)
def test_a_variant_has_the_shape_of_its_base(variant: str, base: str) -> None:
    """Words of tuning, its date and version, and whoever published it say nothing of the shape; versions and dates of the base do."""
    assert find_model(variant)["name"] == base
    assert load_model(variant) == replace(load_model(base), called=variant)


def test_relatives_are_named_once_and_have_a_row() -> None:
    """A model with a row of its own is no relative of another."""
    for row in rows("model_relatives"):
        assert find_model(row["model"])["name"] == row["model"]
        assert load_model(row["name"]) == replace(load_model(row["model"]), called=row["name"])


def test_names_of_the_catalogue_are_no_variants() -> None:
    """What a row is called is that row, with nothing assumed, also where its name ends in such a word."""
    for row in rows("models"):
        if "hf_id" in row:
            assert not load_model(row["hf_id"]).called


@pytest.mark.parametrize(
    "name",
    ["mistralai/Mistral-7B-Instruct-v0.2", "Mistral-7B-Instruct", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "Qwen/Qwen2.5-Math-7B-Instruct",
     "microsoft/Phi-3.5-mini-instruct", "roberta-it", "llama-3.1-8b-2599", "Qwen/Qwen3-VL-4B-Instruct", "instruct", "org/"],
)  # fmt: skip
def test_no_other_model_is_taken_for_a_variant(name: str) -> None:
    """Where what is left is no name that is known, nothing is guessed: other versions, distilled and pruned models, other sizes."""
    assert refused(name).code in ("OFFLINE", "UNKNOWN_MODEL")


def test_unknown_name_is_told_the_nearest() -> None:
    """An unknown name is refused with up to three near ones, among them the obvious."""
    error = refused("llama-3-8")
    assert (error.code, error.exit_code) == ("UNKNOWN_MODEL", 2)
    assert "llama-3-8b" in (error.hint or "")
    assert sum(row["name"] in (error.hint or "").replace("?", " ").split() for row in rows("models")) <= 3


def test_a_name_that_goes_on_is_nearer_than_one_that_looks_alike() -> None:
    """Whoever leaves the end of a name out is told that name first."""
    for said, meant in {"bert-large": "bert-large-uncased", "mixtral": "mixtral-8x7b"}.items():
        assert (refused(said).hint or "").startswith(f"Did you mean {meant} ")


def test_unknown_repository_is_told_that_nothing_is_downloaded() -> None:
    """An organisation/name outside the catalogue is E_OFFLINE and points to --model-config, even for one that ends in a known name."""
    for text in ("org/name", "somebody/my-Llama-3.1-8B"):
        error = refused(text)
        assert error.code == "OFFLINE"
        assert "--model-config" in (error.hint or "")


@pytest.mark.parametrize(("text", "code"), [("", "EMPTY"), ("llama\x1b[31m", "CONTROL_CHAR"), ("gpt\u202e2", "CONTROL_CHAR"), ("7G", "UNKNOWN_MODEL"), ("./missing.json", "FILE_NOT_FOUND"), ("/", "NOT_A_FILE")])  # fmt: skip
def test_bad_names_are_refused(text: str, code: str) -> None:
    """Empty, hostile, missing and unknown sources each have their own code, and no hostile character is echoed."""
    error = refused(text)
    assert error.code == code
    assert not set(str(error)) & {"\x1b", "\u202e"}


def test_all_ways_of_giving_a_model_agree(tmp_path: Path) -> None:
    """A shape, its name, a path, a Path, a mapping and a size describe the same model."""
    named = load_model("llama-2-7b")
    file = CONFIGS / "llama-2-7b.json"
    by_config = [load_model(str(file)), load_model(file), load_model(json.loads(file.read_text()))]
    assert load_model(named) is named
    assert load_model("7B") == named
    for shape in by_config:
        assert (shape.layers, shape.hidden, shape.ffn_hidden, shape.vocab) == (32, 4096, 11008, 32000)
        assert by_config[0].notes == shape.notes


def test_files_of_the_current_folder_never_shadow_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file called like a model does not change what the name means."""
    (tmp_path / "gpt2").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert load_model("gpt2").layers == 12


def test_yaml_configurations_are_read(tmp_path: Path) -> None:
    """The same keys in YAML give the same shape."""
    values = json.loads((CONFIGS / "qwen3-8b.json").read_text())
    file = tmp_path / "config.yaml"
    file.write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in values.items()))
    assert load_model(str(file)) == load_model(CONFIGS / "qwen3-8b.json")


@pytest.mark.parametrize(
    ("name", "key"), [("nemotron-h-56b", "time_step_limit"), ("qwen3-8b", "a_key_that_nothing_reads")]
)
def test_infinity_is_read_where_transformers_writes_it(tmp_path: Path, name: str, key: str) -> None:
    """Mamba 2's steps have no upper limit, and its configurations say `Infinity`; a number that the shape needs must still be one."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**config, key: [0.0, float("inf")]}))
    assert "Infinity" in file.read_text()
    assert load_model(str(file)) == load_model(config)
    file.write_text(json.dumps({**config, "hidden_size": float("inf")}))
    assert refused(file).code == "TOO_LARGE"


@pytest.mark.parametrize(("content", "code"), [(b"PK\x03\x04weights", "JSON"), (b"\x80\x04pickle", "JSON"), (b"[1, 2]", "TYPE"), (b"", "EMPTY_FILE"), (b'{"a": 1, "a": 2}', "DUPLICATE_KEY"), (b'{"a": NaN}', "NOT_FINITE")])  # fmt: skip
def test_files_that_are_no_configuration_are_refused(tmp_path: Path, content: bytes, code: str) -> None:
    """Pickles, archives, lists, empty and ambiguous files are refused; nothing is unpickled."""
    file = tmp_path / "model.json"
    file.write_bytes(content)
    assert refused(file).code == code


@pytest.mark.parametrize("source", [7, None, 7.0, b"gpt2", ["gpt2"], object()])
def test_other_types_are_refused(source: object) -> None:
    """What is neither text, path, mapping, shape nor module is E_TYPE."""
    assert refused(source).code == "TYPE"


def test_debug_model_splits_on_four_ranks() -> None:
    """The small debug shape divides by two in heads, key-value heads, feed-forward, vocabulary and layers."""
    shape = load_model("llama-debug")
    assert isinstance(shape, ModelShape)
    sizes = (shape.heads, shape.kv_heads, shape.ffn_hidden, shape.vocab, shape.layers, shape.hidden)
    assert all(size % 4 == 0 for size in sizes)
    assert not shape.tied
    assert shape.max_seq == 128  # short, so that a laptop trains it in seconds


def test_one_lookup_imports_little() -> None:
    """Finding a model and building its shape leaves families and heavy packages unloaded."""
    program = (
        "import sys\n"
        "from strategist.facts.models import find_model, shape_from_row\n"
        "shape_from_row(find_model('deepseek-v3'))\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy', 'pydantic', 'networkx', 'yaml')))\n"
        "print(any('families' in m for m in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "False"]
