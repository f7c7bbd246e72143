"""What torch's caching allocator reserves on a CUDA device for the memory of a dry run.

The allocator asks the driver for segments and cuts blocks from them. It keeps segments, so what it
reserves depends on the order of all allocations. `reserved_nbytes` repeats them in that order.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit._layout import align_up

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardkit.planning._meter import HeldMemory

_MIB = 2**20
_ROUNDING = 512
_SMALL = _MIB  # Blocks up to this size come from segments of their own, of 2 MiB each.
_MEDIUM = 10 * _MIB  # Smaller ones come from segments of 20 MiB.
_CHUNK = 32 * _MIB  # The driver gives out addresses from chunks, each below the one before.


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a segment, in use or free."""

    address: int
    nbytes: int
    is_small: bool  # Whether it is a part of a segment for small blocks.
    before: _Block | None = None  # Neighbor below it in its segment.
    after: _Block | None = None  # Neighbor above it.
    is_free: bool = False


def _order(block: _Block) -> tuple[int, int]:
    """Return what free blocks are sorted by."""
    return block.nbytes, block.address


class _CachingAllocator:
    """The allocator of one stream with its default settings (torch 2.9 to 2.13)."""

    def __init__(self) -> None:
        self.reserved = 0  # Bytes of all segments. None is given back.
        self._free: dict[bool, list[_Block]] = {True: [], False: []}  # By `is_small`.
        self._bottom = 0
        self._gaps: list[tuple[int, int]] = []

    def allocate(self, nbytes: int) -> _Block:
        """Return the smallest free block that is large enough, or a part of a new segment."""
        nbytes = max(_ROUNDING, align_up(nbytes, _ROUNDING))
        is_small = nbytes <= _SMALL
        free = self._free[is_small]
        place = bisect.bisect_left(free, nbytes, key=lambda each: each.nbytes)
        block = free.pop(place) if place < len(free) else self._segment(nbytes)
        block.is_free = False
        left = block.nbytes - nbytes
        if left >= _ROUNDING if is_small else left > _SMALL:
            rest = _Block(block.address + nbytes, left, is_small, block, block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.nbytes, block.after = nbytes, rest
            self.free(rest)
        return block

    def free(self, block: _Block) -> None:
        """Keep a block, as one with free neighbors."""
        free = self._free[block.is_small]
        for other in (block.after, block.before):
            if other is None or not other.is_free:
                continue
            del free[bisect.bisect_left(free, _order(other), key=_order)]
            low, high = (block, other) if other is block.after else (other, block)
            low.nbytes, low.after = low.nbytes + high.nbytes, high.after
            if low.after is not None:
                low.after.before = low
            block = low
        block.is_free = True
        bisect.insort(free, block, key=_order)

    def _segment(self, nbytes: int) -> _Block:
        is_small = nbytes <= _SMALL
        if is_small:
            size = 2 * _MIB
        else:
            size = 20 * _MIB if nbytes < _MEDIUM else align_up(nbytes, 2 * _MIB)
        self.reserved += size
        return _Block(self._address(size), size, is_small)

    def _address(self, nbytes: int) -> int:
        """Return where a segment lies: among free blocks of one size the lowest is taken first."""
        for place, (begin, room) in enumerate(self._gaps):
            if room >= nbytes:
                self._gaps[place] = (begin + nbytes, room - nbytes)
                return begin
        chunk = align_up(nbytes, _CHUNK)
        self._bottom -= chunk
        self._gaps.insert(0, (self._bottom + nbytes, chunk - nbytes))
        return self._bottom


def reserved_nbytes(memories: Iterable[HeldMemory]) -> int:
    """Return the bytes that the allocator reserves after all memory of a dry run came and went.

    Memory of the host does not count.
    """
    allocator = _CachingAllocator()
    on_device = [memory for memory in memories if not memory.on_host]
    handed_on = {memory.takes_over for memory in on_device}
    changes = [(memory.born, True, memory) for memory in on_device]
    changes += [(m.died, False, m) for m in on_device if m.died is not None and m not in handed_on]
    blocks: dict[HeldMemory, _Block] = {}
    for _, is_born, memory in sorted(changes, key=lambda change: change[:2]):
        if not is_born:
            allocator.free(blocks.pop(memory))
        elif memory.takes_over is not None:
            blocks[memory] = blocks.pop(memory.takes_over)
        else:
            blocks[memory] = allocator.allocate(memory.nbytes)
    return allocator.reserved
