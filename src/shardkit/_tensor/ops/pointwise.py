"""Elementwise operators: they run on the pieces, which must be cut alike."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardkit._tensor.ops.common import first_sharded, local_operand, note_write, refuse, wrap
from shardkit._tensor.sharded import ShardedTensor


def _run_pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    reference = first_sharded((*args, *kwargs.values()))

    def localize(arg: Any) -> Any:
        return local_operand(func, arg, reference) if isinstance(arg, Tensor) else arg

    local_args = [localize(arg) for arg in args]
    local_kwargs = {k: localize(v) for k, v in kwargs.items() if k != "memory_format"}
    return func(*local_args, **local_kwargs), reference


def pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result, reference = _run_pointwise(func, args, kwargs)
    return wrap(result, reference.spec)


def pointwise_mutating(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = kwargs.get("out", args[0])
    if type(target) is not ShardedTensor:
        why = "the result would be written into a plain tensor."
        raise refuse(func, first_sharded((*args, *kwargs.values())), why)
    _run_pointwise(func, args, kwargs)
    note_write(target)
    return target


def mutating(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an in-place operator of one tensor, e.g. ``zero_``."""
    func(args[0].local_piece, *args[1:], **kwargs)
    note_write(args[0])
    return args[0]
