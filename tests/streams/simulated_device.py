"""An accelerator that needs no card: streams that run late, memory that is overwritten when freed.

What is issued on a side stream does not run before something waits for it: then it runs, with the
numbers that are in memory by then. So a wait that is missing gives wrong numbers. Collectives run
over gloo, all of them in the order of issue. NCCL keeps that order for each communicator, and runs
those of different communicators beside each other; here a process runs one at a time, so without
one order a rank could wait in one communicator for a rank that waits in another. Memory is made
here, and overwritten with NaN as soon as nobody holds it, whatever may still be about to use it.

`SimulatedDevice` offers what `shardkit.backends.device.AcceleratorDevice` does. Which operator uses
which memory is noted by `watching.Watch`, and judged by `clocks.Checker`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import sys
import typing
import weakref

import numpy as np
import torch
from capturing import SimulatedGraph
from clocks import DEVICE, HOST, Checker, Clock, Memory, Use
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardkit._compat import torch_tensors

if typing.TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterator

POISON = 0xFF  # In every byte it is NaN in every floating dtype.


class SimulatedEvent:
    """A point on a stream; `torch.Event` to users."""

    def __init__(self, stream: SimulatedStream) -> None:
        self.stream = stream
        self.position = stream.num_issued
        graph = stream.simulation.graph
        # In which it was captured.
        self.graph = graph if graph is not None and graph.has(stream) else None
        # What of that graph lies before it.
        self.before = {} if self.graph is None else self.graph.before(stream)
        if self.graph is not None:
            self.position = self.before.get(stream, 0)
        self.clock = Clock(stream.line.clock)  # What lies before it.
        self.also: list[SimulatedEvent] = []  # Events that whoever waits for this one waits for.
        self.step = stream.simulation.step

    def query(self) -> bool:
        """Whether all before it has run."""
        self.stream.simulation.refuse_to_ask(self)
        return self.stream.num_run >= self.position

    def synchronize(self) -> None:
        """Block the host."""
        self.stream.simulation.synchronize(self)


class SimulatedStream:
    """A queue of work; `torch.Stream` to users."""

    def __init__(self, simulation: Simulation, name: str, *, is_late: bool) -> None:
        self.simulation = simulation
        self.line = simulation.checker.new_line(name)
        self.num_issued = 0  # As many pieces of work were given to it.
        self.num_run = 0  # As many have run.
        self._is_late = is_late
        self._work: list[tuple[int, Callable[[], object]]] = []

    def issue(self, work: Callable[[], object]) -> int:
        """Give it work; return the work's number."""
        if self.simulation.graph is not None:
            return self.simulation.graph.work(self, work)
        self.num_issued += 1
        self._work.append((next(self.simulation.numbers), work))
        if not self._is_late:
            self.run_until(self.num_issued)
        return self.num_issued

    def run_until(self, position: int) -> None:
        """Run work, in order, up to a position."""
        while self.num_run < position:
            self.num_run += 1
            self._work.pop(0)[1]()

    @property
    def next_number(self) -> float:
        """The number of the next work to run, among that of all streams; inf: there is none."""
        return self._work[0][0] if self._work else math.inf

    def record_event(self, event: typing.Any = None) -> SimulatedEvent:
        """Return an event after all work issued so far."""
        del event
        return SimulatedEvent(self)

    def wait_event(self, event: SimulatedEvent) -> None:
        """Let work issued from now on come after an event."""
        for each in (event, *event.also):
            self.line.clock.merge(each.clock)
            graph = self.simulation.graph
            if graph is not None:
                graph.wait(self, each)
                continue
            if each.graph is not None:
                self.simulation.refuse_to_ask(each)
            self.issue(lambda each=each: each.stream.run_until(each.position))


@dataclasses.dataclass
class Sync:
    """A wait of the host for the device."""

    what: str  # What it called.
    step: int  # In which step.
    of_step: int  # In which step the device was given what it waited for.


class _Lease(np.ndarray):
    """Memory that a storage has been given; it dies when no storage holds the memory any more."""


@dataclasses.dataclass(eq=False)
class Block(Memory):
    """Memory with an address."""

    # All its bytes, also after it was freed; None: it was not made here.
    memory: np.ndarray | None = None
    # Whose it was when it was first seen, if it was not made here.
    storage: StorageWeakRef | None = None
    eraser: SimulatedStream | None = None  # Overwrites it while it is a free slot.
    graph: SimulatedGraph | None = None  # In whose pool it lies.


class Simulation:
    """A device, the host, and what happened between them."""

    def __init__(self, *, has_host_engine: bool = True) -> None:
        # Process groups have an engine for tensors of the host.
        self.has_host_engine = has_host_engine
        self.checker = Checker()  # Judges.
        # The stream on which users' operators run.
        self.compute = SimulatedStream(self, "compute", is_late=False)
        self.current = self.compute  # On which operators run now.
        self.streams = [self.compute]
        self.step = 0  # Set by who counts.
        self.syncs: list[Sync] = []  # Waits of the host for the device.
        self.num_made: dict[int, int] = {}  # As many slots were made in each step.
        self.nbytes = 0  # Bytes of the device that are in use.
        self.peak_nbytes = 0  # The most since it was last set.
        self.graph: SimulatedGraph | None = None  # What is captured now.
        self._blocks: dict[int, Block] = {}
        self.numbers = itertools.count()  # Numbers of works, in the order of issue.
        self._collectives: list[tuple[SimulatedStream, int]] = []
        self._is_over = False

    # --- streams ---

    def new_stream(self, name: str) -> SimulatedStream:
        """Return a side stream."""
        stream = SimulatedStream(self, name, is_late=True)
        self.streams.append(stream)
        return stream

    @contextlib.contextmanager
    def on(self, stream: SimulatedStream) -> Iterator[None]:
        """Let operators run on a stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, event: SimulatedEvent, what: str = "synchronize") -> None:
        """Let the host wait for an event."""
        if self.graph is not None:
            self.graph.refuse(f"the host waits for the device ({what})")
        self.refuse_to_ask(event)
        self.syncs.append(Sync(what, self.step, event.step))
        for each in (event, *event.also):
            each.stream.run_until(each.position)
            self.checker.host.clock.merge(each.clock)

    def run_all(self) -> None:
        """Run all work, as a device does while the host waits for another rank's host.

        It runs in the order of issue, which is that of collectives on all ranks.
        """
        while True:
            stream = min(self.streams, key=lambda each: each.next_number)
            if stream.next_number == math.inf:
                return
            stream.run_until(stream.num_run + 1)

    def refuse_to_ask(self, event: SimulatedEvent) -> None:
        """Raise if an event of a graph is used outside of it, or any is asked for inside of one."""
        if self.graph is not None:
            self.graph.refuse("an event is asked for")
        if event.graph is not None:
            event.graph.refuse(f"an event of {event.stream.line} that was captured is used outside")

    def run_in_order(self, run: Callable[[], object]) -> None:
        """Issue a collective on the current stream: all run in this order, that of all ranks."""
        if self.graph is not None:
            self.graph.communication(self.current, run)
            return
        queue, stream = self._collectives, self.current

        def in_order() -> None:
            while queue[0] != entry:
                earlier, position = queue[0]
                earlier.run_until(position)
            run()
            queue.pop(0)

        entry = (stream, stream.num_issued + 1)
        queue.append(entry)
        stream.issue(in_order)

    # --- memory ---

    def block_of(self, tensor: Tensor) -> Block | None:
        """Return the memory that a tensor lies in; None if it has none."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not address or not storage.nbytes():
            return None
        block = self._blocks.get(address)
        if block is not None and (block.storage is None or not block.storage.expired()):
            return block
        block = Block("memory that was there before", DEVICE, storage=StorageWeakRef(storage))
        self._blocks[address] = block
        return block

    def find(self, storage: torch.UntypedStorage) -> Block | None:
        """Return the memory behind a storage, if it was made here."""
        return self._blocks.get(storage.data_ptr()) if storage.nbytes() else None

    def new_storage(
        self, nbytes: int, label: str, kind: str = DEVICE, *, is_pinned: bool = False
    ) -> torch.UntypedStorage:
        """Return memory filled with NaN, which belongs to the current stream."""
        memory = np.full(nbytes, POISON, np.uint8)
        owner = self.current.line if kind == DEVICE else None
        whose = of_whom() if label != OTHER else ""
        block = Block(label, kind, owner, is_pinned, whose=whose, memory=memory)
        if owner is not None:
            # An allocator hands on what was freed, in the order of its stream, to be used at once.
            block.last_write = Use(owner, owner.clock.get(owner.number, 0), "whose it was before")
        block.graph = self.graph
        if self.graph is not None and is_pinned:
            self.graph.refuse("memory of the host is allocated and page-locked")
        self._blocks[memory.ctypes.data] = block
        self.num_made[self.step] = self.num_made.get(self.step, 0) + (label in SLOTS)
        if kind == DEVICE:
            self.nbytes += nbytes
            self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        lease = memory.view(_Lease)
        weakref.finalize(lease, self._freed, block)
        return torch.frombuffer(lease, dtype=torch.uint8).untyped_storage()

    def _freed(self, block: Block) -> None:
        if self._is_over:
            return
        assert block.memory is not None
        self._blocks.pop(block.memory.ctypes.data, None)
        if block.kind == DEVICE:
            self.nbytes -= block.memory.nbytes
            last = block.last_write
            if block.eraser is not None and last is not None and last.stream is block.eraser.line:
                block.last_write = None  # The NaN of `returned`, below.
            self.checker.give_back(block, "the allocator")
            memory = block.memory
            owner = next((s for s in self.streams if s.line is block.owner), None)
            # What lies in no graph's pool may be given away at once.
            if owner is None or (self.graph is not None and block.graph is not self.graph):
                memory.fill(POISON)
            else:
                # The next one that gets it comes after all that was issued there.
                owner.issue(lambda: memory.fill(POISON))

    def close(self) -> None:
        """Judge no more: what is freed from now on belongs to the end."""
        for stream in self.streams:
            stream.run_until(stream.num_issued)
        self._is_over = True

    @torch.inference_mode(mode=False)  # Else its versions are not counted.
    @torch.no_grad()
    def alias(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the same memory, which does not keep it from being freed."""
        block = self.block_of(tensor)
        if block is None or block.memory is None:
            return tensor
        result = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return result.set_(
            torch.from_numpy(block.memory).untyped_storage(),
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
        )

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def copy_of(self, tensor: Tensor, label: str, kind: str) -> Tensor:
        """Return a tensor like another in memory made here."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return tensor
        made = self.new_storage(storage.nbytes(), label, kind)
        block = self.find(made)
        assert block is not None
        block.is_scalar = kind == HOST and tensor.ndim == 0
        source = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(made).copy_(source)
        result = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return result.set_(made, tensor.storage_offset(), tensor.size(), tensor.stride())

    def returned(self, block: Block, fence: SimulatedEvent | None) -> None:
        """Note that memory goes to the pool of slots: its next user waits for `fence`."""
        after = fence.clock if fence is not None else self.compute.line.clock
        self.checker.give_back(block, "the pool of slots", after)
        if fence is None or block.memory is None:
            return
        # Overwritten once its users are done: whoever reads what was there gets NaN.
        if block.eraser is None:
            block.eraser = SimulatedStream(self, "the stream that erases free slots", is_late=True)
        eraser, memory = block.eraser, block.memory
        if self.graph is not None:
            self.graph.erase_on(eraser)
        eraser.line.clock = Clock({**fence.clock, eraser.line.number: eraser.num_issued})
        if self.graph is not None:
            self.graph.wait(eraser, fence)
        else:
            eraser.issue(lambda: fence.stream.run_until(fence.position))
        self.checker.run(eraser.line, "erase", (), (block,))
        eraser.issue(lambda: memory.fill(POISON))
        fence.also.append(SimulatedEvent(eraser))


class SimulatedDevice:
    """What `AcceleratorDevice` offers, of a simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self.device = torch.device("cpu")
        self.simulation = simulation
        self._names = iter(["gather", "reduce", "all-reduce"] * 1000)

    def new_stream(self) -> SimulatedStream:
        return self.simulation.new_stream(f"the {next(self._names)} stream")

    def current_stream(self) -> SimulatedStream:
        return self.simulation.current

    def on(self, stream: SimulatedStream) -> contextlib.AbstractContextManager[None]:
        return self.simulation.on(stream)

    def has_passed(self, event: SimulatedEvent) -> bool | None:
        return None if self.is_capturing() else event.query()

    def new_graph(self) -> SimulatedGraph:
        return SimulatedGraph(self.simulation)

    def new_compute_stream(self) -> SimulatedStream:
        return self.simulation.compute  # No default stream here, which could not be captured.

    def capturing(
        self, graph: SimulatedGraph, stream: SimulatedStream
    ) -> contextlib.AbstractContextManager[None]:
        return graph.capturing(stream)

    def is_capturing(self) -> bool:
        return self.simulation.graph is not None

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._empty(numel, dtype, label_of_caller(), DEVICE)

    def empty_on_host(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        return self._empty(numel, dtype, label_of_caller(), HOST, is_pinned=pinned)

    def _empty(self, numel: int, dtype: torch.dtype, label: str, kind: str, **more: bool) -> Tensor:
        result = torch.empty(0, dtype=dtype, device="cpu")
        nbytes = numel * dtype.itemsize
        if not nbytes:
            return result
        storage = self.simulation.new_storage(nbytes, label, kind, **more)
        return result.set_(storage, 0, (numel,), (1,))

    def new_storage(self, nbytes: int) -> torch.UntypedStorage:
        if not nbytes:
            return torch.UntypedStorage(0)
        return self.simulation.new_storage(nbytes, label_of_caller())

    def resize_storage(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        if storage.nbytes() == nbytes:
            return
        other = self.new_storage(nbytes)
        if other.nbytes():
            self.simulation.find(other).label = label_of_caller()
        torch_tensors.swap_storage(storage, other)

    def copy(self, tensor: Tensor) -> Tensor:
        block = self.simulation.block_of(tensor)
        if block is None or block.kind == DEVICE:
            return tensor
        on_device = self._empty(tensor.numel(), tensor.dtype, "a copy of host memory", DEVICE)
        return on_device.view(tensor.shape).copy_(tensor)


# --- what memory is for ---------------------------------------------------------------------------

SLOTS = ("the unsharded parameters", "the send buffer")
OTHER = "a tensor"
_LABELS = {
    ("FlatStore", "acquire"): "the unsharded parameters",
    ("SendBuffer", "open"): "the send buffer",
    ("FlatStore", "_cut_shard"): "the shard",
    ("AcceleratorStreams", "_new_result"): "the result of a reduction",
    ("AcceleratorStreams", "_prepare"): "the sum over the shard axis",
    ("AcceleratorStreams", "_start_max_on_device"): "the numbers that ranks compare",
    ("FlatStore", "keep_part"): "the part that is kept between forward and backward",
}


def label_of_caller() -> str:
    """Return what memory is for, by who asks for it."""
    for frame in _frames():
        owner = frame.f_locals.get("self")
        for cls in type(owner).__mro__ if owner is not None else ():
            label = _LABELS.get((cls.__name__, frame.f_code.co_name))
            if label is not None:
                return label
    return OTHER


def of_whom() -> str:
    """Return for which parameters memory is asked for, as the end of a sentence."""
    for frame in _frames():
        owner = frame.f_locals.get("self")
        for each in (owner, getattr(owner, "bucket", None)):
            entries = getattr(each, "entries", None)
            if isinstance(entries, list):
                return f" of {', '.join(repr(entry.name) for entry in entries)}"
    return ""


def _frames() -> Iterator[types.FrameType]:
    """Yield the frames of the library that called, innermost first."""
    frame = sys._getframe(2)
    while frame is not None:
        if "/shardkit/" in frame.f_code.co_filename:  # A frame's locals take long to make.
            yield frame
        frame = frame.f_back
