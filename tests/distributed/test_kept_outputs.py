"""Ranks that keep outputs, with the graphs behind them, beside ranks that drop theirs.

Whether a graph still exists is no business of the other ranks, so nothing that is communicated may
depend on it.
"""

from __future__ import annotations

import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models import MLP
from shardkit import fully_shard

if typing.TYPE_CHECKING:
    from workers import Spawn


def shard_layers(reshard_after_forward: bool | int | None) -> MLP:
    torch.manual_seed(4)
    model = MLP((7, 700, 700, 700, 5))  # Layers of more than a batch of small ones.
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard_after_forward)
    return fully_shard(model)


def keep_on_rank_0(reshard_after_forward: bool | int | None) -> list[float]:
    """Return the losses of two steps; before each come forwards that nobody goes back through."""
    model = shard_layers(reshard_after_forward)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(dist.get_rank()))
    kept: list[Tensor] = []
    losses = []
    for _ in range(2):
        for probe in range(3):
            out = model(x * probe)
            if dist.get_rank() == 0:
                kept.append(out)
            del out
        with torch.no_grad():
            model(x)
        for _ in range(2):
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
            del loss
        optimizer.step()
        optimizer.zero_grad()
    return losses


def plain_losses(world_size: int) -> list[list[float]]:
    torch.manual_seed(4)
    model = MLP((7, 700, 700, 700, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generators = [torch.Generator().manual_seed(rank) for rank in range(world_size)]
    xs = [torch.randn(4, 7, generator=generator) for generator in generators]
    losses: list[list[float]] = [[] for _ in xs]
    for _ in range(2):
        for _ in range(2):
            per_rank = [model(x).square().mean() for x in xs]
            (sum(per_rank) / world_size).backward()
            for found, loss in zip(losses, per_rank, strict=True):
                found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("world_size", "reshard_after_forward"), [(2, True), (2, False), (2, None), (4, 2)]
)
def test_one_rank_keeps_outputs_that_others_drop(
    spawn: Spawn, world_size: int, reshard_after_forward: bool | int | None
) -> None:
    found = spawn(keep_on_rank_0, world_size, reshard_after_forward)
    for losses, expected in zip(found, plain_losses(world_size), strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)  # Sums of 700 numbers in another order.


class WithHead(MLP):
    """Returns what its last layer is given as well."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return x, self.layers[-1](x)


def go_around_the_head() -> list[float]:
    """Rank 0's backward comes to the last layer, which is not gathered for it; rank 1's not."""
    torch.manual_seed(4)
    model = WithHead((7, 700, 700, 700))
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model)
    x = torch.ones(2, 7)
    norms = []
    for _ in range(2):
        for _ in range(3):
            hidden, head = model(x)
            (head if dist.get_rank() == 0 else hidden).square().mean().backward()
            with torch.no_grad():
                model(x)
        grads = [param.grad.full_tensor().norm() for param in model.parameters()]
        norms += [norm.item() for norm in grads]
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(0.01 * param.grad)
        model.zero_grad()
    return norms


def test_one_rank_goes_around_the_last_layer(spawn: Spawn) -> None:
    first, second = spawn(go_around_the_head, 2)
    assert first == second
    assert all(norm > 0 for norm in first)
