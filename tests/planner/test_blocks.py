"""Very many layouts are judged in blocks, and what rules refuse of them is not kept: the answer is that of all at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strategist.ask import Given, complete
from strategist.document.plan import Request
from strategist.errors import NoPlanError
from strategist.planner import search as searching
from strategist.planner import why_not
from strategist.planner.recommend import choice
from strategist.planner.search import Found, Question, legality, limits_of, search
from strategist.planner.situation import question
from strategist.rulebook.apply import forbid
from strategist.space.candidates import joined
from strategist.space.enumerate import enumerate_candidates, in_blocks
from strategist.space.grammar import layout
from tests.strategies import rows_of

JOBS: tuple[dict[str, Any], ...] = (
    {"model": "gpt2-xl", "hardware": "dgx-h100", "global_batch": 720},
    {"model": "llama-3.2-1b", "hardware": "dgx-h100:3", "global_batch": 360, "forbid": "offload"},
    {"model": "olmoe-1b-7b", "hardware": "dgx-a100-40gb:2", "global_batch": 96, "pin": "recompute=full"},
    {"model": "llama-3.2-1b", "hardware": "ws-4x-4090", "seq_len": 6000, "also": "gpipe,zb_h1"},
)


def asked(job: dict[str, Any]) -> Question:
    """The question of a job."""
    return complete(Given(**job)).question


def answer(found: Found) -> dict[str, Any]:
    """What a search says, whatever it kept of what is refused."""
    chosen = {policy: layout(found.candidates.row(choice(found, policy).row)) for policy in ("hf", "fastest")}  # type: ignore[arg-type]
    refused = {one.rule.id: one.count for one in found.refused}
    examples = {one.rule.id: layout(found.enumerated_candidates.row(one.example)) for one in found.refused}
    return {"enumerated": found.enumerated, "legal": len(found.legal), "slower": found.slower, "refused": refused, "examples": examples, **chosen}  # fmt: skip


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["model"])
@pytest.mark.parametrize(("at_once", "most"), [(0, 1), (1000, 300)])
def test_blocks_are_the_space(job: dict[str, Any], at_once: int, most: int) -> None:
    """One behind the other the blocks hold every layout once, in the same order and with the same meshes."""
    limits = limits_of(asked(job))
    whole, blocks = enumerate_candidates(limits), list(in_blocks(limits, at_once, most))
    assert len(blocks) > 3
    together = joined(blocks)
    assert all((together[name] == column).all() for name, column in whole.columns.items())


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["model"])
def test_a_search_in_blocks_finds_the_same(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts, examples of refusals and choices are those of a search of everything at once; what is kept is what no rule forbids and the
    examples of each block."""
    question_ = asked(job)
    whole = search(question_, bests=True)
    monkeypatch.setattr(searching, "VERY_MANY", 1000)
    monkeypatch.setattr(searching, "BLOCK", 300)
    parts = search(question_, bests=True)
    assert answer(parts) == answer(whole)
    assert rows_of(parts.candidates) == rows_of(whole.candidates)
    assert whole.refused and len(parts.enumerated_candidates) < whole.enumerated == len(whole.enumerated_candidates)
    keep, again = forbid(legality(question_), question(question_.job), parts.enumerated_candidates)
    assert int(keep.sum()) == len(parts.legal) + parts.slower
    assert {one.rule.id for one in again} == {one.rule.id for one in whole.refused}
    assert np.unique(parts.enumerated_candidates.mesh).size <= np.unique(whole.enumerated_candidates.mesh).size


def test_changes_are_looked_for_among_so_many_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing fits, changes are tried until their spaces hold so many layouts: one change whatever its space."""

    def tried(most: int) -> tuple[int, tuple[str, ...]]:
        searches: list[Question] = []
        monkeypatch.setattr(why_not, "MOST_TRIED", most)
        monkeypatch.setattr(why_not, "search", lambda one, **how: searches.append(one) or search(one, **how))
        with pytest.raises(NoPlanError) as refused:
            raise why_not.explain_failure(found, Request())
        return len(searches), refused.value.fixes

    found = search(asked({"model": "llama-3.1-70b", "hardware": "dgx-h100", "seq_len": 8192, "forbid": "offload"}))
    (one, few), (many, all_) = tried(0), tried(2**23)
    assert one == 1 < many
    assert len(few) <= 1 <= len(all_)
    assert all_[: len(few)] == few
