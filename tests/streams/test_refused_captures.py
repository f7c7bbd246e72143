"""Steps that no graph can hold, and replays that would not be the step of now: named errors."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import types
import typing

import pytest
import torch
from captured_steps import Pair, whole_step
from simulation import simulation
from torch import Tensor, nn
from trainings import Run, Training

import shardkit
from shardkit import CPUOffloadPolicy, StateError

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from workers import Spawn


# --- replays --------------------------------------------------------------------------------------


pytestmark = pytest.mark.streams


@contextlib.contextmanager
def frozen(training: Training) -> Iterator[None]:
    training.model.head.weight.requires_grad_(False)
    yield
    training.model.head.weight.requires_grad_(True)


@contextlib.contextmanager
def without_sync(training: Training) -> Iterator[None]:
    training.model.set_requires_gradient_sync(False)
    yield
    training.model.set_requires_gradient_sync(True)


@contextlib.contextmanager
def evaluating(training: Training) -> Iterator[None]:
    training.model.eval()
    yield
    training.model.train()


@contextlib.contextmanager
def at_another_rate(training: Training) -> Iterator[None]:
    (group,) = training.optimizers[0].param_groups
    before, group["lr"] = group["lr"], 0.5
    yield
    group["lr"] = before


@contextlib.contextmanager
def with_a_gradient(training: Training) -> Iterator[None]:
    before = training.model.head.bias.grad
    training.model.head.bias.grad = training.model.head.bias.detach().clone()
    yield
    training.model.head.bias.grad = before


@contextlib.contextmanager
def unsynced(training: Training) -> Iterator[None]:
    with without_sync(training):
        training.backward(50)
    yield
    training.backward(51)
    training.optimizers[0].zero_grad()


@contextlib.contextmanager
def without_gradients(training: Training) -> Iterator[None]:
    del training
    with torch.no_grad():
        yield


@contextlib.contextmanager
def with_loaded_state(training: Training) -> Iterator[None]:
    optimizer = training.optimizers[0]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    yield  # It stays loaded.


@contextlib.contextmanager
def replaced(training: Training) -> Iterator[None]:
    training.model.to(torch.float64)
    yield  # The last one: it stays so.


CHANGES: dict[str, tuple[Callable[[Training], typing.Any], str]] = {
    "requires_grad": (frozen, r"'requires_grad' of 'head\.weight' was True, and now it is False"),
    "sync": (without_sync, r"'sync' of 'the root' was True, and now it is False"),
    "mode": (evaluating, r"'training' of FSDPModel was True, and now it is False"),
    "rate": (at_another_rate, r"'lr' of SGD was 0\.01, and now it is 0\.5.*capturable=True"),
    "gradient": (with_a_gradient, r"'head\.bias' has a gradient, to which step would add"),
    "unsynced": (unsynced, r"cannot be replayed: gradients of .* wait to be synced"),
    "no grad": (without_gradients, r"a mode of torch was .*grad=True.*grad=False"),
    "state": (with_loaded_state, r"the state of SGD was another one"),
    "parameters": (replaced, r"'buckets' of 'the root' was list"),
}


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except StateError as error:
        return str(error)
    return "nothing was raised"


def find_changes() -> dict[str, str]:
    """Change what a graph takes for granted, one thing after another; return the errors."""
    with simulation() as run:
        pair = Pair(run, whole_step, reshard_after_forward=True)
        pair.train(num_replays=2)
        batch = pair.training.batch(20)
        found = {
            "shape": error_of(lambda: pair.step(batch[:3])),
            "constant": error_of(lambda: pair.step(batch, "now a constant")),  # type: ignore[arg-type]
        }
        for name, (changed, _) in CHANGES.items():
            if name == "state":  # All changes before this one were taken back: replays go on.
                pair.training.optimizers[0].zero_grad()
                pair.training.complaints.clear()
                pair.take(30)
                found["afterwards"] = "".join(pair.training.complaints)
            with changed(pair.training):
                found[name] = error_of(lambda: pair.step(batch))
    return found


def test_what_has_changed_since_the_capture_is_named(spawn: Spawn) -> None:
    for found in spawn(find_changes, 2):
        for name, (_, message) in CHANGES.items():
            assert re.search(message, found[name]), f"{name}: {found[name]}"
        assert re.search(r"input 0 was .*\(6, 7\).*now it is .*\(3, 7\)", found["shape"])
        assert "the arguments was" in found["constant"]
        # Two eager backwards moved nothing: gradients were dropped, and parameters are the same.
        assert not found["afterwards"]


# --- captures -------------------------------------------------------------------------------------


def training_of(run: Run, **options: typing.Any) -> tuple[Training, typing.Any]:
    training = Training(run, **options)
    return training, shardkit.capture(whole_step(training), training.model)


def take(training: Training, body: Callable[[Training], object]) -> None:
    def step(batch: Tensor) -> object:
        training.loss(training.model, batch).backward()
        result = body(training)
        training.step()
        return result

    captured = shardkit.capture(step, training.model)
    for index in range(4):
        captured(training.batch(index))


def leave_unsynced(training: Training) -> None:
    training.step()
    with training.model.no_sync():
        training.backward(9)


def capture_a_forward(training: Training) -> None:
    device = training.model._shardkit_state.group.mesh.backend.accelerator
    training.backward(0)
    with device.capturing(device.new_graph(), device.current_stream()):
        training.model(training.batch(1))


def fail(training: Training, where: str) -> None:
    """Raise in the middle of what is captured."""
    num_calls = 0

    def look(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:
            msg = "it fails"
            raise ValueError(msg)

    block = training.model.blocks[1]
    if where == "forward":
        block.register_forward_pre_hook(look)
    else:
        block.register_full_backward_hook(look)
    take(training, lambda _: None)


def add_to_gradients(training: Training) -> None:
    step = shardkit.capture(
        lambda batch: training.loss(training.model, batch).backward(), training.model
    )
    for index in range(4):
        step(training.batch(index))


def leave_out_the_model(training: Training) -> None:
    step = shardkit.capture(lambda batch: batch + 1, training.model)
    for index in range(4):
        step(training.batch(index))


def offloaded(training: Training) -> nn.Module:
    model = copy.deepcopy(training.plain)
    return shardkit.fully_shard(model, training.mesh, offload_policy=CPUOffloadPolicy())


def checking(training: Training) -> None:
    shardkit.set_watch(check_gradients=True)
    try:
        shardkit.capture(whole_step(training), training.model)
    finally:
        shardkit.set_watch(check_gradients=False)


BODIES: dict[str, tuple[Callable[[Training], object], str]] = {
    "value": (
        lambda t: take(t, lambda t: t.model.head.bias.to_local().sum().item()),
        r"step cannot be captured: .*the host waits for the device.*leave out \.item\(\)",
    ),
    "forward": (lambda t: fail(t, "forward"), r"cannot be captured: it fails"),
    "backward": (lambda t: fail(t, "backward"), r"cannot be captured: it fails"),
    "unsynced": (
        lambda t: take(t, leave_unsynced),
        r"cannot be captured: gradients of .* wait to be synced.*_gradient_sync\(True\)",
    ),
    "added": (add_to_gradients, r"has a gradient, to which <lambda> would add"),
    "not run": (leave_out_the_model, r"<lambda> cannot be captured: its first calls ran none of"),
    "result": (
        lambda t: take(t, lambda t: types.SimpleNamespace(bias=t.model.head.bias)),
        r"the result of step is an object with tensors in it.* in lists, tuples, dicts",
    ),
    "torch's own": (capture_a_forward, r"shardkit\.capture\(step, model\)"),
    "offload": (
        lambda t: shardkit.capture(whole_step(t), offloaded(t)),
        r"is offloaded, and the host waits for its copies",
    ),
    "checks": (checking, r"set_watch\(check_gradients=False\)"),
    "plain": (
        lambda t: shardkit.capture(whole_step(t), t.plain),
        r"sharded modules that it trains, came \['Model'\]\. Write capture\(step, model\)",
    ),
    "swapped": (
        lambda t: shardkit.capture(t.model, whole_step(t)),
        r"sharded modules that it trains, came \['function'\]\. Write capture\(step, model\)",
    ),
    "input": (
        lambda t: shardkit.capture(whole_step(t), t.model)(t.batch(0).requires_grad_()),
        r"input 0 of step is one that requires a gradient",
    ),
}


def find_refusals() -> dict[str, str]:
    found = {}
    with simulation() as run:
        for name, (body, _) in BODIES.items():
            training = Training(run)
            found[name] = error_of(functools.partial(body, training))
            training.model.set_requires_gradient_sync(True)
            training.backward(8)  # With what a refused step may have left unsynced.
            # What was refused does no harm: the model trains as a plain one does from here.
            with torch.no_grad():
                for a, b in zip(
                    training.model.parameters(), training.plain.parameters(), strict=True
                ):
                    b.copy_(a.full_tensor())
            for optimizer in training.optimizers:
                optimizer.state.clear()
                optimizer.zero_grad()
            training.step_both(7)
            training.compare()
            found[name] += "".join(f" BUT {each}" for each in training.complaints)
    with simulation(has_host_engine=False) as run:
        found["engine"] = error_of(lambda: training_of(run))
    return found


def test_what_cannot_be_captured_is_named_and_training_goes_on(spawn: Spawn) -> None:
    for found in spawn(find_refusals, 2):
        for name, (_, message) in BODIES.items():
            assert re.search(message, found[name]), f"{name}: {found[name]}"
            assert " BUT " not in found[name], f"{name}: {found[name]}"
        assert "cpu:gloo,cuda:nccl" in found["engine"]


def fail_in_warm_up() -> list[tuple[int, bool]]:
    """Return, after each call, the number of calls and whether the step is captured."""
    found = []
    with simulation() as run:
        training = Training(run)
        inner, failures = whole_step(training), iter([True, True])

        def step(batch: Tensor) -> Tensor:
            if next(failures, False):
                raise ValueError
            return inner(batch)

        captured = shardkit.capture(step, training.model, warm_up=2)
        for index in range(5):
            with contextlib.suppress(ValueError):
                captured(training.batch(index))
            found.append((captured.num_calls, captured.is_captured))
    return found


def test_calls_that_raised_do_not_count_as_warm_up(spawn: Spawn) -> None:
    for found in spawn(fail_in_warm_up, 2):
        assert found == [(0, False), (0, False), (1, False), (2, False), (3, True)]


def refuse_on_gloo() -> str:
    model = nn.Linear(3, 3)
    shardkit.fully_shard(model, shardkit.init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match=r"warm_up of capture must be at least 2, came 1"):
        shardkit.capture(model, model, warm_up=1)
    wrong: typing.Any = None
    with pytest.raises(ValueError, match=r"warm_up of capture must be at least 2, came None"):
        shardkit.capture(model, model, warm_up=wrong)
    return error_of(lambda: shardkit.capture(model, model))


def test_a_device_without_graphs_is_refused(spawn: Spawn) -> None:
    (found,) = spawn(refuse_on_gloo, 1)
    assert "a step on device 'cpu' cannot be captured" in found
