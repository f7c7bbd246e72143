"""Parameters that a module unshards by hand in its forward, and uses without their own forward."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
from torch import Tensor, nn

from reference import make_mesh
from shardkit import ShardedTensor, fully_shard

if typing.TYPE_CHECKING:
    from workers import Spawn

MAX_NORM = 0.01


class Adapted(nn.Module):
    """A layer that computes with its adapters' weights, as fused kernels for LoRA do."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 5).requires_grad_(requires_grad=False)
        self.down = nn.Linear(5, 3, bias=False)
        self.up = nn.Linear(3, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for adapter in (self.down, self.up):
            if isinstance(adapter.weight, ShardedTensor):
                adapter.unshard()  # type: ignore[operator]
        return torch.tanh(self.base(x) + x @ self.down.weight.t() @ self.up.weight.t())


def train(num_backwards: int) -> float:
    """Return how far norms and weights are from those of a plain model with all ranks' batches."""
    mesh = make_mesh((torch.distributed.get_world_size(),))
    model = nn.Sequential(Adapted(), Adapted()).double()
    plain = copy.deepcopy(model)
    for layer in model:
        for adapter in (layer.down, layer.up):
            fully_shard(adapter, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = [[p for p in each.parameters() if p.requires_grad] for each in (model, plain)]
    optimizers = [torch.optim.SGD(params, lr=1.0) for params in trained]
    largest = 0.0
    for _ in range(2):
        for _ in range(num_backwards):
            batches = torch.randn(mesh.size(), 4, 5, dtype=torch.float64)
            model(batches[mesh.get_rank()]).square().mean().backward()
            assert all(isinstance(p, ShardedTensor) for p in model.parameters())
            plain(batches).square().mean().backward()
        norms = [nn.utils.clip_grad_norm_(each.parameters(), MAX_NORM) for each in (model, plain)]
        largest = max(largest, float(norms[0] - norms[1]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for own, whole in zip(model.parameters(), plain.parameters(), strict=True):
            largest = max(largest, float((own.detach() - whole.detach()).abs().max()))
    assert model.memory_stats()["unsharded_nbytes"] == 0
    return largest


@pytest.mark.parametrize("num_backwards", [1, 2])
def test_the_end_of_backward_gives_back_what_a_forward_unsharded(
    spawn: Spawn, num_backwards: int
) -> None:
    """Otherwise norms of all gradients miss those of the adapters."""
    assert max(spawn(train, 3, num_backwards)) < 1e-12
