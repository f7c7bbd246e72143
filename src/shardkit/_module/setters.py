"""The setters of `FSDPModule`: each changes the settings of one group, of several, or of the root.

Functions of a module that takes them as its methods, so that the class itself stays where torch's
is: between a module's new class and the one it had.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from shardkit._errors import StateError
from shardkit._module.hooks import groups_in, state_of
from shardkit._policy import BackwardPrefetch
from shardkit._settings import as_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from shardkit._custom_comm import AllGather, ReduceScatter
    from shardkit._settings import RootSettings


def update_options(self: Any) -> None:
    """Let the schedule of the root, if it has one, follow the settings."""
    runtime = state_of(self).runtime
    if runtime is not None:
        runtime.update_options()


# --- microbatches ---


def set_requires_gradient_sync(
    self: Any,
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
    for group in groups_in(self, recurse=recurse):
        group.settings.sync = requires_gradient_sync


def set_requires_all_reduce(
    self: Any,
    requires_all_reduce: bool,  # noqa: FBT001 - FSDP2's signature
    *,
    recurse: bool = True,
) -> None:
    """Set whether backward all-reduces over the replicate axis of a 2-D mesh.

    While False, gradients are reduce-scattered, and the sums kept as 1/N-size partial sums;
    ``.grad`` is set by the first backward with True.
    """
    for group in groups_in(self, recurse=recurse):
        group.settings.all_reduce = requires_all_reduce


def set_is_last_backward(self: Any, is_last_backward: bool) -> None:  # noqa: FBT001
    """Set whether the next backward is the last of the step.

    After one that is not, reductions may still be under way, so that the next micro-batch
    overlaps with them; ``.grad`` is complete, and ranks are compared, after one that is.
    """
    for group in groups_in(self, recurse=True):
        group.settings.is_last_backward = is_last_backward


# --- memory ---


def set_reshard_after_forward(
    self: Any,
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
    for group in groups_in(self, recurse=recurse):
        group.set_reshard_after_forward(reshard_after_forward)
    update_options(self)


def set_reshard_after_backward(
    self: Any,
    reshard_after_backward: bool,  # noqa: FBT001 - FSDP2's signature
    *,
    recurse: bool = True,
) -> None:
    """Set whether the parameters are freed after backward.

    False saves the next forward's all-gather while no optimizer step lies between, for the
    memory of the unsharded parameters; changed shards are gathered again.
    """
    for group in groups_in(self, recurse=recurse):
        group.settings.reshard_after_backward = reshard_after_backward
    update_options(self)


def set_unshard_in_backward(self: Any, unshard_in_backward: bool) -> None:  # noqa: FBT001
    """Set whether backward gathers this module's parameters.

    False only where no backward reads them, as of an ``nn.Embedding``: one that does reads
    memory that is not there. Not recursive.
    """
    for group in groups_in(self, recurse=False):
        group.settings.unshard_in_backward = unshard_in_backward
    update_options(self)


# --- prefetch ---


def set_prefetch_policy(
    self: Any, *, forward: bool = True, backward: Literal["pre", "post", "none"] = "pre"
) -> None:
    """Choose when this root gathers ahead of use. Call it on the root.

    Args:
        forward: Gather the next module before the current one computes.
        backward: ``"pre"``: gather the next module before the current one's gradients are
            computed (most overlap); ``"post"``: after (less memory); ``"none"``: when it is
            entered.
    """
    state = state_of(self)
    try:
        when = BackwardPrefetch(backward)
    except ValueError:
        msg = f"backward must be 'pre', 'post' or 'none', got {backward!r}."
        raise StateError(msg) from None
    state.settings.prefetch_in_forward, state.settings.prefetch_in_backward = forward, when
    update_options(self)


# --- communication ---


def set_gradient_divide_factor(self: Any, factor: float) -> None:
    """Divide this module's gradient sums by `factor`, not the number of ranks. Not recursive.

    Raises:
        StateError: It is zero, negative, not finite or no number.
    """
    number = as_number(factor)
    if not 0 < number < math.inf:
        msg = f"factor: gradients cannot be divided by {factor!r}. Pass a finite number above 0."
        raise StateError(msg)
    for group in groups_in(self, recurse=False):
        group.settings.comm.divide_factor = number


def set_reduce_scatter_divide_factor(self: Any, factor: float) -> None:
    """Do as `set_gradient_divide_factor`, its newer name."""
    set_gradient_divide_factor(self, factor)


def set_force_sum_reduction_for_comms(self: Any, enable: bool) -> None:  # noqa: FBT001
    """Have the collective library sum gradients only, and divide them after.

    NCCL divides by the number of ranks itself otherwise. On the CPU and on XLA reductions are
    sums anyhow. For all modules in this one as well.
    """
    for group in groups_in(self, recurse=True):
        group.settings.comm.force_sum = enable


def set_reduce_scatter_unused_params(
    self: Any,
    reduce_scatter_unused_params: bool,  # noqa: FBT001 - FSDP2's signature
    *,
    recurse: bool = True,
) -> None:
    """Set whether a group that this rank did not use takes part in its reduction all the same.

    True (the default; FSDP2's is False) is right when ranks use different parameters. False
    saves the reduction of groups that NO rank uses; ranks that differ then do not match, which
    is told as an error.
    """
    for group in groups_in(self, recurse=recurse):
        group.settings.reduce_unused = reduce_scatter_unused_params


def set_all_reduce_hook(
    self: Any, hook: Callable[[Tensor], object] | None, *, stream: Any = None
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
    for group in groups_in(self, recurse=False):
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


def set_custom_all_gather(self: Any, comm: AllGather | None) -> None:
    """Gather this module's parameters by a function of the user's. Not recursive.

    Args:
        comm: As FSDP2's ``AllGather``: ``allocate(size, dtype=, device=)`` and
            ``(output_tensor, input_tensor, group, async_op)``. None: as before.

    Raises:
        StateError: On XLA, or where buffers come from the process group.

    Cost: copies into and out of the buffers that `comm` allocates.
    """
    _refuse_comm(self, "set_custom_all_gather", comm)
    for group in groups_in(self, recurse=False):
        group.settings.comm.all_gather = comm


def set_custom_reduce_scatter(self: Any, comm: ReduceScatter | None) -> None:
    """Reduce this module's gradients by a function of the user's. Not recursive.

    Args:
        comm: As FSDP2's ``ReduceScatter``: `allocate`, and ``(output_tensor, input_tensor,
            group, op, async_op)``; `op` is always a sum. None: as before.

    Raises:
        StateError: On XLA, or where buffers come from the process group.

    Cost: copies into the buffers that `comm` allocates.
    """
    _refuse_comm(self, "set_custom_reduce_scatter", comm)
    for group in groups_in(self, recurse=False):
        group.settings.comm.reduce_scatter = comm


def _refuse_comm(self: Any, what: str, comm: object) -> None:
    for group in groups_in(self, recurse=False):
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


def set_allocate_memory_from_process_group_for_comm(self: Any, enable: bool) -> None:  # noqa: FBT001
    """Take buffers from the memory that the process group offers, if it does (NCCL).

    Buffers are shared by all modules of a root, so it holds for all of them while any has it.

    Raises:
        StateError: The module has an all-gather or reduce-scatter of the user's.
    """
    for group in groups_in(self, recurse=False):
        comm = group.settings.comm
        if enable and (comm.all_gather is not None or comm.reduce_scatter is not None):
            msg = (
                f"{group.name!r} communicates by functions of yours, which allocate their own "
                f"buffers. Use one or the other."
            )
            raise StateError(msg)
        group.settings.comm_memory = enable
    update_options(self)


def set_separate_reduce_scatter_group(
    self: Any,
    enable: bool = True,  # noqa: FBT001, FBT002 - FSDP2's signature
    *,
    recurse: bool = True,
) -> None:
    """Reduce on a process group of its own, so that gathers and reductions do not queue.

    On gloo that is always so. Call it on all ranks.

    Cost: one more process group (communicator) per mesh axis.
    """
    for group in groups_in(self, recurse=recurse):
        group.settings.separate_reduce = enable
    update_options(self)


def set_reduce_scatter_max_input_buffers(
    self: Any, max_input_buffers: int, *, recurse: bool = True
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
    for group in groups_in(self, recurse=recurse):
        group.settings.max_send_buffers = max_input_buffers


def set_post_optim_event(self: Any, event: Any) -> None:
    """Let the next forward's all-gathers wait for an event recorded after the optimizer step.

    Call it on the root, with a new event in every step.
    """
    state = state_of(self)
    runtime = state.runtime or state.make_runtime()
    if runtime is not None:
        runtime.set_optimizer_event(event)


# --- graphs of XLA devices ---


def set_optimization_barriers(
    self: Any,
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
    settings = settings_of_root(self)
    settings.barrier_in_forward, settings.barrier_in_backward = forward, backward


def set_sync_on_finalization(self: Any, enable: bool = True) -> None:  # noqa: FBT001, FBT002
    """Run the graph at the end of every backward (``mark_step``). Call it on the root.

    On XLA devices only; elsewhere it has no effect. Forward and backward become one graph and
    the optimizer's step another, so the compiler does not fuse across them: less memory in
    some models, for one more launch per backward.

    Raises:
        StateError: After the first forward: it is not the root.
    """
    settings_of_root(self).sync_on_finalization = enable


def settings_of_root(self: Any) -> RootSettings:
    """Return the settings of a module that is not inside another sharded one."""
    state = state_of(self)
    if state.runtime is not None and state.runtime.settings is not state.settings:
        msg = (
            f"this {type(self).__name__} is inside another sharded module, whose choice counts "
            f"for all. Call it on the outermost one."
        )
        raise StateError(msg)
    return state.settings
