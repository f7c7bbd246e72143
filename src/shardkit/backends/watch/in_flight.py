"""Collectives that a device runs while the host goes on: the oldest that is not done is watched."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardkit.backends.watch.wait import Wait

_PERIOD_S = 0.2


class InFlight:
    """What was started on one process group, in the order in which the device runs it.

    Not all of it: one collective in 0.2 s is noted, for what comes later is done later.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[Wait, Callable[[], bool]]] = deque()
        self._last_noted = 0.0
        self._head: Wait | None = None

    def note(self, wait: Wait, is_done: Callable[[], bool]) -> None:
        """Note a collective that was started; called by the thread that starts them."""
        if wait.since - self._last_noted >= _PERIOD_S:
            self._last_noted = wait.since
            self._queue.append((wait, is_done))

    def oldest(self) -> Wait | None:
        """Return what the device has not done; its wait began when all before it was done.

        Called by the thread that watches.
        """
        while self._queue:
            wait, is_done = self._queue[0]
            if not is_done():
                if wait is not self._head:
                    self._head, wait.since = wait, time.monotonic()
                    wait.restart()
                return wait
            self._queue.popleft()
        return None
