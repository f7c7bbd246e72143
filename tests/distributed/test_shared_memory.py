"""CPU ranks of one host give each other tensors without gloo: small ones in shared memory."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import time
import typing
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from allocated import all_read_directly, past_shared_memory
from reference import full_grads, make_mesh
from shardkit import FSDPModule, MixedPrecisionPolicy, fully_shard
from shardkit._module.hooks import state_of
from shardkit.backends import direct_reads, host_links, shared_memory
from shardkit.backends.direct_reads import read_directly
from shardkit.backends.shared_memory import share_memory
from workers import Spawn, on_ranks

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


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


@contextlib.contextmanager
def reads() -> Iterator[list[int]]:
    """Yield a list to which the bytes that each direct exchange reads are added."""
    found: list[int] = []
    start = direct_reads.DirectReads.start

    def counting(
        self: typing.Any, sources: typing.Any, targets: typing.Any, *options: typing.Any
    ) -> typing.Any:
        if targets[0].nbytes != torch.int64.itemsize:  # Else it is tried whether it works.
            found.append(sum(each.nbytes for each in targets))
        return start(self, sources, targets, *options)

    with mock.patch.object(direct_reads.DirectReads, "start", counting):
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


class Uneven(nn.Module):
    """A layer of which ranks use different parameters, some of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.ModuleList(nn.Linear(19, 19) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(19))

    def forward(self, x: torch.Tensor, place: int) -> torch.Tensor:
        first, second, third = self.inside
        if hasattr(torch.Tensor, "grad_dtype"):
            self.scale.grad_dtype = torch.float32  # Of the unsharded one; the others have its own.
        y = checkpoint(third, third(x), use_reentrant=True)
        y = second(y) if place % 2 else y
        return torch.tanh(first(y) * self.scale if place % 3 else y)


class UnevenStack(nn.Module):
    """Such layers between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(19, 19), nn.Linear(19, 19)
        self.layers = nn.ModuleList(Uneven() for _ in range(3))

    def forward(self, x: torch.Tensor, place: int) -> torch.Tensor:
        y = self.first(x)
        for number, layer in enumerate(self.layers):
            y = layer(y, place + number)
        return typing.cast("torch.Tensor", self.last(y))


def trained_unevenly(
    shape: Sequence[int], policy: MixedPrecisionPolicy, factor: float | None
) -> list[torch.Tensor]:
    """Return gradients of steps in which ranks use different parameters."""
    torch.manual_seed(0)
    mesh = make_mesh(tuple(shape))
    model = UnevenStack()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    model.set_gradient_predivide_factor(factor)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    results = []
    for step in range(5):
        model.set_requires_gradient_sync(step != 2)
        model(torch.randn(5, 19), rank + step).square().mean().backward()
        if step != 2:
            results += [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
    return results


def train_in_each_way(work: Callable[..., list[torch.Tensor]], *args: typing.Any) -> None:
    with exchanges() as shares, reads() as few:
        shared = work(*args)
    with all_read_directly(), exchanges() as no_shares, reads() as all_reads:
        read = work(*args)
    with past_shared_memory(), exchanges() as unused, reads() as no_reads:
        past = work(*args)
    assert shares
    assert len(all_reads) > len(few)
    assert not no_shares
    assert not unused
    assert not no_reads
    for results in zip(shared, read, past, strict=True):
        assert all(torch.equal(each, results[0]) for each in results)


@pytest.mark.parametrize(
    "policy", [MixedPrecisionPolicy(), BF16, WIDE], ids=["fp32", "bf16", "wide"]
)
@pytest.mark.parametrize("shape", [(2,), (3,), (4,), (2, 2)], ids=str)
def test_training_is_bit_equal_to_that_over_gloo(
    spawn: Spawn, shape: Sequence[int], policy: MixedPrecisionPolicy
) -> None:
    size = torch.Size(shape).numel()
    for depth in (1, 9):
        spawn(train_in_each_way, size, trained, shape, policy, depth)


@pytest.mark.parametrize("factor", [None, 3.0], ids=["", "divided before"])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), WIDE], ids=["fp32", "wide"])
@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)], ids=str)
def test_ranks_may_use_different_parameters(
    spawn: Spawn, shape: Sequence[int], policy: MixedPrecisionPolicy, factor: float | None
) -> None:
    """A rank that lacks a gradient sends another form than those that have all."""
    size = torch.Size(shape).numel()
    spawn(train_in_each_way, size, trained_unevenly, shape, policy, factor)


@on_ranks(2)
def test_large_groups_are_read_directly() -> None:
    mesh = make_mesh((2,))
    model = fully_shard(nn.Linear(1000, 1000), mesh=mesh)
    with exchanges() as shares, reads() as read, mock.patch.object(dist, "all_to_all_single", None):
        model(torch.ones(1, 1000)).sum().backward()
    assert shares == []
    assert read == [2_002_000, 2_002_000]


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


@on_ranks(2)
def test_gradients_that_are_read_are_held() -> None:
    """Others are copied as they come: a layer needs no memory for both ways."""
    with all_read_directly():
        model = fully_shard(Uneven(), mesh=make_mesh((2,)))
        assert isinstance(model, FSDPModule)
        group = state_of(model).group
        assert group is not None

        def step(place: int) -> list[bool]:
            model(torch.ones(2, 19), place).sum().backward()
            return [group.gradients.holds_layers(sync=sync) for sync in (True, False)]

        assert step(1) == [True, False]  # It uses all parameters.
        assert step(2) == [False, False]
        assert step(3) == [False, False]
        assert step(1) == [True, False]
        model.set_gradient_predivide_factor(2.0)
        assert step(1) == [False, False]


class Conjugated(nn.Module):
    """A complex product whose gradient is a conjugate: a flag on memory with other values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(self.weight.dtype) @ self.weight.conj()).imag


@on_ranks(2)
def test_gradients_that_are_conjugates_are_read_with_their_signs() -> None:
    model = Conjugated()
    plain = copy.deepcopy(model)
    plain(torch.full((1, 5), 1.5)).sum().backward()
    assert plain.weight.grad is not None
    assert plain.weight.grad.is_conj()
    with all_read_directly():
        fully_shard(model, mesh=make_mesh((2,)))
        model(torch.full((1, 5), dist.get_rank() + 1.0)).sum().backward()
    assert torch.equal(full_grads(model)["weight"], plain.weight.grad.resolve_conj())


# --- who shares and reads -------------------------------------------------------------------------


def connected(change: mock._patch[typing.Any] | None, on_rank: int) -> tuple[bool, bool]:
    """Return whether this rank shares memory, and reads directly, with a change on one rank."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    is_changed = change is not None and rank == on_rank
    with change if is_changed else contextlib.nullcontext():
        links = host_links.connect(group)
        if links is None:
            return False, False
        memory, direct = share_memory(links, group), read_directly(links, group)
    expected = [other for other in range(dist.get_world_size()) if other != rank]
    if memory is not None:
        assert memory.nbytes == 0, "what tried it is still there"
        block = memory.block(1)
        block.memory[0] = rank
        others = memory.share(block, 1, 0).wait()
        assert [int(each[0]) for each in others] == expected
    if direct is not None:
        own = torch.full((1000,), rank)
        found = [torch.empty_like(own) for _ in expected]
        direct.start([[own]] * len(found), found, 1).wait()
        assert [each.unique().tolist() for each in found] == [[other] for other in expected]
        dist.barrier()  # The others have read, too; then connections may be closed.
    return memory is not None, direct is not None


def change_of(name: str) -> typing.Any:
    if name == "unwanted":
        return mock.patch.dict(os.environ, {"SHARDKIT_SHARED_MEMORY": "0"})
    if name == "other host":
        return mock.patch.object(host_links, "_host", return_value="another")
    if name == "no socket":
        return mock.patch.object(host_links.socket, "socket", side_effect=OSError(errno.EMFILE))
    return None


def connect_with(name: str, on_rank: int) -> tuple[bool, bool]:
    return connected(change_of(name), on_rank)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_of_one_host_share(spawn: Spawn, size: int) -> None:
    assert spawn(connect_with, size, "nothing", 0) == [(True, True)] * size


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", ["unwanted", "other host", "no socket"])
def test_none_share_if_one_cannot(spawn: Spawn, name: str, rank: int) -> None:
    assert spawn(connect_with, 3, name, rank) == [(False, False)] * 3


_WHERE = {"_meet": host_links, "_mapped": shared_memory, "_read_memory": direct_reads}


def connect_where_it_fails(function: str, error: Exception, on_rank: int) -> tuple[bool, bool]:
    def fail(*_: typing.Any) -> None:
        raise error

    change = mock.patch.object(_WHERE[function], function, fail)
    if function == "_meet":  # The others wait for its connections.
        with mock.patch.object(host_links, "CONNECT_S", 1.0):
            return connected(change, on_rank)
    began = time.monotonic()
    found = connected(change, on_rank)
    assert time.monotonic() - began < host_links.CONNECT_S / 2, "others have waited for this rank"
    return found


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("function", "error", "remain"),
    [
        ("_meet", ConnectionRefusedError(), (False, False)),
        ("_mapped", RuntimeError("not permitted"), (False, True)),
        ("_read_memory", PermissionError(), (True, False)),
    ],
)
def test_all_go_without_what_one_may_not_do(
    spawn: Spawn, function: str, error: Exception, remain: tuple[bool, bool], rank: int
) -> None:
    assert spawn(connect_where_it_fails, 3, function, error, rank) == [remain] * 3


def connect_with_a_slow_rank() -> tuple[bool, bool]:
    """Rank 0 has read when its wait ends, and rank 1 still reads: its own wait began later."""
    slow = vars(direct_reads)

    def begin_late(*args: typing.Any, _make: typing.Any = slow["_table_of"]) -> typing.Any:
        time.sleep(2.0)
        return _make(*args)

    def read_late(*args: typing.Any, _read: typing.Any = slow["_read_memory"]) -> None:
        time.sleep(1.0)  # Twice: a table, and what it says.
        _read(*args)

    change: typing.Any = mock.patch.multiple(
        direct_reads, _table_of=begin_late, _read_memory=read_late
    )
    with mock.patch.object(direct_reads, "CONNECT_S", 3.0):
        return connected(change, 1)


def test_all_go_without_reads_if_one_is_too_slow(spawn: Spawn) -> None:
    assert spawn(connect_with_a_slow_rank, 2) == [(True, False)] * 2


@on_ranks(3)
def test_more_ranks_than_can_be_connected_share_nothing() -> None:
    with mock.patch.object(host_links, "_MAX_RANKS", 2):
        assert host_links.connect(dist.group.WORLD) is None
