"""One process group: what is issued on it is compared first, and waits for it are watched."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from shardkit import _compat
from shardkit._errors import RankMismatchError
from shardkit._watch_settings import watch_settings
from shardkit.backends.watch.status import GroupStatus, WaitStatus, is_in_backward, main_frame
from shardkit.backends.watch.watchdog import Watchdog, current_watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


# --- the sequence of collectives ------------------------------------------------------------------
#
# Every rank of the group has the same history, hence foretells the same. So a rank that does what
# was foretold needs to ask nobody.

NUM_RECENT = 128
_MAX_KNOWN = 1 << 16


class Collective(NamedTuple):
    """What all ranks of a process group must issue alike.

    Attributes:
        kind: ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``, ...
        of: Groups of parameters, or what it is for; may be empty.
        nbytes: Bytes of the whole tensor.
    """

    kind: str
    of: str
    nbytes: int

    def __str__(self) -> str:
        of = f" of {self.of}" if self.of else ""
        return f"{self.kind}{of} ({self.nbytes} bytes)"


class CollectiveSequence:
    """The collectives of one process group, in the order of issue.

    The next one is read off the history: a mark runs through it beside the present, and what comes
    after the mark is foretold. As long as that is right the mark goes on, so that a step of any
    length, with any number of micro-batches, is known from the step before it. After a surprise the
    mark jumps to where the last two collectives came one after the other before.

    Attributes:
        position: Number of collectives so far.
        num_surprises: Number of those that were not foretold.
    """

    def __init__(self) -> None:
        self.position = 0
        self.num_surprises = 0
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


# --- channels -------------------------------------------------------------------------------------

_NOTE_S = 0.2


def is_main_thread() -> bool:
    """Whether this thread is the main one, or autograd's while the main one waits for it."""
    if threading.get_ident() == threading.main_thread().ident:
        return True
    return _compat.in_backward() and is_in_backward(main_frame())


class Wait:
    """A wait of a thread of this process, or of a device.

    Attributes:
        group: Name of the process group.
        position: Place of the collective in the sequence of its group.
        what: The collective.
        is_main: The main thread waits, or what runs in its place.
        is_issued: This rank has issued the collective; else it asks whether the others agree.
        since: Time when it began, of `time.monotonic`.
        next_look: Time when to ask the others (again).
        next_word: Number of seconds after which a message comes next.
    """

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

    def restart(self) -> None:
        """Begin now."""
        self.since = time.monotonic()
        self.next_look = self.since + watch_settings.ask_after_s
        self.next_word = watch_settings.ask_after_s

    def status(self) -> WaitStatus:
        """Return what others are told of it."""
        for_s = time.monotonic() - self.since
        return WaitStatus(
            self.group, self.position, str(self.what), for_s, self.is_main, self.is_issued
        )


class InFlight:
    """What was started on one process group, in the order in which a device runs it.

    Not all of it: one collective in 0.2 s is noted, for what comes later is done later. Whoever
    notes one asks the device which of those before are done. So the thread that watches has to ask
    only where nothing was started for long.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[tuple[Wait, Callable[[], bool | None]]] = deque()
        self._last_noted = 0.0

    def note(self, wait: Wait, is_done: Callable[[], bool | None]) -> None:
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

    def oldest(self, after_s: float = 0.0) -> Wait | None:
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


class Issued(NamedTuple):
    """A collective that this rank has issued, to be waited for.

    Attributes:
        channel: Channel of the process group.
        position: Place in its sequence.
        what: The collective.
    """

    channel: Channel
    position: int
    what: Collective

    def wait(self, works: Sequence[dist.Work]) -> None:
        """Wait for it.

        Raises:
            RankMismatchError: Other ranks have parted from this one, or do not come.
        """
        with self.watched():
            for work in works:
                work.wait()

    def started(self, is_done: Callable[[], bool | None]) -> None:
        """Watch it while a device runs it: all that follows on the device waits."""
        wait = Wait(self.channel.name, self.position, self.what, is_main=True)
        self.channel.in_flight.note(wait, is_done)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch a wait; an error that ends it is explained.

        Raises:
            RankMismatchError: Other ranks have parted from this one, or do not come.
        """
        with self.channel.watchdog.watching(Wait(self.channel.name, self.position, self.what)):
            yield


class Channel:
    """One process group of several ranks.

    Args:
        group: Torch's.
        watchdog: That of this process.

    Attributes:
        sequence: Collectives that were issued here.
        in_flight: Collectives that a device runs.
    """

    def __init__(self, group: dist.ProcessGroup, watchdog: Watchdog) -> None:
        self.group = group
        self.name = group.group_name
        self.watchdog = watchdog
        self.sequence = CollectiveSequence()
        self.in_flight = InFlight()
        self._ranks = dist.get_process_group_ranks(group)
        self._wish: Collective | None = None
        self._last_agreed = ""
        self._is_main = True

    def status(self, *, details: bool = True) -> GroupStatus:
        """Return what this rank did here. Called with the watchdog's lock."""
        wish = str(self._wish) if self._wish is not None else None
        recent = self.sequence.recent() if details else []
        return GroupStatus(self._ranks, self.sequence.position, wish, self._is_main, recent)

    def issue(self, kind: str, of: str, nbytes: int) -> Issued:
        """Note a collective that is about to be issued; ask the others if it was not foretold.

        Raises:
            RankMismatchError: They are about to issue another one, or do not come.

        Cost: nothing where the steps before did the same; else two requests to the store, and a
            wait for the slowest rank.
        """
        sequence, collective = self.sequence, Collective(kind, of, nbytes)
        issued = Issued(self, sequence.position, collective)
        if sequence.foretold != collective:
            self._agree(issued)
        elif self.watchdog.verdict is not None:
            raise RankMismatchError(self.watchdog.verdict)
        with self.watchdog.lock:
            self._wish = None
            self._is_main = is_main_thread()
            sequence.append(collective)
        return issued

    @contextlib.contextmanager
    def run(self, kind: str, of: str, nbytes: int) -> Iterator[None]:
        """Issue and watch a collective that blocks.

        Raises:
            RankMismatchError: As `issue`, and as `Issued.wait`.
        """
        with self.issue(kind, of, nbytes).watched():
            yield

    @contextlib.contextmanager
    def section(self, kind: str, of: str) -> Iterator[None]:
        """Begin something on all ranks together that mixes local work with collectives of torch.

        It is no wait: a rank may work in it for as long as it likes.

        Raises:
            RankMismatchError: As `issue`; or an error in it was caused by ranks that are lost.
        """
        self.issue(kind, of, 0)
        with self.watchdog.explaining():
            yield

    def _agree(self, issued: Issued) -> None:
        """Return when all ranks of the group are about to issue the same."""
        what = str(issued.what)
        digest = hashlib.blake2b(what.encode(), digest_size=8).hexdigest()
        key = f"next/{self.name}/{issued.position}/{digest}"
        wait = Wait(self.name, issued.position, issued.what, is_issued=False)
        wait.next_look = wait.since + watch_settings.ask_unexpected_after_s
        try:
            with self.watchdog.watching(wait):
                with self.watchdog.lock:
                    self._wish = issued.what
                size = min(len(self._ranks), self.watchdog.world_size)
                self.watchdog.count_in(key, size, self._last_agreed)
        except BaseException:
            with self.watchdog.lock:
                self._wish = None
            raise
        self._last_agreed = key


def channel_of(group: dist.ProcessGroup | None) -> Channel:
    """Return the channel of a process group, None the default one; always the same object."""
    group = group or dist.group.WORLD
    assert group is not None, "there is a process group"
    watchdog = current_watchdog()
    channel = watchdog.channels.get(group.group_name)
    if not isinstance(channel, Channel) or channel.group is not group:
        channel = watchdog.channels[group.group_name] = Channel(group, watchdog)
    return channel
