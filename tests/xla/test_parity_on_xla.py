"""A step on XLA gives the plain model's loss and gradients, whatever the model and the mesh."""

from __future__ import annotations

import typing

import pytest
from pairs import Pair, adamw, num_compiles, sgd, sharding_of

from shardkit._sharded import ShardedTensor

if typing.TYPE_CHECKING:
    from shardkit import DeviceMesh


@pytest.mark.parametrize(
    ("case", "optimizer"),
    [("gpt", sgd), ("tiny", adamw), ("unused", adamw), ("frozen", sgd), ("tied", sgd)],
)
def test_training_is_that_of_the_plain_model(
    case: str, optimizer: typing.Any, mesh: DeviceMesh
) -> None:
    pair = Pair.make(case, mesh, optimizer)
    for _ in range(3):
        pair.step()
    pair.assert_equal()
    for param in pair.sharded.parameters():
        assert isinstance(param, ShardedTensor)
        assert sharding_of(param.local_piece) == "{devices=[4]0,1,2,3}"


def test_steps_after_the_second_compile_nothing(mesh: DeviceMesh) -> None:
    pair = Pair.make("gpt", mesh, adamw)
    for _ in range(2):
        pair.step()
    before = num_compiles()
    for _ in range(3):
        pair.step()
    assert num_compiles() == before


@pytest.mark.parametrize("case", ["gpt", "tied"])
def test_hybrid_sharding(case: str, mesh_2d: DeviceMesh) -> None:
    pair = Pair.make(case, mesh_2d, adamw)
    for _ in range(2):
        pair.step(clip=2.0)
    pair.assert_equal(2e-6)
    piece = next(iter(pair.sharded.parameters())).local_piece
    assert sharding_of(piece) == "{devices=[2,2]0,2,1,3 last_tile_dim_replicate}"


@pytest.mark.parametrize("order", [2.0, float("inf")])
def test_gradients_are_clipped(order: float, mesh: DeviceMesh) -> None:
    pair = Pair.make("mlp", mesh)
    for _ in range(2):
        pair.step(clip=order)
    pair.assert_equal()


@pytest.mark.parametrize("reshard", [True, False])
def test_with_and_without_resharding(reshard: bool, mesh: DeviceMesh) -> None:
    pair = Pair.make("mlp", mesh, reshard_after_forward=reshard)
    for _ in range(2):
        pair.step()
    pair.assert_equal()
