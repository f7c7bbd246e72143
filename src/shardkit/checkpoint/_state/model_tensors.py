"""A model's tensors by name, each once, and the mesh of the ranks that hold them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit._errors import CheckpointError
from shardkit._tensor.sharded import ShardedTensor
from shardkit.checkpoint._state.names import EXTRA_STATE, plain_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardkit._mesh import DeviceMesh


@dataclass(slots=True)
class NamedTensor:
    """A tensor of the model with all its names."""

    names: list[str]
    tensor: Tensor


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return the model's state dict: the objects themselves, also sharded ones not shown now."""
    state = model.state_dict(keep_vars=True)
    return {plain_name(model, name): value for name, value in state.items()}


def by_identity(state: dict[str, Any]) -> list[NamedTensor]:
    """Return the model's tensors, each once."""
    entries: dict[int, NamedTensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            entries.setdefault(id(value), NamedTensor([], value)).names.append(name)
    return list(entries.values())


def give_memory(target: Tensor, new: Tensor) -> None:
    """Make a plain tensor on meta the one that has these values; it stays the object that it is."""
    if isinstance(target, nn.Parameter):
        new = nn.Parameter(new, requires_grad=target.requires_grad)
    torch.utils.swap_tensors(target, new)


def set_extra_state(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Give modules the state of their own, by its names in the state dict."""
    for name, module in model.named_modules():
        key = f"{plain_name(model, name)}.{EXTRA_STATE}".removeprefix(".")
        if key in values:
            module.set_extra_state(values[key])


def device_of(values: Iterable[Any]) -> torch.device:
    """Return where the ranks of a state exchange tensors, and where those on meta belong."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    for tensor in tensors:
        if isinstance(tensor, ShardedTensor):
            return tensor.spec.device
    return next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))


def mesh_of(state: dict[str, Any], path: object, *, allow_meta: bool = False) -> DeviceMesh:
    """Return the mesh of all ranks that hold the model.

    Raises:
        CheckpointError: There is none, several, or the model is on meta.
    """
    on_meta = [name for name, value in state.items() if getattr(value, "is_meta", False)]
    if on_meta and not allow_meta:
        msg = f"{on_meta[0]!r} is on the meta device and has no values to write to {path}."
        raise CheckpointError(msg)
    meshes = [v.spec.mesh for v in state.values() if isinstance(v, ShardedTensor)]
    if not meshes:
        msg = (
            f"the model for {path} has no sharded parameters. Save a plain one by torch.save or "
            f"safetensors; a sharded one after fully_shard."
        )
        raise CheckpointError(msg)
    # Tensor-parallel parameters are on more ranks than those beside them.
    largest: DeviceMesh = max(meshes, key=lambda mesh: len(mesh.ranks))
    other = next((m for m in meshes if not set(m.ranks) <= set(largest.ranks)), None)
    if other is not None:
        msg = (
            f"the model for {path} lies on several meshes, of ranks {largest.describe_ranks()} and "
            f"{other.describe_ranks()}. Save its parts one by one."
        )
        raise CheckpointError(msg)
    return largest
