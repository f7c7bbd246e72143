"""Ranks that choose among the modules of a list: each runs others, as often as it likes."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reference import Differences, assert_within, make_mesh
from shardkit import DeviceMesh, fully_shard
from workers import Spawn, on_ranks

pytestmark = pytest.mark.helpers
TOLERANCE = 1e-12
WIDTH = 4

Visits = list[list[int]]  # For each use of the layer of experts: the experts that run, in order.
CHOICES: dict[str, tuple[Visits, Visits]] = {  # Of ranks with even and with odd numbers.
    "one, and all": ([[0, 1, 2]], [[0]]),
    "one twice": ([[0, 1, 2, 0]], [[2]]),
    "the layer runs twice": ([[0, 1, 2], [0]], [[0], [1]]),
    "all the second time": ([[0], [1]], [[2, 1, 0, 1], [0]]),
    "all in two parts": ([[0, 1, 2], [0, 1, 2]], [[0], [1, 2]]),
}


class Experts(nn.Module):
    """A model that runs experts as it is told, between layers that are groups of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.recompute: typing.Literal["reentrant", "not reentrant"] | None = None

    def forward(self, x: Tensor, visits: Visits) -> Tensor:
        x = self.first(x).tanh()
        for chosen in visits:
            if self.recompute is None:
                x = self.mix(x, chosen)
            else:
                is_reentrant = self.recompute == "reentrant"
                x = checkpoint(self.mix, x, chosen, use_reentrant=is_reentrant)
            x = self.middle(x).tanh()
        return self.last(x)

    def mix(self, x: Tensor, chosen: list[int]) -> Tensor:
        total = x
        for number in chosen:
            total = total + self.experts[number](x)
        return total.tanh()


def shard(model: typing.Any, mesh: DeviceMesh, **options: typing.Any) -> None:
    for each in ([*model.experts], model.first, model.middle, model.last, model):
        fully_shard(each, mesh, **options)


def train(choice: str, recompute: typing.Any, options: dict[str, typing.Any]) -> Differences:
    torch.manual_seed(0)
    plain, ranks = Experts().double(), dist.get_world_size()
    model: typing.Any = copy.deepcopy(plain)
    model.recompute = recompute
    shard(model, make_mesh((2, 2) if ranks == 4 else (ranks,)), **options)
    differences = Differences()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for _ in range(3):
        inputs = torch.randn(ranks, 2, WIDTH, dtype=torch.double)
        rank = dist.get_rank()
        model(inputs[rank], CHOICES[choice][rank % 2]).square().sum().backward()
        for number in range(ranks):
            plain(inputs[number], CHOICES[choice][number % 2]).square().sum().backward()
        for param in plain.parameters():
            assert param.grad is not None
            param.grad /= ranks
        differences.note_grads(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    differences.note_parameters(model, plain)
    assert model.memory_stats()["unsharded_nbytes"] == 0
    return differences


@pytest.mark.parametrize("recompute", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("choice", CHOICES)
@on_ranks(2)
def test_gradients_are_those_of_all_ranks(choice: str, recompute: str | None) -> None:
    found = train(choice, recompute, {})
    assert_within([found], grad=TOLERANCE, parameter=TOLERANCE)


@pytest.mark.parametrize("recompute", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize(
    "options", [{"reshard_after_forward": False}, {"reshard_after_forward": 1}]
)
@on_ranks(2)
def test_with_other_options(recompute: str | None, options: dict[str, typing.Any]) -> None:
    found = train("all the second time", recompute, options)
    assert_within([found], grad=TOLERANCE, parameter=TOLERANCE)


@pytest.mark.parametrize("recompute", [None, "reentrant", "not reentrant"])
@on_ranks(4)
def test_on_a_mesh_of_two_axes(recompute: str | None) -> None:
    found = train("the layer runs twice", recompute, {})
    assert_within([found], grad=TOLERANCE, parameter=TOLERANCE)


def leave_all_out() -> None:
    torch.manual_seed(0)
    model: typing.Any = Experts()
    shard(model, make_mesh((2,)))
    for _ in range(2):
        chosen = [0] if dist.get_rank() == 0 else []
        model(torch.ones(1, WIDTH), [chosen]).sum().backward()


def test_a_rank_that_runs_none_is_told(spawn_errors: Spawn) -> None:
    for error in spawn_errors(leave_all_out, 2):
        assert error is not None
        assert error.type_name == "RankMismatchError", error.traceback
        assert "at least one" in error.message
