"""Backends: how ranks of a mesh communicate.

`base` defines what a backend is, and what a backend that traces operators has in addition. The
backends are `gloo` (CPU), `accelerator` (any device with streams) and `xla`. `dtensor` handles
parameters that tensor parallelism has split. Elsewhere only `_compat` and code for checkpoints
import `torch.distributed`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from shardkit._errors import MeshError
from shardkit._mesh import DeviceMesh
from shardkit.backends.device import accelerator_type, device_module
from shardkit.backends.groups import current_world_size, make_torch_mesh, world_size_or_raise
from shardkit.backends.process_group import ProcessGroupBackend, from_torch_mesh

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shardkit.backends.dtensor import TensorParallel

__all__ = [
    "TorchDeviceMesh",
    "accelerator_type",
    "as_device_mesh",
    "init_device_mesh",
    "is_annotated",
    "mesh_of_world",
    "tensor_parallel_of",
]


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """Make a mesh over all ranks of the world; call it on every rank.

    If there is no default process group, this call starts it from the launcher's environment
    variables (gloo for ``"cpu"``, NCCL for ``"cuda"``, torch's default for other accelerators).

    Args:
        device_type: ``"cpu"``, ``"xla"`` or an accelerator with streams (``"cuda"``, ``"xpu"``,
            ...). On an accelerator set the current device first
            (``torch.cuda.set_device(local_rank)``). On XLA one process computes for all devices.
        mesh_shape: Size of each axis; their product is the number of ranks.
        mesh_dim_names: Names of the axes. The axis of a 1-D mesh shards; the axes of a 2-D mesh are
            (replicate, shard), in this order, whatever their names.

    Raises:
        MeshError: No launcher started this process, the product of the sizes is not the world size,
            `mesh_shape` is a number or None, a size is no whole number of at least 1, names are
            missing or equal, or no device of this type can be used. Every rank raises.

    Cost: one process group per axis.
    """
    if not isinstance(device_type, str):
        msg = f"device_type is a name such as 'cpu' or 'cuda', got {device_type!r}."
        raise MeshError(msg)
    given: Any = mesh_shape  # Sizes of NumPy and torch are iterable, but have no dim.
    if not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0:
        msg = f"mesh_shape has the size of each axis, got {mesh_shape}. Write ({mesh_shape},)."
        raise MeshError(msg)
    if device_type == "xla":
        return _init_xla_mesh(mesh_shape, mesh_dim_names)
    backend_class = _backend_class(device_type)
    names = tuple(mesh_dim_names) if mesh_dim_names is not None else None
    mesh = make_torch_mesh(device_type, tuple(mesh_shape), names)
    return from_torch_mesh(mesh, backend_class)


def as_device_mesh(mesh: Any, *, device_type: str) -> DeviceMesh:
    """Return `mesh` as a mesh of shardkit; torch's is converted, None is the world in 1-D.

    Raises:
        MeshError: If `mesh` is something else, or no process group exists.
    """
    if isinstance(mesh, DeviceMesh):
        return mesh
    if mesh is None and device_type == "xla":
        return _init_xla_mesh(None, None)
    if mesh is None:  # Without names, as FSDP2's, by which peft knows it.
        return init_device_mesh(device_type, (world_size_or_raise(),))
    if isinstance(mesh, TorchDeviceMesh):
        return from_torch_mesh(mesh, _backend_class(mesh.device_type))
    msg = (
        f"mesh must be a shardkit or torch DeviceMesh or None, got {type(mesh).__name__}. "
        f"Make one by shardkit.init_device_mesh(device_type, shape)."
    )
    raise MeshError(msg)


def mesh_of_world(
    device_type: str, shape: Sequence[int], names: Sequence[str] | None
) -> DeviceMesh | None:
    """Return a 1-D mesh over the default process group, if that exists and has this size.

    This does not communicate, so one rank may call it alone.
    """
    if len(shape) != 1 or current_world_size() != shape[0]:
        return None
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def tensor_parallel_of(param: Tensor) -> TensorParallel | None:
    """Return how a parameter is spread over a mesh of its own; None if it is not a DTensor."""
    dtensor: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    # Ask for the class: under `install` a sharded tensor also answers as a DTensor.
    if dtensor is None or not issubclass(type(param), dtensor):
        return None  # No code has imported DTensor, so there is none.
    from shardkit.backends.dtensor import TensorParallel

    distributed: Any = param
    mesh = as_device_mesh(distributed.device_mesh, device_type=param.device.type)
    return TensorParallel.of(distributed, mesh)


def is_annotated(param: Tensor) -> bool:
    """Whether a parameter is a plain one that the package ``spmd_types`` describes."""
    spmd: Any = sys.modules.get("spmd_types")
    if spmd is None:
        return False  # No code has imported what describes parameters.
    return bool(spmd.get_local_type(param)) and tensor_parallel_of(param) is None


def _init_xla_mesh(shape: Sequence[int] | None, names: Sequence[str] | None) -> DeviceMesh:
    try:
        from shardkit.backends.xla import init_xla_mesh
    except ImportError as error:
        msg = (
            f"meshes of XLA devices need torch_xla, which cannot be imported ({error}). Install "
            f"it with the torch that it is made for: pip install torch==2.9.0 torch_xla==2.9.0"
        )
        raise MeshError(msg) from error
    return init_xla_mesh(shape, names)


def _backend_class(device_type: str) -> type[ProcessGroupBackend]:
    dry = sys.modules.get("shardkit.backends.dry")
    played: type[ProcessGroupBackend] | None = None if dry is None else dry.played_backend()
    if played is not None:
        return played
    if device_type == "cpu":
        from shardkit.backends.gloo import GlooBackend

        return GlooBackend
    from shardkit.backends.accelerator import AcceleratorBackend

    if not device_module(device_type).is_available():
        msg = (
            f"no device of type {device_type!r} can be used here: torch {torch.__version__} is "
            f"built without it, or sees none. On CPU ranks make meshes for 'cpu'."
        )
        raise MeshError(msg)
    return AcceleratorBackend
