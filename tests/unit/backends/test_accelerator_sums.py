"""The arithmetic of a reduction on an accelerator, on tensors of the host: no card, no ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardkit.backends.accelerator import AcceleratorAxis, Sums
from shardkit.backends.base import Reduction


def axis_of_one() -> AcceleratorAxis:
    axis = AcceleratorAxis.__new__(AcceleratorAxis)
    axis.size, axis.rank, axis.averages = 1, 0, True
    return axis


def reduce_alone(send: Tensor, carry: Tensor, *, scale: float, replicate: bool) -> Tensor:
    """Return what the only rank of its axes gets."""
    reduction = Reduction(
        send=send,
        room=lambda: pytest.fail("nothing is received"),
        out_numel=send.numel(),
        out_dtype=torch.float32,
        scale=scale,
        shard_axis=axis_of_one(),
        replicate_axis=axis_of_one() if replicate else None,
        carry=carry,
    )
    sums = Sums(reduction)
    if replicate:
        sums.replicate_axis = reduction.replicate_axis  # As if there were other ranks on it.
    total = sums.reduce_scatter(None)
    assert total.dtype == (send.dtype if replicate else torch.float32), "on the wire, or kept"
    out = torch.empty(send.numel())
    sums.finish(total, out)
    return out


@pytest.mark.parametrize("replicate", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 1 / 64])
def test_sums_from_before_count_as_much_as_those_of_now(
    dtype: torch.dtype, scale: float, *, replicate: bool
) -> None:
    carry = torch.tensor([1000.0, -3.0, 0.0, 0.125])
    send = torch.tensor([24.0, 2.0, 5.0, 0.5])
    expected = (carry + send) * scale
    found = reduce_alone(send.to(dtype), carry.clone(), scale=scale, replicate=replicate)
    assert torch.equal(found, expected)  # Few bits: nothing is rounded.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_that_stay_are_not_rounded(dtype: torch.dtype) -> None:
    carry = torch.full((4,), 4096.0)
    found = reduce_alone(torch.ones(4, dtype=dtype), carry, scale=1.0, replicate=False)
    assert torch.equal(found, torch.full((4,), 4097.0))
