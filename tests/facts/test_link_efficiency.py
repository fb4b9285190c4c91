"""The efficiency rows follow from the measured rows they name."""

from __future__ import annotations

from itertools import product
from statistics import mean, median
from typing import Any

import pytest

from strategist.catalog import rows
from strategist.facts.link_efficiency import efficiency, fabric_kind

MEASURED = {
    ("nvlink", "Ampere"): ["a100-sxm-80gb"],
    ("nvlink", "Hopper"): ["h100-sxm-80gb", "h200-sxm-141gb"],
    ("nvlink", "Blackwell"): ["b200-sxm-180gb", "gb200"],
    ("nvlink", "Blackwell Ultra"): ["b300-sxm-288gb", "gb300"],
    ("pcie-p2p", ""): ["rtx-pro-6000-blackwell-server"],
}
STARTED = MEASURED | {("pcie-host", ""): ["l40s"]}


def curve(gpu: str, op: str, gpus: int) -> dict[str, Any] | None:
    """The measured curve of one collective."""
    return next((r for r in rows("collective_curves") if (r["gpu"], r["op"], r["gpus"]) == (gpu, op, gpus)), None)


def link(name: str) -> dict[str, Any]:
    """One row of the links table."""
    return next(row for row in rows("links") if row["id"] == name)


def efficiency_row(kind: str, variant: str, gpus: int | None) -> dict[str, Any]:
    """One efficiency row."""
    return next(r for r in rows("link_efficiency") if (r["kind"], r["variant"], r["gpus"]) == (kind, variant, gpus))


@pytest.mark.parametrize(("key", "cards"), MEASURED.items())
def test_shares_are_measured_over_nominal(key: tuple[str, str], cards: list[str]) -> None:
    """A share is the mean peak bus bandwidth of the named curves over the card's nominal rate."""
    nominal = {row["name"]: row["scaleup_GBps"] for row in rows("gpus") if "scaleup_GBps" in row}
    for gpus in (2, 4, 8):
        used = [card for card in cards if curve(card, "all_gather", gpus)]
        if not used:
            continue
        row = efficiency_row(*key, gpus)
        for field, ops in (("ring_share", ["all_gather", "reduce_scatter"]), ("all_reduce_share", ["all_reduce"]), ("all_to_all_share", ["all_to_all"])):  # fmt: skip
            curves = [(card, curve(card, op, gpus)) for card in used for op in ops]
            share = mean(found["busbw_peak_GBps"] / nominal[card] for card, found in curves if found)
            assert row[field] == pytest.approx(share, abs=6e-4), (key, gpus, field)
        assert all(card in row["source"] for card in used)


@pytest.mark.parametrize(("key", "cards"), STARTED.items())
def test_latencies_are_a_line_through_the_measured_ones(key: tuple[str, str], cards: list[str]) -> None:
    """Base and hop are the least-squares line of all-gather start-up over the number of hops."""
    points = [(n - 1, c["latency_us"]) for card in cards for n in (2, 4, 8) if (c := curve(card, "all_gather", n))]
    x_mean, y_mean = mean(x for x, _ in points), mean(y for _, y in points)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in points) / sum((x - x_mean) ** 2 for x, _ in points)
    row = efficiency_row(*key, 2)
    assert row["hop_us"] == pytest.approx(slope, abs=0.006)
    assert row["base_us"] == pytest.approx(y_mean - slope * x_mean, abs=0.02)


COUNTED: dict[str, dict[int, tuple[int, ...]]] = {
    "pcie-host": {2: (2,), 4: (4, 8), 8: (4, 8)},
    "pcie-p2p": {2: (2,), 4: (4,), 8: (8,)},
}
"""The numbers of cards whose machines make one row: together where more cards would reach more."""


def counted(path: str, counts: tuple[int, ...], *ops: str) -> dict[str, float]:
    """Of every machine that counts for a path its share of nominal: the middle of its placements, then of its counts, and of
    these per operation the mean."""
    found: dict[str, dict[str, dict[int, list[float]]]] = {}
    for row in rows("links"):
        op = row["category"].removesuffix(" busbw")
        if row.get("counted") and row["path"] == path and row["gpus"] in counts and op in ops:
            of_op = found.setdefault(row["machine"], {}).setdefault(op, {})
            of_op.setdefault(row["gpus"], []).append(row["measured_GBps"] / row["nominal_GBps"])
    return {m: mean(median(map(median, of_op.values())) for of_op in by_op.values()) for m, by_op in found.items()}


@pytest.mark.parametrize(("path", "gpus"), [(path, gpus) for path, groups in COUNTED.items() for gpus in groups])
def test_pcie_shares_are_the_middle_of_all_counted_machines(path: str, gpus: int) -> None:
    """Each machine counts once. What few measured besides an all-reduce stands to it as on those machines."""
    counts = COUNTED[path][gpus]
    row, reduced = efficiency_row(path, "", gpus), counted(path, counts, "all_reduce")
    middle = median(reduced.values())
    assert row["all_reduce_share"] == pytest.approx(middle, abs=6e-4)
    for field, ops in (("ring_share", ("all_gather", "reduce_scatter")), ("all_to_all_share", ("alltoall",))):
        beside = [share / reduced[machine] for machine, share in counted(path, counts, *ops).items()]
        assert row[field] == pytest.approx(middle * median(beside), abs=6e-4)
    assert path == "pcie-p2p" or f"over {len(reduced)} machines" in row["source"]


@pytest.mark.parametrize("path", COUNTED)
def test_more_cards_on_pcie_reach_no_more(path: str) -> None:
    """Shares fall with the number of cards or stay; counts whose middles would rise are one group."""
    shares = [efficiency_row(path, "", gpus) for gpus in (2, 4, 8)]
    for field in ("ring_share", "all_reduce_share", "all_to_all_share"):
        assert [row[field] for row in shares] == sorted((row[field] for row in shares), reverse=True)
    middles = [median(counted(path, (gpus,), "all_reduce").values()) for gpus in (2, 4, 8)]
    assert (COUNTED[path][4] == (4, 8)) == (middles[1] < middles[2])


def test_a_link_between_sockets_is_the_middle_of_the_measured() -> None:
    """What is assumed between two sockets is a copy's rate across them over its rate within one."""
    across = [
        row["measured_GBps"] / row["nominal_GBps"] for row in rows("links") if row["id"].startswith("pcie-socket-")
    ]
    default = next(row for row in rows("hardware_defaults") if row["name"] == "socket-link")
    assert default["share_of_card_link"] == pytest.approx(median(across), abs=6e-3)


def test_rows_of_links_that_do_not_count_say_why() -> None:
    """A measured path over PCIe names its machine; one that stands for no share says so."""
    paths = [row for row in rows("links") if "path" in row]
    assert paths
    assert all(row["machine"] and row["path"] in ("pcie-host", "pcie-p2p") for row in paths)
    assert all(row["counted"] or row["notes"].startswith("not counted: ") for row in paths)


OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
FULL = 2**22


def besides(row: dict[str, Any], found: dict[str, Any]) -> list[tuple[float, float]]:
    """(measured microseconds, those besides start-up and bytes) of messages of 4 to 256 MiB of one curve."""
    nominal = next(card["scaleup_GBps"] for card in rows("gpus") if card["name"] == found["gpu"])
    start, sent = row["base_us"] + row["hop_us"] * (row["gpus"] - 1), (row["gpus"] - 1) / row["gpus"]
    share = {"all_reduce": row["all_reduce_share"] / 2, "all_to_all": row["all_to_all_share"]}.get(
        found["op"], row["ring_share"]
    )
    starts = 2 * start if found["op"] == "all_reduce" else start
    pairs = zip(found["bytes"], found["time_us"], strict=True)
    return [
        (us, us - starts - size * sent / (share * nominal * 1e3)) for size, us in pairs if FULL <= size <= 64 * FULL
    ]


@pytest.mark.parametrize(("key", "cards"), [(key, cards) for key, cards in MEASURED.items() if key[0] == "nvlink"])
def test_what_fills_the_links_is_the_middle_of_the_measured(key: tuple[str, str], cards: list[str]) -> None:
    """Large messages take a constant time besides start-up and bytes: the median over the named curves. With it the
    measured times lie nearer than without."""
    for gpus in (2, 4, 8):
        row = efficiency_row(*key, gpus)
        curves = [found for card, op in product(cards, OPS) if (found := curve(card, op, gpus))]
        points = [point for found in curves for point in besides(row, found)]
        assert row["fill_us"] == pytest.approx(median(rest for _, rest in points), abs=0.06)
        near, far = (median(abs(rest - fill) / us for us, rest in points) for fill in (row["fill_us"], 0.0))
        assert near < far


def test_a_step_between_nodes_fills_as_nccl_says() -> None:
    """NCCL's own table of latencies, ring: 2.7 us with LL, by which small messages go, and 14.0 with Simple, by which large ones do."""
    own = [row for row in rows("link_efficiency") if row["kind"] in ("infiniband", "roce", "slingshot")]
    assert len(own) == 3
    assert all(row["hop_us"] == 2.7 and row["hop_us"] + row["fill_us"] == pytest.approx(14.0) for row in own)
    assert all(row["tree_us"] == 5.0 for row in own)


def test_links_without_large_curves_fill_at_once() -> None:
    """What nobody measured is not made up: an all-reduce there costs what the two halves of it cost."""
    known = {key for key in MEASURED if key[0] == "nvlink"} | {
        (kind, "") for kind in ("infiniband", "roce", "slingshot")
    }
    assert all(row["fill_us"] == 0.0 for row in rows("link_efficiency") if (row["kind"], row["variant"]) not in known)


def test_network_shares_follow_from_the_links_table() -> None:
    """xGMI and EFA shares and EFA's hop repeat the rows they name."""
    for gpus in (2, 8):
        measured = link(f"ar-mi300x-{gpus}")
        share = measured["measured_GBps"] / measured["nominal_GBps"]
        assert efficiency_row("xgmi", "", gpus)["ring_share"] == pytest.approx(share, abs=6e-4)
    for variant, name in (("", "ar-p5en-4n"), ("EFA v1", "efa-v1-eff"), ("EFA v4", "ar-p6b200-4n")):
        share = link(name)["measured_GBps"] / link(name)["nominal_GBps"]
        assert efficiency_row("efa", variant, None)["ring_share"] == pytest.approx(share, abs=6e-4)
    inside = curve("h100-sxm-80gb", "all_reduce", 8)
    assert inside is not None
    crossing = (link("ar-p5-2n")["latency_us"] - inside["latency_us"]) / 2
    assert efficiency_row("efa", "", None)["hop_us"] == pytest.approx(crossing, abs=0.06)


def test_gloo_shares_follow_from_the_measured_curves() -> None:
    """The shares of CPU ranks are their measured bus bandwidth over the core's copy rate."""
    copy = rows("cpus")[0]["memory_GBps"]
    for ranks in (2, 4):
        found = curve("cpu", "all_reduce", ranks)
        assert found is not None
        assert efficiency_row("shared-memory", "", ranks)["ring_share"] == pytest.approx(found["busbw_peak_GBps"] / copy, abs=6e-4)  # fmt: skip


def test_only_switches_reduce_and_only_for_all_reduce() -> None:
    """Only NVLink among eight GPUs of Hopper or later has reduction in the switch; rings never exceed the wire."""
    for row in rows("link_efficiency"):
        expected = row["kind"] == "nvlink" and row["gpus"] == 8 and row["variant"] not in ("", "Ampere")
        assert row["in_switch"] == expected
        assert 0 < row["ring_share"] < 1
        assert 0 < row["all_to_all_share"] < 1
        assert row["all_reduce_share"] < 1 or row["in_switch"]


def test_a_count_between_rows_takes_the_smaller_row() -> None:
    """Groups between two measured sizes take the smaller one's share, larger ones the largest."""
    hopper = efficiency("nvlink", "Hopper")
    assert hopper.share(5) == hopper.share(4)
    assert hopper.share(72) == hopper.share(8)
    assert hopper.share(8).in_switch
    assert not efficiency("nvlink", "Hopper", in_switch=False).share(8).in_switch


def test_without_rows_of_its_own_a_variant_takes_the_general_ones() -> None:
    """An architecture or fabric without rows answers with its kind's general rows; unknown fabrics count as TCP."""
    assert efficiency("nvlink", "Volta") == efficiency("nvlink")
    assert efficiency("efa", "EFA v2") == efficiency("efa")
    assert fabric_kind("ib ndr") == "infiniband"
    assert fabric_kind("carrier pigeon") == "tcp"


def test_a_mesh_of_links_that_a_switch_reduces_on_gets_what_a_ring_gets() -> None:
    """Of every kind and variant of the catalogue: without a switch that reduces nothing changes, with one the mesh has a ring's share for the
    all-reduce, and all else as beside the switch."""
    seen = set()
    for row in rows("link_efficiency"):
        beside, mesh = (efficiency(row["kind"], row["variant"], in_switch=switched) for switched in (True, False))
        for one, other in zip(beside.shares, mesh.shares, strict=True):
            seen.add(one.in_switch)
            assert (other.gpus, other.ring, other.all_to_all, other.in_switch) == (
                one.gpus,
                one.ring,
                one.all_to_all,
                False,
            )
            assert other.all_reduce == (one.ring if one.in_switch else one.all_reduce)
        assert row["all_reduce_share"] in [one.all_reduce for one in beside.shares]
    assert seen == {True, False}
