"""How flat ranges and rows are cut over ranks, and boxes of such ranges: integers, no torch."""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit._errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


# --- boxes ----------------------------------------------------------------------------------------
#
# A rank owns a range of a flattened tensor. Checkpoints use boxes: an offset and a size for each
# dim. A range consists of a few boxes: the rest of the row in which it begins, the whole rows, the
# start of the row in which it ends, and so on in every dim::
#
#     shape (4, 6), range [4, 21)      . . . . a a      a  offsets (0, 4)  sizes (1, 2)
#                                      b b b b b b      b  offsets (1, 0)  sizes (2, 6)
#                                      b b b b b b
#                                      c c c . . .      c  offsets (3, 0)  sizes (1, 3)
#
# Pure integer arithmetic; no torch.


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor, contiguous in the flattened tensor."""

    offsets: tuple[int, ...]  # Position where the box begins, per dim.
    sizes: tuple[int, ...]  # Extent per dim; none is 0 unless the tensor is empty.
    start: int  # Position of its first element in the range that the box is a part of.

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def stop(self) -> int:
        """Position of its last element in the range, plus one."""
        return self.start + self.numel


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the boxes that make up [start, stop) of a flattened tensor, in order.

    Args:
        shape: Shape of the tensor; ``()`` has one element and one box without dims.
        start: First element.
        stop: End of the range; no boxes if it is not beyond `start`.

    Returns:
        Disjoint boxes that cover the range, at most ``2 * len(shape) - 1`` (one for no dim).

    Cost: O(len(shape) ** 2); nothing depends on sizes.
    """
    if start == 0 and 0 < stop == math.prod(shape):
        return [Box((0,) * len(shape), tuple(shape), 0)]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    boxes: list[Box] = []
    position = start
    while position < stop:
        # The widest dim along which a box can begin here and end by `stop`.
        fits = (position % stride == 0 and position + stride <= stop for stride in strides)
        dim = next((dim for dim, is_fit in enumerate(fits) if is_fit), len(shape))
        index = [position // stride % size for size, stride in zip(shape, strides, strict=True)]
        sizes = [1] * len(shape)
        numel = 1
        if dim < len(shape):
            # Whole steps along `dim`, with all of the dims behind it. They do not go beyond its
            # end, since the next wider dim would have been taken there.
            steps = min((stop - position) // strides[dim], shape[dim] - index[dim])
            sizes[dim:] = [steps, *shape[dim + 1 :]]
            numel = steps * strides[dim]
        boxes.append(Box(tuple(index), tuple(sizes), position - start))
        position += numel
    return boxes


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a tensor that a rank holds in tensor parallelism, in memory of its own.

    It is a box of the tensor if it is taken from one of its groups along a dim, or one box of each
    group, one after the other (gate and up weights in one tensor).
    """

    # Shape of the part, with a dim for the number of groups if there are several.
    shape: tuple[int, ...]
    # Position in the tensor, or in each group, where the part begins, for each dim.
    offsets: tuple[int, ...]
    group_dim: int | None = None  # The dim for the number of groups; None: there is one group.
    group_size: int = 0  # Size of a group of the tensor along its dim.

    def boxes(self, start: int, stop: int) -> list[Box]:
        """Return the boxes of the tensor that make up [start, stop) of the flattened part."""
        boxes = [
            Box(tuple(map(operator.add, box.offsets, self.offsets)), box.sizes, box.start)
            for box in boxes_of_range(self.shape, start, stop)
        ]
        if self.group_dim is None:
            return boxes
        return [each for box in boxes for each in self._of_one_group(box, self.group_dim)]

    def _of_one_group(self, box: Box, group_dim: int) -> Iterator[Box]:
        """Yield the boxes of a box of several groups, each of one group, in the tensor's dims."""
        at = group_dim + 1
        numel = math.prod(box.sizes[at:])
        outer = (range(o, o + s) for o, s in zip(box.offsets[:at], box.sizes[:at], strict=True))
        for number, (*index, group) in enumerate(itertools.product(*outer)):
            first, *rest = box.offsets[at:]
            offsets = (*index, group * self.group_size + first, *rest)
            yield Box(offsets, (*(1,) * group_dim, *box.sizes[at:]), box.start + number * numel)


# --- flat layouts ---------------------------------------------------------------------------------
#
# Pure integer arithmetic, equal on every rank; no torch, no process group.
#
# ``Flat`` puts parameters end to end, each start aligned to 16 bytes, then cuts the whole into
# equal, 16-byte-aligned ranges, one per rank; a cut may fall anywhere, also inside a parameter::
#
#     flat space   | w0 . . . . . . . | b0 | pad | w1 . . . . . . . . . . | pad |
#     ranks        | rank 0       | rank 1       | rank 2       | rank 3       |
#
# For all code above, a layout says one thing: for each parameter and rank, which range of the
# flattened parameter the rank owns, and where that range lies in the rank's shard.

ALIGN_NBYTES = 16  # Vectorized kernels and NCCL want 16-byte-aligned starts.


def align_up(numel: int, multiple: int) -> int:
    """Round `numel` up to a multiple of `multiple`."""
    return -(-numel // multiple) * multiple


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """What the layouts of a bucket have in common: shards of one size."""

    shapes: tuple[tuple[int, ...], ...]  # Global shape of each parameter, in bucket order.
    numels: tuple[int, ...]  # Number of elements of each parameter.
    offsets: tuple[int, ...]  # Position of each parameter; see the subclass.
    shard_numel: int  # Number of elements of every rank's shard, padding included.
    world_size: int  # Number of shards.

    @property
    def padded_numel(self) -> int:
        """Elements of all shards, padding included."""
        return self.shard_numel * self.world_size

    @property
    def padding_numel(self) -> int:
        """Elements of the shards that belong to no parameter."""
        return self.padded_numel - sum(self.numels)

    def cut(self, index: int) -> tuple[int, int, int, int]:
        """Return the numbers that decide how parameter `index` is cut; equal cuts, equal pieces.

        They are (offset, numel, shard_numel, world_size) of a `FlatLayout`.
        """
        return self.offsets[index], self.numels[index], self.shard_numel, self.world_size

    def owned_range(self, index: int, rank: int) -> tuple[int, int]:
        """Return [start, stop) of flattened parameter `index` that `rank` owns; may be empty."""
        offset, numel, shard_numel, _ = self.cut(index)
        start = rank * shard_numel - offset
        return min(max(start, 0), numel), min(max(start + shard_numel, 0), numel)

    def shard_range(self, index: int, rank: int) -> tuple[int, int]:
        """Return [start, stop) in `rank`'s shard where its piece of parameter `index` lies.

        The range excludes padding. An empty piece is ``(0, 0)``.
        """
        start, stop = self.owned_range(index, rank)
        if start == stop:
            return 0, 0
        _, _, shard_numel, _ = self.cut(index)
        shift = self.offsets[index] - rank * shard_numel
        return start + shift, stop + shift

    def owners(self, index: int) -> range:
        """Return the consecutive ranks that own a part of parameter `index`; may be empty."""
        offset, numel, shard_numel, _ = self.cut(index)
        if numel == 0:
            return range(0)
        return range(offset // shard_numel, (offset + numel - 1) // shard_numel + 1)


def _checked(shapes: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return shapes as tuples; refuse negative dims."""
    for shape in shapes:
        if any(dim < 0 for dim in shape):
            msg = f"a shape must not have negative dimensions, got {tuple(shape)}."
            raise LayoutError(msg)
    return tuple(map(tuple, shapes))


def _end_to_end(numels: Sequence[int], multiple: int) -> tuple[tuple[int, ...], int]:
    """Return the starts of parts that lie end to end, each aligned, and the end of the last one."""
    offsets, end = [], 0
    for numel in numels:
        offsets.append(align_up(end, multiple))
        end = offsets[-1] + numel
    return tuple(offsets), end


class FlatLayout(BucketLayout):
    """The `Flat` layout of one bucket; make it by `FlatLayout.plan`.

    `offsets` has the position of the first element of each parameter in the flat space.
    """

    __slots__ = ()

    @classmethod
    def plan(cls, shapes: Sequence[Sequence[int]], *, world_size: int, itemsize: int) -> FlatLayout:
        """Lay out parameters of `shapes` over `world_size` ranks.

        Args:
            shapes: Global shapes; ``()`` is a scalar, a 0 in a shape an empty parameter.
            world_size: Number of ranks of the shard axis, at least 1.
            itemsize: Number of bytes per element of the SMALLEST dtype the bucket travels in, so
                that starts are aligned in every dtype.

        Raises:
            LayoutError: If `world_size` or `itemsize` is below 1, or a dim negative.

        Cost: O(number of parameters); nothing depends on the world size or the sizes.
        """
        if world_size < 1 or itemsize < 1:
            msg = (
                f"world_size and itemsize must be at least 1, got {world_size} and {itemsize}. "
                f"Pass the size of the shard axis and the element size in bytes."
            )
            raise LayoutError(msg)
        multiple = max(1, ALIGN_NBYTES // itemsize)
        fixed = _checked(shapes)
        numels = tuple(map(math.prod, fixed))
        offsets, end = _end_to_end(numels, multiple)
        shard_numel = align_up(-(-end // world_size), multiple)
        return cls(fixed, numels, offsets, shard_numel, world_size)

    @classmethod
    def of_one(cls, shape: Sequence[int], cut: tuple[int, int, int, int]) -> FlatLayout:
        """Return a layout of one parameter that is cut as `cut` of another layout describes."""
        offset, numel, shard_numel, world_size = cut
        return cls((tuple(shape),), (numel,), (offset,), shard_numel, world_size)


# --- even layouts ---------------------------------------------------------------------------------
#
# Pure integer arithmetic; no torch. A compiler that makes one program for all ranks (XLA) needs
# tiles of one size, so a bucket cannot be cut at any element. ``Even`` cuts every parameter into
# equal parts, the last ones padded, and puts the parts of a rank side by side::
#
#     parameters   | w0 . . . . . . . . . . . | b0 . . |
#     shard of 0   | w0[0:3]  | b0[0:1] | pad |
#     shard of 1   | w0[3:6]  | b0[1:2] | pad |
#
# Gathered, the shards are the rows of a matrix, and a parameter is a range of its columns,
# flattened.

ALIGN_NUMEL = 128
"""Vector lanes of a TPU: the compiler pads shards of other sizes, in every operator."""


@dataclass(frozen=True, slots=True)
class EvenLayout(BucketLayout):
    """The `Even` layout of one bucket; make it by `EvenLayout.plan`.

    `offsets` has the position of the first element of each parameter's part in a shard.
    """

    # Number of elements of each parameter's part, padding included; equal on all ranks.
    sizes: tuple[int, ...]

    @classmethod
    def plan(cls, shapes: Sequence[Sequence[int]], *, world_size: int) -> EvenLayout:
        """Lay out parameters of `shapes` over `world_size` ranks.

        Args:
            shapes: Global shapes; ``()`` is a scalar, a 0 in a shape an empty parameter.
            world_size: Number of ranks of the shard axis, at least 1.

        Raises:
            LayoutError: If `world_size` is below 1, or a dim negative.

        Cost: padding of less than `world_size` elements per parameter and 128 per shard.
        """
        if world_size < 1:
            msg = f"world_size must be at least 1, got {world_size}. Pass the size of the axis."
            raise LayoutError(msg)
        fixed = _checked(shapes)
        numels = tuple(map(math.prod, fixed))
        sizes = tuple(-(-numel // world_size) for numel in numels)
        offsets, end = _end_to_end(sizes, 1)
        return cls(fixed, numels, offsets, align_up(end, ALIGN_NUMEL), world_size, sizes)

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

    def cut(self, index: int) -> tuple[int, int, int, int]:
        """Return the numbers that decide how parameter `index` is cut; equal cuts, equal pieces.

        As in a `FlatLayout` of this parameter alone, at the start, with shards of this size.
        """
        return 0, self.numels[index], self.sizes[index], self.world_size
