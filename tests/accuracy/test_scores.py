"""Sums over runs against derivations by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from strategist.accuracy.judge import Judged, judge
from strategist.accuracy.scores import correlation, grouped, ranking, scored, time_error, verdicts
from strategist.accuracy.table import read_runs
from tests.cli.harness import RUN, runs_file


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    """One predicted run."""
    (one,) = judge(read_runs(runs_file(tmp_path_factory.mktemp("runs"), RUN)))
    return one


def having(
    run: Judged, predicted: float, measured: float, *, is_oom: bool = False, peak: int = 1, mbs: int = 1
) -> Judged:
    """The run with other figures and another micro-batch."""
    assert run.case is not None
    facts = replace(run.case.measured, step_s=measured, is_oom=is_oom)
    layout = tuple((dict(run.case.layout) | {"micro_batch": mbs}).items())
    return replace(run, step_s=predicted, peak_bytes=peak, case=replace(run.case, measured=facts, layout=layout))


def test_errors_of_known_ratios(run: Judged) -> None:
    """Ratios 1/2, 1, 2, 1.05 and 1.2: half are within the factors, the median factor is that of the third."""
    ratios = (0.5, 1.0, 2.0, 1.05, 1.2)
    found = time_error([having(run, ratio, 1.0) for ratio in ratios])
    assert found is not None
    assert found.mape == pytest.approx(np.mean([0.5, 0, 1, 0.05, 0.2]))
    assert (found.factor, found.bias, found.max) == (pytest.approx(1.2), pytest.approx(0.05), pytest.approx(1.0))
    assert (found.within_10, found.within_25) == (pytest.approx(0.4), pytest.approx(0.6))


def test_over_and_underestimates_weigh_the_same(run: Judged) -> None:
    """A prediction of twice the measurement and one of half of it have the same factor, and together no bias."""
    twice, half = having(run, 2.0, 1.0), having(run, 1.0, 2.0)
    errors = [time_error([one]) for one in (twice, half)]
    assert [error.factor for error in errors if error] == [pytest.approx(2.0)] * 2
    both = time_error([twice, half])
    assert both is not None and both.bias == pytest.approx(0.0)


@pytest.mark.parametrize("order", list(permutations((1.0, 2.0, 3.0, 4.0)))[::5])
def test_rank_correlation_is_spearmans(order: tuple[float, ...]) -> None:
    """Without ties the coefficient is 1 - 6 sum d^2 / (n (n^2 - 1)), whatever the values behind the ranks."""
    measured = np.array([10.0, 20.0, 40.0, 90.0])
    d = np.array(order) - np.array([1.0, 2.0, 3.0, 4.0])
    assert correlation(np.array(order) ** 2, measured) == pytest.approx(1 - 6 * float(d @ d) / (4 * 15))


def test_regret_is_what_our_first_costs(run: Judged) -> None:
    """Of three layouts measured at 1.0, 1.1 and 1.5 s we rank the second first: the regret is a tenth."""
    runs = [having(run, 2.0, 1.0, mbs=1), having(run, 1.9, 1.1, mbs=2), having(run, 3.0, 1.5, mbs=4)]
    found = ranking([*runs, having(run, 1.9, 1.1, mbs=2)])
    assert (found.groups, found.worst_regret) == (1, pytest.approx(0.1))
    assert ranking(runs[:2]).groups == 0


def test_verdicts_count_every_run_once(run: Judged) -> None:
    """What is predicted to fit and what ran make four boxes."""
    huge = 10**15
    runs = [having(run, 1, 1), having(run, 1, 1, is_oom=True), having(run, 1, 1, peak=huge), having(run, 1, 1, is_oom=True, peak=huge)]  # fmt: skip
    found = verdicts([*runs, runs[0]])
    assert (found.fits_and_ran, found.fits_but_oom, found.refused_but_ran, found.refused_and_oom) == (2, 1, 1, 1)


def test_tight_verdicts_lie_within_the_interval_of_the_peak(run: Judged) -> None:
    """Right beside the device's size either verdict is tight, half of them wrong here; far from it none is."""
    size = run.job.cluster.smallest.memory_bytes
    runs = [having(run, 1, 1, peak=int(size * share), is_oom=oom) for share in (0.98, 1.02) for oom in (True, False)]
    found = verdicts(runs)
    assert (found.tight, found.tight_and_wrong) == (4, 2)
    far = verdicts([having(run, 1, 1, peak=int(size * share), is_oom=True) for share in (0.5, 2.0)])
    assert (far.tight, far.tight_and_wrong, far.fits_but_oom) == (0, 0, 1)


def test_groups_cover_every_row(run: Judged) -> None:
    """The group of everything stands first; the others share its rows out, and skipped rows are counted by reason."""
    lost = Judged({**RUN, "source": "theirs"}, skipped="dp is not stated")
    everything, *groups = grouped([run, run, lost], ("source",))
    assert (everything.rows, everything.covered) == (3, 2)
    assert [(group.key["source"], group.rows) for group in groups] == [("ours", 2), ("theirs", 1)]
    assert scored([lost], {}).skipped == {"dp is not stated": 1}


def test_bigger_files_do_not_change_a_prediction(tmp_path: Path) -> None:
    """A run is predicted the same alone and among others that share its columns."""
    others = [{**RUN, "id": f"run-{n}", "micro_batch_seqs": str(n), "global_batch_seqs": str(8 * n)} for n in (2, 4)]
    together = judge(read_runs(runs_file(tmp_path, RUN, *others)))
    alone = judge(read_runs(runs_file(tmp_path, others[1], name="alone.csv")))
    assert (together[2].step_s, together[2].peak_bytes) == (alone[0].step_s, alone[0].peak_bytes)
