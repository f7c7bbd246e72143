"""Steps that are captured and replayed, beside the same steps that are not."""

from __future__ import annotations

import copy
import gc
import typing

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from trainings import Run, Training

import shardkit
from shardkit.backends.watch.watchdog import current_watchdog

if typing.TYPE_CHECKING:
    from collections.abc import Callable


NUM_REPLAYS = 8


class Pair:
    """Two sharded models with the same parameters: one is captured, the other runs its steps.

    Args:
        run: The simulation and what watches it.
        make_step: Returns the step of a training.
        change: Changes each training before its first step.
        options: Of `Training`.
    """

    def __init__(
        self,
        run: Run,
        make_step: Callable[[Training], Callable[..., Tensor]],
        change: Callable[[Training], object] = lambda _: None,
        **options: typing.Any,
    ) -> None:
        self.training = Training(run, **options)
        self.eager = Training(run, **options, change=self._equalize)
        for each in (self.training, self.eager):
            change(each)
            each.optimizers[0].param_groups[0]["lr"] = 0.01  # They train on for long.
        self.step = shardkit.capture(make_step(self.training), self.training.model)
        self._eager_step = make_step(self.eager)

    def _equalize(self, plain: nn.Module) -> None:
        plain.load_state_dict(copy.deepcopy(self.training.plain.state_dict()))

    def take(self, index: int) -> None:
        """Take a step of both, on new data; complain if anything differs in a bit."""
        batch = self.training.batch(index)
        found, wanted = self.step(batch), self._eager_step(batch)
        self._compare("the loss", index, found, wanted)
        self._compare_models(index)

    def _compare_models(self, index: int) -> None:
        models = self.training.model, self.eager.model
        for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            self._compare(name, index, a.to_local(), b.to_local())
            grads = a.grad, b.grad
            if (grads[0] is None) != (grads[1] is None):
                self.training.complaints.append(f"step {index}: one gradient of {name!r} is None")
            elif grads[0] is not None:
                self._compare(f"grad of {name}", index, *(each.to_local() for each in grads))

    def _compare(self, what: str, index: int, found: Tensor, wanted: Tensor) -> None:
        a, b = (each.detach().numpy() for each in (found, wanted))
        if not np.array_equal(a, b):
            worst = np.abs(a - b).max()
            self.training.complaints.append(f"step {index}: {what} differs by {worst:.3g}")

    def evaluate(self, index: int) -> None:
        """Compute without gradients: slots stay after it."""
        batch = self.training.batch(index)
        with torch.no_grad():
            found, wanted = self.training.model(batch), self.eager.model(batch)
        self._compare("an evaluation", index, found, wanted)

    def train(self, num_replays: int = NUM_REPLAYS) -> Training:
        """Take steps; all but the first three are replays."""
        for index in range(3 + num_replays):
            self.take(index)
        assert self.step.is_captured
        assert current_watchdog().has_captured
        return self.training


# --- steps ----------------------------------------------------------------------------------------


def whole_step(training: Training) -> Callable[..., Tensor]:
    """Forward, backward, the optimizer's step; as people write it."""

    def step(batch: Tensor) -> Tensor:
        training.optimizers[0].zero_grad()
        loss = training.loss(training.model, batch)
        loss.backward()
        training.optimizers[0].step()
        return loss

    return step


def clipped_step(training: Training) -> Callable[..., Tensor]:
    """The same with clipping; returns the norm."""

    def step(batch: Tensor) -> Tensor:
        training.loss(training.model, batch).backward()
        norm = nn.utils.clip_grad_norm_(training.model.parameters(), 0.5)
        training.step()
        return norm

    return step


def accumulating_step(training: Training) -> Callable[..., Tensor]:
    """Three micro-batches, the last of which syncs; clipping."""

    def step(batch: Tensor) -> Tensor:
        total = torch.zeros_like(batch[0, 0])
        for part, rows in enumerate(batch.split(2)):
            training.model.set_requires_gradient_sync(part == 2)
            loss = training.loss(training.model, rows) / 3
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(training.model.parameters(), 0.5)
        training.step()
        return total

    return step


# --- scenarios ------------------------------------------------------------------------------------


def captured(run: Run) -> Training:
    """Everything is gathered anew in backward; evaluations leave slots before the capture."""
    pair = Pair(run, whole_step, reshard_after_forward=True)
    for index in range(3):
        pair.take(index)
    pair.evaluate(100)
    for training in (pair.training, pair.eager):
        training.model.blocks[1].unshard(async_op=True)  # Its event lies outside of the graph.
    for index in range(3, 3 + NUM_REPLAYS):
        pair.take(index)
        if index == 5:
            pair.evaluate(101)
    assert pair.step.is_captured
    return pair.training


def captured_zero2(run: Run) -> Training:
    """Parameters stay from forward to backward, and after backward too."""

    def change(training: Training) -> None:
        training.model.set_reshard_after_backward(False)

    return Pair(run, whole_step, change, reshard_after_forward=False).train()


def captured_clipping(run: Run) -> Training:
    """Norms over all ranks are part of the graph."""
    return Pair(run, clipped_step, reshard_after_forward=True).train()


def captured_accumulation(run: Run) -> Training:
    """Micro-batches that do not sync, then one that does."""
    return Pair(run, accumulating_step, reshard_after_forward=True).train()


def captured_hybrid(run: Run) -> Training:
    """Both axes have two ranks; each layer's gradients go over three streams."""
    return Pair(run, accumulating_step, shape=(2, 2)).train()


def captured_in_bf16(run: Run) -> Training:
    """Compute in bf16, reduction in fp32."""
    policy = shardkit.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    return Pair(run, whole_step, mp_policy=policy, reshard_after_forward=True).train()


def captured_unused(run: Run) -> Training:
    """Rank 0 does not use a bias that others use, and nobody uses another."""

    def change(training: Training) -> None:
        training.model.blocks[1].uses_bias = False
        training.model.blocks[2].uses_bias = dist.get_rank() > 0

    return Pair(run, whole_step, change).train()


def captured_kept_parts(run: Run) -> Training:
    """Each rank keeps a half of what a forward gathered, also of one without a backward."""
    pair = Pair(run, whole_step, shape=(4,), reshard_after_forward=2)
    for index in range(6):
        pair.take(index)
        if index == 2:
            for training in (pair.training, pair.eager):
                training.loss(training.model, training.batch(100))
    assert pair.step.is_captured
    return pair.training


def captured_without_optimizer(run: Run) -> Training:
    """The graph ends with backward; what follows is the user's."""

    def make_step(training: Training) -> Callable[..., Tensor]:
        def step(batch: Tensor) -> Tensor:
            loss = training.loss(training.model, batch)
            loss.backward()
            return loss

        return step

    pair = Pair(run, make_step, reshard_after_forward=True)
    for index in range(3 + NUM_REPLAYS):
        pair.take(index)
        for training in (pair.training, pair.eager):
            training.step()
    return pair.training


def captured_on_a_users_stream(run: Run) -> Training:
    """A user's hook runs on a stream of the user's, and so does what writes parameters."""
    simulation = run[0]
    stream = simulation.new_stream("the user's stream")

    def change(training: Training) -> None:
        for module in (training.model, *training.model.blocks):
            module.set_all_reduce_hook(lambda grad: grad.mul_(0.5), stream=stream)

    pair = Pair(run, whole_step, change, reshard_after_forward=True)
    for index in range(3 + NUM_REPLAYS):
        pair.take(index)
        if index == 2:
            for training in (pair.training, pair.eager):
                other = simulation.new_stream("the optimizer's stream")
                other.wait_event(simulation.compute.record_event())
                with simulation.on(other), torch.no_grad():
                    for param in training.model.parameters():
                        param.to_local().mul_(0.9)
                training.model.set_post_optim_event(other.record_event())
    return pair.training


def captured_beside_a_dropped_model(run: Run) -> Training:
    """Python collects another model, which was dropped before, while the step is captured."""
    others = [Training(run)]
    others[0].backward(0)

    def make_step(training: Training) -> Callable[..., Tensor]:
        step = whole_step(training)

        def dropping(batch: Tensor) -> Tensor:
            if run[0].graph is not None:
                others.clear()
                gc.collect()
            return step(batch)

        return dropping

    return Pair(run, make_step).train()


CAPTURED = (
    captured,
    captured_zero2,
    captured_clipping,
    captured_accumulation,
    captured_hybrid,
    captured_in_bf16,
    captured_unused,
    captured_kept_parts,
    captured_without_optimizer,
    captured_on_a_users_stream,
    captured_beside_a_dropped_model,
)
