"""Protocols of a user's own collectives, for `FSDPModule.set_custom_all_gather` and the like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor


class Comm(Protocol):
    """Where a user's own collective has its buffers: as FSDP2's ``Comm``."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a buffer that is sent or received."""


class AllGather(Comm, Protocol):
    """A user's own all-gather: as FSDP2's ``AllGather``."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        async_op: bool = False,  # noqa: FBT001, FBT002 - FSDP2's signature
    ) -> Any:
        """Gather 1-D `input_tensor` of all ranks of a process group; return the work, or None."""


class ReduceScatter(Comm, Protocol):
    """A user's own reduce-scatter: as FSDP2's ``ReduceScatter``."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,  # noqa: FBT001, FBT002 - FSDP2's signature
    ) -> Any:
        """Sum `input_tensor` over a process group, scatter it; return the work, or None."""


@dataclass(frozen=True, slots=True)
class GradientPiece:
    """Where the gradient of one parameter lies in this rank's range of a bucket.

    Attributes:
        name: Name of the parameter.
        shape: Shape of the whole parameter; with tensor parallelism, of this rank's part of it.
        start: First element of the flattened parameter that is here.
        stop: End of the elements; equal to `start` where nothing is here.
        offset: Position of the first element in the range.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int


class SumAxis(Protocol):
    """The ranks that an `AllReduce` sums over.

    Attributes:
        size: Number of ranks.
        rank: Position of this rank.
    """

    size: int
    rank: int

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """Reduce `tensor` in place; `op` is ``"sum"``, ``"max"``, ``"min"`` or ``"product"``."""


class AllReduce(Protocol):
    """A user's own all-reduce over the replicate axis: for gradients that travel compressed.

    It is called outside of autocast. It may have a method ``settle_unused(pieces, unused)``, which
    is called when a synced backward is over, once for each bucket that was summed in it. ``pieces``
    are as in the call. ``unused`` are the names, equal on all ranks, of parameters that no rank
    used in the backward: their sums became no gradient. A function around a `PowerSGD` does not
    pass that on: then errors of such parameters are lost.
    """

    def __call__(
        self, tensor: Tensor, pieces: Sequence[GradientPiece], axis: SumAxis, unit: float
    ) -> object:
        """Replace `tensor` by its sum over the axis, equal bits on all of its ranks.

        Args:
            tensor: Gradients of this rank's range of a bucket, 1-D, summed over the shard axis.
            pieces: Pieces that lie in it, and where; between pieces there may be padding, which is
                zero.
            axis: Ranks to sum over. Their ranges are of the same parameters.
            unit: Factor that turns the sum into the gradient.
        """
