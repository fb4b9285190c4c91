"""Tables as other programs write them: names, units, commas, words for nothing, and figures that cannot be of one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strategist.accuracy.cells import unread_columns, with_near_names
from strategist.accuracy.judge import judge
from strategist.accuracy.table import read_runs
from strategist.errors import InputError
from tests.cli.harness import RUN, call, runs_file

OWN = {name: cell for name, cell in RUN.items() if cell}
STEP = float(OWN["step_time_s"])
TOKENS = 8192.0 * 8
"""Of a step of that run."""


def table(path: Path, *runs: dict[str, str], separator: str = ",") -> str:
    """A file with these rows, cells quoted."""
    quoted = (separator.join(f'"{cell}"' for cell in line) for line in (runs[0], *(run.values() for run in runs)))
    path.write_text("\n".join(quoted), encoding="utf-8")
    return str(path)


def renamed(**words: str) -> dict[str, str]:
    """The run with a column under another name, which stands for a figure of its own."""
    return {name: cell for name, cell in OWN.items() if name != "step_time_s"} | words


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        ("step_time_s", f"{STEP} s"),
        ("step_time_s", f"{1000 * STEP} ms"),
        ("step_time_ms", f"{1000 * STEP}"),
        ("Step time (ms)", f"{1000 * STEP}"),
        ("elapsed time per iteration (ms)", f"{1000 * STEP}"),
        ("train_step_timing in s", f"{STEP}"),
        ("throughput(tps)", f"{TOKENS / 8 / STEP}"),
        ("train_tokens_per_second", f"{TOKENS / 8 / STEP}"),
        ("train_samples_per_second", f"{8 / STEP}"),
        ("train_steps_per_second", f"{1 / STEP}"),
    ],
)
def test_a_step_is_the_same_under_every_name_and_unit(column: str, cell: str, tmp_path: Path) -> None:
    """Milliseconds, rates of one device and of all, and the names that frameworks log them by mean the same step."""
    (one,) = judge(read_runs(table(tmp_path / "runs.csv", renamed(**{column: cell}))))
    assert one.measured_s == pytest.approx(STEP, rel=1e-6)


@pytest.mark.parametrize(
    ("column", "cell", "gigabytes", "kind"),
    [
        ("peak_mem_gb", "61.5", 61.5, ""),
        ("peak_mem_gb", "61440 MiB", 61440 * 2**20 / 1e9, ""),
        ("memory/max_reserved(GiB)", "60", 60 * 2**30 / 1e9, "torch max_memory_reserved"),
        ("peak_memory_active", "60", 60 * 2**30 / 1e9, "torch peak active"),
        ("max_memory_allocated_mb", "60000", 60.0, "torch max_memory_allocated"),
    ],
)
def test_a_peak_is_in_its_unit_and_says_what_it_counts(
    column: str, cell: str, gigabytes: float, kind: str, tmp_path: Path
) -> None:
    """GiB are not GB, and a figure whose name says whose it is is compared with that."""
    (one,) = judge(read_runs(table(tmp_path / "runs.csv", {**OWN, column: cell})))
    assert one.case is not None
    assert one.case.measured.peak_bytes == pytest.approx(gigabytes * 1e9, rel=1e-6)
    assert one.case.measured.mem_kind == kind


@pytest.mark.parametrize(
    ("separator", "cells", "step"),
    [
        (";", ("1,25", "1.024"), 1.25),
        (";", ("1.001,25", "64"), 1001.25),
        (",", ("1,25", "64"), 1.25),
        (",", ("1,001.25", "1,024"), 1001.25),
        ("\t", ("1,001", "64"), 1001.0),
    ],
)
def test_commas_are_read_as_the_table_means_them(
    separator: str, cells: tuple[str, str], step: float, tmp_path: Path
) -> None:
    """A comma stands before decimals where some number of the table says so, and between thousands otherwise."""
    (run,) = read_runs(table(tmp_path / "runs.csv", {**OWN, "step_time_s": cells[0], "vocab": cells[1]}, separator=separator))  # fmt: skip
    assert float(run["step_time_s"]) == step
    assert run["vocab"] in ("64", "1024")


def test_a_comma_that_may_be_either_is_left(tmp_path: Path) -> None:
    """In a spreadsheet's table 1,250 is 1250 or 1.25, and no other number tells."""
    (one,) = judge(read_runs(table(tmp_path / "runs.csv", {**OWN, "step_time_s": "1,250"}, separator=";")))
    assert one.skipped == "step_time_s is not a number: 1,250"


@pytest.mark.parametrize("nothing", ["NaN", "nan", "None", "n/a", "-", "NULL", "#N/A"])
def test_words_for_nothing_are_empty_cells(nothing: str, tmp_path: Path) -> None:
    """A figure that nobody has does not keep the row's other figures from being judged; - is a word where cells hold words."""
    (run,) = read_runs(table(tmp_path / "runs.csv", {**OWN, "peak_mem_gb": nothing, "offload": "-"}))
    assert (run["peak_mem_gb"], run["offload"]) == ("", "-")
    assert judge([run])[0].measured_s == STEP


def test_oom_in_place_of_a_time_is_a_run_out_of_memory(tmp_path: Path) -> None:
    """Sweeps write OOM where the step time would stand."""
    (one,) = judge(read_runs(table(tmp_path / "runs.csv", {**OWN, "step_time_s": "OOM"})))
    assert one.case is not None
    assert (one.case.measured.is_oom, one.case.measured.step_s) == (True, None)


@pytest.mark.parametrize("write", [lambda run: json.dumps(run), lambda run: json.dumps([run])])
def test_json_is_a_table_too(write: object, tmp_path: Path) -> None:
    """One object a line, or a list of them: numbers and null as JSON has them; a row without an id is called by its place."""
    objects = {**OWN, "gpus_total": 8, "step_time_s": STEP, "peak_mem_gb": None}
    del objects["id"]
    path = tmp_path / "runs.jsonl"
    path.write_text(write(objects), encoding="utf-8")  # type: ignore[operator]
    (one,) = judge(read_runs(str(path)))
    assert (one.run["id"], one.measured_s) == ("row 2", STEP)


@pytest.mark.parametrize("text", ["[]", "[1]", '{"id": 1}\n[2]'])
def test_json_that_is_no_table_is_refused(text: str, tmp_path: Path) -> None:
    """Lists of numbers have no columns."""
    path = tmp_path / "runs.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_runs(str(path))
    assert caught.value.code == "PARSE"


def test_a_broken_line_of_json_is_named(tmp_path: Path) -> None:
    """Of a thousand objects the one that is none is said by its line."""
    path = tmp_path / "runs.jsonl"
    path.write_text(f"{json.dumps(OWN)}\n{{1}}\n", encoding="utf-8")
    with pytest.raises(InputError, match="FILE line 2 is not JSON"):
        read_runs(str(path))


@pytest.mark.parametrize("order", [1, -1])
def test_two_columns_of_one_meaning_are_refused_and_two_figures_are_not(order: int, tmp_path: Path) -> None:
    """dp under two names is a contradiction in waiting, in either order; of two peaks the first counts and the other is said not to be read,
    and a run's name beside its id is a name."""
    with pytest.raises(InputError) as caught:
        read_runs(table(tmp_path / "a.csv", dict([*{**OWN, "data_parallel_size": "2"}.items()][::order])))
    assert caught.value.code == "DUPLICATE_KEY"
    others = {"peak_memory_active_gib": "50", "peak_memory_reserved_gib": "60", "Name": "a"}
    (run,) = read_runs(table(tmp_path / "b.csv", {**OWN, **others}))
    assert unread_columns(run) == ("peak_memory_reserved_gib", "Name")


def test_columns_that_are_not_read_are_named(tmp_path: Path) -> None:
    """A misspelt column is said with the name that it is near; the document lists them."""
    path = table(tmp_path / "runs.csv", {**OWN, "tensor_parallell": "2", "lr": "1e-4", "max_memory": "60"})
    found = call("accuracy", path)
    assert "tensor_parallell (meant: tensor_parallel?), lr, max_memory (its unit is not stated)" in " ".join(
        found.out.split()
    )
    assert call("accuracy", path, "--json").document["unread_columns"] == ["tensor_parallell", "lr", "max_memory"]
    assert with_near_names(("lr",)) == "lr"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"step_time_s": str(1000 * STEP)}, "in ms"),
        ({"peak_mem_gb": "61440"}, "in MB"),
        ({"tokens_per_s_per_gpu": str(TOKENS / STEP)}, "tokens_per_s_per_gpu means a step"),
    ],
)
def test_figures_in_another_unit_are_noticed(change: dict[str, str], reason: str) -> None:
    """Milliseconds for seconds, megabytes for gigabytes, all devices' tokens for one's: a reason that says so, and no error of 100 %."""
    (one,) = judge([{**RUN, **change}])
    assert one.case is None
    assert "contradicts itself" in one.skipped
    assert reason in one.skipped


def test_a_name_of_several_models_says_which(tmp_path: Path) -> None:
    """Mistral 7B has two vocabularies: the reason names both models, and not a width that is missing."""
    (one,) = judge(read_runs(runs_file(tmp_path, {**RUN, "model": "Mistral-7B"})))
    assert "mistral-7b-v0.1 or mistral-7b-v0.3" in one.skipped


def test_runs_inside_their_intervals_are_counted(tmp_path: Path) -> None:
    """A run at its prediction lies inside, one at three times of it does not; the document has what was measured beside the bounds."""
    path = runs_file(tmp_path, RUN)
    (row,) = call("accuracy", path, "--json").document["rows"]
    times = (row["predicted_step_s"], 3 * row["predicted_step_s"])
    path = runs_file(tmp_path, *({**RUN, "id": str(time), "step_time_s": str(time)} for time in times), name="two.csv")
    assert "50 % of 2 runs lie inside" in " ".join(call("accuracy", path).out.split())
    assert [one["measured_step_s"] for one in call("accuracy", path, "--json").document["rows"]] == list(times)


def test_every_row_says_both_verdicts_on_memory(tmp_path: Path) -> None:
    """Whether it is predicted to fit and whether it went out of memory, which the counts of its group rest on."""
    path = runs_file(tmp_path, RUN, {**RUN, "id": "large", "step_time_s": "", "oom": "true", "micro_batch_seqs": "4096", "global_batch_seqs": "32768"}, {**RUN, "id": "lacking", "model": "Mistral-7B"})  # fmt: skip
    found = {
        row["id"]: (row["predicted_fits"], row["measured_oom"])
        for row in call("accuracy", path, "--json").document["rows"]
    }
    assert found == {RUN["id"]: (True, False), "large": (False, True), "lacking": (None, None)}


@pytest.mark.parametrize(
    ("column", "typed", "typeset"),
    [
        ("tokens_per_s", "12000", "12\u00a0000"),
        ("tokens_per_s", "12000", "12 000"),
        ("tokens_per_s", "1234567.5", "1\u202f234\u202f567.5"),
        ("model", "llama-3-8b", "llama\u20113\u20118b"),
        ("seq_len", "8192", "8k"),
        ("seq_len", "8192", "8 K"),
    ],
)
def test_a_typeset_cell_is_what_a_keyboard_has_for_it(column: str, typed: str, typeset: str, tmp_path: Path) -> None:
    """Blanks that part thousands, hyphens that do not break, and lengths in thousands of tokens are read as what they stand for."""
    run = {name: cell for name, cell in OWN.items() if name != "step_time_s"} | {"tokens_per_s": "12000"}
    plain, other = (read_runs(table(tmp_path / "runs.csv", {**run, column: cell}))[0] for cell in (typed, typeset))
    assert float(other[column]) == float(plain[column]) if column != "model" else other == plain


@pytest.mark.parametrize("name", ["max_length", "sequence_len", "cutoff_len", "block_size"])
def test_a_length_goes_by_the_names_that_trainers_have_for_it(name: str, tmp_path: Path) -> None:
    """TRL, axolotl, LLaMA-Factory and nanoGPT each have their own."""
    run = {own: cell for own, cell in OWN.items() if own != "seq_len"} | {name: OWN["seq_len"]}
    assert read_runs(table(tmp_path / "runs.csv", run))[0]["seq_len"] == OWN["seq_len"]
