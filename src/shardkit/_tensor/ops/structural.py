"""Operators that copy, make, view or fill tensors of the same shape: the cut stays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardkit import _compat
from shardkit._tensor.ops.common import (
    check_in_place,
    first_sharded,
    note_write,
    refuse,
    slice_operand,
    wrap,
)
from shardkit._tensor.ops.wholes import gathered, whole
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tensor.written_values import is_param, note_written

_aten = torch.ops.aten


def structural(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that makes one tensor of the same shape from one."""
    tensor = args[0]
    if func is _aten.empty_like.default and _compat.in_user_function():
        return _plain_like(func, args, kwargs)
    kwargs.pop("memory_format", None)
    return wrap(func(tensor.local_piece, *args[1:], **kwargs), tensor.spec)


def _plain_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Make a plain, whole tensor, which each rank fills: with a gradient, as a rule."""
    args[0].cut_gradient(is_gathered=True)
    geometry = args[0].local_piece.new_empty(()).expand(args[0].shape)
    kwargs["memory_format"] = torch.contiguous_format
    result: Tensor = func(geometry, *args[1:], **kwargs)
    return result


def same_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``detach`` and kin: the result lies where the argument does.

    The piece itself is passed on: a view made inside a dispatch has a version counter of its own,
    and writes through it would not be noticed.
    """
    del func, kwargs
    tensor = args[0]
    return ShardedTensor(tensor.local_piece, tensor.spec, tensor.flat, tensor.flat_start)


def state_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make ``zeros_like`` and kin, end to end with those of the bucket's other parameters.

    In a user's `autograd.Function` a plain one: it is for what the rank computes of its own data.
    """
    tensor = args[0]
    if _compat.in_user_function():
        return _plain_like(func, args, kwargs)
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
    """Run a view operator that leaves the shape as it is."""
    del func, kwargs
    tensor = args[0]
    return ShardedTensor(tensor.local_piece, tensor.spec, tensor.flat, tensor.flat_start)


def new_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``new_zeros`` and kin: sharded if the shape is the same, else an ordinary tensor."""
    tensor, size, *rest = args
    kwargs.pop("memory_format", None)
    if tuple(size) != tuple(tensor.shape) or _compat.in_user_function():
        return func(tensor.local_piece, size, *rest, **kwargs)
    piece = func(tensor.local_piece, [tensor.local_piece.numel()], *rest, **kwargs)
    return wrap(piece, tensor.spec)


def plain_empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``new_empty``: an ordinary tensor, also of the same shape: room to compute a whole matrix in.

    So `nn.init.orthogonal_` draws and decomposes the whole on every rank; each keeps its piece. But
    where a device is named, as what copies state dicts to the host does, the same shape is sharded.
    """
    is_packed = func is _aten.new_empty.default
    if is_packed and kwargs.get("device") is not None and tuple(args[1]) == tuple(args[0].shape):
        return new_like(func, args, kwargs)  # type: ignore[no-any-return]
    result: Tensor = func(args[0].local_piece, *args[1:], **kwargs)
    return result


def refuse_resize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse what gives a tensor other memory or another shape."""
    del kwargs
    target = args[0]
    if type(target) is ShardedTensor:
        why = (
            "its shape and its memory belong to the model. Make a new tensor, or write values by "
            "copy_()."
        )
        raise refuse(func, target, why)
    why = "a plain tensor would share the memory of a piece. Use full_tensor(), or to_local()."
    raise refuse(func, first_sharded(args), why)


def copy_into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if type(target) is not ShardedTensor:
        return whole(func, args, kwargs)
    is_sharded, given = type(source) is ShardedTensor, source
    if is_sharded and source.spec.same_cut(target.spec):
        source = source.local_piece
    else:
        check_in_place(func, target, source)
        if is_sharded:
            source = gathered(func, source)
        source = slice_operand(source, target.spec)
    func(target.local_piece, source, *args[2:], **kwargs)
    target.spec.annotate_sharding(target.local_piece)
    # A result of operators, as in nn.init.trunc_normal_, updates what was there.
    note_write(target, is_followed=not is_sharded or (given.flat is None and not is_param(given)))
    if not is_sharded:
        note_written(target, lambda: [given])
    return target


def random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the whole tensor, keep this rank's piece: the same numbers at every world size."""
    tensor = args[0]
    depends = any(isinstance(arg, Tensor) for arg in (*args[1:], *kwargs.values()))
    if type(tensor) is not ShardedTensor or depends:
        return whole(func, args, kwargs)
    kwargs.pop("memory_format", None)
    local = tensor.local_piece
    full = torch.empty(tensor.shape, dtype=local.dtype, device=local.device)
    result = func(full, *args[1:], **kwargs)
    if _compat.is_mutable_op(func):
        local.copy_(tensor.spec.slice_full(full))
        tensor.spec.annotate_sharding(local)
        note_write(tensor, is_followed=True)
        note_written(tensor, lambda: [full])
        return tensor
    return wrap(tensor.spec.slice_full(result).clone(), tensor.spec)


_FILLS = (
    *("uniform_", "normal_", "exponential_", "geometric_", "cauchy_", "log_normal_", "random_"),
    *("uniform", "normal_functional", "exponential", "geometric", "cauchy", "log_normal", "random"),
    *("bernoulli_", "bernoulli.p", "rand_like", "randn_like", "randint_like"),
)


def fills_by_shape(func: Any) -> bool:
    """Whether a random operator looks at the shape of its first operand, and not at its values."""
    namespace, name = func.name().split("::")
    return namespace == "aten" and (name in _FILLS or name.split(".")[0] in _FILLS)
