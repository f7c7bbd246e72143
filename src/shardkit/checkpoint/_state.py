"""State dicts of models and optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor without its values.

    Attributes:
        shape: Global shape.
        dtype: Its dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
