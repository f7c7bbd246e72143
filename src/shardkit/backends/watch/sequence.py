"""What a rank has issued on one process group, and what it is going to issue next.

Every rank of the group has the same history, hence foretells the same. So a rank that does what was
foretold needs to ask nobody.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import NamedTuple

_NUM_RECENT = 128
_MAX_KNOWN = 1 << 16


class Collective(NamedTuple):
    """What all ranks of a process group must issue alike.

    Attributes:
        kind: ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``, ...
        of: Groups of parameters, or what it is for; may be empty.
        nbytes: Bytes of the whole tensor.
    """

    kind: str
    of: str
    nbytes: int

    def __str__(self) -> str:
        of = f" of {self.of}" if self.of else ""
        return f"{self.kind}{of} ({self.nbytes} bytes)"


class CollectiveSequence:
    """The collectives of one process group, in the order of issue.

    The next one is foretold from the last two: it is what followed them the last time. Training
    repeats itself, so steps without news cost two look-ups for each collective.

    Attributes:
        position: Number of collectives so far.
        num_surprises: How many of them were not foretold.
    """

    def __init__(self) -> None:
        self.position = 0
        self.num_surprises = 0
        self._last: tuple[Collective | None, Collective | None] = (None, None)
        self._next: dict[tuple[Collective | None, Collective | None], Collective] = {}
        self._recent: deque[Collective] = deque(maxlen=_NUM_RECENT)

    @property
    def foretold(self) -> Collective | None:
        """What comes next if all is as it was; None where nothing is known."""
        return self._next.get(self._last)

    def append(self, collective: Collective) -> None:
        """Note that a collective is being issued."""
        last = self._last
        if self._next.get(last) != collective:
            self.num_surprises += 1
            if len(self._next) >= _MAX_KNOWN:  # On all ranks at once: they have the same history.
                self._next.clear()
            self._next[last] = collective
        self._last = (last[1], collective)
        self._recent.append(collective)
        self.position += 1

    def recent(self, number: int = _NUM_RECENT) -> list[tuple[int, str]]:
        """Return the last collectives with their positions, which count from 0."""
        kept = list(itertools.islice(reversed(self._recent), number))[::-1]
        first = self.position - len(kept)
        return [(first + i, str(collective)) for i, collective in enumerate(kept)]
