"""Gradients that are divided before they are summed: `set_gradient_predivide_factor`."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
from torch import nn

from models import CASES
from parity import Ranks, Run, compare_training, on_meshes
from reference import (
    LOSS_TOLERANCE,
    Differences,
    assert_each_within,
    assert_within,
    make_mesh,
    shard,
)
from shardkit import FSDPModule, MixedPrecisionPolicy, StateError, fully_shard
from shardkit._params.gradients import predivide_factor_for
from workers import Spawn, on_ranks

pytestmark = pytest.mark.helpers


def set_all(model: nn.Module, factor: typing.Any) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_predivide_factor(factor)


def train_divided(ranks: Ranks, factor: typing.Any) -> Differences:
    case = CASES["gpt"]
    torch.manual_seed(0)
    plain = case.make()
    model = ranks.shard(case, plain)
    set_all(model, factor)
    return compare_training(case, model, plain, ranks=ranks)


@on_meshes((1,), (2,), (4,), (2, 2))
def test_training_is_the_same(run: Run) -> None:
    found = run.each({str(factor): factor for factor in (2, "auto", 3.7)}, train_divided)
    assert_each_within(found, loss=LOSS_TOLERANCE, grad=1e-6, parameter=1e-6)


# What fairscale's get_gradient_predivide_factor returns.
@pytest.mark.parametrize(
    ("num_ranks", "factor"),
    [(1, 1), (2, 2), (3, 2), (4, 2), (6, 4), (8, 4), (9, 2), (16, 4), (64, 8), (100, 8), (128, 16)],
)
def test_auto_is_the_factor_of_fairscale(num_ranks: int, factor: int) -> None:
    assert predivide_factor_for(num_ranks) == factor


def gradients(
    mesh: tuple[int, ...], factor: float | None, value: float, policy: MixedPrecisionPolicy
) -> float:
    """Return a gradient, each rank's being `value`."""
    sharded: typing.Any = fully_shard(nn.Linear(1, 1, bias=False), make_mesh(mesh), policy)
    sharded.set_gradient_predivide_factor(factor)
    dtype = policy.param_dtype or torch.float32
    sharded(torch.full((1, 1), value, dtype=dtype)).sum().backward()
    return sharded.weight.grad.full_tensor().item()


FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)


def overflow() -> tuple[float, float]:
    return gradients((2, 2), None, 40_000.0, FP16), gradients((2, 2), 4.0, 40_000.0, FP16)


def test_sums_over_replicas_in_fp16_do_not_overflow(spawn: Spawn) -> None:
    """Four times 40000 is above the largest fp16 number, 65504."""
    for plain, divided in spawn(overflow, 4):
        assert plain == float("inf")
        assert divided == 40_000.0


def with_both_factors() -> float:
    model: typing.Any = fully_shard(nn.Linear(1, 1, bias=False), make_mesh((2,)))
    model.set_gradient_divide_factor(5.0)
    model.set_gradient_predivide_factor(4.0)
    for _ in range(2):
        model(torch.full((1, 1), 3.0)).sum().backward()
    return model.weight.grad.full_tensor().item()


def test_the_divide_factor_says_how_much_is_divided_in_all(spawn: Spawn) -> None:
    assert spawn(with_both_factors, 2) == [pytest.approx(2 * 2 * 3 / 5, rel=1e-6)] * 2


@on_ranks(4)
def test_with_accumulated_gradients_and_partial_sums() -> None:
    """Micro-batches that are not synced, then ones that are summed over the shard axis only."""
    # A power of two changes no bit.
    case = CASES["mlp"]
    torch.manual_seed(0)
    plain = case.make()
    differences = Differences()
    for factor in (None, 4.0):
        model: typing.Any = shard(case, copy.deepcopy(plain), make_mesh((2, 2)))
        set_all(model, factor)
        for step in range(4):
            model.set_requires_gradient_sync(step != 0)
            model.set_requires_all_reduce(step == 3)
            case.loss(model, case.batch(torch.Generator().manual_seed(step))).backward()
        grads = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
        if factor is None:
            expected = grads
        else:
            differences.note_all("grad", grads, expected)
    assert_within([differences], grad=0.0)


@on_ranks(1)
def test_factors_that_cannot_be() -> None:
    model: typing.Any = fully_shard(nn.Linear(2, 2), make_mesh((1,)))
    for factor in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(StateError, match=r"divided by .* first. Pass a finite number above 0"):
            model.set_gradient_predivide_factor(factor)
    with pytest.raises(StateError, match="must be a number, 'auto' or None, got 'root'"):
        model.set_gradient_predivide_factor("root")
