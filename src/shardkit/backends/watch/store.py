"""The store of a process group as the watch uses it: any kind of store, keys of one run."""

from __future__ import annotations

import itertools
import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_FOREVER = timedelta(days=30)  # Torch writes a warning where a wait for a store runs out.
_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.25
_file_store: Any = dist.FileStore  # type: ignore[attr-defined]  # torch's own list lacks it
_tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch's own list lacks it

_seen: set[str] = set()
"""Runs that this process has taken part in."""


class RunStore:
    """Keys of one run in a store, over a connection.

    Requests to one connection wait for each other, so a thread that waits in the store for long has
    one of its own. A store whose process has ended raises `torch.distributed.DistNetworkError`.

    Args:
        run: Name of the run, of which the keys begin.
        connection: Store below all prefixes.
    """

    def __init__(self, run: str, connection: Any) -> None:
        self.run = run
        self.connection = connection
        self._keys: Any = c10d.PrefixStore(f"shardkit/{run}", connection)
        self._asked_at: float | None = None
        # A file is locked for each look: 100 of them a second, in a wait of torch's.
        self._is_file = isinstance(connection, _file_store)

    def clone(self) -> RunStore:
        """Return the same over a new connection.

        Raises:
            DistNetworkError: The store is gone.
        """
        self.has("x")  # Else that is known only after minutes of trying to connect.
        return RunStore(self.run, self.connection.clone())

    # Each of these is one request.

    def set(self, key: str, value: str) -> None:
        """Write a key."""
        self._request(self._keys.set, key, value)

    def set_all(self, values: Mapping[str, str]) -> None:
        """Write many keys by one request, where the store can."""
        if self._keys.has_extended_api():
            self._request(self._keys.multi_set, list(values), list(values.values()))
        else:
            for key, value in values.items():
                self.set(key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there."""
        value: bytes = self._request(self._keys.get, key)
        return value

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that are there, by one request where the store can."""
        if self._keys.has_extended_api():
            values: list[bytes] = self._request(self._keys.multi_get, list(keys))
            return values
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        """Add to a number; return the sum."""
        return int(self._request(self._keys.add, key, amount))

    def claim(self, key: str, value: str) -> bool:
        """Write a key that is not there; return whether this call, or one like it, did."""
        found: bytes = self._request(self._keys.compare_set, key, "", value)
        return found.decode() == value

    def delete(self, key: str) -> None:
        """Delete a key, if it is there."""
        self._request(self._keys.delete_key, key)

    def has(self, *keys: str) -> bool:
        """Whether all keys are there."""
        return not keys or bool(self._request(self._keys.check, list(keys)))

    def num_keys(self) -> int:
        """Return how many keys the whole store has."""
        return int(self._request(self._keys.num_keys))

    def _request(self, call: Callable[..., Any], *args: Any) -> Any:
        self._asked_at = time.monotonic()
        try:
            return call(*args)
        finally:
            self._asked_at = None

    @property
    def silent_s(self) -> float:
        """Seconds for which the store has not answered a request; for other threads to look at."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    # These are several.

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return the keys that are not there: few requests if few are missing."""
        if self.has(*keys):
            return []
        if len(keys) == 1:
            return list(keys)
        half = len(keys) // 2
        return self.missing(keys[:half]) + self.missing(keys[half:])

    def await_keys(
        self, keys: Sequence[str], limit_s: float, is_over: Callable[[], bool] = lambda: False
    ) -> bool:
        """Return whether all keys are there within a time. Asks more and more seldom.

        Args:
            keys: Keys that are awaited.
            limit_s: Seconds; ``math.inf`` for no limit.
            is_over: Function that says whether to give up, asked each time.
        """
        end, pause = time.monotonic() + limit_s, _FIRST_POLL_S
        while not self.has(*keys):
            if is_over() or time.monotonic() >= end:
                return False
            time.sleep(min(pause, max(end - time.monotonic(), 0)))
            pause = min(pause * 1.5, _LAST_POLL_S)
        return True

    def block_until(self, key: str, is_over: Callable[[], bool]) -> None:
        """Return when a key is there. No request while nothing happens, but for files.

        Args:
            key: Key that is awaited.
            is_over: Function that says whether to give up; asked between looks into a file.
        """
        if self._is_file:
            self.await_keys([key], float("inf"), is_over)
        else:
            self._keys.wait([key], _FOREVER)


def store_of_run(store: Any) -> RunStore:
    """Return the store of a process group, for keys of a run that all of its ranks name alike.

    A process group that was destroyed and made again may have the same store. It is another run.
    """
    for number in itertools.count():
        run = store.compare_set(f"shardkit {number}", "", uuid.uuid4().hex[:12]).decode()
        if run not in _seen:
            break
    _seen.add(run)
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return RunStore(run, store)


def connect(run: str, host: str, port: int, limit: timedelta) -> RunStore:
    """Return the store of a run of other processes."""
    return RunStore(run, _tcp_store(host, port, is_master=False, timeout=limit))
