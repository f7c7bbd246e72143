"""Collectives on XLA: traced where they are started; the compiler orders and overlaps them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardkit import _compat
from shardkit.backends.base import CommStreams
from shardkit.backends.events import InGraph

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shardkit.backends.base import AxisComm, Reduction
    from shardkit.backends.events import Event
    from shardkit.backends.traced import TracedGather


class Traced:
    """`Handle` and `ReduceHandle` of what is part of the graph by now."""

    fence: Event | None = InGraph()

    def __init__(self, outs: Sequence[Tensor] = ()) -> None:
        self._outs = list(outs)

    def wait(self) -> list[Tensor]:
        """Return the results."""
        return self._outs

    def wait_sent(self) -> None:
        """Nothing is on a wire."""


class XlaStreams(CommStreams):
    """`CommStreams` that trace.

    Args:
        region: Region that does the collectives.
    """

    region: Any

    def __init__(self, region: Any) -> None:
        self.region = region

    @_compat.without_dispatch_modes
    @torch.no_grad()
    def start_gather(
        self,
        gathers: Sequence[TracedGather],
        axis: AxisComm,
        after: Sequence[Event | None],
        of: str,
    ) -> Traced:
        """Trace gathers, each after the progress of now in the graph, and one all-gather each."""
        for gather in gathers:
            parts = [self.region.enter_piece(piece) for piece in gather.pieces]
            if self.region.gathers_wait:
                parts = self.region.after_progress(parts)
            parts = [part.to(gather.dtype) for part in parts]
            gather.wholes = self.region.all_gather(parts, gather.tail_numel, gather.bucket_id)
        return Traced()

    @_compat.without_dispatch_modes
    @torch.no_grad()
    def start_reduce(self, reductions: Sequence[Reduction], of: str) -> Traced:
        """Trace reductions: one reduce-scatter each, one all-reduce with a replicate axis."""
        outs = []
        for reduction in reductions:
            carry, send, scale = reduction.carry, reduction.send, reduction.scale
            if reduction.before is not None:
                send, scale = send * reduction.before, scale / reduction.before
            early = scale if carry is None else 1.0
            out = self.region.reduce_scatter(send, early, reduction.bucket_id)
            if carry is not None:
                factor = 1.0 if reduction.before is None else reduction.before
                out = (out.to(carry.dtype) + carry * factor) * scale
            if reduction.replicate_axis is not None and reduction.replicate_axis.size > 1:
                out = self.region.all_reduce(out)
            if reduction.hook is not None:
                reduction.hook(out)
            outs.append(out.to(reduction.out_dtype))
        return Traced(outs)
