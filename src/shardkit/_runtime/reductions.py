"""Gradients of the groups of one root: which wait to be reduced, which reductions are under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardkit._params.gradients import start_reduce
from shardkit._runtime.ranges import named_range, names_of
from shardkit._schedule.reduce_order import ReduceOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from shardkit._params.bucket_gradients import BucketGradients
    from shardkit._params.memory import SlotPool
    from shardkit._runtime.agreement import UsedParameters
    from shardkit._runtime.group import ParamGroup
    from shardkit.backends.base import CommStreams


class Reductions:
    """Starts reductions in the order of `ReduceOrder`, and waits for them in the order of starting.

    Args:
        groups: All groups, by number.
        streams: Streams of the reductions.
        slots: Memory of send and receive buffers.
        used: Record of the parameters that any rank used.
        batch_nbytes: Limit in bytes: neighbours that are smaller than this together are sent
            together.
        before_start: Function called before reductions are started.

    Attributes:
        order: Order in which groups are reduced.
        report: Report of what is reduced, if there is one.
        peak_nbytes: Largest size that buffers of reductions ever took in bytes.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        streams: CommStreams,
        slots: SlotPool,
        used: UsedParameters,
        *,
        batch_nbytes: int,
        before_start: Callable[[], None],
    ) -> None:
        self.order = ReduceOrder()
        self.peak_nbytes = 0
        self._groups = groups
        self.report: Callable[[str, Sequence[ParamGroup]], None] | None = None
        self._streams = streams
        self._slots = slots
        self._used = used
        self._batch_nbytes = batch_nbytes
        backend = groups[0].mesh.backend
        self._is_host_synchronous = backend.is_host_synchronous
        self._holds_layers = backend.copies_gradients_together
        self._before_start = before_start
        self._queued: list[ParamGroup] = []
        self._under_way: list[ParamGroup] = []

    def use_streams(self, streams: Any) -> None:
        """Reduce on other streams from now on, see `set_debug`."""
        self._streams = streams

    def begin_backward(self) -> None:
        """A backward begins: fix the order."""
        if any(g.replicate_axis is not None or g.has_reduce_hook for g in self._under_way):
            self.finish()  # They communicate once more when waited for: in one order.
        self.order.begin_backward()

    def collect(
        self,
        group: ParamGroup,
        gradients: BucketGradients,
        index: int,
        grad: Tensor,
        *,
        is_layer: bool,
    ) -> None:
        """Take a gradient that is to be reduced."""
        writes = is_layer and not self._holds_layers
        if writes and self._under_way and self._is_host_synchronous:
            self._free_sent(group)  # The last group's send buffer becomes this one's.
        if writes and group.gradients.is_reducing:
            self._finish_through(group)  # The send buffer is on the wire.
        gradients.collect(index, grad, self._streams, self._slots, hold=not writes)

    def _free_sent(self, group: ParamGroup) -> None:
        """Wait for send buffers, but as many as the group may have on the wire beside its own."""
        for reducing in self._under_way[: 1 - group.settings.max_send_buffers or None]:
            reducing.gradients.wait_sent(self._slots)

    def complete(self, group: ParamGroup) -> None:
        """All gradients of a group have come."""
        if group.gradients.is_local:
            return
        if not group.settings.sync:
            self._write_held(group)
        for index in self.order.complete(group.index):
            self._reduce(self._groups[index])

    def _reduce(self, group: ParamGroup) -> None:
        """Reduce a group's gradients now, or a little later together with small neighbours."""
        gradients = group.gradients
        if gradients.is_local or not (group.is_trainable or group.has_pending):
            return
        if not group.settings.sync:
            self._write_held(group)
            return
        if not (group.settings.reduce_unused or group.has_pending):
            return
        if group in self._queued:
            return  # It completed again, by a graph retained from before: it is sent with the rest.
        if self._queued and self._queued[0].shard_axis is not group.shard_axis:
            self._start_queued()
        self._queued.append(group)
        if sum(queued.gradients.send_nbytes for queued in self._queued) >= self._batch_nbytes:
            self._start_queued()

    def _start_queued(self) -> None:
        """Start the reductions that wait for company."""
        if not self._queued:
            return
        self._before_start()
        groups, self._queued = self._queued, []
        self.make_room(groups[0])
        self._free_sent(groups[0])  # Where memory is not kept for another use.
        for group in groups:
            self._finish_through(group)  # order: a group's reduction waits for its previous one
        many = [(group.gradients, group.settings.all_reduce) for group in groups]
        with named_range("reduce", *groups):
            start_reduce(many, self._streams, self._slots, names_of(groups))
        self._under_way += groups
        nbytes = sum(group.gradients.reduce_nbytes for group in groups)
        self.peak_nbytes = max(self.peak_nbytes, nbytes)
        if self.report is not None:
            self.report("reduce", groups)

    def finish(self, *, leave: int = 0) -> None:
        """Wait for reductions where that frees their memory; elsewhere the end of backward does."""
        while self._is_host_synchronous and len(self._under_way) > leave:
            self._finish_first()

    def make_room(self, group: ParamGroup) -> None:
        """Wait for reductions, but as many as `group` may have under way, before a gather."""
        self.finish(leave=group.settings.max_send_buffers - 1)

    def _finish_first(self) -> None:
        """Wait for the reduction that was started first.

        Never for another one: waiting may be an all-reduce, and ranks that use different parameters
        may have come to different groups.
        """
        group = self._under_way.pop(0)
        with named_range("await reduce", group):
            group.gradients.finish_reduce(self._slots)

    def _finish_through(self, group: ParamGroup) -> None:
        """Wait for the reduction of a group, if one is under way, and those before it."""
        while group.gradients.is_reducing:
            self._finish_first()

    def _write_held(self, group: ParamGroup) -> None:
        """Write the group's held gradients to its send buffer, which may be on the wire."""
        self._finish_through(group)
        group.gradients.write_held(self._streams, self._slots)

    def finish_all(self) -> None:
        """Wait for all that are under way."""
        while self._under_way:
            self._finish_first()

    def finish_backward(self) -> None:
        """The engine is done: reduce the rest, wait for all, assign all gradients."""
        rest = self.order.end_backward()
        # A parameter that fires in two engine runs (reentrant checkpointing) is reduced twice.
        known = {*rest, *(group.index for group in self._queued)}
        late = [
            group.index
            for group in self._groups
            if group.settings.sync and group.has_pending and group.index not in known
        ]
        for index in (*rest, *late):
            self._reduce(self._groups[index])
        synced = [g for g in self._groups if g.settings.sync and not g.gradients.is_local]
        if not synced:
            return
        self._start_queued()
        if not all(group.settings.is_last_backward for group in self._groups):
            return  # The next backwards overlap with what was started; the last one waits for it.
        self._used.start(self._streams)
        self.finish_all()  # order: the optimizer waits for all reductions
        if self._is_host_synchronous or any(g.gradients.needs_settling for g in synced):
            used = self._used.by_group()
            for group in synced:
                group.gradients.settle(used[group.index])
        for group in synced:
            group.gradients.forget_fired()
        if self._is_host_synchronous:
            self._used.check_alike()

    def reset(self) -> None:
        """Forget everything after an exception; unsynced gradients are dropped."""
        self.order.reset()
        for group in dict.fromkeys((*self._under_way, *self._groups)):
            group.gradients.reset(self._slots)
        self._under_way.clear()
        self._queued.clear()
