"""Gradients of one group on their way from the unsharded parameters to the shards.

[Note: tensors of a reduction]
- unsharded gradient: what autograd leaves in ``.grad`` of an unsharded parameter; taken from it at
  once.
- send buffer: 1-D per bucket, ``layout.padded_numel``, `reduce_dtype`; the unsharded gradients are
  copied into it as they come. Layers copy at once on the CPU. A root, whose gradients come at both
  ends of backward, holds them until the last one has come, so that its send buffer exists only
  shortly; so does a layer where launching a kernel for each gradient would cost more.
- receive buffer: what other ranks send, where the backend does the sum itself.
- unsynced: while gradients are not synced, the send buffer stays, and is added to.
- partial: 1-D, shard-sized sums over the shard axis only, kept while the all-reduce over the
  replicate axis is switched off.
- sharded gradient: ``.grad`` of the sharded parameter, a `ShardedTensor` in storage dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardkit import _compat
from shardkit._params.memory import Buffer
from shardkit._tensor.sharded import ShardedTensor
from shardkit.backends.base import Reduction

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from shardkit._layout.flat import FlatLayout
    from shardkit._params.bucket import Bucket
    from shardkit._params.memory import SlotPool
    from shardkit._settings import CommSettings
    from shardkit._tensor.spec import ShardSpec
    from shardkit.backends.base import AxisComm, CommStreams, ReduceHandle


def assign_grad(
    param: nn.Parameter, piece: Tensor, spec: ShardSpec, flat: Tensor | None = None
) -> None:
    """Add this rank's piece of a reduced gradient to a sharded parameter's ``.grad``.

    Args:
        param: The sharded parameter.
        piece: 1-D.
        spec: How it is cut.
        flat: The reduced gradients of the whole shard, of which `piece` is a view.
    """
    grad = param.grad
    if grad is None:
        param.grad = ShardedTensor.__new__(ShardedTensor, piece, spec, flat)  # Once per gradient.
    else:
        assert isinstance(grad, ShardedTensor)
        grad.to_local().add_(piece)
    for hook in _compat.post_accumulate_grad_hooks(param):
        hook(param)


class SendBuffer:
    """Send and receive memory of one bucket, with views made once."""

    def __init__(self, bucket: Bucket, *, receive_numel: int) -> None:
        layout, dtype, device = bucket.layout, bucket.reduce_dtype, bucket.device
        self._send = Buffer(layout.padded_numel * dtype.itemsize, device)
        self.flat = torch.empty(0, dtype=dtype, device=device)
        self.flat.set_(self._send.storage, 0, (layout.padded_numel,), (1,))
        places = zip(layout.offsets, layout.numels, layout.shapes, strict=True)
        self.slots = [self.flat[at : at + numel].view(shape) for at, numel, shape in places]
        gaps = _gaps(layout) if bucket.copies_gradients_together else []
        self._gaps = [self.flat[start:stop] for start, stop in gaps]
        self._zeros: list[Tensor] = []
        if gaps:
            longest = max(stop - start for start, stop in gaps)
            zeros = torch.zeros(longest, dtype=bucket.param_dtype, device=device)
            self._zeros = [zeros[: stop - start] for start, stop in gaps]
        self._has_open_gaps = True
        self._send.close()
        self._receive = Buffer(receive_numel * dtype.itemsize, device) if receive_numel else None
        self.received: Tensor | None = None
        if self._receive is not None:
            self.received = torch.empty(0, dtype=dtype, device=device)
            self.received.set_(self._receive.storage, 0, (receive_numel,), (1,))
            self._receive.close()
        self.written: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes that exist now."""
        buffers = (self._send, self._receive)
        return sum(b.nbytes for b in buffers if b is not None and b.has_memory)

    def write(self, index: int, grad: Tensor, streams: CommStreams, pool: SlotPool) -> None:
        """Copy a gradient into its slot, or add it to what is there."""
        self.open(streams, pool)
        slot = self.slots[index]
        if index in self.written:
            slot.add_(grad)
        else:
            self.written.add(index)
            slot.copy_(grad)

    def write_all(self, grads: Mapping[int, Tensor], streams: CommStreams, pool: SlotPool) -> None:
        """Write several gradients, by few kernels, and zeros between the slots."""
        self.open(streams, pool)
        again = [index for index in grads if index in self.written]
        if again:
            _compat.foreach_add([self.slots[i] for i in again], [grads[i] for i in again])
        new = [index for index in grads if index not in self.written]
        targets, sources = [self.slots[i] for i in new], [grads[i] for i in new]
        if self._has_open_gaps:
            self._has_open_gaps = False
            targets += self._gaps
            sources += self._zeros
        if targets:
            _compat.foreach_copy(targets, sources)
        self.written.update(new)

    def open(self, streams: CommStreams, pool: SlotPool) -> None:
        """Get memory to write gradients into, if there is none."""
        if not self._send.has_memory:
            streams.wait_fence(self._send.acquire(pool))
            self._has_open_gaps = True

    def complete(self, streams: CommStreams, pool: SlotPool) -> None:
        """Make ready to send: zeros where nothing was written, room for what comes."""
        self.open(streams, pool)
        if not self.written:
            self.flat.zero_()
        else:
            for index, slot in enumerate(self.slots):
                if index not in self.written:
                    slot.zero_()
        self.written.clear()
        if self._receive is not None:
            streams.wait_fence(self._receive.acquire(pool))

    def close_send(self, pool: SlotPool, fence: Any, *, by_compute: bool = False) -> None:
        """Give the send buffer's memory back; what was started is done at `fence`."""
        if self._send.has_memory:
            self._send.release(pool, fence, by_compute=by_compute)
        self.written.clear()

    def close_receive(self, pool: SlotPool) -> None:
        """Give the receive buffer's memory back; the host waited for it."""
        if self._receive is not None and self._receive.has_memory:
            self._receive.release(pool, None, by_compute=False)


def _gaps(layout: FlatLayout) -> list[tuple[int, int]]:
    """Return the ranges of the flat space that no parameter takes."""
    gaps, at = [], 0
    for start, numel in sorted(zip(layout.offsets, layout.numels, strict=True)):
        gaps.append((at, start))
        at = max(at, start + numel)
    gaps.append((at, layout.padded_numel))
    return [(start, stop) for start, stop in gaps if start < stop]


@dataclass(slots=True)
class _Started:
    """A reduction under way."""

    handle: ReduceHandle
    first: int
    buckets: list[int]
    is_partial: bool
    is_sent: bool


class GroupGradients:
    """Collects a group's unsharded gradients, reduces them, assigns the sharded ones.

    Args:
        buckets: The group's buckets that may be trained.
        shard_axis: Reduce-scatter over it.
        replicate_axis: All-reduce over it, or None.
        receive_chunks: Shard-sized pieces that the backend wants room for.
        comm: What the user chose; may change between backwards.
        weight: What a rank's gradients are to be multiplied by to be those of a mean over the
            rank's own batch.

    Attributes:
        fired: Per bucket, one byte per parameter: 1 if its gradient came since the last synced
            backward.
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
        self._buckets = buckets
        self._comm = comm
        self._shard_axis = shard_axis
        self._replicate_axis = replicate_axis
        self._receive_chunks = receive_chunks
        self._num_ranks = shard_axis.size * (replicate_axis.size if replicate_axis else 1)
        self._weight = weight
        self._may_be_local = self._num_ranks == 1 and all(
            bucket.keeps_flats and not bucket.is_offloaded for bucket in buckets
        )
        self.fired = [bytearray(len(bucket.entries)) for bucket in buckets]
        self._held: list[dict[int, Tensor]] = [{} for _ in buckets]
        self._buffers: list[SendBuffer | None] = [None] * len(buckets)
        self._partials: dict[int, Tensor] = {}
        self._started: list[_Started] = []
        self._sending: list[int] = []
        self._is_partial = False
        self._unsettled: list[tuple[int, int, Tensor]] = []

    @property
    def is_local(self) -> bool:
        """Whether gradients are assigned at once: one rank, and no hook on reduced buffers."""
        return self._may_be_local and self._comm.all_reduce_hook is None

    @property
    def _scale(self) -> float:
        factor = self._comm.divide_factor
        return self._weight / (self._num_ranks if factor is None else factor)

    @property
    def send_nbytes(self) -> int:
        """Bytes that a reduction sends."""
        return sum(
            bucket.layout.padded_numel * bucket.reduce_dtype.itemsize
            for i, bucket in enumerate(self._buckets)
            if self._is_sent(i)
        )

    def _is_sent(self, bucket_index: int) -> bool:
        """Whether a reduction carries the bucket: a frozen one, only with sums from before."""
        return self._buckets[bucket_index].is_trainable or bucket_index in self._partials

    @property
    def reduce_nbytes(self) -> int:
        """Bytes of the buffers that a reduction takes."""
        chunks = self._shard_axis.size
        return self.send_nbytes // chunks * (chunks + self._receive_chunks)

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of send, receive and partial buffers that exist now."""
        nbytes = sum(buffer.nbytes for buffer in self._buffers if buffer is not None)
        return nbytes + sum(partial.nbytes for partial in self._partials.values())

    # --- collecting ---

    def collect(
        self,
        bucket_index: int,
        index: int,
        grad: Tensor,
        streams: CommStreams,
        pool: SlotPool,
        *,
        hold: bool,
    ) -> None:
        """Take the unsharded gradient of one parameter, to be reduced.

        Unless `hold` no reduction may be under way: `finish_reduce` comes before, after those of
        groups whose reductions were started before.

        Args:
            bucket_index: Which bucket.
            index: Which parameter.
            grad: Its gradient, in compute dtype; not kept unless `hold`. That of a DTensor is
                brought to the parameter's placements, which may take a collective over its mesh.
            streams: Order the copy.
            pool: Where the send buffer's memory comes from.
            hold: Keep the tensor rather than copy it now.
        """
        self.fired[bucket_index][index] = 1
        bucket = self._buckets[bucket_index]
        if bucket.converts_gradients:
            grad = bucket.part_of_gradient(index, grad)
        if hold:
            held = self._held[bucket_index]
            held[index] = held[index] + grad if index in held else grad
        else:
            assert not self.is_reducing, "the send buffer is on the wire"
            self._buffer(bucket_index).write(index, grad, streams, pool)

    def assign(self, bucket_index: int, index: int, grad: Tensor) -> None:
        """Take the gradient of one parameter and assign it at once: nobody else has a part."""
        self.fired[bucket_index][index] = 1
        bucket = self._buckets[bucket_index]
        if bucket.converts_gradients:
            grad = bucket.part_of_gradient(index, grad)
        if grad.requires_grad:
            grad = grad.detach()
        if grad.dtype is not bucket.orig_dtype:
            grad = grad.to(bucket.orig_dtype)
        piece = grad if grad.ndim == 1 else grad.reshape(-1)
        if self._comm.divide_factor is not None:
            piece = piece / self._comm.divide_factor
        assign_grad(bucket.entries[index].param, piece, bucket.specs[index])

    def write_held(self, streams: CommStreams, pool: SlotPool) -> None:
        """Copy what is held into the send buffers, and drop it."""
        for bucket_index, held in enumerate(self._held):
            if held:
                buffer = self._buffer(bucket_index)
                if self._buckets[bucket_index].copies_gradients_together:
                    buffer.write_all(held, streams, pool)
                    held.clear()
                while held:
                    index, grad = held.popitem()
                    buffer.write(index, grad, streams, pool)

    @property
    def has_collected(self) -> bool:
        """Whether gradients came that have not been sent."""
        return any(self._held) or any(b.written for b in self._buffers if b is not None)

    @property
    def has_pending(self) -> bool:
        """Whether anything waits: gradients, or sums that were not all-reduced."""
        return self.has_collected or bool(self._partials)

    def _buffer(self, bucket_index: int) -> SendBuffer:
        buffer = self._buffers[bucket_index]
        if buffer is None:
            bucket = self._buckets[bucket_index]
            with torch.inference_mode(mode=False):
                make = bucket.send_buffer_class or SendBuffer
                buffer = make(
                    bucket, receive_numel=self._receive_chunks * bucket.layout.shard_numel
                )
            self._buffers[bucket_index] = buffer
        return buffer

    # --- reducing ---

    def prepare(self, streams: CommStreams, pool: SlotPool, *, all_reduce: bool) -> list[Reduction]:
        """Make ready to reduce what was collected, zeros for what did not come.

        Returns:
            What the backend has to do, one per bucket; tell `started` the handle.
        """
        assert not self.is_reducing, "the send buffer is on the wire"
        self.write_held(streams, pool)
        self._is_partial = self._replicate_axis is not None and not all_reduce
        self._sending, reductions = [], []
        for i, bucket in enumerate(self._buckets):
            if not self._is_sent(i):
                continue
            buffer = self._buffer(i)
            buffer.complete(streams, pool)
            wide = torch.promote_types(bucket.reduce_dtype, torch.float32)
            self._sending.append(i)
            reductions.append(
                Reduction(
                    send=buffer.flat,
                    receive=buffer.received,
                    out_numel=bucket.layout.shard_numel,
                    out_dtype=wide if self._is_partial else bucket.orig_dtype,
                    scale=1.0 if self._is_partial else self._scale,
                    shard_axis=self._shard_axis,
                    replicate_axis=self._replicate_axis if all_reduce else None,
                    carry=self._partials.pop(i, None),
                    is_to_host=bucket.is_offloaded and not self._is_partial,
                    is_pinned=bucket.is_pinned,
                    comm=self._comm.reduce_scatter,
                    hook=None if self._is_partial else self._comm.all_reduce_hook,
                    hook_stream=self._comm.all_reduce_hook_stream,
                    bucket_id=bucket.bucket_id,
                    force_sum=self._comm.force_sum,
                )
            )
        return reductions

    def started(self, handle: ReduceHandle, first: int, pool: SlotPool) -> None:
        """Note the reduction that carries this group's, as its results from `first` on."""
        is_sent = handle.fence is not None and pool.keeps_memory
        if is_sent:
            self._close_send(pool, handle.fence)
        started = _Started(handle, first, self._sending, self._is_partial, is_sent)
        self._started.append(started)

    def _close_send(self, pool: SlotPool, fence: Any, *, by_compute: bool = False) -> None:
        for buffer in self._buffers:
            if buffer is not None:
                buffer.close_send(pool, fence, by_compute=by_compute)

    @property
    def is_reducing(self) -> bool:
        """Whether a reduction was started and not finished."""
        return bool(self._started)

    def wait_sent(self, pool: SlotPool) -> None:
        """Wait until the send buffers of started reductions are free, and give them back."""
        for started in self._started:
            if not started.is_sent:
                started.handle.wait_sent()
                self._close_send(pool, started.handle.fence)
                started.is_sent = True

    def finish_reduce(self, pool: SlotPool) -> None:
        """Wait for started reductions; assign the gradients of parameters that fired here."""
        while self._started:
            started = self._started.pop(0)
            last = started.first + len(started.buckets)
            outs = started.handle.wait()[started.first : last]
            if not started.is_sent:
                self._close_send(pool, started.handle.fence)
            pool.passed(started.handle.fence)
            for buffer in self._buffers:
                if buffer is not None:
                    buffer.close_receive(pool)
            if started.is_partial:
                self._partials = dict(zip(started.buckets, outs, strict=True))
                continue
            for i, out in zip(started.buckets, outs, strict=True):
                self._assign(i, out)

    def _assign(self, bucket_index: int, out: Tensor) -> None:
        bucket, fired = self._buckets[bucket_index], self.fired[bucket_index]
        flat = out if bucket.keeps_flats else None
        if flat is not None and all(fired) and (before := _flat_of_grads(bucket)) is not None:
            before.add_(flat)
            for entry in bucket.entries:
                for hook in _compat.post_accumulate_grad_hooks(entry.param):
                    hook(entry.param)
            return
        for index, entry in enumerate(bucket.entries):
            piece = bucket.piece(out, index)
            if fired[index]:
                assign_grad(entry.param, piece, bucket.specs[index], flat)
            else:
                self._unsettled.append((bucket_index, index, piece))

    # --- parameters that did not fire here ---

    @property
    def needs_settling(self) -> bool:
        """Whether a reduced gradient waits to know if any rank used the parameter."""
        return bool(self._unsettled)

    def settle(self, used_anywhere: Sequence[Sequence[int]]) -> None:
        """Assign the gradients of parameters that only other ranks used.

        A parameter that no rank used keeps its ``.grad`` as it was: None would become zero, and
        AdamW would decay it.
        """
        for bucket_index, index, piece in self._unsettled:
            if used_anywhere[bucket_index][index]:
                bucket = self._buckets[bucket_index]
                assign_grad(bucket.entries[index].param, piece, bucket.specs[index])
        self._unsettled.clear()

    def forget_fired(self) -> None:
        """A synced backward is over."""
        if not self._partials:
            for fired in self.fired:
                fired[:] = bytes(len(fired))

    def reset(self, pool: SlotPool) -> None:
        """Drop everything that is not in a ``.grad`` yet, after an exception."""
        for started in self._started:
            started.handle.wait()
            pool.passed(started.handle.fence)
        self._started.clear()
        self._close_send(pool, pool.fence(), by_compute=True)  # Compute waits for all streams.
        for buffer in self._buffers:
            if buffer is not None:
                buffer.close_receive(pool)
        self._unsettled.clear()
        self._partials.clear()
        for held in self._held:
            held.clear()
        self.forget_fired()


def _flat_of_grads(bucket: Bucket) -> Tensor | None:
    """Return the one tensor of which all gradients of a bucket are views, laid out as its shard."""
    grads: list[Any] = [entry.param.grad for entry in bucket.entries]
    flat: Tensor | None = getattr(grads[0], "flat", None)
    is_one = flat is not None and all(
        type(grad) is ShardedTensor and grad.flat is flat and grad.flat_start == 0 for grad in grads
    )
    if not is_one or flat is None:
        return None
    has_room = flat.numel() == bucket.layout.shard_numel and flat.dtype == bucket.orig_dtype
    return flat if has_room else None


def start_reduce(
    many: Sequence[tuple[GroupGradients, bool]], streams: CommStreams, pool: SlotPool
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
    handle = streams.start_reduce(reductions)
    for (gradients, _), first in zip(many, firsts, strict=True):
        gradients.started(handle, first, pool)
