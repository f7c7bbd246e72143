"""`checkpoint_module` on XLA: forward runs again in the graph, with the same random numbers."""

from __future__ import annotations

import copy

import hlo
import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import nn
from xla_graphs import own_graph
from xla_ranks import on_xla

from shardkit import DeviceMesh, checkpoint_activations, checkpoint_module, fully_shard

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


def test_products_that_are_kept_are_not_in_the_graph_again(mesh: DeviceMesh) -> None:
    plain = nn.Sequential(*(Layer() for _ in range(DEPTH)))
    choices = {"no": None, "all": {}, "matmuls": {"operators": "matmuls"}}
    choices["half"] = {"operators": "every_second_matmul"}
    counts, gradients = {}, {}
    for name, options in choices.items():
        model = on_xla(plain)
        if options is not None:
            checkpoint_activations(model, **options)
        for layer in model:
            fully_shard(layer, mesh)
        fully_shard(model, mesh)
        torch.manual_seed(3)
        for _ in range(2):
            grads = backward(model, torch.randn(ROWS, WIDTH))
            counts[name] = hlo.Program(own_graph(grads)).count()
            gradients[name] = [grad.cpu() for grad in grads]
            torch_xla.sync()
    dots = {name: count["dot"] for name, count in counts.items()}
    # The first layer's input needs no gradient; its two products are repeated all the same.
    assert dots["all"] == dots["no"] + 2 * DEPTH
    assert dots["half"] == dots["no"] + DEPTH
    assert dots["matmuls"] == dots["no"]
    for name in ("all", "half", "matmuls"):
        assert counts[name]["all-gather"] == counts["no"]["all-gather"]
        for mine, expected in zip(gradients[name], gradients["no"], strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-7)


class Normalized(nn.Module):
    """Reads a table, writes statistics, and reads a scale before it writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("table", torch.randn(WIDTH))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.linear(x)) * self.table * self.scale.clone()
        with torch.no_grad():
            self.scale.mul_(0.5).add_(hidden.abs().mean())
        return torch.tanh(hidden)


def test_buffers_are_read_again_and_written_once(mesh: DeviceMesh) -> None:
    plain = nn.Sequential(Normalized(), nn.Linear(WIDTH, 2))
    models = [make(mesh, plain, keeps_inputs_only=again) for again in (True, False)]
    x = torch.randn(ROWS, WIDTH)
    grads = [[grad.cpu() for grad in backward(model, x)] for model in models]
    for mine, expected in zip(*grads, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-7)
    for (name, mine), expected in zip(models[0].named_buffers(), models[1].buffers(), strict=True):
        torch.testing.assert_close(mine.cpu(), expected.cpu(), rtol=0, atol=0, msg=name)
    assert models[0][0].norm.num_batches_tracked.item() == 1
