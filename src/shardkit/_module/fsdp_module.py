"""What a module gains by `fully_shard`: its class, and the methods that steer its group."""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.utils import parametrize

from shardkit import _compat_modules
from shardkit._errors import StateError
from shardkit._module import copies, debug, gradient_setters, setters
from shardkit._module.hooks import get_state, groups_in, state_of
from shardkit._module.on_meta import NotedConversion
from shardkit._module.setters import update_options
from shardkit._params.bucket import settled
from shardkit._runtime.agreement import check_same_replicas
from shardkit._runtime.finite import check_gradients
from shardkit._runtime.summoned import refuse_summoned
from shardkit._settings import as_number
from shardkit._tensor.ops import total_norm

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from shardkit._module.hooks import ModuleState
    from shardkit._runtime.group import ParamGroup

    class _Base(nn.Module):
        """What a type checker sees below `FSDPModule`: the class that is sharded comes after it."""

        def __getattr__(self, name: str) -> Any: ...

else:
    _Base = object

_sharded_classes: dict[type, type] = {}


def own_class(module: Any) -> type[nn.Module]:
    """Return the class the module had before `fully_shard`."""
    cls: type[Any] = type(module)
    return cls.__mro__[2] if issubclass(cls, FSDPModule) else cls


def swap_class(module: nn.Module) -> None:
    """Give a module the class with the methods of `FSDPModule`."""
    cls = type(module)
    if cls not in _sharded_classes:
        meta = _parametrized_meta(type(cls)) if parametrize.is_parametrized(module) else type
        _sharded_classes[cls] = meta(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    module.__class__ = _sharded_classes[cls]


def _parametrized_meta(meta: type) -> Any:
    """Return a class of classes that refuses what `remove_parametrizations` does first."""

    def refuse(cls: type, name: str) -> None:
        msg = (
            f"the parametrization of {name!r} cannot be removed from a sharded "
            f"{cls.__mro__[2].__name__}: its group holds what the weight is computed from. Call "
            f"remove_parametrizations before fully_shard; for an export save the model by "
            f"shardkit.checkpoint.save_full, load the file into a plain one, and remove it there."
        )
        raise StateError(msg)

    return type("Parametrized", (meta,), {"__delattr__": refuse})


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns."""

    def __init__(self, state: ModuleState) -> None:
        self._state = state

    def wait(self) -> None:
        """Return when the module's parameters are the unsharded ones.

        Raises:
            StateError: Inside of `summon_full_params`.
        """
        if self._state.group is not None and self._state.runtime is not None:
            refuse_summoned([self._state.group], "wait() of unshard() was called")
            self._state.runtime.wait_unshard(self._state.group)


class FSDPModule(_Base):
    """Methods of a module that `fully_shard` has sharded."""

    set_requires_gradient_sync = setters.set_requires_gradient_sync
    set_requires_all_reduce = setters.set_requires_all_reduce
    set_is_last_backward = setters.set_is_last_backward
    set_reshard_after_forward = setters.set_reshard_after_forward
    set_reshard_after_backward = setters.set_reshard_after_backward
    set_unshard_in_backward = setters.set_unshard_in_backward
    set_prefetch_policy = setters.set_prefetch_policy
    set_gradient_divide_factor = setters.set_gradient_divide_factor
    set_gradient_predivide_factor = gradient_setters.set_gradient_predivide_factor
    set_custom_all_reduce = gradient_setters.set_custom_all_reduce
    set_reduce_scatter_divide_factor = setters.set_reduce_scatter_divide_factor
    set_force_sum_reduction_for_comms = setters.set_force_sum_reduction_for_comms
    set_reduce_scatter_unused_params = setters.set_reduce_scatter_unused_params
    set_all_reduce_hook = setters.set_all_reduce_hook
    set_custom_all_gather = setters.set_custom_all_gather
    set_custom_reduce_scatter = setters.set_custom_reduce_scatter
    set_allocate_memory_from_process_group_for_comm = (
        setters.set_allocate_memory_from_process_group_for_comm
    )
    set_separate_reduce_scatter_group = setters.set_separate_reduce_scatter_group
    set_reduce_scatter_max_input_buffers = setters.set_reduce_scatter_max_input_buffers
    set_post_optim_event = setters.set_post_optim_event
    set_optimization_barriers = setters.set_optimization_barriers
    set_sync_on_finalization = setters.set_sync_on_finalization
    set_debug = debug.set_debug

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object of the original class: containers build new ones when sliced."""
        original = cls.__mro__[2]
        self = original.__new__(original, *args, **kwargs)
        self.__init__(*args, **kwargs)
        return self

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """Refuse to be wrapped in DistributedDataParallel, which asks for this first."""
        if _compat_modules.is_called_by_ddp(inspect.currentframe()):
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
        state = state_of(self)
        refuse_summoned(groups_in(self, recurse=False), "copy.deepcopy() was called")
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
        state = state_of(self)
        refuse_summoned(groups_in(self, recurse=False), "pickling was tried")
        self.reshard()
        written = copies.write(state)
        return copies.new_module, (own_class(self),), written, None, None, _restore

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Convert the pieces (``to``, ``half``, ``to_empty``, ...), and lay them end to end again.

        Group by group, so that beside the shards only one group's pieces exist a second time.
        """
        state = state_of(self)
        refuse_summoned(
            groups_in(self, recurse=False), "a conversion (to(), half(), ...) was called"
        )
        self.reshard()
        attributes = None if state.group is None else state.group.param_attributes()
        conversion = NotedConversion(self, fn)
        result = super()._apply(conversion.fn, *args, **kwargs)  # type: ignore[no-untyped-call]
        state.note_emptied(conversion)
        if state.group is not None and attributes is not None:
            state.group.refresh_params(attributes)
        return result

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters: outside of a forward or backward the sharded ones.

        They are what an optimizer, ``zero_grad()`` and `clip_grad_norm_` want, also after an
        exception in a step, and while kept groups show unsharded ones and wait for their backward.
        """
        runtime = state_of(self).runtime
        if runtime is not None:
            runtime.tidy_up()
        module: Any = self
        named = own_class(self).named_parameters(module, *args, **kwargs)
        if runtime is None or runtime.pass_root is not None or runtime.backward.is_running:
            return named
        return ((name, settled(param)) for name, param in named)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # noqa: FBT001, FBT002
        """Gather this module's parameters now; the next `reshard`, forward or backward frees them.

        Not recursive. Call it on all ranks.

        Args:
            async_op: Return at once, with a handle; the module's forward waits by itself.

        Cost: one all-gather per bucket, none if they are unsharded already.
        """
        state = state_of(self)
        refuse_summoned(groups_in(self, recurse=False), "unshard() was called")
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
        state = state_of(self)
        if state.group is not None and state.runtime is not None:
            state.runtime.reshard(state.group)

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
        before = [(group, group.settings.sync) for group in groups_in(self, recurse=True)]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for group, sync in before:
                group.settings.sync = sync

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Choose what is gathered when this module's forward begins.

        Instead of the module that came next in the last forward. All of `modules` are gathered, so
        a list of n takes the memory of n + 1; an empty one prefetches nothing.

        Raises:
            StateError: One of them is not sharded (now), or of another root (at its forward).
        """
        for group in groups_in(self, recurse=False):
            group.settings.next_in_forward = _groups_of(modules)
        update_options(self)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Choose what is gathered when this module's backward begins; as in forward."""
        for group in groups_in(self, recurse=False):
            group.settings.next_in_backward = _groups_of(modules)
        update_options(self)

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
            max_norm: The most the norm may be; ``float("inf")`` clips nothing.
            norm_type: Order of the norm; ``float("inf")`` is the largest element.
            error_if_nonfinite: Raise if the norm is not finite, which waits for it.

        Returns:
            The norm before, 0-dim, fp32 or wider, the same on every rank. It has `full_tensor()`.

        Raises:
            RuntimeError: See `error_if_nonfinite`.
            StateError: `max_norm` or `norm_type` is negative or not a number.

        Cost: one all-reduce of 8 bytes per parameter (16 for the largest element), for each dtype
        of gradients.
        """
        for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
            if not as_number(value) >= 0:  # Also NaN.
                msg = f"clip_grad_norm_: {name} must be a number of at least 0, got {value!r}."
                raise StateError(msg)
        params = [p for p in self.parameters() if p.grad is not None]
        norm = total_norm([p.grad for p in params], float(norm_type))  # type: ignore[misc]
        runtime = state_of(self).runtime
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

    def check_replicas(self) -> None:
        """Compare the replicas of a hybrid mesh: all elements of all parameters, bit by bit.

        They stay equal if all ranks do the same. Call it on all ranks, from time to time. Where
        nothing is replicated it does nothing.

        Raises:
            RankMismatchError: On all ranks, naming the first parameter that differs.

        Cost: reads the shards; one all-reduce of 16 bytes per parameter, one exchange per group.
        """
        check_same_replicas([*groups_in(self, recurse=True)])

    def check_gradients(self) -> None:
        """Raise if gradients are not finite; say in which parameter, and on which rank it begins.

        Call it on all ranks, after a backward that synced, before the gradients are clipped or
        unscaled. One rank's NaN is all ranks' after the average. To be told whose it was, call
        ``set_watch(check_gradients=True)`` before that backward: then each rank notes its own
        gradients. What was noted is forgotten here.

        Raises:
            NonFiniteGradientError: On all ranks, with the same text.

        Cost: reads the gradients, waits for the device, one exchange for each mesh axis.
        """
        runtime = state_of(self).runtime
        if runtime is not None:
            groups = [*groups_in(self, recurse=True)]
            notes, rank = runtime.backward.finite_notes, groups[0].mesh.rank
            check_gradients(groups, notes, runtime.axes, rank)

    def reset_iter_state(self) -> None:
        """Return to the state between steps, after an exception in forward or backward.

        The next forward of the root does it by itself; this gives the memory back at once.
        Gradients that have not been synced are lost.
        """
        runtime = state_of(self).runtime
        if runtime is not None:
            runtime.reset()

    def memory_stats(self) -> dict[str, int]:
        """Return bytes on this rank, of this module and the sharded modules in it.

        Keys: ``shard_nbytes`` (parameters), ``unsharded_nbytes`` and ``peak_unsharded_nbytes``
        (unsharded buffers now, and the most there ever were), ``reduce_buffer_nbytes`` (the most
        that send and receive buffers of gradients ever took) and ``unsynced_grad_nbytes``
        (gradients that wait to be synced). The middle three are those of the whole root.
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


_compat_modules.note_fully_sharded(FSDPModule)


def _restore(module: Any, written: copies.Written) -> None:
    """Turn an unpickled module into what it was; pickles name this function."""
    copies.restore(module, written)
    swap_class(module)


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
