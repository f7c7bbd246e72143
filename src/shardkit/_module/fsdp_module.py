"""What a module gains from `fully_shard`: its class, and the methods that control its group."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from shardkit._compat import torch_fsdp2, torch_modules
from shardkit._errors import StateError
from shardkit._module.hooks import ModuleState, get_state, groups_in, refuse_export, state_of
from shardkit._module.on_meta import NotedConversion
from shardkit._module.optimizers import note_copies, watch_optimizers
from shardkit._params.bucket import settled
from shardkit._runtime.agreement import check_same_replicas
from shardkit._runtime.backward import check_gradients
from shardkit._runtime.group import refuse_summoned
from shardkit._settings import (
    BackwardPrefetch,
    RootSettings,
    as_number,
    refuse_non_functions,
    refuse_texts,
)
from shardkit._tensor.ops import total_norm
from shardkit._tensor.sharded import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from shardkit._runtime.group import ParamGroup
    from shardkit._runtime.runtime import Runtime
    from shardkit._settings import AllGather, AllReduce, MixedPrecisionPolicy, ReduceScatter

    class _Base(nn.Module):
        """Base of `FSDPModule` for type checkers; at runtime the sharded class is in its place."""

        def __getattr__(self, name: str) -> Any: ...

else:
    _Base = object

_sharded_classes: dict[type, type] = {}


def own_class(module: Any) -> type[nn.Module]:
    """Return the class the module had before `fully_shard`."""
    cls: type[Any] = type(module)
    return cls._own_class if issubclass(cls, FSDPModule) else cls


def swap_class(module: nn.Module) -> None:
    """Give a module the class with the methods of `FSDPModule`."""
    cls = type(module)
    if cls not in _sharded_classes:
        meta = _parametrized_meta(type(cls)) if parametrize.is_parametrized(module) else type
        bases = (*_layout_of(cls), FSDPModule, cls, torch_fsdp2.stage_class())
        _sharded_classes.setdefault(cls, meta(f"FSDP{cls.__name__}", bases, {"_own_class": cls}))
    module.__class__ = _sharded_classes[cls]


def _layout_of(cls: type[Any]) -> tuple[type, ...]:
    """Return a first base without which Python refuses a sharded class, if there is one.

    Python lets an object change its class only if the first bases of both classes lead to the same
    class below those with a ``__dict__``. That is `object`, but for ``class Net(ABC, nn.Module)``
    it is `ABC`, which has no ``__dict__``.
    """
    first: Any = cls
    while first.__base__.__dictoffset__:
        first = first.__base__
    below: Any = first.__base__
    if below is object:
        return ()
    # `Generic` refuses a subclass that does not say which type variables it has: none.
    return (type(below)("Layout", (below,), {"__orig_bases__": ()}),)


def _parametrized_meta(meta: type) -> Any:
    """Return a metaclass that refuses the first thing that `remove_parametrizations` does."""

    def refuse(cls: Any, name: str) -> None:
        msg = (
            f"the parametrization of {name!r} cannot be removed from a sharded "
            f"{cls._own_class.__name__}: its group holds what the weight is computed from. Call "
            f"remove_parametrizations before fully_shard; for an export save the model by "
            f"shardkit.checkpoint.save_full, load the file into a plain one, and remove it there."
        )
        raise StateError(msg)

    return type("Parametrized", (meta,), {"__delattr__": refuse})


class UnshardHandle:
    """Handle that ``unshard(async_op=True)`` returns."""

    def __init__(self, state: ModuleState) -> None:
        self._state = state

    @torch_modules.untraced
    def wait(self) -> None:
        """Wait until the module's parameters are unsharded.

        Raises:
            StateError: The call is inside `summon_full_params`.
        """
        if self._state.group is not None and self._state.runtime is not None:
            refuse_summoned([self._state.group], "wait() of unshard() was called")
            self._state.runtime.wait_unshard(self._state.group)


class GradientReductionHandle:
    """Handle that ``finalize_backward(async_op=True)`` returns."""

    def __init__(self, runtime: Runtime | None = None) -> None:
        self._runtime = runtime

    @torch_modules.untraced
    def wait(self) -> None:
        """Wait until the gradients are reduced, and set ``.grad``. A second call does nothing.

        Raises:
            StateError: The gradients were dropped, by `reset_iter_state` or after an exception.
        """
        if self._runtime is not None:
            self._runtime.end_finalization(self)
            self._runtime = None


class FSDPModule(_Base):
    """Methods of a module that `fully_shard` has sharded.

    A setter that takes True or False raises a `StateError` if it is given a text, such as ``"no"``,
    which Python takes for True.
    """

    _own_class: ClassVar[type[Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Leave the original class out when its sharded class is made.

        It may want arguments, or keep a list of its subclasses.
        """
        if FSDPModule not in cls.__bases__:
            super().__init_subclass__(**kwargs)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object of the original class: containers build new ones when sliced."""
        original = cls._own_class
        self = original.__new__(original, *args, **kwargs)
        self.__init__(*args, **kwargs)
        return self

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """Refuse DistributedDataParallel, which reads this first when it wraps a module."""
        if torch_modules.is_called_by_ddp(inspect.currentframe()):
            msg = (
                f"DistributedDataParallel cannot wrap this {own_class(self).__name__}: fully_shard "
                f"averages its gradients already. Use it alone; to replicate between hosts pass "
                f"fully_shard a 2-D mesh."
            )
            raise StateError(msg)
        raise AttributeError

    @torch_modules.untraced
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return an independent sharded copy: own pieces, same mesh, process groups and options.

        Use it for EMA and teacher models. It does not communicate. A copy of a part of a model is
        its own root.
        """
        state = state_of(self)
        refuse_summoned(groups_in(self, recurse=False), "copy.deepcopy() was called")
        self._show_sharded()
        result = memo[id(self)] = new_module(own_class(self))
        for name, value in state.without_own_hooks(self.__dict__).items():
            result.__dict__[name] = copy.deepcopy(value, memo)
        copied = ModuleState(result, None, state.policy)
        copied.settings = dataclasses.replace(state.settings)
        copied.install()
        if state.group is not None:
            _copy_group(state.group, copied, memo)
        swap_class(result)
        note_copies(result, memo)
        return result

    def __copy__(self) -> Any:
        """Refuse: two modules would gather and free the parameters that a shallow copy shares."""
        msg = (
            f"copy.copy of a sharded {own_class(self).__name__} would share its parameters with "
            f"it. Use copy.deepcopy, which copies this rank's shards."
        )
        raise StateError(msg)

    def __reduce_ex__(self, _: object) -> Any:
        """Pickle this rank's pieces and the settings; the copy is sharded over an equal mesh.

        Use it for `torch.save` and ``torch.load(weights_only=False)``, with one file per rank.
        """
        state = state_of(self)
        refuse_summoned(groups_in(self, recurse=False), "pickling was tried")
        self._show_sharded()
        module: Any = self
        attributes = state.without_own_hooks(dict(module.__getstate__()))
        written = attributes, state.group, state.policy, dataclasses.asdict(state.settings)
        return new_module, (own_class(self),), written, None, None, _restore

    def _show_sharded(self) -> None:
        """Let modules hold the sharded parameters, for a copy or a pickle of this module.

        Parameters that they do not show stay gathered: one rank may copy or pickle alone, and the
        next forward gathers on all ranks or on none.
        """
        group = state_of(self).group
        if group is not None and group.is_shown:
            self.reshard()

    def __prepare_scriptable__(self) -> None:
        """Refuse `torch.jit.script`, which asks a module for one that it can compile."""
        refuse_export()

    @torch_modules.untraced
    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Convert the pieces (``to``, ``half``, ``to_empty``, ...), and lay them end to end again.

        Groups are converted one by one, so that only one group's pieces exist twice at a time.
        """
        state = state_of(self)
        refuse_summoned(
            groups_in(self, recurse=False), "a conversion (to(), half(), ...) was called"
        )
        for group in groups_in(self, recurse=True):
            group.check_conversion(fn)
        self.reshard()
        conversion = NotedConversion(self, fn)
        with contextlib.nullcontext() if state.group is None else state.group.converted():
            result = super()._apply(conversion.fn, *args, **kwargs)  # type: ignore[no-untyped-call]
            state.note_emptied(conversion)
        return result

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters: outside of a forward or backward the sharded ones.

        An optimizer, ``zero_grad()`` and `clip_grad_norm_` need the sharded ones. So they get them
        also after an exception in a step, and between forward and backward of groups that keep
        their unsharded parameters. From `unshard` to `reshard` they get unsharded ones. A thread
        that does not train gets the sharded ones at any time.
        """
        runtime = state_of(self).runtime  # None: at most modules inside have run, as roots.
        if runtime is not None:
            runtime.tidy_up()
        module: Any = self
        named = own_class(self).named_parameters(module, *args, **kwargs)
        if (
            runtime is not None
            and (runtime.pass_root is not None or runtime.backward.is_running)
            and not runtime.is_of_other_thread
        ):
            return named
        # Nearly always the parameters are sharded, and `settled` is not called.
        return ((n, p if isinstance(p, ShardedTensor) else settled(p)) for n, p in named)

    @torch_modules.untraced
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters now; the next `reshard`, forward or backward frees them.

        Not recursive. Call it on all ranks.

        Args:
            async_op: Whether to return a handle at once; the module's forward waits by itself.

        Cost: one all-gather per bucket, none if the parameters are unsharded already.
        """
        state = state_of(self)
        refuse_summoned(groups_in(self, recurse=False), "unshard() was called")
        if state.runtime is None:
            state.make_runtime()
        if state.runtime is not None:
            # Pipelines of torch 2.9 call this once on the stage, newer ones on each module in it.
            is_lent = torch_fsdp2.is_called_by_pipeline(inspect.currentframe())
            for group in groups_in(self, recurse=is_lent):
                state.runtime.unshard(group, until_reshard=is_lent)
        handle = UnshardHandle(state)
        if async_op:
            return handle
        handle.wait()
        return None

    @torch_modules.untraced
    def reshard(self) -> None:
        """Free this module's unsharded parameters and show the sharded ones. Not recursive."""
        runtime = state_of(self).runtime
        if runtime is not None:
            is_lent = torch_fsdp2.is_called_by_pipeline(inspect.currentframe())
            for group in groups_in(self, recurse=is_lent):
                runtime.reshard(group)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging them over the ranks, in the ``with`` block.

        The block calls `set_requires_gradient_sync` with False for this module and the modules in
        it, and restores the former setting at its end. Backwards must run inside:

            with model.no_sync():
                for batch in batches[:-1]:
                    loss(model(batch)).backward()
            loss(model(batches[-1])).backward()
        """
        before = [(group, group.settings.sync) for group in groups_in(self, recurse=True)]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for group, sync in before:
                group.settings.sync = sync

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Choose what is gathered when this module's forward begins.

        The default is the module that came next in the last forward. All of `modules` are gathered,
        so a list of n takes the memory of n + 1 modules. An empty list prefetches nothing. A module
        that is taken out of the model later is left out. If this module has no group, because the
        modules in it took all parameters, the call has no effect.

        Raises:
            StateError: `modules` is no list, or a module is not sharded (raised here), or is part
                of another root (raised at its forward).
        """
        chosen = _groups_of(modules)
        for group in groups_in(self, recurse=False):
            group.settings.next_in_forward = chosen
        _update_options(self)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Choose what is gathered when this module's backward begins."""
        chosen = _groups_of(modules)
        for group in groups_in(self, recurse=False):
            group.settings.next_in_backward = chosen
        _update_options(self)

    @torch_modules.untraced
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the gradients of all parameters in the module so that their norm is `max_norm`.

        It does what ``torch.nn.utils.clip_grad_norm_`` does, on every rank alike. On XLA devices
        use this one: torch_xla replaces torch's function by one that reduces the norm of each
        parameter by itself and, for the largest element, reads on the host. Call it on all ranks,
        on the root.

        Args:
            max_norm: The largest norm allowed; ``float("inf")`` clips nothing.
            norm_type: Order of the norm; ``float("inf")`` is the largest element.
            error_if_nonfinite: Whether to raise if the norm is not finite; this waits for the norm.

        Returns:
            The norm before clipping, 0-dim, fp32 or wider, the same on every rank. It has
            `full_tensor()`.

        Raises:
            RuntimeError: The norm is not finite, with `error_if_nonfinite`.
            StateError: `max_norm` or `norm_type` is negative or not a number, or the call is inside
                `summon_full_params` without gradients.

        Cost: one all-reduce of 8 bytes per parameter (16 for the largest element), for each dtype
        of gradients.
        """
        for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
            if not as_number(value) >= 0:  # Also NaN.
                msg = f"clip_grad_norm_: {name} must be a number of at least 0, got {value!r}."
                raise StateError(msg)
        refuse_texts(StateError, error_if_nonfinite=error_if_nonfinite)
        params = [p for p in self.parameters() if p.grad is not None]
        if not params:
            refuse_summoned(groups_in(self, recurse=True), "clip_grad_norm_() was called")
        norm = total_norm([p.grad for p in params], float(norm_type))  # type: ignore[misc]
        runtime = state_of(self).runtime
        if error_if_nonfinite and runtime is not None:
            runtime.passes.finish_graph()  # All replicas at once, where they are threads.
        if error_if_nonfinite and not bool(norm.isfinite()):
            msg = (
                f"the gradients' norm of order {norm_type} is {norm.item()}, so they cannot be "
                f"clipped. Pass error_if_nonfinite=False to go on."
            )
            raise RuntimeError(msg)
        nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        return norm

    @torch_modules.untraced
    def check_replicas(self) -> None:
        """Compare the replicas of a hybrid mesh: all elements of all parameters, bit by bit.

        Replicas stay equal if all ranks do the same. If some parameters are DTensors, this also
        compares what the ranks of their meshes hold of the others, such as norms: nothing sums
        the gradients of plain parameters over these ranks. Call it on all ranks, from time to time.
        It does nothing if nothing is replicated.

        Raises:
            RankMismatchError: Replicas differ. All ranks raise, and name the first such parameter.

        Cost: it reads the shards; one all-reduce of 16 bytes per parameter, one exchange per group;
        two exchanges for each axis of DTensors.
        """
        check_same_replicas([*groups_in(self, recurse=True)])

    @torch_modules.untraced
    def check_gradients(self) -> None:
        """Raise if gradients are not finite; name the parameter, and the rank where it began.

        Call it on all ranks, after a backward that synced, before the gradients are clipped or
        unscaled. The average spreads one rank's NaN to all ranks. To learn which rank it came from,
        call ``set_watch(check_gradients=True)`` before that backward: then each rank notes its own
        gradients. This call clears the notes.

        Raises:
            NonFiniteGradientError: A gradient is not finite. All ranks raise, with the same text.

        Cost: it reads the gradients and waits for the device; one exchange for each mesh axis.
        """
        runtime, groups = state_of(self).runtime, [*groups_in(self, recurse=True)]
        if runtime is not None and groups:
            notes, rank = runtime.backward.finite_notes, groups[0].mesh.rank
            check_gradients(groups, notes, runtime.axes, rank)

    @torch_modules.untraced
    def reset_iter_state(self) -> None:
        """Return to the state between steps, after an exception in forward or backward.

        The next forward of the root does it by itself. This call gives the memory back at once.
        Gradients that have not been synced are lost.
        """
        runtime = state_of(self).runtime
        if runtime is not None:
            runtime.reset()

    def memory_stats(self) -> dict[str, int]:
        """Return the bytes that this module and the sharded modules in it hold on this rank.

        Keys: ``shard_nbytes`` (parameters), ``unsharded_nbytes`` and ``peak_unsharded_nbytes``
        (unsharded buffers now, and at their peak), ``reduce_buffer_nbytes`` (send and receive
        buffers of gradients at their peak) and ``unsynced_grad_nbytes`` (gradients that wait to be
        synced). The middle three count the whole root.
        """
        groups = list(groups_in(self, recurse=True))
        runtime = state_of(self).runtime
        return {
            "shard_nbytes": sum(group.shard_nbytes for group in groups),
            "unsharded_nbytes": runtime.gathers.nbytes if runtime else 0,
            "peak_unsharded_nbytes": runtime.gathers.peak_nbytes if runtime else 0,
            "reduce_buffer_nbytes": runtime.reductions.peak_nbytes if runtime else 0,
            "unsynced_grad_nbytes": sum(group.gradients.buffer_nbytes for group in groups),
        }

    # --- microbatches ---

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward averages gradients over the ranks.

        For gradient accumulation set it to False for all micro-batches but the last. Unsynced
        gradients are summed in a full-size buffer per group, in `reduce_dtype` (see
        `memory_stats`). `synchronize_gradients` averages them without another backward. True also
        ends `set_requires_all_reduce(False)`.

        Args:
            requires_gradient_sync: The flag.
            recurse: Whether to set the flag on the sharded modules inside, too.
        """
        refuse_texts(StateError, requires_gradient_sync=requires_gradient_sync)
        runtime = state_of(self).runtime
        if runtime is not None and runtime.schedule.lends:
            runtime.backward.take_left()
        for group in groups_in(self, recurse=recurse):
            group.settings.sync = requires_gradient_sync
            if requires_gradient_sync:
                group.settings.all_reduce = True

    @torch_modules.untraced
    def synchronize_gradients(self) -> None:
        """Average the gradients that backwards have left unsynced; no backward is needed.

        Call it on all ranks, on the root, if the last micro-batch of a step cannot be known before
        its backward. The gradients go to ``.grad`` as at the end of a backward that syncs: also
        sums that wait for the all-reduce (`set_requires_all_reduce`), and reductions that a later
        backward was to wait for (`set_is_last_backward`). The settings stay as they are. Nothing
        happens if no gradients wait.

        Raises:
            StateError: It is called inside of a forward or a backward, or inside of
                `summon_full_params`.

        Cost: one reduce-scatter for each bucket whose gradients wait, and one all-reduce on a
        hybrid mesh, as in a backward that syncs.
        """
        runtime = state_of(self).runtime
        if runtime is not None:
            runtime.sync_gradients(groups_in(self, recurse=True))

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward all-reduces over the replicate axis of a 2-D mesh.

        While it is False, gradients are reduce-scattered only, and each rank keeps partial sums of
        1/N of the size. The first backward with True, or after `set_requires_gradient_sync(True)`,
        sets ``.grad``.
        """
        refuse_texts(StateError, requires_all_reduce=requires_all_reduce)
        for group in groups_in(self, recurse=recurse):
            group.settings.all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last of the step.

        After a backward that is not the last, reductions may still be under way, so that the next
        micro-batch overlaps with them. After the last one ``.grad`` is complete, and ranks have
        been compared.
        """
        refuse_texts(StateError, is_last_backward=is_last_backward)
        for group in groups_in(self, recurse=True):
            group.settings.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether you end the backwards of each step yourself, by `finalize_backward`.

        Call it on the outermost sharded module. While it is on, `set_is_last_backward` has no
        effect. Backwards still start reductions as gradients come.

        Raises:
            StateError: The module is inside of another sharded one, a backward runs, or one has
                ended that was not finalized.
        """
        refuse_texts(StateError, enabled=enabled)
        settings = settings_of_root(self)
        if enabled == settings.finalizes_by_hand:
            return  # Pipelines of torch call it in each forward.
        runtime = state_of(self).runtime
        if runtime is not None and (
            runtime.backward.is_running or runtime.reductions.unended or runtime.finalization
        ):
            msg = (
                "set_manual_backward_finalization() was called before the step's backwards were "
                "finalized. Call it before the first backward of a step."
            )
            raise StateError(msg)
        settings.finalizes_by_hand = enabled
        _update_options(self)

    @torch_modules.untraced
    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End the backwards of a step: reduce what is left, wait, and set ``.grad``.

        Parameters that backwards have kept are freed, except after
        `set_reshard_after_backward(False)`. Before this call ``.grad`` may lack a part: do not
        read, clip or clear gradients.

        It needs `set_manual_backward_finalization`. Call it on the outermost sharded module, on all
        ranks, after the last backward of the step. The settings of the groups count: if backwards
        ran without gradient sync, turn the sync on before this call. Nothing happens before the
        first forward.

        Args:
            async_op: Whether to start the reductions only. Then nothing else may be done with the
                module before the handle's ``wait()``.

        Returns:
            A handle if `async_op` is True, else None.

        Raises:
            StateError: It is called inside of a forward or a backward, without
                `set_manual_backward_finalization`, on an inner module, while gradients of a hybrid
                mesh are not to be all-reduced, or before the ``wait()`` of an earlier handle.

        Cost: as for `synchronize_gradients`.
        """
        settings_of_root(self)
        runtime = state_of(self).runtime
        handle = GradientReductionHandle(runtime) if async_op else None
        if runtime is not None:
            runtime.finalize_backward(handle=handle)
        return handle

    # --- memory ---

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether the parameters are freed after forward, from the next forward on."""
        if not isinstance(reshard_after_forward, bool):
            msg = (
                f"reshard_after_forward must be True or False, got {reshard_after_forward!r}. A "
                f"number of ranks can only be given to fully_shard: it makes process groups."
            )
            raise StateError(msg)
        for group in groups_in(self, recurse=recurse):
            group.set_reshard_after_forward(reshard_after_forward)
        _update_options(self)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether the parameters are freed after backward.

        False saves the all-gather of the next forward if no optimizer step comes before it. It
        costs the memory of the unsharded parameters. Shards that changed are gathered again.
        """
        refuse_texts(StateError, reshard_after_backward=reshard_after_backward)
        for group in groups_in(self, recurse=recurse):
            group.settings.reshard_after_backward = reshard_after_backward
        _update_options(self)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward gathers this module's parameters.

        Set it to False only where no backward reads the parameters, as in an ``nn.Embedding``. A
        backward that reads them would read freed memory. Not recursive.
        """
        refuse_texts(StateError, unshard_in_backward=unshard_in_backward)
        for group in groups_in(self, recurse=False):
            group.settings.unshard_in_backward = unshard_in_backward
        _update_options(self)

    # --- prefetch ---

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether the memory of unsharded parameters is kept while they are resharded.

        Then unsharded parameters have the same address each time, from the next unshard on, as
        graphs of devices need that others capture. The group's memory serves no other group
        meanwhile: it costs the bytes of the unsharded parameters. `shardkit.capture` does not need
        it, and `memory_stats` does not count what is kept. After ``keep=False`` the memory is freed
        when the parameters are resharded next. On XLA devices it changes nothing.
        """
        refuse_texts(StateError, keep=keep)
        for group in groups_in(self, recurse=recurse):
            group.set_keep_unsharded_storage(keep)

    def set_prefetch_policy(
        self, *, forward: bool = True, backward: Literal["pre", "post", "none"] = "pre"
    ) -> None:
        """Choose when this root gathers ahead of use. Call it on the root.

        Args:
            forward: Whether to gather the next module before the current one computes.
            backward: Moment when backward gathers the next module. ``"pre"``: before the current
                one's gradients are computed, on CPU ranks when half of them are (most overlap);
                ``"post"``: after that (less memory); ``"none"``: when the next module is entered.
        """
        refuse_texts(StateError, forward=forward)
        state = state_of(self)
        try:
            when = BackwardPrefetch(backward)
        except ValueError:
            msg = f"backward must be 'pre', 'post' or 'none', got {backward!r}."
            raise StateError(msg) from None
        state.settings.prefetch_in_forward, state.settings.prefetch_in_backward = forward, when
        _update_options(self)

    # --- communication ---

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this module's gradient sums by `factor`, not the number of ranks. Not recursive.

        Raises:
            StateError: `factor` is zero, negative, not finite or no number.
        """
        number = as_number(factor)
        if not 0 < number < math.inf:
            msg = (
                f"factor: gradients cannot be divided by {factor!r}. Pass a finite number above 0."
            )
            raise StateError(msg)
        for group in groups_in(self, recurse=False):
            group.settings.comm.divide_factor = number

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Do the same as `set_gradient_divide_factor`, which is the newer name."""
        self.set_gradient_divide_factor(factor)

    def set_gradient_predivide_factor(self, factor: float | Literal["auto"] | None) -> None:
        """Divide this module's gradients by `factor` before they are summed. Not recursive.

        The sum is then multiplied by the rest, ``factor / divide``. Here ``divide`` is the number
        of ranks, or the factor of `set_gradient_divide_factor`. So the gradient is the same except
        for rounding, and values on the wire are `factor` times smaller: partial sums in fp16 do not
        overflow. A power of two changes no bit, except where numbers overflow or underflow.

        Args:
            factor: Number that fairscale and torch_xla call ``gradient_predivide_factor`` (their
                ``gradient_postdivide_factor`` is ``divide / factor``). ``"auto"``: their default,
                the first power of two from which on ``factor * factor`` is at least the number of
                ranks, as long as that is divisible. None, the default: all of the division comes
                after the sum. But in fp16 on accelerators half of it (the root) comes before.

        Raises:
            StateError: `factor` is zero, negative or not finite.

        Cost: one more pass over the data that is sent, on the device.
        """
        is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        if is_number and not 0 < factor < math.inf:  # type: ignore[operator]
            msg = f"gradients cannot be divided by {factor!r} first. Pass a finite number above 0."
            raise StateError(msg)
        if not is_number and factor not in ("auto", None):
            msg = f"factor must be a number, 'auto' or None, got {factor!r}."
            raise StateError(msg)
        for group in groups_in(self, recurse=False):
            chosen = float(factor) if is_number else factor  # type: ignore[arg-type]
            group.settings.comm.predivide_factor = chosen

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Let the collective library only sum gradients, and divide them afterwards.

        Otherwise NCCL itself divides by the number of ranks. On the CPU and on XLA reductions are
        always sums. The setting applies to all modules in this one as well.
        """
        refuse_texts(StateError, enable=enable)
        for group in groups_in(self, recurse=True):
            group.settings.comm.force_sum = enable

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set whether this rank takes part in the reduction of a group that it did not use.

        True (the default; FSDP2's is False) is right when ranks use different parameters. False
        saves the reduction of groups that NO rank uses. If ranks then use different groups, their
        collectives do not match, and they get an error.
        """
        refuse_texts(StateError, reduce_scatter_unused_params=reduce_scatter_unused_params)
        for group in groups_in(self, recurse=recurse):
            group.settings.reduce_unused = reduce_scatter_unused_params

    def set_all_reduce_hook(
        self, hook: Callable[[Tensor], object] | None, *, stream: Any = None
    ) -> None:
        """Set a hook that gets every reduced gradient buffer of this module. Not recursive.

        Args:
            hook: A function of a 1-D tensor: this rank's range of the averaged gradients, after the
                reduce-scatter and, on a 2-D mesh, the all-reduce. It may change the tensor in
                place, e.g. all-reduce it over further ranks. None removes the hook.
            stream: The stream on which an accelerator runs the hook; not with a 2-D mesh.

        Raises:
            StateError: There is a hook already, `hook` is no function, or a stream is given with a
                2-D mesh.
        """
        refuse_non_functions(StateError, hook=hook)
        for group in groups_in(self, recurse=False):
            comm = group.settings.comm
            if hook is not None and comm.all_reduce_hook is not None:
                msg = (
                    f"{group.name!r} has an all-reduce hook already. Remove it first: "
                    f"set_all_reduce_hook(None); or call both from one function."
                )
                raise StateError(msg)
            if stream is not None and group.replicates:
                msg = (
                    f"{group.name!r} is on a 2-D mesh, whose all-reduce has a stream of its own, "
                    f"on which the hook runs too. Do not pass a stream."
                )
                raise StateError(msg)
            comm.all_reduce_hook, comm.all_reduce_hook_stream = hook, stream

    def set_custom_all_gather(self, comm: AllGather | None) -> None:
        """Gather this module's parameters by your own function. Not recursive.

        The function gets buffers that `comm` allocated, also after
        `set_allocate_memory_from_process_group_for_comm`.

        Args:
            comm: Object like FSDP2's ``AllGather``: ``allocate(size, dtype=, device=)`` and
                ``(output_tensor, input_tensor, group, async_op)``. None: shardkit's all-gather.

        Raises:
            StateError: The mesh is one of XLA devices, or `comm` is no function.

        Cost: copies into and out of the buffers that `comm` allocates.
        """
        _refuse_comm(self, "set_custom_all_gather", comm)
        refuse_non_functions(StateError, comm=comm)
        for group in groups_in(self, recurse=False):
            group.settings.comm.all_gather = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter | None) -> None:
        """Reduce this module's gradients by your own function. Not recursive.

        The function gets buffers that `comm` allocated, also after
        `set_allocate_memory_from_process_group_for_comm`.

        Args:
            comm: Object like FSDP2's ``ReduceScatter``: `allocate`, and ``(output_tensor,
                input_tensor, group, op, async_op)``; `op` is always a sum. None: shardkit's
                reduce-scatter.

        Raises:
            StateError: The mesh is one of XLA devices, or `comm` is no function.

        Cost: copies into the buffers that `comm` allocates.
        """
        _refuse_comm(self, "set_custom_reduce_scatter", comm)
        refuse_non_functions(StateError, comm=comm)
        for group in groups_in(self, recurse=False):
            group.settings.comm.reduce_scatter = comm

    def set_custom_all_reduce(self, comm: AllReduce | None) -> None:
        """Sum this module's gradients over the replicate axis by your own function.

        Not recursive. `shardkit.compression` has functions that compress, and sets one for a whole
        model. A copy of the module (``copy.deepcopy``, pickle) does not keep the function.

        Args:
            comm: An `AllReduce`. None: shardkit's all-reduce.

        Raises:
            StateError: There is no replicate axis, or the mesh is one of XLA devices, or `comm`
                takes other arguments, as hooks of DDP do.
        """
        if comm is not None:
            try:
                inspect.signature(comm).bind(*"1234")
            except ValueError:  # A function of C may have no signature.
                pass
            except TypeError as error:
                msg = (
                    f"an all-reduce takes (tensor, pieces, axis, unit), as AllReduce describes it; "
                    f"{getattr(comm, '__name__', comm)!r} does not: {error}. In place of a hook of "
                    f"DDP or FSDP1 pass one of shardkit.compression, or a function of this form."
                )
                raise StateError(msg) from error
        for group in groups_in(self, recurse=False):
            if comm is not None and not group.replicates:
                msg = (
                    f"set_custom_all_reduce: {group.name!r} is on a mesh of one axis, which has no "
                    f"all-reduce. Pass fully_shard a 2-D mesh; (n, 1) replicates without "
                    f"sharding. For fewer bytes in the reduce-scatter choose "
                    f"MixedPrecisionPolicy(reduce_dtype=...)."
                )
                raise StateError(msg)
            _refuse_comm(self, "set_custom_all_reduce", comm)
            group.settings.comm.all_reduce = comm

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Take buffers from memory of the process group, if the group offers any (NCCL does).

        All modules of a root share buffers, so one module with this setting sets it for all.

        Raises:
            StateError: The module has an all-gather or reduce-scatter of the user's.
        """
        refuse_texts(StateError, enable=enable)
        for group in groups_in(self, recurse=False):
            comm = group.settings.comm
            if enable and (comm.all_gather is not None or comm.reduce_scatter is not None):
                msg = (
                    f"{group.name!r} communicates by functions of yours, which allocate their own "
                    f"buffers. Use one or the other."
                )
                raise StateError(msg)
            group.settings.comm_memory = enable
        _update_options(self)

    def set_symm_mem_for_comm(
        self, backend: Literal["NCCL"] = "NCCL", *, max_bytes: int = 64 << 20
    ) -> None:
        """Communicate out of NCCL's symmetric memory where that pays: for small groups.

        All-gathers of parameters use it. Reductions of gradients use it after
        ``set_force_sum_reduction_for_comms(True)``, because NCCL can only sum there. Not recursive.
        Call it on all ranks. NCCL must support it: FSDP2's page says with which cards and options.
        Nobody has run it on a card with shardkit.

        Args:
            backend: Engine of the symmetric memory; torch knows ``"NCCL"`` only.
            max_bytes: Size of the largest group, in bytes of unsharded parameters, that uses it.
                In Megatron-LM (pull request 5655) it made collectives of 1 to 16 MiB 1.3 to 2.1
                times as fast, and those of 256 MiB no faster. A larger group is not changed.

        Raises:
            StateError: The module is not on CUDA devices, torch has no such collectives, the user
                has set collectives of their own, or buffers come from the process group.

        Cost: that of `set_custom_all_gather` and `set_custom_reduce_scatter`.
        """
        _refuse_comm(self, "set_symm_mem_for_comm", backend)
        for group in groups_in(self, recurse=False):
            comm, device_type = group.settings.comm, group.mesh.device_type
            known = {type(comm.all_gather), type(comm.reduce_scatter)}
            other = None
            if group.settings.comm_memory:
                other = "takes its buffers from the process group"
            elif not known <= {type(None), torch_fsdp2.SymmetricComm}:
                other = "communicates by functions of yours"
            if other is not None:
                msg = f"set_symm_mem_for_comm: {group.name!r} {other}. Use one or the other."
                raise StateError(msg)
            kinds = torch_fsdp2.symmetric_kinds(device_type)
            if not kinds:
                msg = (
                    f"set_symm_mem_for_comm: {group.name!r} is on {device_type!r} "
                    f"devices and torch is {torch.__version__}; symmetric memory of {backend} is "
                    f"there on CUDA devices, from torch 2.12 on. Leave the call out."
                )
                raise StateError(msg)
            num_used = 1 + comm.force_sum if group.unsharded_nbytes <= max_bytes else 0
            axis: Any = group.buckets[0].plan.axis
            made: list[Any] = [
                torch_fsdp2.SymmetricComm(kind, axis.group, backend) for kind in kinds[:num_used]
            ]
            comm.all_gather, comm.reduce_scatter, *_ = *made, None, None

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reduce on a separate process group, so that gathers and reductions do not queue.

        On gloo this is always the case. Call it on all ranks.

        Cost: one more process group (communicator) per mesh axis.
        """
        refuse_texts(StateError, enable=enable)
        for group in groups_in(self, recurse=recurse):
            group.settings.separate_reduce = enable
        _update_options(self)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set how many gradient buffers may be in flight at once; 1 takes the least memory.

        On CUDA memory is reused in stream order, and the number has no effect.

        Raises:
            StateError: The number is not a positive int.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            msg = f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}."
            raise StateError(msg)
        if max_input_buffers < 1:
            msg = f"max_input_buffers must be at least 1, got {max_input_buffers}."
            raise StateError(msg)
        for group in groups_in(self, recurse=recurse):
            group.settings.max_send_buffers = max_input_buffers

    def set_post_optim_event(self, event: Any) -> None:
        """Let the next forward's all-gathers wait for an event recorded after the optimizer step.

        Call it on the root in every step, with a new event.
        """
        state = state_of(self)
        runtime = state.runtime or state.make_runtime()
        if runtime is not None:
            runtime.optimizer_event = event

    # --- graphs of XLA devices ---

    def set_optimization_barriers(self, forward: bool = True, backward: bool = True) -> None:
        """Choose where gathers keep their place in the graph. Call it on the root.

        It has an effect on XLA devices only. An optimization barrier ties each gather to the value
        that was computed last when the gather was issued. So the gather can run beside the next
        computation, and the compiler does not hoist it to an earlier place.

        Args:
            forward: Whether to tie gathers in forward. Without ties the compiler may gather all
                modules at the start of forward, which takes more memory and at most adds overlap.
            backward: Whether to tie gathers in backward. Without ties the compiler may merge a
                gather with that of forward: then ``reshard_after_forward=True`` saves no memory.

        Raises:
            StateError: The first forward has run, and this module was not its root.
        """
        refuse_texts(StateError, forward=forward, backward=backward)
        settings = settings_of_root(self)
        settings.barrier_in_forward, settings.barrier_in_backward = forward, backward

    def set_sync_on_finalization(self, enable: bool = True) -> None:
        """Run the graph at the end of every backward (``mark_step``). Call it on the root.

        It has an effect on XLA devices only. Forward and backward become one graph and the
        optimizer's step another, so the compiler does not fuse across them. Some models take less
        memory then. The cost is one more launch per backward.

        Raises:
            StateError: The first forward has run, and this module was not its root.
        """
        refuse_texts(StateError, enable=enable)
        settings_of_root(self).sync_on_finalization = enable

    # --- debugging ---

    def set_debug(
        self,
        *,
        dummy_gathers: bool = False,
        dummy_reductions: bool = False,
        print_memory: str | None = None,
    ) -> None:
        """Find out how much each part of a step costs. Call it on the root, and again to change it.

        With dummies nothing travels between ranks: a rank uses its own data in the place of the
        data of all ranks. Buffers, casts, order and memory are as always, so the difference from a
        usual step is the cost of the collectives. All values are WRONG from then on: a warning says
        so at each root's first step. The model cannot be saved or pickled any more, even after the
        dummies are turned off. Choose the same on all ranks.

        Args:
            dummy_gathers: Whether to leave out all-gathers of parameters.
            dummy_reductions: Whether to leave out reduce-scatters and all-reduces of gradients.
            print_memory: A word that begins a line on stderr at each gather, each free and each
                reduction of this root. The line has the bytes of unsharded parameters now and at
                their peak, of buffers of reductions at their peak, and on CUDA of all allocations.
                On XLA it is printed at tracing. None: print nothing.

        Raises:
            StateError: The first forward has run, and this module was not its root.
        """
        refuse_texts(StateError, dummy_gathers=dummy_gathers, dummy_reductions=dummy_reductions)
        settings = settings_of_root(self)
        settings.dummy_gathers, settings.dummy_reductions = dummy_gathers, dummy_reductions
        settings.memory_message = print_memory
        _update_options(self)


torch_fsdp2.note_fully_sharded(FSDPModule)


def new_module(original: type[nn.Module]) -> nn.Module:
    """Return a module without attributes; pickles name this function."""
    return nn.Module.__new__(original)


def _restore(
    module: Any,
    written: tuple[dict[str, Any], ParamGroup | None, MixedPrecisionPolicy, dict[str, Any]],
) -> None:
    """Restore the state of an unpickled module; pickles name this function."""
    attributes, group, policy, settings = written
    module.__setstate__(attributes)
    # Hooks keep the numbers of the process that pickled them. New hooks must not reuse these.
    numbers = [
        number
        for child in module.modules()
        for name, hooks in child.__dict__.items()
        if name.endswith("hooks") and isinstance(hooks, dict)
        for number in hooks
        if isinstance(number, int)  # Dicts of users may have such names, too.
    ]
    RemovableHandle.next_id = max([RemovableHandle.next_id, *(n + 1 for n in numbers)])
    state = ModuleState(module, group, policy)
    state.settings = RootSettings(**settings)
    state.install()
    watch_optimizers()
    if group is not None:
        group.note_restored()
    swap_class(module)


def _copy_group(group: ParamGroup, copied: ModuleState, memo: dict[int, Any]) -> None:
    """Copy a group for the copy of one of its modules, and copy the other modules of its list."""
    key: Any = ("copies of a group", id(group))
    is_first = key not in memo
    states: list[ModuleState] = memo.setdefault(key, [])
    states.append(copied)
    if is_first:
        for module in group.modules:
            copy.deepcopy(module, memo)
        result = group.copy_for(memo)
        for state in states:
            state.group = result


def _update_options(self: Any) -> None:
    """Let the schedule of the root, if there is one, follow the settings."""
    runtime = state_of(self).runtime
    if runtime is not None:
        runtime.update_options()


def settings_of_root(self: Any) -> RootSettings:
    """Return the settings of a module that is not inside another sharded one."""
    state = state_of(self)
    if state.runtime is not None and state.runtime.settings is not state.settings:
        msg = (
            f"this {type(self).__name__} is inside of another sharded module, whose choice counts "
            f"for all. Call it on the outermost one."
        )
        raise StateError(msg)
    return state.settings


def _refuse_comm(self: Any, what: str, comm: object) -> None:
    for group in groups_in(self, recurse=False):
        if comm is not None and group.mesh.backend.is_traced:
            msg = (
                f"{what}: {group.name!r} is on a mesh of {group.mesh.device_type!r} devices, "
                f"whose collectives are part of the traced program: there is no process group "
                f"to call yours with. Leave it out there."
            )
            raise StateError(msg)


def _groups_of(modules: Sequence[Any]) -> list[ParamGroup]:
    """Return the groups of sharded modules."""
    refusal = (
        "{} cannot be prefetched: it is not sharded. Call fully_shard on it first, or name the "
        "sharded module that holds it."
    )
    states = _states_of(modules, refusal)
    return list(dict.fromkeys(state.group for state in states if state.group is not None))


def _states_of(modules: Sequence[Any], refusal: str) -> list[ModuleState]:
    """Return the states of sharded modules; raise `refusal` with the class of any other module."""
    # An `nn.Sequential` would be taken for its children.
    if isinstance(modules, nn.Module) or not isinstance(modules, Iterable):
        msg = f"expected a list of modules, got {own_class(modules).__name__}. Write [module]."
        raise StateError(msg)
    states = []
    for module in modules:
        state = get_state(module) if isinstance(module, nn.Module) else None
        if state is None:
            raise StateError(refusal.format(type(module).__name__))
        states.append(state)
    return states


def share_comm_ctx(modules: Sequence[Any]) -> None:
    """Let several roots share streams and buffers, such as stages of a pipeline on one rank.

    Args:
        modules: Sharded roots, before their first forward; only the first may have run.

    Raises:
        StateError: One of the modules is not sharded, or another than the first has already run.
    """
    states = dict.fromkeys(_states_of(modules, "share_comm_ctx takes sharded modules, got {}."))
    first, *others = states or (None,)
    for state in others:
        if state.runtime is not None:
            msg = (
                f"{type(state.module).__name__} has run with streams of its own. Call "
                f"share_comm_ctx before the first forward."
            )
            raise StateError(msg)
        state.share = first
