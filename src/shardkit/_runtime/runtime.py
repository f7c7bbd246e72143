"""The runtime of all groups of a root, which handles the events of modules' forwards.

Events come from the hooks (`_module.hooks`), decisions from `_schedule`. `traffic` carries
decisions out and sends gradients, and `backward` handles autograd's events. No code here depends on
a backend.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardkit import _events
from shardkit._compat import torch_autograd, torch_tensors
from shardkit._errors import StateError, warn_user
from shardkit._params.memory import SlotPool
from shardkit._runtime.agreement import (
    UsedParameters,
    check_same_model,
    compared_meshes,
    is_on_part,
)
from shardkit._runtime.backward import Backward, note_freed_memory
from shardkit._runtime.events import ForwardRecord, InputGrads
from shardkit._runtime.group import ParamGroup, refuse_summoned
from shardkit._runtime.passes import Passes, TracedPasses
from shardkit._runtime.traffic import (
    Gathers,
    Reductions,
    keep_own_writes,
    keep_writes,
    refuse_unseen_writes,
)
from shardkit._schedule import Memory, UnshardSchedule
from shardkit._text import listed
from shardkit._tree import iter_tensors
from shardkit.backends.base import AxisComm, CommStreams, Done, InGraph, Reduction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor, nn

    from shardkit._settings import RootSettings
    from shardkit.backends.device import Event


# --- debugging: dummy collectives, lines about memory ---------------------------------------------

_MIB = 2**20


@dataclass(eq=False)
class DummyStreams:
    """Streams that move nothing between ranks: a rank uses its own data as the data of all ranks.

    Buffers, casts and results are as usual, so a step lacks only the collectives. All work runs on
    the compute stream. Values of the groups are worthless after the first dummy. `_which` names the
    collectives in the warning.
    """

    _streams: CommStreams
    _groups: Sequence[ParamGroup]
    _which: str
    _has_warned: bool = False

    def __getattr__(self, name: str) -> Any:
        """Leave all other attributes to the streams."""
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

    @torch_tensors.without_dispatch_modes
    @torch.no_grad()
    def start_gather(
        self, gathers: Sequence[Any], axis: AxisComm, after: Sequence[Event | None], of: str
    ) -> Done:
        """Fill every rank's range with this rank's data."""
        del of
        self._note_use()
        for fence in after:
            self._streams.wait_fence(fence)
        if self._streams.region is not None:
            for gather in gathers:
                gather.wholes = self._traced(self._streams.region, gather, axis.size)
            return Done([], InGraph())
        for gather in gathers:
            for chunk in gather.full.view(axis.size, -1):
                if chunk.data_ptr() != gather.shard.data_ptr():
                    chunk.copy_(gather.shard)
        return Done([], self._streams.fence())

    def _traced(self, region: Any, gather: Any, size: int) -> list[Tensor]:
        parts = [region.enter_piece(piece) for piece in gather.pieces]
        if region.gathers_wait:
            parts = region.after_progress(parts)
        return [part.to(gather.dtype).repeat(size) for part in parts]

    @torch_tensors.without_dispatch_modes
    @torch.no_grad()
    def start_reduce(self, reductions: Sequence[Reduction], of: str) -> Done:
        """Use this rank's gradients as those of all ranks; a sum has them once per rank."""
        del of
        self._note_use()
        region = self._streams.region
        outs = []
        for reduction in reductions:
            axis, replicas = reduction.shard_axis, reduction.replicate_axis
            # If one process traces all ranks, no rank is this one.
            own = reduction.whole().view(axis.size, -1)[0 if region is not None else axis.rank]
            out = own * (axis.size * (replicas.size if replicas is not None else 1))
            if reduction.carry is not None:
                out = out.to(reduction.carry.dtype) + reduction.carry
            out = (out * reduction.scale).to(reduction.out_dtype)
            if reduction.hook is not None:
                reduction.hook(out)
            outs.append(out.cpu() if reduction.is_to_host else out)
        return Done(outs, InGraph() if region is not None else self._streams.fence())


def memory_report(
    message: str, gathers: Gathers, reductions: Reductions
) -> Callable[[str, Sequence[ParamGroup]], None]:
    """Return a function that prints the memory of unsharded parameters when it changes."""

    def report(what: str, groups: Sequence[ParamGroup]) -> None:
        device = groups[0].device
        names = ", ".join(group.name for group in groups)
        line = (
            f"[{message} rank {groups[0].mesh.rank}] {what} {names}: unsharded "
            f"{gathers.nbytes / _MIB:.2f} MiB (peak {gathers.peak_nbytes / _MIB:.2f}), reductions "
            f"at most {reductions.peak_nbytes / _MIB:.2f}"
        )
        if device.type == "cuda":
            line += f", allocated {torch.cuda.memory_allocated(device) / _MIB:.2f}"
        sys.stderr.write(line + "\n")

    return report


def apply_debug(
    settings: RootSettings,
    groups: Sequence[ParamGroup],
    streams: CommStreams,
    gathers: Gathers,
    reductions: Reductions,
) -> None:
    """Apply the debug settings of a root to its gathers and reductions."""
    for user, is_dummy, which in (
        (gathers, settings.dummy_gathers, "gathers"),
        (reductions, settings.dummy_reductions, "reductions"),
    ):
        user.use_streams(DummyStreams(streams, groups, which) if is_dummy else streams)
    message = settings.memory_message
    report = None if message is None else memory_report(message, gathers, reductions)
    gathers.report = reductions.report = report


def forget_casts(*, needs_backward: bool) -> None:
    """Free the copies of weights that autocast keeps until it ends, if no backward reads them.

    They are whole copies, and would outlive the unsharded parameters.
    """
    if not needs_backward or torch_autograd.has_saved_tensors_hooks():  # As in a checkpoint.
        torch.clear_autocast_cache()


# --- the runtime ----------------------------------------------------------------------------------

_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()


def note_failed_backward(error: BaseException) -> None:
    """Note an exception that ended a run of the engine: another backward may come at once."""
    note_freed_memory(error)
    if torch_autograd.in_backward():
        return  # The run around it goes on if its code catches the exception.
    for runtime in [*_runtimes]:
        if runtime.backward.is_running and not runtime.is_of_other_thread:
            runtime.backward.recover = runtime.reset


class Runtime:
    """State that the groups of one root share.

    Args:
        groups: All groups, in module order.
        settings: Settings of the root; call `update_options` after a change.
        share: Runtime of another root whose streams and memory to use.

    Attributes:
        groups: Groups by number.
        axes: Every mesh axis in use.
        schedule: Schedule that decides which groups have memory.
        gathers: Gathers that carry out its actions.
        reductions: Reductions of gradients.
        backward: Follower of backwards.
        passes: Passes, with the further work of backends that trace operators.
        used: Record of the parameters that any rank used.
        pass_root: Module whose forward is under way as a root; None: there is none.
        is_on_part: Whether other ranks of the world are in none of its meshes.
        optimizer_event: Event after the optimizer's step, for which the next pass waits.
        finalization: Handle of reductions that `finalize_backward` has started, and for which
            nobody has waited; None: there are none.
    """

    def __init__(
        self, groups: Sequence[ParamGroup], settings: RootSettings, share: Runtime | None = None
    ) -> None:
        self.groups = list(groups)
        self.settings = settings
        backend = groups[0].mesh.backend
        kind = groups[0].device.type
        self._autocast_type = kind if torch.amp.is_autocast_available(kind) else "cpu"
        for index, group in enumerate(self.groups):
            group.index = index
        # A process that holds all ranks has no other ranks to compare with.
        every_axis = dict.fromkeys(axis for group in self.groups for axis in group.axes)
        self.axes = axes = [] if backend.is_spmd else [*every_axis]
        self.is_on_part = not backend.is_spmd and is_on_part(self.groups)
        meshes = [] if backend.is_spmd else compared_meshes(self.groups)
        check_same_model(self.groups, meshes)
        for group in self.groups:
            group.check_materialized()
            if group.was_replaced:
                group.refresh()
        self.streams: CommStreams = backend.make_streams(axes, share and share.streams)
        self.slots: SlotPool = SlotPool(self.streams) if share is None else share.slots
        nbytes, is_idle = self._sizes()
        self.schedule = UnshardSchedule(
            nbytes=nbytes if backend.batches_small_groups else (), is_idle=is_idle
        )
        # If operators are traced, all ranks have one graph, or none runs at all.
        self.used = UsedParameters(self.groups, [] if backend.is_traced else meshes)
        self.gathers = Gathers(self.groups, self.schedule, self.streams, self.slots)
        self.reductions = Reductions(
            self.groups,
            self.streams,
            self.slots,
            self.used,
            batch_nbytes=self.schedule.batch_nbytes,
            before_start=self.gathers.gather_put_off,
        )
        self.gathers.make_room = self.reductions.make_room
        region = self.streams.region
        self.passes = (
            Passes(groups[0].device)
            if region is None
            else TracedPasses(region, self.groups, settings)
        )
        self.backward = Backward(
            self.groups, self.schedule, self.gathers, self.reductions, self.passes
        )
        for group in self.groups:
            group.listener = self.backward
        self.pass_root: object = None
        self.finalization: object = None
        self._interrupted = False
        self._thread = threading.get_ident()  # That of the last pass.
        self.optimizer_event: Event | None = None
        self._memory_axes: list[AxisComm] = []
        self._noted_versions: list[tuple[int, ...]] = [() for _ in self.groups]
        self._warned: set[int] = set()
        _runtimes.add(self)
        self.update_options()

    def __del__(self) -> None:
        """Let compute wait for collectives in flight, whose memory is freed now."""
        streams = getattr(self, "streams", None)
        if streams is not None:
            with contextlib.suppress(Exception):  # Python may be shutting down.
                streams.join()  # order: a dropped model's memory waits for all streams

    def hand_over(self) -> list[ParamGroup]:
        """Hand over to the runtime of a root around this one; past forwards may have a backward.

        Returns:
            Groups that these forwards entered, in order.
        """
        if self._ended_in_exception:
            self.reset()
            return []
        self.reductions.finish_all()
        self.used.finish()
        self.gathers.reset(self.schedule.reset())
        for group in self.groups:
            group.show(unsharded=False)
        return [self.groups[index] for index in self.reductions.order.entered]

    @property
    def _ended_in_exception(self) -> bool:
        """Whether the last forward or backward did not end, though no pass is under way."""
        return self.backward.is_running or self._interrupted or self.pass_root is not None

    def _sizes(self) -> tuple[list[int], bool]:
        """Return the unsharded bytes of every group, and whether no group needs its own memory."""
        nbytes = [group.unsharded_nbytes for group in self.groups]
        return nbytes, not any(group.needs_memory for group in self.groups)

    # --- what users choose ---

    def update_options(self) -> None:
        """Read the settings of the root and all groups anew."""
        apply_debug(self.settings, self.groups, self.streams, self.gathers, self.reductions)
        self.reductions.waits_at_end = not self.settings.finalizes_by_hand
        options, groups = self.schedule.options, self.groups
        options.prefetch_in_forward = self.settings.prefetch_in_forward
        options.prefetch_in_backward = self.settings.prefetch_in_backward
        options.several_modules = {g.index for g in groups if len(g.modules) > 1}
        options.no_reshard_after_forward = {g.index for g in groups if not g.reshards_after_forward}
        options.no_reshard_after_backward = {
            g.index for g in groups if not g.settings.reshard_after_backward
        }
        options.no_unshard_in_backward = {
            g.index for g in groups if not g.settings.unshard_in_backward
        }
        options.next_in_forward = {
            g.index: self._indices_of(g.settings.next_in_forward)
            for g in groups
            if g.settings.next_in_forward is not None
        }
        options.next_in_backward = {
            g.index: self._indices_of(g.settings.next_in_backward)
            for g in groups
            if g.settings.next_in_backward is not None
        }
        self._has_new_options = True
        shard_axes = [(b.plan.axis, g.settings) for g in groups for b in g.buckets]
        for axis in dict.fromkeys(axis for axis, _ in shard_axes):
            wanted = any(own.separate_reduce for other, own in shard_axes if other is axis)
            self.streams.separate_reduce(axis, enable=wanted)
        memory_axes = [*dict.fromkeys(axis for axis, own in shard_axes if own.comm_memory)]
        if memory_axes != self._memory_axes:
            self._memory_axes = memory_axes
            self.streams.allocate_from(memory_axes)
            self.slots.trim()  # Slots that are free now are of the other kind.

    def _indices_of(self, wanted: Sequence[ParamGroup]) -> list[int]:
        return [group.index for group in wanted if group.listener is self.backward]

    def _check_prefetches(self) -> None:
        """Refuse to prefetch modules of another root.

        Only the forward of a root shows which modules are in it: before, modules may be unsharded
        by hand, or added.
        """
        for group in self.groups:
            chosen = (group.settings.next_in_forward, group.settings.next_in_backward)
            for other in (other for wanted in chosen for other in wanted or ()):
                if other.listener is not self.backward:
                    msg = (
                        f"{group.name!r} is to prefetch {other.name!r}, which is not in the same "
                        f"root. Prefetch modules of one model only."
                    )
                    raise StateError(msg)
        self._has_new_options = False

    # --- forward ---

    @torch_tensors.unseen_by_transforms
    def begin_pass(self, root: object) -> None:
        """Begin the forward of a root."""
        if self._has_new_options:
            self._check_prefetches()
        if self.finalization is not None:
            self._refuse_before_wait("a forward")
        if self._ended_in_exception:
            if self.backward.is_running:
                self.streams.note_error(RuntimeError("an exception in a backward"))
            self.reset()
        self.streams.note_step()
        if not torch.is_grad_enabled() and self._gathers_like_the_last(root):
            self.used.compare_in_inference(self.streams)
        has_changed = self._take_up_changes()
        if has_changed and self.reductions.unended:
            self._warn_of_early_step()
        nbytes, is_idle = self._sizes()  # Parameters may have been converted.
        self.schedule.set_sizes(nbytes, is_idle=is_idle)
        if self.optimizer_event is not None:
            event, self.optimizer_event = self.optimizer_event, None
            self.streams.after_optimizer(event)  # order: gathers wait for the optimizer's event
            if any(len(group.gathered) < len(group.buckets) for group in self.groups):
                # order: compute waits for the optimizer's event where it reads shards
                self.streams.wait_fence(event)
        # order: a forward waits for writes to shards
        self.gathers.follow_writes(self._noted_versions)
        self.used.finish_on_host()  # A wait for the device would stall its queue; do that later.
        self.pass_root = root
        self._thread = threading.get_ident()
        if _events.observer is not None:
            first = self.groups[0]
            _events.observer.begin_pass("forward", first.name, first.number)
        self.schedule.begin_pass(has_changed=has_changed, root=id(root))

    def _warn_of_early_step(self) -> None:
        """Warn that an optimizer has probably stepped with a part of the gradients."""
        how = "call set_is_last_backward(True) before the last backward of a step"
        if self.settings.finalizes_by_hand:
            how = "call finalize_backward() before optimizer.step()"
        msg = (
            f"parameters were changed while gradients were being reduced. If an optimizer has "
            f"stepped, it had a part of the gradients only: {how}."
        )
        warn_user(msg, is_first_rank=self.groups[0].mesh.is_first_rank)

    def note_inputs(self, inputs: Any) -> None:
        """Note whether a forward's inputs require gradients, so that other ranks computed them."""
        if not self.groups[0].is_fed and any(t.requires_grad for t in iter_tensors(inputs)):
            for group in self.groups:
                group.is_fed = True

    def _gathers_like_the_last(self, root: object) -> bool:
        """Whether a pass gathers anything if it is like the last pass of this root.

        With kept memory each rank may run any number of forwards.
        """
        last = self.schedule.last_order(id(root))
        return any(self.groups[i].needs_memory and not self.schedule.has_memory(i) for i in last)

    def _take_up_changes(self) -> bool:
        """Refresh groups whose parameters were replaced; return whether a shard was written."""
        has_changed = False
        for group in self.groups:
            for bucket in group.buckets:
                if bucket.around_if_trained is not None:
                    bucket.follow_trainability()
            if group.was_replaced or group.is_on_meta:
                group.check_materialized()
                self.reshard(group)
                group.refresh()
                has_changed = True
            versions = group.shard_versions
            if versions != self._noted_versions[group.index]:
                self._noted_versions[group.index] = versions
                has_changed = True
        return has_changed

    def end_pass(self, *, needs_backward: bool, is_functional: bool = False) -> None:
        """End the root's forward; in a `functional_call` put back what modules held."""
        for group in self.groups:
            is_visited = group.index in self.schedule.visited
            if is_visited:
                self._look_at_changes(group)
            if is_functional:
                group.end_functional_call(is_live=self.schedule.has_memory(group.index))
                continue
            if is_visited or self.schedule.in_forward(group.index):
                self._hide(group)  # Or the root has caught the exception of its forward.
            for bucket in group.buckets:
                bucket.sites.was_visible = None
        self.pass_root = None
        self.gathers.carry_out(self.schedule.end_pass(needs_backward=needs_backward))
        self.gathers.settle_host_reads()  # order: after a forward the host waits for copies
        if _events.observer is not None:
            _events.observer.end("pass", self.groups[0].number)

    def enter_forward(self, group: ParamGroup) -> ForwardRecord | None:
        """Enter a group's forward; return its record if it may have a backward."""
        if group.gets_only_given and not self.schedule.in_forward(group.index):
            group.show(unsharded=True)
            return None
        if self.schedule.visited:  # Lists of modules that are done when this group is entered.
            for index in self.schedule.visits_before(group.index):
                self._look_at_changes(self.groups[index])
                self._hide(self.groups[index])
        if group.is_stale:
            self.gathers.refresh(group)
        state = self.schedule.states[group.index]
        if group.is_shown and not (state.num_forwards or state.awaits_other_modules):
            group.follow_trainability()
        self.gathers.carry_out(self.schedule.enter_forward(group.index))
        group.show(unsharded=True)
        if _events.observer is not None:
            _events.observer.begin("compute", group.name, group=group.number)
        if not torch.is_grad_enabled():
            return None
        if not group.was_sampled and not torch_tensors.in_function_transform():
            group.sample()
        record = ForwardRecord(group, self.schedule.current_pass, group.shard_versions)
        group.forwards.add(weakref.ref(record, group.forwards.discard))
        if group.is_trainable:
            record.is_first = self.reductions.order.enter_forward(group.index)
        return record

    def watch_inputs(self, record: ForwardRecord, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return stand-ins for the inputs, which report when backward is done with the group."""
        result: Sequence[Tensor] = InputGrads.apply(record, *inputs)  # type: ignore[no-untyped-call]
        return result

    def exit_forward(
        self,
        group: ParamGroup,
        record: ForwardRecord | None,
        outputs: Iterable[Tensor],
        module: nn.Module,
    ) -> None:
        """Leave the forward of a group's module; `outputs` are those that require gradients."""
        is_given = group.has_only_given  # No memory of the group was read.
        if is_given and not self.schedule.in_forward(group.index):
            group.show(unsharded=False)
            return
        if _events.observer is not None:
            _events.observer.end("compute", group.number)
        has_several = len(group.modules) > 1
        if not has_several:
            self._look_at_changes(group)
        is_unreported = torch_tensors.has_other_graphs()
        if is_given or is_unreported:
            outputs = ()
        needs_backward = record is not None and record.watch_outputs(outputs)
        if not needs_backward and record is not None and record.is_first:
            self.reductions.order.withdraw(group.index)
        # A backward without a report may read the memory.
        is_watched = (
            needs_backward
            or is_given
            or record is None
            or not (is_unreported or record.input_grads or group.may_train(module))
        )
        if record is not None and not is_watched:
            # Without this nothing would, since no output reports the start of backward.
            group.grad_hooks.collect_at_once()
            self._warn_unwatched(group, is_meant=is_unreported or record.may_lack_outputs)
        actions = self.schedule.exit_forward(
            group.index,
            needs_backward=needs_backward,
            is_watched=is_watched,
            reports_exit=record is not None and record.input_grads is not None,
        )
        may_be_kept = group.index in self.schedule.options.no_reshard_after_forward
        is_kept = needs_backward and may_be_kept
        if not self.schedule.in_forward(group.index):
            if is_kept or has_several or self.schedule.states[group.index].is_lent:
                group.return_given()
            else:
                group.show(unsharded=False)
        self.gathers.carry_out(actions)
        if torch.is_autocast_enabled(self._autocast_type) and not may_be_kept:
            forget_casts(needs_backward=needs_backward)

    def _hide(self, group: ParamGroup) -> None:
        """Let modules show the sharded parameters, unless a pipeline reshards the group itself."""
        if self.schedule.states[group.index].is_lent:
            group.return_given()
        else:
            group.show(unsharded=False)

    def _look_at_changes(self, group: ParamGroup) -> None:
        """Keep what forwards have written to unsharded parameters; refuse to freeze them there.

        If a group has several modules, this reads all their parameters once, not after each module.
        """
        group.check_trainability()
        if group.samples and self.schedule.has_memory(group.index):
            refuse_unseen_writes(group)
        if group.was_written:
            keep_writes(group, self.streams)

    def _warn_unwatched(self, group: ParamGroup, *, is_meant: bool) -> None:
        """Warn once per group that no output can report the start of its backward."""
        if not is_meant and group.index not in self._warned and group.needs_memory:
            self._warned.add(group.index)
            msg = (
                f"forward of {group.name!r} ran with gradients on, but returned no tensor that "
                f"requires one, so its parameters stay unsharded until the next backward has "
                f"ended. Return what the loss is made of, or run it under torch.no_grad()."
            )
            warn_user(msg, is_first_rank=group.mesh.is_first_rank)

    def interrupt_forward(
        self,
        group: ParamGroup | None,
        record: ForwardRecord | None,
        *,
        error: BaseException | None,
        is_root: bool,
        is_recompute: bool,
    ) -> None:
        """Handle the exception that ended a forward; the caller of the module may catch it."""
        if group is not None and _events.observer is not None:
            _events.observer.end("compute", group.number)
        if is_recompute:
            return  # Or non-reentrant checkpointing has all it needs, and backward continues.
        if error is not None:
            self.streams.note_error(error)
        if group is not None and group.has_only_given and not self.schedule.in_forward(group.index):
            group.show(unsharded=False)
        elif group is not None:
            if record is not None and record.is_first:
                self.reductions.order.withdraw(group.index)
            group.was_sampled, group.samples = False, ()
            keep_own_writes(group, self.streams)
            actions = self.schedule.exit_forward(group.index, needs_backward=False)
            if not self.schedule.in_forward(group.index):
                group.show(unsharded=False)
            self.gathers.carry_out(actions)
        if is_root:
            self.abandon_pass()

    def abandon_pass(self) -> None:
        """End a root's forward that raised; the next one cleans up, or who asks for parameters."""
        self.passes.abandon()
        # Do not reset at once: a wait for collectives would delay the exception.
        self.pass_root = None
        self._interrupted = True

    @property
    def is_of_other_thread(self) -> bool:
        """Whether another thread trains, in whose passes the calling one has no part."""
        return self._thread != threading.get_ident() and not torch_autograd.in_backward()

    def tidy_up(self) -> None:
        """Clean up after an exception; called when code asks for the parameters.

        A thread that only looks at the parameters cannot tell a backward that runs from one that
        has ended in an exception, so the thread that trains does it.
        """
        is_over = self.backward.is_running and not torch_autograd.in_backward()
        if (self._interrupted or is_over) and not self.is_of_other_thread:
            self.reset()

    # --- forward inside backward ---

    def enter_recompute(self, group: ParamGroup) -> ForwardRecord | None:
        """Enter a forward that activation checkpointing runs again."""
        self.backward.begin_backward(by_forward=True)
        state = self.schedule.states[group.index]
        if state.memory is Memory.LIVE and not state.in_backward and group.is_stale:
            self.gathers.refresh(group)  # No pass has begun that would have seen the change.
        self.gathers.carry_out(self.schedule.enter_recompute(group.index))
        group.show(unsharded=True)
        if _events.observer is not None:
            _events.observer.begin("compute", group.name, group=group.number, phase="recompute")
        if not torch.is_grad_enabled():
            return None
        return ForwardRecord(group, None, group.shard_versions)

    def exit_recompute(
        self,
        group: ParamGroup,
        record: ForwardRecord | None,
        outputs: Iterable[Tensor],
        module: nn.Module,
    ) -> None:
        """Leave the repeated forward."""
        del module
        if _events.observer is not None:
            _events.observer.end("compute", group.number)
        if group.was_written:
            keep_writes(group, self.streams)
        if record is not None:
            record.watch_outputs(outputs)
        actions = self.schedule.exit_recompute(group.index)
        if not self.schedule.stays_shown(group.index):
            group.show(unsharded=False)
        self.gathers.carry_out(actions)

    # --- by hand ---

    def unshard(self, group: ParamGroup, *, until_reshard: bool = False) -> None:
        """Start to unshard a group for the user, or for a pipeline that reshards it itself."""
        if group.is_stale:
            self.gathers.refresh(group)
        self.gathers.carry_out(self.schedule.unshard(group.index, until_reshard=until_reshard))

    def wait_unshard(self, group: ParamGroup) -> None:
        """Finish `unshard` and show the unsharded parameters."""
        if self.schedule.has_memory(group.index):
            self.gathers.wait(group)
            group.show(unsharded=True)
            if self.pass_root is None and not self.backward.is_running:
                self.passes.show_outside([group])

    def reshard(self, group: ParamGroup) -> None:
        """Give a group's memory back."""
        if group.is_shown and group.was_written:
            keep_writes(group, self.streams)
        group.show(unsharded=False)
        self.gathers.carry_out(self.schedule.reshard(group.index))
        self.gathers.settle_host_reads()  # order: after a reshard the host waits for copies

    def finish_step(self) -> None:
        """End a pipeline's step after its last backward: reduce unsynced gradients, free memory."""
        self.backward.finish_step(self.groups)
        for group in self.groups:
            self.reshard(group)
        self.gathers.trim()

    def sync_gradients(self, groups: Iterable[ParamGroup]) -> None:
        """Reduce what earlier backwards have left in some groups, for the user.

        Raises:
            StateError: A forward or a backward runs, or a group's modules hold whole parameters.
        """
        groups = [*groups]
        self._check_between_passes(groups, "synchronize_gradients()")
        before = [(g.settings, g.settings.sync, g.settings.all_reduce) for g in groups]
        try:
            for settings, _, _ in before:
                settings.sync = settings.all_reduce = True
            self._finish_step(groups)
        finally:
            for settings, sync, all_reduce in before:
                settings.sync, settings.all_reduce = sync, all_reduce

    def finalize_backward(self, *, handle: object = None) -> None:
        """Reduce what backwards have left, as the settings of the groups say, and free memory.

        A pipeline of torch, from 2.15 on, ends its step so, and does not call `reshard` after it.

        Args:
            handle: Handle whose `end_finalization` waits for the reductions; None: this call waits.

        Raises:
            StateError: As for `sync_gradients`; backwards end by themselves; a group of a hybrid
                mesh may not all-reduce; or nobody has waited for an earlier finalization.
        """
        self._check_between_passes(self.groups, "finalize_backward()")
        if not self.settings.finalizes_by_hand:
            msg = (
                "finalize_backward() was called, but each backward ends by itself. Call "
                "set_manual_backward_finalization(True) before the backward, or leave the call out."
            )
            raise StateError(msg)
        synced = [group for group in self.groups if group.settings.sync]
        partly = next((g for g in synced if g.replicates and not g.settings.all_reduce), None)
        if partly is not None:
            msg = (
                f"finalize_backward() would leave the gradients of {partly.name!r} averaged over a "
                f"part of the ranks. Call set_requires_all_reduce(True) before it."
            )
            raise StateError(msg)
        self._finish_step(synced, wait=handle is None)
        self.finalization = handle
        for group in self.groups:
            if group.settings.reshard_after_backward:
                self.reshard(group)

    def end_finalization(self, handle: object) -> None:
        """Wait for the reductions that `finalize_backward` has started.

        Raises:
            StateError: They were dropped, after an exception or by `reset_iter_state`.
        """
        if handle is not self.finalization:
            msg = (
                "the gradients that this handle waits for were dropped, by reset_iter_state() or "
                "after an exception. Begin with the first backward of the step again."
            )
            raise StateError(msg)
        self.finalization = None
        self._finish_step(())

    def _check_between_passes(self, groups: Sequence[ParamGroup], call: str) -> None:
        self.tidy_up()
        if self.pass_root is not None or self.backward.is_running:
            msg = (
                f"{call} was called inside of a forward or a backward. Call it after the last "
                f"backward of the step, before the gradients are clipped."
            )
            raise StateError(msg)
        if self.finalization is not None:
            self._refuse_before_wait(call)
        refuse_summoned(groups, f"{call} was called")

    def _refuse_before_wait(self, what: str) -> None:
        msg = (
            f"{what} was called before the wait() of the handle that "
            f"finalize_backward(async_op=True) returned. Call it first."
        )
        raise StateError(msg)

    def _finish_step(self, groups: Sequence[ParamGroup], *, wait: bool = True) -> None:
        """Reduce what waits in some groups, if anything does."""
        self.reductions.finish_partial()
        left = [group for group in groups if group.has_pending]
        if left or self.reductions.unended:
            self.backward.finish_step(left, wait=wait)
            self.gathers.trim()

    # --- steps that are captured ---

    @property
    def unfinished(self) -> str | None:
        """Text that says what a step has left for the next one; None: nothing."""
        for group in self.groups:
            if group.has_pending:
                return f"gradients of {group.name!r} wait to be synced"
        return self.reductions.unfinished

    def settle(self) -> None:
        """Leave nothing from before: no unsharded group, no memory, no event to wait for.

        Then later work can be captured, and a capture does not depend on earlier work.
        """
        event, self.optimizer_event = self.optimizer_event, None
        self.streams.wait_fence(event)  # order: a capture comes after the optimizer's event
        self.used.finish_on_host()
        for group in self.groups:
            self.reshard(group)  # order: a capture gathers anew what was gathered before it
            for store in group.gathered:
                store.drop_part()  # order: a capture uses no parts that were kept before it
                store.settle_memory()
        self.streams.join()  # order: all streams join compute before a capture ends
        self.slots.drop()  # order: a capture uses no slots of before it

    def reset(self) -> None:
        """Return to the state between steps after an exception; unsynced gradients are dropped."""
        if self._ended_in_exception and (
            any(group.gradients.are_unsynced for group in self.groups) or self.reductions.unfinished
        ):
            warn_user(
                "an exception ended a step. The gradients of its earlier backwards, which were not "
                "synced yet, are dropped. Call optimizer.zero_grad(), and begin with the first "
                "micro-batch of the step again."
            )
        self._interrupted = False
        self.pass_root = self.finalization = None
        if _events.observer is not None:
            _events.observer.forget({group.number for group in self.groups})
        # Collectives may still use memory that is freed next.
        self.streams.join()  # order: after an error compute waits for all streams
        self.passes.abandon()
        for group in self.groups:
            for bucket in group.buckets:
                bucket.sites.forget_given()
            if group.is_shown and group.was_written:
                keep_own_writes(group, self.streams)
        self.gathers.reset(self.schedule.reset())
        for group in self.groups:
            group.show(unsharded=False)
        self.backward.reset()
        self.reductions.reset()
        self.used.reset()
        self.gathers.settle_host_reads()  # order: after an error the host waits for copies
