"""A backward of a root, from its first event to its end.

The module also handles gradients that are not finite, and backwards for chosen inputs only.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge

from shardkit import _events
from shardkit._compat import torch_autograd, torch_fsdp2, torch_tensors
from shardkit._errors import NonFiniteGradientError, StateError
from shardkit._params.bucket import bucket_showing, settled
from shardkit._params.memory import NAME_ATTRIBUTE, is_unsharded
from shardkit._runtime.group import ParamGroup, refuse_summoned
from shardkit._settings import watch_settings
from shardkit._tensor.sharded import ShardedTensor, averaged
from shardkit._text import listed, listed_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from shardkit._params.gradients import UnshardedGrad
    from shardkit._runtime.events import ForwardRecord
    from shardkit._runtime.passes import Passes
    from shardkit._runtime.traffic import Gathers, Reductions
    from shardkit._schedule import Action, UnshardSchedule
    from shardkit._tensor.spec import Axis
    from shardkit.backends.base import AxisComm


# --- gradients that are not finite ----------------------------------------------------------------

_Key = tuple[str, str]  # A group's name and a parameter's.


class FiniteNotes:
    """Notes that say whether unsharded gradients of this rank were finite, since the last `take`.

    The notes stay on the device, so that the host does not wait for them.
    """

    def __init__(self) -> None:
        self._is_finite: dict[_Key, Tensor] = {}

    def note(self, group: str, grads: Sequence[UnshardedGrad]) -> None:
        """Note gradients before they are averaged; backward reaches the last layers first."""
        for gradients, index, grad in grads:
            key = group, gradients.bucket.entries[index].name
            is_finite, before = _is_finite(grad), self._is_finite.get(key)
            self._is_finite[key] = is_finite if before is None else before & is_finite

    def take(self) -> list[_Key]:
        """Return and drop groups and parameters that were not finite, in the order of backward."""
        notes, self._is_finite = self._is_finite, {}
        return _selected(notes)


def check_gradients(
    groups: Sequence[ParamGroup], notes: FiniteNotes, axes: Sequence[AxisComm], rank: int
) -> None:
    """Raise, on every rank, if gradients of any rank are not finite.

    `notes` are about this rank's gradients before they were averaged; there may be none.

    Raises:
        NonFiniteGradientError: A gradient of any rank is not finite. Every rank raises.

    Cost: it reads all gradients and waits for the device once; an exchange over each axis.
    """
    averaged: dict[_Key, Tensor] = {}
    for group in groups:
        for bucket in group.buckets:
            for entry in bucket.entries:
                if entry.param.grad is not None:
                    averaged[group.name, entry.name] = _is_finite(entry.param.grad)
    mine = (rank, notes.take(), _selected(averaged))
    found = {rank: mine}
    for axis in axes:
        if axis.size > 1:
            for part in axis.exchange(found):
                found.update(part)
    text = _describe([found[each] for each in sorted(found)])
    if text is not None:
        raise NonFiniteGradientError(text)


def _is_finite(grad: Any) -> Tensor:
    local: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
    return torch.isfinite(local.detach()).all()


def _selected(is_finite: dict[_Key, Tensor]) -> list[_Key]:
    """Return the keys of gradients that are not finite, with one transfer from the device."""
    if not is_finite:
        return []
    device = next(iter(is_finite.values())).device
    flags = torch.stack([flag.to(device) for flag in is_finite.values()]).tolist()
    return [key for key, flag in zip(is_finite, flags, strict=True) if not flag]


def _describe(found: Sequence[tuple[int, list[_Key], list[_Key]]]) -> str | None:
    """Return the error's text from the keys that were not finite before and after the average."""
    began = [(rank, local) for rank, local, _ in found if local]
    averaged = list(dict.fromkeys(key for _, _, keys in found for key in keys))
    if began:
        ranks = [
            f"on rank {rank} first in {_show(local[0])}, in {len(local)} parameters in all"
            for rank, local in began
        ]
        where = "; ".join(listed_lines(ranks, "and on {} more"))
        return (
            f"gradients are not finite before they are averaged: {where}. Backward comes to the "
            f"last layers first: look at what this layer computes there, and at that rank's batch."
        )
    if averaged:
        named = listed(averaged, _show)
        return (
            f"gradients are not finite after they were averaged: {named}. To be told on "
            f"which rank that begins, call set_watch(check_gradients=True) before the backward, or "
            f"set SHARDKIT_CHECK_GRADIENTS=1. If all ranks were finite before, the sum has "
            f"overflowed: choose a wider reduce_dtype."
        )
    return None


def _show(key: _Key) -> str:
    group, parameter = key
    return f"{parameter!r}" if group in ("", parameter) else f"{parameter!r} (group {group!r})"


# --- a backward of a root -------------------------------------------------------------------------

_numbers = itertools.count(1)  # One count per process: a forward may outlive its root.


@dataclass(eq=False)
class Backward:
    """Handler of a backward's `events`, which gathers, collects gradients and reduces."""

    _groups: Sequence[ParamGroup]
    _schedule: UnshardSchedule
    _gathers: Gathers
    _reductions: Reductions
    _passes: Passes
    is_running: bool = False  # Whether a backward has begun whose end was not reported yet.
    # Notes of which gradients of this rank were finite, if users want them.
    finite_notes: FiniteNotes = field(default_factory=FiniteNotes)
    # Function that cleans up after a backward that an exception has ended; None: none has, or that
    # is done.
    recover: Callable[[], None] | None = None
    _any_fired: bool = False
    _makes_graph: bool = False
    _number: int = 0
    _awaits_run: bool = False  # Whether a forward has begun it, and no gradient has come yet.
    _run: int = -1  # Number of the engine's run whose end ends it.

    def __post_init__(self) -> None:
        """Begin outside of all forwards."""
        self._inside: dict[int, list[ForwardRecord]] = {group.index: [] for group in self._groups}

    def begin_backward(self, *, by_forward: bool = False) -> None:
        """Handle the first event of a backward: fix the order, and ask for a call at the end.

        A forward inside of another model's backward may be followed by a backward of its own, also
        inside: then the end of that one is the end.
        """
        if self.recover is not None:
            self.recover()
        if self.is_running:
            if self._awaits_run and not by_forward:
                self._awaits_run = False
                if self._run != torch_autograd.current_run():
                    self._any_fired = not _chosen
                    torch_autograd.queue_backward_callback(self.end_backward)
            return
        self.is_running = True
        self._awaits_run = by_forward
        self._run = torch_autograd.current_run()
        self._number = next(_numbers)
        self._any_fired = not _chosen
        self._makes_graph = False
        if _events.observer is not None:
            first = self._groups[0]
            _events.observer.begin_pass("backward", first.name, first.number)
        self._reductions.begin_backward()
        torch_autograd.queue_backward_callback(self.end_backward)

    def is_user_held(self, group: ParamGroup) -> bool:
        """Whether the user has unsharded a group, and no forward or backward has used it since."""
        return self._schedule.states[group.index].is_user_held

    def leave_gradient(self, grad: Tensor) -> Tensor:
        """Return what a user sees of the gradient of an unsharded parameter, before the average."""
        return self._passes.leave_gradient(grad)

    def enter_backward(self, record: ForwardRecord, grad: Tensor) -> None:
        """Handle the arrival of a gradient of a group's outputs."""
        group = self._groups[record.group.index]
        refuse_summoned([group], "a backward was called")
        self._passes.enter_backward(group, grad)
        self.begin_backward()
        if torch.is_grad_enabled():  # The graph of this backward will read the memory.
            self._makes_graph = True
            self._schedule.hold(on=True)
        if record.active:
            return
        if _apart and group.is_trainable and not self._schedule.states[group.index].is_lent:
            msg = (
                f"a pipeline computes the gradients of inputs and of weights apart, and its "
                f"schedule has not unsharded {group.name!r}, whose parameters would get no "
                f"gradients. Call fully_shard on the module that PipelineStage gets, and not only "
                f"on layers in it, and run it by a schedule of torch or a class derived from one "
                f"(torch 2.9 has schedules that do not unshard)."
            )
            raise StateError(msg)
        if record.versions != group.shard_versions:
            msg = (
                f"parameters of {group.name!r} were changed between a forward and its backward, so "
                f"gradients would be computed with weights that the forward did not use. Call "
                f"backward before optimizer.step(), or run the forward again."
            )
            raise StateError(msg)
        record.active = True
        record.run = group.grad_hooks.run = torch_autograd.current_run()
        self._reductions.order.reach(group.index)
        is_inside = bool(self._inside[group.index])
        self._inside[group.index].append(record)
        state = self._schedule.states[group.index]
        reports_exit = record.input_grads is not None
        state.num_watched += reports_exit
        hooks = group.grad_hooks
        if not (is_inside or hooks.at_once) and (
            watch_settings.check_gradients
            or hooks.has_user_hooks
            or not group.gradients.is_local  # A hook on reduced buffers was set.
        ):
            hooks.collect_at_once()
        is_trained_layer = reports_exit and group.is_trainable
        self._gathers.in_trained_layer = is_trained_layer
        if is_trained_layer and self._may_hold(group):
            if state.num_arrived == 0:
                state.expect_gradients(group.num_trainable)
            hooks.hold(state, self.some_have_come, at_first=not group.gradients.copies_together)
        self._gathers.carry_out(self._schedule.enter_backward(group.index, record.in_pass))
        if group.settings.unshard_in_backward:
            group.show(unsharded=True)
        if _events.observer is not None:
            _events.observer.begin("compute", group.name, group=group.number)

    def _may_hold(self, group: ParamGroup) -> bool:
        """Whether no code needs each gradient of a layer as soon as it comes."""
        return (
            group.gradients.holds_layers(sync=group.settings.sync)
            and not group.gradients.are_converted
            and not group.gradients.is_local
            and not self._makes_graph
            and not watch_settings.check_gradients
        )

    def exit_backward(self, record: ForwardRecord) -> None:
        """Leave a forward of a group, whose inputs' gradients have come."""
        if not record.active:
            return
        record.active = False
        group = self._groups[record.group.index]
        records, state = self._inside[group.index], self._schedule.states[group.index]
        records.remove(record)
        hooks = group.grad_hooks
        if hooks.nested:
            hooks.flush()
        hooks.run = records[-1].run if records else -1
        self._note_left(group, record)
        if _events.observer is not None:
            _events.observer.end("compute", group.number)
        state.num_watched -= record.input_grads is not None
        self._any_fired |= state.num_arrived > 0
        self._gathers.gather_put_off()
        if not state.num_watched:
            hooks.release()
        if records:
            return
        in_own_run = record.in_pass is None  # In that of a reentrant checkpoint.
        is_last = not in_own_run and not self._comes_again(group)
        actions = self._schedule.exit_backward(group.index, record.in_pass, is_last=is_last)
        self._leave(group, actions)
        # A parameter without a gradient by now is not used. A run for chosen tensors may bring no
        # gradients at all, as ``autograd.grad`` does: then nothing is reduced.
        if state.is_complete or not group.is_trainable:
            return
        comes_later = not is_last and (
            not in_own_run
            or state.awaits_other_modules
            or self._schedule.awaits_backward(group.index)
        )
        if comes_later:
            return
        if hooks.at_once and (state.num_arrived == 0 or state.num_arrived < state.num_expected):
            self._take_set_by_hand(group)
        if self._any_fired and not state.is_complete:
            self._complete(group)

    def _comes_again(self, group: ParamGroup) -> bool:
        """Whether the backward of another forward of the group comes in this run, or may come.

        Ranks may use different parameters, so the answer must not depend on gradients that came. If
        the inputs of another forward require no gradients, it has no node to look for.
        """
        if self._schedule.awaits_unreported(group.index):
            return True
        entered = self._inside[group.index]
        for each in entered:
            # User code may run more forwards inside backward. Where it calls backward in there,
            # some gradients came in another run of the engine, so those of this one may be missing.
            if each.in_pass is None or each.run != entered[-1].run:
                return True
        for ref in group.forwards.copy():
            record = ref()
            if record is None or record.active or record.left_in == self._number:
                continue
            if record.is_in_run:
                return True
        return False

    def _note_left(self, group: ParamGroup, record: ForwardRecord) -> None:
        """Note that backward has left a forward; it comes back only if the graph is retained."""
        record.left_in = self._number
        if not torch_autograd.keeps_graph():
            group.forwards.discard(weakref.ref(record))

    def _leave(self, group: ParamGroup, actions: Sequence[Action]) -> None:
        self._gathers.carry_out(actions)
        if not self._schedule.stays_shown(group.index):
            group.show(unsharded=False)

    def _take_set_by_hand(self, group: ParamGroup) -> None:
        """Take gradients that the user's code has set on parameters, which no hook reports.

        A pipeline sets those of weights itself, and they are taken at the end of its step.
        """
        state = self._schedule.states[group.index]
        if not (state.is_complete or state.is_lent):
            group.grad_hooks.take_left()

    def _complete(self, group: ParamGroup) -> None:
        self._schedule.states[group.index].is_complete = True
        self._reductions.complete(group)

    def on_grads(self, group: ParamGroup, grads: Sequence[UnshardedGrad]) -> None:
        """Handle the arrival of unsharded gradients."""
        if not self.is_running or self._awaits_run or self.recover is not None:
            self.begin_backward()
        self._any_fired = True
        state = self._schedule.states[group.index]
        if self._makes_graph:
            _refuse_graphs(grads)
        grads = self._passes.enter_gradients(group, grads)
        is_layer = state.num_watched > 0
        if watch_settings.check_gradients:
            self.finite_notes.note(group.name, grads)
        if group.gradients.is_local:
            group.gradients.assign(grads)
        else:
            self._reductions.collect(group, grads, is_layer=is_layer)
        if state.num_arrived == 0:
            state.expect_gradients(group.num_trainable)
        is_last = state.count_gradients(len(grads))
        if is_layer:
            self.some_have_come(group)
        # A layer is complete when backward leaves it, so that its memory is free. If backward comes
        # to another forward of the group, other ranks may have used parameters there.
        if not is_last or is_layer or self._comes_again(group):
            return
        records = self._inside[group.index]
        none_is_frozen = state.num_expected == group.num_params
        if records and group.is_innermost and none_is_frozen:
            # All uses of these parameters are over. Those of a frozen one may still come, if a
            # tensor from elsewhere (an ignored parameter) went through it.
            in_pass = records[-1].in_pass
            self._close_records(group.index)
            state.num_watched = 0
            self._leave(group, self._schedule.leave_early(group.index, in_pass))
        is_reduced = group.settings.sync and not group.gradients.may_be_local
        if is_reduced and not self._reductions.order.expects(group.index):
            return  # The end reduces it: a rank that does not use all of it would not do so now.
        self._complete(group)

    def some_have_come(self, group: ParamGroup) -> None:
        """Note that the first, or half, of a layer's gradients have come.

        When the first one comes, gradients of the layer before are freed, if other ranks read them.
        When half of them have come, the layer that backward reaches next is gathered.
        """
        state = self._schedule.states[group.index]
        if state.num_arrived == 1:
            self._reductions.free_read(group)
        if 2 * state.num_arrived >= state.num_expected:
            self._gathers.gather_put_off()

    def _close_records(self, group_index: int) -> None:
        """Close the open forwards of a group, for which backward no longer needs the parameters."""
        records = self._inside[group_index]
        for record in records:
            record.active = False
            self._note_left(self._groups[group_index], record)
            if _events.observer is not None:
                _events.observer.end("compute", self._groups[group_index].number)
        records.clear()

    def end_backward(self) -> None:
        """Handle the end of the engine's run: reduce the rest, assign gradients, free memory."""
        if not self.is_running:
            return  # It has ended in a run inside of this one.
        for group in reversed(self._groups):  # As backward comes to them.
            group.grad_hooks.flush()
            state = self._schedule.states[group.index]
            is_missed = state.num_arrived == 0 and self._inside[group.index]
            if is_missed or state.num_arrived < state.num_expected:
                self._take_set_by_hand(group)
            self._any_fired |= state.num_arrived > 0
        if self._any_fired:
            self._reductions.finish_backward()
        else:
            self._reductions.order.cancel()
        self._forget()  # Not after an error: then the next forward cleans up.
        is_retained = torch_autograd.keeps_graph()
        reads_again = self._makes_graph or (self._schedule.is_held and is_retained)
        self._schedule.hold(on=reads_again)
        actions = self._schedule.end_backward(is_retained=is_retained)
        self._gathers.carry_out(actions)
        self._reductions.order.keep(self._schedule.awaited)
        for group in self._groups:
            if not reads_again and not self._schedule.in_use(group.index):
                group.show(unsharded=False)
            if group.kept_axes and not self._schedule.awaits_backward(group.index):
                for store in group.gathered:
                    store.drop_part()  # On this rank backward did not reach the group.
        self._passes.end_backward(self._schedule.in_use)
        self._gathers.trim()
        self._gathers.settle_host_reads()  # order: after a backward the host waits for copies
        if _events.observer is not None:
            _events.observer.end_backward(self._groups[0].number)

    # --- backwards of a pipeline's schedule, which do not sync ---

    def take_left(self) -> None:
        """Take gradients that came by ``autograd.grad`` and were put on unsharded parameters.

        Schedules that compute gradients of inputs first, and of weights later, put them there.
        """
        groups = [group for group in self._groups if group.grad_hooks.has_left]
        if not groups:
            return
        self.is_running = True  # But the engine does not run, so nothing may be queued.
        self._any_fired = self._makes_graph = False
        self._reductions.begin_backward()
        for group in groups:
            group.grad_hooks.take_left()
        self.end_backward()

    def finish_step(self, groups: Sequence[ParamGroup], *, wait: bool = True) -> None:
        """Reduce gradients of some groups that backwards left unsynced; `wait` for all."""
        self.take_left()
        self._reductions.finish_step(groups, wait=wait)

    def _forget(self) -> None:
        """Drop the state of a backward."""
        self.is_running = False
        self._gathers.in_trained_layer = False
        for group in self._groups:
            group.grad_hooks.release()
            group.grad_hooks.run = -1
            self._close_records(group.index)
            self._schedule.states[group.index].forget_gradients()

    def reset(self) -> None:
        """Drop a backward after an exception."""
        self.recover = None
        for group in self._groups:
            group.grad_hooks.discard()
            group.forwards.clear()
        self._forget()


# --- backwards for chosen tensors -----------------------------------------------------------------
#
# Users name sharded parameters. But forwards use the unsharded ones, and gradients arrive there,
# so the engine is asked for these.


_apart: list[None] = []
"""List that is not empty while gradients of a stage's inputs are computed, before those of weights.

It belongs to the process, not to a thread: the engine of an accelerator runs in other threads.
"""

_chosen: list[None] = []
"""List that is not empty while the engine runs for chosen tensors; of the process, as `_apart`."""


def run_backward(engine: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run the engine for some tensors; gradients of sharded parameters come back sharded.

    Args:
        engine: Autograd engine of torch.
        *args: Outputs, their gradients, whether to keep and to make a graph, the tensors; for
            `autograd.grad` also whether these may be unused.
        **options: Options of the engine. `accumulate_grad`: whether gradients go to ``.grad`` or
            are returned.

    Cost: only the backward if gradients accumulate in ``.grad``. For ``autograd.grad`` an
    all-reduce of each gradient, and one of a flag for each.
    """
    is_apart = not options["accumulate_grad"] and torch_fsdp2.goes_to_inputs_of_stage(
        inspect.currentframe()
    )
    if is_apart:
        _apart.append(None)
    _chosen.append(None)
    try:
        return engine(*args, **options) if is_apart else _run_for_chosen(engine, args, options)
    finally:
        _chosen.pop()
        if is_apart:
            _apart.pop()


def _run_for_chosen(
    engine: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    outputs, grads, keep_graph, create_graph, inputs, *more = args
    found = [_pair(tensor) for tensor in inputs]
    if all(whole is None for _, whole in found):
        return engine(*args, **options)
    wanted = tuple(each for pair in found for each in pair if each is not None)
    args = (outputs, grads, keep_graph, create_graph, wanted)
    if options["accumulate_grad"]:
        return engine(*args, *more, **options)
    if torch_tensors.in_function_transform() or any(map(torch_tensors.is_batched, grads)):
        msg = (
            "torch.autograd.grad for sharded parameters was called inside of a transform "
            "(is_grads_batched=True, vmap): gradients are averaged over the ranks one by one. "
            "Call it for each output, or take gradients by whole values: "
            "torch.func.functional_call(model, {name: param.full_tensor(), ...}, ...)."
        )
        raise StateError(msg)
    results = iter(engine(*args, True, **options))
    pairs = [
        (next(results), None if unsharded is None else next(results)) for _, unsharded in found
    ]
    with torch.set_grad_enabled(create_graph):
        return _combined(found, pairs, allow_unused=bool(more[0]))


def refuse_compiled(outputs: Iterable[Any]) -> None:
    """Refuse a backward that torch compiles if it goes through sharded modules.

    Raises:
        StateError: It computes gradients of unsharded parameters.
    """
    for param in torch_autograd.leaves_of(outputs):
        if is_unsharded(param):
            msg = (
                f"compiled autograd cannot run a backward through sharded "
                f"{param.__dict__[NAME_ATTRIBUTE]!r}: it reads the parameters of all layers before "
                f"the first of them is gathered. Leave torch._dynamo.config.compiled_autograd at "
                f"False, or call backward outside of the compiled function. Compiled layers have "
                f"compiled backwards without it."
            )
            raise StateError(msg)


def note_freed_memory(error: BaseException) -> None:
    """Add a note to an error of the engine that has found no memory behind a tensor."""
    if "out of bounds for storage of size 0" in str(error):
        error.add_note(
            "this backward reads parameters of a sharded module whose memory was freed. If "
            "create_graph=True made its graph: run it before the next other backward of the "
            "model, each time but the last with retain_graph=True. If reshard() was called after "
            "the forward, call it after the backward. If the loss is made of tensors from inside "
            "of the module (of a hook or an attribute), let its forward return them. In other "
            "cases, call set_reshard_after_forward(False) and set_reshard_after_backward(False) "
            "on it."
        )


def _refuse_graphs(grads: Iterable[UnshardedGrad]) -> None:
    for gradients, index, grad in grads:
        if grad.requires_grad:
            name = gradients.bucket.entries[index].name
            msg = (
                f"backward(create_graph=True) made the gradient of parameter {name!r}: it goes to "
                f"a buffer of its group, which has no graph. Take differentiable gradients by "
                f"torch.autograd.grad(loss, list(model.parameters()), create_graph=True)."
            )
            raise StateError(msg)


def _pair(tensor: Any) -> tuple[Any, Any]:
    """Return a tensor, and the unsharded parameter that was used in its place, if it has one.

    Users may pass the edge of the graph that ends in a sharded parameter (`get_gradient_edge`).
    """
    leaf = getattr(tensor.node, "variable", None) if isinstance(tensor, GradientEdge) else None
    if isinstance(leaf, ShardedTensor):
        tensor = leaf
    if isinstance(tensor, ShardedTensor):
        unsharded = tensor.unsharded
        return tensor, unsharded if unsharded is not None and unsharded.requires_grad else None
    sharded = settled(tensor)
    return sharded, None if sharded is tensor else tensor


def _combined(
    found: Sequence[tuple[Any, Any]], results: Sequence[tuple[Any, Any]], *, allow_unused: bool
) -> tuple[Tensor | None, ...]:
    """Return for each input the average over uses of the whole, plus the gradient of other uses.

    The average is divided by the module's own factor, if it has one.
    """
    used = _used_anywhere(found, results)
    grads: list[Tensor | None] = []
    for index, ((tensor, unsharded), (own, whole)) in enumerate(zip(found, results, strict=True)):
        grad = own
        if used[index]:
            zeros = functools.partial(torch.zeros, dtype=tensor.dtype, device=unsharded.device)
            local = zeros(tensor.shape) if whole is None else _seen_outside(whole, unsharded)
            grad = _divided(averaged(local, tensor), unsharded)
            grad = grad if own is None else grad + own
        if grad is None and not allow_unused:
            name = repr(tensor.spec.name) if isinstance(tensor, ShardedTensor) else f"{index}"
            msg = (
                f"One of the differentiated Tensors appears to not have been used in the graph: "
                f"{name}. Set allow_unused=True if this is the desired behavior."
            )
            raise RuntimeError(msg)
        grads.append(grad)
    return tuple(grads)


def _seen_outside(grad: Tensor, unsharded: object) -> Tensor:
    """Return a gradient as the code sees it that runs the model."""
    bucket = bucket_showing(unsharded)
    group = None if bucket is None or bucket.group is None else bucket.group()
    if group is None or group.listener is None or group.listener.is_user_held(group):
        return grad
    seen: Tensor = group.listener.leave_gradient(grad)
    return seen


def _divided(average: Tensor, unsharded: object) -> Tensor:
    """Return an average of gradients, divided as `set_gradient_divide_factor` says."""
    bucket = bucket_showing(unsharded)
    group = None if bucket is None or bucket.group is None else bucket.group()
    factor: float | None = None if group is None else group.settings.comm.divide_factor
    if bucket is None or factor is None:
        return average
    return average * (bucket.plan.num_ranks / factor)


def _used_anywhere(
    found: Sequence[tuple[Any, Any]], results: Sequence[tuple[Any, Any]]
) -> list[bool]:
    """Return for each input whether any rank has used the whole. Collective, unless it is traced.

    Ranks that are traced run equal programs.
    """
    used = [whole is not None for _, whole in results]
    by_axes: dict[tuple[Axis, ...], list[int]] = {}
    for index, (tensor, unsharded) in enumerate(found):
        if unsharded is not None and not tensor.spec.is_traced:
            axes = tuple(axis for axis in tensor.spec.data_parallel_axes if axis.size > 1)
            by_axes.setdefault(axes, []).append(index)
    for axes, indices in by_axes.items():
        device = found[indices[0]][1].device
        flags = torch.tensor([used[index] for index in indices], dtype=torch.int64, device=device)
        for axis in axes:
            axis.all_reduce(flags, "max")
        for index, flag in zip(indices, flags.tolist(), strict=True):
            used[index] = bool(flag)
    return used
