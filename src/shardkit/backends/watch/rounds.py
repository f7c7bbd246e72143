"""A round of questions over the store: all ranks are woken, each answers, who asked judges."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardkit._watch_settings import watch_settings
from shardkit.backends.watch.answer import Answer
from shardkit.backends.watch.machine import machine_id
from shardkit.backends.watch.verdict import Verdict, judge

_ANSWER_S = 4.0
VERDICT_S = timedelta(seconds=2 * _ANSWER_S)
"""How long a verdict takes at the most, once a round has begun."""


class Rounds:
    """Asks all ranks of a run where they are.

    Args:
        store: For this alone: requests to it block others of the same object.
        world_size: Number of ranks.
        rank: Who asks; -1 for one that is not of the run.

    Attributes:
        store: As given.
        answers: Of the last round that was asked here.
    """

    def __init__(self, store: Any, world_size: int, rank: int) -> None:
        self.answers: list[Answer] = []
        self.store = store
        self._world_size = world_size
        self._rank = rank
        self._silent_since: dict[int, float] = {}

    def ask(self) -> Verdict | None:
        """Have all ranks answer; return what follows. Of several that ask at once, one does.

        Raises:
            RuntimeError: The store does not answer.
        """
        store = self.store
        number = int(store.add("rounds", 0)) + 1
        if number > 1 and not store.check([f"verdict/{number - 1}"]):
            with contextlib.suppress(dist.DistStoreError):  # Else who asked is gone.
                return read_verdict(store, number - 1)
        if int(store.compare_set(f"asks/{number}", "", str(self._rank))) != self._rank:
            try:
                return read_verdict(store, number)
            except dist.DistStoreError:  # Who asked is gone.
                if int(store.add("rounds", 0)) < number:
                    store.add("rounds", 1)
                return None
        store.add("rounds", 1)
        for rank in range(self._world_size):
            store.set(f"wake/{rank}", "")
        self.answers = self._collect(number)
        verdict = judge(self.answers, watch_settings.ask_after_s)
        text = "" if verdict is None else json.dumps(dataclasses.asdict(verdict))
        store.set(f"verdict/{number}", text)
        for name in ("asks", "verdict", *(f"answer/{rank}" for rank in range(self._world_size))):
            store.delete_key(f"{name}/{number - 2}")
        return verdict

    def _collect(self, number: int) -> list[Answer]:
        """Return the answers of all ranks; of those that do not answer what is known of them."""
        keys = [f"answer/{rank}/{number}" for rank in range(self._world_size)]
        with contextlib.suppress(dist.DistStoreError):
            self.store.wait(keys, timedelta(seconds=_ANSWER_S))
        return [self._answer_of(rank, key) for rank, key in enumerate(keys)]

    def _answer_of(self, rank: int, key: str) -> Answer:
        for known in (key, f"end/{rank}"):
            if self.store.check([known]):
                self._silent_since.pop(rank, None)
                return Answer.load(self.store.get(known))
        since = self._silent_since.setdefault(rank, time.monotonic() - _ANSWER_S)
        if not self.store.check([f"hello/{rank}"]):
            return Answer(rank, state="unborn")
        host, pid, machine = json.loads(self.store.get(f"hello/{rank}"))
        state = _process_state(pid) if machine == machine_id() else "silent"
        return Answer(rank, host, pid, state, silent_s=time.monotonic() - since)


def read_verdict(store: Any, number: int) -> Verdict | None:
    """Return what follows from a round, when it is there.

    Raises:
        DistStoreError: It does not come.
    """
    key = f"verdict/{number}"
    store.wait([key], VERDICT_S)
    content = store.get(key)
    return Verdict(**json.loads(content)) if content else None


def _process_state(pid: int) -> str:
    """Return what a silent process of this host does, as `Answer.state`."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "gone" if sys.platform.startswith("linux") else "silent"
    letter = status.rsplit(")", 1)[1].split()[0]
    if letter in "ZXx":
        return "gone"
    return "stopped" if letter == "T" else "busy"
