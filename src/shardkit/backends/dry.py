"""Ranks that compute nothing: one process is any rank of a world of any size, on meta tensors.

The backends are the real ones. They use torch's fake process group, so every collective is issued
as on that many ranks, and returns at once. Only the device differs: its streams do nothing, and
memory is a storage on meta, which has a size but no bytes.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh as torch_mesh

from shardkit._compat import torch_groups
from shardkit._errors import StateError
from shardkit.backends.accelerator import AcceleratorAxis, AcceleratorBackend
from shardkit.backends.base import InGraph
from shardkit.backends.device import AcceleratorDevice, Event, Stream
from shardkit.backends.gloo import GlooAxis, GlooBackend
from shardkit.backends.groups import sub_group
from shardkit.backends.process_group import ProcessGroupBackend, from_torch_mesh

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from shardkit._mesh import DeviceMesh

_META = torch.device("meta")
_HOST_MARK = "shardkit_is_on_host"
_host_makers: list[None] = []  # List that is not empty while memory of the host is made.


class _NoStream(InGraph):
    """`Stream` and `Event` of a device on which nothing runs."""

    def record_event(self) -> Event:
        """Return an event."""
        return self

    def wait_event(self, event: Event) -> None:
        """Wait for nothing."""


class DryDevice(AcceleratorDevice):
    """A device without a chip."""

    def __init__(self) -> None:
        self.device = _META
        self._stream = _NoStream()

    def new_stream(self) -> Stream:
        """Return the only stream."""
        return self._stream

    def current_stream(self) -> Stream:
        """Return the only stream."""
        return self._stream

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def is_capturing(self) -> bool:
        """Whether issued work is captured: it is not."""
        return False

    def has_passed(self, event: Event) -> bool:
        """Whether an event has passed: all have."""
        return True

    def empty_on_host(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """Return 1-D memory of the host, which is on meta as well; `is_on_host` recognizes it."""
        _host_makers.append(None)
        try:
            tensor = torch.empty(numel, dtype=dtype, device=_META)
        finally:
            _host_makers.pop()
        setattr(tensor.untyped_storage(), _HOST_MARK, True)
        return tensor

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a small tensor as it is."""
        return tensor


def is_on_host(storage: torch.UntypedStorage) -> bool:
    """Whether a storage on meta replaces memory of the host, also while it is being made."""
    return bool(_host_makers) or hasattr(storage, _HOST_MARK)


class DryGlooAxis(GlooAxis):
    """An axis whose second process group has the same engine as the first."""

    def make_reduce_group(self) -> None:
        """Make the group, once."""
        if self.reduce_group is None and self.size > 1:
            self.reduce_group = sub_group(self.group, [range(self.size)])


class DryGlooBackend(GlooBackend):
    """gloo's ranks, on meta."""

    is_dry = True

    def __init__(self, mesh: torch_mesh.DeviceMesh, axes: Sequence[int]) -> None:
        super().__init__(mesh, axes)
        self.device = _META

    def make_axis(self, group: dist.ProcessGroup) -> GlooAxis:
        """Return the communicator over a process group."""
        return DryGlooAxis(group)


class DryAcceleratorBackend(AcceleratorBackend):
    """Ranks of an accelerator whose engine can do all that NCCL can, on meta."""

    is_dry = True

    @staticmethod
    def find_device(device_type: str) -> AcceleratorDevice:
        """Return a device without a chip."""
        del device_type
        return DryDevice()

    def make_axis(self, group: dist.ProcessGroup) -> AcceleratorAxis:
        """Return the communicator over a process group."""
        axis = super().make_axis(group)
        axis.averages = True
        axis.host_group = group
        return axis


_classes: list[type[ProcessGroupBackend]] = []
"""Backend of the dry world that is open now; empty: there is none."""


def size_of_group(given: Any) -> int:
    """Return the number of ranks of a process group, given as operators of collectives get it."""
    group = (
        torch_groups.group_named(given)
        if isinstance(given, str)
        else dist.ProcessGroup.unbox(given)
    )
    return group.size()


def played_backend() -> type[ProcessGroupBackend] | None:
    """Return the backend of all meshes in a dry world; None: no dry world is open."""
    return _classes[-1] if _classes else None


@contextlib.contextmanager
def dry_world(size: int, rank: int, *, has_streams: bool) -> Iterator[None]:
    """Be one rank of a world whose other ranks do not exist, while the context is open.

    Args:
        size: Number of ranks.
        rank: Number of this rank.
        has_streams: Whether ranks have accelerators; else they are gloo ranks on CPUs.

    Raises:
        StateError: This process is a rank already.
    """
    if dist.is_initialized():
        msg = (
            "this process has a process group, and a plan needs one of its own. Plan before "
            "init_process_group and init_device_mesh, or in a process that no launcher started."
        )
        raise StateError(msg)
    excepthook = sys.excepthook  # Torch's hook prints the rank before tracebacks.
    torch_groups.init_fake_process_group(rank, size)
    _classes.append(DryAcceleratorBackend if has_streams else DryGlooBackend)
    try:
        yield
    finally:
        _classes.pop()
        torch_groups.forget_dtensor_meshes()
        dist.destroy_process_group()
        sys.excepthook = excepthook


def init_dry_mesh(shape: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """Return a mesh over all ranks of the dry world.

    Cost: a process group of torch for each line of ranks along each axis.
    """
    # DTensors ask torch's mesh for the number of devices of a host, which torch knows for the CPU.
    mesh = torch_mesh.init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names))
    return from_torch_mesh(mesh, _classes[-1])
