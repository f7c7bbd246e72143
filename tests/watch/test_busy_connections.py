"""While a thread waits in the store, over torch's connection, the watch goes on over its own."""

from __future__ import annotations

import logging
import time
import typing

import torch.distributed as dist

from shardkit import init_device_mesh, set_watch

if typing.TYPE_CHECKING:
    from workers import Spawn


def make_a_group_while_a_rank_is_late() -> list[str]:
    """Return what the watch of this rank says until rank 1 has come, after 4 seconds."""
    init_device_mesh("cpu", (2,))
    set_watch(ask_after_s=1)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardkit").addHandler(handler)
    if dist.get_rank() == 1:
        time.sleep(4)
    dist.new_group([0, 1])
    logging.getLogger("shardkit").removeHandler(handler)
    return told


def test_a_rank_that_makes_a_process_group_does_not_miss_the_store(spawn: Spawn) -> None:
    """Under torchrun the run ended after a minute: nobody knows the process of that store."""
    assert spawn(make_a_group_while_a_rank_is_late, 2) == [[], []]
