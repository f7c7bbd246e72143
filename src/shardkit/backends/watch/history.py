"""Collectives that this process has issued on each process group, and its waits."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from shardkit._compat import torch_autograd
from shardkit._settings import watch_settings
from shardkit.backends.watch.status import (
    CallStatus,
    MainThread,
    WaitStatus,
    call_of,
    is_in_backward,
    main_frame,
)

if TYPE_CHECKING:
    from collections.abc import Callable


# --- the sequence of collectives ------------------------------------------------------------------
#
# Every rank of the group has the same history, and so predicts the same collective. A rank that
# issues the predicted one need not ask other ranks.

NUM_RECENT = 128
_MAX_KNOWN = 1 << 16


class Collective(NamedTuple):
    """A collective, which all ranks of a process group must issue alike."""

    kind: str  # ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``, ...
    of: str  # Groups of parameters, or the purpose; may be empty.
    nbytes: int  # Bytes of the whole tensor.

    def __str__(self) -> str:
        of = f" of {self.of}" if self.of else ""
        return f"{self.kind}{of} ({self.nbytes} bytes)"


class CollectiveSequence:
    """The collectives of one process group, in the order of issue.

    The history predicts the next one: a mark points into the history, and the collective after the
    mark is the prediction. While predictions are right, the mark moves on. So a step of any length,
    with any number of micro-batches, is predicted by the step before it. After a surprise the mark
    jumps to the last place where the latest two collectives followed each other.
    """

    def __init__(self) -> None:
        self.position = 0  # Number of collectives so far.
        self.num_surprises = 0  # Number of collectives that were not predicted.
        self._history: list[Collective] = []  # A ring, once it is full.
        self._mark: int | None = None
        self._after: dict[tuple[Collective, Collective], int] = {}
        self._last: Collective | None = None

    @property
    def foretold(self) -> Collective | None:
        """The next collective if the step repeats; None: not known."""
        mark = self._mark
        return None if mark is None else self._history[mark % _MAX_KNOWN]

    def append(self, collective: Collective) -> None:
        """Note that a collective is being issued."""
        mark, position, history = self._mark, self.position, self._history
        foretold = None if mark is None else history[mark % _MAX_KNOWN]
        if foretold is not None and foretold == collective:
            collective = foretold  # Later steps add no objects.
        if len(history) < _MAX_KNOWN:
            history.append(collective)
        else:
            history[position % _MAX_KNOWN] = collective
        self.position = position = position + 1
        last, self._last = self._last, collective
        if collective is foretold:
            assert mark is not None
            self._mark = mark + 1
        else:
            self.num_surprises += 1
            self._mark = None if last is None else self._after.get((last, collective))
        if last is not None:
            if len(self._after) >= _MAX_KNOWN:  # On all ranks at once: they have the same history.
                self._after.clear()
            self._after[last, collective] = position
        mark = self._mark
        # What lies after this place has not been issued yet, or is overwritten by now.
        if mark is not None and not position - _MAX_KNOWN < mark < position:
            self._mark = None

    def recent(self, number: int = NUM_RECENT) -> list[str]:
        """Return the last collectives."""
        number = min(number, len(self._history))
        first = self.position - number
        return [str(self._history[i % _MAX_KNOWN]) for i in range(first, self.position)]


# --- waits ----------------------------------------------------------------------------------------

_NOTE_S = 0.2


def is_main_thread() -> bool:
    """Whether this thread is the main one, or autograd's thread while the main one waits for it."""
    if threading.get_ident() == MainThread.now.ident:
        return True
    return torch_autograd.in_backward() and is_in_backward(main_frame())


class Wait:
    """A wait of a thread of this process, or of a device."""

    is_main: bool  # Whether the main thread waits, or a thread in its place.

    def restart(self) -> None:
        """Let the wait begin now."""
        self.since = time.monotonic()
        self.next_look = self.since + watch_settings.ask_after_s  # When to ask other ranks (again).
        self.next_word = watch_settings.ask_after_s  # Seconds after which the next message comes.

    @property
    def for_s(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self.since

    def status(self) -> WaitStatus | None:
        """Return the status of the wait for other ranks; None: they see it as a call."""


class CollectiveWait(Wait):
    """A wait for one of shardkit's collectives, see `WaitStatus`."""

    def __init__(
        self,
        group: str,
        position: int,
        what: Collective,
        *,
        is_main: bool | None = None,
        is_issued: bool = True,
    ) -> None:
        self.group = group
        self.position = position
        self.what = what
        self.is_main = is_main_thread() if is_main is None else is_main
        self.is_issued = is_issued
        self.restart()

    def status(self) -> WaitStatus:
        """Return the status of the wait for other ranks."""
        return WaitStatus(
            self.group, self.position, str(self.what), self.for_s, self.is_main, self.is_issued
        )


class CallWait(Wait):
    """A user's collective in which the main thread is.

    The frame of the call is not kept: it would keep the arguments of the call alive.
    """

    is_main = True

    def __init__(self, at: tuple[int, int], number: int) -> None:
        self.at = at  # Instruction of the main thread. Calls in a loop may look the same.
        self.number = number  # Count of calls that looked different.
        self.restart()

    def call(self) -> CallStatus | None:
        """Return the status of the call for other ranks; None: its process group is not known."""
        return call_of(main_frame(), self.number, self.for_s)


class InFlight:
    """Collectives started on one process group, in the order in which a device runs them.

    Only one collective per 0.2 s is noted, because later ones are done later. The thread that notes
    one asks the device which of the earlier ones are done. So the thread that watches has to ask
    only if nothing was started for a long time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[tuple[CollectiveWait, Callable[[], bool | None]]] = deque()
        self._last_noted = 0.0

    def note(self, wait: CollectiveWait, is_done: Callable[[], bool | None]) -> None:
        """Note a collective that was started; called by the thread that starts them.

        Args:
            wait: The wait for it.
            is_done: Function that returns whether it is done; None: the device must not be asked
                now.
        """
        if wait.since - self._last_noted < _NOTE_S:
            return
        self._last_noted = wait.since
        with self._lock:
            if is_done() is not None and self._pop_done() is not None:
                self._queue.append((wait, is_done))

    def oldest(self, after_s: float = 0.0) -> CollectiveWait | None:
        """Return the first collective that is not done; its wait began when the one before ended.

        Args:
            after_s: Least length of the wait in seconds. Before that the device is not asked.
        """
        with self._lock:
            if not self._queue or time.monotonic() - self._queue[0][0].since < after_s:
                return None
            if not self._pop_done():
                return None
            return self._queue[0][0] if self._queue else None

    def _pop_done(self) -> bool | None:
        """Drop finished collectives; return None if the device must not be asked."""
        while self._queue:
            is_done = self._queue[0][1]()
            if is_done is None:
                return None
            if not is_done:
                break
            self._queue.popleft()
            if self._queue:
                self._queue[0][0].restart()
        return True
