"""While a thread waits in the store, over torch's connection, the watch goes on over its own."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import typing

import torch.distributed as dist

from shardkit import init_device_mesh, set_watch
from shardkit._compat import torch_groups
from shardkit.backends.watch.watchdog import channel_of

if typing.TYPE_CHECKING:
    from collections.abc import Iterator

    from workers import Spawn


@contextlib.contextmanager
def words_of_the_watch() -> Iterator[list[str]]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardkit").addHandler(handler)
    yield told
    logging.getLogger("shardkit").removeHandler(handler)


def make_a_group_while_a_rank_is_late() -> list[str]:
    """Return what the watch of this rank says until rank 1 has come, after 4 seconds."""
    init_device_mesh("cpu", (2,))
    set_watch(ask_after_s=1)
    with words_of_the_watch() as told:
        if dist.get_rank() == 1:
            time.sleep(4)
        dist.new_group([0, 1])
    return told


def test_a_rank_that_makes_a_process_group_does_not_miss_the_store(spawn: Spawn) -> None:
    """Under torchrun the run ended after a minute: nobody knows the process of that store."""
    assert spawn(make_a_group_while_a_rank_is_late, 2) == [[], []]


def make_a_group_beside_a_wait() -> list[str]:
    """Return the same; a thread makes the group, while the main thread waits for rank 1 as well."""
    init_device_mesh("cpu", (2,))
    set_watch(ask_after_s=1)
    with words_of_the_watch() as told:
        if dist.get_rank() == 1:
            time.sleep(4)
        making = threading.Thread(target=dist.new_group, args=([0, 1],))
        making.start()
        time.sleep(0.2)
        channel_of(None).issue("all-reduce", "what no earlier step has done", 4)
        making.join()
    return told


def test_nor_does_one_that_makes_it_beside_the_main_thread(spawn: Spawn) -> None:
    [told], nothing = spawn(make_a_group_beside_a_wait, 2)
    assert nothing == []
    assert told.startswith("rank 0 waited"), told
    assert "rank 1 is at test_busy_connections.py" in told


def end_while_a_thread_waits_for_a_key() -> float:
    """Return the seconds that the end takes; a thread of the user's waits all the time."""
    init_device_mesh("cpu", (2,))
    store = torch_groups.default_store()
    mine = store.clone()
    key = f"stop {dist.get_rank()}"
    waiting = threading.Thread(target=store.wait, args=([key],))
    waiting.start()
    time.sleep(0.5)
    releases = threading.Timer(6, mine.set, [key, ""])
    releases.start()
    begun = time.monotonic()
    dist.destroy_process_group()
    seconds = time.monotonic() - begun
    releases.join()
    waiting.join()
    return seconds


def test_a_thread_that_waits_for_a_key_does_not_delay_the_end(spawn: Spawn) -> None:
    """A script with a thread that waits for a signal to stop did not end."""
    assert max(spawn(end_while_a_thread_waits_for_a_key, 2)) < 4
