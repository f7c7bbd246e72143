"""On a card: sharded training in fp32 against plain training on the concatenated batch."""

from __future__ import annotations

import typing

import pytest
import torch
import torch.distributed as dist
from torch import nn

import one_card
from models import CASES
from one_card import (
    LOSS_TOLERANCE,
    SGD_TOLERANCE,
    TOLERANCES,
    CardDifferences,
    CardRanks,
    compare_training,
    reduce_by_buffers,
)
from reference import OPTIMIZERS, assert_within, step_all
from shardkit.backends.process_group import all_gather_single, reduce_scatter_single

if typing.TYPE_CHECKING:
    from workers import Spawn

pytestmark = one_card.NEEDS_CARD


WORLD_SIZES = (1, 2)


# --- what two ranks on one card stand on ----------------------------------------------------------


def try_collectives(dtype: torch.dtype) -> dict[str, str]:
    """Return what became of each collective that sharding needs, on tensors of the card."""
    world_size, rank = dist.get_world_size(), dist.get_rank()

    def gather() -> torch.Tensor:
        full = torch.zeros(3 * world_size, dtype=dtype, device=one_card.CARD)
        all_gather_single(full, torch.full_like(full[:3], rank + 1))
        return full.view(world_size, 3)[:, 0].double() - torch.arange(1.0, world_size + 1).to(full)

    def scatter() -> torch.Tensor:
        own = torch.zeros(3, dtype=dtype, device=one_card.CARD)
        reduce_scatter_single(own, torch.full_like(own.repeat(world_size), rank + 1))
        return own.double() - world_size * (world_size + 1) / 2

    def reduce(op: dist.ReduceOp, expected: float) -> torch.Tensor:
        numbers = torch.full((3,), rank + 1, dtype=dtype, device=one_card.CARD)
        dist.all_reduce(numbers, op)
        return numbers.double() - expected

    def broadcast() -> torch.Tensor:
        numbers = torch.full((3,), rank + 1, dtype=dtype, device=one_card.CARD)
        dist.broadcast(numbers, 0)
        return numbers.double() - 1

    total = world_size * (world_size + 1) / 2
    outcomes = {}
    for name, run in {
        "all-gather": gather,
        "reduce-scatter": scatter,
        "all-reduce (sum)": lambda: reduce(dist.ReduceOp.SUM, total),
        "all-reduce (max)": lambda: reduce(dist.ReduceOp.MAX, world_size),
        "broadcast": broadcast,
    }.items():
        try:
            outcomes[name] = "right" if not run().any() else "wrong numbers"
        except RuntimeError as error:  # What engines raise for what they do not support.
            outcomes[name] = f"{type(error).__name__}: {error}"
    return outcomes


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64], ids=str
)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_engine_has_the_collectives_for_tensors_of_the_card(
    on_card: Spawn, world_size: int, dtype: torch.dtype
) -> None:
    """Where this fails for two ranks, it is gloo of this torch that all their tests fail by."""
    for outcomes in on_card(try_collectives, world_size, dtype):
        assert set(outcomes.values()) == {"right"}, outcomes


# --- plain training -------------------------------------------------------------------------------


def train_sharded(
    name: str, reshard_after_forward: bool | None, optimizer: str, through_buffers: bool
) -> CardDifferences:
    ranks, case = CardRanks(), CASES[name]
    model, plain = ranks.pair(case, reshard_after_forward=reshard_after_forward)
    if through_buffers:
        reduce_by_buffers(model)
    return compare_training(case, model, plain, ranks, optimizer=optimizer)


def assert_trained(found: list[CardDifferences], optimizer: str = "sgd") -> None:
    tolerance = TOLERANCES[optimizer]
    assert_within(found, loss=max(LOSS_TOLERANCE, tolerance), grad=tolerance, parameter=tolerance)


@pytest.mark.parametrize(
    ("optimizer", "reshard_after_forward"),
    [("sgd", True), ("sgd", False), ("sgd", None), ("adamw", None)],
)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_training_equals_plain_training(
    on_card: Spawn,
    world_size: int,
    name: str,
    reshard_after_forward: bool | None,
    optimizer: str,
) -> None:
    found = on_card(train_sharded, world_size, name, reshard_after_forward, optimizer, False)
    assert_trained(found, optimizer)


@pytest.mark.parametrize("name", ["mlp", "gpt", "tiny", "frozen", "unused", "tied"])
def test_one_rank_trains_by_way_of_send_buffers_too(on_card: Spawn, name: str) -> None:
    assert_trained(on_card(train_sharded, 1, name, None, "sgd", True))


@pytest.mark.parametrize("name", ["tiny", "frozen", "unused", "tied"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_unusual_parameters_train_as_in_plain_training(
    on_card: Spawn, world_size: int, name: str
) -> None:
    assert_trained(on_card(train_sharded, world_size, name, None, "sgd", False))


def train_on(mesh_shape: tuple[int, ...], name: str) -> CardDifferences:
    ranks, case = CardRanks(mesh_shape), CASES[name]
    model, plain = ranks.pair(case)
    return compare_training(case, model, plain, ranks)


@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize("mesh_shape", [(1, 1), (1, 2), (2, 1)], ids=str)
def test_hybrid_meshes_train_as_in_plain_training(
    on_card: Spawn, mesh_shape: tuple[int, ...], name: str
) -> None:
    assert_trained(on_card(train_on, torch.Size(mesh_shape).numel(), mesh_shape, name))


# --- accumulation and clipping --------------------------------------------------------------------


def accumulate(name: str, micro_batches: int, through_buffers: bool) -> CardDifferences:
    """Train with several micro-batches per step, of which the last is synced."""
    ranks, case = CardRanks(), CASES[name]
    model, plain = ranks.pair(case)
    if through_buffers:
        reduce_by_buffers(model)
    optimizers = [OPTIMIZERS["sgd"](each.parameters()) for each in (model, plain)]
    differences = CardDifferences()
    for step in range(4):
        for micro in range(micro_batches):
            model.set_requires_gradient_sync(micro == micro_batches - 1)
            number = step * micro_batches + micro
            (case.loss(model, ranks.batch(case, number)) / micro_batches).backward()
            (case.loss(plain, ranks.global_batch(case, number)) / micro_batches).backward()
        differences.note_grads(model, plain)
        step_all(optimizers)
    differences.note_parameters(model, plain)
    return differences


@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize(("world_size", "through_buffers"), [(1, False), (1, True), (2, False)])
def test_micro_batches_add_up(
    on_card: Spawn, world_size: int, through_buffers: bool, name: str
) -> None:
    found = on_card(accumulate, world_size, name, 3, through_buffers)
    assert_within(found, grad=SGD_TOLERANCE, parameter=SGD_TOLERANCE)


def train_clipped(name: str, norm_type: float, by_module: bool) -> CardDifferences:
    ranks, case = CardRanks(), CASES[name]
    model, plain = ranks.pair(case)
    optimizers = [OPTIMIZERS["sgd"](each.parameters()) for each in (model, plain)]
    differences = CardDifferences()
    for step in range(4):
        case.loss(model, ranks.batch(case, step)).backward()
        case.loss(plain, ranks.global_batch(case, step)).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.05, norm_type)
        assert expected > 0.05, "nothing to clip"
        if by_module:
            norm = model.clip_grad_norm_(0.05, norm_type)
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type, foreach=True)
        assert norm.device == one_card.CARD
        differences.note("norm", norm, expected)
        differences.note_grads(model, plain)
        step_all(optimizers)
    differences.note_parameters(model, plain)
    return differences


@pytest.mark.parametrize("by_module", [False, True])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_clipped_gradients_are_those_of_plain_training(
    on_card: Spawn, world_size: int, name: str, norm_type: float, by_module: bool
) -> None:
    found = on_card(train_clipped, world_size, name, norm_type, by_module)
    # Norms are below 10: some units in the last place of it.
    assert_within(found, norm=1e-5, grad=SGD_TOLERANCE, parameter=SGD_TOLERANCE)
