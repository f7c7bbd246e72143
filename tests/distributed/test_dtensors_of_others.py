"""DTensors that packages make on the mesh of a sharded parameter, with torch's placements."""

from __future__ import annotations

import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardkit
from shardkit import ShardedTensor, ShardedTensorError, fully_shard
from workers import on_ranks

MESHES: tuple[typing.Any, ...] = ((3,), (2, 2))


def sharded(shape: tuple[int, ...], *, is_of_torch: bool) -> typing.Any:
    """Shard two layers of odd sizes; the first one has a group of its own."""
    make = init_torch_mesh if is_of_torch else shardkit.init_device_mesh
    mesh = make("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)] if is_of_torch else None)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    fully_shard(model[0], mesh)
    return fully_shard(model, mesh)


def whole_like(param: Tensor) -> Tensor:
    return torch.arange(param.numel(), dtype=param.dtype).reshape(param.shape)


@pytest.mark.parametrize("is_of_torch", [True, False])
@pytest.mark.parametrize("shape", MESHES)
@on_ranks("shape")
def test_they_are_cut_like_the_parameter(shape: tuple[int, ...], is_of_torch: bool) -> None:
    model = sharded(shape, is_of_torch=is_of_torch)
    rank, size = dist.get_rank(), dist.get_world_size()
    with shardkit.install():
        from torch.distributed.tensor import distribute_tensor

        for param in model.parameters():
            mesh, whole = param.device_mesh, whole_like(param)
            copies = [Replicate()] * mesh.ndim
            sums = [Partial()] * mesh.ndim
            share = whole * (rank + 1)
            for made, factor in (
                (DTensor.from_local(whole, mesh, copies), 1),
                (DTensor.from_local(share, mesh, sums), size * (size + 1) // 2),
                (distribute_tensor(share.clone(), mesh, copies), 1),
            ):
                assert type(made) is DTensor
                assert torch.equal(made.full_tensor(), whole * factor)
                cut: typing.Any = made.redistribute(placements=param.placements)
                assert type(cut) is ShardedTensor
                assert torch.equal(cut.to_local(), param.spec.slice_full(whole * factor))
                again = made.redistribute(mesh, param.placements)
                assert torch.equal(again.to_local(), cut.to_local())
                assert torch.equal(
                    (param + cut).full_tensor(), param.full_tensor() + factor * whole
                )


OPERATORS: dict[str, typing.Any] = {
    "mul": lambda a, b: a * b,
    "mul_": lambda a, b: a.mul_(b),
    "clamp": lambda a, b: a.clamp(max=b),
    "copy_": lambda a, b: a.copy_(b),
    "_foreach_mul_": lambda a, b: torch._foreach_mul_([a, a.clone()], b),
    "_foreach_div": lambda a, b: torch._foreach_div([a, a.clone()], b)[0],  # noqa: SLF001
    "_foreach_add_": lambda a, b: torch._foreach_add_([a, a.clone()], [b, b]),
}


@pytest.mark.parametrize("shape", MESHES)
@on_ranks("shape")
def test_operators_take_them_beside_sharded_tensors(shape: tuple[int, ...]) -> None:
    """Packages clip gradients by a norm that they make a DTensor on the mesh of the gradients."""
    weight: typing.Any = sharded(shape, is_of_torch=True)[0].weight.detach()
    mesh, whole = weight.device_mesh, whole_like(weight)
    with shardkit.install():
        for value in (torch.tensor(2.5, dtype=whole.dtype), whole / 5):
            for name, operator in OPERATORS.items():
                if name.startswith("_foreach_") and value.ndim > 0 and name != "_foreach_add_":
                    continue  # These take a number beside a list.
                for placement, share in (
                    (Replicate(), value),
                    (Partial(), value / weight.spec.mesh.size()),
                ):
                    made = DTensor.from_local(share, mesh, [placement] * mesh.ndim)
                    found, expected = weight.clone(), weight.full_tensor().clone()
                    result, wanted = operator(found, made), operator(expected, value)
                    torch.testing.assert_close(found.full_tensor(), expected, msg=name)
                    if isinstance(result, Tensor):
                        torch.testing.assert_close(result.full_tensor(), wanted, msg=name)


@pytest.mark.parametrize("shape", MESHES)
@on_ranks("shape")
def test_distribute_tensor_takes_what_is_distributed(shape: tuple[int, ...]) -> None:
    """Loaders fill parameters that a file lacks with ``zeros_like`` of the parameter."""
    mesh = init_torch_mesh("cpu", shape)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(5, 7), nn.Linear(5, 7)).double()
    fully_shard(model[1], mesh)
    fully_shard(model, mesh)
    first, own, last = (typing.cast("typing.Any", layer.weight).detach() for layer in model)
    whole = whole_like(own)
    for param in (first, own, last):
        param.copy_(whole)
    with shardkit.install():
        from torch.distributed.tensor import distribute_tensor

        empty = torch.zeros_like(first)
        assert distribute_tensor(empty, first.device_mesh, first.placements) is empty
        copies = DTensor.from_local(whole, own.device_mesh, [Replicate()] * len(shape))
        rows = distribute_tensor(whole, mesh, [Shard(0)] * len(shape))
        for given in (own, last, copies, rows, last.view(7, 5, 1).squeeze(-1)):
            made = distribute_tensor(given, first.device_mesh, first.placements)
            assert type(made) is ShardedTensor
            assert torch.equal(made.to_local(), first.spec.slice_full(whole))


@on_ranks(3)
def test_gradients_come_back_to_the_dtensor() -> None:
    weight: typing.Any = sharded((3,), is_of_torch=True)[0].weight
    whole = whole_like(weight).requires_grad_()
    slope = torch.rand(weight.shape, dtype=weight.dtype)
    with shardkit.install():
        made: typing.Any = DTensor.from_local(whole, weight.device_mesh, [Replicate()])
        cut = made.redistribute(placements=weight.placements)
        (cut * slope).sum().backward()
    torch.testing.assert_close(whole.grad, slope)


@on_ranks(3)
def test_other_shapes_and_meshes_are_refused() -> None:
    model = sharded((3,), is_of_torch=True)
    weight, pair = model[0].weight, init_torch_mesh("cpu", (3, 1))
    with shardkit.install():
        other = DTensor.from_local(torch.ones(5, 7), weight.device_mesh, [Replicate()])
        with pytest.raises(ShardedTensorError, match=r"redistribute got placements .*\(7, 5\)"):
            other.redistribute(placements=weight.placements)
        other = DTensor.from_local(torch.ones(7, 5), pair, [Replicate(), Replicate()])
        with pytest.raises(ShardedTensorError, match=r"DTensor.redistribute got device_mesh="):
            other.redistribute(placements=weight.placements)


# --- placements of gradients ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", MESHES)
@on_ranks("shape")
def test_gradients_are_summed_over_axes_with_partial(shape: tuple[int, ...]) -> None:
    """Fused losses use a head's weight outside of its forward, and say how to add gradients up."""
    weight: typing.Any = sharded(shape, is_of_torch=True)[0].weight
    rank, size = dist.get_rank(), dist.get_world_size()
    total = size * (size + 1) / 2
    cases: list[tuple[list[typing.Any], float]] = [
        ([Partial()] * len(shape), total),
        ([Partial("avg")] * len(shape), total / size),
        ([Replicate()] * len(shape), total / size),
        ([*[Replicate()] * (len(shape) - 1), Partial()], total / size * shape[-1]),
    ]
    for placements, expected in cases:
        gathered = weight.redistribute(placements=[Replicate()] * len(shape))
        for whole in (
            weight.full_tensor(grad_placements=placements),
            gathered.to_local(grad_placements=placements),
        ):
            weight.grad = None
            (whole * (rank + 1)).sum().backward()
            assert torch.allclose(weight.grad.to_local(), torch.tensor(expected).double())
    local = weight.to_local(grad_placements=weight.placements)
    assert torch.equal(local, weight.to_local())


@on_ranks(2)
def test_other_placements_of_gradients_are_refused() -> None:
    weight: typing.Any = sharded((2,), is_of_torch=True)[0].weight
    for wrong in ([Shard(0)], [Partial("max")], [Partial(), Partial()], weight.placements):
        with pytest.raises(ShardedTensorError, match=r"grad_placements=.*expected 1 of Partial"):
            weight.full_tensor(grad_placements=wrong)
    with pytest.raises(ShardedTensorError, match="only the tensor's own placements"):
        weight.to_local(grad_placements=[Replicate()])
