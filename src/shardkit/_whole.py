"""How a parameter is cut where one process holds the pieces of all ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F

from shardkit._layout import FlatLayout
from shardkit._sharded import ShardSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class WholeSpec(ShardSpec):
    """Padded, end to end; to operators this process is the only rank, and owns everything.

    Args:
        shape: Of the parameter.
        piece_numel: Elements of its piece, padding included.
        **rest: As of `ShardSpec`.
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

    def gather(self, piece: Tensor) -> Tensor:
        """Return the whole tensor, which is here."""
        return self.trim(piece).reshape(self.shape).clone()

    def place(self, piece: Tensor) -> None:
        """Have a piece spread over the devices, where it was written as a whole."""
        self.mesh.backend.place(piece)


def padded(flat: Tensor, numel: int) -> Tensor:
    """Return 1-D `flat` with zeros behind it."""
    return flat if flat.numel() == numel else F.pad(flat, (0, numel - flat.numel()))
