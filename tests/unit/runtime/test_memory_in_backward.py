"""Backward finds the weights it needs: none is freed while a node of the graph may read it.

Reading freed memory raises in matrix products, which is why they are used here; elementwise
operators would kill the process.
"""

from __future__ import annotations

import dataclasses
import typing

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recording import recording_mesh
from shardkit import FSDPModule, fully_shard

if typing.TYPE_CHECKING:
    from collections.abc import Callable

Head = typing.Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """A sharded layer, and two linear ones of the root's own that are used as `head` says."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self, torch.tanh(self.layer(x)))


def train(model: nn.Module, steps: int = 2) -> None:
    """Run steps; the gradients of the layer before all must come."""
    for _ in range(steps):
        model.zero_grad()
        model(torch.ones(2, 8)).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            assert module.memory_stats()["unsharded_nbytes"] == 0


def sharded(model: Net, **options: typing.Any) -> nn.Module:
    mesh, _ = recording_mesh((4,))
    fully_shard(model.layer, mesh, **options)
    return fully_shard(model, mesh, **options)


RESHARDING = pytest.mark.parametrize("reshard_after_forward", [True, False, None])


@RESHARDING
def test_root_layers_after_a_sharded_one(*, reshard_after_forward: bool | None) -> None:
    model = Net(lambda net, x: net.second(torch.tanh(net.first(x))))
    train(sharded(model, reshard_after_forward=reshard_after_forward))


@RESHARDING
def test_a_frozen_layer_of_the_root_before_a_trainable_one(
    *, reshard_after_forward: bool | None
) -> None:
    """As in LoRA; the gradient of the trainable one comes first."""
    model = Net(lambda net, x: net.second(torch.tanh(net.first(x))))
    model.first.requires_grad_(requires_grad=False)
    train(sharded(model, reshard_after_forward=reshard_after_forward))


@RESHARDING
def test_a_weight_of_the_root_used_detached_before_it_is_used(
    *, reshard_after_forward: bool | None
) -> None:
    """A stop-gradient on a weight, as in quantization and contrastive losses."""

    def head(net: Net, x: Tensor) -> Tensor:
        return net.second(torch.tanh(net.first(F.linear(x, net.second.weight.detach()))))

    train(sharded(Net(head), reshard_after_forward=reshard_after_forward))


# --- outputs that hooks must find ---------------------------------------------------------------


@dataclasses.dataclass
class Output:
    x: Tensor


@dataclasses.dataclass(slots=True)
class SlottedOutput:
    x: Tensor


class ObjectOutput:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class CallableOutput(ObjectOutput):
    def __call__(self) -> Tensor:
        return self.x


class Packing(nn.Module):
    """A linear layer that returns an object."""

    def __init__(self, pack: Callable[[Tensor], typing.Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.pack = pack

    def forward(self, x: Tensor) -> typing.Any:
        return self.pack(self.linear(x))


class Unpacking(nn.Module):
    """Layers that return objects, one after another."""

    def __init__(self, pack: Callable[[Tensor], typing.Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Packing(pack) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x).x)
        return x


@pytest.mark.parametrize("pack", [Output, ObjectOutput, SlottedOutput, CallableOutput])
def test_layers_that_return_objects_train(pack: Callable[[Tensor], typing.Any]) -> None:
    mesh, _ = recording_mesh((4,))
    model = Unpacking(pack)
    for layer in model.layers:
        fully_shard(layer, mesh)
    train(fully_shard(model, mesh))


class HiddenOutput:
    """Keeps its tensor where nobody looks: in a function."""

    def __init__(self, x: Tensor) -> None:
        self._get = lambda: x

    @property
    def x(self) -> Tensor:
        return self._get()


def unpacking(pack: Callable[[Tensor], typing.Any], frozen: int | None = None) -> Unpacking:
    """Return a sharded model of layers that return objects; the same weights every time."""
    torch.manual_seed(0)
    model = Unpacking(pack)
    if frozen is not None:
        model.layers[frozen].requires_grad_(requires_grad=False)
    mesh, _ = recording_mesh((4,))
    for layer in model.layers:
        fully_shard(layer, mesh)
    return fully_shard(model, mesh)


def test_a_layer_whose_output_is_not_found_stays_unsharded_and_warns_once() -> None:
    model, plain = unpacking(HiddenOutput), unpacking(Output)
    with pytest.warns(UserWarning, match="returned no tensor that requires one") as caught:
        train(model, steps=3)
    named = [str(warning.message).split("'")[1] for warning in caught]
    assert named == ["layers.0", "layers.1", "layers.2"]
    train(plain, steps=1)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), other.grad.to_local())


@pytest.mark.filterwarnings("ignore:forward of")
def test_a_frozen_layer_whose_output_is_not_found_stays_unsharded() -> None:
    """Backward goes through it to the layer before."""
    train(unpacking(HiddenOutput, frozen=1))


@pytest.mark.filterwarnings("ignore:forward of")
def test_an_unfound_output_stays_unsharded_until_a_backward_has_ended() -> None:
    """An evaluation may come before its backward."""
    model, plain = unpacking(HiddenOutput), unpacking(Output)
    losses = [each(torch.ones(2, 8)).sum() for each in (model, plain)]
    with torch.no_grad():
        model(torch.ones(2, 8))
    assert model.layers[0].memory_stats()["unsharded_nbytes"] == 3 * 4 * 80
    for loss in losses:
        loss.backward()
    assert model.layers[0].memory_stats()["unsharded_nbytes"] == 0
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), other.grad.to_local())


# --- graphs of gradients ------------------------------------------------------------------------


def penalty(model: nn.Module, *, between: Callable[[], object]) -> Tensor:
    """Return the norm of the gradient of the input, to be differentiated again."""
    x = torch.ones(2, 8, requires_grad=True)
    [grad] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    between()
    return grad.square().sum()


def net() -> nn.Module:
    return sharded(Net(lambda net, x: net.second(torch.tanh(net.first(x)))))


def test_a_penalty_on_gradients_can_be_differentiated() -> None:
    model = net()
    for _ in range(2):
        penalty(model, between=lambda: None).backward()
    assert model.layer.weight.grad is not None


def test_an_evaluation_before_a_penalty_is_differentiated_frees_nothing() -> None:
    model = net()

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.ones(2, 8))

    penalty(model, between=evaluate).backward()
    assert model.layer.weight.grad is not None


def test_after_a_penalty_nothing_is_unsharded() -> None:
    model = net()
    penalty(model, between=lambda: None).backward()
    assert model.memory_stats()["unsharded_nbytes"] == 0


def test_after_a_penalty_on_one_group_nothing_is_unsharded() -> None:
    mesh, _ = recording_mesh((4,))
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), mesh)
    penalty(model, between=lambda: None).backward()
    assert model.memory_stats()["unsharded_nbytes"] == 0


# --- dtypes -------------------------------------------------------------------------------------


class Complex(nn.Module):
    """A module with a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


def test_a_complex_parameter_gets_its_gradient() -> None:
    mesh, _ = recording_mesh((2,))
    model = fully_shard(Complex(), mesh)
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None
