"""A thread beside Python's main one trains, as Ray Train does it: it is watched as the main one."""

from __future__ import annotations

import logging
import threading
import time
import typing

from parting_cases import SMALL, Run

from shardkit import set_watch
from shardkit.backends.watch.status import MainThread

if typing.TYPE_CHECKING:
    from collections.abc import Callable

    from workers import Spawn


def run_in_thread(work: Callable[[], object]) -> None:
    """Run something in a thread, while the main one waits for it."""
    errors = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in errors:
        raise error


def part_in_a_thread() -> None:
    """One rank goes backward, the other one does not."""
    set_watch(ask_after_s=1)

    def train() -> None:
        run = Run(-1, (2,), SMALL)
        run.shard()
        for step in range(6):
            loss = run.loss()
            if step != 4 or not run.is_odd:
                loss.backward()
                run.optimizer.step()
                run.optimizer.zero_grad()

    run_in_thread(train)


def test_ranks_that_part_are_told(spawn_errors: Spawn) -> None:
    for error in spawn_errors(part_in_a_thread, 2, timeout_s=30):
        assert error is not None
        assert error.type_name == "RankMismatchError", error.traceback
        assert "rank 1" in error.message
        assert "test_training_in_a_thread.py" in error.message


def come_late_to_a_step() -> tuple[str, bool]:
    """Return what a rank logs while the other one is late, and whose thread is the main one then.

    The mesh was made in a thread that has ended.
    """
    set_watch(ask_after_s=1)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardkit").addHandler(handler)
    runs: list[Run] = []

    def prepare() -> None:
        runs.append(Run(-1, (2,), SMALL))
        runs[0].shard()

    def train() -> None:
        for step in range(5):
            if step == 4 and runs[0].is_odd:
                time.sleep(4)
            runs[0].step()

    run_in_thread(prepare)
    run_in_thread(train)
    logging.getLogger("shardkit").removeHandler(handler)
    end = time.monotonic() + 5
    while MainThread.now is not threading.main_thread() and time.monotonic() < end:
        time.sleep(0.1)
    return "\n".join(said), MainThread.now is threading.main_thread()


def test_a_rank_that_is_awaited_is_told(spawn: Spawn) -> None:
    (first, _), _ = results = spawn(come_late_to_a_step, 2)
    assert "for these ranks:" in first
    assert "`train`" in first
    assert [is_main for _, is_main in results] == [True, True]
