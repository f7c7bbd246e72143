"""This process' end of the watch: it asks the other ranks where they are, and answers them.

All of it goes through the store of the default process group, which works where collectives do not.
While nothing is wrong nothing is sent: a thread of each rank waits inside the store to be woken.
Whoever has waited long wakes all; each writes its answer; who asked writes the verdict.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardkit import _compat
from shardkit._errors import RankMismatchError
from shardkit._watch_settings import watch_settings
from shardkit.backends.watch import runs
from shardkit.backends.watch.answer import Answer
from shardkit.backends.watch.break_off import break_off, end_if_stuck
from shardkit.backends.watch.connections import Connections, prefix_of, run_of
from shardkit.backends.watch.flight_recorder import recorded
from shardkit.backends.watch.machine import machine_id
from shardkit.backends.watch.place import instruction_of, main_frame, place_of, stack_of
from shardkit.backends.watch.rounds import Rounds, read_verdict
from shardkit.backends.watch.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardkit.backends.watch.answer import ChannelState
    from shardkit.backends.watch.in_flight import InFlight
    from shardkit.backends.watch.wait import Wait

logger = logging.getLogger("shardkit")

_TICK_S = 0.25
_SURPRISE_S = 2.0  # Ranks that leave the known order come together, or not at all.
_LOOK_S = 1.0  # How long a main thread is looked at, to see whether it moves.
_STORE_S = 15.0
_GO = "go"
_SLICE = timedelta(seconds=20)
_LISTEN = timedelta(days=30)  # torch writes a warning where a wait for the store runs out.
_LINGER = timedelta(seconds=12)
_MAX_PAUSE_S = 30.0
_END_S = 6.0  # More than a round of questions takes.


class StationChannel(Protocol):
    """What a station needs of a `Channel`."""

    group: dist.ProcessGroup
    in_flight: InFlight

    def state(self) -> ChannelState:
        """Return what this rank did there."""


class Station:
    """The end of one process in one default process group.

    Args:
        default_store: Of the group.
        store: Where ranks meet: the same, as a rule.
        rank: This process' place among those that meet.
        world_size: How many meet.

    Attributes:
        channels: The process groups in use, by name.
        verdict: What ended the run, or None.
        step: Number of root forwards so far.
        error: The last exception that left a forward, or ends the process.
        has_raised: An exception ends the process.
        num_counted_in: How often this rank had to agree with others; three requests each.
    """

    def __init__(self, default_store: Any, store: Any, rank: int, world_size: int) -> None:
        self.default_store = default_store
        self.rank = rank
        self.world_size = world_size
        self.channels: dict[str, StationChannel] = {}
        self.verdict: str | None = None
        self.step = 0
        self.error: str | None = None
        self.has_raised = False
        self.num_counted_in = 0
        self._run, bottom = run_of(store)
        # Requests to one object wait for each other; who waits long has a connection of its own.
        self._own = c10d.PrefixStore(prefix_of(self._run), bottom)
        self._connections = Connections.to(bottom)
        self._rounds: Rounds | None = None
        self._waits: dict[int, Wait] = {}
        self._shown: set[str] = set()
        self._rounds_done = 0
        self._asking = threading.Lock()
        self._closed = threading.Event()
        self._counting_in: str | None = None
        here = [socket.gethostname(), os.getpid(), machine_id()]
        self._own.set(f"hello/{self.rank}", json.dumps(here))
        self._threads = [
            threading.Thread(target=target, name=f"shardkit-{name}", daemon=True)
            for name, target in (("answers", self._listen), ("clock", self._tick))
        ]
        for thread in self._threads:
            thread.start()
        self._file = self._register(bottom)

    def _register(self, bottom: Any) -> Path | None:
        """Let `python -m shardkit why` find this process."""
        if not hasattr(bottom, "port"):
            return None
        place = (bottom.host, bottom.port, self.world_size, self.rank, os.getpid(), time.time())
        return runs.register(runs.Run(self._run, *place))

    # --- waits of threads that compute ---

    @contextlib.contextmanager
    def waiting(self, wait: Wait) -> Iterator[None]:
        """Note that this thread waits."""
        if self.verdict is not None:
            raise RankMismatchError(self.verdict)
        ident = threading.get_ident()
        self._waits[ident] = wait
        try:
            yield
        finally:
            self._waits.pop(ident, None)

    def count_in(self, key: str, size: int, old: str) -> None:
        """Return when `size` ranks have come to a key.

        Args:
            key: Where to.
            size: How many.
            old: The last key to which the same ranks came, to be deleted; empty: there is none.

        Raises:
            RankMismatchError: There is a verdict on this wait.
        """
        wait = self._waits[threading.get_ident()]
        wait.next_look = wait.since + min(_SURPRISE_S, watch_settings.ask_after_s)
        self.num_counted_in += 1
        try:
            self._wait_for_all(key, size, old)
        except dist.DistError as error:
            raise RankMismatchError(self.verdict or self._store_is_gone()) from error

    def _wait_for_all(self, key: str, size: int, old: str) -> None:
        go = f"{key}/go"
        if self._own.add(key, 1) == size:
            self._own.set(go, _GO)
            if old:  # All have passed it, for all have come here.
                self._own.delete_key(old)
                self._own.delete_key(f"{old}/go")
            return
        self._counting_in = go
        try:
            while self.verdict is None:
                with contextlib.suppress(dist.DistStoreError):
                    self._own.wait([go], _SLICE)
                    if self._own.get(go).decode() == _GO:
                        return
                    time.sleep(_TICK_S)  # Another rank has heard of a verdict first.
        finally:
            self._counting_in = None
        raise RankMismatchError(self.verdict)

    def explain(self) -> str | None:
        """Return the verdict on a wait that has ended in an error; None if there is none."""
        deadline = time.monotonic() + _STORE_S
        while self.verdict is None and time.monotonic() < deadline and not self._closed.is_set():
            self._ask_guarded()
            if self.verdict is None:
                time.sleep(_TICK_S)
        return self.verdict

    # --- asking ---

    def _tick(self) -> None:
        """Look at the waits of this process from time to time."""
        while not self._closed.wait(_TICK_S):
            now = time.monotonic()
            for wait in self._all_waits():
                if now >= wait.next_look and self.verdict is None:
                    self._ask_guarded()
                    pause = min(max(now - wait.since, 1.0), _MAX_PAUSE_S)
                    wait.next_look = time.monotonic() + pause

    def _all_waits(self) -> list[Wait]:
        """Return the waits of threads, the main one's first, and those of devices."""
        threads = sorted(self._waits.values(), key=lambda wait: (not wait.is_main, wait.since))
        devices = (channel.in_flight.oldest() for channel in list(self.channels.values()))
        return threads + [wait for wait in devices if wait is not None]

    def _ask_guarded(self) -> None:
        """Ask; a store that does not answer is a verdict, too."""
        asker = threading.Thread(target=self._ask, name="shardkit-asks", daemon=True)
        asker.start()  # First: end_threads may join what is in the list at any time.
        self._threads = [each for each in self._threads if each.is_alive()] + [asker]
        asker.join(_STORE_S)
        if asker.is_alive() and self._all_waits() and self.verdict is None:
            self._apply(Verdict(is_final=True, text=self._store_is_gone()))

    def _store_is_gone(self) -> str:
        waits = self._all_waits()
        of = f"rank {self.rank} waits for {waits[0].what}, and " if waits else ""
        return (
            f"{of}the store of the process group does not answer: the process that holds it "
            f"(rank 0's, or the launcher's) has ended or is stopped, or its host is gone. Look at "
            f"the output of rank 0 and of the launcher."
        )

    def _ask(self) -> None:
        with self._asking, contextlib.suppress(dist.DistStoreError):
            try:
                if self._rounds is None:
                    connection = self._connections.take(self._run)
                    self._rounds = Rounds(connection, self.world_size, self.rank)
                verdict = self._rounds.ask()
            except dist.DistStoreError:
                raise
            except RuntimeError:
                if self._all_waits():
                    self._apply(Verdict(is_final=True, text=self._store_is_gone()))
                return
            if verdict is not None:
                self._apply(verdict, self._rounds.store)

    def _apply(self, verdict: Verdict, store: Any = None) -> None:
        """Do what follows: end the waits, or tell who looks at this process."""
        if not verdict.is_final:
            waits = [wait for wait in self._all_waits() if wait.is_main]
            is_long = any(time.monotonic() - w.since >= watch_settings.ask_after_s for w in waits)
            if is_long and verdict.told_by == self.rank and verdict.wait not in self._shown:
                self._shown.add(verdict.wait)
                logger.warning("%s", verdict.text)
            return
        if self.verdict is not None:
            return
        self.verdict = verdict.text
        if self._rounds is not None and self._rounds.answers:
            runs.keep_verdict(self._run, verdict.text, self._rounds.answers)
        world = dist.group.WORLD  # Read first: if the store is still ours, so is this.
        is_blocked = self._is_in_use() and place_of(main_frame()).waits
        cannot_go_on = is_blocked or bool(self._all_waits())
        if not self._waits:  # Else whoever waits raises it.
            logger.error("rank %d: %s", self.rank, verdict.text)
        if self._counting_in is not None and store is not None:
            with contextlib.suppress(RuntimeError):
                store.set(self._counting_in, "")  # Whoever waits for it looks at the verdict.
        if cannot_go_on:  # On a device the main thread waits where it asks for a number.
            end_if_stuck(self.rank, verdict.text)
        for channel in list(self.channels.values()):  # Whoever ends clears them meanwhile.
            break_off(channel.group)
        if is_blocked:
            break_off(world)

    # --- answering ---

    def _listen(self) -> None:
        """Answer whoever asks, until the process ends or the store is gone."""
        store, wake = self._connections.take(self._run), f"wake/{self.rank}"
        while not self._closed.is_set():
            try:
                store.wait([wake], _LISTEN)
                if self._closed.is_set():
                    break
                store.delete_key(wake)
                rounds = int(store.add("rounds", 0))
                if rounds > self._rounds_done:
                    self._rounds_done = rounds
                    self._answer(store, rounds)
            except dist.DistStoreError:
                continue
            except RuntimeError:  # The store is gone.
                return
        self._connections.give_back(store)

    def _answer(self, store: Any, number: int) -> None:
        store.set(f"answer/{self.rank}/{number}", self.answer().dump())
        verdict = read_verdict(store, number)
        if verdict is not None:
            self._apply(verdict, store)

    def answer(self) -> Answer:
        """Return where this process is. Takes a second if the main thread may be stuck."""
        frame = main_frame()
        place = place_of(frame)
        is_still = False
        if place.waits:
            before = instruction_of(frame)
            del frame
            time.sleep(_LOOK_S)
            frame = main_frame()
            is_still = instruction_of(frame) == before
        waits = self._all_waits()
        return self._describe(
            "runs" if self._is_in_use() else "destroyed",
            place=place,
            is_still=is_still,
            waits=waits[0].state() if waits else None,
            stack=stack_of(frame),
            engine=recorded(),
        )

    def _describe(self, state: str, **where: Any) -> Answer:
        """Return what is known without a look at the main thread, and `where` that one is."""
        return Answer(
            self.rank,
            socket.gethostname(),
            os.getpid(),
            state,
            self.step,
            error=self.error,
            channels={name: channel.state() for name, channel in list(self.channels.items())},
            verdict=self.verdict,
            **where,
        )

    def _is_in_use(self) -> bool:
        return dist.is_initialized() and _compat.default_store() is self.default_store

    # --- the end ---

    def linger(self) -> None:
        """Wait a little for the ends of the others, if this process holds the store.

        Without the store they could not be told why this rank does not come.
        """
        is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if self.rank != 0 or is_agents or self.verdict is not None:
            return
        keys = [f"end/{rank}" for rank in range(1, self.world_size)]
        with contextlib.suppress(dist.DistError):
            if keys and not self._own.check(keys):
                self._own.wait(keys, _LINGER)

    def note_error(self, error: BaseException) -> None:
        """Remember an exception that left a forward, or ends the process."""
        self.error = describe_error(error)

    def close(self, state: str = "ended") -> None:
        """Say that this process takes part no more, and end the threads."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(RuntimeError):
            self._own.set(f"end/{self.rank}", self._describe(state).dump())
            self._own.set(f"wake/{self.rank}", "")
        self.channels.clear()  # What is left of the process groups may go.
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def end_threads(self) -> None:
        """Wait for the threads: at the end of Python none may be inside the store."""
        end = time.monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0))


def describe_error(error: BaseException) -> str:
    """Return an exception, and the user's line that it came from."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    place = place_of(frames[-1]) if frames else None
    return f"{type(error).__name__}: {error}" + (f" at {place}" if place is not None else "")
