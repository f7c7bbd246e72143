"""Replicas of a hybrid mesh that have drifted apart are found and named."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from models import CASES
from reference import make_mesh, my_batch, shard
from shardkit import RankMismatchError, fully_shard
from workers import Spawn, on_ranks


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


class Scaled(nn.Module):
    """The second weight is used if it has a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(3)) for _ in range(2))

    def forward(self, factor: float) -> Tensor:
        result = self.first.sum()
        return result + factor * self.second.sum() if factor else result


@on_ranks(2)
def test_replicas_add_micro_batches_in_one_order() -> None:
    model = fully_shard(Scaled(), mesh=make_mesh((2, 1)))
    # Where only rank 0 uses the second weight, the average is 1. Added after 1e8, it is lost.
    factors = [2.0 if dist.get_rank() == 0 else 0.0, 1e8, -1e8]
    for factor in factors:
        model.set_is_last_backward(factor is factors[-1])
        model(factor).backward()
    assert torch.equal(model.second.grad.to_local(), torch.zeros(3))


class Heads(nn.Module):
    """Each tensor-parallel rank has the norm of one head, of two."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(8, 8, bias=False) for _ in range(2))
        self.norm, self.last = nn.LayerNorm(4), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).unflatten(1, (-1, 4))
        return self.last(self.down(self.norm(heads).flatten(1)))


@on_ranks(4)
@pytest.mark.parametrize("is_planned", [False, True])
def test_tensor_parallel_copies_of_a_plain_parameter_are_compared(is_planned: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Heads()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if is_planned:
        plan["norm"] = SequenceParallel(sequence_dim=1)
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.check_replicas()
    torch.manual_seed(mesh["dp"].get_local_rank())
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    if is_planned:
        model.check_replicas()
        return
    with pytest.raises(RankMismatchError, match=r"'norm.weight' is not the same on rank . and on"):
        model.check_replicas()
