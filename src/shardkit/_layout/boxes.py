"""Rectangular boxes that a flat range of a tensor consists of.

A rank owns a range of a flattened tensor. Checkpoints speak of boxes: an offset and a size for
each dimension. A range is a few of them: what completes the row it begins in, the whole rows, what
is left at its end, and so on in every dimension::

    shape (4, 6), range [4, 21)      . . . . a a      a  offsets (0, 4)  sizes (1, 2)
                                     b b b b b b      b  offsets (1, 0)  sizes (2, 6)
                                     b b b b b b
                                     c c c . . .      c  offsets (3, 0)  sizes (1, 3)

Pure integer arithmetic; no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor, contiguous in the flattened tensor.

    Attributes:
        offsets: Position where it begins, per dimension.
        sizes: Extent per dimension; none is 0 unless the tensor is empty.
        start: Position of its first element in the range that it is a part of.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def stop(self) -> int:
        """Where its last element lies in the range, plus one."""
        return self.start + self.numel


def boxes_of_range(
    shape: Sequence[int], start: int, stop: int, *, origin: Sequence[int] | None = None
) -> list[Box]:
    """Return the boxes that [start, stop) of a flattened tensor consists of, in its order.

    Args:
        shape: Shape of the tensor; ``()`` has one element and one box without dimensions.
        start: First element.
        stop: End of the range; no boxes if it is not beyond `start`.
        origin: Position of the tensor in a larger one whose offsets are wanted (the part that
            tensor parallelism left on this rank); None: at its beginning.

    Returns:
        Disjoint boxes that cover the range, at most ``2 * len(shape) - 1`` (one for no dimension).

    Cost: O(len(shape) ** 2); nothing depends on sizes.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    boxes: list[Box] = []
    position = start
    while position < stop:
        dim = _widest_dim(strides, position, stop)
        index = _unravel(position, shape, strides)
        sizes = [1] * len(shape)
        numel = 1
        if dim < len(shape):
            # Whole steps along `dim`, all of the dimensions behind it; never beyond its end, since
            # the next wider dimension would have been taken there.
            steps = min((stop - position) // strides[dim], shape[dim] - index[dim])
            sizes[dim:] = [steps, *shape[dim + 1 :]]
            numel = steps * strides[dim]
        if origin is not None:
            index = [i + o for i, o in zip(index, origin, strict=True)]
        boxes.append(Box(tuple(index), tuple(sizes), position - start))
        position += numel
    return boxes


def _widest_dim(strides: Sequence[int], position: int, stop: int) -> int:
    """Return the first dimension along which a box can begin at `position` and end by `stop`."""
    for dim, stride in enumerate(strides):
        if position % stride == 0 and position + stride <= stop:
            return dim
    return len(strides)


def _unravel(position: int, shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    return [position // stride % size for size, stride in zip(shape, strides, strict=True)]
