"""`plan --verify`: formulas choose, the trace of the real program judges, and nothing of it happens in silence."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import strategist
from strategist import load_plan
from strategist.api import plan_for
from strategist.ask import Asked, Given, complete
from strategist.document.estimate import MemoryTerm
from strategist.document.load import plan_from
from strategist.document.observed import MomentBytes, Observed, ObservedMemory, RankObservation
from strategist.document.plan import Plan
from strategist.document.write import as_document, dump, seal_state
from strategist.errors import NoPlanError
from strategist.planner.check import faults
from strategist.planner.predict import layout_of
from strategist.planner.recommend import recommend
from strategist.verify import TRIES, fits, traced_ledger, verified, without
from tests.cli.harness import SMALL, completed, plan_file, process
from tests.executor.harness import run_alone

QUESTION = ("--model", "llama-debug", "--hardware", "cpu:2", "--seq-len", "32", "--pin", "pp=2")


def _asked(**changes: Any) -> Asked:
    return complete(Given(**{"model": "llama-debug", "hardware": "cpu:4", "seq_len": 32} | changes))


def _seen(stage: int, moment: str, reserved: int, **sizes: int) -> RankObservation:
    terms = tuple(MemoryTerm(name, size, "traced") for name, size in sizes.items())
    peak = MomentBytes(moment=moment, module="", during="backward", operator="aten::mm", terms=terms)
    memory = ObservedMemory(moments=(peak,), modules=(), reserved=reserved, reserved_basis="modelled")
    return RankObservation(
        kind=f"stage {stage}", rank=stage, stage=stage, memory=memory, collectives=(), tiers=(), operators=(),
        substitutions=(), seconds=0.0, process_bytes=0,
    )  # fmt: skip


def test_traced_stages_replace_predicted_ones_and_the_sums_hold() -> None:
    """Bytes of tensors are the trace's, slack is what is reserved beyond them, runtime stays; the worst stage is the peak."""
    plan = plan_for(_asked(pin="pp=4"))
    sizes = {"activations": 7 * 10**9, "parameters": 10**9}
    rank = _seen(2, "loss", 9 * 10**9, **sizes)
    seen = Observed(made_by="tests", rung="traced", plan="", torch="2", model="m", ranks=(rank,))
    ledger = traced_ledger(plan.memory, seen)
    judged = replace(plan, memory=ledger)
    assert faults(judged) == ()
    stage, before = ledger.stages[2], plan.memory.stages[2]
    assert ledger.worst is stage
    assert stage.allocated == sum(sizes.values())
    assert (stage.reserved, stage.term("runtime")) == (9 * 10**9, before.term("runtime"))
    assert {term.name: term.basis for term in stage.terms} == {
        "activations": "traced", "parameters": "traced", "slack": "derived", "runtime": "assumed",
    }  # fmt: skip
    assert (ledger.peak.value, ledger.peak.basis) == (stage.device, "traced")
    assert ledger.peak.low < ledger.peak.value < ledger.peak.high
    assert [ledger.stages[i] for i in (0, 1, 3)] == [plan.memory.stages[i] for i in (0, 1, 3)]


def test_a_layout_that_is_ruled_out_is_gone_and_no_other() -> None:
    """Without the chosen layout the next is another one, one candidate fewer is looked at, and it is never faster."""
    asked = _asked(policy="fastest")
    first = plan_for(asked)
    second = plan_for(without(asked, first))
    assert layout_of(first) != layout_of(second)
    assert first.time.step_ns <= second.time.step_ns
    from strategist.planner.search import search

    counts = [search(question).enumerated for question in (asked.question, without(asked, first).question)]
    assert counts[0] - counts[1] == 1
    assert layout_of(recommend(without(without(asked, first), second).question, asked.request)) not in {
        layout_of(first), layout_of(second),
    }  # fmt: skip


def test_a_seal_from_before_there_was_a_verification_is_whole(tmp_path: Path) -> None:
    """The field is signed only where it says something: an older document without it keeps its seal."""
    path = Path(plan_file(tmp_path, *SMALL))
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document.pop("verification") is None
    assert seal_state(plan_from(document, "PLAN")) == "sealed"
    plan = load_plan(str(path))
    told = replace(plan, verification=strategist.document.verification.Verification(torch="2", ranks=(), predicted=(), layouts=()))  # fmt: skip
    assert seal_state(told) == "edited"


def test_another_framework_is_not_verified() -> None:
    """The trace is of our own executor; asking for another's plans beside it is a contradiction, told before any work."""
    ran = process("plan", "--verify", "--frontend", "deepspeed", "--json", *QUESTION)
    assert (ran.code, ran.error["code"], ran.error["flag"]) == (2, "E_CONFLICT", "--verify")


@pytest.mark.slow
def test_without_torch_there_is_a_sentence() -> None:
    """A machine without torch is told what to install; plans without --verify need none."""
    words = ["plan", *QUESTION, "--json"]
    program = "import sys; sys.modules['torch'] = None; from strategist.cli import main; sys.exit(main({}))"
    refused = completed((sys.executable, "-c", program.format([*words, "--verify"])))
    assert (refused.code, refused.error["code"]) == (2, "E_MISSING")
    assert "strategist[run]" in refused.error["hint"]
    assert completed((sys.executable, "-c", program.format(words))).code == 0


def test_a_layout_without_a_program_is_impossible_and_leaves_nothing(tmp_path: Path) -> None:
    """Tiled matrices beside selective recompute can be planned and not traced: exit 3, the way out, and no file."""
    tiled = "offload=parameters,tiling=8,recompute=selective"
    question = ("--model", "llama-3.2-1b", "--hardware", "dgx-h100", "--pin", tiled)
    ran = process("plan", "--verify", "--json", "--out", "plan.json", *question, cwd=tmp_path)
    assert (ran.code, ran.error["code"]) == (3, "E_UNSUPPORTED")
    assert "--verify" in ran.error["hint"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_verified_plan_holds_traced_bytes_with_predicted_ones_beside_them(tmp_path: Path) -> None:
    """The document is sealed and sound; its tensors' bytes are the trace's, stage by stage, the formulas' are kept."""
    ran = process("plan", "--verify", "--out", "plan.json", "--json", *QUESTION, cwd=tmp_path)
    assert ran.code == 0, ran.out
    assert ran.err == ""
    plan, plain = load_plan(str(tmp_path / "plan.json")), plan_for(_asked(hardware="cpu:2", pin="pp=2"))
    assert plan_from(ran.document, "PLAN") == plan
    assert seal_state(plan) == "sealed"
    assert faults(plan) == ()
    account = plan.verification
    assert account is not None
    assert account.predicted == plain.memory.stages
    assert [each.role for each in account.layouts] == ["chosen", "runner-up"]
    assert account.layouts[0].layout == layout_of(plan) != account.layouts[1].layout
    traced = run_alone(strategist.trace, plan, timeout_s=120.0)
    for rank in traced.ranks:
        stage = plan.memory.stages[rank.stage]
        assert stage.is_traced
        assert stage.allocated == rank.memory.peak.allocated
        assert stage.moment == rank.memory.peak.moment
    shown = process("explain", "plan.json", "--json", cwd=tmp_path).document["tree"]["children"][1]
    worst = plan.memory.worst
    assert shown["predicted"] == account.predicted_of(worst.stage).device
    assert shown["observed"] == [worst.device]
    words = process("explain", "plan.json", cwd=tmp_path).out
    assert "traced" in words
    assert "runner-up" in words
    report = process("plan", "--verify", *QUESTION, cwd=tmp_path)
    assert "traced  predicted" in report.out
    assert "tracing pp=2" in report.err
    again = process("plan", "--verify", "--quiet", *QUESTION, cwd=tmp_path)
    assert (again.out, again.err) == ("", "")


@pytest.mark.slow
def test_python_and_the_command_line_verify_alike() -> None:
    """`recommend(verify=True)` gives the very memory and account that the command line writes."""
    made: Plan = run_alone(_recommended, timeout_s=120.0)
    written = plan_from(process("plan", "--verify", "--json", *QUESTION).document, "PLAN")
    assert made.verification == written.verification
    assert as_document(made.memory) == as_document(written.memory)


def _recommended() -> Plan:
    return strategist.recommend("llama-debug", "cpu:2", seq_len=32, pin="pp=2", verify=True)


@pytest.mark.slow
def test_a_winner_that_is_traced_not_to_fit_gives_way_and_is_named() -> None:
    """With one byte less than its trace takes, the winner is ruled out and said to be; the next that fits is taken."""
    first, taken = run_alone(_pressed, timeout_s=300.0)
    assert layout_of(taken) != layout_of(first)
    account = taken.verification
    ruled_out = [each for each in account.layouts if each.role == "ruled out"]
    assert ruled_out[0].layout == layout_of(first)
    assert ruled_out[0].traced_bytes == first.memory.worst.device > taken.memory.worst.device
    assert [hint.code for hint in taken.hints].count("W_TRACED_MISFIT") == len(ruled_out)
    assert any(layout_of(first) in hint.sentence for hint in taken.hints if hint.code == "W_TRACED_MISFIT")
    assert {refusal.example for refusal in taken.refusals if refusal.rule == "trace"} == {e.layout for e in ruled_out}
    assert fits(taken)
    assert faults(taken) == ()
    assert dump(taken)


def _pressed() -> tuple[Plan, Plan]:
    asked = _asked(hardware="cpu:2", pin="dp_shard=2")
    first = verified(asked, plan_for)

    def tighter(question: Asked) -> Plan:
        plan = plan_for(question)
        return replace(plan, memory=replace(plan.memory, usable_bytes=first.memory.worst.device - 1))

    return first, verified(asked, tighter)


@pytest.mark.slow
def test_when_nothing_is_traced_to_fit_all_of_it_is_told() -> None:
    """After a bounded number of layouts there is no plan but the account of each: what was predicted, what was traced."""
    code, chain = run_alone(_hopeless, timeout_s=300.0)
    assert code == 3
    assert len(chain) == TRIES + 1
    assert all("predicted" in link and "traced" in link for link in chain[:TRIES])


def _hopeless() -> tuple[int, tuple[str, ...]]:
    def hopeless(question: Asked) -> Plan:
        plan = plan_for(question)
        return replace(plan, memory=replace(plan.memory, usable_bytes=1))

    with pytest.raises(NoPlanError) as refusal:
        verified(_asked(hardware="cpu:2", seq_len=8, global_batch=16), hopeless)
    return refusal.value.exit_code, refusal.value.chain
