"""What a process does when a verdict is final."""

from __future__ import annotations

import types
import typing

import pytest
import torch.distributed as dist

from shardkit.backends.watch import station as station_module
from shardkit.backends.watch.in_flight import InFlight
from shardkit.backends.watch.sequence import Collective
from shardkit.backends.watch.station import Station
from shardkit.backends.watch.verdict import Verdict
from shardkit.backends.watch.wait import Wait

if typing.TYPE_CHECKING:
    from collections.abc import Iterator

FINAL = Verdict(is_final=True, text="rank 1 is stopped")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done to end waits, in order."""
    found: list[str] = []
    monkeypatch.setattr(station_module, "end_if_stuck", lambda *_: found.append("end if stuck"))
    monkeypatch.setattr(station_module, "break_off", lambda _: found.append("break off"))
    return found


@pytest.fixture
def station() -> Iterator[Station]:
    """The only process of a run, with one process group."""
    store = dist.HashStore()
    made = Station(store, store, 0, 1)
    channel: typing.Any = types.SimpleNamespace(
        group=None, in_flight=InFlight(), state=lambda: None
    )
    made.channels["0"] = channel
    yield made
    made.channels.clear()
    made.close()
    made.end_threads()


def test_a_device_that_waits_ends_the_process_if_it_cannot_be_freed(
    station: Station, calls: list[str]
) -> None:
    """The main thread is in no collective: it asks the device for a number, or is about to."""
    wait = Wait("0", 3, Collective("all-gather", "layer", 64))
    station.channels["0"].in_flight.note(wait, lambda: False)
    station._apply(FINAL)  # noqa: SLF001 - called by its threads
    assert calls == ["end if stuck", "break off"]


def test_a_process_that_waits_for_nothing_goes_on(station: Station, calls: list[str]) -> None:
    station._apply(FINAL)  # noqa: SLF001 - called by its threads
    assert calls == ["break off"]
    assert station.verdict == "rank 1 is stopped"
