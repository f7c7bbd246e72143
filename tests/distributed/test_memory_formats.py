"""Parameters that are not contiguous: right values in training and in `full_tensor()`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from models import Batch, Case, cross_entropy, image_batch, regression_batch, squared_error
from parity import compare_training
from reference import (
    TRAINED,
    assert_within,
    full_parameters,
    make_mesh,
    shard,
)
from shardkit import ShardedTensor, fully_shard
from workers import Spawn, on_ranks

pytestmark = pytest.mark.helpers


class Images(nn.Module):
    """Convolutions whose weights and inputs are in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, 6, kernel_size=3, padding=1), nn.GELU())
            for channels in (3, 6)
        )
        self.head = nn.Linear(6, 5)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean(dim=(2, 3)))


class Strided(nn.Module):
    """Parameters that are views: transposed, every second element, permuted."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.linear.weight = nn.Parameter(torch.randn(7, 7).t())
        self.transposed = nn.Parameter(torch.randn(5, 7).t())
        self.strided = nn.Parameter(torch.randn(10)[::2])
        self.permuted = nn.Parameter(torch.randn(2, 3, 5).permute(2, 0, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x)) @ self.transposed
        return x * self.strided + torch.einsum("abc->a", self.permuted.tanh())


CASES: dict[str, Case] = {
    "channels_last": Case(Images, lambda model: list(model.stages), image_batch, cross_entropy),
    "views": Case(Strided, lambda model: [model.linear], regression_batch, squared_error),
}


@pytest.mark.parametrize("reshard_after_forward", [True, None])
@pytest.mark.parametrize("mesh_shape", [(1,), (2,)], ids=str)
@pytest.mark.parametrize("name", CASES)
@on_ranks("mesh_shape")
def test_parameters_that_are_not_contiguous(
    name: str, mesh_shape: tuple[int, ...], reshard_after_forward: bool | None
) -> None:
    case = CASES[name]
    plain = case.make()
    assert any(not param.is_contiguous() for param in plain.parameters())
    values = {name: param.detach().clone() for name, param in plain.named_parameters()}
    mesh = make_mesh(mesh_shape)
    model = shard(case, copy.deepcopy(plain), mesh, reshard_after_forward=reshard_after_forward)
    whole = full_parameters(model)
    assert all(torch.equal(whole[name], value) for name, value in values.items())
    assert all(param.is_contiguous() for param in model.parameters())
    assert_within([compare_training(case, model, plain)], **TRAINED)


def gradients_from_before() -> tuple[bool, bool]:
    """A gradient that a parameter had before it was sharded is cut by its values, not its memory.

    Also one whose strides are not its parameter's.
    """
    results = []
    for make in (Images, Strided):
        plain = make()
        for param in plain.parameters():
            value = torch.randn(param.shape)
            is_image = param.ndim == 4
            param.grad = value.contiguous(
                memory_format=torch.channels_last if is_image else torch.contiguous_format
            )
        grads = {name: param.grad.clone() for name, param in plain.named_parameters()}
        model = fully_shard(plain)
        results.append(
            all(
                isinstance(param.grad, ShardedTensor)
                and torch.equal(param.grad.full_tensor(), grads[name])
                for name, param in model.named_parameters()
            )
        )
    return results[0], results[1]


def test_gradients_from_before_sharding_keep_their_values(spawn: Spawn) -> None:
    assert spawn(gradients_from_before, 2) == [(True, True)] * 2


def load_and_copy() -> list[bool]:
    """Whole tensors of any format go into sharded ones by their values."""
    source, target = Images(), Images()
    fully_shard(target)
    target.load_state_dict(source.state_dict())
    loaded = full_parameters(target)
    results = [torch.equal(loaded[name], param) for name, param in source.named_parameters()]
    with torch.no_grad():
        for name, param in target.named_parameters():
            param.copy_(source.get_parameter(name) * 2)
    doubled = full_parameters(target)
    results += [torch.equal(doubled[name], param * 2) for name, param in source.named_parameters()]
    return results


def test_whole_tensors_of_any_format_are_loaded_by_value(spawn: Spawn) -> None:
    assert spawn(load_and_copy, 2) == [[True] * 12] * 2


@on_ranks(2)
def test_a_format_asked_for_after_sharding() -> None:
    """``.to(memory_format=...)`` after sharding changes nothing: a piece has no format."""
    case = CASES["channels_last"]
    plain = case.make()
    model = shard(case, copy.deepcopy(plain))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        model.to(memory_format=torch.channels_last)
        return case.loss(model, batch)

    assert_within(
        [compare_training(Case(case.make, case.groups, case.batch, loss), model, plain, steps=3)],
        **TRAINED,
    )
