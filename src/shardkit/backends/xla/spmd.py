"""SPMD mode: one process traces the program of all ranks and has the pieces of all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardkit.backends.xla.backend import XlaBackend
from shardkit.backends.xla.spmd_region import SpmdRegion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class SpmdAxis:
    """One axis, all of whose ranks this process computes for: what it knows, all know.

    Args:
        size: Number of ranks.
    """

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, full: Tensor, own: Tensor) -> None:
        """One process has everything."""
        full.copy_(own)

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """One process has everything."""

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """One process has everything."""

    def exchange(self, item: Any) -> list[Any]:
        """Return what the only process has."""
        return [item]


class SpmdBackend(XlaBackend):
    """`Backend` of all XLA devices of this process.

    Args:
        shape: Shape of the mesh.
    """

    is_spmd = True
    why_no_groups = "one process computes for all ranks"

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__(SpmdRegion(shape), [SpmdAxis(size) for size in shape])
        self.process_axis = SpmdAxis(1)
        # The loss is computed outside, of the outputs of all ranks: a mean over all of them.
        self.gradient_weight = float(self.region.num_ranks)
