"""docs/targets.md: every target of `emit` with what it can say, for which versions, and what showed that its files are right."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.record import read
from strategist.emitters import EMITTERS, proofs
from strategist.rulebook.rule import Rule, load_rules

ROOT = Path(__file__).parent.parent
LEVELS = {
    "trained": "two CPU ranks, or nodes of a pretended cluster, trained from the emitted files unchanged",
    "parsed": "code of the framework itself, or of the system that runs the job, accepted every emitted file",
    "keys": "names in the files stand in the framework's sources; nothing of the framework ran",
}
"""What each proof says."""


def targets_page() -> str:
    """The page, from the committed proofs, which `make test-frameworks` alone writes."""
    counts = Counter(proofs()[emitter.name]["proof"] for emitter in EMITTERS)
    levels = "".join(f"| {level} | {counts[level]} | {words} |\n" for level, words in LEVELS.items())
    rows = "".join(_row(emitter.name) for emitter in EMITTERS)
    return (
        "# Targets of emit\n\n"
        f"`strategist emit PLAN --to NAME --out DIR` knows {len(EMITTERS)} targets. Proofs are those of the last run of "
        "`make test-frameworks`; a test that fails or is skipped proves nothing. "
        "The last column has the day and the commit of the run that showed it.\n\n"
        f"| proof | targets | says |\n|---|---|---|\n{levels}\n"
        f"| target | is | axes | versions | proof | shown by | run |\n|---|---|---|---|---|---|---|\n{rows}\n"
        "Every target writes files for a plan or refuses it with the field and the reason ([status.md](status.md) shows which "
        "techniques each takes). `--to torch-launch` is answered with its translation to torchrun: it is an alias of that.\n\n"
        "## Which one\n\n"
        "`plan --frontend auto --purpose WORD` says which target a plan is for and why, and limits no layout; `emit` without `--to` takes it. "
        "The first rule of `rules/frontends.toml` that holds decides, and of its targets the first that can say the plan, or any other.\n\n"
        f"| rule | situation | targets |\n|---|---|---|\n{''.join(map(_choice, load_rules('frontends')))}\n"
        "## What ran\n\n"
        "Every test of each environment's last run, with its seconds and the versions that were installed, stands in "
        f"[frameworks.json](../benchmarks/results/frameworks.json). {_unlogged()}\n\n"
        f"| environment | run | tests | passed | minutes | with |\n|---|---|---|---|---|---|\n{''.join(map(_group, groups()))}"
    )


def _choice(rule: Rule) -> str:
    return f"| {rule.id} | {rule.situation} | {', '.join(f'`{target}`' for target in rule.targets)} |\n"


def groups() -> dict[str, Any]:
    """The log of the last run of each environment, by its name."""
    return read("frameworks")


def _unlogged() -> str:
    """Which proofs are older than the log."""
    logged = {test["target"] for log in groups().values() for test in log["tests"]}
    older = [f"`{emitter.name}`" for emitter in EMITTERS if emitter.name not in logged]
    return f"Proofs of runs before there was a log: {', '.join(older)}." if older else "It has tests of every target."


def _group(name: str) -> str:
    log = groups()[name]
    tests = log["tests"]
    passed = sum(test["outcome"] == "passed" for test in tests)
    minutes = sum(test["seconds"] for test in tests) / 60
    ours = ("python", "strategist")
    versions = ", ".join(
        f"{name} {version}" for name, version in log["versions"].items() if version and name not in ours
    )
    run = f"{log['date']} at {log['commit'][:7]}"
    return f"| {name} | {run} | {len(tests)} | {passed} | {minutes:.1f} | {versions} |\n"


def _row(name: str) -> str:
    emitter = next(emitter for emitter in EMITTERS if emitter.name == name)
    proof = proofs()[name]
    shown = f"[{proof['evidence'].rpartition('/')[2]}](../{proof['evidence']}): {_sentence(proof['evidence'])}"
    return f"| `{name}` | {emitter.title} | {', '.join(emitter.axes)} | {emitter.versions} | {proof['proof']} | {shown} | {proof.get('run', '')} |\n"


@cache
def _sentence(evidence: str) -> str:
    """What the tests of a file show, in its own words; a folder has none."""
    path = ROOT / evidence
    if path.is_dir():
        return "what the files say, read back by other code, is what the plan says."
    return (
        (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n\n")[0].replace("\n", " ")
    )
