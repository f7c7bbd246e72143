"""`materialize` on real ranks: values, training, seeds that differ."""

from __future__ import annotations

import typing

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parallel_models
from models import CASES
from reference import (
    LOSS_TOLERANCE,
    OPTIMIZERS,
    Differences,
    assert_within,
    full_parameters,
    global_batch,
    make_mesh,
    mean_over_ranks,
    my_batch,
    shard,
    train,
)
from shardkit import MixedPrecisionPolicy, StateError, fully_shard, materialize
from workers import on_ranks

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = pytest.mark.helpers

STEPS = 3


def init(module: nn.Module) -> None:
    """Give values to modules of all cases, also by reading."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    for param in module.parameters(recurse=False):
        if param.isnan().any():
            nn.init.normal_(param, std=0.1)
        elif param.ndim > 1:
            param.data /= param.data.abs().max()


def train_materialized(name: str, mesh_shape: tuple[int, ...]) -> Differences:
    case = CASES[name]
    with torch.device("meta"):
        plain = case.make()
        model = shard(case, case.make(), make_mesh(mesh_shape))
    optimizers = [OPTIMIZERS["adamw"](m.parameters()) for m in (plain, model)]
    for each in (plain, model):
        torch.manual_seed(4)
        materialize(each, init)
    differences = Differences()
    for key, whole in full_parameters(model).items():
        differences.note("initial", whole, dict(plain.named_parameters())[key].detach(), key)
    mine = train(case, model, optimizers[1], (my_batch(case, step) for step in range(STEPS)))
    others = train(case, plain, optimizers[0], (global_batch(case, step) for step in range(STEPS)))
    for loss, expected in zip(mine, others, strict=True):
        differences.note("loss", mean_over_ranks(loss), expected.double())
    return differences


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["gpt", "mlp", "tied"])
def test_training_is_that_of_the_plain_model(
    spawn: Spawn, name: str, mesh_shape: tuple[int, ...]
) -> None:
    world_size = torch.Size(mesh_shape).numel()
    by_rank = spawn(train_materialized, world_size, name, mesh_shape)
    assert_within(by_rank, initial=0.0, loss=LOSS_TOLERANCE)


def with_seeds_apart() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3))
    fully_shard(model, make_mesh((2,)))
    torch.manual_seed(dist.get_rank())
    materialize(model)
    model(torch.ones(1, 5))


def test_other_seeds_are_noticed(spawn_errors: Spawn) -> None:
    for error in spawn_errors(with_seeds_apart, 2):
        assert error.type_name == "RankMismatchError"
        assert "ranks hold different values: parameter '0.weight'" in error.message


@on_ranks(2)
def test_lists_and_frozen_parameters() -> None:
    """Frozen, in two dtypes, in a list with mixed precision."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3), nn.Linear(3, 2))
        model[1].weight.requires_grad_(requires_grad=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard([model[0], model[2]], make_mesh((2,)), mp_policy=policy)
    fully_shard(model, make_mesh((2,)), mp_policy=policy)
    torch.manual_seed(0)
    materialize(model)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    for name, whole in full_parameters(model).items():
        assert torch.equal(whole, plain.get_parameter(name)), name
    model(torch.ones(1, 5)).sum().backward()
    assert model[1].weight.grad is None
    assert model[1].bias.grad is not None


@on_ranks(4)
def test_tensor_parallel_parameters_are_whole_while_they_are_initialized() -> None:
    plain, model = parallel_models.make("gpt", (2, 2))
    values = [param.detach().clone() for param in plain.parameters()]
    model.to("meta")

    def fill(module: nn.Module) -> None:
        for name, param in module.named_parameters(recurse=False):
            param.data.copy_(whole_of[module][name])

    names = {module: name for name, module in model.named_modules()}
    whole_of: dict[nn.Module, dict[str, torch.Tensor]] = {
        module: {
            n: p.detach() for n, p in plain.get_submodule(name).named_parameters(recurse=False)
        }
        for module, name in names.items()
    }
    materialize(model, fill)
    for param, expected in zip(model.parameters(), values, strict=True):
        assert torch.equal(typing.cast("typing.Any", param).full_tensor(), expected)


class Parent(nn.Module):
    """Holds nothing itself; writes, scales and reads what modules inside hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.second = nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            view = self.first.weight.data[1:]  # Lives on while others are touched.
            self.second.weight.mul_(self.first.weight.norm())
            nn.init.constant_(self.second.bias, 7)
            view.fill_(2)
            self.second.weight += self.first.weight
            self.norm.running_mean.fill_(3)
            self.norm.weight = nn.Parameter(torch.full((3,), 5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x) + self.second(x))


def make_transformer() -> nn.Module:
    return nn.Transformer(8, 2, 1, 1, 16, batch_first=True)


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (2, 2)], ids=str)
@pytest.mark.parametrize("make", [Parent, make_transformer])
@on_ranks("mesh_shape")
def test_parents_write_what_modules_inside_hold(
    mesh_shape: tuple[int, ...], make: typing.Callable[[], nn.Module]
) -> None:
    torch.manual_seed(3)
    plain = make()
    with torch.device("meta"):
        model = make()
    mesh = make_mesh(mesh_shape)
    fully_shard(next(model.children()), mesh)
    fully_shard(model, mesh)
    torch.manual_seed(3)
    materialize(model)
    for name, whole in full_parameters(model).items():
        assert torch.equal(whole, plain.get_parameter(name)), name
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


class Bad(nn.Linear):
    """Fails to initialize itself."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            msg = "no"
            raise ValueError(msg)


@pytest.mark.parametrize("one_group", [False, True])
@on_ranks(2)
def test_a_second_call_after_a_failure(one_group: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Bad(3, 3), nn.Linear(3, 3))
    mesh = make_mesh((2,))
    if not one_group:
        for layer in model:
            fully_shard(layer, mesh)
    fully_shard(model, mesh)
    torch.manual_seed(3)
    with pytest.raises(ValueError, match="no"):
        materialize(model)
    first = full_parameters(model[0])["weight"] if not one_group else None
    with pytest.raises(StateError, match=r"'1\.weight'.* is on the meta device|'weight' of '1'"):
        model(torch.ones(1, 3))
    materialize(model, lambda m: [nn.init.constant_(p, 2) for p in m.parameters(recurse=False)])
    found = full_parameters(model)
    if first is not None:
        assert torch.equal(found["0.weight"], first)
    for name, whole in found.items():
        if not name.startswith("0."):
            assert whole.eq(2).all(), name
    assert not any(found["0.weight"].eq(2).flatten().tolist())
    model(torch.ones(1, 3)).sum().backward()
