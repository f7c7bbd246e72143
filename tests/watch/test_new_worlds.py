"""What is found about process groups that were destroyed does not touch those that follow."""

from __future__ import annotations

import threading
import time
import typing

import torch
import torch.distributed as dist

from shardkit import init_device_mesh
from shardkit.backends.watch.watchdog import current_watchdog
from worlds import begin_new_world

if typing.TYPE_CHECKING:
    from workers import Spawn


def hear_late() -> float:
    """Rank 0 hears of the end of a world that is no more while it waits in the next one."""
    init_device_mesh("cpu", (2,))
    old = current_watchdog()
    begin_new_world("next")
    late = threading.Timer(0.3, old._end, ["late"])  # noqa: SLF001
    total = torch.ones(1)
    if dist.get_rank() == 0:
        late.start()
    else:
        time.sleep(1.0)
    dist.all_reduce(total)
    return total.item()


def test_a_late_diagnosis_leaves_the_next_world_alone(spawn: Spawn) -> None:
    assert spawn(hear_late, 2) == [2.0, 2.0]
