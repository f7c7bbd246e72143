"""Gradients that are not finite: in which group, in which parameter, on which rank they began."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardkit._errors import NonFiniteGradientError, listed, listed_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shardkit._runtime.group import ParamGroup
    from shardkit.backends.base import AxisComm

_Key = tuple[str, str]  # A group's name and a parameter's.


class FiniteNotes:
    """Whether the unsharded gradients of this rank were finite, since it was last asked.

    The answers stay on the device, so that nobody waits for them.
    """

    def __init__(self) -> None:
        self._is_finite: dict[_Key, Tensor] = {}

    def note(self, group: str, parameter: str, grad: Tensor) -> None:
        """Note a gradient before it is averaged; backward comes to the last layers first."""
        key, is_finite = (group, parameter), _is_finite(grad)
        before = self._is_finite.get(key)
        self._is_finite[key] = is_finite if before is None else before & is_finite

    def take(self) -> list[_Key]:
        """Return groups and parameters that were not finite, in the order of backward; forget."""
        notes, self._is_finite = self._is_finite, {}
        return _selected(notes)


def check_gradients(
    groups: Sequence[ParamGroup], notes: FiniteNotes, axes: Sequence[AxisComm], rank: int
) -> None:
    """Raise, on every rank, if gradients of any rank are not finite.

    Args:
        groups: Groups of the gradients.
        notes: Notes about this rank's gradients before they were averaged; may be empty.
        axes: Every mesh axis in use.
        rank: Number of this rank.

    Raises:
        NonFiniteGradientError: On every rank.

    Cost: reads all gradients, waits for the device once; an exchange over each axis.
    """
    averaged: dict[_Key, Tensor] = {}
    for group in groups:
        for bucket in group.buckets:
            for entry in bucket.entries:
                if entry.param.grad is not None:
                    averaged[group.name, entry.name] = _is_finite(entry.param.grad)
    mine = (rank, notes.take(), _selected(averaged))
    found = {rank: mine}
    for axis in axes:
        if axis.size > 1:
            for part in axis.exchange(found):
                found.update(part)
    text = _describe([found[each] for each in sorted(found)])
    if text is not None:
        raise NonFiniteGradientError(text)


def _is_finite(grad: Any) -> Tensor:
    local: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
    return torch.isfinite(local.detach()).all()


def _selected(is_finite: dict[_Key, Tensor]) -> list[_Key]:
    """Return the keys of those that are not, with one transfer from the device."""
    if not is_finite:
        return []
    device = next(iter(is_finite.values())).device
    flags = torch.stack([flag.to(device) for flag in is_finite.values()]).tolist()
    return [key for key, flag in zip(is_finite, flags, strict=True) if not flag]


def _describe(found: Sequence[tuple[int, list[_Key], list[_Key]]]) -> str | None:
    """Return the error's text.

    Args:
        found: Findings by rank: its number, what was not finite before the average, and after it.
    """
    began = [(rank, local) for rank, local, _ in found if local]
    averaged = list(dict.fromkeys(key for _, _, keys in found for key in keys))
    if began:
        ranks = [
            f"on rank {rank} first in {_show(local[0])}, in {len(local)} parameters in all"
            for rank, local in began
        ]
        where = "; ".join(listed_lines(ranks, "and on {} more"))
        return (
            f"gradients are not finite before they are averaged: {where}. Backward comes to the "
            f"last layers first: look at what this layer computes there, and at that rank's batch."
        )
    if averaged:
        named = listed(averaged, _show)
        return (
            f"gradients are not finite after they were averaged: {named}. To be told on "
            f"which rank that begins, call set_watch(check_gradients=True) before the backward, or "
            f"set SHARDKIT_CHECK_GRADIENTS=1. If all ranks were finite before, the sum has "
            f"overflowed: choose a wider reduce_dtype."
        )
    return None


def _show(key: _Key) -> str:
    group, parameter = key
    return f"{parameter!r}" if group in ("", parameter) else f"{parameter!r} (group {group!r})"
