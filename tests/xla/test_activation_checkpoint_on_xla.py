"""`checkpoint_module` on XLA: forward runs again in the graph, with the same random numbers."""

from __future__ import annotations

import copy
import typing

import hlo
import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from pairs import own_graph
from torch import nn
from xla_ranks import on_xla

from shardkit import checkpoint_module, fully_shard

if typing.TYPE_CHECKING:
    from shardkit import DeviceMesh

WIDTH, DEPTH, ROWS = 16, 3, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(torch.tanh(self.up(x)), 0.5, self.training)
        return x + torch.tanh(self.down(hidden))


def make(mesh: DeviceMesh, plain: nn.Sequential, *, keeps_inputs_only: bool) -> nn.Module:
    model = on_xla(plain)
    for layer in model:
        if keeps_inputs_only:
            checkpoint_module(layer)
        fully_shard(layer, mesh)
    return fully_shard(model, mesh)


def backward(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    xm.set_rng_state(5)
    model(x).square().mean().backward()
    return [param.grad.local_piece for param in model.parameters()]


@pytest.mark.parametrize("training", [True, False])
def test_gradients_are_those_of_one_forward(training: bool, mesh: DeviceMesh) -> None:
    plain = nn.Sequential(*(Layer() for _ in range(DEPTH))).train(training)
    x = torch.randn(ROWS, WIDTH)
    found = [
        [grad.cpu() for grad in backward(make(mesh, plain, keeps_inputs_only=again), x)]
        for again in (True, False)
    ]
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-7)


def test_the_graph_runs_forward_twice_and_gathers_as_before(mesh: DeviceMesh) -> None:
    plain = nn.Sequential(*(Layer() for _ in range(DEPTH)))
    counts = {}
    for again in (True, False):
        model = make(mesh, copy.deepcopy(plain), keeps_inputs_only=again)
        for _ in range(2):
            grads = backward(model, torch.randn(ROWS, WIDTH))
            counts[again] = hlo.Program(own_graph(grads)).count()
            torch_xla.sync()
    assert counts[True]["dot"] > counts[False]["dot"]
    assert counts[True]["opt-barrier"] > counts[False]["opt-barrier"]
    for opcode in ("all-gather", "reduce-scatter"):
        assert counts[True][opcode] == counts[False][opcode]
