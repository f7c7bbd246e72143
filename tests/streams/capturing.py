"""Graphs of the simulated device: what is issued is noted and not run; what a card refuses raises.

A graph is a list of what was issued on each stream, and of waits. A replay issues it again: side
streams run late there too, so that a wait that was not captured gives wrong numbers.
"""

from __future__ import annotations

import contextlib
import typing

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from simulated_device import Block, SimulatedEvent, SimulatedStream, Simulation

Before = dict["SimulatedStream", int]
"""How much of each stream's part of a graph lies before something."""


class CaptureError(RuntimeError):
    """A card refuses this while it captures, or what was captured is no graph."""


class Work(typing.NamedTuple):
    """A kernel, or the overwriting of freed memory."""

    stream: SimulatedStream
    run: Callable[[], object]

    def issue(self, simulation: Simulation, first: Before) -> None:
        """Issue it in a replay, whose part of each stream begins at `first`."""
        del simulation, first
        self.stream.issue(self.run)


class Wait(typing.NamedTuple):
    """A stream waits until another has come to a place in the graph."""

    stream: SimulatedStream
    awaited: SimulatedStream
    position: int

    def issue(self, simulation: Simulation, first: Before) -> None:
        """Issue it."""
        del simulation
        position = first[self.awaited] + self.position
        self.stream.issue(lambda: self.awaited.run_until(position))


class Communication(typing.NamedTuple):
    """A collective."""

    stream: SimulatedStream
    run: Callable[[], object]

    def issue(self, simulation: Simulation, first: Before) -> None:
        """Issue it: collectives run in the order of issue."""
        del first
        with simulation.on(self.stream):
            simulation.run_in_order(self.run)


class SimulatedGraph:
    """What ``torch.cuda.CUDAGraph`` is, of a simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.used: dict[Block, None] = {}  # What memory it uses.
        self._nodes: list[Work | Wait | Communication] = []
        self._before: dict[SimulatedStream, Before] = {}
        self._erasers: set[SimulatedStream] = set()
        self._refused = ""  # What a card has refused last: then the graph is lost.

    @contextlib.contextmanager
    def capturing(self, origin: SimulatedStream) -> Iterator[None]:
        """Note what is issued.

        Raises:
            CaptureError: At the end, if a stream has not joined the first one, or if code has gone
                on after an error.
        """
        self._before = {origin: {}}
        self.simulation.graph = self
        try:
            yield
        finally:
            self.simulation.graph = None
        if self._refused:
            msg = f"operation failed due to a previous error during capture: {self._refused}"
            raise CaptureError(msg)
        joined = self._before[origin]
        for stream, before in self._before.items():
            if stream not in self._erasers and joined.get(stream, 0) < before.get(stream, 0):
                msg = f"capturing stream has unjoined work: nobody waits for {stream.line}"
                raise CaptureError(msg)

    # --- while it captures ---

    def refuse(self, what: str) -> None:
        """Raise what a card raises."""
        self._refused = f"operation not permitted when stream is capturing: {what}"
        raise CaptureError(self._refused)

    def has(self, stream: SimulatedStream) -> bool:
        """Whether a stream has joined."""
        return stream in self._before

    def erase_on(self, stream: SimulatedStream) -> None:
        """Let the simulation overwrite memory on a stream of its own."""
        self._erasers.add(stream)
        self._before.setdefault(stream, {})

    def before(self, stream: SimulatedStream) -> Before:
        """Return what lies before what is issued next on a stream."""
        return dict(self._before[stream])

    def work(self, stream: SimulatedStream, run: Callable[[], object]) -> int:
        """Note work; return its place on its stream."""
        return self._note(Work(stream, run))

    def communication(self, stream: SimulatedStream, run: Callable[[], object]) -> int:
        """Note a collective; return its place on its stream."""
        return self._note(Communication(stream, run))

    def wait(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        """Note that a stream waits; so it joins the capture."""
        if event.graph is not self:
            if self.has(stream):
                self._refused = (
                    f"dependency created on uncaptured work in another stream: {stream.line} waits "
                    f"for an event that {event.stream.line} recorded outside of the capture"
                )
                raise CaptureError(self._refused)
            return
        own = self._before.setdefault(stream, {})
        for each, position in event.before.items():
            own[each] = max(position, own.get(each, 0))
        self._note(Wait(stream, event.stream, event.position))

    def _note(self, node: Work | Wait | Communication) -> int:
        stream = node.stream
        if not self.has(stream):
            self.refuse(f"work on {stream.line}, which has not joined the capture")
        own = self._before[stream]
        own[stream] = own.get(stream, 0) + 1
        self._nodes.append(node)
        return own[stream]

    def use(self, blocks: Iterable[Block | None]) -> None:
        """Note what memory it uses."""
        self.used.update(dict.fromkeys(block for block in blocks if block is not None))

    # --- afterwards ---

    def replay(self) -> None:
        """Run it in the order of the current stream."""
        simulation = self.simulation
        if simulation.graph is not None:
            simulation.graph.refuse("a replay")
        blocks = [block for block in self.used if not block.is_scalar]
        simulation.checker.run(simulation.current.line, "replay", (), blocks)
        first = {stream: stream.num_issued for stream in self._before}
        for node in self._nodes:
            node.issue(simulation, first)
