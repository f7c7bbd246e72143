"""Where a thread of this process is: the line of the user's code, and what it called there."""

from __future__ import annotations

import functools
import sys
import sysconfig
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, FrameType

_OURS = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = str(Path(_TORCH, "distributed", "distributed_c10d.py"))
_ENGINE = str(Path(_TORCH, "autograd", "graph.py"))
_LIBRARIES = (_OURS, _TORCH, *{sysconfig.get_path(name) for name in ("stdlib", "purelib")})
_NAMES = {"Module._wrapped_call_impl": "forward", "Module._call_impl": "forward"}


@dataclass(frozen=True, slots=True)
class CodePlace:
    """Where a thread is.

    Attributes:
        file: Name of the user's file.
        line: Number of the line, from 1.
        function: Name of the function.
        inside: Function that the user's code called there: ``"Tensor.backward"``, or empty.
    """

    file: str = "?"
    line: int = 0
    function: str = "?"
    inside: str = ""

    def __str__(self) -> str:
        inside = f", in {self.inside}" if self.inside else ""
        return f"{self.file}:{self.line}, `{self.function}`{inside}"


def main_frame() -> FrameType | None:
    """Return the innermost frame of the main thread; None if it has ended."""
    ident = threading.main_thread().ident
    assert ident is not None
    return sys._current_frames().get(ident)  # noqa: SLF001 - Python's documented function


def place_of(frame: FrameType | None) -> CodePlace:
    """Return the user's line that a frame runs for, and what that line called."""
    called: list[CodeType] = []
    while frame is not None and _is_library(frame.f_code.co_filename):
        called.append(frame.f_code)
        frame = frame.f_back
    if frame is None:
        return CodePlace()
    code = frame.f_code
    return CodePlace(Path(code.co_filename).name, frame.f_lineno, code.co_name, _inside(called))


def stack_of(frame: FrameType | None) -> str:
    """Return the whole stack, as tracebacks show it; empty for None."""
    return "".join(traceback.format_stack(frame)) if frame is not None else ""


Lines = tuple[tuple["CodeType", int], ...]
"""Lines of the user's code that called each other, the innermost first."""
_MAX_LINES = 4


def lines_of(frame: FrameType | None) -> Lines:
    """Return the innermost of the user's lines that a frame runs for; refers to no frame."""
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < _MAX_LINES:
        if not _is_library(frame.f_code.co_filename):
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def lines_in_words(lines: Lines) -> str:
    """Return the innermost line, and who called it."""
    shown = [f"{Path(c.co_filename).name}:{line}, `{c.co_name}`" for c, line in lines]
    return ", called at ".join(shown)


@functools.lru_cache(maxsize=4096)
def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or file.startswith("<")


def _inside(called: list[CodeType]) -> str:
    """Return the function that the user's line called, by the name that users know."""
    for code in reversed(called):
        name = code.co_qualname
        if "<locals>" not in name:  # Else a decorator's.
            return _NAMES.get(name, name)
    return ""


def is_in_collective(frame: FrameType | None) -> bool:
    """Whether a thread is inside a function of torch.distributed itself.

    What that function calls does not count: to write a checkpoint is no collective.
    """
    return frame is not None and frame.f_code.co_filename == _COLLECTIVES


class Call(NamedTuple):
    """A function of torch.distributed that a thread is inside of.

    Attributes:
        name: Function that the user called, or that called torch.distributed for the user.
        group: Name of the process group.
        ranks: Members of the group, ranks of the world.
    """

    name: str
    group: str
    ranks: Sequence[int]


def call_of(frame: FrameType | None) -> Call | None:
    """Return the collective that a thread is inside of; None if its group cannot be told."""
    name, group, is_known = "", None, False
    while is_in_collective(frame):
        assert frame is not None
        if not is_known and "group" in frame.f_locals:
            group, is_known = frame.f_locals["group"], True
        if "wrapper" not in frame.f_code.co_name:
            name = frame.f_code.co_name
        frame = frame.f_back
    group = group or dist.group.WORLD
    if not is_known or not isinstance(group, dist.ProcessGroup):
        return None
    try:
        return Call(name, group.group_name, dist.get_process_group_ranks(group))
    except (KeyError, RuntimeError, ValueError):  # It has been destroyed meanwhile.
        return None


def is_in_backward(frame: FrameType | None) -> bool:
    """Whether a thread waits for autograd, which may compute in a thread of its own."""
    return frame is not None and frame.f_code.co_filename == _ENGINE


def instruction_of(frame: FrameType | None) -> tuple[int, int] | None:
    """Return what a frame is at, to see later whether it has moved."""
    return (id(frame), frame.f_lasti) if frame is not None else None
