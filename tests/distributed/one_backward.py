"""What autograd does with a sharded model beside a plain one: one backward, or some steps on."""

from __future__ import annotations

import typing

from models import CASES, Batch
from reference import LOSS_TOLERANCE, OPTIMIZERS, Differences, assert_within, train

if typing.TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from parity import Ranks


# Sums over ranks in another order: some units in the last place of gradients below 1.
TOLERANCE = 1e-6


class BoomError(Exception):
    """Raised by tests in the middle of a step."""


def compare_one_backward(
    ranks: Ranks,
    model: nn.Module,
    reference: nn.Module,
    backward: Callable[[nn.Module, Batch], object],
) -> Differences:
    """Compare gradients after ``backward`` with the reference's mean over all ranks' batches."""
    case = CASES["mlp"]
    backward(model, ranks.batch(case, 0))
    for batch in ranks.rank_batches(case, 0):
        backward(reference, batch)
    for parameter in reference.parameters():
        if parameter.grad is not None:
            parameter.grad /= ranks.world_size
    differences = Differences()
    differences.note_grads(model, reference)
    return differences


def compare_later_training(
    ranks: Ranks,
    model: nn.Module,
    reference: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> Differences:
    """Train both for some steps; ``optimizer`` is the sharded model's, if it has one already."""
    case = CASES["mlp"]
    steps = range(10, 14)
    differences = Differences()
    optimizer = optimizer or OPTIMIZERS["sgd"](model.parameters())
    sharded = train(
        case, model, optimizer, (ranks.batch(case, step) for step in steps), ranks.end_step
    )
    plain = train(
        case,
        reference,
        OPTIMIZERS["sgd"](reference.parameters()),
        (ranks.global_batch(case, step) for step in steps),
    )
    for loss, expected in zip(sharded, plain, strict=True):
        differences.note("loss", ranks.mean(loss), expected.double())
    differences.note_parameters(model, reference)
    return differences


def sharded_and_plain(
    ranks: Ranks, name: str = "mlp", **options: typing.Any
) -> tuple[nn.Module, nn.Module]:
    """Make a case's model sharded layer by layer, and plain."""
    plain = CASES[name].make()
    return ranks.shard(CASES[name], plain, **options), plain


MODES = {f"reshard_after_forward={mode}": mode for mode in (True, False, None)}


def assert_same_gradients(by_rank: list[Differences]) -> None:
    assert_within(by_rank, grad=TOLERANCE)


def assert_same_training(by_rank: list[Differences]) -> None:
    assert_within(by_rank, loss=LOSS_TOLERANCE, parameter=TOLERANCE)
