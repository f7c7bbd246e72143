"""Who has no other rank to ask: a fake process group."""

from __future__ import annotations

import threading
import typing

import pytest
import torch.distributed as dist

from shardkit.backends.watch.watchdog import channel_of, current_watchdog

if typing.TYPE_CHECKING:
    from workers import Spawn


def issue_in_a_fake_group(world_size: int) -> list[int]:
    """Return how often this rank had to wait for others, and how many there are for it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=world_size)
    for _ in range(3):
        for layer in ("first", "second"):
            with channel_of(None).run("all-gather", layer, 64):
                pass
    watchdog = current_watchdog()
    found = [watchdog.num_counted_in, watchdog.world_size]
    dist.destroy_process_group()
    return found


def test_a_rank_of_a_fake_group_waits_for_nobody(spawn: Spawn) -> None:
    [[num_counted_in, others]] = spawn(issue_in_a_fake_group, 1, 64)
    assert others == 1
    assert num_counted_in > 0  # It counted itself in, and went on.


def issue_alone() -> bool:
    """Return whether the watchdog is the same as long as the process group is."""
    first = current_watchdog()
    return current_watchdog() is first


def test_a_process_group_has_one_watchdog(spawn: Spawn) -> None:
    assert spawn(issue_alone, 2) == [True, True]


def threads_left() -> tuple[list[str], list[str]]:
    """Return the names of shardkit's threads before the process group ends and right after it."""

    def running() -> list[str]:
        names = [thread.name for thread in threading.enumerate()]
        return sorted(name for name in names if name.startswith("shardkit"))

    current_watchdog()
    before = running()
    dist.barrier()
    dist.destroy_process_group()
    return before, running()


@pytest.mark.parametrize("world_size", [1, 2])
def test_threads_end_with_the_process_group(spawn: Spawn, world_size: int) -> None:
    """Who looks for threads that were left behind after a test finds none."""
    for before, after in spawn(threads_left, world_size):
        assert before == (["shardkit-answers", "shardkit-clock"] if world_size > 1 else [])
        assert after == []
