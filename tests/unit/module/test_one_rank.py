"""With one rank nothing is communicated or copied, and gradients are as a plain model's."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recording import recording_mesh
from shardkit import MixedPrecisionPolicy, fully_shard

if typing.TYPE_CHECKING:
    from collections.abc import Callable


class Net(nn.Module):
    """Layers, one parameter of the root's own, and a loss that it keeps to itself if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.rand(4))
        self.hides = False
        self.loss = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor | None:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.loss = (x * self.scale).square().sum()
        return None if self.hides else self.loss


def pair() -> tuple[typing.Any, typing.Any, list[typing.Any]]:
    """Return a sharded model, the same one plain, and what was communicated."""
    torch.manual_seed(0)
    plain = Net()
    model: typing.Any = copy.deepcopy(plain)
    mesh, log = recording_mesh((1,))
    for layer in model.layers:
        fully_shard(layer, mesh)
    return fully_shard(model, mesh), plain, log


def compare(model: nn.Module, plain: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert mine.grad is None, name
        else:
            assert mine.grad is not None, name
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=0, atol=0)


def backward(model: typing.Any) -> None:
    model(torch.ones(2, 4, requires_grad=True)).backward()


def twice(model: typing.Any) -> None:
    backward(model)
    backward(model)


def retained(model: typing.Any) -> None:
    loss = model(torch.ones(2, 4))
    loss.backward(retain_graph=True)
    loss.backward()


def only_grad(model: typing.Any) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    torch.autograd.grad(model(x), x)


def frozen(model: typing.Any) -> None:
    model.layers[1].requires_grad_(False)
    backward(model)
    model.layers[1].requires_grad_(True)
    backward(model)


def hidden(model: typing.Any) -> None:
    model.hides = True
    for _ in range(2):
        model(torch.ones(2, 4))
        model.loss.backward()


def recomputed(model: typing.Any) -> None:
    x = torch.ones(2, 4)
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    x.sum().backward()


USES: list[Callable[[typing.Any], None]] = [
    backward,
    twice,
    retained,
    only_grad,
    frozen,
    recomputed,
]


@pytest.mark.parametrize("use", USES)
def test_gradients_are_those_of_a_plain_model(use: Callable[[typing.Any], None]) -> None:
    model, plain, log = pair()
    for _ in range(2):
        use(model)
        use(plain)
        compare(model, plain)
    assert not log


@pytest.mark.filterwarnings("ignore:forward of")
@pytest.mark.parametrize("groups", ["each layer", "one"])
def test_a_loss_that_forward_does_not_return_has_gradients_too(groups: str) -> None:
    model, plain, _ = pair()
    if groups == "one":
        model = fully_shard(copy.deepcopy(plain), recording_mesh((1,))[0])
    for _ in range(2):
        hidden(model)
        hidden(plain)
        compare(model, plain)


@pytest.mark.parametrize("when", ["before", "after"])
def test_users_hooks_run_while_backward_goes_on(when: str) -> None:
    model, plain, _ = pair()
    events: list[str] = []

    def register(module: typing.Any) -> None:
        for i, layer in enumerate(module.layers):
            layer.weight.register_post_accumulate_grad_hook(
                lambda _, i=i: events.append(f"hook {i}")
            )
            layer.register_full_backward_hook(lambda *_, i=i: events.append(f"left {i}"))

    if when == "after":
        backward(model)
        model.zero_grad()
    register(model)
    backward(model)
    mine = events.copy()
    events.clear()
    register(plain)
    backward(plain)
    assert mine.index("hook 2") < mine.index("left 0")
    assert events.index("hook 2") < events.index("left 0")
    assert sorted(mine) == sorted(events)
    compare(model, plain)


class BoomError(Exception):
    """Raised in backward."""


def test_gradients_of_a_backward_that_failed_are_dropped() -> None:
    model, plain, _ = pair()
    backward(model)
    model.zero_grad()

    def boom(*_: object) -> None:
        raise BoomError

    handle = model.layers[0].register_full_backward_hook(boom)
    with pytest.raises(BoomError):
        backward(model)
    handle.remove()
    model.zero_grad()
    backward(model)
    backward(plain)
    compare(model, plain)


def test_a_hook_on_reduced_buffers_runs_with_one_rank_too() -> None:
    model, plain, _ = pair()
    model.layers[0].set_all_reduce_hook(lambda grads: grads.mul_(2))
    for _ in range(2):
        backward(model)
        backward(plain)
        for parameter in plain.layers[0].parameters():
            parameter.grad *= 2
        compare(model, plain)
        model.zero_grad()
        plain.zero_grad()


class Penalized(nn.Module):
    """Keeps a penalty on its weight, made in forward and never returned."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.penalty = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.linear.weight.square().mean()
        return self.linear(x)


def test_a_backward_that_passes_through_no_output() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Penalized(), nn.Linear(4, 4))
    model: typing.Any = copy.deepcopy(plain)
    mesh, _ = recording_mesh((1,))
    fully_shard(model[0], mesh)
    fully_shard(model, mesh)
    for each in (model, plain):
        each(torch.ones(2, 4))
        each[0].penalty.backward()
    compare(model, plain)


def test_a_weight_used_by_hand() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(4, 4)
    mesh, _ = recording_mesh((1,))
    model: typing.Any = fully_shard(copy.deepcopy(plain), mesh)
    x = torch.ones(2, 4)
    model.unshard()
    nn.functional.linear(x, model.weight).sum().backward()
    model.reshard()
    nn.functional.linear(x, plain.weight).sum().backward()
    compare(model, plain)


def test_a_conversion_after_which_memory_is_needed() -> None:
    mesh, _ = recording_mesh((1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fully_shard(nn.Linear(4, 4).bfloat16(), mesh, policy)
    model(torch.ones(2, 4)).sum().backward()
    model.zero_grad()
    model.float()
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
