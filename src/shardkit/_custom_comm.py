"""Protocols of a user's own collectives, for `FSDPModule.set_custom_all_gather` and the like."""

from __future__ import annotations

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
