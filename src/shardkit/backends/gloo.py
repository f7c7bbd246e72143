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

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardkit.backends.base import Gather
from shardkit.backends.hang_watch import HangWatch
from shardkit.backends.process_group import (
    CustomGather,
    CustomReduceScatter,
    ProcessGroupAxis,
    ProcessGroupBackend,
    all_gather_single,
    sub_group,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shardkit.backends.base import AxisComm, CheckHandle, Handle, Reduction
    from shardkit.backends.hang_watch import Progress


_MAX_BROADCASTS = 8
"""An all-gather over more ranks than this is left to gloo: its ring beats one broadcast each."""


_MAX_STAGED_NBYTES = 2 << 20


class GlooAxis(ProcessGroupAxis):
    """An axis with a second process group for reductions."""

    reduce_group: dist.ProcessGroup | None = None

    def make_reduce_group(self) -> None:
        """Make the group, once; call it on all ranks of the axis."""
        if self.reduce_group is None and self.size > 1:
            self.reduce_group = sub_group(self.group, [range(self.size)], "gloo")


class WorkHandle:
    """Started collectives of one process group."""

    is_of_host = True

    def __init__(
        self, works: Sequence[dist.Work | None], group: dist.ProcessGroup, hang_watch: HangWatch
    ) -> None:
        self._works = [work for work in works if work is not None]
        self._group = group
        self._hang_watch = hang_watch

    def is_done(self) -> bool:
        """Whether they are done."""
        return all(work.is_completed() for work in self._works)

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


class StagedGather:
    """Several small gathers in one collective, through a staging buffer."""

    def __init__(self, gathers: Sequence[Gather], axis: GlooAxis, hang_watch: HangWatch) -> None:
        self._gathers = gathers
        self._axis = axis
        own = torch.cat([gather.own.view(torch.uint8) for gather in gathers])
        self._staging = own.new_empty(axis.size * own.numel())
        self._staging.view(axis.size, -1)[axis.rank] = own
        whole = Gather(self._staging, self._staging.view(axis.size, -1)[axis.rank], own)
        self._handle = WorkHandle(_start_all_gather(whole, axis), axis.group, hang_watch)

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


class HandleList:
    """Several handles as one."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self) -> None:
        """Wait for each."""
        for handle in self._handles:
            handle.wait()


class CustomGatherHandle:
    """A gather by the user's own function."""

    def __init__(self, gather: Gather, axis: GlooAxis, hang_watch: HangWatch) -> None:
        self._gather: CustomGather | None = CustomGather(gather, axis, async_op=True)
        self._handle = WorkHandle([self._gather.work], axis.group, hang_watch)

    def wait(self) -> None:
        """Block until it is done; again is free."""
        self._handle.wait()
        if self._gather is not None:
            self._gather.finish()
            self._gather = None


class ExchangeHandle:
    """A reduce-scatter by exchange: the sum is done by who waits, in two steps.

    First the pieces are added where they were received, which frees the send buffer for the next
    group; the result gets memory of its own only later. The all-reduce over the replicate axis
    comes last: it needs the sum.
    """

    fence = None

    def __init__(self, reductions: Sequence[Reduction], hang_watch: HangWatch) -> None:
        self._reductions = reductions
        self._exchange = _start_exchange(reductions, hang_watch)
        self._sums: list[Tensor] | None = None
        self._outs: list[Tensor] | None = None

    def wait_sent(self) -> None:
        """Block until all pieces have come, and add them."""
        if self._sums is None:
            pieces = self._exchange.wait_pieces()
            self._sums = list(map(_add_pieces, self._reductions, pieces))

    def wait(self) -> list[Tensor]:
        """Block until the results are there."""
        if self._outs is None:
            self.wait_sent()
            assert self._sums is not None
            self._outs = list(map(_finish, self._reductions, self._sums))
            self._reductions, self._sums = (), []
        return self._outs


def _sends_own(axis: AxisComm) -> bool:
    """Whether this rank's own piece takes part in the exchange.

    It need not, but what is sent must be contiguous, so only the first and the last rank can leave
    it out. With two ranks that halves the receive buffer.
    """
    return axis.rank not in (0, axis.size - 1)


class Exchange:
    """Sends every rank its ranges of reductions over one axis, each in a collective of its own.

    Where the user gave a reduce-scatter, that makes the sum, of one piece then.
    """

    def __init__(self, reductions: Sequence[Reduction], hang_watch: HangWatch) -> None:
        self._reductions = reductions
        self._custom: dict[int, CustomReduceScatter] = {}
        self._works = []
        for i, reduction in enumerate(reductions):
            if reduction.shard_axis.size == 1:
                continue
            if reduction.comm is not None:
                axis = reduction.shard_axis
                assert isinstance(axis, GlooAxis)
                assert axis.reduce_group is not None
                self._custom[i] = CustomReduceScatter(reduction, axis.reduce_group, async_op=True)
                works = [self._custom[i].work]
                self._works.append(WorkHandle(works, axis.reduce_group, hang_watch))
            else:
                self._works.append(self._start(reduction, hang_watch))

    @staticmethod
    def _start(reduction: Reduction, hang_watch: HangWatch) -> WorkHandle:
        assert reduction.receive is not None
        axis = reduction.shard_axis
        assert isinstance(axis, GlooAxis)
        return _start_all_to_all(
            reduction.receive, reduction.send, reduction.out_numel, axis, hang_watch
        )

    def wait_pieces(self) -> list[list[Tensor]]:
        """Return, for each reduction, this rank's range of every rank's gradients, in rank order.

        This rank's own is in the send buffer.
        """
        for work in self._works:
            work.wait()
        return [
            [self._custom[i].total]
            if i in self._custom
            else _in_rank_order(r.receive, r.send.view(r.shard_axis.size, -1), r.shard_axis)
            for i, r in enumerate(self._reductions)
        ]


class StagedExchange:
    """The same for several small reductions in one collective, through staging buffers."""

    def __init__(self, reductions: Sequence[Reduction], hang_watch: HangWatch) -> None:
        axis = reductions[0].shard_axis
        assert isinstance(axis, GlooAxis)
        self._axis = axis
        self._reductions = reductions
        by_rank = [r.send.view(axis.size, -1).view(torch.uint8) for r in reductions]
        self._send = torch.cat(by_rank, dim=1)
        piece_nbytes = self._send.shape[1]
        chunks = axis.size if _sends_own(axis) else axis.size - 1
        self._receive = self._send.new_empty(chunks * piece_nbytes)
        self._work = _start_all_to_all(
            self._receive, self._send.view(-1), piece_nbytes, axis, hang_watch
        )

    def wait_pieces(self) -> list[list[Tensor]]:
        """Return, for each reduction, this rank's range of every rank's gradients."""
        self._work.wait()
        rows = _in_rank_order(self._receive, self._send, self._axis)
        result, at = [], 0
        for reduction in self._reductions:
            dtype = reduction.send.dtype
            nbytes = reduction.out_numel * dtype.itemsize
            result.append([row[at : at + nbytes].view(dtype) for row in rows])
            at += nbytes
        return result


def _start_exchange(
    reductions: Sequence[Reduction], hang_watch: HangWatch
) -> Exchange | StagedExchange:
    is_one_axis = len({reduction.shard_axis for reduction in reductions}) == 1
    nbytes = sum(reduction.send.nbytes for reduction in reductions)
    is_custom = any(reduction.comm is not None for reduction in reductions)
    if (
        len(reductions) > 1
        and is_one_axis
        and not is_custom
        and _is_small(nbytes, reductions[0].shard_axis)
    ):
        return StagedExchange(reductions, hang_watch)
    return Exchange(reductions, hang_watch)


def _is_small(nbytes: int, axis: AxisComm) -> bool:
    """Whether copying through a staging buffer costs less than a collective more."""
    return axis.size > 1 and nbytes <= _MAX_STAGED_NBYTES


def _start_all_to_all(
    receive: Tensor, send: Tensor, piece_numel: int, axis: GlooAxis, hang_watch: HangWatch
) -> WorkHandle:
    """Send range r of `send` to rank r; a rank's own range stays where it is if it can."""
    assert axis.reduce_group is not None
    splits = [piece_numel] * axis.size
    if not _sends_own(axis):
        splits[axis.rank] = 0
        send = send[piece_numel:] if axis.rank == 0 else send[:-piece_numel]
    work = dist.all_to_all_single(
        receive, send, splits, splits, group=axis.reduce_group, async_op=True
    )
    return WorkHandle([work], axis.reduce_group, hang_watch)


def _in_rank_order(received: Tensor | None, send: Tensor, axis: AxisComm) -> list[Tensor]:
    """Return the received rows and this rank's own, of `send`, in rank order."""
    own = send[axis.rank]
    if axis.size == 1:
        return [own]
    assert received is not None
    rows = list(received.view(-1, own.numel()))
    if not _sends_own(axis):
        rows.insert(axis.rank, own)
    return rows


def _add_pieces(reduction: Reduction, pieces: list[Tensor]) -> Tensor:
    """Return the sum of the pieces, in rank order, so that replicas add to the same result.

    Low-precision pieces are added in fp32.
    """
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
        total = reduction.carry.add_(total)  # In its dtype: the sum of one piece is not widened.
    if reduction.replicate_axis is not None:
        # What crosses the axis travels in the dtype that the user chose for the wire.
        on_wire = total.to(reduction.send.dtype)
        reduction.replicate_axis.all_reduce(on_wire, "sum")
        total.copy_(on_wire)
    out = torch.empty(reduction.out_numel, dtype=reduction.out_dtype, device=total.device)
    if out.dtype == total.dtype:
        torch.mul(total, reduction.scale, out=out)
    else:
        out.copy_(total.mul_(reduction.scale))
    if reduction.hook is not None:
        reduction.hook(out)
    return out


class HostStreams:
    """gloo has no streams: order comes from waiting."""

    region = None

    def __init__(self) -> None:
        self._hang_watch = HangWatch()

    def watch(self, progress: Progress) -> None:
        """Look into long waits."""
        self._hang_watch.progress = progress

    def allocate_from(self, axes: Sequence[AxisComm]) -> None:
        """Keep to ordinary memory: gloo has no allocator of its own."""

    def separate_reduce(self, axis: AxisComm, *, enable: bool) -> None:
        """Do nothing: reductions always have a process group of their own."""

    def new_storage(self, nbytes: int) -> torch.UntypedStorage:
        """Return ordinary memory."""
        return torch.UntypedStorage(nbytes)

    def resize_storage(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Put other memory behind a storage, or none."""
        storage.resize_(nbytes)

    def after_optimizer(self, event: Any) -> None:
        """Wait for the event now: the host is what runs the gathers."""
        event.synchronize()

    def follow_compute(self) -> None:
        """Nothing runs behind the host's back."""

    def fence(self) -> None:
        """Nothing runs behind the host's back."""

    def wait_fence(self, fence: None) -> None:
        """Nothing runs behind the host's back."""

    def join(self) -> None:
        """Nothing runs behind the host's back."""

    def settle_host_reads(self, *, compute: bool) -> None:
        """Nothing is offloaded: the host's memory is the device's."""

    def start_gather(
        self, gathers: Sequence[Gather], axis: GlooAxis, after: Sequence[None]
    ) -> Handle:
        """Cast this rank's range, then gather in place."""
        del after
        for gather in gathers:
            gather.own.copy_(gather.shard)
        if axis.size > 1 and any(gather.comm is not None for gather in gathers):
            return HandleList([self._start_one(gather, axis) for gather in gathers])
        if len(gathers) > 1 and _is_small(sum(g.full.nbytes for g in gathers), axis):
            return StagedGather(gathers, axis, self._hang_watch)
        works = [work for gather in gathers for work in _start_all_gather(gather, axis)]
        return WorkHandle(works, axis.group, self._hang_watch)

    def _start_one(self, gather: Gather, axis: GlooAxis) -> Handle:
        if gather.comm is not None:
            return CustomGatherHandle(gather, axis, self._hang_watch)
        return WorkHandle(_start_all_gather(gather, axis), axis.group, self._hang_watch)

    def start_reduce(self, reductions: Sequence[Reduction]) -> ExchangeHandle:
        """Exchange the pieces; waiting adds them."""
        return ExchangeHandle(reductions, self._hang_watch)

    def start_all_reduce_max(self, tensor: Tensor, axes: Sequence[GlooAxis]) -> CheckHandle:
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

    def make_axis(self, group: dist.ProcessGroup) -> GlooAxis:
        """Return the communicator over a process group."""
        return GlooAxis(group)

    def receive_chunks(self, axis: AxisComm) -> int:
        """Return the number of pieces that come in the exchange."""
        if axis.size == 1:
            return 0
        return axis.size if _sends_own(axis) else axis.size - 1

    def make_streams(
        self, axes: Sequence[AxisComm], share: HostStreams | None = None
    ) -> HostStreams:
        """Make the process groups for reductions; there are no streams to share."""
        del share
        for axis in axes:
            assert isinstance(axis, GlooAxis)
            axis.make_reduce_group()
        return HostStreams()
