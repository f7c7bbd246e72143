"""Gradients that travel in 16 bits, and whose gradients are compressed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardkit._errors import StateError
from shardkit._module.fsdp_module import FSDPModule
from shardkit._module.hooks import groups_in, state_of
from shardkit.compression._power_sgd import PowerSGD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from shardkit._custom_comm import AllReduce, GradientPiece, SumAxis


def bf16_compress(
    tensor: Tensor, pieces: Sequence[GradientPiece], axis: SumAxis, unit: float
) -> None:
    """Sum gradients over the replicate axis in bf16: an `AllReduce`.

    As torch's ``bf16_compress_hook``. The engine adds in bf16, too: each of its additions rounds to
    8 bits. The reduce-scatter stays in `reduce_dtype`, in fp32 say; to have both in bf16, choose
    that as `reduce_dtype` instead.

    Args:
        tensor: Gradients; see `AllReduce`.
        pieces: Parameters in it; not looked at.
        axis: The replicas.
        unit: The sum times this is the gradient, and is what travels.

    Cost: one all-reduce of 2 bytes per element; memory for that.
    """
    _all_reduce_as(tensor, torch.bfloat16, axis, unit)


def fp16_compress(
    tensor: Tensor, pieces: Sequence[GradientPiece], axis: SumAxis, unit: float
) -> None:
    """Sum gradients over the replicate axis in fp16: an `AllReduce`.

    As torch's ``fp16_compress_hook``. What travels is divided by the number of ranks before, so
    that averages up to 65504 do not overflow. Parts below 6e-8 become 0, so scale the loss. The
    engine adds in fp16.

    Args:
        tensor: Gradients; see `AllReduce`.
        pieces: Parameters in it; not looked at.
        axis: The replicas.
        unit: The sum times this is the gradient, and is what travels.

    Cost: one all-reduce of 2 bytes per element; memory for that.
    """
    _all_reduce_as(tensor, torch.float16, axis, unit)


def _all_reduce_as(tensor: Tensor, dtype: torch.dtype, axis: SumAxis, unit: float) -> None:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if real.dtype.itemsize <= dtype.itemsize:
        axis.all_reduce(real, "sum")
        return
    wire = (real * unit).to(dtype)
    axis.all_reduce(wire, "sum")
    real.copy_(wire)
    real.div_(unit)


# --- whose gradients are compressed ---------------------------------------------------------------


def compress_gradients(model: nn.Module, hook: AllReduce | None) -> None:
    """Have the gradients of all groups in a model go over the replicate axis through `hook`.

    Call it on the root, after `fully_shard`, on all ranks with the same. In place of FSDP1's
    ``register_comm_hook`` and DDP's. Groups on a mesh of one axis are left as they are.

    Args:
        model: A sharded root.
        hook: `bf16_compress`, `fp16_compress`, a `PowerSGD` of this model alone, or any
            `AllReduce`. None: gradients travel as they are again.

    Raises:
        StateError: `model` is not sharded, is inside of another root, or has no group with a
            replicate axis; or the mesh is one of XLA devices.
    """
    if not isinstance(model, FSDPModule):
        msg = (
            f"compress_gradients takes a sharded module, got {type(model).__name__}. Call "
            f"fully_shard on it first."
        )
        raise StateError(msg)
    sharded: Any = model
    state = state_of(sharded)
    if state.runtime is not None and state.runtime.settings is not state.settings:
        msg = (
            f"compress_gradients: this {type(model).__name__} is inside of another sharded module. "
            f"Call it on the outermost one."
        )
        raise StateError(msg)
    modules = [m for m in sharded.modules() if isinstance(m, FSDPModule)]
    replicated = [
        module
        for module in modules
        if any(group.replicates for group in groups_in(module, recurse=False))
    ]
    if not replicated and hook is not None:
        msg = (
            f"compress_gradients: no group of this {type(model).__name__} has a replicate axis. "
            f"Pass fully_shard a 2-D mesh; (n, 1) replicates without sharding. For fewer bytes in "
            f"the reduce-scatter choose MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)."
        )
        raise StateError(msg)
    if isinstance(hook, PowerSGD):
        groups = [group for module in replicated for group in groups_in(module, recurse=False)]
        state.name_params(groups, [state.module])
        hook.bind(groups)
    for module in replicated:
        module.set_custom_all_reduce(hook)
