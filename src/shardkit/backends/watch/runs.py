"""The store of a run as the watch uses it, and files that let other terminals find runs.

Each rank leaves a small file in a folder of its user while it runs, so that another terminal can
find it. A diagnosis that ended a run leaves a file that stays. Nothing depends on these files: if
there is no place for them, as on a read-only disk, there are none.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import stat
import tempfile
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardkit._processes import machine_id, process_state
from shardkit.backends.watch.status import RankStatus, from_text, to_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


# --- keys of one run in a store -------------------------------------------------------------------


_FOREVER = timedelta(days=30)  # Torch writes a warning when a wait for a store times out.
_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.25
_file_store: Any = dist.FileStore  # type: ignore[attr-defined]  # torch's own list lacks it
_tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch's own list lacks it

_seen: set[str] = set()  # Runs that this process has taken part in.


class RunStore:
    """Keys of one run in a store, over a connection.

    Requests on one connection wait for each other, so a thread that waits long in the store has its
    own connection. A store whose process has ended raises `torch.distributed.DistNetworkError`.
    """

    def __init__(self, run: str, connection: Any) -> None:
        self.run = run  # Name of the run, with which the keys begin.
        self.connection = connection  # Store below all prefixes.
        self._keys: Any = c10d.PrefixStore(f"shardkit/{run}", connection)
        self._asked_at: float | None = None
        # Each look locks the file; a wait of torch looks 100 times per second.
        self._is_file = isinstance(connection, _file_store)

    def clone(self) -> RunStore:
        """Return the same over a new connection.

        Raises:
            DistNetworkError: The store has ended.
        """
        self.has("x")  # Without this a missing store shows only after minutes of connecting.
        return RunStore(self.run, self.connection.clone())

    # Each of these is one request.

    def set(self, key: str, value: str) -> None:
        """Write a key."""
        self._request(self._keys.set, key, value)

    def set_all(self, values: Mapping[str, str]) -> None:
        """Write many keys, by one request if the store can."""
        if self._keys.has_extended_api():
            self._request(self._keys.multi_set, list(values), list(values.values()))
        else:
            for key, value in values.items():
                self.set(key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key that exists."""
        value: bytes = self._request(self._keys.get, key)
        return value

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that exist, by one request if the store can."""
        if self._keys.has_extended_api():
            values: list[bytes] = self._request(self._keys.multi_get, list(keys))
            return values
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        """Add to a number; return the sum."""
        return int(self._request(self._keys.add, key, amount))

    def claim(self, key: str, value: str) -> bool:
        """Write a key that does not exist; return whether this call, or an equal one, wrote it."""
        found: bytes = self._request(self._keys.compare_set, key, "", value)
        return found.decode() == value

    def delete(self, key: str) -> None:
        """Delete a key if it exists."""
        self._request(self._keys.delete_key, key)

    def has(self, *keys: str) -> bool:
        """Whether all keys exist."""
        return not keys or bool(self._request(self._keys.check, list(keys)))

    def _request(self, call: Callable[..., Any], *args: Any) -> Any:
        self._asked_at = time.monotonic()
        try:
            return call(*args)
        finally:
            self._asked_at = None

    @property
    def silent_s(self) -> float:
        """Seconds for which the store has not answered a request; other threads read it."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    # These are several.

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return the keys that do not exist, by few requests if few are missing."""
        if self.has(*keys):
            return []
        if len(keys) == 1:
            return list(keys)
        half = len(keys) // 2
        return self.missing(keys[:half]) + self.missing(keys[half:])

    def await_keys(
        self, keys: Sequence[str], limit_s: float, is_over: Callable[[], bool] = lambda: False
    ) -> bool:
        """Return whether all keys exist within a time. It asks less and less often.

        Args:
            keys: Awaited keys.
            limit_s: Seconds; ``math.inf`` for no limit.
            is_over: Function that returns whether to give up, called each time.
        """
        end, pause = time.monotonic() + limit_s, _FIRST_POLL_S
        while not self.has(*keys):
            if is_over() or time.monotonic() >= end:
                return False
            time.sleep(min(pause, max(end - time.monotonic(), 0)))
            pause = min(pause * 1.5, _LAST_POLL_S)
        return True

    def block_until(self, key: str, is_over: Callable[[], bool]) -> None:
        """Return when a key exists. Meanwhile there are no requests, except on files.

        Args:
            key: Awaited key.
            is_over: Function that returns whether to give up; called between looks into a file.
        """
        if self._is_file:
            self.await_keys([key], float("inf"), is_over)
        else:
            self._keys.wait([key], _FOREVER)


def store_of_run(store: Any) -> RunStore:
    """Return the store of a process group, with a run name that is equal on all of its ranks.

    A process group that was destroyed and made again may have the same store, but is another run.
    """
    for number in itertools.count():
        run = store.compare_set(f"shardkit {number}", "", uuid.uuid4().hex[:12]).decode()
        if run not in _seen:
            break
    _seen.add(run)
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return RunStore(run, store)


def connect(run: str, host: str, port: int, *, limit_s: float, is_master: bool = False) -> RunStore:
    """Return the store of a run over a new connection to a port that the master opens."""
    limit = timedelta(seconds=limit_s)
    options = {"is_master": is_master, "timeout": limit, "wait_for_workers": False}
    return RunStore(run, _tcp_store(host, port, **options))


# --- runs of this host ----------------------------------------------------------------------------

_MAX_DIAGNOSES = 20
_MAX_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class RankFile:
    """One rank of a run, on this host."""

    name: str  # Name of the run.
    host: str  # Host of the store.
    port: int  # Port of the store.
    world_size: int
    rank: int
    pid: int
    started: float  # Seconds since 1970.
    machine: str = ""  # Machine on which the process id is valid.
    start: str = ""  # Start of the process, in the machine's ticks.

    @property
    def process_state(self) -> str:
        """State of the process, if it is on this machine."""
        return process_state(self.pid, self.start)


def folder() -> Path:
    """Return the folder of the files, named by user id, because not every user has a name."""
    return Path(tempfile.gettempdir(), f"shardkit-{os.getuid()}")


def _own_folder(*, make: bool = False) -> Path | None:
    """Return the folder if only this user owns it; None: it is another's, a link, or missing.

    In a place where all users write, others may make folders and links of this name.
    """
    try:
        path = folder()  # Raises where no folder for temporary files can be written to.
        if make:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
        found = path.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return path if is_own and not found.st_mode & 0o077 else None


def register(run: RankFile) -> Path | None:
    """Leave a file about a rank and return it; None: this host has no place for it.

    Files of killed runs are removed.
    """
    own = _own_folder(make=True)
    if own is None:
        return None
    running()
    path = own / f"{run.name}-{run.rank}.run"
    try:
        path.write_text(to_text(run), "utf-8")
    except OSError:
        return None
    return path


def running() -> list[RankFile]:
    """Return the ranks on this host, newest first; remove the files of runs that have ended.

    Files of ended ranks stay while a rank of the run is there, which looks for them.
    """
    known = [*_runs("*")]
    # Whether processes on other machines still run cannot be known here.
    here = machine_id()
    found = [
        run for _, run in known if run.machine not in ("", here) or run.process_state != "gone"
    ]
    names = {run.name for run in found}
    for path, run in known:
        if run.name not in names:
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted(found, key=lambda run: (-run.started, run.rank))


def rank_here(name: str, rank: int) -> RankFile | None:
    """Return a run's rank if its process is on this machine; it may have ended."""
    found = (run for _, run in _runs(f"{name}-{rank}"))
    return next((run for run in found if run.machine == machine_id()), None)


def keep_diagnosis(
    name: str, text: str, statuses: Sequence[RankStatus], *, of_all_ranks: bool
) -> None:
    """Leave a file with the diagnosis that ended a run, and where ranks were.

    A file with the knowledge of a single rank does not replace one that another rank has left.
    """
    own = _own_folder(make=True)
    if own is None:
        return
    content = {"text": text, "answers": [status.dump() for status in statuses], "at": time.time()}
    with contextlib.suppress(OSError):
        with (own / f"{name}.diagnosis").open(
            "w" if of_all_ranks else "x", encoding="utf-8"
        ) as file:
            json.dump(content, file)
        for old in _diagnoses()[_MAX_DIAGNOSES:]:
            old.unlink()


def last_diagnosis() -> dict[str, Any] | None:
    """Return the diagnosis that ended the last run on this host: text, answers and time."""
    for path in _diagnoses():
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(_read(path))
            return found
    return None


def _runs(pattern: str) -> Iterator[tuple[Path, RankFile]]:
    """Yield the files that can be read."""
    for path in _files(f"{pattern}.run"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            yield path, from_text(RankFile, _read(path))


def _files(pattern: str) -> list[Path]:
    own = _own_folder()
    return [*own.glob(pattern)] if own is not None else []


def _read(path: Path) -> str:
    """Return the text of a file of sensible size.

    Raises:
        OSError: The file cannot be read, or is not of such a size.
    """
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_NBYTES:
        msg = f"{path} is no file of a run"
        raise OSError(msg)
    return path.read_text("utf-8")


def _diagnoses() -> list[Path]:
    def age(path: Path) -> float:
        try:
            return -path.stat().st_mtime
        except OSError:
            return 0.0

    return sorted(_files("*.diagnosis"), key=age)
