"""Vector clocks: which use of memory comes before which, however the streams run.

A stream runs what it is given in order. Nothing else is ordered, but by events: what is issued on a
stream after it waited for an event comes after all that the event's stream had been given before
the event was recorded. The host is a stream too: what it issues comes after what it has seen.

A clock says of every stream how much of it lies before. A use of memory is ordered after an earlier
one if the clock of its stream has come to that earlier one. Two uses of which one is a write must
be ordered; memory that goes back to its owner must be, too, for the owner gives it away at once.
"""

from __future__ import annotations

import dataclasses
import typing

if typing.TYPE_CHECKING:
    from collections.abc import Iterable

HOST, DEVICE = "host", "device"


class Clock(dict[int, int]):
    """How many operations of each stream lie before, by the stream's number."""

    def merge(self, other: Clock) -> None:
        """Come after all that `other` comes after."""
        for stream, count in other.items():
            if count > self.get(stream, 0):
                self[stream] = count


@dataclasses.dataclass(frozen=True)
class Use:
    """One use of memory: the stream, the count of its operation there, the operation's name."""

    stream: Line
    count: int
    op: str

    def is_before(self, clock: Clock) -> bool:
        """Whether all that comes after `clock` comes after this."""
        return self.count <= clock.get(self.stream.number, 0)


@dataclasses.dataclass(eq=False)
class Line:
    """A stream as clocks see it: its name, its number, what lies before its next operation."""

    name: str
    number: int
    clock: Clock = dataclasses.field(default_factory=Clock)

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(eq=False)
class Memory:
    """Memory that operators use."""

    label: str  # What it is, for findings.
    kind: str  # HOST or DEVICE.
    # The stream in whose order its allocator gives it away again; None: not by streams.
    owner: Line | None = None
    is_pinned: bool = False  # Of the host: copies from and to it go on beside the host.
    is_scalar: bool = False  # A number of the host, which goes to the device by value.
    whose: str = ""  # Of which parameters, for findings: " of 'layers.0.weight'".
    last_write: Use | None = None  # The last operation that wrote it.
    # The last operations since then that read it, by stream.
    reads: dict[int, Use] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return self.label + self.whose

    @property
    def uses(self) -> Iterable[Use]:
        """What a write must come after."""
        if self.last_write is not None:
            yield self.last_write
        yield from self.reads.values()


@dataclasses.dataclass(frozen=True)
class Edge:
    """Two uses of memory on different streams, the second ordered after the first: a rule kept."""

    label: str
    first: str
    first_stream: str
    then: str
    then_stream: str


class Checker:
    """Advances clocks and collects findings."""

    def __init__(self) -> None:
        self.findings: list[str] = []  # What was not ordered, in words.
        self.edges: set[Edge] = set()  # What was ordered between different streams.
        # By what memory is, who reads and who writes it.
        self.uses: dict[str, set[tuple[str, str]]] = {}
        self.returns: dict[str, set[str]] = {}  # By what memory is, to whom it goes back.
        self._lines = 0
        self.host = self.new_line("the host")  # The line of the host.

    def new_line(self, name: str) -> Line:
        """Return a line on which nothing has run."""
        line = Line(name, self._lines)
        self._lines += 1
        return line

    def run(self, line: Line, op: str, reads: Iterable[Memory], writes: Iterable[Memory]) -> None:
        """Note an operation that is issued now."""
        if line is not self.host:
            line.clock.merge(self.host.clock)
        line.clock[line.number] = line.clock.get(line.number, 0) + 1
        use = Use(line, line.clock[line.number], op)
        reads = [memory for memory in reads if not memory.is_scalar]
        written = [memory for memory in writes if not memory.is_scalar]
        for memory in (*reads, *written):
            does = "writes" if memory in written else "reads"
            if memory.last_write is not None:
                self._check(memory, memory.last_write, "writes", use, does)
        for memory in written:
            for read in memory.reads.values():
                self._check(memory, read, "reads", use, "writes")
        for does, some in (("reads", reads), ("writes", written)):
            for memory in some:
                self.uses.setdefault(memory.label, set()).add((does, line.name))
        for memory in reads:
            memory.reads[line.number] = use
        for memory in written:
            memory.last_write = use
            memory.reads = {}

    def _check(self, memory: Memory, first: Use, did: str, then: Use, does: str) -> None:
        if first.stream is then.stream:
            return
        if first.is_before(then.stream.clock):
            self.edges.add(
                Edge(memory.label, f"{did}", first.stream.name, f"{does}", then.stream.name)
            )
            return
        by = (
            "The host must wait for" if then.stream is self.host else f"{then.stream} must wait for"
        )
        self.findings.append(
            f"{then.op} on {then.stream} {does} {memory}, which {first.op} on {first.stream} "
            f"{did}, and nothing orders them. {by} an event that {first.stream} records after it."
        )

    def give_back(self, memory: Memory, to: str, after: Clock | None = None) -> None:
        """Note that memory goes back to its owner, or to a pool that has it wait for a fence."""
        self.returns.setdefault(memory.label, set()).add(to)
        clock = after
        if clock is None:
            if memory.owner is None:
                return
            clock = Clock(memory.owner.clock)
            clock.merge(self.host.clock)
        for use in memory.uses:
            if (after is None and use.stream is memory.owner) or use.is_before(clock):
                continue
            waiting = "the fence that it goes back with" if after is not None else memory.owner
            self.findings.append(
                f"{memory} goes back to {to} while {use.op} on {use.stream} may still use "
                f"it. {waiting} must come after an event that {use.stream} records after it."
            )
