"""CPU ranks over gloo: the host waits, nothing has a stream order.

gloo's `reduce_scatter_tensor` is a whole all-reduce; exchanging the pieces by `all_to_all_single`
and adding them here takes half the time. Only collectives issued with ``async_op=True`` overlap.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardkit.backends.process_group import (
    ProcessGroupAxis,
    ProcessGroupBackend,
    all_gather_single,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shardkit.backends.base import Gather, Handle, Reduction


class WorkHandle:
    """Started gloo collectives."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Block until they are done; again is free."""
        for work in self._works:
            work.wait()
        self._works = ()


class ReduceHandle:
    """A reduce-scatter by exchange: the sum is done by who waits.

    The all-reduce over the replicate axis must not be issued before the exchange is waited for:
    gloo would run both at once.
    """

    def __init__(self, reductions: Sequence[Reduction]) -> None:
        self._reductions = reductions
        self._works = [_start_exchange(reduction) for reduction in reductions]

    def wait(self) -> None:
        """Block until every `out` holds the result; again is free."""
        for reduction, work in zip(self._reductions, self._works, strict=True):
            if work is not None:
                work.wait()
            _add_pieces(reduction)
        self._reductions, self._works = (), []


def _start_exchange(reduction: Reduction) -> dist.Work | None:
    if reduction.shard_axis.size == 1:
        return None
    assert isinstance(reduction.shard_axis, ProcessGroupAxis)
    return dist.all_to_all_single(
        reduction.receive, reduction.send, group=reduction.shard_axis.group, async_op=True
    )


def _add_pieces(reduction: Reduction) -> None:
    """Add the received pieces, all-reduce over the replicate axis, scale into `out`."""
    size, out, carry = reduction.shard_axis.size, reduction.out, reduction.carry
    pieces = reduction.send if size == 1 else reduction.receive
    assert pieces is not None
    replicate_axis = reduction.replicate_axis
    if replicate_axis is None and carry is None and pieces.dtype == out.dtype:
        _sum_rows(pieces.view(size, -1), out)
        out.mul_(reduction.scale)
        return
    # Sums of low-precision pieces are done in fp32; what crosses the replicate axis travels in
    # the dtype that the user chose for the wire.
    wide = torch.promote_types(pieces.dtype, torch.float32)
    total = torch.empty(out.numel(), dtype=wide, device=out.device)
    _sum_rows(pieces.view(size, -1), total)
    if carry is not None:
        total.add_(carry)
    if replicate_axis is not None:
        total = total.to(pieces.dtype)
        replicate_axis.all_reduce(total, "sum")
    torch.mul(total, reduction.scale, out=total)
    out.copy_(total)


def _sum_rows(rows: Tensor, out: Tensor) -> None:
    if len(rows) == 1:
        out.copy_(rows[0])
    elif len(rows) == 2 and rows.dtype == out.dtype:  # noqa: PLR2004 - the pair has its own kernel
        torch.add(rows[0], rows[1], out=out)
    else:
        torch.sum(rows, 0, dtype=out.dtype, out=out)


class HostLanes:
    """gloo has no streams: order comes from waiting."""

    def fence(self) -> None:
        """Nothing runs behind the host's back."""

    def allocating(self) -> contextlib.nullcontext[None]:
        """Any time is right."""
        return contextlib.nullcontext()

    def start_gather(
        self, gathers: Sequence[Gather], axis: ProcessGroupAxis, after: Sequence[None]
    ) -> Handle:
        """Cast this rank's range, then gather in place."""
        del after
        works = []
        for gather in gathers:
            gather.own.copy_(gather.shard)
            if axis.size > 1:
                work = all_gather_single(
                    gather.full, gather.own, group=axis.group, async_op=True
                )
                works.append(work)
        return WorkHandle(works)

    def start_reduce(self, reductions: Sequence[Reduction]) -> Handle:
        """Exchange the pieces; `wait` adds them."""
        return ReduceHandle(reductions)

    def start_all_reduce_max(self, tensor: Tensor, axes: Sequence[ProcessGroupAxis]) -> Handle:
        """Start over one axis; over several, one after another, waiting between."""
        for axis in axes[:-1]:
            axis.all_reduce(tensor, "max")
        last = axes[-1]
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=last.group, async_op=True)
        return WorkHandle([work])


class GlooBackend(ProcessGroupBackend):
    """Meshes of device type ``"cpu"``."""

    needs_receive = True

    def make_lanes(self) -> HostLanes:
        """Return lanes without streams."""
        return HostLanes()
