"""Reductions over the whole tensor: on the pieces, then ONE collective.

One more for each axis of tensor parallelism that the tensor is split over.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardkit._tensor.ops.common import all_reduce, first_sharded, refuse
from shardkit._tensor.ops.wholes import gathered, whole
from shardkit._tensor.sharded import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardkit._tensor.spec import Axis

    Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def covers_all(tensor: ShardedTensor, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a reduction with arguments (dim, keepdim) behind the tensor leaves no dimension."""
    dims = args[0] if args else kwargs.get("dim")
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return True
    dims = [dims] if isinstance(dims, int) else list(dims)
    return {dim % max(tensor.ndim, 1) for dim in dims} == set(range(max(tensor.ndim, 1)))


def shaped(value: Tensor, tensor: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Return the result in the shape that ``keepdim`` asks for."""
    keepdim = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
    return value.reshape((1,) * tensor.ndim) if keepdim else value


def reduction(fn: Handler, *, dims_at: int = 1, takes_complex: bool = False) -> Handler:
    """Return a handler: `fn` where no dimension is left, else the operator on wholes.

    Args:
        fn: Function that gives a number.
        dims_at: Position of the operator's (dim, keepdim).
        takes_complex: Whether `fn` can sum complex numbers over the ranks.
    """

    @functools.wraps(fn)
    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, dims = args[0], args[dims_at:]
        if type(tensor) is not ShardedTensor or "out" in kwargs:
            return whole(func, args, kwargs)
        if tensor.is_complex() and not takes_complex:
            return whole(func, args, kwargs)
        if not covers_all(tensor, dims, kwargs):
            return whole(func, args, kwargs)
        tensor.cut_gradient()
        return shaped(fn(func, args, kwargs), tensor, dims, kwargs)

    return handler


def reduce_by(op: str, local_reduce: Callable[..., Tensor]) -> Handler:
    """Return a handler: reduce the piece by `local_reduce`, the results over the ranks by `op`."""
    neutral = 1 if op == "product" else 0

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        del func
        tensor = args[0]
        piece = tensor.spec.without_padding(tensor.local_piece, neutral)
        dtype = {"dtype": kwargs["dtype"]} if "dtype" in kwargs else {}
        value = local_reduce(piece, **dtype).clone()
        all_reduce(value, tensor.spec, op)
        return value

    return reduction(handler)


def extreme(op: str) -> Handler:
    """Return a handler of max or min; NaN on one rank is NaN on all."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        del kwargs
        tensor = args[0]
        if tensor.numel() == 0:
            raise refuse(func, tensor, "it has no elements, so there is no result.")
        identity = _identity(op, tensor.dtype)
        local = tensor.spec.without_padding(tensor.local_piece, identity)
        value = identity if local.numel() == 0 else getattr(local, op)()
        pair = torch.stack([torch.as_tensor(value, dtype=local.dtype, device=local.device)] * 2)
        for axis in tensor.spec.axes:
            reduce_extremes(pair, axis, op)
        return pair[0].clone()

    return reduction(handler)


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
        piece = tensor.spec.without_padding(tensor.local_piece, op == "min")
        local: Tensor = func(piece)
        value = local.to(torch.uint8)
        all_reduce(value, tensor.spec, op)
        return value.to(local.dtype)

    return reduction(handler)


@reduction
def mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor = args[0]
    dtype = kwargs.get("dtype") or tensor.dtype
    if not dtype.is_floating_point:
        return whole(func, args, kwargs)  # type: ignore[no-any-return]  # Torch says why not.
    wide = torch.promote_types(dtype, torch.float32)  # A sum of many fp16 numbers overflows.
    total: Tensor = tensor.spec.without_padding(tensor.local_piece, 0).sum(dtype=wide)
    all_reduce(total, tensor.spec, "sum")
    mean: Tensor = (total / tensor.numel()).to(dtype)
    return mean


def agree(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Whether two tensors are ``equal`` or ``allclose`` on all ranks."""
    spec = first_sharded(args).spec
    both = args[:2]
    if any(arg.shape != spec.shape for arg in both):
        return whole(func, args, kwargs)
    pieces = []
    for arg in both:
        if type(arg) is ShardedTensor and arg.spec.same_cut(spec):
            piece = arg.local_piece
        else:
            piece = spec.slice_full(gathered(func, arg))
        pieces.append(spec.without_padding(piece, 0))
    is_same = func(*pieces, *args[2:], **kwargs)
    same = torch.tensor(int(is_same), device=pieces[0].device)
    all_reduce(same, spec, "min")
    return bool(same.item())


def item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del kwargs
    return func(args[0].spec.gather(args[0].local_piece))
