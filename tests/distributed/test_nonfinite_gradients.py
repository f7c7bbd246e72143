"""Gradients that are not finite are named: parameter, group and the rank on which they began."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from models import CASES
from reference import make_mesh, my_batch, shard
from shardkit import NonFiniteGradientError, fully_shard, set_watch
from workers import Spawn, on_ranks

MESHES = ((2,), (2, 2), (1,))


def spoil(rank: int | None, mesh_shape: tuple[int, ...], check: bool, late: bool) -> str | None:
    """Train; on one rank a block of the middle gives NaN; return what is said of it."""
    set_watch(check_gradients=check)
    case = CASES["gpt"]
    torch.manual_seed(0)
    model = shard(case, case.make(), make_mesh(mesh_shape))
    if late:
        case.loss(model, my_batch(case, 0)).backward()
        model.check_gradients()
        model.zero_grad()

    def spoil_gradient(_module: object, _inputs: object, output: torch.Tensor) -> None:
        if dist.get_rank() == rank:
            output.register_hook(lambda grad: grad * float("nan"))

    model.blocks[1].fc1.register_forward_hook(spoil_gradient)
    case.loss(model, my_batch(case, 1)).backward()
    try:
        model.check_gradients()
    except NonFiniteGradientError as error:
        return str(error)
    finally:
        set_watch(check_gradients=False)
    return None


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("late", [False, True])
def test_the_rank_and_the_layer_where_they_begin_are_named(
    spawn: Spawn, mesh_shape: tuple[int, ...], late: bool
) -> None:
    world_size = torch.Size(mesh_shape).numel()
    culprit = world_size - 1
    for said in spawn(spoil, world_size, culprit, mesh_shape, True, late):
        assert said is not None
        assert f"on rank {culprit} first in 'blocks.1.fc1." in said, said
        assert said.count("on rank") == 1, said


def test_without_the_switch_the_parameters_are_named(spawn: Spawn) -> None:
    found = spawn(spoil, 2, 1, (2,), False, False)
    assert found[0] == found[1]
    assert found[0] is not None
    assert "after they were averaged: " in found[0]
    assert "set_watch(check_gradients=True)" in found[0]


@pytest.mark.parametrize("check", [False, True])
def test_finite_gradients_pass(spawn: Spawn, check: bool) -> None:
    assert spawn(spoil, 2, None, (2,), check, True) == [None, None]


@on_ranks(2)
def test_before_the_first_forward_there_is_nothing_to_check() -> None:
    case = CASES["mlp"]
    shard(case, case.make(), make_mesh((2,))).check_gradients()


@on_ranks(2)
def test_without_parameters_there_is_nothing_to_check() -> None:
    mesh = make_mesh((2,))
    model = nn.Sequential(nn.Linear(2, 2), fully_shard(nn.ReLU(), mesh=mesh))
    fully_shard(model, mesh=mesh)(torch.ones(2)).sum().backward()
    model[1].check_gradients()
