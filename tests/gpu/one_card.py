"""What tests on one CUDA card have in common: process groups, ranks, comparisons on the card.

A test function runs in a worker process (`workers`), which brings up CUDA itself. One rank uses
NCCL. Two ranks use gloo, since NCCL refuses two ranks on one card: that is for numbers, not for
time. Where there is no card all these tests are skipped.
"""

from __future__ import annotations

import copy
import datetime as dt
import gc
import os
import traceback
import typing
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parity import Ranks
from reference import AXES, OPTIMIZERS, STEPS, Differences, rank_batch, train
from shardkit import DeviceMesh, init_device_mesh

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from models import Batch, Case

CARD = torch.device("cuda", 0)

# A test function has so long on all ranks, with the start of CUDA and the loading of its kernels.
TIMEOUT_S = 180
# A collective that does not end raises after so long, where the engine can tell.
_COLLECTIVE_TIMEOUT = dt.timedelta(seconds=TIMEOUT_S - 60)

# Sums are taken in another order than in plain training: over the ranks, and inside of kernels,
# which are chosen by the alignment of parameters that lie end to end. That is some units in the
# last place (6e-8 at 1) of gradients below 1, over ten steps. On the host, changes of what linear
# layers compute by 3e-7 of it came to 3e-7 in gradients, to 1e-6 in losses and, with AdamW, to 1e-5
# in parameters; sums of a card are taken in more parts.
SGD_TOLERANCE = 5e-6
# Adam divides the gradient by its own size, so where that is small its rounding counts for more.
ADAMW_TOLERANCE = 1e-4
TOLERANCES = {"sgd": SGD_TOLERANCE, "adamw": ADAMW_TOLERANCE}
# Some units in the last place of a number between 4 and 8, as the loss of GPT is.
LOSS_TOLERANCE = 1e-5
# Some hundred units in the last place of parameters of about 1, after three steps in fp64.
FP64_TOLERANCE = 1e-12


def _count_cards() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # A build for CUDA warns where there is no driver.
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


NUM_CARDS = _count_cards()
NEEDS_CARD = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_CARDS < 1, reason="needs a CUDA device, torch sees none"),
]


# --- processes ------------------------------------------------------------------------------------


def start_group(engine: str = "nccl", **options: typing.Any) -> None:
    """Make a default process group of this process alone, over NCCL, instead of what there is."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        engine,
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=_COLLECTIVE_TIMEOUT,
        **options,
    )


def choose_card() -> None:
    """Make the card the current device, with a context: else torch's mesh chooses, and warns."""
    torch.cuda.set_device(CARD)
    torch.zeros(1, device=CARD)


def run_on_card(fn: Callable[..., typing.Any], *args: typing.Any) -> typing.Any:
    """Run a test function in a worker: one rank over NCCL, several over the worker's gloo.

    An error of the card itself stays with the process: that process prints it and ends, so that the
    tests after it get a new one.
    """
    choose_card()
    torch.set_float32_matmul_precision("highest")  # Some installations choose TF32.
    gc.collect()
    torch.cuda.empty_cache()
    if dist.get_world_size() == 1:
        start_group()
    try:
        result = fn(*args)
        torch.cuda.synchronize()
    except BaseException:
        _end_if_card_is_lost()
        raise
    return result


def _end_if_card_is_lost() -> None:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        traceback.print_exc()  # Both errors: the first one is this one's context.
        os._exit(3)


def delay_card(milliseconds: int) -> None:
    """Let the card do nothing for a while, so that the host runs ahead of it."""
    torch.cuda._sleep(milliseconds * 1_500_000)  # noqa: SLF001 - in cycles; torch's own tests use it


# --- ranks ----------------------------------------------------------------------------------------


def make_card_mesh(shape: Sequence[int]) -> DeviceMesh:
    """Make a mesh of ranks on the card: (shard,) or (replicate, shard)."""
    return init_device_mesh(CARD.type, tuple(shape), mesh_dim_names=AXES[-len(shape) :])


class CardRanks(Ranks):
    """Ranks that keep their models and batches on the card."""

    def __init__(self, mesh_shape: Sequence[int] | None = None) -> None:
        super().__init__(make_card_mesh(mesh_shape or (dist.get_world_size(),)))

    def make(self, case: Case) -> nn.Module:
        """Make a plain model of a case, the same on every rank."""
        return case.make().to(CARD)

    def rank_batches(self, case: Case, step: int) -> list[Batch]:
        """Draw the batch of each rank."""
        batches = [rank_batch(case, rank, step) for rank in range(self.world_size)]
        return [(x.to(CARD), y.to(CARD)) for x, y in batches]

    def pair(self, case: Case, **options: typing.Any) -> tuple[typing.Any, nn.Module]:
        """Make a plain model and shard a copy of it; return the copy first."""
        plain = self.make(case)
        return self.shard(case, plain, **options), plain


# --- differences ----------------------------------------------------------------------------------


class CardDifferences(Differences):
    """Differences of tensors that are on the card, or on the host."""

    def note(
        self, kind: str, actual: Tensor | None, expected: Tensor | None, name: str = ""
    ) -> None:
        """Compare two tensors on the host."""
        super().note(kind, actual, None if expected is None else expected.detach().cpu(), name)

    def note_relative(
        self, kind: str, actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]
    ) -> None:
        """Compare tensors by name, each on the scale of the largest element that is expected."""
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            found = actual[name]
            assert (found is None) == (tensor is None), f"{kind} of {name!r}: one is None"
            if found is None or tensor is None:
                continue
            size = tensor.abs().max().clamp_min(1e-30)
            self.note(kind, found / size, tensor / size, f"{kind} of {name!r}")


def compare_training(
    case: Case,
    model: nn.Module,
    plain: nn.Module,
    ranks: Ranks,
    *,
    optimizer: str = "sgd",
    steps: int = STEPS,
) -> CardDifferences:
    """Train both, the sharded model on this rank's batches and the plain one on all. Collective."""
    differences = CardDifferences()
    batches = (
        [ranks.batch(case, step) for step in range(steps)],
        [ranks.global_batch(case, step) for step in range(steps)],
    )
    losses, expected_losses = (
        train(case, each, OPTIMIZERS[optimizer](each.parameters()), own)
        for each, own in zip((model, plain), batches, strict=True)
    )
    for loss, expected in zip(losses, expected_losses, strict=True):
        differences.note_grads(model, plain)
        differences.note("loss", ranks.mean(loss), expected.double())
    differences.note_parameters(model, plain)
    return differences


def take_steps(
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    before_step: Callable[[], object] = lambda: None,
) -> None:
    """Train without a look at any number: the host never waits for the card here."""
    for batch in batches:
        case.loss(model, batch).backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()


def leave_gradients(gradients: Tensor) -> None:
    """Do nothing to reduced gradients.

    With this as the all-reduce hook also one rank reduces by way of buffers and streams, where its
    gradients would otherwise be assigned at once.
    """


def reduce_by_buffers(model: nn.Module) -> None:
    """Have every sharded module in a model reduce as several ranks do: see `leave_gradients`."""
    for module in model.modules():
        if hasattr(module, "set_all_reduce_hook"):
            module.set_all_reduce_hook(leave_gradients)


def on_host(value: typing.Any) -> typing.Any:
    """Return nested dicts, lists and tuples with all tensors on the host."""
    if isinstance(value, dict):
        return {key: on_host(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [on_host(entry) for entry in value]
    return value.detach().cpu() if isinstance(value, Tensor) else value


def copy_on_host(plain: nn.Module) -> nn.Module:
    """Return a copy of a plain model on the host."""
    return copy.deepcopy(plain).cpu()
