"""This process's part of the watch: it asks the other ranks where they are, and answers them.

All messages go through the store of the default process group, which works even if collectives do
not. While nothing is wrong nothing is sent: a thread of each rank waits inside the store. A rank
that has waited long wakes all ranks. Each writes its status, and the asker writes the conclusion.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import functools
import hashlib
import logging
import multiprocessing
import os
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from shardkit._compat import torch_groups
from shardkit._compat.once import wrap
from shardkit._errors import RankMismatchError, StateError, warn_user
from shardkit._processes import allow_open_files, machine_id, start_of
from shardkit._settings import watch_settings
from shardkit.backends.watch import runs
from shardkit.backends.watch.diagnosis import Diagnosis, explain_error, what_is_awaited
from shardkit.backends.watch.history import (
    CallWait,
    Collective,
    CollectiveSequence,
    CollectiveWait,
    InFlight,
    Wait,
    is_main_thread,
)
from shardkit.backends.watch.liveness import NOWHERE, Connections, Listener, address_of
from shardkit.backends.watch.rounds import Answering, Rounds, hello
from shardkit.backends.watch.runs import RunStore, store_of_run
from shardkit.backends.watch.status import (
    GroupStatus,
    Lines,
    MainThread,
    RankStatus,
    flight_record,
    instruction_of,
    is_in_collective,
    lines_in_words,
    lines_of,
    main_frame,
    place_of,
    stack_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    from shardkit.backends.device import AcceleratorDevice, Event


# --- ending waits ---------------------------------------------------------------------------------

logger = logging.getLogger("shardkit")

_PROBE_TAG = 7
_FREED_IN_S = 20.0
_EXIT_CODE = 70


def abort_group(group: dist.ProcessGroup | None) -> None:
    """End all waits for a process group, which cannot be used any more."""
    if group is None:
        return
    if torch.accelerator.is_available():
        with contextlib.suppress(RuntimeError):
            group.abort()
    if torch_groups.process_group_backend(group, torch.device("cpu")) is None:
        return
    # A receive that times out closes all of gloo's connections. A receive from a rank that has
    # ended fails at once and closes none, so try each rank.
    for offset in range(1, group.size()):
        source = (group.rank() + offset) % group.size()
        with contextlib.suppress(RuntimeError):
            probe = dist.irecv(
                torch.zeros(1, device="cpu"), group=group, group_src=source, tag=_PROBE_TAG
            )
            assert probe is not None, "this rank is in the group"
            probe.wait(timedelta(milliseconds=1))


def raise_in_main_thread(text: str, at: tuple[int, int]) -> None:
    """Let the main thread raise a `RankMismatchError` where its collective ends.

    The collective ends in an error of the engine, which does not name the reason. Python raises the
    exception that another thread has set at the next line of Python, in place of that error.

    Args:
        text: Message of the error.
        at: Instruction of the main thread, from `instruction_of`. If the thread has gone on,
            nothing is raised: the error would hit whatever it does by then.
    """

    @functools.wraps(RankMismatchError, updated=())
    class _RankMismatchError(RankMismatchError):
        def __init__(self) -> None:
            super().__init__(text)
            self.__suppress_context__ = True  # The context is the engine's error, which we caused.

    ident = MainThread.now.ident
    assert ident is not None, "it has been started"
    if instruction_of(main_frame()) != at:
        return
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(ident), ctypes.py_object(_RankMismatchError)
    )


def end_if_stuck(rank: int, text: str, *, even_on_host: bool, after_s: float = _FREED_IN_S) -> None:
    """End this process if its main thread is still at the same place after a while.

    An engine that was asked to abort may itself wait: for a card, or for a rank that is stopped. A
    thread inside a store that does not answer waits, too. Nothing else could end the process then.
    Without an accelerator engines do end waits, so there this happens only with `even_on_host`.
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


# --- process groups -------------------------------------------------------------------------------


class Issued(NamedTuple):
    """A collective that this rank has issued at a position of its group, and will wait for."""

    channel: Channel
    position: int
    what: Collective

    def started(self, device: AcceleratorDevice, end: Event) -> None:
        """Watch the collective while a device runs it, up to an event: all later work waits."""
        wait = CollectiveWait(self.channel.name, self.position, self.what, is_main=True)
        self.channel.in_flight.note(wait, functools.partial(device.has_passed, end))

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch a wait; explain an error that ends it.

        Raises:
            RankMismatchError: Other ranks have diverged from this one, or do not come.
        """
        with self.channel.watchdog.watching(
            CollectiveWait(self.channel.name, self.position, self.what)
        ):
            yield


class Channel:
    """One process group of several ranks: what this rank did on it, and does now.

    Collectives on it are compared before they are issued, and waits for them are watched.
    """

    def __init__(self, group: dist.ProcessGroup, watchdog: Watchdog) -> None:
        self.group = group
        self.name = group.group_name
        try:
            self.ranks = dist.get_process_group_ranks(group)
        except KeyError:
            raise StateError(_DESTROYED) from None
        self.watchdog = watchdog
        self.sequence = CollectiveSequence()  # Issued collectives.
        self.in_flight = InFlight()  # Collectives that a device runs.
        self.wish: Collective | None = None  # Collective to which others have not agreed yet.
        self.is_main = True  # Whether the main thread, or its backward, issued the last one.
        self._last_agreed = ""
        self.at_end: list[Callable[[], object]] = []  # Functions that end further waits.

    def end_waits(self) -> None:
        """End the waits that are not inside the engine."""
        for end in self.at_end:
            end()

    def status(self, *, details: bool = True) -> GroupStatus:
        """Return the status for other ranks. The caller holds the watchdog's lock."""
        wish = str(self.wish) if self.wish is not None else None
        recent = self.sequence.recent() if details else []
        return GroupStatus(self.ranks, self.sequence.position, wish, self.is_main, recent)

    def issue(self, kind: str, of: str, nbytes: int) -> Issued:
        """Note a collective that is about to be issued; ask other ranks if it was not predicted.

        Raises:
            RankMismatchError: Other ranks are about to issue another collective, or do not come.

        Cost: nothing if earlier steps did the same; else two requests to the store, and a wait for
            the slowest rank.
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
            RankMismatchError: For the reasons of `issue` and of `Issued.watched`.
        """
        with self.issue(kind, of, nbytes).watched():
            yield

    @contextlib.contextmanager
    def section(self, kind: str, of: str) -> Iterator[None]:
        """Begin, on all ranks together, a section of local work and torch's collectives.

        A section is no wait: a rank may work in it for as long as it likes.

        Raises:
            RankMismatchError: For the reasons of `issue`; or lost ranks caused an error in it.
        """
        self.issue(kind, of, 0)
        try:
            yield
        except RuntimeError as error:
            self.watchdog.raise_reason(error)
            raise

    def _agree(self, issued: Issued) -> None:
        """Return when all ranks of the group are about to issue the same collective."""
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


# --- the watchdog ---------------------------------------------------------------------------------

_TICK_S = 0.25
_NUM_BEGUN = 8
_EXPLAIN_S = 15.0
_GO = "go"
_MAX_PAUSE_S = 30.0
_MORE_WORDS = 6.0  # A wait is logged again when it has become this many times as long.
_END_S = 6.0
_END_OF_GROUP_S = 2.0  # A user waits for this.
_LAST_WORKS_S = 0.05
_STUCK_S = 2.0
_RETRY_S = 5.0
_RAISED_S = 5.0
_NUM_OTHER_FILES, _NUM_FILES_OF_RANK = 256, 6  # With connections of threads, and those of NCCL.
_STORE_GONE = (
    "the store of the process group does not answer: the process that holds it (rank 0's, or the "
    "launcher's) has ended{or_more}. Look at the output of rank 0 and of the launcher."
)
_LEFT = (
    "this rank called destroy_process_group() while a thread of it waited in the group for other "
    "ranks. End what runs in the background first."
)


class Watchdog:
    """The watch of one process over one default process group.

    Args:
        default_store: Store of the group.
        store: Store in which ranks meet, usually the same.
        rank: Position of this process among those that meet.
        world_size: Number of ranks that meet. A process that is alone asks no ranks, and has no
            threads.
    """

    def __init__(self, default_store: Any, store: Any, rank: int, world_size: int) -> None:
        self.default_store = default_store
        self.rank = rank
        self.world_size = world_size
        self.channels: dict[str, Channel] = {}  # Process groups in use, by name.
        self.final_text: str | None = None  # Text of the diagnosis that ended the run.
        self.lock = threading.Lock()  # Held while the status for other ranks is changed or read.
        self.step = 0  # Number of root forwards so far.
        self._begun: collections.deque[Lines] = collections.deque(maxlen=_NUM_BEGUN)
        self.error: str | None = None  # The last exception that left a forward or ends the process.
        self.has_raised = False  # Whether an exception ends the process.
        self.has_captured = False  # Whether collectives were captured in a graph.
        self.num_counted_in = 0  # Number of agreements with other ranks; each took two requests.
        self._alarmed_step = -1
        # Requests on one connection wait for each other; a thread that waits long has its own.
        self._store: RunStore = store_of_run(store)
        self._waits: dict[int, Wait] = {}
        self._call: CallWait | None = None
        self._num_calls = 0
        self._asking = threading.Lock()
        self._asker: threading.Thread | None = None
        self._asked_since = 0.0
        self._awake_since = self._looked_at = self._store_seen_at = time.monotonic()
        self._to_store = Connections()
        self._rounds: Rounds | None = None
        self._asked_for: str | None = None
        self._complained = 0.0
        self._closed = threading.Event()
        self._counting_in: dict[int, str] = {}
        self._free_stores: list[RunStore] = []
        self._threads: list[threading.Thread] = []
        self._file: Path | None = None
        self._answering: Answering | None = None
        self._listener = Listener(NOWHERE)
        if world_size > 1:
            self._start()

    def _start(self) -> None:
        """Let others find this process, and begin to answer."""
        MainThread.now = threading.current_thread()
        self._make_room()
        # A thread that makes a process group, or waits for a key, waits in torch's connection. Then
        # the store has not stopped to answer, so the watch uses it no more.
        with contextlib.suppress(RuntimeError):
            self._store = self._store.clone()
        at = address_of(self._store.connection)
        self._listener = Listener(at)
        own = hello(socket.gethostname(), os.getpid(), self._listener.address)
        self._store.set(f"hello/{self.rank}", own)
        if at != NOWHERE:  # Then `python -m shardkit why` can reach the store.
            place = (*at, self.world_size, self.rank)
            process = (os.getpid(), time.time(), machine_id(), start_of(os.getpid()))
            self._file = runs.register(runs.RankFile(self._store.run, *place, *process))
        for name, target in (("answers", self._listen), ("clock", self._tick)):
            thread = threading.Thread(target=target, name=f"shardkit-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _make_room(self) -> None:
        """Let the process that holds the store open a file for each connection of the watch.

        Torch's store closes a connection for which it cannot open a file. Ranks try again.
        """
        is_agents = _is_agents_store()
        is_first = os.environ.get("LOCAL_RANK") == "0" if is_agents else self.rank == 0
        if is_first:
            number = _NUM_OTHER_FILES + _NUM_FILES_OF_RANK * self.world_size
            allowed = allow_open_files(os.getppid() if is_agents else os.getpid(), number)
            msg = (
                f"the process that holds the store may open {allowed} files, and may need "
                f"{number} for {self.world_size} ranks: at its limit ranks wait until they can "
                f"connect. Write `ulimit -n {number}` before the launcher."
            )
            if allowed < number:
                warn_user(msg, is_first_rank=self.rank == 0)

    def begin_step(self) -> None:
        """Note where a root's forward begins, for the error if ranks diverge later."""
        if not self.step:
            MainThread.now = threading.current_thread()
        self.step += 1
        self._begun.append(lines_of(sys._getframe(1)))  # noqa: SLF001 - documented for this use

    def claim(self, key: str, value: str) -> str:
        """Write a key that does not exist; return its value, "" if there are no other ranks."""
        if self.world_size == 1 or self._closed.is_set() or self._store.silent_s >= _STUCK_S:
            return ""
        with contextlib.suppress(RuntimeError):
            is_own = self._store.claim(key, value)
            return value if is_own else self._store.get(key).decode(errors="replace")
        return ""

    # --- waits of threads that compute ---

    @contextlib.contextmanager
    def watching(self, wait: Wait) -> Iterator[None]:
        """Watch a wait of this thread; explain an error that ends it.

        Raises:
            RankMismatchError: Other ranks have diverged from this one, or do not come.
        """
        if self.final_text is not None:
            raise RankMismatchError(self.final_text)
        if self._alarmed_step >= self.step:
            wait.next_look = min(wait.next_look, wait.since + watch_settings.ask_unexpected_after_s)
        ident = threading.get_ident()
        with self.lock:
            self._waits[ident] = wait
        try:
            yield
        except RuntimeError as error:
            self.raise_reason(error)
            raise
        finally:
            with self.lock:
                self._waits.pop(ident, None)

    def raise_reason(self, error: RuntimeError) -> None:
        """Raise the reason of an engine's error, if other ranks have caused it.

        Raises:
            RankMismatchError: Why, in place of the engine's error, which says nothing of it.
        """
        if isinstance(error, RankMismatchError):
            return
        if self.final_text is not None:  # This watchdog has ended the waits.
            raise RankMismatchError(self.final_text) from None
        text = self._explain()
        if text is not None:
            said = f"{text}\n(The engine said: {str(error).splitlines()[0]})"
            raise RankMismatchError(said) from None

    def count_in(self, key: str, size: int, old: str) -> None:
        """Return when `size` ranks have come to a key.

        Args:
            key: Key to come to.
            size: Number of ranks.
            old: The last key to which the same ranks came, to be deleted; empty: there is none.

        Raises:
            RankMismatchError: This wait will never end.
        """
        self.num_counted_in += 1
        go = f"{key}/go"
        store: RunStore | None = None
        try:
            # Use a separate connection: this wait must not block threads that it may wait for.
            with self.lock:
                store = self._free_stores.pop() if self._free_stores else None
            store = store or self._store.clone()
            if store.add(key, 1) == size:
                store.set(go, _GO)
                if old:  # All ranks have passed the old key, since all have come here.
                    store.delete(old)
                    store.delete(f"{old}/go")
                return
            self._counting_in[threading.get_ident()] = go
            store.block_until(go, lambda: self.final_text is not None or self._has_left())
        except dist.DistNetworkError as error:
            text = self.final_text or self._store_is_gone(or_more="")
            raise RankMismatchError(text) from error
        finally:
            self._counting_in.pop(threading.get_ident(), None)
            if store is not None:
                with self.lock:
                    self._free_stores.append(store)
        if self.final_text is not None:
            raise RankMismatchError(self.final_text)
        if self._has_left():
            raise RankMismatchError(_LEFT)

    def _explain(self) -> str | None:
        """Return why a wait has ended in an error; None if no other rank is the cause."""
        if self.world_size == 1:
            return None
        end = time.monotonic() + _EXPLAIN_S
        limit = watch_settings.silent_after_s
        while time.monotonic() < end and not self._closed.is_set():
            asker = self._ask_beside()
            asker.join(max(end - time.monotonic(), 0))
            if self.final_text is not None:
                return self.final_text
            if self._rounds is not None and self._rounds.statuses:
                text = explain_error(self._rounds.statuses, self.rank, limit)
                if text is not None:
                    return text
            time.sleep(_TICK_S)
        return None

    # --- asking ---

    def _tick(self) -> None:
        """Look at the waits of this process from time to time."""
        while not self._closed.wait(_TICK_S):
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - the watch goes on
                self._complain(error)

    def _look(self) -> None:
        if not self._is_in_use():
            self.close("destroyed")
            return
        if not MainThread.now.is_alive():
            MainThread.now = threading.main_thread()
        self._see_call()
        now = time.monotonic()
        if now - self._looked_at > _STUCK_S:  # It was stopped, and the store perhaps as well.
            self._awake_since = now
        self._looked_at = now
        if self._asker is not None and self._asker.is_alive():
            # A watchdog without its own connection makes one first.
            rounds, asks_for_s = self._rounds, now - self._asked_since
            silent_s = rounds.store.silent_s if rounds is not None else asks_for_s
            self._judge_store(min(silent_s, now - self._awake_since))
            return
        for wait in self._all_waits(watch_settings.ask_after_s):
            if now < wait.next_look or self.final_text is not None:
                continue
            self._ask_beside()
            pause = min(max(now - wait.since, 1.0), _MAX_PAUSE_S)
            wait.next_look = now + pause
            break

    def _see_call(self) -> None:
        """Note whether the main thread is inside a user's collective."""
        frame = main_frame()
        is_ours = MainThread.now.ident in self._waits
        at = instruction_of(frame) if is_in_collective(frame) and not is_ours else None
        del frame
        if at is None:
            self._call = None
        elif self._call is None or self._call.at != at:
            self._num_calls += 1
            self._call = CallWait(at, self._num_calls)

    def _all_waits(self, device_after_s: float) -> list[Wait]:
        """Return the waits of threads (the main one's first), of devices, and in users' calls."""
        with self.lock:
            threads = self._waits_of_threads()
        return [*threads, *self._other_waits(device_after_s)]

    def _other_waits(self, device_after_s: float) -> list[Wait]:
        """Return the waits of devices, and in users' calls."""
        channels = [*self.channels.values()]
        flights = [channel.in_flight.oldest(device_after_s) for channel in channels]
        return [wait for wait in (*flights, self._call) if wait is not None]

    def _waits_of_threads(self) -> list[Wait]:
        """Return the waits of threads, the main one's first. The caller holds the lock."""
        return sorted(self._waits.values(), key=lambda wait: (not wait.is_main, wait.since))

    def _ask_beside(self) -> threading.Thread:
        """Ask in a separate thread, since a store may not answer. Return the thread."""
        asker = self._asker
        if asker is None or not asker.is_alive():
            asker = threading.Thread(target=self._ask, name="shardkit-asks", daemon=True)
            self._asked_since = time.monotonic()
            asker.start()  # Start it first: `end_threads` may join threads of the list at any time.
            self._asker = asker
            self._threads = [each for each in self._threads if each.is_alive()] + [asker]
        return asker

    def _ask(self) -> None:
        try:
            with self._asking:
                if self._rounds is None:
                    self._rounds = Rounds(self._store.clone(), self.world_size, self.rank)
                with self.lock:
                    waits = [wait for wait in self._waits.values() if wait.is_main]
                awaited = f"{id(waits[0])} {waits[0].since}" if waits else None
                if awaited != self._asked_for:
                    self._asked_for = awaited
                    self._rounds.forget()
                diagnosis = self._rounds.ask()
                again_at = time.monotonic() + self._rounds.silence_counts_in_s
                for wait in self._all_waits(watch_settings.ask_after_s):
                    wait.next_look = min(wait.next_look, again_at)
                if diagnosis is not None:
                    self._take_up(diagnosis, self._rounds.store, self._rounds.statuses)
        except dist.DistNetworkError:
            self._rounds = None
            if self._all_waits(0.0) and self._is_in_use():  # Its process has ended.
                self._end(self._store_is_gone(or_more=""))
        except Exception as error:  # noqa: BLE001 - the watch goes on
            self._rounds = None
            self._complain(error)

    def _judge_store(self, silent_s: float) -> None:
        """Say that the store does not answer; end the waits if its process cannot answer again."""
        waits = [wait for wait in self._all_waits(0.0) if wait.is_main]
        if not waits or silent_s < watch_settings.ask_after_s:
            return
        # If the launcher holds the store, its process is not known.
        holder = None if _is_agents_store() else runs.rank_here(self._store.run, 0)
        state = "silent" if holder is None else holder.process_state
        is_unseen = state == "silent" and (
            min(silent_s, time.monotonic() - self._store_seen_at) >= watch_settings.silent_after_s
        )
        if is_unseen and self._reaches_store():
            is_unseen, self._store_seen_at = False, time.monotonic()
        if state == "gone":
            self._end(self._store_is_gone(or_more=""))
        elif is_unseen:
            self._end(self._store_is_gone(or_more=", or its host is gone"), is_store_silent=True)
        elif silent_s >= waits[0].next_word:
            waits[0].next_word = silent_s * _MORE_WORDS
            if holder is not None and state == "stopped":
                why = f"rank 0, which holds it, is stopped (SIGSTOP): `kill -CONT {holder.pid}`"
            else:
                why = "rank 0, or the launcher, which holds it, may be stopped, or very busy"
            logger.warning(
                "rank %d: %sthe store of the process group has not answered for %.0f s: %s. The "
                "run goes on.", self.rank, self._own_wait(), silent_s, why,
            )  # fmt: skip

    def _reaches_store(self) -> bool:
        """Whether the process that holds a silent store exists, on any host."""
        return bool(self._to_store.reach([address_of(self._store.connection)]))

    def _own_wait(self) -> str:
        statuses = [wait.status() for wait in self._all_waits(0.0)]
        first = next((status for status in statuses if status is not None), None)
        return f"rank {self.rank} waits for {first.of}, and " if first is not None else ""

    def _store_is_gone(self, *, or_more: str) -> str:
        return self._own_wait() + _STORE_GONE.format(or_more=or_more)

    # --- what follows ---

    def _take_up(
        self, diagnosis: Diagnosis, store: RunStore, answers: Sequence[RankStatus] = ()
    ) -> None:
        """Act on the result of a round: end the waits, or log the diagnosis.

        Args:
            diagnosis: Diagnosis of the round.
            store: Keys of the run, over the connection of the calling thread.
            answers: Statuses of all ranks in the round, if this rank has asked.
        """
        if not diagnosis.is_final:
            self._tell(diagnosis)
            return
        if diagnosis.doomed.get(str(self.rank)) == what_is_awaited(self.status(details=False)):
            self._end(diagnosis.text, store, diagnosis.in_calls, answers=answers)
        else:
            if self.rank in diagnosis.in_calls:  # No rank needs to wait for this one.
                store.set(f"raised/{self.rank}", "")
            # The wait is not this rank's, or no longer: the rank finds out at its next wait.
            self._alarmed_step = self.step + 1
            for wait in self._all_waits(watch_settings.ask_after_s):
                asks_at = wait.since + watch_settings.ask_unexpected_after_s
                wait.next_look = min(wait.next_look, asks_at)

    def _tell(self, diagnosis: Diagnosis) -> None:
        """Log who is awaited, and again each time the wait is six times as long."""
        if diagnosis.told_by != self.rank or self._answering is None:
            return
        for wait in self._all_waits(watch_settings.ask_after_s):
            is_meant = wait.is_main and wait.since <= self._answering.answered_at
            if is_meant and wait.for_s >= wait.next_word:
                wait.next_word = wait.for_s * _MORE_WORDS
                logger.warning("%s", diagnosis.text)
                return

    def _end(
        self,
        text: str,
        store: RunStore | None = None,
        in_calls: Sequence[int] = (),
        *,
        answers: Sequence[RankStatus] = (),
        is_store_silent: bool = False,
    ) -> None:
        """End all waits, which provably are in vain.

        Args:
            text: Reason.
            store: Keys of the run, over the connection of the calling thread.
            in_calls: Ranks inside users' collectives. When another rank ends its waits, these
                collectives end too, in an error of the engine. So this rank waits for these ranks
                first.
            answers: Statuses of all ranks in the last round, if this rank has asked.
            is_store_silent: Whether the store answers no request.
        """
        if self.final_text is not None:
            return
        self.final_text = text
        # Without details of this rank: collecting them must not delay the end of the waits.
        known = answers or [self.status(details=False)]
        runs.keep_diagnosis(self._store.run, text, known, of_all_ranks=bool(answers))
        world = dist.group.WORLD  # Read it first: if the store is still ours, so is the group.
        call = self._call if self._is_in_use() else None
        if not self._waits:  # Else the waiting thread raises it.
            logger.error("rank %d: %s", self.rank, text)
        if call is not None:
            raise_in_main_thread(text, call.at)
        if not is_store_silent:
            self._end_agreements(store or self._store, in_calls)
        if call is not None or self._all_waits(0.0):
            # With a device the main thread waits where it reads a number.
            end_if_stuck(self.rank, text, even_on_host=is_store_silent)
        for channel in list(self.channels.values()):  # `close` may clear them meanwhile.
            abort_group(channel.group)
            channel.end_waits()
        if call is not None:
            abort_group(world)

    def _end_agreements(self, store: RunStore, in_calls: Sequence[int]) -> None:
        """End waits for other ranks in the store, when ranks in calls know what to raise."""
        with contextlib.suppress(RuntimeError):
            if self.rank in in_calls:
                store.set(f"raised/{self.rank}", "")
            store.await_keys([f"raised/{rank}" for rank in in_calls], _RAISED_S)
            self._wake_counting_in(store)  # Woken ranks read the final text.

    def _wake_counting_in(self, store: RunStore) -> None:
        for go in list(self._counting_in.values()):
            store.set(go, "")

    # --- answering ---

    def _listen(self) -> None:
        """Answer askers until the process ends or the store has ended."""
        is_over = self._closed.is_set
        store: RunStore | None = None
        while not is_over():
            try:
                if store is None:
                    store = self._store.clone()
                    self._answering = Answering(store, self.rank, self.status)
                answering = self._answering
                assert answering is not None, "it was made with the store"
                if is_over():  # The watchdog was closed before the wake key existed.
                    return
                store.block_until(answering.wake_key, is_over)
                self._listener.clear()
                result = answering.answer(is_over)
                if result.diagnosis is not None and not is_over():
                    self._take_up(result.diagnosis, store)
            except dist.DistNetworkError:  # The store has ended.
                return
            except Exception as error:  # noqa: BLE001 - the watch goes on
                store = None
                if not is_over():
                    self._complain(error)
                    self._closed.wait(_RETRY_S)

    def _complain(self, error: Exception) -> None:
        """Log that the watch met an error and goes on, once a minute."""
        now = time.monotonic()
        if not self._closed.is_set() and (not self._complained or now > self._complained + 60):
            self._complained = now
            logger.warning(
                "rank %d: the watch over ranks met %s: %s. Training and the watch go on.",
                self.rank, type(error).__name__, error,
            )  # fmt: skip

    def status(self, *, details: bool = True) -> RankStatus:
        """Return where this process is."""
        place, stack = place_of(main_frame()), stack_of(main_frame()) if details else ""
        others = self._other_waits(watch_settings.ask_unexpected_after_s)
        call = self._call.call() if self._call is not None else None
        with self.lock:
            # A thread's wait and its issued collectives must be from the same moment.
            found = (wait.status() for wait in [*self._waits_of_threads(), *others])
            wait = next((status for status in found if status is not None), None)
            groups = {
                name: channel.status(details=details)
                for name, channel in list(self.channels.items())
            }
        return RankStatus(
            self.rank,
            socket.gethostname(),
            os.getpid(),
            "runs" if self._is_in_use() else "destroyed",
            self.step,
            place,
            self.error,
            groups,
            wait,
            call if wait is None else None,
            self.final_text,
            stack=stack,
            engine=flight_record(has_captured=self.has_captured) if details else [],
            begun=[lines_in_words(lines) for lines in list(self._begun)] if details else [],
        )

    def _is_in_use(self) -> bool:
        return dist.is_initialized() and torch_groups.default_store() is self.default_store

    def _has_left(self) -> bool:
        """Whether the process group was destroyed; a script may end without doing so."""
        return self._closed.is_set() and not self._is_in_use()

    # --- the end ---

    def linger(self) -> None:
        """Wait for the ends of the other ranks, if this process holds the store.

        Without the store they could not learn why this rank does not come, and healthy ranks would
        print torch's complaints about it.
        """
        if (
            self.rank != 0
            or _is_agents_store()
            or self.final_text is not None
            or self.world_size == 1
        ):
            return
        end = time.monotonic() + watch_settings.silent_after_s
        ranks = range(1, self.world_size)
        with contextlib.suppress(RuntimeError):
            # Ranks that have no mesh so far may never have one. After an error they may still ask.
            hellos = [f"hello/{rank}" for rank in ranks]
            absent = [] if self.has_raised else self._store.missing(hellos)
            missing = [f"end/{rank}" for rank in ranks if f"hello/{rank}" not in absent]
            while time.monotonic() < end:
                missing = self._store.missing(missing)
                # Ranks that were killed write nothing.
                others = (runs.rank_here(self._store.run, int(key[4:])) for key in missing)
                if all(other is not None and other.process_state == "gone" for other in others):
                    return
                time.sleep(_TICK_S)

    def note_error(self, error: BaseException) -> None:
        """Note an exception that left a forward, or that other ranks have to know."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        # The frame of a generator, as of a context manager, does not lead to its caller.
        places = [place for place in map(place_of, reversed(frames)) if place.line]
        place = f" at {places[0]}" if places else ""
        self.error = f"{type(error).__name__}: {error}{place}"
        self._alarmed_step = self.step + 1  # Others may have gone on without it.

    def note_end(self, error: BaseException) -> None:
        """Note an exception that ends the process."""
        self.note_error(error)
        self.has_raised = True

    def close(self, state: str = "ended") -> None:
        """Say that this process takes part no more, and end the threads."""
        with self.lock:  # The clock may find out by itself at the same time.
            if self._closed.is_set():
                return
            self._closed.set()
        self._call = None
        try:
            # A request to a lost store, which does not end, would delay this one.
            if self.world_size > 1 and self._store.silent_s < _STUCK_S:
                with contextlib.suppress(RuntimeError):
                    self._tell_end(state)
        finally:  # A comparison may warn, and a warning may be an error.
            for channel in list(self.channels.values()):
                channel.end_waits()
            self.channels.clear()  # The rest of the process groups may be freed.
            self._free_stores.clear()
            self._listener.close()
            if self._file is not None:
                self._file.unlink(missing_ok=True)

    def _tell_end(self, state: str) -> None:
        last = self.status()
        last.state, last.wait, last.call = state, None, None
        self._store.set(f"end/{self.rank}", last.dump())
        if state != "ended":  # Ranks that wait with these fail without this one.
            self._wake_counting_in(self._store)
        if self._answering is not None:
            self._store.set(self._answering.wake_key, "")
        if state != "raised":
            for compare in at_end:
                compare(self._store, self.world_size)

    def end_threads(self, limit_s: float = _END_S) -> None:
        """Wait for the threads: at the end of Python none may be inside the store.

        A lost store keeps the threads for longer, so the wait for them has a limit.
        """
        end = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0))


def _is_agents_store() -> bool:
    """Whether torchrun's agent holds the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


# --- the watchdog of this process -----------------------------------------------------------------

at_end: list[Any] = []
"""Functions called when this process stops taking part, with the `RunStore` and number of ranks."""

_DESTROYED = (
    "destroy_process_group() has ended the process group of this mesh, so what is sharded over it "
    "cannot communicate any more. Save a checkpoint before that. After init_process_group() make "
    "the mesh and the model anew, and load the checkpoint."
)

_HashStore: Any = dist.HashStore  # type: ignore[attr-defined]  # torch's own list lacks it
_current: Watchdog | None = None
_lock = threading.Lock()
_of_thread = threading.local()


def current_watchdog() -> Watchdog:
    """Return the watchdog of the default process group; the first call makes it.

    Raises:
        StateError: There is no default process group any more.
    """
    global _current  # noqa: PLW0603 - one process, one watchdog
    try:
        store = torch_groups.default_store()
    except ValueError:
        raise StateError(_DESTROYED) from None
    if torch_groups.ranks_are_threads():  # They look alike, so none is asked.
        found: Watchdog | None = getattr(_of_thread, "watchdog", None)
        if found is None or found.default_store is not store:
            found = _of_thread.watchdog = Watchdog(store, _HashStore(), 0, 1)
        return found
    with _lock:
        if _current is None or _current.default_store is not store:
            if _current is not None:
                _current.close("destroyed")
            else:
                _at_start()
            if "fake" in dist.get_backend_config():  # One process is all ranks, so none is asked.
                _current = Watchdog(store, _HashStore(), 0, 1)
            else:
                _current = Watchdog(store, store, dist.get_rank(), dist.get_world_size())
        return _current


def channel_of(group: dist.ProcessGroup | None) -> Channel:
    """Return the channel of a process group (None: the default one), always the same object.

    Raises:
        StateError: The process group has been destroyed.
    """
    group = group or dist.group.WORLD
    assert group is not None, "there is a process group"
    watchdog = current_watchdog()
    channel = watchdog.channels.get(group.group_name)
    if channel is None or channel.group is not group:
        channel = watchdog.channels[group.group_name] = Channel(group, watchdog)
    return channel


def _at_start() -> None:
    """Report the end of this process, and of the process group, to other ranks."""
    torch_groups.around_end_of_world(after=functools.partial(_end_with_group, os.getpid()))
    atexit.register(_say_goodbye, os.getpid())
    if multiprocessing.parent_process() is not None:  # Forked ones may end without `atexit`.
        Finalize(None, _say_goodbye, (os.getpid(),), exitpriority=0)
        wrap(traceback, "print_exc", _note_printed)
    hook = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if _current is not None:
            _current.note_end(error)
        hook(kind, error, trace)

    sys.excepthook = tell


def _note_printed(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Note an exception that ends a process of multiprocessing, which prints it.

    From Python 3.13 on it has been handled when `_say_goodbye` is called.
    """
    error = sys.exception()
    if error is not None and error.__traceback__ is not None and _current is not None:
        catcher = error.__traceback__.tb_frame.f_globals.get("__name__")
        if catcher == "multiprocessing.process":
            _current.note_end(error)
    original(*args, **kwargs)


def _end_with_group(pid: int) -> None:
    """End the threads when the group has ended, so that checks for forgotten threads find none.

    If an exception is on its way, as in a ``finally``, other ranks are informed of it. A forked
    process ends a group that its parent continues to use.
    """
    if _current is None or os.getpid() != pid:
        return
    error = sys.exception()
    if error is not None:
        _current.note_end(error)
    try:
        _current.close("destroyed" if error is None else "raised")
    finally:
        _current.end_threads(_END_OF_GROUP_S)


def _say_goodbye(pid: int) -> None:
    if _current is not None and os.getpid() == pid:  # Not in a forked process.
        # An exception that nobody has caught; multiprocessing's processes end while it is handled.
        error = sys.exception() or getattr(sys, "last_value", None)
        if isinstance(error, SystemExit):
            error = (error.__context__ or error) if error.code else None
        if error is not None and not _current.has_raised:  # Another hook took the place of ours.
            _current.note_end(error)
        _current.close("raised" if _current.has_raised else "ended")
        _current.linger()
        _current.end_threads()
        if _current.world_size > 1:
            # Gloo's threads may be about to free collectives that hold objects of Python. When
            # Python has begun to end, that would abort the process (pytorch/pytorch#190489).
            time.sleep(_LAST_WORKS_S)
