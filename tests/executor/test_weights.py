"""Weights leave and come in under Hugging Face's names: transformers itself reads them, and says the same with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strategist.errors import StrategistError
from strategist.facts.model_config import shape_from_config
from tests.examples import by_night
from tests.executor.test_against_transformers import CASES, LLAMA3_1
from tests.plans import FLOAT32, make_plan, tiny_llama, tiny_mixtral

pytestmark = pytest.mark.slow

FAMILIES = (
    "gpt2",
    "llama",
    "llama-3.1",
    "llama-tied",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "olmoe",
    "qwen2-moe",
    "qwen3-moe",
)
IN_CI = ("gpt2", "llama", "llama-3.1", "llama-tied", "mistral", "mixtral", "qwen2-moe")
LAYOUT = {"dp_shard": 2, "zero": 3, "micro_batch": 4}
CUT = {"tp": 2, "micro_batch": 2}
LAYOUTS = {
    "gpt2": LAYOUT | {"tiling": 3},
    "llama": CUT,
    "mixtral": LAYOUT | {"ep": 2},
    "qwen3-moe": LAYOUT | {"ep": 2},
    "qwen2-moe": CUT | {"etp": 2},
    "mistral": {"dp_replicate": 2, "tables": "server", "micro_batch": 4},
}


def config_of(case: str) -> Any:
    """transformers' configuration of a small model."""
    from transformers import AutoConfig

    family, sizes = CASES[case]
    return AutoConfig.for_model(family, **sizes)


@pytest.mark.parametrize("case", by_night(FAMILIES, set(FAMILIES) - set(IN_CI)))
def test_weights_come_in_and_leave_as_they_were(case: str, tmp_path: Path) -> None:
    """What transformers saved is imported into a session on two ranks, saved, exported and read by transformers: every tensor
    is bit by bit what it was, and the built-in model says with them what theirs says."""
    from tests.executor.harness import run_alone, run_ranks
    from tests.executor.workers import carried, differing_to_transformers, made_by_transformers

    config = config_of(case)
    config.save_pretrained(tmp_path / "theirs")
    tokens = [[(7 * place + 5 * row) % 64 for place in range(14)] for row in range(2)]
    expected = run_alone(made_by_transformers, tmp_path / "theirs", tokens)
    plan = make_plan(shape_from_config(config.to_dict()), **LAYOUTS.get(case, LAYOUT), formats=FLOAT32)
    first, _ = run_ranks(2, carried, plan, tmp_path / "theirs", tmp_path / "checkpoint", tmp_path / "ours", tokens)
    config.save_pretrained(tmp_path / "ours")
    assert run_alone(differing_to_transformers, tmp_path / "theirs", tmp_path / "ours") == []
    largest = max(abs(logit) for logit in flat(expected))
    assert max(abs(a - b) for a, b in zip(flat(first), flat(expected), strict=True)) <= 1e-4 * largest


def flat(values: Any) -> list[float]:
    """The numbers of nested lists, in order."""
    return [number for value in values for number in flat(value)] if isinstance(values, list) else [values]


def test_large_models_are_written_in_parts(tmp_path: Path) -> None:
    """Above the limit of a file there are several and an index; together they hold every tensor once, and come in again."""
    from tests.executor.harness import run_alone
    from tests.executor.workers import exported_in_parts

    files, same = run_alone(exported_in_parts, make_plan(tiny_llama(family="llama"), micro_batch=8), tmp_path, 20_000)
    assert len(files) > 3
    assert files[-1] == "model.safetensors.index.json"
    index = json.loads((tmp_path / "out" / files[-1]).read_text())
    assert set(index["weight_map"].values()) == set(files[:-1])
    assert same


def _missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _cut(folder: Path) -> None:
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(1000)


def _elsewhere(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')


def _other_files(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "weights.bin"}}')


@pytest.mark.parametrize(
    ("spoil", "changes", "code"),
    [
        (_missing, {}, "FILE_NOT_FOUND"),
        (_cut, {}, "KIND"),
        (_elsewhere, {}, "PATH_ESCAPE"),
        (_other_files, {}, "KIND"),
        (None, {"layers": 3}, "FACTS_DIFFER"),
        (None, {"ffn_hidden": 32}, "FACTS_DIFFER"),
        (None, {"tied": True, "qkv_bias": True}, "FACTS_DIFFER"),
    ],
)
def test_files_that_do_not_fit_are_refused(spoil: Any, changes: dict[str, Any], code: str, tmp_path: Path) -> None:
    """No files, cut ones, lists that leave the folder, other models: refused, and the weights stay."""
    from tests.executor.harness import run_alone
    from tests.executor.workers import exported_in_parts, refused_import

    run_alone(exported_in_parts, make_plan(tiny_llama(family="llama"), micro_batch=8), tmp_path, None)
    if spoil is not None:
        spoil(tmp_path / "out")
    plan = make_plan(tiny_llama(family="llama", **changes), micro_batch=8)
    assert run_alone(refused_import, plan, tmp_path / "out") == (code, True)


@pytest.mark.parametrize(
    "shape", [tiny_mixtral(family="llama"), tiny_llama(family="mixtral-of-others")], ids=["experts", "family"]
)
def test_families_without_names_are_refused(shape: Any) -> None:
    """Where no row says what Hugging Face calls the weights, nothing is guessed."""
    from strategist.executor.weights import entries

    with pytest.raises(StrategistError) as refused:
        entries(shape)
    assert (refused.value.code, refused.value.exit_code) == ("UNSUPPORTED", 3)


ANGLES: dict[str, tuple[dict[str, Any] | None, str, str]] = {
    "base": ({"rope_theta": 500000.0, "rms_norm_eps": 1e-5}, "UNSUPPORTED", "rope_theta 500000,"),
    "new-base": ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, "UNSUPPORTED", "rope_theta 1e+06,"),
    "llama3": ({"rope_scaling": LLAMA3_1, "rms_norm_eps": 1e-5}, "UNSUPPORTED", "scaling llama3 with a factor of 8,"),
    "yarn": ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "UNSUPPORTED", 'rope_type = "yarn"'),
    "partial": ({"partial_rotary_factor": 0.5}, "UNSUPPORTED", "partial_rotary_factor = 0.5"),
    "by-layer": ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "UNSUPPORTED", "rope_parameters = "),
    "norms": ({"rope_theta": 10000.0}, "UNSUPPORTED", "norm_eps 1e-06;"),
    "nonsense": ({"rope_theta": "large"}, "RANGE", 'rope_theta is "large"'),
    "nothing": (None, "FILE_NOT_FOUND", "no config.json"),
}
"""Configurations beside the weights of a Llama, and how a session of the plain built-in model answers."""


def test_weights_of_other_angles_are_refused(tmp_path: Path) -> None:
    """Weights trained with another base, scaling or part of rotary angles, or another epsilon, fit tensor by tensor and would be another
    model: the value is named and nothing changes. Those of the same come in."""
    from tests.executor.harness import run_alone
    from tests.executor.workers import refused_constants

    same = json.dumps({"rope_theta": 10000.0, "rms_norm_eps": 1e-5})
    configs = [None if config is None else json.dumps(config) for config, _, _ in ANGLES.values()]
    plan = make_plan(tiny_llama(family="llama"), micro_batch=8)
    *refused, taken = run_alone(refused_constants, plan, tmp_path, [*configs, same])
    for (code, sentence, stayed), (_, expected, part) in zip(refused, ANGLES.values(), strict=True):
        assert (code, stayed) == (expected, True)
        assert part in sentence
    assert taken == ("", "", False)


def test_constants_travel_with_the_weights(tmp_path: Path) -> None:
    """A checkpoint does not go on under other angles, exported files say theirs, and a config.json that says others is a conflict."""
    from strategist.facts.constants import Constants, RopeScaling
    from tests.executor.harness import run_alone
    from tests.executor.workers import exported_constants

    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64.0)
    own = Constants(rope_theta=500_000.0, rope_scaling=scaling, norm_eps=1e-6)
    plan = make_plan(tiny_llama(family="llama"), micro_batch=8)
    said = run_alone(exported_constants, plan, tmp_path, own, json.dumps({"rope_theta": 10_000.0}))
    assert said == (own, "FACTS_DIFFER", "CONFLICT")


def test_every_scheme_is_judged_by_transformers() -> None:
    """Each scheme of names in the catalogue is one of those that are compared with transformers here."""
    from strategist.catalog import rows
    from strategist.executor.weights import EXPERTS, SCHEMES

    named = {row["family"]: row for row in rows("weight_names")}
    judged = [named[CASES[case][0]] for case in FAMILIES]
    for kind, schemes in (("scheme", SCHEMES), ("experts", EXPERTS)):
        every = {row[kind] for row in named.values() if kind in row}
        assert {row[kind] for row in judged if kind in row} == every == set(schemes)


@pytest.mark.parametrize(
    ("said", "code"), [({"norm_topk_prob": False}, "UNSUPPORTED"), ({}, "UNSUPPORTED"), ({"norm_topk_prob": True}, "")]
)
def test_experts_that_are_weighed_in_another_way_are_refused(said: dict[str, Any], code: str, tmp_path: Path) -> None:
    """Weights of a model whose chosen experts' weights do not add up to one would say something else here: nothing changes."""
    from tests.executor.harness import run_alone
    from tests.executor.workers import exported_in_parts, refused_import

    plan = make_plan(tiny_mixtral(family="olmoe"), micro_batch=8)
    _, same = run_alone(exported_in_parts, plan, tmp_path, None)
    assert same
    (tmp_path / "out" / "config.json").write_text(json.dumps(said))
    changed = code == ""
    assert run_alone(refused_import, plan, tmp_path / "out") == (code, not changed)
