"""The model of PyTorch's caching allocator: its rules one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.capture.cuda_allocator import CachingAllocator

MIB = 2**20


def filled(allocator: CachingAllocator, *sizes: int) -> CachingAllocator:
    """The allocator with blocks named 0, 1, 2, …"""
    for block, size in enumerate(sizes):
        allocator.allocate(block, size)
    return allocator


class TestSizes:
    @pytest.mark.parametrize(("asked", "taken"), [(0, 0), (1, 512), (512, 512), (513, 1024), (3 * MIB + 1, 3 * MIB + 512)])
    def test_are_rounded_to_512_bytes(self, asked: int, taken: int) -> None:
        assert filled(CachingAllocator(), asked).allocated_bytes == taken

    @pytest.mark.parametrize(
        ("asked", "segment"),
        [
            (0, 0),
            (1, 2 * MIB),
            (MIB, 2 * MIB),
            (MIB + 1, 20 * MIB),
            (10 * MIB - 512, 20 * MIB),
            (10 * MIB, 10 * MIB),
            (10 * MIB + 1, 12 * MIB),
            (500 * MIB, 500 * MIB),
        ],
    )
    def test_decide_how_large_a_segment_is(self, asked: int, segment: int) -> None:
        assert filled(CachingAllocator(), asked).reserved_bytes == segment

    def test_small_and_large_do_not_share_segments(self) -> None:
        assert filled(CachingAllocator(), 3 * MIB, 512).reserved_bytes == 22 * MIB
        assert filled(CachingAllocator(), 512, MIB + 1).reserved_bytes == 22 * MIB

    def test_of_nothing_can_be_freed(self) -> None:
        allocator = filled(CachingAllocator(), 0)
        allocator.free(0)
        assert allocator.peak_reserved_bytes == 0


class TestSplitting:
    def test_a_small_rest_of_512_bytes_is_a_block(self) -> None:
        assert filled(CachingAllocator(), MIB, MIB - 512, 512).reserved_bytes == 2 * MIB
        assert filled(CachingAllocator(), MIB, MIB - 512, 513).reserved_bytes == 4 * MIB

    def test_a_large_rest_of_1_mib_stays_with_its_block(self) -> None:
        assert filled(CachingAllocator(), 19 * MIB).allocated_bytes == 20 * MIB
        assert filled(CachingAllocator(), 19 * MIB - 512).allocated_bytes == 19 * MIB - 512

    def test_blocks_beyond_the_limit_are_given_whole_or_not_at_all(self) -> None:
        allocator = filled(CachingAllocator(max_split_size=25 * MIB), 100 * MIB)
        allocator.free(0)
        allocator.allocate("below the limit", 5 * MIB)
        assert allocator.reserved_bytes == 120 * MIB
        allocator.allocate("20 MiB too small for the whole", 80 * MIB)
        assert allocator.reserved_bytes == 200 * MIB
        allocator.allocate("near enough", 80 * MIB + 512)
        assert allocator.reserved_bytes == 200 * MIB
        assert allocator.allocated_bytes == 185 * MIB


class TestReuse:
    def test_what_is_freed_serves_the_next(self) -> None:
        allocator = filled(CachingAllocator(), 30 * MIB)
        allocator.free(0)
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 30 * MIB)
        allocator.allocate("next", 20 * MIB)
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (20 * MIB, 30 * MIB)
        assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (30 * MIB, 30 * MIB)

    def test_free_neighbours_become_one(self) -> None:
        for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
            allocator = filled(CachingAllocator(), 6 * MIB, 6 * MIB, 8 * MIB)
            for block in order:
                allocator.free(block)
            allocator.allocate("whole", 20 * MIB)
            assert allocator.reserved_bytes == 20 * MIB

    def test_two_segments_never_become_one(self) -> None:
        allocator = filled(CachingAllocator(), 20 * MIB, 20 * MIB)
        allocator.free(0)
        allocator.free(1)
        allocator.allocate("larger", 22 * MIB)
        assert allocator.reserved_bytes == 62 * MIB

    def test_the_smallest_block_that_fits_is_taken(self) -> None:
        allocator = filled(CachingAllocator(), 40 * MIB, 30 * MIB, 50 * MIB)
        for block in (0, 1, 2):
            allocator.free(block)
        for size in (25, 40, 50):
            allocator.allocate(size, size * MIB)
        assert allocator.reserved_bytes == 120 * MIB

    @pytest.mark.parametrize(("separate_first", "given_back"), [(True, 0), (False, 30 * MIB)])
    def test_of_equal_blocks_the_lowest_is_taken(self, separate_first: bool, given_back: int) -> None:
        allocator = CachingAllocator()
        for block, size in (("separate", 30), ("wide", 60)) if separate_first else (("wide", 60), ("separate", 30)):
            allocator.allocate(block, size * MIB)
        allocator.free("wide")
        allocator.allocate("half", 30 * MIB)
        allocator.allocate("other half", 30 * MIB)
        allocator.free("half")
        allocator.free("separate")
        allocator.allocate("fits both", 30 * MIB)
        allocator.release_cached()
        assert 90 * MIB - allocator.reserved_bytes == given_back

    def test_a_name_in_use_is_refused(self) -> None:
        with pytest.raises(ValueError, match="block 0 is allocated already"):
            filled(CachingAllocator(), 1).allocate(0, 1)


class TestGivingBack:
    def test_only_whole_segments_go(self) -> None:
        allocator = filled(CachingAllocator(), 5 * MIB, 5 * MIB, 30 * MIB, 512)
        for block in (0, 2, 3):
            allocator.free(block)
        assert allocator.reserved_bytes == 52 * MIB
        allocator.release_cached()
        assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (20 * MIB, 52 * MIB)

    @pytest.mark.parametrize("expandable", [False, True])
    def test_a_full_device_gets_the_cache_back(self, expandable: bool) -> None:
        allocator = filled(CachingAllocator(expandable_segments=expandable, capacity=62 * MIB), 512, 30 * MIB)
        allocator.free(1)
        allocator.allocate("larger", 60 * MIB)
        assert allocator.peak_reserved_bytes == allocator.reserved_bytes == 62 * MIB
        with pytest.raises(MemoryError, match="do not fit"):
            allocator.allocate("too much", 2 * MIB)
        allocator.free("larger")
        allocator.allocate("after the failure", 2 * MIB)


class TestExpandableSegments:
    def test_grow_by_whole_pages_beyond_what_is_free_at_the_end(self) -> None:
        allocator = filled(CachingAllocator(expandable_segments=True), 3 * MIB, 30 * MIB)
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (33 * MIB, 40 * MIB)
        allocator.allocate("rest", 7 * MIB)
        allocator.allocate("small", 512)
        assert allocator.reserved_bytes == 42 * MIB

    def test_split_large_blocks_to_512_bytes(self) -> None:
        assert filled(CachingAllocator(expandable_segments=True), 20 * MIB - 512).allocated_bytes == 20 * MIB - 512

    def test_spare_the_block_at_the_end(self) -> None:
        allocator = filled(CachingAllocator(expandable_segments=True), 12 * MIB, 4 * MIB)
        allocator.free(0)
        allocator.allocate("not in the 4 MiB at the end", 3 * MIB)
        allocator.allocate("more than the 9 MiB left", 10 * MIB)
        assert allocator.reserved_bytes == 40 * MIB

    def test_give_back_pages_from_the_middle(self) -> None:
        allocator = filled(CachingAllocator(expandable_segments=True), 5 * MIB, 50 * MIB, 5 * MIB)
        allocator.free(1)
        allocator.release_cached()
        assert allocator.reserved_bytes == 40 * MIB
        allocator.allocate("left of the hole", 15 * MIB)
        allocator.allocate("right of the hole", 15 * MIB)
        assert allocator.reserved_bytes == 40 * MIB


sizes = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(1, 60 * MIB))
steps = st.lists(st.tuples(sizes, st.booleans(), st.integers(0, 10**6)), max_size=60)
options = st.fixed_dictionaries({"expandable_segments": st.booleans(), "max_split_size": st.sampled_from([None, 20 * MIB, 30 * MIB])})


@given(steps, options)
def test_memory_is_neither_lost_nor_invented(steps: list[tuple[int, bool, int]], options: dict[str, bool | int | None]) -> None:
    allocator = CachingAllocator(**options)  # type: ignore[arg-type]
    pools = (allocator._small, allocator._large)
    in_use: dict[int, int] = {}
    reserved = 0
    for block, (size, frees, which) in enumerate(steps):
        if frees and in_use:
            freed = list(in_use)[which % len(in_use)]
            allocator.free(freed)
            del in_use[freed]
        else:
            allocator.allocate(block, size)
            in_use[block] = size
        assert sum(in_use.values()) <= allocator.allocated_bytes <= allocator.reserved_bytes == allocator.peak_reserved_bytes
        assert allocator.reserved_bytes >= reserved
        reserved = allocator.reserved_bytes
        assert sum(size for pool in pools for size, _ in pool.free_blocks) == reserved - allocator.allocated_bytes
    for block in in_use:
        allocator.free(block)
    if not options["expandable_segments"]:
        assert all(pool.free_blocks == sorted(pool.segments) for pool in pools)
    allocator.release_cached()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)
