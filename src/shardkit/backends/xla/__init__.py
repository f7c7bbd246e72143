"""XLA devices (TPU, and CPU in tests): one process traces the program of all ranks.

Only this package imports torch_xla, including private names of it. `init_xla_mesh` makes meshes: by
`spmd` for one process with all devices, by `replica` if each replica traces for itself. `backend`
is the common part of both. `random_numbers` draws numbers that differ between ranks. `host_reads`
refuses operators that would read what the host cannot, `operators` puts right what torch_xla
computes wrongly.

Tried with torch_xla 2.9.0 on the CPU. Private names are
``_XLAC._xla_spmd_all_reduce`` (the public `all_reduce` does nothing under SPMD),
``_XLAC._spmd_full_to_shard_shape`` (the public one marks its input, see `SpmdRegion.enter`),
``_XLAC._get_xla_tensors_hlo``, ``_XLAC._set_all_reduce_token``, ``_XLAC._get_xla_sharding_spec``,
``_XLAC._get_xla_tensor_shape_type``, ``_XLAC._xla_sync_multi`` and
``_XLAC._xla_get_spmd_config_is_locked``.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import torch_xla
import torch_xla.runtime as xr

from shardkit._errors import MeshError
from shardkit._mesh import DeviceMesh
from shardkit.backends.xla.replica import ReplicaBackend
from shardkit.backends.xla.spmd import SpmdBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_NDIM = 2


def init_xla_mesh(shape: Sequence[int] | None, names: Sequence[str] | None) -> DeviceMesh:
    """Make a mesh over all XLA devices.

    Under `torch_xla.launch` each replica makes its own mesh, and is one rank of it. Otherwise this
    process traces one program for all devices, in torch_xla's SPMD mode. This call turns that mode
    on, and it cannot be turned off again. With None as shape the mesh has one axis.

    Raises:
        MeshError: The product of the sizes is not the number of devices, there are more than two
            axes, a device was used before SPMD mode was on, or the devices belong to several hosts.
    """
    is_replica = not xr.is_spmd() and "PJRT_LOCAL_PROCESS_COUNT" in os.environ
    if not is_replica:
        _turn_on_spmd()
        if (num_hosts := xr.process_count()) > 1:
            msg = (
                f"XLA devices of {num_hosts} hosts: shardkit supports those of one host only. "
                f"Start the script on a slice of one host (v4-8, v5litepod-8, v6e-8)."
            )
            raise MeshError(msg)
    num_devices = xr.world_size() if is_replica else xr.global_runtime_device_count()
    shape = (num_devices,) if shape is None else tuple(shape)
    if math.prod(shape) != num_devices:
        msg = (
            f"a mesh of shape {shape} needs {math.prod(shape)} devices, but there are "
            f"{num_devices}. Pass a shape whose sizes multiply to {num_devices}."
        )
        raise MeshError(msg)
    if len(shape) > _MAX_NDIM:
        msg = (
            f"meshes of XLA devices have one axis (shard) or two (replicate, shard), got "
            f"{len(shape)}: {shape}."
        )
        raise MeshError(msg)
    ranks = tuple(range(num_devices))
    named = tuple(names) if names is not None else None
    rank = xr.global_ordinal() if is_replica else 0
    backend: Any = ReplicaBackend(shape, rank) if is_replica else SpmdBackend(shape)
    return DeviceMesh("xla", shape, ranks, named, rank, backend)


def _turn_on_spmd() -> None:
    if xr.is_spmd():
        return
    if torch_xla._XLAC._xla_get_spmd_config_is_locked():
        msg = (
            "an XLA device was used before the mesh was made. Call "
            "shardkit.init_device_mesh('xla', ...) or torch_xla.runtime.use_spmd() first, "
            "before any tensor or module is moved to an XLA device."
        )
        raise MeshError(msg)
    xr.use_spmd()
