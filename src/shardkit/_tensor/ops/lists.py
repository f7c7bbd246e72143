"""Operators on lists (``_foreach_*``, ``_fused_*``).

They run on whole flats where they can: pieces of neighbouring parameters of a bucket lie end to
end, in parameters, gradients and optimizer state alike, so that one kernel does the work of many.
Plain tensors in the lists are cut. Where an entry cannot be, the operator runs entry by entry, so
that one tensor is whole at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardkit import _compat
from shardkit._tensor.ops.common import note_write, runs_on_wholes, slice_operand, wrap
from shardkit._tensor.ops.contiguous import find_runs, join, pieces_of
from shardkit._tensor.ops.reductions import extreme
from shardkit._tensor.ops.wholes import gathered, whole
from shardkit._tensor.sharded import ShardedTensor
from shardkit._tree import iter_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence


def foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on lists: index i of every list belongs together.

    Indices of plain tensors only (parameters that are not sharded) pass through.
    """
    if any(type(arg) is ShardedTensor for arg in (*args, *kwargs.values())):  # A number for all.
        args = tuple(_number(func, arg) for arg in args)
        kwargs = {key: _number(func, arg) for key, arg in kwargs.items()}
    first: Sequence[Any] = next(arg for arg in args if isinstance(arg, (list, tuple)))
    runs = find_runs(args)
    if _has_data(func, args, runs):
        return one_by_one(func, args, kwargs)
    if runs is None:
        lists = [_local_list(func, arg, first) for arg in args]
        if any(items is None for items in lists):
            return one_by_one(func, args, kwargs)
        result = func(*lists, **kwargs)
        written = [item for item in first if type(item) is ShardedTensor]
    else:
        result = func(*(join(arg, runs) for arg in args), **kwargs)
        written = [first[run.positions[0]] for run in runs]
    if _compat.is_mutable_op(func):
        note_write(*written, pieces=first)
        return result
    if not isinstance(result, (list, tuple)):
        return result
    if runs is None:
        return [
            wrap(item, of.spec) if type(of) is ShardedTensor else item
            for item, of in zip(result, first, strict=True)
        ]
    found = pieces_of(result, runs, [item.spec for item in first])
    return [
        ShardedTensor(piece, item.spec, flat, start)
        for item, (piece, flat, start) in zip(first, found, strict=True)
    ]


def _has_data(func: Any, args: tuple[Any, ...], runs: Sequence[Any] | None) -> bool:
    """Whether the result depends on plain tensors that may be other ones on each rank."""
    if _compat.is_mutable_op(func):  # Optimizers write in backward, by numbers that are tensors.
        return False
    if runs is not None and not any(isinstance(arg, Tensor) for arg in args):
        return False
    if not runs_on_wholes(args):
        return False
    return any(type(tensor) is not ShardedTensor for tensor in iter_tensors(args, depth=0))


def _number(func: Any, arg: Any) -> Any:
    return gathered(func, arg) if type(arg) is ShardedTensor else arg


def _local_list(func: Any, items: Any, first: Sequence[Any]) -> list[Any] | Any:
    """Return the pieces of a list argument, other arguments as they are; None: there are none."""
    if not isinstance(items, (list, tuple)) or not items or not isinstance(items[0], Tensor):
        return items
    pieces = []
    for each, reference in zip(items, first, strict=True):
        piece = _local_entry(func, each, reference)
        if piece is None:
            return None
        pieces.append(piece)
    return pieces


def _local_entry(func: Any, item: Tensor, reference: Tensor) -> Tensor | None:
    if type(reference) is not ShardedTensor:
        return gathered(func, item) if type(item) is ShardedTensor else item
    spec = reference.spec
    if type(item) is ShardedTensor and item.spec.same_cut(spec):
        return item.local_piece
    if item.ndim == 0 and type(item) is not ShardedTensor:
        return item
    if torch.broadcast_shapes(item.shape, spec.shape) != spec.shape:
        return None
    return slice_operand(gathered(func, item), spec)


def one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on lists on the wholes of one entry after another."""
    count = len(next(arg for arg in args if isinstance(arg, (list, tuple))))
    results: list[Any] = []
    for index in range(count):
        entry = tuple([arg[index]] if isinstance(arg, (list, tuple)) else arg for arg in args)
        result = whole(func, entry, kwargs)
        if isinstance(result, (list, tuple)):
            results += result
    return results or None


def largest(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the largest element of each entry. Cost: an all-reduce for each."""
    del kwargs
    maximum, of_one = extreme("max"), torch.ops.aten.max.default
    return [
        maximum(of_one, (item,), {}) if type(item) is ShardedTensor else func([item])[0]
        for item in args[0]
    ]
