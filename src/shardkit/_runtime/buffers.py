"""Buffers of modules in a traced forward: what one rank writes to them, averaged over the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shardkit import _compat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.backends.traced import Region


class RegionBuffers:
    """Lets modules hold what one rank has of their buffers while a root's forward runs."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._held: list[tuple[nn.Module, str, Tensor, Tensor, int]] = []

    def enter(self, module: nn.Module) -> None:
        """Let modules hold what one rank has of their buffers: what they write is a rank's."""
        entered: dict[int, Tensor] = {}
        for child, name, buffer in buffers_of(module):
            if id(buffer) not in entered:
                entered[id(buffer)] = self._region.enter_shared(buffer.detach())
            local = entered[id(buffer)]
            version = _compat.version_of(local)
            self._held.append((child, name, buffer, local, version))
            child._buffers[name] = local  # noqa: SLF001 - past the checks of `setattr`

    @torch.no_grad()
    def average(self) -> None:
        """Write back what forwards have written to buffers: running statistics, counters."""
        done: set[int] = set()
        for child, _, buffer, local, version in self._held:
            if was_written(child, local, version) and id(buffer) not in done:
                done.add(id(buffer))
                buffer.copy_(self._region.leave_shared(self._region.agree(local)))

    def restore(self) -> None:
        """Let modules hold their own buffers again."""
        for child, name, buffer, local, _ in self._held:
            if child._buffers.get(name) is local:  # noqa: SLF001
                child._buffers[name] = buffer  # noqa: SLF001
        self._held.clear()


def buffers_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield the buffers of a module and those in it, by who holds them and as what."""
    for child in module.modules():
        for name, buffer in child._buffers.items():  # noqa: SLF001 - tied ones as well
            if buffer is not None:
                yield child, name, buffer


def was_written(module: nn.Module, buffer: Tensor, version: int) -> bool:
    """Return whether a module wrote to its buffer, which had this version before."""
    # Kernels of batch normalization do not raise versions.
    is_norm = isinstance(module, nn.modules.batchnorm._NormBase)  # noqa: SLF001
    return _compat.version_of(buffer) != version or (is_norm and module.training)
