"""The order of layers: right length and right counts for every model, and spelling that reads back."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategist.catalog import rows
from strategist.errors import InputError
from strategist.facts.layer_kind import LayerKind, read_spelling, spell, spread
from strategist.facts.model import MAX_LAYERS, Mix, ModelShape, Moe, Ssm, arranged, layer_counts, layer_sequence
from strategist.facts.model_rows import find_model, shape_from_row
from tests.examples import examples

KINDS = st.sampled_from(
    [
        LayerKind(m, f)
        for m in ("attention", "sliding", "none")
        for f in ("dense", "moe", "none")
        if (m, f) != ("none", "none")
    ]
)


def stack(**fields: object) -> ModelShape:
    return ModelShape(**{"name": "x", "family": "x", "kind": "decoder", "layers": 12, "hidden": 64, "vocab": 99, "ffn_hidden": 128} | fields)  # type: ignore[arg-type]  # fmt: skip


def mixers(shape: ModelShape) -> Counter[str]:
    return Counter(kind.mixer for kind in layer_sequence(shape))


def test_sequence_has_one_entry_per_layer() -> None:
    """Every model has as many layers in order as its row says, and one where the row knows of no layers."""
    lengths = {row["name"]: len(layer_sequence(shape_from_row(row))) for row in rows("models")}
    assert lengths == {row["name"]: row.get("layers", 1) + row.get("enc_layers", 0) for row in rows("models")}


def test_sequence_has_the_stated_number_of_expert_layers() -> None:
    """Every mixture of the catalogue has exactly its stated number of expert layers, none among its first dense ones."""
    for row in rows("models"):
        kinds = layer_sequence(shape_from_row(row))
        assert sum(kind.ffn == "moe" for kind in kinds) == row.get("moe_layers", 0)
        assert all(kind.ffn != "moe" for kind in kinds[: row.get("moe_first_dense", 0)])


def test_hybrids_have_the_stated_mix() -> None:
    """Every hybrid of the catalogue stacks the stated numbers of attention, linear, feed-forward and expert parts."""
    for row in rows("models"):
        if row["formula"] == "hybrid":
            shape, extra = shape_from_row(row), row["extra"]
            ffns = Counter(kind.ffn for kind in layer_sequence(shape))
            assert mixers(shape)["attention"] == extra["n_attn"]
            assert mixers(shape)[shape.ssm.kind if shape.ssm else ""] == extra["n_lin"]
            assert (ffns["dense"], ffns["moe"]) == (extra["n_mlp"], extra["n_moe"])


@pytest.mark.parametrize(
    ("name", "full"),
    [("gemma-2-9b", 21), ("gemma-3-27b-text", 10), ("gpt-oss-20b", 12), ("llama-4-scout-text", 12), ("mistral-7b-v0.1", 0), ("modernbert-large", 10), ("gpt-neo-1.3b", 12), ("mimo-v2-flash", 9), ("llama-3.1-8b", 32)],
)  # fmt: skip
def test_sliding_models_attend_fully_in_the_right_number_of_layers(name: str, full: int) -> None:
    """Models with sliding layers keep full attention in as many layers as their model code does."""
    assert mixers(shape_from_row(find_model(name)))["attention"] == full


def test_jamba_attends_at_the_offsets_of_its_configuration() -> None:
    """Jamba's attention stands at layer 4 of every 8 and its experts in every odd layer."""
    kinds = layer_sequence(shape_from_row(find_model("jamba-v0.1")))
    assert [i for i, kind in enumerate(kinds) if kind.mixer == "attention"] == [4, 12, 20, 28]
    assert [i for i, kind in enumerate(kinds) if kind.ffn == "moe"] == list(range(1, 32, 2))


def test_nemotron_keeps_the_order_of_its_pattern() -> None:
    """Nemotron-H's layers follow the letters of its own pattern one by one."""
    row = find_model("nemotron-h-56b")
    letters = {"mamba2": "M", "attention": "*"}
    spelled = "".join(letters.get(kind.mixer, "-") for kind in layer_sequence(shape_from_row(row)))
    assert spelled == row["attn_pattern"]


@given(st.lists(KINDS, min_size=1, max_size=40))
def test_spelling_reads_back(kinds: list[LayerKind]) -> None:
    """Layers that were spelled out read back as the same layers."""
    assert read_spelling(spell(kinds), len(kinds), None) == tuple(kinds)


@examples(60)
@given(st.lists(st.tuples(st.sampled_from(("attention", "sliding")), st.sampled_from(("dense", "moe"))), min_size=1, max_size=30))  # fmt: skip
def test_any_order_of_layers_can_be_kept(pairs: list[tuple[str, str]]) -> None:
    """Arranging a shape makes its sequence exactly the wanted one, however irregular."""
    kinds = [LayerKind(mixer, ffn) for mixer, ffn in pairs]  # type: ignore[arg-type]
    experts = sum(kind.ffn == "moe" for kind in kinds)
    moe = Moe(experts=4, top_k=2, ffn=32, layers=experts) if experts else None
    shape = arranged(stack(layers=len(kinds), window=16, moe=moe), kinds)
    assert layer_sequence(shape) == tuple(kinds)


@given(st.integers(0, 60), st.integers(0, 60))
def test_spread_keeps_both_counts(rare: int, common: int) -> None:
    """Spreading words keeps how many there are of each, and no two stretches differ by more than one."""
    words = spread(rare, True, common, False)
    assert (words.count(True), words.count(False)) == (rare, common)
    if rare:
        gaps = [i for i, word in enumerate(words) if word]
        steps = {b - a for a, b in pairwise(gaps)}
        assert max(steps, default=0) - min(steps, default=0) <= 1


@given(st.integers(1, 60), st.integers(0, 10), st.integers(1, 60))
def test_every_expert_layer_is_placed(layers: int, first: int, experts: int) -> None:
    """As many layers have experts as the shape says, or as fit behind its dense ones."""
    moe = Moe(experts=4, top_k=2, ffn=32, layers=experts, first_dense=first)
    placed = sum(kind.ffn == "moe" for kind in layer_sequence(stack(layers=layers, moe=moe)))
    assert placed == min(experts, max(0, layers - first))


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"layers": MAX_LAYERS + 1}, "TOO_LARGE"),
        ({"pattern": "M-"}, "CHOICE"),
        ({"pattern": "*- *-"}, "CHOICE"),
        ({"pattern": "*- \x1b[31m"}, "CHOICE"),
        ({"ssm": Ssm(kind="mamba2", conv=4), "mix": Mix(attention=3, linear=3, mlp=0, moe=0, norms=0)}, "CONFLICT"),
    ],
)
def test_shapes_that_contradict_themselves_are_refused(fields: dict[str, object], code: str) -> None:
    """A shape read from elsewhere whose layers cannot be laid out is refused with a sentence."""
    with pytest.raises(InputError) as caught:
        layer_sequence(replace(stack(), **fields))  # type: ignore[arg-type]
    assert caught.value.code == code
    assert "\x1b" not in str(caught.value)


def test_counts_count_the_sequence() -> None:
    """The counts of layers are those of the sequence."""
    shape = shape_from_row(find_model("deepseek-v3"))
    assert layer_counts(shape) == {LayerKind("mla", "dense"): 3, LayerKind("mla", "moe"): 58}
