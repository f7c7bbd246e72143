"""Gathers and reductions of one root: which are in flight, which wait, what waits for them.

Decisions come from `_schedule`; collectives are started and finished here.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import record_function

from shardkit import _events
from shardkit._compat import torch_devices, torch_tensors
from shardkit._errors import RankMismatchError, StateError
from shardkit._params.gradients import UnshardedGrad, start_reduce
from shardkit._schedule import Action, Op, ReduceOrder, UnshardSchedule
from shardkit._tensor.written_values import fingerprint, note_written
from shardkit._text import listed
from shardkit.backends.base import AxisComm, CommStreams, Handle, first_of_all
from shardkit.backends.watch.diagnosis import WRITTEN_SINCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from shardkit._params.flat_store import Store
    from shardkit._params.memory import SlotPool
    from shardkit._runtime.agreement import UsedParameters
    from shardkit._runtime.group import ParamGroup
    from shardkit.backends.device import Event


# --- names in profiles ----------------------------------------------------------------------------

_NOTHING = contextlib.nullcontext()


def names_of(groups: Sequence[ParamGroup]) -> str:
    """Return the names of groups that travel together."""
    return ", ".join(group.name for group in groups)


def named_range(what: str, *groups: ParamGroup) -> AbstractContextManager[Any]:
    """Return a context that a profile shows as ``what`` and the groups' names.

    Without a profiler it does nothing, and does not build the name.
    """
    if not torch_devices.is_profiling():
        return _NOTHING
    return record_function(f"{what} {names_of(groups)}")


# --- writes to unsharded parameters ---------------------------------------------------------------
#
# A forward may clamp or normalize its weights, or move a codebook. User code may do so with
# parameters that are kept between forward and backward. The memory of these parameters is freed.
# Version counters show the writes, when a forward ends and before the memory is freed.


def keep_writes(group: ParamGroup, streams: CommStreams) -> None:
    """Copy what was written to unsharded parameters of a group into the shards.

    Raises:
        RankMismatchError: Ranks wrote different values. All ranks that wrote raise.
        StateError: The written values cannot be kept.

    Cost: one all-reduce of 16 bytes per axis; details travel only if ranks differ.
    """
    places = group.note_writes()
    by_mesh: dict[tuple[AxisComm, ...], list[tuple[Store, int]]] = {}
    for store, index in places:
        _check_can_keep(group, store, index)
        by_mesh.setdefault(store.plan.axes, []).append((store, index))
    for axes, on_mesh in by_mesh.items():
        several = [axis for axis in axes if axis.size > 1]
        if several:
            values = [fingerprint(store.unsharded_values(index), 0) for store, index in on_mesh]
            names = [store.entries[index].name for store, index in on_mesh]
            known = dict(zip(names, torch.stack(values).tolist(), strict=True))
            _check_alike(group, known, several, streams)
    for store, index in places:
        store.keep_written(index)
    streams.follow_compute()  # For the next gather, which sees no version of this write.


def keep_own_writes(group: ParamGroup, streams: CommStreams) -> None:
    """Copy into the shards what was written before an exception that other ranks may not have had.

    The next backward compares the values, as all values that ranks write by themselves. Writes that
    cannot be kept stay noted: the next forward of the group, or freeing its memory, raises.
    """
    if not all(store.keeps_writes for store, _ in group.written_places()):
        return
    for store, index in group.note_writes():
        store.keep_written(index)
        values = store.unsharded_values(index)
        param: Any = store.entries[index].param
        note_written(param, lambda values=values: [values], max_samples=0)  # type: ignore[misc]
    streams.follow_compute()


def refuse_unseen_writes(group: ParamGroup) -> None:
    """Refuse what the first forward wrote without raising a counter, since it would be lost.

    Raises:
        StateError: It wrote through ``param.data``.
    """
    names = group.written_unseen()
    if names:
        msg = (
            f"the forward of {group.name!r} wrote to its parameter {names[0]!r} in place through "
            f".data, which raises no version counter, so shardkit cannot keep such writes. Write "
            f"to the parameter itself under torch.no_grad(): weight.copy_(value). If only the "
            f"first forward writes, you can also run it once before fully_shard."
        )
        raise StateError(msg)


def _check_can_keep(group: ParamGroup, store: Store, index: int) -> None:
    name = store.entries[index].name
    if not store.keeps_writes:
        msg = (
            f"the forward of {group.name!r} wrote to its parameter {name!r}, {store.why_lost}, so "
            f"it would be lost. Write between steps, under torch.no_grad(), or hold what a forward "
            f"changes in a buffer (register_buffer)."
        )
        raise StateError(msg)
    if store.is_stale:
        msg = (
            f"parameter {name!r} of {group.name!r} was written while it was unsharded, and its "
            f"shard was changed since it was gathered (an optimizer's step, a load): one of both "
            f"would be lost. Call reshard() after the write, or write after the step."
        )
        raise StateError(msg)


def _check_alike(
    group: ParamGroup, written: dict[str, int], axes: Sequence[AxisComm], streams: CommStreams
) -> None:
    digest = sum(hash_of(name) * value for name, value in written.items()) % 2**62
    extremes = torch.tensor([digest, -digest], dtype=torch.int64, device="cpu")
    streams.start_all_reduce_max(extremes, axes, f"what forward wrote to {listed(written)}").wait()
    highest, lowest = extremes.tolist()
    if highest == -lowest:
        return
    text = None
    for axis in axes:
        text = text or _first_difference(group, axis.exchange(written))
    text = first_of_all(text, axes)
    if text is not None:
        raise RankMismatchError(text)


def hash_of(name: str) -> int:
    """Return an odd number for a name, the same in all processes."""
    return int.from_bytes(name.encode(), "big") * 2 + 1


def _first_difference(group: ParamGroup, by_rank: Sequence[dict[str, int]]) -> str | None:
    for rank, other in enumerate(by_rank):
        for name in {**by_rank[0], **other}:
            if by_rank[0].get(name) != other.get(name):
                return (
                    f"the forward of {group.name!r} wrote to its parameter {name!r}, and not the "
                    f"same on position 0 and on position {rank} of the process group, so there is "
                    f"no one value to keep. Compute what it writes from data of all ranks, for "
                    f"example by torch.distributed.all_reduce of the statistics, or hold it in a "
                    f"buffer (register_buffer), which is each rank's own."
                )
    return None


# --- what an observer is told ---------------------------------------------------------------------


def _begin_gather(parts: Sequence[tuple[ParamGroup, list[Store]]], axis: AxisComm) -> None:
    """Report a gather of groups' stores over `axis`; offloaded shards are copied first."""
    observer = _events.observer
    assert observer is not None
    for group, stores in parts:
        nbytes = on_host = 0
        for store in stores:
            nbytes += store.unsharded_nbytes
            if store.plan.is_offloaded:
                on_host += store.shard_nbytes
        name, number = group.name, group.number
        if on_host:
            observer.tell("copy", name, group=number, nbytes=on_host)
        observer.begin("gather", name, group=number, nbytes=nbytes, across=("shard", axis.size))


def _begin_reduction(groups: Sequence[ParamGroup]) -> None:
    """Report a reduction of groups' gradients; sums are copied if they are offloaded."""
    observer = _events.observer
    assert observer is not None
    for group in groups:
        sent = [each for each in group.gradients.buckets if each.is_sent]
        if not sent:
            continue
        nbytes = over = to_host = 0
        replicate = None
        for each in sent:
            plan = each.bucket.plan
            own = each.send_nbytes // plan.axis.size
            nbytes += each.send_nbytes
            if plan.is_offloaded:
                to_host += own
            if plan.replicate_axis is not None:
                replicate = replicate or plan.replicate_axis
                over += own
        name, number, size = group.name, group.number, sent[0].bucket.plan.axis.size
        observer.begin("reduce_scatter", name, group=number, nbytes=nbytes, across=("shard", size))
        if to_host:
            observer.tell("copy", name, group=number, nbytes=to_host)
        if replicate is not None and group.settings.all_reduce:
            across = ("replicate", replicate.size)
            observer.begin("all_reduce", name, group=number, nbytes=over, across=across)


# --- gathers --------------------------------------------------------------------------------------


class Gathers:
    """Executor of the schedule's actions: gather, prefetch, wait, free."""

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        schedule: UnshardSchedule,
        streams: CommStreams,
        slots: SlotPool,
    ) -> None:
        self.nbytes = 0  # Bytes of unsharded memory that exist now.
        self.peak_nbytes = 0  # Largest value of `nbytes` so far.
        # Whether backward is inside a layer whose gradients come now.
        self.in_trained_layer = False
        # Function that reports gathers and frees, if there is one.
        self.report: Callable[[str, Sequence[ParamGroup]], None] | None = None
        # Function called before a late prefetch of a group, so that memory is free.
        self.make_room: Callable[[ParamGroup], None] = lambda _: None
        self._begun: set[int] = set()  # Groups that are gathered, or will be.
        self._groups = groups
        self._schedule = schedule
        self._streams = streams
        self._slots = slots
        backend = groups[0].mesh.backend
        self._is_host_synchronous = backend.is_host_synchronous
        self._has_own_memory = backend.has_own_memory
        self._is_traced = backend.is_traced
        self._put_off: list[ParamGroup] = []  # Until gradients have come.
        self._if_needed: list[ParamGroup] = []  # Until a wait, which may never come.
        self._under_way: dict[int, list[Handle]] = {}
        self._refreshed: set[int] = set()
        self._followed: list[tuple[int, ...]] = [() for _ in groups]

    def follow_writes(self, versions: Sequence[tuple[int, ...]]) -> None:
        """Let gathers come after all writes to shards so far."""
        self._streams.follow_compute()
        self._followed = [*versions]

    def _follow_late_writes(self, groups: Sequence[ParamGroup]) -> None:
        """Let gathers come after writes inside the root's forward, e.g. of momentum encoders.

        Otherwise a gather waits only until its memory is free, which may have been long ago.
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

    @torch_tensors.unseen_by_transforms
    def carry_out(self, actions: Sequence[Action]) -> None:
        """Carry out the schedule's actions, in order."""
        ahead: list[ParamGroup] = []
        for op, index in actions:
            group = self._groups[index]
            if op is Op.WAIT:
                self._wait(group)  # order: compute waits for the gather before its use
            elif op is Op.GATHER:
                self._gather([group])
            elif op is Op.PREFETCH:
                # A forward in `functional_call` may need no parameters of the group.
                (self._if_needed if group.gets_only_given else ahead).append(group)
            elif group in self._if_needed:
                self._if_needed.remove(group)
            else:
                self._free(group)
        if ahead:
            self._prefetch(ahead)

    def refresh(self, group: ParamGroup) -> None:
        """Free parameters that were gathered before the shards were written."""
        self._refreshed.add(group.index)
        self.carry_out(self._schedule.refresh(group.index))

    @torch_tensors.unseen_by_transforms
    def wait(self, group: ParamGroup) -> None:
        """Let compute issued from now on see the gathered parameters."""
        self._wait(group)

    def _wait(self, group: ParamGroup) -> None:
        if group in self._put_off:
            self.gather_put_off()
        elif group in self._if_needed:
            self._if_needed.remove(group)
            self._gather([group])
        handles = self._under_way.get(group.index)
        if handles is not None:
            if _events.observer is not None:
                _events.observer.begin("wait", group.name, group=group.number)
            with named_range("await gather", group):
                for handle in handles:
                    handle.wait()
            del self._under_way[group.index]  # If Ctrl-C ends the wait, `reset` waits again.
            if _events.observer is not None:
                _events.observer.end("wait", group.number)
                for _ in handles:
                    _events.observer.end("gather", group.number)
            for store in group.gathered:
                store.finish_gather()

    def _prefetch(self, groups: list[ParamGroup]) -> None:
        """Gather for later.

        If only a wait frees memory, backward delays the gather until half of the current group's
        gradients have come. By then the last reduction is done and activations are freed, and there
        is still enough compute left to hide the gather. Ranks may get different gradients, so the
        gather comes before any other collective, and before backward leaves the layer.
        """
        if self._is_host_synchronous and self.in_trained_layer:
            self.gather_put_off()
            self._put_off = groups
        else:
            self._gather(groups)

    def gather_put_off(self) -> None:
        """Carry out the delayed prefetch."""
        if self._put_off:
            self.make_room(self._put_off[0])  # A user's hook may raise here.
            groups, self._put_off = self._put_off, []
            self._gather(groups)

    def reset(self, actions: Sequence[Action]) -> None:
        """Free all memory after an exception, by `actions`, and drop gathers that did not begin."""
        self._put_off, self._if_needed = [], []
        # The exception may have come between a decision and what carries it out.
        self.carry_out([(op, index) for op, index in actions if index in self._begun])

    def _gather(self, groups: Sequence[ParamGroup]) -> None:
        self.gather_put_off()
        by_axis: dict[AxisComm, list[tuple[ParamGroup, list[Store]]]] = {}
        for group in groups:
            for axis, stores in _stores_by_axis(group).items():
                by_axis.setdefault(axis, []).append((group, stores))
            self.nbytes += group.unsharded_nbytes
            self._begun.add(group.index)
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        self._follow_late_writes(groups)  # order: gathers wait for writes inside of a forward
        # Allocate all memory of a group first: after an error on one axis no store may lack it.
        every = [
            (axis, store)
            for axis, together in by_axis.items()
            for _, stores in together
            for store in stores
        ]
        fences: dict[AxisComm, list[Event | None]] = {axis: [] for axis in by_axis}
        try:
            for axis, store in every:
                fences[axis].append(store.acquire(self._slots))
        except BaseException:
            self._wait_for_users(fences.values())
            raise
        for axis, together in by_axis.items():
            self._start(together, axis, fences[axis])
        if self._refreshed:
            self._refreshed.difference_update(group.index for group in groups)
        if self.report is not None:
            self.report("gather", groups)

    def _wait_for_users(self, fences: Iterable[Sequence[Event | None]]) -> None:
        """Let compute wait for the last users of memory that goes back without a gather."""
        for of_axis in fences:
            for fence in of_axis:
                self._streams.wait_fence(fence)

    def _start(
        self,
        parts: Sequence[tuple[ParamGroup, list[Store]]],
        axis: AxisComm,
        fences: list[Event | None],
    ) -> None:
        """Gather stores of groups into their memory over `axis`, in one go, after `fences`.

        Cost: one all-gather per bucket, of `param_dtype` bytes; small buckets may travel together.
        """
        jobs = []
        for group, stores in parts:
            kept = [store.kept_part for store in stores]
            # order: gathers wait for kept parts
            fences += [part.fence for part in kept if part is not None]
            comm = group.settings.comm.all_gather
            jobs += [job for store in stores for job in store.gather_jobs(comm)]
        if jobs:
            groups = [group for group, _ in parts]
            if _events.observer is not None:
                _begin_gather(parts, axis)
            with named_range("gather", *groups):
                handle = self._streams.start_gather(jobs, axis, fences, self._describe(groups))
            for group in groups:
                self._under_way.setdefault(group.index, []).append(handle)

    def _describe(self, groups: Sequence[ParamGroup]) -> str:
        """Return the groups' names, and whether this rank had them and they were written since."""
        if not self._refreshed or self._refreshed.isdisjoint(group.index for group in groups):
            return names_of(groups)
        return f"{names_of(groups)}, {WRITTEN_SINCE}"

    def _free(self, group: ParamGroup) -> None:
        """Give the memory back and show the sharded parameters."""
        if group.is_shown and group.was_written:
            keep_writes(group, self._streams)
        self.nbytes -= group.unsharded_nbytes
        self._begun.discard(group.index)
        self._wait(group)  # order: freeing waits for the gather
        if _events.observer is not None:
            nbytes = group.unsharded_nbytes
            _events.observer.tell("reshard", group.name, group=group.number, nbytes=nbytes)
        group.show(unsharded=False)
        kept = group.kept_axes
        may_come_back = bool(kept) and self._schedule.awaits_backward(group.index)
        for store in group.gathered:
            axis = kept.get(store.plan.axis) if may_come_back else None
            if axis is None or store.is_stale:
                store.drop_part()
            else:
                store.keep_part(axis, self._streams.fence)
        if group.gathered:
            fence = self._streams.fence()  # order: a slot's next user waits for the last reader
            # Traced stores raise version counters, so that autograd notices the freed parameters.
            with group.unnoticed_writes() if self._is_traced else _NOTHING:
                for store in group.gathered:
                    store.release(self._slots, fence)
        if self.report is not None:
            self.report("free", [group])

    # --- memory between steps ---

    def trim(self) -> None:
        """Give free slots back, to make room for the optimizer's temporaries."""
        self._slots.trim()

    def settle_host_reads(self) -> None:
        """Wait until the user's code may write offloaded shards."""
        if not self._has_own_memory:
            return
        stores = [b.store for g in self._groups for b in g.buckets if b.plan.is_offloaded]
        if stores:
            by_compute = any(spec.subclass is not None for s in stores for spec in s.specs)
            self._streams.settle_host_reads(compute=by_compute)


def _stores_by_axis(group: ParamGroup) -> dict[AxisComm, list[Store]]:
    """Return the stores that a group gathers next, by the axis of the gather."""
    by_axis: dict[AxisComm, list[Store]] = {}
    for store in group.gathered:
        by_axis.setdefault(store.plan.axis, []).append(store)
    result: dict[AxisComm, list[Store]] = {}
    for whole, stores in by_axis.items():
        kept = group.kept_axes.get(whole)
        if kept is not None and all(store.kept_part is not None for store in stores):
            result[kept] = stores
            continue
        for store in stores:
            store.drop_part()
        result[whole] = stores
    return result


# --- reductions -----------------------------------------------------------------------------------


class Reductions:
    """Reductions, started in the order of `ReduceOrder`, and waited for in the same order."""

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
        self.order = ReduceOrder()  # Order in which groups are reduced.
        self.peak_nbytes = 0  # Largest number of bytes that buffers of reductions took so far.
        # Whether the end of a backward waits for its reductions, if it is the last.
        self.waits_at_end = True
        # Groups of backwards that did not wait for their reductions, and for which nobody has
        # waited since.
        self.unended: Sequence[ParamGroup] = ()
        self._groups = groups
        # Function that reports reductions, if there is one.
        self.report: Callable[[str, Sequence[ParamGroup]], None] | None = None
        self._streams = streams
        self._slots = slots
        self._used = used
        # Limit in bytes: neighbours whose sizes add up to less than this are sent together.
        self._batch_nbytes = batch_nbytes
        backend = groups[0].mesh.backend
        self._is_host_synchronous = backend.is_host_synchronous
        self._before_start = before_start  # Function called before reductions are started.
        self._queued: list[ParamGroup] = []
        self._queued_nbytes = 0
        self._under_way: list[ParamGroup] = []
        self._num_sent = 0  # Number of the first of these whose send buffers are free.

    def use_streams(self, streams: Any) -> None:
        """Reduce on other streams from now on, see `set_debug`."""
        self._streams = streams

    def begin_backward(self) -> None:
        """Fix the order at the start of a backward."""
        if any(group.replicates or group.has_reduce_hook for group in self._under_way):
            self.finish()  # A wait for them communicates once more, which needs one order.
        self.order.begin_backward()

    def collect(self, group: ParamGroup, grads: Sequence[UnshardedGrad], *, is_layer: bool) -> None:
        """Take gradients to reduce."""
        is_held = group.gradients.holds_layers(sync=group.settings.sync)
        writes = is_layer and not is_held
        if writes and self._under_way and self._is_host_synchronous:
            self._free_sent(group)  # The last group's send buffer becomes this one's.
        if writes and self._under_way and group.gradients.is_reducing:
            self._finish_through(group)  # The send buffer is in flight.
        for gradients, index, grad in grads:
            sums = is_held or gradients.copies_together
            if index in gradients.held and self._is_host_synchronous and sums:
                self._write_held(group)  # Sums are made in the dtype of the send buffer.
            gradients.collect(index, grad, self._streams, self._slots, hold=not writes)

    def free_read(self, group: ParamGroup) -> None:
        """Wait for gradients that other ranks read, before a layer holds more of its own."""
        if self._is_host_synchronous and not group.gradients.copies_together:
            self._free_sent(group)

    def _free_sent(self, group: ParamGroup) -> None:
        """Wait for what is sent, except for as much as may be in flight beside the group's own."""
        allowed = len(self._under_way) + 1 - group.settings.max_send_buffers
        while self._num_sent < allowed:
            reducing = self._under_way[self._num_sent]
            if _events.observer is not None:
                _events.observer.begin("wait", reducing.name, group=reducing.number)
            reducing.gradients.wait_sent(self._slots)
            if _events.observer is not None:
                _events.observer.end("wait", reducing.number)
            self._num_sent += 1

    def complete(self, group: ParamGroup) -> None:
        """Note that all gradients of a group have come."""
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
            if group.settings.reduce_unused:
                gradients.keep_unsynced()
            return
        if not (group.settings.reduce_unused or group.has_pending):
            return
        if group in self._queued:
            return  # It completed again through a retained graph, and is sent with the rest.
        if self._queued and self._queued[0].axes != group.axes:
            self._start_queued()
        if self._is_host_synchronous and gradients.copies_together and not gradients.sends_parts:
            self._free_sent(group)  # The last group's send buffer becomes this one's.
            self._write_held(group)
        self._queued.append(group)
        self._queued_nbytes += gradients.send_nbytes
        if self._queued_nbytes >= self._batch_nbytes:
            self._start_queued()

    def _start_queued(self) -> None:
        """Start the reductions that wait for neighbours."""
        if not self._queued:
            return
        self._before_start()
        groups, self._queued, self._queued_nbytes = self._queued, [], 0
        self.make_room(groups[0])
        self._free_sent(groups[0])  # Only if memory is not kept for another use.
        for group in groups:
            self._finish_through(group)  # order: a group's reduction waits for its previous one
        many = [(group.gradients, group.settings.all_reduce) for group in groups]
        if _events.observer is not None:
            _begin_reduction(groups)
        with named_range("reduce", *groups):
            start_reduce(many, self._streams, self._slots, names_of(groups))
        self._under_way += groups
        nbytes = sum(group.gradients.reduce_nbytes for group in groups)
        self.peak_nbytes = max(self.peak_nbytes, nbytes)
        if self.report is not None:
            self.report("reduce", groups)

    def finish(self, *, leave: int = 0) -> None:
        """Wait for reductions if that frees their memory; else the end of backward waits."""
        while self._is_host_synchronous and len(self._under_way) > leave:
            self._finish_first()

    def make_room(self, group: ParamGroup) -> None:
        """Wait for reductions before a gather, except for as many as `group` may have in flight."""
        self.finish(leave=group.settings.max_send_buffers - 1)

    def _finish_first(self) -> None:
        """Wait for the reduction that was started first.

        It never waits for another one: a wait may be an all-reduce, and ranks that use different
        parameters may have reached different groups.
        """
        group = self._under_way.pop(0)
        self._num_sent = max(self._num_sent - 1, 0)
        if _events.observer is not None:
            _events.observer.begin("wait", group.name, group=group.number)
        with named_range("await reduce", group):
            group.gradients.finish_reduce(self._slots)
        if _events.observer is not None:
            for kind in ("wait", "all_reduce", "reduce_scatter"):
                _events.observer.end(kind, group.number)

    def _finish_through(self, group: ParamGroup) -> None:
        """Wait for the reduction of a group, if one is in flight, and for those before it."""
        while group.gradients.is_reducing:
            self._finish_first()

    def _write_held(self, group: ParamGroup) -> None:
        """Write the group's held gradients to its send buffer, which may be in flight."""
        self._finish_through(group)
        group.gradients.write_held(self._streams, self._slots)

    @property
    def unfinished(self) -> str | None:
        """Text that says what no backward has waited for yet; None: nothing.

        Even if a gather has waited for the last reduction, ranks have not told each other yet which
        parameters they used.
        """
        left = self.unended
        return f"the reduction of {left[0].name!r} was not waited for" if left else None

    def finish_partial(self) -> None:
        """Wait for reductions in flight that may leave sums over a part of the ranks."""
        if any(group.replicates for group in self._under_way):
            self.finish_all()

    def finish_all(self) -> None:
        """Wait for all reductions in flight."""
        while self._under_way:
            self._finish_first()

    def finish_backward(self) -> None:
        """Reduce the rest when the engine is done, wait for all, and assign all gradients."""
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
        # Otherwise the next backwards overlap with these reductions; the last one waits for them.
        is_last = all(group.settings.is_last_backward for group in self._groups)
        self._assign(synced, wait=is_last and self.waits_at_end)

    def finish_step(self, groups: Sequence[ParamGroup], *, wait: bool = True) -> None:
        """Reduce what several backwards have collected in some groups, used here or not."""
        self.order.reset()
        self.begin_backward()
        for group in reversed(groups):
            self._reduce(group)
        due = {group for group in groups if group.settings.sync}
        settled = (g for g in self._groups if g in due or not g.has_pending)
        self._assign([group for group in settled if not group.gradients.is_local], wait=wait)

    def _assign(self, synced: Sequence[ParamGroup], *, wait: bool) -> None:
        """Start what is queued; with `wait`, wait for all reductions and assign all gradients."""
        if not synced:
            return
        self._start_queued()
        if not wait:
            self.unended = synced
            return
        self._used.start(self._streams)
        self.finish_all()  # order: the optimizer waits for all reductions
        if self._is_host_synchronous or any(g.gradients.needs_settling for g in synced):
            used = self._used.by_group()
            for group in synced:
                group.gradients.settle(used[group.index])
        for group in synced:
            group.gradients.forget_fired()
        self.unended = ()
        if self._is_host_synchronous:
            self._used.check_alike()

    def reset(self) -> None:
        """Drop all state after an exception, including unsynced gradients."""
        self.order.reset()
        for group in dict.fromkeys((*self._under_way, *self._groups)):
            group.gradients.reset(self._slots)
        self._under_way.clear()
        self.unended = ()
        self._num_sent = 0
        self._queued.clear()
        self._queued_nbytes = 0
