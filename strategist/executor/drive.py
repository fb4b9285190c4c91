"""Optimizer state on a drive: files that are gone with the process, and an optimizer that works through them block by block.

The host keeps weights and gradients; moments lie on the drive and are fetched into one of two buffers while the block in the
other one is updated and written back (ZeRO-Infinity, Rajbhandari et al. 2021, arXiv 2104.07857, section 5.1.1).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strategist.catalog import rows
from strategist.errors import InternalError
from strategist.executor.initialise import local_part
from strategist.records import dataclass, field

PLACE = "TMPDIR"
"""The environment variable that names the folder on the drive; the system's folder for temporary files without it."""
ALIGNMENT = 16
"""Bytes: where a state begins in a block is a multiple of it, so that any number format can be read there."""


def block_elements() -> int:
    """Weights whose state is carried at once (catalogue: overheads)."""
    return int(next(row["value"] for row in rows("overheads") if row["name"] == "drive_block_elements"))


class Drive:
    """Room in files, and one thread that carries bytes to and from them in the order in which it was told."""

    def __init__(self) -> None:
        """Raises InternalError IO for a folder that nothing can be written to."""
        self._folder = Path(os.environ.get(PLACE) or "/tmp")
        self._carrier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drive")
        self.room(1)

    def room(self, size: int) -> Tensor:
        """`size` bytes of a file as a tensor. Nobody else can open the file, and it is gone when the tensor is.

        Raises InternalError IO where the file cannot be made or the drive is full.
        """
        try:
            with NamedTemporaryFile(dir=self._folder, prefix="strategist-") as file:
                os.posix_fallocate(
                    file.fileno(), 0, size
                )  # a full drive must not show itself in a later write to memory
                return torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
        except OSError as problem:
            raise InternalError(
                "IO",
                f"The optimizer's state cannot be put into {self._folder} ({size} bytes): {problem.strerror}.",
                flag=PLACE,
                value=str(self._folder),
                hint=f"Set the environment variable {PLACE} to a folder on a drive with enough room.",
            ) from None

    def copy(self, value: Tensor) -> Tensor:
        """A tensor's numbers in a file of their own. Raises as `room`."""
        size = value.numel() * value.element_size()
        return self.room(max(size, 1))[:size].view(value.dtype).view(value.shape).copy_(value)

    def carry(self, source: Tensor, target: Tensor) -> Future[Tensor]:
        """Copy one tensor to another behind all that was asked for before."""
        return self._carrier.submit(target.copy_, source)


@dataclass(slots=True, eq=False)
class Piece:
    """Some elements of a parameter, which the optimizer updates as a parameter of its own."""

    parameter: nn.Parameter
    span: slice
    part: nn.Parameter

    def lend(self) -> None:
        """Show the optimizer where the weights and their gradients lie at this moment: FSDP2 may have moved them."""
        gradient = self.parameter.grad
        self.part.data = local_part(self.parameter.detach()).view(-1)[self.span]
        self.part.grad = None if gradient is None else local_part(gradient).view(-1)[self.span]


@dataclass(frozen=True, slots=True)
class Home:
    """Where a state of a piece lies in its block: the offset is in bytes."""

    piece: Piece
    name: str
    offset: int
    shape: torch.Size
    dtype: torch.dtype

    def within(self, raw: Tensor) -> Tensor:
        """This state's place in the bytes of its block."""
        size = prod(self.shape) * self.dtype.itemsize
        return raw[self.offset : self.offset + size].view(self.dtype).view(self.shape)


@dataclass(slots=True, eq=False)
class Block:
    """Pieces whose state is carried together; it lies in `image` once it exists."""

    pieces: list[Piece]
    homes: list[Home] = field(default_factory=list)
    image: Tensor | None = None


class StateOnDrive(Optimizer):
    """The optimizer that `make` makes, with its states on a drive. It must treat each element, or each piece of a weight,
    on its own, as Adam and SGD do. A block has at most `most` elements."""

    def __init__(
        self, parameters: list[nn.Parameter], make: Callable[[list[dict[str, Any]]], Optimizer], drive: Drive, most: int
    ) -> None:
        pieces = {parameter: list(_pieces(parameter, most)) for parameter in parameters}
        self._cut = {parameter: its for parameter, its in pieces.items() if its}
        self.blocks = list(_blocks([piece for its in pieces.values() for piece in its], most))
        self.optim = make([{"params": [piece.part for block in self.blocks for piece in block.pieces]}])
        super().__init__(self.optim.param_groups, self.optim.defaults)
        self.state, self.drive = self.optim.state, drive
        self.buffers: tuple[Tensor, ...] = ()

    @property
    def images(self) -> list[Tensor]:
        """What lies on the drive."""
        return [block.image for block in self.blocks if block.image is not None]

    def whole(self) -> dict[nn.Parameter, dict[str, Any]]:
        """The states of each parameter's local part, in one piece, flat: what lies on the drive where the part is one piece there, else
        a copy of the pieces behind one another, on the drive too. Numbers are those of the first piece. Raises as `Drive.room`."""
        return {
            parameter: {name: self._joined(pieces, name) for name in self.state.get(pieces[0].part, {})}
            for parameter, pieces in self._cut.items()
        }

    def _joined(self, pieces: list[Piece], name: str) -> Any:
        values = [self.state[piece.part][name] for piece in pieces]
        if len(values) == 1 or not _is_spread(values[0]):
            return values[0]
        size = sum(value.numel() for value in values) * values[0].element_size()
        return torch.cat(values, out=self.drive.room(size).view(values[0].dtype))

    @torch.no_grad()
    def take(self, whole: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Make the states what `whole` would give."""
        for parameter, states in whole.items():
            for name, value in states.items():
                self._deal_out(self._cut[parameter], name, value)

    def _deal_out(self, pieces: list[Piece], name: str, value: Any) -> None:
        begin = 0
        for piece in pieces:
            own = self.state[piece.part][name]
            if _is_spread(own):
                own.copy_(value[begin : begin + own.numel()])
                begin += own.numel()
            else:
                self.state[piece.part][name] = value.clone() if isinstance(value, Tensor) else value

    def forget(self) -> None:
        """Have no states, as before the first step."""
        self.state.clear()
        self.buffers = ()
        for block in self.blocks:
            block.homes, block.image = [], None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every block; the state of the next one arrives, and that of the one before leaves, meanwhile."""
        if not self.images:
            self._begin()
            return
        under_way: list[Future[Tensor]] = []
        coming = self._fetch(0)
        for number, block in enumerate(self.blocks):
            coming.result()
            if number + 1 < len(self.blocks):
                coming = self._fetch(number + 1)
            here = self._buffer(number)
            self._update_in(block, here)
            under_way.append(self.drive.carry(here, _there(block)))
            self._lay(block, _there(block))
        for carried in under_way:
            carried.result()

    def _begin(self) -> None:
        """The first update of all blocks: their states are made in the host's memory and put on the drive."""
        for block in self.blocks:
            self._update(block)
            block.homes, size = _homes(block, self.state)
            block.image = self.drive.room(max(size, 1))
            for home in block.homes:
                home.within(block.image).copy_(self.state[home.piece.part][home.name])
            self._lay(block, block.image)
        largest = max((len(image) for image in self.images), default=0)
        self.buffers = tuple(torch.empty(largest, dtype=torch.uint8) for _ in range(min(2, len(self.blocks))))

    def _update_in(self, block: Block, here: Tensor) -> None:
        """Update a block whose states lie `here`; what the optimizer exchanged instead of changing it is put there, too."""
        laid = self._lay(block, here)
        self._update(block)
        for home, place in zip(block.homes, laid, strict=True):
            value = self.state[home.piece.part][home.name]
            if value is not place:
                place.copy_(value)

    def _update(self, block: Block) -> None:
        """Let the optimizer see the gradients of one block only."""
        for piece in block.pieces:
            piece.lend()
        self.optim.step()
        for piece in block.pieces:
            piece.part.grad = None

    def _buffer(self, number: int) -> Tensor:
        return self.buffers[number % 2][: len(_there(self.blocks[number]))]

    def _fetch(self, number: int) -> Future[Tensor]:
        return self.drive.carry(_there(self.blocks[number]), self._buffer(number))

    def _lay(self, block: Block, raw: Tensor) -> list[Tensor]:
        """Make the states of a block those that lie in `raw`, and give them."""
        laid = [home.within(raw) for home in block.homes]
        for home, place in zip(block.homes, laid, strict=True):
            self.state[home.piece.part][home.name] = place
        return laid


def _is_spread(value: Any) -> bool:
    """True for a state with numbers for the elements of a piece, false for one number for all of them, such as a step."""
    return isinstance(value, Tensor) and value.dim() > 0


def _there(block: Block) -> Tensor:
    if block.image is None:
        raise InternalError("INTERNAL", "A block of optimizer state was looked for before its first update.")
    return block.image


def _pieces(parameter: nn.Parameter, most: int) -> Iterator[Piece]:
    """A parameter's local part in pieces of at most `most` elements; none of an empty part."""
    flat = local_part(parameter.detach()).view(-1)
    for first in range(0, len(flat), most):
        span = slice(first, min(first + most, len(flat)))
        yield Piece(parameter, span, nn.Parameter(flat[span]))


def _blocks(pieces: list[Piece], most: int) -> Iterator[Block]:
    """Pieces in order, as many together as have at most `most` elements."""
    together: list[Piece] = []
    held = 0
    for piece in pieces:
        if together and held + piece.part.numel() > most:
            yield Block(together)
            together, held = [], 0
        together.append(piece)
        held += piece.part.numel()
    if together:
        yield Block(together)


def _homes(block: Block, states: Any) -> tuple[list[Home], int]:
    """Where the states of a block lie in it, one behind the other, and its bytes; single numbers stay in memory."""
    homes, end = [], 0
    for piece in block.pieces:
        for name, value in states[piece.part].items():
            if _is_spread(value):
                homes.append(Home(piece, name, end, value.shape, value.dtype))
                end += -(-value.numel() * value.element_size() // ALIGNMENT) * ALIGNMENT
    return homes, end
