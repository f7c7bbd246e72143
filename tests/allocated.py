"""Bytes of the CPU that live at once, and collectives that are issued: counted in a real run.

Nothing of shardkit is asked. c10's CPU allocator keeps a total of all threads once its flag is set
(see `benchmarks/memory.py`), and each allocation that the profiler sees carries that total.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import typing
from pathlib import Path
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardkit import _schedule
from shardkit._params import gradients
from shardkit.backends import gloo

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def start_counting() -> None:
    """Have the allocator count from now on; it takes longer then."""
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(c10, "FLAGS_caffe2_report_cpu_memory_usage").value = True
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


@contextlib.contextmanager
def past_shared_memory() -> Iterator[None]:
    """Let all collectives of gloo's ranks be torch's, as between hosts; on all ranks."""

    def keep(axis: gloo.GlooAxis, direct: object) -> None:
        axis.__dict__["direct"] = direct  # For later.

    unused = property(lambda _: None, keep)
    with (
        mock.patch.object(gloo, "_SHARED_NBYTES", 0),
        mock.patch.object(gloo.GlooAxis, "direct", unused),
    ):
        yield


@contextlib.contextmanager
def all_read_directly() -> Iterator[None]:
    """Treat all groups of ranks of one host as large ones, which they read; on all ranks."""
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (gloo, "_SHARED_NBYTES", 0),
            (gloo, "_MAX_STAGED_NBYTES", 0),
            (gloo, "_ADDED", 7),
            (gradients, "BATCH_NBYTES", 0),
            (_schedule, "BATCH_NBYTES", 0),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def with_large_groups(fn: Callable[..., typing.Any], *args: typing.Any) -> typing.Any:
    """Run a function in a rank, as `all_read_directly`."""
    with all_read_directly():
        return fn(*args)


_MARK_NBYTES = 12_289


def mark() -> None:
    """End a stretch of `peaks_of`: memory of a size that nobody else asks for comes and goes."""
    torch.empty(_MARK_NBYTES, dtype=torch.uint8)


def peaks_of(work: Callable[[], None]) -> list[int]:
    """Return the most bytes that lived at once, for each stretch between two marks."""
    probe = torch.empty(1)
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        del probe  # At least one event, which carries the total of before.
        work()
    changes = sorted(_changes(profiler.kineto_results.experimental_event_tree()))
    total = changes[0][1] if changes else 0  # A simulated device allocates elsewhere.
    peaks = [total]
    for _, changed, nbytes in changes:
        if nbytes == _MARK_NBYTES:
            peaks.append(total)
        elif nbytes != -_MARK_NBYTES:
            total = changed
            peaks[-1] = max(peaks[-1], total)
    return peaks


def _changes(events: typing.Any) -> Iterator[tuple[int, int, int]]:
    """Yield when memory came or went, the bytes that lived then, and what came."""
    for event in events:
        fields = event.extra_fields
        total = getattr(fields, "total_allocated", None)
        if total is not None and fields.device.type == "cpu":
            yield event.start_time_ns, total, fields.alloc_size
        yield from _changes(event.children)


class Issued(TorchDispatchMode):
    """Notes collectives: their names and the bytes of the whole tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: typing.Any, types: typing.Any, args: typing.Any = (), kwargs: typing.Any = None
    ) -> typing.Any:
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # Then what it runs inside comes here.
        if func.namespace == "_c10d_functional" and isinstance(args[-1], str):
            self.found.append((func.__name__.partition(".")[0], args[0].nbytes))
        if func.namespace == "c10d":
            sizes = [sum(t.nbytes for t in _tensors(arg)) for arg in args]
            self.found.append((func.__name__.partition(".")[0].strip("_"), max(sizes)))
        return func(*args, **(kwargs or {}))


def _tensors(arg: typing.Any) -> list[torch.Tensor]:
    if isinstance(arg, torch.Tensor):
        return [arg]
    return [t for each in arg for t in _tensors(each)] if isinstance(arg, (list, tuple)) else []
