"""Blocks of 256 elements, some of one cut of a weight and some of another: which of them are the same ones."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.slow

EDGE = st.one_of(st.integers(0, 8).map(lambda blocks: 256 * blocks), st.integers(0, 2048))
KIND = "optimizer/head.weight/exp_avg_scale"


def cuts(edges: set[int]) -> list[tuple[int, int]]:
    """A weight of 2048 elements in runs that meet at some edges."""
    return list(pairwise(sorted(edges | {0, 2048})))


def blocks(first: int, last: int) -> list[tuple[int, int]]:
    """The elements that share a scale in one run, block by block."""
    return [(begin, min(begin + 256, last)) for begin in range(first, last, 256)]


@given(st.sets(EDGE, max_size=4), st.sets(EDGE, max_size=4))
def test_scales_are_lent_exactly_where_the_blocks_are_the_same(theirs: set[int], mine: set[int]) -> None:
    """A run gets the scales of its own blocks in order when each of them is a block of the stored cut, else none."""
    from strategist.executor.scales import loans

    stored = {f"{KIND}/{first}:{last}": blocks(first, last) for first, last in cuts(theirs)}
    known = {block for each in stored.values() for block in each}
    for first, last in cuts(mine):
        wanted = blocks(first, last)
        lent = [block for loan in loans(f"{KIND}/{first}:{last}", stored) for block in stored[loan.name][loan.blocks]]
        assert lent == (wanted if set(wanted) <= known else [])


def test_parts_of_columns_are_like_themselves_alone() -> None:
    """A rank that holds some columns has blocks of no run, and its scales are found under its own name only."""
    from strategist.executor.scales import loans

    stored = [f"{KIND}/0:32,0:256", f"{KIND}/0:32,256:512"]
    assert [loan.name for loan in loans(stored[1], stored)] == [stored[1]]
    assert loans(f"{KIND}/0:8192", stored) == ()
    assert loans(stored[0], [f"{KIND}/0:8192", f"{KIND}/8192:16384"]) == ()


def test_a_drive_carries_whole_blocks() -> None:
    """Pieces of a weight on a drive begin where a block in eight bits begins, so a drive changes no block."""
    from strategist.executor.drive import block_elements
    from strategist.executor.eight_bits import BLOCK

    assert block_elements() % BLOCK == 0
