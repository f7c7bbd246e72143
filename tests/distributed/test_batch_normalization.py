"""Batch normalization with statistics of each rank, beside DDP and beside a plain copy per rank."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from models import CASES
from parity import Ranks, Run, on_meshes
from reference import (
    LOSS_TOLERANCE,
    OPTIMIZERS,
    SGD_TOLERANCE,
    STEPS,
    TRAINED,
    Differences,
    assert_within,
    my_batch,
    train,
)

MESHES = ((2,), (4,), (2, 2))


# --- batch normalization ------------------------------------------------------------------------


def train_beside_ddp(ranks: Ranks) -> Differences:
    """Train with statistics per rank, as in DDP without broadcast of buffers."""
    case = CASES["conv"]
    plain = case.make()
    model = ranks.shard(case, plain)
    peer = DistributedDataParallel(plain, broadcast_buffers=False)
    batches = [my_batch(case, step) for step in range(STEPS)]
    differences = Differences()
    runs = (
        train(case, each, OPTIMIZERS["sgd"](each.parameters()), batches) for each in (model, peer)
    )
    for loss, expected in zip(*runs, strict=True):
        differences.note("loss", loss, expected)
        differences.note_grads(model, plain)
    differences.note_parameters(model, plain)
    differences.note_all("buffer", dict(model.named_buffers()), dict(plain.named_buffers()))
    return differences


@on_meshes(*MESHES, xla=())  # There is no DDP beside it.
def test_batch_normalization_trains_as_in_ddp(run: Run) -> None:
    # Only the order of the sum over ranks differs, and with it the parameters that later batches
    # see.
    assert_within(
        run(train_beside_ddp),
        loss=LOSS_TOLERANCE,
        grad=SGD_TOLERANCE,
        parameter=SGD_TOLERANCE,
        buffer=SGD_TOLERANCE,
    )


def train_with_statistics_per_rank(ranks: Ranks) -> Differences:
    """Train beside a plain copy per rank, whose gradients are averaged and whose steps are one."""
    case = CASES["conv"]
    plain = case.make()
    model = ranks.shard(case, plain)
    optimizer, plain_optimizer = (OPTIMIZERS["sgd"](each.parameters()) for each in (model, plain))
    differences = Differences()
    for step in range(4):
        losses = []
        for batch in ranks.rank_batches(case, step):
            losses.append(case.loss(plain, batch))
            (losses[-1] / ranks.world_size).backward()
        for loss in train(case, model, optimizer, [ranks.batch(case, step)], ranks.end_step):
            differences.note_grads(model, plain)
            differences.note("loss", ranks.mean(loss), torch.stack(losses).double().mean())
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    differences.note_parameters(model, plain)
    return differences


@on_meshes((2,), (2, 2))
def test_each_rank_normalizes_by_its_own_statistics(run: Run) -> None:
    assert_within(run(train_with_statistics_per_rank), **TRAINED)
