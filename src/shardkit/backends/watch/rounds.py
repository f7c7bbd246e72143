"""Rounds of questions over the store: the asker wakes all ranks, they answer, it diagnoses.

The keys of round `n`, under the prefix of the run:

| key | written by | holds |
| --- | --- | --- |
| ``rounds`` | the asker | ``n``, the number of rounds so far |
| ``asks/n`` | the asker: the first rank that comes | its rank |
| ``wake/RANK/n`` | the asker, for all ranks at once | nothing; each rank waits for its own key |
| ``answer/n/RANK`` | each rank | its status, without details |
| ``details/RANK`` | each rank, after its answer | its status with details; of the last round only |
| ``result/n`` | the asker, or who finds that it has ended | `Result`: the conclusion, if any |
| ``looked/n/RANK`` | a rank that was asked to look | what silent processes of its machine do |
| ``hello/RANK`` | each rank, once | host, process and its start, machine, where it listens |
| ``end/RANK`` | each rank, once, at its end | its last status |
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from shardkit._processes import machine_id, process_state, start_of
from shardkit._settings import watch_settings
from shardkit.backends.watch.diagnosis import Diagnosis, diagnose
from shardkit.backends.watch.liveness import NOWHERE, Address, Connections
from shardkit.backends.watch.status import ALIVE, LEFT, UNHEARD, RankStatus, from_text, to_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardkit.backends.watch.runs import RunStore

_CONFIRM_S = 1.0
_now = time.monotonic
_DETAILS_S = 1.0
_LOOK_S = 2.0
_MORE_RESULT_S = 4.0  # An asker that takes longer, after the time for answers, has died.
_MAX_ROUNDS = 3
_MAX_WITH_ALL_DETAILS = 16
_NUM_KEPT = 16  # Rounds whose results are kept: new rounds may come faster than a rank reads.


@dataclass(slots=True)
class SilentProcess:
    """The process of a rank that does not answer, for another rank of its machine to look at."""

    rank: int = 0
    pid: int = 0
    start: str = ""  # Start of the process, in the machine's ticks.


@dataclass(slots=True)
class Result:
    """Result of a round."""

    diagnosis: Diagnosis | None = None  # None: nobody waits.
    silent: list[int] = field(default_factory=list)  # Ranks that did not answer.
    # Processes to look at, by the rank that is to look.
    look: dict[str, list[SilentProcess]] = field(default_factory=dict)

    @classmethod
    def load(cls, text: str | bytes) -> Result:
        """Return the result that was written; an empty one if the text is no result."""
        try:
            return from_text(cls, text)
        except ValueError:
            return cls()


class Hello(NamedTuple):
    """How a rank introduces itself."""

    host: str
    pid: int
    start: str  # Start of the process, in the machine's ticks.
    machine: str  # Machine on which the process id is valid.
    address: Address  # Where the process listens.


class Rounds:
    """An asker, which asks all ranks of a run where they are."""

    def __init__(self, store: RunStore, world_size: int, rank: int) -> None:
        self.statuses: list[RankStatus] = []  # Of the last round by rank, if this object asked.
        self.num_rounds = 0  # Number of rounds in which this object asked.
        self.store = store  # Keys of the run, over a separate connection.
        self._world_size = world_size  # Number of ranks.
        # Rank that asks; -1 for a process outside of the run, which never ends the run.
        self._rank = rank
        self._hello: dict[int, Hello] = {}
        self._connections = Connections()  # To ranks that do not answer.
        self._silent_since: dict[int, float] = {}
        self._known: dict[int, str] = {}  # States of silent ranks, as their hosts see them.
        self._suspicion = ""

    def forget(self) -> None:
        """Begin anew with another wait, because silence counts within one wait."""
        self._silent_since.clear()
        self._known.clear()
        self._suspicion = ""

    @property
    def silence_counts_in_s(self) -> float:
        """Seconds until the silence of a rank counts; infinite if no rank is silent."""
        ages = (_now() - since for since in self._silent_since.values())
        left = (watch_settings.silent_after_s - age for age in ages)
        return min((seconds for seconds in left if seconds > 0), default=math.inf)

    def ask(self) -> Diagnosis | None:
        """Let all ranks answer; return the diagnosis. Of several that ask at once, one does.

        A suspicion is checked again at once, and other processes of the same machine look at silent
        processes. This takes up to three rounds.

        Raises:
            RuntimeError: The store does not answer, or has ended.
        """
        diagnosis = None
        self._known = {rank: state for rank, state in self._known.items() if state == "gone"}
        for _ in range(_MAX_ROUNDS):
            result = self._ask_or_join()
            diagnosis = result.diagnosis
            if self._rank < 0 and not self.statuses:
                continue  # A process outside of the run shows all statuses, so it asks itself.
            if diagnosis is None or diagnosis.is_final:
                break
            if diagnosis.suspicion:
                time.sleep(_CONFIRM_S)
            elif not result.look:
                break
        return diagnosis

    def _ask_or_join(self) -> Result:
        """Return the result of a round: of the one that runs, if there is one, else of a new one.

        A rank that answers a round waits for its result before it answers the next one, so ranks
        would seem silent to whoever asks in between.
        """
        number = self.store.add("rounds", 0)
        if number and not self.store.has(f"result/{number}"):
            result = self._result_of(number)
            if result is not None:
                return result
        number += 1
        if self.store.claim(f"asks/{number}", str(self._rank)):
            return self._ask_round(number)
        return self._result_of(number) or Result()

    def _result_of(self, number: int) -> Result | None:
        """Return the result of another asker's round; None: the asker has ended before it."""
        self.statuses = []
        self._suspicion = ""
        has_ended = functools.partial(self._has_ended, int(self.store.get(f"asks/{number}")))
        if not self.store.await_keys([f"result/{number}"], _result_s(), has_ended):
            # Ranks that have answered wait for a result. Then the next round can begin.
            self.store.claim(f"result/{number}", to_text(Result()))
            if self.store.add("rounds", 0) < number:
                self.store.set("rounds", str(number))
                self._wake(number)
            return None
        result = Result.load(self.store.get(f"result/{number}"))
        if result.diagnosis is not None:
            self._suspicion = result.diagnosis.suspicion
        for rank in range(self._world_size):
            if rank in result.silent:
                self._silent_since.setdefault(rank, _now())
            else:
                self._silent_since.pop(rank, None)
        return result

    def _has_ended(self, asker: int) -> bool:
        return asker >= 0 and self._unheard(asker).state in LEFT

    def _ask_round(self, number: int) -> Result:
        store = self.store
        self.num_rounds += 1
        store.set("rounds", str(number))  # Not `add`: a rank that took this one for dead set it.
        self._wake(number)
        self.statuses = self._collect(number)
        diagnosis = self._diagnose()
        wanted: Sequence[int] = diagnosis.details_of if diagnosis is not None else []
        if self._rank < 0 or self._world_size <= _MAX_WITH_ALL_DETAILS:
            wanted = range(self._world_size)
        elif diagnosis is not None and diagnosis.is_final:
            wanted = [*wanted, *map(int, diagnosis.doomed)][:_MAX_WITH_ALL_DETAILS]
        if wanted and self._add_details(number, wanted):
            diagnosis = self._diagnose()
        self._suspicion = diagnosis.suspicion if diagnosis is not None else ""
        silent = [status.rank for status in self.statuses if status.state == "silent"]
        result = Result(diagnosis, silent, self._who_shall_look())
        # An observer never ends the run; and diagnoses wait for the results of looks.
        is_told = self._rank >= 0 and not result.look
        told = result if is_told else Result(None, silent, result.look)
        store.set(f"result/{number}", to_text(told))
        self._await_looks(number, result)
        for key in (f"asks/{number - _NUM_KEPT}", f"result/{number - _NUM_KEPT}"):
            store.delete(key)
        return result

    def _diagnose(self) -> Diagnosis | None:
        limit = watch_settings.silent_after_s
        return diagnose(self.statuses, silent_after_s=limit, suspicion=self._suspicion)

    def _wake(self, number: int) -> None:
        """Wake all ranks by one request."""
        self.store.set_all({f"wake/{rank}/{number}": "" for rank in range(self._world_size)})

    # --- answers ---

    def _collect(self, number: int) -> list[RankStatus]:
        """Return the answers of all ranks; for ranks that do not answer, what is known of them."""
        keys = [f"answer/{number}/{rank}" for rank in range(self._world_size)]
        self.store.await_keys(keys, watch_settings.answer_s)
        missing = set(self.store.missing(keys))
        there = [rank for rank, key in enumerate(keys) if key not in missing]
        texts = self.store.get_all([keys[rank] for rank in there]) if there else []
        by_rank: dict[int, RankStatus] = {}
        for rank, text in zip(there, texts, strict=True):
            status = _read(text, rank)
            if status is not None:
                by_rank[rank] = status
                self._silent_since.pop(rank, None)
                self._known.pop(rank, None)
        statuses = [by_rank.get(rank) or self._unheard(rank) for rank in range(self._world_size)]
        self._reach(statuses)
        for status in statuses:
            if status.state in ALIVE:
                self._silent_since[status.rank] = _now()
        return statuses

    def _reach(self, statuses: Sequence[RankStatus]) -> None:
        """Find out which silent processes exist."""
        silent = {s.rank: self._hello[s.rank].address for s in statuses if s.state == "silent"}
        reached = self._connections.reach(silent.values())
        for rank, address in silent.items():
            if address in reached:
                statuses[rank].state = "reachable"

    def _unheard(self, rank: int) -> RankStatus:
        """Return the known state of a rank that has not answered."""
        if self.store.has(f"end/{rank}"):
            status = _read(self.store.get(f"end/{rank}"), rank)
            if status is not None:
                return status
        if rank not in self._hello and self.store.has(f"hello/{rank}"):
            self._hello[rank] = _read_hello(self.store.get(f"hello/{rank}"))
        if rank not in self._hello:
            return RankStatus(rank, state="unborn")
        since = self._silent_since.setdefault(rank, _now() - watch_settings.answer_s)
        host, pid, start, machine, _ = self._hello[rank]
        is_here = machine == machine_id()
        state = process_state(pid, start) if is_here else self._known.get(rank, "silent")
        return RankStatus(rank, host, pid, state, silent_s=_now() - since)

    def _add_details(self, number: int, ranks: Sequence[int]) -> bool:
        """Fill in the details of ranks that have answered; return whether there are any."""
        ranks = [rank for rank in ranks if self.statuses[rank].state not in UNHEARD]
        ranks = [rank for rank in ranks if not self.statuses[rank].stack]
        keys = [f"details/{rank}" for rank in ranks]
        self.store.await_keys(keys, _DETAILS_S)
        found = False
        for rank, key in zip(ranks, keys, strict=True):
            if not self.store.has(key):
                continue
            round_of, _, text = self.store.get(key).partition(b" ")
            status = _read(text, rank)
            if status is not None and round_of == str(number).encode():
                self.statuses[rank] = status
                found = True
        return found

    # --- what hosts say of their processes ---

    def _who_shall_look(self) -> dict[str, list[SilentProcess]]:
        """Return silent processes on other machines, by a rank that has answered from there.

        That rank is on the same machine, so process ids are valid there.
        """
        unseen = ("silent", "reachable")
        silent = [s for s in self.statuses if s.state in unseen and s.rank not in self._known]
        look: dict[str, list[SilentProcess]] = {}
        if not silent:
            return look
        awake = [s.rank for s in self.statuses if s.state not in UNHEARD]
        keys = {f"hello/{rank}": rank for rank in awake if rank not in self._hello}
        for key in self.store.missing([*keys]):  # Reading a missing key would block forever.
            del keys[key]
        unknown = [*keys.values()]
        texts = self.store.get_all([*keys]) if keys else []
        self._hello |= dict(zip(unknown, map(_read_hello, texts), strict=True))
        by_machine = {
            self._hello[rank].machine: rank for rank in reversed(awake) if rank in self._hello
        }
        for status in silent:
            _, pid, start, machine, _ = self._hello[status.rank]
            if machine in by_machine:
                process = SilentProcess(status.rank, pid, start)
                look.setdefault(str(by_machine[machine]), []).append(process)
        return look

    def _await_looks(self, number: int, result: Result) -> None:
        """Take over what other ranks see of the processes on their machines."""
        for looker in result.look:
            key = f"looked/{number}/{looker}"
            if self.store.await_keys([key], _LOOK_S):
                self._known |= _read_looked(self.store.get(key))
                self.store.delete(key)
        asked = {process.rank for processes in result.look.values() for process in processes}
        if asked.isdisjoint(self._known):
            result.look = {}  # No rank has answered, so asking again does not help.


class Answering:
    """The part of one rank that answers the rounds of a run."""

    def __init__(self, store: RunStore, rank: int, status: Callable[[], RankStatus]) -> None:
        self.store = store  # Keys of the run, over a separate connection.
        self._rank = rank  # This rank.
        self._status = status  # Function that returns where this process is.
        self._number = store.add("rounds", 0)
        if store.has(f"wake/{rank}/{self._number}"):  # That round runs: it can still be answered.
            self._number -= 1
        self._answered = 0
        self.answered_at = 0.0  # Time of the last answer, of `time.monotonic`.

    @property
    def wake_key(self) -> str:
        """Key that wakes this rank next, for an answer or for its end."""
        return f"wake/{self._rank}/{self._number + 1}"

    def answer(self, is_over: Callable[[], bool]) -> Result:
        """Answer the round of the `wake_key`, which exists; return the result of the round.

        Args:
            is_over: Function that returns whether this rank no longer needs the result.

        Raises:
            RuntimeError: The store does not answer, or has ended.
        """
        store, rank = self.store, self._rank
        store.delete(self.wake_key)
        self._number = number = self._number + 1
        if is_over() or store.has(self.wake_key):  # A later round has begun meanwhile.
            return Result()
        self.answered_at = _now()
        status = self._status()
        store.set(f"answer/{number}/{rank}", status.dump(details=False))
        store.set(f"details/{rank}", f"{number} {status.dump()}")
        if self._answered:
            store.delete(f"answer/{self._answered}/{rank}")
        self._answered = number
        if not store.await_keys([f"result/{number}"], _result_s(), is_over):
            return Result()
        result = Result.load(store.get(f"result/{number}"))
        if asked := result.look.get(str(rank)):
            seen = {str(other.rank): process_state(other.pid, other.start) for other in asked}
            store.set(f"looked/{number}/{rank}", json.dumps(seen))
        return result


def _result_s() -> float:
    """Return the seconds after which a round without a result has lost its asker."""
    return watch_settings.answer_s + _MORE_RESULT_S


def hello(host: str, pid: int, address: Address = NOWHERE) -> str:
    """Return the text by which a rank introduces itself once."""
    return json.dumps(Hello(host, pid, start_of(pid), machine_id(), address))


def _read_hello(text: bytes) -> Hello:
    try:
        host, pid, start, machine, (name, port) = json.loads(text)
        return Hello(str(host), int(pid), str(start), str(machine), Address(str(name), int(port)))
    except (TypeError, ValueError, RecursionError):
        return Hello("?", 0, "", "?", NOWHERE)


def _read(text: bytes, rank: int) -> RankStatus | None:
    """Return a rank's status; None if it cannot be read."""
    try:
        status = RankStatus.load(text)
    except ValueError:
        return None
    return dataclasses.replace(status, rank=rank)


def _read_looked(text: bytes) -> dict[int, str]:
    """Return the states of processes by rank, as a rank on their machine sees them."""
    try:
        found = {int(rank): str(state) for rank, state in json.loads(text).items()}
    except (AttributeError, TypeError, ValueError, RecursionError):
        return {}
    return {rank: state for rank, state in found.items() if state in UNHEARD}
