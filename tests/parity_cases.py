"""Cases of training that run on every backend, replicas of XLA as well: see `parity`."""

from __future__ import annotations

from torch import nn

from models import CASES
from parity import Ranks, compare_training, compare_with, run_plain
from reference import (
    LOSS_TOLERANCE,
    OPTIMIZERS,
    SGD_TOLERANCE,
    Differences,
    shard,
    step_all,
)
from shardkit import checkpoint_module

# Adam divides the gradient by its own size, so where that is small its rounding error counts for
# more.
ADAMW_TOLERANCE = 2e-5
# Gradients are compared along the whole run: those of late steps belong to parameters that already
# differ.
TRAINING = {
    name: {"loss": max(LOSS_TOLERANCE, tolerance), "grad": tolerance, "parameter": tolerance}
    for name, tolerance in (("sgd", SGD_TOLERANCE), ("adamw", ADAMW_TOLERANCE))
}
ACCUMULATED = {"grad": SGD_TOLERANCE, "parameter": SGD_TOLERANCE}
CLIPPED = {"grad": SGD_TOLERANCE, "norm": SGD_TOLERANCE, "parameter": SGD_TOLERANCE}


def train_sharded(
    ranks: Ranks, name: str, reshard_after_forward: bool | None, optimizer: str
) -> Differences:
    case = CASES[name]
    plain = case.make()
    model = ranks.shard(case, plain, reshard_after_forward=reshard_after_forward)
    return compare_training(case, model, plain, optimizer, ranks=ranks)


def train_in_every_mode(ranks: Ranks, name: str, optimizer: str) -> dict[bool | None, Differences]:
    """Train one model sharded in every way of resharding, beside one plain run."""
    case = CASES[name]
    plain = case.make()
    models = {
        mode: ranks.shard(case, plain, reshard_after_forward=mode) for mode in (True, False, None)
    }
    expected = run_plain(case, plain, optimizer, ranks)
    found = {}
    for mode, model in models.items():
        try:
            found[mode] = compare_with(case, model, expected, optimizer, ranks)
        except BaseException as error:
            error.add_note(f"with reshard_after_forward={mode}")
            raise
    return found


def train_checkpointed(ranks: Ranks) -> Differences:
    """Train with blocks that keep their inputs only."""
    case = CASES["gpt"]
    plain = case.make()
    model = ranks.put(plain)
    for block in model.blocks:
        checkpoint_module(block)
    return compare_training(case, shard(case, model, ranks.mesh), plain, ranks=ranks)


def accumulate(ranks: Ranks, name: str, switch: str | None) -> Differences:
    """Train with three micro-batches per step.

    Args:
        ranks: Where.
        name: The case.
        switch: The method that turns communication off for all micro-batches but the last; None:
            none is.
    """
    case, micro_batches = CASES[name], 3
    reference = case.make()
    model = ranks.shard(case, reference)
    optimizer, plain_optimizer = (
        OPTIMIZERS["sgd"](each.parameters()) for each in (model, reference)
    )
    differences = Differences()
    for step in range(4):
        for micro in range(micro_batches):
            if switch is not None:
                getattr(model, switch)(micro == micro_batches - 1)
            number = step * micro_batches + micro
            (case.loss(model, ranks.batch(case, number)) / micro_batches).backward()
            (case.loss(reference, ranks.global_batch(case, number)) / micro_batches).backward()
            if switch is None:
                differences.note_grads(model, reference)
            elif micro == 0:
                assert all(parameter.grad is None for parameter in model.parameters()), (
                    "not yet averaged"
                )
        differences.note_grads(model, reference)
        step_all((optimizer, plain_optimizer))
        ranks.end_step()
    differences.note_parameters(model, reference)
    return differences


def train_clipped(
    ranks: Ranks, name: str, norm_type: float, by: str = "torch's function"
) -> Differences:
    """Train with gradients clipped, of the sharded model by torch's function or by its method."""
    case = CASES[name]
    plain = case.make()
    model = ranks.shard(case, plain)
    optimizers = [OPTIMIZERS["sgd"](each.parameters()) for each in (model, plain)]
    differences = Differences()
    for step in range(3):
        case.loss(model, ranks.batch(case, step)).backward()
        case.loss(plain, ranks.global_batch(case, step)).backward()
        norms = [
            model.clip_grad_norm_(0.05, norm_type)
            if by == "its method"
            else nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type),
            nn.utils.clip_grad_norm_(plain.parameters(), 0.05, norm_type),
        ]
        assert norms[1] > 0.05, "nothing to clip"
        differences.note_grads(model, plain)
        differences.note("norm", *norms)
        step_all(optimizers)
        ranks.end_step()
    differences.note_parameters(model, plain)
    return differences
