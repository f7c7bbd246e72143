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

from reference import Differences, assert_within, full_parameters, make_mesh
from shardkit import CPUOffloadPolicy, MixedPrecisionPolicy, ShardedTensor, fully_shard

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = pytest.mark.helpers
TOLERANCE = 1e-12


class Clamped(nn.Linear):
    """As critics do: weights stay between bounds."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
            self.bias.div_(self.bias.norm())
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
    plain = Model(Clamped(4, 4) if kind == "clamped" else Codebook())
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
    name = "middle.weight" if kind == "clamped" else "middle.vectors"
    differences.note("written", wholes[name].to(wanted[name].dtype), wanted[name])
    if not is_half:
        differences.note_parameters(model, plain)
    else:
        differences.note("parameter", torch.zeros(1), torch.zeros(1))
    assert all(isinstance(param, ShardedTensor) for param in model.parameters())
    return differences


@pytest.mark.parametrize("kind", ["clamped", "codebook"])
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
def test_with_other_options(spawn: Spawn, options: dict[str, typing.Any]) -> None:
    world_size = 4 if options.get("reshard_after_forward") == 2 else 2
    by_rank = spawn(train, world_size, "clamped", (world_size,), options)
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
