"""Checkpoints of models that are tensor-parallel as well: to and from any other mesh."""

from __future__ import annotations

import math
import typing

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import parallel_models
from checkpoints import WholeState, assert_same, whole, whole_state
from reference import OPTIMIZERS, make_mesh, rank_batch, shard, train
from shardkit import fully_shard
from shardkit.checkpoint import get_state_dict, set_state_dict

if typing.TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

    from workers import Spawn

pytestmark = pytest.mark.helpers


def make(
    name: str, mesh_shape: tuple[int, ...], seed: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a model on a mesh: of two axes the last is tensor-parallel."""
    torch.manual_seed(seed)
    case = parallel_models.CASES[name].case
    if len(mesh_shape) > 1:
        _, model = parallel_models.make(name, mesh_shape)
    else:
        model = shard(case, case.make(), make_mesh(mesh_shape))
    return model, OPTIMIZERS["adamw"](model.parameters())


def save(name: str, mesh_shape: tuple[int, ...], folder: str) -> WholeState:
    model, optimizer = make(name, mesh_shape, seed=0)
    case, data_rank = parallel_models.CASES[name].case, dist.get_rank() // math.prod(mesh_shape[1:])
    list(train(case, model, optimizer, [rank_batch(case, data_rank, step) for step in range(2)]))
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=folder)
    return whole_state(model, optimizer)


def load(name: str, mesh_shape: tuple[int, ...], folder: str) -> WholeState:
    model, optimizer = make(name, mesh_shape, seed=7)
    case = parallel_models.CASES[name].case
    list(train(case, model, optimizer, [rank_batch(case, 0, 5)]))
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state)
    return whole_state(model, optimizer)


# The vocabulary of the first is split unevenly.
@pytest.mark.parametrize("name", ["gpt", "gated"])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((2, 2), (3,)), ((2,), (2, 2)), ((1, 2), (2, 2)), ((2, 2), (1, 2))],
    ids=str,
)
def test_saved_on_one_mesh_loads_on_another(
    spawn: Spawn, tmp_path: Path, name: str, saved: tuple[int, ...], loaded: tuple[int, ...]
) -> None:
    expected, *others = spawn(save, math.prod(saved), name, saved, str(tmp_path))
    for other in others:
        assert_same(other, expected)
    for state in spawn(load, math.prod(loaded), name, loaded, str(tmp_path)):
        assert_same(state, expected)


class Uneven(nn.Module):
    """Behind rows that are split unevenly, others that all ranks of a tensor-parallel mesh have."""

    def __init__(self, tp: DeviceMesh | None, other_tp: DeviceMesh | None = None) -> None:
        super().__init__()
        rows, copied, plain = torch.randn(5, 8), torch.randn(33), torch.randn(64)
        self.rows = nn.Parameter(rows if tp is None else distribute_tensor(rows, tp, [Shard(0)]))
        self.copied = nn.Parameter(
            copied if tp is None else distribute_tensor(copied, other_tp or tp, [Replicate()])
        )
        self.plain = nn.Parameter(plain)

    def forward(self) -> None:
        """Never run."""


def make_uneven(mesh_shape: tuple[int, ...], seed: int, *, num_meshes: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    if len(mesh_shape) == 1:
        return fully_shard(Uneven(None), make_mesh(mesh_shape))
    dp, tp = parallel_models.make_meshes(mesh_shape)
    other_tp = parallel_models.make_meshes(mesh_shape)[1] if num_meshes > 1 else None
    return fully_shard(Uneven(tp, other_tp), dp)


def save_uneven(
    mesh_shape: tuple[int, ...], folder: str, num_meshes: int
) -> tuple[WholeState, tuple[int, int]]:
    model = make_uneven(mesh_shape, seed=0, num_meshes=num_meshes)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    return whole(model.state_dict()), (model.plain.spec.start, model.plain.spec.stop)


def load_uneven(mesh_shape: tuple[int, ...], folder: str) -> WholeState:
    model = make_uneven(mesh_shape, seed=7)
    dcp.load(model.state_dict(), checkpoint_id=folder)
    return whole(model.state_dict())


@pytest.mark.parametrize(("num_meshes", "loaded"), [(1, (3,)), (1, (2, 2)), (2, (3,))], ids=str)
def test_copies_that_are_cut_differently_are_written_once(
    spawn: Spawn, tmp_path: Path, num_meshes: int, loaded: tuple[int, ...]
) -> None:
    """Also on two equal meshes: torch's caches give DTensors the mesh of a model before."""
    saved = spawn(save_uneven, 4, (2, 2), str(tmp_path), num_meshes)
    assert saved[0][1] != saved[1][1]  # The same part of the shard axis.
    for state in spawn(load_uneven, math.prod(loaded), loaded, str(tmp_path)):
        assert_same(state, saved[0][0])
