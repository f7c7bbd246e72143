"""The arithmetic of a reduction on an accelerator, on tensors of the host: no card, no ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardkit.backends import accelerator
from shardkit.backends.accelerator import AcceleratorAxis, Sums
from shardkit.backends.base import Reduction


def axis_of(size: int) -> AcceleratorAxis:
    axis = AcceleratorAxis.__new__(AcceleratorAxis)
    axis.size, axis.rank, axis.averages = size, 0, True
    return axis


@pytest.mark.parametrize("size", [2, 3, 8, 24])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_average_is_not_biased(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, size: int
) -> None:
    """NCCL multiplies by 1/n in the dtype of the data: 1/24 in bf16 is 0.2 % too large."""
    torch.manual_seed(0)
    send = torch.rand(4096, dtype=dtype).repeat(size)

    def reduce(into: Tensor, data: Tensor, *, op: dist.ReduceOp, group: object) -> None:
        """Do what NCCL does, where all ranks send the same."""
        del group
        factor = torch.tensor(1 / size if op == dist.ReduceOp.AVG else 1.0, dtype=data.dtype)
        into.copy_((data[: into.numel()] * factor).float() * size)

    monkeypatch.setattr(accelerator, "reduce_scatter_single", reduce)
    axis = axis_of(size)
    axis.reduce_group = None  # type: ignore[assignment]
    reduction = Reduction(
        send=send,
        room=lambda: pytest.fail("nothing is received"),
        out_numel=4096,
        out_dtype=torch.float32,
        scale=1 / size,
        shard_axis=axis,
        replicate_axis=None,
        carry=None,
    )
    expected = send[:4096].float().mean()
    sums, out = Sums(reduction), torch.empty(4096)
    sums.finish(sums.reduce_scatter(None), out)
    assert abs(out.mean() / expected - 1) < 2e-4


def reduce_alone(send: Tensor, carry: Tensor, *, scale: float, replicate: bool) -> Tensor:
    """Return what the only rank of its axes gets."""
    reduction = Reduction(
        send=send,
        room=lambda: pytest.fail("nothing is received"),
        out_numel=send.numel(),
        out_dtype=torch.float32,
        scale=scale,
        shard_axis=axis_of(1),
        replicate_axis=axis_of(1) if replicate else None,
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
