"""Pieces on their way to owners, and back: what is packed, sent, and put where it belongs.

[Note: buffers of an exchange]
- pieces: 1-D, one per parameter and rank; views of shards or of sharded gradients.
- send buffer: bytes: what each member gets, member by member; packed when the exchange starts.
- receive buffer: bytes: what each member sends; unpacked when it ends.
- whole: the parameter's shape, at its owner.
Both buffers live from start to end of an exchange. Their elements have one dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardkit import _compat
from shardkit._layout.exchange import gradient_traffic, value_traffic
from shardkit.backends.base import AllToAll

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from shardkit.optim._team import Team


class Gathering:
    """Pieces of parameters (values, gradients, state) that become whole ones at their owners.

    Args:
        team: Ranks and their parameters.
        indices: Indices of the parameters, one or more.
        pieces: This rank's, by index; of one dtype.
        of: Word for the pieces, for messages.

    Cost: one all-to-all: this rank sends its pieces once, to the owners in its replica.
    """

    def __init__(
        self, team: Team, indices: Sequence[int], pieces: Mapping[int, Tensor], of: str
    ) -> None:
        self._team = team
        self._pieces = pieces
        self._indices = indices
        traffic = team.traffic(gradient_traffic, indices)
        send = [[pieces[index] for index in to_one] for to_one in traffic.sends]
        gets = [
            [(index, team.spreads[index].numel_of(member)) for index in from_one]
            for member, from_one in enumerate(traffic.gets)
        ]
        self._exchange = _Exchange(team, pieces[indices[0]], indices, send, gets, of)

    def finish(self) -> dict[int, Tensor]:
        """Return the whole tensors of what belongs to this rank.

        Where its piece is all there is, the piece itself, viewed; else memory of their own.
        """
        team, wholes = self._team, {}
        copies: list[tuple[Tensor, Tensor]] = []
        for index in self._indices:
            if team.owners[index] != team.me:
                continue
            piece, shape = self._pieces[index], tuple(team.params[index].shape)
            if team.is_whole_here(index):
                wholes[index] = piece.view(shape)
                continue
            wholes[index] = piece.new_empty(shape)
            for view, part in boxes_in(team, index, team.me, wholes[index]):
                copies.append((view, piece[part].view(view.shape)))
        for member, index, segment in self._exchange.received():
            for view, part in boxes_in(team, index, member, wholes[index]):
                copies.append((view, segment[part].view(view.shape)))
        _copy_all(copies)
        return wholes


class Scattering:
    """Whole parameters at their owners, of which every member gets its piece.

    Args:
        team: Ranks and their parameters.
        indices: Indices of the parameters, one or more.
        wholes: Those of this rank, by index; of one dtype.
        of: Word for the wholes, for messages.

    Cost: one all-to-all: each rank receives its pieces once.
    """

    def __init__(
        self, team: Team, indices: Sequence[int], wholes: Mapping[int, Tensor], of: str
    ) -> None:
        self._team = team
        self._indices = indices
        self._wholes = wholes
        traffic = team.traffic(value_traffic, indices)
        send = [
            [
                view.reshape(-1)
                for index in to_one
                for view, _ in boxes_in(team, index, member, wholes[index])
            ]
            for member, to_one in enumerate(traffic.sends)
        ]
        gets = [
            [(index, team.spreads[index].numel_of(team.me)) for index in from_one]
            for from_one in traffic.gets
        ]
        self._exchange = _Exchange(team, team.piece_of(indices[0]), indices, send, gets, of)

    def finish(self, pieces: Mapping[int, Tensor]) -> None:
        """Write this rank's pieces."""
        team = self._team
        copies: list[tuple[Tensor, Tensor]] = []
        for index in self._indices:
            if team.owners[index] != team.me:
                continue
            for view, part in boxes_in(team, index, team.me, self._wholes[index]):
                target = pieces[index][part].view(view.shape)
                if target.data_ptr() != view.data_ptr():  # Else the whole is the piece.
                    copies.append((target, view))
        copies += [(pieces[index], segment) for _, index, segment in self._exchange.received()]
        _copy_all(copies)


def _copy_all(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy sources to targets: (target, source)."""
    if copies:
        _compat.foreach_copy([target for target, _ in copies], [source for _, source in copies])


class _Exchange:
    """One all-to-all; where a rank is alone, none.

    Args:
        team: Ranks and their parameters.
        like: A tensor of the dtype and device of all elements.
        indices: Parameters that travel; equal on all members.
        send: Tensors for each member, 1-D.
        gets: Parameters that come from each member, and how many elements of each.
        of: Word for what travels, for messages.
    """

    def __init__(
        self,
        team: Team,
        like: Tensor,
        indices: Sequence[int],
        send: Sequence[Sequence[Tensor]],
        gets: Sequence[Sequence[tuple[int, int]]],
        of: str,
    ) -> None:
        self._gets = gets if team.axis.size > 1 else ()
        if not self._gets:
            return
        itemsize = like.dtype.itemsize
        parts = [part.view(torch.uint8) for to_one in send for part in to_one]
        buffer = torch.cat(parts) if parts else like.new_empty(0, dtype=torch.uint8)
        send_nbytes = [sum(part.nbytes for part in to_one) for to_one in send]
        receive_nbytes = [sum(numel for _, numel in from_one) * itemsize for from_one in gets]
        total_nbytes = itemsize * sum(team.params[index].numel() for index in indices)
        self._dtype = like.dtype
        self._receive = like.new_empty(sum(receive_nbytes), dtype=torch.uint8)
        self._handle = team.axis.start_all_to_all(
            AllToAll(buffer, self._receive, send_nbytes, receive_nbytes, total_nbytes, of)
        )

    def received(self) -> Iterator[tuple[int, int, Tensor]]:
        """Wait; yield the member, the parameter and the elements of all that has come."""
        if not self._gets:
            return
        self._handle.wait()
        flat, at = self._receive.view(self._dtype), 0
        for member, from_one in enumerate(self._gets):
            for index, numel in from_one:
                yield member, index, flat[at : at + numel]
                at += numel


def boxes_in(team: Team, index: int, member: int, whole: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """Yield views of a whole that make up a member's piece, and where each lies in the piece."""
    shape, boxes = team.spreads[index].boxes_of(member)
    if not boxes:
        return
    viewed = whole.view(shape)
    for box in boxes:
        view = viewed
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            if size != shape[dim]:
                view = view.narrow(dim, offset, size)
        yield view, slice(box.start, box.stop)
