"""Status of a rank, which it sends to other ranks: a short part, and details on demand.

Data from the store is not trusted: types and lengths are checked.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import sysconfig
import threading
import traceback
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from shardkit._compat import torch_groups
from shardkit._compat.collector import collector_paused

if TYPE_CHECKING:
    from types import CodeType, FrameType


# --- places in the user's code --------------------------------------------------------------------

_OURS = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = str(Path(_TORCH, "distributed", "distributed_c10d.py"))
_ENGINE = str(Path(_TORCH, "autograd", "graph.py"))
_LIBRARIES = (_OURS, _TORCH, *{sysconfig.get_path(name) for name in ("stdlib", "purelib")})
_NAMES = {"Module._wrapped_call_impl": "forward", "Module._call_impl": "forward"}


@dataclass(frozen=True, slots=True)
class CodePlace:
    """Place in the code where a thread is."""

    file: str = "?"  # Name of the user's file.
    line: int = 0  # From 1 on.
    function: str = "?"
    inside: str = ""  # Function that the user's code called there; may be empty.

    def __str__(self) -> str:
        inside = f", in {self.inside}" if self.inside else ""
        return f"{self.file}:{self.line}, `{self.function}`{inside}"


class MainThread:
    """The thread that counts as the main one: the one that trains.

    It is the thread that made the first mesh, then that of the first forward. Once that thread has
    ended, it is Python's main thread.
    """

    now = threading.main_thread()


def main_frame() -> FrameType | None:
    """Return the innermost frame of the main thread; None if it has ended.

    Python 3.11 holds a lock of all threads while it makes frames, and may collect garbage there. If
    a finalizer lets another thread run, which asks for the lock, both wait for ever
    (python/cpython#106883). So nothing is collected meanwhile.
    """
    ident = MainThread.now.ident
    assert ident is not None
    with collector_paused():
        return sys._current_frames().get(ident)  # noqa: SLF001 - Python's documented function


def place_of(frame: FrameType | None) -> CodePlace:
    """Return the user's line that led to a frame, and the function that the line called."""
    called: list[CodeType] = []
    while frame is not None and _is_library(frame.f_code.co_filename):
        called.append(frame.f_code)
        frame = frame.f_back
    if frame is None:
        return CodePlace()
    code = frame.f_code
    return CodePlace(Path(code.co_filename).name, frame.f_lineno, code.co_name, _inside(called))


def stack_of(frame: FrameType | None) -> str:
    """Return the whole stack, in the format of tracebacks; empty for None."""
    return "".join(traceback.format_stack(frame)) if frame is not None else ""


Lines = tuple[tuple["CodeType", int], ...]
"""Lines of the user's code that called each other, the innermost first."""
_MAX_LINES = 4


def lines_of(frame: FrameType | None) -> Lines:
    """Return the innermost of the user's lines that led to a frame; they refer to no frame."""
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < _MAX_LINES:
        if not _is_library(frame.f_code.co_filename):
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def lines_in_words(lines: Lines) -> str:
    """Return text with the innermost line and its callers."""
    shown = [f"{Path(c.co_filename).name}:{line}, `{c.co_name}`" for c, line in lines]
    return ", called at ".join(shown)


@functools.lru_cache(maxsize=4096)
def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or file.startswith("<")


def _inside(called: list[CodeType]) -> str:
    """Return the function that the user's line called, by the name that users know."""
    for code in reversed(called):
        name = code.co_qualname
        # Else it belongs to a decorator, or to what makes a context manager of a function.
        if "<locals>" not in name and not name.startswith("_GeneratorContextManager."):
            return _NAMES.get(name, name)
    return ""


def is_in_collective(frame: FrameType | None) -> bool:
    """Whether a thread is inside a function of torch.distributed itself.

    Functions that it calls do not count: writing a checkpoint is no collective.
    """
    return frame is not None and frame.f_code.co_filename == _COLLECTIVES


def call_of(frame: FrameType | None, number: int, for_s: float) -> CallStatus | None:
    """Return the collective in which a thread is; None if its group is not known."""
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
        ranks = dist.get_process_group_ranks(group)
        return CallStatus(name, group.group_name, ranks, number, for_s)
    except (KeyError, RuntimeError, ValueError):  # The group has been destroyed meanwhile.
        return None


def is_in_backward(frame: FrameType | None) -> bool:
    """Whether a thread waits for autograd, which may compute in another thread."""
    return frame is not None and frame.f_code.co_filename == _ENGINE


def instruction_of(frame: FrameType | None) -> tuple[int, int] | None:
    """Return the instruction where a frame is, to see later whether it has moved."""
    return (id(frame), frame.f_lasti) if frame is not None else None


# --- NCCL's flight recorder -----------------------------------------------------------------------
#
# Torch keeps the last collectives of each communicator (``TORCH_FR_BUFFER_SIZE``; 2000 of them
# if it is not set). It says which of them the card has begun and ended, also for groups of
# users.


def flight_record(*, has_captured: bool) -> list[str]:
    """Return the lines of this process; none if NCCL is not in use.

    Args:
        has_captured: Whether collectives were captured in a graph: torch cannot tell whether they
            are done.
    """
    record = torch_groups.nccl_flight_record(with_entries=not has_captured)
    lines = [] if record is None else describe_record(json.loads(record))
    return [f"{line} {_CAPTURED}" for line in lines] if has_captured else lines


_CAPTURED = "Those that a graph has captured count as issued, and never as done."


def describe_record(record: dict[str, Any]) -> list[str]:
    """Return a line for each communicator that has unfinished collectives in a record."""
    pending: dict[str, list[dict[str, Any]]] = {}
    for entry in record.get("entries", ()):
        if entry.get("state") != "completed":
            pending.setdefault(str(entry.get("pg_id")), []).append(entry)
    lines = []
    for number, status in sorted(record.get("pg_status", {}).items()):
        config = record.get("pg_config", {}).get(number, {})
        enqueued = int(status["last_enqueued_collective"])
        completed = int(status["last_completed_collective"])
        name = config.get("desc") or config.get("name") or number
        line = f"NCCL, {name}: {max(enqueued, 0)} collectives issued, {max(completed, 0)} done"
        if of_group := pending.get(number):
            oldest = min(of_group, key=lambda entry: int(entry.get("record_id", 0)))
            what = str(oldest.get("profiling_name", "?")).removeprefix("nccl:")
            line += f"; the oldest that is not done is {what} ({oldest.get('state')})"
        lines.append(f"{line}.")
    return lines


# --- statuses -------------------------------------------------------------------------------------

_MAX_TEXT = 1 << 20
STATES = ("runs", "destroyed", "ended", "raised")  # States that a rank reports of itself.
UNHEARD = ("unborn", "silent", "reachable", "busy", "stopped", "gone")
"""States that other ranks find out about a rank that does not answer."""
ALIVE = ("reachable", "busy", "stopped")  # Those of a process that exists.
LEFT = ("gone", "ended", "raised", "destroyed")  # States of a rank that takes part no more.


@dataclass(slots=True)
class GroupStatus:
    """Status of a rank on one process group."""

    ranks: Sequence[int]  # Members, ranks of the world.
    position: int  # Number of collectives so far.
    wish: str | None = None  # Collective that it will issue next if the other ranks agree.
    is_main: bool = True  # Whether the main thread, or its backward, issued the last one.
    recent: list[str] = field(default_factory=list)  # The last collectives; in details only.

    def at(self, position: int) -> str | None:
        """Return the collective that was issued, or is wished, at a position, if known."""
        if position == self.position:
            return self.wish
        first = self.position - len(self.recent)
        return self.recent[position - first] if first <= position < self.position else None


@dataclass(slots=True)
class WaitStatus:
    """Wait of a rank."""

    group: str  # Name of the process group.
    position: int  # Place of the collective in the sequence of its group.
    of: str  # The collective.
    for_s: float  # Seconds so far.
    is_main: bool = True  # Whether the main thread waits, or a thread that runs in its place.
    is_issued: bool = True  # Whether it was issued; else the rank waits for others to agree.


@dataclass(slots=True)
class CallStatus:
    """A collective of torch.distributed in which the main thread is, but not one of shardkit's."""

    name: str  # Function that the user called, or that called torch.distributed for the user.
    group: str  # Name of the process group.
    ranks: Sequence[int]  # Members, ranks of the world.
    number: int  # Different numbers mean different calls, but calls in a loop may share a number.
    for_s: float  # Seconds since it was first seen.


@dataclass(slots=True)
class RankStatus:
    """Known status of a rank."""

    rank: int
    host: str = "?"
    pid: int = 0
    state: str = "runs"  # One of `STATES`, or of `UNHEARD`.
    step: int = 0  # Number of root forwards so far.
    place: CodePlace = field(default_factory=CodePlace)  # Where its main thread is.
    error: str | None = None  # The last exception that left a forward, or ended the process.
    groups: dict[str, GroupStatus] = field(default_factory=dict)  # Process groups by name.
    wait: WaitStatus | None = None  # Wait of its main thread or device.
    call: CallStatus | None = None  # Call of its main thread.
    gave_up: str | None = None  # Error that it raised, after which it issues no collectives.
    silent_s: float = 0.0  # Seconds without an answer, or another sign that its process exists.
    # In details only: the stack of the main thread, lines of the engine of an accelerator (NCCL's
    # flight recorder), and the places that called the last root forwards, up to `step`.
    stack: str = ""
    engine: list[str] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)

    def dump(self, *, details: bool = True) -> str:
        """Return the status as text, with or without details."""
        if details:
            return to_text(self)
        groups = {name: dataclasses.replace(of, recent=[]) for name, of in self.groups.items()}
        return to_text(dataclasses.replace(self, groups=groups, stack="", engine=[], begun=[]))

    @classmethod
    def load(cls, text: str | bytes) -> RankStatus:
        """Return the status that was dumped.

        Raises:
            ValueError: The text is no status.
        """
        if len(text) > _MAX_TEXT:
            msg = "too long"
            raise ValueError(msg)
        status = from_text(cls, text)
        if status.state not in (*STATES, *UNHEARD):
            msg = f"unknown state {status.state!r}"
            raise ValueError(msg)
        return status


# --- dataclasses as text --------------------------------------------------------------------------

T = TypeVar("T")


def to_text(found: Any) -> str:
    """Return a dataclass as text, without empty fields."""
    return json.dumps(dataclasses.asdict(found, dict_factory=_shortened), separators=(",", ":"))


def from_text(cls: type[T], text: str | bytes) -> T:
    """Return the dataclass that `to_text` was given.

    Raises:
        ValueError: The text is no JSON, or a field is missing, unknown, or of another type.
    """
    try:
        found: T = _made(cls, json.loads(text))
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        msg = f"no {cls.__name__}: {error}"
        raise ValueError(msg) from error
    return found


def _shortened(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Keep fields that are not empty; write regular lists of members as first, step and number."""
    found = {key: value for key, value in pairs if value not in (None, "", [], {}, ())}
    if "ranks" in found:
        ranks = found["ranks"] = list(found["ranks"])
        step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        if step and ranks == list(range(ranks[0], ranks[0] + step * len(ranks), step)):
            found["ranks"] = ["range", ranks[0], step, len(ranks)]
    return found


_hints: Any = functools.cache(typing.get_type_hints)


def _made(kind: Any, value: Any) -> Any:
    """Return a value of JSON as a value of a type; raise `TypeError` if it has another type."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: _made(hints[name], each) for name, each in value.items()})
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _made(of[0], value)
    if origin is dict:
        return {_made(of[0], key): _made(of[1], each) for key, each in value.items()}
    if origin in (list, Sequence) and isinstance(value, list):
        if origin is Sequence and value[:1] == ["range"]:
            first, step, number = map(int, value[1:])
            return range(first, first + step * number, step)
        return [_made(of[0], each) for each in value]
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    msg = f"{value!r} is no {kind}"
    raise TypeError(msg)
