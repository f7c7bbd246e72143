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

from shardkit.backends.hang_watch import HangWatch
from shardkit.backends.process_group import (
    ProcessGroupAxis,
    ProcessGroupBackend,
    all_gather_single,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shardkit.backends.base import AxisComm, Gather, Handle, Reduction
    from shardkit.backends.hang_watch import Progress


_MAX_BROADCASTS = 8
"""An all-gather over more ranks than this is left to gloo: its ring beats one broadcast each."""


class GlooAxis(ProcessGroupAxis):
    """An axis with a second process group for reductions."""

    reduce_group: dist.ProcessGroup | None = None

    def make_reduce_group(self) -> None:
        """Make the group, once; call it on all ranks of the axis."""
        if self.reduce_group is None and self.size > 1:
            ranks = dist.get_process_group_ranks(self.group)
            group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            self.reduce_group = group


class WorkHandle:
    """Started collectives of one process group."""

    def __init__(
        self, works: Sequence[dist.Work | None], group: dist.ProcessGroup, hang_watch: HangWatch
    ) -> None:
        self._works = [work for work in works if work is not None]
        self._group = group
        self._hang_watch = hang_watch

    def wait(self) -> None:
        """Block until they are done; again is free."""
        works, self._works = self._works, []
        if works:
            self._hang_watch.wait(works, self._group)


def _start_all_gather(gather: Gather, axis: AxisComm) -> list[dist.Work | None]:
    """Start filling ``gather.full`` in place, without a temporary while ranks are few."""
    assert isinstance(axis, GlooAxis)
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


class ExchangeHandle:
    """A reduce-scatter by exchange: the sum is done by who waits, in two steps.

    First the pieces are added where they were received, which frees the send buffer for the next
    group; the result gets memory of its own only later. The all-reduce over the replicate axis
    comes last: it needs the sum.
    """

    fence = None

    def __init__(self, reductions: Sequence[Reduction], hang_watch: HangWatch) -> None:
        self._reductions = reductions
        self._exchanges = [_start_exchange(r, hang_watch) for r in reductions]
        self._sums: list[Tensor] | None = None

    def wait_sent(self) -> None:
        """Block until all pieces have come, and add them."""
        if self._sums is None:
            for exchange in self._exchanges:
                if exchange is not None:
                    exchange.wait()
            self._sums = [_add_pieces(reduction) for reduction in self._reductions]

    def wait(self) -> list[Tensor]:
        """Block until the results are there."""
        self.wait_sent()
        assert self._sums is not None
        return list(map(_finish, self._reductions, self._sums))


def _sends_own(axis: AxisComm) -> bool:
    """Whether this rank's own piece takes part in the exchange.

    It need not, but what is sent must be contiguous, so only the first and the last rank can leave
    it out. With two ranks that halves the receive buffer.
    """
    return axis.rank not in (0, axis.size - 1)


def _start_exchange(reduction: Reduction, hang_watch: HangWatch) -> WorkHandle | None:
    axis, send, piece_numel = reduction.shard_axis, reduction.send, reduction.out_numel
    assert isinstance(axis, GlooAxis)
    if axis.size == 1:
        return None
    assert axis.reduce_group is not None
    splits = [piece_numel] * axis.size
    if not _sends_own(axis):
        splits[axis.rank] = 0
        send = send[piece_numel:] if axis.rank == 0 else send[:-piece_numel]
    work = dist.all_to_all_single(
        reduction.receive, send, splits, splits, group=axis.reduce_group, async_op=True
    )
    return WorkHandle([work], axis.reduce_group, hang_watch)


def _pieces(reduction: Reduction) -> list[Tensor]:
    """Return this rank's range of every rank's gradients, in rank order: its own is in `send`."""
    axis = reduction.shard_axis
    own = reduction.send.view(axis.size, -1)[axis.rank]
    if axis.size == 1:
        return [own]
    assert reduction.receive is not None
    received = list(reduction.receive.view(-1, reduction.out_numel))
    if not _sends_own(axis):
        received.insert(axis.rank, own)
    return received


def _add_pieces(reduction: Reduction) -> Tensor:
    """Return the sum of the pieces, in rank order, so that replicas add to the same result.

    Low-precision pieces are added in fp32.
    """
    pieces = _pieces(reduction)
    if len(pieces) == 1:
        return pieces[0].clone()  # The send buffer is about to be given away.
    wide = torch.promote_types(pieces[0].dtype, torch.float32)
    if wide != pieces[0].dtype:
        total = pieces[0].to(wide)
        total.add_(pieces[1])
    else:
        assert reduction.receive is not None
        total = reduction.receive[: reduction.out_numel]
        torch.add(pieces[0], pieces[1], out=total)
    for piece in pieces[2:]:
        total.add_(piece)
    return total


def _finish(reduction: Reduction, total: Tensor) -> Tensor:
    """All-reduce over the replicate axis, scale."""
    if reduction.carry is not None:
        total.add_(reduction.carry)
    if reduction.replicate_axis is not None:
        # What crosses the axis travels in the dtype that the user chose for the wire.
        on_wire = total.to(reduction.send.dtype)
        reduction.replicate_axis.all_reduce(on_wire, "sum")
        total.copy_(on_wire)
    out = torch.empty(reduction.out_numel, dtype=reduction.out_dtype, device=total.device)
    if out.dtype == total.dtype:
        return torch.mul(total, reduction.scale, out=out)
    return out.copy_(total.mul_(reduction.scale))


class HostLanes:
    """gloo has no streams: order comes from waiting."""

    def __init__(self) -> None:
        self._hang_watch = HangWatch()

    def watch(self, progress: Progress) -> None:
        """Look into long waits."""
        self._hang_watch.progress = progress

    def fence(self) -> None:
        """Nothing runs behind the host's back."""

    def wait_fence(self, fence: None) -> None:
        """Nothing runs behind the host's back."""

    def start_gather(
        self, gathers: Sequence[Gather], axis: GlooAxis, after: Sequence[None]
    ) -> Handle:
        """Cast this rank's range, then gather in place."""
        del after
        works = []
        for gather in gathers:
            gather.own.copy_(gather.shard)
            works += _start_all_gather(gather, axis)
        return WorkHandle(works, axis.group, self._hang_watch)

    def start_reduce(self, reductions: Sequence[Reduction]) -> ExchangeHandle:
        """Exchange the pieces; waiting adds them."""
        return ExchangeHandle(reductions, self._hang_watch)

    def start_all_reduce_max(self, tensor: Tensor, axes: Sequence[GlooAxis]) -> Handle:
        """Start over one axis; over several, one after another, waiting between."""
        for axis in axes[:-1]:
            self._start_max(tensor, axis).wait()
        return self._start_max(tensor, axes[-1])

    def _start_max(self, tensor: Tensor, axis: GlooAxis) -> WorkHandle:
        group = axis.reduce_group
        assert group is not None
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True)
        return WorkHandle([work], group, self._hang_watch)


class GlooBackend(ProcessGroupBackend):
    """Meshes of device type ``"cpu"``."""

    axis_class = GlooAxis

    def receive_chunks(self, axis: AxisComm) -> int:
        """Return the number of pieces that come in the exchange."""
        if axis.size == 1:
            return 0
        return axis.size if _sends_own(axis) else axis.size - 1

    def make_lanes(self, axes: Sequence[AxisComm]) -> HostLanes:
        """Make the process groups for reductions."""
        for axis in axes:
            assert isinstance(axis, GlooAxis)
            axis.make_reduce_group()
        return HostLanes()
