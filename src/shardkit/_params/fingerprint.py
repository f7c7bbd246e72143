"""A number that tells whether ranks hold equal values, from a sample of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardkit._params.packing import packing_of
from shardkit._watch_settings import watch_settings
from shardkit.backends import tensor_parallel_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from shardkit._params.sites import ParamEntry

_MAX_SAMPLES = 1024
_PART_NBYTES = 2**20  # Looked at together, which takes 16 times as much memory.
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # Odd, as int64: each place counts by another multiple.


@torch.no_grad()
def fingerprint(tensor: Tensor, max_samples: int = _MAX_SAMPLES) -> Tensor:
    """Return a 0-dim int64 that depends on the bits of evenly spaced elements.

    Tensors that differ in all elements, as those of different seeds do, have different ones. So do
    tensors that differ in one of the elements looked at.

    Args:
        tensor: Any shape and dtype, with memory.
        max_samples: Of elements; 0: all of them.
    """
    if not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = tensor.detach().reshape(-1)
    if max_samples and flat.numel() > max_samples:
        flat = flat[:: flat.numel() // max_samples][:max_samples]
    octets = flat.contiguous().view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first, part in enumerate(octets.split(_PART_NBYTES)):
        start = first * _PART_NBYTES + 1
        places = torch.arange(start, start + part.numel(), device=tensor.device)
        total += (places.mul_(_FACTOR)).mul_(part.to(torch.int64).add_(1)).sum()
    return total


class WholeValues:
    """Fingerprints of the parameters of a group, when they were whole.

    Args:
        entries: The parameters, before they are cut; those on meta, and of classes that gather
            themselves, are left out.

    Attributes:
        versions: Of the shards, when they were cut.
    """

    def __init__(self, entries: Iterable[ParamEntry] = ()) -> None:
        self.versions: tuple[int, ...] = ()
        self._by_entry: dict[int, Tensor] = {}
        if watch_settings.compare_values:
            for entry in entries:
                part = _plain_part(entry)
                if part is not None:
                    self.note(entry, part)

    def note(self, entry: ParamEntry, whole: Tensor) -> None:
        """Add the values of one parameter."""
        if watch_settings.compare_values:
            self._by_entry[id(entry)] = fingerprint(whole)

    def known(self, versions: tuple[int, ...]) -> dict[int, int]:
        """Return them by the entry's id; nothing if the shards have been written to since."""
        if versions != self.versions or not self._by_entry:
            return {}
        values = torch.stack([*self._by_entry.values()]).tolist()  # One transfer from the device.
        return dict(zip(self._by_entry, values, strict=True))


def _plain_part(entry: ParamEntry) -> Tensor | None:
    """Return a parameter, a DTensor's local part, or the bytes of a packed one.

    None if it is of another kind, or on meta.
    """
    param: Any = entry.param
    packing = None if param.is_meta else packing_of(entry)
    if packing is not None:
        return packing.pack(param)
    part: Tensor = param.to_local() if tensor_parallel_of(param) is not None else param
    if part.is_meta or type(part) not in (torch.Tensor, nn.Parameter):
        return None
    return part
