"""Exceptions, evaluations and writes between steps: the next forward sees what they left."""

from __future__ import annotations

import functools
import typing

import pytest
import torch
from one_backward import (
    MODES,
    TOLERANCE,
    BoomError,
    assert_same_training,
    compare_later_training,
    sharded_and_plain,
)
from torch import Tensor

from models import CASES, MLP
from parity import Ranks, Run, on_meshes
from reference import (
    LOSS_TOLERANCE,
    OPTIMIZERS,
    Differences,
    assert_each_within,
    assert_within,
    train,
)
from shardkit import ShardedTensor

if typing.TYPE_CHECKING:
    from collections.abc import Callable


# --- interruptions ------------------------------------------------------------------------------


class Fragile(MLP):
    """An MLP that raises where it is told: in forward or in backward, before the last layer."""

    breaks: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        if self.breaks == "forward":
            raise BoomError
        if self.breaks == "backward":
            x.register_hook(raise_boom)
        return self.layers[-1](x)


def raise_boom(grad: Tensor) -> Tensor:  # noqa: ARG001 - a hook's argument
    raise BoomError


def train_after_an_exception(
    ranks: Ranks, where: str, reshard_after_forward: bool | None
) -> Differences:
    case = CASES["mlp"]
    plain = Fragile()
    model = ranks.shard(case, plain, reshard_after_forward=reshard_after_forward)
    # Made first: an interrupted forward leaves unsharded parameters in the module until the next
    # one.
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    case.loss(model, ranks.batch(case, 0)).backward()
    for _ in range(2):
        model.breaks = where
        with pytest.raises(BoomError):
            case.loss(model, ranks.batch(case, 1)).backward()
        model.breaks = None
        optimizer.zero_grad()
    return compare_later_training(ranks, model, plain, optimizer)


@pytest.mark.parametrize("where", ["forward", "backward"])
@on_meshes((2,))
def test_training_goes_on_after_an_exception(run: Run, where: str) -> None:
    found = run.each(MODES, train_after_an_exception, where)
    assert_each_within(found, loss=LOSS_TOLERANCE, parameter=TOLERANCE)


def train_with_evaluations(ranks: Ranks) -> Differences:
    """Evaluate the whole model between steps, where it has only just been resharded or stepped."""
    case = CASES["gpt"]
    model, plain = sharded_and_plain(ranks, "gpt")
    differences = Differences()
    optimizer, plain_optimizer = (OPTIMIZERS["sgd"](each.parameters()) for each in (model, plain))
    for step in range(4):
        for _ in zip(
            train(case, model, optimizer, [ranks.batch(case, step)], ranks.end_step),
            train(case, plain, plain_optimizer, [ranks.global_batch(case, step)]),
            strict=True,
        ):
            pass
        with torch.no_grad():
            model.eval()
            plain.eval()
            loss = ranks.mean(case.loss(model, ranks.batch(case, 100)))
            differences.note("loss", loss, case.loss(plain, ranks.global_batch(case, 100)).double())
            model.train()
            plain.train()
    differences.note_parameters(model, plain)
    return differences


@on_meshes((2,))
def test_evaluation_between_steps_sees_the_stepped_weights(run: Run) -> None:
    assert_same_training(run(train_with_evaluations))


def halve_by_optimizer(parameters: list[Tensor], **form: bool) -> None:
    """Take a step that halves the parameters."""
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    torch.optim.SGD(parameters, lr=0.5, **form).step()
    for parameter in parameters:
        parameter.grad = None


def halve_pieces(parameters: list[Tensor]) -> None:
    """Write to each rank's piece, as initializers and exponential averages do."""
    with torch.no_grad():
        for parameter in parameters:
            piece = parameter.to_local() if isinstance(parameter, ShardedTensor) else parameter
            piece.mul_(0.5)


def halve_detached(parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.data.mul_(0.5)


def halve_by_copy(parameters: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter * 0.5)


WRITES: dict[str, Callable[[list[Tensor]], None]] = {
    "foreach": functools.partial(halve_by_optimizer, foreach=True),
    "for-loop": functools.partial(halve_by_optimizer, foreach=False),
    "fused": functools.partial(halve_by_optimizer, fused=True),
    "pieces": halve_pieces,
    "detached": halve_detached,
    "copy": halve_by_copy,
}


def write_after_a_forward(ranks: Ranks, write: str) -> Differences:
    """Change parameters while a group is gathered; compare what the next forward computes."""
    case = CASES["mlp"]
    model, plain = sharded_and_plain(ranks, reshard_after_forward=False)
    parameters = list(model.parameters())
    batch = ranks.batch(case, 0)
    case.loss(model, batch)  # Its graph is gone, its gathered weights are kept.
    WRITES[write](parameters)
    halve_by_copy(list(plain.parameters()))
    differences = Differences()
    loss = ranks.mean(case.loss(model, batch).detach())
    expected = case.loss(plain, ranks.global_batch(case, 0)).detach()
    differences.note("loss", loss, expected.double())
    return differences


@pytest.mark.parametrize("write", [write for write in WRITES if write != "fused"])
@on_meshes((2,))
def test_a_forward_sees_parameters_changed_since_the_last_one(run: Run, write: str) -> None:
    """Also where that one had no backward, and `reshard_after_forward` kept what it gathered."""
    assert_within(run(write_after_a_forward, write), loss=LOSS_TOLERANCE)


@on_meshes((2,), xla=())  # torch has no fused optimizers for XLA.
def test_a_forward_sees_parameters_changed_by_a_fused_optimizer(run: Run) -> None:
    assert_within(run(write_after_a_forward, "fused"), loss=LOSS_TOLERANCE)
