"""Accelerator ranks: three streams per root and events between them, never `record_stream`.

One backend for every device that torch has streams and a collective library for: ``cuda`` (NCCL,
and RCCL on AMD), ``xpu``, ``npu``, ... What it needs of the device is in `device`.

Memory belongs to the compute stream. A side stream reads or writes it only after an event that the
compute stream recorded, and the compute stream touches it again only after an event of that side
stream; so no buffer is ever reused early, and peaks are the same in every step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardkit import _compat
from shardkit.backends.device import AcceleratorDevice
from shardkit.backends.process_group import (
    CustomGather,
    CustomReduceScatter,
    ProcessGroupAxis,
    ProcessGroupBackend,
    all_gather_single,
    reduce_scatter_single,
    sub_group,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import device_mesh as torch_mesh

    from shardkit.backends.base import CheckHandle, Gather, Handle, Reduction

_AVERAGING_ENGINES = ("nccl", "xccl", "fake")
"""Collective libraries that divide by the number of ranks themselves."""

_COALESCING_ENGINES = ("nccl", "xccl", "fake")
"""Those that run several all-gathers as one."""


class AcceleratorAxis(ProcessGroupAxis):
    """An axis whose small collectives also take host tensors, as offloaded shards are.

    Attributes:
        device: Where its collectives run.
        reduce_group: For reduce-scatters; the gathers' own unless it was separated.
        host_group: For small host tensors, so that the device need not be waited for; None: the
            process group was made without an engine for the host.
    """

    def __init__(self, group: dist.ProcessGroup, device: AcceleratorDevice) -> None:
        super().__init__(group)
        self.device = device
        self.reduce_group = group
        self._separate_group: dist.ProcessGroup | None = None
        engine = _compat.process_group_backend(group, device.device)
        name = engine.name() if engine is not None else ""
        self.averages = name in _AVERAGING_ENGINES
        self.coalesces = name in _COALESCING_ENGINES
        has_host_engine = _compat.process_group_backend(group, torch.device("cpu")) is not None
        self.host_group = group if has_host_engine else None

    def all_gather(self, full: Tensor, own: Tensor) -> None:
        """See `AxisComm.all_gather`."""
        on_device = self.device.copy(full)
        super().all_gather(on_device, self.device.copy(own))
        if on_device is not full:
            full.copy_(on_device)

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """See `AxisComm.all_reduce`."""
        on_device = self.device.copy(tensor)
        super().all_reduce(on_device, op)
        if on_device is not tensor:
            tensor.copy_(on_device)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """See `AxisComm.broadcast`."""
        on_device = self.device.copy(tensor)
        super().broadcast(on_device, src)
        if on_device is not tensor:
            tensor.copy_(on_device)

    def separate_reduce(self, *, enable: bool) -> None:
        """Reduce on a communicator of its own, or on that of the gathers. Collective."""
        if enable and self.size > 1 and self._separate_group is None:
            self._separate_group = sub_group(self.group, [range(self.size)])
        separate = self._separate_group if enable else None
        self.reduce_group = separate or self.group


class EventHandle:
    """A point on a side stream."""

    def __init__(self, device: AcceleratorDevice, event: Any) -> None:
        self._device = device
        self._event = event

    def wait(self) -> None:
        """Let the compute stream wait; the host goes on."""
        self._device.wait(self._device.current_stream(), self._event)


class ReduceEventHandle:
    """Reductions on side streams.

    Attributes:
        fence: After it the send buffers are free.
    """

    def __init__(self, device: AcceleratorDevice, outs: list[Tensor]) -> None:
        self.fence: Any = None
        self._device = device
        self._outs = outs
        # The compute stream's memory, used by others: not to be allocated anew before that is done.
        self._kept: list[Tensor] = []
        self._ends: list[Any] = []
        self._is_on_host = False

    def keep(self, tensor: Tensor) -> Tensor:
        """Let memory live until the compute stream waits for the results."""
        self._kept.append(tensor)
        return tensor

    def started(self, fence: Any, ends: list[Any], *, is_on_host: bool) -> None:
        """Note the event after the send buffers' last use, and those after all results."""
        self.fence, self._ends, self._is_on_host = fence, ends, is_on_host

    def wait_sent(self) -> None:
        """Let the compute stream wait until the send buffers are free; the host goes on."""
        self._device.wait(self._device.current_stream(), self.fence)

    def wait(self) -> list[Tensor]:
        """Let the compute stream wait; the host goes on, unless results are offloaded to it."""
        stream = self._device.current_stream()
        for event in self._ends:
            self._device.wait(stream, event)
            if self._is_on_host:
                self._device.synchronize(event)
        self._kept.clear()
        return self._outs


class DeviceCheckHandle:
    """Numbers on their way from the device, through pinned memory, to a host tensor."""

    is_of_host = False

    def __init__(
        self, device: AcceleratorDevice, target: Tensor, pinned: Tensor, event: Any
    ) -> None:
        self._device = device
        self._target = target
        self._pinned = pinned
        self._event = event

    def is_done(self) -> bool:
        """Whether the numbers are there."""
        return self._device.is_done(self._event)

    def wait(self) -> None:
        """Block the host until the numbers are there."""
        self._device.synchronize(self._event)
        self._target.copy_(self._pinned)


class HostCheckHandle:
    """A collective of the host's engine; the device is not touched."""

    is_of_host = True

    def __init__(self, work: dist.Work | None) -> None:
        self._work = work

    def is_done(self) -> bool:
        """Whether all hosts have come."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> None:
        """Block until all hosts have come; again is free."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()


class AcceleratorStreams:
    """One stream each for gathers, reduce-scatters and all-reduces over the replicate axis.

    A collective library runs what one communicator is given in the order of issue, so more streams
    would not run more of them at once.
    """

    region = None

    def __init__(self, device: AcceleratorDevice, share: AcceleratorStreams | None = None) -> None:
        self._device = device
        if share is None:
            self._streams = [device.new_stream() for _ in range(3)]
        else:
            self._streams = share._streams  # noqa: SLF001 - own class
        self._gather, self._reduce, self._all_reduce = self._streams
        self._hook_streams: dict[Any, None] = {}
        self._host_read: Any = None
        self._allocator: Any = None

    def watch(self, progress: Any) -> None:
        """Collective libraries of devices have watchdogs of their own."""

    # --- memory ---

    def allocate_from(self, axes: Sequence[AcceleratorAxis]) -> None:
        """Take the memory of buffers from the engine, which registers it with the network."""
        device = self._device.device
        engines = (_compat.process_group_backend(axis.group, device) for axis in axes)
        offered = (e for e in engines if e is not None and e.supports_tensor_alloc(device))
        self._allocator = next(offered, None)

    def separate_reduce(self, axis: AcceleratorAxis, *, enable: bool) -> None:
        """Reduce over `axis` on a communicator of its own, or on that of the gathers."""
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

    def fence(self) -> Any:
        """Mark the compute stream."""
        return self._device.record(self._device.current_stream())

    def wait_fence(self, fence: Any) -> None:
        """Let the compute stream wait."""
        if fence is not None:
            self._device.wait(self._device.current_stream(), fence)

    def follow_compute(self) -> None:
        """Let the gather stream wait for writes to shards, whatever slots it will use."""
        self._device.wait(self._gather, self.fence())

    def after_optimizer(self, event: Any) -> None:
        """Let the gather stream wait for a user's event."""
        self._device.wait(self._gather, event)

    def join(self) -> None:
        """Let the compute stream wait for all that was issued on others."""
        compute = self._device.current_stream()
        for stream in (*self._streams, *self._hook_streams):
            self._device.wait(compute, self._device.record(stream))

    def settle_host_reads(self, *, compute: bool) -> None:
        """Block the host until copies from offloaded shards have been made."""
        if compute:
            self._device.synchronize(self.fence())
        event, self._host_read = self._host_read, None
        if event is not None:
            self._device.synchronize(event)

    # --- collectives ---

    def start_gather(
        self, gathers: Sequence[Gather], axis: AcceleratorAxis, after: Sequence[Any]
    ) -> Handle:
        """Cast and gather on the gather stream, after the slots' last readers."""
        for event in after:
            if event is not None:
                self._device.wait(self._gather, event)
        with self._device.on(self._gather):
            for gather in gathers:
                gather.own.copy_(gather.shard, non_blocking=True)
            if axis.size > 1:
                _gather_all(gathers, axis)
        event = self._device.record(self._gather)
        if any(gather.is_on_host for gather in gathers):
            self._host_read = event
        return EventHandle(self._device, event)

    def start_reduce(self, reductions: Sequence[Reduction]) -> ReduceEventHandle:
        """Reduce-scatter on one stream, all-reduce on the next."""
        # All memory belongs to the compute stream: it is allocated here, not in the streams below.
        outs = [self._new_result(reduction) for reduction in reductions]
        handle = ReduceEventHandle(self._device, outs)
        self._device.wait(self._reduce, self.fence())
        try:
            ends = [self._reduce]
            for reduction, out in zip(reductions, outs, strict=True):
                ends.append(self._start_one(reduction, out, handle))
        except BaseException:
            self.join()  # What was issued still writes memory that nobody will wait for.
            raise
        events = [self._device.record(stream) for stream in dict.fromkeys(ends)]
        is_on_host = any(reduction.is_to_host for reduction in reductions)
        handle.started(events[0], events, is_on_host=is_on_host)
        return handle

    def _new_result(self, reduction: Reduction) -> Tensor:
        numel, dtype = reduction.out_numel, reduction.out_dtype
        if reduction.is_to_host:
            return self._device.empty_on_host(numel, dtype, pinned=reduction.is_pinned)
        return self._device.empty(numel, dtype)

    def _start_one(self, reduction: Reduction, out: Tensor, handle: ReduceEventHandle) -> Any:
        """Start one reduction; return the stream that it ends on."""
        result = out
        if reduction.is_to_host:
            result = handle.keep(self._device.empty(reduction.out_numel, reduction.out_dtype))
        if reduction.carry is not None:
            handle.keep(reduction.carry)
        sums = Sums(reduction)
        into = None
        if sums.can_be_result:
            into = result
        elif sums.replicate_axis is not None:
            # Else the send buffer would be in use until the all-reduce is done.
            into = handle.keep(self._device.empty(reduction.out_numel, reduction.send.dtype))
        stream = self._reduce
        with self._device.on(stream):
            total = sums.reduce_scatter(into)
            if sums.replicate_axis is None:
                sums.finish(total, result)
        if sums.replicate_axis is not None:
            stream = self._follow(self._all_reduce, stream)
            with self._device.on(stream):
                sums.all_reduce(total)
                sums.finish(total, result)
        if reduction.hook is not None:
            if reduction.hook_stream is not None:
                self._hook_streams.setdefault(reduction.hook_stream)
                stream = self._follow(reduction.hook_stream, stream)
            with self._device.on(stream):
                reduction.hook(result)
        if result is not out:
            with self._device.on(stream):
                out.copy_(result, non_blocking=reduction.is_pinned)
        return stream

    def _follow(self, stream: Any, before: Any) -> Any:
        """Let a stream go on after all that was issued on another."""
        self._device.wait(stream, self._device.record(before))
        return stream

    def start_all_reduce_max(self, tensor: Tensor, axes: Sequence[AcceleratorAxis]) -> CheckHandle:
        """All-reduce by the host's engine if all axes have one, else a copy on the device."""
        groups = [axis.host_group for axis in axes]
        if any(group is None for group in groups):
            return self._start_max_on_device(tensor, axes)
        for group in groups[:-1]:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        last = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=groups[-1], async_op=True)
        return HostCheckHandle(last)

    def _start_max_on_device(
        self, tensor: Tensor, axes: Sequence[AcceleratorAxis]
    ) -> DeviceCheckHandle:
        pinned = self._device.empty_on_host(tensor.numel(), tensor.dtype, pinned=True)
        pinned.copy_(tensor)
        with self._device.on(self._reduce):
            # This stream's own memory: nobody waits for a model that is dropped.
            on_device = self._device.empty(tensor.numel(), tensor.dtype)
            on_device.copy_(pinned, non_blocking=True)
            for axis in axes:
                dist.all_reduce(on_device, dist.ReduceOp.MAX, group=axis.group)
            pinned.copy_(on_device, non_blocking=True)
        return DeviceCheckHandle(self._device, tensor, pinned, self._device.record(self._reduce))


def _gather_all(gathers: Sequence[Gather], axis: AcceleratorAxis) -> None:
    """Gather buckets over an axis of several ranks, as one collective if the engine can."""
    own = [gather for gather in gathers if gather.comm is None]
    for gather in gathers:
        if gather.comm is not None:
            custom = CustomGather(gather, axis, async_op=False)
            if custom.work is not None:
                custom.work.wait()
            custom.finish()
    if len(own) > 1 and axis.coalesces:
        with _compat.coalesced(axis.group):
            for gather in own:
                all_gather_single(gather.full, gather.own, group=axis.group)
    else:
        for gather in own:
            all_gather_single(gather.full, gather.own, group=axis.group)


class Sums:
    """The arithmetic of one reduction, in steps that run on the current stream.

    The engine divides if it can and if the sum is to be divided by the number of ranks; then a
    reduction in the dtype of the result takes no kernel but the collective's. fp16 would overflow
    in a sum, or underflow before it, so there half of the division comes before.

    Attributes:
        replicate_axis: All-reduce over it; None: there is none, or one rank on it.
        can_be_result: The sum over the shard axis may be written where the result is wanted.
    """

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction
        shard, replicate = reduction.shard_axis, reduction.replicate_axis
        assert isinstance(shard, AcceleratorAxis)
        assert replicate is None or isinstance(replicate, AcceleratorAxis)
        self._shard_axis = shard
        self.replicate_axis = replicate if replicate is not None and replicate.size > 1 else None
        axes = [axis for axis in (shard, self.replicate_axis) if axis is not None and axis.size > 1]
        num_ranks = math.prod(axis.size for axis in axes)
        is_half = reduction.send.dtype == torch.float16
        is_plain = reduction.comm is None and reduction.carry is None and not is_half
        averages = all(axis.averages for axis in axes) and not reduction.force_sum
        self._averages = is_plain and averages and reduction.scale == 1.0 / num_ranks
        self._op = dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM
        self._before = math.sqrt(reduction.scale) if is_half else 1.0
        self._after = 1.0 if self._averages else reduction.scale / self._before
        self.can_be_result = (
            is_plain and shard.size > 1 and reduction.out_dtype == reduction.send.dtype
        )

    def reduce_scatter(self, into: Tensor | None) -> Tensor:
        """Sum over the shard axis, and add sums of earlier backwards.

        Args:
            into: Where the sum is wanted. None: in this rank's range of the send buffer, which is
                free for it.

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
            custom = CustomReduceScatter(reduction, axis.reduce_group, async_op=False)
            if custom.work is not None:
                custom.work.wait()
            total.copy_(custom.total)
        elif axis.size > 1:
            reduce_scatter_single(
                _as_real(total), _as_real(send), op=self._op, group=axis.reduce_group
            )
        elif into is not None:
            total.copy_(own)
        return self._add_carry(total)

    def _add_carry(self, total: Tensor) -> Tensor:
        """Add sums of earlier backwards in their dtype; what crosses an axis is narrow again."""
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
        dist.all_reduce(_as_real(total), op=self._op, group=self.replicate_axis.group)

    def finish(self, total: Tensor, result: Tensor) -> None:
        """Scale the sum and put it where the result is wanted."""
        if self._after == 1.0:
            if total is not result:
                result.copy_(total)
        elif total.dtype == result.dtype:
            torch.mul(total, self._after, out=result)
        else:
            result.copy_(total).mul_(self._after)


def _as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers, which is what engines know."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class AcceleratorBackend(ProcessGroupBackend):
    """Meshes of accelerators: the current device of this process is its rank's."""

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
        """Return zeros on the host, for shards that are offloaded."""
        return self.accelerator.empty_on_host(numel, dtype, pinned=pinned).zero_()

    def make_streams(
        self, axes: Sequence[AcceleratorAxis], share: AcceleratorStreams | None = None
    ) -> AcceleratorStreams:
        """Make the three streams, or use those of another root."""
        del axes
        return AcceleratorStreams(self.accelerator, share)
