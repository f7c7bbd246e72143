"""Matrices in a range of gradients, and sums of them at low rank.

Pure but for the sums that it is given: what is sent is one tensor of all first factors, and one of
all second ones.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from shardkit._custom_comm import GradientPiece


@dataclass(frozen=True, slots=True)
class Matrix:
    """Whole rows of one parameter in a rank's range, to be sent at low rank.

    Attributes:
        name: Name of the parameter.
        start: Position of the first element in the range.
        rows: Number of rows.
        columns: Elements of a row: all dims but the first.
        rank: Rank of the approximation.
    """

    name: str
    start: int
    rows: int
    columns: int
    rank: int

    @property
    def stop(self) -> int:
        """Position behind the last element."""
        return self.start + self.rows * self.columns

    def view(self, flat: Tensor) -> Tensor:
        """Return the matrix in a range."""
        return flat[self.start : self.stop].view(self.rows, self.columns)


def find_matrices(
    pieces: Sequence[GradientPiece],
    rank_of: int | Callable[[str, tuple[int, int]], int],
    min_rate: float,
) -> list[Matrix]:
    """Return the matrices for which low rank sends at least `min_rate` times fewer numbers.

    A cut may fall inside of a row: what is left of a row at either end is in no matrix.

    Args:
        pieces: Parameters, and where they lie in the range.
        rank_of: A rank, or a function of a parameter's name and (rows, columns).
        min_rate: Least rate.
    """
    result = []
    for piece in pieces:
        if len(piece.shape) < 2 or piece.start == piece.stop:  # noqa: PLR2004 - a matrix
            continue
        columns = math.prod(piece.shape[1:])
        first, last = -(-piece.start // columns), piece.stop // columns
        rows = last - first
        if rows < 1:
            continue
        wanted = rank_of(piece.name, (rows, columns)) if callable(rank_of) else rank_of
        rank = min(wanted, rows, columns)
        if rank > 0 and (rows + columns) * rank * min_rate <= rows * columns:
            start = piece.offset + first * columns - piece.start
            result.append(Matrix(piece.name, start, rows, columns, rank))
    return result


def rest_of(matrices: Sequence[Matrix], numel: int) -> list[tuple[int, int]]:
    """Return the ranges of [0, numel) that are in no matrix."""
    ranges, at = [], 0
    for matrix in sorted(matrices, key=lambda each: each.start):
        if matrix.start > at:
            ranges.append((at, matrix.start))
        at = matrix.stop
    return [*ranges, (at, numel)] if at < numel else ranges


def random_factor(matrix: Matrix, seed: int, iteration: int, like: Tensor) -> Tensor:
    """Return a second factor to begin with: equal on all ranks that have the same matrix."""
    text = f"{seed}/{iteration}/{matrix.name}".encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())
    generator = torch.Generator().manual_seed(number)
    factor = torch.randn(matrix.columns, matrix.rank, generator=generator, dtype=torch.float64)
    return like.new_empty(factor.shape).copy_(factor)


def sum_at_low_rank(
    values: Sequence[Tensor], seconds: Sequence[Tensor], sum_up: Callable[[Tensor], object]
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return factors of the sums of matrices over ranks: one step of the power iteration.

    Args:
        values: Matrices of this rank.
        seconds: Second factors to begin with, (columns, rank) each, equal on all ranks.
        sum_up: Function that sums a 1-D tensor over the ranks, in place, to equal bits on all.

    Returns:
        First factors (rows, rank), orthonormal columns; second factors (columns, rank), so that
        first times the transpose of second is the approximation of the sum; whether all of it is
        finite, 0-dim.

    Cost: two sums, of rank * rows and rank * columns numbers for each matrix.
    Source: Vogels et al. 2019, arXiv:1905.13727, algorithm 1.
    """
    starts = [torch.linalg.qr(second)[0] for second in seconds]
    firsts = [value @ start for value, start in zip(values, starts, strict=True)]
    firsts = [torch.linalg.qr(first)[0] for first in _summed(firsts, sum_up)]
    products = [value.T @ first for value, first in zip(values, firsts, strict=True)]
    results = _summed(products, sum_up)
    is_finite = torch.stack([result.isfinite().all() for result in (*firsts, *results)]).all()
    return firsts, results, is_finite


def _summed(parts: Sequence[Tensor], sum_up: Callable[[Tensor], object]) -> list[Tensor]:
    """Return sums over the ranks of several tensors, sent as one."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    sum_up(flat)
    sizes = [part.numel() for part in parts]
    return [chunk.view(part.shape) for chunk, part in zip(flat.split(sizes), parts, strict=True)]
