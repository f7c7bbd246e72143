"""torch's composable `replicate` around and inside sharded modules: each averages its own."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate  # Its only name, also in torch 2.13.

from models import CASES
from reference import (
    LOSS_TOLERANCE,
    STEPS,
    Differences,
    assert_within,
    full_parameters,
    make_mesh,
    step_batches,
)
from shardkit import ShardedTensor, WrapError, fully_shard
from workers import Spawn, on_ranks

if typing.TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = [
    pytest.mark.helpers,
    # DDP's own, of the streams of an accelerator that is not there.
    pytest.mark.filterwarnings("ignore:.*AccumulateGrad node's stream.*"),
]

TOLERANCE = 2e-6
"""Sums over the batch and the ranks in another order; AdamW divides by small numbers."""


def shard_inside(model: nn.Module, mesh_shape: tuple[int, ...]) -> None:
    """Blocks are sharded; embeddings, the last norm and the tied head are plain."""
    mesh = make_mesh(mesh_shape)
    for block in model.blocks:
        fully_shard(block, mesh)
    replicate(model)


def shard_inside_later(model: nn.Module, mesh_shape: tuple[int, ...]) -> None:
    mesh = make_mesh(mesh_shape)
    replicate(model)
    for block in model.blocks:
        fully_shard(block, mesh)


def shard_a_list_inside(model: nn.Module, mesh_shape: tuple[int, ...]) -> None:
    fully_shard(list(model.blocks), make_mesh(mesh_shape))
    replicate(model)


def shard_around(model: nn.Module, mesh_shape: tuple[int, ...]) -> None:
    """The other way round: one block is replicated, and all around it is sharded."""
    mesh = make_mesh(mesh_shape)
    replicate(model.blocks[0])
    fully_shard(model.blocks[1], mesh)
    fully_shard(model, mesh)


def train(
    put: Callable[[nn.Module, tuple[int, ...]], None], mesh_shape: tuple[int, ...]
) -> Differences:
    case = CASES["gpt"]
    reference = case.make()
    model = copy.deepcopy(reference)
    put(model, mesh_shape)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, reference)]
    differences, batches = Differences(), step_batches(case, range(STEPS))
    differences.note_training(case, (model, reference), optimizers, batches, max_norm=0.1)
    differences.note_parameters(model, reference)
    kinds = {type(param) for param in model.parameters()}
    assert kinds == {ShardedTensor, nn.Parameter}
    gathered = full_parameters(model)
    for value in gathered.values():  # What replicate trains is equal on all ranks.
        low = value.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        differences.note("rank", low, value)
    return differences


@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize(
    "put", [shard_inside, shard_inside_later, shard_a_list_inside, shard_around]
)
def test_gradients_are_averaged_once(
    spawn: Spawn, put: Callable[..., None], mesh_shape: tuple[int, ...]
) -> None:
    world_size = 2 if mesh_shape == (2,) else 4
    found = spawn(train, world_size, put, mesh_shape)
    assert_within(
        found,
        loss=LOSS_TOLERANCE,
        grad=TOLERANCE,
        parameter=TOLERANCE,
        rank=0.0,
        norm=TOLERANCE,
    )


@on_ranks(2)
def test_one_module_is_sharded_or_replicated() -> None:
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(fully_shard(nn.Linear(2, 2)))
    module = replicate(nn.Linear(2, 2))
    with pytest.raises(WrapError, match=r"replicate\(\) was called on this DDPLinear"):
        fully_shard(module)
