"""What autograd can do with a sharded model, compared with a plain one."""

from __future__ import annotations

import copy
import typing

import pytest
import torch
from one_backward import (
    MODES,
    TOLERANCE,
    assert_same_training,
    compare_later_training,
    compare_one_backward,
    sharded_and_plain,
)
from torch import Tensor, nn

from models import CASES, MLP, Batch
from parity import Ranks, Run, on_meshes
from reference import LOSS_TOLERANCE, Differences, assert_each_within, shard
from shardkit import ShardedTensor

if typing.TYPE_CHECKING:
    from collections.abc import Callable


# --- forwards and backwards, combined -----------------------------------------------------------


def two_forwards(model: nn.Module, batch: Batch) -> None:
    """Run the model on a batch and on its negative before one backward."""
    x, y = batch
    loss = CASES["mlp"].loss
    (loss(model, (x, y)) + 2 * loss(model, (-x, y))).backward()


def recurrent(model: nn.Module, batch: Batch) -> None:
    """Use one layer three times in a forward."""
    x, _ = batch
    model.layers[0](x).mean().backward()
    h = model.layers[0](x)
    for _ in range(2):
        h = model.layers[0](torch.tanh(h[:, :7]))
    (10 * h.square().mean()).backward()


def two_backwards(model: nn.Module, batch: Batch) -> None:
    """Go backward twice through one graph."""
    loss = CASES["mlp"].loss(model, batch)
    loss.backward(retain_graph=True)
    (3 * loss).backward()


def interleaved(model: nn.Module, batch: Batch) -> None:
    """Go backward through the first of two forwards after the second."""
    x, y = batch
    first = CASES["mlp"].loss(model, (x, y))
    second = CASES["mlp"].loss(model, (-x, y))
    first.backward()
    second.backward()


def partial_forward(model: nn.Module, batch: Batch) -> None:
    """Run layers without the root."""
    x, _ = batch
    model.layers[1](torch.tanh(model.layers[0](x))).square().mean().backward()


def gradient_of_inputs(model: nn.Module, batch: Batch) -> None:
    """Ask for the gradient of the input too, and use it."""
    x, y = batch
    x = x.clone().requires_grad_()
    CASES["mlp"].loss(model, (x, y)).backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


def discarded_forward(model: nn.Module, batch: Batch) -> None:
    """Throw away the graph of one forward, then train on another."""
    CASES["mlp"].loss(model, batch)
    x, y = batch
    CASES["mlp"].loss(model, (x * 0.5, y)).backward()


def inference_before(model: nn.Module, batch: Batch) -> None:
    """Evaluate in inference mode before a step."""
    with torch.inference_mode():
        model(batch[0])
    evaluation_between(model, batch)


def evaluation_between(model: nn.Module, batch: Batch) -> None:
    """Evaluate, without gradients, between forward and backward and before both."""
    x, y = batch
    with torch.no_grad():
        model(x)
    loss = CASES["mlp"].loss(model, (x, y))
    with torch.no_grad():
        model.eval()
        model(-x)
        model.train()
    loss.backward()


@pytest.mark.parametrize(
    "backward",
    [
        two_forwards,
        recurrent,
        two_backwards,
        interleaved,
        partial_forward,
        gradient_of_inputs,
        discarded_forward,
        evaluation_between,
    ],
)
@on_meshes((2,))
def test_forwards_and_backwards_in_any_order(
    run: Run, backward: Callable[[nn.Module, Batch], None]
) -> None:
    found = run.each(MODES, backward_in_order, backward)
    assert_each_within(found, grad=TOLERANCE, loss=LOSS_TOLERANCE, parameter=TOLERANCE)


@on_meshes((2,), xla=())  # torch_xla has no inference mode: plain linear layers fail in it.
def test_inference_before_a_step(run: Run) -> None:
    found = run.each(MODES, backward_in_order, inference_before)
    assert_each_within(found, grad=TOLERANCE, loss=LOSS_TOLERANCE, parameter=TOLERANCE)


def backward_in_order(
    ranks: Ranks, backward: Callable[[nn.Module, Batch], None], reshard_after_forward: bool | None
) -> Differences:
    model, plain = sharded_and_plain(ranks, reshard_after_forward=reshard_after_forward)
    differences = compare_one_backward(ranks, model, plain, backward)
    for each in (model, plain):
        each.zero_grad()
    return differences | compare_later_training(ranks, model, plain)


def gradient_of_the_input(ranks: Ranks, reshard_after_forward: bool | None) -> Differences:
    """``autograd.grad`` for the input is right, leaves no ``.grad``, and training goes on."""
    model, plain = sharded_and_plain(ranks, reshard_after_forward=reshard_after_forward)
    differences = Differences()
    x, y = ranks.batch(CASES["mlp"], 0)
    for _ in range(2):
        grads: list[Tensor] = []
        for each, device in ((model, x.device), (plain, "cpu")):
            inputs = x.detach().to(device, copy=True).requires_grad_()
            grads += torch.autograd.grad(CASES["mlp"].loss(each, (inputs, y.to(device))), inputs)
        differences.note("grad", *grads)
        assert all(parameter.grad is None for parameter in model.parameters())
    return differences | compare_later_training(ranks, model, plain)


@on_meshes((2,))
def test_autograd_grad_creates_no_grad(run: Run) -> None:
    found = run.each(MODES, gradient_of_the_input)
    assert_each_within(found, grad=TOLERANCE, loss=LOSS_TOLERANCE, parameter=TOLERANCE)


def gradient_penalty(ranks: Ranks, reshard_after_forward: bool | None) -> Differences:
    """Differentiate the gradient of the input: double backward."""

    def backward(model: nn.Module, batch: Batch) -> None:
        x, y = batch
        x = x.clone().requires_grad_()
        loss = CASES["mlp"].loss(model, (x, y))
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        # A mean over the batch, also where the batch is that of all ranks.
        (loss + (grad * len(x)).square().sum(1).mean()).backward()

    model, plain = sharded_and_plain(ranks, reshard_after_forward=reshard_after_forward)
    return compare_one_backward(ranks, model, plain, backward)


@on_meshes((2,))
def test_a_gradient_penalty_differentiates_twice(run: Run) -> None:
    assert_each_within(run.each(MODES, gradient_penalty), grad=TOLERANCE)


# --- parameters' hooks and copies of models -----------------------------------------------------


def hooks_on_parameters(ranks: Ranks, registered: str) -> list[int]:
    """Return how often each parameter's hook ran in two backwards, with the gradient in place."""
    model = ranks.put(MLP())
    counts = [0] * len(list(model.parameters()))
    if registered == "after":
        shard(CASES["mlp"], model, ranks.mesh)
    for i, parameter in enumerate(model.parameters()):

        def count(param: Tensor, i: int = i) -> None:
            assert isinstance(param, ShardedTensor)
            assert isinstance(param.grad, ShardedTensor)
            counts[i] += 1

        parameter.register_post_accumulate_grad_hook(count)
    if registered == "before":
        shard(CASES["mlp"], model, ranks.mesh)
    for step in range(2):
        CASES["mlp"].loss(model, ranks.batch(CASES["mlp"], step)).backward()
    return counts


@pytest.mark.parametrize("registered", ["before", "after"])
@on_meshes((2,))
def test_post_accumulate_hooks_run_once_per_backward(run: Run, registered: str) -> None:
    assert all(counts == [2] * 6 for counts in run(hooks_on_parameters, registered))


def train_a_copy(ranks: Ranks, when: str) -> Differences:
    """Train a deep copy of a sharded model; the original must stay as it was."""
    case = CASES["mlp"]
    model, plain = sharded_and_plain(ranks)
    if when == "after training":
        compare_later_training(ranks, model, plain)
    duplicate, plain_duplicate = copy.deepcopy(model), copy.deepcopy(plain)
    differences = compare_later_training(ranks, duplicate, plain_duplicate)
    differences.note_parameters(model, plain)  # Training the copy did not change the original.
    case.loss(model, ranks.batch(case, 50)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in duplicate.parameters())
    return differences


@pytest.mark.parametrize("when", ["at once", "after training"])
@on_meshes((2,))
def test_a_deep_copy_trains_by_itself(run: Run, when: str) -> None:
    assert_same_training(run(train_a_copy, when))


# --- tied weights -------------------------------------------------------------------------------


def tied_weight_stays_tied(ranks: Ranks, name: str) -> bool:
    model, _ = sharded_and_plain(ranks, name)
    first, second = {"gpt": ("tokens", "head"), "tied": ("encoder", "decoder")}[name]
    case = CASES[name]
    case.loss(model, ranks.batch(case, 0)).backward()
    first, second = getattr(model, first), getattr(model, second)
    return isinstance(first.weight, ShardedTensor) and first.weight is second.weight


@pytest.mark.parametrize("name", ["gpt", "tied"])
@on_meshes((2,))
def test_a_tied_weight_stays_one_parameter(run: Run, name: str) -> None:
    """That its gradient is the sum over its uses is seen in the parity tests."""
    assert all(run(tied_weight_stays_tied, name))
