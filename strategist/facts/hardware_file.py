"""The hardware file `strategist-hardware/1`: machines described by hand, in JSON, YAML or TOML (docs/hardware.md).

Two forms. Flat: the words of the flags. `nodes`: a list of node types, links inside them and links between them. A
wrong type is told before a missing or unknown key, and so is a link that leads nowhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from strategist.errors import InputError, StaleError, shown
from strategist.facts.described import DescribedGpu, DescribedLink, DescribedNode, Paths
from strategist.facts.described_cluster import build_cluster
from strategist.facts.listings import refuse_listing
from strategist.facts.resolved import Resolved
from strategist.facts.wiring import refuse_bad_wiring
from strategist.reading import PARSERS, checked, parse_document, read_text
from strategist.records import dataclass

FORMAT = "strategist-hardware/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatFile:
    """Equal nodes of one GPU, in the words of the command line."""

    gpu: str
    gpus_per_node: int | None = None
    nodes: int | None = None
    gpu_memory: str | None = None
    intra_bw: str | None = None
    inter_bw: str | None = None
    gpus: tuple[DescribedGpu, ...] = ()
    format: str = FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesFile:
    """Any nodes, joined by one fabric or by the given links between nodes and switches."""

    nodes: tuple[DescribedNode, ...]
    links: tuple[DescribedLink, ...] = ()
    switches: tuple[str, ...] = ()
    oversubscription: float = 1.0
    gpus: tuple[DescribedGpu, ...] = ()
    format: str = FORMAT


def cluster_from_file(path: str, flag: str = "--hardware") -> Resolved:
    """The cluster in a file. Raises InputError for the file, its syntax and its keys; see cluster_from_document."""
    text = read_text(path, flag)
    if os.path.splitext(path)[1].lower() not in PARSERS:
        refuse_listing(text, path, flag)
    document = parse_document(path, text, flag)
    return cluster_from_document(_with_matrices(document, os.path.dirname(path)), flag)


def _with_matrices(document: Any, folder: str) -> Any:
    """The document with the text of each matrix that it names as a file beside it."""
    nodes = document.get("nodes") if isinstance(document, Mapping) else None
    if not isinstance(nodes, list):
        return document
    return {**document, "nodes": [_with_matrix(node, folder, index) for index, node in enumerate(nodes)]}


def _with_matrix(node: Any, folder: str, index: int) -> Any:
    named = node.get("matrix") if isinstance(node, Mapping) else None
    if not isinstance(named, str) or "\n" in named:
        return node
    return {**node, "matrix": read_text(os.path.join(folder, named), f"$.nodes[{index}].matrix")}


def cluster_from_document(value: Any, flag: str = "--hardware") -> Resolved:
    """The cluster in a parsed hardware file.

    Raises InputError with the path of the first problem (further ones in `also`), TOPOLOGY for a link to something
    that does not exist, KIND for another document, StaleError SCHEMA_VERSION for another version, ImpossibleError
    NO_PATH for machines that nothing connects.
    """
    if not isinstance(value, Mapping):
        raise InputError("TYPE", f"{flag} must hold one object.", flag="$", value=value, hint="See docs/hardware.md.")
    _refuse_other_formats(value, flag)
    try:
        return _built(dict(value), flag)
    except InputError as problem:
        if problem.code in ("MISSING", "UNKNOWN_KEY"):
            refuse_bad_wiring(value)
        raise


def _refuse_other_formats(value: Mapping[str, Any], flag: str) -> None:
    found = value.get("format", FORMAT)
    if found == FORMAT or not isinstance(found, str):
        return
    if found.startswith("strategist-hardware/"):
        raise StaleError("SCHEMA_VERSION", f"{flag} has format {shown(found)}; this version reads {FORMAT}.", flag="$.format", value=found, hint="Write it in this format.")  # fmt: skip
    raise InputError("KIND", f"{flag} is not a hardware file: its format is {shown(found)}.", flag="$.format", value=found, hint=f"Write {FORMAT}, or leave the key out.")  # fmt: skip


def _built(value: dict[str, Any], flag: str) -> Resolved:
    if not isinstance(value.get("nodes"), (list, tuple)):
        return _from_flat(checked(FlatFile, value, flag))
    file = checked(NodesFile, value, flag)
    refuse_bad_wiring(value)
    return build_cluster(file.nodes, Paths("$.nodes[{index}].{key}"), gpus=file.gpus, links=file.links, switches=file.switches, oversubscription=file.oversubscription)  # fmt: skip


def _from_flat(file: FlatFile) -> Resolved:
    node = DescribedNode(
        gpu=file.gpu,
        gpu_count=file.gpus_per_node,
        count=1 if file.nodes is None else file.nodes,
        gpu_memory=file.gpu_memory,
        intra_bw=file.intra_bw,
        inter_bw=file.inter_bw,
    )
    return build_cluster((node,), Paths("$.{key}", {"gpu_count": "gpus_per_node", "count": "nodes"}), gpus=file.gpus)
