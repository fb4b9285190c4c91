"""The model of the caching allocator keeps the rules of the one it models."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from strategist.measure.caching_allocator import CachingAllocator, rounded, segment_size

MIB = 1 << 20
requests = st.lists(st.tuples(st.integers(1, 64 * MIB), st.sampled_from(["main", "side"])), max_size=40)


def _after(*sizes: int, **options: int) -> CachingAllocator:
    allocator = CachingAllocator(**options)
    for name, size in enumerate(sizes):
        allocator.allocate(name, size)
    return allocator


def test_small_requests_share_a_segment_of_two_mebibytes() -> None:
    """Four requests of half a mebibyte fill one small segment; a fifth opens another."""
    assert _after(*[MIB // 2] * 4).reserved == 2 * MIB
    assert _after(*[MIB // 2] * 5).reserved == 4 * MIB


def test_middling_requests_share_a_segment_of_twenty_mebibytes() -> None:
    """Requests between one and ten mebibytes are cut from segments of twenty."""
    assert _after(5 * MIB, 5 * MIB, 5 * MIB, 5 * MIB).reserved == 20 * MIB


def test_a_large_request_takes_its_own_segment() -> None:
    """From ten mebibytes on a request opens a segment of its own size, rounded up to two mebibytes."""
    assert _after(11 * MIB).reserved == 12 * MIB


def test_a_freed_block_is_taken_again() -> None:
    """What was freed serves the next request of its size, without a new segment."""
    allocator = _after(32 * MIB)
    allocator.free(0)
    allocator.allocate(1, 30 * MIB)
    assert allocator.reserved == 32 * MIB


def test_a_rest_of_at_most_one_mebibyte_is_not_split_off() -> None:
    """A large block that leaves no more than one mebibyte is handed out whole, and counts whole."""
    allocator = _after(32 * MIB)
    allocator.free(0)
    allocator.allocate(1, 31 * MIB)
    assert allocator.allocated == 32 * MIB


def test_streams_do_not_share() -> None:
    """A block freed by one stream does not serve another."""
    allocator = _after(32 * MIB)
    allocator.free(0)
    allocator.allocate(1, 32 * MIB, "side")
    assert allocator.reserved == 64 * MIB


def test_free_segments_return_when_the_device_is_full() -> None:
    """Before a new segment exceeds the capacity, segments without live blocks are given back."""
    allocator = _after(32 * MIB, 8 * MIB, capacity=64 * MIB)
    allocator.free(0)
    allocator.allocate(2, 40 * MIB)
    assert allocator.reserved == 20 * MIB + 40 * MIB


@given(requests, st.randoms(use_true_random=False))
def test_everything_freed_leaves_whole_segments(sizes: list[tuple[int, str]], random) -> None:
    """After all is freed nothing is allocated, and capacity zero would give every segment back."""
    allocator = CachingAllocator()
    for name, (size, stream) in enumerate(sizes):
        allocator.allocate(name, size, stream)
    assert allocator.allocated >= sum(rounded(size) for size, _ in sizes)
    assert allocator.reserved >= allocator.allocated
    names = list(range(len(sizes)))
    random.shuffle(names)
    for name in names:
        allocator.free(name)
    assert allocator.allocated == 0
    allocator._give_back()
    assert allocator.reserved == 0


@given(st.integers(1, 256 * MIB))
def test_a_segment_holds_its_request(size: int) -> None:
    """No request exceeds the segment opened for it."""
    assert segment_size(rounded(size)) >= rounded(size) >= size


@given(requests)
def test_repeating_a_balanced_stream_settles(sizes: list[tuple[int, str]]) -> None:
    """A step that frees all it takes finds blocks again: reserved bytes never shrink, and after some rounds stay the same.

    The second round may still reserve: small requests are served first, from the segments that the first round opened for
    larger ones.
    """
    allocator = CachingAllocator()
    reserved = []
    for _ in range(len(sizes) + 2):
        for name, (size, stream) in enumerate(sizes):
            allocator.allocate(name, size, stream)
        for name in range(len(sizes)):
            allocator.free(name)
        reserved.append(allocator.reserved)
    assert reserved == sorted(reserved)
    assert reserved[-1] == reserved[-2]
