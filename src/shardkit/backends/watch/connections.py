"""Connections to the store, apart from that of the process group, and keys of one run."""

from __future__ import annotations

import itertools
import uuid
from typing import Any

from torch.distributed import distributed_c10d as c10d

_seen: set[str] = set()
"""Runs that this process has taken part in."""


def run_of(store: Any) -> tuple[str, Any]:
    """Return a name that all ranks of a run give it, and the store below all prefixes.

    A process group that was destroyed and made again may have the same store. It is another run.
    """
    for number in itertools.count():
        run = store.compare_set(f"shardkit {number}", "", uuid.uuid4().hex[:12]).decode()
        if run not in _seen:
            break
    _seen.add(run)
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return run, store


def prefix_of(run: str) -> str:
    """Return what the keys of a run begin with."""
    return f"shardkit/{run}"


class Connections:
    """Connections to one store: requests to one object wait for each other.

    To make one takes seconds where no name server answers, so they are used again.
    """

    _known: dict[tuple[str, int], Connections] = {}  # noqa: RUF012 - of the process

    def __init__(self, bottom: Any) -> None:
        self._bottom = bottom
        self._free: list[Any] = []

    @classmethod
    def to(cls, bottom: Any) -> Connections:
        """Return those to a store; the same object for stores at the same place."""
        # Another store may be where one was.
        place = (getattr(bottom, "host", ""), getattr(bottom, "port", id(bottom)))
        known = cls._known.get(place)
        if known is None or known._bottom is not bottom:  # noqa: SLF001 - own class
            known = cls._known[place] = cls(bottom)
        return known

    def take(self, run: str) -> Any:
        """Return a connection for the keys of a run, which nobody else uses."""
        connection = self._free.pop() if self._free else self._bottom.clone()
        return c10d.PrefixStore(prefix_of(run), connection)

    def give_back(self, taken: Any) -> None:
        """Let others use it."""
        self._free.append(taken.underlying_store)
