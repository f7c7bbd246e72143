"""Measures what this machine can do, on all ranks at once, since they share cores and links."""

from __future__ import annotations

import math
import os
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit._events import observed_by
from shardkit._module.fully_shard import fully_shard
from shardkit.backends import init_device_mesh
from shardkit.backends.base import AxisComm, CommStreams, Gather, Handle, ReduceHandle, Reduction
from shardkit.backends.device import use_own_device
from shardkit.planning._meter import MemoryMeter
from shardkit.planning._profile import Curve, HardwareProfile, Route
from shardkit.planning._run import Run
from shardkit.planning._time import seconds_of, time_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardkit._mesh import DeviceMesh

_ROUNDS = 10
_WINDOW_S = 0.01
_PRODUCTS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_MEMORY = (2**12, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26)
_MORE_MEMORY = (*_MEMORY, 2**28)  # More than the cache of an accelerator.
_SENT = (2**14, 2**20, 2**23, 2**25)
_LARGE = 2**23
_SLOW_S = 0.1
_NUM_BLOCKS = 6
_DTYPES = ("float32", "bfloat16")


def calibrate(device: str) -> HardwareProfile:
    """Return a profile of the ranks of this world. Collective; takes less than a minute.

    The speed of a shared machine changes from second to second. So each round measures everything
    for a moment, and the profile has the medians of all rounds.

    Raises:
        MeshError: No launcher started this process.
    """
    use_own_device(device)
    mesh = init_device_mesh(device, (int(os.environ.get("WORLD_SIZE", "1")),))
    clock = _Clock(mesh, device)
    products = {name: _products(clock, getattr(torch, name)) for name in _DTYPES}
    memory = {
        "new": _memory(clock, lambda x: x + 1.0, 2),
        "in_place": _memory(clock, lambda x: x.mul_(1.0), 1),
        "function": _memory(clock, nn.functional.gelu, 2),
    }
    host = torch.ones(_LARGE // 4, pin_memory=not clock.on_cpu)
    target = torch.empty(_LARGE // 4, device=clock.device)
    copy = clock.add(lambda: target.copy_(host, non_blocking=True))
    one = torch.ones(1, device=clock.device)
    kernel = clock.add(lambda: one.mul_(1.0))
    # Meshes (replicate, shard) of all ranks.
    sizes = [n for n in range(clock.size, 0, -1) if clock.size % n == 0 and clock.size > 1]
    links = [link for n in sizes for link in _links(clock, (clock.size // n, n))]
    overlap = _overlap(clock) if clock.size > 1 else lambda: 1.0
    of_operator = _operator_s(clock)
    add_groups = _groups(clock)
    for _ in range(_ROUNDS):
        clock.measure()
    clock.settle()
    operator_s = of_operator()
    rates = {name: _rates(points) for name, points in products.items()}
    of_memory = {name: _rates(points) for name, points in memory.items()}
    profile = HardwareProfile(
        name=f"calibrated-{device}",
        device=device,
        memory_nbytes=memory_nbytes(device),
        overlap=overlap(),
        operator_s=operator_s,
        sharded_operator_s=operator_s,
        group_s=0.0,
        kernel_s=0.0 if clock.on_cpu else kernel.seconds,
        host_bytes_per_s=_LARGE / copy.seconds,
        peak={name: max(rate for _, rate in curve) for name, curve in rates.items()},
        products=rates,
        memory={**of_memory, "host": of_memory["in_place"]},
        links=tuple(route() for route in links),
    )
    return add_groups(profile)


@dataclass(slots=True, eq=False)
class _Probe:
    """A function that is timed."""

    call: Callable[[], object]
    number: int  # Number of calls in a round.
    seconds: float  # Time of a call; at first the time of the first one.
    times: list[float] = field(default_factory=list)  # Time of a call in each round.


class _Clock:
    """Times probes on all ranks at once.

    The time of a round is that of the slowest rank, since the others wait for it in a step.
    """

    def __init__(self, mesh: DeviceMesh, device: str) -> None:
        self.mesh = mesh
        self.axis: AxisComm = mesh.backend.axis(0)
        self.size: int = self.axis.size
        self.device = mesh.backend.device
        self.on_cpu = device == "cpu"
        self._probes: list[_Probe] = []

    def add(self, call: Callable[[], object]) -> _Probe:
        """Add a function to time from the next round on."""
        call()
        once = self.largest([self._seconds(call, 1)])[0]
        probe = _Probe(call, max(1, min(1_000, int(_WINDOW_S / max(once, 1e-7)))), once)
        self._probes.append(probe)
        return probe

    def measure(self) -> None:
        """Time each probe."""
        for probe in self._probes:
            probe.times.append(self._seconds(probe.call, probe.number))

    def settle(self) -> None:
        """Set the time of each probe: the median of its rounds. Collective."""
        for probe in self._probes:
            probe.seconds = statistics.median(self.largest(probe.times))

    def _seconds(self, call: Callable[[], object], number: int) -> float:
        self.largest([0.0])  # All ranks begin at this point.
        self._await_device()
        begin = time.perf_counter()
        for _ in range(number):
            call()
        self._await_device()
        return (time.perf_counter() - begin) / number

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return for each value the largest of all ranks. Collective."""
        tensor = torch.tensor(values, dtype=torch.float32, device=self.device)
        if self.size > 1:
            self.axis.all_reduce(tensor, "max")
        found: list[float] = tensor.tolist()
        return found

    def _await_device(self) -> None:
        if not self.on_cpu:
            torch.accelerator.synchronize()


# --- compute --------------------------------------------------------------------------------------

_Points = list[tuple[float, _Probe]]  # Work of a call (operations or bytes), and its probe.


def _rates(points: _Points) -> Curve:
    return tuple((size, size / probe.seconds) for size, probe in points)


def _products(clock: _Clock, dtype: torch.dtype) -> _Points:
    points = []
    for size in _PRODUCTS:
        # Not one number: the speed of a card depends on its power draw, and that depends on the
        # numbers.
        matrix = torch.arange(size * size, device=clock.device).sin().to(dtype).view(size, size)
        probe = clock.add(lambda matrix=matrix: matrix @ matrix)  # type: ignore[misc]
        points.append((2.0 * size**3, probe))
        if probe.seconds > _SLOW_S:
            break
    return points


def _memory(clock: _Clock, call: Callable[[Tensor], Tensor], num_tensors: int) -> _Points:
    """Time an operator that reads and writes `num_tensors` tensors of the size of its input."""
    points = []
    for nbytes in _MEMORY if clock.on_cpu else _MORE_MEMORY:
        tensor = torch.ones(nbytes // 4, device=clock.device)
        probe = clock.add(lambda tensor=tensor: call(tensor))  # type: ignore[misc]
        points.append((float(nbytes * num_tensors), probe))
    return points


def _operator_s(clock: _Clock) -> Callable[[], float]:
    """Time the host's work for an operator of a model, forward and backward."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(16))).to(clock.device)
    rows = torch.ones(2, 4, device=clock.device)

    def step() -> None:
        model(rows).sum().backward()
        model.zero_grad()

    probe = clock.add(step)
    meter = MemoryMeter(on_cpu=clock.on_cpu, is_timed=True)
    with observed_by(meter.observer), meter:
        step()
    number = len(meter.operators)
    return lambda: probe.seconds / number


def memory_nbytes(device: str) -> float:
    """Return a rank's memory: on the CPU a part of the host's, otherwise that of its device."""
    if device == "cpu":
        import psutil

        total = float(psutil.virtual_memory().total)
        return total / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    properties: Any = torch.get_device_module(device).get_device_properties(0)
    return float(properties.total_memory)


# --- collectives ----------------------------------------------------------------------------------


class _Sender:
    """Starts a rank's collectives over the axes of a mesh (replicate, shard)."""

    def __init__(self, device_type: str, shape: tuple[int, int]) -> None:
        self._backend = backend = init_device_mesh(device_type, shape).backend
        self._replicate, self._shard = axes = [backend.axis(0), backend.axis(1)]
        self._streams: CommStreams = backend.make_streams(axes)

    def gather(self, nbytes: int) -> Handle:
        """Start an all-gather."""
        axis = self._shard
        full = torch.empty(nbytes // 4, device=self._backend.device)
        own = full.view(axis.size, -1)[axis.rank]
        return self._streams.start_gather([Gather(full, own, own.clone())], axis, [], "calibration")

    def reduce(self, nbytes: int) -> ReduceHandle:
        """Start a reduce-scatter."""
        axis, device = self._shard, self._backend.device
        send = torch.zeros(nbytes // 4, device=device)
        own = send.numel() // axis.size
        received = torch.empty(self._backend.receive_chunks(axis) * own, device=device)
        job = Reduction(send, lambda: received, own, send.dtype, 1.0, axis, None, None)
        return self._streams.start_reduce([job], "calibration")

    def all_reduce(self, nbytes: int) -> None:
        """All-reduce over the replicate axis."""
        self._replicate.all_reduce(torch.zeros(nbytes // 4, device=self._backend.device), "sum")


def _links(clock: _Clock, shape: tuple[int, int]) -> list[Callable[[], Route]]:
    """Time collectives over both axes of a mesh."""
    sender = _Sender(clock.mesh.device_type, shape)
    replicas, shards = shape
    calls: dict[str, Callable[[int], object]] = {}
    if shards > 1:
        calls["all_gather"] = lambda n: sender.gather(n).wait()
        calls["reduce_scatter"] = lambda n: sender.reduce(n).wait()
    found = [_link(clock, op, call, shards, shards) for op, call in calls.items()]
    if replicas > 1:
        found.append(_link(clock, "all_reduce", sender.all_reduce, replicas, math.prod(shape)))
    return found


def _link(
    clock: _Clock, op: str, call: Callable[[int], object], num_ranks: int, span: int
) -> Callable[[], Route]:
    """Time a collective at several sizes."""
    probes = [clock.add(lambda n=n: call(n)) for n in _SENT]  # type: ignore[misc]

    def route() -> Route:
        # The time of the smallest size is the latency; the other times give the rates.
        latency_s, *times = [probe.seconds for probe in probes]
        part = (num_ranks - 1) / num_ranks * (2 if op == "all_reduce" else 1)
        points = [
            (size * part, size * part / max(seconds - latency_s, seconds / 10))
            for size, seconds in zip(_SENT[1:], times, strict=True)
        ]
        return Route(span, latency_s, tuple(points), op, num_ranks)

    return route


def _overlap(clock: _Clock) -> Callable[[], float]:
    """Time a gather and matrix products, each alone and both at once."""
    sender = _Sender(clock.mesh.device_type, (1, clock.size))
    matrix = torch.ones(256, 256, device=clock.device)
    sent = clock.add(lambda: sender.gather(_LARGE).wait())
    number = max(1, int(sent.seconds / clock.add(lambda: matrix @ matrix).seconds))

    def compute() -> None:
        for _ in range(number):
            matrix @ matrix

    def both() -> None:
        handle = sender.gather(_LARGE)
        compute()
        handle.wait()

    computed, at_once = clock.add(compute), clock.add(both)

    def part() -> float:
        """Return the part of the gather that does not slow concurrent compute."""
        hidden_s = sent.seconds + computed.seconds - at_once.seconds
        return min(max(hidden_s / min(sent.seconds, computed.seconds), -1.0), 1.0)

    return part


# --- the host -------------------------------------------------------------------------------------


def _groups(clock: _Clock) -> Callable[[HardwareProfile], HardwareProfile]:
    """Time steps of a small sharded model: the unexplained rest is the host's cost of groups."""
    model = nn.Sequential()
    for _ in range(_NUM_BLOCKS):
        model.append(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)))
    model.to(clock.device)
    for param in model.parameters():
        nn.init.constant_(param, 0.01)  # The same on all ranks; no random numbers are drawn.
    for block in model:
        fully_shard(block, mesh=clock.mesh)
    fully_shard(model, mesh=clock.mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = torch.ones(64, 256, device=clock.device)

    def forward_and_backward() -> None:
        model(rows).square().sum().backward()

    forward_and_backward()
    optimizer.step()
    meter = MemoryMeter(on_cpu=clock.on_cpu, is_timed=True)
    with observed_by(meter.observer), meter:
        forward_and_backward()
        number = len(meter.operators)
        optimizer.step()
    of_optimizer = meter.operators[number:]
    del meter.operators[number:]
    computed, stepped = clock.add(forward_and_backward), clock.add(optimizer.step)

    def added_to(profile: HardwareProfile) -> HardwareProfile:
        """Return a profile with the costs of groups and of the optimizer's operators."""
        busy_s = sum(seconds_of(each, profile) for each in of_optimizer)
        # Ranks hold pieces of different parameters, so one rank has the most work.
        busy_s, number = clock.largest([busy_s, len(of_optimizer)])
        call_s = max(stepped.seconds - busy_s, 0.0) / number
        profile = replace(profile, sharded_operator_s=call_s)
        run = Run(model, (rows,), (clock.size,), device=profile.device)
        foreseen_s = time_of(run, meter, profile).seconds
        num_computes = sum(event.kind == "compute" for event in meter.events)
        left_s = computed.seconds - foreseen_s
        [group_s] = clock.largest([max(left_s, 0.0) / num_computes])
        return replace(profile, group_s=group_s)

    return added_to
