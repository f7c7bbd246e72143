"""What ranks send each other, so that pieces of matrices become whole ones, and pieces again.

Pure integer arithmetic; no torch. Ranks are places among the `members` of a mesh, of all its axes.
A member holds a range of each matrix, or of the part that tensor parallelism left on it. Members
that hold one matrix together are a *replica* of it. Gradients go to a matrix' owner from the
members of its own replica; new values go from the owner to all members::

    2 replicas of 2 members, one matrix, owned by member 1

    members        0          1    |     2          3
    gradients    [0:8) ---> [8:16) |   [0:8)      [8:16)
    values       [0:8) <--- whole ------> [0:8), [8:16)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit._layout.boxes import Box, boxes_of_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit._layout.flat import FlatLayout


@dataclass(frozen=True, slots=True)
class HeldPart:
    """What a member holds of a matrix that tensor parallelism splits.

    Attributes:
        start: First element that it holds of its flattened part.
        stop: Their end.
        shape: Shape of the part.
        offsets: The place where the part begins in the whole, per dimension.
    """

    start: int
    stop: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """Who holds what of one matrix.

    Attributes:
        shape: Shape of the whole.
        replicas: The number of each member's replica.
        layout: The cut of each replica; not used where there are `parts`.
        index: Position of the matrix in the layout.
        places: Place of each member among those of the layout.
        parts: The part that each member holds; None: nothing but the layout cuts the matrix.
    """

    shape: tuple[int, ...]
    replicas: tuple[int, ...]
    layout: FlatLayout
    index: int
    places: tuple[int, ...]
    parts: tuple[HeldPart, ...] | None = None

    def range_of(self, member: int) -> tuple[int, int]:
        """Return [start, stop) of what a member holds, of the flattened whole or of its part."""
        if self.parts is not None:
            return self.parts[member].start, self.parts[member].stop
        return self.layout.owned_range(self.index, self.places[member])

    def numel_of(self, member: int) -> int:
        """Return how many elements a member holds."""
        start, stop = self.range_of(member)
        return stop - start

    def boxes_of(self, member: int) -> tuple[tuple[int, ...], list[Box]]:
        """Return what a member holds as boxes of the whole, viewed with a shape: (shape, boxes)."""
        start, stop = self.range_of(member)
        if self.parts is None:
            numel = self.layout.numels[self.index]
            return (numel,), [Box((start,), (stop - start,), 0)] if stop > start else []
        part = self.parts[member]
        return self.shape, boxes_of_range(part.shape, start, stop, origin=part.offsets)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one member sends and gets in one exchange: matrices by member, in one order.

    Attributes:
        sends: Matrices of which each member gets something from here.
        gets: Matrices of which something comes from each member.
    """

    sends: tuple[tuple[int, ...], ...]
    gets: tuple[tuple[int, ...], ...]


def gradient_traffic(
    spreads: Sequence[Spread], owners: Sequence[int], indices: Sequence[int], me: int
) -> Traffic:
    """Return what `me` exchanges so that the owners of matrices have whole gradients.

    What a member holds of its own matrices does not travel.

    Args:
        spreads: The spread of every matrix.
        owners: The owner of every matrix.
        indices: The matrices of this exchange, in the same order on all members.
        me: This member.
    """
    mine, others = _by_member(spreads, owners, indices, me, in_replica=True)
    return Traffic(sends=others, gets=mine)


def value_traffic(
    spreads: Sequence[Spread], owners: Sequence[int], indices: Sequence[int], me: int
) -> Traffic:
    """Return what `me` exchanges so that all members have their pieces of what owners have.

    See `gradient_traffic`; here all replicas get something.
    """
    mine, others = _by_member(spreads, owners, indices, me, in_replica=False)
    return Traffic(sends=mine, gets=others)


def _by_member(
    spreads: Sequence[Spread],
    owners: Sequence[int],
    indices: Sequence[int],
    me: int,
    *,
    in_replica: bool,
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return the matrices of `me` by the other members that hold a piece, and those of the others.

    With `in_replica` only members of the owner's replica take part.
    """
    num_members = len(spreads[0].replicas) if spreads else 0
    mine: list[list[int]] = [[] for _ in range(num_members)]
    others: list[list[int]] = [[] for _ in range(num_members)]
    for index in indices:
        spread, owner = spreads[index], owners[index]
        for member in range(num_members) if owner == me else (me,):
            is_in_replica = spread.replicas[member] == spread.replicas[owner]
            if member == owner or not spread.numel_of(member) or (in_replica and not is_in_replica):
                continue
            if owner == me:
                mine[member].append(index)
            else:
                others[owner].append(index)
    return tuple(map(tuple, mine)), tuple(map(tuple, others))
