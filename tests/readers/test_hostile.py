"""Files from strangers: whatever stands in them, they are judged or refused, nothing runs and nothing steers a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from strategist.catalog import rows
from strategist.errors import StrategistError, is_hostile
from strategist.judging import judge
from tests.cli.harness import call
from tests.examples import examples
from tests.readers.test_as_written import ARGUMENTS
from tests.readers.test_traps import MEGATRON, SOUND, TITAN

KEYS = sorted({key for row in rows("framework_keys") for key in row["keys"] if not key.startswith("--")})
SECTIONS = ["zero_optimization", "fsdp_config", "parallelism_config", "deepspeed_config", "pipeline", "bf16", "flags"]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from([*KEYS, "x"]), inner, max_size=3),
    max_leaves=6,
)
SIGNS = st.sampled_from(
    ["train_batch_size", "distributed_type", "per_device_train_batch_size", "zero_optimization", "flags"]
)


@pytest.mark.slow
@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from([*KEYS, *SECTIONS, "bad key"]), VALUES, max_size=6), SIGNS, VALUES)
def test_any_table_is_judged_or_refused(tmp_path: Path, table: dict[str, Any], sign: str, value: Any) -> None:
    """A table of any keys and values ends in a judgement or in an error of ours."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**table, sign: value}), encoding="utf-8")
    try:
        found = judge(str(path))
    except StrategistError:
        return
    assert all(fault.sentence and fault.fix for fault in found.findings)


@pytest.mark.slow
@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([MEGATRON, TITAN, SOUND["job.sbatch"], f"accelerate launch --use_fsdp {ARGUMENTS}"]),
    st.text(max_size=12),
    st.integers(0, 300),
)
def test_any_script_is_judged_or_refused(tmp_path: Path, text: str, piece: str, place: int) -> None:
    """A launch script with anything put in anywhere ends in a judgement or in an error of ours."""
    path = tmp_path / "run.sh"
    path.write_text(text[:place] + piece.replace("\\ud800", "") + text[place:], encoding="utf-8", errors="replace")
    try:
        found = judge(str(path))
    except StrategistError:
        return
    assert all(fault.sentence and fault.fix for fault in found.findings)


@pytest.mark.parametrize("name", ["$(touch canary)", "`touch canary`", "a;touch canary", "\x1b[2J", "é∑", "x" * 300])
def test_hostile_words_are_shown_safely(name: str, tmp_path: Path) -> None:
    """A key or a word that a shell or a terminal would act on is printed harmlessly, and nothing of it runs."""
    table, script = tmp_path / "d.json", tmp_path / "m.sh"
    table.write_text(json.dumps({"train_batch_size": 8, name: 1, "zero_optimization": {name: 1}}), encoding="utf-8")
    script.write_text(f"{MEGATRON} '--{name}' 1 --num-layers $(touch canary)\n", encoding="utf-8")
    for path in (table, script):
        done = call("validate", str(path))
        assert done.code == (5 if path == table else 0)  # arguments of the program's own are a warning
        assert not [c for c in done.out + done.err if is_hostile(c) and c != "\n"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.json", "m.sh"]
