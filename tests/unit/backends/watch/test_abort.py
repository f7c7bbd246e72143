"""The last resort: a main thread that an aborted engine does not free."""

from __future__ import annotations

import os
import threading
import time
import traceback

import pytest
import torch

from shardkit import RankMismatchError
from shardkit.backends.watch.status import instruction_of, main_frame
from shardkit.backends.watch.watchdog import abort_group, end_if_stuck, raise_in_main_thread


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the process would have ended; there is an accelerator here."""
    event = threading.Event()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(os, "_exit", lambda _: event.set())
    return event


def call_soon(rank: int, text: str, after_s: float, *, even_on_host: bool = False) -> None:
    """Call it from another thread, when the main thread is where it will be."""

    def call() -> None:
        time.sleep(0.2)
        end_if_stuck(rank, text, even_on_host=even_on_host, after_s=after_s)

    threading.Thread(target=call).start()


def test_a_main_thread_that_stays_blocked_ends_the_process(
    ended: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    call_soon(3, "rank 1 is stopped", 0.3)
    assert ended.wait(10)
    assert (
        "rank 3 cannot be freed, so its process ends. RankMismatchError: rank 1 is" in caplog.text
    )


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
    abort_group(None)


def test_a_store_that_does_not_answer_ends_the_process_of_a_host_too(
    ended: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    call_soon(3, "the store is silent", 0.3, even_on_host=True)
    assert ended.wait(10)


def test_the_main_thread_raises_the_reason_in_place_of_the_error_of_its_engine() -> None:
    lock = threading.Lock()
    lock.acquire()
    is_failing = threading.Event()

    def give() -> None:
        is_failing.wait()
        time.sleep(0.1)  # Until the main thread is inside of the lock.
        place = instruction_of(main_frame())
        assert place is not None
        raise_in_main_thread("rank 1 is gone", place)
        lock.release()

    def fail() -> None:
        try:
            msg = "Application timeout caused pair closure"
            raise RuntimeError(msg)  # noqa: TRY301 - as an engine does
        except RuntimeError:
            is_failing.set()
            lock.acquire()  # No line of Python runs until the other thread has raised.
            time.sleep(0)
            raise

    threading.Thread(target=give).start()
    with pytest.raises(RankMismatchError, match="rank 1 is gone") as raised:
        fail()
    shown = "".join(traceback.format_exception(raised.value))
    assert "RuntimeError: Application timeout" not in shown
    assert "shardkit._errors.RankMismatchError: rank 1 is gone" in shown


def test_a_main_thread_that_has_gone_on_raises_nothing() -> None:
    """It would meet what it does by then: the end of a script, the next test."""
    place = instruction_of(main_frame())
    assert place is not None
    late = threading.Thread(target=raise_in_main_thread, args=("rank 1 is gone", place))
    late.start()
    late.join()
    time.sleep(0)
