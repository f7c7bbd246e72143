"""Where each parameter lies in a bucket's flat space, and which range each rank owns.

Pure integer arithmetic, equal on every rank; no torch, no process group.

``Flat`` puts parameters end to end, each start aligned to 16 bytes, then cuts the whole into equal,
16-byte-aligned ranges, one per rank; a cut may fall anywhere, also inside a parameter::

    flat space   | w0 . . . . . . . | b0 | pad | w1 . . . . . . . . . . | pad |
    ranks        | rank 0       | rank 1       | rank 2       | rank 3       |

For everything above, a layout is one thing: for each parameter and rank, the range of the flattened
parameter that the rank owns, and where it lies in the rank's shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit._errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

ALIGN_NBYTES = 16
"""Vectorized kernels and NCCL want 16-byte-aligned starts."""


def align_up(numel: int, multiple: int) -> int:
    """Round `numel` up to a multiple of `multiple`."""
    return -(-numel // multiple) * multiple


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The `Flat` layout of one bucket; make it by `FlatLayout.plan`.

    Attributes:
        shapes: Global shape of each parameter, in bucket order.
        numels: Number of elements of each parameter.
        offsets: Position of the first element of each parameter in the flat space.
        shard_numel: Number of elements of every rank's range, padding included.
        world_size: Number of ranges.
    """

    shapes: tuple[tuple[int, ...], ...]
    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    shard_numel: int
    world_size: int

    @classmethod
    def plan(cls, shapes: Sequence[Sequence[int]], *, world_size: int, itemsize: int) -> FlatLayout:
        """Lay out parameters of `shapes` over `world_size` ranks.

        Args:
            shapes: Global shapes; ``()`` is a scalar, a 0 in a shape an empty parameter.
            world_size: Number of ranks of the shard axis, at least 1.
            itemsize: Number of bytes per element of the SMALLEST dtype the bucket travels in, so
                that starts are aligned in every dtype.

        Raises:
            LayoutError: If `world_size` or `itemsize` is below 1, or a dimension negative.

        Cost: O(number of parameters); nothing depends on the world size or the sizes.
        """
        if world_size < 1 or itemsize < 1:
            msg = (
                f"world_size and itemsize must be at least 1, got {world_size} and {itemsize}. "
                f"Pass the size of the shard axis and the element size in bytes."
            )
            raise LayoutError(msg)
        align_numel = max(1, ALIGN_NBYTES // itemsize)
        fixed_shapes, numels, offsets, end = [], [], [], 0
        for shape in shapes:
            if any(dim < 0 for dim in shape):
                msg = f"a shape must not have negative dimensions, got {tuple(shape)}."
                raise LayoutError(msg)
            start = align_up(end, align_numel)
            numel = math.prod(shape)
            fixed_shapes.append(tuple(shape))
            numels.append(numel)
            offsets.append(start)
            end = start + numel
        return cls(
            shapes=tuple(fixed_shapes),
            numels=tuple(numels),
            offsets=tuple(offsets),
            shard_numel=align_up(-(-end // world_size), align_numel),
            world_size=world_size,
        )

    @classmethod
    def of_one(cls, shape: Sequence[int], cut: tuple[int, int, int, int]) -> FlatLayout:
        """Return a layout of one parameter that is cut as `cut` of another layout says."""
        offset, numel, shard_numel, world_size = cut
        return cls(
            shapes=(tuple(shape),),
            numels=(numel,),
            offsets=(offset,),
            shard_numel=shard_numel,
            world_size=world_size,
        )

    @property
    def padded_numel(self) -> int:
        """Elements of the whole flat space, padding included."""
        return self.shard_numel * self.world_size

    @property
    def padding_numel(self) -> int:
        """Elements of the flat space that belong to no parameter."""
        return self.padded_numel - sum(self.numels)

    def owned_range(self, index: int, rank: int) -> tuple[int, int]:
        """Return [start, stop) of flattened parameter `index` that `rank` owns; may be empty."""
        shard_start = rank * self.shard_numel - self.offsets[index]
        numel = self.numels[index]
        start = min(max(shard_start, 0), numel)
        stop = min(max(shard_start + self.shard_numel, 0), numel)
        return start, stop

    def shard_range(self, index: int, rank: int) -> tuple[int, int]:
        """Return [start, stop) in `rank`'s shard where its piece of parameter `index` lies.

        An empty piece is ``(0, 0)``.
        """
        start, stop = self.owned_range(index, rank)
        if start == stop:
            return 0, 0
        shift = self.offsets[index] - rank * self.shard_numel
        return start + shift, stop + shift

    def owners(self, index: int) -> range:
        """Return the consecutive ranks that own a part of parameter `index`; may be empty."""
        numel = self.numels[index]
        if numel == 0:
            return range(0)
        first = self.offsets[index] // self.shard_numel
        last = (self.offsets[index] + numel - 1) // self.shard_numel
        return range(first, last + 1)

    def cut(self, index: int) -> tuple[int, int, int, int]:
        """Return what decides how parameter `index` is cut; equal cuts mean equal pieces."""
        return self.offsets[index], self.numels[index], self.shard_numel, self.world_size
