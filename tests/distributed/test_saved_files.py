"""Files that ranks save by `torch.save`, loaded by others in a new process group."""

from __future__ import annotations

import typing
from pathlib import Path
from pathlib import Path as PathType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from models import CASES
from reference import OPTIMIZERS, full_parameters, make_mesh, my_batch, shard, train

if typing.TYPE_CHECKING:
    from workers import Spawn

Result = tuple[list[float], dict[str, Tensor]]

CASE = CASES["gpt"]
STEPS = 3


def rank_file(folder: str, what: str, rank: int | None = None) -> PathType:
    return Path(folder) / f"{what}{dist.get_rank() if rank is None else rank}.pt"


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> Result:
    batches = [my_batch(CASE, step) for step in range(STEPS, 2 * STEPS)]
    losses = [loss.item() for loss in train(CASE, model, optimizer, batches)]
    return losses, full_parameters(model)


def train_and_save(mesh_shape: tuple[int, ...], folder: str) -> Result:
    """Return what training on without a break gives."""
    torch.manual_seed(0)
    model = shard(CASE, CASE.make(), make_mesh(mesh_shape))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    list(train(CASE, model, optimizer, [my_batch(CASE, step) for step in range(STEPS)]))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, rank_file(folder, "state"))
    torch.save((model, optimizer), rank_file(folder, "module"))
    return go_on(model, optimizer)


def load_state(mesh_shape: tuple[int, ...], folder: str) -> Result:
    torch.manual_seed(1)
    model = shard(CASE, CASE.make(), make_mesh(mesh_shape))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    state = torch.load(rank_file(folder, "state"), weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return go_on(model, optimizer)


def load_module(mesh_shape: tuple[int, ...], folder: str) -> Result:
    """A 1-D mesh over the world is found without being made."""
    mesh = make_mesh(mesh_shape) if len(mesh_shape) > 1 else None
    model, optimizer = torch.load(rank_file(folder, "module"), weights_only=False)
    del mesh
    return go_on(model, optimizer)


@pytest.mark.parametrize("load", [load_state, load_module])
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=str)
def test_training_goes_on_bit_for_bit(
    spawn: Spawn,
    tmp_path: PathType,
    mesh_shape: tuple[int, ...],
    load: typing.Callable[..., Result],
) -> None:
    world_size = torch.Size(mesh_shape).numel()
    expected = spawn(train_and_save, world_size, mesh_shape, str(tmp_path))
    results = spawn(load, world_size, mesh_shape, str(tmp_path))
    for (losses, parameters), (other_losses, others) in zip(results, expected, strict=True):
        assert losses == other_losses
        for name, value in others.items():
            assert torch.equal(parameters[name], value), name


def load_alone(folder: str) -> list[int]:
    """Load on one rank only: nothing is sent, also where no mesh was made yet."""
    if dist.get_rank() == 1:
        return []
    loaded = torch.load(rank_file(folder, "state"), weights_only=True)
    return [tensor.to_local().numel() for tensor in loaded["model"].values()]


def load_of_rank(folder: str, rank: int) -> None:
    torch.load(rank_file(folder, "state", rank), weights_only=True)


def test_the_wrong_file_or_number_of_ranks_is_said(
    spawn: Spawn, spawn_errors: Spawn, tmp_path: PathType
) -> None:
    spawn(train_and_save, 2, (2,), str(tmp_path))
    assert sum(spawn(load_alone, 2, str(tmp_path))[0]) > 0
    errors = spawn_errors(load_of_rank, 2, str(tmp_path), 0)
    assert errors[0] is None
    assert errors[1].type_name == "ShardedTensorError"
    assert "shard 0" in errors[1].message
    for error in spawn_errors(load_of_rank, 3, str(tmp_path), 0):
        assert error.type_name == "MeshError"
        assert "2 processes" in error.message
