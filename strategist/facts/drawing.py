"""A cluster as an inline SVG picture: one panel per kind of node, links coloured by tier, a legend."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from math import log10

from strategist.errors import shown
from strategist.facts.hardware import Cluster, Link, Node, NodeGroup
from strategist.facts.meshes import is_mesh
from strategist.facts.outline import GROUP_LIMIT, node_title, outside, text_tree, tier_line
from strategist.facts.tier import level_of
from strategist.facts.tiers import tiers
from strategist.records import dataclass
from strategist.units import format_rate

__all__ = ["svg", "text_tree"]

WIDTH = 960
DEVICE_LIMIT = 72
LINE = 22

COLOURS = ("#2f9e44", "#e8890c", "#1c7ed6")
"""Of the levels of facts/tier.py: links that scale up, links through the host, links between nodes."""


@dataclass(frozen=True, slots=True)
class _Box:
    """A rectangle with a label."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> tuple[float, float]:
        """Its centre."""
        return self.x + self.width / 2, self.y + self.height / 2


def svg(cluster: Cluster) -> str:
    """The picture as one `<svg>` element, text escaped, without scripts, styles or references to anything outside."""
    parts: list[str] = []
    y = 44.0
    for group in cluster.groups[:GROUP_LIMIT]:
        height = _panel_height(group.node)
        parts += _panel(group, y, height)
        y += height + 26
    if cluster.nodes > 1:
        parts += _fabric(cluster, y)
        y += 44
    parts += _legend(cluster, y)
    y += LINE * (len(tiers(cluster)) + 1) + 10
    title = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)}, {cluster.world} device{'s' * (cluster.world > 1)}"
    hidden = len(cluster.groups) - GROUP_LIMIT
    more = f"; {hidden} more kinds of node are not drawn" if hidden > 0 else ""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" width="{WIDTH}" height="{y:.0f}" role="img" font-family="sans-serif">'
    return "\n".join([head, f"<title>{escape(title)}</title>", f'<rect width="{WIDTH}" height="{y:.0f}" fill="#ffffff"/>', _text(20, 28, title + more, size=16), *parts, "</svg>"])  # fmt: skip


def _is_mesh(node: Node) -> bool:
    """True where links run between devices themselves; those stand in two rows, so that links can be told apart."""
    meshed = is_mesh(node.links) or (not node.links and node.topology.endswith("-mesh"))
    return meshed and 2 < node.gpus <= 16


def _columns(node: Node) -> int:
    if _is_mesh(node):
        return -(-node.gpus // 2)
    return min(node.gpus, 8 if node.gpus <= 32 else 12)


def _pitch(node: Node) -> int:
    """From one row of devices to the next."""
    return 120 if _is_mesh(node) else 52


def _drawn(node: Node) -> int:
    return min(node.gpus, DEVICE_LIMIT)


def _helpers(node: Node) -> list[str]:
    """Switches, sockets and NICs that the links of a node name."""
    ends = (end for link in node.links for end in (link.a, link.b) if not end.startswith("gpu"))
    return list(dict.fromkeys(ends))


def _panel_height(node: Node) -> float:
    rows = -(-_drawn(node) // _columns(node))
    arches = 80 if _is_mesh(node) else 0
    return 148 + (rows - 1) * _pitch(node) + arches + (84 if _helpers(node) else 0) + 26 * (node.gpus > DEVICE_LIMIT)


def _panel(group: NodeGroup, y: float, height: float) -> Iterator[str]:
    """One kind of node: frames behind it when there are several, its devices, its links, its way out."""
    node = group.node
    for shift in (8, 4) if group.count > 1 else ():
        yield f'<rect x="{20 + shift}" y="{y + shift:.0f}" width="{WIDTH - 52}" height="{height}" rx="8" fill="#f1f3f5" stroke="#adb5bd"/>'
    yield f'<rect x="20" y="{y:.0f}" width="{WIDTH - 52}" height="{height}" rx="8" fill="#f8f9fa" stroke="#495057"/>'
    yield _text(34, y + 22, node_title(group), size=14)
    boxes = _device_boxes(node, y + (92 if _is_mesh(node) else 62))
    yield from _links(node, boxes, y + 34)
    for index, box in enumerate(boxes):
        yield _device(box, f"gpu{index}")
    if node.gpus > DEVICE_LIMIT:
        yield _text(34, boxes[-1].y + 62, f"and {node.gpus - DEVICE_LIMIT} more devices", size=12)
    yield _bar(y + height - 26, f"way out: {outside(node)}", COLOURS[2])


def _device_boxes(node: Node, top: float) -> list[_Box]:
    columns, pitch = _columns(node), _pitch(node)
    width = (WIDTH - 92) / columns
    return [
        _Box(36 + (i % columns) * width, top + (i // columns) * pitch, min(width - 8, 96), 34)
        for i in range(_drawn(node))
    ]


def _device(box: _Box, label: str) -> str:
    x, y = box.middle
    frame = f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height}" rx="4" fill="#ffffff" stroke="#343a40"/>'
    return frame + _text(x, y + 4, label, size=12, anchor="middle")


def _links(node: Node, boxes: list[_Box], bar_y: float) -> Iterator[str]:
    """The links inside a node: given ones as curves, a switch or a shared bus as a bar with stubs, pairs as bridges."""
    if node.links:
        yield from _given_links(node, boxes)
    elif node.gpus == 1 and node.fast_domain == 1:
        return
    elif node.topology == "nvlink-pairs":
        yield from _stubs(boxes, bar_y, "PCIe through the host", COLOURS[1])
        for a, b in zip(boxes[::2], boxes[1::2], strict=False):
            yield _line(a.middle, b.middle, COLOURS[0], node.intra_Bps)
    elif node.topology.endswith("-mesh") and len(boxes) <= 16:
        for i, a in enumerate(boxes):
            yield from (
                _curve(a.middle, b.middle, boxes[0].middle[1], COLOURS[0], node.pair_Bps) for b in boxes[i + 1 :]
            )
    else:
        wide = f", domains of {node.fast_domain} devices" if node.fast_domain != node.gpus else ""
        host = node.topology.startswith("pcie")
        yield from _stubs(
            boxes, bar_y, f"{node.topology}, {format_rate(node.intra_Bps)} per device{wide}", COLOURS[host]
        )


def _given_links(node: Node, boxes: list[_Box]) -> Iterator[str]:
    """Links as listed; what is not a device stands in a row under the devices."""
    places = {f"gpu{i}": box for i, box in enumerate(boxes)}
    helpers = _helpers(node)
    width = (WIDTH - 92) / max(len(helpers), 1)
    top = boxes[-1].y + 72
    places |= {name: _Box(36 + i * width, top, min(width - 8, 96), 24) for i, name in enumerate(helpers)}
    for link in node.links:
        yield from _given_link(link, places)
    for name in helpers:
        box = places[name]
        yield f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="24" rx="12" fill="#e9ecef" stroke="#495057"/>'
        yield _text(box.middle[0], box.middle[1] + 4, name, size=11, anchor="middle")


def _given_link(link: Link, places: dict[str, _Box]) -> Iterator[str]:
    if link.a in places and link.b in places:
        top = places["gpu0"].middle[1]
        yield _curve(places[link.a].middle, places[link.b].middle, top, COLOURS[level_of(link.kind)], link.Bps)


def _stubs(boxes: list[_Box], y: float, label: str, colour: str) -> Iterator[str]:
    yield from (_line(box.middle, (box.middle[0], y + 8), colour, 0.0) for box in boxes)
    yield _bar(y, label, colour)


def _bar(y: float, label: str, colour: str) -> str:
    bar = f'<rect x="34" y="{y:.0f}" width="{WIDTH - 80}" height="18" rx="4" fill="{colour}"/>'
    return bar + _text(WIDTH / 2 - 6, y + 13, label, size=12, anchor="middle", colour="#ffffff")


def _weight(Bps: float) -> float:
    """Stroke width by the order of magnitude of a rate."""
    return 1.2 if Bps <= 0 else min(5.0, max(1.0, log10(Bps) - 8.5))


def _line(a: tuple[float, float], b: tuple[float, float], colour: str, Bps: float) -> str:
    return f'<line x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}" stroke="{colour}" stroke-width="{_weight(Bps):.1f}"/>'


def _curve(a: tuple[float, float], b: tuple[float, float], top: float, colour: str, Bps: float) -> str:
    """Between rows a line; inside the top row an arch over it, inside a lower row an arch under it, higher when far."""
    rise = min(110.0, 40.0 + abs(a[0] - b[0]) / 9) if abs(a[1] - b[1]) < 1 else 0.0
    middle = (a[0] + b[0]) / 2, (a[1] + b[1]) / 2 + (-rise if abs(a[1] - top) < 1 else rise)
    return f'<path d="M{a[0]:.1f} {a[1]:.1f} Q{middle[0]:.1f} {middle[1]:.1f} {b[0]:.1f} {b[1]:.1f}" fill="none" stroke="{colour}" stroke-width="{_weight(Bps):.1f}" opacity="0.8"/>'


def _fabric(cluster: Cluster, y: float) -> Iterator[str]:
    """What joins the nodes."""
    shape = f"{len(cluster.links)} links over {len(cluster.switches)} switches" if cluster.links else "one fabric"
    over = f", oversubscribed {cluster.oversubscription:g} to 1" if cluster.oversubscription != 1.0 else ""
    yield _bar(y, f"{cluster.nodes} nodes joined by {shape}{over}", COLOURS[2])


def _legend(cluster: Cluster, y: float) -> Iterator[str]:
    yield _text(20, y + 16, "Tiers, innermost first", size=13)
    for index, tier in enumerate(tiers(cluster)):
        top = y + LINE * (index + 1)
        yield f'<rect x="20" y="{top + 4:.0f}" width="14" height="14" fill="{COLOURS[level_of(tier.kind)]}"/>'
        yield _text(42, top + 16, tier_line(tier), size=12)


def _text(x: float, y: float, words: str, *, size: int, anchor: str = "start", colour: str = "#212529") -> str:
    """One line of text; whatever steers a terminal or a parser is escaped."""
    safe = escape("".join(shown(words[i : i + 50]) for i in range(0, min(len(words), 150), 50)))
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{safe}</text>'
