"""Gradients that no backward has synced, and that a call averages."""

from __future__ import annotations

import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parity import Pair, Ranks, Run, on_meshes
from reference import full_grads, make_mesh
from shardkit import StateError, fully_shard, summon_full_params
from workers import on_ranks

SETTERS = ["set_requires_gradient_sync", "set_requires_all_reduce"]


def end_steps_by_a_call(ranks: Ranks, setter: str) -> None:
    pair = Pair(ranks, "gpt")
    getattr(pair.sharded, setter)(False)
    for num_micro_batches in (2, 1):
        for _ in range(num_micro_batches):
            pair.backward(pair.draw(), scale=1 / num_micro_batches)
        pair.sharded.synchronize_gradients()
        assert pair.sharded.memory_stats()["unsynced_grad_nbytes"] == 0
        pair.assert_equal_gradients()
        pair.update()
        pair.sharded.zero_grad()
        pair.plain.zero_grad()
    pair.assert_equal()


@pytest.mark.parametrize("setter", SETTERS)
@on_meshes((2,), (2, 2))
def test_steps_that_a_call_ends_equal_plain_steps(run: Run, setter: str) -> None:
    run(end_steps_by_a_call, setter)


def add_to_synced_gradients(ranks: Ranks) -> None:
    pair = Pair(ranks, "mlp")
    pair.backward(pair.draw())  # Averaged in backward.
    with pair.sharded.no_sync():
        pair.backward(pair.draw())
    pair.sharded.synchronize_gradients()
    pair.assert_equal_gradients()
    pair.sharded.synchronize_gradients()  # Nothing waits.
    pair.assert_equal_gradients()
    pair.backward(pair.draw())
    pair.assert_equal_gradients()


@on_meshes((2,), (2, 2))
def test_the_call_adds_to_gradients_that_are_there_once(run: Run) -> None:
    run(add_to_synced_gradients)


class Experts(nn.Module):
    """Parameters of one group, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterList(nn.Parameter(torch.zeros(5)) for _ in range(3))

    def forward(self, expert: int) -> Tensor:
        return self.experts[expert].sum()


def grads_of(model: nn.Module) -> list[list[float] | None]:
    return [None if grad is None else grad.tolist() for grad in full_grads(model).values()]


@on_ranks(2)
def test_ranks_that_used_different_parameters_average_the_right_ones() -> None:
    """A rank that did not use a parameter adds zero to its mean; nobody used the last one."""
    model = fully_shard(Experts())
    with model.no_sync():
        model(dist.get_rank()).backward()
    model.synchronize_gradients()
    assert grads_of(model) == [[0.5] * 5, [0.5] * 5, None]


@on_ranks(2)
def test_gradients_of_layers_that_were_frozen_since_are_averaged() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    nn.init.ones_(model[0].weight)
    for layer in model:
        fully_shard(layer)
    sharded = fully_shard(model)
    with sharded.no_sync():
        sharded(torch.full((1, 4), 1.0 + dist.get_rank())).sum().backward()
    model[1].weight.requires_grad_(False)
    sharded.synchronize_gradients()
    assert model[1].weight.grad.full_tensor().tolist() == [[6.0] * 4]


@on_ranks(2)
def test_reductions_that_a_later_backward_was_to_wait_for_are_waited_for() -> None:
    model = fully_shard(nn.Linear(4, 1, bias=False))
    model.set_is_last_backward(False)
    model(torch.full((1, 4), 1.0 + dist.get_rank())).sum().backward()
    assert model.weight.grad is None
    model.synchronize_gradients()
    assert model.weight.grad.full_tensor().tolist() == [[1.5] * 4]


@on_ranks(4)
def test_partial_sums_of_a_reduction_that_was_not_waited_for_are_averaged() -> None:
    model = fully_shard(nn.Linear(4, 1, bias=False), mesh=make_mesh((2, 2)))
    model.set_is_last_backward(False)
    model.set_requires_all_reduce(False)
    model(torch.full((1, 4), 1.0 + dist.get_rank())).sum().backward()
    model.synchronize_gradients()
    assert model.weight.grad.full_tensor().tolist() == [[2.5] * 4]


@on_ranks(2)
def test_the_call_on_a_layer_leaves_other_layers_waiting() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    first, second = (fully_shard(layer) for layer in model)
    sharded = fully_shard(model)
    with sharded.no_sync():
        sharded(torch.ones(1, 4)).sum().backward()
    second.synchronize_gradients()
    assert second.weight.grad is not None
    assert first.weight.grad is None
    sharded.synchronize_gradients()
    assert first.weight.grad is not None


@on_ranks(4)
def test_settings_stay_as_they_are() -> None:
    model = fully_shard(nn.Linear(4, 1, bias=False), make_mesh((2, 2)))
    model.set_requires_gradient_sync(False)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        assert model.weight.grad is None
        model.synchronize_gradients()
        assert model.weight.grad.full_tensor().tolist() == [[1.0] * 4]
        model.zero_grad()


@on_ranks(1)
def test_one_rank_has_its_gradients_already() -> None:
    model = fully_shard(nn.Linear(4, 1, bias=False))
    model.synchronize_gradients()  # Before the first forward, too.
    with model.no_sync():
        model(torch.ones(1, 4)).sum().backward()
    model.synchronize_gradients()
    assert model.weight.grad.full_tensor().tolist() == [[1.0] * 4]


class CallsInForward(nn.Module):
    """Asks in its forward for gradients to be averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        typing.cast("typing.Any", self).synchronize_gradients()
        return x @ self.weight


@on_ranks(2)
def test_a_call_at_the_wrong_time_is_told() -> None:
    model = fully_shard(CallsInForward())
    with pytest.raises(StateError, match="inside of a forward or a backward"):
        model(torch.ones(2, 4))
    model = fully_shard(nn.Linear(4, 1))
    with model.no_sync():
        model(torch.ones(1, 4)).sum().backward()
    with (
        summon_full_params(model, writeback=False),
        pytest.raises(StateError, match=r"synchronize_gradients\(\) was called inside of"),
    ):
        model.synchronize_gradients()
    model.synchronize_gradients()
    assert model.weight.grad is not None
