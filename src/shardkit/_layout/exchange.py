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
    from collections.abc import Callable, Sequence

    from shardkit._layout.flat import FlatLayout


@dataclass(frozen=True, slots=True)
class HeldPart:
    """What a member holds of a matrix that tensor parallelism splits.

    Attributes:
        start: First element that it holds of its flattened part.
        stop: Their end.
        shape: Of the part.
        offsets: Where the part begins in the whole, per dimension.
    """

    start: int
    stop: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """Who holds what of one matrix.

    Attributes:
        shape: Of the whole.
        replicas: Of each member, the number of the replica that it belongs to.
        layout: How each replica's members cut it; not used where there are `parts`.
        index: Its position in the layout.
        places: Of each member, its place among those of the layout.
        parts: Of each member, what it holds; None: nothing but the layout cuts it.
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

    def sends_to(self, owner: int, member: int) -> bool:
        """Whether an owner gets a piece from a member: one of its replica, maybe itself."""
        return self.replicas[member] == self.replicas[owner] and self.numel_of(member) > 0

    def gets_from(self, owner: int, member: int) -> bool:
        """Whether an owner has a piece for a member, maybe itself."""
        del owner  # It has the whole.
        return self.numel_of(member) > 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one member sends and gets in one exchange: matrices by member, in one order.

    Attributes:
        sends: Of each member, the matrices of which it gets something from here.
        gets: Of each member, the matrices of which something comes from there.
    """

    sends: tuple[tuple[int, ...], ...]
    gets: tuple[tuple[int, ...], ...]


def gradient_traffic(
    spreads: Sequence[Spread], owners: Sequence[int], indices: Sequence[int], me: int
) -> Traffic:
    """Return what `me` exchanges so that the owners of matrices have whole gradients.

    What a member holds of its own matrices does not travel.

    Args:
        spreads: Of all matrices.
        owners: Of all matrices.
        indices: The matrices of this exchange, in the same order on all members.
        me: This member.
    """
    mine, others = _by_member(spreads, owners, indices, me, Spread.sends_to)
    return Traffic(sends=others, gets=mine)


def value_traffic(
    spreads: Sequence[Spread], owners: Sequence[int], indices: Sequence[int], me: int
) -> Traffic:
    """Return what `me` exchanges so that all members have their pieces of what owners have.

    See `gradient_traffic`; here all replicas get something.
    """
    mine, others = _by_member(spreads, owners, indices, me, Spread.gets_from)
    return Traffic(sends=mine, gets=others)


def _by_member(
    spreads: Sequence[Spread],
    owners: Sequence[int],
    indices: Sequence[int],
    me: int,
    takes_part: Callable[[Spread, int, int], bool],
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return the matrices of `me` by the other members that take part, and those of the others.

    Args:
        spreads: Of all matrices.
        owners: Of all matrices.
        indices: The matrices of the exchange.
        me: This member.
        takes_part: Whether a member, the last argument, exchanges a matrix with its owner.
    """
    num_members = len(spreads[0].replicas) if spreads else 0
    mine: list[list[int]] = [[] for _ in range(num_members)]
    others: list[list[int]] = [[] for _ in range(num_members)]
    for index in indices:
        spread, owner = spreads[index], owners[index]
        if owner == me:
            for member in range(num_members):
                if member != me and takes_part(spread, owner, member):
                    mine[member].append(index)
        elif takes_part(spread, owner, me):
            others[owner].append(index)
    return tuple(map(tuple, mine)), tuple(map(tuple, others))
