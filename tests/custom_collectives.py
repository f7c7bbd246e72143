"""Collectives of users: they communicate as torch does, and count their calls."""

from __future__ import annotations

import typing

import torch
import torch.distributed as dist
from torch import Tensor

if typing.TYPE_CHECKING:
    from collections.abc import Sequence


class Gather:
    """A user's all-gather that counts."""

    calls = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(tuple(size), -1, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: typing.Any, async_op: bool
    ) -> typing.Any:
        type(self).calls += 1
        return dist.all_gather_into_tensor(
            output_tensor, input_tensor, group=group, async_op=async_op
        )


class Scatter(Gather):
    """A user's reduce-scatter that counts."""

    calls = 0

    def __call__(  # type: ignore[override]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: typing.Any,
        op: typing.Any,
        async_op: bool,
    ) -> typing.Any:
        type(self).calls += 1
        return dist.reduce_scatter_tensor(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
