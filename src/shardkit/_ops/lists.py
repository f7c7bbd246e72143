"""Operators on lists (``_foreach_*``, ``_fused_*``).

They run on whole flats where they can: pieces of neighbouring parameters of a bucket lie end to
end, in parameters, gradients and optimizer state alike, so that one kernel does the work of many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardkit import _compat
from shardkit._ops.common import local_operand, note_write, refuse
from shardkit._sharded import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit._sharded import ShardSpec


def foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on lists: index i of every list belongs together.

    Indices of plain tensors only (parameters that are not sharded) pass through.
    """
    for arg in (*args, *kwargs.values()):
        if type(arg) is ShardedTensor:
            raise refuse(func, arg, "it stands where one number for all is wanted.")
    first = args[0]
    runs = _find_runs(args)
    joined = [_join(arg, runs) if runs else _local_list(func, arg, first) for arg in args]
    result = func(*joined, **kwargs)
    if _compat.is_mutable_op(func):
        written = [first[run.positions[0]] for run in runs] if runs else first
        note_write(*(item for item in written if type(item) is ShardedTensor))
        return result
    if not isinstance(result, (list, tuple)):
        return result
    if runs:
        return _split(result, runs, first)
    return [
        ShardedTensor(item, of.spec) if type(of) is ShardedTensor else item
        for item, of in zip(result, first, strict=True)
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


@dataclass(slots=True)
class _Run:
    """Entries of all lists whose pieces lie end to end, at [start, stop) of their shards.

    Attributes:
        positions: Which entries; none of them is empty.
        start: Where the first piece begins.
        stop: Where the last one ends.
    """

    positions: list[int]
    start: int
    stop: int

    def join(self, items: Sequence[Any]) -> Any:
        """Return what stands for the run's entries: one tensor, or their common number."""
        item = items[self.positions[0]]
        if type(item) is not ShardedTensor:
            return item
        if len(self.positions) == 1 or item.flat is None:
            return item.local_piece
        return item.flat[self.start - item.flat_start : self.stop - item.flat_start]


def _join(items: Any, runs: Sequence[_Run]) -> Any:
    if not isinstance(items, (list, tuple)):
        return items
    return [run.join(items) for run in runs]


def _split(
    flats: Sequence[Tensor], runs: Sequence[_Run], first: Sequence[ShardedTensor]
) -> list[ShardedTensor]:
    """Return results for runs as one result for each entry."""
    result: list[Any] = [None] * len(first)
    for run, flat in zip(runs, flats, strict=True):
        for position in run.positions:
            spec = first[position].spec
            start, stop = spec.piece_range
            piece = flat[start - run.start : stop - run.start]
            result[position] = ShardedTensor(piece, spec, flat, run.start)
    for position, item in enumerate(result):
        if item is None:
            result[position] = ShardedTensor(flats[0][:0], first[position].spec)
    return result


def _find_runs(args: tuple[Any, ...]) -> list[_Run] | None:
    """Return how to run list operators on flats; None if entries are not such pieces at all."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    first = lists[0]
    if set(map(type, first)) != {ShardedTensor}:
        return None
    specs = tuple([item.spec for item in first])
    runs = _planned_runs.get(specs)
    if runs is None:
        if len(_planned_runs) >= _MAX_PLANS:
            _planned_runs.clear()
        runs = _planned_runs[specs] = _plan_runs(specs)
    if not runs or not all(_follows(items, specs, runs) for items in lists):
        return None
    return runs


_planned_runs: dict[tuple[ShardSpec, ...], list[_Run]] = {}
_MAX_PLANS = 16


def _plan_runs(specs: Sequence[ShardSpec]) -> list[_Run]:
    """Return the runs of neighbouring parameters; those without elements here are in none."""
    runs: list[_Run] = []
    before = None
    for position, spec in enumerate(specs):
        if spec.start == spec.stop:
            continue
        start, stop = spec.piece_range
        follows = before is not None and spec.siblings is before.siblings is not None
        if follows and before is not None and spec.index == before.index + 1:
            runs[-1].positions.append(position)
            runs[-1].stop = stop
        else:
            runs.append(_Run([position], start, stop))
        before = spec
    return runs


def _follows(items: Sequence[Any], specs: Sequence[ShardSpec], runs: Sequence[_Run]) -> bool:
    """Return whether a list has these runs: each of pieces in one flat, or of one number."""
    if len(items) != len(specs):
        return False
    if isinstance(items[0], (int, float)):
        return all(len({items[i] for i in run.positions}) == 1 for run in runs)
    if set(map(type, items)) != {ShardedTensor} or tuple([item.spec for item in items]) != specs:
        return False
    for run in runs:
        if len(run.positions) > 1:
            flat = items[run.positions[0]].flat
            if flat is None or any(items[i].flat is not flat for i in run.positions):
                return False
    return True
