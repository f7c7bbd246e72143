"""The last resort: a main thread that an aborted engine does not free."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from shardkit.backends.watch.break_off import break_off, end_if_stuck


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the process would have ended; there is an accelerator here."""
    event = threading.Event()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(os, "_exit", lambda _: event.set())
    return event


def call_soon(*arguments: object) -> None:
    """Call it from another thread, when the main thread is where it will be."""

    def call() -> None:
        time.sleep(0.2)
        end_if_stuck(*arguments)

    threading.Thread(target=call).start()


def test_a_main_thread_that_stays_blocked_ends_the_process(
    ended: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    call_soon(3, "rank 1 is stopped", 0.3)
    assert ended.wait(10)
    assert "rank 3 cannot be freed, so its process ends: rank 1 is stopped" in caplog.text


def test_one_that_goes_on_does_not(ended: threading.Event) -> None:
    call_soon(3, "rank 1 is stopped", 0.5)
    ended.wait(0.4)  # Blocked when it is looked at first,
    time.sleep(0.8)  # and elsewhere later.
    assert not ended.is_set()


def test_without_an_accelerator_nothing_is_watched(
    ended: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    call_soon(3, "rank 1 is stopped", 0.1)
    assert not ended.wait(0.8)


def test_no_group_needs_no_end() -> None:
    break_off(None)
