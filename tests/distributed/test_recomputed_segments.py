"""torch's activation checkpointing inside and outside of groups."""

from __future__ import annotations

import copy

import pytest
import torch
from one_backward import (
    MODES,
    TOLERANCE,
    assert_same_training,
    compare_later_training,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models import CASES
from parity import Ranks, Run, on_meshes
from reference import (
    LOSS_TOLERANCE,
    OPTIMIZERS,
    Differences,
    assert_each_within,
    full_grads,
    train,
)
from shardkit import fully_shard

# --- checkpointing ------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Recomputes the forward of the module inside."""

    def __init__(self, inner: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


def train_checkpointed(
    ranks: Ranks, order: str, use_reentrant: bool, reshard_after_forward: bool | None
) -> Differences:
    """Recompute blocks inside or outside of their groups.

    Args:
        ranks: Where.
        order: What is outside: ``"checkpoint"`` recomputes a sharded block, unsharding included;
            ``"shard"`` recomputes the inside of one.
        use_reentrant: Kind of checkpointing.
        reshard_after_forward: As of ``fully_shard``.
    """
    case = CASES["gpt"]
    plain = case.make()
    model = copy.deepcopy(plain)
    for i, block in enumerate(model.blocks):
        if order == "checkpoint":
            fully_shard(block, reshard_after_forward=reshard_after_forward)
            model.blocks[i] = Checkpointed(block, use_reentrant=use_reentrant)
        else:
            model.blocks[i] = fully_shard(
                Checkpointed(block, use_reentrant=use_reentrant),
                reshard_after_forward=reshard_after_forward,
            )
    fully_shard(model, reshard_after_forward=reshard_after_forward)
    return compare_renamed_training(ranks, model, plain)


def compare_renamed_training(ranks: Ranks, model: nn.Module, plain: nn.Module) -> Differences:
    """Train a model whose blocks are wrapped; compare by position, for names differ."""
    case = CASES["gpt"]
    differences = Differences()
    batches = range(4)
    sharded = train(
        case, model, OPTIMIZERS["sgd"](model.parameters()), (ranks.batch(case, i) for i in batches)
    )
    expected = train(
        case,
        plain,
        OPTIMIZERS["sgd"](plain.parameters()),
        (ranks.global_batch(case, i) for i in batches),
    )
    for losses in zip(sharded, expected, strict=True):
        differences.note("loss", ranks.mean(losses[0]), losses[1].double())
        grads = zip(full_grads(model).values(), full_grads(plain).items(), strict=True)
        for actual, (name, grad) in grads:
            differences.note("grad", actual, grad, name)
    return differences


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("order", ["checkpoint", "shard"])
@on_meshes((2,), xla=())  # torch's checkpointing does not know XLA; `checkpoint_module` does.
def test_checkpointing_inside_and_outside_of_groups(
    run: Run, order: str, use_reentrant: bool
) -> None:
    found = run.each(MODES, train_checkpointed, order, use_reentrant)
    assert_each_within(found, loss=LOSS_TOLERANCE, grad=TOLERANCE)


class SharedSegments(nn.Module):
    """Two reentrant segments that use one layer: its gradient arrives twice in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.shared = nn.Linear(7, 7)
        self.last = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(2):
            x = torch.tanh(checkpoint(self.shared, x, use_reentrant=True))
        return self.last(x)


def train_shared_segments(ranks: Ranks, one_group: bool) -> Differences:
    plain = SharedSegments()
    model = copy.deepcopy(plain)
    if not one_group:
        for layer in (model.first, model.shared, model.last):
            fully_shard(layer)
    fully_shard(model)
    return compare_later_training(ranks, model, plain)


@pytest.mark.parametrize("one_group", [True, False])
@on_meshes((2,), xla=())  # torch's checkpointing does not know XLA; `checkpoint_module` does.
def test_reentrant_segments_that_share_a_layer(run: Run, one_group: bool) -> None:
    assert_same_training(run(train_shared_segments, one_group))
