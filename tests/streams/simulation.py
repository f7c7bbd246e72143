"""Runs test functions on a simulated accelerator: `simulated(fn)` in every rank's process.

Meshes of device type ``"cpu"`` get the accelerator's backend, over `SimulatedDevice`; operators are
watched; what was not ordered raises `StreamError` at the end.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import typing

from clocks import DEVICE
from simulated_device import SimulatedDevice, Simulation
from watching import Watch

import shardkit.backends
from shardkit._params import memory
from shardkit.backends import groups, process_group
from shardkit.backends.accelerator import AcceleratorAxis, AcceleratorBackend
from shardkit.backends.watch.runs import RunStore

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    import torch.distributed as dist

_MAX_SHOWN = 8


class StreamError(AssertionError):
    """Uses of memory that nothing orders."""


class SimulatedAxis(AcceleratorAxis):
    """An axis whose engine averages and coalesces, as NCCL does; the host has one of its own."""

    has_host_engine = True

    def __init__(self, group: dist.ProcessGroup, device: typing.Any) -> None:
        super().__init__(group, device)
        self.averages = True
        self.host_group = None
        if self.has_host_engine:
            self.host_group = groups.sub_group(group, [range(self.size)], "gloo")


class SimulatedBackend(AcceleratorBackend):
    """The accelerator's backend over a simulated device."""

    device_in_use: typing.ClassVar[SimulatedDevice | None] = None

    @staticmethod
    def find_device(device_type: str) -> typing.Any:
        """Return the simulated device."""
        del device_type
        return SimulatedBackend.device_in_use

    def make_axis(self, group: dist.ProcessGroup) -> SimulatedAxis:
        """Return the communicator over a process group."""
        return SimulatedAxis(group, self.accelerator)


@contextlib.contextmanager
def simulation(
    *, keeps_memory: bool = True, has_host_engine: bool = True, batches: bool = True
) -> Iterator[tuple[Simulation, Watch]]:
    """Run what is inside on a simulated accelerator.

    Args:
        keeps_memory: Slots are swapped, as with torch 2.12 and newer.
        has_host_engine: Process groups have an engine for tensors of the host.
        batches: Small groups travel together.

    Raises:
        StreamError: At the end, if uses of memory were not ordered.
    """
    sim = Simulation(has_host_engine=has_host_engine)
    watch = Watch(sim)
    SimulatedBackend.device_in_use = SimulatedDevice(sim)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(SimulatedAxis, "has_host_engine", has_host_engine))
        stack.enter_context(
            _replaced(shardkit.backends, "_backend_class", lambda _: SimulatedBackend)
        )
        stack.enter_context(
            _replaced(process_group, "_axes", groups.OfWorld())
        )  # They hold their device.
        stack.enter_context(_replaced(SimulatedBackend, "batches_small_groups", batches))
        if not has_host_engine:  # Otherwise the host waits for no collective of the device.
            stack.enter_context(_replaced(RunStore, "block_until", _block_beside(sim)))
        # What takes no notice of modes for speed is to be watched as well.
        stack.enter_context(_watched_pool(sim, keeps_memory=keeps_memory))
        stack.enter_context(watch)
        try:
            yield sim, watch
            gc.collect()
        finally:
            sim.close()
    raise_findings(sim)


def raise_findings(sim: Simulation) -> None:
    """Raise if anything was found."""
    found = list(dict.fromkeys(sim.checker.findings))
    if found:
        shown = "\n".join(f"- {finding}" for finding in found[:_MAX_SHOWN])
        more = f"\nand {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
        msg = f"{len(found)} uses of memory are not ordered:\n{shown}{more}"
        raise StreamError(msg)


def simulated(fn: Callable[..., typing.Any], *args: typing.Any) -> typing.Any:
    """Return what ``fn(*args)`` returns on a simulated accelerator."""
    with simulation():
        return fn(*args)


def _block_beside(sim: Simulation) -> Callable[..., None]:
    """Return a wait of the host, during which the device goes on."""
    block_until, host = RunStore.block_until, threading.current_thread()

    def block(store: RunStore, *args: typing.Any) -> None:
        if threading.current_thread() is host:  # Threads of the watch wait as well.
            sim.run_all()
        block_until(store, *args)

    return block


@contextlib.contextmanager
def _replaced(owner: typing.Any, name: str, value: typing.Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _watched_pool(sim: Simulation, *, keeps_memory: bool) -> Iterator[None]:
    """Tell the simulation of memory that goes to the pool of slots and comes from there."""
    pool = memory.SlotPool
    attach, detach, make = pool.acquire, pool.release, pool.__init__

    def made(self: typing.Any, streams: typing.Any) -> None:
        make(self, streams)
        self.keeps_memory = self.keeps_memory and keeps_memory

    def attached(self: typing.Any, storage: torch.UntypedStorage, nbytes: int) -> typing.Any:
        from simulated_device import label_of_caller, of_whom

        slot = attach(self, storage, nbytes)
        block = sim.find(storage)
        if block is not None:
            block.label, block.whose = label_of_caller(), of_whom()
        return slot

    def detached(
        self: typing.Any,
        storage: torch.UntypedStorage,
        slot: typing.Any,
        fence: typing.Any,
        *,
        by_compute: bool,
    ) -> None:
        block = sim.find(storage)
        detach(self, storage, slot, fence, by_compute=by_compute)
        if block is not None and self.keeps_memory and block.kind == DEVICE:
            sim.returned(block, fence)

    with (
        _replaced(pool, "acquire", attached),
        _replaced(pool, "release", detached),
        _replaced(pool, "__init__", made),
    ):
        yield


__all__ = ["Simulation", "StreamError", "Watch", "simulated", "simulation"]
