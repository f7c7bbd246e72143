"""CPU ranks of one host give each other small tensors in memory that they share."""

from __future__ import annotations

import contextlib
import os
import typing
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allocated import past_shared_memory
from reference import make_mesh
from shardkit import FSDPModule, MixedPrecisionPolicy, fully_shard
from shardkit._module.hooks import state_of
from shardkit.backends import shared_memory
from shardkit.backends.shared_memory import connect
from workers import on_ranks

if typing.TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from workers import Spawn

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
WIDE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@contextlib.contextmanager
def exchanges() -> Iterator[list[int]]:
    """Yield a list to which the bytes of each exchange are added."""
    found: list[int] = []
    share = shared_memory.SharedMemory.share

    def counting(self: typing.Any, block: typing.Any, nbytes: int, lane: int) -> typing.Any:
        if nbytes > 1:  # Else it is tried whether it works.
            found.append(nbytes)
        return share(self, block, nbytes, lane)

    with mock.patch.object(shared_memory.SharedMemory, "share", counting):
        yield found


def trained(shape: Sequence[int], policy: MixedPrecisionPolicy, depth: int) -> list[torch.Tensor]:
    """Return losses and pieces of parameters after some steps."""
    torch.manual_seed(0)
    mesh = make_mesh(tuple(shape))
    model = nn.Sequential(*[nn.Linear(37, 37) for _ in range(depth)])
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    results = []
    for step in range(4):
        model.set_requires_gradient_sync(step != 1)
        loss = model(torch.randn(5, 37)).square().mean()
        loss.backward()
        results.append(loss.detach())
        if step != 1:
            optimizer.step()
            optimizer.zero_grad()
    return [*results, *[param.to_local().detach().clone() for param in model.parameters()]]


def train_twice(shape: Sequence[int], policy: MixedPrecisionPolicy, depth: int) -> None:
    with exchanges() as used:
        shared = trained(shape, policy, depth)
    with past_shared_memory(), exchanges() as unused:
        past = trained(shape, policy, depth)
    assert used
    assert not unused
    for one, other in zip(shared, past, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "policy", [MixedPrecisionPolicy(), BF16, WIDE], ids=["fp32", "bf16", "wide"]
)
@pytest.mark.parametrize("shape", [(2,), (3,), (4,), (2, 2)], ids=str)
def test_training_is_bit_equal_to_that_over_gloo(
    spawn: Spawn, shape: Sequence[int], policy: MixedPrecisionPolicy
) -> None:
    size = torch.Size(shape).numel()
    for depth in (1, 9):
        spawn(train_twice, size, shape, policy, depth)


@on_ranks(2)
def test_large_groups_go_past_it() -> None:
    mesh = make_mesh((2,))
    model = fully_shard(nn.Linear(1000, 1000), mesh=mesh)
    with exchanges() as used:
        model(torch.ones(1, 1000)).sum().backward()
    assert used == []


@on_ranks(2)
def test_it_grows_no_further() -> None:
    """Blocks come back as fast as they are used."""
    mesh = make_mesh((2,))
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(3):
        model(torch.ones(1, 64)).sum().backward()
    shared = state_of(model[0]).group.gradients.buckets[0].bucket.plan.axis.shared  # type: ignore[union-attr]
    before = shared.nbytes
    for _ in range(40):
        model(torch.ones(1, 64)).sum().backward()
    assert shared.nbytes <= before + 2 * 262_144, (before, shared.nbytes)


# --- who shares -----------------------------------------------------------------------------------


def connected(change: mock._patch[typing.Any] | None, on_rank: int) -> bool:
    is_changed = change is not None and dist.get_rank() == on_rank
    with change if is_changed else contextlib.nullcontext():
        memory = connect(dist.group.WORLD)
    if memory is None:
        return False
    assert memory.nbytes == 0, "what tried it is still there"
    size = dist.get_world_size()
    block = memory.block(1)
    block.memory[0] = dist.get_rank()
    others = memory.share(block, 1, 0).wait()
    assert [int(each[0]) for each in others] == [r for r in range(size) if r != dist.get_rank()]
    return True


def change_of(name: str) -> typing.Any:
    if name == "unwanted":
        return mock.patch.dict(os.environ, {"SHARDKIT_SHARED_MEMORY": "0"})
    if name == "other host":
        return mock.patch.object(shared_memory, "_host", return_value="another")
    return None


def connect_with(name: str, on_rank: int) -> bool:
    return connected(change_of(name), on_rank)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_of_one_host_share(spawn: Spawn, size: int) -> None:
    assert spawn(connect_with, size, "nothing", 0) == [True] * size


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", ["unwanted", "other host"])
def test_none_share_if_one_cannot(spawn: Spawn, name: str, rank: int) -> None:
    assert spawn(connect_with, 3, name, rank) == [False] * 3


def connect_where_it_fails(function: str, error: Exception, on_rank: int) -> bool:
    def fail(*_: typing.Any) -> None:
        raise error

    with mock.patch.object(shared_memory, "_CONNECT_S", 1.0):
        return connected(mock.patch.object(shared_memory, function, fail), on_rank)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("function", "error"),
    [("_meet", ConnectionRefusedError()), ("_mapped", RuntimeError("not permitted"))],
)
def test_none_share_if_one_does_not_reach_the_others(
    spawn: Spawn, function: str, error: Exception, rank: int
) -> None:
    assert spawn(connect_where_it_fails, 3, function, error, rank) == [False] * 3


@on_ranks(3)
def test_more_ranks_than_can_be_connected_share_nothing() -> None:
    with mock.patch.object(shared_memory, "_MAX_RANKS", 2):
        assert connect(dist.group.WORLD) is None
