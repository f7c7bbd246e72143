"""Ranks as threads of one process, which meet in their collectives: for laws with many examples."""

from __future__ import annotations

import functools
import operator
import threading
import typing

import torch
from torch import Tensor

from shardkit._layout import FlatLayout
from shardkit._mesh import DeviceMesh
from shardkit._tensor.spec import ShardSpec
from shardkit.backends.base import Backend

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": operator.add,
    "product": operator.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
TIMEOUT_S = 20


class Meeting:
    """Where the ranks put what they send."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=TIMEOUT_S)
        self.sent: list[typing.Any] = [None] * world_size

    def exchange(self, rank: int, item: typing.Any) -> list[typing.Any]:
        """Return what every rank sent."""
        self.sent[rank] = item
        self.barrier.wait()
        items = list(self.sent)
        self.barrier.wait()
        return items


class ThreadedAxis:
    """`AxisComm` of one thread; refuses, as ranks do, to pair unlike collectives."""

    def __init__(self, meeting: Meeting, size: int, rank: int) -> None:
        self.meeting, self.size, self.rank = meeting, size, rank
        self.log: list[str] = []

    def _exchange(self, kind: str, tensor: Tensor) -> list[Tensor]:
        self.log.append(kind)
        found = self.meeting.exchange(self.rank, (kind, tensor.detach().clone()))
        assert {(each[0], each[1].dtype) for each in found} == {(kind, tensor.dtype)}, found
        return [each[1] for each in found]

    def all_gather(self, full: Tensor, own: Tensor) -> None:
        """See `AxisComm.all_gather`."""
        full.copy_(torch.cat(self._exchange("all-gather", own)))

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """See `AxisComm.all_reduce`."""
        tensor.copy_(functools.reduce(_OPS[op], self._exchange(f"all-reduce {op}", tensor)))

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """See `AxisComm.broadcast`."""
        tensor.copy_(self._exchange("broadcast", tensor)[src])


class ThreadedBackend(Backend):
    """`Backend` of a mesh of one axis."""

    def __init__(self, axis: ThreadedAxis) -> None:
        self.device = torch.device("cpu")
        self._axis = axis

    def process_group(self, axis: int) -> None:
        """There is none."""
        del axis

    def axis(self, axis: int) -> typing.Any:
        """Return the only one."""
        del axis
        return self._axis

    def for_axes(self, axes: Sequence[int]) -> ThreadedBackend:
        """Return itself."""
        del axes
        return self

    def split_axis(self, axis: int, size: int) -> typing.NoReturn:
        """Raise: parameters are cut over all ranks."""
        raise NotImplementedError(axis, size)

    def make_streams(self, axes: typing.Any, share: typing.Any = None) -> typing.NoReturn:
        """Raise: no module is sharded."""
        raise NotImplementedError(axes, share)


Rank = tuple[ThreadedAxis, "Callable[[Tensor, str], typing.Any]"]


def run_ranks(
    world_size: int, shapes: Sequence[tuple[int, ...]], fn: Callable[[list[ShardSpec]], object]
) -> list[typing.Any]:
    """Call ``fn(specs)`` in a thread per rank and return the results.

    Args:
        world_size: Number of ranks.
        shapes: Of parameters that lie in one bucket, in this order.
        fn: Gets how each is cut on the rank.
    """
    meeting = Meeting(world_size)
    # Of so large items cuts fall at any element.
    layout = FlatLayout.plan(shapes, world_size=world_size, itemsize=16)
    results: list[typing.Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        axis = ThreadedAxis(meeting, world_size, rank)
        ranks = tuple(range(world_size))
        mesh = DeviceMesh("cpu", (world_size,), ranks, None, rank, ThreadedBackend(axis))
        specs = [
            ShardSpec(layout, index, mesh=mesh, axis=axis, name=f"p{index}")
            for index in range(len(shapes))
        ]
        try:
            results[rank] = fn(specs)
        except BaseException as error:  # noqa: BLE001 - raised where the threads are awaited
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not errors, "the ranks waited for each other"
    return results
