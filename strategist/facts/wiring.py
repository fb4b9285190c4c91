"""The links of a hardware file, looked at before anything else is known: do they lead somewhere, do they join all?

Works on the raw document, because a link that leads nowhere is worth telling even when some key is missing too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from strategist.errors import ImpossibleError, InputError, shown

INNER_IDS = re.compile(r"(gpu|nic|nvswitch|pcie|root|numa)(0|[1-9][0-9]{0,4})")
"""What may stand at the end of a link inside a node."""


class Wire(NamedTuple):
    """The two ends of a link and where they stand in the document."""

    a: str
    b: str
    path: str


def refuse_bad_wiring(document: Mapping[str, Any]) -> None:
    """Raise InputError TOPOLOGY for a link to something that does not exist, ImpossibleError NO_PATH for islands."""
    nodes = [node for node in _listed(document.get("nodes")) if isinstance(node, Mapping)]
    for index, node in enumerate(nodes):
        _check_inside(node, f"$.nodes[{index}]")
    wires = list(_wires(document.get("links"), "$.links"))
    if wires:
        _check_between(nodes, [name for name in _listed(document.get("switches")) if isinstance(name, str)], wires)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _wires(value: Any, path: str) -> Iterator[Wire]:
    for index, link in enumerate(_listed(value)):
        if isinstance(link, Mapping) and isinstance(link.get("a"), str) and isinstance(link.get("b"), str):
            yield Wire(link["a"], link["b"], f"{path}[{index}]")


def _check_inside(node: Mapping[str, Any], path: str) -> None:
    wires = list(_wires(node.get("links"), f"{path}.links"))
    gpus = node.get("gpu_count")
    if not wires or isinstance(gpus, bool) or not isinstance(gpus, int):
        return
    for wire in wires:
        for end in (wire.a, wire.b):
            _check_id(end, gpus, node.get("nics"), wire.path)
        _refuse_loop(wire)
    _refuse_islands([f"gpu{i}" for i in range(gpus)], wires, f"{path}.links")


def _check_id(end: str, gpus: int, nics: Any, path: str) -> None:
    found = INNER_IDS.fullmatch(end)
    if found is None:
        raise _dangling(end, path, "Inside a node links join gpu0, nic0, nvswitch0, pcie0, root0, numa0 and so on.")
    number = int(found[2])
    if found[1] == "gpu" and number >= gpus:
        raise _dangling(end, path, f"The node has gpu0 to gpu{gpus - 1}.")
    if found[1] == "nic" and isinstance(nics, int) and not isinstance(nics, bool) and number >= nics:
        raise _dangling(end, path, f"The node has {nics} NICs.")


def _dangling(end: str, path: str, hint: str) -> InputError:
    return InputError("TOPOLOGY", f"{path} leads to {shown(end)}, which does not exist.", flag=path, value=end, hint=hint)  # fmt: skip


def _refuse_loop(wire: Wire) -> None:
    if wire.a == wire.b:
        raise InputError("TOPOLOGY", f"{wire.path} joins {shown(wire.a)} with itself.", flag=wire.path, value=wire.a, hint="Name two ends.")  # fmt: skip


def node_names(name: str, count: int) -> list[str]:
    """The names of the nodes of one entry: its name, or name0, name1, ... when it stands for several."""
    return [name] if count == 1 else [f"{name}{i}" for i in range(count)]


def expanded(end: str, entries: Mapping[str, int]) -> list[str]:
    """The nodes or the switch that an end of a link means; the name of an entry means all of its nodes."""
    return node_names(end, entries[end]) if end in entries else [end]


def _check_between(nodes: Iterable[Mapping[str, Any]], switches: Sequence[str], wires: Sequence[Wire]) -> None:
    entries = {node["name"]: _count(node) for node in nodes if isinstance(node.get("name"), str)}
    every = [name for entry, count in entries.items() for name in node_names(entry, count)]
    known = {*entries, *every, *switches}
    for wire in wires:
        for end in (wire.a, wire.b):
            if end not in known:
                raise _dangling(end, wire.path, "Links between nodes join names under `nodes` and words under `switches`.")  # fmt: skip
        _refuse_loop(wire)
    spread = [Wire(a, b, w.path) for w in wires for a in expanded(w.a, entries) for b in expanded(w.b, entries)]
    _refuse_islands(every, spread, "$.links")


def _count(node: Mapping[str, Any]) -> int:
    count = node.get("count", 1)
    return count if isinstance(count, int) and not isinstance(count, bool) and 0 < count <= 4096 else 1


def _refuse_islands(things: Sequence[str], wires: Iterable[Wire], path: str) -> None:
    """Raise NO_PATH when `wires` leave two of `things` apart, naming both islands."""
    island: dict[str, set[str]] = {thing: {thing} for thing in things}
    for a, b, _ in wires:
        merged = island.setdefault(a, {a}) | island.setdefault(b, {b})
        for member in merged:
            island[member] = merged
    parts = {frozenset(island[thing] & set(things)) for thing in things}
    if len(parts) > 1:
        one, other = sorted((sorted(part, key=things.index) for part in parts), key=lambda p: (-len(p), p))[:2]
        raise ImpossibleError("NO_PATH", f"Nothing connects {_named(one)} with {_named(other)}.", flag=path, hint="Add the missing link, or leave one island out.")  # fmt: skip


def _named(names: Sequence[str]) -> str:
    return shown(", ".join(names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
