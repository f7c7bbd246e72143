"""A group may have only empty parameters of some dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from reference import make_mesh
from shardkit import fully_shard
from workers import on_ranks


class Layer(nn.Module):
    """Its parameters of float64 are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.empty = nn.Parameter(torch.ones(0, 3, dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.weight.sum() + self.empty.sum()


@on_ranks(2)
def test_empty_parameters_get_empty_gradients() -> None:
    for mesh_shape in ((2,), (2, 1)):
        model = fully_shard(Layer(), mesh=make_mesh(mesh_shape))
        for num_backwards in (1, 2):
            model().backward()
            assert torch.equal(model.weight.grad.full_tensor(), torch.full((3,), num_backwards))
            assert model.empty.grad.shape == (0, 3)
