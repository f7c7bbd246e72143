"""What a device runs: the oldest that is not done is a wait, from when those before it were."""

from __future__ import annotations

import pytest

from shardkit.backends.watch import history
from shardkit.backends.watch.history import CollectiveWait, InFlight


class Clock:
    """The time, and collectives that are done at some time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(history.time, "monotonic", lambda: self.now)
        self.flight = InFlight()

    def start(self, name: str, done_at: float) -> None:
        self.flight.note(CollectiveWait("0", 0, name), lambda: self.now >= done_at)

    def oldest(self) -> str | None:
        found = self.flight.oldest()
        return found and found.what


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_what_is_done_is_forgotten(clock: Clock) -> None:
    clock.start("a", 101)
    assert clock.oldest() == "a"
    clock.now = 102
    assert clock.oldest() is None


def test_a_wait_begins_when_those_before_it_are_done(clock: Clock) -> None:
    """A host that runs ahead has not waited."""
    clock.start("a", 150)
    clock.now += 1
    clock.start("b", 200)
    clock.now = 149
    clock.oldest()
    clock.now = 151
    assert clock.oldest() == "b"
    found = clock.flight.oldest()
    assert found is not None
    assert found.since == 151
    clock.now = 160
    assert clock.flight.oldest() is found
    assert found.since == 151


def test_not_all_are_noted(clock: Clock) -> None:
    for number in range(1000):
        clock.start(str(number), 1e9)
        clock.now += 0.001
    assert len(clock.flight._queue) <= 6  # noqa: SLF001


def test_the_thread_that_watches_does_not_ask_a_device_early(clock: Clock) -> None:
    clock.start("a", 1e9)
    assert clock.flight.oldest(10.0) is None
    clock.now += 11
    assert clock.flight.oldest(10.0) is not None


def test_while_a_graph_is_captured_nothing_is_noted_and_nobody_waits(clock: Clock) -> None:
    clock.flight.note(CollectiveWait("0", 0, "captured"), lambda: None)
    assert clock.oldest() is None
    clock.now += 1
    clock.start("a", 1e9)
    clock.flight._queue[0] = (clock.flight._queue[0][0], lambda: None)  # noqa: SLF001
    assert clock.oldest() is None
