"""Gradients of small layers are held while backward is inside, and copied by one operator."""

from __future__ import annotations

import gc
import typing
import weakref

import pytest
import torch
from recorded import Recorded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recording import recording_mesh
from shardkit import ShardedTensor, fully_shard
from shardkit._compat import torch_tensors
from shardkit._module.hooks import get_state
from shardkit._runtime.backward import Backward

if typing.TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit._params.gradients import UnshardedGrad
    from shardkit._runtime.group import ParamGroup

Copies = list[int]


@pytest.fixture(name="copies")
def _copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Return a list to which the number of tensors of each copy of gradients is added."""
    found: Copies = []

    def copy(targets: list[Tensor], sources: list[Tensor]) -> None:
        found.append(len(targets))
        torch._foreach_copy_(targets, sources)

    monkeypatch.setattr(torch_tensors, "foreach_copy", copy)
    return found


@pytest.fixture(name="told")
def _told(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the group of each gradient is added that backward is told of."""
    found: list[int] = []
    tell = Backward.on_grads

    def on_grads(self: Backward, group: ParamGroup, grads: Sequence[UnshardedGrad]) -> None:
        found.extend([group.index] * len(grads))
        tell(self, group, grads)

    monkeypatch.setattr(Backward, "on_grads", on_grads)
    return found


def test_a_layer_is_copied_once_and_nobody_is_told_of_its_gradients(
    copies: Copies, told: list[int]
) -> None:
    recorded = Recorded()
    recorded.step()
    copies.clear()
    told.clear()
    recorded.step()
    # The first layer's inputs want no gradient, and the root has none, so these are told of.
    assert sorted(told) == [0, 1, 1]
    assert sorted(copies) == [1, 2, 2, 2]


class Pair(nn.Module):
    """A layer that runs again inside of backward, for one half of its uses of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.linear, x, use_reentrant=True)
        return self.linear(torch.tanh(x))


def test_a_weight_that_fires_twice_in_one_layer_gets_the_sum() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Pair())
    x = torch.ones(2, 4)
    model(x).square().sum().backward()
    expected = [param.grad for param in model.parameters()]
    model.zero_grad()
    mesh, _ = recording_mesh((2, 1))  # This rank has whole parameters; the other sends the same.
    for module in (*model, model):
        fully_shard(module, mesh)
    model(x).square().sum().backward()
    for param, whole in zip(model.parameters(), expected, strict=True):
        assert isinstance(param, ShardedTensor)
        assert isinstance(param.grad, ShardedTensor)
        assert whole is not None
        torch.testing.assert_close(param.grad.to_local(), whole.reshape(-1))


class Two(nn.Module):
    """A layer of which one gradient comes long before the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def sharded_two() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Two(), nn.Linear(4, 4))
    mesh, _ = recording_mesh((2, 1))
    for module in (*model, model):
        fully_shard(module, mesh)
    return model


def step(model: nn.Module) -> list[Tensor]:
    model(torch.ones(2, 4)).square().sum().backward()
    grads = [param.grad for param in model.parameters()]
    model.zero_grad()
    return [grad.to_local() for grad in grads if isinstance(grad, ShardedTensor)]


def interrupt(model: nn.Sequential) -> None:
    """End a backward between two gradients of a layer."""
    hook = model[1].first.register_full_backward_pre_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        step(model)
    hook.remove()


def _fail(*_: object) -> None:
    raise ZeroDivisionError


def test_gradients_that_came_before_an_error_are_dropped() -> None:
    model = sharded_two()
    expected = step(model)
    interrupt(model)
    state = get_state(model[1])
    assert state is not None
    assert state.group is not None
    assert state.group.gradients.buckets[0].held
    found = step(model)
    assert not state.group.gradients.buckets[0].held
    assert len(found) == len(expected) > 0
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other)


def test_a_model_can_go_after_an_error() -> None:
    """C++ keeps hooks, where the garbage collector sees no cycle."""
    model = sharded_two()
    step(model)
    interrupt(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
