"""What a module gains by `fully_shard`: its class, and the methods that steer its group."""

from __future__ import annotations

import contextlib
import inspect
import math
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from shardkit import _compat
from shardkit._errors import StateError
from shardkit._module import copies
from shardkit._module.hooks import get_state
from shardkit._policy import BackwardPrefetch
from shardkit._tensor.ops import total_norm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from shardkit._module.hooks import ModuleState
    from shardkit._runtime.group import ParamGroup
    from shardkit._settings import RootSettings
    from shardkit.backends.base import AllGather, ReduceScatter

_sharded_classes: dict[type, type] = {}


def own_class(module: Any) -> type[nn.Module]:
    """Return the class the module had before `fully_shard`."""
    cls: type[Any] = type(module)
    return cls.__mro__[2] if issubclass(cls, FSDPModule) else cls


def swap_class(module: nn.Module) -> None:
    """Give a module the class with the methods of `FSDPModule`."""
    cls = type(module)
    if cls not in _sharded_classes:
        _sharded_classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    module.__class__ = _sharded_classes[cls]


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns."""

    def __init__(self, state: ModuleState) -> None:
        self._state = state

    def wait(self) -> None:
        """Return when the module's parameters are the unsharded ones."""
        if self._state.group is not None and self._state.runtime is not None:
            self._state.runtime.wait_unshard(self._state.group)


class FSDPModule:
    """Methods of a module that `fully_shard` has sharded."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object of the original class: containers build new ones when sliced."""
        original = cls.__mro__[2]
        self = original.__new__(original, *args, **kwargs)
        self.__init__(*args, **kwargs)
        return self

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """Refuse to be wrapped in DistributedDataParallel, which asks for this first."""
        if _compat.is_called_by_ddp(inspect.currentframe()):
            msg = (
                f"DistributedDataParallel cannot wrap this {own_class(self).__name__}: fully_shard "
                f"averages its gradients already. Use it alone; to replicate between hosts pass "
                f"fully_shard a 2-D mesh."
            )
            raise StateError(msg)
        raise AttributeError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return an independent sharded copy: own pieces, same mesh, process groups and options.

        For EMA and teacher models. No communication. A copy of a part of a model is its own root.
        """
        state = _state_of(self)
        if state.runtime is not None and state.group is not None:
            state.runtime.reshard(state.group)
        result = copies.deep_copy(state, own_class(self), memo)
        swap_class(result)
        return result

    def __copy__(self) -> Any:
        """Refuse: a shallow copy would have the same parameters, gathered and freed by two."""
        msg = (
            f"copy.copy of a sharded {own_class(self).__name__} would share its parameters with "
            f"it. Use copy.deepcopy, which copies this rank's pieces."
        )
        raise StateError(msg)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Pickle this rank's pieces and the settings; the copy is sharded on a mesh alike.

        For `torch.save` and ``torch.load(weights_only=False)``, each rank its own file.
        """
        del protocol
        state = _state_of(self)
        self.reshard()
        written = copies.write(state)
        return copies.new_module, (own_class(self),), written, None, None, _restore

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Convert the pieces (``to``, ``half``, ``to_empty``, ...), and lay them end to end again.

        Group by group, so that beside the shards only one group's pieces exist a second time.
        """
        state = _state_of(self)
        self.reshard()
        if state.group is None:
            return super()._apply(fn, *args, **kwargs)  # type: ignore[misc]
        attributes = state.group.param_attributes()
        result = super()._apply(fn, *args, **kwargs)  # type: ignore[misc]
        state.group.refresh_params(attributes)
        return result

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return parameters and buffers, after the last comparison between the ranks was read.

        Raises:
            RankMismatchError: On every rank, if ranks communicated different things.
        """
        runtime = _state_of(self).runtime
        if runtime is not None:
            runtime.check.finish()
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters; after an exception in a step, the sharded ones again.

        What an optimizer or ``zero_grad()`` gets between an exception and the next forward.
        """
        runtime = _state_of(self).runtime
        if runtime is not None:
            runtime.tidy_up()
        module: Any = self
        return own_class(self).named_parameters(module, *args, **kwargs)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # noqa: FBT001, FBT002
        """Gather this module's parameters now; the next `reshard`, forward or backward frees them.

        Not recursive. Call it on all ranks.

        Args:
            async_op: Return at once, with a handle; the module's forward waits by itself.

        Cost: one all-gather per bucket, none if they are unsharded already.
        """
        state = _state_of(self)
        if state.runtime is None:
            state.make_runtime()
        if state.group is not None and state.runtime is not None:
            state.runtime.unshard(state.group)
        handle = UnshardHandle(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's unsharded parameters and show the sharded ones. Not recursive."""
        state = _state_of(self)
        if state.group is not None and state.runtime is not None:
            state.runtime.reshard(state.group)

    # --- microbatches ---

    def set_requires_gradient_sync(
        self,
        requires_gradient_sync: bool,  # noqa: FBT001 - FSDP2's signature
        *,
        recurse: bool = True,
    ) -> None:
        """Set whether backward averages gradients over the ranks.

        For gradient accumulation: False for all micro-batches but the last. Unsynced gradients are
        summed in a full-size buffer per group, in `reduce_dtype` (see `memory_stats`).

        Args:
            requires_gradient_sync: The flag.
            recurse: Also for sharded modules inside.
        """
        for group in _groups(self, recurse=recurse):
            group.settings.sync = requires_gradient_sync

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging them over the ranks, in the ``with`` block.

        As `set_requires_gradient_sync` set to False for this module and those in it, and then to
        what it was. Backwards must run inside:

            with model.no_sync():
                for batch in batches[:-1]:
                    loss(model(batch)).backward()
            loss(model(batches[-1])).backward()
        """
        before = [(group, group.settings.sync) for group in _groups(self, recurse=True)]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for group, sync in before:
                group.settings.sync = sync

    def set_requires_all_reduce(
        self,
        requires_all_reduce: bool,  # noqa: FBT001 - FSDP2's signature
        *,
        recurse: bool = True,
    ) -> None:
        """Set whether backward all-reduces over the replicate axis of a 2-D mesh.

        While False, gradients are reduce-scattered, and the sums kept as 1/N-size partial sums;
        ``.grad`` is set by the first backward with True.
        """
        for group in _groups(self, recurse=recurse):
            group.settings.all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:  # noqa: FBT001
        """Set whether the next backward is the last of the step.

        After one that is not, reductions may still be under way, so that the next micro-batch
        overlaps with them; ``.grad`` is complete, and ranks are compared, after one that is.
        """
        for group in _groups(self, recurse=True):
            group.settings.is_last_backward = is_last_backward

    # --- memory ---

    def set_reshard_after_forward(
        self,
        reshard_after_forward: bool,  # noqa: FBT001 - FSDP2's signature
        recurse: bool = True,  # noqa: FBT001, FBT002
    ) -> None:
        """Set whether the parameters are freed after forward, from the next forward on."""
        if not isinstance(reshard_after_forward, bool):
            msg = (
                f"reshard_after_forward must be True or False, got {reshard_after_forward!r}. A "
                f"number of ranks can only be given to fully_shard: it makes process groups."
            )
            raise StateError(msg)
        for group in _groups(self, recurse=recurse):
            group.set_reshard_after_forward(reshard_after_forward)
        self._update_options()

    def set_reshard_after_backward(
        self,
        reshard_after_backward: bool,  # noqa: FBT001 - FSDP2's signature
        *,
        recurse: bool = True,
    ) -> None:
        """Set whether the parameters are freed after backward.

        False saves the next forward's all-gather while no optimizer step lies between, for the
        memory of the unsharded parameters; changed shards are gathered again.
        """
        for group in _groups(self, recurse=recurse):
            group.settings.reshard_after_backward = reshard_after_backward
        self._update_options()

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:  # noqa: FBT001
        """Set whether backward gathers this module's parameters.

        False only where no backward reads them, as of an ``nn.Embedding``: one that does reads
        memory that is not there. Not recursive.
        """
        for group in _groups(self, recurse=False):
            group.settings.unshard_in_backward = unshard_in_backward
        self._update_options()

    # --- prefetch ---

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Choose what is gathered when this module's forward begins.

        Instead of the module that came next in the last forward. All of `modules` are gathered, so
        a list of n takes the memory of n + 1; an empty one prefetches nothing.

        Raises:
            StateError: One of them is not sharded (now), or of another root (at its forward).
        """
        for group in _groups(self, recurse=False):
            group.settings.next_in_forward = _groups_of(modules)
        self._update_options()

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Choose what is gathered when this module's backward begins; as in forward."""
        for group in _groups(self, recurse=False):
            group.settings.next_in_backward = _groups_of(modules)
        self._update_options()

    def set_prefetch_policy(
        self, *, forward: bool = True, backward: Literal["pre", "post", "none"] = "pre"
    ) -> None:
        """Choose when this root gathers ahead of use. Call it on the root.

        Args:
            forward: Gather the next module before the current one computes.
            backward: ``"pre"``: gather the next module before the current one's gradients are
                computed (most overlap); ``"post"``: after (less memory); ``"none"``: when it is
                entered.
        """
        state = _state_of(self)
        try:
            when = BackwardPrefetch(backward)
        except ValueError:
            msg = f"backward must be 'pre', 'post' or 'none', got {backward!r}."
            raise StateError(msg) from None
        state.settings.prefetch_in_forward, state.settings.prefetch_in_backward = forward, when
        self._update_options()

    # --- communication ---

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this module's gradient sums by `factor`, not the number of ranks. Not recursive.

        Raises:
            StateError: It is zero, or not finite.
        """
        if factor == 0 or not math.isfinite(factor):
            msg = f"gradients cannot be divided by {factor!r}. Pass a finite number other than 0."
            raise StateError(msg)
        for group in _groups(self, recurse=False):
            group.settings.comm.divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Do as `set_gradient_divide_factor`, its newer name."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:  # noqa: FBT001
        """Have the collective library sum gradients only, and divide them after.

        NCCL divides by the number of ranks itself otherwise. On the CPU and on XLA reductions are
        sums anyhow. For all modules in this one as well.
        """
        for group in _groups(self, recurse=True):
            group.settings.comm.force_sum = enable

    def set_reduce_scatter_unused_params(
        self,
        reduce_scatter_unused_params: bool,  # noqa: FBT001 - FSDP2's signature
        *,
        recurse: bool = True,
    ) -> None:
        """Set whether a group that this rank did not use takes part in its reduction all the same.

        True (the default; FSDP2's is False) is right when ranks use different parameters. False
        saves the reduction of groups that NO rank uses; ranks that differ then do not match, which
        is told as an error.
        """
        for group in _groups(self, recurse=recurse):
            group.settings.reduce_unused = reduce_scatter_unused_params

    def set_all_reduce_hook(
        self, hook: Callable[[Tensor], object] | None, *, stream: Any = None
    ) -> None:
        """Set what is done to every reduced gradient buffer of this module. Not recursive.

        Args:
            hook: Called with a 1-D tensor: this rank's range of the averaged gradients, after the
                reduce-scatter and, on a 2-D mesh, the all-reduce. It may change it in place, e.g.
                all-reduce it over further ranks. None removes the hook.
            stream: Where an accelerator runs it; not with a 2-D mesh.

        Raises:
            StateError: There is one already, or a stream is given with a 2-D mesh.
        """
        for group in _groups(self, recurse=False):
            comm = group.settings.comm
            if hook is not None and comm.all_reduce_hook is not None:
                msg = (
                    f"{group.name!r} has an all-reduce hook already. Remove it first: "
                    f"set_all_reduce_hook(None); or call both from one function."
                )
                raise StateError(msg)
            if stream is not None and group.replicate_axis is not None:
                msg = (
                    f"{group.name!r} is on a 2-D mesh, whose all-reduce has a stream of its own, "
                    f"on which the hook runs too. Do not pass a stream."
                )
                raise StateError(msg)
            comm.all_reduce_hook, comm.all_reduce_hook_stream = hook, stream

    def set_custom_all_gather(self, comm: AllGather | None) -> None:
        """Gather this module's parameters by a function of the user's. Not recursive.

        Args:
            comm: As FSDP2's ``AllGather``: ``allocate(size, dtype=, device=)`` and
                ``(output_tensor, input_tensor, group, async_op)``. None: as before.

        Raises:
            StateError: On XLA, or where buffers come from the process group.

        Cost: copies into and out of the buffers that `comm` allocates.
        """
        self._refuse_comm("set_custom_all_gather", comm)
        for group in _groups(self, recurse=False):
            group.settings.comm.all_gather = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter | None) -> None:
        """Reduce this module's gradients by a function of the user's. Not recursive.

        Args:
            comm: As FSDP2's ``ReduceScatter``: `allocate`, and ``(output_tensor, input_tensor,
                group, op, async_op)``; `op` is always a sum. None: as before.

        Raises:
            StateError: On XLA, or where buffers come from the process group.

        Cost: copies into the buffers that `comm` allocates.
        """
        self._refuse_comm("set_custom_reduce_scatter", comm)
        for group in _groups(self, recurse=False):
            group.settings.comm.reduce_scatter = comm

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:  # noqa: FBT001
        """Take buffers from the memory that the process group offers, if it does (NCCL).

        Buffers are shared by all modules of a root, so it holds for all of them while any has it.

        Raises:
            StateError: The module has an all-gather or reduce-scatter of the user's.
        """
        for group in _groups(self, recurse=False):
            comm = group.settings.comm
            if enable and (comm.all_gather is not None or comm.reduce_scatter is not None):
                msg = (
                    f"{group.name!r} communicates by functions of yours, which allocate their own "
                    f"buffers. Use one or the other."
                )
                raise StateError(msg)
            group.settings.comm_memory = enable
        self._update_options()

    def set_separate_reduce_scatter_group(
        self,
        enable: bool = True,  # noqa: FBT001, FBT002 - FSDP2's signature
        *,
        recurse: bool = True,
    ) -> None:
        """Reduce on a process group of its own, so that gathers and reductions do not queue.

        On gloo that is always so. Call it on all ranks.

        Cost: one more process group (communicator) per mesh axis.
        """
        for group in _groups(self, recurse=recurse):
            group.settings.separate_reduce = enable
        self._update_options()

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set how many gradient buffers may be on their way at once; 1 is the least memory.

        On CUDA memory is reused in stream order, and the number has no effect.

        Raises:
            StateError: It is not a positive int.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            msg = f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}."
            raise StateError(msg)
        if max_input_buffers < 1:
            msg = f"max_input_buffers must be at least 1, got {max_input_buffers}."
            raise StateError(msg)
        for group in _groups(self, recurse=recurse):
            group.settings.max_send_buffers = max_input_buffers

    def _refuse_comm(self, what: str, comm: object) -> None:
        for group in _groups(self, recurse=False):
            if comm is not None and group.mesh.backend.is_traced:
                msg = (
                    f"{what}: {group.name!r} is on a mesh of {group.mesh.device_type!r} devices, "
                    f"whose collectives are part of the traced program: there is no process group "
                    f"to call yours with. Leave it out there."
                )
                raise StateError(msg)
            if group.settings.comm_memory:
                msg = (
                    f"{what}: {group.name!r} takes its buffers from the process group "
                    f"(set_allocate_memory_from_process_group_for_comm). Use one or the other."
                )
                raise StateError(msg)

    def set_post_optim_event(self, event: Any) -> None:
        """Let the next forward's all-gathers wait for an event recorded after the optimizer step.

        Call it on the root, with a new event in every step.
        """
        state = _state_of(self)
        runtime = state.runtime or state.make_runtime()
        if runtime is not None:
            runtime.set_optimizer_event(event)

    # --- gradients ---

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002 - as torch's
    ) -> Tensor:
        """Scale the gradients of all parameters in the module so that their norm is `max_norm`.

        What ``torch.nn.utils.clip_grad_norm_`` does, on every rank alike. On XLA devices use this:
        torch_xla replaces torch's by one that reduces each parameter's norm by itself and, for the
        largest element, reads on the host. Call it on all ranks, on the root.

        Args:
            max_norm: The most the norm may be.
            norm_type: Order of the norm; ``float("inf")`` is the largest element.
            error_if_nonfinite: Raise if the norm is not finite, which waits for it.

        Returns:
            The norm before, 0-dim, fp32 or wider, the same on every rank.

        Raises:
            RuntimeError: See `error_if_nonfinite`.

        Cost: one all-reduce of 8 bytes per parameter (16 for the largest element), for each dtype
        of gradients.
        """
        params = [p for p in self.parameters() if p.grad is not None]  # type: ignore[attr-defined]
        norm = total_norm([p.grad for p in params], float(norm_type))
        runtime = _state_of(self).runtime
        if error_if_nonfinite and runtime is not None:
            runtime.passes.finish_graph()  # Together, where replicas are threads.
        if error_if_nonfinite and not bool(norm.isfinite()):
            msg = (
                f"the gradients' norm of order {norm_type} is {norm.item()}, so they cannot be "
                f"clipped. Pass error_if_nonfinite=False to go on."
            )
            raise RuntimeError(msg)
        nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        return norm

    # --- graphs of XLA devices ---

    def set_optimization_barriers(
        self,
        forward: bool = True,  # noqa: FBT001, FBT002 - both are plain switches
        backward: bool = True,  # noqa: FBT001, FBT002
    ) -> None:
        """Choose where gathers are kept in their place in the graph. Call it on the root.

        On XLA devices only; elsewhere it has no effect. A gather is tied by an optimization barrier
        to what was computed last when it was issued: it can run beside the next computation, and is
        not hoisted before it.

        Args:
            forward: Without it the compiler may gather all modules at the start of forward: more
                overlap at most, more memory.
            backward: Without it the compiler may merge a gather with that of forward: then
                ``reshard_after_forward=True`` saves no memory.

        Raises:
            StateError: After the first forward: it is not the root.
        """
        settings = self._settings_of_root()
        settings.barrier_in_forward, settings.barrier_in_backward = forward, backward

    def set_sync_on_finalization(self, enable: bool = True) -> None:  # noqa: FBT001, FBT002
        """Run the graph at the end of every backward (``mark_step``). Call it on the root.

        On XLA devices only; elsewhere it has no effect. Forward and backward become one graph and
        the optimizer's step another, so the compiler does not fuse across them: less memory in
        some models, for one more launch per backward.

        Raises:
            StateError: After the first forward: it is not the root.
        """
        self._settings_of_root().sync_on_finalization = enable

    def _settings_of_root(self) -> RootSettings:
        state = _state_of(self)
        if state.runtime is not None and state.runtime.settings is not state.settings:
            msg = (
                f"this {type(self).__name__} is inside another sharded module, whose choice counts "
                f"for all. Call it on the outermost one."
            )
            raise StateError(msg)
        return state.settings

    # --- the rest ---

    def reset_iter_state(self) -> None:
        """Return to the state between steps, after an exception in forward or backward.

        The next forward of the root does it by itself; this gives the memory back at once.
        Gradients that have not been synced are lost.
        """
        runtime = _state_of(self).runtime
        if runtime is not None:
            runtime.reset()

    def _update_options(self) -> None:
        runtime = _state_of(self).runtime
        if runtime is not None:
            runtime.update_options()

    def memory_stats(self) -> dict[str, int]:
        """Return bytes on this rank, of this module and the sharded modules in it.

        Keys: ``shard_nbytes`` (parameters), ``unsharded_nbytes`` and ``peak_unsharded_nbytes``
        (unsharded buffers now, and the most there ever were), ``reduce_buffer_nbytes`` (the most
        that send and receive buffers of gradients ever took) and ``unsynced_grad_nbytes``
        (gradients that wait to be synced). The middle three are those of the whole root.
        """
        groups = list(_groups(self, recurse=True))
        runtime = _state_of(self).runtime
        return {
            "shard_nbytes": sum(group.shard_nbytes for group in groups),
            "unsharded_nbytes": runtime.gathers.nbytes if runtime else 0,
            "peak_unsharded_nbytes": runtime.gathers.peak_nbytes if runtime else 0,
            "reduce_buffer_nbytes": runtime.reductions.peak_nbytes if runtime else 0,
            "unsynced_grad_nbytes": sum(group.gradients.buffer_nbytes for group in groups),
        }


def _restore(module: Any, written: copies.Written) -> None:
    """Turn an unpickled module into what it was; pickles name this function."""
    copies.restore(module, written)
    swap_class(module)


def _state_of(module: Any) -> ModuleState:
    state = get_state(module)
    assert state is not None, "an FSDPModule has a state"
    return state


def _groups(module: Any, *, recurse: bool) -> Iterable[ParamGroup]:
    modules = module.modules() if recurse else [module]
    states = map(get_state, modules)
    return dict.fromkeys(s.group for s in states if s is not None and s.group is not None)


def _groups_of(modules: Sequence[Any]) -> list[ParamGroup]:
    """Return the groups of sharded modules."""
    refusal = (
        "{} cannot be prefetched: it is not sharded. Call fully_shard on it first, or name the "
        "sharded module that holds it."
    )
    states = _states_of(modules, refusal)
    return list(dict.fromkeys(state.group for state in states if state.group is not None))


def _states_of(modules: Sequence[Any], refusal: str) -> list[ModuleState]:
    """Return the states of sharded modules; raise `refusal`, about its class, of another."""
    states = []
    for module in modules:
        state = get_state(module) if isinstance(module, nn.Module) else None
        if state is None:
            raise StateError(refusal.format(type(module).__name__))
        states.append(state)
    return states


def share_comm_ctx(modules: Sequence[Any]) -> None:
    """Let several roots use one set of streams and buffers: for stages of a pipeline on one rank.

    Args:
        modules: Sharded roots, before their first forward.

    Raises:
        StateError: One of them is not sharded, or has run.
    """
    states = _states_of(modules, "share_comm_ctx takes sharded modules, got {}.")
    for state in states[1:]:
        if state.runtime is not None:
            msg = (
                f"{type(state.module).__name__} has run with streams of its own. Call "
                f"share_comm_ctx before the first forward."
            )
            raise StateError(msg)
        state.share = states[0]
