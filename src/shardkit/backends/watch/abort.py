"""How waits end that cannot end by themselves."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from shardkit import _compat
from shardkit._errors import RankMismatchError
from shardkit.backends.watch.place import instruction_of, main_frame

logger = logging.getLogger("shardkit")

_PROBE_TAG = 7
_STUCK_S = 20.0
_EXIT_CODE = 70


def abort_group(group: dist.ProcessGroup | None) -> None:
    """End all waits for a process group: it cannot be used any more."""
    if group is None:
        return
    if torch.accelerator.is_available():
        with contextlib.suppress(RuntimeError):
            group.abort()
    if _compat.process_group_backend(group, torch.device("cpu")) is None:
        return
    # A receive that times out closes gloo's connections, all of them. One from a rank that has gone
    # fails at once and closes none, so each rank is tried.
    for offset in range(1, group.size()):
        source = (group.rank() + offset) % group.size()
        with contextlib.suppress(RuntimeError):
            probe = dist.irecv(torch.zeros(1), group=group, group_src=source, tag=_PROBE_TAG)
            assert probe is not None, "this rank is in the group"
            probe.wait(timedelta(milliseconds=1))


def raise_in_main_thread(text: str, at: tuple[int, int]) -> None:
    """Have the main thread raise a `RankMismatchError` where its collective ends.

    That ends in an error of the engine, which says nothing of the reason. Python raises what it was
    given by another thread at the next line of Python, in place of that error.

    Args:
        text: What the error says.
        at: What the main thread is at, of `instruction_of`. If it has gone on, nothing is raised:
            that would meet whatever it does by then.
    """

    class _RankMismatchError(RankMismatchError):
        def __init__(self) -> None:
            super().__init__(text)
            self.__suppress_context__ = True  # The engine's error, which is ours.

    _RankMismatchError.__name__ = RankMismatchError.__name__
    _RankMismatchError.__qualname__ = RankMismatchError.__qualname__
    _RankMismatchError.__module__ = RankMismatchError.__module__
    ident = threading.main_thread().ident
    assert ident is not None, "it has been started"
    if instruction_of(main_frame()) != at:
        return
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(ident), ctypes.py_object(_RankMismatchError)
    )


def end_if_stuck(rank: int, text: str, *, even_on_host: bool, after_s: float = _STUCK_S) -> None:
    """End this process if its main thread is where it is now after a while, too.

    An engine that was told to abort may wait itself: for a card, or for a rank that is stopped. So
    does who waits inside a store that does not answer. Nobody else could end the process then.

    Args:
        rank: This one.
        text: What was found, to be said once more.
        even_on_host: Whether to do so without an accelerator as well, where engines do end waits.
        after_s: Seconds.
    """
    if not even_on_host and not torch.accelerator.is_available():
        return
    before = instruction_of(main_frame())

    def look() -> None:
        time.sleep(after_s)
        if instruction_of(main_frame()) == before:
            logger.critical(
                "rank %d cannot be freed, so its process ends. RankMismatchError: %s", rank, text
            )
            os._exit(_EXIT_CODE)

    threading.Thread(target=look, name="shardkit-ends", daemon=True).start()
