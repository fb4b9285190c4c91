"""Every command: its help, its JSON, its complaints about flags."""

from __future__ import annotations

import errno
import json
import re
import shlex
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from strategist import __version__
from strategist.cli import COMMANDS
from strategist.cli.arguments import Command
from strategist.cli.flags import COMMON, Flag
from strategist.emitters import EMITTERS
from strategist.reports.brief import batch_words
from strategist.rulebook.rule import BOOKS, load_rules
from tests.cli.bad_inputs import written
from tests.cli.harness import MANY, SMALL, call, hand_written, plan_file, runs_file
from tests.cli.test_resume import run_of
from tests.source import ROOT

NAMES = [name for name, _ in COMMANDS]
DOCUMENTS: dict[str, Callable[[Path], list[str]]] = {
    "plan": lambda folder: ["plan", *SMALL],
    "explain": lambda folder: ["explain", plan_file(folder)],
    "check": lambda folder: ["check", plan_file(folder)],
    "check --seal": lambda folder: ["check", "--seal", hand_written(folder)],
    "diff": lambda folder: ["diff", *[plan_file(folder)] * 2],
    "compare": lambda folder: ["compare", *[plan_file(folder)] * 2],
    "compare layouts": lambda folder: ["compare", "dp=2", "tp=2", *SMALL],
    "size": lambda folder: ["size", "--model", "gpt2", "--tokens", "10B", "--gpu", "a10g", "--nodes", "2"],
    "size --max": lambda folder: ["size", *SMALL, "--max", "micro-batch"],
    "sweep": lambda folder: ["sweep", "--model-size", "100M,1B", "--nodes", "1", "--gpus-per-node", "1"],
    "predict": lambda folder: ["predict", *SMALL, "--strategy", "dp=2"],
    "predict PLAN": lambda folder: ["predict", plan_file(folder)],
    "validate": lambda folder: ["validate", written(folder, "d.json", '{"train_batch_size": 8}')],
    "accuracy": lambda folder: ["accuracy", runs_file(folder)],
    "calibrate": lambda folder: ["calibrate", runs_file(folder, *MANY)],
    "emit": lambda folder: ["emit", plan_file(folder), "--to", "torchrun", "--out", str(folder / "job")],
    "emit --list": lambda folder: ["emit", "--list"],
    "topology": lambda folder: ["topology", "--hardware", "dgx-h100:2"],
    "catalog gpus": lambda folder: ["catalog", "gpus"],
    "catalog nodes": lambda folder: ["catalog", "nodes"],
    "catalog models": lambda folder: ["catalog", "models", "llama-2-7b"],
    "rule": lambda folder: ["rule"],
    "rule HF202": lambda folder: ["rule", "hf202"],
    "schema": lambda folder: ["schema"],
    "help": lambda folder: ["help"],
    "help E_UNIT": lambda folder: ["help", "unit"],
    "completion": lambda folder: ["completion", "fish"],
    "version": lambda folder: ["version"],
    "status": lambda folder: ["status", run_of(folder).path],
    "resume": lambda folder: ["resume", run_of(folder, step=10).path],
}
"""Ways to call every command but `run`, which trains, and `trace` and `rehearse`, which need torch (tests/measure)."""


def command(name: str) -> Command:
    """What a command takes and says about itself."""
    found: Command = import_module(f"strategist.cli.{name}_command").COMMAND
    return found


def test_every_command_has_a_document() -> None:
    """No command is left out of the tests below."""
    assert {name.partition(" ")[0] for name in DOCUMENTS} == set(NAMES) - {"run", "trace", "rehearse"}


@pytest.mark.parametrize("name", NAMES)
def test_help_of_every_command(name: str) -> None:
    """--help and -h print the same page on stdout, whatever else is typed, and the page names every flag."""
    page = call(name, "--help")
    assert (page.code, page.err) == (0, "")
    assert page.out.startswith(f"usage: strategist {name}")
    assert call(name, "-h").out == page.out == call(name, "--no-such-flag", "x", "--help").out
    assert [flag.name for flag in command(name).flags if flag.name not in page.out] == []


@pytest.mark.parametrize("name", NAMES)
def test_help_of_every_command_as_json(name: str) -> None:
    """--help --json prints the flags as a document."""
    document = call(name, "--help", "--json").document
    assert document["name"] == name
    assert [flag["name"] for flag in document["flags"]][-len(COMMON) :] == [flag.name for flag in COMMON]


def test_the_page_of_all_commands() -> None:
    """Without a command the page of all commands is printed and the exit code says that something was missing."""
    assert (call().code, call("--help").code, call().out) == (2, 0, call("-h").out)
    assert [name for name in NAMES if f"  {name} " not in call("--help").out] == []
    assert [row["command"] for row in call("--help", "--json").document] == NAMES


@pytest.mark.parametrize("words", DOCUMENTS.values(), ids=DOCUMENTS)
def test_json_of_every_command(words: Callable[[Path], list[str]], tmp_path: Path) -> None:
    """--json prints one JSON document and nothing else, in front of the other words or behind them."""
    typed = words(tmp_path)
    before = call(typed[0], "--json", *typed[1:])
    assert (before.code, before.err) == (0, "")
    assert before.document
    if typed[0] != "emit":
        assert call(*typed, "--json").out == before.out


@pytest.mark.parametrize("words", DOCUMENTS.values(), ids=DOCUMENTS)
def test_text_of_every_command(words: Callable[[Path], list[str]], tmp_path: Path) -> None:
    """Without --json people get text without control characters, ending in one line break."""
    ran = call(*words(tmp_path))
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.endswith("\n")
    assert not ran.out.endswith("\n\n")
    assert "\x1b" not in ran.out


@pytest.mark.parametrize("name", NAMES)
def test_unknown_flags_are_answered_with_the_nearest(name: str) -> None:
    """A misspelt flag is an error that names the flag that was meant."""
    ran = call(name, "--jsno", "--json")
    assert (ran.code, ran.error["code"], ran.error["flag"]) == (2, "E_UNKNOWN_KEY", "--jsno")
    assert "--json" in ran.error["hint"]


def test_unknown_commands_are_answered_with_the_nearest() -> None:
    """A misspelt command is an error that names the command that was meant."""
    assert "Did you mean topology" in call("topolgy").err


@pytest.mark.parametrize("name", [name for name in NAMES if not any(p.repeats for p in command(name).positionals)])
def test_too_many_words(name: str) -> None:
    """A word that no positional takes is refused, not ignored."""
    ran = call(name, "a", "b", "c", "--json")
    assert (ran.code, ran.error["code"]) == (2, "E_PARSE")


@pytest.mark.parametrize(
    "flag", [flag for flag in command("plan").flags if flag.metavar and not flag.repeats], ids=lambda flag: flag.name
)
def test_flags_given_twice(flag: Flag) -> None:
    """A flag that means one thing is refused when it is given twice, even with the same value."""
    ran = call("plan", flag.name, "1", f"{flag.name}=1", "--json")
    assert (ran.code, ran.error["code"], ran.error["flag"]) == (2, "E_DUPLICATE_FLAG", flag.name)


def test_parts_given_apart_are_shown_together() -> None:
    """Who repeats a flag that takes several parts is told how they are given at once."""
    assert "Give it once, with commas: --pin tp=2,pp=2." in call("plan", "--pin", "tp=2", "--pin", "pp=2").err


def test_switches_may_repeat_and_take_no_value() -> None:
    """A switch given twice is still on; a switch with a value is refused."""
    assert call("version", "--json", "--json").document == {"version": __version__}
    assert "E_PARSE" in call("version", "--json=yes").err


def test_a_flag_needs_its_value() -> None:
    """The next flag is not taken for the value of the one before."""
    for words in (["--model", "--nodes", "2"], ["--model"], ["--nodes", "2", "--model", "--help-me"]):
        ran = call("plan", *words)
        assert ran.code == 2
    assert "--model needs a value" in call("plan", "--model", "--nodes", "2").err


def test_both_ways_to_give_a_value() -> None:
    """--flag VALUE and --flag=VALUE mean the same, and the value may hold the sign."""
    spaced, joined = (call("plan", *SMALL, *words) for words in (["--pin", "pp=2"], ["--pin=pp=2"]))
    assert (spaced.code, spaced.out) == (0, joined.out)


@pytest.mark.parametrize("value", ["-4", "-x", "--4"])
def test_values_may_begin_with_a_dash(value: str) -> None:
    """What is no flag of the command is a value, so that a negative number is told as one."""
    ran = call("plan", "--nodes", value, "--json")
    assert (ran.code, ran.error["flag"], ran.error["value"]) == (2, "--nodes", value)


def test_words_behind_two_dashes_belong_to_somebody_else(tmp_path: Path) -> None:
    """--json behind -- does not ask us for JSON."""
    ran = call("run", plan_file(tmp_path, "--model", "llama-debug", "--hardware", "dgx-h100:2"), "--", "x", "--json")
    assert (ran.code, ran.out) == (4, "")
    assert ran.err.startswith("E_FACTS_DIFFER")


def test_quiet_prints_no_report(tmp_path: Path) -> None:
    """--quiet leaves the files and nothing else."""
    ran = call("plan", *SMALL, "--quiet", "--out", str(tmp_path / "p.json"))
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert (tmp_path / "p.json").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("plan",),
        ("predict", "--strategy", "dp=1"),
        ("compare", "dp=1", "dp=1,recompute=full"),
        ("sweep",),
        ("size", "--max", "micro-batch"),
    ],
    ids=lambda words: words[0],
)
def test_quiet_prints_nothing_of_an_answer(words: tuple[str, ...]) -> None:
    """Whatever computes an answer keeps it to itself under --quiet, as the help says, and ends as it would else; errors are still told."""
    question = ("--gpu", "l4", "--gpus-per-node", "1", "--global-batch", "8", "--seq-len", "512")
    named = ("--model-size", "124M", *(() if words[0] == "sweep" else ("--nodes", "1")))
    ran = call(*words, *question, *named, "--quiet")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert call(*words, *question, *named).out
    assert call(*words, *question, "--model-size", "nothing", "--quiet").err.startswith("E_")


def test_what_is_shown_for_its_own_sake_is_shown_quietly() -> None:
    """Pages of the catalogue and rules are all that their commands do."""
    for words in (("catalog", "models"), ("rule", "LEG001")):
        assert call(*words, "--quiet").out == call(*words).out != ""


def test_verbose_prints_more() -> None:
    """--verbose adds every term, rule and refusal to the report."""
    brief, full = call("plan", *SMALL), call("plan", *SMALL, "--verbose")
    assert full.out.startswith(brief.out)
    assert "peak memory" in full.out[len(brief.out) :]


def test_the_search_log_is_a_remark() -> None:
    """--search-log shows every stage on stderr, so that --json stays one document."""
    ran = call("plan", *SMALL, "--search-log", "--json")
    assert ran.document["format"] == "strategist-plan/1"
    stages = [row.split()[0] for row in ran.err.splitlines()]
    assert stages == ["enumerate", "legality", "memory", "time"]
    survivors = [int(row.split()[-2].replace(",", "")) for row in ran.err.splitlines()]
    assert survivors == sorted(survivors, reverse=True)


def test_top_bounds_the_alternatives() -> None:
    """--top 1 shows one alternative that fits and at most one that does not."""
    shown = call("plan", *SMALL, "--top", "1", "--json").document["alternatives"]
    assert [a["fits"] for a in shown].count(True) == 1
    assert len(shown) <= 2


def test_catalog_knows_near_names() -> None:
    """A name that is not there is answered with names that are."""
    ran = call("catalog", "gpus", "h1000-sxm-80gb", "--json")
    assert (ran.code, ran.error["code"]) == (2, "E_UNKNOWN_GPU")
    assert "h100-sxm-80gb" in ran.error["hint"]
    assert call("catalog", "gpu", "--json").error["code"] == "E_CHOICE"


def test_catalog_pages_have_a_source() -> None:
    """A page of the catalogue says where the facts are from."""
    page = call("catalog", "nodes", "dgx-h100").out
    assert re.search(r"^source +\S", page, re.MULTILINE)


def test_rule_lists_every_rule_and_prints_one() -> None:
    """The list names all rules and words; a page gives condition, source and examples."""
    listed = call("rule").out
    rules = [rule for book in BOOKS for rule in load_rules(book)]
    assert [rule.id for rule in rules if f"{rule.id} " not in listed] == []
    assert "fast_inter" in listed
    for label in ("when", "because", "source", "fires for", "silent for"):
        assert re.search(rf"^{label} ", call("rule", "HF202").out, re.MULTILINE)
    assert "HF202" in call("rule", "HF22").err


def test_help_explains_every_code_it_lists() -> None:
    """Every listed code has a page, with and without its prefix and in any case."""
    for row in call("help", "--json").document:
        page = call("help", row["code"].lower())
        assert page.code == 0
        assert page.out.startswith(row["code"])
    assert call("help", "unit").out == call("help", "E_UNIT").out
    assert "E_UNIT" in call("help", "E_UNITS").err


def test_emit_lists_every_target() -> None:
    """The list is the registry; each row says which axes, which versions and how far it was proven, by a test that is there."""
    listed = call("emit", "--list", "--json").document
    assert [row["name"] for row in listed] == [e.name for e in EMITTERS]
    for row in listed:
        assert row["axes"]
        assert row["versions"]
        assert row["proof"] in ("keys", "parsed", "trained")
        assert (ROOT / row["evidence"]).exists()


@pytest.mark.parametrize("missing", ["PLAN", "--out"])
def test_emit_says_what_is_missing(missing: str, tmp_path: Path) -> None:
    """Whatever of the two is left out is named; without --to rules choose (tests/test_chosen_frontend.py)."""
    given = {"PLAN": [plan_file(tmp_path)], "--to": ["--to", "torchrun"], "--out": ["--out", str(tmp_path / "job")]}
    words = [word for name, pair in given.items() if name != missing for word in pair]
    ran = call("emit", *words, "--json")
    assert (ran.code, ran.error["code"], ran.error["flag"]) == (2, "E_MISSING", missing)


def test_emit_says_when_the_hardware_was_assumed(tmp_path: Path) -> None:
    """Files of a plan whose hardware nobody named are written with a warning, and only those."""
    for number, (words, said) in enumerate(((("--model-size", "7B"), 1), (SMALL, 0))):
        plan = plan_file(tmp_path, *words, name=f"{number}.json")
        ran = call("emit", plan, "--to", "torchrun", "--out", str(tmp_path / str(number)), "--json")
        assert len(ran.document["notes"]) == said


def test_version_is_the_packages() -> None:
    """Three ways to ask, one answer."""
    assert {call(word).out for word in ("version", "--version")} == {f"strategist {__version__}\n"}


def test_topology_draws(tmp_path: Path) -> None:
    """--svg writes a picture once, and again only with --force."""
    file = tmp_path / "machines.svg"
    words = ("topology", "--hardware", "dgx-h100:2", "--svg", str(file))
    assert call(*words).code == 0
    assert file.read_text(encoding="utf-8").startswith("<svg ")
    assert call(*words, "--json").error["code"] == "E_EXISTS"
    assert call(*words, "--force").code == 0


@pytest.mark.parametrize("name", NAMES)
def test_help_has_the_page_of_every_command(name: str) -> None:
    """`help COMMAND` is `COMMAND --help`, as a document too."""
    assert call("help", name).out == call(name, "--help").out
    assert call("help", name, "--json").out == call(name, "--help", "--json").out


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (("validate",), "E_MISSING", "validate --help"),
        (("help", "pln"), "E_CHOICE", "Did you mean plan"),
        (("plan", "--gpus", "8"), "E_UNKNOWN_KEY", "Did you mean --gpus-per-node?"),
        (("plan", "--batch-size", "8"), "E_UNKNOWN_KEY", "Did you mean --global-batch?"),
        (("plan", "--output", "p.json"), "E_UNKNOWN_KEY", "Did you mean --out?"),
        (("plan", "--max_seq_len", "8"), "E_UNKNOWN_KEY", "Did you mean --seq-len?"),
        (("plan", "--tp", "8"), "E_UNKNOWN_KEY", "--pin tp=VALUE"),
        (("predict", "--zero-stage", "3"), "E_UNKNOWN_KEY", "Did you mean"),
        (("predict", "--zero", "3"), "E_UNKNOWN_KEY", "--strategy zero=VALUE"),
        (("plan", "7B"), "E_PARSE", "--model 7B"),
        (("plan", "--hardware", "2xdgx-h100", "--model", "7B"), "E_UNKNOWN_NODE", "Write dgx-h100:2."),
        (("plan", "--hardware", "dgx-h100 x 4", "--model", "7B"), "E_UNKNOWN_NODE", "Write dgx-h100:4."),
        (("plan", "--hardware", "2xdgx-h1000", "--model", "7B"), "E_UNKNOWN_NODE", "Did you mean"),
    ],
)
def test_common_mistakes_are_met_with_what_was_meant(words: tuple[str, ...], code: str, hint: str) -> None:
    """Words of launchers and frameworks, choices of the layout for flags, and a model without its flag."""
    found = call(*words, "--json")
    assert (found.code, found.error["code"]) == (2, code)
    assert hint in found.error["hint"]


@pytest.mark.parametrize("words", [("emit", "--to", "torchrun"), ("run",)])
def test_a_folder_that_may_not_be_made(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only place is the user's to change, as for a file: exit 2 with a code, and not a fault of the machine."""
    path = plan_file(tmp_path)

    def refuse(place: str, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", place)

    monkeypatch.setattr("os.makedirs", refuse)
    found = call(words[0], path, *words[1:], "--out", str(tmp_path / "new"), "--json")
    assert (found.code, found.error["code"]) == (2, "E_PERMISSION")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("nodes", "p5.48xlarge"), "aws-p5.48xlarge"),
        (("gpus", "NVIDIA H100 80GB HBM3"), "h100-sxm-80gb"),
        (("models", "meta-llama/Llama-3.1-8B"), "llama-3.1-8b"),
        (("models", "vit-bigG-14"), "vit-bigG-14"),
    ],
)
def test_catalog_knows_what_plan_knows(words: tuple[str, str], name: str) -> None:
    """A row is found by every name that --hardware, --gpu and --model take."""
    (row,) = call("catalog", *words, "--json").document
    assert row["name"] == name


EXAMPLES = [
    example
    for name in ("plan", "compare", "predict")
    for example in command(name).examples
    if not re.search(r"\.(json|sh)\b|--verify|--sensitivity", example)
]
"""Examples that need no file, and take no longer than a question does."""


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_work(example: str) -> None:
    """What a help page shows to be copied has an answer."""
    found = call(*shlex.split(example)[1:])
    assert (found.code, found.err) == (0, "")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("plan", "--model", "7B", "--gpu", "h100", "--gpu-memory", "100000TiB"), "E_TOO_LARGE", "The limit is 16TiB."),
        (("plan", "--model", "7B", "--gpu", "h100", "--inter-bw", "1e9GB/s"), "E_TOO_LARGE", "The limit is 1000000GB/s."),
        (("plan", "--model", "7B", "--gpu", "h100", "--inter-bw", "1B/s"), "E_TOO_SMALL", "smallest allowed is 1MB/s."),
        (("plan", "--model-size", "1e30"), "E_TOO_LARGE", "The limit is 100T."),
        (("size", "--model", "7B", "--tokens", "1B", "--deadline", "99999999999d"), "E_TOO_LARGE", "The limit is 115740d."),
        (("plan", "--model", "7B", "--gpu", "h100", "--gpu-memory", "80"), "E_UNIT", "--gpu-memory: a unit is missing. Say GiB"),
        (("compare", ""), "E_EMPTY", "A is empty."),
        (("compare", "dp=8", " "), "E_EMPTY", "B is empty."),
        (("explain", ""), "E_EMPTY", "PLAN is empty."),
        (("plan", "--model", "7B", "--calibration", ""), "E_EMPTY", "--calibration is empty."),
        (("sweep", "--model-size", "1B,7B,1B"), "E_DUPLICATE_KEY", "--model-size names 1B twice."),
        (("sweep", "--gpu", "h100-sxm,h100-sxm-80gb"), "E_DUPLICATE_KEY", "--gpu names h100-sxm-80gb twice."),
        (("plan", "--model", "7B", "--forbid", "pp,PP"), "E_DUPLICATE_KEY", "--forbid names pp twice."),
        (("plan", "--model", "7B", "--also", "zb_h1,zb-h1"), "E_DUPLICATE_KEY", "--also names zb_h1 twice."),
    ],
    ids=str,
)  # fmt: skip
def test_refusals_speak_in_the_units_of_their_flags(words: tuple[str, ...], code: str, said: str) -> None:
    """A limit is said as the flag takes it, a unit that is missing once, and an empty word by its name."""
    error = call(*words, "--json").error
    assert error["code"] == code
    assert said in error["message"]


def test_one_is_no_plural() -> None:
    """A single sequence of a single token, and sides that differ in one thing."""
    one = call("plan", "--model", "gpt2", "--gpu", "h100", "--gpus-per-node", "1", "--nodes", "1", "--global-batch", "1", "--seq-len", "1")  # fmt: skip
    assert "1 sequence = 1 token per step" in " ".join(one.out.split())
    assert (batch_words("images", 1, 1), batch_words("images", 1, 2)) == ("1 image", "2 images")


def test_sides_that_differ_in_one_thing(tmp_path: Path) -> None:
    """The note about different questions has a verb that agrees."""
    other = plan_file(tmp_path, *SMALL, "--seq-len", "512", name="b.json")
    told = " ".join(call("compare", plan_file(tmp_path), other).out.split())
    assert "different questions: sequence length differs." in told


def test_emit_into_nowhere(tmp_path: Path) -> None:
    """An empty folder name is not the root of all files."""
    assert call("emit", plan_file(tmp_path), "--to", "torchrun", "--out", "", "--json").error["code"] == "E_EMPTY"


def test_edited_ledgers_are_told_and_not_tripped_over(tmp_path: Path) -> None:
    """Plans whose edits no formula could count with are refused by every command that reads them."""
    edits: dict[str, Callable[[Any], Any]] = {
        "E_MISSING": lambda plan: plan["memory"]["stages"].clear(),
        "memory_bytes is 0": lambda plan: plan["cluster"]["groups"][0]["node"]["gpu"].update(memory_bytes=0),
        "factors[0].value": lambda plan: plan.update(factors=[{"part": "matmul", "value": 0, "gpu": "", "framework": ""}]),
        "near[0] is no": lambda plan: plan.update(near=[{"chip": "", "framework": "", "width": "", "low": 5, "high": 6, "runs": 1}]),
    }  # fmt: skip
    sound = plan_file(tmp_path)
    for said, edit in edits.items():
        document = json.loads(Path(sound).read_text(encoding="utf-8"))
        edit(document)
        path = written(tmp_path, "edited.json", json.dumps(document))
        for words in (("explain", path), ("check", path), ("predict", path), ("compare", path, sound), ("emit", path, "--to", "torchrun", "--out", str(tmp_path / "job"))):  # fmt: skip
            told = call(*words, "--json").error
            assert told["code"] != "E_INTERNAL"
            assert said in (told["code"] + told["message"]), words
        assert call("diff", path, sound).code in (2, 8)
