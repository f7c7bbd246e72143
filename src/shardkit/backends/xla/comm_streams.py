"""Collectives on XLA: traced where they are started; the compiler orders and overlaps them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardkit import _compat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shardkit.backends.base import AxisComm, Reduction, TracedGather


class Traced:
    """`Handle` and `ReduceHandle` of what is part of the graph by now."""

    fence = "traced"
    is_of_host = True

    def __init__(self, outs: Sequence[Tensor] = ()) -> None:
        self._outs = list(outs)

    def wait(self) -> list[Tensor]:
        """Return the results."""
        return self._outs

    def is_done(self) -> bool:
        """What is part of the graph needs no waiting."""
        return True

    def wait_sent(self) -> None:
        """Nothing is on a wire."""


class XlaStreams:
    """`CommStreams` that trace.

    Args:
        region: Does the collectives.
    """

    def __init__(self, region: Any) -> None:
        self.region = region

    def watch(self, progress: Any) -> None:
        """One process does not wait for another."""

    def allocate_from(self, axes: Sequence[AxisComm]) -> None:
        """The compiler allocates."""

    def separate_reduce(self, axis: AxisComm, *, enable: bool) -> None:
        """The compiler has no queues."""

    def new_storage(self, nbytes: int) -> torch.UntypedStorage:
        """Never called: nothing that is traced has a storage."""
        raise NotImplementedError(nbytes)

    def resize_storage(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Never called: nothing that is traced has a storage."""
        raise NotImplementedError(storage, nbytes)

    def after_optimizer(self, event: Any) -> None:
        """The graph knows what depends on what."""

    def follow_compute(self) -> None:
        """The graph knows what depends on what."""

    def fence(self) -> None:
        """The graph knows what depends on what."""

    def wait_fence(self, fence: Any) -> None:
        """The graph knows what depends on what."""

    def join(self) -> None:
        """The graph knows what depends on what."""

    def settle_host_reads(self, *, compute: bool) -> None:
        """Nothing is offloaded."""

    @_compat.without_dispatch_modes
    @torch.no_grad()
    def start_gather(
        self, gathers: Sequence[TracedGather], axis: AxisComm, after: Sequence[Any]
    ) -> Traced:
        """Trace gathers, each after the progress of now in the graph, and one all-gather each."""
        del axis, after
        for gather in gathers:
            parts = [self.region.enter_piece(piece) for piece in gather.pieces]
            if self.region.gathers_wait:
                parts = self.region.after_progress(parts)
            parts = [part.to(gather.dtype) for part in parts]
            gather.wholes = self.region.all_gather(parts, gather.tail_numel, gather.bucket_id)
        return Traced()

    @_compat.without_dispatch_modes
    @torch.no_grad()
    def start_reduce(self, reductions: Sequence[Reduction]) -> Traced:
        """Trace reductions: one reduce-scatter each, one all-reduce with a replicate axis."""
        outs = []
        for reduction in reductions:
            carry = reduction.carry
            early = reduction.scale if carry is None else 1.0
            out = self.region.reduce_scatter(reduction.send, early, reduction.bucket_id)
            if carry is not None:
                out = (out.to(carry.dtype) + carry) * reduction.scale
            if reduction.replicate_axis is not None and reduction.replicate_axis.size > 1:
                out = self.region.all_reduce(out)
            if reduction.hook is not None:
                reduction.hook(out)
            outs.append(out.to(reduction.out_dtype))
        return Traced(outs)

    def start_all_reduce_max(self, tensor: Tensor, axes: Sequence[AxisComm]) -> Traced:
        """Never called: steps are not compared, since a graph is the same on all ranks."""
        raise NotImplementedError(tensor, axes)
