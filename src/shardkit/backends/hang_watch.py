"""An error instead of a hang: finds out why a wait on gloo does not end.

Ranks that issue different collectives wait for each other forever. A rank that has waited long
publishes what it has issued in the process group's store, and reads what the others published. If
they differ, all ranks end the wait with an error that names both sides.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from shardkit import _compat
from shardkit._errors import RankMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence


PATIENCE_S = 5.0
"""A wait this long is looked into."""
DEADLOCK_S = 10.0
"""All ranks waiting this much longer after unequal numbers of collectives: a deadlock."""
_PERIOD_S = 0.5
_PROBE_TAG = 7


class Progress(Protocol):
    """What this rank has issued since ranks last agreed."""

    def snapshot(self) -> list[list[int]]:
        """Return it as lists, for the other ranks."""

    def difference(self, snapshots: Sequence[list[list[int]]]) -> str | None:
        """Return what differs between ranks' snapshots, as an error message; None if nothing."""

    def contradicts(self, snapshots: Sequence[list[list[int]]]) -> bool:
        """Return whether snapshots differ even where they overlap, whoever is ahead."""


class HangWatch:
    """Watches the waits of one root's groups, from a thread that sleeps while none is long."""

    def __init__(self) -> None:
        self.progress: Progress | None = None
        self._group: dist.ProcessGroup | None = None
        self._since = 0.0
        self._count = 0
        self._beat = 0
        self._seen: dict[str, Any] = {}
        self._verdict: str | None = None
        self._thread: threading.Thread | None = None

    def wait(self, works: Sequence[dist.Work], group: dist.ProcessGroup) -> None:
        """Wait for work of one process group.

        Raises:
            RankMismatchError: The ranks of the group have issued different collectives.
        """
        self._count += 1
        self._since = time.monotonic()
        self._group = group
        if self._thread is None and self.progress is not None:
            self._thread = threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True)
            self._thread.start()
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            verdict = self._verdict or self._ask_after_error(group)
            if verdict is not None:
                raise RankMismatchError(verdict) from error
            raise
        finally:
            self._group = None

    def _ask_after_error(self, group: dist.ProcessGroup) -> str | None:
        """Find out whether the ranks disagree: unequal sizes make gloo raise an error."""
        if self.progress is None:
            return None
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            found = self._compare(group, self._count, final=True)
            if found is not None:
                return found
            time.sleep(_PERIOD_S)
        return None

    def look(self) -> None:
        """Look into the current wait, if it is long; called by the thread."""
        group, count, since = self._group, self._count, self._since
        if group is None or time.monotonic() - since < PATIENCE_S:
            return
        is_old = time.monotonic() - since > PATIENCE_S + DEADLOCK_S
        verdict = self._compare(group, count, final=is_old)
        if verdict is None or self._group is not group or self._count != count:
            return
        self._verdict = verdict
        _break_off(group)

    def _compare(self, group: dist.ProcessGroup, count: int, *, final: bool) -> str | None:
        """Publish this rank's state, compare with what others are publishing.

        Only ranks that go on publishing the same wait count: what another left behind is old.

        Args:
            group: The ranks.
            count: Which wait this is.
            final: All ranks having stopped after different numbers of collectives is enough.
        """
        assert self.progress is not None
        store = _compat.default_store()
        # Ranks may wait in different groups over the same ranks.
        ranks = dist.get_process_group_ranks(group)
        prefix = f"shardkit/{'-'.join(map(str, ranks))}"
        self._beat += 1
        mine = self.progress.snapshot()
        store.set(f"{prefix}/{group.rank()}", json.dumps([count, self._beat, mine]))
        snapshots = []
        for rank in range(len(ranks)):
            key = f"{prefix}/{rank}"
            if not store.check([key]):
                continue
            seen, self._seen[key] = self._seen.get(key), json.loads(store.get(key))
            count_now, beat, snapshot = self._seen[key]
            if rank == group.rank():
                snapshots.append(mine)
            elif seen is not None and seen[0] == count_now and seen[1] != beat:
                snapshots.append(snapshot)
        if self.progress.contradicts(snapshots) or (final and len(snapshots) == len(ranks)):
            return self.progress.difference(snapshots)
        return None


def _watch(reference: weakref.ref[HangWatch]) -> None:
    """Look from time to time, as long as the root lives."""
    while True:
        time.sleep(_PERIOD_S)
        watch = reference()
        if watch is None:
            return
        try:
            watch.look()
        except (RuntimeError, dist.DistStoreError):
            return  # The process group is gone.
        del watch  # Not kept alive while this sleeps.


def _break_off(group: dist.ProcessGroup) -> None:
    """End all waits of the group: a receive that times out closes gloo's connections."""
    source = (group.rank() + 1) % group.size()
    probe = dist.irecv(torch.zeros(1), group=group, group_src=source, tag=_PROBE_TAG)
    assert probe is not None  # This rank is in the group.
    try:
        probe.wait(timedelta(milliseconds=1))
    except RuntimeError:
        return
