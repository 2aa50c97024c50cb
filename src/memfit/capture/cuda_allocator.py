"""From the sizes a step asks for to the bytes PyTorch's caching allocator takes from a CUDA device for them.

It takes memory in segments, cuts them into blocks, and keeps what is freed for the next request. Small requests and large ones
live in separate pools, so neither fills the other's gaps. Modelled is one stream; addresses are made up, only their order matters.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable

_ROUNDING, _MIB = 512, 2**20
_SMALL_REQUEST = _MIB
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * _MIB, 20 * _MIB
_OWN_SEGMENT, _OWN_SEGMENT_ROUNDING = 10 * _MIB, 2 * _MIB  # requests this large get a segment of their own, thus rounded
_UNLIMITED = 2**64


class _Pool:
    """The free blocks for requests of one kind; a free block is its size and its address."""

    def __init__(self, segment_size: int) -> None:
        self.segment_size, self.end = segment_size, 0
        self.segments: set[tuple[int, int]] = set()
        self.free_blocks: list[tuple[int, int]] = []  # sorted, so the first that is large enough is the best
        self._size_at: dict[int, int] = {}
        self._address_ending_at: dict[int, int] = {}

    def give(self, size: int, address: int) -> None:
        """A block becomes free, and one with its free neighbours."""
        if (before := self._address_ending_at.get(address)) is not None:
            size, address = size + self.take(before), before
        if address + size in self._size_at:
            size += self.take(address + size)
        insort(self.free_blocks, (size, address))
        self._size_at[address] = size
        self._address_ending_at[address + size] = address

    def take(self, address: int) -> int:
        """A block is free no longer; its size."""
        size = self._size_at.pop(address)
        del self._address_ending_at[address + size]
        del self.free_blocks[bisect_left(self.free_blocks, (size, address))]
        return size

    def grow(self, size: int, gap: int) -> tuple[int, int]:
        """The free block at the end, after fresh memory has come; a gap keeps segments, and so their blocks, apart."""
        self.segments.add((size, self.end + gap))
        self.give(size, self.end + gap)
        self.end += gap + size
        return self.free_at_end(), self.end - self.free_at_end()

    def free_at_end(self) -> int:
        return self.end - self._address_ending_at.get(self.end, self.end)


class CachingAllocator:
    """Follows blocks being allocated and freed, and counts what the device has to give for them.

    `allocated_bytes` is what torch.cuda.memory_allocated() would say: whole blocks, with a tail too short to be cut off.
    With a `capacity`, what is cached goes back to the device before a request fails with MemoryError.

    >>> allocator = CachingAllocator()
    >>> allocator.allocate("weight", 3 * 2**20)
    >>> allocator.allocated_bytes, allocator.reserved_bytes
    (3145728, 20971520)
    """

    def __init__(self, expandable_segments: bool = False, max_split_size: int | None = None, capacity: int | None = None) -> None:
        self.reserved_bytes = self.allocated_bytes = self.peak_reserved_bytes = self.peak_allocated_bytes = 0
        self._expandable, self._capacity = expandable_segments, _UNLIMITED if capacity is None else capacity
        self._max_split_size = _UNLIMITED if max_split_size is None else max_split_size
        self._small, self._large = _Pool(_SMALL_SEGMENT), _Pool(_LARGE_SEGMENT)
        self._in_use: dict[Hashable, tuple[_Pool, int, int]] = {}

    def allocate(self, block: Hashable, size: int) -> None:
        """Find room for a block, under any name that is not in use; like torch, take none for 0 bytes."""
        if block in self._in_use:
            raise ValueError(f"block {block!r} is allocated already: free it first, or use another name")
        size = _rounded(max(size, 0), _ROUNDING)
        pool = self._small if size <= _SMALL_REQUEST else self._large
        given, address = self._room(pool, size) if size else (0, 0)
        self._in_use[block] = pool, given, address
        self.allocated_bytes += given
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, block: Hashable) -> None:
        """Keep the room of a block for later ones; the device gets nothing back."""
        pool, size, address = self._in_use.pop(block)
        self.allocated_bytes -= size
        if size:
            pool.give(size, address)

    def release_cached(self) -> None:
        """Give back what no block in use stands in the way of, as torch.cuda.empty_cache() does."""
        for pool in (self._small, self._large):
            for size, address in list(pool.free_blocks):
                if self._expandable:
                    self._release_pages(pool, address, address + size)
                elif (size, address) in pool.segments:
                    pool.segments.remove((size, address))
                    self.reserved_bytes -= pool.take(address)

    def _release_pages(self, pool: _Pool, start: int, end: int) -> None:
        first, last = _rounded(start, pool.segment_size), end // pool.segment_size * pool.segment_size
        if first < last:
            self.reserved_bytes -= last - first
            pool.take(start)
            for left, right in ((start, first), (last, end)):
                if left < right:
                    pool.give(right - left, left)
            pool.end = first if last == pool.end else pool.end  # a hole elsewhere stays one, though torch may fill it again

    def _room(self, pool: _Pool, size: int) -> tuple[int, int]:
        """Size and address of a block that is now in use."""
        available, address = self._cached(pool, size) or self._from_device(pool, size)
        pool.take(address)
        rest = available - size
        splits_anything = pool is self._small or self._expandable
        if rest >= _ROUNDING if splits_anything else rest > _SMALL_REQUEST and size < self._max_split_size:
            pool.give(rest, address + size)
            return size, address
        return available, address

    def _cached(self, pool: _Pool, size: int) -> tuple[int, int] | None:
        """The smallest free block that is large enough, and of equals the lowest."""
        blocks, at, limit = pool.free_blocks, bisect_left(pool.free_blocks, (size, 0)), self._max_split_size
        if self._expandable and at + 1 < len(blocks) and sum(blocks[at]) == pool.end:
            at += 1  # the block at the end can grow, so it counts as the largest of all
        too_large = limit if size < limit else size + _LARGE_SEGMENT
        return blocks[at] if at < len(blocks) and blocks[at][0] < too_large else None

    def _from_device(self, pool: _Pool, size: int) -> tuple[int, int]:
        if self.reserved_bytes + self._missing(pool, size) > self._capacity:
            self.release_cached()
        missing = self._missing(pool, size)
        if self.reserved_bytes + missing > self._capacity:
            raise MemoryError(f"{size} bytes do not fit beside {self.reserved_bytes} reserved of {self._capacity}")
        self.reserved_bytes += missing
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return pool.grow(missing, gap=0 if self._expandable else _ROUNDING)

    def _missing(self, pool: _Pool, size: int) -> int:
        if self._expandable:
            return _rounded(max(size - pool.free_at_end(), 0), pool.segment_size)
        return pool.segment_size if size < _OWN_SEGMENT else _rounded(size, _OWN_SEGMENT_ROUNDING)


def _rounded(size: int, to: int) -> int:
    return -(-size // to) * to
