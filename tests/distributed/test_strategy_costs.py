"""What strategies really communicate and hold on ranks, beside what the documentation says."""

from __future__ import annotations

import typing

import pytest
import torch
from torch import nn

from reference import make_mesh
from shardkit import auto_shard, strategy
from step_traffic import counted, on_the_wire, told, total

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = pytest.mark.helpers

NUM_LAYERS, DIM = 4, 1024  # Layers of 4 MiB: each has collectives of its own.


def cost_of_a_step(
    chosen: str, mesh_shape: tuple[int, ...], micro_batches: int
) -> dict[str, float]:
    """Train a while; return what the last step communicated, by torch's functions."""
    layers = [nn.Linear(DIM, DIM, bias=False) for _ in range(NUM_LAYERS)]
    model, way = nn.Sequential(*layers), strategy(chosen)
    nbytes = sum(param.nbytes for param in model.parameters())
    plan = auto_shard(model, make_mesh(mesh_shape), nn.Linear, strategy=way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    unsynced: list[int] = []

    def step() -> None:
        for micro in range(micro_batches):
            way.begin_micro_batch(model, is_last=micro == micro_batches - 1)
            (model(torch.ones(1, DIM)) / micro_batches).sum().backward()
            unsynced.append(model.memory_stats()["unsynced_grad_nbytes"])
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    with counted(model) as found, on_the_wire(model) as wire:
        unsynced.clear()
        step()
    cost = told(chosen, mesh_shape, NUM_LAYERS, micro_batches)
    real, stats = total(found), model.memory_stats()
    assert real == plan.traffic(micro_batches)
    assert (real.all_gathers, real.reduce_scatters, real.all_reduces) == (
        cost.all_gathers,
        cost.reduce_scatters,
        cost.all_reduces,
    )
    assert wire["gathered"] == pytest.approx(cost.gathered * nbytes)
    assert wire["reduced"] == pytest.approx(cost.reduced * nbytes)
    assert wire["all-reduced"] == pytest.approx(cost.all_reduced * nbytes)
    assert stats["shard_nbytes"] == cost.shards * nbytes
    if cost.whole:
        assert stats["peak_unsharded_nbytes"] == nbytes
    state = optimizer.state[next(model.parameters())]["exp_avg"].to_local()
    assert state.nbytes * NUM_LAYERS == cost.shards * nbytes
    waiting = nbytes if cost.between == 1 else 0
    assert unsynced == [waiting] * (micro_batches - 1) + [0]
    return {"gathered": wire["gathered"] / nbytes, "reduced": wire["reduced"] / nbytes}


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("chosen", "mesh_shape"),
    [
        ("replicate", (2, 1)),
        ("replicate", (4, 1)),
        *((name, (n,)) for name in ("zero1", "zero2", "zero3") for n in (2, 4)),
        ("hybrid", (2, 2)),
        ("hybrid_zero2", (2, 2)),
    ],
)
def test_the_cost_is_that_of_a_step(
    spawn: Spawn, chosen: str, mesh_shape: tuple[int, ...], micro_batches: int
) -> None:
    world_size = mesh_shape[0] * (mesh_shape[1] if len(mesh_shape) > 1 else 1)
    by_rank = spawn(cost_of_a_step, world_size, chosen, mesh_shape, micro_batches)
    assert all(found == by_rank[0] for found in by_rank)
