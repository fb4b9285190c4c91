"""Whatever is typed or written into a file: a Plan or one of our errors, never a traceback and never our own fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from strategist.cli.flags import PLAN_FLAGS
from tests.cli.bad_inputs import FLAT, LLAMA, written
from tests.cli.fuzzing import cases
from tests.cli.harness import Outcome, call, plan_text

ENDS = (0, 2, 3, 4)
"""Done, bad input, impossible, stale. 1 would be our fault."""

VALUED = [flag.name for flag in PLAN_FLAGS if flag.metavar and flag.key != "out"]
PIECES = (
    "7B", "7", "-1", "0", "1e400", "nan", "inf", "tp=", "=", ",", "pp=2", "zero=3", "recompute=full", "dp=4", "h100", "a100",
    "dgx-h100", ":", "2", "cpu", "local", "/", ".", "..", "llama", "-8b", "x", "GiB", "GB/s", "Gb/s", "\x00", "\x1b[2J",
    "\u202e", "\ud800", "é", "９", " ", "\n", "'", '"', "$(", "`", "{", "}", "[", "]", "_", "0x", ".json", ".yaml", "~",
)  # fmt: skip
TYPED = st.lists(st.sampled_from(PIECES), max_size=6).map("".join) | st.text(max_size=40)


def assert_ours(ran: Outcome) -> None:
    """One document on stdout, an exit code for users, and an error of the closed list when it is not 0."""
    assert ran.code in ENDS, ran.out
    if ran.code:
        assert ran.error["code"].startswith("E_")
    assert "Traceback" not in ran.out + ran.err


@cases(40)
@given(st.dictionaries(st.sampled_from(VALUED), TYPED, min_size=1, max_size=4))
def test_any_value_of_any_flag(said: dict[str, str]) -> None:
    """No value of any flag of `plan` ends in a fault of ours."""
    words = [f"{flag}={value}" for flag, value in said.items()]
    base = [] if {"--model", "--model-size", "--model-config"} & said.keys() else ["--model=llama-debug"]
    assert_ours(call("plan", "--json", *base, *words))


@cases(50)
@given(
    st.lists(
        TYPED | st.sampled_from(("plan", "emit", "check", "--json", "--pin", "--", "--help", "-h", "--to")), max_size=5
    )
)
def test_any_words(words: list[str]) -> None:
    """No sequence of words ends in a fault of ours; a command line without a command is a question for help."""
    ran = call(*(word for word in words if not word.startswith("--out")))
    assert ran.code in ENDS, ran.err
    assert "Traceback" not in ran.out + ran.err


@cases(50)
@given(st.sampled_from(("--job-name", "--master-addr", "--master-port", "--env")), TYPED)
def test_any_value_of_emit(flag: str, value: str) -> None:
    """No value of a flag of `emit` ends in a fault of ours; without a plan nothing is written."""
    assert_ours(call("emit", "--json", "missing.json", "--to", "slurm", "--out", "missing", flag, value))


SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | TYPED
    | st.sampled_from(("h100-sxm-80gb", "80GiB", "450GB/s", 8, 1, 0, -1, 2**40, "nvlink", "gpu0", "node0"))
)  # fmt: skip
HARDWARE_KEYS = ("nodes", "gpu", "gpus", "gpu_count", "count", "links", "a", "b", "kind", "bw", "switches", "name",
                 "memory", "memory_bw", "bf16_TFLOPs", "inter_bw", "intra_bw", "format", "topology", "nics", "rdma")  # fmt: skip
CONFIG_KEYS = (*LLAMA, "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "text_config", "n_layer",
               "layer_types", "sliding_window", "quantization_config", "d_model", "architectures")  # fmt: skip


def documents(keys: tuple[str, ...]) -> st.SearchStrategy[Any]:
    """JSON values whose objects use words that a reader knows."""
    names = st.sampled_from(keys) | st.text(max_size=5)
    return st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=5), max_leaves=20
    )


def objects(keys: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects at the top."""
    return st.dictionaries(st.sampled_from(keys), documents(keys), max_size=6)


@pytest.mark.slow
@cases(40)
@given(objects(HARDWARE_KEYS), st.sampled_from(("json", "yaml")))
def test_any_hardware_file(tmp_path: Path, value: dict[str, Any], ending: str) -> None:
    """No hardware file ends in a fault of ours, alone or laid over a good one."""
    for document in (value, {**json.loads(FLAT), **value}):
        text = json.dumps(document) if ending == "json" else yaml.safe_dump(document)
        file = written(tmp_path, f"hardware.{ending}", text.encode("utf-8", "replace"))
        assert_ours(call("topology", "--json", "--hardware", file))
        assert_ours(call("plan", "--json", "--model", "llama-debug", "--hardware", file))


@cases(40)
@given(objects(CONFIG_KEYS), st.sampled_from(("llama", "mixtral", "deepseek_v3", "gpt2", "t5", "qwen2_vl", "clip")))
def test_any_configuration(tmp_path: Path, value: dict[str, Any], model_type: str) -> None:
    """No config.json ends in a fault of ours, alone or laid over a good one."""
    for document in ({"model_type": model_type, **value}, {**LLAMA, **value, "model_type": model_type}):
        file = written(tmp_path, "config.json", json.dumps(document).encode("utf-8", "replace"))
        assert_ours(call("plan", "--json", "--hardware", "dgx-h100", "--model-config", file))


@cases(50)
@given(st.text() | st.binary(), st.sampled_from(("json", "yaml", "toml", "txt")))
def test_any_bytes(tmp_path: Path, content: str | bytes, ending: str) -> None:
    """No bytes at all end in a fault of ours, wherever a file is read."""
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    file = written(tmp_path, f"file.{ending}", data)
    for words in (
        ("topology", "--hardware", file),
        ("plan", "--model-config", file),
        ("plan", "--model", "llama-debug", "--config", file),
        ("explain", file),
        ("check", file),
        ("run", file),
    ):
        assert_ours(call(words[0], "--json", *words[1:]))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value, the branches included."""
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in pairs:
        yield from places(child, (*path, key))


PIPELINE = ("--model", "llama-2-7b", "--hardware", "dgx-h100:2", "--pin", "pp=2,zero=3", "--tokens", "1T")
EXPERTS = ("--model", "mixtral-8x7b", "--hardware", "dgx-h100:2", "--pin", "ep=8")


@st.deferred
def spots() -> st.SearchStrategy[tuple[str, tuple[Any, ...]]]:
    """Every place in a plan of many stages and in one with experts."""
    texts = (plan_text(*PIPELINE), plan_text(*EXPERTS))
    return st.sampled_from([(text, place) for text in texts for place in places(json.loads(text)) if place])


@pytest.mark.slow
@cases(100)
@given(spots, SCALARS | documents(("mesh", "pp", "layers")))
def test_any_edited_plan(tmp_path: Path, spot: tuple[str, tuple[Any, ...]], value: Any) -> None:
    """A plan with one value replaced by anything is read and judged, or refused: by explain, check, emit and run."""
    text, (*branches, last) = spot
    plan = json.loads(text)
    parent = plan
    for key in branches:
        parent = parent[key]
    parent[last] = value
    file = written(tmp_path, "plan.json", json.dumps(plan).encode("utf-8", "replace"))
    assert_ours(call("explain", "--json", file))
    assert call("explain", file).code in ENDS
    assert_ours(call("check", "--json", file))
    assert_ours(call("emit", "--json", file, "--to", "slurm", "--out", str(tmp_path / "job"), "--force"))
    assert_ours(call("run", "--json", file, "--allow-edited"))


def test_a_policy_whose_steps_take_no_time_is_refused(tmp_path: Path) -> None:
    """Nothing can be so many times faster than that, and no sentence says it."""
    plan = json.loads(plan_text(*EXPERTS))
    plan["decision"]["difference"] = 0
    done = call("explain", "--json", written(tmp_path, "plan.json", json.dumps(plan).encode()))
    assert_ours(done)
    assert json.loads(done.out)["error"]["code"] == "E_RANGE"


@pytest.mark.parametrize("text", ["[rule]\nid = 1", "[[rule]]\nid = 1\nwhen = 2", "rule = 3", "[[rule]]\n", "x"])
def test_bad_rule_folders(tmp_path: Path, text: str) -> None:
    """A folder of broken rules is refused wherever it is given."""
    written(tmp_path, "legality.toml", text)
    assert_ours(call("plan", "--json", "--model", "llama-debug", "--rules", str(tmp_path)))
    assert call("rule", "--json", "--rules", str(tmp_path)).code == 2
