"""Memory of unsharded buffers: a few slots that come and go behind fixed storages.

A bucket's unsharded parameters are views of ONE storage for its whole life: autograd saves views
of them, and a tensor pointed elsewhere between forward and backward would train on wrong weights
without an error. What comes and goes is the memory behind the storage. With torch >= 2.12 a slot
is swapped under it and back, so nothing is mapped anew after the first step; older torch resizes
the storage, correct and slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardkit import _compat

_LARGEST_WASTE = 2
"""A free slot is taken for a bucket if it is at most this many times as large."""


@dataclass(slots=True, eq=False)
class Slot:
    """Memory that is or was behind a storage.

    Attributes:
        storage: Holds the memory while the slot is free, is empty while it is used.
        nbytes: Size.
        free_after: Fence after which the memory may be written again.
    """

    storage: torch.UntypedStorage
    nbytes: int
    free_after: Any = None


class SlotPool:
    """The slots of one root on one device.

    Attributes:
        live_nbytes: Bytes behind storages now.
        peak_nbytes: The most there ever were.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Slot] = []
        self._last_fence: Any = None
        self.live_nbytes = 0
        self.peak_nbytes = 0

    @property
    def held_nbytes(self) -> int:
        """Bytes of all slots, free ones included."""
        return self.live_nbytes + sum(slot.nbytes for slot in self._free)

    def attach(self, storage: torch.UntypedStorage, nbytes: int) -> Slot:
        """Put at least `nbytes` behind an empty `storage`; write there after `Slot.free_after`."""
        if _compat.HAS_STORAGE_SWAP:
            slot = self._take(nbytes)
            _compat.swap_storage(storage, slot.storage)
        else:
            storage.resize_(nbytes)
            slot = Slot(storage, nbytes, self._last_fence)
        self.live_nbytes += slot.nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes)
        return slot

    def detach(self, storage: torch.UntypedStorage, slot: Slot, fence: Any) -> None:
        """Take the memory away from `storage`; its readers are done at `fence`."""
        self.live_nbytes -= slot.nbytes
        if _compat.HAS_STORAGE_SWAP:
            _compat.swap_storage(storage, slot.storage)
            slot.free_after = fence
            self._free.append(slot)
        else:
            self._last_fence = fence
            storage.resize_(0)

    def trim(self) -> None:
        """Give free slots back to the allocator."""
        self._free.clear()

    def _take(self, nbytes: int) -> Slot:
        """Return the smallest free slot that fits without much waste, or a new one."""
        best = None
        for slot in self._free:
            fits = nbytes <= slot.nbytes <= nbytes * _LARGEST_WASTE
            if fits and (best is None or slot.nbytes < best.nbytes):
                best = slot
        if best is not None:
            self._free.remove(best)
            return best
        return Slot(torch.UntypedStorage(nbytes, device=self._device), nbytes)
