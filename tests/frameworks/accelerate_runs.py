"""Training by Accelerate, replicated by DDP or sharded by shardkit; runs inside of ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import typing

import pytest
import torch
import torch.distributed as dist
from launched import forget_accelerate, set_launchers_variables
from zoo import ZOO

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

MICRO_BATCHES = 8
ACCUMULATE = 2


@dataclasses.dataclass
class Run:
    """One training."""

    accelerator: typing.Any  # Accelerate's.
    model: typing.Any  # The prepared one.
    optimizer: typing.Any  # The prepared one.
    losses: list[float]  # The mean over the ranks, by micro-batch.
    norms: list[float]  # Of the gradients before they were clipped, by step.

    def train(self, name: str, micro_batches: range) -> None:
        """Train, with clipping, on this rank's batches."""
        for number in micro_batches:
            generator = torch.Generator().manual_seed(1_000 * number + dist.get_rank())
            inputs, labels = ZOO[name].batch(generator)
            with self.accelerator.accumulate(self.model):
                loss = self.model(inputs, labels=labels).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    self.norms.append(float(norm))
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.losses.append(float(self.accelerator.reduce(loss.detach(), "mean")))

    def parameters(self) -> dict[str, Tensor]:
        """Return the whole parameters by name, on the first rank. Collective."""
        return self.accelerator.get_state_dict(self.model)


def prepare(
    model: nn.Module,
    *,
    plugin: dict[str, typing.Any] | None = None,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    learning_rate: float = 0.05,
    before: Callable[[nn.Module], object] = lambda model: None,  # noqa: ARG005
    **options: typing.Any,
) -> Run:
    """Prepare a model; with `plugin`, settings of FSDP2, it is sharded."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    given = None
    if plugin is not None:
        settings = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", **plugin}
        given = FullyShardedDataParallelPlugin(**settings)
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=given, gradient_accumulation_steps=ACCUMULATE, **options
    )
    made = optimizer(model.parameters(), lr=learning_rate)
    before(model)
    prepared = accelerator.prepare(model, made)
    return Run(accelerator, *prepared, losses=[], norms=[])


@contextlib.contextmanager
def fsdp2() -> Iterator[None]:
    """Let Accelerate shard ranks of the CPU by FSDP2, as it does where there are accelerators."""
    from accelerate.state import AcceleratorState

    from shardkit._compat.once import wrapped
    from shardkit.integrations.accelerate import _also_on_cpu

    with pytest.MonkeyPatch.context() as patch:
        sharded = wrapped(AcceleratorState.__init__, _also_on_cpu)
        patch.setattr(AcceleratorState, "__init__", sharded)
        yield


@contextlib.contextmanager
def accelerate_ranks(
    using: contextlib.AbstractContextManager[object] | None = None,
) -> Iterator[None]:
    """Let Accelerate use shardkit in the ``with`` block, and forget its state before and after.

    Args:
        using: Context in its place, which is entered there.
    """
    from shardkit.integrations import accelerate as integration

    set_launchers_variables()
    forget_accelerate()
    try:
        with using or integration.use():
            yield
    finally:
        forget_accelerate()


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Run torchao's steps as they are written, in a second instead of twenty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda step, **_: step)
        yield


def make(name: str, seed: int = 0, **sizes: int) -> nn.Module:
    """Make a model in training mode; `sizes` are fields of its config."""
    torch.manual_seed(seed)
    return ZOO[name].make(**sizes).train()


def replicated(name: str) -> Run:
    """Train by Accelerate's own way for ranks of the CPU, which is DDP."""
    run = prepare(make(name))
    run.train(name, range(MICRO_BATCHES))
    forget_accelerate()
    return run
