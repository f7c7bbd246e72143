"""Carries out what the schedules decide: one runtime for all groups of a root.

Events come from the hooks (`_module.hooks`) and from autograd, decisions from `_schedule`. Nothing
here knows a backend.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import torch

from shardkit import _compat
from shardkit._errors import StateError
from shardkit._params.memory import SlotPool
from shardkit._runtime import agreement
from shardkit._runtime.forward_record import ForwardRecord, InputGrads
from shardkit._runtime.group import start_unshard
from shardkit._runtime.passes import TracedPasses
from shardkit._runtime.reductions import Reductions
from shardkit._schedule.unshard import Action, Op, UnshardSchedule

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn

    from shardkit._runtime.group import ParamGroup
    from shardkit._settings import PrefetchedGroup, RootSettings
    from shardkit.backends.base import AxisComm, CommStreams


class Runtime:
    """State that the groups of one root share.

    Args:
        groups: All groups, in module order.
        settings: Of the root; `update_options` tells that they changed.
        share: Another root's runtime, whose streams and memory are to be used.
    """

    def __init__(
        self, groups: Sequence[ParamGroup], settings: RootSettings, share: Runtime | None = None
    ) -> None:
        self.groups = list(groups)
        self.settings = settings
        backend = groups[0].mesh.backend
        for index, group in enumerate(self.groups):
            group.index = index
            group.listener = self
        # A process that holds all ranks has nobody to compare with.
        axes = [] if backend.is_spmd else _distinct_axes(self.groups)
        agreement.check_same_model(self.groups, axes)
        for group in self.groups:
            group.check_materialized()
            if group.was_replaced:
                group.refresh()
        shared_streams: CommStreams | None = share.streams if share is not None else None
        self.streams: CommStreams = backend.make_streams(axes, shared_streams)
        region = self.streams.region
        self.traced = TracedPasses(region, self.groups, settings) if region is not None else None
        self.device = groups[0].device
        self.slots: SlotPool = SlotPool(self.streams) if share is None else share.slots
        self.unsharded_nbytes = 0
        self.peak_unsharded_nbytes = 0
        nbytes, is_idle = self._sizes()
        self.schedule = UnshardSchedule(
            nbytes=nbytes if backend.batches_small_groups else (), is_idle=is_idle
        )
        self.pass_root: Any = None
        self._is_host_synchronous = backend.is_host_synchronous
        self._backward_running = False
        self._interrupted = False
        self._any_fired = False
        self._makes_graph = False
        self._put_off: list[ParamGroup] = []
        self._in_trained_layer = False
        self._optimizer_event: Any = None
        self._memory_axes: list[AxisComm] = []
        self.update_options()
        # Replicas whose graphs differ cannot run at all, so steps need not be compared.
        compared = [] if backend.is_traced else axes
        self.check = agreement.StepCheck(self.groups, compared)
        self.reductions = Reductions(
            self.groups,
            self.streams,
            self.slots,
            self.check,
            batch_nbytes=self.schedule.batch_nbytes,
            before_start=self._prefetch_put_off,
        )
        self.streams.watch(self.check)

    def __del__(self) -> None:
        """Let compute wait for what is under way: its memory goes back to the allocator now."""
        streams = getattr(self, "streams", None)
        if streams is not None:
            with contextlib.suppress(Exception):  # Where all of Python ends.
                streams.join()

    def hand_over(self) -> list[ParamGroup]:
        """Give way to the runtime of a root around this one: forwards so far may still go backward.

        Returns:
            The groups that they entered, in order.
        """
        if self._backward_running or self._interrupted or self.pass_root is not None:
            self.reset()  # They ended in an exception.
            return []
        self.reductions.finish_all()
        self.check.finish()
        self._carry_out(self.schedule.reset())
        for group in self.groups:
            group.show(unsharded=False)
        return [self.groups[index] for index in self.reductions.order.entered]

    def _sizes(self) -> tuple[list[int], bool]:
        """Return the unsharded bytes of every group, and whether none needs memory of its own."""
        nbytes = [group.unsharded_nbytes for group in self.groups]
        return nbytes, not any(group.needs_memory for group in self.groups)

    def update_options(self) -> None:
        """Read the settings of the root and all groups anew."""
        options = self.schedule.options
        options.prefetch_in_forward = self.settings.prefetch_in_forward
        options.prefetch_in_backward = self.settings.prefetch_in_backward
        groups = self.groups
        options.no_reshard_after_forward = {g.index for g in groups if not g.reshards_after_forward}
        options.several_modules = {g.index for g in groups if len(g.modules) > 1}
        options.no_reshard_after_backward = {
            g.index for g in groups if not g.settings.reshard_after_backward
        }
        options.no_unshard_in_backward = {
            g.index for g in groups if not g.settings.unshard_in_backward
        }
        options.next_in_forward = {
            g.index: self._indices_of(g.settings.next_in_forward, g)
            for g in groups
            if g.settings.next_in_forward is not None
        }
        options.next_in_backward = {
            g.index: self._indices_of(g.settings.next_in_backward, g)
            for g in groups
            if g.settings.next_in_backward is not None
        }
        for axis in dict.fromkeys(group.shard_axis for group in groups):
            on_axis = [group for group in groups if group.shard_axis is axis]
            wanted = any(group.settings.separate_reduce for group in on_axis)
            self.streams.separate_reduce(axis, enable=wanted)
        memory_axes = dict.fromkeys(g.shard_axis for g in groups if g.settings.comm_memory)
        if [*memory_axes] != self._memory_axes:
            self._memory_axes = [*memory_axes]
            self.streams.allocate_from(self._memory_axes)
            self.slots.trim()  # What is free now is of the other kind.

    def _indices_of(self, wanted: Sequence[PrefetchedGroup], by: ParamGroup) -> list[int]:
        for group in wanted:
            if group.listener is not self:
                msg = (
                    f"{by.name!r} is to prefetch {group.name!r}, which is not in the same root. "
                    f"Prefetch modules of one model only."
                )
                raise StateError(msg)
        return [group.index for group in wanted]

    def set_optimizer_event(self, event: Any) -> None:
        """Let the next pass wait for an event after the optimizer's step."""
        self._optimizer_event = event

    # --- forward ---

    def begin_pass(self, root: Any) -> None:
        """A root forward starts."""
        if self._backward_running or self._interrupted or self.pass_root is not None:
            self.reset()  # The last forward or backward ended in an exception.
        has_changed = False
        for group in self.groups:
            if group.was_replaced or group.is_on_meta:
                group.check_materialized()
                self.reshard(group)
                group.refresh()
                has_changed = True
            has_changed = group.note_versions() or has_changed
            group.modules_run.clear()
        nbytes, is_idle = self._sizes()  # They may have been converted.
        self.schedule.set_sizes(nbytes, is_idle=is_idle)
        if self._optimizer_event is not None:
            event, self._optimizer_event = self._optimizer_event, None
            self.streams.after_optimizer(event)
        self.streams.follow_compute()
        self.check.finish_on_host()  # What needs the device would stall its queue: at the next one.
        self.pass_root = root
        self.schedule.begin_pass(has_changed=has_changed, root=id(root))

    def end_pass(self, *, needs_backward: bool) -> None:
        """The root forward ends."""
        self.pass_root = None
        for group in self.groups:
            if self.schedule.in_forward(group.index):  # The root has caught what it raised.
                group.show(unsharded=False)
        self._carry_out(self.schedule.end_pass(needs_backward=needs_backward))
        self._settle_host_reads()

    def _settle_host_reads(self) -> None:
        """Let the user's code write offloaded shards from now on."""
        if not self.groups[0].mesh.backend.has_own_memory:
            return
        buckets = [bucket for group in self.groups for bucket in group.buckets]
        if any(bucket.is_offloaded for bucket in buckets):
            by_compute = any(b.is_offloaded and b.subclass is not None for b in buckets)
            self.streams.settle_host_reads(compute=by_compute)

    def enter_forward(self, group: ParamGroup) -> ForwardRecord | None:
        """A group's forward starts; return its record if it may have a backward."""
        if group.is_stale:
            self._carry_out(self.schedule.refresh(group.index))
        self._carry_out(self.schedule.enter_forward(group.index))
        group.show(unsharded=True)
        if not torch.is_grad_enabled():
            return None
        record = ForwardRecord(group, self.schedule.current_pass)
        if group.is_trainable:
            record.is_first = self.reductions.order.enter_forward(group.index)
        return record

    def watch_inputs(self, record: ForwardRecord, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return stand-ins of the inputs that tell when backward is done with the group."""
        record.has_input_grads = True
        result: Sequence[Tensor] = InputGrads.apply(record, *inputs)  # type: ignore[no-untyped-call]
        return result

    def exit_forward(
        self,
        group: ParamGroup,
        record: ForwardRecord | None,
        outputs: Iterable[Tensor],
        module: nn.Module,
    ) -> None:
        """The forward of a group's module ends with `outputs`, those that require gradients."""
        group.check_trainability()
        needs_backward = record is not None and record.watch_outputs(outputs)
        if not needs_backward and record is not None and record.is_first:
            self.reductions.order.withdraw(group.index)
        may_train = record is not None and (group.is_trainable or record.has_input_grads)
        is_watched = needs_backward or not may_train
        if not is_watched:
            # Else nobody would: no output tells that backward has begun.
            group.grad_hooks.collect_at_once()
        if not is_watched and record is not None and not record.may_lack_outputs:
            _warn_unwatched(group)
        actions = self.schedule.exit_forward(
            group.index,
            needs_backward=needs_backward,
            is_watched=is_watched,
            is_unfinished=group.is_unfinished(module),
        )
        is_kept = needs_backward and group.index in self.schedule.options.no_reshard_after_forward
        if not is_kept and not self.schedule.in_forward(group.index):
            group.show(unsharded=False)
        self._carry_out(actions)

    def interrupt_forward(
        self,
        group: ParamGroup | None,
        record: ForwardRecord | None,
        *,
        is_root: bool,
        is_recompute: bool,
    ) -> None:
        """A forward ends in an exception. Whoever called the module may go on without it."""
        if is_recompute:
            return  # Or non-reentrant checkpointing has what it wants; backward goes on.
        if group is not None:
            if record is not None and record.is_first:
                self.reductions.order.withdraw(group.index)
            actions = self.schedule.exit_forward(group.index, needs_backward=False)
            group.show(unsharded=False)
            self._carry_out(actions)
        if is_root and self.traced is not None:
            self.traced.abandon()
        if is_root:
            # Not reset at once: to wait for collectives would hold up the exception.
            self.pass_root = None
            self._interrupted = True

    def tidy_up(self) -> None:
        """Clean up after an exception; called where the parameters are asked for."""
        if self._interrupted or (self._backward_running and not _compat.in_backward()):
            self.reset()

    # --- forward inside backward ---

    def enter_recompute(self, group: ParamGroup) -> ForwardRecord | None:
        """Activation checkpointing runs a forward again."""
        self.begin_backward()
        self._carry_out(self.schedule.enter_recompute(group.index))
        group.show(unsharded=True)
        return ForwardRecord(group, None) if torch.is_grad_enabled() else None

    def exit_recompute(
        self,
        group: ParamGroup,
        record: ForwardRecord | None,
        outputs: Iterable[Tensor],
        module: nn.Module,
    ) -> None:
        """The repeated forward ends."""
        del module
        if record is not None:
            record.watch_outputs(outputs)
        actions = self.schedule.exit_recompute(group.index)
        if not self.schedule.in_use(group.index):
            group.show(unsharded=False)
        self._carry_out(actions)

    # --- backward ---

    def begin_backward(self) -> None:
        """The first event of a backward: fix the order, ask for the end to be told."""
        if self._backward_running:
            return
        self._backward_running = True
        self._any_fired = False
        self._makes_graph = False
        self.reductions.begin_backward()
        _compat.queue_backward_callback(self.end_backward)

    def enter_backward(self, record: ForwardRecord, grad: Tensor) -> None:
        """A gradient of a group's outputs came (`BackwardListener`)."""
        if self.traced is not None:
            self.traced.enter_backward(record.group, grad)
        if not self._backward_running:
            self.begin_backward()
        if torch.is_grad_enabled():  # The graph of this backward will read the memory.
            self._makes_graph = True
            self.schedule.hold(on=True)
        if record.active:
            return
        group = record.group
        if record.versions != group.shard_versions:
            msg = (
                f"parameters of {group.name!r} were changed between a forward and its backward, so "
                f"gradients would be computed with weights that the forward did not use. Call "
                f"backward before optimizer.step(), or run the forward again."
            )
            raise StateError(msg)
        record.active = True
        group.records.append(record)
        group.num_watched += record.has_input_grads
        if not group.grad_hooks.at_once and group.grad_hooks.has_user_hooks:
            group.grad_hooks.collect_at_once()
        self._in_trained_layer = record.has_input_grads and group.is_trainable
        self._carry_out(self.schedule.enter_backward(group.index, record.in_pass))
        if group.settings.unshard_in_backward:
            group.show(unsharded=True)

    def exit_backward(self, record: ForwardRecord) -> None:
        """The gradients of a group's inputs came: backward is done with this forward of it."""
        if not record.active:
            return
        record.active = False
        group = record.group
        group.records.remove(record)
        group.num_watched -= record.has_input_grads
        if group.records:
            return
        # A gradient comes after all uses of its parameter in a run of the engine. Inside of a
        # reentrant checkpoint that is a run of its own.
        is_last = group.has_all_arrived and record.in_pass is not None
        self._leave(group, record.in_pass, is_last=is_last)
        # What has not fired by now is not used. Where nothing has fired at all this may be
        # ``autograd.grad``, which reduces nothing; if it is not, the end of backward reduces.
        if group.is_complete or not group.is_trainable or not self._any_fired:
            return
        if is_last or not self.schedule.awaits_backward(group.index):
            self.reductions.complete(group)

    def _leave(self, group: ParamGroup, in_pass: int | None, *, is_last: bool) -> None:
        self._carry_out(self.schedule.exit_backward(group.index, in_pass, is_last=is_last))
        if not self.schedule.in_use(group.index):
            group.show(unsharded=False)

    def on_grad(self, group: ParamGroup, bucket_index: int, index: int, grad: Tensor) -> None:
        """An unsharded gradient came (`BackwardListener`)."""
        if not self._backward_running:
            self.begin_backward()
        self._any_fired = True
        if self.traced is not None:
            grad = self.traced.enter_gradient(group, bucket_index, grad)
        is_layer = group.num_watched > 0
        gradients = group.gradients
        if gradients.is_local:
            gradients.assign(bucket_index, index, grad)
        else:
            self.reductions.collect(group, bucket_index, index, grad, is_layer=is_layer)
        is_last = group.count_arrival()
        if is_layer and 2 * group.num_arrived >= group.num_expected:
            self._prefetch_put_off()
        if not is_last or is_layer:
            return  # A layer is complete when backward leaves it, so that its memory is free.
        if group.records and group.is_innermost:
            # Nothing before these parameters wants a gradient, so backward needs them no more.
            in_pass = group.records[-1].in_pass
            group.close_records()
            self._leave(group, in_pass, is_last=True)
        self.reductions.complete(group)

    def _prefetch_put_off(self) -> None:
        """Carry out the prefetch that was put off."""
        if self._put_off:
            groups, self._put_off = self._put_off, []
            self.reductions.finish(leave=groups[0].settings.max_send_buffers - 1)
            self._gather(groups)

    def end_backward(self) -> None:
        """The engine is done: reduce the rest, assign all gradients, free all memory."""
        for group in self.groups:
            group.grad_hooks.flush()
        if self._any_fired:
            self.reductions.finish_backward()
        else:
            self.reductions.order.cancel()
        self._backward_running = False  # Not after an error: the next forward cleans up then.
        for group in self.groups:
            group.forget_backward()
        self.schedule.hold(on=self._makes_graph)
        self._carry_out(self.schedule.end_backward())
        for group in self.groups:
            if not self._makes_graph and not self.schedule.in_use(group.index):
                group.show(unsharded=False)
            if group.kept_axis is not None and not self.schedule.awaits_backward(group.index):
                group.drop_parts()  # On a rank whose backward did not come to the group.
        if self.traced is not None:
            self.traced.end_backward(self.schedule.in_use)
        # The optimizer's temporaries want the room more than the next step wants mapped pages.
        self.slots.trim()
        self._settle_host_reads()

    # --- by hand ---

    def unshard(self, group: ParamGroup) -> None:
        """Start to unshard a group for the user."""
        self.streams.follow_compute()
        if group.is_stale:
            self._carry_out(self.schedule.refresh(group.index))
        self._carry_out(self.schedule.unshard(group.index))

    def wait_unshard(self, group: ParamGroup) -> None:
        """Finish `unshard` and show the unsharded parameters."""
        if group in self._put_off:
            self._prefetch_put_off()
        if group.index in self.schedule.live:
            group.wait_unshard()
            group.show(unsharded=True)
            if self.traced is not None and self.pass_root is None and not self._backward_running:
                self.traced.show_outside([group])

    def reshard(self, group: ParamGroup) -> None:
        """Give a group's memory back."""
        group.show(unsharded=False)
        self._carry_out(self.schedule.reshard(group.index))
        self._settle_host_reads()

    def reset(self) -> None:
        """Return to the state between steps after an exception; unsynced gradients are dropped."""
        self._backward_running = False
        self._interrupted = False
        self.pass_root = None
        self.streams.join()  # Memory is about to be given back that collectives may still use.
        if self.traced is not None:
            self.traced.abandon()
        self._carry_out(self.schedule.reset())
        for group in self.groups:
            group.show(unsharded=False)
            group.grad_hooks.discard()
            group.forget_backward()
        self.reductions.reset()
        self._put_off.clear()
        self.check.reset()
        self._settle_host_reads()

    # --- actions ---

    def _carry_out(self, actions: Sequence[Action]) -> None:
        ahead = []
        for op, index in actions:
            group = self.groups[index]
            if op is Op.WAIT:
                if group in self._put_off:
                    self._prefetch_put_off()
                group.wait_unshard()
            elif op is Op.GATHER:
                self._gather([group])
            elif op is Op.PREFETCH:
                ahead.append(group)
            elif group in self._put_off:
                self._put_off.remove(group)
            else:
                self.unsharded_nbytes -= group.unsharded_nbytes
                keeps = group.kept_axis is not None and self.schedule.awaits_backward(index)
                group.free(self.streams, self.slots, keep_parts=keeps)
        if ahead:
            self._prefetch(ahead)

    def _prefetch(self, groups: list[ParamGroup]) -> None:
        """Gather for later.

        Where only waiting frees memory, backward puts it off until half of the current group's
        gradients have come: by then the last reduction is done and activations are freed, and
        there is still enough compute left to hide it behind.
        """
        if self._is_host_synchronous and self._backward_running and self._in_trained_layer:
            self._prefetch_put_off()
            self._put_off = groups
        else:
            self._gather(groups)

    def _gather(self, groups: Sequence[ParamGroup]) -> None:
        by_axis: dict[AxisComm, list[ParamGroup]] = {}
        for group in groups:
            by_axis.setdefault(group.gather_axis, []).append(group)
            if group.shard_axis.size > 1 and group.needs_memory:
                self.check.note(agreement.GATHER, group.index)
            self.unsharded_nbytes += group.unsharded_nbytes
        self.peak_unsharded_nbytes = max(self.peak_unsharded_nbytes, self.unsharded_nbytes)
        for axis, together in by_axis.items():
            start_unshard(together, axis, self.streams, self.slots)


def _warn_unwatched(group: ParamGroup) -> None:
    """Say once per group that no output was found by which to tell when its backward begins."""
    if not group.has_warned and group.needs_memory:
        group.has_warned = True
        msg = (
            f"forward of {group.name!r} ran with gradients enabled, but returned no tensor that "
            f"requires one, so its parameters stay unsharded until the end of the next backward. "
            f"Return the tensors that the loss is made of, or run it under torch.no_grad()."
        )
        warnings.warn(msg, stacklevel=2)


def _distinct_axes(groups: Sequence[ParamGroup]) -> list[AxisComm]:
    axes: dict[AxisComm, None] = {}
    for group in groups:
        axes.setdefault(group.shard_axis)
        if group.replicate_axis is not None:
            axes.setdefault(group.replicate_axis)
    return list(axes)
