"""A process group: who asks the others before a collective is issued, and what ends a wait."""

from __future__ import annotations

import contextlib
import types
import typing

import pytest
import torch.distributed as dist

from shardkit import RankMismatchError
from shardkit.backends.watch.channel import Channel

if typing.TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.backends.watch.wait import Wait


class Station:
    """A station that notes what it is asked for.

    Attributes:
        counted: Keys to which this rank has counted in, with what is to be deleted.
        waits: All that were begun.
    """

    world_size = 4

    def __init__(self, explanation: str | None = None) -> None:
        self.verdict: str | None = None
        self.counted: list[tuple[str, int, str]] = []
        self.waits: list[Wait] = []
        self._explanation = explanation

    @contextlib.contextmanager
    def waiting(self, wait: Wait) -> Iterator[None]:
        self.waits.append(wait)
        yield

    def count_in(self, key: str, size: int, old: str) -> None:
        self.counted.append((key, size, old))

    def explain(self) -> str | None:
        return self._explanation


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 2])


def make(station: Station) -> Channel:
    group: typing.Any = types.SimpleNamespace(group_name="7")
    any_station: typing.Any = station
    return Channel(group, any_station)


def take_step(channel: Channel, *names: str) -> None:
    for name in names:
        channel.issue("all-gather", name, 64)


def test_a_step_that_repeats_asks_nobody() -> None:
    station = Station()
    channel = make(station)
    take_step(channel, "a", "b", "c")
    take_step(channel, "a", "b", "c")
    num_asked = len(station.counted)
    for _ in range(5):
        take_step(channel, "a", "b", "c")
    assert len(station.counted) == num_asked
    assert channel.state().position == 21


def test_what_is_not_foretold_is_counted_in_by_all_ranks_of_the_group() -> None:
    station = Station()
    take_step(make(station), "a", "b")
    (first, size, old), (second, _, before) = station.counted
    assert first.startswith("next/7/0/")
    assert second.startswith("next/7/1/")
    assert (size, old, before) == (2, "", first)


def test_ranks_that_part_count_in_at_different_keys() -> None:
    keys = []
    for name, nbytes in (("a", 64), ("b", 64), ("a", 128)):
        station = Station()
        make(station).issue("all-gather", name, nbytes)
        keys.append(station.counted[0][0])
    assert len(set(keys)) == 3


def test_after_a_verdict_nothing_is_issued() -> None:
    station = Station()
    channel = make(station)
    for _ in range(3):
        take_step(channel, "a", "b")
    station.verdict = "rank 2 is gone"
    position = channel.state().position
    with pytest.raises(RankMismatchError, match="rank 2 is gone"):
        channel.issue("all-gather", "a", 64)
    assert channel.state().position == position


def test_an_error_of_the_engine_is_explained() -> None:
    channel = make(Station("rank 2 has ended"))
    engine_error = RuntimeError("Connection closed by peer")
    with (
        pytest.raises(RankMismatchError, match="rank 2 has ended") as raised,
        channel.run("all-gather", "a", 64),
    ):
        raise engine_error
    assert raised.value.__cause__ is engine_error


def test_an_error_that_nobody_explains_stays_as_it_is() -> None:
    engine_error = RuntimeError("out of memory")
    with (
        pytest.raises(RuntimeError, match="out of memory") as raised,
        make(Station()).run("all-gather", "a", 64),
    ):
        raise engine_error
    assert raised.value is engine_error


def test_others_are_told_what_this_rank_wishes_for() -> None:
    station = Station()
    channel = make(station)
    wishes = []
    station.count_in = lambda *_: wishes.append(channel.state().wish)  # type: ignore[method-assign]
    channel.issue("all-gather", "a", 64)
    assert wishes == ["all-gather of a (64 bytes)"]
    assert channel.state().wish is None
    assert channel.state().recent == [(0, "all-gather of a (64 bytes)")]
