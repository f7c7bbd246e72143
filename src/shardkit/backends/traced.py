"""What only tracing backends have: regions, and gathers that are part of a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(slots=True)
class TracedGather:
    """One bucket to gather on a backend that traces (`Backend.is_traced`).

    Attributes:
        pieces: 1-D, storage dtype, one per parameter, as the bucket keeps them.
        dtype: Cast to it before they travel.
        tail_numel: Elements to put behind the pieces of every rank, if they travel as one.
        bucket_id: Number of the bucket, equal in every step.
        wholes: Result: 1-D, all ranks' parts of each piece, end to end; none shares memory with
            another.
    """

    pieces: list[Tensor]
    dtype: torch.dtype
    tail_numel: int
    bucket_id: int
    wholes: list[Tensor] | None = None


class Region(Protocol):
    """What is traced for each rank.

    Where one process has all ranks' tensors (`is_spmd`), a tensor is whole outside of the region.
    Inside it is what one rank has. `enter` and `leave` of a batch, of something shared and of a
    mean are differentiable. On other meshes a process is a rank, and nothing is entered or left.
    """

    is_spmd: bool
    num_ranks: int
    """Number of parts that a batch is split into when it enters."""
    device: torch.device
    drawing: Any
    """The last context of `draw_apart`; its `again()` repeats what is drawn from now on."""

    gathers_wait: bool
    """Gathers come after `progress` in the graph."""

    def after_progress(self, parts: list[Tensor]) -> list[Tensor]:
        """Return copies that are there only when `progress` is; the compiler cannot merge them."""

    def enter_batch(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows of `tensor`, of all ranks' axes together."""

    def leave_batch(self, tensor: Tensor) -> Tensor:
        """Return all ranks' rows."""

    def enter_shared(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, equal on all ranks; its gradient is the sum of theirs."""

    def leave_shared(self, tensor: Tensor) -> Tensor:
        """Return what all ranks have alike. Not differentiable."""

    def leave_mean(self, tensor: Tensor) -> Tensor:
        """Return the mean over the ranks of a 0-dim floating-point tensor."""

    def agree(self, tensor: Tensor) -> Tensor:
        """Return the mean over the ranks, the maximum of integers, on every rank. In the region.

        Cost: one all-reduce.
        """

    def progress(self, tensor: Tensor | None) -> None:
        """Let gathers from now on come after `tensor` in the graph; None: after nothing."""

    def forget_collectives(self) -> None:
        """Do not order later collectives after those that were traced before.

        The earlier ones may have run by now, because the host read a result. An order would run
        them again, and make another graph each time.
        """

    def draw_apart(self) -> Any:
        """Return a context in which every rank draws random numbers of its own."""

    def finish_graph(self) -> None:
        """Run what has been traced."""
