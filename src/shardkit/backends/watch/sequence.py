"""What a rank has issued on one process group, and what it is going to issue next.

Every rank of the group has the same history, hence foretells the same. So a rank that does what was
foretold needs to ask nobody.
"""

from __future__ import annotations

from typing import NamedTuple

NUM_RECENT = 128
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

    The next one is read off the history: a mark runs through it beside the present, and what comes
    after the mark is foretold. As long as that is right the mark goes on, so that a step of any
    length, with any number of micro-batches, is known from the step before it. After a surprise the
    mark jumps to where the last two collectives came one after the other before.

    Attributes:
        position: Number of collectives so far.
        num_surprises: Number of those that were not foretold.
    """

    def __init__(self) -> None:
        self.position = 0
        self.num_surprises = 0
        self._history: list[Collective] = []  # A ring, once it is full.
        self._mark: int | None = None
        self._after: dict[tuple[Collective, Collective], int] = {}
        self._last: Collective | None = None

    @property
    def foretold(self) -> Collective | None:
        """What comes next if all is as it was; None where nothing is known."""
        mark = self._mark
        return None if mark is None else self._history[mark % _MAX_KNOWN]

    def append(self, collective: Collective) -> None:
        """Note that a collective is being issued."""
        mark, position, history = self._mark, self.position, self._history
        is_foretold = mark is not None and history[mark % _MAX_KNOWN] == collective
        if len(history) < _MAX_KNOWN:
            history.append(collective)
        else:
            history[position % _MAX_KNOWN] = collective
        self.position = position = position + 1
        last, self._last = self._last, collective
        if is_foretold:
            assert mark is not None
            self._mark = mark + 1
        else:
            self.num_surprises += 1
            self._mark = None if last is None else self._after.get((last, collective))
        if last is not None:
            if len(self._after) >= _MAX_KNOWN:  # On all ranks at once: they have one history.
                self._after.clear()
            self._after[last, collective] = position
        mark = self._mark
        # What lies after it has not been issued yet, or is overwritten by now.
        if mark is not None and not position - _MAX_KNOWN < mark < position:
            self._mark = None

    def recent(self, number: int = NUM_RECENT) -> list[str]:
        """Return the last collectives."""
        number = min(number, len(self._history))
        first = self.position - number
        return [str(self._history[i % _MAX_KNOWN]) for i in range(first, self.position)]
