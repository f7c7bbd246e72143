"""Norms of lists of sharded tensors, by playing all ranks of a mesh one after the other."""

from __future__ import annotations

import math
import typing

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from recording import RecordingAxis, recording_mesh
from shardkit import fully_shard
from shardkit._tensor.ops.reductions import sharded_norms

if typing.TYPE_CHECKING:
    from collections.abc import Sequence

ORDERS = [1.0, 2.0, math.inf, -math.inf, 0.0, 3.0]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


class PlayedAxis(RecordingAxis):
    """Sums up what all ranks gave in a first round, and answers with it in a second."""

    def __init__(self, size: int, rank: int, given: list[Tensor]) -> None:
        super().__init__([], size, rank)
        self.given = given

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        if len(self.given) < self.size:
            self.given.append(tensor.clone())
            return
        stacked = torch.stack(self.given)
        reduced = {"sum": stacked.sum, "max": stacked.amax, "min": stacked.amin}[op](0)
        tensor.copy_(reduced)


class Holder(nn.Module):
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.held = nn.ParameterList(nn.Parameter(tensor.clone()) for tensor in tensors)

    def forward(self) -> None:
        """Make it a module to shard."""


class ListsOfIndices(TorchDispatchMode):
    """Refuses to index by a list, which is copied to the device and waited for."""

    def __torch_dispatch__(
        self, func: typing.Any, types: typing.Any, args: typing.Any = (), kwargs: typing.Any = None
    ) -> typing.Any:
        del types
        assert "index" not in func._schema.name, func  # noqa: SLF001 - no public way to the name
        return func(*args, **(kwargs or {}))


def norms_of(
    tensors: Sequence[Tensor],
    order: float,
    *,
    size: int,
    plain: Sequence[int] = (),
    dtype: torch.dtype | None = None,
) -> list[list[Tensor]]:
    """Return the norms of a list on each rank; tensors at `plain` are not sharded."""
    given: list[Tensor] = []
    found = []
    for rank in (*range(size), *range(size)):
        mesh, _ = recording_mesh((size,), rank=rank)
        mesh.backend._axes = [PlayedAxis(size, rank, given)]  # noqa: SLF001 - what the mesh asks
        module = Holder(tensors)
        fully_shard(module, mesh)
        params: list[Tensor] = [param.detach() for param in module.parameters()]
        mixed = [tensors[i] if i in plain else param for i, param in enumerate(params)]
        with ListsOfIndices():
            found.append(sharded_norms(mixed, order, dtype))
    return found[size:]


def filled(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return numbers of which none is zero but every seventh."""
    numbers = torch.arange(math.prod(shape)).view(*shape) * 3 % 7
    return (numbers * torch.where(numbers % 2 == 0, 1, -1)).to(dtype)


def compare(found: Tensor, whole: Tensor, order: float, dtype: torch.dtype) -> None:
    # Half as exact as the least exact dtype: torch rounds powers in it, shardkit sums them in fp64.
    expected = torch.linalg.vector_norm(whole.double(), order).to(dtype)
    assert found.dtype == dtype
    assert found.shape == ()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("order", ORDERS)
@hypothesis.settings(max_examples=12)
@given(
    sizes=st.lists(st.sampled_from([1, 2, 3, 5, 33]), min_size=1, max_size=5),
    dtypes=st.data(),
    size=st.sampled_from([1, 2, 5]),
)
def test_norms_are_those_of_the_whole_tensors(
    order: float, sizes: list[int], dtypes: st.DataObject, size: int
) -> None:
    """Most tensors are so small that most ranks own nothing of them."""
    # One that is not narrow comes first, as the sums are as wide as the first.
    kinds = [dtypes.draw(st.sampled_from(DTYPES[: 2 if i == 0 else 4])) for i in range(len(sizes))]
    tensors = [filled((n,), kind) for n, kind in zip(sizes, kinds, strict=True)]
    for found in norms_of(tensors, order, size=size):
        for norm, whole in zip(found, tensors, strict=True):
            compare(norm, whole, order, whole.dtype)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", DTYPES)
def test_norms_in_a_wider_dtype(order: float, kind: torch.dtype) -> None:
    tensors = [filled((n,), kind) for n in (2, 33, 3)]
    for found in norms_of(tensors, order, size=3, dtype=torch.float64):
        for norm, whole in zip(found, tensors, strict=True):
            compare(norm, whole, order, torch.float64)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("plain", [[0], [1], [0, 2]])
def test_plain_tensors_between_sharded_ones_are_not_summed_over_ranks(
    order: float, plain: list[int]
) -> None:
    tensors = [filled((n,), torch.float32) for n in (9, 3, 5)]
    for found in norms_of(tensors, order, size=4, plain=plain):
        for norm, whole in zip(found, tensors, strict=True):
            compare(norm, whole, order, torch.float32)


@pytest.mark.parametrize("order", [-1.0, *ORDERS])
def test_all_ranks_but_one_own_nothing(order: float) -> None:
    tensors = [torch.tensor([-4.0])]
    for found in norms_of(tensors, order, size=8):
        assert found[0] == (1 if order == 0 else 4)


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_a_narrow_tensor_before_a_wide_one(order: float) -> None:
    tensors = [filled((3,), torch.bfloat16), filled((5,), torch.float64)]
    norms_of(tensors, order, size=1)


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf, 3.0])
@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16, torch.complex64])
def test_real_and_complex_tensors_in_one_list(first: torch.dtype, order: float) -> None:
    norms_of([filled((3,), first), filled((4,), torch.complex64)], order, size=1)
