"""Operators that copy, make, view or fill tensors of the same shape: the cut stays."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardkit import _compat
from shardkit._tensor.ops.common import local_operand, note_write, refuse
from shardkit._tensor.sharded import ShardedTensor

if TYPE_CHECKING:
    from shardkit._tensor.spec import ShardSpec

_aten = torch.ops.aten


def structural(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that makes one tensor of the same shape from one."""
    tensor = args[0]
    kwargs.pop("memory_format", None)
    return _wrap_new(func(tensor.local_piece, *args[1:], **kwargs), tensor.spec)


def _wrap_new(piece: Tensor, spec: ShardSpec) -> ShardedTensor:
    return ShardedTensor(_compat.track_views(piece) if spec.is_traced else piece, spec)


def same_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``detach`` and kin: the result lies where the argument does.

    The piece itself is passed on: a view made inside a dispatch has a version counter of its own,
    and writes through it would not be noticed.
    """
    del func, kwargs
    tensor = args[0]
    return ShardedTensor(tensor.local_piece, tensor.spec, tensor.flat, tensor.flat_start)


def state_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make ``zeros_like`` and kin, end to end with those of the bucket's other parameters."""
    tensor = args[0]
    kwargs.pop("memory_format", None)
    allocator = tensor.spec.state_allocator
    is_plain = (
        kwargs.get("device") in (None, tensor.device)
        and kwargs.get("layout") in (None, torch.strided)
        and not kwargs.get("pin_memory")
    )
    placed = None
    if allocator is not None and is_plain:
        dtype = kwargs.get("dtype") or tensor.dtype
        placed = allocator.allocate(tensor.spec, dtype, tensor.device)
    if placed is None:
        return structural(func, args, kwargs)
    flat, piece = placed
    if func is not _aten.zeros_like.default:
        piece.fill_(1 if func is _aten.ones_like.default else args[1])
    return ShardedTensor(piece, tensor.spec, flat)


def reshape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a view operator that leaves the shape as it is; refuse others."""
    del kwargs
    tensor, size = args[0], list(args[1])
    if -1 in size:
        known = math.prod(dim for dim in size if dim != -1)
        size[size.index(-1)] = tensor.numel() // known if known else 0
    if size != list(tensor.shape):
        raise refuse(func, tensor, f"a view of shape {tuple(args[1])} would need another cut.")
    return ShardedTensor(tensor.local_piece, tensor.spec, tensor.flat, tensor.flat_start)


def new_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``new_zeros`` and kin: sharded if the shape is the same, else an ordinary tensor."""
    tensor, size, *rest = args
    kwargs.pop("memory_format", None)
    if tuple(size) != tuple(tensor.shape):
        return func(tensor.local_piece, size, *rest, **kwargs)
    piece = func(tensor.local_piece, [tensor.local_piece.numel()], *rest, **kwargs)
    return _wrap_new(piece, tensor.spec)


def plain_empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``new_empty``: an ordinary tensor, also of the same shape: room to compute a whole matrix in.

    So `nn.init.orthogonal_` draws and decomposes the whole on every rank; each keeps its piece. But
    where a device is named, as what copies state dicts to the host does, the same shape is sharded.
    """
    if kwargs.get("device") is not None and tuple(args[1]) == tuple(args[0].shape):
        return new_like(func, args, kwargs)  # type: ignore[no-any-return]
    result: Tensor = func(args[0].local_piece, *args[1:], **kwargs)
    return result


def copy_into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if type(target) is not ShardedTensor:
        raise refuse(func, source, "it would be copied into a plain tensor.")
    if type(source) is not ShardedTensor and source.shape == target.shape:
        source = target.spec.slice_full(source)
    else:
        source = local_operand(func, source, target)
    func(target.local_piece, source, *args[2:], **kwargs)
    target.spec.annotate_sharding(target.local_piece)
    note_write(target)
    return target


def random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the whole tensor, keep this rank's piece: the same numbers at every world size."""
    tensor = args[0]
    kwargs.pop("memory_format", None)
    local = tensor.local_piece
    if any(isinstance(arg, Tensor) for arg in args[1:]) or func in DEPEND_ON_VALUES:
        raise refuse(func, tensor, "its random numbers depend on the values of a tensor.")
    full = torch.empty(tensor.shape, dtype=local.dtype, device=local.device)
    result = func(full, *args[1:], **kwargs)
    if _compat.is_mutable_op(func):
        local.copy_(tensor.spec.slice_full(full))
        tensor.spec.annotate_sharding(local)
        note_write(tensor)
        return tensor
    return ShardedTensor(tensor.spec.slice_full(result).clone(), tensor.spec)


DEPEND_ON_VALUES = (
    _aten.bernoulli.default,
    _aten.multinomial.default,
    _aten.poisson.default,
    _aten.native_dropout.default,
)
