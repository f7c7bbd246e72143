"""What is known of whole values that ranks compare: fingerprints of parameters that were cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardkit._params.packing import packing_of
from shardkit._tensor.written_values import fingerprint
from shardkit._watch_settings import watch_settings
from shardkit.backends import tensor_parallel_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from shardkit._params.sites import ParamEntry


class WholeValues:
    """Fingerprints of the parameters of a group, when they were whole.

    Args:
        entries: The parameters, before they are cut; those on meta, and of classes that gather
            themselves, are left out.

    Attributes:
        versions: Versions of the shards when they were cut.
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
