"""`apply_full`: functions that change whole parameters, module by module."""

from __future__ import annotations

import math
import typing

import pytest
import torch
from test_full_params import assert_full_values, on_all_meshes, plain_and_sharded
from torch import nn

from models import CASES, GPT
from reference import make_mesh, my_batch, shard, train
from shardkit import (
    FSDPModule,
    ShardedTensor,
    apply_full,
    fully_shard,
)
from workers import Spawn, on_ranks

pytestmark = pytest.mark.helpers


def init(module: nn.Module) -> None:
    """Initialize at random, some parameters from outside of their module, as GPT-2's does."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.trunc_normal_(module.weight, std=0.3)
        if getattr(module, "bias", None) is not None:
            nn.init.uniform_(module.bias)
    for name, param in module.named_parameters(recurse=False):
        if name == "positions":
            nn.init.orthogonal_(param)
    if type(module).__name__.endswith("Block"):
        module.proj.weight.data.normal_(std=0.1)  # type: ignore[union-attr]


def seeded(mesh: tuple[int, ...], *, meta: bool) -> list[str]:
    case = CASES["gpt"]
    plain = GPT()
    with torch.device("meta" if meta else "cpu"):
        model: typing.Any = GPT()
    model.head.weight = model.tokens.weight
    model = shard(case, model, make_mesh(mesh))
    if meta:
        model.to_empty(device="cpu")
        with torch.no_grad():  # Layer norms have functions of their own.
            for module in model.modules():
                if isinstance(module, nn.LayerNorm):
                    module.reset_parameters()
    order: list[str] = []

    def note(module: nn.Module) -> None:
        order.append(type(module).__name__.removeprefix("FSDP"))
        init(module)

    torch.manual_seed(5)
    assert apply_full(model, note) is model
    torch.manual_seed(5)
    plain.apply(init)
    assert_full_values(model, plain)
    for _ in train(case, model, torch.optim.SGD(model.parameters(), lr=0.1), [my_batch(case, 0)]):
        pass
    return order


@on_all_meshes
@pytest.mark.parametrize("meta", [False, True], ids=["values", "meta"])
def test_one_seed_gives_the_parameters_of_a_plain_model(
    spawn: Spawn, mesh: tuple[int, ...], *, meta: bool
) -> None:
    by_rank = spawn(seeded_on, math.prod(mesh), mesh, meta)
    expected: list[str] = []
    GPT().apply(lambda module: expected.append(type(module).__name__))
    assert all(order == expected for order in by_rank)


def seeded_on(mesh: tuple[int, ...], meta: bool) -> list[str]:
    return seeded(mesh, meta=meta)


class Applied(nn.Module):
    """A layer whose method `apply` is another than torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def apply(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply(x)


@on_ranks(2)
def test_modules_may_have_a_method_of_this_name() -> None:
    model = fully_shard(nn.Sequential(Applied(), Applied()), make_mesh((2,)))
    seen = []
    apply_full(model, lambda module: seen.append(type(module)))
    assert seen == [Applied, Applied, type(model)]


@on_ranks(2)
def test_an_exception_leaves_sharded_parameters() -> None:
    plain, model = plain_and_sharded("gpt", (2,))

    def fn(module: nn.Module) -> None:
        if module is model.blocks[1].fc1:
            msg = "enough"
            raise ValueError(msg)

    with pytest.raises(ValueError, match="enough"):
        apply_full(model, fn)
    assert all(isinstance(param, ShardedTensor) for param in model.parameters())
    assert_full_values(model, plain)
    assert isinstance(model, FSDPModule)
