"""What we say about our own speed is a committed measurement, and the ways of measuring measure."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bench_calculon import require_checkout
from benchmarks.bench_search import FIRST, JOBS, dropped
from benchmarks.bench_startup import BARS, NOTHING, figures, paired, run
from benchmarks.nightly import counts, folders, known, to_run, whole
from benchmarks.record import read, write
from strategist.emitters import EMITTERS
from tests.cli.bad_inputs import APART, OWED, corpus

ROOT = Path(__file__).parents[1]


def test_the_committed_figures_stay_under_their_bars() -> None:
    """The last measurement of `make bench` misses no bar, covers every target, and planning and emitting had loaded nothing heavy."""
    result = read("startup")
    assert {name: value for name, value in figures(result).items() if value > BARS[name]} == {}
    assert result["heavy_imports"] == result["emits"]["heavy_imports"] == []
    assert result["emits"]["targets"] == len(EMITTERS)


def test_a_measurement_says_when_and_what() -> None:
    """The committed result carries date, commit, versions and cores, and covers every refused row of the corpus."""
    result = read("startup")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])
    assert re.fullmatch(r"[0-9a-f]{40}", result["commit"])
    assert result["machine"]["cores"] >= 1
    assert None not in result["versions"].values()
    rows = [row for row in corpus() if (row.flag, row.value) not in (*OWED, *APART) and row.ends[0]]
    assert result["refusals"]["rows"] == len(rows)


@pytest.mark.slow
def test_a_pair_weighs_one_command_against_another() -> None:
    """A process that holds a hundred megabytes peaks above them, a longer one has the larger ratio, a failure is raised."""
    weigh = (
        "import sys; from benchmarks.bench_startup import run; print(run((sys.executable, *sys.argv[1:])).peak_bytes)"
    )

    def peak(program: str) -> int:  # asked of a small process: a child starts with the peak of its parent
        return int(
            subprocess.run(
                (sys.executable, "-c", weigh, "-c", program), cwd=ROOT, stdout=subprocess.PIPE, check=True
            ).stdout
        )

    assert peak("b'x' * 100_000_000") > 100_000_000 > peak("pass")
    assert paired((sys.executable, "-c", "import time; time.sleep(1)"), NOTHING, 2)["median_ratio"] > 1
    with pytest.raises(ChildProcessError, match="ended with 3"):
        run((sys.executable, "-c", "raise SystemExit(3)"))


def test_the_committed_searches_left_nothing_out() -> None:
    """Each job of the last `make bench-search` looked at no fewer values and layouts than its floor, and what became of its
    layouts adds up."""
    jobs = read("search")["jobs"]
    assert list(jobs) == list(JOBS)
    assert {name: dropped(name, found) for name, found in jobs.items() if dropped(name, found)} == {}
    for found in jobs.values():
        left = found["enumerated"] - found["refused"] - found.get("slower", 0) - found["pruned"]
        assert left >= found["weighed"]
        assert found["weighed"] >= found["evaluated"] > 0


def test_a_search_that_leaves_something_out_misses_its_floor() -> None:
    """A value, a whole choice, or layouts that are not looked at any more are named."""
    found = read("search")["jobs"][FIRST]
    values = found["dimensions"]
    no_ring = found | {"dimensions": values | {"context_parallel": ["none", "all-to-all"]}}
    no_pipeline = found | {"dimensions": {name: words for name, words in values.items() if name != "pp"}}
    assert dropped(FIRST, no_ring) == ["context_parallel=ring"]
    assert [word.partition(":")[0] for word in dropped(FIRST, no_pipeline)] == ["pp"]
    assert [word.partition(":")[0] for word in dropped(FIRST, found | {"enumerated": 1})] == ["enumerated"]


def test_only_a_checkout_of_calculon_will_do(tmp_path: Path) -> None:
    """A folder without it is refused with a sentence that names what is not there."""
    with pytest.raises(SystemExit, match=r"bin/calculon is not there"):
        require_checkout(tmp_path)


SUITE = """
import pytest
def test_good(): pass
def test_bad(): assert False
@pytest.mark.skip
def test_left_out(): pass
@pytest.fixture
def broken(): raise OSError
def test_never_ran(broken): pass
"""


@pytest.mark.slow
def test_the_nightly_result_counts_every_end(tmp_path: Path) -> None:
    """Passed, failed, broken and skipped tests are counted apart, all but the passed ones are named, and the seconds of each
    are there."""
    (tmp_path / "test_all.py").write_text(SUITE, encoding="utf-8")
    report = tmp_path / "report.xml"
    subprocess.run(
        (sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", str(tmp_path)), cwd=tmp_path, check=False
    )
    result = counts(report)
    assert {how: result[how] for how in ("passed", "failed", "error", "skipped")} == dict.fromkeys(
        ("passed", "failed", "error", "skipped"), 1
    )
    assert [name.rpartition(".")[2] for name in result["not_passed"]] == ["test_bad", "test_left_out", "test_never_ran"]
    assert len(result["longest"]) == 4
    assert result["longest"].keys() > set(result["not_passed"])


def test_the_folders_of_the_nightly_run_are_all_tests() -> None:
    """Every file of tests that pytest finds by itself lies in one folder of the long suite, and in one only."""
    parts = [
        {file for path in paths for file in (path.rglob("test_*.py") if path.is_dir() else [path])}
        for paths in folders().values()
    ]
    found = {path for path in (ROOT / "tests").rglob("test_*.py") if "frameworks" not in path.relative_to(ROOT).parts}
    assert sum(map(len, parts)) == len(found)
    assert set.union(*parts) == found


def test_the_nightly_run_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a folder gave is kept with its commit; it runs again on another commit or other versions, after those that never ran."""
    monkeypatch.setattr("benchmarks.record.RESULTS", tmp_path)
    monkeypatch.setattr("benchmarks.nightly.RESULTS", tmp_path)
    head = {"date": "2026-01-02", "commit": "a", "changed_files": 0, "versions": {"torch": "2"}}
    counted = {**dict.fromkeys(("passed", "failed", "error", "skipped"), 1), "seconds": 3, "longest": {"t": 2}}
    one = {**head, **counted, "not_passed": ["u"]}
    assert known([], "night") == {}
    assert to_run(head, {}) == list(folders())
    write("night", whole([], {"cli": one, "gone": one}))
    done = known([], "night")
    assert done == {"cli": one}
    assert known(["-x"], "night") == {}
    others = [part for part in folders() if part != "cli"]
    assert json.loads((tmp_path / "night.json").read_text(encoding="utf-8"))["missing"] == others
    assert to_run(head, done) == others
    for other in ({"commit": "b"}, {"versions": {"torch": "3"}}, {"changed_files": 1}):
        assert to_run({**head, **other}, done) == [*others, "cli"]
    assert to_run({**head, "commit": "b"}, {**done, others[0]: {**one, "date": "2026-01-01"}})[-2:] == [
        others[0],
        "cli",
    ]
