"""Parts of its experts that a token calls on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategist.facts.model import Moe
from strategist.facts.models import load_model
from strategist.facts.routing import called, called_on, copies_for_nodes
from tests.oracle import routing


@st.composite
def mixtures(draw: st.DrawFn) -> Moe:
    """Experts few enough to go through every choice of them."""
    groups, size = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    top_groups = draw(st.integers(1, groups))
    top_k = draw(st.integers(1, min(4, top_groups * size)))
    return Moe(experts=groups * size, top_k=top_k, ffn=8, layers=1, groups=groups, top_groups=top_groups)


@given(mixtures(), st.integers(1, 12))
def test_what_is_expected_is_the_mean_over_every_choice(moe: Moe, parts: int) -> None:
    """In any number of parts, whether or not it divides groups or experts."""
    every = routing.called(moe.experts, moe.top_k, moe.groups, moe.top_groups, parts)
    assert called(moe, parts) == pytest.approx(float(every), rel=1e-12)
    assert routing.expected(moe, parts) == pytest.approx(float(every), rel=1e-12)


@given(
    st.sampled_from(["deepseek-v3", "deepseek-v2", "kimi-k2", "qwen3-235b-a22b", "gpt-oss-120b"]), st.integers(1, 256)
)
def test_a_token_calls_on_a_part_and_on_no_more_than_it_chooses(name: str, parts: int) -> None:
    """At least one part, at most as many as it has experts or there are parts; and where every group is one part, as groups."""
    moe = load_model(name).moe
    assert moe is not None
    assert 1 <= called(moe, parts) <= min(moe.top_k, parts) + 1e-12
    if parts == moe.groups:
        assert called(moe, parts) <= moe.top_groups


def test_groups_keep_a_token_of_deepseek_v3_on_half_of_its_nodes() -> None:
    """Four of eight groups: at most 4 of 8 nodes, 3.6 of which are called on; 5.3 where any experts may be chosen."""
    limited = load_model("deepseek-v3").moe
    assert limited is not None
    free = Moe(experts=limited.experts, top_k=limited.top_k, ffn=limited.ffn, layers=limited.layers)
    assert (round(called(limited, 8), 2), round(called(free, 8), 2)) == (3.63, 5.29)


def test_nodes_that_cut_the_same_experts_get_a_copy_each() -> None:
    """Of two ranks of experts on one node one copy goes to it; of one rank on two nodes, one to each."""
    moe = Moe(experts=8, top_k=2, ffn=8, layers=1)
    ranks, nodes = np.array([8, 4, 4]), np.array([4, 4, 8])
    assert copies_for_nodes(moe, ranks, nodes) == pytest.approx(called(moe, 4) * np.array([1.0, 1.0, 2.0]))
    assert called_on(moe, ranks) == pytest.approx([called(moe, 8), called(moe, 4), called(moe, 4)])
