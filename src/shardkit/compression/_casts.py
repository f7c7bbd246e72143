"""Gradients that travel in 16 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shardkit._custom_comm import GradientPiece, SumAxis


def bf16_compress(
    tensor: Tensor, pieces: Sequence[GradientPiece], axis: SumAxis, unit: float
) -> None:
    """Sum gradients over the replicate axis in bf16: an `AllReduce`.

    As torch's ``bf16_compress_hook``. The engine adds in bf16, too: each of its additions rounds to
    8 bits. The reduce-scatter stays in `reduce_dtype`, in fp32 say; to have both in bf16, choose
    that as `reduce_dtype` instead.

    Args:
        tensor: Gradients; see `AllReduce`.
        pieces: Parameters in it; not looked at.
        axis: The replicas.
        unit: The sum times this is the gradient, and is what travels.

    Cost: one all-reduce of 2 bytes per element; memory for that.
    """
    _all_reduce_as(tensor, torch.bfloat16, axis, unit)


def fp16_compress(
    tensor: Tensor, pieces: Sequence[GradientPiece], axis: SumAxis, unit: float
) -> None:
    """Sum gradients over the replicate axis in fp16: an `AllReduce`.

    As torch's ``fp16_compress_hook``. What travels is divided by the number of ranks before, so
    that averages up to 65504 do not overflow. Parts below 6e-8 become 0, so scale the loss. The
    engine adds in fp16.

    Args:
        tensor: Gradients; see `AllReduce`.
        pieces: Parameters in it; not looked at.
        axis: The replicas.
        unit: The sum times this is the gradient, and is what travels.

    Cost: one all-reduce of 2 bytes per element; memory for that.
    """
    _all_reduce_as(tensor, torch.float16, axis, unit)


def _all_reduce_as(tensor: Tensor, dtype: torch.dtype, axis: SumAxis, unit: float) -> None:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if real.dtype.itemsize <= dtype.itemsize:
        axis.all_reduce(real, "sum")
        return
    wire = (real * unit).to(dtype)
    axis.all_reduce(wire, "sum")
    real.copy_(wire)
    real.div_(unit)
