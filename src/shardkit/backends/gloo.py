"""CPU ranks over gloo: the host waits, nothing has a stream order.

Ranks of one host share small tensors, and read large ones from each other, without gloo.

gloo's own collectives cost more than the bytes they move: `reduce_scatter_tensor` is a whole
all-reduce, and `all_gather_into_tensor` gathers into a temporary and copies that out. This backend
uses an exchange by `all_to_all_single`, adds the pieces itself, and broadcasts in place. So the
same bytes move directly to where they belong. (Sends and receives would do this, too, but take
3.5 ms each for 100 kB.)

Only collectives issued with ``async_op=True`` overlap. Collectives of one process group must come
in one order on all ranks. Reductions have a separate group, because on ranks that use different
modules they come at different points between the gathers.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardkit._compat import torch_tensors
from shardkit.backends.base import (
    AllToAll,
    AxisComm,
    CommStreams,
    Gather,
    Handle,
    Reduction,
    end_to_end,
)
from shardkit.backends.direct_reads import DirectExchange, DirectReads, read_directly
from shardkit.backends.groups import sub_group
from shardkit.backends.host_links import connect
from shardkit.backends.process_group import (
    CustomCollective,
    ProcessGroupAxis,
    ProcessGroupBackend,
    WatchedStreams,
    WorkHandle,
    all_gather_single,
    custom_all_gather,
    custom_reduce_scatter,
    movable,
    start_host_all_to_all,
    start_host_max,
)
from shardkit.backends.shared_memory import Shared, SharedMemory, share_memory
from shardkit.backends.watch.watchdog import Issued, channel_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shardkit.backends.device import Event

    _Pieces = tuple[Sequence[Tensor], list[Tensor], Tensor]


# --- a mesh axis over gloo ------------------------------------------------------------------------


_GATHERS, _REDUCTIONS = range(2)
"""Lanes, each with its own order, since ranks that use different modules order them differently."""

_SHARED_NBYTES = 2 << 20
"""Larger transfers bypass the memory that ranks share: it never shrinks, and takes two copies."""


class GlooAxis(ProcessGroupAxis):
    """An axis with a second process group for reductions, and other ways within one host."""

    reduce_group: dist.ProcessGroup | None = None  # Second process group, when it is made.
    shared: SharedMemory | None = None  # Memory that the ranks share; None if they cannot.
    # Direct reads of what they do not share; None: gloo sends it.
    direct: DirectReads | None = None

    def make_reduce_group(self) -> None:
        """Make the group once; call this on all ranks of the axis."""
        if self.reduce_group is None and self.size > 1:
            self.reduce_group = sub_group(self.group, [range(self.size)], "gloo")
            links = connect(self.reduce_group)
            if links is not None:
                self.shared = share_memory(links, self.reduce_group)
                self.direct = read_directly(links, self.reduce_group)
            for way in (self.shared, self.direct):
                if way is not None:
                    for group in (self.group, self.reduce_group):
                        channel_of(group).at_end.append(way.close)

    def shares(self, nbytes: int) -> bool:
        """Whether transfers with this many bytes of all ranks go through shared memory."""
        return self.shared is not None and 0 < nbytes <= _SHARED_NBYTES

    def start_all_to_all(self, job: AllToAll) -> WorkHandle:
        """See `PeerAxis.start_all_to_all`."""
        if self.size == 1:
            return WorkHandle([], None)
        if self.direct is None:
            return start_host_all_to_all(job, self.group)
        issued = self.issue("all-to-all", job.of, job.total_nbytes)
        sources, targets = job.send.split(job.send_nbytes), job.receive.split(job.receive_nbytes)
        return WorkHandle([self.start_reads(sources, targets)], issued)

    def start_reads(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> DirectExchange:
        """Start direct reads; a rank copies its own data, unless it is there already."""
        assert self.direct is not None
        others, places = list(sources), list(targets)
        own, place = others.pop(self.rank), places.pop(self.rank)
        if place.data_ptr() != own.data_ptr():
            place.copy_(own)
        return self.direct.start([[other] for other in others], places, _GATHERS)


# --- reduce-scatter -------------------------------------------------------------------------------

_MAX_STAGED_NBYTES = 2 << 20


class ExchangeHandle:
    """A reduce-scatter by exchange. The thread that waits computes the sum, in two steps.

    First the pieces are added where they were received. That frees the send buffer for the next
    group; the result gets its own memory only later. The all-reduce over the replicate axis comes
    last, since it needs the sum. Small reductions of the same kind are copied together and continue
    as one.
    """

    fence: Event | None = None
    # Whether the data was copied before it is sent, so that the send buffers are free.
    was_copied = True

    def __init__(self, reductions: Sequence[Reduction], of: str) -> None:
        self._together = _travelling_together(reductions)
        self._exchanges: list[Exchange] = []
        for positions in self._together:
            several = [reductions[i] for i in positions]
            first, axis = several[0], several[0].shard_axis
            assert isinstance(axis, GlooAxis)
            nbytes = sum(reduction.send.nbytes for reduction in several)
            # A user's all-reduce may keep the tensor that it gets.
            if first.comm is None and first.all_reduce is None and axis.shares(nbytes):
                self._exchanges.append(SharedExchange(several, nbytes, of))
                continue
            is_read = first.comm is None and axis.direct is not None and nbytes > 0
            sends_in_place = is_read and first.before is None  # Gradients are not ours to scale.
            is_copied = len(several) > 1 or (bool(first.parts) and not sends_in_place)
            self.was_copied &= is_copied
            one = _joined(several) if is_copied else first
            if one.before is not None:
                one.send.mul_(one.before)
            self._exchanges.append((ReadExchange if is_read else SentExchange)(one, of))
        self._numels = [reduction.out_numel for reduction in reductions]
        self._outs: list[Tensor] | None = None

    def wait_sent(self) -> None:
        """Block until all pieces have come, and add them."""
        for exchange in self._exchanges:
            exchange.add()

    def wait(self) -> list[Tensor]:
        """Block until the results are there."""
        if self._outs is None:
            self.wait_sent()
            found: dict[int, Tensor] = {}
            for positions in self._together:
                exchange = self._exchanges.pop(0)  # An error must not leave it to `wait_sent`.
                parts = exchange.finish().split([self._numels[i] for i in positions])
                found.update(zip(positions, parts, strict=True))
            self._outs = [found[i] for i in range(len(found))]
        return self._outs


def num_received(axis: AxisComm) -> int:
    """Return the number of pieces that gloo's exchange receives.

    The data to send must be contiguous, so only the first and the last rank can leave their own
    piece out. With two ranks that halves the receive buffer.
    """
    return axis.size - 1 if axis.rank in (0, axis.size - 1) else axis.size


class Exchange(ABC):
    """A reduction whose pieces come to this rank in some way; then they are added, and scaled."""

    def __init__(self, reduction: Reduction) -> None:
        assert isinstance(reduction.shard_axis, GlooAxis)
        self._axis = reduction.shard_axis
        # The data that is sent is not kept for longer than the ranks need it.
        self._reduction = dataclasses.replace(reduction, send=reduction.send[:0], parts=())
        self._total: Tensor | None = None
        self._is_own = False  # Whether the memory of the sum has no other use.

    @abstractmethod
    def _pieces(self) -> _Pieces:
        """Block until all pieces have come, and stop holding them.

        Returns:
            This rank's piece, in parts, which is the sum if there are no others; the pieces of the
            other ranks, in rank order; memory for the sum, which may be one of the first two
            pieces.
        """

    def add(self) -> None:
        """Block until all pieces have come, and add them. A second call returns at once.

        They are added in rank order, so that replicas get the same result: pieces of low precision
        in fp32, others in their own dtype and in the memory of one of them.
        """
        if self._total is not None:
            return
        own, others, memory = self._pieces()
        if not others:
            self._total, self._is_own = own[0].clone(), True
            return
        wide = torch.promote_types(memory.dtype, torch.float32)
        self._is_own = {each.dtype for each in (*own, *others)} != {wide}
        total = torch.empty_like(memory, dtype=wide) if self._is_own else memory
        at = 0
        for part in own:
            stop = at + part.numel()
            addends = [piece[at:stop] for piece in others]
            addends.insert(self._axis.rank, part.view(-1))
            _add_to(total[at:stop], addends)
            at = stop
        self._total = total

    def finish(self) -> Tensor:
        """All-reduce the sum over the replicate axis, and scale it; return the result, once."""
        reduction, total, is_own = self._reduction, self._total, self._is_own
        assert total is not None, "the pieces have been added"
        self._total = None
        before = 1.0 if reduction.before is None else reduction.before
        scale = reduction.scale / before
        if reduction.carry is not None:
            # In the dtype of the carry: the sum of one piece is not widened.
            total, is_own = reduction.carry.mul_(before).add_(total), False
        axis = reduction.replicate_axis
        if axis is not None and axis.size > 1 and reduction.all_reduce is not None:
            reduction.all_reduce(total, scale)
        elif axis is not None:
            # Sums cross the axis in the dtype that the user chose for the wire.
            on_wire = total.to(reduction.send.dtype)
            axis.all_reduce(on_wire, "sum")
            total.copy_(on_wire)
        if is_own and reduction.all_reduce is None and total.dtype == reduction.out_dtype:
            out = total.mul_(scale)
        else:
            out = torch.empty_like(total, dtype=reduction.out_dtype)
            if out.dtype == total.dtype:
                torch.mul(total, scale, out=out)
            else:
                out.copy_(total.mul_(scale))
        if reduction.hook is not None:
            reduction.hook(out)
        return out


class SentExchange(Exchange):
    """An exchange in which gloo sends every rank its range.

    If the user gave a reduce-scatter, that function computes the sum, and there is one piece.
    """

    def __init__(self, reduction: Reduction, of: str) -> None:
        super().__init__(reduction)
        send, axis, numel = reduction.send, self._axis, reduction.out_numel
        self._found: _Pieces | None = [send], [], send
        self._work: WorkHandle | None = None
        self._custom: CustomCollective | None = None
        if axis.size == 1 or not send.numel():  # One rank, or empty parameters only.
            return
        group = axis.reduce_group
        assert group is not None
        if reduction.comm is not None:
            issued = axis.issue("reduce-scatter", of, send.nbytes, group)
            self._custom = custom_reduce_scatter(reduction, group, async_op=True)
            self._found = [self._custom.received], [], send
            self._work = WorkHandle([self._custom.work], issued)
            return
        received, rows = reduction.room(), send.view(axis.size, -1)
        others, splits = list(received.view(-1, numel)), [numel] * axis.size
        if len(others) == axis.size:
            own = others.pop(axis.rank)
        else:  # It stays in the send buffer.
            own, splits[axis.rank] = rows[axis.rank], 0
            rows = rows[1:] if axis.rank == 0 else rows[:-1]
        self._found = [own], others, received[:numel]
        issued = axis.issue("reduce-scatter", of, send.nbytes, group)
        work = dist.all_to_all_single(
            received.view(-1), rows.view(-1), splits, splits, group=group, async_op=True
        )
        self._work = WorkHandle([work], issued)

    def _pieces(self) -> _Pieces:
        """Return the pieces, see `Exchange`."""
        if self._work is not None:
            self._work.wait()
        found, self._found, self._custom = self._found, None, None
        assert found is not None, "they are taken once"
        return found


class ReadExchange(Exchange):
    """A large exchange: ranks read the pieces from each other, wherever they are."""

    def __init__(self, reduction: Reduction, of: str) -> None:
        super().__init__(reduction)
        axis, numel = self._axis, reduction.out_numel
        assert axis.direct is not None
        issued = axis.issue("reduce-scatter", of, reduction.send.nbytes, axis.reduce_group)
        rows = _readable_rows(reduction)
        self._narrow = reduction.part_dtype or reduction.send.dtype
        self._received = list(reduction.room().view(-1, numel)[: axis.size - 1])
        self._own = rows.pop(axis.rank)
        narrow_nbytes = numel * self._narrow.itemsize
        self._exchange = axis.direct.start(rows, self._received, _REDUCTIONS, narrow_nbytes)
        self._work = WorkHandle([self._exchange], issued)

    def _pieces(self) -> _Pieces:
        """Return the pieces, see `Exchange`."""
        self._work.wait()
        own, received = self._own, self._received
        self._own, self._received = [], []
        others = [
            piece if nbytes == piece.nbytes else piece.view(self._narrow)[: len(piece)]
            for piece, nbytes in zip(received, self._exchange.nbytes, strict=True)
        ]
        return own, others, received[0]


def _readable_rows(reduction: Reduction) -> list[list[Tensor]]:
    """Return contiguous tensors that each rank can read: of one dtype, which the ranks know.

    Autograd may give the conjugate or the negative of a gradient as a flag on the same memory, of
    which readers would know nothing.
    """
    rows = [[p.contiguous().resolve_conj().resolve_neg() for p in r] for r in reduction.rows()]
    _clear_parts([reduction])
    dtypes = {part.dtype for row in rows for part in row}
    if len(dtypes) == 1 and dtypes <= {reduction.send.dtype, reduction.part_dtype}:
        return rows
    # Users may choose another dtype for a gradient than for its parameter.
    return [[part.to(reduction.send.dtype) for part in row] for row in rows]


class SharedExchange(Exchange):
    """An exchange of small reductions of the same kind, in memory that the ranks share.

    Each rank adds the other ranks' pieces to its own range, in its own block.
    """

    def __init__(self, reductions: Sequence[Reduction], nbytes: int, of: str) -> None:
        super().__init__(reductions[0])
        shared, before = self._axis.shared, reductions[0].before
        assert shared is not None
        self._issued = self._axis.issue("reduce-scatter", of, nbytes, self._axis.reduce_group)
        block = shared.block(nbytes)
        send = block.memory[:nbytes].view(reductions[0].send.dtype)
        end_to_end(reductions, out=send)
        _clear_parts(reductions)
        if before is not None:
            send.mul_(before)
        self._rows = send.view(self._axis.size, -1)
        self._shared = shared.share(block, nbytes, _REDUCTIONS)

    def _pieces(self) -> _Pieces:
        """See `Exchange`. The sum must not overwrite a piece that is added later."""
        rank = self._axis.rank
        own = self._rows[rank]
        others = [
            other.view(own.dtype).view_as(self._rows)[rank]
            for other in _others(self._shared, self._issued)
        ]
        return [own], others, own if rank in (0, 1) else torch.empty_like(own)

    def finish(self) -> Tensor:
        """Return the result, and give the block back."""
        result = super().finish()
        self._shared.close()
        return result


def _others(shared: Shared, issued: Issued | None) -> list[Tensor]:
    """Return the tensors that the other ranks have shared; a wait is watched."""
    if shared.is_there():
        return shared.wait()
    assert issued is not None, "there are ranks to wait for"
    with issued.watched():
        return shared.wait()


def _travelling_together(reductions: Sequence[Reduction]) -> list[list[int]]:
    """Return the positions of reductions that travel as one: small ones of the same kind."""
    alike: dict[Any, list[int]] = {}
    for i, r in enumerate(reductions):
        is_plain = r.comm is None and r.all_reduce is None and r.hook is None and r.carry is None
        kind = (r.shard_axis, r.replicate_axis, r.send.dtype, r.out_dtype, r.scale, r.before)
        alike.setdefault(kind if is_plain else i, []).append(i)
    result = []
    for positions in alike.values():
        nbytes = sum(reductions[i].send.nbytes for i in positions)
        is_one = len(positions) > 1 and is_small(nbytes, reductions[positions[0]].shard_axis)
        result += [positions] if is_one else [[i] for i in positions]
    return result


def _joined(reductions: Sequence[Reduction]) -> Reduction:
    """Return one reduction, of a copy, for several or for one that is in parts."""
    axis = reductions[0].shard_axis
    send = end_to_end(reductions)
    _clear_parts(reductions)  # Free them before memory for received pieces is allocated.
    numel = send.numel() // axis.size
    room = functools.partial(send.new_empty, num_received(axis) * numel)
    return dataclasses.replace(reductions[0], send=send, parts=(), room=room, out_numel=numel)


def _clear_parts(reductions: Sequence[Reduction]) -> None:
    for reduction in reductions:
        for parts in reduction.parts:
            parts.clear()


def is_small(nbytes: int, axis: AxisComm) -> bool:
    """Whether copying through a staging buffer costs less than one more collective."""
    return axis.size > 1 and nbytes <= _MAX_STAGED_NBYTES


_ADDED = 1 << 16
"""Elements of low precision that are added at once, so that their wide copies fit in the cache."""


def _add_to(total: Tensor, addends: Sequence[Tensor]) -> None:
    """Fill `total`, 1-D, with the sum of tensors, added in their order, and in its dtype.

    `total` may be one of the first two, if all have its dtype.
    """
    if all(each.dtype == total.dtype for each in addends):
        torch.add(addends[0], addends[1], out=total)
        for addend in addends[2:]:
            total.add_(addend)
        return
    # Torch makes a wide copy of each addend, here of one part at a time.
    parts = zip(total.split(_ADDED), *(each.split(_ADDED) for each in addends), strict=True)
    for part, *added in parts:
        part.copy_(added[0])
        for addend in added[1:]:
            part.add_(addend)


# --- the backend ----------------------------------------------------------------------------------

_MAX_BROADCASTS = 8
"""Largest number of ranks for broadcasts; with more the ring of gloo's all-gather is faster."""


def _start_all_gather(gather: Gather, axis: GlooAxis) -> Sequence[Handle | None]:
    """Start to fill ``gather.full`` in place, without a temporary if there are few ranks."""
    full, own, group = gather.full, gather.own, axis.group
    if axis.size == 1:
        return []
    if axis.direct is not None:
        targets = full.view(axis.size, -1).unbind()
        return [axis.start_reads([own] * axis.size, targets)]
    full, own = movable(full), movable(own)
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
    """Gathers with a collective each, or by the user's own functions."""

    def __init__(self, gathers: Sequence[Gather], axis: GlooAxis, issued: Issued | None) -> None:
        self._customs: list[tuple[Gather, CustomCollective]] = []
        works: list[Handle | None] = []
        for gather in gathers:
            if gather.comm is not None and axis.size > 1:
                custom = custom_all_gather(gather, axis.group, async_op=True)
                self._customs.append((gather, custom))
                works.append(custom.work)
            else:
                works += _start_all_gather(gather, axis)
        self._handle = WorkHandle(works, issued)

    def wait(self) -> None:
        """Block until done; copy from the user's buffers. A second call returns at once."""
        self._handle.wait()
        for gather, custom in self._customs:
            gather.full.copy_(custom.received)
        self._customs = []


class SmallGathers:
    """Small gathers that travel as one, in memory that the ranks share or in a staging buffer."""

    def __init__(
        self,
        gathers: Sequence[Gather],
        axis: GlooAxis,
        issued: Issued | None,
        shared: SharedMemory | None,
    ) -> None:
        self._gathers = gathers
        self._axis = axis
        self._issued = issued
        self._shared: Shared | None = None
        owns = [gather.own.view(torch.uint8) for gather in gathers]
        nbytes = sum(own.numel() for own in owns)
        if shared is not None:
            block = shared.block(nbytes)
            torch.cat(owns, out=block.memory[:nbytes])
            self._shared = shared.share(block, nbytes, _GATHERS)
            return
        self._staging = owns[0].new_empty(axis.size, nbytes)
        own = self._staging[axis.rank]
        torch.cat(owns, out=own)
        whole = Gather(self._staging.view(-1), own, own)
        self._handle = WorkHandle(_start_all_gather(whole, axis), issued)

    def wait(self) -> None:
        """Block until done; copy other ranks' pieces into place. A second call returns at once."""
        gathers, self._gathers = self._gathers, ()
        if not gathers:
            return
        wholes = [g.full.view(torch.uint8).view(self._axis.size, -1) for g in gathers]
        places = [place for place in range(self._axis.size) if place != self._axis.rank]
        if self._shared is None:
            self._handle.wait()
            others = [self._staging[place] for place in places]
            del self._staging
        else:
            others = _others(self._shared, self._issued)
        numels = [whole.shape[1] for whole in wholes]
        targets = [whole[place] for place in places for whole in wholes]
        sources = [part for other in others for part in other.split(numels)]
        torch_tensors.foreach_copy(targets, sources)
        if self._shared is not None:
            self._shared.close()


class HostStreams(WatchedStreams):
    """Streams of gloo, which has none: the host orders work by waiting."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_storage(self, nbytes: int) -> torch.UntypedStorage:
        """Return memory for a buffer."""
        return torch.UntypedStorage(nbytes, device=self._device)

    def after_optimizer(self, event: Event) -> None:
        """Wait for the event now, since the host runs the gathers."""
        event.synchronize()

    def start_gather(
        self, gathers: Sequence[Gather], axis: AxisComm, after: Sequence[Event | None], of: str
    ) -> Handle:
        """Cast this rank's range, then gather in place."""
        assert isinstance(axis, GlooAxis)
        nbytes = sum(gather.full.nbytes for gather in gathers)
        issued = axis.issue("all-gather", of, nbytes)
        torch_tensors.foreach_copy([g.own for g in gathers], [g.shard for g in gathers])
        is_plain = all(gather.comm is None for gather in gathers)
        shared = axis.shared if is_plain and axis.shares(nbytes) else None
        if shared is not None or (len(gathers) > 1 and is_plain and is_small(nbytes, axis)):
            return SmallGathers(gathers, axis, issued, shared)
        return GatherHandle(gathers, axis, issued)

    def start_reduce(self, reductions: Sequence[Reduction], of: str) -> ExchangeHandle:
        """Exchange the pieces; a wait adds them."""
        return ExchangeHandle(reductions, of)

    def start_all_reduce_max(self, tensor: Tensor, axes: Sequence[AxisComm], of: str) -> WorkHandle:
        """Start over one axis; of several axes, wait for each before starting the next."""
        own = [axis for axis in axes if isinstance(axis, GlooAxis)]
        return start_host_max(tensor, [axis.reduce_group for axis in own], of)


class GlooBackend(ProcessGroupBackend):
    """Meshes of device type ``"cpu"``."""

    def takes_parts(self, axis: AxisComm, *, is_small: bool) -> bool:
        """Small groups are copied to where they travel together; ranks read large ones."""
        assert isinstance(axis, GlooAxis)
        return is_small or axis.direct is not None

    def make_axis(self, group: dist.ProcessGroup) -> GlooAxis:
        """Return the communicator over a process group."""
        return GlooAxis(group)

    def receive_chunks(self, axis: AxisComm) -> int:
        """Return the number of pieces that the exchange receives."""
        return num_received(axis)

    def make_streams(
        self, axes: Sequence[AxisComm], share: CommStreams | None = None
    ) -> HostStreams:
        """Make the process groups for reductions; there are no streams to share."""
        for axis in axes:
            assert isinstance(axis, GlooAxis)
            axis.make_reduce_group()
        return HostStreams(self.device)
