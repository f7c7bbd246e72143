"""A layout whose cuts are the same on every rank: for compilers that know one program for all.

Pure integer arithmetic; no torch. Compilers of one program for all ranks (XLA) want tiles of one
size, so a bucket cannot be cut wherever a rank's range ends. ``Even`` cuts every parameter into
equal parts, the last ones padded, and puts the parts of a rank side by side::

    parameters   | w0 . . . . . . . . . . . | b0 . . |
    shard of 0   | w0[0:3]  | b0[0:1] | pad |
    shard of 1   | w0[3:6]  | b0[1:2] | pad |

Gathered, the shards are the rows of a matrix, and a parameter is a range of its columns, flattened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit._errors import LayoutError
from shardkit._layout.flat import align_up

if TYPE_CHECKING:
    from collections.abc import Sequence

ALIGN_NUMEL = 128
"""Vector lanes of a TPU: shards of another size are padded by the compiler, in every operator."""


@dataclass(frozen=True, slots=True)
class EvenLayout:
    """The `Even` layout of one bucket; make it by `EvenLayout.plan`.

    Attributes:
        shapes: Global shape of each parameter, in bucket order.
        numels: Number of elements of each parameter.
        sizes: Number of elements of each parameter's part, padding included; equal on all ranks.
        offsets: Position of the first element of each parameter's part in a shard.
        shard_numel: Number of elements of every rank's shard, padding included.
        world_size: Number of shards.
    """

    shapes: tuple[tuple[int, ...], ...]
    numels: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    shard_numel: int
    world_size: int

    @classmethod
    def plan(cls, shapes: Sequence[Sequence[int]], *, world_size: int) -> EvenLayout:
        """Lay out parameters of `shapes` over `world_size` ranks.

        Args:
            shapes: Global shapes; ``()`` is a scalar, a 0 in a shape an empty parameter.
            world_size: Number of ranks of the shard axis, at least 1.

        Raises:
            LayoutError: If `world_size` is below 1, or a dimension negative.

        Cost: padding of less than `world_size` elements per parameter and 128 per shard.
        """
        if world_size < 1:
            msg = f"world_size must be at least 1, got {world_size}. Pass the size of the axis."
            raise LayoutError(msg)
        for shape in shapes:
            if any(dim < 0 for dim in shape):
                msg = f"a shape must not have negative dimensions, got {tuple(shape)}."
                raise LayoutError(msg)
        numels = [math.prod(shape) for shape in shapes]
        sizes = [-(-numel // world_size) for numel in numels]
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += size
        return cls(
            shapes=tuple(tuple(shape) for shape in shapes),
            numels=tuple(numels),
            sizes=tuple(sizes),
            offsets=tuple(offsets),
            shard_numel=align_up(end, ALIGN_NUMEL),
            world_size=world_size,
        )

    @property
    def padded_numel(self) -> int:
        """Elements of all shards, padding included."""
        return self.shard_numel * self.world_size

    @property
    def padding_numel(self) -> int:
        """Elements of the shards that belong to no parameter."""
        return self.padded_numel - sum(self.numels)

    @property
    def tail_numel(self) -> int:
        """Elements at the end of every shard that belong to no part."""
        return self.shard_numel - sum(self.sizes)

    def padded_part_numel(self, index: int) -> int:
        """Return the elements of all parts of parameter `index`, padding included."""
        return self.sizes[index] * self.world_size

    def columns(self, index: int) -> tuple[int, int]:
        """Return [start, stop) in every shard where the part of parameter `index` lies, padded."""
        return self.offsets[index], self.offsets[index] + self.sizes[index]

    def owned_range(self, index: int, rank: int) -> tuple[int, int]:
        """Return [start, stop) of flattened parameter `index` that `rank` owns; may be empty."""
        size, numel = self.sizes[index], self.numels[index]
        return min(rank * size, numel), min((rank + 1) * size, numel)

    def shard_range(self, index: int, rank: int) -> tuple[int, int]:
        """Return [start, stop) in `rank`'s shard where its piece of parameter `index` lies.

        Without the padding of the part. An empty piece is ``(0, 0)``.
        """
        start, stop = self.owned_range(index, rank)
        if start == stop:
            return 0, 0
        return self.offsets[index], self.offsets[index] + stop - start

    def owners(self, index: int) -> range:
        """Return the consecutive ranks that own a part of parameter `index`; may be empty."""
        if self.numels[index] == 0:
            return range(0)
        return range(-(-self.numels[index] // self.sizes[index]))

    def cut(self, index: int) -> tuple[int, int, int, int]:
        """Return what decides how parameter `index` is cut; equal cuts mean equal pieces.

        In the terms of `FlatLayout`: one alone, at the start, with shards of this size.
        """
        return 0, self.numels[index], self.sizes[index], self.world_size
