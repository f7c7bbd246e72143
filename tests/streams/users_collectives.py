"""Collectives of a user's, on the simulated accelerator."""

from __future__ import annotations

import typing

import torch
import torch.distributed as dist
from torch import Tensor


class CopyingComm:
    """A user's collectives, in buffers of their own."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []  # Size of each buffer, in bytes.

    def allocate(self, size: typing.Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory."""
        made = torch.empty(*size, dtype=dtype, device=device)
        self.nbytes.append(made.nbytes)
        return made


class Gathers(CopyingComm):
    """An all-gather."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: typing.Any, **_: object
    ) -> typing.Any:
        """Gather."""
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=True)


class FailingGathers(Gathers):
    """An all-gather that raises when it is told to."""

    raises = False

    def __call__(self, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        """Gather, or raise."""
        if self.raises:
            message = "on purpose"
            raise ValueError(message)
        return super().__call__(*args, **kwargs)


class Scatters(CopyingComm):
    """A reduce-scatter."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: typing.Any,
        op: typing.Any,
        **_: object,
    ) -> typing.Any:
        """Reduce and scatter."""
        return dist.reduce_scatter_tensor(
            output_tensor, input_tensor, op=op, group=group, async_op=True
        )
