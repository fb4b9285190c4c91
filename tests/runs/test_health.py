"""What does not stop a run is said once, of the rank and the step that it is about, and of nothing else."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategist.runs.folder import RunFolder, append_row
from strategist.runs.health import LATE, LEAST, Health, Remark, latenesses

SECONDS = 0.4


def looked(tmp_path: Path, late: dict[int, float], losses: list[float], world: int = 4, looks: int = 3) -> list[Remark]:
    """What is said of a run whose rows are written bit by bit; `late` are seconds by rank."""
    folder, noise = RunFolder(str(tmp_path)), Random(1)
    folder.ranks.mkdir(exist_ok=True)
    health, found = Health(folder, world), []
    for step, loss in enumerate(losses):
        for rank in range(world):
            began = {
                name: step + at + late.get(rank, 0.0) + 0.01 * noise.random()
                for name, at in (("forward", 0.0), ("backward", 0.2))
            }
            append_row(folder.of_rank(rank, "steps"), {"step": step, "loss": loss, "seconds": SECONDS, "began": began})
        if step % looks == 0:
            found += health.look()
    return [*found, *health.look()]


FALLING = [6.0 - 0.05 * step + 0.02 * (step % 3) for step in range(30)]


def test_a_steady_run_says_nothing(tmp_path: Path) -> None:
    """Losses that fall unevenly and ranks that differ by a hundredth of a second are no news."""
    assert looked(tmp_path, {}, FALLING) == []


@pytest.mark.parametrize("rank", [0, 2])
def test_a_late_rank_is_named_once_with_its_score(rank: int, tmp_path: Path) -> None:
    """Late by half a step in every step: said once, within fifty steps, with a score of about a half."""
    (found,) = looked(tmp_path, {rank: SECONDS / 2}, FALLING)
    assert (found.kind, found.rank) == ("slow", rank)
    assert found.step < 50
    assert found.score == pytest.approx(0.5, abs=0.1)
    assert f"rank {rank} is late" in found.sentence


def test_a_loss_that_leaps_is_said_with_its_step(tmp_path: Path) -> None:
    """One loss far above the others; the ordinary ones behind it are none."""
    losses = [*FALLING[:20], 40.0, *FALLING[20:]]
    (found,) = looked(tmp_path, {}, losses)
    assert (found.kind, found.step, found.rank) == ("leap", 20, None)


def test_few_steps_say_nothing(tmp_path: Path) -> None:
    """Before there is anything to compare with, nobody is late and nothing leaps."""
    assert looked(tmp_path, {1: SECONDS}, [1.0] * (LEAST - 2) + [9.0]) == []


def test_an_unfinished_line_waits_for_its_end(tmp_path: Path) -> None:
    """A rank may be writing while we look: half a row is read when it is whole, and once."""
    folder = RunFolder(str(tmp_path))
    folder.ranks.mkdir()
    health = Health(folder, 1)
    for step in range(LEAST):
        append_row(folder.of_rank(0, "steps"), {"step": step, "loss": 1.0 + 0.01 * step, "seconds": 1.0})
    with open(folder.of_rank(0, "steps"), "a", encoding="utf-8") as file:
        file.write('{"step": 6, "loss": 99.0, ')
        file.flush()
        assert list(health.look()) == []
        file.write('"seconds": 1.0}\n')
    assert [each.step for each in health.look()] == [6]
    assert list(health.look()) == []


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=8), st.floats(0, 1e6))
def test_lateness_is_of_ranks_and_not_of_clocks(at: list[float], shift: float) -> None:
    """The first of all is never late, and when all begin later by as much nothing changes."""
    late = list(latenesses([{"forward": each} for each in at]))
    assert late[at.index(min(at))] == 0.0
    assert list(latenesses([{"forward": each + shift} for each in at])) == pytest.approx(late, abs=1e-6)
    assert 0 < LATE < 1
