"""Modules sharded as a list are one group, gathered once for all of them; also in copies."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
from torch import nn

from recording import recording_mesh
from shardkit import ShardedTensor, fully_shard

GATHER = "start all_gather"


def make(
    together: tuple[int, int] = (0, 2), **options: typing.Any
) -> tuple[typing.Any, list[tuple[str, int]]]:
    """Return a model of which two layers are one group, and what is communicated."""
    mesh, log = recording_mesh((2,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 4))
    fully_shard([model[i] for i in together], mesh, **options)
    fully_shard(model[3 - sum(together)], mesh)
    return fully_shard(model, mesh), log


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


OPTIONS: tuple[dict[str, typing.Any], ...] = ({}, {"reshard_after_forward": False})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("together", [(0, 1), (1, 2), (0, 2)], ids=str)
def test_it_is_gathered_anew_only_if_other_groups_ran_in_between(
    together: tuple[int, int], options: dict[str, typing.Any]
) -> None:
    model, log = make(together, **options)
    is_freed = together == (0, 2) and not options
    for _ in range(3):
        log.clear()
        with torch.no_grad():
            model(torch.ones(2, 4))
            for parameter in model.parameters():
                parameter.add_(1)  # What is kept is gathered once after a step.
        assert [what for what, _ in log].count(GATHER) == 2 + is_freed


def test_it_is_freed_when_the_pass_ends_although_a_module_did_not_run() -> None:
    model, _ = make()
    with torch.no_grad():
        model(torch.ones(2, 4))
        model[0](torch.ones(2, 4))
    assert model.memory_stats()["unsharded_nbytes"] == 0


def test_a_copy_has_a_group_of_its_own() -> None:
    model, _ = make()
    step(model)
    twin = copy.deepcopy(model)
    groups = [twin[0].memory_stats()["shard_nbytes"], twin[2].memory_stats()["shard_nbytes"]]
    assert groups[0] == groups[1] == model[0].memory_stats()["shard_nbytes"]
    model.zero_grad()
    twin.zero_grad()
    step(twin)
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in model.parameters())
    before = [p.to_local().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    step(model)
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.to_local(), value)


def test_a_copy_of_one_of_them_takes_the_others_along() -> None:
    model, _ = make()
    part = copy.deepcopy(model[0])
    assert part.memory_stats()["shard_nbytes"] == model[0].memory_stats()["shard_nbytes"]
    assert type(part) is type(model[0])


# --- a list without a root around it --------------------------------------------------------------


def make_rootless() -> tuple[typing.Any, list[tuple[str, int]]]:
    """Return a model of which two layers are one group, and nothing else is sharded."""
    mesh, log = recording_mesh((2,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 4))
    fully_shard([model[0], model[2]], mesh)
    return model, log


def test_it_is_kept_from_the_first_module_to_the_backward() -> None:
    model, log = make_rootless()
    for _ in range(3):
        log.clear()
        step(model)
        assert sum(numel for what, numel in log if what == GATHER) == 20 + 36
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)  # As an optimizer does: what was gathered is stale.
    assert model[0].memory_stats()["unsharded_nbytes"] == 0


def test_its_parameters_are_named_by_their_place_in_the_list() -> None:
    model, _ = make_rootless()
    model[2](torch.ones(2, 8))
    model[0].reshard()
    names = [repr(model[i].weight).split("'")[1] for i in (0, 2)]
    assert names == ["0.weight", "1.weight"]


def test_a_root_that_comes_later_takes_it_over() -> None:
    model, _ = make_rootless()
    step(model)
    model.zero_grad()
    fully_shard(model, model[0].weight.device_mesh)
    step(model)
    assert all(p.grad is not None for p in model.parameters())
    assert repr(model[2].weight).split("'")[1] == "2.weight"


def test_one_of_them_is_unsharded_before_the_first_forward() -> None:
    model, log = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = model[2].unshard(async_op=True)
    assert [what for what, _ in log].count(GATHER) == 1
    handle.wait()
    assert [type(layer.weight) for layer in (model[0], model[2])] == [nn.Parameter] * 2
    assert type(model[1].weight) is ShardedTensor
    step(model)
    optimizer.step()
    assert all(p.grad is not None for p in model.parameters())
    assert model.memory_stats()["unsharded_nbytes"] == 0
