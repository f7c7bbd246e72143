"""Ranks with unequal data take equally many steps."""

from __future__ import annotations

import typing

import pytest
import torch
import torch.distributed as dist
from torch import nn

from reference import make_mesh
from shardkit import MeshError, StateError, even_steps, fully_shard

if typing.TYPE_CHECKING:
    from workers import Spawn


def batches_of(rank: int) -> list[int]:
    """Return 3, 5, 7, ... batches, whose numbers say whose they are."""
    return [10 * rank + i for i in range(3 + 2 * rank)]


def iterate(mesh_shape: tuple[int, ...], uneven: str) -> list[tuple[int, float]]:
    steps = even_steps(batches_of(dist.get_rank()), make_mesh(mesh_shape), uneven=uneven)
    first = [(batch, steps.weight) for batch in steps]
    again = [(batch, steps.weight) for batch in steps]
    assert first == again, "another epoch begins anew"
    assert steps.num_steps == len(first)
    return first


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_all_stop_with_the_first(spawn: Spawn, mesh_shape: tuple[int, ...]) -> None:
    world_size = 2 * len(mesh_shape)
    for rank, seen in enumerate(spawn(iterate, world_size, mesh_shape, "stop")):
        assert seen == [(10 * rank + i, 1.0) for i in range(3)]


def test_all_batches_are_seen_and_some_twice(spawn: Spawn) -> None:
    first, second = spawn(iterate, 2, (2,), "repeat")
    assert [batch for batch, _ in first] == [0, 1, 2, 0, 1]
    assert [batch for batch, _ in second] == [10, 11, 12, 13, 14]
    assert {weight for _, weight in (*first, *second)} == {1.0}


def test_who_has_no_batch_joins_with_weight_zero(spawn: Spawn) -> None:
    first, second = spawn(iterate, 2, (2,), "join")
    assert first == [(0, 1.0), (1, 1.0), (2, 1.0), (2, 0.0), (2, 0.0)]
    assert second == [(10 + i, 1.0) for i in range(5)]


def train_unevenly(uneven: str) -> tuple[int, list[float]]:
    """Train on unequal data; return the number of steps and the weights."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(3, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = even_steps(
        [torch.full((2, 3), float(b)) for b in batches_of(dist.get_rank())], uneven=uneven
    )
    for batch in steps:
        (model(batch).mean() * steps.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    return steps.num_steps, model.weight.full_tensor().flatten().tolist()


def test_joined_ranks_do_not_change_the_gradients(spawn: Spawn) -> None:
    """The gradient of a step is the sum over those that have a batch, over all ranks."""
    torch.manual_seed(0)
    weight = nn.Linear(3, 1, bias=False).weight.detach().flatten()
    for step in range(5):
        own = [batches_of(rank)[step] for rank in range(2) if step < len(batches_of(rank))]
        weight = weight - 0.1 * sum(own) / 2
    for num_steps, found in spawn(train_unevenly, 2, "join"):
        assert num_steps == 5
        assert found == pytest.approx(weight.tolist(), rel=1e-5)


def iterate_without_data() -> None:
    list(even_steps([1, 2] if dist.get_rank() else [], uneven="repeat"))


def test_a_rank_without_any_batch_is_named_on_all(spawn_errors: Spawn) -> None:
    for error in spawn_errors(iterate_without_data, 2, timeout_s=20):
        assert error is not None
        assert "rank 0 has no batch at all" in error.message


def test_other_modes_are_refused() -> None:
    with pytest.raises(StateError, match="uneven must be one of 'stop', 'repeat', 'join'"):
        even_steps([], uneven=typing.cast("typing.Any", "drop"))


def test_a_mode_in_the_place_of_the_mesh_is_refused() -> None:
    with pytest.raises(MeshError, match="mesh must be a shardkit or torch DeviceMesh"):
        even_steps([], typing.cast("typing.Any", "join"))
