"""Gradients that are asked for, gradients of gradients, and those of plain parameters."""

from __future__ import annotations

import typing

import pytest
import torch
import torch_xla
from torch import Tensor, nn
from torch.func import functional_call
from xla_ranks import XlaRanks, on_xla

from parity import ROWS, Pair
from shardkit import DeviceMesh, checkpoint_module, fully_shard

if typing.TYPE_CHECKING:
    from collections.abc import Iterable


WIDTH = 6


def batch() -> tuple[Tensor, Tensor]:
    """Return the inputs of all ranks, for a plain and for a sharded model."""
    x = torch.randn(ROWS, WIDTH)
    return x, x.to("xla")


def twins(
    mesh: DeviceMesh, *, ignores: bool = False, recomputes: bool = False
) -> tuple[typing.Any, typing.Any]:
    """Return a plain model and a sharded one; both ignore a weight in a layer, or neither."""
    plain = nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
        nn.Tanh(),
        nn.Linear(WIDTH, 1),
    )
    sharded: typing.Any = on_xla(plain)
    ignored = [sharded[0][0].weight] if ignores else []
    if recomputes:
        checkpoint_module(sharded[0])
    for module in (sharded[0], sharded):
        fully_shard(module, mesh=mesh, ignored_params=ignored)
    return plain, sharded


def whole(tensor: typing.Any) -> Tensor:
    """Return a tensor of a sharded model on the CPU."""
    torch_xla.sync()
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach().cpu()


def assert_close(found: Iterable[Tensor | None], expected: Iterable[Tensor | None]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is None:
            continue
        torch.testing.assert_close(whole(ours), theirs.detach(), rtol=0, atol=1e-6)


def assert_equal_gradients(sharded: nn.Module, plain: nn.Module) -> None:
    gradients = [[p.grad for p in model.parameters()] for model in (sharded, plain)]
    assert_close(*gradients)


@pytest.mark.parametrize("shape", ["mesh", "mesh_2d"])
def test_gradients_are_asked_for_and_may_be_differentiated(
    shape: str, request: pytest.FixtureRequest
) -> None:
    models = twins(request.getfixturevalue(shape))
    results = []
    for model, x in zip(models, batch(), strict=True):
        loss = model(x).square().mean()
        grads = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
        sum((grad * grad).sum() for grad in grads).backward()  # type: ignore[union-attr]
        results.append(grads)
    assert_close(results[1], results[0])
    assert_equal_gradients(models[1], models[0])
    for model, x in zip(models, batch(), strict=True):
        model(x).square().mean().backward()  # Nothing is left of before.
    assert_equal_gradients(models[1], models[0])


def test_a_penalty_trains_by_gradients_of_inputs(mesh: DeviceMesh) -> None:
    models = twins(mesh)
    for _ in range(2):
        for model, x in zip(models, batch(), strict=True):
            x.requires_grad_()
            (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (grad.norm(dim=1) - 1).square().mean().backward()
        torch_xla.sync()
    assert_equal_gradients(models[1], models[0])


@pytest.mark.parametrize("recomputes", [False, True])
def test_ignored_parameters_get_gradients_of_all_ranks(recomputes: bool, mesh: DeviceMesh) -> None:
    models = twins(mesh, ignores=True, recomputes=recomputes)
    for _ in range(2):
        for model, x in zip(models, batch(), strict=True):
            model(x).square().mean().backward()
        torch_xla.sync()
    assert isinstance(models[1][0][0].weight.grad, Tensor)
    assert models[1][0][0].weight is next(models[1].parameters())
    assert_equal_gradients(models[1], models[0])


@pytest.mark.parametrize("way", ["whole", "computed of parameters"])
def test_a_model_is_called_with_other_values(way: str, mesh: DeviceMesh) -> None:
    models = twins(mesh)
    given: list[dict[str, Tensor]] = []
    for model, x in zip(models, batch(), strict=True):
        named: dict[str, typing.Any] = dict(model.named_parameters())
        if way == "whole":
            param = named["0.0.weight"].detach()
            value = param.full_tensor() if hasattr(param, "full_tensor") else param
            given.append({"0.0.weight": (value * 1.5).requires_grad_()})
        else:
            given.append({name: param * 1.5 for name, param in named.items()})
        functional_call(model, given[-1], (x,)).square().mean().backward()
    if way == "whole":
        assert_close([given[1]["0.0.weight"].grad], [given[0]["0.0.weight"].grad])
        for model in models:
            assert model[0][0].weight.grad is None
            model[0][0].weight.grad = torch.zeros_like(model[0][0].weight)
    assert_equal_gradients(models[1], models[0])


class Both(nn.Module):
    """Returns outputs of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def test_an_output_that_no_loss_uses_has_no_gradients_behind_a_hook(mesh: DeviceMesh) -> None:
    plain = Both()
    sharded = fully_shard(on_xla(plain), mesh)
    for model, x in zip((plain, sharded), batch(), strict=True):
        model.register_full_backward_pre_hook(lambda *_: None)
        model(x.requires_grad_())[1].sum().backward()
    assert plain.first.weight.grad is None
    assert_equal_gradients(sharded, plain)


def test_unsynced_gradients_do_not_outlive_an_exception(mesh: DeviceMesh) -> None:
    pair = Pair(XlaRanks(mesh), "mlp")
    with pair.sharded.no_sync():
        pair.sharded(pair.draw()[0].to("xla")).sum().backward()
    with pytest.raises(RuntimeError):
        pair.sharded(torch.ones(ROWS, 1, device="xla"))
    with pytest.warns(UserWarning, match="an exception ended a step"):
        pair.backward(pair.draw())
    torch_xla.sync()
    pair.assert_equal_gradients()
