"""Process groups of torch: how the default group is started, how others are made and queried."""

from __future__ import annotations

import hashlib
import math
import numbers
import os
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch.distributed as dist
from torch.distributed import device_mesh as torch_mesh
from torch.distributed import distributed_c10d

from shardkit._compat import torch_groups
from shardkit._errors import MeshError
from shardkit._settings import watch_settings
from shardkit.backends.watch.watchdog import channel_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

Value = TypeVar("Value")


class OfWorld(Generic[Value]):
    """Values by key, which are dropped when the default process group has changed.

    Each rank that is a thread has its own default process group, and its own values.
    """

    def __init__(self) -> None:
        self._by_rank: dict[int, tuple[Any, dict[tuple[Any, ...], Value]]] = {}

    def now(self) -> dict[tuple[Any, ...], Value]:
        """Return the values of the current default process group, for reads and writes."""
        rank = threading.get_ident() if torch_groups.ranks_are_threads() else 0
        world, values = self._by_rank.get(rank, (None, {}))
        if world is not dist.group.WORLD:
            if rank == 0:
                self._by_rank.clear()
            values = {}
            self._by_rank[rank] = (dist.group.WORLD, values)
        return values


_num_made: OfWorld[int] = OfWorld()


def collective_timeout() -> timedelta | None:
    """Return the time limit of collectives of a new process group; None: torch's default."""
    seconds = watch_settings.timeout_s
    return None if math.isinf(seconds) else timedelta(seconds=seconds)


def new_group(ranks: Sequence[int], backend: str | None = None, of: str = "") -> dist.ProcessGroup:
    """Make a process group. Only its own ranks have to call this.

    They must make all groups of exactly these ranks, and of the same group, in the same order.
    Other groups of a rank make no difference.

    Args:
        ranks: Ranks of the group.
        backend: The engine; None: torch chooses.
        of: Name of the group that it is a part of; empty: none.
    """
    with _named_group(ranks, of):
        # Not `dist.new_group`: in its place torch_xla puts a function without the last argument.
        group: dist.ProcessGroup = distributed_c10d.new_group(
            list(ranks),
            timeout=collective_timeout(),
            backend=backend,
            use_local_synchronization=True,
        )
    return group


def _named_group(ranks: Sequence[int], of: str) -> AbstractContextManager[None]:
    """Give the next process group a name that is the same on all of its ranks."""
    key, counts = (of, *ranks), _num_made.now()
    number = counts[key] = counts.get(key, 0) + 1
    # The name is short for any number of ranks, since ranks send each other the names of groups.
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).hexdigest()
    return torch_groups.named_group(f"shardkit_{digest}_{number}")


def sub_group(
    parent: dist.ProcessGroup, splits: Sequence[Sequence[int]], backend: str | None = None
) -> dist.ProcessGroup:
    """Make a process group of some ranks of another group. All ranks of `parent` must call this.

    Args:
        parent: The other group.
        splits: Positions in `parent`, without overlaps. A rank gets the group that it is in.
        backend: The engine; None: that of `parent`.
    """
    mine = next(split for split in splits if parent.rank() in split)
    ranks = [dist.get_process_group_ranks(parent)[position] for position in mine]
    must_split = _must_be_split(parent)
    if backend is None and must_split:
        # A new group would split the communicator of the whole world. Torch needs a call on all
        # ranks of the world for that.
        with _named_group(ranks, ""):
            all_splits = [list(split) for split in splits]
            made = dist.split_group(
                parent_pg=parent, split_ranks=all_splits, timeout=collective_timeout()
            )
        assert made is not None, "every rank is in one of the splits"
        return made
    # Torch names groups that it splits by a number of the rank's own.
    return new_group(ranks, backend, "" if must_split else parent.group_name)


def _must_be_split(parent: dist.ProcessGroup) -> bool:
    """Whether groups must be split from others: the world is bound to devices, and engines can."""
    device = getattr(dist.group.WORLD, "bound_device_id", None)
    if device is None:
        return False
    engine = torch_groups.process_group_backend(parent, device)
    return bool(getattr(engine, "supports_splitting", False))


def group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return a process group of these ranks: the default one if it has no others, else a new one.

    All of these ranks must call this. If groups are split from the world, all ranks of the world
    must call it, each with the ranks of its own group.
    """
    world = dist.group.WORLD
    assert world is not None, "there is a mesh"
    if sorted(ranks) == list(range(world.size())):
        return world
    if _must_be_split(world):
        splits = sorted(set(exchange(tuple(sorted(ranks)), None, "process groups")))
        return sub_group(world, splits)
    return new_group(sorted(ranks))


def exchange(item: Any, group: Any, of: str = "") -> list[Any]:
    """Return the picklable `item` of every rank of a process group, in rank order.

    Args:
        item: Item of this rank.
        group: Process group of torch; None: the default one, or this process alone if there is
            none.
        of: Word for the purpose of the exchange.

    Cost: two all-gathers, of the sizes and of the items.
    """
    size = dist.get_world_size(group) if dist.is_initialized() else 1
    items: list[Any] = [item] * size
    if size > 1 and dist.get_backend(group) != "fake":  # In a fake group one process is all ranks.
        with channel_of(group).run("exchange", of, 0):
            dist.all_gather_object(items, item, group=group)
    return items


# --- the default process group --------------------------------------------------------------------

_NO_PROCESS_GROUP = (
    "no process group: this process was not started by a launcher. Start the script by\n"
    "    torchrun --standalone --nproc-per-node 2 {script}\n"
    "or call torch.distributed.init_process_group() before making a mesh."
)


_NOT_REACHED = (
    "this rank, on {host}, does not reach the others. GLOO_SOCKET_IFNAME is {interface}; without "
    "it gloo takes the address that a host's own name leads to, which may be 127.0.1.1. Set it on "
    "each host to its interface in the network that all share, or start by `python -m shardkit "
    "launch`, which does. Gloo said: {error}"
)


_ENGINES = dist.Backend.default_device_backend_map
"""Engines by device type; packages for other accelerators add theirs."""

_started_for_host: Any = None  # The default process group, if it was started for a mesh of the CPU.

torch_groups.separate_attempts()  # Before any call of `init_process_group`.


def make_torch_mesh(
    device_type: str, shape: tuple[int, ...], names: tuple[str, ...] | None
) -> torch_mesh.DeviceMesh:
    """Make torch's mesh over the whole world; start the default process group if need be.

    Raises:
        MeshError: No launcher started this process, or the mesh does not have the world's size.
    """
    world_size = world_size_or_raise()
    if names is not None and (len(names) != len(shape) or len(set(names)) != len(names)):
        msg = (
            f"mesh_dim_names must name every axis, each by another name: got {names} for a mesh of "
            f"shape {shape} with {len(shape)} axes."
        )
        raise MeshError(msg)
    if any(not isinstance(size, numbers.Integral) or size < 1 for size in shape):
        msg = (
            f"each size of a mesh is a whole number of at least 1, got {shape}. Divide by //, and "
            f"write all sizes: none is inferred."
        )
        raise MeshError(msg)
    wanted = math.prod(shape)
    if wanted != world_size:
        msg = (
            f"a mesh of shape {shape} needs {wanted} ranks, the world has {world_size}. "
            f"Start {wanted} processes (torchrun --nproc-per-node), give a shape for {world_size} "
            f"ranks, or make a mesh of torch's DeviceMesh over some of the ranks and pass that."
        )
        raise MeshError(msg)
    if not dist.is_initialized():
        _start(device_type)
    return torch_mesh.init_device_mesh(device_type, shape, mesh_dim_names=names)


def _start(device_type: str) -> None:
    """Start the default process group.

    Raises:
        MeshError: The ranks do not reach each other through gloo.
    """
    global _started_for_host  # noqa: PLW0603 - the default process group is of the process, too
    engines = None  # Torch chooses.
    if device_type != "cpu" and device_type in _ENGINES:
        # Add an engine for the host, so that small numbers need not go through the device.
        engines = f"cpu:gloo,{device_type}:{_ENGINES[device_type]}"
    try:
        dist.init_process_group(engines, timeout=collective_timeout())
    except RuntimeError as error:
        if "connectFullMesh" not in str(error):
            raise
        msg = _NOT_REACHED.format(
            host=socket.gethostname(),
            interface=os.environ.get("GLOO_SOCKET_IFNAME", "not set"),
            error=error,
        )
        raise MeshError(msg) from error
    _started_for_host = dist.group.WORLD if device_type == "cpu" else None


def engine_of(device_type: str | None) -> str:
    """Return the engine of a device type; gloo for None, and if torch knows no engine."""
    return _ENGINES.get(device_type or "cpu", "gloo")


def current_world_size() -> int | None:
    """Return the number of ranks of the default process group; None if there is none."""
    return dist.get_world_size() if dist.is_initialized() else None


def accelerator_of_world(device_type: str | None) -> str | None:
    """Return the accelerator's type if the default process group has its engine, such as NCCL.

    The result is None if shardkit started the group for a mesh of the CPU, because torch gives such
    a group all engines that it has.
    """
    if device_type not in _ENGINES or not dist.is_initialized():
        return None
    if _started_for_host is not None and _started_for_host is dist.group.WORLD:
        return None
    engines = dist.get_backend_config().split(",")
    return device_type if f"{device_type}:{_ENGINES[device_type]}" in engines else None


def group_rank(group: Any) -> int:
    """Return this process's rank in a process group of torch; None is the default group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def world_size_or_raise() -> int:
    """Return the number of ranks; without ranks raise a MeshError that says how to start them."""
    world_size = current_world_size()
    if world_size is not None:
        return world_size
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        found = os.environ["WORLD_SIZE"]
        if not (found.isdecimal() and int(found) > 0):
            msg = f"WORLD_SIZE must be a number of ranks, got {found!r}. torchrun sets it."
            raise MeshError(msg)
        return int(found)
    name = Path(sys.argv[0]).name if sys.argv else ""
    msg = _NO_PROCESS_GROUP.format(script=name if name.endswith(".py") else "train.py")
    raise MeshError(msg)
