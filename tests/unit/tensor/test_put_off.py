"""Square roots of lists are computed where they are used, with the results of computing at once."""

# ruff: noqa: SLF001 - lists are what torch calls _foreach_*

from __future__ import annotations

import typing

import pytest
import torch
from torch import Tensor, nn

from shardkit import ShardedTensorError, fully_shard
from shardkit._tensor.ops import put_off
from shardkit.backends.recording import recording_mesh

if typing.TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardkit._tensor.sharded import ShardedTensor

SIZES = [(64, 33), (33,), (5, 7), (1,), (128, 128), (3,)]


def sharded_list(seed: int, *, rank: int = 1) -> list[ShardedTensor]:
    """Return parameters of two buckets: state made like those of each lies end to end."""
    mesh, _ = recording_mesh((2,), rank=rank)
    torch.manual_seed(seed)
    modules = [nn.Linear(1, 1), nn.Linear(2, 2)]
    for module in modules:
        for i, size in enumerate(SIZES):
            module.register_parameter(f"p{i}", nn.Parameter(torch.rand(size) + 0.5))
        fully_shard(module, mesh)
    return [p.detach() for module in modules for p in module.parameters()]  # type: ignore[misc]


@pytest.fixture(params=[7, 64, 1 << 17])
def _part_numel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(put_off, "PART_NUMEL", request.param)
    yield
    assert not put_off._open, "roots are still open"


def locals_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.to_local().clone() for t in tensors]  # type: ignore[attr-defined]


def state_of(params: list[ShardedTensor], seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    state = [torch.zeros_like(p) for p in params]
    for tensor in state:
        tensor.to_local().uniform_(0.1, 1)  # type: ignore[attr-defined]
    return state


def is_open(tensors: Sequence[Tensor]) -> bool:
    return all(typing.cast("ShardedTensor", t).put_off is not None for t in tensors)


@pytest.mark.usefixtures("_part_numel")
class TestResults:
    def test_an_update_is_bitwise_that_of_each_piece(self) -> None:
        params = sharded_list(0)
        avg, square = state_of(params, 1), state_of(params, 2)
        expected = []
        for p, m, v in zip(*map(locals_of, (params, avg, square)), strict=True):
            expected.append(p.addcdiv_(m, v.sqrt().div_(0.7).add_(1e-8), value=-0.25))

        denominator = torch._foreach_sqrt(square)
        torch._foreach_div_(denominator, [0.7] * len(params))
        torch._foreach_add_(denominator, 1e-8)
        assert is_open(denominator)
        torch._foreach_addcdiv_(params, avg, denominator, [-0.25] * len(params))

        assert is_open(denominator)
        torch.testing.assert_close(locals_of(params), expected, rtol=0, atol=0)

    def test_the_roots_can_be_read_afterwards(self) -> None:
        params = sharded_list(0)
        square = state_of(params, 2)
        expected = [v.sqrt() * 2 for v in locals_of(square)]
        roots = torch._foreach_sqrt(square)
        torch._foreach_mul_(roots, 2.0)
        torch._foreach_mul_(params, roots)
        torch.testing.assert_close(locals_of(roots), expected, rtol=0, atol=0)
        assert not is_open(roots)

    def test_used_twice(self) -> None:
        params = sharded_list(0)
        square = state_of(params, 2)
        expected = [
            p + v.sqrt() + v.sqrt() * v.sqrt()
            for p, v in zip(*map(locals_of, (params, square)), strict=True)
        ]
        roots = torch._foreach_sqrt(square)
        torch._foreach_add_(params, roots)
        torch._foreach_addcmul_(params, roots, roots)
        torch.testing.assert_close(locals_of(params), expected)

    def test_a_write_to_what_they_are_computed_from_comes_after_them(self) -> None:
        params = sharded_list(0)
        square = state_of(params, 2)
        expected = [v.sqrt() for v in locals_of(square)]
        writes = (
            lambda: torch._foreach_mul_(square, 0.0),
            lambda: square[0].fill_(3.0),
            lambda: torch._foreach_mul_(square[:3], 2.0),
            lambda: torch._foreach_copy_(square, params),
            lambda: torch._foreach_addcmul_(square, roots, roots),
        )
        for write in writes:
            square = state_of(params, 2)
            roots = torch._foreach_sqrt(square)
            write()
            torch.testing.assert_close(locals_of(roots), expected, rtol=0, atol=0)

    def test_changed_by_tensors_they_are_computed_first(self) -> None:
        params = sharded_list(0)
        square = state_of(params, 2)
        expected = [v.sqrt() / p for v, p in zip(*map(locals_of, (square, params)), strict=True)]
        roots = torch._foreach_sqrt(square)
        torch._foreach_div_(roots, params)
        torch.testing.assert_close(locals_of(roots), expected, rtol=0, atol=0)

    def test_numbers_that_differ_within_a_bucket(self) -> None:
        params = sharded_list(0)
        square = state_of(params, 2)
        numbers = [float(i + 1) for i in range(len(params))]
        expected = [v.sqrt() * n for v, n in zip(locals_of(square), numbers, strict=True)]
        roots = torch._foreach_sqrt(square)
        torch._foreach_mul_(roots, numbers)
        torch.testing.assert_close(locals_of(roots), expected, rtol=0, atol=0)

    def test_numbers_that_differ_between_buckets(self) -> None:
        params = sharded_list(0)
        square = state_of(params, 2)
        half = len(params) // 2
        numbers = [3.0] * half + [7.0] * half
        expected = [
            p + v.sqrt() * n
            for p, v, n in zip(locals_of(params), locals_of(square), numbers, strict=True)
        ]
        roots = torch._foreach_sqrt(square)
        torch._foreach_mul_(roots, numbers)
        assert is_open(roots)
        torch._foreach_add_(params, roots)
        torch.testing.assert_close(locals_of(params), expected)

    @pytest.mark.parametrize("picked", [slice(4, 9), slice(9)])
    def test_a_part_of_the_list(self, picked: slice) -> None:
        params = sharded_list(0)
        square = state_of(params, 2)
        expected = [v.sqrt() for v in locals_of(square)]
        expected[picked] = [root + 1 for root in expected[picked]]
        roots = torch._foreach_sqrt(square)
        torch._foreach_add_(roots[picked], 1.0)
        torch.testing.assert_close(locals_of(roots), expected, rtol=0, atol=0)


def test_a_write_behind_the_back_is_an_error() -> None:
    params = sharded_list(0)
    square = state_of(params, 2)
    roots = torch._foreach_sqrt(square)
    square[0].to_local().mul_(2)  # type: ignore[attr-defined]
    with pytest.raises(ShardedTensorError, match=r"changed in the meantime by way of to_local"):
        torch._foreach_add_(params, roots)


def test_an_update_takes_memory_of_a_part_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(put_off, "PART_NUMEL", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    made: list[int] = []
    empty_like = torch.empty_like

    def spy(like: Tensor) -> Tensor:
        made.append(like.numel())
        return empty_like(like)

    monkeypatch.setattr(torch, "empty_like", spy)
    params = sharded_list(0)
    square = state_of(params, 2)
    roots = torch._foreach_sqrt(square)
    torch._foreach_add_(params, roots)
    assert is_open(roots)
    assert max(made) == 100


def test_roots_that_nobody_uses_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: typing.Any) -> None:
        pytest.fail("computed")

    monkeypatch.setattr(put_off.PutOff, "parts", fail)
    params = sharded_list(0)
    roots = torch._foreach_sqrt(state_of(params, 2))
    del roots
    assert not put_off._open
    torch._foreach_zero_(params)


@pytest.mark.parametrize("limit", [1, 3, 10, 100])
def test_batches_hold_every_run_once(limit: int) -> None:
    numels = [4, 1, 25, 10, 2]
    found = list(put_off.batches(numels, limit))
    assert [index for batch in found for index in batch] == list(range(len(numels)))
    for batch in found:
        assert len(batch) == 1 or sum(numels[index] for index in batch) <= limit
    assert len(found) == {1: 5, 3: 5, 10: 4, 100: 1}[limit]


class TestOtherLists:
    """Where every run is one tensor nothing else would notice that a list is another one."""

    def vectors(self, *values: float) -> list[ShardedTensor]:
        mesh, _ = recording_mesh((1,))
        layers = [fully_shard(nn.Linear(1, 1, bias=False), mesh) for _ in values]
        tensors = [layer.weight.detach() for layer in layers]
        for tensor, value in zip(tensors, values, strict=True):
            tensor.to_local().fill_(value)
        return tensors

    def numbers(self, tensors: Sequence[Tensor]) -> list[float]:
        return [tensor.to_local().item() for tensor in tensors]  # type: ignore[attr-defined]

    def test_a_part(self) -> None:
        x, roots = self.vectors(0, 0), torch._foreach_sqrt(self.vectors(4, 16))
        torch._foreach_add_([x[1]], [roots[1]])
        assert self.numbers(x) == [0, 4]

    def test_another_order(self) -> None:
        x, roots = self.vectors(0, 0), torch._foreach_sqrt(self.vectors(4, 16))
        torch._foreach_add_([x[1], x[0]], [roots[1], roots[0]])
        assert self.numbers(x) == [2, 4]

    def test_of_two_lists(self) -> None:
        x = self.vectors(0, 0)
        roots, others = (torch._foreach_sqrt(self.vectors(*v)) for v in ((4, 16), (9, 100)))
        torch._foreach_add_(x, [roots[0], others[1]])
        assert self.numbers(x) == [2, 10]

    def test_changed_one_by_one(self) -> None:
        roots = torch._foreach_sqrt(self.vectors(4, 16))
        for root in roots:
            torch._foreach_add_([root], 1.0)
        assert self.numbers(roots) == [3, 5]

    def test_a_number_in_a_tensor_is_the_one_of_now(self) -> None:
        roots = torch._foreach_sqrt(self.vectors(4, 16))
        factor = torch.tensor(2.0)
        torch._foreach_mul_(roots, factor)
        factor.fill_(100)
        assert self.numbers(roots) == [4, 8]
