"""Forwards that write to their own parameters: what ranks wrote alike is kept."""

from __future__ import annotations

import copy
import math
import typing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from reference import Differences, assert_within, full_parameters, make_mesh
from shardkit import CPUOffloadPolicy, MixedPrecisionPolicy, ShardedTensor, fully_shard
from workers import Spawn, on_ranks

pytestmark = pytest.mark.helpers
TOLERANCE = 1e-12


class Clamped(nn.Linear):
    """As critics do: weights stay between bounds."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
            self.bias.div_(self.bias.norm())
        return super().forward(x)


class Assigned(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.clamp(-0.2, 0.2)
        self.bias.data = self.bias.data / self.bias.norm()
        return super().forward(x)


class Codebook(nn.Module):
    """Vectors that move towards what is looked up, and get no gradient."""

    def __init__(self, *, is_averaged: bool = True) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(5, 4), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(4))
        self.is_averaged = is_averaged

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.vectors).argmin(1)
        found = x + (self.vectors[nearest] - x).detach()
        if self.training:
            moved = torch.zeros_like(self.vectors).index_add_(0, nearest, x.detach())
            if self.is_averaged and dist.is_initialized():
                dist.all_reduce(moved)
            with torch.no_grad():
                self.vectors.mul_(0.9).add_(moved, alpha=0.1)
        return found * self.scale


KINDS = {"clamped": Clamped, "assigned": Assigned}


class Model(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.middle = middle
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).tanh()))


def train(kind: str, mesh_shape: tuple[int, ...], options: dict[str, typing.Any]) -> Differences:
    """Train beside a plain model, all ranks on the same data."""
    torch.manual_seed(0)
    is_half = "mp_policy" in options
    plain = Model(Codebook() if kind == "codebook" else KINDS[kind](4, 4))
    if not is_half:
        plain = plain.double()
    model, mesh = copy.deepcopy(plain), make_mesh(mesh_shape)
    if kind == "codebook":
        plain.middle.is_averaged = model.middle.is_averaged = False
    fully_shard(model.middle, mesh, **options)
    fully_shard(model, mesh, **options)
    if is_half:
        plain = plain.bfloat16()
    differences = Differences()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        x = torch.randn(6, 3).to(plain.first.weight.dtype)
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(x).square().sum().backward()
            if not is_half:
                optimizer.step()
            optimizer.zero_grad()
        if step == 1:
            for each in (plain, model):
                each.eval()
    wholes, wanted = full_parameters(model), full_parameters(plain)
    name = "middle.vectors" if kind == "codebook" else "middle.weight"
    differences.note("written", wholes[name].to(wanted[name].dtype), wanted[name])
    if not is_half:
        differences.note_parameters(model, plain)
    else:
        differences.note("parameter", torch.zeros(1), torch.zeros(1))
    assert all(isinstance(param, ShardedTensor) for param in model.parameters())
    return differences


@pytest.mark.parametrize("kind", ["clamped", "assigned", "codebook"])
@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (2, 2)], ids=str)
def test_what_all_ranks_write_is_kept(spawn: Spawn, kind: str, mesh_shape: tuple[int, ...]) -> None:
    by_rank = spawn(train, math.prod(mesh_shape), kind, mesh_shape, {})
    assert_within(by_rank, written=TOLERANCE, parameter=TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"reshard_after_forward": False},
        {"reshard_after_forward": 2},
    ],
    ids=["half", "offloaded", "kept", "in part"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_with_other_options(spawn: Spawn, kind: str, options: dict[str, typing.Any]) -> None:
    world_size = 4 if options.get("reshard_after_forward") == 2 else 2
    by_rank = spawn(train, world_size, kind, (world_size,), options)
    assert_within(by_rank, written=TOLERANCE, parameter=TOLERANCE)


def digits_kept() -> tuple[float, float]:
    """Elements that are not clamped keep the digits that the compute dtype has not."""
    layer = Clamped(4, 4)
    before = layer.weight.detach().clone()
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with torch.no_grad():
        layer(torch.ones(1, 4))
    after = layer.weight.full_tensor().detach()
    inside = before.abs() < 0.19
    return (after - before)[inside].abs().max().item(), after.abs().max().item()


def test_what_is_not_changed_keeps_its_digits(spawn: Spawn) -> None:
    for changed, largest in spawn(digits_kept, 2):
        assert changed == 0.0
        assert largest <= 0.2002


def ranks_write_different_values() -> None:
    torch.manual_seed(0)
    model = Model(Codebook(is_averaged=False))
    fully_shard(model.middle)
    fully_shard(model)
    model(torch.randn(6, 3) + dist.get_rank()).sum().backward()


@pytest.mark.parametrize("world_size", [2, 4])
def test_an_error_names_what_ranks_wrote_differently(spawn_errors: Spawn, world_size: int) -> None:
    for error in spawn_errors(ranks_write_different_values, world_size):
        assert error.type_name == "RankMismatchError"
        assert "forward of 'middle' wrote to its parameter 'middle.vectors'" in error.message
        assert "register_buffer" in error.message


class Normalized(nn.Module):
    """Takes its scale from the first batch, through `data`, as flows do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.is_known = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.is_known:
            self.scale.data.copy_(torch.full((4,), 0.5))
            self.is_known = True
        return x * self.scale


def write_through_data(number_of_modules: int) -> None:
    torch.manual_seed(0)
    model = Model(nn.Sequential(*[Normalized()] * number_of_modules))
    fully_shard(model.middle)
    fully_shard(model)
    model.eval()
    with torch.no_grad():
        model(torch.ones(6, 3))
    model.train()
    model(torch.ones(6, 3)).sum().backward()


@pytest.mark.parametrize("number_of_modules", [1, 2])
def test_an_error_names_what_was_written_through_data(
    spawn_errors: Spawn, number_of_modules: int
) -> None:
    for error in spawn_errors(write_through_data, 2, number_of_modules):
        assert error.type_name == "StateError"
        assert "'middle.0.scale'" in error.message
        assert "torch.no_grad()" in error.message


def written_by_hand() -> float:
    model = fully_shard(nn.Linear(4, 4))
    model.unshard()
    with torch.no_grad():
        model.weight.fill_(0.5)
    model.reshard()
    return model.weight.full_tensor().sum().item()


def test_a_write_between_unshard_and_reshard_is_kept(spawn: Spawn) -> None:
    assert spawn(written_by_hand, 2) == [8.0, 8.0]


def embedding_with_max_norm(kind: str) -> None:
    fully_shard(nn.Sequential(getattr(nn, kind)(6, 4, max_norm=1.0)))


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_max_norm_is_refused(spawn_errors: Spawn, kind: str) -> None:
    for error in spawn_errors(embedding_with_max_norm, 2, kind):
        assert error.type_name == "WrapError"
        assert f"'0.weight' of {kind} has max_norm=1.0" in error.message


def max_norm_after_the_step() -> float:
    """The way out that the error shows."""
    model = fully_shard(nn.Embedding(6, 4))
    with torch.no_grad():
        model.weight.copy_(torch.renorm(model.weight, 2, 0, 0.5))
    return model.weight.full_tensor().norm(dim=1).max().item()


def test_rows_can_be_normalized_after_the_step(spawn: Spawn) -> None:
    assert spawn(max_norm_after_the_step, 2) == [pytest.approx(0.5)] * 2


def looked_up_with_max_norm_on_one_rank() -> float:
    model = fully_shard(nn.Embedding(6, 4, max_norm=0.5))
    model(torch.arange(6)).sum().backward()
    return model.weight.full_tensor().norm(dim=1).max().item()


def test_max_norm_works_on_one_rank(spawn: Spawn) -> None:
    assert spawn(looked_up_with_max_norm_on_one_rank, 1) == [pytest.approx(0.5)]


class Functional(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight, max_norm=0.5)


def looked_up_by_function() -> None:
    fully_shard(Functional(8, 4))(torch.arange(4) + 4 * dist.get_rank())


def test_max_norm_of_the_function_is_told(spawn_errors: Spawn) -> None:
    for error in spawn_errors(looked_up_by_function, 2):
        assert "wrote to its parameter 'weight'" in error.message


# --- after the forward, or in one that raises -----------------------------------------------------


class Fragile(Model):
    """May raise after its parts have written, or have the middle one raise itself."""

    fails = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.first(x).tanh())
        if self.fails == "root":
            raise ValueError(self.fails)
        return self.last(x)


class FragileMiddle(Clamped):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.fails:
            raise ValueError
        return x


def train_amid_failures(mesh_shape: tuple[int, ...], where: str, kept: bool) -> Differences:
    """Beside a plain model that raises in the same place, and keeps what it wrote until then."""
    torch.manual_seed(0)
    plain = Fragile(FragileMiddle(4, 4)).double()
    model, mesh = copy.deepcopy(plain), make_mesh(mesh_shape)
    fully_shard(model.middle, mesh, reshard_after_forward=not kept)
    fully_shard(model, mesh)
    differences = Differences()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (plain, model)]
    for step in range(4):
        x = torch.randn(6, 3, dtype=torch.double)
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each.fails = "root" if step % 2 and where == "root" else ""
            each.middle.fails = bool(step % 2) and where == "middle"
            if step % 2:
                with pytest.raises(ValueError):  # noqa: PT011 - what it says does not matter
                    each(x)
            else:
                each(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        differences.note_parameters(model, plain)
    return differences


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("where", ["middle", "root"])
def test_what_was_written_before_an_exception_is_kept(
    spawn: Spawn, where: str, *, kept: bool
) -> None:
    assert_within(spawn(train_amid_failures, 2, (2,), where, kept), parameter=TOLERANCE)


def test_what_was_written_before_an_exception_on_a_mesh_of_two_axes(spawn: Spawn) -> None:
    assert_within(spawn(train_amid_failures, 4, (2, 2), "middle", False), parameter=TOLERANCE)


def written_before_an_exception_on_one_rank() -> None:
    torch.manual_seed(0)
    model = fully_shard(Model(Codebook()))
    rank = dist.get_rank()

    def fail(*_: object) -> None:
        if rank == 1:
            with torch.no_grad():
                model.first.weight.add_(1)
        raise ValueError

    handle = model.last.register_forward_hook(fail)
    with pytest.raises(ValueError):  # noqa: PT011
        model(torch.ones(6, 3))
    handle.remove()
    model.middle.eval()
    for _ in range(2):
        model(torch.ones(6, 3)).sum().backward()


def test_what_one_rank_wrote_before_an_exception_is_told(spawn_errors: Spawn) -> None:
    for error in spawn_errors(written_before_an_exception_on_one_rank, 2):
        assert error.type_name == "RankMismatchError"
        assert "'first.weight' was written before this step on position 1" in error.message


@pytest.mark.parametrize("how", ["between", "in backward", "before another forward"])
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=str)
@on_ranks("mesh_shape")
def test_what_is_written_to_kept_parameters_is_kept(mesh_shape: tuple[int, ...], how: str) -> None:
    """Write to parameters that are kept unsharded, between forward and backward or in backward."""
    torch.manual_seed(0)
    plain = Model(nn.Linear(4, 4)).double()
    model, mesh = copy.deepcopy(plain), make_mesh(mesh_shape)
    fully_shard(model.middle, mesh, reshard_after_forward=False)
    fully_shard(model, mesh)
    differences = Differences()

    def halve(each: nn.Module) -> None:
        with torch.no_grad():  # A bias is not saved for backward.
            for layer in (each.middle, each.last):
                layer.bias.mul_(0.5)

    for _ in range(3):
        x = torch.randn(6, 3, dtype=torch.double)
        for each in (plain, model):
            out = each(x)
            if how == "between":
                halve(each)
            elif how == "in backward":
                out.register_hook(lambda _, each=each: halve(each))
            if how == "before another forward":
                halve(each)
                out = each(x)
            out.square().sum().backward()
        differences.note_parameters(model, plain)
        differences.note_grads(model, plain)
    assert model.memory_stats()["unsharded_nbytes"] == 0
    assert_within([differences], parameter=TOLERANCE, grad=TOLERANCE)


def evaluated_and_written() -> float:
    """Kept after a forward without gradients, and given back by a forward after a step."""
    model = fully_shard(nn.Linear(2, 2))
    with torch.no_grad():
        model(torch.ones(1, 2))
        model.weight.fill_(3.0)
        model.reshard()
    return model.weight.full_tensor().sum().item()


def test_what_is_written_after_an_evaluation_is_kept(spawn: Spawn) -> None:
    assert spawn(evaluated_and_written, 2) == [12.0, 12.0]


def written_on_both_sides() -> None:
    model = fully_shard(nn.Linear(2, 2))
    sharded = model.weight
    model.unshard()
    with torch.no_grad():
        model.weight.fill_(3.0)
        sharded.fill_(4.0)
    model.reshard()


def test_two_writes_of_which_one_would_be_lost_are_refused(spawn_errors: Spawn) -> None:
    for error in spawn_errors(written_on_both_sides, 2):
        assert error.type_name == "StateError"
        assert "'weight' of 'the root' was written while it was unsharded" in error.message


class Recomputed(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.middle, self.first(x).tanh(), use_reentrant=False)
        return self.last(x)


@on_ranks(2)
def test_writes_of_a_forward_that_runs_again_are_kept() -> None:
    """A forward that runs again writes again, as in plain training."""
    torch.manual_seed(0)
    plain = Recomputed(Clamped(4, 4)).double()
    model = copy.deepcopy(plain)
    fully_shard(model.middle)
    fully_shard(model)
    differences = Differences()
    for _ in range(3):
        x = torch.randn(6, 3, dtype=torch.double)
        for each in (plain, model):
            each(x).square().sum().backward()
        differences.note_parameters(model, plain)
    assert_within([differences], parameter=TOLERANCE)
