"""Whole tensors of state dicts made of pieces, and pieces of whole ones.

What `shardkit.checkpoint` and torch's own functions for state dicts (through `_compat`) have in
common.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardkit._errors import CheckpointError
from shardkit._tensor.sharded import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Callable

STATE_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
"""State of torch's optimizers that is one number for each parameter, whatever its shape."""


def holds_sharded(value: object) -> bool:
    """Whether there is a sharded tensor in nested dicts, lists and tuples."""
    if isinstance(value, dict):
        return any(map(holds_sharded, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(holds_sharded, value))
    return isinstance(value, ShardedTensor)


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested dicts, lists and tuples like these, of what `change` makes of the leaves."""
    if isinstance(value, dict):
        return {key: map_leaves(entry, change) for key, entry in value.items()}
    if isinstance(value, list):
        return [map_leaves(entry, change) for entry in value]
    if type(value) is tuple:
        return tuple(map_leaves(entry, change) for entry in value)
    return change(value)


@torch.no_grad()
def whole_tensor(tensor: Tensor, *, keep: bool, to_cpu: bool) -> Tensor | None:
    """Return a sharded tensor as a plain one of the whole, others as a copy. Collective.

    Args:
        tensor: Tensor sharded by shardkit, DTensor, or plain tensor.
        keep: Whether this rank wants it; a rank that does not takes part and gets None.
        to_cpu: Whether to put it on the host.
    """
    device = torch.device("cpu") if to_cpu else tensor.device
    detached: Any = tensor.detach()
    if hasattr(detached, "full_tensor"):
        is_ours = isinstance(detached, ShardedTensor)
        result: Tensor = detached.whole_values() if is_ours else detached.full_tensor()
        return result.to(device) if keep else None
    return tensor.detach().to(device, copy=True) if keep else None


@torch.no_grad()
def cut_whole(whole: Tensor, like: ShardedTensor, name: str) -> Tensor:
    """Return this rank's piece of a whole tensor, sharded as `like`, in memory of its own.

    Pieces of one bucket lie end to end, as an optimizer's state does.

    Raises:
        CheckpointError: The shapes differ.
    """
    check_shape(name, tuple(whole.shape), tuple(like.shape))
    if like.is_meta:
        spec = like.spec
        piece = torch.empty(spec.piece_numel, dtype=whole.dtype, device=spec.device)
        new: Tensor = ShardedTensor(piece, spec)
    else:
        new = torch.zeros_like(like, dtype=whole.dtype)
    new.copy_(whole.detach())
    return new


def check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape.

    Raises:
        CheckpointError: If it is; on every rank, since ranks know the same shapes.
    """
    if found != expected:
        msg = (
            f"{name!r} has shape {found} in the state dict, and {expected} here. Make the model as "
            f"it was when the state was saved, or leave the entry out and load with strict=False."
        )
        raise CheckpointError(msg)
