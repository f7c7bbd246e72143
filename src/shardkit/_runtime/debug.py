"""What `FSDPModule.set_debug` turns on: collectives that move nothing, and lines about memory."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch

from shardkit import _compat
from shardkit._errors import listed
from shardkit.backends.events import InGraph

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shardkit._runtime.gathers import Gathers
    from shardkit._runtime.group import ParamGroup
    from shardkit._runtime.reductions import Reductions
    from shardkit._settings import RootSettings
    from shardkit.backends.base import AxisComm, CommStreams, Reduction
    from shardkit.backends.events import Event

_MIB = 2**20


class _Done:
    """`Handle` and `ReduceHandle` of what was done where it was started.

    Args:
        outs: Results of the collective.
        fence: Fence after the compute that made them.
    """

    def __init__(self, outs: Sequence[Tensor], fence: Event | None) -> None:
        self._outs = list(outs)
        self.fence = fence

    def wait(self) -> list[Tensor]:
        """Return the results."""
        return self._outs

    def wait_sent(self) -> None:
        """Nothing is on a wire."""


class DummyStreams:
    """Streams that move nothing between ranks: a rank takes what it has for what all have.

    Buffers, casts and results are as they would be, so a step differs by the collectives only.
    All of it runs on the compute stream.

    Args:
        streams: Streams that do everything else.
        groups: Groups whose values are worthless from the first dummy on.
        which: Name of the collectives, for the warning.
    """

    def __init__(self, streams: CommStreams, groups: Sequence[ParamGroup], which: str) -> None:
        self._streams = streams
        self._groups = groups
        self._which = which
        self._has_warned = False

    def __getattr__(self, name: str) -> Any:
        """Leave the rest to the streams."""
        return getattr(self._streams, name)

    def _note_use(self) -> None:
        for group in self._groups:
            for bucket in group.buckets:
                for spec in bucket.store.specs:
                    spec.is_worthless = True
        if not self._has_warned:
            self._has_warned = True
            names = listed((group.name for group in self._groups), str)
            msg = (
                f"{self._which} of {names} move nothing "
                f"between ranks (set_debug): losses, gradients and parameters are WRONG from this "
                f"step on. Measure time and memory with them, nothing else; then build the model "
                f"anew."
            )
            warnings.warn(msg, stacklevel=2)

    @_compat.without_dispatch_modes
    @torch.no_grad()
    def start_gather(
        self, gathers: Sequence[Any], axis: AxisComm, after: Sequence[Event | None], of: str
    ) -> _Done:
        """Fill every rank's range with this rank's."""
        del of
        self._note_use()
        for fence in after:
            self._streams.wait_fence(fence)
        if self._streams.region is not None:
            for gather in gathers:
                gather.wholes = self._traced(self._streams.region, gather, axis.size)
            return _Done([], InGraph())
        for gather in gathers:
            for chunk in gather.full.view(axis.size, -1):
                if chunk.data_ptr() != gather.shard.data_ptr():
                    chunk.copy_(gather.shard)
        return _Done([], self._streams.fence())

    def _traced(self, region: Any, gather: Any, size: int) -> list[Tensor]:
        parts = [region.enter_piece(piece) for piece in gather.pieces]
        if region.gathers_wait:
            parts = region.after_progress(parts)
        return [part.to(gather.dtype).repeat(size) for part in parts]

    @_compat.without_dispatch_modes
    @torch.no_grad()
    def start_reduce(self, reductions: Sequence[Reduction], of: str) -> _Done:
        """Take this rank's gradients for those of all; sums are of as many of them as ranks."""
        del of
        self._note_use()
        region = self._streams.region
        outs = []
        for reduction in reductions:
            axis, replicas = reduction.shard_axis, reduction.replicate_axis
            # Where one process traces all ranks, none of them is this one.
            own = reduction.send.view(axis.size, -1)[0 if region is not None else axis.rank]
            out = own * (axis.size * (replicas.size if replicas is not None else 1))
            if reduction.carry is not None:
                out = out.to(reduction.carry.dtype) + reduction.carry
            out = (out * reduction.scale).to(reduction.out_dtype)
            if reduction.hook is not None:
                reduction.hook(out)
            outs.append(out.cpu() if reduction.is_to_host else out)
        return _Done(outs, InGraph() if region is not None else self._streams.fence())


class MemoryReport:
    """Prints what exists of the unsharded parameters when that changes."""

    def __init__(self, message: str, gathers: Gathers, reductions: Reductions) -> None:
        self._message = message
        self._gathers = gathers
        self._reductions = reductions

    def __call__(self, what: str, groups: Sequence[ParamGroup]) -> None:
        """Print one line on stderr, as a whole."""
        gathers, reductions = self._gathers, self._reductions
        device = groups[0].device
        names = ", ".join(group.name for group in groups)
        line = (
            f"[{self._message} rank {groups[0].mesh.rank}] {what} {names}: unsharded "
            f"{gathers.nbytes / _MIB:.2f} MiB (peak {gathers.peak_nbytes / _MIB:.2f}), reductions "
            f"at most {reductions.peak_nbytes / _MIB:.2f}"
        )
        if device.type == "cuda":
            line += f", allocated {torch.cuda.memory_allocated(device) / _MIB:.2f}"
        sys.stderr.write(line + "\n")


def apply_debug(
    settings: RootSettings,
    groups: Sequence[ParamGroup],
    streams: CommStreams,
    gathers: Gathers,
    reductions: Reductions,
) -> None:
    """Have a root's gathers and reductions do what its settings say."""
    for user, is_dummy, which in (
        (gathers, settings.dummy_gathers, "gathers"),
        (reductions, settings.dummy_reductions, "reductions"),
    ):
        user.use_streams(DummyStreams(streams, groups, which) if is_dummy else streams)
    message = settings.memory_message
    report = None if message is None else MemoryReport(message, gathers, reductions)
    gathers.report = reductions.report = report
