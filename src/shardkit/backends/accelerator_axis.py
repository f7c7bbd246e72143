"""A mesh axis over the collective library of an accelerator."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardkit import _compat
from shardkit.backends.groups import sub_group
from shardkit.backends.host_work import start_host_all_to_all
from shardkit.backends.process_group import REDUCE_OPS, ProcessGroupAxis
from shardkit.backends.watch.channel import channel_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from shardkit.backends.base import AllToAll, Handle
    from shardkit.backends.device import AcceleratorDevice
    from shardkit.backends.events import Event, Stream

_CAPABLE_ENGINES = ("nccl", "xccl", "fake")
"""Collective libraries that divide by the number of ranks, and run several all-gathers as one."""


class PeerHandle:
    """An exchange on a side stream.

    Args:
        device: Device of the stream.
        event: Event after the exchange.
        kept: Memory of the compute stream that the exchange uses.
        back: (target on the host, source): copied when somebody waits.
    """

    def __init__(
        self,
        device: AcceleratorDevice,
        event: Event,
        kept: tuple[Tensor, ...],
        back: tuple[Tensor, Tensor] | None,
    ) -> None:
        self._device = device
        self._event = event
        self._kept = kept
        self._back = back

    def wait(self) -> None:
        """Let the compute stream wait; the host goes on, unless it is the host's memory."""
        self._device.wait(self._device.current_stream(), self._event)
        back, self._back = self._back, None
        if back is not None:
            back[0].copy_(back[1])
        self._kept = ()

    def __del__(self) -> None:
        """Give no memory back that an exchange still uses: an error dropped the handle."""
        if self._kept:
            self._device.wait(self._device.current_stream(), self._event)


class AcceleratorAxis(ProcessGroupAxis):
    """An axis whose small collectives also take host tensors, as offloaded shards are.

    Attributes:
        device: Device on which its collectives run.
        reduce_group: Group for reduce-scatters; the gathers' own unless it was separated.
        host_group: For small host tensors, so that the device need not be waited for; None: the
            process group was made without an engine for the host.
    """

    def __init__(self, group: dist.ProcessGroup, device: AcceleratorDevice) -> None:
        super().__init__(group)
        self.device = device
        self.reduce_group = group
        self._separate_group: dist.ProcessGroup | None = None
        engine = _compat.process_group_backend(group, device.device)
        self.averages = engine is not None and engine.name() in _CAPABLE_ENGINES
        self.coalesces = self.averages
        has_host_engine = _compat.process_group_backend(group, torch.device("cpu")) is not None
        self.host_group = group if has_host_engine else None
        self._peer_stream: Stream | None = None

    def start_all_to_all(self, job: AllToAll) -> Handle:
        """See `PeerAxis.start_all_to_all`: on a stream of its own.

        Memory of the host, as of offloaded shards, goes by the host's engine where there is one,
        else through the device.
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
        # What compute has written is sent, and what it has read last is overwritten.
        self.device.wait(stream, self.device.record(self.device.current_stream()))
        issued = self.issue("all-to-all", job.of, job.total_nbytes)
        with self.device.on(stream):
            if self.size > 1:
                splits = (list(job.receive_nbytes), list(job.send_nbytes))
                dist.all_to_all_single(receive, send, *splits, group=self.group)
        event = self.device.record(stream)
        if issued is not None:
            issued.started(functools.partial(self.device.has_passed, event))
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
        """Return a tensor, or a copy on the device that comes back when the context ends."""
        on_device = self.device.copy(tensor)
        yield on_device
        if on_device is not tensor:
            tensor.copy_(on_device)

    def all_gather(self, full: Tensor, own: Tensor) -> None:
        """See `AxisComm.all_gather`."""
        with self._on_device(full) as on_device:
            super().all_gather(on_device, self.device.copy(own))

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """See `AxisComm.all_reduce`. What is on the device is watched until it is done there."""
        if tensor.device != self.device.device:
            with self._on_device(tensor) as on_device:
                super().all_reduce(on_device, op)
        elif self.size > 1:
            issued = channel_of(self.group).issue(f"all-reduce ({op})", "", tensor.nbytes)
            dist.all_reduce(tensor, REDUCE_OPS[op], group=self.group)
            event = self.device.record(self.device.current_stream())
            issued.started(functools.partial(self.device.has_passed, event))

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """See `AxisComm.broadcast`."""
        with self._on_device(tensor) as on_device:
            super().broadcast(on_device, src)

    def separate_reduce(self, *, enable: bool) -> None:
        """Reduce on a communicator of its own, or on that of the gathers. Collective."""
        if enable and self.size > 1 and self._separate_group is None:
            self._separate_group = sub_group(self.group, [range(self.size)])
        separate = self._separate_group if enable else None
        self.reduce_group = separate or self.group
