"""What rank 0 alone has, sent to all ranks one tensor at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardkit._errors import CheckpointError
from shardkit._params.host_heap import give_back
from shardkit.backends.watch.channel import channel_of
from shardkit.checkpoint._files.bytes_io import TensorInfo

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping


class FromRank0:
    """Entries that rank 0 has; made on all ranks of the default process group together.

    Args:
        entries: Values on rank 0, by any keys; not looked at on others. Tensors are plain and
            whole.
        device: Device on which tensors are sent.

    Attributes:
        infos: Shape and dtype of every tensor with dimensions, on every rank: may be checked before
            any is sent.

    Raises:
        CheckpointError: On every rank: rank 0 has a tensor that is not plain.

    Cost: one broadcast of what is not a tensor and of the tensors' descriptions, then one of each
    tensor; memory for one tensor.
    """

    def __init__(self, entries: Mapping[Any, Any], *, device: torch.device) -> None:
        self._entries = entries
        self._device = device
        described: list[Any] = [_describe(entries) if self.is_source else None]
        if dist.is_initialized():
            with channel_of(None).run("broadcast", "keys", 0):
                dist.broadcast_object_list(described, src=0)
        if isinstance(described[0], str):
            raise CheckpointError(described[0])
        self._described: list[tuple[Hashable, Any]] = described[0]
        self.infos = {key: value for key, value in self._described if isinstance(value, TensorInfo)}

    @property
    def is_source(self) -> bool:
        """Whether this rank's entries are those that are sent."""
        return not dist.is_initialized() or dist.get_rank() == 0

    @torch.no_grad()
    def receive(self) -> Iterator[tuple[Any, Any]]:
        """Yield key and value of every entry, in rank 0's order. Collective: exhaust it."""
        for key, value in self._described:
            if not isinstance(value, TensorInfo):
                yield key, value
                continue
            if self.is_source:
                tensor = self._entries[key].detach().to(self._device).contiguous()
            else:
                tensor = torch.empty(value.shape, dtype=value.dtype, device=self._device)
            if dist.is_initialized() and tensor.numel() > 0:
                with channel_of(None).run("broadcast", str(key), tensor.nbytes):
                    dist.broadcast(tensor, src=0)
            yield key, tensor
            if not self.is_source and self._device.type == "cpu":
                give_back(tensor.nbytes)  # The one before it, for this one is still referred to.


def _describe(entries: Mapping[Any, Any]) -> list[tuple[Any, Any]] | str:
    """Return entries with tensors described, those without dimensions as they are; or an error."""
    described = []
    for key, value in entries.items():
        if isinstance(value, Tensor) and type(value) not in (Tensor, torch.nn.Parameter):
            return (
                f"rank 0 has {key!r} as a {type(value).__name__}: broadcast_from_rank0 sends whole "
                f"plain tensors. Pass a full state dict, or leave broadcast_from_rank0 out."
            )
        if isinstance(value, Tensor):
            plain = value.detach()
            info = TensorInfo(tuple(plain.shape), plain.dtype)
            described.append((key, info if plain.ndim else plain.cpu()))
        else:
            described.append((key, value))
    return described
