"""Optimizers that update what no group holds, or another model, are noticed at their first step."""

from __future__ import annotations

import copy
import typing
import warnings

import pytest
import torch
from torch import nn

from models import CASES
from reference import make_mesh, my_batch
from shardkit import fully_shard

if typing.TYPE_CHECKING:
    from workers import Spawn

CASE = CASES["gpt"]


def warnings_of_training(
    world_size: int, what: str, optimizer_class: type[torch.optim.Optimizer]
) -> list[str]:
    """Train two steps; return what is warned of."""
    torch.manual_seed(0)
    model, mesh = CASE.make(), make_mesh((world_size,))
    plain = [param for name, param in model.named_parameters() if not name.startswith("blocks.")]
    for block in model.blocks:
        fully_shard(block, mesh=mesh, ignored_params=set(plain) if what == "ignored" else None)
    if what in {"all sharded", "a copy"}:
        fully_shard(model, mesh=mesh)
    trained = copy.deepcopy(model) if what == "a copy" else model
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            CASE.loss(trained, my_batch(CASE, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [f"{each.filename.rsplit('/', 1)[-1]}: {each.message}" for each in caught]


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_a_forgotten_root_is_named_once(
    spawn: Spawn, optimizer_class: type[torch.optim.Optimizer]
) -> None:
    for found in spawn(warnings_of_training, 2, 2, "no root", optimizer_class):
        [said] = found
        assert said.startswith("test_optimizer_warnings.py: no group of fully_shard holds '"), said
        assert "'positions'" in said
        assert "'blocks." not in said
        assert "Call fully_shard on the root as well" in said


def test_an_optimizer_of_another_model_is_named_once(spawn: Spawn) -> None:
    for found in spawn(warnings_of_training, 2, 2, "a copy", torch.optim.SGD):
        [said] = found
        assert said.startswith("test_optimizer_warnings.py: none of this optimizer's "), said
        assert "SGD(model.parameters())" in said


@pytest.mark.parametrize(
    ("world_size", "what"), [(2, "all sharded"), (2, "ignored"), (1, "no root")]
)
def test_what_is_right_or_meant_is_not_warned_of(spawn: Spawn, world_size: int, what: str) -> None:
    assert spawn(warnings_of_training, world_size, world_size, what, torch.optim.SGD) == [
        [] for _ in range(world_size)
    ]


def step_with_a_closure() -> list[str]:
    """Let an optimizer compute the first gradients itself, beside a model that has some."""
    torch.manual_seed(0)
    mesh = make_mesh((2,))
    other, model = (fully_shard(nn.Linear(4, 4), mesh=mesh) for _ in range(2))
    other(torch.ones(1, 4)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        return loss

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step(closure)
    return [str(each.message) for each in caught]


def test_a_closure_may_make_the_gradients(spawn: Spawn) -> None:
    assert spawn(step_with_a_closure, 2) == [[], []]
