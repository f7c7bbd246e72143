"""CPU ranks over gloo: the host waits, nothing has a stream order.

gloo's own collectives cost more than the bytes they move: `reduce_scatter_tensor` is a whole
all-reduce, and `all_gather_into_tensor` gathers into a temporary and copies that out. Sends and
receives between every two ranks move the same bytes straight from and to where they belong, in
gloo's background thread, with no temporary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardkit.backends.hang_watch import HangWatch
from shardkit.backends.process_group import ProcessGroupAxis, ProcessGroupBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shardkit.backends.base import Gather, Handle, Reduction
    from shardkit.backends.hang_watch import Progress


_GATHER_TAG, _REDUCE_TAG = 1, 2


class WorkHandle:
    """Started sends and receives, or collectives."""

    def __init__(
        self, works: Sequence[dist.Work], axis: ProcessGroupAxis, hang_watch: HangWatch
    ) -> None:
        self._works = works
        self._axis = axis
        self._hang_watch = hang_watch

    def wait(self) -> None:
        """Block until they are done; again is free."""
        works, self._works = self._works, ()
        if works:
            self._hang_watch.wait(works, self._axis)


def _exchange(
    axis: ProcessGroupAxis, sends: Sequence[Tensor], receives: Sequence[Tensor], *, tag: int
) -> list[dist.Work]:
    """Send ``sends[r]`` to every other rank r of the axis, receive into ``receives[r]``.

    Ranks start with their neighbours, so that not all of them send to the same one at once.
    """
    works: list[dist.Work | None] = []
    for distance in range(1, axis.size):
        to, source = (axis.rank + distance) % axis.size, (axis.rank - distance) % axis.size
        works.append(dist.irecv(receives[source], group=axis.group, group_src=source, tag=tag))
        works.append(dist.isend(sends[to], group=axis.group, group_dst=to, tag=tag))
    return [work for work in works if work is not None]


def _start_all_gather(gather: Gather, axis: ProcessGroupAxis) -> list[dist.Work]:
    ranges = gather.full.view(axis.size, -1).unbind()
    return _exchange(axis, [gather.own] * axis.size, ranges, tag=_GATHER_TAG)


class ExchangeHandle:
    """A reduce-scatter by exchange: the sum is done by who waits, in two steps.

    First the pieces are added where they were received, which frees the send buffer for the next
    group; the result gets memory of its own only later. The all-reduce over the replicate axis
    comes last: it needs the sum.
    """

    fence = None

    def __init__(self, reductions: Sequence[Reduction], hang_watch: HangWatch) -> None:
        self._reductions = reductions
        self._hang_watch = hang_watch
        self._works = [_start_reduce_scatter(reduction) for reduction in reductions]
        self._sums: list[Tensor] | None = None

    def wait_sent(self) -> None:
        """Block until all pieces have come, and add them."""
        if self._sums is None:
            for reduction, works in zip(self._reductions, self._works, strict=True):
                assert isinstance(reduction.shard_axis, ProcessGroupAxis)
                self._hang_watch.wait(works, reduction.shard_axis)
            self._sums = [_add_pieces(reduction) for reduction in self._reductions]

    def wait(self) -> list[Tensor]:
        """Block until the results are there."""
        self.wait_sent()
        assert self._sums is not None
        return list(map(_finish, self._reductions, self._sums))


def _start_reduce_scatter(reduction: Reduction) -> list[dist.Work]:
    axis = reduction.shard_axis
    if axis.size == 1:
        return []
    assert isinstance(axis, ProcessGroupAxis)
    pieces = reduction.send.view(axis.size, -1).unbind()
    return _exchange(axis, pieces, _pieces(reduction), tag=_REDUCE_TAG)


def _pieces(reduction: Reduction) -> list[Tensor]:
    """Return this rank's range of every rank's gradients, in rank order: its own is in `send`."""
    axis = reduction.shard_axis
    own = reduction.send.view(axis.size, -1)[axis.rank]
    received = []
    if axis.size > 1:
        assert reduction.receive is not None
        received = list(reduction.receive.view(axis.size - 1, -1).unbind())
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

    def start_gather(
        self, gathers: Sequence[Gather], axis: ProcessGroupAxis, after: Sequence[None]
    ) -> Handle:
        """Cast this rank's range, then gather in place."""
        del after
        works: list[dist.Work] = []
        for gather in gathers:
            gather.own.copy_(gather.shard)
            works += _start_all_gather(gather, axis)
        return WorkHandle(works, axis, self._hang_watch)

    def wait_fence(self, fence: None) -> None:
        """Nothing runs behind the host's back."""

    def start_reduce(self, reductions: Sequence[Reduction]) -> ExchangeHandle:
        """Exchange the pieces; `wait` adds them."""
        return ExchangeHandle(reductions, self._hang_watch)

    def start_all_reduce_max(self, tensor: Tensor, axes: Sequence[ProcessGroupAxis]) -> Handle:
        """Start over one axis; over several, one after another, waiting between."""
        for axis in axes[:-1]:
            axis.all_reduce(tensor, "max")
        last = axes[-1]
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=last.group, async_op=True)
        return WorkHandle([work], last, self._hang_watch)


class GlooBackend(ProcessGroupBackend):
    """Meshes of device type ``"cpu"``."""

    def receive_chunks(self, axis: ProcessGroupAxis) -> int:
        """One piece comes from every other rank."""
        return axis.size - 1

    def make_lanes(self) -> HostLanes:
        """Return lanes without streams."""
        return HostLanes()
