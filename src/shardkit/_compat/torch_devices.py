"""Private names of torch for devices: captures of graphs, profilers, modules of devices.

| branch | until which torch |
| --- | --- |
| ``register_device_module``: torch_xla registers none | torch_xla 2.9.0, the last one |
"""

from __future__ import annotations

import contextlib
import threading
import types
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler as _autograd_profiler

from shardkit._compat.once import once, wrap

if TYPE_CHECKING:
    from collections.abc import Iterator


def is_profiling() -> bool:
    """Whether a profiler of torch is on; it records ranges only then."""
    return bool(_autograd_profiler._is_profiler_enabled)


_capturing = threading.Lock()

_num_captures = 0


@contextlib.contextmanager
def unless_capturing() -> Iterator[bool]:
    """Yield whether no CUDA graph is being captured; no capture begins inside the context.

    If a thread queries an event, the capture of another thread fails. Torch (2.9 to 2.13) only
    reports the capture of a thread's own stream.
    """
    _note_captures()
    with _capturing:
        yield _num_captures == 0


@once
def _note_captures() -> None:
    def capture_begin(begin: Any, *args: Any, **kwargs: Any) -> None:
        global _num_captures  # noqa: PLW0603 - it is per process, like captures
        with _capturing:
            _num_captures += 1
        try:
            begin(*args, **kwargs)
        except BaseException:
            with _capturing:
                _num_captures -= 1
            raise

    def capture_end(end: Any, graph: Any) -> None:
        global _num_captures  # noqa: PLW0603
        try:
            end(graph)
        finally:
            with _capturing:
                _num_captures = max(_num_captures - 1, 0)

    wrap(torch.cuda.CUDAGraph, "capture_begin", capture_begin)
    wrap(torch.cuda.CUDAGraph, "capture_end", capture_end)


def end_broken_capture(index: int, pool: Any) -> None:
    """Undo what torch leaves of a capture whose end raised.

    Torch (2.9 to 2.13) continues to count allocations for the graph, and keeps its memory. The
    random number generator still counts as captured, so that no number can be drawn.
    """
    # They raise if torch has done this: then something else raised, and the capture has ended.
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
    # The end of a complete capture resets the generator; its numbers stay where they are.
    with torch.cuda.device(index):
        number = torch.zeros(1, device="cuda")
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            number.zero_()


def register_device_module(name: str) -> None:
    """Give torch a module for a device type, which functions such as checkpoint look for.

    torch_xla 2.9.0 registers none.
    """
    if not hasattr(torch, name):
        torch._register_device_module(name, types.ModuleType(f"torch.{name}"))
