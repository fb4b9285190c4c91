"""What each test proves about a target, and where it is written down."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from strategist.emitters import EMITTERS
from tests.source import PACKAGE

LEVELS = ("keys", "parsed", "trained")
"""From what is least proven to what is most."""

PROOFS = PACKAGE / "emitters/proofs.json"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-proofs", action="store_true", help="write strategist/emitters/proofs.json")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "proves(level): what a test shows about the target that it is given")
    config.stash[OUTCOMES] = defaultdict(list)


OUTCOMES: pytest.StashKey[dict[tuple[str, str], list[bool]]] = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Notes for each target and level whether its tests passed; one that is skipped or fails proves nothing."""
    report = yield
    mark = item.get_closest_marker("proves")
    if mark is not None and (report.when == "call" or not report.passed):
        target = item.callspec.params["target"]  # type: ignore[attr-defined]
        item.config.stash[OUTCOMES][target, mark.args[0]].append(report.passed)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--write-proofs"):
        PROOFS.write_text(proofs_text(session.config.stash[OUTCOMES]), encoding="utf-8")


def proofs_text(outcomes: dict[tuple[str, str], list[bool]]) -> str:
    """The highest level of each target whose tests all passed, and how many they were."""
    rows = {}
    for emitter in EMITTERS:
        passed = [
            level for level in LEVELS if outcomes.get((emitter.name, level)) and all(outcomes[emitter.name, level])
        ]
        level = passed[-1] if passed else "keys"
        where = f"tests/frameworks/test_{level}.py" if passed else "tests/emitters"
        rows[emitter.name] = {"proof": level, "evidence": where, "tests": len(outcomes.get((emitter.name, level), ()))}
    return json.dumps(rows, indent=1) + "\n"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a Llama of 2 layers that trains in milliseconds."""
    folder = tmp_path_factory.mktemp("model")
    configuration = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
        "max_position_embeddings": 64, "initializer_range": 0.2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(configuration), encoding="utf-8")
    return folder
