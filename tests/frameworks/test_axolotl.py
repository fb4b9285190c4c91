"""axolotl's own validation takes every file, and each key is a field of its schema, which takes any."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from axolotl.utils.config import validate_config
from axolotl.utils.dict import DictDefault
from axolotl.utils.schemas.config import AxolotlInputConfig

from tests.emitters.grid import distinct

H100 = {"bf16": True, "fp8": True, "tf32": True, "n_gpu": 2, "n_node": 1, "compute_capability": "sm_90"}
"""What axolotl asks the machine for; none with a GPU is here."""

TOLD = {
    "base_model": "llama",
    "datasets": [{"path": "words", "type": "completion"}],
    "learning_rate": 3e-4,
    "max_steps": 1,
}
"""What the command adds to the file."""


def unknown(document: dict[str, Any]) -> set[str]:
    """Keys that are no field of the schema: axolotl itself says nothing about them."""
    fields = AxolotlInputConfig.model_fields
    return set(document) - set(fields) - {field.alias for field in fields.values() if field.alias}


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["axolotl"])
def test_axolotl_takes_every_file(target: str) -> None:
    """validate_config accepts each file with what the command adds, and keeps the numbers that stand in it."""
    kinds = set()
    for text, _ in distinct(target, "axolotl.yaml"):
        document = yaml.safe_load(text)
        kinds.add("deepspeed" in document)
        read = validate_config(DictDefault(document | TOLD), H100, {"torch_version": "2.13.0"})
        for name in (
            "sequence_len",
            "micro_batch_size",
            "gradient_accumulation_steps",
            "bf16",
            "gradient_checkpointing",
        ):
            assert read[name] == document[name]
        assert unknown(document) == set()
    assert kinds == {False, True}


@pytest.mark.proves("parsed")
@pytest.mark.parametrize("target", ["axolotl"])
def test_axolotl_refuses_what_is_wrong(target: str) -> None:
    """The validation that takes our files refuses a number that is none; a misspelt key is seen by the comparison above."""
    document = yaml.safe_load(distinct(target, "axolotl.yaml")[0][0])
    with pytest.raises(ValueError, match="micro_batch_size"):
        validate_config(DictDefault(document | TOLD | {"micro_batch_size": "many"}), H100, {"torch_version": "2.13.0"})
    assert unknown(document | {"micro_bath_size": 1}) == {"micro_bath_size"}
