"""Operators on lists run on whole buckets, with the results of running on each piece."""

# ruff: noqa: SLF001 - operators on lists are what torch calls _foreach_*

from __future__ import annotations

import typing

import pytest
import torch
from torch import Tensor, nn

from recording import recording_mesh
from shardkit import ShardedTensor, fully_shard

if typing.TYPE_CHECKING:
    from collections.abc import Sequence

SIZES = [(64, 33), (33,), (5, 7), (1,), (128, 128), (3,)]


@pytest.fixture(params=[0, 1], ids=["rank 0", "rank 1"])
def params(request: pytest.FixtureRequest) -> list[Tensor]:
    """Return parameters of two buckets: state made like those of each lies end to end."""
    mesh, _ = recording_mesh((2,), rank=request.param)
    torch.manual_seed(0)
    modules = [nn.Linear(1, 1), nn.Linear(2, 2)]
    for module in modules:
        for i, size in enumerate(SIZES):
            module.register_parameter(f"p{i}", nn.Parameter(torch.rand(size) + 0.5))
        fully_shard(module, mesh)
    return [p.detach() for module in modules for p in module.parameters()]


def state_of(params: Sequence[Tensor], seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    state = [torch.zeros_like(p) for p in params]
    for tensor in state:
        piece_of(tensor).uniform_(0.1, 1)
    return state


def piece_of(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, ShardedTensor)
    return tensor.to_local()


def pieces_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [piece_of(tensor).clone() for tensor in tensors]


def assert_equal(tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    torch.testing.assert_close(pieces_of(tensors), list(expected), rtol=0, atol=0)


def test_an_update_is_bitwise_that_of_each_piece(params: list[Tensor]) -> None:
    avg, square = state_of(params, 1), state_of(params, 2)
    expected = [
        p.addcdiv_(m, v.sqrt().div_(0.7).add_(1e-8), value=-0.25)
        for p, m, v in zip(*map(pieces_of, (params, avg, square)), strict=True)
    ]
    denominator = torch._foreach_sqrt(square)
    torch._foreach_div_(denominator, [0.7] * len(params))
    torch._foreach_add_(denominator, 1e-8)
    torch._foreach_addcdiv_(params, avg, denominator, [-0.25] * len(params))
    assert_equal(params, expected)


@pytest.mark.parametrize("per_bucket", [True, False])
def test_numbers_that_differ(params: list[Tensor], *, per_bucket: bool) -> None:
    numbers = [float(i // len(SIZES) if per_bucket else i) for i in range(len(params))]
    expected = [p * n for p, n in zip(pieces_of(params), numbers, strict=True)]
    torch._foreach_mul_(params, numbers)
    assert_equal(params, expected)


@pytest.mark.parametrize("per_bucket", [True, False])
def test_numbers_in_one_tensor(params: list[Tensor], *, per_bucket: bool) -> None:
    """Optimizers that are compiled pass the sizes of their steps in this way."""
    numbers = [float(i // len(SIZES) if per_bucket else i) for i in range(len(params))]
    up, down = state_of(params, 1), state_of(params, 2)
    expected = [
        p + n * u / d
        for p, n, u, d in zip(pieces_of(params), numbers, *map(pieces_of, (up, down)), strict=True)
    ]
    sums = torch._foreach_addcdiv(params, up, down, torch.tensor(numbers))
    torch._foreach_addcdiv_(params, up, down, torch.tensor(numbers))
    assert_equal(params, pieces_of(sums))
    torch.testing.assert_close(pieces_of(params), expected)


@pytest.mark.parametrize("picked", [slice(4, 9), slice(5), slice(9), slice(None, None, -1)])
def test_a_part_of_the_list_or_another_order(params: list[Tensor], picked: slice) -> None:
    state = state_of(params, 1)
    expected = pieces_of(params)
    expected[picked] = [
        p + s for p, s in zip(expected[picked], pieces_of(state)[picked], strict=True)
    ]
    torch._foreach_add_(params[picked], state[picked])
    assert_equal(params, expected)


def test_a_list_of_tensors_that_do_not_lie_end_to_end(params: list[Tensor]) -> None:
    first, second = state_of(params, 1), state_of(params, 2)
    mixed = [pair[i % 2] for i, pair in enumerate(zip(first, second, strict=True))]
    expected = [p + s for p, s in zip(*map(pieces_of, (params, mixed)), strict=True)]
    torch._foreach_add_(params, mixed)
    assert_equal(params, expected)


@pytest.mark.parametrize("rank", [0, 1])
def test_results_have_the_dtype_of_each_entry(rank: int) -> None:
    """Also where this rank holds nothing of an entry."""
    mesh, _ = recording_mesh((2,), rank=rank)
    lists = []
    for dtypes in ([torch.float32, torch.bfloat16], [torch.float64, torch.bfloat16]):
        modules = [nn.Linear(9, 9), nn.Linear(1, 1, bias=False)]
        for module, dtype in zip(modules, dtypes, strict=True):
            fully_shard(module.to(dtype), mesh)
        lists.append([p.detach() for module in modules for p in module.parameters()])
    first, other = lists
    found = torch._foreach_mul(first, 2.0), torch._foreach_mul(other, other)
    for items, results in zip((first, other), found, strict=True):
        for item, result in zip(items, results, strict=True):
            assert result.dtype == piece_of(result).dtype == item.dtype
            assert torch.equal(
                piece_of(result), piece_of(item) * (2 if items is first else piece_of(item))
            )
