"""Which groups of a model have their gradients compressed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardkit._errors import StateError
from shardkit._module.fsdp_module import FSDPModule
from shardkit._module.hooks import groups_in, state_of
from shardkit.compression._power_sgd import PowerSGD

if TYPE_CHECKING:
    from torch import nn

    from shardkit._custom_comm import AllReduce


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
        if any(g.replicate_axis is not None for g in groups_in(module, recurse=False))
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
