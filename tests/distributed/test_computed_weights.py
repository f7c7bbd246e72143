"""Modules that compute, collect or check their weights themselves: parametrizations and RNNs."""

from __future__ import annotations

import copy
import dataclasses
import math
import typing

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

from models import Batch, Case
from parity import compare_training
from reference import Differences, assert_within, full_parameters, make_mesh, my_batch, shard
from shardkit import ShardedTensor

if typing.TYPE_CHECKING:
    from collections.abc import Callable

    from workers import Spawn

pytestmark = pytest.mark.helpers

STEPS = 4
# Rounding of means over ranks, after a few steps; weights are below 1.
TOLERANCE = 2e-6


class Layered(nn.Module):
    """A layer between two linear ones that share its group or not."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.block = nn.Sequential(layer)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.block(torch.tanh(self.first(x)))
        return self.last(hidden[0] if isinstance(hidden, tuple) else hidden)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(6, 6)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(6, 6)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(6, 6)),
    "lstm": lambda: nn.LSTM(6, 6, num_layers=2, bidirectional=False),
    "gru": lambda: nn.GRU(6, 6),
    "rnn": lambda: nn.RNN(6, 6),
}


def pruned() -> nn.Linear:
    """A layer with masks of two kinds for its weight, and one for its bias."""
    layer = nn.Linear(6, 6)
    prune.l1_unstructured(layer, "weight", 0.3)
    prune.ln_structured(layer, "weight", 0.2, n=2, dim=0)
    prune.random_unstructured(layer, "bias", 0.5)
    return layer


HOOKED: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: weight_norm(nn.Linear(6, 6)),
    "spectral_norm": lambda: spectral_norm(nn.Linear(6, 6)),
    "pruned": pruned,
}
"""Layers whose weights a hook computes before each forward, and leaves on the module."""


def batch(generator: torch.Generator) -> Batch:
    x = torch.randn(4, 5, generator=generator)
    return x, torch.randn(4, 3, generator=generator)


def loss_of(model: nn.Module, given: Batch) -> Tensor:
    """To an RNN every entry of the batch is a sequence of its own, of length 1."""
    x, y = given
    return nn.functional.mse_loss(model(x.unsqueeze(0)).squeeze(0), y)


def case_of(name: str) -> Case:
    return Case(lambda: Layered(LAYERS[name]()), lambda model: [model.block], batch, loss_of)


def compare(name: str, mesh_shape: tuple[int, ...], change: str) -> Differences:
    """Train beside a plain copy, which takes the batches of all ranks one behind the other."""
    case = case_of(name)
    torch.manual_seed(0)
    plain = case.make()
    model = shard(case, copy.deepcopy(plain), make_mesh(mesh_shape))
    if change == "deepcopy":
        model = copy.deepcopy(model)
    elif change == "convert":
        plain, model = plain.double(), model.double()
        case = dataclasses.replace(case, loss=in_double(case.loss))
    differences = compare_training(case, model, plain, steps=STEPS)
    assert all(isinstance(param, ShardedTensor) for param in model.parameters())
    return differences


def in_double(loss: Callable[[nn.Module, Batch], Tensor]) -> Callable[[nn.Module, Batch], Tensor]:
    return lambda model, given: loss(model, (given[0].double(), given[1].double()))


@pytest.mark.parametrize("change", ["", "deepcopy", "convert"])
@pytest.mark.parametrize("name", LAYERS)
def test_training_is_that_of_the_plain_model(spawn: Spawn, name: str, change: str) -> None:
    by_rank = spawn(compare, 2, name, (2,), change)
    assert_within(by_rank, loss=TOLERANCE, grad=TOLERANCE, parameter=TOLERANCE)


def test_on_a_mesh_of_two_axes(spawn: Spawn) -> None:
    for name in ("weight_norm", "lstm"):
        by_rank = spawn(compare, 4, name, (2, 2), "")
        assert_within(by_rank, loss=TOLERANCE, grad=TOLERANCE, parameter=TOLERANCE)


def compare_hooked(name: str) -> tuple[Differences, int]:
    """Train beside a plain model of the same seed, and return how many masks are still zero."""
    case = Case(lambda: Layered(HOOKED[name]()), lambda model: [model.block], batch, loss_of)
    torch.manual_seed(0)
    plain = case.make()
    torch.manual_seed(0)
    model = shard(case, case.make(), make_mesh((2,)))
    differences = compare_training(case, model, plain, steps=STEPS)
    assert all(isinstance(param, ShardedTensor) for param in model.parameters())
    return differences, int((model.block[0].weight == 0).sum())


@pytest.mark.parametrize("name", HOOKED)
def test_weights_that_hooks_compute(spawn: Spawn, name: str) -> None:
    for differences, num_zeros in spawn(compare_hooked, 2, name):
        assert_within([differences], loss=TOLERANCE, grad=TOLERANCE, parameter=TOLERANCE)
        assert bool(num_zeros) == (name == "pruned")


# --- refused ------------------------------------------------------------------------------------


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def parametrize_late(model: nn.Module) -> None:
    parametrize.register_parametrization(model.block[0], "weight", Double())


def replace_late(model: nn.Module) -> None:
    model.block[0].weight = nn.Parameter(torch.ones(6, 6))


def tie_late(model: nn.Module) -> None:
    model.block[0].bias = model.first.bias


def delete_late(model: nn.Module) -> None:
    del model.block[0].weight


LATE = {
    "parametrize": (parametrize_late, "'weight' of a ParametrizedLinear"),
    "replace": (replace_late, "'weight' of a Linear"),
    "tie": (tie_late, "'bias' of a Linear"),
    "delete": (delete_late, "'weight' of a Linear"),
}


def change_late(name: str) -> None:
    model = shard(case_of_linear(), Layered(nn.Linear(6, 6)), make_mesh((2,)))
    loss_of(model, my_batch(case_of_linear(), 0)).backward()
    LATE[name][0](model)
    loss_of(model, my_batch(case_of_linear(), 0))


def case_of_linear() -> Case:
    return Case(lambda: Layered(nn.Linear(6, 6)), lambda model: [model.block], batch, loss_of)


@pytest.mark.parametrize("name", LATE)
def test_changes_after_fully_shard_are_named(spawn_errors: Spawn, name: str) -> None:
    """They would be undone by the next forward, silently."""
    for error in spawn_errors(change_late, 2, name):
        assert error.type_name == "StateError", error
        assert LATE[name][1] in error.message
        assert "before fully_shard" in error.message


def weights_are_computed_alike() -> dict[str, Tensor]:
    """Return what parametrizations give inside `unshard`."""
    torch.manual_seed(0)
    model = Layered(parametrizations.weight_norm(nn.Linear(6, 6)))
    expected = model.block[0].weight.detach().clone()
    shard(case_of_linear(), model, make_mesh((2,)))
    model.block.unshard()
    assert torch.equal(model.block[0].weight, expected)
    model.block.reshard()
    assert math.isfinite(sum(value.sum() for value in full_parameters(model).values()))
    return full_parameters(model)


def test_a_computed_weight_can_be_read_while_unsharded(spawn: Spawn) -> None:
    one, other = spawn(weights_are_computed_alike, 2)
    assert all(torch.equal(one[name], other[name]) for name in one)
