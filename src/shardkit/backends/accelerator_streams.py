"""Three streams per root and events between them, never `record_stream`.

Memory belongs to the compute stream. A side stream reads or writes it only after an event that the
compute stream recorded, and the compute stream touches it again only after an event of that side
stream; so no buffer is ever reused early, and peaks are the same in every step.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardkit import _compat
from shardkit.backends.accelerator_axis import AcceleratorAxis
from shardkit.backends.accelerator_sums import Sums
from shardkit.backends.host_work import start_host_max
from shardkit.backends.process_group import WatchedStreams, all_gather_single, custom_all_gather

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shardkit.backends.base import AxisComm, CheckHandle, Gather, Handle, Reduction
    from shardkit.backends.device import AcceleratorDevice
    from shardkit.backends.events import Event, Stream
    from shardkit.backends.watch.channel import Issued


class EventHandle:
    """A point on a side stream."""

    def __init__(self, device: AcceleratorDevice, event: Event) -> None:
        self._device = device
        self._event = event

    def wait(self) -> None:
        """Let the compute stream wait; the host goes on."""
        # order: compute waits for the gather
        self._device.wait(self._device.current_stream(), self._event)


class ReduceEventHandle:
    """Reductions on side streams.

    Attributes:
        fence: Event after which the send buffers are free.
    """

    def __init__(self, device: AcceleratorDevice, outs: list[Tensor]) -> None:
        self.fence: Event | None = None
        self._issued: list[Issued] = []
        self._device = device
        self._outs = outs
        # The compute stream's memory, used by others: not to be allocated anew before that is done.
        self._kept: list[Tensor] = []
        self._ends: list[Event] = []
        self._is_on_host = False

    def note(self, issued: Issued | None) -> None:
        """Note one of the collectives."""
        if issued is not None:
            self._issued.append(issued)

    def keep(self, tensor: Tensor) -> Tensor:
        """Let memory live until the compute stream waits for the results."""
        self._kept.append(tensor)  # order: memory lives until compute waits for the results
        return tensor

    def started(self, fence: Event, ends: list[Event], *, is_on_host: bool) -> None:
        """Note the event after the send buffers' last use, and those after all results."""
        self.fence, self._ends, self._is_on_host = fence, ends, is_on_host
        for issued in self._issued:
            issued.started(functools.partial(self._device.has_passed, ends[-1]))

    def wait_sent(self) -> None:
        """Let the compute stream wait until the send buffers are free; the host goes on."""
        assert self.fence is not None  # It was started.
        # order: compute waits for the last use of send buffers
        self._device.wait(self._device.current_stream(), self.fence)

    def wait(self) -> list[Tensor]:
        """Let the compute stream wait; the host goes on, unless results are offloaded to it."""
        stream = self._device.current_stream()
        for event in self._ends:
            self._device.wait(stream, event)  # order: compute waits for the results
            if self._is_on_host:
                self._device.synchronize(event)  # order: the host waits for offloaded results
        self._kept.clear()
        return self._outs


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """One reduction with its memory.

    Attributes:
        reduction: The reduction that is asked for.
        sums: The arithmetic of it.
        into: Memory for the sum over the shard axis. None: the send buffer.
        result: Memory for the result, on the device.
        out: Memory where it is wanted: `result`, or memory of the host.
    """

    reduction: Reduction
    sums: Sums
    into: Tensor | None
    result: Tensor
    out: Tensor


class DeviceCheckHandle:
    """Numbers on their way from the device, through pinned memory, to a host tensor."""

    is_of_host = False

    def __init__(
        self, device: AcceleratorDevice, target: Tensor, pinned: Tensor, event: Event
    ) -> None:
        self._device = device
        self._target = target
        self._pinned = pinned
        self._event = event

    def wait(self) -> None:
        """Block the host until the numbers are there."""
        self._device.synchronize(self._event)  # order: the host waits for compared numbers
        self._target.copy_(self._pinned)


class AcceleratorStreams(WatchedStreams):
    """One stream each for gathers, reduce-scatters and all-reduces over the replicate axis.

    A collective library runs what one communicator is given in the order of issue, so more streams
    would not run more of them at once.
    """

    def __init__(self, device: AcceleratorDevice, share: AcceleratorStreams | None = None) -> None:
        self._device = device
        if share is None:
            self._streams = [device.new_stream() for _ in range(3)]
        else:
            self._streams = share._streams  # noqa: SLF001 - own class
        self._gather, self._reduce, self._all_reduce = self._streams
        self._hook_streams: dict[Stream, None] = {}
        self._host_read: Event | None = None
        self._allocator: Any = None

    # --- memory ---

    def allocate_from(self, axes: Sequence[AxisComm]) -> None:
        """Take the memory of buffers from the engine, which registers it with the network."""
        device = self._device.device
        engines = (_compat.process_group_backend(a.group, device) for a in _as_own(axes))
        offered = (e for e in engines if e is not None and e.supports_tensor_alloc(device))
        self._allocator = next(offered, None)

    def separate_reduce(self, axis: AxisComm, *, enable: bool) -> None:
        """Reduce over `axis` on a communicator of its own, or on that of the gathers."""
        assert isinstance(axis, AcceleratorAxis)
        axis.separate_reduce(enable=enable)

    def new_storage(self, nbytes: int) -> torch.UntypedStorage:
        """Return memory of the device."""
        if self._allocator is None:
            return self._device.new_storage(nbytes)
        device = self._device.device
        buffer = self._allocator.allocate_tensor(nbytes, dtype=torch.uint8, device=device)
        storage: torch.UntypedStorage = buffer.untyped_storage()
        return storage

    def resize_storage(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Put other memory of the device behind a storage, or none."""
        self._device.resize_storage(storage, nbytes)

    # --- order ---

    def fence(self) -> Event:
        """Mark the compute stream."""
        return self._device.record(self._device.current_stream())

    def wait_fence(self, fence: Event | None) -> None:
        """Let the compute stream wait."""
        if fence is not None:
            # order: compute waits for a slot's last use
            self._device.wait(self._device.current_stream(), fence)

    def follow_compute(self) -> None:
        """Let the gather stream wait for writes to shards, whatever slots it will use."""
        self._device.wait(self._gather, self.fence())  # order: gathers wait for writes to shards

    def after_optimizer(self, event: Event) -> None:
        """Let the gather stream wait for a user's event."""
        self._device.wait(self._gather, event)  # order: gathers wait for the optimizer's event

    def join(self) -> None:
        """Let the compute stream wait for all that was issued on others."""
        compute = self._device.current_stream()
        for stream in (*self._streams, *self._hook_streams):
            # order: compute waits for all streams
            self._device.wait(compute, self._device.record(stream))

    def settle_host_reads(self, *, compute: bool) -> None:
        """Block the host until copies from offloaded shards have been made."""
        if compute:
            self._device.synchronize(self.fence())
        event, self._host_read = self._host_read, None
        if event is not None:
            self._device.synchronize(event)  # order: the host waits for copies of offloaded shards

    # --- collectives ---

    def start_gather(
        self, gathers: Sequence[Gather], axis: AxisComm, after: Sequence[Event | None], of: str
    ) -> Handle:
        """Cast and gather on the gather stream, after the slots' last readers."""
        assert isinstance(axis, AcceleratorAxis)
        issued = axis.issue("all-gather", of, sum(gather.full.nbytes for gather in gathers))
        for event in after:
            if event is not None:
                self._device.wait(self._gather, event)  # order: gathers wait for slots' readers
        with self._device.on(self._gather):  # order: gathers run on their own stream
            for gather in gathers:
                gather.own.copy_(gather.shard, non_blocking=True)
            if axis.size > 1:
                _gather_all(gathers, axis)
        event = self._device.record(self._gather)
        if issued is not None:
            issued.started(functools.partial(self._device.has_passed, event))
        if any(gather.is_on_host for gather in gathers):
            self._host_read = event  # order: the host waits for the last copy from its shards
        return EventHandle(self._device, event)

    def start_reduce(self, reductions: Sequence[Reduction], of: str) -> ReduceEventHandle:
        """Reduce-scatter on one stream, all-reduce on the next."""
        # All memory belongs to the compute stream: it is allocated before others may touch it.
        outs = [self._new_result(reduction) for reduction in reductions]
        handle = ReduceEventHandle(self._device, outs)
        prepared = [self._prepare(*pair, handle) for pair in zip(reductions, outs, strict=True)]
        self._device.wait(self._reduce, self.fence())  # order: reductions wait for compute
        try:
            # order: send buffers wait for the reduce-scatter
            ends = [self._reduce, *(self._start_one(each, handle, of) for each in prepared)]
        except BaseException:
            # What was issued still writes memory that nobody will wait for.
            self.join()  # order: after an error compute waits for what was issued
            raise
        # order: compute waits for every stream that results end on
        events = [self._device.record(stream) for stream in dict.fromkeys(ends)]
        is_on_host = any(reduction.is_to_host for reduction in reductions)
        handle.started(events[0], events, is_on_host=is_on_host)
        return handle

    def _new_result(self, reduction: Reduction) -> Tensor:
        numel, dtype = reduction.out_numel, reduction.out_dtype
        if reduction.is_to_host:
            return self._device.empty_on_host(numel, dtype, pinned=reduction.is_pinned)
        return self._device.empty(numel, dtype)

    def _prepare(self, reduction: Reduction, out: Tensor, handle: ReduceEventHandle) -> _Prepared:
        """Allocate what one reduction needs beside its result."""
        result = out
        if reduction.is_to_host:
            # order: a result lives until it is copied to the host
            result = handle.keep(self._device.empty(reduction.out_numel, reduction.out_dtype))
        if reduction.carry is not None:
            handle.keep(reduction.carry)  # order: earlier sums live until they are added
        sums = Sums(reduction)
        into = None
        if sums.can_be_result:
            into = result
        elif sums.replicate_axis is not None:
            # Else the send buffer would be in use until the all-reduce is done.
            # order: a sum over the shard axis lives until it is all-reduced
            into = handle.keep(self._device.empty(reduction.out_numel, reduction.send.dtype))
        return _Prepared(reduction, sums, into, result, out)

    def _start_one(self, prepared: _Prepared, handle: ReduceEventHandle, of: str) -> Stream:
        """Start one reduction; return the stream that it ends on."""
        reduction, sums, result = prepared.reduction, prepared.sums, prepared.result
        stream = self._reduce
        shard_axis = reduction.shard_axis
        assert isinstance(shard_axis, AcceleratorAxis)
        group, nbytes = shard_axis.reduce_group, reduction.send.nbytes
        handle.note(shard_axis.issue("reduce-scatter", of, nbytes, group))
        with self._device.on(stream):
            total = sums.reduce_scatter(prepared.into)
            if sums.replicate_axis is None:
                sums.finish(total, result)
        if sums.replicate_axis is not None:
            stream = self._follow(self._all_reduce, stream)
            if reduction.all_reduce is None:
                handle.note(sums.replicate_axis.issue("all-reduce", of, total.nbytes))
            with self._device.on(stream):
                sums.all_reduce(total)
                sums.finish(total, result)
        if reduction.hook is not None:
            if reduction.hook_stream is not None:
                # order: compute waits for hooks' streams when it waits for all
                self._hook_streams.setdefault(reduction.hook_stream)
                stream = self._follow(reduction.hook_stream, stream)
            with self._device.on(stream):
                reduction.hook(result)
        if result is not prepared.out:
            with self._device.on(stream):
                prepared.out.copy_(result, non_blocking=reduction.is_pinned)
        return stream

    def _follow(self, stream: Stream, before: Stream) -> Stream:
        """Let a stream go on after all that was issued on another."""
        # order: a stream waits for the one before it
        self._device.wait(stream, self._device.record(before))
        return stream

    def start_all_reduce_max(
        self, tensor: Tensor, axes: Sequence[AxisComm], of: str
    ) -> CheckHandle:
        """All-reduce by the host's engine if all axes have one, else a copy on the device."""
        own = _as_own(axes)
        groups = [axis.host_group for axis in own]
        if any(group is None for group in groups):
            return self._start_max_on_device(tensor, own, of)
        return start_host_max(tensor, groups, of)

    def _start_max_on_device(
        self, tensor: Tensor, axes: Sequence[AcceleratorAxis], of: str
    ) -> DeviceCheckHandle:
        pinned = self._device.empty_on_host(tensor.numel(), tensor.dtype, pinned=True)
        pinned.copy_(tensor)
        with self._device.on(self._reduce):
            # This stream's own memory: nobody waits for a model that is dropped.
            # order: numbers lie in memory that the reduce stream allocates
            on_device = self._device.empty(tensor.numel(), tensor.dtype)
            on_device.copy_(pinned, non_blocking=True)
            for axis in axes:
                axis.issue("all-reduce", of, tensor.nbytes)
                dist.all_reduce(on_device, dist.ReduceOp.MAX, group=axis.group)
            pinned.copy_(on_device, non_blocking=True)
        return DeviceCheckHandle(self._device, tensor, pinned, self._device.record(self._reduce))


def _as_own(axes: Sequence[AxisComm]) -> list[AcceleratorAxis]:
    """Return axes, all of which are of this backend."""
    own = [axis for axis in axes if isinstance(axis, AcceleratorAxis)]
    assert len(own) == len(axes)
    return own


def _gather_all(gathers: Sequence[Gather], axis: AcceleratorAxis) -> None:
    """Gather buckets over an axis of several ranks, as one collective if the engine can."""
    own = [gather for gather in gathers if gather.comm is None]
    for gather in gathers:
        if gather.comm is not None:
            custom = custom_all_gather(gather, axis.group, async_op=False)
            gather.full.copy_(custom.received)
    if len(own) > 1 and axis.coalesces:
        with _compat.coalesced(axis.group):
            for gather in own:
                all_gather_single(gather.full, gather.own, group=axis.group)
    else:
        for gather in own:
            all_gather_single(gather.full, gather.own, group=axis.group)
