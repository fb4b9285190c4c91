"""What plans are told of their links: rates are those of the ranks that talk, and nothing is advised that the search found slower."""

from __future__ import annotations

import re
from typing import Any

import pytest

from strategist import load_cluster, recommend
from strategist.facts.groups import group_bandwidth
from strategist.facts.tiers import tiers

JOB: dict[str, Any] = {"seq_len": 4096, "global_batch": 32}


def warning(code: str, model: str, machines: Any, **fields: Any) -> str:
    """The sentence of a warning of a plan; empty without it."""
    hints = recommend(model, machines, **JOB | fields).hints
    return next((hint.sentence for hint in hints if hint.code == code), "")


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_slow_links_are_those_of_the_ranks_that_share_a_layer(tp: int) -> None:
    """On pairs of bridged devices tp=2 stays on a bridge, and nothing is said of the PCIe that joins the pairs; tp=4 and tp=8 cross it,
    and the rate that is named is what such a group gets."""
    machines = "ws-8x-h100-nvl"
    reached = group_bandwidth(tiers(load_cluster(machines)), tp).all_reduce_Bps / 1e9
    said = warning("W_ADV002", "llama-3.1-8b", machines, pin=f"tp={tp}")
    assert bool(said) == (tp > 2) == (reached < 100)
    assert not said or f"{reached:.0f} GB/s" in re.sub(r"\s+", " ", said)


@pytest.mark.parametrize("model", ["llama-2-7b", "llama-2-13b"])
def test_sharding_over_a_slow_network_is_told_without_a_layout_that_is_slower(model: str) -> None:
    """A plan under ZeRO-3 over Ethernet has been held against every hybrid layout, so the warning sends nobody to one."""
    plan = recommend(model, "aws-g5.48xlarge:2", global_batch=256, pin="pp=1,tp=1,zero=3")
    said = next(hint.sentence for hint in plan.hints if hint.code == "W_ADV202")
    assert "HSDP" not in said
    hybrid = [one for one in plan.alternatives if one.family == "hsdp" and one.fits]
    assert all(one.relative_time is not None and one.relative_time >= 1 for one in hybrid)
