"""The arithmetic of one reduction on an accelerator: who divides, when, and in which dtype."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardkit.backends.accelerator_axis import AcceleratorAxis
from shardkit.backends.process_group import custom_reduce_scatter, reduce_scatter_single

if TYPE_CHECKING:
    from torch import Tensor

    from shardkit.backends.base import Reduction


class Sums:
    """The arithmetic of one reduction, in steps that run on the current stream.

    The engine divides if it can and if the sum is to be divided by the number of ranks; then a
    reduction in the dtype of the result takes no kernel but the collective's. fp16 would overflow
    in a sum, or underflow before it, so there half of the division comes before.

    Attributes:
        replicate_axis: All-reduce over it; None: there is none, or one rank on it.
        can_be_result: The sum over the shard axis may be written where the result is wanted.
    """

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction
        shard, replicate = reduction.shard_axis, reduction.replicate_axis
        assert isinstance(shard, AcceleratorAxis)
        assert replicate is None or isinstance(replicate, AcceleratorAxis)
        self._shard_axis = shard
        self.replicate_axis = replicate if replicate is not None and replicate.size > 1 else None
        axes = [axis for axis in (shard, self.replicate_axis) if axis is not None and axis.size > 1]
        num_ranks = math.prod(axis.size for axis in axes)
        is_half = reduction.send.dtype == torch.float16
        is_own = reduction.comm is not None or reduction.all_reduce is not None
        scales_before = is_half or reduction.before is not None
        is_plain = not is_own and reduction.carry is None and not scales_before
        averages = all(axis.averages for axis in axes) and not reduction.force_sum
        self._averages = is_plain and averages and reduction.scale == 1.0 / num_ranks
        self._op = dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM
        self._before = math.sqrt(reduction.scale) if is_half else 1.0
        if reduction.before is not None:
            self._before = reduction.before
        self._after = 1.0 if self._averages else reduction.scale / self._before
        self.can_be_result = (
            is_plain and shard.size > 1 and reduction.out_dtype == reduction.send.dtype
        )

    def reduce_scatter(self, into: Tensor | None) -> Tensor:
        """Sum over the shard axis, and add sums of earlier backwards.

        Args:
            into: Where the sum is wanted. None: in this rank's range of the send buffer, which is
                free for it.

        Returns:
            The sum: `into`, or that range, or the carry.
        """
        reduction, axis = self._reduction, self._shard_axis
        send = reduction.send
        if self._before != 1.0:
            send.mul_(self._before)
        own = send.view(axis.size, -1)[axis.rank]
        total = own if into is None else into
        if axis.size > 1 and reduction.comm is not None:
            custom = custom_reduce_scatter(reduction, axis.reduce_group, async_op=False)
            total.copy_(custom.received)
        elif axis.size > 1:
            reduce_scatter_single(
                _as_real(total), _as_real(send), op=self._op, group=axis.reduce_group
            )
        elif into is not None:
            total.copy_(own)
        return self._add_carry(total)

    def _add_carry(self, total: Tensor) -> Tensor:
        """Add sums of earlier backwards in their dtype; what crosses an axis is narrow again."""
        carry = self._reduction.carry
        if carry is None:
            return total
        if self._before != 1.0:
            carry.mul_(self._before)
        wide = carry.add_(total)
        return wide if self.replicate_axis is None else total.copy_(wide)

    def all_reduce(self, total: Tensor) -> None:
        """Sum over the replicate axis, in place."""
        assert self.replicate_axis is not None
        if self._reduction.all_reduce is not None:
            self._reduction.all_reduce(total, self._after)
            return
        dist.all_reduce(_as_real(total), op=self._op, group=self.replicate_axis.group)

    def finish(self, total: Tensor, result: Tensor) -> None:
        """Scale the sum and put it where the result is wanted."""
        if self._after == 1.0:
            if total is not result:
                result.copy_(total)
        elif total.dtype == result.dtype:
            torch.mul(total, self._after, out=result)
        else:
            result.copy_(total).mul_(self._after)


def _as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of real numbers, which is what engines know."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
