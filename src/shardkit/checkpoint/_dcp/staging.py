"""The copy of a state that is written in the background."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardkit._state.full import map_leaves
from shardkit._tensor.sharded import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

_ALIGNMENT = 64


class Staging:
    """Memory on the host for copies of a state's tensors.

    It is kept from one copy to the next: memory fresh from the system takes several times as long
    to be written as the copy itself. Training goes on while a copy is being written to the disk, so
    the peak is the same as if it were given back in between.
    """

    def __init__(self) -> None:
        """Take no memory yet."""
        self._buffer: Tensor | None = None

    def release(self) -> None:
        """Give the memory back to the system, once no copy is in it any more."""
        self._buffer = None

    @torch.no_grad()
    def copy(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state like this one whose tensors nobody else writes to.

        Values that are not tensors are those of the state. What the last copy holds is overwritten.

        Cost: one copy of what this rank holds.
        """
        tensors: dict[int, Tensor] = {}

        def note(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                tensors[id(leaf)] = memory_of(leaf)
            return leaf

        map_leaves(state, note)
        copies = self._copy_all(tensors)
        result: dict[str, Any] = map_leaves(
            state, lambda leaf: _like(leaf, copies[id(leaf)]) if id(leaf) in copies else leaf
        )
        return result

    def _copy_all(self, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        starts, total = {}, 0
        for key, tensor in tensors.items():
            if _can_be_staged(tensor):
                starts[key] = total
                total += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        on_accelerator = {t.device for t in tensors.values()} - {torch.device("cpu")}
        if self._buffer is None or self._buffer.numel() < total:
            self._buffer = None  # First: there is not room for both.
            self._buffer = _allocate(total, pinned=bool(on_accelerator))
        copies = {}
        for key, tensor in tensors.items():
            if key not in starts:
                copies[key] = tensor.detach().cpu().clone()
                continue
            memory = self._buffer[starts[key] : starts[key] + tensor.nbytes]
            copies[key] = memory.view(tensor.dtype).view(tensor.shape)
            copies[key].copy_(tensor, non_blocking=True)
        for device in on_accelerator:
            if device.type not in {"meta", "xla"}:  # XLA's copies are done when they return.
                torch.accelerator.synchronize(device)
        return copies


def _allocate(nbytes: int, *, pinned: bool) -> Tensor:
    if pinned and torch.accelerator.is_available():
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # So the first copy takes fewer page faults.
    return torch.frombuffer(memory, dtype=torch.uint8)


def memory_of(tensor: Any) -> Tensor:
    """Return what this rank holds of a tensor."""
    if isinstance(tensor, ShardedTensor):
        return tensor.local_piece.detach()
    if hasattr(tensor, "to_local"):
        local: Tensor = tensor.detach().to_local()
        return local
    detached: Tensor = tensor.detach()
    return detached


def _can_be_staged(tensor: Tensor) -> bool:
    plain = type(tensor) in {Tensor, torch.nn.Parameter, torch.nn.Buffer}
    return plain and tensor.layout is torch.strided and not tensor.is_quantized


def _like(tensor: Any, memory: Tensor) -> Any:
    """Return a tensor like another, of which this rank holds `memory`."""
    if isinstance(tensor, ShardedTensor):
        return ShardedTensor(memory, tensor.spec)
    if hasattr(tensor, "to_local"):
        return type(tensor).from_local(
            memory,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return memory
