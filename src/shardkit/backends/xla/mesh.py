"""Meshes of XLA devices."""

from __future__ import annotations

import itertools
import math
import os
from typing import TYPE_CHECKING, Any

import torch_xla
import torch_xla.runtime as xr

from shardkit._errors import MeshError
from shardkit._mesh import DeviceMesh
from shardkit.backends.xla.lanes import XlaLanes
from shardkit.backends.xla.region import SpmdRegion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shardkit.backends.base import AxisComm, Lanes

_MAX_NDIM = 2


def init_xla_mesh(shape: Sequence[int] | None, names: Sequence[str] | None) -> DeviceMesh:
    """Make a mesh over all XLA devices, for which this process traces one program.

    With None as shape it has one axis.

    Turns torch_xla's SPMD mode on, which cannot be turned off again.

    Raises:
        MeshError: The sizes do not multiply to the number of devices, more than two axes, a
            device was used before SPMD mode was on, there are several hosts, or this is a replica
            of `torch_xla.launch`.
    """
    if not xr.is_spmd():
        if "PJRT_LOCAL_PROCESS_COUNT" in os.environ:
            msg = (
                "this process was started by torch_xla.launch, as one of several replicas. Run "
                "the script by itself: one process computes for all devices."
            )
            raise MeshError(msg)
        if torch_xla._XLAC._xla_get_spmd_config_is_locked():  # noqa: SLF001
            msg = (
                "an XLA device was used before the mesh was made. Call "
                "shardkit.init_device_mesh('xla', ...) or torch_xla.runtime.use_spmd() first, "
                "before any tensor or module is moved to an XLA device."
            )
            raise MeshError(msg)
        xr.use_spmd()
    if xr.process_count() > 1:
        msg = (
            f"XLA devices of {xr.process_count()} hosts: shardkit supports those of one host only. "
            f"Start the script on a slice of one host (v4-8, v5litepod-8, v6e-8)."
        )
        raise MeshError(msg)
    num_devices = xr.global_runtime_device_count()
    shape = (num_devices,) if shape is None else tuple(shape)
    if math.prod(shape) != num_devices:
        msg = (
            f"a mesh of shape {shape} needs {math.prod(shape)} devices, but there are "
            f"{num_devices}. Pass a shape whose sizes multiply to {num_devices}."
        )
        raise MeshError(msg)
    if len(shape) > _MAX_NDIM:
        msg = (
            f"meshes of XLA devices have one axis (shard) or two (replicate, shard), got "
            f"{len(shape)}: {shape}."
        )
        raise MeshError(msg)
    ranks = tuple(range(num_devices))
    named = tuple(names) if names is not None else None
    return DeviceMesh("xla", shape, ranks, named, 0, XlaBackend(shape))


class XlaAxis:
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


class XlaBackend:
    """`Backend` of all XLA devices of this process.

    Args:
        shape: Of the mesh.
    """

    host_reads_are_free = False
    is_traced = True
    batches_small_groups = False
    """Batched gathers come before the compute that they are meant to run beside: more memory."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.region = SpmdRegion(shape)
        self.device = self.region.device
        self.process_axis = XlaAxis(1)
        # The loss is computed outside, of the outputs of all ranks: a mean over all of them.
        self.gradient_weight = float(self.region.num_ranks)
        self._axes = [XlaAxis(size) for size in shape]
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

    def axis(self, axis: int) -> XlaAxis:
        """Return one axis."""
        return self._axes[axis]

    def for_axes(self, axes: Sequence[int]) -> XlaBackend:
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
