"""What runs once, though several threads call it first."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardkit._compat.once import once


def test_threads_that_call_it_first_get_one_result() -> None:
    calls, all_ready = [], threading.Barrier(4)

    @once
    def made(name: str) -> object:
        calls.append(name)
        time.sleep(0.05)
        return object()

    def call(name: str) -> object:
        all_ready.wait(20)
        return made(name)

    with ThreadPoolExecutor(4) as threads:
        first, second, third, other = threads.map(call, ["one", "one", "one", "other"])
    assert first is second is third is not other
    assert sorted(calls) == ["one", "other"]


def test_what_raised_runs_again() -> None:
    outcomes = [ValueError("no"), None]

    @once
    def attempt() -> str:
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome
        return "done"

    with pytest.raises(ValueError, match="no"):
        attempt()
    assert attempt() == "done"
    assert attempt() == "done"


def test_it_may_call_itself() -> None:
    @once
    def factorial(number: int) -> int:
        return number * factorial(number - 1) if number else 1

    assert factorial(5) == 120
