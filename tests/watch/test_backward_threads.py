"""Backward in a thread of its own, as on accelerators: its waits are those of the main thread.

The main thread is inside of autograd meanwhile, which waits for the thread.
"""

from __future__ import annotations

import threading
import time
import typing

import torch
from parting_cases import SMALL, Run

from shardkit import set_watch
from shardkit._compat import torch_autograd
from shardkit.backends.watch.history import is_main_thread
from shardkit.backends.watch.status import is_in_backward, main_frame

if typing.TYPE_CHECKING:
    from collections.abc import Callable

    from workers import Spawn


def run_as_engine(work: Callable[[], object]) -> None:
    """Run something in a thread; the main one waits where autograd's engine does."""
    done, errors = threading.Lock(), []

    def run() -> None:
        while not is_in_backward(main_frame()):
            time.sleep(0.001)
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            errors.append(error)
        finally:
            done.release()

    names: dict[str, typing.Any] = {}
    wait = "def _engine_run_backward(lock): lock.acquire()"
    exec(compile(wait, torch.autograd.graph.__file__, "exec"), names)
    done.acquire()
    thread = threading.Thread(target=run)
    thread.start()
    names["_engine_run_backward"](done)
    thread.join()
    for error in errors:
        raise error


def train(part: bool) -> None:
    set_watch(ask_after_s=1)
    run = Run(-1, (2,), SMALL)
    run.shard()
    for step in range(6):
        loss = run.loss()
        if part and step == 4 and run.is_odd:
            continue
        run_as_engine(loss.backward)
        run.optimizer.step()
        run.optimizer.zero_grad()


def test_ranks_that_part_in_it_are_told(spawn_errors: Spawn) -> None:
    """One goes backward, the other one does not."""
    for error in spawn_errors(train, 2, True, timeout_s=30):
        assert error is not None
        assert error.type_name == "RankMismatchError", error.traceback
        assert "in forward" in error.message
        assert "rank 1" in error.message


def test_others_train(spawn: Spawn) -> None:
    spawn(train, 2, False)


def test_whose_wait_it_is(monkeypatch) -> None:  # noqa: ANN001
    found = []
    assert is_main_thread()
    run_as_engine(lambda: found.append(is_main_thread()))
    monkeypatch.setattr(torch_autograd, "in_backward", lambda: True)
    run_as_engine(lambda: found.append(is_main_thread()))
    thread = threading.Thread(target=lambda: found.append(is_main_thread()))
    thread.start()
    thread.join()  # Beside a main thread that is elsewhere, as where a user's thread goes backward.
    assert found == [False, True, False]
