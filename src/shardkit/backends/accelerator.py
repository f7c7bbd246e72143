"""Accelerator ranks: one backend for every device for which torch has streams and collectives.

Such devices are ``cuda`` (NCCL, and RCCL on AMD), ``xpu``, ``npu``, ... `device` has what this
backend needs of the device. `AcceleratorStreams` says what runs on which stream.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardkit._compat import torch_groups
from shardkit._errors import StateError
from shardkit.backends.device import AcceleratorDevice, Event, Stream
from shardkit.backends.graphs import StreamGraph
from shardkit.backends.groups import sub_group
from shardkit.backends.process_group import (
    REDUCE_OPS,
    ProcessGroupAxis,
    ProcessGroupBackend,
    WatchedStreams,
    all_gather_single,
    as_bytes,
    custom_all_gather,
    custom_reduce_scatter,
    movable,
    reduce_scatter_single,
    start_host_all_to_all,
    start_host_max,
)
from shardkit.backends.watch.watchdog import Issued, channel_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.distributed import device_mesh as torch_mesh

    from shardkit.backends.base import (
        AllToAll,
        AxisComm,
        CheckHandle,
        CommStreams,
        Gather,
        Handle,
        Reduction,
    )


# --- axes -----------------------------------------------------------------------------------------

_CAPABLE_ENGINES = ("nccl", "xccl", "fake")
"""Collective libraries that can divide by the number of ranks and can merge several all-gathers."""


@dataclasses.dataclass(slots=True, eq=False)
class PeerHandle:
    """An exchange on a side stream.

    The handle keeps the memory of the compute stream that the exchange uses. If the target is on
    the host, `wait` copies the result from the source to it.
    """

    _device: AcceleratorDevice
    _event: Event
    _kept: tuple[Tensor, ...]
    _back: tuple[Tensor, Tensor] | None

    def wait(self) -> None:
        """Let the compute stream wait; the host goes on, unless the memory is the host's."""
        self._device.current_stream().wait_event(self._event)
        back, self._back = self._back, None
        if back is not None:
            back[0].copy_(back[1])
        self._kept = ()

    def __del__(self) -> None:
        """Keep memory until the exchange has used it, also if an error dropped the handle."""
        if self._kept:
            self._device.current_stream().wait_event(self._event)


class AcceleratorAxis(ProcessGroupAxis):
    """An axis whose small collectives also take host tensors, such as offloaded shards."""

    def __init__(self, group: dist.ProcessGroup, device: AcceleratorDevice) -> None:
        super().__init__(group)
        self.device = device  # Device on which its collectives run.
        # Group for reduce-scatters; that of the gathers, or `separate_group`.
        self.reduce_group = group
        # Group for reduce-scatters alone, when it is made.
        self.separate_group: dist.ProcessGroup | None = None
        engine = torch_groups.process_group_backend(group, device.device)
        # Whether the engine can divide by the number of ranks, and merge all-gathers.
        self.averages = engine is not None and engine.name() in _CAPABLE_ENGINES
        has_host_engine = torch_groups.process_group_backend(group, torch.device("cpu")) is not None
        # Group for small host tensors, so that the host need not wait for the device; None: the
        # process group was made without an engine for the host.
        self.host_group = group if has_host_engine else None
        self._peer_stream: Stream | None = None

    def start_all_to_all(self, job: AllToAll) -> Handle:
        """See `PeerAxis.start_all_to_all`; the exchange runs on a separate stream.

        Memory of the host, such as offloaded shards, is exchanged by the host's engine if there is
        one, else through the device.
        """
        is_on_host = job.send.device != self.device.device
        if is_on_host and self.host_group is not None:
            return start_host_all_to_all(job, self.host_group)
        send, receive = job.send, job.receive
        if is_on_host:
            send = self.device.copy(send)
            receive = self.device.empty(job.receive.numel(), job.receive.dtype)
        if self._peer_stream is None:
            self._peer_stream = self.device.new_stream()
        stream = self._peer_stream
        # The exchange sends what compute has written, and overwrites what compute has read.
        stream.wait_event(self.device.current_stream().record_event())
        issued = self.issue("all-to-all", job.of, job.total_nbytes)
        with self.device.on(stream):
            if self.size > 1:
                splits = (list(job.receive_nbytes), list(job.send_nbytes))
                dist.all_to_all_single(receive, send, *splits, group=self.group)
        event = stream.record_event()
        if issued is not None:
            issued.started(self.device, event)
        back = (job.receive, receive) if is_on_host else None
        return PeerHandle(self.device, event, (send, receive), back)

    def all_reduce_flags(self, flags: Tensor) -> None:
        """See `PeerAxis.all_reduce_flags`."""
        if self.size == 1:
            return
        if self.host_group is None:
            self.all_reduce(flags, "max")
            return
        with channel_of(self.host_group).run("all-reduce (max)", "", flags.nbytes):
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.host_group)

    @contextlib.contextmanager
    def _on_device(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yield a tensor, or a copy on the device that is copied back when the context ends."""
        on_device = self.device.copy(tensor)
        yield on_device
        if on_device is not tensor:
            tensor.copy_(on_device)

    def all_gather(self, full: Tensor, own: Tensor) -> None:
        """See `AxisComm.all_gather`."""
        with self._on_device(full) as on_device:
            super().all_gather(on_device, self.device.copy(own))

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """See `AxisComm.all_reduce`. A reduction on the device is watched until it is done."""
        if tensor.device != self.device.device:
            with self._on_device(tensor) as on_device:
                super().all_reduce(on_device, op)
        elif self.size > 1:
            issued = channel_of(self.group).issue(f"all-reduce ({op})", "", tensor.nbytes)
            dist.all_reduce(tensor, REDUCE_OPS[op], group=self.group)
            issued.started(self.device, self.device.current_stream().record_event())

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """See `AxisComm.broadcast`."""
        with self._on_device(tensor) as on_device:
            super().broadcast(on_device, src)


# --- sums -----------------------------------------------------------------------------------------


class Sums:
    """The arithmetic of one reduction, in steps that run on the current stream.

    The engine divides if it can, and if the divisor is the number of ranks. Then a reduction in the
    dtype of the result takes only the kernel of the collective. NCCL divides by a multiplication
    with 1/n in the dtype of the data. In bf16 this number is up to 0.2 % off, unless n is a power
    of two, so then the engine sums only. fp16 would overflow in a sum, or underflow before it, so
    with fp16 half of the division comes before the sum.

    Source: ``hostToDevRedOp`` in NCCL's ``enqueue.cc``.
    """

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction
        shard, replicate = reduction.shard_axis, reduction.replicate_axis
        assert isinstance(shard, AcceleratorAxis)
        assert replicate is None or isinstance(replicate, AcceleratorAxis)
        self._shard_axis = shard
        # Axis of the all-reduce; None: there is none, or it has one rank.
        self.replicate_axis = replicate if replicate is not None and replicate.size > 1 else None
        axes = [axis for axis in (shard, self.replicate_axis) if axis is not None and axis.size > 1]
        num_ranks = math.prod(axis.size for axis in axes)
        is_half = reduction.send.dtype == torch.float16
        is_own = reduction.comm is not None or reduction.all_reduce is not None
        scales_before = is_half or reduction.before is not None
        is_plain = not is_own and reduction.carry is None and not scales_before
        is_exact = reduction.send.dtype != torch.bfloat16 or num_ranks.bit_count() == 1
        averages = all(axis.averages for axis in axes) and not reduction.force_sum
        self._averages = is_plain and is_exact and averages and reduction.scale == 1.0 / num_ranks
        self._op = dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM
        self._before = math.sqrt(reduction.scale) if is_half else 1.0
        if reduction.before is not None:
            self._before = reduction.before
        self._after = 1.0 if self._averages else reduction.scale / self._before
        # Whether the sum over the shard axis may be written to the result's memory.
        self.can_be_result = (
            is_plain and shard.size > 1 and reduction.out_dtype == reduction.send.dtype
        )

    def reduce_scatter(self, into: Tensor | None) -> Tensor:
        """Sum over the shard axis, and add sums of earlier backwards.

        Args:
            into: Tensor that gets the sum. None: the sum goes into this rank's range of the send
                buffer, which may be overwritten.

        Returns:
            The sum: `into`, or that range, or the carry.
        """
        reduction, axis = self._reduction, self._shard_axis
        send = reduction.send
        if self._before != 1.0:
            send.mul_(self._before)
        own = send.view(axis.size, -1)[axis.rank]
        total = own if into is None else into
        if axis.size > 1 and reduction.comm is not None:
            custom = custom_reduce_scatter(reduction, axis.reduce_group, async_op=False)
            total.copy_(custom.received)
        elif axis.size > 1:
            reduce_scatter_single(
                _as_real(total), _as_real(send), op=self._op, group=axis.reduce_group
            )
        elif into is not None:
            total.copy_(own)
        return self._add_carry(total)

    def _add_carry(self, total: Tensor) -> Tensor:
        """Add sums of earlier backwards in their dtype; cast the sum back if it crosses an axis."""
        carry = self._reduction.carry
        if carry is None:
            return total
        if self._before != 1.0:
            carry.mul_(self._before)
        wide = carry.add_(total)
        return wide if self.replicate_axis is None else total.copy_(wide)

    def all_reduce(self, total: Tensor) -> None:
        """Sum over the replicate axis, in place."""
        assert self.replicate_axis is not None
        if self._reduction.all_reduce is not None:
            self._reduction.all_reduce(total, self._after)
            return
        dist.all_reduce(_as_real(total), op=self._op, group=self.replicate_axis.group)

    def finish(self, total: Tensor, result: Tensor) -> None:
        """Scale the sum and put it into the result's memory."""
        if self._after == 1.0:
            if total is not result:
                result.copy_(total)
        elif total.dtype == result.dtype:
            torch.mul(total, self._after, out=result)
        else:
            result.copy_(total).mul_(self._after)


def _as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers, since engines take only real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


# --- streams --------------------------------------------------------------------------------------
#
# Memory belongs to the compute stream. A side stream reads or writes it only after an event that
# the compute stream recorded. The compute stream touches it again only after an event of that side
# stream. So no buffer is reused too early, and peaks are the same in every step.


@dataclasses.dataclass(slots=True, eq=False)
class EventHandle:
    """A point on a side stream."""

    _device: AcceleratorDevice
    _event: Event

    def wait(self) -> None:
        """Let the compute stream wait; the host goes on."""
        # order: compute waits for the gather
        self._device.current_stream().wait_event(self._event)


class ReduceEventHandle:
    """Reductions on side streams."""

    was_copied = False

    def __init__(self, device: AcceleratorDevice, outs: list[Tensor]) -> None:
        self.fence: Event | None = None  # Event after which the send buffers are free.
        self.issued: list[Issued | None] = []  # The collectives; None: one over a single rank.
        self._device = device
        self._outs = outs
        # Memory of the compute stream that other streams use. It is freed when they are done.
        self._kept: list[Tensor] = []
        self._ends: list[Event] = []
        self._is_on_host = False

    def keep(self, tensor: Tensor) -> Tensor:
        """Let memory live until the compute stream waits for the results."""
        self._kept.append(tensor)  # order: memory lives until compute waits for the results
        return tensor

    def started(self, fence: Event, ends: list[Event], *, is_on_host: bool) -> None:
        """Note the event after the last use of the send buffers, and the events after results."""
        self.fence, self._ends, self._is_on_host = fence, ends, is_on_host
        for issued in self.issued:
            if issued is not None:
                issued.started(self._device, ends[-1])

    def wait_sent(self) -> None:
        """Let the compute stream wait until the send buffers are free; the host goes on."""
        assert self.fence is not None  # `started` was called.
        # order: compute waits for the last use of send buffers
        self._device.current_stream().wait_event(self.fence)

    def wait(self) -> list[Tensor]:
        """Let the compute stream wait; the host goes on, unless results are offloaded to it."""
        stream = self._device.current_stream()
        for event in self._ends:
            stream.wait_event(event)  # order: compute waits for the results
            if self._is_on_host:
                event.synchronize()  # order: the host waits for offloaded results
        self._kept.clear()
        return self._outs


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """One reduction with its memory."""

    reduction: Reduction  # The requested reduction.
    sums: Sums  # The arithmetic of the reduction.
    into: Tensor | None  # Memory for the sum over the shard axis. None: the send buffer.
    result: Tensor  # Memory for the result, on the device.
    out: Tensor  # Memory that finally holds the result: `result`, or memory of the host.


@dataclasses.dataclass(slots=True, eq=False)
class DeviceCheckHandle:
    """Numbers on their way from the device, through pinned memory, to a host tensor."""

    _target: Tensor
    _pinned: Tensor
    _event: Event

    is_of_host = False

    def wait(self) -> None:
        """Block the host until the numbers are there."""
        self._event.synchronize()  # order: the host waits for compared numbers
        self._target.copy_(self._pinned)


class AcceleratorStreams(WatchedStreams):
    """One stream each for gathers, reduce-scatters and all-reduces over the replicate axis.

    A collective library runs the collectives of one communicator in the order of issue, so more
    streams would not run more of them at once.
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
        self._has_forked = False

    def note_step(self) -> None:
        """Count the step.

        Raises:
            StateError: The step would be captured in a graph that shardkit did not make.
        """
        if self._device.is_capturing() and not self._has_forked:
            msg = (
                "a forward of a sharded model was called while a CUDA graph was captured "
                "(torch.cuda.graph, make_graphed_callables): the graph would use memory and events "
                "of earlier steps. Capture the whole step by shardkit.capture(step, model)."
            )
            raise StateError(msg)
        super().note_step()

    # --- memory ---

    def allocate_from(self, axes: Sequence[AxisComm]) -> None:
        """Take the memory of buffers from the engine, which registers it with the network."""
        device = self._device.device
        engines = (torch_groups.process_group_backend(a.group, device) for a in _as_own(axes))
        offered = (e for e in engines if e is not None and e.supports_tensor_alloc(device))
        self._allocator = next(offered, None)

    def separate_reduce(self, axis: AxisComm, *, enable: bool) -> None:
        """Reduce over `axis` on a separate communicator, or on that of the gathers."""
        assert isinstance(axis, AcceleratorAxis)
        if enable and axis.size > 1 and axis.separate_group is None:
            axis.separate_group = sub_group(axis.group, [range(axis.size)])
        separate = axis.separate_group if enable else None
        axis.reduce_group = separate or axis.group

    def new_storage(self, nbytes: int) -> torch.UntypedStorage:
        """Return memory of the device."""
        if self._allocator is None:
            return self._device.new_storage(nbytes)
        device = self._device.device
        buffer = self._allocator.allocate_tensor(nbytes, dtype=torch.uint8, device=device)
        storage: torch.UntypedStorage = buffer.untyped_storage()
        return storage

    def resize_storage(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give a storage other memory of the device, or none."""
        self._device.resize_storage(storage, nbytes)

    # --- order ---

    def fence(self) -> Event:
        """Record an event on the compute stream."""
        return self._device.current_stream().record_event()

    def wait_fence(self, fence: Event | None) -> None:
        """Let the compute stream wait."""
        if fence is not None:
            # order: compute waits for a slot's last use
            self._device.current_stream().wait_event(fence)

    def follow_compute(self) -> None:
        """Let the gather stream wait for writes to shards, whichever slots it will use."""
        self._gather.wait_event(self.fence())  # order: gathers wait for writes to shards

    def after_optimizer(self, event: Event) -> None:
        """Let the gather stream wait for a user's event."""
        self._gather.wait_event(event)  # order: gathers wait for the optimizer's event

    def fork(self) -> None:
        """Let all streams wait for compute, whose capture has begun, so that it captures them."""
        start = self.fence()
        for stream in (*self._streams, *self._hook_streams):
            stream.wait_event(start)  # order: all streams join a capture
        self._has_forked = True

    def end_fork(self) -> None:
        """Note that the capture has ended, or was given up."""
        self._has_forked = False

    def join(self) -> None:
        """Let the compute stream wait for all work issued on other streams.

        A capture of other work must not wait. It began when all work from before it was done.
        """
        if self._device.is_capturing() and not self._has_forked:
            return  # order: a capture does not wait for streams of a dropped model
        compute = self._device.current_stream()
        for stream in (*self._streams, *self._hook_streams):
            # order: compute waits for all streams
            compute.wait_event(stream.record_event())

    def settle_host_reads(self, *, compute: bool) -> None:
        """Block the host until all copies from offloaded shards are done."""
        if compute:
            self.fence().synchronize()
        event, self._host_read = self._host_read, None
        if event is not None:
            event.synchronize()  # order: the host waits for copies of offloaded shards

    # --- collectives ---

    def start_gather(
        self, gathers: Sequence[Gather], axis: AxisComm, after: Sequence[Event | None], of: str
    ) -> Handle:
        """Cast and gather on the gather stream, after the slots' last readers."""
        assert isinstance(axis, AcceleratorAxis)
        issued = axis.issue("all-gather", of, sum(gather.full.nbytes for gather in gathers))
        for event in after:
            if event is not None:
                self._gather.wait_event(event)  # order: gathers wait for slots' readers
        with self._device.on(self._gather):  # order: gathers run on their own stream
            for gather in gathers:
                gather.own.copy_(gather.shard, non_blocking=True)
            if axis.size > 1:
                _gather_all(gathers, axis)
        event = self._gather.record_event()
        if issued is not None:
            issued.started(self._device, event)
        if any(gather.is_on_host for gather in gathers):
            self._host_read = event  # order: the host waits for the last copy from its shards
        return EventHandle(self._device, event)

    def start_reduce(self, reductions: Sequence[Reduction], of: str) -> ReduceEventHandle:
        """Reduce-scatter on one stream, all-reduce on the next."""
        # All memory belongs to the compute stream: allocate it before other streams touch it.
        outs = [self._new_result(reduction) for reduction in reductions]
        handle = ReduceEventHandle(self._device, outs)
        prepared = [self._prepare(*pair, handle) for pair in zip(reductions, outs, strict=True)]
        self._reduce.wait_event(self.fence())  # order: reductions wait for compute
        try:
            # order: send buffers wait for the reduce-scatter
            ends = [self._reduce, *(self._start_one(each, handle, of) for each in prepared)]
        except BaseException:
            # Collectives that were issued still write to memory, and nobody will wait for them.
            self.join()  # order: after an error compute waits for what was issued
            raise
        # order: compute waits for every stream that results end on
        events = [stream.record_event() for stream in dict.fromkeys(ends)]
        is_on_host = any(reduction.is_to_host for reduction in reductions)
        handle.started(events[0], events, is_on_host=is_on_host)
        return handle

    def _new_result(self, reduction: Reduction) -> Tensor:
        numel, dtype = reduction.out_numel, reduction.out_dtype
        if reduction.is_to_host:
            return self._device.empty_on_host(numel, dtype, pinned=reduction.is_pinned)
        return self._device.empty(numel, dtype)

    def _prepare(self, reduction: Reduction, out: Tensor, handle: ReduceEventHandle) -> _Prepared:
        """Allocate the memory that one reduction needs beside its result."""
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
            # Without this the send buffer would be in use until the all-reduce is done.
            # order: a sum over the shard axis lives until it is all-reduced
            into = handle.keep(self._device.empty(reduction.out_numel, reduction.send.dtype))
        return _Prepared(reduction, sums, into, result, out)

    def _start_one(self, prepared: _Prepared, handle: ReduceEventHandle, of: str) -> Stream:
        """Start one reduction; return the stream on which it ends."""
        reduction, sums, result = prepared.reduction, prepared.sums, prepared.result
        stream = self._reduce
        shard_axis = reduction.shard_axis
        assert isinstance(shard_axis, AcceleratorAxis)
        nbytes = reduction.send.nbytes
        issued = shard_axis.issue("reduce-scatter", of, nbytes, shard_axis.reduce_group)
        handle.issued.append(issued)
        with self._device.on(stream):
            total = sums.reduce_scatter(prepared.into)
            if sums.replicate_axis is None:
                sums.finish(total, result)
        if sums.replicate_axis is not None:
            stream = self._follow(self._all_reduce, stream)
            if reduction.all_reduce is None:
                handle.issued.append(sums.replicate_axis.issue("all-reduce", of, total.nbytes))
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
        """Let a stream continue after all work issued on another."""
        # order: a stream waits for the one before it
        stream.wait_event(before.record_event())
        return stream

    def start_all_reduce_max(
        self, tensor: Tensor, axes: Sequence[AxisComm], of: str
    ) -> CheckHandle:
        """All-reduce by the host's engine if all axes have one, else on a copy on the device."""
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
            # The memory is this stream's own, since nobody waits for a model that is dropped.
            # order: numbers lie in memory that the reduce stream allocates
            on_device = self._device.empty(tensor.numel(), tensor.dtype)
            on_device.copy_(pinned, non_blocking=True)
            for axis in axes:
                axis.issue("all-reduce", of, tensor.nbytes)
                dist.all_reduce(on_device, dist.ReduceOp.MAX, group=axis.group)
            pinned.copy_(on_device, non_blocking=True)
        return DeviceCheckHandle(tensor, pinned, self._reduce.record_event())


def _as_own(axes: Sequence[AxisComm]) -> list[AcceleratorAxis]:
    """Return the axes with the type of this backend; all of them are of this backend."""
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
    is_one = len(own) > 1 and axis.averages
    as_sent = movable
    for gather in own:
        if is_one and gather.full.dtype is not own[0].full.dtype:
            as_sent = as_bytes  # Some engines take the dtype of the first for all.
    with torch_groups.coalesced(axis.group) if is_one else contextlib.nullcontext():
        for gather in own:
            all_gather_single(as_sent(gather.full), as_sent(gather.own), group=axis.group)


# --- the backend ----------------------------------------------------------------------------------


class AcceleratorBackend(ProcessGroupBackend):
    """Meshes of accelerators; the current device of a process is the device of its rank."""

    is_host_synchronous = False
    has_own_memory = True
    copies_gradients_together = True

    def __init__(self, mesh: torch_mesh.DeviceMesh, axes: Sequence[int]) -> None:
        super().__init__(mesh, axes)
        self.accelerator = self.find_device(mesh.device_type)
        self.device = self.accelerator.device

    @staticmethod
    def find_device(device_type: str) -> AcceleratorDevice:
        """Return the device of this process."""
        return AcceleratorDevice.current(device_type)

    def make_axis(self, group: dist.ProcessGroup) -> AcceleratorAxis:
        """Return the communicator over a process group."""
        return AcceleratorAxis(group, self.accelerator)

    def zeros_on_host(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """Return zeros on the host, for offloaded shards."""
        return self.accelerator.empty_on_host(numel, dtype, pinned=pinned).zero_()

    def new_graph(self, axes: Sequence[AxisComm]) -> StreamGraph:
        """See `Backend.new_graph`."""
        own = _as_own([axis for axis in axes if axis.size > 1])
        if any(axis.host_group is None for axis in own):
            msg = (
                "a step cannot be captured where ranks tell each other over the device which "
                "parameters they used, for the host waits for that: expected process groups with "
                "an engine for the host too. Call "
                "torch.distributed.init_process_group('cpu:gloo,cuda:nccl')."
            )
            raise StateError(msg)
        return StreamGraph(self.accelerator, [axis.group for axis in own])

    def make_streams(
        self, axes: Sequence[AxisComm], share: CommStreams | None = None
    ) -> AcceleratorStreams:
        """Make the three streams, or use those of another root."""
        assert share is None or isinstance(share, AcceleratorStreams)
        return AcceleratorStreams(self.accelerator, share)
