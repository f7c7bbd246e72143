"""Operators that need more than a piece: they run on the whole tensors, gathered for them.

Each rank does the same, and has the result: a plain tensor. Of a sharded tensor that is written
each rank keeps its piece.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardkit import _compat
from shardkit._errors import warn_user
from shardkit._tensor.ops.common import check_in_place, note_write, refuse, without_out
from shardkit._tensor.ops.shown import ShardedView, in_whole
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tensor.written_values import note_written
from shardkit._tree import iter_tensors, map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

LARGE_NBYTES = 2**20
_warned: set[Any] = set()


def gathered(func: Any, tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor, the values of a view; others as they are.

    Cost: that of `ShardedTensor.full_tensor`.
    """
    if type(tensor) is ShardedTensor:
        return _gather(func, tensor)
    if type(tensor) is ShardedView:
        return in_whole(func, tensor, _gather(func, tensor.base))
    full_tensor: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if full_tensor is None else full_tensor()  # A DTensor.


def _gather(func: Any, tensor: ShardedTensor) -> Tensor:
    tensor.cut_gradient(is_gathered=True)
    spec, piece = tensor.spec, tensor.local_piece
    if piece.is_meta:
        return torch.empty(spec.shape, dtype=piece.dtype, device="meta")
    nbytes = tensor.numel() * piece.itemsize
    if nbytes > LARGE_NBYTES and func not in _warned and any(a.size > 1 for a in spec.axes):
        _warned.add(func)
        msg = (
            f"{func} needs the whole of sharded {spec.name!r} of shape {tuple(spec.shape)}, so it "
            f"gathers {nbytes / 2**20:.0f} MiB on every rank, each time. Where several operators "
            f"need it, call full_tensor() once and go on with that. Where it is a module's weight "
            f"that another module uses in every step, shard both in one group, or call "
            f"register_fsdp_forward_method() on the method that uses it. This is said once for "
            f"each operator."
        )
        warn_user(msg, is_first_rank=spec.mesh.is_first_rank)
    return spec.gather(_compat.without_tracking(piece)).contiguous()


def whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on whole tensors.

    Cost: a gather of each sharded operand.
    """
    wholes: dict[int, Tensor] = {}
    outs: dict[int, Tensor] = {}
    in_place, by_name = _compat.written_arguments(func)
    changed = list(iter_tensors([_argument(args, kwargs, key) for key in in_place], depth=0))
    filled = list(iter_tensors([kwargs.get(key) for key in by_name], depth=0))
    written = [t for t in (*changed, *filled) if _is_sharded(t)]
    for target in written:
        check_in_place(func, _base(target), args, kwargs)
    for target in filled:
        if _is_sharded(target):  # It gets the shape of what is put there.
            outs[id(target)] = torch.empty(0, dtype=target.dtype, device=target.device)

    def to_whole(tensor: Tensor) -> Tensor:
        found = wholes.get(id(tensor))
        if found is None:
            found = wholes[id(tensor)] = gathered(func, tensor)
        return found

    plain_args = map_tensors(to_whole, args)
    plain_kwargs = {
        key: map_tensors(lambda t: outs.get(id(t), t), value)
        if key in by_name
        else map_tensors(to_whole, value)
        for key, value in kwargs.items()
    }
    is_traced = any(_base(target).spec.is_traced for target in filled if _is_sharded(target))
    call = functools.partial(without_out, func) if is_traced else func
    try:
        result = call(*plain_args, **plain_kwargs)
    except RuntimeError as error:
        _explain(error, args, kwargs)
        raise
    if is_traced:
        result = _fill(filled, result, outs)
    originals = {}
    for target in written:
        values = outs[id(target)] if id(target) in outs else wholes[id(target)]
        store(func, target, values)
        originals[id(values)] = target
    return map_tensors(lambda t: originals.get(id(t), t), followed(result, args, kwargs))


def _fill(filled: list[Tensor], results: tuple[Tensor, ...], outs: dict[int, Tensor]) -> Any:
    """Note results by the sharded tensors that they are for, copy them into others."""
    for target, values in zip(filled, results, strict=True):
        if _is_sharded(target):
            outs[id(target)] = values
        else:
            target.copy_(values)
    return tuple(filled) if len(filled) > 1 else filled[0]


def store(func: Any, target: Tensor, values: Tensor) -> None:
    """Write the values of the whole into a sharded tensor or a view."""
    base = _base(target)
    if values.shape != target.shape:
        why = (
            f"its shape cannot change, and the result has shape {tuple(values.shape)}. Give out= a "
            f"tensor of that shape."
        )
        raise refuse(func, base, why)
    if type(target) is ShardedView:
        target.copy_(values)
        return
    base.local_piece.copy_(base.spec.slice_full(values))
    base.spec.annotate_sharding(base.local_piece)
    note_write(base, is_followed=True)
    note_written(base, lambda: [values])


def _base(tensor: Any) -> ShardedTensor:
    base: ShardedTensor = tensor.base if type(tensor) is ShardedView else tensor
    return base


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], key: int | str) -> Any:
    if isinstance(key, str):
        return kwargs.get(key)
    return args[key] if key < len(args) else None


def followed(result: Any, args: Any, kwargs: Any) -> Any:
    """Have views of plain results follow writes where operators are traced.

    If there are plain operands, torch took from those what views follow by, and gives the results
    the same.
    """
    tensors = list(iter_tensors([args, kwargs], depth=0))
    if not any(_is_sharded(tensor) and _base(tensor).spec.is_traced for tensor in tensors):
        return result
    plain = [tensor for tensor in tensors if not _is_sharded(tensor)]
    if any(tensor.device.type == "xla" and not _compat.is_tracked(tensor) for tensor in plain):
        return result
    return map_tensors(lambda t: t if _is_sharded(t) else _compat.track_views(t), result)


def _is_sharded(tensor: Tensor) -> bool:
    return type(tensor) in (ShardedTensor, ShardedView)


def _explain(error: RuntimeError, args: Any, kwargs: Any) -> None:
    """Name the sharded operands in an error of torch, which knows of wholes only."""
    named = [
        f"{_base(t).spec.name!r} ({str(t.dtype).removeprefix('torch.')}, {tuple(t.shape)})"
        for t in iter_tensors([args, kwargs], depth=0)
        if _is_sharded(t)
    ]
    error.add_note(
        f"It ran on the whole of sharded {', '.join(named)}. Outside of its module's forward a "
        f"parameter has its own dtype, not the policy's param_dtype."
    )
