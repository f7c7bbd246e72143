"""Operators on lists (``_foreach_*``, ``_fused_*``).

They run on whole flats where they can: pieces of neighbouring parameters of a bucket lie end to
end, in parameters, gradients and optimizer state alike, so that one kernel does the work of many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardkit import _compat
from shardkit._tensor.ops.common import local_operand, note_write, refuse
from shardkit._tensor.ops.contiguous import find_runs, join, pieces_of
from shardkit._tensor.sharded import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Sequence


def foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on lists: index i of every list belongs together.

    Indices of plain tensors only (parameters that are not sharded) pass through.
    """
    for arg in (*args, *kwargs.values()):
        if type(arg) is ShardedTensor:
            raise refuse(func, arg, "it stands where one number for all is wanted.")
    first: Sequence[Any] = next(arg for arg in args if isinstance(arg, (list, tuple)))
    runs = find_runs(args)
    if runs is None:
        result = func(*(_local_list(func, arg, first) for arg in args), **kwargs)
        written = [item for item in first if type(item) is ShardedTensor]
    else:
        result = func(*(join(arg, runs) for arg in args), **kwargs)
        written = [first[run.positions[0]] for run in runs]
    if _compat.is_mutable_op(func):
        note_write(*written)
        return result
    if not isinstance(result, (list, tuple)):
        return result
    if runs is None:
        return [
            ShardedTensor(item, of.spec) if type(of) is ShardedTensor else item
            for item, of in zip(result, first, strict=True)
        ]
    found = pieces_of(result, runs, [item.spec for item in first])
    return [
        ShardedTensor(piece, item.spec, flat, start)
        for item, (piece, flat, start) in zip(first, found, strict=True)
    ]


def _local_list(func: Any, items: Any, first: Sequence[Any]) -> Any:
    """Return the pieces of a list argument; other arguments as they are."""
    if not isinstance(items, (list, tuple)) or not items or not isinstance(items[0], Tensor):
        return items
    pieces = []
    for item, reference in zip(items, first, strict=True):
        if type(reference) is ShardedTensor:
            pieces.append(local_operand(func, item, reference))
        elif type(item) is ShardedTensor:
            raise refuse(func, item, "the entry of another list that belongs to it is plain.")
        else:
            pieces.append(item)
    return pieces
