"""What `Backend`s of both modes have in common."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from shardkit._errors import MeshError
from shardkit.backends.base import Backend
from shardkit.backends.xla.comm_streams import XlaStreams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from torch import Tensor

    from shardkit.backends.base import AxisComm, CommStreams


class XlaBackend(Backend):
    """`Backend` whose collectives are traced.

    Args:
        region: Region of the collectives.
        axes: One communicator per mesh axis.
    """

    is_host_synchronous = False
    is_traced = True
    batches_small_groups = False
    """Batched gathers come before the compute that they are meant to run beside: more memory."""
    why_no_groups: str

    def __init__(self, region: Any, axes: Sequence[AxisComm]) -> None:
        self.region = region
        self.device = region.device
        self._axes = list(axes)
        self._keys = itertools.count()

    def next_bucket_id(self) -> int:
        """Return a number for a bucket: equal in equal programs, so that they compile once."""
        return next(self._keys)

    def process_group(self, axis: int) -> Any:
        """Refuse: there is none that could be handed out."""
        msg = f"meshes of XLA devices have no process groups: {self.why_no_groups}."
        raise MeshError(msg)

    def axis(self, axis: int) -> AxisComm:
        """Return the communicator of one axis."""
        return self._axes[axis]

    def for_axes(self, axes: Sequence[int]) -> Self:
        """Refuse parts of a mesh: every device runs the one program."""
        if len(axes) == len(self._axes):
            return self
        msg = "a mesh of XLA devices has no submeshes: every device runs the same program."
        raise MeshError(msg)

    def split_axis(self, axis: int, size: int) -> AxisComm:
        """Refuse."""
        msg = (
            f"reshard_after_forward={size} is not supported on XLA devices. Pass True to gather "
            f"again for backward, or False to keep whole parameters."
        )
        raise MeshError(msg)

    def make_streams(
        self, axes: Sequence[AxisComm], share: CommStreams | None = None
    ) -> XlaStreams:
        """Return streams; roots need not share them."""
        return XlaStreams(self.region)

    def annotate_sharding(self, piece: Tensor) -> None:
        """Have a piece spread over the devices of this process."""
        self.region.spread(piece)

    def leave_piece(self, part: Tensor) -> Tensor:
        """Return the piece of which a rank has `part`."""
        result: Tensor = self.region.leave_piece(part)
        return result
