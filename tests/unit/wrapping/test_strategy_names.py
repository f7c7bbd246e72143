"""Strategies: their names, their meshes, what they pass on."""

from __future__ import annotations

import typing

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from models import Block
from recording import recording_mesh
from shardkit import MeshError, Strategy, WrapError, auto_shard, fully_shard, strategy
from shardkit._wrapping.strategies import STRATEGIES
from step_traffic import counted, told, total
from wrapped_models import Stack

if typing.TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.helpers

MESHES = {
    "replicate": (4, 1),
    "zero1": (4,),
    "zero2": (4,),
    "zero3": (4,),
    "hybrid": (2, 2),
    "hybrid_zero2": (2, 2),
}


def test_each_strategy_has_a_mesh_here() -> None:
    assert MESHES.keys() == {each.name for each in STRATEGIES}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ZeRO-1", "zero1"),
        ("zero_2", "zero2"),
        ("full_shard", "zero3"),
        ("SHARD_GRAD_OP", "zero2"),
        ("No_Shard", "replicate"),
        ("DDP", "replicate"),
        ("HYBRID_SHARD", "hybrid"),
        ("_HYBRID_SHARD_ZERO2", "hybrid_zero2"),
        ("HYBRID_SHARD_ZERO2", "hybrid_zero2"),
    ],
)
def test_names(name: str, expected: str) -> None:
    assert strategy(name).name == expected
    assert strategy(strategy(name)) is strategy(name)


@pytest.mark.parametrize("member", ShardingStrategy)
def test_members_of_torchs_enum(member: ShardingStrategy) -> None:
    assert member.name in strategy(member).aliases


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(WrapError, match=r"no strategy 'zero4'. The nearest ones are 'zero"):
        strategy("zero4")


def test_strategies_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        strategy("zero2").name = "other"  # type: ignore[misc]
    assert isinstance(strategy("zero2"), Strategy)


def test_shapes_of_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert strategy("replicate").mesh_shape(8) == (8, 1)
    assert strategy("zero3").mesh_shape(8) == (8,)
    assert strategy("hybrid").mesh_shape(8, 2) == (4, 2)
    for number in (0, -2):
        with pytest.raises(MeshError, match=f"8 ranks in copies of {number}"):
            strategy("hybrid").mesh_shape(8, number)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert strategy("hybrid").mesh_shape(8) == (2, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(MeshError, match="8 ranks in copies of 3"):
        strategy("hybrid").mesh_shape(8)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")  # Hosts of 4, 2 and 2 ranks, for example.
    for local in ("4", "2"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        with pytest.raises(MeshError, match=f"3 hosts have 8 ranks, but this one has {local}"):
            strategy("hybrid").mesh_shape(8)
    assert strategy("hybrid").mesh_shape(8, 2) == (4, 2)


@pytest.mark.parametrize(
    ("name", "shape"), [("zero2", (2, 2)), ("hybrid", (4,)), ("replicate", (4,)), ("ddp", (2, 2))]
)
def test_a_mesh_of_another_shape_is_refused(name: str, shape: Sequence[int]) -> None:
    mesh, _ = recording_mesh(shape)
    for call in (
        lambda: strategy(name).arguments(mesh),
        lambda: auto_shard(Stack(), mesh, Block, strategy=name),
    ):
        with pytest.raises(MeshError, match=r"wants a mesh of shape \("):
            call()


def test_without_a_mesh_only_1d_ones_are_made() -> None:
    assert strategy("zero2").arguments() == {"reshard_after_forward": False}
    with pytest.raises(MeshError, match="without one fully_shard makes a 1-D mesh"):
        strategy("replicate").arguments()


def test_a_strategy_says_what_is_resharded() -> None:
    with pytest.raises(WrapError, match="Leave out reshard_after_forward, or the strategy"):
        auto_shard(Stack(), 4, strategy="zero2", reshard_after_forward=True, apply=False)


def test_by_hand_it_is_what_auto_shard_does() -> None:
    logs = []
    for by_hand in (True, False):
        model, (mesh, log) = (
            nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))),
            recording_mesh((4,)),
        )
        zero1 = strategy("zero1")
        if by_hand:
            for layer in model:
                fully_shard(layer, **zero1.arguments(mesh))
            zero1.prepare(fully_shard(model, **zero1.arguments(mesh)))
        else:
            auto_shard(model, mesh, nn.Linear, strategy="zero1")

        for micro in range(3):
            zero1.begin_micro_batch(model, is_last=micro == 2)
            model(torch.ones(2, 4)).sum().backward()
        logs.append(log)
    assert logs[0] == logs[1]


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_cost_of_a_strategy_is_that_of_its_plan(name: str, micro_batches: int) -> None:
    """And of a step: six blocks of one size, and nothing that is the root's."""

    shape = MESHES[name]
    layers = [nn.Linear(64, 64, bias=False) for _ in range(6)]
    model, (mesh, _) = nn.Sequential(*layers), recording_mesh(shape)
    plan = auto_shard(model, mesh, nn.Linear, strategy=name)
    chosen = strategy(name)

    def step() -> None:
        for micro in range(micro_batches):
            chosen.begin_micro_batch(model, is_last=micro == micro_batches - 1)
            model(torch.ones(2, 64)).sum().backward()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1)

    step()
    step()
    with counted(model) as found:
        step()
    real = total(found)
    assert real == plan.traffic(micro_batches)
    cost = told(name, shape, 6, micro_batches)
    nbytes = sum(group.nbytes for group in plan.groups)
    assert real.all_gathers == cost.all_gathers
    assert real.reduce_scatters == cost.reduce_scatters
    assert real.all_reduces == cost.all_reduces
    assert real.gathered_nbytes == pytest.approx(cost.gathered * nbytes)
    assert real.reduced_nbytes == pytest.approx(cost.reduced * nbytes)
    assert real.all_reduced_nbytes == pytest.approx(cost.all_reduced * nbytes)
    assert plan.memory.shard_nbytes == cost.shards * nbytes
    assert plan.memory.kept_nbytes == cost.whole * nbytes
