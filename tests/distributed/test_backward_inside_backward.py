"""User code that calls backward inside of a backward, once for each part of a batch."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from reference import full_grads
from shardkit import fully_shard
from workers import on_ranks

if typing.TYPE_CHECKING:
    from workers import Spawn

NUM_TILES = 3


class _Tiled(torch.autograd.Function):
    """Runs a module on parts of its input, so that activations of one part are alive at a time."""

    @staticmethod
    def forward(ctx: typing.Any, module: nn.Module, x: Tensor, sums: bool, *_: Tensor) -> Tensor:
        ctx.module, ctx.sums = module, sums
        ctx.params = [*module.parameters()]
        ctx.save_for_backward(x)
        return torch.cat([module(tile) for tile in x.chunk(NUM_TILES)])

    @staticmethod
    def backward(ctx: typing.Any, grad: Tensor) -> typing.Any:
        (x,), of_tiles = ctx.saved_tensors, []
        totals = [torch.zeros_like(param) for param in ctx.params]
        for index, part in enumerate(grad.chunk(NUM_TILES)):
            tile = x.chunk(NUM_TILES)[index].detach().requires_grad_()
            is_last = index == NUM_TILES - 1
            handles = [
                param.register_hook(_sum_up(param, total, is_last=is_last))
                for param, total in zip(ctx.params, totals, strict=True)
                if ctx.sums
            ]
            with torch.enable_grad():
                out = ctx.module(tile)
            torch.autograd.backward(out, part)
            for handle in handles:
                handle.remove()
            of_tiles.append(tile.grad)
        return None, torch.cat(of_tiles), None, *[None] * len(ctx.params)


def _sum_up(param: Tensor, total: Tensor, *, is_last: bool) -> typing.Any:
    """Return a hook that adds the gradients of tiles, and gives the sum to the last one alone."""

    def hook(grad: Tensor) -> Tensor | None:
        total.add_(grad)
        if not is_last:
            return None
        param.grad = None  # What autograd has added up for the other tiles.
        return total

    return hook


class Block(nn.Module):
    """A layer that also has a parameter outside of what is tiled; of over 1 MiB if it is wide."""

    def __init__(self, width: int, sums: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.mlp = nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.Linear(width, 6))
        self.sums = sums

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        params = self.mlp.parameters()
        tiled: Tensor = _Tiled.apply(self.mlp, x, self.sums, *params)  # type: ignore[no-untyped-call]
        return x + tiled


def tiles_beside_plain(width: int, layers: bool, sums: bool, num_backwards: int) -> float:
    """Return by how much a gradient differs from the mean of plain ones over the ranks."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), Block(width, sums), Block(width, sums)).double()
    model = copy.deepcopy(plain)
    if layers:
        for layer in model[1:]:
            fully_shard(layer)
    fully_shard(model)
    num_ranks = dist.get_world_size()
    for _ in range(num_backwards):
        batches = torch.randn(num_ranks, 7, 6, dtype=torch.float64)
        model(batches[dist.get_rank()]).square().mean().backward()
        for batch in batches:
            # The hooks drop what is in `.grad`, so each rank's gradients need a model of their own.
            alone = copy.deepcopy(plain)
            alone.zero_grad()
            (alone(batch).square().mean() / num_ranks).backward()
            for param, other in zip(plain.parameters(), alone.parameters(), strict=True):
                assert other.grad is not None
                param.grad = other.grad if param.grad is None else param.grad + other.grad
    found, expected = full_grads(model), full_grads(plain)
    differences = [(found[name] - grad).abs().max().item() for name, grad in expected.items()]
    return max(differences)


@pytest.mark.parametrize("sums", [False, True], ids=["added", "summed by hooks"])
@pytest.mark.parametrize("layers", [False, True], ids=["root", "layers"])
@pytest.mark.parametrize("width", [6, 40_000])
def test_tiles_of_a_batch(spawn: Spawn, width: int, layers: bool, sums: bool) -> None:
    """Gradients of tiles stay in `.grad` until all have come, so code may sum and drop them."""
    for found in spawn(tiles_beside_plain, 2, width, layers, sums, 2):
        assert found < 1e-12


def test_tiles_of_a_batch_on_one_rank(spawn: Spawn) -> None:
    [found] = spawn(tiles_beside_plain, 1, 6, True, True, 2)
    assert found < 1e-12


@on_ranks(2)
def test_a_model_that_a_hook_calls_has_its_present_values() -> None:
    """Those of its last evaluation are still unsharded, because it is a root."""
    student = fully_shard(nn.Linear(6, 6))
    teacher = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    plain = copy.deepcopy(teacher)
    for module in (teacher[0], teacher):
        fully_shard(module)
    x, found = torch.randn(4, 6), []

    @torch.no_grad()
    def note(_: Tensor) -> None:
        found.append(teacher(x))

    for factor in (2, 3):
        with torch.no_grad():
            teacher(x)
            for param in (*teacher.parameters(), *plain.parameters()):
                param.mul_(factor)
        out = student(x)
        out.register_hook(note)
        out.sum().backward()
        torch.testing.assert_close(found.pop(), plain(x))
