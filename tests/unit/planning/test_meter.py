"""What is recorded of a run: gradients that are added in place, memory that kernels take."""

from __future__ import annotations

import typing

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from planned_runs import Adapters, Mlp
from shardkit.planning._meter import MemoryMeter
from wrapped_models import Stack

if typing.TYPE_CHECKING:
    from collections.abc import Callable

TOKENS = torch.zeros(2, 5, dtype=torch.long)


class _Adds(torch.autograd.Function):
    """Backward adds by itself, which makes a new tensor."""

    @staticmethod
    def forward(ctx: typing.Any, x: Tensor) -> Tensor:
        del ctx
        return 2 * x

    @staticmethod
    def backward(ctx: typing.Any, *grads: typing.Any) -> typing.Any:
        del ctx
        (grad,) = grads
        twice = 1 * grad
        twice = twice + grad
        return 1 * twice


class OwnBackward(nn.Module):
    """A function of a user."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        result: Tensor = self.last(x + _Adds.apply(x))
        return result


def _in_place_for_real(model: nn.Module, batch: Tensor) -> int:
    loss = model(batch).sum()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        loss.backward()
    return sum(event.name == "aten::add_" for event in seen.events())


def _in_place_in_a_plan(model: nn.Module, batch: Tensor) -> int:
    model, batch = model.to("meta"), batch.to("meta")
    with MemoryMeter(on_cpu=False) as meter:
        model(batch).sum().backward()
    return sum(memory.takes_over is not None for memory in meter.memories)


@pytest.mark.parametrize(
    ("make", "batch", "expected"),
    [
        (lambda: Mlp(10, 3), torch.ones(4, 10), 2),
        (lambda: Adapters(32), TOKENS, 5),  # Five others are views of what they are made of.
        (lambda: Stack(dim=32, num_blocks=3), TOKENS, 6),
        (OwnBackward, torch.ones(2, 3, 8), 0),
        (OwnBackward, torch.ones(3, 8), 1),
    ],
    ids=["mlp", "adapters", "transformer", "own backward", "own backward, matrices"],
)
def test_gradients_are_added_in_place_where_the_engine_does(
    make: Callable[[], nn.Module], batch: Tensor, expected: int
) -> None:
    assert _in_place_for_real(make(), batch) == expected
    assert _in_place_in_a_plan(make(), batch) == expected


def test_a_gradient_that_is_added_in_place_is_counted_once() -> None:
    """In backward there are three: the output of a layer, its gradient, and what is added to it."""
    x = torch.empty(1000, 1000, device="meta", requires_grad=True)
    with MemoryMeter(on_cpu=True) as meter:
        y = 2 * x
        loss = (y * 3 + y * 4).sum()
        begin = meter.position
        loss.backward()
    assert max(meter.totals()[begin:]) // x.nbytes == 3


def test_what_a_formula_of_backward_writes_in_place_is_counted_once() -> None:
    """The gradient of a gather is zeros, into which torch scatters unless a mode is on."""
    x = torch.empty(1000, 1000, device="meta", requires_grad=True)
    index = torch.empty(1, 1, dtype=torch.long, device="meta")
    with MemoryMeter(on_cpu=True) as meter:
        loss = x.gather(0, index).sum()
        begin = meter.position
        loss.backward()
    assert max(meter.totals()[begin:]) // x.nbytes == 1


@pytest.mark.parametrize(
    "loss", [F.binary_cross_entropy, F.smooth_l1_loss, F.mse_loss, F.soft_margin_loss]
)
def test_a_loss_that_keeps_its_terms_is_as_large(loss: Callable[..., Tensor]) -> None:
    x = torch.empty(1000, 1000, device="meta")
    with MemoryMeter(on_cpu=True) as meter:
        result = loss(x, x)
    assert meter.totals()[-1] == x.nbytes
    assert result.numel() == 1


def test_a_fold_keeps_as_much_memory_as_its_patches() -> None:
    patches = torch.empty(16, 36, 900, device="meta")
    with MemoryMeter(on_cpu=True) as meter:
        result = F.fold(patches, 32, 3)
    assert meter.totals()[-1] == patches.nbytes > result.nbytes
