"""The common part of the `Backend`s of both modes."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Self

import torch

from shardkit._compat import torch_tensors
from shardkit._errors import MeshError
from shardkit.backends.base import (
    AxisComm,
    Backend,
    CommStreams,
    Done,
    InGraph,
    Reduction,
    TracedGather,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.backends.device import Event


# --- collectives ----------------------------------------------------------------------------------


class XlaStreams(CommStreams):
    """`CommStreams` that trace collectives by a region."""

    region: Any

    def __init__(self, region: Any) -> None:
        self.region = region

    @torch_tensors.without_dispatch_modes
    @torch.no_grad()
    def start_gather(
        self,
        gathers: Sequence[TracedGather],
        axis: AxisComm,
        after: Sequence[Event | None],
        of: str,
    ) -> Done:
        """Trace gathers, one all-gather each, after the current progress in the graph."""
        for gather in gathers:
            parts = [self.region.enter_piece(piece) for piece in gather.pieces]
            if self.region.gathers_wait:
                parts = self.region.after_progress(parts)
            parts = [part.to(gather.dtype) for part in parts]
            gather.wholes = self.region.all_gather(parts, gather.tail_numel, gather.bucket_id)
        return Done(fence=InGraph())

    @torch_tensors.without_dispatch_modes
    @torch.no_grad()
    def start_reduce(self, reductions: Sequence[Reduction], of: str) -> Done:
        """Trace reductions: one reduce-scatter each, one all-reduce with a replicate axis."""
        outs = []
        for reduction in reductions:
            carry, send, scale = reduction.carry, reduction.send, reduction.scale
            if reduction.before is not None:
                send, scale = send * reduction.before, scale / reduction.before
            early = scale if carry is None else 1.0
            out = self.region.reduce_scatter(send, early, reduction.bucket_id)
            if carry is not None:
                factor = 1.0 if reduction.before is None else reduction.before
                out = (out.to(carry.dtype) + carry * factor) * scale
            if reduction.replicate_axis is not None and reduction.replicate_axis.size > 1:
                out = self.region.all_reduce(out)
            if reduction.hook is not None:
                reduction.hook(out)
            outs.append(out.to(reduction.out_dtype))
        return Done(outs, InGraph())


# --- the backend ----------------------------------------------------------------------------------


class XlaBackend(Backend):
    """`Backend` whose collectives a region traces, with a communicator per mesh axis."""

    is_host_synchronous = False
    is_traced = True
    batches_small_groups = False
    """Batched gathers would come before the compute that they overlap with: more memory."""
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
        """Refuse, since there is no process group."""
        msg = f"meshes of XLA devices have no process groups: {self.why_no_groups}."
        raise MeshError(msg)

    def axis(self, axis: int) -> AxisComm:
        """Return the communicator of one axis."""
        return self._axes[axis]

    def for_axes(self, axes: Sequence[int]) -> Self:
        """Refuse parts of a mesh, since every device runs the one program."""
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
        """Return streams, which roots need not share."""
        return XlaStreams(self.region)
