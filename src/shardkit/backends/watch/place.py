"""Where a thread of this process is: the line of the user's code, and what it called there."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from types import CodeType, FrameType

_OURS = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = str(Path(_TORCH, "distributed", "distributed_c10d.py"))
_LIBRARIES = (_OURS, _TORCH, *{sysconfig.get_path(name) for name in ("stdlib", "purelib")})
_NAMES = {"Module._wrapped_call_impl": "forward", "Module._call_impl": "forward"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a thread is.

    Attributes:
        file: Name of the user's file.
        line: In it, from 1.
        function: In it.
        inside: What the user's code called there: ``"Tensor.backward"``, ``"barrier"``, or empty.
        waits: It is inside a collective of torch.distributed, and not in what that calls.
    """

    file: str = "?"
    line: int = 0
    function: str = "?"
    inside: str = ""
    waits: bool = False

    def __str__(self) -> str:
        inside = f", in {self.inside}" if self.inside else ""
        return f"{self.file}:{self.line}, `{self.function}`{inside}"


def main_frame() -> FrameType | None:
    """Return the innermost frame of the main thread; None if it has ended."""
    ident = threading.main_thread().ident
    assert ident is not None
    return sys._current_frames().get(ident)  # noqa: SLF001 - Python's documented function


def place_of(frame: FrameType | None) -> Place:
    """Return the user's line that a frame runs for, and what that line called."""
    called: list[CodeType] = []
    while frame is not None and _is_library(frame.f_code.co_filename):
        called.append(frame.f_code)
        frame = frame.f_back
    if frame is None:
        return Place(waits=_waits(called))
    code = frame.f_code
    return Place(
        Path(code.co_filename).name, frame.f_lineno, code.co_name, _inside(called), _waits(called)
    )


def stack_of(frame: FrameType | None) -> str:
    """Return the whole stack, as tracebacks show it; empty for None."""
    return "".join(traceback.format_stack(frame)) if frame is not None else ""


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or file.startswith("<")


def _waits(called: list[CodeType]) -> bool:
    """Whether the innermost function is a collective: to write a checkpoint is none."""
    return bool(called) and called[0].co_filename == _COLLECTIVES


def _inside(called: list[CodeType]) -> str:
    """Return the function that the user's line called, by the name that users know."""
    for code in reversed(called):
        name = code.co_qualname
        if "<locals>" not in name:  # Else a decorator's.
            return _NAMES.get(name, name)
    return ""


def instruction_of(frame: FrameType | None) -> tuple[int, int] | None:
    """Return what a frame is at, to see later whether it has moved."""
    return (id(frame), frame.f_lasti) if frame is not None else None
