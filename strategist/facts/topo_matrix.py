"""Read the matrix that `nvidia-smi topo -m` prints, and AMD's link type table, into one neutral form.

The layouts of many driver versions are read: tabs or blanks, an underlined header, NIC or mlx5 columns, with or without
NUMA columns, blank affinities, cells nobody has seen (`?`). What lost its tabs on the way is refused, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import dropwhile, takewhile

from strategist.errors import InputError, is_hostile, shown
from strategist.records import dataclass, field

AFFINITY_COLUMNS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
CELL = re.compile(r"NV[1-9][0-9]?|XGMI|SYS|NODE|PHB|PXB|PIX")
OLD_WORDS = {"SOC": "SYS", "PCIE": "PHB", "SELF": "X", "?": "?"}
"""Words of old drivers and of AMD's tool, in today's words."""

_DEVICE = re.compile(
    r"GPU[0-9]+|NIC[0-9]+|mlx[0-9]+_[0-9]+(?:_bond)?|(?:bnxt_re|ionic_)[0-9]+|[a-z]+[0-9]+(?:[a-z_][a-z0-9_]*)?"
)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_LEGEND = re.compile(r"\s*(NIC[0-9]+):\s*(\S+)\s*")

Links = tuple[tuple[str | None, ...], ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """How the devices of one node see each other. `links[i][j]` is X on the diagonal, None where nobody has looked.

    `affinity` holds the further columns of each GPU's row; `nic_names` the names behind NIC0, NIC1, ...
    """

    devices: tuple[str, ...]
    links: Links
    affinity: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    nic_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def gpus(self) -> tuple[str, ...]:
        """The devices that compute."""
        return tuple(device for device in self.devices if device.startswith("GPU"))

    @property
    def nics(self) -> tuple[str, ...]:
        """The devices that reach other nodes."""
        return tuple(device for device in self.devices if not device.startswith("GPU"))

    def link(self, a: str, b: str) -> str | None:
        """What joins two devices."""
        return self.links[self.devices.index(a)][self.devices.index(b)]

    def near_nics(self, gpu: str) -> tuple[str, ...]:
        """The NICs that a GPU reaches without leaving its host bridge."""
        return tuple(nic for nic in self.nics if self.link(gpu, nic) in ("PIX", "PXB", "PHB"))


def parse_matrix(text: str, flag: str = "nvidia-smi topo -m") -> Matrix:
    """The matrix in the tool's output. Raises InputError PARSE with the cell or row that makes no sense."""
    lines = list(_clean_lines(text, flag))
    if any(line.strip().startswith("LINK TYPE TABLE") for line in lines):
        return _parse_link_types(lines, flag)
    start = _header_at(lines)
    if start is None:
        raise _refusal(flag, "there is no header line that starts with GPU0", "Paste the whole output.")
    header = _Header(lines[start], flag)
    rows = [_Row(line, header, flag) for line in _matrix_lines(lines[start + 1 :], header.devices)]
    _check_rows([row.device for row in rows], header.devices, flag)
    affinity = {row.device: row.affinity for row in rows if row.device.startswith("GPU") and row.affinity}
    found = (_LEGEND.fullmatch(line) for line in lines)
    names = {match[1]: match[2] for match in found if match}
    return Matrix(header.devices, _symmetric([row.cells for row in rows], header.devices, flag), affinity, names)


def is_matrix(text: str) -> bool:
    """True for text that looks like the tool's output, readable or not."""
    lines = _ESCAPE.sub("", text).splitlines()
    return _header_at(lines) is not None and any(line.split()[:2] == ["GPU0", "X"] for line in lines)


def _header_at(lines: Sequence[str]) -> int | None:
    return next((i for i, line in enumerate(lines) if line.split() and line.split()[0] == "GPU0"), None)


def _clean_lines(text: str, flag: str) -> Iterator[str]:
    """The lines without colours; anything else that steers a terminal is refused."""
    for line in _ESCAPE.sub("", text).splitlines():
        if any(is_hostile(c) for c in line if c != "\t"):
            raise InputError("CONTROL_CHAR", f"{flag} contains a control character.", flag=flag, value=line, hint="Paste plain text.")  # fmt: skip
        yield line.rstrip()


def _refusal(flag: str, what: str, hint: str, value: object = None) -> InputError:
    return InputError("PARSE", f"{flag} cannot be read: {what}.", flag=flag, value=value, hint=hint)


class _Header:
    """The devices and further columns of a header line, and at which character each further column starts."""

    def __init__(self, line: str, flag: str) -> None:
        self.columns = tuple(name for name in AFFINITY_COLUMNS if name in line)
        self.starts = tuple(line.index(name) for name in self.columns)
        self.devices = tuple(line[: min(self.starts, default=len(line))].split())
        for device in self.devices:
            if not _DEVICE.fullmatch(device):
                raise _refusal(flag, f"{shown(device)} is not the name of a device", "Tabs may have been lost; paste the output again.", device)  # fmt: skip
        if len(set(self.devices)) < len(self.devices):
            raise _refusal(flag, "a device stands twice in the header", "Paste the output again.")


class _Row:
    """One device's cells and affinities."""

    def __init__(self, line: str, header: _Header, flag: str) -> None:
        parts = line.split("\t") if "\t" in line else line.split()
        count = len(header.devices)
        self.device = parts[0].strip()
        self.cells = [_cell(part.strip(), self.device, flag) for part in parts[1 : count + 1]]
        if len(self.cells) < count:
            raise _refusal(flag, f"the row of {shown(self.device)} has {len(self.cells)} cells, not {count}", "Tabs may have been lost; paste the output again.")  # fmt: skip
        rest = parts[count + 1 :]
        found = _by_tabs(rest, header) if "\t" in line else _by_place(line, rest, header)
        self.affinity = found if any(found.values()) else {}


def _cell(word: str, device: str, flag: str) -> str:
    """A cell in today's words."""
    word = OLD_WORDS.get(word, word)
    if word not in ("X", "?") and not CELL.fullmatch(word):
        raise _refusal(flag, f"the row of {shown(device)} has a cell {shown(word)}", "Tabs may have been lost; paste the output again.", word)  # fmt: skip
    return word


def _by_tabs(rest: Sequence[str], header: _Header) -> dict[str, str]:
    """Affinities by order; drivers print one tab too many before the last of three columns."""
    cells = [part.strip() for part in rest]
    if len(cells) == len(header.columns) + 1 and not cells[-2]:
        del cells[-2]
    return dict(zip(header.columns, cells, strict=False))


def _by_place(line: str, rest: Sequence[str], header: _Header) -> dict[str, str]:
    """Affinities by order when all are there, else each under the column that starts nearest."""
    if len(rest) == len(header.columns):
        return dict(zip(header.columns, rest, strict=True))
    found = dict.fromkeys(header.columns, "")
    at = len(line)
    for word in reversed(rest):
        at = line.rindex(word, 0, at)
        nearest = min(range(len(header.starts)), key=lambda i: abs(header.starts[i] - at))
        found[header.columns[nearest]] = word
    return found if rest else {}


def _matrix_lines(lines: Iterable[str], devices: Sequence[str]) -> Iterator[str]:
    """The lines that are rows: they start with a name, and end before the legend."""
    for line in lines:
        if not line.strip() or line.strip().endswith("Legend:"):
            return
        yield line


def _check_rows(rows: Sequence[str], devices: Sequence[str], flag: str) -> None:
    if list(rows) != list(devices):
        odd = next((d for d in (*devices, *rows) if (d in rows) != (d in devices)), "a device")
        raise _refusal(flag, f"rows and columns differ: {shown(odd)} is not in both, or they are in another order", "Paste the whole output.", odd)  # fmt: skip


def _symmetric(cells: Sequence[Sequence[str]], devices: Sequence[str], flag: str) -> Links:
    """The cells with unseen ones filled from their mirror image; a matrix that contradicts itself is refused."""
    count = range(len(devices))
    for i in count:
        for j in count:
            one, other = cells[i][j], cells[j][i]
            if (one == "X") != (i == j) or ("?" not in (one, other) and one != other):
                raise _refusal(flag, f"{devices[i]} sees {devices[j]} as {one} and is seen as {other}", "Paste the output again.")  # fmt: skip
    return tuple(tuple(_known(cells[i][j], cells[j][i]) for j in count) for i in count)


def _known(one: str, other: str) -> str | None:
    seen = one if one != "?" else other
    return None if seen == "?" else seen


def _first_block(lines: Iterable[str]) -> Iterator[str]:
    """The lines up to the next blank one: further tables follow."""
    return takewhile(str.strip, dropwhile(lambda line: not line.strip(), lines))


def _parse_link_types(lines: Sequence[str], flag: str) -> Matrix:
    """AMD's table: devices by PCI address, which become GPU0, GPU1, ... in their order."""
    start = next(i for i, line in enumerate(lines) if line.strip().startswith("LINK TYPE TABLE"))
    table = [line.split() for line in _first_block(lines[start + 1 :])]
    if not table or any(len(row) != len(table[0]) + 1 for row in table[1:]) or len(table) != len(table[0]) + 1:
        raise _refusal(flag, "the link type table is not square", "Paste the whole table.")
    addresses = table[0]
    _check_rows([row[0] for row in table[1:]], addresses, flag)
    devices = tuple(f"GPU{i}" for i in range(len(addresses)))
    cells = [[_cell(word, row[0], flag) for word in row[1:]] for row in table[1:]]
    return Matrix(devices, _symmetric(cells, devices, flag))
