"""SPMD mode: one process traces the program of all ranks and has the pieces of all of them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from shardkit._errors import MeshError
from shardkit.backends.xla.lanes import XlaLanes
from shardkit.backends.xla.region import SpmdRegion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shardkit.backends.base import AxisComm, Lanes


class SpmdAxis:
    """One axis, all of whose ranks this process computes for: what it knows, all know.

    Args:
        size: Number of ranks.
    """

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, full: Tensor, own: Tensor) -> None:
        """One process has everything."""
        full.copy_(own)

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """One process has everything."""

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """One process has everything."""

    def exchange(self, item: Any) -> list[Any]:
        """Return what the only process has."""
        return [item]


class SpmdBackend:
    """`Backend` of all XLA devices of this process.

    Args:
        shape: Of the mesh.
    """

    host_reads_are_free = False
    is_traced = True
    holds_all_ranks = True
    batches_small_groups = False
    """Batched gathers come before the compute that they are meant to run beside: more memory."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.region = SpmdRegion(shape)
        self.device = self.region.device
        self.process_axis = SpmdAxis(1)
        # The loss is computed outside, of the outputs of all ranks: a mean over all of them.
        self.gradient_weight = float(self.region.num_ranks)
        self._axes = [SpmdAxis(size) for size in shape]
        self._keys = itertools.count()

    def next_key(self) -> int:
        """Return a number for a bucket: equal in equal programs, so that they compile once."""
        return next(self._keys)

    def receive_chunks(self, axis: AxisComm) -> int:
        """The compiler allocates."""
        del axis
        return 0

    def process_group(self, axis: int) -> Any:
        """Refuse: there is only one process."""
        del axis
        msg = "meshes of XLA devices have no process groups: one process computes for all ranks."
        raise MeshError(msg)

    def axis(self, axis: int) -> SpmdAxis:
        """Return one axis."""
        return self._axes[axis]

    def for_axes(self, axes: Sequence[int]) -> SpmdBackend:
        """Refuse parts of a mesh: every device runs the one program."""
        if len(axes) == len(self._axes):
            return self
        msg = "a mesh of XLA devices has no submeshes: every device runs the same program."
        raise MeshError(msg)

    def split_axis(self, axis: int, size: int) -> AxisComm:
        """Refuse."""
        del axis
        msg = (
            f"reshard_after_forward={size} is not supported on XLA devices. Pass True to gather "
            f"again for backward, or False to keep whole parameters."
        )
        raise MeshError(msg)

    def make_lanes(self, axes: Sequence[AxisComm], share: Lanes | None = None) -> Any:
        """Return lanes; roots need not share them."""
        del axes, share
        return XlaLanes(self.region)

    def place(self, piece: Tensor) -> None:
        """Have a piece spread over the devices."""
        self.region.spread(piece)

    def leave_piece(self, part: Tensor) -> Tensor:
        """Return the piece of which a rank has `part`."""
        return self.region.leave_piece(part)
