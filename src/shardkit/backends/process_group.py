"""Meshes over torch.distributed process groups: the common part of gloo and NCCL."""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh as torch_mesh

from shardkit._compat import torch_groups
from shardkit._mesh import DeviceMesh
from shardkit.backends.base import (
    AllToAll,
    Backend,
    CommStreams,
    Gather,
    Handle,
    PeerAxis,
    Reduction,
)
from shardkit.backends.groups import OfWorld, exchange, group_of, sub_group
from shardkit.backends.watch.watchdog import Issued, channel_of, current_watchdog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


# --- work of an engine of the host ----------------------------------------------------------------


class WorkHandle:
    """Started collectives of one process group."""

    is_of_host = True

    def __init__(self, works: Sequence[Handle | None], issued: Issued | None) -> None:
        self._works = [work for work in works if work is not None]
        self._issued = issued

    def wait(self) -> None:
        """Block until they are done or have failed; then a second call returns at once."""
        if not self._works:
            return
        assert self._issued is not None, "there are ranks to wait for"
        with self._issued.watched():
            try:
                for work in self._works:
                    work.wait()
            except Exception:
                self._works = []
                raise
        self._works = []


def start_host_all_to_all(job: AllToAll, group: dist.ProcessGroup) -> WorkHandle:
    """Start an exchange of memory of the host over a group of several ranks."""
    issued = channel_of(group).issue("all-to-all", job.of, job.total_nbytes)
    splits = (list(job.receive_nbytes), list(job.send_nbytes))
    work = dist.all_to_all_single(job.receive, job.send, *splits, group=group, async_op=True)
    return WorkHandle([work], issued)


def start_host_max(
    tensor: Tensor, groups: Sequence[dist.ProcessGroup | None], of: str
) -> WorkHandle:
    """Start a MAX all-reduce of a host tensor over groups, one group after another."""
    for group in groups[:-1]:
        start_host_max(tensor, [group], of).wait()
    assert groups[-1] is not None, "it was made"
    issued = channel_of(groups[-1]).issue("all-reduce", of, tensor.nbytes)
    work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=groups[-1], async_op=True)
    return WorkHandle([work], issued)


# --- axes over process groups ---------------------------------------------------------------------

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}

# torch 2.13 renamed both; 2.9 has only the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_KNOWN_TO_ALL_ENGINES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
}


def movable(tensor: Tensor) -> Tensor:
    """Return a tensor over the memory of a contiguous one that all engines can move.

    That is its bytes, 1-D, if not every engine knows its dtype.
    """
    return tensor if tensor.dtype in _KNOWN_TO_ALL_ENGINES else as_bytes(tensor)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, 1-D, over its memory."""
    return tensor.view(-1).view(torch.uint8)


class ProcessGroupAxis:
    """`AxisComm` over one torch process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()
        self.rank = group.rank()
        self.members = tuple(dist.get_process_group_ranks(group))

    def issue(
        self, kind: str, of: str, nbytes: int, group: dist.ProcessGroup | None = None
    ) -> Issued | None:
        """Announce a collective, on this group or another; None if there is only one rank."""
        return channel_of(group or self.group).issue(kind, of, nbytes) if self.size > 1 else None

    def all_gather(self, full: Tensor, own: Tensor) -> None:
        """See `AxisComm.all_gather`."""
        if self.size == 1:
            if full.data_ptr() != own.data_ptr():
                full.copy_(own)
            return
        with channel_of(self.group).run("all-gather", "", full.nbytes):
            all_gather_single(movable(full), movable(own), group=self.group)

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """See `AxisComm.all_reduce`."""
        if self.size > 1:
            with channel_of(self.group).run(f"all-reduce ({op})", "", tensor.nbytes):
                dist.all_reduce(tensor, REDUCE_OPS[op], group=self.group)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """See `AxisComm.broadcast`."""
        if self.size > 1:
            with channel_of(self.group).run("broadcast", "", tensor.nbytes):
                dist.broadcast(movable(tensor), group=self.group, group_src=src)

    def exchange(self, item: Any) -> list[Any]:
        """See `AxisComm.exchange`."""
        return exchange(item, self.group)

    def all_reduce_flags(self, flags: Tensor) -> None:
        """See `PeerAxis.all_reduce_flags`."""
        self.all_reduce(flags, "max")


class WatchedStreams(CommStreams):
    """Streams whose collectives run on process groups."""

    def note_step(self) -> None:
        """Count the step."""
        current_watchdog().begin_step()

    def note_error(self, error: BaseException) -> None:
        """Keep the error."""
        current_watchdog().note_error(error)


class CustomCollective:
    """A collective by the user's own function, in buffers that the function allocates.

    With `async_op` code that uses `received` waits for `work`, unless that is None.
    """

    def __init__(
        self, comm: Any, send: Tensor, receive_numel: int, *, async_op: bool, **options: Any
    ) -> None:
        place = functools.partial(comm.allocate, dtype=send.dtype, device=send.device)
        self._sent = sent = place((send.numel(),))  # Keep it: the work may still read it.
        sent.copy_(send)
        self.received: Tensor = place((receive_numel,))
        self.work: dist.Work | None = comm(
            output_tensor=self.received, input_tensor=sent, async_op=async_op, **options
        )
        if self.work is not None and not async_op:
            self.work.wait()  # order: the stream waits for a user's collective


def custom_all_gather(
    gather: Gather, group: dist.ProcessGroup, *, async_op: bool
) -> CustomCollective:
    """Start a gather by the user's own function."""
    numel = gather.full.numel()
    return CustomCollective(gather.comm, gather.own, numel, group=group, async_op=async_op)


def custom_reduce_scatter(
    reduction: Reduction, group: dist.ProcessGroup, *, async_op: bool
) -> CustomCollective:
    """Start a reduce-scatter by the user's own function."""
    options = {"group": group, "op": dist.ReduceOp.SUM}
    comm, send, numel = reduction.comm, reduction.send, reduction.out_numel
    return CustomCollective(comm, send, numel, async_op=async_op, **options)


_axes: OfWorld[ProcessGroupAxis] = OfWorld()


class ProcessGroupBackend(Backend):
    """A backend over a torch DeviceMesh; subclasses add the streams."""

    def __init__(self, mesh: torch_mesh.DeviceMesh, axes: Sequence[int]) -> None:
        self._mesh = mesh
        self._axes = tuple(axes)
        self._comms: dict[int, ProcessGroupAxis] = {}
        self._world = dist.group.WORLD
        self.device = torch.device(mesh.device_type)

    @property
    def is_current(self) -> bool:
        """Whether the process groups have not been destroyed."""
        return self._world is dist.group.WORLD

    def as_torch(self, mesh: DeviceMesh) -> torch_mesh.DeviceMesh:
        """Return the mesh of this backend as one of torch, over the same process groups."""
        if self._axes == tuple(range(self._mesh.ndim)):
            return self._mesh
        names = mesh.mesh_dim_names or tuple(f"axis_{index}" for index in range(mesh.ndim))
        groups = mesh.get_all_groups()
        return torch_mesh.DeviceMesh.from_group(
            groups, mesh.device_type, mesh.mesh, mesh_dim_names=names
        )

    def process_group(self, axis: int) -> dist.ProcessGroup:
        """Return torch's process group of one axis."""
        known = self._comms.get(axis)
        return self._mesh.get_group(self._axes[axis]) if known is None else known.group

    def axis(self, axis: int) -> ProcessGroupAxis:
        """Return the communicator of one axis; always the same object."""
        if axis not in self._comms:
            group = self.process_group(axis)
            axes, key = _axes.now(), (type(self), group.group_name)
            known = axes.get(key)
            if known is None or known.group is not group:  # A user may destroy a single group.
                known = axes[key] = self.make_axis(group)
            self._comms[axis] = known
        return self._comms[axis]

    @abstractmethod
    def make_axis(self, group: dist.ProcessGroup) -> ProcessGroupAxis:
        """Return the communicator over a process group."""

    def joint_axis(self, ranks: Sequence[int]) -> PeerAxis:
        """Return the communicator of several axes as one; always the same object. Collective."""
        axes, key = _axes.now(), (type(self), tuple(sorted(ranks)))
        if key not in axes:
            axes[key] = self.make_axis(group_of(ranks))
        axis: Any = axes[key]
        return axis  # type: ignore[no-any-return]

    def split_axis(self, axis: int, size: int) -> ProcessGroupAxis:
        """Return the communicator of `size` neighbours on one axis."""
        whole = self.axis(axis)
        axes, key = _axes.now(), (whole, size)
        if key not in axes:
            splits = [range(first, first + size) for first in range(0, whole.size, size)]
            axes[key] = self.make_axis(sub_group(whole.group, splits))
        return axes[key]

    def for_axes(self, axes: Sequence[int]) -> ProcessGroupBackend:
        """Return the backend of the submesh made of `axes`; it shares the communicators."""
        return self.with_axes([self.axis(axis) for axis in axes])

    def with_axes(self, axes: Sequence[Any]) -> ProcessGroupBackend:
        """Return the backend of a mesh of the same devices, with these communicators as axes."""
        made = type(self)(self._mesh, ())
        made._comms = dict(enumerate(axes))  # noqa: SLF001 - own class
        return made


def from_torch_mesh(
    mesh: torch_mesh.DeviceMesh, backend_class: type[ProcessGroupBackend]
) -> DeviceMesh:
    """Return torch's mesh as one of shardkit, over the process groups of its axes."""
    watchdog = current_watchdog()  # From now on this process answers other ranks.
    return DeviceMesh(
        device_type=mesh.device_type,
        shape=tuple(mesh.shape),
        ranks=tuple(mesh.mesh.flatten().tolist()),
        mesh_dim_names=tuple(mesh.mesh_dim_names) if mesh.mesh_dim_names else None,
        rank=dist.get_rank(),
        backend=backend_class(mesh, range(mesh.ndim)),
        left_out=_left_out_of(mesh),
        world_size=watchdog.world_size,
    )


def _left_out_of(mesh: torch_mesh.DeviceMesh) -> tuple[str, ...]:
    """Return the names of axes, of several ranks each, that a submesh lacks; none if flattened."""
    root = torch_groups.root_mesh(mesh)
    own, names = mesh.mesh_dim_names or (), root.mesh_dim_names or ()
    if not own or not set(own) <= set(names):
        return ()
    sizes = zip(names, root.shape, strict=True)
    return tuple(name for name, size in sizes if name not in own and size > 1)
