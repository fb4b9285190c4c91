"""Plans as files: sealed, edited, hand-written, checked, explained, refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from strategist.document.load import load_plan, plan_from
from strategist.document.write import dump, seal_state
from strategist.errors import StrategistError
from strategist.planner.check import faults
from tests.cli.bad_inputs import written
from tests.cli.harness import SMALL, call, hand_written, plan_file, plan_text, process

QUESTIONS = (
    SMALL,
    ("--model-size", "7B"),
    ("--model", "mixtral-8x7b", "--hardware", "dgx-h100:4", "--pin", "ep=8", "--tokens", "1T"),
    ("--model", "llama-3.1-8b", "--hardware", "dgx-a100-80gb:4", "--pin", "pp=4,virtual_stages=2"),
    ("--model", "gpt2-xl", "--gpu", "rtx-3090", "--gpus-per-node", "1", "--price-per-gpu-hour", "2"),
    ("--model", "llama-debug", "--hardware", "cpu:4", "--headroom", "0"),
    ("--model", "bert-large-uncased", "--gpu", "mi300x"),
    ("--model", "llama-2-7b", "--hardware", "dgx-h100", "--pin", "pp=4", "--policy", "fastest", "--also", "zb_h1,zbv"),
)  # fmt: skip


@pytest.mark.parametrize(("difference", "code"), [(0, "RANGE"), (-1, "NEGATIVE"), (1e-9, None)])
def test_a_difference_that_divides_by_nothing_is_refused(difference: float, code: str | None) -> None:
    """The other policy's step over the chosen one's is above 0: whoever reads a plan divides by it."""
    document = json.loads(plan_text(*SMALL))
    document["decision"]["difference"] = difference
    if code is None:
        assert plan_from(document, "PLAN").decision.difference == difference
        return
    with pytest.raises(StrategistError) as refused:
        plan_from(document, "PLAN")
    assert refused.value.code == code


@pytest.mark.parametrize("question", QUESTIONS, ids=" ".join)
def test_a_written_plan_reads_back_the_same(question: tuple[str, ...], tmp_path: Path) -> None:
    """A plan that is read has an intact seal and is written again byte for byte."""
    plan = load_plan(plan_file(tmp_path, *question))
    assert seal_state(plan) == "sealed"
    assert dump(plan) == plan_text(*question)


@pytest.mark.parametrize("question", QUESTIONS, ids=" ".join)
def test_the_schema_accepts_a_written_plan(question: tuple[str, ...]) -> None:
    """An independent validator finds no fault in a plan by the schema that `schema` prints."""
    assert list(jsonschema.Draft202012Validator(schema()).iter_errors(json.loads(plan_text(*question)))) == []


@cache
def schema() -> Any:
    """The schema that `schema` prints."""
    return call("schema").document


@pytest.mark.parametrize(
    "spoil",
    [
        lambda plan: plan.pop("mesh"),
        lambda plan: plan["mesh"].update(pp="2"),
        lambda plan: plan["strategy"].update(schedule="zigzag"),
        lambda plan: plan.update(format="strategist-plan/2"),
    ],
)
def test_the_schema_refuses_what_is_no_plan(spoil: Callable[[dict[str, Any]], Any]) -> None:
    """A missing part, a wrong type, an unknown word and another version fail the schema."""
    plan = json.loads(plan_text(*SMALL))
    spoil(plan)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(plan, schema())


def edited(folder: Path, change: Callable[[dict[str, Any]], Any], *question: str) -> str:
    """A sealed plan with a change made by hand."""
    plan = json.loads(plan_text(*(question or SMALL)))
    change(plan)
    return written(folder, "edited.json", json.dumps(plan))


def rename(plan: dict[str, Any]) -> None:
    """A change that leaves the plan sound."""
    plan["made_by"] = "somebody"


def test_a_sealed_plan_is_sound(tmp_path: Path) -> None:
    """check says so, and --seal leaves the file as it is."""
    path = plan_file(tmp_path)
    assert call("check", path).out == "The plan is sound; seal: sealed.\n"
    assert call("check", "--seal", "--json", path).document == {"sound": True, "seal": "sealed"}
    assert Path(path).read_text(encoding="utf-8") == plan_text(*SMALL)


@pytest.mark.parametrize("frontend", ["", "megatrom"])
def test_a_front_end_that_nobody_knows_is_refused(frontend: str, tmp_path: Path) -> None:
    """Rules ask what runs a plan's job: check names the word that no catalogue row has."""
    done = call("check", "--json", edited(tmp_path, lambda plan: plan["request"].update(frontend=frontend)))
    assert (done.code, done.document["error"]["code"]) == (2, "E_CHOICE")
    assert f"no front end {frontend!r}" in done.document["error"]["message"]


def test_figures_of_another_layout_are_told(tmp_path: Path) -> None:
    """check prices the layout again: who edits the batch of a plan is told what it needs now, sealed or not."""
    path = plan_file(tmp_path)

    def divide_otherwise(plan: dict[str, Any]) -> None:
        each = plan["strategy"]["micro_batch"] * plan["strategy"]["accumulation"]
        micro = 1 if plan["strategy"]["micro_batch"] > 1 else each
        plan["strategy"] |= {"micro_batch": micro, "accumulation": each // micro}

    assert "predicted" not in call("check", "--json", path).document
    other = edited(tmp_path, divide_otherwise)
    ran = call("check", "--seal", "--json", other)
    due = call("predict", other, "--json").document
    assert ran.document["predicted"]["device_bytes"] == due["memory"]["peak"]["value"]
    assert ran.document["predicted"]["step_ns"] == sum(term["exposed_ns"] for term in due["time"]["terms"])
    assert "figures" in call("check", other).out


def test_an_edited_plan(tmp_path: Path) -> None:
    """explain says that the seal is broken, check and run refuse with 4, and --seal signs the plan again."""
    path = edited(tmp_path, rename)
    assert "BROKEN" in call("explain", path).out
    assert call("explain", "--json", path).document["seal"] == "edited"
    for name in ("check", "run"):
        ran = call(name, "--json", path)
        assert (ran.code, ran.error["code"]) == (4, "E_DIGEST")
    assert call("check", "--seal", path).code == 0
    assert "intact" in call("explain", path).out


def test_no_figure_can_be_edited_unseen() -> None:
    """Whatever number, word or switch of a sealed plan is changed, checking it no longer passes: either the document is
    no plan any more, or an invariant or the seal is broken."""
    text = plan_text(*SMALL)
    unseen = [place for place, spoilt in _spoilt(json.loads(text)) if _passes(spoilt)]
    assert unseen == []


def _spoilt(document: Any, root: Any = None, place: str = "$") -> Iterator[tuple[str, Any]]:
    """The document once per leaf, with that leaf changed a little; restored after each."""
    root = document if root is None else root
    for key in document if isinstance(document, dict) else range(len(document)):
        value, where = document[key], f"{place}.{key}"
        if isinstance(value, (dict, list)):
            yield from _spoilt(value, root, where)
        elif where != "$.seal" and value is not None:
            document[key] = not value if isinstance(value, bool) else value + ("x" if isinstance(value, str) else 1)
            yield where, root
            document[key] = value


def _passes(document: Any) -> bool:
    try:
        plan = plan_from(document, "PLAN")
        return not faults(plan) and seal_state(plan) == "sealed"
    except StrategistError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS[:3], ids=" ".join)
def test_a_plan_is_the_same_bytes_everywhere(question: tuple[str, ...], tmp_path: Path) -> None:
    """--out writes the same bytes whatever seed Python hashes with, in whatever folder and locale, and they are what
    --json prints; its explanation is the same text."""
    surroundings: tuple[dict[str, str | None], ...] = (
        {"PYTHONHASHSEED": "0"}, {"PYTHONHASHSEED": "77", "LC_ALL": "C", "TZ": "Asia/Tokyo"}, {"HOME": None},
    )  # fmt: skip
    files, texts = set(), set()
    for number, around in enumerate(surroundings):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert process("plan", *question, "--out", "p.json", "--quiet", cwd=folder, **around).code == 0
        files.add((folder / "p.json").read_bytes())
        texts.add(process("explain", "p.json", cwd=folder, **around).out)
    assert files == {plan_text(*question).encode()}
    assert len(texts) == 1


def test_a_hand_written_plan(tmp_path: Path) -> None:
    """Without a seal it is read, explained and emitted; run wants the seal first."""
    path = hand_written(tmp_path, dp_shard=2, zero=3)
    assert "none: written or edited by hand" in " ".join(call("explain", path).out.split())
    assert call("emit", path, "--to", "torchrun", "--out", str(tmp_path / "job")).code == 0
    assert call("run", "--json", path).error["code"] == "E_DIGEST"
    assert call("check", "--seal", "--json", path).document["seal"] == "sealed"
    assert seal_state(load_plan(path)) == "sealed"


UNSOUND: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "more ranks than devices": (lambda plan: plan["mesh"].update(tp=2), "ranks and the cluster"),
    "another optimizer than was asked for": (
        lambda plan: plan["strategy"].update(optimizer="moe"),
        "workload.optimizer adamw",
    ),
    "a batch that is no product": (lambda plan: plan["strategy"].update(accumulation=7), "the global batch is"),
    "a lost layer": (lambda plan: plan["strategy"]["stages"][0].update(layers=[[0, 3]]), "every layer exactly once"),
    "no embedding": (lambda plan: plan["strategy"]["stages"][0].update(embedding=False), "embedding"),
    "bytes that do not add up": (lambda plan: plan["memory"]["stages"][0]["terms"].pop(), "add up to"),
    "time that does not add up": (lambda plan: plan["time"].update(step_ns=1), "do not add up"),
    "an interval beside its value": (lambda plan: plan["time"]["step"].update(low=1e9), "interval"),
    "no devices": (lambda plan: plan["cluster"].update(groups=[]), "cluster.groups is 0"),
    "no ranks": (lambda plan: plan["mesh"].update(dp_replicate=0), "mesh.dp_replicate is 0"),
    "an order without an axis": (lambda plan: plan["mesh"].update(order=["pp", "tp"]), "order"),
}


@pytest.mark.parametrize(("change", "words"), UNSOUND.values(), ids=UNSOUND)
def test_unsound_plans_are_refused_everywhere(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    """What breaks an invariant is neither shown, emitted, sealed nor run: exit 3 with the invariant's sentence."""
    path = edited(tmp_path, change)
    before = Path(path).read_bytes()
    for typed in (
        ["explain", path],
        ["check", path],
        ["check", "--seal", path],
        ["emit", path, "--to", "torchrun", "--out", str(tmp_path / "job")],
        ["run", path, "--allow-edited"],
    ):
        ran = call(*typed, "--json")
        assert (ran.code, ran.error["code"]) == (3, "E_FRAMEWORK_LEGALITY")
        assert words in ran.error["message"]
    assert Path(path).read_bytes() == before
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize(
    ("text", "exit_code", "code"),
    [
        ("{}", 2, "E_KIND"),
        ("[]", 2, "E_KIND"),
        ('"x"', 2, "E_KIND"),
        ('{"format": "strategist-observed/1"}', 2, "E_KIND"),
        ('{"format": 1}', 2, "E_KIND"),
        ('{"format": "strategist-plan/2"}', 4, "E_SCHEMA_VERSION"),
        ('{"format": "strategist-plan/1"}', 2, "E_MISSING"),
        ("", 2, "E_EMPTY_FILE"),
        ("{", 2, "E_JSON"),
    ],
)
def test_files_that_are_no_plans(tmp_path: Path, text: str, exit_code: int, code: str) -> None:
    """Every reader of plans says what the file is instead."""
    path = written(tmp_path, "plan.json", text)
    for name in ("explain", "check", "run"):
        ran = call(name, path, "--json")
        assert (ran.code, ran.error["code"]) == (exit_code, code)


def test_strict_types(tmp_path: Path) -> None:
    """All faults of a plan are told with their places: a text for a number, an unknown key, a negative size."""

    def spoil(plan: dict[str, Any]) -> None:
        plan["mesh"]["pp"] = "2"
        plan["mesh"]["xp"] = 1

    error = call("check", edited(tmp_path, spoil), "--json").error
    assert (error["code"], error["flag"]) == ("E_TYPE", "$.mesh.pp")
    assert [other["code"] for other in error["also"]] == ["E_UNKNOWN_KEY"]
    negative = call("check", edited(tmp_path, lambda plan: plan["mesh"].update(pp=-2)), "--json").error
    assert (negative["code"], negative["flag"]) == ("E_NEGATIVE", "$.mesh.pp")


def test_run_refuses_before_anything_starts(tmp_path: Path) -> None:
    """Assumed hardware, other machines and layouts that the executor lacks each have their code."""
    assumed = plan_file(tmp_path, "--model", "llama-debug", name="a.json")
    elsewhere = plan_file(tmp_path, "--model", "llama-debug", "--hardware", "dgx-h100:2", name="b.json")
    pins = "offload=parameters,tiling=8,recompute=selective"
    lacking = plan_file(tmp_path, *SMALL, "--seq-len", "2048", "--pin", pins, name="c.json")
    ends = [(ran.code, ran.error["code"]) for ran in (call("run", "--json", p) for p in (assumed, elsewhere, lacking))]
    assert ends == [(4, "E_ASSUMED_HARDWARE"), (4, "E_FACTS_DIFFER"), (3, "E_UNSUPPORTED")]


def test_explain_shows_every_term(tmp_path: Path) -> None:
    """Each term of step and peak has a line, and so has each rule that fired."""
    question = QUESTIONS[3]
    plan = load_plan(plan_file(tmp_path, *question))
    text = call("explain", str(tmp_path / "plan.json")).out
    terms = {term.name for term in plan.time.terms} | {term.name for term in plan.memory.worst.terms}
    assert [name for name in sorted(terms) if f" {name} " not in text] == []
    assert [reason.rule for reason in plan.reasons if reason.rule not in text] == []
    assert all(f"layers {first}-{end - 1}" in text for s in plan.strategy.stages for first, end in s.layers[:1])


@pytest.mark.parametrize("layers", [[[0, 10**16]], [[0, 15]], [[1, 16]], [[0, 16], [3, 16]], [[0, 20], [20, 16]]])
def test_stages_that_do_not_partition_the_layers(layers: list[list[int]], tmp_path: Path) -> None:
    """A stage whose runs leave layers out, own them twice, run backwards or go on for ever is a fault, told at once."""
    plan = json.loads(plan_text("--model", "llama-2-7b", "--hardware", "dgx-h100:2", "--pin", "pp=2,zero=3"))
    plan["strategy"]["stages"][0]["layers"] = layers
    file = tmp_path / "p.json"
    file.write_text(json.dumps(plan), encoding="utf-8")
    ran = call("check", str(file), "--json")
    assert "own every layer exactly once" in ran.out
    assert ran.code != 0
