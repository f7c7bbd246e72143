"""Gradients of one group: taken from autograd by bucket, reduced, and given to the parameters."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shardkit._compat import torch_autograd
from shardkit._errors import StateError
from shardkit._schedule import BATCH_NBYTES
from shardkit._tensor.ops.dispatch import common_flat
from shardkit._tensor.sharded import ShardedTensor
from shardkit.backends.base import AxisComm, CommStreams, ReduceHandle, Reduction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from shardkit._params.bucket import Bucket
    from shardkit._params.flat_store import SendBuffer
    from shardkit._params.memory import SlotPool
    from shardkit._params.traced_store import TracedSend
    from shardkit._settings import AllReduce, CommSettings
    from shardkit._tensor.spec import ShardSpec
    from shardkit.backends.device import Event


# --- gradients of a bucket ------------------------------------------------------------------------
#
# [Note: tensors of a reduction]
# - unsharded gradient: the gradient that autograd leaves in ``.grad`` of an unsharded parameter; it
#   is taken from there at once.
# - send buffer: 1-D, ``layout.padded_numel``, `reduce_dtype`; the unsharded gradients are copied
#   into it as they come. A root's gradients come at both ends of backward. It holds them until the
#   last one has come, so that its send buffer exists only for a short time. A layer holds them,
#   too, if a kernel, or a call, for each gradient would cost more than the memory; or if they are
#   sent from where they are, so that there is no send buffer.
# - receive buffer: data from other ranks, if the backend does the sum itself.
# - unsynced: while gradients are not synced, the send buffer stays, and is added to.
# - partial: 1-D, shard-sized sums over the shard axis only, kept while the all-reduce over the
#   replicate axis is switched off.
# - sharded gradient: ``.grad`` of the sharded parameter, a `ShardedTensor` in `grad_dtype`.


def assign_grad(
    param: nn.Parameter, piece: Tensor, spec: ShardSpec, flat: Tensor | None = None
) -> None:
    """Add this rank's piece of a reduced gradient to a sharded parameter's ``.grad``.

    `flat` has the gradients of the whole shard, and `piece`, 1-D, is a view of it; None: `piece` is
    no view.

    Raises:
        StateError: The ``.grad`` that is there is cut as another parameter's.
    """
    grad = param.grad
    if grad is None:
        param.grad = ShardedTensor.__new__(ShardedTensor, piece, spec, flat)  # Once per gradient.
    elif isinstance(grad, ShardedTensor):
        if grad.spec is not spec and not grad.spec.same_cut(spec):
            msg = (
                f"the gradient that was set on {spec.name!r} is cut as {grad.spec.name!r}, so a "
                f"backward cannot add to it. Copy it, on all ranks: "
                f"param.grad = torch.zeros_like(param).copy_(other.grad)."
            )
            raise StateError(msg)
        grad.to_local().add_(piece)
    else:  # The user has set a whole tensor.
        param.grad = ShardedTensor(spec.slice_full(grad.detach()) + piece, spec)
    for hook in torch_autograd.post_accumulate_grad_hooks(param):
        hook(param)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast, since a backward may run inside the user's autocast."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


class BucketGradients:
    """Collector of one bucket's unsharded gradients, which also assigns the sharded ones."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket  # Bucket of the gradients.
        plan = bucket.plan
        self.num_ranks = plan.num_ranks  # Number of ranks whose gradients are averaged.
        # Bytes that a reduction sends.
        self.send_nbytes = int(bucket.store.layout.padded_numel * plan.reduce_dtype.itemsize)
        # One byte per parameter: 1 if its gradient came since the last synced backward.
        self.fired = bytearray(len(bucket.entries))
        self.partial: Tensor | None = None  # Sums over the shard axis that wait for the all-reduce.
        backend = plan.mesh.backend
        self._receive_chunks = backend.receive_chunks(plan.axis)
        # Gradients that came but were not copied to the send buffer, by parameter.
        self.held: dict[int, Tensor] = {}
        is_small = backend.batches_small_groups and self.send_nbytes < BATCH_NBYTES
        # Whether held gradients are copied by one list operator: if a kernel costs more than
        # memory, or if all of them are small.
        self.copies_together = backend.copies_gradients_together or is_small
        may_send_parts = (
            self.send_nbytes > 0
            and plan.axis.size > 1
            and torch.promote_types(plan.param_dtype, plan.reduce_dtype) == plan.reduce_dtype
            and not bucket.store.converts_gradients
        )
        takes_small = is_small and backend.takes_parts(plan.axis, is_small=True)
        self._sends_small_parts = may_send_parts and takes_small
        # Dtype of gradients that are sent from where they are, on any rank; None: none are.
        self.part_dtype = plan.param_dtype if may_send_parts else None
        # Whether any rank, perhaps not this one, may have gradients of an unsynced backward.
        self.may_have_unsynced = False
        self._buffer: SendBuffer | TracedSend | None = None
        self._unsettled: list[tuple[int, Tensor]] = []
        self._unused: set[str] = set()
        self._comm: AllReduce | None = None  # The user's function called in this backward.

    # --- sizes and state ---

    @property
    def reduce_nbytes(self) -> int:
        """Bytes of the buffers that a reduction takes."""
        chunks = self.bucket.plan.axis.size
        return int(self.send_nbytes // chunks * (chunks + self._receive_chunks))

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of send, receive and partial buffers that exist now."""
        nbytes = 0 if self._buffer is None else self._buffer.nbytes
        return nbytes + (0 if self.partial is None else self.partial.nbytes)

    @property
    def is_sent(self) -> bool:
        """Whether a reduction has this bucket; a frozen one only if it has earlier gradients."""
        return self.bucket.is_trainable or self.partial is not None or self.has_collected

    @property
    def has_collected(self) -> bool:
        """Whether gradients came, perhaps on other ranks only, that have not been sent."""
        return self.may_have_unsynced or bool(self.held) or self.is_written

    @property
    def needs_settling(self) -> bool:
        """Whether a reduced gradient waits to know if any rank used the parameter."""
        return bool(self._unsettled)

    # --- collecting ---

    @property
    def takes_parts(self) -> bool:
        """Whether gradients of this bucket can be sent from where they are."""
        if self._sends_small_parts or self.part_dtype is None:
            return self._sends_small_parts
        plan = self.bucket.plan  # Process groups of the axis may not have been there before.
        takes: bool = plan.mesh.backend.takes_parts(plan.axis, is_small=False)
        return takes

    @property
    def is_written(self) -> bool:
        """Whether the send buffer has gradients."""
        return self._buffer is not None and bool(self._buffer.written)

    def collect(
        self, index: int, grad: Tensor, streams: CommStreams, pool: SlotPool, *, hold: bool
    ) -> None:
        """Take the unsharded gradient of one parameter, to be reduced.

        Args:
            index: Position of the parameter in the bucket.
            grad: Gradient in compute dtype; kept only with `hold`. A DTensor's gradient is brought
                to the parameter's placements, which may take a collective over its mesh.
            streams: Streams that order the copy.
            pool: Pool of the send buffer's memory.
            hold: Whether to keep the tensor and not copy it now.
        """
        self.fired[index] = 1
        if self.bucket.store.converts_gradients:
            grad = self.bucket.store.part_of_gradient(index, grad)
        if hold:
            self.held[index] = self.held[index] + grad if index in self.held else grad
        else:
            buffer = self.buffer if self._buffer is None else self._buffer
            buffer.write(index, grad, streams, pool)

    def assign_local(self, index: int, grad: Tensor, divide_factor: float | None) -> None:
        """Take the gradient of one parameter and assign it at once: no other rank has a part."""
        self.fired[index] = 1
        bucket = self.bucket
        if bucket.store.converts_gradients:
            grad = bucket.store.part_of_gradient(index, grad)
        if grad.requires_grad:
            grad = grad.detach()
        if grad.dtype is not bucket.plan.grad_dtype:
            grad = grad.to(bucket.plan.grad_dtype)
        grad = grad.resolve_conj().resolve_neg()  # In a dispatch operators do not heed such flags.
        piece = grad if grad.ndim == 1 else grad.reshape(-1)
        if divide_factor is not None:
            piece = piece / divide_factor
        assign_grad(bucket.entries[index].param, piece, bucket.store.specs[index])

    def write_held(self, streams: CommStreams, pool: SlotPool) -> None:
        """Copy the held gradients into the send buffer, and drop them."""
        if not self.held:
            return
        if self.copies_together:
            self.buffer.write_all(self.held, streams, pool)
            self.held.clear()
        while self.held:
            index, grad = self.held.popitem()
            self.buffer.write(index, grad, streams, pool)

    @property
    def sends_parts(self) -> bool:
        """Whether only held gradients are sent, and can be sent from where they are."""
        return (
            len(self.held) == len(self.fired)
            and (self._buffer is None or not self._buffer.written)
            and (self._sends_small_parts or self.takes_parts)  # The first saves a call.
        )

    def take_parts(self) -> list[list[Tensor]]:
        """Return the held gradients in parts for each rank, and drop them."""
        parts = self.bucket.store.parts_by_rank(self.held)
        self.held = {}
        return parts

    @property
    def buffer(self) -> SendBuffer | TracedSend:
        """Buffer that collects gradients; made at first use."""
        if self._buffer is None:
            with torch.inference_mode(mode=False):
                self._buffer = self.bucket.store.new_gradient_buffer(self._receive_chunks)
        return self._buffer

    # --- reduced ---

    def all_reduce(self, comm: AllReduce, axis: AxisComm, tensor: Tensor, unit: float) -> None:
        """Sum over the replicate axis by the user's function, outside of autocast."""
        self._comm = comm
        with without_autocast(tensor.device):
            comm(tensor, self.bucket.store.gradient_pieces(), axis, unit)

    def close_send(self, pool: SlotPool, fence: Event | None, *, by_compute: bool = False) -> None:
        """Give the send buffer's memory back; started collectives are done at `fence`."""
        if self._buffer is not None:
            self._buffer.close_send(pool, fence, by_compute=by_compute)

    def close_receive(self, pool: SlotPool) -> None:
        """Give the receive buffer's memory back; the host waited for it."""
        if self._buffer is not None:
            self._buffer.close_receive(pool)

    def assign(self, out: Tensor) -> None:
        """Assign a reduced gradient, 1-D and as long as the shard, to parameters that fired."""
        bucket, store, fired = self.bucket, self.bucket.store, self.fired
        if self._unsettled:  # Parameters that fired since: all replicas add in one order.
            self._assign_held(fired)
        flat = out if store.keeps_flats else None
        if flat is not None and all(fired) and (before := _flat_of_grads(bucket)) is not None:
            before.add_(flat)
            for param in bucket.sharded:
                for hook in torch_autograd.post_accumulate_grad_hooks(param):
                    hook(param)
            return
        has_hooks = torch_autograd.has_post_accumulate_grad_hooks(bucket.sharded)
        for index, (entry, spec) in enumerate(zip(bucket.entries, store.specs, strict=True)):
            param = entry.param
            if not fired[index]:
                self._unsettled.append((index, store.piece(out, index)))
            elif flat is None or has_hooks or param.grad is not None:
                assign_grad(param, store.piece(out, index), spec, flat)
            else:  # The same as `assign_grad`, with fewer calls for each gradient.
                param.grad = ShardedTensor.over(flat, spec)

    def _assign_held(self, is_due: Sequence[int]) -> None:
        """Assign held gradients of the parameters that are due; hold the others on."""
        held, self._unsettled = self._unsettled, []
        for index, piece in held:
            if is_due[index]:
                assign_grad(self.bucket.entries[index].param, piece, self.bucket.store.specs[index])
            else:
                self._unsettled.append((index, piece))

    def settle(self, used_anywhere: Sequence[int]) -> None:
        """Assign the gradients of parameters that only other ranks used.

        A parameter that no rank used keeps its ``.grad`` as it was: None would become zero, and
        AdamW would decay it.
        """
        if self._unsettled:
            self._assign_held(used_anywhere)
            self._unused.update(self.bucket.entries[index].name for index, _ in self._unsettled)
            self._unsettled.clear()

    def forget_fired(self) -> None:
        """End a synced backward; tell the user's all-reduce which results no parameter got."""
        self.fired[:] = bytes(len(self.fired))
        comm, self._comm = self._comm, None
        unused, self._unused = self._unused, set()
        settle = getattr(comm, "settle_unused", None)
        if settle is not None:
            with without_autocast(self.bucket.plan.device):
                settle(self.bucket.store.gradient_pieces(), unused)

    def reset(self, pool: SlotPool, fence: Event | None) -> None:
        """Drop all gradients that are not in a ``.grad`` yet; compute has reached `fence`."""
        self.close_send(pool, fence, by_compute=True)
        self.close_receive(pool)
        self._unsettled.clear()
        self.partial = None
        self.may_have_unsynced = False
        self.held.clear()
        self.forget_fired()


UnshardedGrad = tuple[BucketGradients, int, "Tensor"]
"""The gradient of an unsharded parameter, and the bucket and the position of the parameter."""


def _flat_of_grads(bucket: Bucket) -> Tensor | None:
    """Return the tensor of which all gradients of a bucket are views, laid out like its shard."""
    grads: list[Any] = [entry.param.grad for entry in bucket.entries]
    flat = common_flat(grads)
    specs = bucket.store.specs
    if flat is None or any(
        grad.flat_start or grad.spec is not spec for grad, spec in zip(grads, specs, strict=True)
    ):
        return None
    has_room = (
        flat.numel() == bucket.store.layout.shard_numel and flat.dtype == bucket.plan.grad_dtype
    )
    return flat if has_room else None


# --- gradients of a group -------------------------------------------------------------------------


@dataclass(slots=True)
class _Started:
    """A reduction under way."""

    handle: ReduceHandle  # Handle that waits for the reduction; it may be shared with other groups.
    first: int  # Position of this group's first result among those of the handle.
    sent: list[BucketGradients]  # Buckets in the reduction.
    are_partial: list[bool]  # Flag of each bucket: whether it goes over the shard axis only.
    is_closed: bool  # Whether the send buffers were given back.


def predivide_factor_for(num_ranks: int) -> float:
    """Return the power of two near the root of the number of ranks that fairscale divides by first.

    Source: fairscale's ``get_gradient_predivide_factor`` (``nn/data_parallel``).
    """
    factor = 1
    while num_ranks % factor == 0 and num_ranks / factor > factor:
        factor *= 2
    return float(factor)


class GroupGradients:
    """The gradients of a group, with their reductions.

    Args:
        buckets: The group's buckets that may be trained; each may have its own mesh.
        comm: Settings that the user chose; they may change between backwards.
        weight: Multiplier that turns gradients of the global-mean loss into gradients of this
            rank's local-mean loss.
    """

    def __init__(
        self, buckets: Sequence[Bucket], *, comm: CommSettings, weight: float = 1.0
    ) -> None:
        self.buckets = [BucketGradients(bucket) for bucket in buckets]  # Gradients of the buckets.
        # Whether held gradients are copied by list operators.
        self.copies_together = all(each.copies_together for each in self.buckets)
        # Whether a gradient is more than its values: a DTensor also has placements.
        self.are_converted = any(bucket.store.converts_gradients for bucket in buckets)
        self._comm = comm
        self._weight = weight
        # Whether gradients are assigned at once, unless the user has a hook on buffers.
        self.may_be_local = all(
            b.plan.num_ranks == 1 and b.store.keeps_flats and not b.plan.is_offloaded
            for b in buckets
        )
        self._started: list[_Started] = []
        self._prepared: list[BucketGradients] = []
        self._all_reduces = True
        self._lacks_gradients = False  # Whether some did not come in the last synced backward.

    @property
    def is_local(self) -> bool:
        """Whether gradients are assigned at once: one rank, and no hook on reduced buffers."""
        return self.may_be_local and self._comm.all_reduce_hook is None

    def _scale_of(self, num_ranks: int) -> float:
        factor = self._comm.divide_factor
        return self._weight / (num_ranks if factor is None else factor)

    def _before(self, num_ranks: int) -> float | None:
        """Return the factor of gradients before the sum; None: the backend decides."""
        factor = self._comm.predivide_factor
        if factor is None:
            return None
        return 1.0 / (predivide_factor_for(num_ranks) if factor == "auto" else factor)

    def _is_partial(self, gradients: BucketGradients) -> bool:
        """Whether the next reduction of a bucket goes over its shard axis only."""
        return gradients.bucket.plan.replicate_axis is not None and not self._all_reduces

    def _all_reduce_of(
        self, gradients: BucketGradients
    ) -> Callable[[Tensor, float], object] | None:
        """Return the user's all-reduce for one bucket, if there is one, and other replicas."""
        comm, axis = self._comm.all_reduce, gradients.bucket.plan.replicate_axis
        if comm is None or axis is None or axis.size == 1 or self._is_partial(gradients):
            return None
        return partial(gradients.all_reduce, comm, axis)

    @property
    def send_nbytes(self) -> int:
        """Bytes that a reduction sends."""
        return sum(each.send_nbytes for each in self.buckets if each.is_sent)

    @property
    def reduce_nbytes(self) -> int:
        """Bytes of the buffers that a reduction takes."""
        return sum(each.reduce_nbytes for each in self.buckets if each.is_sent)

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of send, receive and partial buffers that exist now."""
        return sum(each.buffer_nbytes for each in self.buckets)

    @property
    def has_collected(self) -> bool:
        """Whether gradients came that have not been sent."""
        for each in self.buckets:  # noqa: SIM110 - faster, and asked often
            if each.has_collected:
                return True
        return False

    @property
    def has_partials(self) -> bool:
        """Whether partial sums wait for the all-reduce."""
        return any(each.partial is not None for each in self.buckets)

    @property
    def has_pending(self) -> bool:
        """Whether gradients wait, or sums that were not all-reduced."""
        for each in self.buckets:  # noqa: SIM110 - faster, and asked often
            if each.partial is not None or each.has_collected:
                return True
        return False

    @property
    def needs_settling(self) -> bool:
        """Whether a reduced gradient waits to know if any rank used the parameter."""
        return any(each.needs_settling for each in self.buckets)

    def assign(self, grads: Sequence[UnshardedGrad]) -> None:
        """Assign gradients, if `is_local`."""
        for gradients, index, grad in grads:
            gradients.assign_local(index, grad, self._comm.divide_factor)

    def keep_unsynced(self) -> None:
        """Note that a backward ended that does not sync, on all ranks that share the group.

        Ranks may have used different parameters in it. The next backward that syncs may come
        without the group, and then all of them must reduce it.
        """
        for each in self.buckets:
            each.may_have_unsynced |= each.bucket.is_trainable

    @property
    def are_unsynced(self) -> bool:
        """Whether gradients of earlier backwards wait to be synced, perhaps on other ranks only."""
        return any(each.may_have_unsynced for each in self.buckets)

    def write_held(self, streams: CommStreams, pool: SlotPool) -> None:
        """Copy the held gradients into the send buffers, and drop them."""
        for each in self.buckets:
            each.write_held(streams, pool)

    @property
    def sends_parts(self) -> bool:
        """Whether all held gradients can be sent from where they are."""
        for each in self.buckets:
            if not each.sends_parts and each.is_sent:
                return False
        return self._comm.reduce_scatter is None

    def holds_layers(self, *, sync: bool) -> bool:
        """Whether gradients of a layer are held until all have come.

        Args:
            sync: Whether they are reduced in this backward.
        """
        if self.copies_together:
            return True
        # They would be copied to be sent: a layer needs no memory for both.
        is_copied = self._comm.reduce_scatter is not None or self._comm.predivide_factor is not None
        if not sync or self._lacks_gradients or is_copied:
            return False
        return not any(each.is_written or not each.takes_parts for each in self.buckets)

    # --- reducing ---

    @property
    def is_reducing(self) -> bool:
        """Whether a reduction was started and not finished: the send buffers are in flight."""
        return bool(self._started)

    def prepare(self, streams: CommStreams, pool: SlotPool, *, all_reduce: bool) -> list[Reduction]:
        """Prepare to reduce the collected gradients, with zeros for missing ones.

        Returns:
            Reductions for the backend, one per bucket; pass their handle to `started`.
        """
        assert not self.is_reducing, "the send buffers are on the wire"
        self._all_reduces = all_reduce
        self._prepared = [each for each in self.buckets if each.is_sent]
        if not self.copies_together:
            self._lacks_gradients = not all(all(each.fired) for each in self._prepared)
        if self.sends_parts:
            parts = [each.take_parts() for each in self._prepared]
        else:
            parts = [[] for _ in self._prepared]
            self.write_held(streams, pool)
            for each in self._prepared:
                each.buffer.complete(streams, pool)
        for each in self._prepared:
            each.may_have_unsynced = False
        return [
            self._reduction_of(each, partial(each.buffer.room, streams, pool), of_each)
            for each, of_each in zip(self._prepared, parts, strict=True)
        ]

    def _reduction_of(
        self,
        gradients: BucketGradients,
        room: Callable[[], Tensor],
        parts: list[list[Tensor]],
    ) -> Reduction:
        plan, store = gradients.bucket.plan, gradients.bucket.store
        is_partial = self._is_partial(gradients)
        wide = torch.promote_types(plan.reduce_dtype, torch.float32)
        carry, gradients.partial = gradients.partial, None
        return Reduction(
            send=gradients.buffer.flat,
            room=room,
            out_numel=store.layout.shard_numel,
            out_dtype=wide if is_partial else plan.grad_dtype,
            scale=1.0 if is_partial else self._scale_of(gradients.num_ranks),
            before=self._before(gradients.num_ranks),
            shard_axis=plan.axis,
            replicate_axis=None if is_partial else plan.replicate_axis,
            carry=carry,
            is_to_host=plan.is_offloaded and not is_partial,
            is_pinned=plan.is_pinned,
            comm=self._comm.reduce_scatter,
            all_reduce=self._all_reduce_of(gradients),
            hook=None if is_partial else self._comm.all_reduce_hook,
            hook_stream=self._comm.all_reduce_hook_stream,
            bucket_id=store.bucket_id,
            force_sum=self._comm.force_sum,
            parts=parts,
            part_dtype=gradients.part_dtype,
        )

    def started(self, handle: ReduceHandle, first: int, pool: SlotPool) -> None:
        """Note the started reduction; this group's results are those from `first` on."""
        is_closed = handle.was_copied or (handle.fence is not None and pool.keeps_memory)
        if is_closed:
            self._close_send(pool, handle)
        prepared, self._prepared = self._prepared, []
        partial_ones = [self._is_partial(each) for each in prepared]
        self._started.append(_Started(handle, first, prepared, partial_ones, is_closed))

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
            started = self._started[0]
            last = started.first + len(started.sent)
            # order: gradients wait for the reduction
            outs = started.handle.wait()[started.first : last]
            del self._started[0]  # If Ctrl-C ends the wait, `reset` waits again.
            if not started.is_closed:
                self._close_send(pool, started.handle)
            pool.passed(started.handle.fence)  # order: slots are passed once compute has waited
            for each in self.buckets:
                each.close_receive(pool)
            for each, out, is_partial in zip(started.sent, outs, started.are_partial, strict=True):
                if is_partial:
                    each.partial = out
                else:
                    each.assign(out)

    def settle(self, used_anywhere: Sequence[Sequence[int]]) -> None:
        """Assign the gradients of parameters that only other ranks used, per bucket."""
        for each, used in zip(self.buckets, used_anywhere, strict=True):
            each.settle(used)

    def forget_fired(self) -> None:
        """End a synced backward."""
        if not self.has_partials:
            for each in self.buckets:
                each.forget_fired()

    def reset(self, pool: SlotPool) -> None:
        """Drop everything that is not in a ``.grad`` yet, after an exception."""
        dropped, self._started = self._started, []
        for started in dropped:
            # Do not take its results: a user's hook would run, and may have raised the exception.
            started.handle.wait_sent()
            pool.passed(started.handle.fence)
        fence = pool.fence()  # Compute has waited for all streams before.
        for each in self.buckets:
            each.reset(pool, fence)


def start_reduce(
    many: Sequence[tuple[GroupGradients, bool]], streams: CommStreams, pool: SlotPool, of: str
) -> None:
    """Reduce the gradients of groups, each with or without the all-reduce, in one go.

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
