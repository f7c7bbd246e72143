"""What must come before what in a traced graph, and when it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch_xla
import torch_xla.core.xla_model as xm

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class GraphOrder:
    """The part of `Region` that both modes share.

    Attributes:
        device: Device of the tensors.
        drawing: Context of random numbers; see `Region`.
        gathers_wait: Order of gathers; see `Region`.
    """

    device: torch.device
    gathers_wait = True

    def __init__(self) -> None:
        self._progress: Tensor | None = None
        self.drawing: Any = None

    def progress(self, tensor: Tensor | None) -> None:
        """See `Region`."""
        self._progress = None if tensor is None else tensor.detach()

    def after_progress(self, parts: list[Tensor]) -> list[Tensor]:
        """See `Region`."""
        if self._progress is None:
            return parts
        copies = [part.clone() for part in parts]
        xm.optimization_barrier_([*copies, self._progress.clone()])
        return copies

    def forget_collectives(self) -> None:
        """See `Region`."""
        torch_xla._XLAC._set_all_reduce_token(str(self.device), None)
