"""Lists of modules of which a forward runs some, and what happens between two of them."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from reference import Differences, assert_within, full_parameters, make_mesh
from shardkit import StateError, fully_shard
from workers import on_ranks

if typing.TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.helpers
TOLERANCE = 1e-12
WIDTH = 3


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.clamp_(-0.2, 0.2)
        return super().forward(x).tanh()


def nothing(model: Chosen, x: Tensor) -> None:
    del model, x


class Chosen(nn.Module):
    """A model that runs the chosen layers, with a call of `between` after each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Clamped(WIDTH, WIDTH) for _ in range(3))
        self.chosen = [0, 2]
        self.between: Callable[[Chosen, Tensor], None] = nothing

    def forward(self, x: Tensor) -> Tensor:
        for number in self.chosen:
            x = self.layers[number](x)
            self.between(self, x)
        return x


def train_with(between: Callable[[Chosen, Tensor], None], **options: typing.Any) -> Differences:
    """Train beside a plain model; each step chooses other layers, and the last one all."""
    torch.manual_seed(0)
    plain = Chosen().double()
    model = copy.deepcopy(plain)
    mesh = make_mesh((dist.get_world_size(),))
    fully_shard([*model.layers], mesh, **options)
    fully_shard(model, mesh)
    differences = Differences()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for chosen in ([0, 2], [1], [2, 0], [0, 1, 2]):
        x = torch.randn(4, WIDTH, dtype=torch.double)
        for each in (plain, model):
            each.chosen, each.between = chosen, between
            each(x).square().sum().backward()
        wholes = full_parameters(model)
        for name, value in full_parameters(plain).items():
            differences.note("written", wholes[name], value)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    differences.note_parameters(model, plain)
    return differences


def own_loss(model: Chosen, x: Tensor) -> None:
    """Call backward inside the forward, in which other modules of the list may follow."""
    del model
    x.square().mean().backward(retain_graph=True)


def look_up(model: Chosen, x: Tensor) -> None:
    """Run a layer with a bias of its own, without a trace in the loss."""
    given = {"bias": torch.ones(WIDTH, dtype=x.dtype)}
    with torch.no_grad():
        functional_call(model.layers[0].eval(), given, (x,))
    model.layers[0].train()


def fails(model: Chosen, x: Tensor) -> None:
    """Catch the error of another module of the list."""
    with pytest.raises(RuntimeError, match="shape"):
        model.layers[1].eval()(torch.cat((x, x), 1))
    model.layers[1].train()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("between", [nothing, own_loss, look_up, fails])
@on_ranks(2)
def test_writes_and_gradients_are_as_unsharded(
    between: Callable[[Chosen, Tensor], None], reshard: bool
) -> None:
    found = train_with(between, reshard_after_forward=reshard)
    assert_within([found], written=TOLERANCE, parameter=TOLERANCE)


@pytest.mark.parametrize("chosen", [[0, 2], [0, 1, 2]], ids=["some", "all"])
@on_ranks(2)
def test_to_freeze_a_layer_inside_the_forward_is_refused(chosen: list[int]) -> None:
    model, mesh = Chosen(), make_mesh((dist.get_world_size(),))
    fully_shard([*model.layers], mesh)
    fully_shard(model, mesh)
    x = torch.ones(2, WIDTH)
    model.chosen = chosen
    model.between = lambda model, _: model.layers[0].requires_grad_(requires_grad=False)
    with pytest.raises(StateError, match=r"'layers\.0\.\w+' was changed inside"):
        model(x)
    model.between = nothing
    model(x).sum().backward()
    assert all(p.grad is not None for n in chosen for p in model.layers[n].parameters())


@on_ranks(2)
def test_memory_is_freed_when_the_forward_ends() -> None:
    model: typing.Any = Chosen()
    mesh = make_mesh((dist.get_world_size(),))
    fully_shard([*model.layers], mesh)
    fully_shard(model, mesh)
    shown: list[bool] = []
    model.between = lambda each, _: shown.append(each.layers[1].weight.numel() == WIDTH * WIDTH)
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    assert shown == [True, True]
    assert model.memory_stats()["unsharded_nbytes"] == 0
    assert type(model.layers[1].weight) is not nn.Parameter
