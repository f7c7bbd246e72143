"""A mesh axis over the collective library of an accelerator."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardkit import _compat
from shardkit.backends.process_group import REDUCE_OPS, ProcessGroupAxis, sub_group
from shardkit.backends.watch.channel import channel_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from shardkit.backends.device import AcceleratorDevice
    from shardkit.backends.watch.channel import Issued

_CAPABLE_ENGINES = ("nccl", "xccl", "fake")
"""Collective libraries that divide by the number of ranks, and run several all-gathers as one."""


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
        self.averages = engine is not None and engine.name() in _CAPABLE_ENGINES
        self.coalesces = self.averages
        has_host_engine = _compat.process_group_backend(group, torch.device("cpu")) is not None
        self.host_group = group if has_host_engine else None

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
            issued.started(functools.partial(self.device.is_done, event))

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """See `AxisComm.broadcast`."""
        with self._on_device(tensor) as on_device:
            super().broadcast(on_device, src)

    def issue_reduce(self, kind: str, of: str, nbytes: int) -> Issued | None:
        """Announce a collective of `reduce_group`; None where one rank is alone."""
        return channel_of(self.reduce_group).issue(kind, of, nbytes) if self.size > 1 else None

    def separate_reduce(self, *, enable: bool) -> None:
        """Reduce on a communicator of its own, or on that of the gathers. Collective."""
        if enable and self.size > 1 and self._separate_group is None:
            self._separate_group = sub_group(self.group, [range(self.size)])
        separate = self._separate_group if enable else None
        self.reduce_group = separate or self.group
