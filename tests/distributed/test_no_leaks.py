"""What a root leaves behind when it is dropped: nothing."""

from __future__ import annotations

import contextlib
import gc
import threading
import typing
import weakref

import torch
from torch import nn

from shardkit import fully_shard, init_device_mesh
from shardkit._tensor.spec import ShardSpec
from shardkit.backends.process_group import ProcessGroupAxis
from waiting import until
from worlds import begin_new_world

if typing.TYPE_CHECKING:
    from workers import Spawn


def train_and_drop(num_models: int) -> tuple[int, int]:
    """Return how many threads and modules of dropped models are left."""
    modules = []

    def train() -> None:
        model = fully_shard(nn.Linear(4, 4))
        model(torch.ones(1, 4)).sum().backward()
        modules.append(weakref.ref(model))

    train()  # Starts the threads that serve all models: they answer others, and read from them.
    before = threading.active_count()
    for _ in range(num_models):
        train()
    gc.collect()
    until(lambda: threading.active_count() <= before)  # The watching threads notice in a period.
    alive = sum(reference() is not None for reference in modules)
    return threading.active_count() - before, alive


def test_dropped_models_leave_no_threads_and_no_modules(spawn: Spawn) -> None:
    for threads, modules in spawn(train_and_drop, 2, 4):
        assert threads <= 0
        assert modules == 0


class Interrupted(nn.Module):
    """A layer that takes a list, and whose forward ctrl-C may end."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.stops = False

    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        if self.stops:
            raise KeyboardInterrupt
        return inputs[0] * self.weight


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = fully_shard(Interrupted())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer([x])


def interrupt_forwards() -> int:
    """Return how many inputs of forwards that ctrl-C has ended are left."""
    model = fully_shard(Root())
    inputs = []
    for stops in (True, True, False):
        model.layer.stops = stops
        x = torch.ones(4, requires_grad=True)
        inputs.append(weakref.ref(x))
        with contextlib.suppress(KeyboardInterrupt):
            model(x)
        del x
    gc.collect()
    return sum(reference() is not None for reference in inputs)


def test_interrupted_forwards_leave_no_inputs(spawn: Spawn) -> None:
    assert spawn(interrupt_forwards, 2) == [0, 0]


def shard_in_new_worlds(num_worlds: int) -> list[tuple[int, int]]:
    """Return which specs and communicators are alive after models in worlds of their own."""
    alive = []
    for world in range(num_worlds):
        begin_new_world(str(world))
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        del mesh, model, optimizer
        gc.collect()
        kept = [sum(isinstance(item, kind) for item in gc.get_objects()) for kind in _KEPT_KINDS]
        alive.append(tuple(kept))
    return alive


_KEPT_KINDS = (ShardSpec, ProcessGroupAxis)


def test_destroyed_worlds_are_not_kept(spawn: Spawn) -> None:
    for alive in spawn(shard_in_new_worlds, 4, 4):
        assert [specs for specs, _ in alive] == [0] * 4
        assert len({axes for _, axes in alive}) == 1, alive
