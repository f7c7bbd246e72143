"""Elementwise operators: they run on the pieces, which must be cut alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardkit._tensor.ops.common import (
    check_in_place,
    first_sharded,
    note_write,
    runs_on_wholes,
    slice_operand,
    without_out,
    wrap,
)
from shardkit._tensor.ops.wholes import gathered, whole
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tensor.written_values import constant, note_written

_aten = torch.ops.aten
_TAKE_A_NUMBER = {_aten.fill_.Tensor, _aten.masked_fill.Tensor, _aten.masked_fill_.Tensor}
"""Operators with an operand that must have no dims, whatever the others have."""


def _pieces_of(
    spec: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]] | None:
    """Return the arguments with pieces for sharded tensors, if no tensor is cut otherwise."""
    local = []
    for arg in args:
        if type(arg) is ShardedTensor and arg.spec is spec:
            local.append(arg.local_piece)
        elif isinstance(arg, Tensor):
            return None
        else:
            local.append(arg)
    local_kwargs = {}
    for key, arg in kwargs.items():
        if type(arg) is ShardedTensor and arg.spec is spec:
            local_kwargs[key] = arg.local_piece
        elif isinstance(arg, Tensor):
            return None
        elif key != "memory_format":
            local_kwargs[key] = arg
    return local, local_kwargs


def pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    spec = first_sharded((*args, *kwargs.values())).spec
    local = _pieces_of(spec, args, kwargs)
    if local is None:
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
        sharded = [tensor for tensor in tensors if type(tensor) is ShardedTensor]
        shape = torch.broadcast_shapes(*[tensor.shape for tensor in tensors])
        spec = next((tensor.spec for tensor in sharded if tensor.shape == shape), spec)
        if spec.shape != shape or any(not tensor.spec.same_cut(spec) for tensor in sharded):
            return whole(func, args, kwargs)
        if not shape and func in _TAKE_A_NUMBER:
            return whole(func, args, kwargs)
        if len(sharded) < len(tensors) and (spec.is_traced or runs_on_wholes(tensors)):
            return whole(func, args, kwargs)  # Who traces cannot follow a piece of a plain operand.
        local = _sliced(func, spec, args, kwargs)
    return wrap(func(*local[0], **local[1]), spec)


def _sliced(
    func: Any, spec: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments with pieces for all tensors, also for plain ones."""

    def slice_one(arg: Any) -> Any:
        if not isinstance(arg, Tensor):
            return arg
        if type(arg) is ShardedTensor:
            if arg.spec.same_cut(spec):
                return arg.local_piece
            arg = gathered(func, arg)
        return slice_operand(arg, spec)

    local_kwargs = {k: slice_one(v) for k, v in kwargs.items() if k != "memory_format"}
    return [slice_one(arg) for arg in args], local_kwargs


def pointwise_mutating(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = kwargs.get("out", args[0])
    if type(target) is not ShardedTensor:
        return whole(func, args, kwargs)
    local = _pieces_of(target.spec, args, kwargs)
    if local is None:
        by_name = [value for key, value in kwargs.items() if key != "out"]
        sources = [arg for arg in (*args, *by_name) if isinstance(arg, Tensor)]
        shape = torch.broadcast_shapes(*[tensor.shape for tensor in sources])
        is_alone = not any(type(tensor) is ShardedTensor for tensor in sources)
        if is_alone or shape != target.shape or (not shape and func in _TAKE_A_NUMBER):
            return whole(func, args, kwargs)
        check_in_place(func, target, sources)
        local = _sliced(func, target.spec, args, kwargs)
    if "out" in kwargs and target.spec.is_traced:
        (values,) = without_out(func, *local[0], **local[1])
        target.local_piece.copy_(values)
    else:
        func(*local[0], **local[1])
    note_write(target, is_followed="out" not in kwargs)
    return target


def mutating(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an in-place operator that writes a number: ``zero_``, ``fill_``."""
    target = args[0]
    func(target.local_piece, *args[1:], **kwargs)
    note_write(target, is_followed=True)
    note_written(target, lambda: [constant(args[1] if len(args) > 1 else 0, target)])
    return target
