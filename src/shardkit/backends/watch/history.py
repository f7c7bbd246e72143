"""What this process has issued on each process group, and what it waits for."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from shardkit._compat import torch_autograd
from shardkit._settings import watch_settings
from shardkit.backends.watch.status import (
    CallStatus,
    WaitStatus,
    call_of,
    is_in_backward,
    main_frame,
)

if TYPE_CHECKING:
    from collections.abc import Callable


# --- the sequence of collectives ------------------------------------------------------------------
#
# Every rank of the group has the same history, hence foretells the same. So a rank that does what
# was foretold needs to ask nobody.

NUM_RECENT = 128
_MAX_KNOWN = 1 << 16


class Collective(NamedTuple):
    """What all ranks of a process group must issue alike."""

    kind: str  # ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``, ...
    of: str  # Groups of parameters, or what it is for; may be empty.
    nbytes: int  # Bytes of the whole tensor.

    def __str__(self) -> str:
        of = f" of {self.of}" if self.of else ""
        return f"{self.kind}{of} ({self.nbytes} bytes)"


class CollectiveSequence:
    """The collectives of one process group, in the order of issue.

    The next one is read off the history: a mark runs through it beside the present, and what comes
    after the mark is foretold. As long as that is right the mark goes on, so that a step of any
    length, with any number of micro-batches, is known from the step before it. After a surprise the
    mark jumps to where the last two collectives came one after the other before.
    """

    def __init__(self) -> None:
        self.position = 0  # Number of collectives so far.
        self.num_surprises = 0  # Number of those that were not foretold.
        self._history: list[Collective] = []  # A ring, once it is full.
        self._mark: int | None = None
        self._after: dict[tuple[Collective, Collective], int] = {}
        self._last: Collective | None = None

    @property
    def foretold(self) -> Collective | None:
        """What comes next if all is as it was; None where nothing is known."""
        mark = self._mark
        return None if mark is None else self._history[mark % _MAX_KNOWN]

    def append(self, collective: Collective) -> None:
        """Note that a collective is being issued."""
        mark, position, history = self._mark, self.position, self._history
        is_foretold = mark is not None and history[mark % _MAX_KNOWN] == collective
        if len(history) < _MAX_KNOWN:
            history.append(collective)
        else:
            history[position % _MAX_KNOWN] = collective
        self.position = position = position + 1
        last, self._last = self._last, collective
        if is_foretold:
            assert mark is not None
            self._mark = mark + 1
        else:
            self.num_surprises += 1
            self._mark = None if last is None else self._after.get((last, collective))
        if last is not None:
            if len(self._after) >= _MAX_KNOWN:  # On all ranks at once: they have one history.
                self._after.clear()
            self._after[last, collective] = position
        mark = self._mark
        # What lies after it has not been issued yet, or is overwritten by now.
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
    """Whether this thread is the main one, or autograd's while the main one waits for it."""
    if threading.get_ident() == threading.main_thread().ident:
        return True
    return torch_autograd.in_backward() and is_in_backward(main_frame())


class Wait:
    """A wait of a thread of this process, or of a device."""

    is_main: bool  # The main thread waits, or what runs in its place.

    def restart(self) -> None:
        """Begin now."""
        self.since = time.monotonic()
        self.next_look = self.since + watch_settings.ask_after_s  # When to ask the others (again).
        self.next_word = watch_settings.ask_after_s  # Seconds after which a message comes next.

    @property
    def for_s(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self.since

    def status(self) -> WaitStatus | None:
        """Return what others are told of it; None: it is told of as a call."""


class CollectiveWait(Wait):
    """A wait for a collective of shardkit's, see `WaitStatus`."""

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
        """Return what others are told of it."""
        return WaitStatus(
            self.group, self.position, str(self.what), self.for_s, self.is_main, self.is_issued
        )


class CallWait(Wait):
    """A collective of the user's that the main thread is inside of.

    The frame of the call is not kept: it would keep tensors that the call was given.
    """

    is_main = True

    def __init__(self, at: tuple[int, int], number: int) -> None:
        self.at = at  # Instruction of the main thread. Calls in a loop may look the same.
        self.number = number  # Count of calls that looked different.
        self.restart()

    def call(self) -> CallStatus | None:
        """Return what others are told of it; None: its process group cannot be found out."""
        return call_of(main_frame(), self.number, self.for_s)


class InFlight:
    """What was started on one process group, in the order in which a device runs it.

    Not all of it: one collective in 0.2 s is noted, for what comes later is done later. Whoever
    notes one asks the device which of those before are done. So the thread that watches has to ask
    only where nothing was started for long.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[tuple[CollectiveWait, Callable[[], bool | None]]] = deque()
        self._last_noted = 0.0

    def note(self, wait: CollectiveWait, is_done: Callable[[], bool | None]) -> None:
        """Note a collective that was started; called by the thread that starts them.

        Args:
            wait: The wait for it.
            is_done: Returns whether it is; None where the device must not be asked now.
        """
        if wait.since - self._last_noted < _NOTE_S:
            return
        self._last_noted = wait.since
        with self._lock:
            if is_done() is not None and self._pop_done() is not None:
                self._queue.append((wait, is_done))

    def oldest(self, after_s: float = 0.0) -> CollectiveWait | None:
        """Return what the device has not done; its wait began when all before it was done.

        Args:
            after_s: Seconds that it must have been waited for. The device is not asked before.
        """
        with self._lock:
            if not self._queue or time.monotonic() - self._queue[0][0].since < after_s:
                return None
            if not self._pop_done():
                return None
            return self._queue[0][0] if self._queue else None

    def _pop_done(self) -> bool | None:
        """Forget what is done; return None if the device must not be asked."""
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
