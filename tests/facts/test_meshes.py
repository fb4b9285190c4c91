"""The narrowest cut of a mesh, against networkx and against closed forms."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategist.facts.hardware import Link
from strategist.facts.meshes import (
    full_mesh,
    group_rate,
    is_mesh,
    islands,
    layouts,
    narrowest_cut,
    placements,
    rates_of,
)


@st.composite
def meshes(draw: st.DrawFn) -> dict[tuple[int, int], float]:
    """A mesh of two to seven devices with small whole rates, connected by a chain."""
    count = draw(st.integers(2, 7))
    rates = {(i, i + 1): float(draw(st.integers(1, 5))) for i in range(count - 1)}
    for a, b in draw(st.sets(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)))):
        if a < b:
            rates[a, b] = float(draw(st.integers(1, 5)))
    return rates


@given(meshes())
def test_narrowest_cut_equals_networkx(rates: dict[tuple[int, int], float]) -> None:
    """The narrowest cut is the global minimum cut that networkx finds."""
    built = nx.Graph()
    built.add_weighted_edges_from((a, b, rate) for (a, b), rate in rates.items())
    assert narrowest_cut(rates, sorted(built)) == nx.stoer_wagner(built)[0]


@pytest.mark.parametrize("gpus", [2, 3, 5, 8, 16])
def test_a_full_mesh_is_cut_at_one_device(gpus: int) -> None:
    """Among m members of a full mesh the narrowest cut frees one of them: m - 1 links."""
    rates = full_mesh(gpus, 10.0)
    assert [narrowest_cut(rates, range(m)) for m in range(2, gpus + 1)] == [10.0 * (m - 1) for m in range(2, gpus + 1)]


def test_islands_meet_over_the_host() -> None:
    """Members that no link joins are limited by the host links of the smaller island."""
    rates = {(0, 1): 50.0, (2, 3): 50.0}
    assert islands(rates, [0, 1, 2, 3]) == [[0, 1], [2, 3]]
    assert group_rate(rates, [0, 1, 2, 3], 10.0) == (20.0, True)
    assert group_rate(rates, [0, 1, 2, 3], 40.0) == (50.0, False)
    assert group_rate(rates, [0, 2], 10.0) == (10.0, True)


def test_every_layout_fits_and_every_aligned_placement_is_tried() -> None:
    """Layouts list all that fit; aligned ones are placed at every block, others at every start."""
    assert set(layouts(4)) == {(2, 1), (2, 2), (2, 3), (3, 1), (4, 1)}
    assert list(placements(8, 2, 2)) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert list(placements(4, 2, 3)) == [(0, 3)]
    assert list(placements(4, 3, 1)) == [(0, 1, 2), (1, 2, 3)]


def test_links_between_the_same_gpus_add_up() -> None:
    """Two links of one pair count together, in either direction of writing; other ends are no mesh."""
    links = [Link(a="gpu1", b="gpu0", kind="nvlink", Bps=5.0), Link(a="gpu0", b="gpu1", kind="nvlink", Bps=5.0)]
    assert rates_of(links) == {(0, 1): 10.0}
    assert is_mesh(links)
    assert not is_mesh([*links, Link(a="gpu0", b="numa0", kind="pcie-host", Bps=1.0)])
    assert not is_mesh([])
