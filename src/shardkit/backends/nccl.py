"""CUDA ranks over NCCL: three streams per root and events between them, never `record_stream`.

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
from shardkit.backends.process_group import (
    CustomGather,
    CustomReduceScatter,
    ProcessGroupAxis,
    ProcessGroupBackend,
    all_gather_single,
    new_group,
    reduce_scatter_single,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import device_mesh as torch_mesh

    from shardkit.backends.base import Gather, Handle, Reduction


class NcclAxis(ProcessGroupAxis):
    """An axis whose small collectives also take host tensors, as offloaded shards are.

    Attributes:
        reduce_group: For reduce-scatters; the gathers' own unless it was separated.
        separate_group: Made once, when it was first wanted.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.reduce_group = group
        self.separate_group: dist.ProcessGroup | None = None

    def all_gather(self, full: Tensor, own: Tensor) -> None:
        """See `AxisComm.all_gather`."""
        if full.device.type == "cuda" or self.size == 1:
            super().all_gather(full, own)
            return
        on_device = full.cuda()
        super().all_gather(on_device, own.cuda())
        full.copy_(on_device)

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """See `AxisComm.all_reduce`."""
        on_device = tensor.cuda()
        super().all_reduce(on_device, op)
        if on_device is not tensor:
            tensor.copy_(on_device)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """See `AxisComm.broadcast`."""
        on_device = tensor.cuda()
        super().broadcast(on_device, src)
        if on_device is not tensor:
            tensor.copy_(on_device)


class EventHandle:
    """A point on a side stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.fence = event

    def wait(self) -> None:
        """Let the compute stream wait; the host goes on."""
        torch.cuda.current_stream().wait_event(self.fence)


class ReduceEventHandle:
    """Reductions on side streams, done at an event."""

    def __init__(
        self, event: torch.cuda.Event, outs: list[Tensor], reductions: Sequence[Reduction]
    ) -> None:
        self.fence = event
        self._outs = outs
        # The compute stream's, read by another: not to be allocated anew before that is done.
        self._carries = [reduction.carry for reduction in reductions]
        self._is_on_host = any(out.device.type == "cpu" for out in outs)

    def wait_sent(self) -> None:
        """Return at once: the fence tells streams, the host need not know."""

    def wait(self) -> list[Tensor]:
        """Let the compute stream wait; the host goes on, unless results are offloaded to it."""
        torch.cuda.current_stream().wait_event(self.fence)
        self._carries.clear()
        if self._is_on_host:
            self.fence.synchronize()
        return self._outs


class HostHandle:
    """Numbers on their way from the device, through pinned memory, to a host tensor."""

    def __init__(
        self, target: Tensor, pinned: Tensor, on_device: Tensor, event: torch.cuda.Event
    ) -> None:
        self._target = target
        self._pinned = pinned
        self._on_device = on_device  # Its memory must outlive the copy.
        self._event = event

    def wait(self) -> None:
        """Block the host until the numbers are there; the compute stream is not touched."""
        self._event.synchronize()
        self._target.copy_(self._pinned)


class CudaLanes:
    """One stream each for gathers, reduce-scatters and all-reduces over the replicate axis.

    NCCL runs the collectives of one communicator in the order of issue, so more streams would
    not run more of them at once.
    """

    region = None

    def __init__(self, device: torch.device, share: CudaLanes | None = None) -> None:
        self._device = device
        # High priority: collectives of the next group must not queue behind this group's kernels.
        if share is None:
            self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(3)]
        else:
            self._streams = share._streams  # noqa: SLF001 - own class
        self._gather, self._reduce, self._all_reduce = self._streams
        self._allocator: Any = None

    def watch(self, progress: Any) -> None:
        """NCCL has a watchdog of its own."""

    def allocate_from(self, axes: Sequence[ProcessGroupAxis]) -> None:
        """Take the memory of buffers from NCCL's allocator, which registers it with the network."""
        backends = (_compat.process_group_backend(axis.group, self._device) for axis in axes)
        offered = (backend for backend in backends if backend.supports_tensor_alloc(self._device))
        self._allocator = next(offered, None)

    def separate_reduce(self, axis: NcclAxis, *, enable: bool) -> None:
        """Reduce over `axis` on a communicator of its own, or on that of the gathers."""
        if axis.size > 1 and enable and axis.separate_group is None:
            ranks = dist.get_process_group_ranks(axis.group)
            axis.separate_group = new_group(ranks)
        axis.reduce_group = axis.separate_group if enable and axis.separate_group else axis.group

    def new_storage(self, nbytes: int) -> torch.UntypedStorage:
        """Return memory of the device."""
        if self._allocator is None:
            return torch.UntypedStorage(nbytes, device=self._device)
        buffer = self._allocator.allocate_tensor(nbytes, dtype=torch.uint8, device=self._device)
        storage: torch.UntypedStorage = buffer.untyped_storage()
        return storage

    def after_optimizer(self, event: torch.cuda.Event) -> None:
        """Let the gather stream wait for a user's event."""
        self._gather.wait_event(event)

    def follow_compute(self) -> None:
        """Let the gather stream wait for writes to shards, whatever slots it will use."""
        self._gather.wait_event(self.fence())

    def fence(self) -> torch.cuda.Event:
        """Mark the compute stream."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def start_gather(
        self,
        gathers: Sequence[Gather],
        axis: ProcessGroupAxis,
        after: Sequence[torch.cuda.Event | None],
    ) -> Handle:
        """Cast and gather on the gather stream, after the slots' last readers."""
        for event in after:
            if event is not None:
                self._gather.wait_event(event)
        with torch.cuda.stream(self._gather):
            for gather in gathers:
                gather.own.copy_(gather.shard, non_blocking=True)
                if axis.size > 1 and gather.comm is not None:
                    CustomGather(gather, axis, async_op=False).finish()
                elif axis.size > 1:
                    all_gather_single(gather.full, gather.own, group=axis.group)
            return EventHandle(self._gather.record_event())

    def wait_fence(self, fence: torch.cuda.Event | None) -> None:
        """Let the compute stream wait."""
        if fence is not None:
            torch.cuda.current_stream(self._device).wait_event(fence)

    def start_reduce(self, reductions: Sequence[Reduction]) -> ReduceEventHandle:
        """Reduce-scatter on one stream, all-reduce on the next."""
        # The results belong to the compute stream, as all memory does.
        outs = [
            torch.empty(
                r.out_numel,
                dtype=r.out_dtype,
                device=r.out_device,
                pin_memory=r.out_device.type == "cpu",
            )
            for r in reductions
        ]
        self._reduce.wait_event(self.fence())
        others: dict[torch.cuda.Stream, None] = {}
        for reduction, out in zip(reductions, outs, strict=True):
            with torch.cuda.stream(self._reduce):
                partial = _add_carry(reduction, _reduce_scatter(reduction))
            if reduction.replicate_axis is not None:
                stream = self._all_reduce
                others.setdefault(stream)
                stream.wait_event(self._reduce.record_event())
                with torch.cuda.stream(stream):
                    assert isinstance(reduction.replicate_axis, ProcessGroupAxis)
                    dist.all_reduce(partial, group=reduction.replicate_axis.group)
                    _finish(reduction, partial, out)
            elif reduction.hook_stream is not None:
                stream = reduction.hook_stream
                others.setdefault(stream)
                stream.wait_event(self._reduce.record_event())
                with torch.cuda.stream(stream):
                    _finish(reduction, partial, out)
            else:
                with torch.cuda.stream(self._reduce):
                    _finish(reduction, partial, out)
        for stream in others:
            # All come back to the reduce stream, so that one event covers them.
            self._reduce.wait_event(stream.record_event())
        return ReduceEventHandle(self._reduce.record_event(), outs, reductions)

    def start_all_reduce_max(self, tensor: Tensor, axes: Sequence[ProcessGroupAxis]) -> Handle:
        """All-reduce a device copy on the reduce stream; `wait` brings it to the host."""
        pinned = tensor.pin_memory()
        on_device = torch.empty_like(tensor, device=self._device)
        self._reduce.wait_event(self.fence())
        with torch.cuda.stream(self._reduce):
            on_device.copy_(pinned, non_blocking=True)
            for axis in axes:
                dist.all_reduce(on_device, dist.ReduceOp.MAX, group=axis.group)
            pinned.copy_(on_device, non_blocking=True)
            return HostHandle(tensor, pinned, on_device, self._reduce.record_event())


def _pre_scale(reduction: Reduction) -> float:
    """Return what to multiply before the sum: fp16 would overflow in it, or underflow before."""
    return math.sqrt(reduction.scale) if reduction.send.dtype == torch.float16 else 1.0


def _finish(reduction: Reduction, total: Tensor, out: Tensor) -> None:
    """Scale, run the user's hook, bring the result to where it is wanted."""
    scale = reduction.scale / _pre_scale(reduction)
    if out.device == total.device:
        result = out.copy_(total).mul_(scale)
    else:
        result = total.to(out.dtype).mul_(scale)
    if reduction.hook is not None:
        reduction.hook(result)
    if result is not out:
        out.copy_(result, non_blocking=True)


def _reduce_scatter(reduction: Reduction) -> Tensor:
    """Sum into this rank's own range of `send`, which is free for it; no further memory."""
    if (pre_scale := _pre_scale(reduction)) != 1.0:
        reduction.send.mul_(pre_scale)
    axis = reduction.shard_axis
    assert isinstance(axis, NcclAxis)
    own = reduction.send.view(axis.size, -1)[axis.rank]
    if axis.size > 1 and reduction.comm is not None:
        custom = CustomReduceScatter(reduction, axis.reduce_group, async_op=False)
        own.copy_(custom.total)
    elif axis.size > 1:
        reduce_scatter_single(own, reduction.send, group=axis.reduce_group)
    return own


def _add_carry(reduction: Reduction, own: Tensor) -> Tensor:
    """Add sums of earlier backwards, in their dtype; what crosses another axis is narrow again."""
    if reduction.carry is None:
        return own
    if (pre_scale := _pre_scale(reduction)) != 1.0:
        reduction.carry.mul_(pre_scale)
    total = reduction.carry.add_(own)
    # No further memory: this rank's range of the send buffer is what goes on the wire.
    return total if reduction.replicate_axis is None else own.copy_(total)


class NcclBackend(ProcessGroupBackend):
    """Meshes of device type ``"cuda"``."""

    axis_class = NcclAxis
    host_reads_are_free = False

    def __init__(self, mesh: torch_mesh.DeviceMesh, axes: Sequence[int]) -> None:
        super().__init__(mesh, axes)
        self.device = torch.device("cuda", torch.cuda.current_device())

    def make_lanes(
        self, axes: Sequence[ProcessGroupAxis], share: CudaLanes | None = None
    ) -> CudaLanes:
        """Make the three streams, or use those of another root."""
        del axes
        return CudaLanes(self.device, share)
