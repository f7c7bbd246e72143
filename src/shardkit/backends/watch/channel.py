"""One process group: what is issued on it is compared first, and waits for it are watched."""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch.distributed as dist

from shardkit._errors import RankMismatchError
from shardkit.backends.watch.answer import ChannelState
from shardkit.backends.watch.current import current_station
from shardkit.backends.watch.in_flight import InFlight
from shardkit.backends.watch.sequence import Collective, CollectiveSequence
from shardkit.backends.watch.wait import Wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardkit.backends.watch.station import Station


class Waitable(Protocol):
    """What was started."""

    def wait(self) -> object:
        """Block until it is done."""


class Issued(NamedTuple):
    """A collective that this rank has issued, to be waited for.

    Attributes:
        channel: On which process group.
        position: In its sequence.
        what: Which one it is.
    """

    channel: Channel
    position: int
    what: Collective

    def wait(self, works: Sequence[Waitable]) -> None:
        """Wait for it.

        Raises:
            RankMismatchError: Other ranks have parted from this one, or do not come.
        """
        with self.watched():
            for work in works:
                work.wait()

    def started(self, is_done: Callable[[], bool]) -> None:
        """Watch it while a device runs it."""
        wait = Wait(self.channel.name, self.position, self.what)
        wait.is_main = True  # All that follows on the device waits.
        self.channel.in_flight.note(wait, is_done)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch a wait; an error that ends it is explained.

        Raises:
            RankMismatchError: Other ranks have parted from this one, or do not come.
        """
        station = self.channel.station
        with station.waiting(Wait(self.channel.name, self.position, self.what)):
            try:
                yield
            except RankMismatchError:
                raise
            except RuntimeError as error:
                text = station.explain()
                if text is None:
                    raise
                raise RankMismatchError(text) from error


class Channel:
    """One process group of several ranks.

    Args:
        group: Torch's.
        station: This process' end.

    Attributes:
        sequence: What was issued here.
        in_flight: What a device runs of it.
    """

    def __init__(self, group: dist.ProcessGroup, station: Station) -> None:
        self.group = group
        self.name = group.group_name
        self.station = station
        self.sequence = CollectiveSequence()
        self.in_flight = InFlight()
        self._ranks = dist.get_process_group_ranks(group)
        self._wish: Collective | None = None
        self._last_agreed = ""

    def state(self) -> ChannelState:
        """Return what this rank did here."""
        wish = str(self._wish) if self._wish is not None else None
        return ChannelState(self._ranks, self.sequence.position, self.sequence.recent(), wish)

    def issue(self, kind: str, of: str, nbytes: int) -> Issued:
        """Note a collective that is about to be issued; ask the others if it was not foretold.

        Raises:
            RankMismatchError: They are about to issue another one, or do not come.

        Cost: nothing where the last two collectives were followed by this one before; else
            three requests to the store, and a wait for the slowest rank.
        """
        sequence, collective = self.sequence, Collective(kind, of, nbytes)
        issued = Issued(self, sequence.position, collective)
        if sequence.foretold != collective:
            self._agree(issued)
        elif self.station.verdict is not None:
            raise RankMismatchError(self.station.verdict)
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

    def _agree(self, issued: Issued) -> None:
        """Return when all ranks of the group are about to issue the same."""
        what = str(issued.what)
        digest = hashlib.blake2b(what.encode(), digest_size=8).hexdigest()
        key = f"next/{self.name}/{issued.position}"
        self._wish = issued.what
        try:
            with self.station.waiting(Wait(self.name, issued.position, issued.what)):
                size = min(len(self._ranks), self.station.world_size)
                self.station.count_in(f"{key}/{digest}", size, self._last_agreed)
        finally:
            self._wish = None
        self._last_agreed = f"{key}/{digest}"


def channel_of(group: dist.ProcessGroup | None) -> Channel:
    """Return the channel of a process group, None the default one; always the same object."""
    group = group or dist.group.WORLD
    assert group is not None, "there is a process group"
    station = current_station()
    channel = station.channels.get(group.group_name)
    if not isinstance(channel, Channel) or channel.group is not group:
        channel = station.channels[group.group_name] = Channel(group, station)
    return channel
