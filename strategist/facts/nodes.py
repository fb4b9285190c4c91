"""Catalogue rows -> Node, the lookup by name, and the reference node of a GPU."""

from __future__ import annotations

from functools import cache

from strategist.catalog import Row, rows
from strategist.facts.gpus import gpu_by_id
from strategist.facts.hardware import Basis, Link, Node
from strategist.facts.lookup import Found, Names, fold, resolve, words
from strategist.units import GB

_BASIS: dict[str, Basis] = {"typical": "assumed", "derived": "derived"}
"""Of the status of a row; everything else was stated by a vendor, a provider or somebody quoting them."""

_KINDS = ("system", "cloud", "workstation", "site", "part")
"""Kinds of rows that may stand for a GPU that nobody placed, best first."""

_PLACED = ("site", "part")
"""Computing centres and parts of machines: they stand for a GPU only where nothing else carries it."""

_BEFORE_NAMES = {"AWS": "ml.", "Azure": "standard_"}
"""What a provider's own tools write before the name of an instance: SageMaker, and Azure's size names."""


def find_node(name: str, flag: str = "--hardware") -> Found[Node]:
    """The node type called `name`, with or without its provider. Raises InputError UNKNOWN_NODE, AMBIGUOUS, ..."""
    found = resolve(name, node_names(flag))
    return Found(node_by_id(found.value), found.assumed)


def find_rack(name: str, flag: str = "--hardware") -> Node | None:
    """The tray of the rack called `name`, which is the tray's name without that word; None for any other name."""
    tray = node_names(flag).exact.get(fold(f"{name} tray"))
    return None if tray is None else node_by_id(tray)


@cache
def node_by_id(name: str) -> Node:
    """The node type with this canonical name, which must exist."""
    return _node(_rows()[name])


def nodes() -> tuple[Node, ...]:
    """Every node type of the catalogue, in file order."""
    return tuple(node_by_id(name) for name in _rows())


@cache
def _rows() -> dict[str, Row]:
    return {row["name"]: row for row in rows("nodes")}


@cache
def node_names(flag: str) -> Names:
    """The names that `find_node` knows."""
    listed = rows("nodes")
    return Names(
        exact={fold(said): row["name"] for row in listed for said in _exact(row)},
        short={},
        parts={row["name"]: _spellings(row) for row in listed},
        flag=flag,
        unknown="UNKNOWN_NODE",
        noun="node type",
        table="nodes",
    )


def _exact(row: Row) -> tuple[str, ...]:
    """The names that mean exactly this row."""
    aliases = row.get("aliases", ())
    before = _BEFORE_NAMES.get(row["provider"])
    return (row["name"], *aliases, *(f"{before}{alias}" for alias in aliases if before))


def _spellings(row: Row) -> tuple[tuple[str, ...], ...]:
    """The words of the name, and of the name without its provider where it starts with one."""
    name = words(row["name"])
    return (name, name[1:]) if name[0] == row["provider"].lower() else (name,)


def reference_node(gpu: str, gpus: int | None = None) -> Node | None:
    """The node type that stands for `gpus` cards of this kind when nobody says which machine it is.

    Vendor systems go before cloud nodes, and those before workstations; among equals the earlier row. Without `gpus`
    the best row of any count. None when the catalogue has no such node.
    """
    fitting = [row for row in _of_gpu(gpu) if gpus in (None, row["gpus_per_node"])]
    best = min(fitting, key=lambda row: _KINDS.index(row["kind"]), default=None)
    return None if best is None else node_by_id(best["name"])


def reference_counts(gpu: str) -> tuple[int, ...]:
    """How many GPUs of this kind the nodes of the catalogue have, ascending."""
    return tuple(sorted({row["gpus_per_node"] for row in _of_gpu(gpu)}))


def _of_gpu(gpu: str) -> list[Row]:
    """The rows that may stand for a GPU of this kind."""
    carrying = [row for row in rows("nodes") if row["gpu"] == gpu]
    return [row for row in carrying if row["kind"] not in _PLACED] or carrying


def _node(row: Row) -> Node:
    return Node(
        name=row["name"],
        gpu=gpu_by_id(row["gpu"]),
        gpus=row["gpus_per_node"],
        fast_domain=row["fast_domain_gpus"],
        topology=row["topology"],
        intra_Bps=row["intra_GBps"] * GB,
        pair_Bps=row.get("pair_GBps", 0) * GB,
        inter_Bps=row.get("inter_node_Gbps", 0) * GB / 8,
        nics=row.get("nic_count", 0),
        fabric=row["fabric"],
        rdma=row["gpu_direct_rdma"],
        vcpus=row["vcpus"],
        ram_bytes=row["ram_GB"] * GB,
        nvme_read_Bps=row["nvme_read_GBps"] * GB if "nvme_read_GBps" in row else None,
        price_per_hour=row.get("price_USD_per_hour"),
        price_note=_price_note(row),
        links=mesh_links(row["mesh"]) if "mesh" in row else (),
        basis=_BASIS.get(row["status"], "datasheet"),
        source=row["source"],
    )


def mesh_links(mesh: str) -> tuple[Link, ...]:
    """The links of a named mesh of unequal pairs."""
    row = next(row for row in rows("meshes") if row["name"] == mesh)
    return tuple(
        Link(a=f"gpu{a}", b=f"gpu{b}", kind="nvlink", Bps=count * row["link_GBps"] * 1e9)
        for a, b, count in row["links"]
    )


def _price_note(row: Row) -> str:
    said = (row.get("price_scope"), row.get("price_date"), row.get("price_source"))
    return "; ".join(part for part in said if part) if "price_USD_per_hour" in row else ""
