"""One suite for every target: it writes files for a plan, or refuses in a sentence that names the field."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

from strategist import StrategistError, emit
from strategist.document.load import plan_from
from strategist.document.plan import Plan
from strategist.emitters import EMITTERS, find_emitter
from strategist.emitters.emitter import Options
from strategist.errors import is_hostile
from tests.emitters.grid import COMMON, outcomes, plan_for, targets, written

NAMES = [emitter.name for emitter in EMITTERS]


@pytest.mark.slow
@pytest.mark.parametrize("target", targets(NAMES))
def test_every_plan_is_written_or_refused(target: str) -> None:
    """No plan ends otherwise; a refusal has exit code 3, a hint, and names the field that cannot be expressed.

    Targets of one or two axes write fewer files than others.
    """
    said = refused = 0
    for _, outcome in outcomes(target).values():
        if isinstance(outcome, StrategistError):
            refused += 1
            assert (outcome.exit_code, bool(outcome.hint)) == (3, True)
            named = re.search(
                r"\b(mesh|strategy|model|workload)\.[a-z_]+|formats|(parameters|reduced in) b?float\d+", outcome.message
            )
            assert named or re.search(r"zero|tp|cp|ep|stages|schedule", outcome.message), outcome.message
        else:
            said += 1
    assert said > (20 if len(find_emitter(target).axes) > 2 else 10)
    assert refused > 20


@pytest.mark.slow
@pytest.mark.parametrize("target", targets(NAMES))
def test_the_plan_lies_beside_the_script(target: str) -> None:
    """plan.json in the output is the plan: it reads back equal, so nothing of it is lost on the way."""
    for plan, outcome in outcomes(target).values():
        if isinstance(outcome, dict):
            assert read(outcome[PurePosixPath("plan.json")]) == plan


@cache
def read(text: str) -> Plan:
    """The plan of a text; most targets have the same."""
    return plan_from(json.loads(text), "plan.json")


@pytest.mark.slow
@pytest.mark.parametrize("target", targets(NAMES))
def test_names_stay_inside_the_folder(target: str) -> None:
    """File names are plain: no folder above, no absolute path, nothing hidden; scripts that run are among them."""
    names = {name for _, outcome in outcomes(target).values() if isinstance(outcome, dict) for name in outcome}
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*\.[a-z]+", str(name)) for name in names)
    assert set(find_emitter(target).executables) <= {str(name) for name in names}


@pytest.mark.parametrize("target", targets(NAMES))
def test_texts_are_clean(target: str) -> None:
    """Every text ends in one line break and holds no character that steers a terminal; Python compiles."""
    seen: set[str] = set()
    for _, outcome in outcomes(target).values():
        for name, text in outcome.items() if isinstance(outcome, dict) else ():
            if text not in seen and name.suffix != ".json":
                seen.add(text)
                assert text.endswith("\n")
                assert not [c for c in text if is_hostile(c) and c != "\n"]
                assert name.suffix != ".py" or ast.parse(text)
    assert seen


@pytest.mark.slow
@pytest.mark.parametrize("target", NAMES)
def test_equal_plans_have_equal_files(target: str) -> None:
    """The same plan and options give the same bytes."""
    options = Options(job_name="a", env=(("NCCL_DEBUG", "INFO"),))
    plan, _ = next(written(target))
    assert emit(plan, target, options) == emit(deepcopy(plan), target, options)


@pytest.mark.parametrize("target", targets(NAMES))
def test_scripts_are_right_for_the_shell(target: str, tmp_path: Path) -> None:
    """bash finds no fault in any script, and neither does shellcheck where it is installed."""
    scripts = {
        text
        for _, outcome in outcomes(target).values()
        for name, text in (outcome.items() if isinstance(outcome, dict) else ())
        if str(name) in find_emitter(target).executables
    }
    checkers = [["bash", "-n"], *([["shellcheck", "--severity=warning"]] if shutil.which("shellcheck") else [])]
    paths = []
    for number, text in enumerate(sorted(scripts)):
        paths.append(tmp_path / f"{number}.sh")
        paths[-1].write_text(text, encoding="utf-8")
    for checker in checkers:
        for path in paths if checker[0] == "bash" else [paths[0]]:
            done = subprocess.run([*checker, str(path)], capture_output=True, text=True, check=False, timeout=30)
            assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_unequal_nodes_are_refused() -> None:
    """Launchers start equally many processes everywhere, so nodes that differ are refused by every target."""
    plan = plan_for(dp_replicate=3, **COMMON)
    group = plan.cluster.groups[0]
    groups = tuple(replace(group, node=replace(group.node, gpus=gpus, fast_domain=gpus)) for gpus in (1, 2))
    unequal = replace(plan, cluster=replace(plan.cluster, groups=groups))
    for target in NAMES:
        with pytest.raises(StrategistError, match="equally many"):
            emit(unequal, target)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (Options(job_name="x\n#SBATCH --partition=gold"), "CONTROL_CHAR"),
        (Options(job_name="$(touch canary)"), "NAME"),
        (Options(job_name=""), "EMPTY"),
        (Options(master_addr='"; touch canary; "'), "HOSTNAME"),
        (Options(master_addr="$(touch canary)"), "HOSTNAME"),
        (Options(master_port=80), "RANGE"),
        (Options(env=(("A;touch canary", "1"),)), "NAME"),
        (Options(env=(("A", "1\n2"),)), "CONTROL_CHAR"),
        (Options(env=(("A", "1"), ("A", "2"))), "DUPLICATE_KEY"),
        (Options(env=(("A", "x" * 5000),)), "PARSE"),
        (Options(nvme_path='/x"; touch canary; "'), "NAME"),
        (Options(nvme_path="/x/../y"), "NAME"),
        (Options(nvme_path="relative"), "NAME"),
        (Options(nvme_path="/x\ny"), "CONTROL_CHAR"),
        (Options(zeropp=('hpz"; touch canary; "',)), "CHOICE"),
    ],
)
@pytest.mark.parametrize("target", NAMES)
def test_python_callers_pass_the_same_door(target: str, options: Options, code: str) -> None:
    """A value that the command line refuses is refused from Python too."""
    with pytest.raises(StrategistError) as refused:
        emit(plan_for(), target, options)
    assert refused.value.code == code
