"""Clocks of ranks are compared through a store: shifts and drifts that are known are found."""

from __future__ import annotations

import concurrent.futures
import time
import typing

import pytest
import torch.distributed as dist

from shardkit import StateError
from shardkit._settings import watch_settings
from shardkit.tracing.clocks import Clock, read_clock

SHIFTS = {0: 0.0, 1: 3.25, 2: -0.0071}


def readings(limit_s: float = 60, ranks: typing.Sequence[int] = (0, 1, 2)) -> dict[int, Clock]:
    """Return what ranks read, each in a thread, with a clock that is behind by its shift."""
    store = dist.HashStore()

    def read(rank: int) -> Clock:
        def now() -> float:
            return time.perf_counter() - SHIFTS[rank]

        return read_clock(store, "x", rank=rank, world_size=3, limit_s=limit_s, now=now)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(ranks, pool.map(read, ranks), strict=True))


def test_a_shift_is_found() -> None:
    for rank, reading in readings().items():
        # Threads of one process, on shared processors: the error that it states is the bound.
        assert abs(reading.offset_s - SHIFTS[rank]) <= reading.error_s + 1e-6
        assert reading.error_s < 0.1


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(StateError, match="rank 2 did not call it, or has ended"):
        readings(limit_s=0.2, ranks=[0, 1])


def test_a_rank_that_comes_late_is_named_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit of minutes says nothing for minutes."""
    monkeypatch.setattr(watch_settings, "ask_after_s", 0.2)
    with pytest.raises(StateError, match="after 1 s one is missing"):
        readings(limit_s=1, ranks=[0, 1])
    [said] = caplog.messages
    assert "after 0 s one is missing: rank 2 did not call it" in said
    caplog.clear()
    with pytest.raises(StateError):
        readings(limit_s=1, ranks=[1, 2])
    [said] = caplog.messages
    assert "rank 0 did not call it" in said


def test_a_drift_is_taken_out() -> None:
    first, last = Clock(100.0, 5.0, error_s=1e-5), Clock(200.0, 5.01, error_s=1e-5)
    clock = Clock.through(first, last)
    assert clock.align(100.0) == pytest.approx(105.0)
    assert clock.align(200.0) == pytest.approx(205.01)
    assert clock.align(150.0) == pytest.approx(155.005)


def test_what_may_be_an_error_is_no_drift() -> None:
    clock = Clock.through(Clock(100.0, 5.0, error_s=1e-4), Clock(100.1, 5.0001, error_s=1e-4))
    assert clock.drift == 0.0
    assert clock.align(1e6) == pytest.approx(1e6 + 5)
    assert Clock().align(3.0) == 3.0
