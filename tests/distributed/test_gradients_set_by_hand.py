"""Code in a backward that sets ``.grad`` of weights itself, as kernels that add to it in place."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from reference import make_mesh
from shardkit import StateError, fully_shard
from workers import Spawn, on_ranks


class _Product(torch.autograd.Function):
    """A product whose backward adds to the gradient of the weight, of which autograd knows none."""

    @staticmethod
    def forward(ctx: typing.Any, x: Tensor, linear: nn.Linear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.linear = linear
        return x @ linear.weight.detach().t()

    @staticmethod
    def backward(ctx: typing.Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,), weight = ctx.saved_tensors, ctx.linear.weight
        grad = grads[0].t() @ x
        weight.grad = grad if weight.grad is None else weight.grad + grad
        return grads[0] @ weight.detach(), None


class Layer(nn.Module):
    def __init__(self, *, has_scale: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5, bias=False)
        self.norm = nn.LayerNorm(5, elementwise_affine=has_scale)
        self.is_fused = True

    def forward(self, x: Tensor) -> Tensor:
        y = typing.cast("Tensor", _Product.apply(x, self.linear)) if self.is_fused else None  # type: ignore[no-untyped-call]
        return self.norm(torch.tanh(self.linear(x) if y is None else y))


def compare(has_scale: bool, has_layers: bool, num_backwards: int) -> None:
    model = nn.Sequential(*(Layer(has_scale=has_scale) for _ in range(3))).double()
    plain = copy.deepcopy(model)
    for layer in plain:
        layer.is_fused = False
    mesh = make_mesh((dist.get_world_size(),))
    for layer in model if has_layers else ():
        fully_shard(layer, mesh=mesh)
    sharded = fully_shard(model, mesh=mesh)
    for _ in range(2):
        for index in range(num_backwards):
            sharded.set_requires_gradient_sync(index == num_backwards - 1)
            batches = torch.randn(mesh.size(), 4, 5, dtype=torch.float64)
            model(batches[mesh.get_rank()].requires_grad_()).square().mean().backward()
            plain(batches).square().mean().backward()
        for own, whole in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad.full_tensor(), whole.grad)  # type: ignore[union-attr]
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("num_backwards", [1, 2])
@pytest.mark.parametrize("has_layers", [True, False], ids=["layers", "root"])
@pytest.mark.parametrize("has_scale", [True, False], ids=["beside others", "alone"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_they_count_as_if_autograd_had_brought_them(
    spawn: Spawn,
    world_size: int,
    has_scale: bool,
    has_layers: bool,
    num_backwards: int,
) -> None:
    spawn(compare, world_size, has_scale, has_layers, num_backwards)


@on_ranks(2)
def test_the_gradient_of_another_parameter_is_not_added_to() -> None:
    """It is a piece of other elements. A copy that is cut anew is one's own."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2))).double()
    plain = copy.deepcopy(model)
    fully_shard(model, mesh=make_mesh((2,)))
    x = torch.ones(4, 8, dtype=torch.float64)
    for each in (model, plain):
        each(x).square().sum().backward()
        first, second = each.parameters()
        first.grad = torch.zeros_like(first).copy_(second.grad)  # type: ignore[arg-type]
        each(x).square().sum().backward()
    for own, whole in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad.full_tensor(), whole.grad)  # type: ignore[union-attr]
    first, second = model.parameters()
    first.grad = second.grad
    with pytest.raises(StateError, match=r"on '0\.weight' is cut as '1\.weight'"):
        model(x).square().sum().backward()
