"""A model of PyTorch's CUDA caching allocator: what a stream of allocations and frees reserves on the device.

Sizes and rules after pytorch/pytorch: c10/cuda/CUDACachingAllocator.cpp, with its default settings (no expandable
segments, no limit on splitting):

- requests are rounded up to 512 bytes;
- requests of at most 1 MiB live in the small pool, whose segments are 2 MiB; larger ones in the large pool, whose
  segments are 20 MiB for requests under 10 MiB and otherwise the request rounded up to 2 MiB;
- the smallest free block of the pool that is large enough is taken, the lowest address among equals;
- a block is split when the rest is at least 512 bytes (small pool) or more than 1 MiB (large pool);
- neighbouring free blocks of one segment merge;
- every stream has pools of its own;
- when a new segment would exceed the capacity, segments that are wholly free are given back first.

What it leaves out: blocks that wait for another stream (record_stream), workspaces of libraries, the context.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from strategist.records import dataclass

MIN_BLOCK = 512
SMALL_REQUEST = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
MIN_LARGE_REQUEST = 10 << 20
ROUND_LARGE = 2 << 20


def rounded(size: int) -> int:
    """Bytes a request of `size` > 0 bytes takes inside a block."""
    return -(-size // MIN_BLOCK) * MIN_BLOCK


def segment_size(size: int) -> int:
    """Bytes of the segment that is opened for a rounded request."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < MIN_LARGE_REQUEST:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


class _Block:
    """A piece of a segment, with its neighbours in address order."""

    __slots__ = ("after", "before", "is_free", "segment", "size", "start")

    def __init__(self, segment: int, start: int, size: int) -> None:
        self.segment, self.start, self.size = segment, start, size
        self.is_free = True
        self.before: _Block | None = None
        self.after: _Block | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """Order of the search: smallest first, then lowest address."""
        return self.size, self.segment, self.start


class _Pool:
    """Blocks of one stream and one class of sizes."""

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self._keys: list[tuple[int, int, int]] = []
        self._free: dict[tuple[int, int], _Block] = {}

    def add(self, block: _Block) -> None:
        """Offer a free block."""
        block.is_free = True
        insort(self._keys, block.key)
        self._free[block.segment, block.start] = block

    def remove(self, block: _Block) -> None:
        """Take a free block out of the offers."""
        del self._keys[bisect_left(self._keys, block.key)]
        del self._free[block.segment, block.start]
        block.is_free = False

    def best_fit(self, size: int) -> _Block | None:
        """The smallest free block of at least `size` bytes, taken out; None when there is none."""
        at = bisect_left(self._keys, (size, -1, -1))
        if at == len(self._keys):
            return None
        _, segment, start = self._keys[at]
        block = self._free[segment, start]
        self.remove(block)
        return block

    def splits(self, rest: int) -> bool:
        """Whether a block is split when `rest` bytes would be left."""
        return rest >= MIN_BLOCK if self.is_small else rest > SMALL_REQUEST

    def whole_segments(self) -> list[_Block]:
        """Free blocks that are a whole segment."""
        return [block for block in self._free.values() if block.before is None and block.after is None]


@dataclass(frozen=True, slots=True)
class Reserved:
    """What a stream of events led to, in bytes: highest reserved and highest allocated (each request rounded up)."""

    reserved: int
    allocated: int


class CachingAllocator:
    """The allocator's state. Feed it `allocate` and `free`; read `peak`."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.reserved = self.allocated = 0
        self._peak_reserved = self._peak_allocated = 0
        self._pools: dict[tuple[str, bool], _Pool] = {}
        self._live: dict[int, tuple[_Pool, _Block]] = {}
        self._segments = 0

    @property
    def peak(self) -> Reserved:
        """The highest values so far."""
        return Reserved(self._peak_reserved, self._peak_allocated)

    def allocate(self, name: int, size: int, stream: str = "main") -> None:
        """Serve a request of `size` > 0 bytes under a name that is not live."""
        need = rounded(size)
        is_small = need <= SMALL_REQUEST
        pool = self._pools.setdefault((stream, is_small), _Pool(is_small))
        block = pool.best_fit(need) or self._new_segment(need)
        block.is_free = False
        self._split(pool, block, need)
        self._live[name] = (pool, block)
        self.allocated += block.size
        self._peak_allocated = max(self._peak_allocated, self.allocated)

    def free(self, name: int) -> None:
        """Give a live request back."""
        pool, block = self._live.pop(name)
        self.allocated -= block.size
        pool.add(self._merged(pool, block))

    def _new_segment(self, need: int) -> _Block:
        size = segment_size(need)
        if self.capacity is not None and self.reserved + size > self.capacity:
            self._give_back()
        self._segments += 1
        self.reserved += size
        self._peak_reserved = max(self._peak_reserved, self.reserved)
        return _Block(self._segments, 0, size)

    def _give_back(self) -> None:
        """Return every segment without a live block to the device."""
        for pool in self._pools.values():
            for block in pool.whole_segments():
                pool.remove(block)
                self.reserved -= block.size

    @staticmethod
    def _split(pool: _Pool, block: _Block, need: int) -> None:
        rest = block.size - need
        if not pool.splits(rest):
            return
        tail = _Block(block.segment, block.start + need, rest)
        tail.before, tail.after = block, block.after
        if block.after is not None:
            block.after.before = tail
        block.after, block.size = tail, need
        pool.add(tail)

    @staticmethod
    def _merged(pool: _Pool, block: _Block) -> _Block:
        """The block joined with its free neighbours, which leave the pool."""
        before, after = block.before, block.after
        if after is not None and after.is_free:
            pool.remove(after)
            _join(block, after)
        if before is not None and before.is_free:
            pool.remove(before)
            _join(before, block)
            return before
        return block


def _join(first: _Block, second: _Block) -> None:
    """Let `first` take the space of `second`, which lies right behind it."""
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
