"""Runs: entries of lists whose pieces lie end to end, so that one kernel does the work of many."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardkit._tensor.sharded import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shardkit._tensor.spec import ShardSpec


@dataclass(slots=True)
class PieceRun:
    """Entries of all lists whose pieces lie end to end, at [start, stop) of their shards.

    Attributes:
        positions: Positions of the entries; none of them is empty.
        start: Position where the first piece begins.
        stop: Position where the last one ends.
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


def common_flat(tensors: Sequence[Any]) -> Tensor | None:
    """Return the one tensor of which all of these are views; None where there is none."""
    first = tensors[0]
    flat: Tensor | None = first.flat if type(first) is ShardedTensor else None
    if flat is None:
        return None
    for tensor in tensors:
        if type(tensor) is not ShardedTensor or tensor.flat is not flat:
            return None
    return flat


def join(items: Any, runs: Sequence[PieceRun]) -> Any:
    """Return a list argument as one entry for each run; other arguments as they are."""
    if not isinstance(items, (list, tuple)):
        return items
    return [run.join(items) for run in runs]


def pieces_of(
    flats: Sequence[Tensor], runs: Sequence[PieceRun], specs: Sequence[ShardSpec]
) -> list[tuple[Tensor, Tensor | None, int]]:
    """Return (piece, flat, start of the flat) for each entry, of one flat for each run."""
    result: list[Any] = [None] * len(specs)
    for run, flat in zip(runs, flats, strict=True):
        for position in run.positions:
            start, stop = specs[position].piece_range
            result[position] = (flat[start - run.start : stop - run.start], flat, run.start)
    return [(flats[0][:0], None, 0) if found is None else found for found in result]


def find_runs(args: tuple[Any, ...]) -> list[PieceRun] | None:
    """Return how to run list operators on flats; None if entries are not such pieces at all."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    first = lists[0]
    if set(map(type, first)) != {ShardedTensor} or first[0].spec.is_traced:
        return None
    specs = tuple([item.spec for item in first])
    key = tuple(map(id, specs))
    known = _planned.get(key)
    runs = _remember(key, specs) if known is None else known.runs
    if not runs or not all(_follows(items, specs, runs) for items in lists):
        return None
    return runs


@dataclass(slots=True)
class _ListPlan:
    """The runs of some specs, which keeps none of them: with the first that goes, it goes."""

    runs: list[PieceRun]
    specs: list[weakref.ref[ShardSpec]]


_planned: dict[tuple[int, ...], _ListPlan] = {}  # By the ids of the specs.
_MAX_PLANS = 16


def _remember(key: tuple[int, ...], specs: Sequence[ShardSpec]) -> list[PieceRun]:
    if len(_planned) >= _MAX_PLANS:
        _planned.clear()

    def forget(_: object) -> None:
        _planned.pop(key, None)

    runs = _plan(specs)
    _planned[key] = _ListPlan(runs, [weakref.ref(spec, forget) for spec in specs])
    return runs


def _plan(specs: Sequence[ShardSpec]) -> list[PieceRun]:
    """Return the runs of neighbouring parameters; those without elements here are in none."""
    runs: list[PieceRun] = []
    before = None
    for position, spec in enumerate(specs):
        if spec.piece_numel == 0:
            continue
        start, stop = spec.piece_range
        follows = before is not None and spec.state_allocator is before.state_allocator is not None
        if follows and before is not None and spec.index == before.index + 1:
            runs[-1].positions.append(position)
            runs[-1].stop = stop
        else:
            runs.append(PieceRun([position], start, stop))
        before = spec
    return runs


def _follows(items: Sequence[Any], specs: Sequence[ShardSpec], runs: Sequence[PieceRun]) -> bool:
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
