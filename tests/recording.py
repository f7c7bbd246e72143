"""A backend that runs no process: it logs every collective, so schedules are tested as lists.

One process plays one rank of a mesh of any shape. What other ranks would have sent is taken to be
zero in gathers and equal to this rank's own in reductions, so a model runs through, with numbers
that mean nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from shardkit._mesh import DeviceMesh
from shardkit.backends.base import AxisComm, Backend, CommStreams, Gather, Reduction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class RecordingAxis:
    """`AxisComm` of one axis; see the module's docstring."""

    def __init__(self, log: list[tuple[str, int]], size: int, rank: int) -> None:
        self.log = log
        self.size = size
        self.rank = rank

    def note(self, what: str, tensor: Tensor) -> None:
        """Log a collective and the elements of its whole tensor."""
        if self.size > 1:
            self.log.append((what, tensor.numel()))

    def all_gather(self, full: Tensor, own: Tensor) -> None:
        """Log."""
        del own
        self.note("all_gather", full)

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """Log; sums as if all ranks had the same."""
        self.note(f"all_reduce_{op}", tensor)
        if op == "sum":
            tensor.mul_(self.size)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Log."""
        del src
        self.note("broadcast", tensor)

    def exchange(self, item: Any) -> list[Any]:
        """Return the item once per rank."""
        return [item] * self.size


class RecordingHandle:
    """Work that is logged when it is waited for."""

    fence = None
    was_copied = False
    is_of_host = True

    def __init__(
        self, log: list[tuple[str, int]], what: str, numel: int, outs: list[Tensor]
    ) -> None:
        self._log = log
        self._entry = (what, numel)
        self._outs = outs

    def wait_sent(self) -> None:
        """Nothing is sent."""

    def wait(self) -> list[Tensor]:
        """Log the waiting."""
        self._log.append(self._entry)
        return self._outs


class RecordingStreams(CommStreams):
    """`CommStreams` that log starting and waiting apart."""

    def __init__(self, log: list[tuple[str, int]]) -> None:
        self._log = log

    def after_optimizer(self, event: Any) -> None:
        """Log."""
        del event
        self._log.append(("after optimizer", 0))

    def start_gather(
        self, gathers: Sequence[Gather], axis: AxisComm, after: Sequence[Any], of: str
    ) -> RecordingHandle:
        """Log; fill other ranks' ranges with zeros."""
        del axis, after, of
        numel = 0
        for gather in gathers:
            gather.full.zero_()
            gather.own.copy_(gather.shard)
            numel += gather.full.numel()
        self._log.append(("start all_gather", numel))
        return RecordingHandle(self._log, "wait all_gather", numel, [])

    def start_reduce(self, reductions: Sequence[Reduction], of: str) -> RecordingHandle:
        """Log; reduce as if all ranks had sent the same."""
        del of
        outs, numel = [], 0
        for reduction in reductions:
            axis = reduction.shard_axis
            if axis.size > 1:
                reduction.room()
            own = reduction.send.view(axis.size, -1)[axis.rank]
            factor = axis.size * (reduction.replicate_axis.size if reduction.replicate_axis else 1)
            outs.append(own.to(reduction.out_dtype) * (factor * reduction.scale))
            if reduction.hook is not None:
                reduction.hook(outs[-1])
            numel += reduction.send.numel()
        self._log.append(("start reduce_scatter", numel))
        if any(r.replicate_axis is not None and r.replicate_axis.size > 1 for r in reductions):
            self._log.append(("start all_reduce", sum(out.numel() for out in outs)))
        return RecordingHandle(self._log, "wait reduce_scatter", numel, outs)

    def start_all_reduce_max(
        self, tensor: Tensor, axes: Sequence[AxisComm], of: str
    ) -> RecordingHandle:
        """Log."""
        del axes, of
        self._log.append(("start check", tensor.numel()))
        return RecordingHandle(self._log, "wait check", tensor.numel(), [])


class RecordingBackend(Backend):
    """`Backend` of a mesh in one process."""

    def __init__(
        self, shape: Sequence[int], coordinate: Sequence[int], log: list[tuple[str, int]]
    ) -> None:
        self.device = torch.device("cpu")
        self.log = log
        self._split_axes: dict[tuple[int, int], RecordingAxis] = {}
        self._axes = [
            RecordingAxis(log, size, rank) for size, rank in zip(shape, coordinate, strict=True)
        ]

    def process_group(self, axis: int) -> None:
        """There is none."""
        del axis

    def axis(self, axis: int) -> RecordingAxis:
        """Return the communicator of one axis."""
        return self._axes[axis]

    def receive_chunks(self, axis: AxisComm) -> int:
        """As gloo: one piece from every other rank."""
        return axis.size - 1

    def for_axes(self, axes: Sequence[int]) -> RecordingBackend:
        """Return the backend of a submesh; it shares the log."""
        sub = RecordingBackend((), (), self.log)
        sub._axes = [self._axes[axis] for axis in axes]
        return sub

    def split_axis(self, axis: int, size: int) -> RecordingAxis:
        """Return the communicator of neighbours on one axis."""
        whole = self._axes[axis]
        if (axis, size) not in self._split_axes:
            self._split_axes[axis, size] = RecordingAxis(self.log, size, whole.rank % size)
        return self._split_axes[axis, size]

    def make_streams(
        self, axes: Sequence[AxisComm], share: CommStreams | None = None
    ) -> RecordingStreams:
        """Return streams that log."""
        del axes, share
        return RecordingStreams(self.log)


def recording_mesh(
    shape: Sequence[int], *, rank: int = 0, mesh_dim_names: Sequence[str] | None = None
) -> tuple[DeviceMesh, list[tuple[str, int]]]:
    """Return a mesh that logs, seen from `rank`, and its log of (what, elements)."""
    log: list[tuple[str, int]] = []
    coordinate: list[int] = []
    rest = rank
    for size in reversed(shape):
        rest, on_axis = divmod(rest, size)
        coordinate.insert(0, on_axis)
    mesh = DeviceMesh(
        "cpu",
        tuple(shape),
        tuple(range(math.prod(shape))),
        tuple(mesh_dim_names) if mesh_dim_names else None,
        rank,
        RecordingBackend(shape, coordinate, log),
    )
    return mesh, log
