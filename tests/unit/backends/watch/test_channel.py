"""A process group: who asks the others before a collective is issued, and what ends a wait."""

from __future__ import annotations

import contextlib
import threading
import types
import typing

import pytest
import torch.distributed as dist

from shardkit import RankMismatchError
from shardkit.backends.watch.watchdog import Channel

if typing.TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.backends.watch.history import Wait


class Watchdog:
    """A watchdog that notes what it is asked for."""

    world_size = 4

    def __init__(self) -> None:
        self.final_text: str | None = None
        self.lock = threading.Lock()
        # Keys to which this rank has counted in, with what is to be deleted.
        self.counted: list[tuple[str, int, str]] = []
        self.waits: list[Wait] = []  # All that were begun.

    @contextlib.contextmanager
    def watching(self, wait: Wait) -> Iterator[None]:
        self.waits.append(wait)
        yield

    def count_in(self, key: str, size: int, old: str) -> None:
        self.counted.append((key, size, old))


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 2])


def make(watchdog: Watchdog) -> Channel:
    group: typing.Any = types.SimpleNamespace(group_name="7")
    any_watchdog: typing.Any = watchdog
    return Channel(group, any_watchdog)


def take_step(channel: Channel, *names: str) -> None:
    for name in names:
        channel.issue("all-gather", name, 64)


def test_a_step_that_repeats_asks_nobody() -> None:
    watchdog = Watchdog()
    channel = make(watchdog)
    for _ in range(3):
        take_step(channel, "a", "b", "c")
    num_asked = len(watchdog.counted)
    for _ in range(5):
        take_step(channel, "a", "b", "c")
    assert len(watchdog.counted) == num_asked
    assert channel.status().position == 24


def test_what_is_not_foretold_is_counted_in_by_all_ranks_of_the_group() -> None:
    watchdog = Watchdog()
    take_step(make(watchdog), "a", "b")
    (first, size, old), (second, _, before) = watchdog.counted
    assert first.startswith("next/7/0/")
    assert second.startswith("next/7/1/")
    assert (size, old, before) == (2, "", first)


def test_ranks_that_part_count_in_at_different_keys() -> None:
    keys = []
    for name, nbytes in (("a", 64), ("b", 64), ("a", 128)):
        watchdog = Watchdog()
        make(watchdog).issue("all-gather", name, nbytes)
        keys.append(watchdog.counted[0][0])
    assert len(set(keys)) == 3


def test_after_the_end_nothing_is_issued() -> None:
    watchdog = Watchdog()
    channel = make(watchdog)
    for _ in range(3):
        take_step(channel, "a", "b")
    watchdog.final_text = "rank 2 is gone"
    position = channel.status().position
    with pytest.raises(RankMismatchError, match="rank 2 is gone"):
        channel.issue("all-gather", "a", 64)
    assert channel.status().position == position


def test_others_are_told_what_this_rank_wishes_for() -> None:
    watchdog = Watchdog()
    channel = make(watchdog)
    wishes = []
    watchdog.count_in = lambda *_: wishes.append(channel.status().wish)  # type: ignore[method-assign]
    channel.issue("all-gather", "a", 64)
    assert wishes == ["all-gather of a (64 bytes)"]
    assert channel.status().wish is None
    assert channel.status().recent == ["all-gather of a (64 bytes)"]


def test_an_error_of_the_store_takes_the_wish_back() -> None:
    """Else others would wait for what this rank does not wish for any more."""
    watchdog = Watchdog()

    def fail(*_: object) -> None:
        raise ConnectionError

    watchdog.count_in = fail  # type: ignore[method-assign]
    channel = make(watchdog)
    with pytest.raises(ConnectionError):
        channel.issue("all-gather", "a", 64)
    assert channel.status().wish is None
    assert channel.status().position == 0
