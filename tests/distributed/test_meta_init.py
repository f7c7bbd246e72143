"""Models made on the meta device against plain ones of the same seed, on real ranks."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parallel_models
from models import CASES, Parent
from parity import in_turns
from reference import (
    LOSS_TOLERANCE,
    OPTIMIZERS,
    Differences,
    assert_within,
    full_parameters,
    make_mesh,
    my_batch,
    shard,
    step_batches,
)
from shardkit import MixedPrecisionPolicy, StateError, fully_shard, materialize
from workers import Spawn, on_ranks

STEPS = 3
ADAMW_TOLERANCE = 2e-5  # Adam divides by small gradients.


def check_training(
    name: str, mesh_shape: tuple[int, ...], plain: nn.Module, fill: typing.Callable[..., object]
) -> None:
    """Shard a model on meta, make its optimizer, fill both models, and train them."""
    case = CASES[name]
    with torch.device("meta"):
        model = shard(case, case.make(), make_mesh(mesh_shape))
    optimizers = [OPTIMIZERS["adamw"](m.parameters()) for m in (model, plain)]
    fill(model, plain)
    differences = Differences()
    for key, whole in full_parameters(model).items():
        differences.note("initial", whole, plain.get_parameter(key).detach(), key)
    models, batches = (model, plain), step_batches(case, range(STEPS))
    differences.note_training(case, models, optimizers, batches)
    assert_within([differences], initial=0.0, loss=LOSS_TOLERANCE, grad=ADAMW_TOLERANCE)


# --- filled by hand -------------------------------------------------------------------------------


def initialize(model: nn.Module) -> None:
    """As training scripts do: by kind of module, then some by name, then slices."""
    torch.manual_seed(4)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
        if isinstance(module, nn.Embedding):
            nn.init.orthogonal_(module.weight)
    for name, param in model.named_parameters():
        if "pos" in name:
            nn.init.normal_(param, std=0.02)
        if name.endswith("qkv.weight"):
            nn.init.xavier_uniform_(param.data.chunk(3)[1])


def by_init(model: nn.Module, plain: nn.Module) -> None:
    del plain
    model.to_empty(device="cpu")
    initialize(model)


def by_loading(model: nn.Module, plain: nn.Module) -> None:
    model.load_state_dict(plain.state_dict(), assign=True)


@pytest.mark.parametrize(
    ("mesh_shape", "name", "fill"),
    in_turns([(2,), (3,), (2, 2)], ["gpt", "mlp"], [by_init, by_loading]),
)
@on_ranks("mesh_shape")
def test_training_starts_and_goes_on_as_that_of_the_plain_model(
    name: str, mesh_shape: tuple[int, ...], fill: typing.Callable[..., None]
) -> None:
    plain = CASES[name].make()
    initialize(plain)
    check_training(name, mesh_shape, plain, fill)


def forget_on_one_rank() -> None:
    case = CASES["mlp"]
    with torch.device("meta"):
        model = shard(case, case.make(), make_mesh((2,)))
    if dist.get_rank() == 0:
        model.to_empty(device="cpu")
    case.loss(model, my_batch(case, 0))


def test_all_ranks_say_that_one_has_no_values(spawn_errors: Spawn) -> None:
    for error in spawn_errors(forget_on_one_rank, 2):
        assert error.type_name == "RankMismatchError"
        assert "layers.0.weight" in error.message
        assert "on meta" in error.message
        assert "on cpu" in error.message


def forget_on_all_ranks() -> None:
    case = CASES["mlp"]
    with torch.device("meta"):
        model = shard(case, case.make(), make_mesh((2,)))
    twin = copy.deepcopy(model)
    twin.to_empty(device="cpu")
    case.loss(twin, my_batch(case, 0)).backward()
    case.loss(model, my_batch(case, 0))


def test_all_ranks_raise_before_anything_is_gathered(spawn_errors: Spawn) -> None:
    for error in spawn_errors(forget_on_all_ranks, 2):
        assert error.type_name == "StateError"
        assert "layers.0.weight" in error.message
        assert "to_empty" in error.message


# --- filled by `materialize` ----------------------------------------------------------------------


def init(module: nn.Module) -> None:
    """Give values to modules of all cases, also by reading."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    for param in module.parameters(recurse=False):
        if param.isnan().any():
            nn.init.normal_(param, std=0.1)
        elif param.ndim > 1:
            param.data /= param.data.abs().max()


def by_materialize(*models: nn.Module) -> None:
    for model in models:
        torch.manual_seed(4)
        materialize(model, init)


@pytest.mark.helpers
@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["gpt", "mlp", "tied"])
@on_ranks("mesh_shape")
def test_training_is_that_of_the_plain_model(name: str, mesh_shape: tuple[int, ...]) -> None:
    with torch.device("meta"):
        plain = CASES[name].make()
    check_training(name, mesh_shape, plain, by_materialize)


def with_seeds_apart() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3))
    fully_shard(model, make_mesh((2,)))
    torch.manual_seed(dist.get_rank())
    materialize(model)
    model(torch.ones(1, 5))


@pytest.mark.helpers
def test_other_seeds_are_noticed(spawn_errors: Spawn) -> None:
    for error in spawn_errors(with_seeds_apart, 2):
        assert error.type_name == "RankMismatchError"
        assert "ranks hold different values: parameter '0.weight'" in error.message


@pytest.mark.helpers
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


@pytest.mark.helpers
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


def make_transformer() -> nn.Module:
    return nn.Transformer(8, 2, 1, 1, 16, batch_first=True)


@pytest.mark.helpers
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


@pytest.mark.helpers
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
