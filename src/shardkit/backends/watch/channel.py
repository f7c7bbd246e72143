"""One process group: what is issued on it is compared first, and waits for it are watched."""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from shardkit._errors import RankMismatchError
from shardkit._settings import watch_settings
from shardkit.backends.watch.history import (
    Collective,
    CollectiveWait,
    GroupHistory,
    is_main_thread,
)
from shardkit.backends.watch.watchdog import Watchdog, current_watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Issued(NamedTuple):
    """A collective that this rank has issued, at a position of its group, to be waited for."""

    channel: Channel
    position: int
    what: Collective

    def wait(self, works: Sequence[dist.Work]) -> None:
        """Wait for it, as `watched`."""
        with self.watched():
            for work in works:
                work.wait()

    def started(self, is_done: Callable[[], bool | None]) -> None:
        """Watch it while a device runs it: all that follows on the device waits."""
        wait = CollectiveWait(self.channel.name, self.position, self.what, is_main=True)
        self.channel.in_flight.note(wait, is_done)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch a wait; an error that ends it is explained.

        Raises:
            RankMismatchError: Other ranks have parted from this one, or do not come.
        """
        with self.channel.watchdog.watching(
            CollectiveWait(self.channel.name, self.position, self.what)
        ):
            yield


class Channel(GroupHistory):
    """One process group of several ranks, watched by the watchdog of this process."""

    def __init__(self, group: dist.ProcessGroup, watchdog: Watchdog) -> None:
        super().__init__(group)
        self.name = group.group_name
        self.watchdog = watchdog
        self._last_agreed = ""

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
        elif self.watchdog.final_text is not None:
            raise RankMismatchError(self.watchdog.final_text)
        with self.watchdog.lock:
            self.wish = None
            self.is_main = is_main_thread()
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
        wait = CollectiveWait(self.name, issued.position, issued.what, is_issued=False)
        wait.next_look = wait.since + watch_settings.ask_unexpected_after_s
        try:
            with self.watchdog.watching(wait):
                with self.watchdog.lock:
                    self.wish = issued.what
                size = min(len(self.ranks), self.watchdog.world_size)
                self.watchdog.count_in(key, size, self._last_agreed)
        except BaseException:
            with self.watchdog.lock:
                self.wish = None
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
