"""What each test proves about a target, and where it is written down."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import RESULTS, circumstances, read, write
from strategist.emitters import EMITTERS
from tests.frameworks.jobs import ALONE, WORDS, trained
from tests.source import PACKAGE

LEVELS = ("trained", "parsed")
"""What tests show, the most first; what is shown by none of them is keys."""

PROOFS = PACKAGE / "emitters/proofs.json"
LOG = "frameworks"
"""The result with every test of every environment's last run."""
PACKAGES = (
    "strategist", "torch", "transformers", "accelerate", "deepspeed", "lightning", "trl", "torchtitan", "ray", "llamafactory",
    "axolotl", "skypilot", "kubeflow-trainer-api", "kubeflow-training", "mosaicml", "llm-foundry", "megatron-core",
    "megatron-bridge", "pyepl",
)  # fmt: skip
"""Whose versions the log has, where they are installed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "write strategist/emitters/proofs.json, and what ran in this environment into benchmarks/results/frameworks.json"
    parser.addoption("--write-proofs", metavar="GROUP", help=words)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "proves(level): what a test shows about the target that it is given")
    config.stash[RAN] = []


@dataclass(frozen=True)
class Ran:
    """A test that ran: its file and name, how it ended, its seconds, and what it shows about which target, if anything."""

    file: str
    test: str
    outcome: str
    seconds: float
    target: str | None = None
    level: str | None = None


RAN: pytest.StashKey[list[Ran]] = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Notes of each test how it ended; one that is skipped or fails proves nothing."""
    report = yield
    if report.when == "call" or not report.passed:
        mark = item.get_closest_marker("proves")
        shows = (item.callspec.params["target"], mark.args[0]) if mark is not None else ()  # type: ignore[attr-defined]
        item.config.stash[RAN].append(
            Ran(item.location[0], item.name, report.outcome, round(report.duration, 1), *shows)
        )
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    group, ran = session.config.getoption("--write-proofs"), session.config.stash[RAN]
    if group:
        about = circumstances(PACKAGES)
        known = json.loads(PROOFS.read_text(encoding="utf-8"))
        PROOFS.write_text(proofs_text(ran, known, f"{about['date']} at {about['commit'][:7]}"), encoding="utf-8")
        before = read(LOG) if (RESULTS / f"{LOG}.json").exists() else {}
        write(LOG, before | {group: about | {"tests": [vars(test) for test in ran]}})


def proofs_text(ran: Sequence[Ran], known: Mapping[str, Any], run: str) -> str:
    """The rows of all targets: anew for those that this run has tests of, as they were for those of other environments."""
    tested = {test.target for test in ran}
    rows = {
        emitter.name: proof_of(emitter.name, ran) | {"run": run}
        if emitter.name in tested or emitter.name not in known
        else known[emitter.name]
        for emitter in EMITTERS
    }
    return json.dumps(rows, indent=1) + "\n"


def proof_of(target: str, ran: Sequence[Ran]) -> dict[str, Any]:
    """The highest level whose tests all passed, in which file they are, and how many they were."""
    for level in LEVELS:
        tests = [test for test in ran if (test.target, test.level) == (target, level)]
        if tests and all(test.outcome == "passed" for test in tests):
            return {"proof": level, "evidence": tests[0].file, "tests": len(tests)}
    return {"proof": "keys", "evidence": "tests/emitters", "tests": 0}


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Frameworks speak through environment variables; what one file sets is gone before the next."""
    before = dict(os.environ)
    yield monkeypatch
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


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
