"""Scenarios of steps that are cut short, go around blocks, or whose model is dropped."""

from __future__ import annotations

import contextlib
import gc
import typing

import torch
from torch import Tensor
from trainings import (
    WIDTH,
    Run,
    Training,
)
from users_collectives import FailingGathers


def recovery(run: Run) -> Training:
    """A user's hook raises in the midst of a reduction; training goes on after it was caught."""
    return _recover(Training(run), None)


def _recover(training: Training, stream: typing.Any) -> Training:
    state = {"raises": False}

    def hook(grad: Tensor) -> None:
        grad.mul_(1.0)
        if state["raises"]:
            message = "on purpose"
            raise ValueError(message)

    for module in (training.model, *training.model.blocks):
        module.set_all_reduce_hook(hook, stream=stream)
    for step in range(1, 5):
        state["raises"] = step == 2
        try:
            training.backward(step)
        except ValueError:
            was_caught = True
        else:
            was_caught = False
        if was_caught:
            gc.collect()  # What the traceback held is free before anybody cleans up.
            torch.ones(WIDTH).add_(1)
            training.model.zero_grad()
            continue
        training.backward_plain(step)
        training.update_both()
    training.compare()
    return training


def recovery_on_a_stream(run: Run) -> Training:
    """The same with a hook on a stream of the user's."""
    stream = run[0].new_stream("the user's stream")
    return _recover(Training(run), stream)


def skipped(run: Run) -> Training:
    """All ranks go around the last block in every other step: it is gathered in vain."""
    training = Training(run)
    for step in range(1, 6):
        for each in (training.model, training.plain):
            each.blocks[3].is_skipped = step % 2 == 0
        training.step_both(step)
    training.compare()
    return training


def dropped(run: Run) -> Training:
    """A model is dropped while its reductions are under way."""
    training = Training(run)
    other = Training(run)
    for step in range(1, 4):
        training.model.set_is_last_backward(False)
        training.backward(step)
        del training.model, training.optimizers
        gc.collect()
        training = Training(run)
        other.step_both(step)
    other.compare()
    return other


def interrupted_gather(run: Run) -> Training:
    """A user's all-gather raises; training goes on after it was caught."""
    training = Training(run)
    failing = FailingGathers()
    training.model.blocks[2].set_custom_all_gather(failing)
    for step in range(1, 4):
        failing.raises = True
        with contextlib.suppress(ValueError):
            training.model(training.batch(step))
        failing.raises = False
        training.step_both(step)
    training.compare()
    return training


def interrupted_forward(run: Run) -> Training:
    """A forward raises while parameters for the next layer are under way."""
    training = Training(run)
    for step in range(1, 4):
        training.step_both(step)
        handle = training.model.blocks[1].register_forward_pre_hook(interrupt)
        with contextlib.suppress(ValueError):
            training.model(training.batch(step))
        handle.remove()
    training.compare()
    return training


def interrupt(*_: object) -> None:
    message = "on purpose"
    raise ValueError(message)
