"""State dicts of models and optimizers by parameter names, sharded or full.

The functions have the names, arguments and meaning of those in
``torch.distributed.checkpoint.state_dict``, with these differences: an optimizer that was never
stepped has an empty state, where torch steps it with zero gradients (which counts as a step);
parameters are found also while a module shows unsharded ones; state of another shape is refused
before anything has been changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from shardkit._errors import CheckpointError
from shardkit._state.full import check_shape, map_leaves, whole_tensor
from shardkit._tensor.sharded import ShardedTensor
from shardkit.backends.world import group_rank
from shardkit.checkpoint._files.bytes_io import TensorInfo
from shardkit.checkpoint._state.broadcast import FromRank0
from shardkit.checkpoint._state.model_tensors import device_of
from shardkit.checkpoint._state.names import plain_name
from shardkit.checkpoint._state.optimizer import (
    flatten,
    named_state,
    parameters_by_name,
    put_optimizer_state,
    room_for,
    saved_parameters,
    unflatten,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.nn.modules.module import _IncompatibleKeys

    from shardkit.checkpoint._state.optimizer import Optimizers


# --- get ------------------------------------------------------------------------------------------


def get_model_state_dict(
    model: nn.Module, *, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Return a model's state dict, by names without those of wrappers.

    Args:
        model: Module, sharded or not; all ranks must call it with ``full_state_dict``.
        options: Options of torch: ``full_state_dict``, ``cpu_offload``, ``ignore_frozen_params``.
            With the first two, rank 0 gets the state and the others an empty dict.

    Cost: with ``full_state_dict`` one gather for each tensor (`ShardedTensor.full_tensor`), one
    tensor at a time where ``cpu_offload`` moves it away.
    """
    options = options or StateDictOptions()
    state = {plain_name(model, key): value for key, value in model.state_dict().items()}
    if options.ignore_frozen_params:
        for name, param in model.named_parameters(remove_duplicate=False):
            if not param.requires_grad:
                state.pop(plain_name(model, name), None)
    return _as_wanted(state, options)


def get_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, *, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Return the state of one or several optimizers, by parameter names.

    Args:
        model: Module that holds all of their parameters.
        optimizers: One optimizer or several.
        options: Options of torch: ``full_state_dict``, ``cpu_offload``,
            ``flatten_optimizer_state_dict``.

    Raises:
        CheckpointError: An optimizer holds a parameter that the model does not.

    Cost: see `get_model_state_dict`.
    """
    options = options or StateDictOptions()
    state = named_state(model, optimizers)
    if options.flatten_optimizer_state_dict:
        state = flatten(state)
    return _as_wanted(state, options)


def get_state_dict(
    model: nn.Module, optimizers: Optimizers, *, options: StateDictOptions | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state of a model and of its optimizers; see the functions for each."""
    return (
        get_model_state_dict(model, options=options),
        get_optimizer_state_dict(model, optimizers, options=options),
    )


def _as_wanted(state: dict[str, Any], options: StateDictOptions) -> dict[str, Any]:
    if options.full_state_dict:
        keep = not options.cpu_offload or group_rank(None) == 0
        return whole_state(state, keep=keep, to_cpu=options.cpu_offload)
    if options.cpu_offload:
        return map_leaves(state, lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf)  # type: ignore[no-any-return]
    return state


def whole_state(state: dict[str, Any], *, keep: bool, to_cpu: bool) -> dict[str, Any]:
    """Return a state with whole tensors; an empty one on ranks that do not keep it. Collective."""

    def whole(leaf: Any) -> Any:
        return whole_tensor(leaf, keep=keep, to_cpu=to_cpu) if isinstance(leaf, Tensor) else leaf

    state = map_leaves(state, whole)
    return state if keep else {}


# --- set ------------------------------------------------------------------------------------------


def set_model_state_dict(
    model: nn.Module,
    model_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> _IncompatibleKeys:
    """Load a model's state dict, of pieces or of whole tensors.

    Args:
        model: Module, sharded or not. Parameters on the meta device get memory for their pieces.
        model_state_dict: State by names without those of wrappers. Whole tensors are cut by each
            rank.
        options: Options of torch: ``strict``; with ``broadcast_from_rank0`` rank 0 has whole
            tensors and sends them one at a time, what other ranks pass is not looked at.

    Raises:
        CheckpointError: With ``broadcast_from_rank0``, on all ranks: a shape differs.
        RuntimeError: As `nn.Module.load_state_dict` does.

    Cost: with ``broadcast_from_rank0`` one broadcast for each tensor, and memory for the largest.
    """
    options = options or StateDictOptions()
    own = model.state_dict(keep_vars=True)
    keys = {plain_name(model, key): key for key in own}
    if options.broadcast_from_rank0:
        state = _received_model(model_state_dict, {name: own[key] for name, key in keys.items()})
    else:
        state = dict(model_state_dict)
    state = {keys.get(name, name): value for name, value in state.items()}
    is_meta = any(isinstance(value, Tensor) and value.is_meta for value in own.values())
    result: _IncompatibleKeys = model.load_state_dict(state, strict=options.strict, assign=is_meta)
    return result


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load the state of one or several optimizers, of pieces or of whole tensors.

    Args:
        model: Module that holds all of their parameters.
        optimizers: One optimizer or several; they need not have been stepped.
        optim_state_dict: State by parameter names, nested or flat.
        options: Options of torch: ``strict``, ``broadcast_from_rank0`` as in
            `set_model_state_dict`.

    Raises:
        CheckpointError: Parameters are missing (unless ``strict=False``), or a sharded tensor is
            cut otherwise than its parameter. Nothing has been changed then.

    Cost: see `set_model_state_dict`.
    """
    options = options or StateDictOptions()
    if options.broadcast_from_rank0:
        optim_state_dict = _received_optimizer(model, optimizers, optim_state_dict)
    else:
        if "state" not in optim_state_dict:
            optim_state_dict = unflatten(model, optimizers, optim_state_dict)
        saved = _infos(optim_state_dict["state"])
        state = dict(optim_state_dict["state"])
        for name, param in saved_parameters(model, optimizers, saved):
            state[name] = {
                key: _placed(value, param, key, name, saved) for key, value in state[name].items()
            }
        optim_state_dict = {**optim_state_dict, "state": state}
    put_optimizer_state(model, optimizers, optim_state_dict, strict=options.strict)


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> _IncompatibleKeys:
    """Load the state of a model and of its optimizers; see the functions for each."""
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return set_model_state_dict(model, model_state_dict, options=options)


def _infos(state: Mapping[str, Any]) -> dict[str, dict[str, TensorInfo | None]]:
    return {
        name: {
            key: TensorInfo(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
            for key, value in entries.items()
        }
        for name, entries in state.items()
    }


@torch.no_grad()
def _placed(
    value: Any,
    param: nn.Parameter,
    key: str,
    name: str,
    saved: Mapping[str, Mapping[str, TensorInfo | None]],
) -> Any:
    """Return an entry of a parameter's state as its optimizer needs it: sharded as that is.

    Sharded tensors are not copied, as by torch: the memory of a whole state. Plain ones are: an
    optimizer counts its steps in place, and the same state may be put into another one.
    """
    if isinstance(value, dict):
        return {k: _placed(entry, param, k, name, saved) for k, entry in value.items()}
    if not isinstance(value, Tensor):
        return value
    if not isinstance(param, ShardedTensor):
        return value.detach().clone()
    if isinstance(value, ShardedTensor):
        if not value.spec.same_cut(param.spec):
            msg = (
                f"{key!r} of {name!r}, shape {tuple(value.shape)}, is sharded otherwise than the "
                f"parameter, shape {tuple(param.shape)}. Load a state dict of a model sharded "
                f"alike, or one of whole tensors (full_state_dict=True)."
            )
            raise CheckpointError(msg)
        return value
    info = TensorInfo(tuple(value.shape), value.dtype)
    room = room_for(param, key, info, saved)
    if isinstance(room, ShardedTensor):
        return room.copy_(value.detach())
    return value.detach().clone()


def _received_model(state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return what rank 0 has of a model: sharded parameters in place, others whole."""
    sent = FromRank0(state, device=device_of(own.values()))
    for name, info in sent.infos.items():
        if isinstance(own.get(name), ShardedTensor):
            check_shape(name, info.shape, tuple(own[name].shape))
    received: dict[str, Any] = {}
    for name, value in sent.receive():
        target = own.get(name)
        if not isinstance(value, Tensor) or not isinstance(target, ShardedTensor):
            received[name] = value
        else:
            target.copy_values(value)  # At once: pieces laid aside would be a second shard.
            received[name] = target
    return received


def _received_optimizer(
    model: nn.Module, optimizers: Optimizers, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what rank 0 has of optimizers' state, cut like their parameters."""
    if state and "state" not in state:
        state = unflatten(model, optimizers, state)
    entries: dict[tuple[str, ...], Any] = {("param_groups",): state.get("param_groups", [])}
    for name, values in state.get("state", {}).items():
        entries |= {(name, key): value for key, value in values.items()}
    named = {
        alias: param for names, param in parameters_by_name(model, optimizers) for alias in names
    }
    sent = FromRank0(entries, device=device_of(named.values()))
    saved: dict[str, dict[str, TensorInfo | None]] = {}
    for (name, key), info in sent.infos.items():
        saved.setdefault(name, {})[key] = info
    received: dict[str, Any] = {"state": {}, "param_groups": []}
    for (name, *keys), value in sent.receive():
        if not keys:
            received["param_groups"] = value
            continue
        entry = value
        if name in named:
            entry = _placed(value, named[name], keys[0], name, saved)
        received["state"].setdefault(name, {})[keys[0]] = entry
    return received
