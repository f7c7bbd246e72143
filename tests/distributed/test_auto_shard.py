"""Models that a policy shards train as plain ones, whatever it chooses."""

from __future__ import annotations

import contextlib
import typing

import pytest
import torch
from torch import Tensor, nn

from models import CASES, Block, Case, cross_entropy, token_batch
from parity import Ranks, Run, compare_training, on_meshes
from reference import (
    TRAINED,
    Differences,
    assert_each_within,
    assert_within,
    step_all,
)
from shardkit import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    _schedule,
    always_wrap_policy,
    auto_shard,
    checkpoint_module,
    strategy,
)
from wrapped_models import (
    Attention,
    FeedForward,
    Mixture,
    SharedLayers,
    SharingBlock,
    Stack,
    TiedBlocks,
)

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from workers import Spawn


pytestmark = pytest.mark.helpers


def case_of(make: Callable[[], nn.Module]) -> Case:
    return Case(make, lambda _: [], token_batch, cross_entropy)


def frozen_stack() -> nn.Module:
    """The embedding, a block and half of another one are frozen."""
    model = Stack()
    for module in (model.tokens, model.blocks[1], model.blocks[2].fc1):
        module.requires_grad_(requires_grad=False)
    return model


WRAPPED: dict[str, tuple[Case, typing.Any]] = {
    "classes": (case_of(Stack), {Block}),
    "tied to the root": (CASES["gpt"], {Block, nn.Embedding, nn.Linear}),
    "tied inside": (case_of(TiedBlocks), [nn.Linear, nn.Embedding, nn.Sequential]),
    "tied in a list": (case_of(TiedBlocks), {("tokens", "head"): {}, ("layers.*",): {}}),
    "named": (
        case_of(Stack),
        {
            "tokens": "free_full_weight",
            "blocks.*": {},
            "blocks.1": {"reshard_after_forward": False},
            ("norm", "head"): "keep_full_weight",
        },
    ),
    "everything": (case_of(Attention), always_wrap_policy),
    "frozen": (case_of(frozen_stack), {Block, nn.Embedding}),
    "one group": (CASES["mlp"], "no_wrap"),
    "balanced": (case_of(Stack), None),
    "shared": (case_of(SharedLayers), SharingBlock),
    "shared and balanced": (case_of(SharedLayers), None),
    "shared, with a group inside": (
        case_of(SharedLayers),
        {"blocks.*": {}, "blocks.0.shared.fc1": {}},
    ),
    "shared, a group itself": (case_of(SharedLayers), {SharingBlock, FeedForward}),
    "shared in a list": (case_of(SharedLayers), {("blocks.*",): {}}),
}


@contextlib.contextmanager
def small_groups() -> Iterator[None]:
    """Let the balanced choice divide small models, too."""
    before, _schedule.BATCH_NBYTES = _schedule.BATCH_NBYTES, 4096
    try:
        yield
    finally:
        _schedule.BATCH_NBYTES = before


def train_wrapped(ranks: Ranks, name: str, chosen: str | None = None) -> Differences:
    case, policy = WRAPPED[name]
    plain = case.make()
    model = ranks.put(plain)
    with small_groups():
        plan = auto_shard(model, ranks.mesh, policy, strategy=chosen)
    assert len(plan.groups) >= (1 if policy == "no_wrap" else 2)
    assert plan.memory.shard_nbytes == model.memory_stats()["shard_nbytes"]
    return compare_training(case, model, plain, ranks=ranks)


def check(by_rank: list[Differences]) -> None:
    assert_within(by_rank, **TRAINED)


@on_meshes((2,), (2, 2), xla=())
def test_training(run: Run) -> None:
    assert_each_within(run.each({name: name for name in WRAPPED}, train_wrapped), **TRAINED)


@pytest.mark.parametrize("name", ["tied inside", "named"])
@on_meshes((1,), (4,), xla=((4,),))
def test_training_on_one_and_four_ranks(run: Run, name: str) -> None:
    check(run(train_wrapped, name))


def train_mixture(ranks: Ranks) -> tuple[Differences, list[set[int]]]:
    """Train experts; return which of them ran in the end, too."""
    case = case_of(Mixture)
    plain = case.make()
    model = ranks.put(plain)
    with small_groups():
        plan = auto_shard(model, ranks.mesh)
    differences = compare_training(case, model, plain, ranks=ranks)
    assert [group.names for group in plan.groups] == [("blocks.0",), ("blocks.1",), ("",)]
    return differences, [block.taken for block in model.blocks]


@on_meshes((2,), xla=())
def test_ranks_may_choose_among_experts(run: Run) -> None:
    by_rank = run(train_mixture)
    first, second = (taken for _, taken in by_rank)
    assert first != second
    check([differences for differences, _ in by_rank])


# --- strategies ---------------------------------------------------------------------------------


def accumulate(ranks: Ranks, name: str, chosen: str) -> Differences:
    """Train with three micro-batches a step."""
    case, policy = WRAPPED[name]
    plain = case.make()
    model, way = ranks.put(plain), strategy(chosen)
    auto_shard(model, ranks.mesh, policy, strategy=way)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (plain, model)]
    differences = Differences()
    for step in range(3):
        for micro in range(3):
            way.begin_micro_batch(model, is_last=micro == 2)
            number = 3 * step + micro
            losses = (
                case.loss(model, ranks.batch(case, number)),
                case.loss(plain, ranks.global_batch(case, number)),
            )
            for loss in losses:
                (loss / 3).backward()
            differences.note("loss", ranks.mean(losses[0]), losses[1].double().detach())
        differences.note_grads(model, plain)
        step_all(optimizers)
        ranks.end_step()
    differences.note_parameters(model, plain)
    return differences


@pytest.mark.parametrize("chosen", ["zero1", "zero2", "zero3"])
@on_meshes((2,), xla=((4,),))
def test_strategies_of_one_axis(run: Run, chosen: str) -> None:
    check(run(accumulate, "classes", chosen))


@pytest.mark.parametrize("chosen", ["hybrid", "hybrid_zero2"])
@on_meshes((2, 2), xla=())
def test_strategies_of_two_axes(run: Run, chosen: str) -> None:
    check(run(accumulate, "tied inside", chosen))


@pytest.mark.parametrize("name", ["classes", "tied inside"])
@on_meshes((2, 1), xla=())
def test_replicas(run: Run, name: str) -> None:
    check(run(accumulate, name, "replicate"))


def mesh_of(chosen: str) -> tuple[int, ...]:
    model = Stack()
    plan = auto_shard(model, None, Block, strategy=chosen)
    return plan.mesh_shape


@pytest.mark.parametrize(("chosen", "shape"), [("ddp", (2, 1)), ("FULL_SHARD", (2,))])
def test_a_strategy_makes_its_mesh(spawn: Spawn, chosen: str, shape: tuple[int, ...]) -> None:
    assert spawn(mesh_of, 2, chosen) == [shape, shape]


# --- with everything else -----------------------------------------------------------------------


def train_with_options(ranks: Ranks) -> float:
    """Mixed precision, activation checkpointing, some groups on the host."""
    case = case_of(Stack)
    model = ranks.put(case.make())
    plan = auto_shard(
        model,
        ranks.mesh,
        Block,
        units={"tokens": {"offload_policy": CPUOffloadPolicy()}, ("norm", "head"): {}},
        before=lambda module: checkpoint_module(module) if isinstance(module, Block) else None,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        offload_budget_nbytes=0,
    )
    assert [group.name for group in plan.groups][-1] == "norm, head"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # Has no state beside the shards.
    losses: list[Tensor] = []
    for _ in range(12):
        loss = case.loss(model, ranks.batch(case, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return (losses[-1] / losses[0]).item()


@on_meshes((2,), xla=())
def test_training_with_all_options(run: Run) -> None:
    assert all(ratio < 0.8 for ratio in run(train_with_options))
