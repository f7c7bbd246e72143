"""How a parameter is cut where operators are traced: pieces of one length, padded at the end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F

from shardkit._errors import ShardedTensorError
from shardkit._layout.flat import FlatLayout
from shardkit._tensor.spec import Axis, ShardSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shardkit._layout.even import EvenLayout


class WholeSpec(ShardSpec):
    """By a process that holds the pieces of all ranks: end to end, the padding behind them.

    To operators it is the only rank, and owns everything.

    Args:
        shape: Shape of the parameter.
        piece_numel: Number of elements of its piece, padding included.
        **rest: Arguments of `ShardSpec`.
    """

    __slots__ = ("_padded_numel",)
    is_traced = True

    def __init__(self, shape: Sequence[int], piece_numel: int, **rest: Any) -> None:
        shape, numel = tuple(shape), math.prod(shape)
        super().__init__(FlatLayout.of_one(shape, (0, numel, numel, 1)), 0, **rest)
        self._padded_numel = piece_numel

    @property
    def piece_numel(self) -> int:
        """Elements of the piece, padding included."""
        return self._padded_numel

    def trim(self, piece: Tensor) -> Tensor:
        """Return a piece without its padding."""
        rest = piece.numel() - self.stop
        # Not a slice: inside of a dispatch XLA's functionalization refuses those.
        return piece.split([self.stop, rest])[0] if rest else piece

    def slice_full(self, full: Tensor) -> Tensor:
        """Return the piece of a tensor of the global shape: 1-D, padded with zeros."""
        return padded(full.reshape(-1), self.piece_numel)

    @property
    def data_parallel_axes(self) -> tuple[Axis, ...]:
        """None: what this process computes is computed once."""
        return ()

    def gather(self, piece: Tensor) -> Tensor:
        """Return the whole tensor, which is here."""
        return self.trim(piece).reshape(self.shape).clone()

    def annotate_sharding(self, piece: Tensor) -> None:
        """Have a piece spread over the devices, where it was written as a whole."""
        self.mesh.backend.annotate_sharding(piece)


class TracedAxis(Axis, Protocol):
    """A mesh axis of ranks that trace one graph: each rank's number is data."""

    rank_on_device: Tensor


class PaddedSpec(ShardSpec):
    """By each of several ranks that trace: its own piece, as long as the others'.

    Ranks that communicate must trace the same graph, so what is a rank's own enters as data.
    """

    __slots__ = ()
    is_traced = True
    layout: EvenLayout  # type: ignore[assignment]
    axis: TracedAxis

    def __init__(self, layout: EvenLayout, index: int, **rest: Any) -> None:
        super().__init__(layout, index, **rest)  # type: ignore[arg-type]
        self.piece_range = layout.columns(index)

    @property
    def piece_numel(self) -> int:
        """Elements of the piece, padding included."""
        return self.layout.sizes[self.index]

    def check_saved(self) -> None:
        """Raise: these ranks have no process group to agree about files by.

        Raises:
            ShardedTensorError: There are several.
        """
        ShardSpec.check_saved(self)
        if self.mesh.size() > 1:
            msg = (
                f"sharded {self.name!r} is a piece of one of {self.mesh.size()} replicas "
                f"(torch_xla.launch), which cannot be pickled or written to a checkpoint. Call "
                f"full_tensor() on all replicas and save that on one, or train in SPMD mode "
                f"(without torch_xla.launch), where shardkit.checkpoint.save works."
            )
            raise ShardedTensorError(msg)

    def without_padding(self, piece: Tensor, neutral: Any) -> Tensor:
        """Return a piece with `neutral` for its padding: the same graph on each rank."""
        numel, padded_numel = self.layout.numels[self.index], self._padded_numel
        if numel == padded_numel:
            return piece
        places = torch.arange(padded_numel, device=piece.device)
        is_padding = self._own_row(places) >= numel
        return piece.masked_fill(is_padding, neutral)

    def slice_full(self, full: Tensor) -> Tensor:
        """Return this rank's piece of a tensor of the global shape: 1-D, padded with zeros."""
        return self._own_row(padded(full.reshape(-1), self._padded_numel))

    def gather(self, piece: Tensor) -> Tensor:
        """Return the whole tensor. Cost: one all-gather."""
        whole = piece.new_empty(self._padded_numel)
        self.axis.all_gather(whole, piece)
        return whole[: self.layout.numels[self.index]].reshape(self.shape)

    @property
    def _padded_numel(self) -> int:
        return self.layout.padded_part_numel(self.index)

    def _own_row(self, flat: Tensor) -> Tensor:
        rows, rank = flat.view(self.axis.size, -1), self.axis.rank_on_device
        if flat.device != rank.device:
            return rows[self.axis.rank]  # On the host there is no graph.
        return rows.index_select(0, rank).view(-1)


def padded(flat: Tensor, numel: int) -> Tensor:
    """Return 1-D `flat` with zeros behind it."""
    return flat if flat.numel() == numel else F.pad(flat, (0, numel - flat.numel()))
