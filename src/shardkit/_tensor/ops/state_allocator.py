"""Memory of optimizer state, which is made one tensor at a time."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from shardkit._tensor.spec import ShardSpec


@dataclass(slots=True)
class _OpenFlat:
    flat: Any
    taken: set[int]


class StateAllocator:
    """Lays new tensors of one bucket's parameters end to end, as the parameters are.

    So that operators on lists run on the whole bucket. The first tensor takes memory for all. If
    that memory is freed while only one tensor lies in it, it was a temporary: then the allocator
    stops.
    """

    def __init__(self) -> None:
        self._open: list[_OpenFlat] = []
        self._is_off = False

    def allocate(
        self, spec: ShardSpec, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor] | None:
        """Return zeros for one parameter of the bucket: (flat, piece of it); None: make it apart.

        Args:
            spec: Cut of the parameter.
            dtype: Dtype of the new tensor.
            device: Device of the new tensor.

        Returns:
            Tensors in 1-D: the flat has `shard_numel` elements, and the piece is a view of it.
        """
        layout, index = spec.layout, spec.index
        if self._is_off or len(layout.shapes) == 1 or spec.start == spec.stop:
            return None
        start, stop = spec.piece_range
        for entry in self._open:
            flat = entry.flat()
            if flat is None or index in entry.taken:
                continue
            if flat.dtype == dtype and flat.device == device:
                entry.taken.add(index)
                return flat, flat[start:stop]
        flat = torch.zeros(layout.shard_numel, dtype=dtype, device=device)
        entry = _OpenFlat(None, {index})
        entry.flat = weakref.ref(flat, lambda _: self._closed(entry))
        self._open.append(entry)
        return flat, flat[start:stop]

    def _closed(self, entry: _OpenFlat) -> None:
        self._open.remove(entry)
        if len(entry.taken) == 1:
            self._is_off = True
