"""torch.distributed process groups behind a mesh: what gloo and NCCL have in common."""

from __future__ import annotations

import functools
import math
import os
import sys
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh as torch_mesh

from shardkit import _compat
from shardkit._errors import MeshError
from shardkit._mesh import DeviceMesh
from shardkit.backends.base import Backend, CommStreams
from shardkit.backends.watch.channel import channel_of
from shardkit.backends.watch.current import current_station

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from shardkit.backends.base import Gather, Reduction
    from shardkit.backends.watch.channel import Issued

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}

# torch 2.13 renamed both; 2.9 has only the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_NO_PROCESS_GROUP = (
    "no process group: this process was not started by a launcher. Start the script by\n"
    "    torchrun --standalone --nproc-per-node 2 {script}\n"
    "or call torch.distributed.init_process_group() before making a mesh."
)


_num_made: dict[tuple[int, ...], int] = {}
_made_in: Any = None


def new_group(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """Make a process group. Only its own ranks have to call this.

    They must make all groups of the same ranks in the same order. Other groups of a rank make no
    difference.
    """
    with _named_group(ranks):
        group: dist.ProcessGroup = dist.new_group(
            list(ranks), backend=backend, use_local_synchronization=True
        )
    return group


def _named_group(ranks: Sequence[int]) -> AbstractContextManager[None]:
    """Give the next process group a name that all of its ranks give it."""
    global _made_in  # noqa: PLW0603 - to know that everything has begun anew
    if _made_in is not dist.group.WORLD:
        _num_made.clear()
        _made_in = dist.group.WORLD
    members = tuple(ranks)
    number = _num_made[members] = _num_made.get(members, 0) + 1
    return _compat.named_group(f"shardkit_{'_'.join(map(str, members))}_{number}")


def sub_group(
    parent: dist.ProcessGroup, splits: Sequence[Sequence[int]], backend: str | None = None
) -> dist.ProcessGroup:
    """Make a process group of some ranks of another. All ranks of `parent` must call this.

    Args:
        parent: The other one.
        splits: Positions in `parent`, without overlaps. A rank gets the group that it is in.
        backend: The engine; None: as the parent's.
    """
    mine = next(split for split in splits if parent.rank() in split)
    ranks = [dist.get_process_group_ranks(parent)[position] for position in mine]
    if backend is None and _must_be_split(parent):
        # A new group would split the communicator of the whole world, for which torch needs all of
        # its ranks to call.
        with _named_group(ranks):
            all_splits = [list(split) for split in splits]
            made = dist.split_group(parent_pg=parent, split_ranks=all_splits)
        assert made is not None, "every rank is in one of the splits"
        return made
    return new_group(ranks, backend)


def _must_be_split(parent: dist.ProcessGroup) -> bool:
    """Whether groups must be split from others: the world is bound to devices, the engine can."""
    device = getattr(dist.group.WORLD, "bound_device_id", None)
    if device is None:
        return False
    engine = _compat.process_group_backend(parent, device)
    return bool(getattr(engine, "supports_splitting", False))


_compat.separate_attempts()  # Before anyone calls `init_process_group`.


class ProcessGroupAxis:
    """`AxisComm` over one torch process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()
        self.rank = group.rank()

    def issue(self, kind: str, of: str, nbytes: int) -> Issued | None:
        """Announce a collective; None where one rank is alone."""
        return channel_of(self.group).issue(kind, of, nbytes) if self.size > 1 else None

    def all_gather(self, full: Tensor, own: Tensor) -> None:
        """See `AxisComm.all_gather`."""
        if self.size == 1:
            if full.data_ptr() != own.data_ptr():
                full.copy_(own)
            return
        with channel_of(self.group).run("all-gather", "", full.nbytes):
            all_gather_single(full, own, group=self.group)

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """See `AxisComm.all_reduce`."""
        if self.size > 1:
            with channel_of(self.group).run(f"all-reduce ({op})", "", tensor.nbytes):
                dist.all_reduce(tensor, REDUCE_OPS[op], group=self.group)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """See `AxisComm.broadcast`."""
        if self.size > 1:
            with channel_of(self.group).run("broadcast", "", tensor.nbytes):
                dist.broadcast(tensor, group=self.group, group_src=src)

    def exchange(self, item: Any) -> list[Any]:
        """See `AxisComm.exchange`."""
        return exchange(item, self.group)


def exchange(item: Any, group: Any, of: str = "") -> list[Any]:
    """Return the picklable `item` of every rank of a process group, in rank order.

    Args:
        item: This rank's.
        group: Torch's; None is the default one.
        of: What it is for.

    Cost: two all-gathers: of the sizes, of the items.
    """
    size = dist.get_world_size(group)
    items: list[Any] = [item] * size
    if size > 1:
        with channel_of(group).run("exchange", of, 0):
            dist.all_gather_object(items, item, group=group)
    return items


class WatchedStreams(CommStreams):
    """Streams whose collectives are those of process groups."""

    def note_step(self) -> None:
        """Count it."""
        current_station().step += 1

    def note_error(self, error: BaseException) -> None:
        """Remember it."""
        current_station().note_error(error)


class CustomCollective:
    """A collective by the user's own function, in buffers of its own choice.

    Args:
        comm: The function.
        send: What is sent.
        receive_numel: Elements that come.
        async_op: Let `work` be waited for by whoever uses `received`.
        options: What else the function takes.

    Attributes:
        received: What comes.
        work: To wait for; None: there is nothing to wait for.
    """

    def __init__(
        self, comm: Any, send: Tensor, receive_numel: int, *, async_op: bool, **options: Any
    ) -> None:
        place = functools.partial(comm.allocate, dtype=send.dtype, device=send.device)
        self._sent = sent = place((send.numel(),))  # Kept: the work may still read it.
        sent.copy_(send)
        self.received: Tensor = place((receive_numel,))
        self.work: dist.Work | None = comm(
            output_tensor=self.received, input_tensor=sent, async_op=async_op, **options
        )
        if self.work is not None and not async_op:
            self.work.wait()


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


_split_axes: dict[tuple[ProcessGroupAxis, int], ProcessGroupAxis] = {}
_axes: dict[tuple[str, type[ProcessGroupBackend]], ProcessGroupAxis] = {}


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
        """Whether the process groups have not been destroyed since."""
        return self._world is dist.group.WORLD

    def process_group(self, axis: int) -> dist.ProcessGroup:
        """Return torch's process group of one axis."""
        return self._mesh.get_group(self._axes[axis])

    def axis(self, axis: int) -> ProcessGroupAxis:
        """Return the communicator of one axis; always the same object."""
        if axis not in self._comms:
            group = self.process_group(axis)
            key = (group.group_name, type(self))
            known = _axes.get(key)
            if known is None or known.group is not group:  # After a restart names come again.
                known = _axes[key] = self.make_axis(group)
            self._comms[axis] = known
        return self._comms[axis]

    @abstractmethod
    def make_axis(self, group: dist.ProcessGroup) -> ProcessGroupAxis:
        """Return the communicator over a process group."""

    def split_axis(self, axis: int, size: int) -> ProcessGroupAxis:
        """Return the communicator of `size` neighbours on one axis."""
        whole = self.axis(axis)
        if (whole, size) not in _split_axes:
            splits = [range(first, first + size) for first in range(0, whole.size, size)]
            _split_axes[whole, size] = self.make_axis(sub_group(whole.group, splits))
        return _split_axes[whole, size]

    def for_axes(self, axes: Sequence[int]) -> ProcessGroupBackend:
        """Return the backend of the submesh made of `axes`; it shares the communicators."""
        sub = type(self)(self._mesh, [self._axes[axis] for axis in axes])
        sub._comms = {i: self.axis(axis) for i, axis in enumerate(axes)}  # noqa: SLF001 - own class
        return sub


def make_torch_mesh(
    device_type: str, shape: tuple[int, ...], names: tuple[str, ...] | None
) -> torch_mesh.DeviceMesh:
    """Make torch's mesh over the whole world; starts the default process group if need be.

    Raises:
        MeshError: Not started by a launcher, or the world has another size than the mesh.
    """
    world_size = world_size_or_raise()
    if names is not None and len(names) != len(shape):
        msg = (
            f"mesh_dim_names must name every axis: got {names} for a mesh of shape {shape} with "
            f"{len(shape)} axes."
        )
        raise MeshError(msg)
    wanted = math.prod(shape)
    if wanted != world_size:
        msg = (
            f"a mesh of shape {shape} needs {wanted} ranks, the world has {world_size}. "
            f"Start {wanted} processes (torchrun --nproc-per-node), or make a mesh of torch's "
            f"DeviceMesh over some of the ranks and pass that."
        )
        raise MeshError(msg)
    if not dist.is_initialized():
        dist.init_process_group(_engines_for(device_type))
    return torch_mesh.init_device_mesh(device_type, shape, mesh_dim_names=names)


def _engines_for(device_type: str) -> str | None:
    """Return the engines of the default process group; None: torch's choice.

    An accelerator gets one for the host as well, so that small numbers need not pass the device.
    """
    library = dist.Backend.default_device_backend_map.get(device_type)
    if device_type == "cpu" or library is None:
        return None
    return f"cpu:gloo,{device_type}:{library}"


def _script() -> str:
    name = Path(sys.argv[0]).name if sys.argv else ""
    return name if name.endswith(".py") else "train.py"


def current_world_size() -> int | None:
    """Return the number of ranks of the default process group; None if there is none."""
    return dist.get_world_size() if dist.is_initialized() else None


def group_rank(group: Any) -> int:
    """Return this process' rank in a process group of torch; None is the default group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def world_size_or_raise() -> int:
    """Return the number of ranks; a MeshError that says how to start them if there are none."""
    world_size = current_world_size()
    if world_size is not None:
        return world_size
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    msg = _NO_PROCESS_GROUP.format(script=_script())
    raise MeshError(msg)


def from_torch_mesh(
    mesh: torch_mesh.DeviceMesh, backend_class: type[ProcessGroupBackend]
) -> DeviceMesh:
    """Return shardkit's view of torch's mesh, with the axes' process groups behind it."""
    current_station()  # From now on this process answers others.
    return DeviceMesh(
        device_type=mesh.device_type,
        shape=tuple(mesh.shape),
        ranks=tuple(mesh.mesh.flatten().tolist()),
        mesh_dim_names=tuple(mesh.mesh_dim_names) if mesh.mesh_dim_names else None,
        rank=dist.get_rank(),
        backend=backend_class(mesh, range(mesh.ndim)),
    )
