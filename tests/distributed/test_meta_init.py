"""Models made on the meta device against plain ones of the same seed, on real ranks."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
import torch.distributed as dist
from torch import nn

from models import CASES
from parity import in_turns
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

if typing.TYPE_CHECKING:
    from workers import Spawn

STEPS = 3


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


def train_from_meta(
    name: str, mesh_shape: tuple[int, ...], fill: typing.Callable[..., None]
) -> Differences:
    case = CASES[name]
    plain = case.make()
    initialize(plain)
    with torch.device("meta"):
        model = shard(case, case.make(), make_mesh(mesh_shape))
    optimizers = [OPTIMIZERS["adamw"](m.parameters()) for m in (plain, model)]
    fill(model, plain)
    differences = Differences()
    for key, whole in full_parameters(model).items():
        differences.note("initial", whole, dict(plain.named_parameters())[key].detach(), key)
    mine = train(case, model, optimizers[1], (my_batch(case, step) for step in range(STEPS)))
    others = train(case, plain, optimizers[0], (global_batch(case, step) for step in range(STEPS)))
    for loss, expected in zip(mine, others, strict=True):
        differences.note("loss", mean_over_ranks(loss), expected.double())
    return differences


@pytest.mark.parametrize(
    ("mesh_shape", "name", "fill"),
    in_turns([(2,), (3,), (2, 2)], ["gpt", "mlp"], [by_init, by_loading]),
)
def test_training_starts_and_goes_on_as_that_of_the_plain_model(
    spawn: Spawn,
    name: str,
    mesh_shape: tuple[int, ...],
    fill: typing.Callable[..., None],
) -> None:
    world_size = torch.Size(mesh_shape).numel()
    by_rank = spawn(train_from_meta, world_size, name, mesh_shape, fill)
    assert_within(by_rank, initial=0.0, loss=LOSS_TOLERANCE)


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
