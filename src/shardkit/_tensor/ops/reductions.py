"""Reductions over the whole tensor: on the pieces, then ONE collective.

One more for each axis of tensor parallelism that the tensor is split over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardkit._tensor.ops.common import all_reduce, first_sharded, local_operand, refuse
from shardkit._tensor.sharded import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardkit._tensor.spec import Axis

    Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def check_whole(func: Any, tensor: ShardedTensor, args: Sequence[Any]) -> None:
    """Refuse a reduction (``dim``, ``keepdim``) that leaves dimensions."""
    dims = args[0] if args else None
    if len(args) > 1 and args[1]:
        raise refuse(func, tensor, "keepdim=True asks for a tensor, a reduction gives a number.")
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return
    dims = [dims] if isinstance(dims, int) else list(dims)
    if {dim % max(tensor.ndim, 1) for dim in dims} != set(range(tensor.ndim)):
        raise refuse(func, tensor, f"a reduction over dims {dims} leaves others, and rows are cut.")


def reduce_by(op: str, local_reduce: Callable[..., Tensor]) -> Handler:
    """Return a handler: reduce the piece by `local_reduce`, the results over the ranks by `op`."""
    neutral = 1 if op == "product" else 0

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        tensor = args[0]
        check_whole(func, tensor, args[1:])
        piece = tensor.spec.without_padding(tensor.local_piece, neutral)
        value = local_reduce(piece, **kwargs).clone()
        all_reduce(value, tensor.spec, op)
        return value

    return handler


def extreme(op: str) -> Handler:
    """Return a handler of max or min; NaN on one rank is NaN on all."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        del kwargs
        tensor = args[0]
        check_whole(func, tensor, args[1:])
        if tensor.numel() == 0:
            raise refuse(func, tensor, "it has no elements.")
        identity = _identity(op, tensor.dtype)
        local = tensor.spec.without_padding(tensor.local_piece, identity)
        value = identity if local.numel() == 0 else getattr(local, op)()
        pair = torch.stack([torch.as_tensor(value, dtype=local.dtype, device=local.device)] * 2)
        for axis in tensor.spec.axes:
            reduce_extremes(pair, axis, op)
        return pair[0].clone()

    return handler


def _identity(op: str, dtype: torch.dtype) -> Any:
    """Return the maximum or minimum of no element."""
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max


def reduce_extremes(values: Tensor, axis: Axis, op: str) -> None:
    """All-reduce `values` by max or min, in place; gloo forgets NaN, so it travels beside them."""
    if axis.size == 1:
        return
    if not values.is_floating_point():
        on_wire = values.to(torch.int64)
        axis.all_reduce(on_wire, op)
        values.copy_(on_wire)
        return
    sign = 1 if op == "max" else -1
    is_nan = values.isnan()
    numbers = values.to(torch.float64).masked_fill(is_nan, -sign * float("inf"))
    on_wire = torch.cat([numbers, is_nan.to(torch.float64) * sign])
    axis.all_reduce(on_wire, op)
    numbers, nans = on_wire.chunk(2)
    values.copy_(numbers.masked_fill(nans != 0, float("nan")))


def truth(op: str) -> Handler:
    """Return a handler of any (max) or all (min)."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        del kwargs
        tensor = args[0]
        check_whole(func, tensor, args[1:])
        piece = tensor.spec.without_padding(tensor.local_piece, op == "min")
        value: Tensor = func(piece).to(torch.uint8)
        all_reduce(value, tensor.spec, op)
        return value.to(torch.bool)

    return handler


def mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor = args[0]
    check_whole(func, tensor, args[1:])
    dtype = kwargs.get("dtype") or tensor.dtype
    wide = torch.promote_types(dtype, torch.float32)  # A sum of many fp16 numbers overflows.
    total: Tensor = tensor.spec.without_padding(tensor.local_piece, 0).sum(dtype=wide)
    all_reduce(total, tensor.spec, "sum")
    mean: Tensor = (total / tensor.numel()).to(dtype)
    return mean


def agree(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether two tensors are ``equal`` or ``allclose`` on all ranks."""
    reference = first_sharded(args)
    if args[0].shape != args[1].shape:
        return False
    pieces = [
        reference.spec.without_padding(
            local_operand(func, arg, reference)
            if type(arg) is ShardedTensor
            else reference.spec.slice_full(arg),
            0,
        )
        for arg in args[:2]
    ]
    is_same = func(*pieces, *args[2:], **kwargs)
    same = torch.tensor(int(is_same), device=reference.local_piece.device)
    all_reduce(same, reference.spec, "min")
    return bool(same.item())


def item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del kwargs
    return func(args[0].spec.gather(args[0].local_piece))
