"""A backward of a root, from its first event to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardkit import _compat
from shardkit._errors import StateError
from shardkit._runtime.finite import FiniteNotes
from shardkit._runtime.summoned import refuse_summoned
from shardkit._watch_settings import watch_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shardkit._params.bucket_gradients import BucketGradients
    from shardkit._runtime.events import ForwardRecord
    from shardkit._runtime.gathers import Gathers
    from shardkit._runtime.group import ParamGroup
    from shardkit._runtime.passes import Passes
    from shardkit._runtime.reductions import Reductions
    from shardkit._schedule.unshard import UnshardSchedule


class Backward:
    """Follows a backward (`events.BackwardListener`): gathers, collects gradients, reduces.

    Args:
        groups: All groups of the root, by number.
        schedule: Schedule that decides what is gathered and freed.
        gathers: Gathers that carry out its actions.
        reductions: Reductions, which take gradients.
        passes: Passes: what else is to be done where operators are traced.

    Attributes:
        is_running: Whether a backward has begun whose end was not reported yet.
        finite_notes: Notes of which gradients of this rank were finite, if they are wanted.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        schedule: UnshardSchedule,
        gathers: Gathers,
        reductions: Reductions,
        passes: Passes,
    ) -> None:
        self.is_running = False
        self.finite_notes = FiniteNotes()
        self._groups = groups
        self._schedule = schedule
        self._gathers = gathers
        self._reductions = reductions
        self._passes = passes
        self._any_fired = False
        self._makes_graph = False
        self._inside: dict[int, list[ForwardRecord]] = {group.index: [] for group in groups}

    def begin_backward(self) -> None:
        """The first event of a backward: fix the order, ask for the end to be told."""
        if self.is_running:
            return
        self.is_running = True
        self._any_fired = False
        self._makes_graph = False
        self._reductions.begin_backward()
        _compat.queue_backward_callback(self.end_backward)

    def is_user_held(self, group: int) -> bool:
        """Whether the user has unsharded a group, and no forward or backward has used it since."""
        return self._schedule.state(group).is_user_held

    def enter_backward(self, record: ForwardRecord, grad: Tensor) -> None:
        """A gradient of a group's outputs came."""
        group = self._groups[record.group.index]
        refuse_summoned([group], "a backward was called")
        self._passes.enter_backward(group, grad)
        self.begin_backward()
        if torch.is_grad_enabled():  # The graph of this backward will read the memory.
            self._makes_graph = True
            self._schedule.hold(on=True)
        if record.active:
            return
        if record.versions != group.shard_versions:
            msg = (
                f"parameters of {group.name!r} were changed between a forward and its backward, so "
                f"gradients would be computed with weights that the forward did not use. Call "
                f"backward before optimizer.step(), or run the forward again."
            )
            raise StateError(msg)
        record.active = True
        self._inside[group.index].append(record)
        self._schedule.state(group.index).num_watched += record.has_input_grads
        wants_order = group.grad_hooks.has_user_hooks or watch_settings.check_gradients
        if wants_order and not group.grad_hooks.at_once:
            group.grad_hooks.collect_at_once()
        self._gathers.in_trained_layer = record.has_input_grads and group.is_trainable
        self._gathers.carry_out(self._schedule.enter_backward(group.index, record.in_pass))
        if group.settings.unshard_in_backward:
            group.show(unsharded=True)

    def exit_backward(self, record: ForwardRecord) -> None:
        """The gradients of a group's inputs came: backward is done with this forward of it."""
        if not record.active:
            return
        record.active = False
        group = self._groups[record.group.index]
        records, state = self._inside[group.index], self._schedule.state(group.index)
        records.remove(record)
        state.num_watched -= record.has_input_grads
        if records:
            return
        # A gradient comes after all uses of its parameter in a run of the engine. Inside of a
        # reentrant checkpoint that is a run of its own.
        is_last = state.has_all_gradients and record.in_pass is not None
        self._leave(group, record.in_pass, is_last=is_last)
        # What has not fired by now is not used. Where nothing has fired at all this may be
        # ``autograd.grad``, which reduces nothing; if it is not, the end of backward reduces.
        if state.is_complete or not group.is_trainable or not self._any_fired:
            return
        if is_last or not self._schedule.awaits_backward(group.index):
            self._complete(group)

    def _leave(self, group: ParamGroup, in_pass: int | None, *, is_last: bool) -> None:
        actions = self._schedule.exit_backward(group.index, in_pass, is_last=is_last)
        self._gathers.carry_out(actions)
        if not self._schedule.in_use(group.index):
            group.show(unsharded=False)

    def _complete(self, group: ParamGroup) -> None:
        self._schedule.state(group.index).is_complete = True
        self._reductions.complete(group)

    def on_grad(
        self, group_index: int, gradients: BucketGradients, index: int, grad: Tensor
    ) -> None:
        """An unsharded gradient came."""
        self.begin_backward()
        self._any_fired = True
        group, state = self._groups[group_index], self._schedule.state(group_index)
        grad = self._passes.enter_gradient(group, gradients.bucket, grad)
        is_layer = state.num_watched > 0
        if watch_settings.check_gradients:
            self.finite_notes.note(group.name, gradients.bucket.entries[index].name, grad)
        if group.gradients.is_local:
            group.gradients.assign(gradients, index, grad)
        else:
            self._reductions.collect(group, gradients, index, grad, is_layer=is_layer)
        if state.num_arrived == 0:
            state.expect_gradients(group.num_trainable)
        is_last = state.count_gradient()
        if is_layer and 2 * state.num_arrived >= state.num_expected:
            self._gathers.gather_put_off()
        if not is_last or is_layer:
            return  # A layer is complete when backward leaves it, so that its memory is free.
        records = self._inside[group_index]
        if records and group.is_innermost:
            # Nothing before these parameters wants a gradient, so backward needs them no more.
            in_pass = records[-1].in_pass
            self._close_records(group_index)
            state.num_watched = 0
            self._leave(group, in_pass, is_last=True)
        self._complete(group)

    def _close_records(self, group_index: int) -> None:
        """Backward needs the parameters no more for the forwards that it is inside of."""
        records = self._inside[group_index]
        for record in records:
            record.active = False
        records.clear()

    def end_backward(self) -> None:
        """The engine is done: reduce the rest, assign all gradients, free all memory."""
        for group in self._groups:
            group.grad_hooks.flush()
        if self._any_fired:
            self._reductions.finish_backward()
        else:
            self._reductions.order.cancel()
        self._forget()  # Not after an error: the next forward cleans up then.
        self._schedule.hold(on=self._makes_graph)
        self._gathers.carry_out(self._schedule.end_backward())
        for group in self._groups:
            if not self._makes_graph and not self._schedule.in_use(group.index):
                group.show(unsharded=False)
            if group.kept_axis is not None and not self._schedule.awaits_backward(group.index):
                for store in group.gathered:
                    store.drop_part()  # On a rank whose backward did not come to the group.
        self._passes.end_backward(self._schedule.in_use)
        self._gathers.trim()
        self._gathers.settle_host_reads()  # order: after a backward the host waits for copies

    def _forget(self) -> None:
        """Nothing of a backward is left."""
        self.is_running = False
        self._gathers.in_trained_layer = False
        for group in self._groups:
            self._close_records(group.index)
            self._schedule.state(group.index).forget_gradients()

    def reset(self) -> None:
        """Forget a backward after an exception."""
        for group in self._groups:
            group.grad_hooks.discard()
        self._forget()
