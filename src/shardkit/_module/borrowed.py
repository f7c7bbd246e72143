"""Whole tensors for a module while it is initialized, and whether that has written them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from shardkit._tensor.sharded import user_attributes

if TYPE_CHECKING:
    from collections.abc import Container

    from shardkit._module.initializers import InitializedModule

_UNWRITTEN_BYTE = 0xA5


class Borrowed:
    """A context in which a module holds whole tensors, in the place of its own.

    Replaced are those that have no values yet. On exit the module holds its own again.

    Args:
        unit: The module.
        device: The device of the whole tensors.
        pending: The tensors that have no values yet, by id.

    Attributes:
        stand_ins: The whole tensors, by the id of the module's own.
    """

    def __init__(
        self, unit: InitializedModule, device: torch.device, pending: Container[int]
    ) -> None:
        self._device = device
        self._pending = pending
        self.stand_ins: dict[int, Tensor] = {}
        self._places = [
            (holder, tensors, attribute, tensor)
            for holder in unit.holders
            for tensors in (holder._parameters, holder._buffers)  # noqa: SLF001
            for attribute, tensor in tensors.items()
            if tensor is not None and id(tensor) in pending
        ]

    def __enter__(self) -> Self:
        for holder, tensors, attribute, tensor in self._places:
            stand_in = self.stand_ins.get(id(tensor))
            if stand_in is None:
                stand_in = self.stand_ins[id(tensor)] = self._whole(tensor)
            put(holder, tensors, attribute, stand_in)
        return self

    def _whole(self, tensor: Tensor) -> Tensor:
        whole = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=self._device)
        mark_unwritten(whole)
        if isinstance(tensor, nn.Parameter):
            whole = nn.Parameter(whole, requires_grad=tensor.requires_grad)
        whole.__dict__.update(user_attributes(tensor))
        return whole

    def unwritten(self) -> set[int]:
        """Return the ids of the module's tensors that have no values still."""
        held = self.results()
        wanted = [key for key in held if key in self._pending]
        return {key for key in wanted if held[key].is_meta or is_unwritten(held[key])}

    def results(self) -> dict[int, Tensor]:
        """Return what the module holds, by the id of its own tensor."""
        held = [(tensor, tensors.get(name)) for _, tensors, name, tensor in self._places]
        return {id(tensor): found for tensor, found in held if found is not None}

    def __exit__(self, *error: object) -> None:
        for holder, tensors, attribute, tensor in self._places:
            put(holder, tensors, attribute, tensor)


def put(holder: nn.Module, tensors: dict[str, Any], attribute: str, tensor: Tensor) -> None:
    """Let a module hold a tensor, past the checks of `setattr`."""
    tensors[attribute] = tensor
    if isinstance(holder, nn.RNNBase) and isinstance(tensor, nn.Parameter):
        setattr(holder, attribute, tensor)  # It keeps a list of its weights as well.


# --- tensors without values -----------------------------------------------------------------------


def mark_unwritten(tensor: Tensor) -> None:
    """Fill a new tensor with what no initialization writes."""
    if _may_be_nan(tensor):
        tensor.fill_(torch.nan)
    else:
        tensor.view(-1).view(torch.uint8).fill_(_UNWRITTEN_BYTE)


def is_unwritten(tensor: Tensor) -> bool:
    """Whether a parameter has an element that was not written, or nothing of a buffer was."""
    if tensor.numel() == 0:
        return False
    values = tensor.detach()
    if not _may_be_nan(tensor):
        if not values.is_contiguous():
            return False  # Another tensor than the one that was marked.
        return bool((values.view(-1).view(torch.uint8) == _UNWRITTEN_BYTE).all())
    if not values.sum().isnan():
        return False  # Needs no memory; else it may also be the sum of infinities.
    unwritten = values.isnan()
    return bool(unwritten.any() if isinstance(tensor, nn.Parameter) else unwritten.all())


def _may_be_nan(tensor: Tensor) -> bool:
    is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return is_number and tensor.dtype.itemsize > 1
