"""The station of this process, and what is told when the process ends."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardkit import _compat
from shardkit.backends.watch.station import Station

if TYPE_CHECKING:
    from types import TracebackType

_HashStore: Any = dist.HashStore  # type: ignore[attr-defined]  # torch's own list lacks it
_current: Station | None = None
_lock = threading.Lock()


def current_station() -> Station:
    """Return the station of the default process group; made when it is first asked for."""
    global _current  # noqa: PLW0603 - one process, one station
    store = _compat.default_store()
    with _lock:
        if _current is None or _current.default_store is not store:
            if _current is not None:
                _current.close("destroyed")
            else:
                _at_start()
            _current = _new_station(store)
        return _current


def _new_station(store: Any) -> Station:
    if "fake" in dist.get_backend_config():  # One process stands for all: it has nobody to ask.
        return Station(store, _HashStore(), 0, 1)
    return Station(store, store, dist.get_rank(), dist.get_world_size())


def _at_start() -> None:
    """Have the end of this process told."""
    atexit.register(_say_goodbye, os.getpid())
    hook = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if _current is not None:
            _current.note_error(error)
            _current.has_raised = True
        hook(kind, error, trace)

    sys.excepthook = tell


def _say_goodbye(pid: int) -> None:
    if _current is not None and os.getpid() == pid:  # Not in a process that was forked.
        _current.close("raised" if _current.has_raised else "ended")
        _current.linger()
        _current.end_threads()
