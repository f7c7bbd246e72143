"""Where the gradients of one bucket are collected, and from where they are sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from shardkit import _compat
from shardkit._params.memory import Buffer

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from shardkit._layout.flat import FlatLayout
    from shardkit._params.memory import SlotPool
    from shardkit._params.plan import BucketPlan
    from shardkit.backends.base import CommStreams
    from shardkit.backends.events import Event


class GradientBuffer(Protocol):
    """What every store's buffer of gradients can do."""

    @property
    def flat(self) -> Tensor:
        """1-D, what is sent, once `complete`."""

    @property
    def received(self) -> Tensor | None:
        """1-D, room for what other ranks send, once `complete`; None: nothing is received."""

    @property
    def written(self) -> Collection[int]:
        """Parameters whose gradients wait here to be sent."""

    @property
    def nbytes(self) -> int:
        """Bytes that exist now."""

    def write(self, index: int, grad: Tensor, streams: CommStreams, pool: SlotPool) -> None:
        """Copy a gradient, or add it to what is there."""

    def write_all(self, grads: Mapping[int, Tensor], streams: CommStreams, pool: SlotPool) -> None:
        """Copy several gradients, or add them to what is there."""

    def complete(self, streams: CommStreams, pool: SlotPool) -> None:
        """Make ready to send: zeros where nothing was written, room for what comes."""

    def close_send(self, pool: SlotPool, fence: Event | None, *, by_compute: bool = False) -> None:
        """Give the send memory back; what was started is done at `fence`."""

    def close_receive(self, pool: SlotPool) -> None:
        """Give the receive memory back; the host waited for it."""


class SendBuffer:
    """Send and receive memory of one bucket, with views made once.

    Args:
        layout: Layout of the bucket.
        plan: Plan of the bucket.
        receive_numel: Number of elements in the receive buffer; 0: there is none.

    Attributes:
        flat: Buffer to send, 1-D, ``layout.padded_numel``.
        received: Buffer for what others send, 1-D, `receive_numel`; None where nothing is received.
        slots: Views into `flat`, one for each parameter.
        written: Parameters whose slot holds a gradient.
    """

    def __init__(self, layout: FlatLayout, plan: BucketPlan, receive_numel: int) -> None:
        dtype, device = plan.reduce_dtype, plan.device
        self._send = Buffer(layout.padded_numel * dtype.itemsize, device)
        self.flat = torch.empty(0, dtype=dtype, device=device)
        self.flat.set_(self._send.storage, 0, (layout.padded_numel,), (1,))
        parts = zip(layout.offsets, layout.numels, layout.shapes, strict=True)
        self.slots = [self.flat[at : at + numel].view(shape) for at, numel, shape in parts]
        gaps = gaps_of(layout) if plan.mesh.backend.copies_gradients_together else []
        self._gaps = [self.flat[start:stop] for start, stop in gaps]
        self._zeros: list[Tensor] = []
        if gaps:
            longest = max(stop - start for start, stop in gaps)
            zeros = torch.zeros(longest, dtype=plan.param_dtype, device=device)
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
            streams.wait_fence(self._send.acquire(pool))  # order: gradients wait for their slot
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

    def close_send(self, pool: SlotPool, fence: Event | None, *, by_compute: bool = False) -> None:
        """Give the send buffer's memory back; what was started is done at `fence`."""
        if self._send.has_memory:
            self._send.release(pool, fence, by_compute=by_compute)
        self.written.clear()

    def close_receive(self, pool: SlotPool) -> None:
        """Give the receive buffer's memory back; the host waited for it."""
        if self._receive is not None and self._receive.has_memory:
            self._receive.release(pool, None, by_compute=False)


def gaps_of(layout: FlatLayout) -> list[tuple[int, int]]:
    """Return the ranges of the flat space that no parameter takes."""
    gaps, at = [], 0
    for start, numel in sorted(zip(layout.offsets, layout.numels, strict=True)):
        gaps.append((at, start))
        at = max(at, start + numel)
    gaps.append((at, layout.padded_numel))
    return [(start, stop) for start, stop in gaps if start < stop]
