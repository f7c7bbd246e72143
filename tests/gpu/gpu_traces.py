"""What ran on the card, by stream, read from a trace of torch's profiler."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import tempfile
import typing

import torch
from torch.profiler import ProfilerActivity, profile

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

# What a trace calls kernels, copies by the copy engine or the driver, and fills.
_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclasses.dataclass(frozen=True)
class Work:
    """A kernel, a copy or a fill."""

    name: str  # As the profiler shows it.
    stream: int  # Number of its stream, the same in all traces of a process.
    start: float  # In microseconds.
    end: float  # In microseconds.

    @property
    def is_copy(self) -> bool:
        """Whether it only moves or casts numbers on the card.

        Kernels of ``copy_`` and ``to(dtype)`` have it in their names (``direct_copy_kernel``,
        ``bfloat16_copy_kernel_cuda``, ``CatArrayBatchedCopy``), copies by the driver as well.
        """
        return "copy" in self.name.lower() or "memcpy dtod" in self.name.lower()


def record(step: Callable[[], object]) -> list[Work]:
    """Return what a step runs on the card, in the order of its start."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read(json.loads(path.read_text()))


def read(trace: dict[str, typing.Any]) -> list[Work]:
    """Return what a trace says of the card, in the order of its start."""
    found = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in _CATEGORIES:
            start = float(event["ts"])
            end = start + float(event["dur"])
            found.append(Work(event["name"], int(event["args"]["stream"]), start, end))
    return sorted(found, key=lambda work: work.start)


def time_of(works: Iterable[Work]) -> float:
    """Return the sum of their durations."""
    return sum(work.end - work.start for work in works)


def time_before(works: Iterable[Work], end: float) -> float:
    """Return how much of their time lies before `end`."""
    return sum(max(0.0, min(work.end, end) - work.start) for work in works)


def time_under(works: Iterable[Work], others: Sequence[Work]) -> float:
    """Return how much of their time lies under others, which are all of one stream."""
    return sum(
        max(0.0, min(work.end, other.end) - max(work.start, other.start))
        for work in works
        for other in others
    )
