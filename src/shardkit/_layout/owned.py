"""Whole matrices that belong to ranks: which rank has which, and in which batches they travel.

Pure integer arithmetic, equal on every rank; no torch. Matrices are given out by their cost, the
dearest first, each to the rank with the least to do so far (Graham 1969: at most 4/3 of the best)::

    cost        9  7  6  5  4  4        rank 0   9      4      = 13
                                        rank 1   7  5          = 12
                                        rank 2   6      4      = 10
"""

from __future__ import annotations

import heapq
import itertools
import math
from typing import TYPE_CHECKING

from shardkit._layout.flat import FlatLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

_ELEMENTWISE = 64
"""What reading and writing an element costs, in multiplications: what a vector costs at all."""


def owned_layout(shape: Sequence[int], owner: int, world_size: int) -> FlatLayout:
    """Return the layout of one tensor of which `owner` has all and others have nothing.

    It is a `FlatLayout` whose cuts lie before and behind the tensor, so all that knows layouts
    knows this one.
    """
    numel = math.prod(shape)
    return FlatLayout.of_one(shape, (owner * numel, numel, numel, world_size))


def matrix_cost(shape: Sequence[int]) -> int:
    """Return what the update of a parameter costs where nobody says it: multiplications.

    Of a matrix those of its Gram matrix, on the shorter side: what Muon, Shampoo and SOAP repeat
    some times. Of several matrices, stacked, those of all. What has fewer dimensions costs its
    elements.
    """
    numel = math.prod(shape)
    shorter = min(shape[-2:]) if len(shape) > 1 else 0
    return numel * (shorter + _ELEMENTWISE)


def assign_owners(
    costs: Sequence[float], num_ranks: int, loads: Sequence[float] | None = None
) -> list[int]:
    """Return which rank each matrix belongs to.

    Args:
        costs: Cost of each matrix, none below 0.
        num_ranks: Number of ranks, at least 1.
        loads: Load that each rank has already; None: none.

    Cost: O(M log(M N)) for M matrices on N ranks.
    """
    start = loads if loads is not None else [0] * num_ranks
    free = [(load, 0, rank) for rank, load in enumerate(start)]
    heapq.heapify(free)
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, count, rank = free[0]
        owners[index] = rank
        # Of equal loads the rank with fewer matrices: those that cost nothing are spread, too.
        heapq.heapreplace(free, (load + costs[index], count + 1, rank))
    return owners


def loads_of(costs: Sequence[float], owners: Sequence[int], num_ranks: int) -> list[float]:
    """Return what each rank has to do."""
    loads: list[float] = [0] * num_ranks
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return loads


def plan_batches(
    costs: Sequence[float],
    nbytes: Sequence[int],
    owners: Sequence[int],
    batch_nbytes: int,
) -> list[list[int]]:
    """Return the matrices of each batch, so that each rank has as much to do in one as in another.

    Args:
        costs: Cost of each matrix.
        nbytes: Size of each matrix in bytes.
        owners: Owner of each matrix.
        batch_nbytes: Bytes of a batch that one rank owns, about; a larger matrix travels alone.

    Returns:
        Indices, rising in each batch. Every matrix is in one batch; there are no batches without
        any.
    """
    by_owner: dict[int, list[int]] = {}
    for index, owner in enumerate(owners):
        by_owner.setdefault(owner, []).append(index)
    number = max(
        (
            min(len(indices), -(-sum(nbytes[i] for i in indices) // batch_nbytes))
            for indices in by_owner.values()
        ),
        default=0,
    )
    batches: list[list[int]] = [[] for _ in range(max(number, 1))]
    for indices in by_owner.values():
        for index, place in _spread(indices, costs, len(batches)).items():
            batches[place].append(index)
    return [sorted(batch) for batch in batches if batch]


def _spread(indices: Sequence[int], costs: Sequence[float], number: int) -> dict[int, int]:
    """Return the batch of each of a rank's matrices: by the middle of its place among the costs."""
    weights = [max(costs[i], 1) for i in indices]
    ends = list(itertools.accumulate(weights))
    return {
        index: min(int((end - weight / 2) * number / ends[-1]), number - 1)
        for index, weight, end in zip(indices, weights, ends, strict=True)
    }
