"""Reductions of the gradients of one group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from shardkit._params.bucket_gradients import BucketGradients
from shardkit.backends.base import Reduction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from shardkit._params.bucket import Bucket
    from shardkit._params.memory import SlotPool
    from shardkit._settings import CommSettings
    from shardkit.backends.base import AxisComm, CommStreams, ReduceHandle


@dataclass(slots=True)
class _Started:
    """A reduction under way.

    Attributes:
        handle: Handle that waits for it; maybe shared with other groups.
        first: Position of this group's results among the handle's.
        sent: Buckets that it carries.
        is_partial: Whether it goes over the shard axis only.
        is_closed: Whether the send buffers were given back.
    """

    handle: ReduceHandle
    first: int
    sent: list[BucketGradients]
    is_partial: bool
    is_closed: bool


def predivide_factor_for(num_ranks: int) -> float:
    """Return the power of two near the root of the number of ranks that fairscale divides by first.

    Source: fairscale's ``get_gradient_predivide_factor`` (``nn/data_parallel``).
    """
    factor = 1
    while num_ranks % factor == 0 and num_ranks / factor > factor:
        factor *= 2
    return float(factor)


class GroupGradients:
    """Starts reductions of a group's gradients, and waits for them.

    Args:
        buckets: The group's buckets that may be trained.
        shard_axis: Axis of the reduce-scatter.
        replicate_axis: Axis of the all-reduce, or None.
        receive_chunks: Number of shard-sized pieces that the backend wants room for.
        comm: Settings that the user chose; may change between backwards.
        weight: Multiplier that turns gradients of the global-mean loss into gradients of this
            rank's local-mean loss.

    Attributes:
        buckets: Gradients of the buckets.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        shard_axis: AxisComm,
        replicate_axis: AxisComm | None,
        receive_chunks: int,
        comm: CommSettings,
        weight: float = 1.0,
    ) -> None:
        self.buckets = [BucketGradients(bucket, receive_chunks) for bucket in buckets]
        self._comm = comm
        self._shard_axis = shard_axis
        self._replicate_axis = replicate_axis
        self._receive_chunks = receive_chunks
        self._num_ranks = shard_axis.size * (replicate_axis.size if replicate_axis else 1)
        self._weight = weight
        self._may_be_local = self._num_ranks == 1 and all(
            bucket.store.keeps_flats and not bucket.plan.is_offloaded for bucket in buckets
        )
        self._started: list[_Started] = []
        self._prepared: list[BucketGradients] = []
        self._is_partial = False

    @property
    def is_local(self) -> bool:
        """Whether gradients are assigned at once: one rank, and no hook on reduced buffers."""
        return self._may_be_local and self._comm.all_reduce_hook is None

    @property
    def _scale(self) -> float:
        factor = self._comm.divide_factor
        return self._weight / (self._num_ranks if factor is None else factor)

    @property
    def _before(self) -> float | None:
        """What gradients are multiplied with before the sum; None: as the backend does it."""
        factor = self._comm.predivide_factor
        if factor is None:
            return None
        return 1.0 / (predivide_factor_for(self._num_ranks) if factor == "auto" else factor)

    def _all_reduce_of(
        self, gradients: BucketGradients
    ) -> Callable[[Tensor, float], object] | None:
        """Return the user's all-reduce for one bucket, if it has one and there are others."""
        comm, axis = self._comm.all_reduce, self._replicate_axis
        if comm is None or axis is None or axis.size == 1 or self._is_partial:
            return None
        return partial(gradients.all_reduce, comm, axis)

    @property
    def send_nbytes(self) -> int:
        """Bytes that a reduction sends."""
        return sum(each.send_nbytes for each in self.buckets if each.is_sent)

    @property
    def reduce_nbytes(self) -> int:
        """Bytes of the buffers that a reduction takes."""
        chunks = self._shard_axis.size
        return self.send_nbytes // chunks * (chunks + self._receive_chunks)

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of send, receive and partial buffers that exist now."""
        return sum(each.buffer_nbytes for each in self.buckets)

    @property
    def has_collected(self) -> bool:
        """Whether gradients came that have not been sent."""
        return any(each.has_collected for each in self.buckets)

    @property
    def has_partials(self) -> bool:
        """Whether sums wait for the all-reduce."""
        return any(each.partial is not None for each in self.buckets)

    @property
    def has_pending(self) -> bool:
        """Whether anything waits: gradients, or sums that were not all-reduced."""
        return self.has_collected or self.has_partials

    @property
    def needs_settling(self) -> bool:
        """Whether a reduced gradient waits to know if any rank used the parameter."""
        return any(each.needs_settling for each in self.buckets)

    def assign(self, gradients: BucketGradients, index: int, grad: Tensor) -> None:
        """Assign the gradient of one parameter, where `is_local`."""
        gradients.assign_local(index, grad, self._comm.divide_factor)

    def write_held(self, streams: CommStreams, pool: SlotPool) -> None:
        """Copy what is held into the send buffers, and drop it."""
        for each in self.buckets:
            each.write_held(streams, pool)

    # --- reducing ---

    @property
    def is_reducing(self) -> bool:
        """Whether a reduction was started and not finished: the send buffers are on the wire."""
        return bool(self._started)

    def prepare(self, streams: CommStreams, pool: SlotPool, *, all_reduce: bool) -> list[Reduction]:
        """Make ready to reduce what was collected, zeros for what did not come.

        Returns:
            Reductions for the backend, one per bucket; give `started` the handle.
        """
        assert not self.is_reducing, "the send buffers are on the wire"
        self.write_held(streams, pool)
        self._is_partial = self._replicate_axis is not None and not all_reduce
        self._prepared = [each for each in self.buckets if each.is_sent]
        for each in self._prepared:
            each.buffer.complete(streams, pool)
        return [self._reduction_of(each) for each in self._prepared]

    def _reduction_of(self, gradients: BucketGradients) -> Reduction:
        plan, store = gradients.bucket.plan, gradients.bucket.store
        is_partial = self._is_partial
        wide = torch.promote_types(plan.reduce_dtype, torch.float32)
        return Reduction(
            send=gradients.buffer.flat,
            receive=gradients.buffer.received,
            out_numel=store.layout.shard_numel,
            out_dtype=wide if is_partial else plan.orig_dtype,
            scale=1.0 if is_partial else self._scale,
            before=self._before,
            shard_axis=self._shard_axis,
            replicate_axis=None if is_partial else self._replicate_axis,
            carry=gradients.take_partial(),
            is_to_host=plan.is_offloaded and not is_partial,
            is_pinned=plan.is_pinned,
            comm=self._comm.reduce_scatter,
            all_reduce=self._all_reduce_of(gradients),
            hook=None if is_partial else self._comm.all_reduce_hook,
            hook_stream=self._comm.all_reduce_hook_stream,
            bucket_id=store.bucket_id,
            force_sum=self._comm.force_sum,
        )

    def started(self, handle: ReduceHandle, first: int, pool: SlotPool) -> None:
        """Note the reduction that carries this group's, as its results from `first` on."""
        is_closed = handle.fence is not None and pool.keeps_memory
        if is_closed:
            self._close_send(pool, handle)
        prepared, self._prepared = self._prepared, []
        self._started.append(_Started(handle, first, prepared, self._is_partial, is_closed))

    def _close_send(self, pool: SlotPool, handle: ReduceHandle) -> None:
        for each in self.buckets:
            each.close_send(pool, handle.fence)  # order: send buffers wait for the reduction

    def wait_sent(self, pool: SlotPool) -> None:
        """Wait until the send buffers of started reductions are free, and give them back."""
        for started in self._started:
            if not started.is_closed:
                started.handle.wait_sent()  # order: compute waits until send buffers are free
                self._close_send(pool, started.handle)
                started.is_closed = True

    def finish_reduce(self, pool: SlotPool) -> None:
        """Wait for started reductions; assign the gradients of parameters that fired here."""
        while self._started:
            started = self._started.pop(0)
            last = started.first + len(started.sent)
            # order: gradients wait for the reduction
            outs = started.handle.wait()[started.first : last]
            if not started.is_closed:
                self._close_send(pool, started.handle)
            pool.passed(started.handle.fence)  # order: slots are passed once compute has waited
            for each in self.buckets:
                each.close_receive(pool)
            for each, out in zip(started.sent, outs, strict=True):
                if started.is_partial:
                    each.partial = out
                else:
                    each.assign(out)

    def settle(self, used_anywhere: Sequence[Sequence[int]]) -> None:
        """Assign the gradients of parameters that only other ranks used, per bucket."""
        for each, used in zip(self.buckets, used_anywhere, strict=True):
            each.settle(used)

    def forget_fired(self) -> None:
        """A synced backward is over."""
        if not self.has_partials:
            for each in self.buckets:
                each.forget_fired()

    def reset(self, pool: SlotPool) -> None:
        """Drop everything that is not in a ``.grad`` yet, after an exception."""
        dropped, self._started = self._started, []
        for started in dropped:
            # Not its results: a user's hook would run, which may be what raised.
            started.handle.wait_sent()
            pool.passed(started.handle.fence)
        fence = pool.fence()  # Compute waits for all streams before.
        for each in self.buckets:
            each.reset(pool, fence)


def start_reduce(
    many: Sequence[tuple[GroupGradients, bool]], streams: CommStreams, pool: SlotPool, of: str
) -> None:
    """Reduce the gradients of groups, each with or without the all-reduce, in one go.

    Args:
        many: Groups, each with whether to all-reduce it.
        streams: Streams of the reductions.
        pool: Pool of the memory.
        of: Names of the groups.

    Cost: one reduce-scatter per bucket, one all-reduce per bucket on a replicate axis; small
    reduce-scatters may travel together.
    """
    reductions: list[Reduction] = []
    firsts = []
    for gradients, all_reduce in many:
        firsts.append(len(reductions))
        reductions += gradients.prepare(streams, pool, all_reduce=all_reduce)
    handle = streams.start_reduce(reductions, of)
    for (gradients, _), first in zip(many, firsts, strict=True):
        gradients.started(handle, first, pool)
