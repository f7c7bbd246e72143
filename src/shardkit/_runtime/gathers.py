"""Gives groups unsharded memory and takes it back, as the schedule says."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from shardkit import _compat
from shardkit._runtime.forward_writes import keep_writes
from shardkit._runtime.ranges import named_range, names_of
from shardkit._schedule.unshard import Op
from shardkit.backends.watch.diagnosis import WRITTEN_SINCE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardkit._params.memory import SlotPool
    from shardkit._runtime.group import ParamGroup
    from shardkit._schedule.unshard import Action, UnshardSchedule
    from shardkit.backends.base import AxisComm, CommStreams, Handle

_NOTHING = contextlib.nullcontext()


class Gathers:
    """Carries out the schedule's actions: gather, prefetch, wait, free.

    Args:
        groups: All groups of the root, by number.
        schedule: Schedule of the actions.
        streams: Streams of the gathers.
        slots: Pool of the memory.

    Attributes:
        nbytes: Size of the unsharded memory that exists now in bytes.
        peak_nbytes: Largest size that ever existed.
        in_trained_layer: Whether backward is inside a layer whose gradients come now.
        report: Report of gathers and of what is freed, if there is one.
        make_room: Function called before a late prefetch of a group, so that memory is free.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        schedule: UnshardSchedule,
        streams: CommStreams,
        slots: SlotPool,
    ) -> None:
        self.nbytes = 0
        self.peak_nbytes = 0
        self.in_trained_layer = False
        self.report: Callable[[str, Sequence[ParamGroup]], None] | None = None
        self.make_room: Callable[[ParamGroup], None] = lambda _: None
        self._groups = groups
        self._schedule = schedule
        self._streams = streams
        self._slots = slots
        backend = groups[0].mesh.backend
        self._is_host_synchronous = backend.is_host_synchronous
        self._has_own_memory = backend.has_own_memory
        self._is_traced = backend.is_traced
        self._put_off: list[ParamGroup] = []
        self._under_way: dict[int, Handle] = {}
        self._refreshed: set[int] = set()
        self._followed: list[tuple[int, ...]] = [() for _ in groups]

    def follow_writes(self, versions: Sequence[tuple[int, ...]]) -> None:
        """Let gathers come after all writes to shards so far."""
        self._streams.follow_compute()
        self._followed = [*versions]

    def _follow_late_writes(self, groups: Sequence[ParamGroup]) -> None:
        """Let gathers come after writes inside of the root's forward, as of momentum encoders.

        What a gather waits for besides is that its memory is free, which may be long ago.
        """
        versions = [group.shard_versions for group in groups]
        if any(
            now != self._followed[group.index] for group, now in zip(groups, versions, strict=True)
        ):
            self._streams.follow_compute()
            for group, now in zip(groups, versions, strict=True):
                self._followed[group.index] = now

    def use_streams(self, streams: Any) -> None:
        """Gather on other streams from now on, see `set_debug`."""
        self._streams = streams

    # --- actions ---

    @_compat.unseen_by_transforms
    def carry_out(self, actions: Sequence[Action]) -> None:
        """Do what the schedule says, in order."""
        ahead: list[ParamGroup] = []
        for op, index in actions:
            group = self._groups[index]
            if op is Op.WAIT:
                self.wait(group)  # order: compute waits for the gather before its use
            elif op is Op.GATHER:
                self._gather([group])
            elif op is Op.PREFETCH:
                # A forward in `functional_call` may need nothing of the group's.
                (self._put_off if group.gets_only_given else ahead).append(group)
            elif group in self._put_off:
                self._put_off.remove(group)
            else:
                self._free(group)
        if ahead:
            self._prefetch(ahead)

    def refresh(self, group: ParamGroup) -> None:
        """Free what was gathered before the shards were written to."""
        self._refreshed.add(group.index)
        self.carry_out(self._schedule.refresh(group.index))

    @_compat.unseen_by_transforms
    def wait(self, group: ParamGroup) -> None:
        """Let compute issued from now on see the gathered parameters."""
        if group in self._put_off:
            self.gather_put_off()
        handle = self._under_way.pop(group.index, None)
        if handle is not None:
            with named_range("await gather", group):
                handle.wait()
            for store in group.gathered:
                store.finish_gather()

    def _prefetch(self, groups: list[ParamGroup]) -> None:
        """Gather for later.

        Where only waiting frees memory, backward puts it off until half of the current group's
        gradients have come: by then the last reduction is done and activations are freed, and
        there is still enough compute left to hide it behind.
        """
        if self._is_host_synchronous and self.in_trained_layer:
            self.gather_put_off()
            self._put_off = groups
        else:
            self._gather(groups)

    def gather_put_off(self) -> None:
        """Carry out the prefetch that was put off."""
        if self._put_off:
            groups, self._put_off = self._put_off, []
            self.make_room(groups[0])
            self._gather(groups)

    def forget_put_off(self) -> None:
        """Do without it, after an exception."""
        self._put_off.clear()

    def _gather(self, groups: Sequence[ParamGroup]) -> None:
        by_axis: dict[AxisComm, list[ParamGroup]] = {}
        for group in groups:
            by_axis.setdefault(_axis_of_gather(group), []).append(group)
            self.nbytes += group.unsharded_nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        for axis, together in by_axis.items():
            self._start(together, axis)
        if self.report is not None:
            self.report("gather", groups)

    def _start(self, groups: Sequence[ParamGroup], axis: AxisComm) -> None:
        """Get memory for groups and gather into it over `axis`, in one go.

        Cost: one all-gather per bucket, of `param_dtype` bytes; small ones may travel together.
        """
        self._follow_late_writes(groups)  # order: gathers wait for writes inside of a forward
        jobs, fences = [], []
        for group in groups:
            fences += [store.acquire(self._slots) for store in group.gathered]
            parts = [store.kept_part for store in group.gathered]
            # order: gathers wait for kept parts
            fences += [part.fence for part in parts if part is not None]
            comm = group.settings.comm.all_gather
            jobs += [job for store in group.gathered for job in store.gather_jobs(comm)]
        if jobs:
            with named_range("gather", *groups):
                handle = self._streams.start_gather(jobs, axis, fences, self._describe(groups))
            self._under_way.update({group.index: handle for group in groups})

    def _describe(self, groups: Sequence[ParamGroup]) -> str:
        """Return the names of groups, and whether this rank had them and they were written to."""
        written = self._refreshed and self._refreshed.intersection(g.index for g in groups)
        if not written:
            return names_of(groups)
        self._refreshed -= written
        return f"{names_of(groups)}, {WRITTEN_SINCE}"

    def _free(self, group: ParamGroup) -> None:
        """Give the memory back and show the sharded parameters."""
        if group.is_shown and group.was_written:
            keep_writes(group, self._streams)
        self.nbytes -= group.unsharded_nbytes
        self.wait(group)  # order: freeing waits for the gather
        group.show(unsharded=False)
        axis = group.kept_axis
        may_come_back = axis is not None and self._schedule.awaits_backward(group.index)
        for store in group.gathered:
            if axis is None or not may_come_back or store.is_stale:
                store.drop_part()
            else:
                store.keep_part(axis, self._streams.fence)
        if group.gathered:
            fence = self._streams.fence()  # order: a slot's next user waits for the last reader
            # Traced stores tell autograd by version counters that what they showed is gone.
            with group.unnoticed_writes() if self._is_traced else _NOTHING:
                for store in group.gathered:
                    store.release(self._slots, fence)
        if self.report is not None:
            self.report("free", [group])

    # --- memory between steps ---

    def trim(self) -> None:
        """Give free slots back: the optimizer's temporaries want the room."""
        self._slots.trim()

    def settle_host_reads(self) -> None:
        """Let the user's code write offloaded shards from now on."""
        if not self._has_own_memory:
            return
        stores = [b.store for g in self._groups for b in g.buckets if b.plan.is_offloaded]
        if stores:
            by_compute = any(spec.subclass is not None for s in stores for spec in s.specs)
            self._streams.settle_host_reads(compute=by_compute)


def _axis_of_gather(group: ParamGroup) -> AxisComm:
    """Return the axis that the next gather of a group goes over."""
    parts = [store.kept_part for store in group.gathered]
    if group.kept_axis is not None and parts and all(part is not None for part in parts):
        return group.kept_axis
    for store in group.gathered:
        store.drop_part()
    return group.shard_axis
