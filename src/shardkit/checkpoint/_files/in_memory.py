"""A state dict in memory, read as a file of whole tensors is: by names and ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardkit._errors import CheckpointError
from shardkit.checkpoint._files.bytes_io import Source, TensorInfo

_MODEL = "model"


class StateInMemory(Source):
    """A state dict as a source.

    Args:
        state: Whole, plain tensors by name, on any device; or such a dict under ``"model"``.

    Raises:
        CheckpointError: It is no dict, or a tensor in it is not plain.
    """

    def __init__(self, state: Mapping[str, Any] | None) -> None:
        if not isinstance(state, Mapping):
            msg = (
                f"expected a file or a state dict of whole tensors, got {state!r}. Ranks that have "
                f"none may pass None or {{}} with broadcast_from_rank0=True; the first rank must "
                f"have it."
            )
            raise CheckpointError(msg)
        inner = state.get(_MODEL)
        if isinstance(inner, Mapping) and not any(isinstance(v, Tensor) for v in state.values()):
            state = inner
        self._tensors = {n: v for n, v in state.items() if isinstance(v, Tensor)}
        self.others: dict[str, Any] = {n: v for n, v in state.items() if not isinstance(v, Tensor)}
        self.infos, self.tied = {}, {}
        for name, tensor in self._tensors.items():
            if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta:
                kind = "on the meta device" if tensor.is_meta else f"a {type(tensor).__name__}"
                msg = (
                    f"{name!r} in the state dict is {kind}; expected whole, plain tensors. Pass a "
                    f"full state dict (get_model_state_dict with full_state_dict=True)."
                )
                raise CheckpointError(msg)
            self.infos[name] = TensorInfo(tuple(tensor.shape), tensor.dtype)
        self._flat: tuple[str, Tensor] | None = None

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the flattened tensor: 1-D, not copied if it can be."""
        if self._flat is None or self._flat[0] != name:  # Flattening may copy.
            self._flat = (name, self._tensors[name].detach().reshape(-1))
        return self._flat[1][start:stop]

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` from `start` on."""
        out.copy_(self.read(name, start, start + out.numel()))
