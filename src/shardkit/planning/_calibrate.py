"""Measures what this machine can do, on all ranks at once: they share its cores and links."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardkit._events import observe
from shardkit._module.fully_shard import fully_shard
from shardkit.backends import init_device_mesh
from shardkit.backends.base import Gather, Reduction
from shardkit.backends.device import use_own_device
from shardkit.planning._meter import MemoryMeter
from shardkit.planning._profile import Curve, HardwareProfile, Route
from shardkit.planning._run import DryRun, Run
from shardkit.planning._time import seconds_of, time_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardkit._mesh import DeviceMesh
    from shardkit.backends.base import AxisComm, CommStreams, Handle, ReduceHandle

_WINDOW_S = 0.1
_PRODUCTS = (32, 64, 128, 256, 512, 1024, 2048)
_MEMORY = (2**12, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26)
_SENT = (2**14, 2**20, 2**23, 2**25)
_LARGE = 2**23
_SLOW_S = 0.1
_NUM_BLOCKS = 6
_DTYPES = ("float32", "bfloat16")


def calibrate(device: str) -> HardwareProfile:
    """Return a profile of the ranks of this world. Collective; takes less than a minute.

    Args:
        device: Type of the devices.

    Raises:
        MeshError: No launcher started this process.
    """
    use_own_device(device)
    mesh = init_device_mesh(device, (int(os.environ.get("WORLD_SIZE", "1")),))
    probe = _Probe(mesh, device)
    operator_s = _operator_s(probe)
    products = {name: _products(probe, getattr(torch, name)) for name in _DTYPES}
    memory = {
        "new": _memory(probe, lambda x: x + 1.0, 2),
        "in_place": _memory(probe, lambda x: x.mul_(1.0), 1),
        "function": _memory(probe, nn.functional.gelu, 2),
    }
    links = tuple(link for shape in _shapes(probe.size) for link in _links(probe, shape))
    profile = HardwareProfile(
        name=f"calibrated-{device}",
        device=device,
        memory_nbytes=memory_nbytes(device),
        overlap=_overlap(probe),
        operator_s=operator_s,
        sharded_operator_s=operator_s,
        group_s=0.0,
        kernel_s=0.0 if device == "cpu" else _kernel_s(probe),
        host_bytes_per_s=_host_rate(probe),
        peak={name: max(rate for _, rate in curve) for name, curve in products.items()},
        products=products,
        memory={**memory, "host": memory["in_place"]},
        links=links,
    )
    return _with_groups(probe, profile)


class _Probe:
    """Times functions on all ranks at once; the times are means of all ranks."""

    def __init__(self, mesh: DeviceMesh, device: str) -> None:
        self.mesh = mesh
        self.axis: AxisComm = mesh.backend.axis(0)
        self.size: int = self.axis.size
        self.device = mesh.backend.device
        self.on_cpu = device == "cpu"

    def mean(self, value: float) -> float:
        """Return the mean of the values of all ranks."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.float32, device=self.device)
        self.axis.all_reduce(tensor, "sum")
        return tensor.item() / self.size

    def settle(self) -> None:
        """Wait for the device."""
        if not self.on_cpu:
            torch.accelerator.synchronize()

    def seconds(self, call: Callable[[], object], *, windows: int = 1) -> float:
        """Return the time of a call: all ranks make as many, for a while."""
        window_s = windows * _WINDOW_S
        call()
        self.settle()
        self.mean(0.0)
        begin = time.perf_counter()
        call()
        self.settle()
        once = self.mean(time.perf_counter() - begin)
        number = max(2, min(10_000, int(window_s / max(once, 1e-7))))
        begin = time.perf_counter()
        for _ in range(number):
            call()
        self.settle()
        return self.mean((time.perf_counter() - begin) / number)


# --- compute --------------------------------------------------------------------------------------


def _operator_s(probe: _Probe) -> float:
    """Return what the host takes for an operator of a model, forward and backward."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(16))).to(probe.device)
    rows = torch.ones(2, 4, device=probe.device)

    def step() -> None:
        model(rows).sum().backward()
        model.zero_grad()

    step()
    meter = MemoryMeter(on_cpu=probe.on_cpu, is_timed=True)
    with observe(meter.told), meter:
        step()
    return probe.seconds(step) / len(meter.operators)


def _products(probe: _Probe, dtype: torch.dtype) -> Curve:
    points = []
    for size in _PRODUCTS:
        matrix = torch.ones(size, size, dtype=dtype, device=probe.device)
        seconds = probe.seconds(lambda matrix=matrix: matrix @ matrix)  # type: ignore[misc]
        points.append((2.0 * size**3, 2.0 * size**3 / seconds))
        if seconds > _SLOW_S:
            break
    return tuple(points)


def _memory(probe: _Probe, call: Callable[[Tensor], Tensor], num_tensors: int) -> Curve:
    """Return the rates of an operator that reads and writes so many tensors as large as its own."""
    points = []
    for nbytes in _MEMORY:
        tensor = torch.ones(nbytes // 4, device=probe.device)
        seconds = probe.seconds(lambda tensor=tensor: call(tensor))  # type: ignore[misc]
        moved = float(nbytes * num_tensors)
        points.append((moved, moved / seconds))
    return tuple(points)


def _kernel_s(probe: _Probe) -> float:
    """Return the time of the smallest operator on a device whose host is far ahead."""
    one = torch.ones(1, device=probe.device)
    return probe.seconds(lambda: one.mul_(1.0))


def _host_rate(probe: _Probe) -> float:
    host = torch.ones(_LARGE // 4, pin_memory=not probe.on_cpu)
    target = torch.empty(_LARGE // 4, device=probe.device)
    return _LARGE / probe.seconds(lambda: target.copy_(host, non_blocking=True))


def memory_nbytes(device: str) -> float:
    """Return a rank's memory: ranks share that of their host, and have a device each."""
    if device == "cpu":
        import psutil

        total = float(psutil.virtual_memory().total)
        return total / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    properties: Any = torch.get_device_module(device).get_device_properties(0)
    return float(properties.total_memory)


# --- collectives ----------------------------------------------------------------------------------


def _shapes(size: int) -> list[tuple[int, int]]:
    """Return the meshes (replicate, shard) of all ranks."""
    return [(size // n, n) for n in range(size, 0, -1) if size % n == 0 and size > 1]


@dataclass(frozen=True, slots=True)
class _Sender:
    """Starts a rank's collectives over the axes of a mesh."""

    mesh: DeviceMesh
    streams: CommStreams
    shard: AxisComm
    replicate: AxisComm

    def gather(self, nbytes: int) -> Handle:
        """Start an all-gather."""
        axis = self.shard
        full = torch.empty(nbytes // 4, device=self.mesh.backend.device)
        own = full.view(axis.size, -1)[axis.rank]
        return self.streams.start_gather([Gather(full, own, own.clone())], axis, [], "calibration")

    def reduce(self, nbytes: int) -> ReduceHandle:
        """Start a reduce-scatter."""
        axis, device = self.shard, self.mesh.backend.device
        send = torch.zeros(nbytes // 4, device=device)
        chunks = self.mesh.backend.receive_chunks(axis)
        own = send.numel() // axis.size
        received = torch.empty(chunks * own, device=device)
        job = Reduction(send, lambda: received, own, send.dtype, 1.0, axis, None, None)
        return self.streams.start_reduce([job], "calibration")

    def all_reduce(self, nbytes: int) -> None:
        """Sum over the replicate axis."""
        tensor = torch.zeros(nbytes // 4, device=self.mesh.backend.device)
        self.replicate.all_reduce(tensor, "sum")


def _sender(mesh: DeviceMesh) -> _Sender:
    backend = mesh.backend
    axes = [backend.axis(0), backend.axis(1)]
    return _Sender(mesh, backend.make_streams(axes), axes[1], axes[0])


def _links(probe: _Probe, shape: tuple[int, int]) -> list[Route]:
    sender = _sender(init_device_mesh(probe.mesh.device_type, shape))
    replicas, shards = shape
    found = []
    if shards > 1:
        calls = {"all_gather": lambda n: sender.gather(n).wait()}
        calls["reduce_scatter"] = lambda n: sender.reduce(n).wait()
        found += [_link(probe, op, call, shards, shards) for op, call in calls.items()]
    if replicas > 1:
        span = math.prod(shape)
        found.append(_link(probe, "all_reduce", sender.all_reduce, replicas, span))
    return found


def _link(
    probe: _Probe, op: str, call: Callable[[int], object], num_ranks: int, span: int
) -> Route:
    """Return what sizes say: the smallest costs the same as none, the others their rate."""
    times = [probe.seconds(lambda n=n: call(n), windows=3) for n in _SENT]  # type: ignore[misc]
    part = (num_ranks - 1) / num_ranks * (2 if op == "all_reduce" else 1)
    points = [
        (n * part, n * part / max(seconds - times[0], seconds / 10))
        for n, seconds in zip(_SENT[1:], times[1:], strict=True)
    ]
    return Route(span, times[0], tuple(points), op, num_ranks)


def _overlap(probe: _Probe) -> float:
    """Return the part of a gather that compute beside it does not feel."""
    if probe.size == 1:
        return 1.0
    sender = _sender(init_device_mesh(probe.mesh.device_type, (1, probe.size)))
    matrix = torch.ones(256, 256, device=probe.device)
    sent_s = probe.seconds(lambda: sender.gather(_LARGE).wait())
    number = max(1, int(sent_s / probe.seconds(lambda: matrix @ matrix)))

    def compute() -> None:
        for _ in range(number):
            matrix @ matrix

    def both() -> None:
        handle = sender.gather(_LARGE)
        compute()
        handle.wait()

    computed_s, both_s = probe.seconds(compute), probe.seconds(both)
    hidden = (sent_s + computed_s - both_s) / min(sent_s, computed_s)
    return min(max(hidden, -1.0), 1.0)


# --- the host -------------------------------------------------------------------------------------


def _with_groups(probe: _Probe, profile: HardwareProfile) -> HardwareProfile:
    """Return a profile with what groups cost the host: what is left of a step of a small model."""
    model = nn.Sequential()
    for _ in range(_NUM_BLOCKS):
        model.append(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)))
    model.to(probe.device)
    for param in model.parameters():
        nn.init.constant_(param, 0.01)  # The same on all ranks, and no random numbers are drawn.
    for block in model:
        fully_shard(block, mesh=probe.mesh)
    fully_shard(model, mesh=probe.mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = torch.ones(64, 256, device=probe.device)

    def forward_and_backward() -> None:
        model(rows).square().sum().backward()

    forward_and_backward()
    optimizer.step()
    meter = MemoryMeter(on_cpu=probe.on_cpu, is_timed=True)
    with observe(meter.told) as observer, meter:
        observer.tell("step", "2")
        forward_and_backward()
        number = len(meter.operators)
        optimizer.step()
    in_step = meter.operators[number:]
    step_s = probe.seconds(optimizer.step)
    busy_s = sum(seconds_of(each, profile) for each in in_step)
    call_s = probe.mean(max(step_s - busy_s, 0.0) / len(in_step))
    profile = replace(profile, sharded_operator_s=call_s)
    del meter.operators[number:]
    run = Run(model, (rows,), (probe.size,), device=profile.device)
    foreseen_s = time_of(run, DryRun(meter, 0, 0, 0, 0), profile).seconds
    left_s = probe.seconds(forward_and_backward) - foreseen_s
    num_computes = sum(event.kind == "compute" for event in meter.events)
    return replace(profile, group_s=probe.mean(max(left_s, 0.0) / num_computes))
