"""Checkpoints that an earlier version wrote, with all its classes and modules at other addresses.

`tests/golden` was written by two ranks at commit 2d7c38e: state dicts, a checkpoint, files of
single ranks, whole tensors, and the values that must come out.
"""

from __future__ import annotations

import typing
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shardkit import MixedPrecisionPolicy, ShardedTensor, fully_shard, init_device_mesh
from shardkit import checkpoint as shardkit_checkpoint
from workers import Spawn, on_ranks

GOLDEN = Path(__file__).parent.parent / "golden"
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def own_file(kind: str) -> Path:
    return GOLDEN / f"{kind}-{dist.get_rank()}.pt"


def expected() -> dict[str, typing.Any]:
    values: dict[str, typing.Any] = torch.load(GOLDEN / "expected.pt")
    return values


def make() -> nn.Module:
    """Return a sharded model of the golden one's shape, with other values."""
    torch.manual_seed(1)
    inner = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
    pair = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 2)])
    model = nn.Sequential(nn.Linear(3, 4), inner, pair, nn.GRU(2, 2))
    model.double()
    model[3].float()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh, mp_policy=BF16)
    for part in (model[1], list(pair), model):
        fully_shard(part, mesh=mesh)
    return model


def check_model(model: nn.Module) -> None:
    wholes = {
        name: value.full_tensor() if isinstance(value, ShardedTensor) else value
        for name, value in model.state_dict().items()
    }
    torch.testing.assert_close(wholes, expected()["model"], rtol=0, atol=0)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    wholes = {
        index: {
            key: value.full_tensor() if isinstance(value, ShardedTensor) else value
            for key, value in state.items()
        }
        for index, state in optimizer.state_dict()["state"].items()
    }
    torch.testing.assert_close(wholes, expected()["optimizer"], rtol=0, atol=0)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def load_checkpoint() -> None:
    model = make()
    optimizer = make_optimizer(model)
    extra = shardkit_checkpoint.load(GOLDEN / "checkpoint", model, optimizer)
    assert extra == {"step": 3}
    check_model(model)
    check_optimizer(optimizer)


@on_ranks(2)
def test_state_dicts_load() -> None:
    model = make()
    optimizer = make_optimizer(model)
    states = torch.load(own_file("states"), weights_only=True)
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    check_model(model)
    check_optimizer(optimizer)


def test_a_checkpoint_loads_on_two_ranks(spawn: Spawn) -> None:
    spawn(load_checkpoint, 2)


def test_a_checkpoint_loads_on_three_ranks(spawn: Spawn) -> None:
    spawn(load_checkpoint, 3)


@on_ranks(2)
def test_files_of_single_ranks_load() -> None:
    model = make()
    optimizer = make_optimizer(model)
    state = torch.load(own_file("local"), weights_only=True)
    shardkit_checkpoint.load_local_state_dict(model, state, optimizer)
    check_model(model)
    check_optimizer(optimizer)


@on_ranks(2)
def test_whole_tensors_load() -> None:
    model = make()
    shardkit_checkpoint.load_full(GOLDEN / "full.pt", model)
    check_model(model)
