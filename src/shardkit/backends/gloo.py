"""CPU ranks over gloo: the host waits, nothing has a stream order.

gloo's own collectives cost more than the bytes they move: `reduce_scatter_tensor` is a whole
all-reduce, and `all_gather_into_tensor` gathers into a temporary and copies that out. An exchange
by `all_to_all_single` with the addition done here, and broadcasts in place, move the same bytes
from and to where they belong. (Sends and receives would too, but take 3.5 ms each for 100 kB.)

Only what is issued with ``async_op=True`` overlaps. Collectives of one process group must come in
one order on all ranks; reductions have a group of their own, because where ranks use different
modules they come at different points between the gathers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardkit.backends.base import Gather
from shardkit.backends.gloo_axis import GlooAxis
from shardkit.backends.gloo_exchange import ExchangeHandle, is_small, sends_own
from shardkit.backends.host_work import WorkHandle, start_host_max
from shardkit.backends.process_group import (
    ProcessGroupBackend,
    WatchedStreams,
    all_gather_single,
    custom_all_gather,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shardkit.backends.base import AxisComm, CommStreams, Handle, Reduction
    from shardkit.backends.events import Event
    from shardkit.backends.process_group import CustomCollective
    from shardkit.backends.watch.channel import Issued


_MAX_BROADCASTS = 8
"""An all-gather over more ranks than this is left to gloo: its ring beats one broadcast each."""


def _start_all_gather(gather: Gather, axis: GlooAxis) -> list[dist.Work | None]:
    """Start filling ``gather.full`` in place, without a temporary while ranks are few."""
    full, own, group = gather.full, gather.own, axis.group
    if axis.size == 1:
        return []
    if axis.size == 2:  # noqa: PLR2004 - each needs just what the other has
        other = full.view(2, -1)[1 - axis.rank]
        splits = [own.numel(), own.numel()]
        splits[axis.rank] = 0
        return [dist.all_to_all_single(other, own, splits, splits, group=group, async_op=True)]
    if axis.size > _MAX_BROADCASTS:
        return [all_gather_single(full, own, group=group, async_op=True)]
    return [
        dist.broadcast(part, group=group, group_src=rank, async_op=True)
        for rank, part in enumerate(full.view(axis.size, -1))
    ]


class GatherHandle:
    """Gathers in collectives of their own, or by the user's own functions."""

    def __init__(self, gathers: Sequence[Gather], axis: GlooAxis, issued: Issued | None) -> None:
        self._customs: list[tuple[Gather, CustomCollective]] = []
        works: list[dist.Work | None] = []
        for gather in gathers:
            if gather.comm is not None and axis.size > 1:
                custom = custom_all_gather(gather, axis.group, async_op=True)
                self._customs.append((gather, custom))
                works.append(custom.work)
            else:
                works += _start_all_gather(gather, axis)
        self._handle = WorkHandle(works, issued)

    def wait(self) -> None:
        """Block until they are done, and copy from the user's buffers; again is free."""
        self._handle.wait()
        for gather, custom in self._customs:
            gather.full.copy_(custom.received)
        self._customs = []


class StagedGather:
    """Several small gathers in one collective, through a staging buffer."""

    def __init__(self, gathers: Sequence[Gather], axis: GlooAxis, issued: Issued | None) -> None:
        self._gathers = gathers
        self._axis = axis
        own = torch.cat([gather.own.view(torch.uint8) for gather in gathers])
        self._staging = own.new_empty(axis.size * own.numel())
        self._staging.view(axis.size, -1)[axis.rank] = own
        whole = Gather(self._staging, self._staging.view(axis.size, -1)[axis.rank], own)
        self._handle = WorkHandle(_start_all_gather(whole, axis), issued)

    def wait(self) -> None:
        """Block until it is done, and copy to where it belongs; again is free."""
        self._handle.wait()
        at = 0
        for gather in self._gathers:
            nbytes = gather.own.nbytes
            whole = gather.full.view(torch.uint8).view(self._axis.size, nbytes)
            whole.copy_(self._staging.view(self._axis.size, -1)[:, at : at + nbytes])
            at += nbytes
        self._gathers = ()


class HostStreams(WatchedStreams):
    """gloo has no streams: order comes from waiting."""

    def after_optimizer(self, event: Event) -> None:
        """Wait for the event now: the host is what runs the gathers."""
        event.synchronize()

    def start_gather(
        self, gathers: Sequence[Gather], axis: AxisComm, after: Sequence[Event | None], of: str
    ) -> Handle:
        """Cast this rank's range, then gather in place."""
        assert isinstance(axis, GlooAxis)
        nbytes = sum(gather.full.nbytes for gather in gathers)
        issued = axis.issue("all-gather", of, nbytes)
        for gather in gathers:
            gather.own.copy_(gather.shard)
        is_plain = all(gather.comm is None for gather in gathers)
        if len(gathers) > 1 and is_plain and is_small(nbytes, axis):
            return StagedGather(gathers, axis, issued)
        return GatherHandle(gathers, axis, issued)

    def start_reduce(self, reductions: Sequence[Reduction], of: str) -> ExchangeHandle:
        """Exchange the pieces; waiting adds them."""
        return ExchangeHandle(reductions, of)

    def start_all_reduce_max(self, tensor: Tensor, axes: Sequence[AxisComm], of: str) -> WorkHandle:
        """Start over one axis; over several, one after another, waiting between."""
        own = [axis for axis in axes if isinstance(axis, GlooAxis)]
        return start_host_max(tensor, [axis.reduce_group for axis in own], of)


class GlooBackend(ProcessGroupBackend):
    """Meshes of device type ``"cpu"``."""

    def make_axis(self, group: dist.ProcessGroup) -> GlooAxis:
        """Return the communicator over a process group."""
        return GlooAxis(group)

    def receive_chunks(self, axis: AxisComm) -> int:
        """Return the number of pieces that come in the exchange."""
        if axis.size == 1:
            return 0
        return axis.size if sends_own(axis) else axis.size - 1

    def make_streams(
        self, axes: Sequence[AxisComm], share: CommStreams | None = None
    ) -> HostStreams:
        """Make the process groups for reductions; there are no streams to share."""
        for axis in axes:
            assert isinstance(axis, GlooAxis)
            axis.make_reduce_group()
        return HostStreams()
