"""High-water marks of memory, exact on CPU and CUDA.

On CUDA the caching allocator keeps the mark itself. On the CPU nothing does, and two obvious ways
are wrong. Following tensors (a dispatch mode with weak references) misses temporaries inside
operators, and memory that moves between storages (``UntypedStorage._swap_data_ptr_``,
``resize_``). Adding up the profiler's allocation events misses memory that gloo's worker threads
free: only threads with the profiler's thread-local state report. After 40 rounds of collectives of
12 MiB, 240 MiB seemed to be left that had all been freed.

c10's CPU allocator keeps a total over all threads, under a lock, once the flag
``caffe2_report_cpu_memory_usage`` is set. The flag is meant for C++ programs and has no Python
name, so it is set through its symbol. Each allocation event of the profiler then has the total
after it, and the greatest total is the mark. Memory of other allocators is not counted: gloo's
staging buffers, oneDNN's scratch memory, Python objects. The resident set includes them all.
Memory that shardkit's ranks share is not from this allocator either, and is added: a rank's part of
the memory that is there at the end, which is the most there has been.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch._C._profiler import _ExtraFields_Allocation, _ProfilerEvent


class Meter(Protocol):
    """A meter of the live bytes of tensors that were made after it."""

    def peak_during(self, work: Callable[[], None]) -> int:
        """Run something and return the most bytes that were live at once meanwhile."""


def meter_for(device: torch.device) -> Meter:
    """Start counting on a device."""
    return CudaMeter() if device.type == "cuda" else CpuMeter()


class CudaMeter:
    """A meter that reads the caching allocator's mark: bytes of live blocks, not of segments."""

    def __init__(self) -> None:
        """Start counting."""
        self._before = torch.cuda.memory_allocated()

    def peak_during(self, work: Callable[[], None]) -> int:
        """Run something and return the most bytes that were live at once meanwhile."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - self._before


class CpuMeter:
    """A meter that reads the total of c10's CPU allocator; see the module's docstring."""

    def __init__(self) -> None:
        """Start counting; the flag stays set and slows allocations, so measure time elsewhere."""
        c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        ctypes.c_bool.in_dll(c10, "FLAGS_caffe2_report_cpu_memory_usage").value = True
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # It reports every start and stop.
        self._before = _peak_total(lambda: None)

    def peak_during(self, work: Callable[[], None]) -> int:
        """Run something and return the most bytes that were live at once meanwhile."""
        return _peak_total(work) - self._before + shared_bytes()


def _peak_total(work: Callable[[], None]) -> int:
    probe = torch.empty(1)
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        del probe  # At least one event: it has the total of the bytes that were live before.
        work()
    assert profiler.kineto_results is not None
    events = profiler.kineto_results.experimental_event_tree()
    return max(_totals(events))


def _totals(events: list[_ProfilerEvent]) -> Iterator[int]:
    """Yield the CPU total that each allocation or free under these events left behind."""
    unseen = list(events)
    while unseen:
        event = unseen.pop()
        unseen += event.children
        fields = event.extra_fields
        if isinstance(fields, _ExtraFields_Allocation) and fields.device.type == "cpu":
            yield fields.total_allocated


def shared_bytes() -> int:
    """Return this process's part of the memory that shardkit's ranks share."""
    mappings = Path("/proc/self/smaps").read_text(encoding="utf-8").split("VmFlags:")
    shared = (each for each in mappings if "memfd:shardkit" in each)
    return sum(int(each.split("\nPss:")[1].split()[0]) * 1024 for each in shared)


def resident_bytes(mark: str = "VmRSS") -> int:
    """Read this process's resident set from Linux.

    Args:
        mark: ``"VmRSS"``, the size now, or ``"VmHWM"``, the peak.
    """
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    kibibytes = next(line.split()[1] for line in lines if line.startswith(mark))
    return int(kibibytes) * 1024
