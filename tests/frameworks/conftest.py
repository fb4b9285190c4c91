"""What each test proves about a target, and where it is written down."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from strategist.emitters import EMITTERS
from tests.frameworks.jobs import ALONE, WORDS, trained
from tests.source import PACKAGE, ROOT

LEVELS = ("keys", "parsed", "trained")
"""From what is least proven to what is most."""

PROOFS = PACKAGE / "emitters/proofs.json"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-proofs", action="store_true", help="write strategist/emitters/proofs.json")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "proves(level): what a test shows about the target that it is given")
    config.stash[OUTCOMES] = defaultdict(list)


Outcomes = dict[tuple[str, str], list[tuple[str, bool]]]
"""The file of each test of a target and a level, and whether it passed."""

OUTCOMES: pytest.StashKey[Outcomes] = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Notes for each target and level whether its tests passed; one that is skipped or fails proves nothing."""
    report = yield
    mark = item.get_closest_marker("proves")
    if mark is not None and (report.when == "call" or not report.passed):
        target = item.callspec.params["target"]  # type: ignore[attr-defined]
        item.config.stash[OUTCOMES][target, mark.args[0]].append((item.location[0], report.passed))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--write-proofs"):
        known = json.loads(PROOFS.read_text(encoding="utf-8"))
        PROOFS.write_text(proofs_text(session.config.stash[OUTCOMES], known, this_run()), encoding="utf-8")


def this_run() -> str:
    """The day of this run, and the commit of the tree that it looks at."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return f"{datetime.now(UTC).date()} at {commit}"


def proofs_text(outcomes: Outcomes, known: Mapping[str, Any], run: str) -> str:
    """The rows of all targets: anew for those that this run has tests of, as they were for those of other environments."""
    tested = {target for target, _ in outcomes}
    rows = {
        emitter.name: known[emitter.name]
        if emitter.name in set(known) - tested
        else proof_of(emitter.name, outcomes) | ({"run": run} if emitter.name in tested else {})
        for emitter in EMITTERS
    }
    return json.dumps(rows, indent=1) + "\n"


def proof_of(target: str, outcomes: Outcomes) -> dict[str, Any]:
    """The highest level whose tests all passed, in which files they are, and how many they were."""
    passed = [level for level in LEVELS if outcomes.get((target, level)) and all_passed(outcomes[target, level])]
    if not passed:
        return {"proof": "keys", "evidence": "tests/emitters", "tests": 0}
    tests = outcomes[target, passed[-1]]
    return {"proof": passed[-1], "evidence": tests[0][0], "tests": len(tests)}


def all_passed(tests: list[tuple[str, bool]]) -> bool:
    """Whether nothing failed or was skipped."""
    return all(passed for _, passed in tests)


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


@pytest.fixture(scope="session")
def losses_of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What the job on strategist's executor prints when torchrun starts one rank."""
    return trained(tmp_path_factory.mktemp("alone"), "torchrun", ALONE, WORDS)


@pytest.fixture(scope="session")
def tokenizer_files() -> dict[str, str]:
    """A tokenizer of 64 words, for front ends that do not start without one."""
    words = {f"w{number}": number for number in range(62)} | {"<eos>": 62, "<pad>": 63}
    tokenizer = {
        "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None, "decoder": None, "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "w0",
    }
    return {"tokenizer.json": json.dumps(tokenizer), "tokenizer_config.json": json.dumps(settings)}
