"""What the catalogue says that Transformers' modules move is what their operations move, counted on a CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.module_kernels import FORMS, MODELS, NUMBERS, act_columns, columns
from strategist.catalog import rows

pytestmark = pytest.mark.slow

MASKS = 4.0
"""Bytes per score that releases before 4.48 moved besides in a pass: a mask was added, or taken by torch.where."""


@pytest.mark.parametrize(
    ("sort", "numbers"), [("gpt2", "mixed"), ("layernorm", "low"), ("rmsnorm", "mixed"), ("rmsnorm", "wide")]
)
def test_modules_move_what_the_catalogue_says(sort: str, numbers: str) -> None:
    """Norms, sums, rotation, activation, dropout and scores of one layer, in forward and backward together, to within a hundredth; masks aside, which newer
    releases leave out where nothing is padded."""
    row = next(row for row in rows("modules") if (row["sort"], row["numbers"]) == (sort, numbers))
    found = columns(next(model for model in MODELS if model.sort == sort), numbers)
    for name, traced in found.items():
        masks = MASKS if name.startswith("score") and row[name] > traced else 0.0
        assert row[name] - masks == pytest.approx(traced, rel=0.01), name


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("form", FORMS)
def test_activations_keep_and_move_what_the_catalogue_says(form: str, numbers: str) -> None:
    """Bytes that autograd keeps of one activation between two matrices, exactly, and elements that both passes move, to within a hundredth."""
    row = next(row for row in rows("act_forms") if (row["name"], row["numbers"]) == (form, numbers))
    found = act_columns(form, numbers)
    assert found["kept_bytes"] == row["kept_bytes"]
    assert found["moved"] == pytest.approx(row["moved"], rel=0.01)


def test_every_form_of_the_catalogue_is_traced() -> None:
    """Each in 16 bits, under autocast and in float32."""
    assert {(row["name"], row["numbers"]) for row in rows("act_forms")} == {
        (form, n) for form in FORMS for n in NUMBERS
    }
