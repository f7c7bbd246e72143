"""Models larger than memory on XLA: materialized, or built while they are sharded."""

from __future__ import annotations

import typing

import pytest
import torch
import torch_xla
from torch import Tensor, nn
from xla_graphs import sharding_of

from parity import ROWS
from shardkit import DeviceMesh, StateError, fully_shard, materialize
from shardkit.checkpoint import load_full

FOUR_PARTS = "{devices=[4]0,1,2,3}"


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 6)
        self.register_buffer("table", torch.arange(6.0), persistent=False)

    def reset_parameters(self) -> None:
        self.table = torch.arange(6.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.table


def make() -> nn.Sequential:
    return nn.Sequential(Scaled(), nn.Linear(6, 8), nn.Linear(8, 3))


def assert_same(model: nn.Module, plain: nn.Module, x: Tensor) -> None:
    for name, param in plain.named_parameters():
        mine = typing.cast("typing.Any", model.get_parameter(name))
        assert torch.equal(mine.full_tensor().cpu(), param), name
        assert sharding_of(mine.local_piece) == FOUR_PARTS
    torch.testing.assert_close(model(x.to("xla")).cpu(), plain(x), rtol=0, atol=1e-6)
    torch_xla.sync()


def test_values_are_those_of_the_plain_model_on_the_host(mesh: DeviceMesh) -> None:
    torch.manual_seed(3)
    plain = make()
    with torch.device("meta"):
        model = make()
    for module in (*model, model):
        fully_shard(module, mesh)
    x = torch.randn(ROWS, 7)
    with pytest.raises(StateError, match="on the meta device"):
        model(x.to("xla"))
    torch.manual_seed(3)
    materialize(model)
    assert model[0].table.device.type == "xla"
    assert_same(model, plain, x)


def test_a_state_dict_of_the_first_process_and_tables(mesh: DeviceMesh) -> None:
    plain = make()
    with torch.device("meta"):
        model = make()
    fully_shard(model, mesh)
    loaded = load_full(plain.state_dict(), model, broadcast_from_rank0=True)
    assert loaded.meta_keys == []
    assert_same(model, plain, torch.randn(ROWS, 7))


def test_layers_are_sharded_as_soon_as_they_are_made(mesh: DeviceMesh) -> None:
    torch.manual_seed(3)
    plain = make()
    torch.manual_seed(3)
    layers = [fully_shard(Scaled().to("xla"), mesh)]
    layers += [fully_shard(nn.Linear(*shape).to("xla"), mesh) for shape in ((6, 8), (8, 3))]
    model = fully_shard(nn.Sequential(*layers), mesh)
    assert_same(model, plain, torch.randn(ROWS, 7))


class Parent(nn.Module):
    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        self.linear = nn.Linear(7, 3)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.reads:
            self.linear.weight.data.mul_(2)
        nn.init.xavier_uniform_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_parents_may_overwrite_what_modules_inside_hold(mesh: DeviceMesh) -> None:
    torch.manual_seed(3)
    plain = Parent(reads=False)
    with torch.device("meta"):
        model, reader = Parent(reads=False), Parent(reads=True)
    torch.manual_seed(3)
    materialize(fully_shard(model, mesh))
    assert_same(model, plain, torch.randn(ROWS, 7))
    with pytest.raises(StateError, match=r"reads parameter 'linear\.weight' .* On XLA"):
        materialize(fully_shard(reader, mesh))
