"""What happens in a step, as records: one model of events for plans, pictures and comparisons.

The code of the schedule reports them in the same places in a real run, in a simulated run and in a
dry run. Nothing is computed for them. Without an observer, a place costs one ``is None``:

    if _events.observer is not None:
        _events.observer.begin("gather", group.name, group=group.number, ...)

There is one observer at a time; `observed_by` sets it. It hands a `StepEvent` to its sink when the
event ends. Where that is too slow, a `StepLog` notes the calls, and makes the events later.

Kinds, what they span, and what `nbytes` says:

- ``pass``: the forward of a root (phase ``forward``), and its backward (``backward``), to its very
  end. Name and number: those of the root's first group; 0.
- ``compute``: a group's forward, backward or recompute. Events of groups inside it lie inside it.
  If no input of a group wants a gradient, its backward ends with its last gradient. 0.
- ``gather``: from the start of an all-gather until it was waited for. Bytes of the
  unsharded buffers that it fills. Groups that travel together have an event each.
- ``reduce_scatter``: from the start of a reduction until it was waited for. Bytes of
  the send buffers.
- ``all_reduce``: the same interval, if the reduction continues over a replicate axis. Bytes of
  this rank's range of the sums. Without a group: numbers that ranks compare.
- ``wait``: the time for which the host, or on an accelerator the order of streams, holds compute
  back for a gather or a reduction, or for its send buffer. It belongs to the gather or reduction of
  the same group that ends next, which has the bytes. 0.
- ``copy``: a copy of offloaded shards or gradients between host and device. Bytes. An instant: the
  copy is a part of the gather or reduction of the same group, reported together with it.
- ``reshard``: a group's unsharded parameters are freed. An instant; their bytes.
- ``allocate``, ``free``: memory of a buffer comes from the allocator and goes back. Instants; name:
  ``buffer``. Reuse of memory is not reported here.
- ``take``, ``return``: a buffer gets memory, new or used, and gives it up. Instants; name: the kind
  of the buffer (``unsharded``, ``send``, ``receive``), a space, and its first parameter; bytes of
  the memory that lies behind the buffer, which may be more than it asked for.

A group's forward that ends in an exception is reported as any other. The ends of other events that
were under way then are not reported.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

Kind = Literal[
    "pass",
    "compute",
    "gather",
    "reduce_scatter",
    "all_reduce",
    "wait",
    "copy",
    "reshard",
    "allocate",
    "free",
    "take",
    "return",
]
Phase = Literal["forward", "backward", "recompute", "optimizer"]


# A named tuple: a frozen dataclass takes five times as long to make, 1.5 us. Events that have begun
# are plain tuples of the first nine fields, which take a third of the time of named ones.


class StepEvent(NamedTuple):
    """Something that began and ended on this rank; see the module's docstring."""

    kind: Kind  # Kind of the event.
    name: str  # Name of the group, as seen from the root, or of another subject.
    group: int  # Number of the group in its process; -1: the event belongs to no group.
    # Part of the step in which it began. ``optimizer`` is all between a backward and the next
    # forward.
    phase: Phase
    nbytes: int  # Size in bytes; the kind says of what.
    axis: str  # Axis of the mesh that it goes over, ``shard`` or ``replicate``; empty: none.
    num_ranks: int  # Number of ranks that take part.
    begin: float  # Time of the beginning in seconds of the observer's clock; 0 in a dry run.
    opened: int  # Position of the beginning among all beginnings and ends of this observer.
    end: float  # Time of the end.
    closed: int  # Position of the end, counted in the same way; for an instant equal to `opened`.


def edges_of(events: Iterable[StepEvent]) -> list[tuple[float, StepEvent, bool]]:
    """Return positions of events, each with whether it is the beginning; instants have no end."""
    edges: list[tuple[float, StepEvent, bool]] = []
    for event in events:
        edges.append((event.opened, event, True))
        if event.closed > event.opened:
            edges.append((event.closed, event, False))
    return edges


_Open = tuple["Kind", str, int, "Phase", int, str, int, float, int]
_new = tuple.__new__


class StepObserver:
    """An observer that makes events of beginnings and ends, and hands them to a sink."""

    def __init__(
        self, sink: Callable[[StepEvent], object], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.phase: Phase = "forward"  # Current part of the step.
        self.position = 0  # Number of beginnings and ends so far.
        self._open: list[_Open] = []
        # Function that gets each event when it ends, in the thread that reports it.
        self._sink = sink
        self._clock = clock  # Function that returns a time in seconds.

    @property
    def under_way(self) -> list[StepEvent]:
        """Events that have begun and not ended, in order of beginning, as if they ended now."""
        return [StepEvent(*found, *found[-2:]) for found in self._open]

    def is_within(self, kind: Kind) -> bool:
        """Whether an event of a kind has begun and not ended."""
        return any(found[0] == kind for found in self._open)

    def begin(
        self,
        kind: Kind,
        name: str,
        group: int = -1,
        nbytes: int = 0,
        across: tuple[str, int] = ("", 1),
        phase: Phase | None = None,
    ) -> None:
        """Note that an event begins.

        Args:
            kind: Kind of the event.
            name: Name of the group.
            group: Number of the group. Events of one kind and group end in the reverse order.
            nbytes: Size in bytes.
            across: Axis, and number of ranks.
            phase: Part of the step; None: the current one.
        """
        self.position = opened = self.position + 1
        axis, num = across
        phase = phase or self.phase
        self._open.append((kind, name, group, phase, nbytes, axis, num, self._clock(), opened))

    def begin_pass(self, phase: Phase, name: str, group: int) -> None:
        """Note that the forward or backward of a root begins, and with it a phase of the step."""
        self.phase = phase
        self.begin("pass", name, group=group)

    def end(self, kind: Kind, group: int = -1) -> None:
        """Note that an event ends. An event that began before the observer came is ignored."""
        for at in range(len(self._open) - 1, -1, -1):
            found = self._open[at]
            if found[0] == kind and found[2] == group:
                del self._open[at]
                self.position = closed = self.position + 1
                # No `*` here: it would make a list first.
                self._sink(_new(StepEvent, found + (self._clock(), closed)))  # noqa: RUF005
                return

    def tell(self, kind: Kind, name: str, group: int = -1, nbytes: int = 0) -> None:
        """Something happens at once."""
        self.position = at = self.position + 1
        now = self._clock()
        self._sink(
            _new(StepEvent, (kind, name, group, self.phase, nbytes, "", 1, now, at, now, at))
        )

    def end_backward(self, group: int) -> None:
        """Note that the backward of a root, given by its first group, ends; others may go on."""
        self.end("pass", group)
        if not self.is_within("pass"):
            self.phase = "optimizer"

    def forget(self, groups: Collection[int]) -> None:
        """Drop the open events of these groups, which will not end after an exception."""
        self._open = [found for found in self._open if found[2] not in groups]


class StepLog:
    """A log of the calls of a `StepObserver`, with their times, which makes the events later.

    Cost: 0.2 us for each beginning and end, and 2 us in `take`.
    """

    def __init__(
        self, clock: Callable[[], float], max_calls: int, when_full: Callable[[], object]
    ) -> None:
        self._events: list[StepEvent] = []
        self._at = 0.0
        self._later = later = StepObserver(self._events.append, lambda: self._at)
        # A bound method takes time to make.
        self._begin, self._end, self._tell = later.begin, later.end, later.tell
        self._clock = clock  # Function that returns a time in seconds.
        self._max_calls = max_calls  # Number of beginnings and ends at which the log is full.
        # Function that is called when a pass begins while the log is full; it calls `take`.
        self._when_full = when_full
        self._calls: list[tuple[Any, ...]] = []  # A method of `_later`, its arguments, the time.
        self._note = self._calls.append

    def begin(
        self,
        kind: Kind,
        name: str,
        group: int = -1,
        nbytes: int = 0,
        across: tuple[str, int] = ("", 1),
        phase: Phase | None = None,
    ) -> None:
        """Note that an event begins."""
        self._note((self._begin, kind, name, group, nbytes, across, phase, self._clock()))

    def begin_pass(self, phase: Phase, name: str, group: int) -> None:
        """Note that a pass begins."""
        if len(self._calls) >= self._max_calls:
            self._when_full()
        self._note((self._later.begin_pass, phase, name, group, self._clock()))

    def end(self, kind: Kind, group: int = -1) -> None:
        """Note that an event ends."""
        self._note((self._end, kind, group, self._clock()))

    def tell(self, kind: Kind, name: str, group: int = -1, nbytes: int = 0) -> None:
        """Note an instant."""
        self._note((self._tell, kind, name, group, nbytes, self._clock()))

    def end_backward(self, group: int) -> None:
        """Note that the backward of a root ends."""
        self._note((self._later.end_backward, group, self._clock()))

    def forget(self, groups: Collection[int]) -> None:
        """Note that the open events of these groups will not end."""
        self._note((self._later.forget, groups, self._clock()))

    def take(self) -> list[StepEvent]:
        """Return the events that have ended since the last call."""
        for call, *arguments, at in self._calls:
            self._at = at
            call(*arguments)
        self._calls.clear()
        events = self._events[:]
        self._events.clear()
        return events


observer: StepObserver | StepLog | None = None
"""The observer of this process's steps; None: there is none. Read it where it is used."""


_Observer = TypeVar("_Observer", StepObserver, StepLog)


@contextlib.contextmanager
def observed_by(new: _Observer) -> Iterator[_Observer]:
    """Report what happens in this process to an observer while the context is open.

    Yields:
        The observer.

    Raises:
        RuntimeError: There is another observer already.
    """
    global observer  # noqa: PLW0603 - what it observes is the process
    if observer is not None:
        msg = "the steps of this process are observed already. End the other context first."
        raise RuntimeError(msg)
    observer = new
    try:
        yield new
    finally:
        observer = None
