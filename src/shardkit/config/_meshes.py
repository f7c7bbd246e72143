"""The mesh that a config means."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardkit._errors import MeshError
from shardkit._mesh import SHARD_AXIS
from shardkit._wrapping.strategies import REPLICATE_AXIS
from shardkit.backends import as_device_mesh, init_device_mesh
from shardkit.backends.device import device_module
from shardkit.backends.world import make_torch_mesh, world_size_or_raise

if TYPE_CHECKING:
    from shardkit._mesh import DeviceMesh
    from shardkit._wrapping.strategies import Strategy
    from shardkit.backends import TorchDeviceMesh
    from shardkit.config._schema import Parallelism, Settings

_TP_AXIS = "tp"


def make(
    settings: Settings, strategy: Strategy, device_type: str
) -> tuple[DeviceMesh, TorchDeviceMesh | None]:
    """Return the mesh to shard over, and torch's of the ``tp`` axis, if there is one.

    Raises:
        MeshError: The ranks do not fit.
    """
    _set_current_device(device_type)
    if device_type == "xla":
        world_size = as_device_mesh(None, device_type=device_type).size()
    else:
        world_size = world_size_or_raise()
    if settings.parallelism is not None:
        return _of_sizes(settings.parallelism, device_type, world_size)
    if settings.distributed_type == "NO" and world_size > 1:
        msg = (
            f"distributed_type is NO, which is one process, and there are {world_size} ranks. "
            f"Write distributed_type: FSDP."
        )
        raise MeshError(msg)
    shape = strategy.mesh_shape(world_size, _ranks_per_machine(settings, world_size))
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=strategy.mesh_dim_names)
    return mesh, None


def in_words(settings: Settings) -> str:
    """Return which mesh it is, before there are ranks."""
    sizes = settings.parallelism
    if sizes is not None:
        return (
            f"dp_replicate {sizes.dp_replicate_size}, dp_shard {sizes.dp_shard_size}, "
            f"tp {sizes.tp_size}"
        )
    return {
        "replicate": "a copy for each rank",
        "hybrid": "a copy for each machine",
        "hybrid_zero2": "a copy for each machine",
    }.get(settings.strategy, "one axis of all ranks")


def _ranks_per_machine(settings: Settings, world_size: int) -> int | None:
    """Return how many ranks share a copy; None: the launcher's LOCAL_WORLD_SIZE says it."""
    machines = settings.num_machines
    if "LOCAL_WORLD_SIZE" in os.environ or world_size % machines:
        return None
    return world_size // machines


def _of_sizes(
    sizes: Parallelism, device_type: str, world_size: int
) -> tuple[DeviceMesh, TorchDeviceMesh | None]:
    if sizes.total_size != world_size:
        msg = (
            f"parallelism_config is about {sizes.dp_replicate_size} x {sizes.dp_shard_size} x "
            f"{sizes.tp_size} = {sizes.total_size} ranks (dp_replicate_size x dp_shard_size x "
            f"tp_size), and there are {world_size}. Change a size, or start "
            f"{sizes.total_size} ranks."
        )
        raise MeshError(msg)
    axes = [(SHARD_AXIS, sizes.dp_shard_size)]
    if sizes.dp_replicate_size > 1:
        axes.insert(0, (REPLICATE_AXIS, sizes.dp_replicate_size))
    names, shape = tuple(name for name, _ in axes), tuple(size for _, size in axes)
    if sizes.tp_size == 1:
        return init_device_mesh(device_type, shape, mesh_dim_names=names), None
    if device_type == "xla":
        msg = "tensor parallelism does not work on XLA. Write tp_size: 1."
        raise MeshError(msg)
    whole = make_torch_mesh(device_type, (*shape, sizes.tp_size), (*names, _TP_AXIS))
    mesh = as_device_mesh(whole[names], device_type=device_type)
    return mesh, whole[_TP_AXIS]


def _set_current_device(device_type: str) -> None:
    """Choose this rank's own accelerator, as Accelerate does."""
    local_rank = os.environ.get("LOCAL_RANK", "")
    if device_type in ("cpu", "xla") or not local_rank.isdecimal():
        return
    module = device_module(device_type)
    if int(local_rank) < module.device_count():
        module.set_device(int(local_rank))
