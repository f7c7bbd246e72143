"""What users choose for a group or a root, in `fully_shard` and by the setters of `FSDPModule`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from shardkit._policy import BackwardPrefetch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from shardkit._custom_comm import AllGather, AllReduce, ReduceScatter


@dataclass(slots=True)
class CommSettings:
    """How a group communicates.

    Attributes:
        divide_factor: Divisor of gradient sums; None: the number of ranks.
        predivide_factor: Part of the division that comes before the sum; "auto": about the root of
            the number of ranks; None: as the backend does it.
        force_sum: Whether the engine may only sum, and not average.
        all_reduce_hook: Function called with every reduced and divided gradient buffer, which it
            may change.
        all_reduce_hook_stream: Stream where an accelerator runs the hook; None: after the
            reduction.
        all_gather: Replacement of the all-gather.
        reduce_scatter: Replacement of the reduce-scatter.
        all_reduce: Replacement of the all-reduce over the replicate axis.
    """

    divide_factor: float | None = None
    predivide_factor: float | Literal["auto"] | None = None
    force_sum: bool = False
    all_reduce_hook: Callable[[Tensor], object] | None = None
    all_reduce_hook_stream: Any = None
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    all_reduce: AllReduce | None = None


@dataclass(slots=True)
class GroupSettings:
    """What users choose for one group.

    Attributes:
        reshard_after_forward: Choice of True, False, None for True unless the group is the root's,
            or the number of neighbouring ranks over which the parameters stay sharded until
            backward.
        reshard_after_backward: Whether to give the memory back after backward.
        sync: Whether to average gradients over the ranks (`set_requires_gradient_sync`).
        all_reduce: Whether to average also over the replicate axis (`set_requires_all_reduce`).
        is_last_backward: Whether to wait for all reductions at the end of backward.
        reduce_unused: Whether to take part in the reduction also where no parameter was used.
        unshard_in_backward: Whether backward needs the parameters.
        comm_memory: Whether to take buffers from the allocator of the communication engine.
        separate_reduce: Whether to reduce on a process group of its own.
        max_send_buffers: Number of reductions under way at once, where waiting frees their memory.
        next_in_forward: Groups (`ParamGroup`) to gather when forward enters; None: what came next
            last time.
        next_in_backward: Groups to gather when backward enters.
        comm: Communication settings of the group.
    """

    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool = True
    sync: bool = True
    all_reduce: bool = True
    is_last_backward: bool = True
    reduce_unused: bool = True
    unshard_in_backward: bool = True
    comm_memory: bool = False
    separate_reduce: bool = False
    max_send_buffers: int = 1
    next_in_forward: Sequence[Any] | None = None
    next_in_backward: Sequence[Any] | None = None
    comm: CommSettings = field(default_factory=CommSettings)

    def copy(self) -> GroupSettings:
        """Return independent settings for a copy of the group.

        It prefetches no group of ours, and its gradients do not go through our all-reduce, which
        may have state of this group.
        """
        comm = replace(self.comm, all_reduce=None)
        return replace(self, next_in_forward=None, next_in_backward=None, comm=comm)


@dataclass(slots=True)
class RootSettings:
    """What users choose for a root.

    Attributes:
        prefetch_in_forward: Whether to gather ahead in forward.
        prefetch_in_backward: Moment when to gather ahead in backward.
        barrier_in_forward: Whether to tie gathers to the inputs of the module entered last, where
            operators are traced, so that the compiler does not hoist them.
        barrier_in_backward: Whether to do the same in backward; without it the compiler may merge a
            gather with that of forward.
        sync_on_finalization: Whether to run the graph at the end of backward, where operators are
            traced.
        dummy_gathers: Whether gathers move nothing between ranks (`set_debug`).
        dummy_reductions: Whether reductions move nothing between ranks.
        memory_message: Text before the memory that is printed at each gather, free and reduction;
            None: print nothing.
    """

    prefetch_in_forward: bool = True
    prefetch_in_backward: BackwardPrefetch = BackwardPrefetch.PRE
    barrier_in_forward: bool = True
    barrier_in_backward: bool = True
    sync_on_finalization: bool = False
    dummy_gathers: bool = False
    dummy_reductions: bool = False
    memory_message: str | None = None


def as_number(value: Any) -> float:
    """Return what a user gave as a number; NaN if it is none, which no comparison accepts."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
