"""The default process group of torch: how it is started, and what it has."""

from __future__ import annotations

import math
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh as torch_mesh

from shardkit import _compat
from shardkit._errors import MeshError
from shardkit.backends.groups import collective_timeout

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
"""Which device type has which engine; packages for other accelerators add theirs."""

_started_for_host: Any = None
"""The default process group, if it was started for a mesh of the CPU."""

_compat.separate_attempts()  # Before anyone calls `init_process_group`.


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
        _start(device_type)
    return torch_mesh.init_device_mesh(device_type, shape, mesh_dim_names=names)


def _start(device_type: str) -> None:
    """Start the default process group.

    Raises:
        MeshError: Gloo's ranks do not reach each other.
    """
    global _started_for_host  # noqa: PLW0603 - the default process group is of the process, too
    try:
        dist.init_process_group(_engines_for(device_type), timeout=collective_timeout())
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
    """Return the engine of a device type; gloo for None, and where torch knows none."""
    return _ENGINES.get(device_type or "cpu", "gloo")


def _engines_for(device_type: str) -> str | None:
    """Return the engines of the default process group; None: torch's choice.

    An accelerator gets one for the host as well, so that small numbers need not pass the device.
    """
    if device_type == "cpu" or device_type not in _ENGINES:
        return None
    return f"cpu:gloo,{device_type}:{_ENGINES[device_type]}"


def _script() -> str:
    name = Path(sys.argv[0]).name if sys.argv else ""
    return name if name.endswith(".py") else "train.py"


def current_world_size() -> int | None:
    """Return the number of ranks of the default process group; None if there is none."""
    return dist.get_world_size() if dist.is_initialized() else None


def accelerator_of_world(device_type: str | None) -> str | None:
    """Return the accelerator's type if the default process group has its engine, such as NCCL.

    None if the group was started here for a mesh of the CPU: torch gives that all engines it has.
    """
    if device_type not in _ENGINES or not dist.is_initialized():
        return None
    if _started_for_host is not None and _started_for_host is dist.group.WORLD:
        return None
    engines = dist.get_backend_config().split(",")
    return device_type if f"{device_type}:{_ENGINES[device_type]}" in engines else None


def group_rank(group: Any) -> int:
    """Return this process' rank in a process group of torch; None is the default group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def world_size_or_raise() -> int:
    """Return the number of ranks; a MeshError that says how to start them if there are none."""
    world_size = current_world_size()
    if world_size is not None:
        return world_size
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        found = os.environ["WORLD_SIZE"]
        if not (found.isdecimal() and int(found) > 0):
            msg = f"WORLD_SIZE must be a number of ranks, got {found!r}. torchrun sets it."
            raise MeshError(msg)
        return int(found)
    msg = _NO_PROCESS_GROUP.format(script=_script())
    raise MeshError(msg)
