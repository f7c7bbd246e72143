"""Replicas of a hybrid mesh that have drifted apart are found and named."""

from __future__ import annotations

import typing

import torch
import torch.distributed as dist

from models import CASES
from reference import make_mesh, my_batch, shard

if typing.TYPE_CHECKING:
    from workers import Spawn


def drift(rank: int | None, mesh_shape: tuple[int, ...]) -> str:
    """Train; change one element on one rank; return what is said."""
    case = CASES["gpt"]
    torch.manual_seed(0)
    model = shard(case, case.make(), make_mesh(mesh_shape))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    case.loss(model, my_batch(case, 0)).backward()
    optimizer.step()
    if dist.get_rank() == rank:
        with torch.no_grad():
            model.blocks[1].fc1.weight.to_local()[-1:] += 1e-6
    try:
        model.check_replicas()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_equal_replicas_pass(spawn: Spawn) -> None:
    assert spawn(drift, 4, None, (2, 2)) == [""] * 4


def test_all_ranks_hear_of_one_element(spawn: Spawn) -> None:
    for said in spawn(drift, 4, 3, (2, 2)):
        assert said.startswith(
            "RankMismatchError: replicas have drifted apart: 'blocks.1.fc1.weight'"
        )
        assert "replica 0 and on replica 1" in said


def test_without_replicas_there_is_nothing_to_compare(spawn: Spawn) -> None:
    assert spawn(drift, 2, 1, (2,)) == [""] * 2
