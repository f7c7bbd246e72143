"""What a root leaves behind when it is dropped: nothing."""

from __future__ import annotations

import gc
import threading
import time
import typing
import weakref

import torch
from torch import nn

from shardkit import fully_shard

if typing.TYPE_CHECKING:
    from workers import Spawn


def train_and_drop(num_models: int) -> tuple[int, int]:
    """Return how many threads and modules of dropped models are left."""
    before = threading.active_count()
    modules = []
    for _ in range(num_models):
        model = fully_shard(nn.Linear(4, 4))
        model(torch.ones(1, 4)).sum().backward()
        modules.append(weakref.ref(model))
    del model
    gc.collect()
    time.sleep(1.5)  # The watching threads notice within a period.
    alive = sum(reference() is not None for reference in modules)
    return threading.active_count() - before, alive


def test_dropped_models_leave_no_threads_and_no_modules(spawn: Spawn) -> None:
    for threads, modules in spawn(train_and_drop, 2, 4):
        assert threads <= 0
        assert modules == 0
