"""Gradients of one group on their way from the unsharded parameters to the shards.

[Note: tensors of a reduction]
- unsharded gradient: what autograd leaves in ``.grad`` of an unsharded parameter; taken from it at
  once and held until the group is complete.
- reduce set: a send and (where the backend needs one) a receive buffer for all buckets of a group,
  in `reduce_dtype`. All groups of a root share one set: the reduction of a group runs beside the
  backward of the next, and is waited for when that one is complete.
- unsynced buffer: a send buffer that a group keeps for itself while gradients are not synced.
- partial: 1-D, shard-sized sums over the shard axis only, kept while the all-reduce over the
  replicate axis is switched off.
- sharded gradient: ``.grad`` of the sharded parameter, a `ShardedTensor` in storage dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardkit import _compat
from shardkit._layout import align_up
from shardkit._sharded import ShardedTensor, ShardSpec
from shardkit.backends.base import Reduction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from shardkit._bucket import Bucket
    from shardkit.backends.base import AxisComm, Handle, Lanes

_ALIGN_NBYTES = 64


def assign_grad(param: nn.Parameter, piece: Tensor, spec: ShardSpec) -> None:
    """Add this rank's piece of a reduced gradient to a sharded parameter's ``.grad``."""
    grad = param.grad
    if grad is None:
        param.grad = ShardedTensor(piece, spec)
    else:
        assert isinstance(grad, ShardedTensor)
        grad.to_local().add_(piece)
    for hook in _compat.post_accumulate_grad_hooks(param):
        hook(param)


class ReduceSet:
    """A send buffer and maybe a receive buffer, raw bytes.

    Attributes:
        nbytes: Size of each.
        send: What this rank contributes, all ranks' ranges.
        receive: Room for what comes, or None.
        busy: The gradients whose reduction uses the set, or None.
    """

    def __init__(self, nbytes: int, device: torch.device, *, receive: bool) -> None:
        self.nbytes = nbytes
        self.send = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.receive = torch.empty(nbytes, dtype=torch.uint8, device=device) if receive else None
        self.busy: GroupGradients | None = None

    @property
    def held_nbytes(self) -> int:
        """Bytes of both buffers."""
        return self.nbytes * (1 if self.receive is None else 2)


class ReduceSetPool:
    """The reduce sets of one root: at most `max_sets`, in use one after another."""

    def __init__(self, device: torch.device, *, receive: bool, max_sets: int = 1) -> None:
        self._device = device
        self._receive = receive
        self._max_sets = max_sets
        self._sets: list[ReduceSet] = []

    @property
    def held_nbytes(self) -> int:
        """Bytes of all sets."""
        return sum(reduce_set.held_nbytes for reduce_set in self._sets)

    def acquire(self, nbytes: int) -> ReduceSet:
        """Return a set that is free, waiting for the oldest reduction if all are under way."""
        chosen = None
        if len(self._sets) >= self._max_sets:
            chosen = self._sets.pop(0)
            if chosen.busy is not None:
                chosen.busy.finish_reduce()
        if chosen is None or not nbytes <= chosen.nbytes <= 2 * nbytes:
            del chosen  # Give its memory back first.
            chosen = ReduceSet(nbytes, self._device, receive=self._receive)
        self._sets.append(chosen)
        return chosen

    def trim(self) -> None:
        """Give the memory of free sets back to the allocator."""
        self._sets = [s for s in self._sets if s.busy is not None]


class _Views:
    """The buckets' flat ranges, and the parameters' slots, in one buffer of raw bytes."""

    def __init__(self, buffer: Tensor, buckets: Sequence[Bucket], starts: Sequence[int]) -> None:
        self.flats: list[Tensor] = []
        self.slots: list[list[Tensor]] = []
        storage = buffer.untyped_storage()
        for bucket, start in zip(buckets, starts, strict=True):
            dtype, layout = bucket.reduce_dtype, bucket.layout
            flat = torch.empty(0, dtype=dtype, device=buffer.device)
            flat.set_(storage, start // dtype.itemsize, (layout.padded_numel,), (1,))
            self.flats.append(flat)
            places = zip(layout.offsets, layout.numels, layout.shapes, strict=True)
            self.slots.append([flat[at : at + numel].view(shape) for at, numel, shape in places])


@dataclass(slots=True)
class _Started:
    """A reduction under way; holds its buffers."""

    carrier: ReduceSet
    source: ReduceSet
    handle: Handle
    outs: list[Tensor]
    is_partial: bool


class GroupGradients:
    """Collects a group's unsharded gradients, reduces them, assigns the sharded ones.

    Args:
        buckets: The group's buckets.
        shard_axis: Reduce-scatter over it.
        replicate_axis: All-reduce over it, or None.

    Attributes:
        fired: Per bucket, one byte per parameter: 1 if its gradient came since the last `settle`.
        is_local: One rank only: gradients are assigned at once.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        shard_axis: AxisComm,
        replicate_axis: AxisComm | None,
    ) -> None:
        self._buckets = buckets
        self._shard_axis = shard_axis
        self._replicate_axis = replicate_axis
        num_ranks = shard_axis.size * (replicate_axis.size if replicate_axis else 1)
        self.is_local = num_ranks == 1
        self._scale = 1.0 / num_ranks
        self._active: list[int] = []
        self._starts: list[int] = []
        self._nbytes = 0
        self.fired = [bytearray(len(bucket.found)) for bucket in buckets]
        self._held: list[dict[int, Tensor]] = [{} for _ in buckets]
        self._views: dict[ReduceSet, tuple[_Views, _Views | None]] = {}
        self._unsynced: ReduceSet | None = None
        self._partials: list[Tensor] | None = None
        self._started: list[_Started] = []
        self._unsettled: list[tuple[int, int, Tensor]] = []

    @property
    def unsynced_nbytes(self) -> int:
        """Bytes this group keeps because gradients were not synced."""
        nbytes = self._unsynced.held_nbytes if self._unsynced else 0
        return nbytes + sum(partial.nbytes for partial in self._partials or ())

    @property
    def has_held(self) -> bool:
        """Whether unsharded gradients are held."""
        return any(self._held)

    def _activate(self) -> None:
        """Lay out the buckets that are trained now; parameters may be frozen at any time."""
        active = [i for i, bucket in enumerate(self._buckets) if bucket.is_trainable or self._held[i]]
        if active == self._active or self._unsynced is not None:
            return
        self._active, self._starts, self._nbytes = active, [], 0
        self._views.clear()
        for bucket in self._active_buckets:
            self._starts.append(self._nbytes)
            nbytes = bucket.layout.padded_numel * bucket.reduce_dtype.itemsize
            self._nbytes += align_up(nbytes, _ALIGN_NBYTES)

    @property
    def _active_buckets(self) -> list[Bucket]:
        return [self._buckets[i] for i in self._active]

    # --- collecting ---

    def take(self, bucket_index: int, index: int, grad: Tensor) -> None:
        """Take the unsharded gradient of one parameter."""
        self.fired[bucket_index][index] = 1
        if self.is_local:
            bucket = self._buckets[bucket_index]
            piece = grad.detach().to(bucket.orig_dtype).reshape(-1)
            assign_grad(bucket.found[index].param, piece, bucket.specs[index])
            return
        held = self._held[bucket_index]
        held[index] = held[index] + grad if index in held else grad

    def keep_unsynced(self) -> None:
        """Move what is held into the unsynced buffer: this backward is not synced."""
        if not self.has_held:
            return
        self._activate()
        if self._unsynced is None:
            device = self._buckets[0].device
            self._unsynced = ReduceSet(self._nbytes, device, receive=False)
            self._write_held(self._views_of(self._unsynced)[0])
        else:
            self._add_held()

    def _add_held(self) -> None:
        assert self._unsynced is not None
        views = self._views_of(self._unsynced)[0]
        for i, slots in zip(self._active, views.slots, strict=True):
            held = self._held[i]
            for index, grad in held.items():
                slots[index].add_(grad)
            held.clear()

    def _write_held(self, views: _Views) -> None:
        """Copy what is held into its slots, zeros into the others, and drop it."""
        for i, slots in zip(self._active, views.slots, strict=True):
            held = self._held[i]
            if len(held) < len(slots):
                torch._foreach_zero_([slot for i, slot in enumerate(slots) if i not in held])  # noqa: SLF001
            if held:
                torch._foreach_copy_([slots[i] for i in held], list(held.values()))  # noqa: SLF001
            held.clear()

    def _views_of(self, reduce_set: ReduceSet) -> tuple[_Views, _Views | None]:
        views = self._views.get(reduce_set)
        if views is None:
            buckets = self._active_buckets
            send = _Views(reduce_set.send, buckets, self._starts)
            receive = None
            if reduce_set.receive is not None:
                receive = _Views(reduce_set.receive, buckets, self._starts)
            self._views.clear()  # Sets that were replaced must not be kept alive.
            self._views[reduce_set] = views = (send, receive)
        return views

    # --- reducing ---

    def start_reduce(self, lanes: Lanes, pool: ReduceSetPool, *, all_reduce: bool) -> None:
        """Reduce what was collected, zeros for what did not come.

        Cost: one reduce-scatter per bucket, one all-reduce per bucket on a replicate axis.
        """
        self._activate()
        carrier = source = pool.acquire(self._nbytes)
        receive = self._views_of(carrier)[1]
        if self._unsynced is not None:
            self._add_held()
            source, self._unsynced = self._unsynced, None
        send = self._views_of(source)[0]
        if source is carrier:
            self._write_held(send)
        is_partial = self._replicate_axis is not None and not all_reduce
        outs, reductions = [], []
        for i, bucket in enumerate(self._active_buckets):
            wide = torch.promote_types(bucket.reduce_dtype, torch.float32)
            out = torch.empty(
                bucket.layout.shard_numel,
                dtype=wide if is_partial else bucket.orig_dtype,
                device=bucket.device,
            )
            outs.append(out)
            reductions.append(
                Reduction(
                    send=send.flats[i],
                    receive=receive.flats[i] if receive else None,
                    out=out,
                    scale=1.0 if is_partial else self._scale,
                    shard_axis=self._shard_axis,
                    replicate_axis=self._replicate_axis if all_reduce else None,
                    carry=self._partials[i] if self._partials else None,
                )
            )
        self._partials = None
        carrier.busy = self
        handle = lanes.start_reduce(reductions)
        self._started.append(_Started(carrier, source, handle, outs, is_partial))

    def finish_reduce(self) -> None:
        """Wait for started reductions and assign the gradients of parameters that fired here."""
        while self._started:
            started = self._started.pop(0)
            started.handle.wait()
            started.carrier.busy = None
            if started.is_partial:
                self._partials = started.outs
            else:
                self._assign(started.outs)

    def _assign(self, outs: Sequence[Tensor]) -> None:
        for i, out in zip(self._active, outs, strict=True):
            bucket, fired = self._buckets[i], self.fired[i]
            for index, found in enumerate(bucket.found):
                piece = bucket.piece(out, index)
                if fired[index]:
                    assign_grad(found.param, piece, bucket.specs[index])
                else:
                    self._unsettled.append((i, index, piece))

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
                assign_grad(bucket.found[index].param, piece, bucket.specs[index])
        self._unsettled.clear()

    def forget_fired(self) -> None:
        """A synced backward is over."""
        if self._partials is None:
            for fired in self.fired:
                fired[:] = bytes(len(fired))

    def reset(self) -> None:
        """Drop everything that is not in a ``.grad`` yet, after an exception."""
        for started in self._started:
            started.handle.wait()
            started.carrier.busy = None
        self._started.clear()
        self._unsettled.clear()
        self._unsynced = self._partials = None
        for held in self._held:
            held.clear()
        self.forget_fired()
