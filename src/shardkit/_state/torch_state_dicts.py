"""torch's ``get_state_dict`` and ``set_state_dict`` with full state dicts of sharded models.

Those functions (``torch.distributed.checkpoint.state_dict``) ask for DTensors where they gather,
cut and broadcast: they would return pieces as if they were whole tensors, and put whole tensors
into optimizers. So the helpers they call are wrapped (by `_compat`): sharded tensors are taken care
of here, everything else goes to torch's helper as it came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit import _compat_checkpoints
from shardkit._params.host_heap import give_back
from shardkit._state.full import check_shape, cut_whole, holds_sharded, map_leaves, whole_tensor
from shardkit._tensor.sharded import ShardedTensor
from shardkit.backends.groups import exchange
from shardkit.backends.world import group_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def gather_state_dict(original: Callable[..., Any], state_dict: Any, **kwargs: Any) -> Any:
    """Gather sharded tensors one by one; on ranks that shall have nothing return that."""
    if not holds_sharded(state_dict):
        return original(state_dict, **kwargs)
    ranks = kwargs.get("ranks_only") or ()
    keep = not ranks or group_rank(kwargs.get("pg")) in ranks
    to_cpu = bool(kwargs.get("cpu_offload"))

    def gather(leaf: Any) -> Any:
        if isinstance(leaf, ShardedTensor):
            return whole_tensor(leaf, keep=keep, to_cpu=to_cpu)
        return original({"": leaf}, **kwargs).get("")

    result = map_leaves(state_dict, gather)
    return result if keep else {}


def distribute_state_dict(
    original: Callable[..., Any],
    full_state_dict: Mapping[str, Any],
    local_state_dict: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Cut what is sharded here out of whole tensors that every rank has."""
    others = {}
    for key, value in full_state_dict.items():
        local = local_state_dict.get(key)
        if not isinstance(local, ShardedTensor) or not isinstance(value, Tensor):
            others[key] = value
        elif isinstance(value, ShardedTensor) or isinstance(local, nn.Parameter):
            local_state_dict[key] = value.detach()  # `load_state_dict` cuts it, or refuses it.
        else:
            local_state_dict[key] = _put(value, local, key)
    original(others, local_state_dict, *args, **kwargs)


def broadcast_state_dict(
    original: Callable[..., Any],
    full_state_dict: Mapping[str, Any],
    local_state_dict: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Cut also tensors without dimensions, which torch sends apart from others."""
    sharded = _sharded_ones(local_state_dict)
    original(full_state_dict, local_state_dict, *args, **kwargs)
    _cut_received(local_state_dict, sharded)


def broadcast_tensors(
    original: Callable[..., Any],
    full_state_dict: Mapping[str, Any],
    local_state_dict: dict[str, Any],
    keys: list[str],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Cut what was received before the next one comes: one whole tensor exists at a time."""
    sharded = _sharded_ones({key: local_state_dict.get(key) for key in keys})
    original(full_state_dict, local_state_dict, keys, *args, **kwargs)
    _cut_received(local_state_dict, sharded)


def agree_on_parts(
    original: Callable[..., Any], model: nn.Module, *args: Any, optim_only: bool, **kwargs: Any
) -> Any:
    """Have rank 0 say whether it sends a model's state; on the others the dicts may be empty.

    Cost: with ``broadcast_from_rank0`` an all-gather of a few bytes.
    """
    options = kwargs.get("options")
    if getattr(options, "broadcast_from_rank0", False) and any(
        isinstance(param, ShardedTensor) for param in model.parameters()
    ):
        optim_only = exchange(optim_only, None, "which state dicts are set")[0]
    return original(model, *args, optim_only=optim_only, **kwargs)


def _sharded_ones(state: Mapping[str, Any]) -> dict[str, ShardedTensor]:
    return {key: value for key, value in state.items() if isinstance(value, ShardedTensor)}


def _cut_received(state: dict[str, Any], sharded: Mapping[str, ShardedTensor]) -> None:
    for key, local in sharded.items():
        received = state.get(key)
        if isinstance(received, Tensor) and not isinstance(received, ShardedTensor):
            state[key] = _put(received, local, key)
            if received.device.type == "cpu":
                give_back(received.nbytes)  # The one before it, for this one is still referred to.


@torch.no_grad()
def _put(whole: Tensor, local: ShardedTensor, name: str) -> Tensor:
    """Write a whole tensor to a sharded one, or to a new one if that has no memory or dtype."""
    check_shape(name, tuple(whole.shape), tuple(local.shape))
    if local.is_meta or (local.dtype != whole.dtype and not isinstance(local, nn.Parameter)):
        return cut_whole(whole, local, name)
    local.detach().copy_(whole)
    return local


_compat_checkpoints.wrap_state_dict_helpers(
    {
        "_gather_state_dict": gather_state_dict,
        "_distribute_state_dict": distribute_state_dict,
        "_broadcast_state_dict": broadcast_state_dict,
        "_broadcast_tensors": broadcast_tensors,
        "_verify_options": agree_on_parts,
    }
)
