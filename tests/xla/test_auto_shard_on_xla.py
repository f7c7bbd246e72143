"""`auto_shard` on XLA: plans, and units that are prepared before they are sharded."""

from __future__ import annotations

import typing

import pytest
import torch
from torch import nn
from xla_ranks import XlaRanks, on_xla

from models import Block, Case, cross_entropy, token_batch
from parity import compare_training
from reference import TRAINED, assert_within
from shardkit import (
    CPUOffloadPolicy,
    DeviceMesh,
    WrapError,
    auto_shard,
    checkpoint_module,
    fully_shard,
)
from wrapped_models import Stack


def test_prepared_blocks_train_as_plain_ones(mesh: DeviceMesh) -> None:
    case, ranks = Case(Stack, lambda _: [], token_batch, cross_entropy), XlaRanks(mesh)
    plain = case.make()
    model = on_xla(plain)
    plan = auto_shard(model, mesh, Block, units=["tokens"], before=checkpoint_module)
    assert plan.memory.shard_nbytes == model.memory_stats()["shard_nbytes"]
    assert sum(group.padding_nbytes for group in plan.groups) > 0
    found = compare_training(case, model, plain, steps=3, ranks=ranks)
    assert_within([found], **TRAINED)


def test_the_callable_of_torch_xla(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to("xla")

    def wrap(module: nn.Module, *args: typing.Any, **kwargs: typing.Any) -> nn.Module:
        return fully_shard(checkpoint_module(module), *args, **kwargs)

    auto_shard(model, mesh, auto_wrap_policy={nn.Linear}, auto_wrapper_callable=wrap)
    model(torch.ones(4, 4).to("xla")).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_what_is_not_supported_is_refused_before_anything_is_changed(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("xla")
    for options in (
        {"units": {"1": {"offload_policy": CPUOffloadPolicy()}}},
        {"offload_budget_nbytes": 100},
    ):
        with pytest.raises(WrapError, match="is offloaded to the host, which meshes of 'xla'"):
            auto_shard(model, mesh, nn.Linear, **options)
    assert type(model[0]) is nn.Linear


def test_torch_xlas_own_policy(mesh: DeviceMesh) -> None:
    import functools

    from torch_xla.distributed.fsdp import wrap

    policy = functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=20)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("xla")
    plan = auto_shard(model, mesh, policy, apply=False)
    assert [group.names for group in plan.groups] == [("0",), ("1",)]
